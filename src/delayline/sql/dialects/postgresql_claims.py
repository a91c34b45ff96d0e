"""Claims on queue rows that end with their holder's connection: advisory locks of a session.

A row lock would need a transaction that stays open while a handler runs, and an open transaction keeps PostgreSQL from
cleaning up behind every other one. A claim hides a message from other receivers; what makes its handling count once is
the row, which can be deleted once only.
"""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.sql.dialects.server import run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

    from delayline.sql.server_database import ServerDatabase

LOCK: Final = "SELECT k FROM unnest(%s::bigint[]) AS k WHERE pg_try_advisory_lock(%s + k)"
UNLOCK: Final = "SELECT pg_advisory_unlock(%s + k) FROM unnest(%s::bigint[]) AS k"


class AdvisoryClaims:
    """This process's claims on the rows of one table. Safe to call from any thread; `take` blocks for a round trip."""

    def __init__(self, database: ServerDatabase, table: str) -> None:
        self._database = database
        self._session = database.session()
        digest = hashlib.sha256(table.encode()).digest()
        self._base = int.from_bytes(digest[:3], "big", signed=True) << 40  # row numbers stay below
        self._held: set[int] = set()
        self._released: list[int] = []
        self._lock = threading.Lock()
        self._locked_by: Connection | None = None

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return those; rows claimed by anybody are left out."""
        with self._lock:
            wanted = [row for row in rows if row not in self._held]
            taken: list[int] = []
            while wanted and len(taken) < limit:
                some, wanted = wanted[: limit - len(taken)], wanted[limit - len(taken) :]
                taken += self._session.run(partial(self._try, rows=some))
            self._held.update(taken)
            return taken

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims: here at once, for everybody else with `flush`, which is not far."""
        with self._lock:
            known = self._held.intersection(rows)
            self._held -= known
            self._released += known
        if known:
            self._database.spawn(self.flush)

    def flush(self) -> None:
        """Let everybody have what was released; blocks for a round trip."""
        with self._lock:
            if self._released:
                self._session.run(self._settle)

    @property
    def number_held(self) -> int:
        """How many rows this process holds."""
        return len(self._held)

    def close(self) -> None:
        """Give up every claim."""
        with self._lock:
            self._session.close()
            self._held.clear()

    def _try(self, connection: Connection, rows: list[int]) -> list[int]:
        self._settle(connection)
        locked = {row for (row,) in run(connection, LOCK, rows, self._base)}
        return [row for row in rows if row in locked]

    def _settle(self, connection: Connection) -> None:
        """Unlock what was released; after a lost connection lock again what is still free."""
        if connection is not self._locked_by:
            self._held = {row for (row,) in run(connection, LOCK, list(self._held), self._base)}
            self._released.clear()
            self._locked_by = connection
        if self._released:
            run(connection, UNLOCK, self._base, self._released)
            self._released.clear()
