"""Claims on queue rows in SQL Server: application locks of a session."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import BackendUnavailable
from delayline.sql.dialects.server import run
from delayline.sql.dialects.session_claims import SessionClaims

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection

    from delayline.sql.server_database import ServerDatabase

AT_ONCE: Final = 100  # each lock is a procedure call; this many fit into a round trip
LOCK: Final = (
    "EXEC @r{n} = sp_getapplock @Resource = N'{name}', @LockMode = N'Exclusive', @LockOwner = N'Session', "
    "@LockTimeout = 0;"
)
UNLOCK: Final = "EXEC sp_releaseapplock @Resource = N'{name}', @LockOwner = N'Session';"


class ApplicationLocks(SessionClaims):
    """This process's claims on the rows of one table."""

    def __init__(self, database: ServerDatabase, table: str) -> None:
        super().__init__(database)
        self._prefix = f"delayline {hashlib.sha256(table.encode()).hexdigest()[:16]} "

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows, many in a round trip."""
        taken: set[int] = set()
        for some in _chunks(rows):
            results = only_row(connection, self.lock_sql(some))
            taken.update(row for row, result in zip(some, results, strict=True) if result >= 0)
        return taken

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, many in a round trip."""
        for some in _chunks(rows):
            run(connection, " ".join(UNLOCK.format(name=self._name(row)) for row in some))

    def lock_sql(self, rows: Sequence[int]) -> str:
        """Return the batch that tries for each row, and answers with one row of results: negative where refused."""
        names = [f"@r{n}" for n in range(len(rows))]
        locks = [LOCK.format(n=n, name=self._name(row)) for n, row in enumerate(rows)]
        return f"DECLARE {', '.join(f'{name} int' for name in names)}; {' '.join(locks)} SELECT {', '.join(names)}"

    def _name(self, row: int) -> str:
        return f"{self._prefix}{row:d}"


def only_row(connection: Connection, batch: str) -> tuple[Any, ...]:
    """Run the statements and return the row of the only one that gives rows; others give counts, or nothing.

    Raises BackendUnavailable where the server gives none.
    """
    cursor: Any = connection.connection.cursor()
    cursor.execute(batch)
    rows: list[Any] = []
    while True:
        if cursor.description:
            rows += cursor.fetchall()
        if not cursor.nextset():  # an error of a later statement is raised here
            break
    cursor.close()
    if len(rows) != 1:
        raise BackendUnavailable(f"SQL Server gave {len(rows)} rows instead of one for: {batch[:200]}")
    return tuple(rows[0])


def _chunks(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    return (rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE))
