"""Claims on queue rows in PostgreSQL: advisory locks of a session."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from delayline.sql.dialects.server import run
from delayline.sql.dialects.session_claims import SessionClaims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.sql.server_database import ServerDatabase

LOCK: Final = "SELECT k FROM unnest(%s::bigint[]) AS k WHERE pg_try_advisory_lock(%s + k)"
UNLOCK: Final = "SELECT pg_advisory_unlock(%s + k) FROM unnest(%s::bigint[]) AS k"


class AdvisoryLockClaims(SessionClaims):
    """This process's claims on the rows of one table."""

    def __init__(self, database: ServerDatabase, table: str) -> None:
        super().__init__(database)
        digest = hashlib.sha256(table.encode()).digest()
        self._base = int.from_bytes(digest[:3], "big", signed=True) << 40  # row numbers stay below

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows in one round trip."""
        return {row for (row,) in run(connection, LOCK, list(rows), self._base)}

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, in one round trip."""
        run(connection, UNLOCK, self._base, list(rows))
