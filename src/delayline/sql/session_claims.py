"""Claims on queue rows that end with their holder's connection: a session's locks on names or numbers.

A row lock would need a transaction that stays open while a handler runs, and an open transaction keeps the server from
cleaning up behind all others. A claim hides a message from other receivers; what makes its handling count once is
the row, which can be deleted once only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable
from delayline.sql.deadlines import STOPPING_EACH
from delayline.sql.workers import is_given_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Connection

    from delayline.sql.server import ServerSessions

RECLAIM_EVERY: Final = 1.0  # seconds between looks whether the session of claims is used by something that has ended
FORGOTTEN_AT_ONCE: Final = 100  # locks on rows that are gone; a server has room for some thousands


class SessionClaims(ABC):
    """This process's claims on the rows of a table. Safe to call from any thread; `take` blocks for a round trip."""

    def __init__(self, database: ServerSessions) -> None:
        self._database = database
        self._session = database.session()
        self._claimed: set[int] = set()
        self._released: list[int] = []
        self._lock = threading.Lock()  # never held for long: `release` is called on event loops
        self._in_use = threading.Lock()
        self._locked_by: Connection | None = None

    @abstractmethod
    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock rows that no other session has locked, without waiting, and return them."""

    @abstractmethod
    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock rows that this session has locked."""

    def exchange(self, connection: Connection, released: Sequence[int], rows: Sequence[int]) -> set[int]:
        """Unlock the released rows, if any, then lock rows as `try_lock` does."""
        if released:
            self.unlock(connection, released)
        return self.try_lock(connection, rows)

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        with self._in_session():
            with self._lock:
                wanted = [row for row in rows if row not in self._claimed]
            claimed: list[int] = []
            try:
                while wanted and len(claimed) < limit:
                    some, wanted = wanted[: limit - len(claimed)], wanted[limit - len(claimed) :]
                    claimed += self._session.run(partial(self._try, rows=some))
            except BaseException:
                self._session.close()  # the session's end also ends locks whose acquisition was not confirmed
                raise
            with self._lock:
                if is_given_up():
                    self._released += claimed
                    return []
                self._claimed.update(claimed)
            return claimed

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims: here at once, for other sessions with the next `flush`."""
        if self._give_up(rows):
            self._database.spawn(self.flush)

    def forget(self, rows: Iterable[int]) -> None:
        """Give up claims on rows that are gone: the next `take` unlocks them on its way, a round trip cheaper."""
        if self._give_up(rows) > FORGOTTEN_AT_ONCE:
            self._database.spawn(self.flush)

    def flush(self) -> None:
        """Make released rows available to other sessions; blocks for a round trip."""
        with self._in_session():
            if self._released:
                self._session.run(self._unlock_released)

    def lock_again(self) -> None:
        """Lock what is claimed again, if the connection that has locked it is lost; blocks for a round trip."""
        if self._claimed:
            with self._in_session():
                self._session.run(self._lock_again)

    def number_claimed_after(self, row: int) -> int:
        """Return how many rows this process holds whose numbers are higher."""
        with self._lock:
            return sum(claimed > row for claimed in self._claimed)

    def holds(self, row: int) -> bool:
        """Return whether this process holds the row, as of its last request."""
        return row in self._claimed

    def close(self) -> None:
        """Give up every claim."""
        in_use = self._in_use.acquire(timeout=STOPPING_EACH)
        try:
            self._session.close()  # which ends the claims; a thread that still uses it is cut off
            with self._lock:
                self._claimed.clear()
                self._released.clear()
        finally:
            if in_use:
                self._in_use.release()

    @contextlib.contextmanager
    def _in_session(self) -> Iterator[None]:
        """Keep other threads from the session. Raises BackendUnavailable where others keep it for too long."""
        dialect, begun = self._database.dialect, time.monotonic()
        end = begun + 2 * dialect.connections.server_timeout
        while not self._in_use.acquire(timeout=RECLAIM_EVERY):
            self._reclaim()
            if time.monotonic() > dialect.connections.stops.end_of(end, begun):
                raise BackendUnavailable(
                    f"{dialect} has not answered an earlier request on the connection of the claims: check that the "
                    "server and the network are alive, or raise server_timeout"
                )
        try:
            yield
        finally:
            self._in_use.release()

    def _reclaim(self) -> None:  # noqa: B027 - for sessions that an event loop uses too
        """End a use of the session that cannot end by itself."""

    def _give_up(self, rows: Iterable[int]) -> int:
        """Give them up here; return how many are to be unlocked."""
        with self._lock:
            known = self._claimed.intersection(rows)
            self._claimed -= known
            self._released += known
            return len(self._released)

    def _try(self, connection: Connection, rows: list[int]) -> list[int]:
        locked = self.exchange(connection, self._settle(connection), rows)
        return [row for row in rows if row in locked]

    def _unlock_released(self, connection: Connection) -> None:
        if released := self._settle(connection):
            self.unlock(connection, released)

    def _settle(self, connection: Connection) -> list[int]:
        """Return the rows to unlock; after a lost connection, lock again the rows that are still free."""
        self._lock_again(connection)
        return self._take_released()

    def _take_released(self) -> list[int]:
        """Return the rows to unlock; the caller unlocks them."""
        with self._lock:
            released, self._released = self._released, []
        return released

    def _lock_again(self, connection: Connection) -> None:
        """Lock rows that are still free again after a lost connection."""
        if connection is not self._locked_by:
            with self._lock:
                before = set(self._claimed)
                self._released.clear()
            again = self.try_lock(connection, list(before)) if before else before
            with self._lock:
                self._claimed -= before - again
            self._locked_by = connection
