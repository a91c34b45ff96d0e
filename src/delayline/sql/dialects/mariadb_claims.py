"""Claims on queue rows in MariaDB and MySQL: named locks of a session."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from delayline.sql.dialects.server import run
from delayline.sql.dialects.session_claims import SessionClaims
from delayline.sql.prepared import LONGEST_LIST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.sql.server_database import ServerDatabase

LOCK: Final = "GET_LOCK(%s, 0)"
UNLOCK: Final = "RELEASE_LOCK(%s)"


class NamedLocks(SessionClaims):
    """This process's claims on the rows of one table. The server knows the names of all its databases' locks."""

    def __init__(self, database: ServerDatabase, table: str) -> None:
        super().__init__(database)
        self._prefix = f"delayline {hashlib.sha256(table.encode()).hexdigest()[:24]} "  # 64 characters with the number

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows, some hundreds in a round trip."""
        return {row for row, locked in self._each(connection, LOCK, rows) if locked}

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, some hundreds in a round trip."""
        self._each(connection, UNLOCK, rows)

    def _each(self, connection: Connection, function: str, rows: Sequence[int]) -> list[tuple[int, int | None]]:
        answers: list[int | None] = []
        for first in range(0, len(rows), LONGEST_LIST):
            names = [f"{self._prefix}{row}" for row in rows[first : first + LONGEST_LIST]]
            answers += run(connection, f"SELECT {', '.join([function] * len(names))}", *names)[0]
        return list(zip(rows, answers, strict=True))
