"""Due messages go from store to queue in PostgreSQL in one statement: one round trip, no body leaves the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.sql.dialects.server import run
from delayline.sql.forwarding import EXPIRY_MARKER, MARKER, Moved

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from delayline.sql.dialects.postgresql import Postgresql
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements

#: `due` takes the locks; skipped rows are unlocked when the statement ends, which commits.
MOVE: Final = """
WITH due AS MATERIALIZED (
  SELECT seq, due, destination, octet_length(headers) + octet_length(body) AS size,
    position(%s::bytea IN headers) = 0 AND position(%s::bytea IN headers) = 0
      AND EXISTS (SELECT FROM {queues} WHERE name = destination) AS movable
  FROM {table} WHERE due <= %s AND due >= %s AND (leased_until IS NULL OR leased_until < clock_timestamp())
  ORDER BY due, seq LIMIT %s FOR UPDATE SKIP LOCKED
), {chosen}, gone AS (
  DELETE FROM {table} WHERE seq = ANY (ARRAY(SELECT seq FROM chosen)) RETURNING seq, due, destination, id, headers, body
), put AS (
  INSERT INTO {queued} (queue, id, headers, body)
  SELECT destination, id, headers, body FROM gone ORDER BY due, seq
)
SELECT (SELECT count(*) FROM gone), ARRAY(SELECT DISTINCT destination FROM due WHERE movable),
  (SELECT count(*) FROM due), (SELECT count(*) FROM due WHERE NOT movable), (SELECT max(due) FROM gone)
"""
EVER: Final = "-infinity"
ALL: Final = "chosen AS (SELECT seq FROM due WHERE movable AND (SELECT sum(size) FROM due) <= %s)"
#: As many as fit, but at least one: sorting them once more costs a tenth of the whole move.
SOME: Final = """
  sized AS (
    SELECT seq, movable, sum(size) OVER before <= %s OR row_number() OVER before = 1 AS fits
    FROM due WINDOW before AS (ORDER BY due, seq)
  ), chosen AS (SELECT seq FROM sized WHERE movable AND fits)
"""


class PostgresqlForwarding:
    """Moves the earliest due messages of one store's table, skipping locked ones."""

    one_statement = True

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: Postgresql) -> None:
        quote = dialect.sql.identifier_preparer.format_table
        tables_named = {"table": statements.table, "queues": tables.queues, "queued": tables.queued}
        names = {name: quote(table) for name, table in tables_named.items()}
        self._all = MOVE.format(chosen=ALL, **names)
        self._some = MOVE.format(chosen=SOME, **names)

    def run(
        self, connection: Connection, until: object, *, limit: int, max_bytes: int, since: object | None = None
    ) -> Moved:
        """Move messages due from `since` on, where given, and say what became of them."""
        bounds = (MARKER, EXPIRY_MARKER, until, EVER if since is None else since, limit, max_bytes)
        moved, queues, due, left, last = run(connection, self._all, *bounds)[0]
        if moved + left < due:
            moved, queues, due, left, last = run(connection, self._some, *bounds)[0]
        more = due == limit or moved + left < due
        return Moved(moved, set(queues), left, until if more else None, None if left else last)
