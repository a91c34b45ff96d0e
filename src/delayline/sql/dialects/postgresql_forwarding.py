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
  SELECT seq, due, destination, octet_length(headers) + octet_length(body) AS size,
    position(%s::bytea IN headers) = 0 AND EXISTS (SELECT FROM {queues} WHERE name = destination) AS movable
  FROM {table} WHERE due <= %s AND (leased_until IS NULL OR leased_until < clock_timestamp())
  ORDER BY due, seq LIMIT %s FOR UPDATE SKIP LOCKED
), sized AS (
  SELECT seq, movable, sum(size) OVER before <= %s OR row_number() OVER before = 1 AS fits
  FROM due WINDOW before AS (ORDER BY due, seq)
), chosen AS MATERIALIZED (
  SELECT seq FROM sized WHERE movable AND fits
), gone AS (
  DELETE FROM {table} WHERE seq = ANY (ARRAY(SELECT seq FROM chosen)) RETURNING seq, due, destination, id, headers, body
), put AS (
  INSERT INTO {queued} (queue, id, headers, body)
  SELECT destination, id, headers, body FROM gone ORDER BY due, seq
  RETURNING queue
)
SELECT (SELECT count(*) FROM put), ARRAY(SELECT DISTINCT queue FROM put),
  (SELECT min(due) FROM {table} WHERE NOT seq = ANY (ARRAY(SELECT seq FROM chosen))),
  (SELECT count(*) FROM due WHERE NOT movable)
"""


class PostgresqlForwarding:
    """Moves the earliest due messages of one store's table that nobody has locked."""

    one_statement = True

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: Postgresql) -> None:
        quote = dialect.sql.identifier_preparer.format_table
        names = {"table": quote(statements.table), "queues": quote(tables.queues), "queued": quote(tables.queued)}
        self._move = MOVE.format(**{key: name.replace("%", "%%") for key, name in names.items()})

    def run(self, connection: Connection, until: object, *, limit: int, max_bytes: int) -> Moved:
        """Move messages and say what became of them."""
        moved, queues, next_due, left = run(connection, self._move, MARKER, until, limit, max_bytes)[0]
        return Moved(moved, set(queues), next_due, left)
