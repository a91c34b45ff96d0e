"""Due messages go from store to queue in PostgreSQL in one statement: one round trip, no body leaves the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.sql.dialects.server import run
from delayline.sql.forwarding import MARKER, Moved

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from delayline.sql.dialects.postgresql import Postgresql
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements

#: Locks are taken in `due`; what is passed over is unlocked again when the statement ends, and commits.
MOVE: Final = """
WITH due AS MATERIALIZED (
  SELECT seq, due, destination, position(%s::bytea IN headers) > 0 AS marked FROM {table}
  WHERE due <= %s ORDER BY due, seq LIMIT %s FOR UPDATE SKIP LOCKED
), fit AS MATERIALIZED (
  SELECT due.seq FROM due JOIN {queues} AS known ON known.name = due.destination WHERE NOT due.marked
), gone AS (
  DELETE FROM {table} WHERE seq = ANY (ARRAY(SELECT seq FROM fit)) RETURNING seq, due, destination, id, headers, body
), put AS (
  INSERT INTO {queued} (queue, id, headers, body)
  SELECT destination, id, headers, body FROM gone ORDER BY due, seq
  RETURNING queue
)
SELECT (SELECT count(*) FROM due), (SELECT count(*) FROM put), ARRAY(SELECT DISTINCT queue FROM put),
  (SELECT min(due) FROM {table} WHERE NOT seq = ANY (ARRAY(SELECT seq FROM fit)))
"""


class PostgresqlForwarding:
    """Moves the earliest due messages of one store's table that nobody has locked."""

    one_statement = True

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: Postgresql) -> None:
        quote = dialect.sql.identifier_preparer.format_table
        names = {"table": quote(statements.table), "queues": quote(tables.queues), "queued": quote(tables.queued)}
        self._move = MOVE.format(**{key: name.replace("%", "%%") for key, name in names.items()})

    def run(self, connection: Connection, until: object, *, limit: int, max_bytes: int) -> Moved:
        """Move messages and say what became of them. The bytes do not count: they stay in the server."""
        del max_bytes
        due, moved, queues, next_due = run(connection, self._move, MARKER, until, limit)[0]
        return Moved(moved, set(queues), next_due, left=due - moved)
