"""Expired timeouts go to their queues in PostgreSQL in a single statement, which also returns when the next expires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.message import Headers, TimeoutHeaders
from delayline.sql.moves import Moved
from delayline.sql.server import run

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect, Table

    from delayline.sql.schema import QueueTables

#: Headers in which any of these words occurs need more than moving.
TIMEOUT_MARKERS: Final = (Headers.DISPATCH_PROPERTIES, Headers.TIME_TO_BE_RECEIVED, TimeoutHeaders.OLD_REPLY_TO)
MOVE_EXPIRED: Final = """
WITH leased AS MATERIALIZED (
  SELECT id, until FROM {leases} WHERE store = %s AND id <> '' AND until > %s
), due AS MATERIALIZED (
  SELECT "Id", "Time", "Destination",
    coalesce(octet_length("State"), 0) + coalesce(octet_length("Headers"), 0) AS size,
    coalesce(NOT ("Headers" LIKE ANY (%s)), false)
      AND EXISTS (SELECT FROM {queues} WHERE name = "Destination") AS movable
  FROM {table} WHERE "Time" <= %s AND "Id"::text NOT IN (SELECT id FROM leased)
  ORDER BY "Time" LIMIT %s FOR UPDATE SKIP LOCKED
), sized AS (
  SELECT "Id", movable, sum(size) OVER before <= %s OR row_number() OVER before = 1 AS fits
  FROM due WINDOW before AS (ORDER BY "Time", "Id")
), gone AS (
  DELETE FROM {table} WHERE "Id" = ANY (ARRAY(SELECT "Id" FROM sized WHERE movable AND fits))
  RETURNING "Id", "Time", "Destination", "State", "Headers"::jsonb AS headers
), put AS (
  INSERT INTO {queued} (queue, id, headers, body)
  SELECT "Destination", coalesce(nullif(headers ->> %s::text, ''), "Id"::text),
    convert_to((headers || jsonb_build_object(%s::text, %s::text, %s::text, "Id"::text))::text, 'UTF8'),
    coalesce("State", '')
  FROM gone ORDER BY "Time", "Id"
)
SELECT (SELECT count(*) FROM gone), ARRAY(SELECT DISTINCT "Destination" FROM gone),
  (SELECT count(*) FROM due WHERE NOT movable), least(
    (SELECT min(until) FROM leased),
    (SELECT "Time" AT TIME ZONE 'UTC' FROM {table}
     WHERE "Time" IS NOT NULL AND "Id" <> ALL (ARRAY(SELECT "Id" FROM gone))
       AND "Id"::text NOT IN (SELECT id FROM leased) ORDER BY "Time" LIMIT 1))
"""


class PostgresqlTimeouts:
    """Moves the earliest expired timeouts of a table, skipping locked and leased timeouts."""

    def __init__(self, table: Table, tables: QueueTables, sql: Dialect) -> None:
        named = {"table": table, "leases": tables.leases, "queues": tables.queues, "queued": tables.queued}
        quote = sql.identifier_preparer.format_table
        self._move = MOVE_EXPIRED.format(**{name: quote(table_named) for name, table_named in named.items()})
        self._name = str(table.name)
        self._patterns = [f"%{marker}%" for marker in TIMEOUT_MARKERS]

    def run(self, connection: Connection, at: object, until: object, sent: str, *, limit: int, max_bytes: int) -> Moved:
        """Move expired timeouts and return the result."""
        names = (Headers.MESSAGE_ID, Headers.TIME_SENT, sent, TimeoutHeaders.RELATED_TIMEOUT)
        values = (self._name, at, self._patterns, until, limit, max_bytes, *names)
        [(number, queues, left, next_due)] = run(connection, self._move, *values)
        return Moved(number, set(queues), left, next_due)
