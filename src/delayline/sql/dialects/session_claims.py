"""Claims on queue rows that end with their holder's connection: locks of a session on names or numbers.

A row lock would need a transaction that stays open while a handler runs, and an open transaction keeps the server from
cleaning up behind every other one. A claim hides a message from other receivers; what makes its handling count once is
the row, which can be deleted once only.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.sql.deadlines import STOPPING_EACH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from delayline.sql.dialect import ServerSessions


FORGOTTEN_AT_ONCE: Final = 100  # locks on rows that are gone; a server has room for some thousands


class SessionClaims(ABC):
    """This process's claims on the rows of one table. Safe to call from any thread; `take` blocks for a round trip."""

    def __init__(self, database: ServerSessions) -> None:
        self._database = database
        self._session = database.session()
        self._held: set[int] = set()
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

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        with self._in_use:
            with self._lock:
                wanted = [row for row in rows if row not in self._held]
            taken: list[int] = []
            try:
                while wanted and len(taken) < limit:
                    some, wanted = wanted[: limit - len(taken)], wanted[limit - len(taken) :]
                    taken += self._session.run(partial(self._try, rows=some))
            except BaseException:
                self._session.close()  # the session's end also ends locks whose acquisition was not confirmed
                raise
            with self._lock:
                self._held.update(taken)
            return taken

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims: here at once, for everybody else with `flush`, which is not far."""
        if self._give_up(rows):
            self._database.spawn(self.flush)

    def forget(self, rows: Iterable[int]) -> None:
        """Give up claims on rows that are gone: the next `take` unlocks them on its way, a round trip cheaper."""
        if self._give_up(rows) > FORGOTTEN_AT_ONCE:
            self._database.spawn(self.flush)

    def flush(self) -> None:
        """Make released rows available to other sessions; blocks for a round trip."""
        with self._in_use:
            if self._released:
                self._session.run(self._settle)

    @property
    def number_held(self) -> int:
        """How many rows this process holds."""
        return len(self._held)

    def close(self) -> None:
        """Give up every claim."""
        in_use = self._in_use.acquire(timeout=STOPPING_EACH)
        try:
            self._session.close()  # which ends the claims; a thread that still uses it is cut off
            with self._lock:
                self._held.clear()
                self._released.clear()
        finally:
            if in_use:
                self._in_use.release()

    def _give_up(self, rows: Iterable[int]) -> int:
        """Give them up here; return how many are to be unlocked."""
        with self._lock:
            known = self._held.intersection(rows)
            self._held -= known
            self._released += known
            return len(self._released)

    def _try(self, connection: Connection, rows: list[int]) -> list[int]:
        self._settle(connection)
        locked = self.try_lock(connection, rows)
        return [row for row in rows if row in locked]

    def _settle(self, connection: Connection) -> None:
        """Unlock released rows; after a lost connection, lock again the rows that are still free."""
        if connection is not self._locked_by:
            with self._lock:
                held = set(self._held)
                self._released.clear()
            again = self.try_lock(connection, list(held)) if held else held
            with self._lock:
                self._held -= held - again
            self._locked_by = connection
        with self._lock:
            released, self._released = self._released, []
        if released:
            self.unlock(connection, released)
