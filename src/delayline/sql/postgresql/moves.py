"""Due messages go from store to queue in PostgreSQL in a single statement and round trip: no body leaves the server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delayline.delayed.fairness import Served
from delayline.sql.fair_groups import fair_by_of, group_column
from delayline.sql.moves import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.statements import EXPIRY_MARKER, MARKER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.delayed.fairness import Turn
    from delayline.sql.postgresql.dialect import Postgresql
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements

#: `due` takes the locks; skipped rows are unlocked when the statement ends, which commits.
MOVE_DUE: Final = """
WITH due AS MATERIALIZED ({due}), {chosen}, gone AS (
  DELETE FROM {table} WHERE seq = ANY (ARRAY(SELECT seq FROM chosen)) RETURNING seq, due, destination, id, headers, body
), put AS (
  INSERT INTO {queued} (queue, id, headers, body)
  SELECT destination, id, headers, body FROM gone ORDER BY due, seq{returning}
){grouped}{claimed}{turned}
SELECT (SELECT count(*) FROM gone), ARRAY(SELECT DISTINCT destination FROM due WHERE movable),
  (SELECT count(*) FROM due), (SELECT count(*) FROM due WHERE NOT movable), (SELECT max(due) FROM gone),
  {next_due}{counts}{columns}
"""
HEADS: Final = """
  SELECT seq, due, destination, octet_length(headers) + octet_length(body) AS size,
    position(%s::bytea IN headers) = 0 AND position(%s::bytea IN headers) = 0
      AND EXISTS (SELECT FROM {queues} WHERE name = destination) AS movable
  FROM {table} WHERE {condition}{unpaused} AND (leased_until IS NULL OR leased_until < statement_timestamp())
  ORDER BY {order} LIMIT {limit} FOR UPDATE SKIP LOCKED
"""
BY_DUE_TIME: Final = {"condition": "due <= %s AND due >= %s", "order": "due, seq", "limit": "%s"}
NEXT_DUE: Final = """CASE WHEN (SELECT count(*) FROM due) < %s THEN (
    SELECT due FROM {table} WHERE due >= (SELECT max(due) FROM gone) AND seq NOT IN (SELECT seq FROM gone){unpaused}
    ORDER BY due, seq LIMIT 1) END"""
#: Only the index of groups fulfils the condition, in this order: with an equality the planner may take another.
OF_TURN: Final = {
    "condition": "({group}, due) >= (turn.name, turn.since) AND ({group}, due) <= (turn.name, %s)",
    "order": "{group}, due, seq",
    "limit": "turn.most",
}
#: Groups that come first take what there is for them; the last ones what the limit leaves.
IN_TURN: Final = """
  SELECT head.*, turn.number AS turn
  FROM unnest(%s::text[], %s::timestamptz[], %s::bigint[]) WITH ORDINALITY AS turn (name, since, most, number),
    LATERAL ({heads}) AS head
  LIMIT %s
"""
TURNED: Final = """, turned AS (
  SELECT turn, count(*) AS number, max(due) AS last FROM {fitting} AS fitting GROUP BY turn
)"""
TURN_COLUMNS: Final = """,
  (SELECT array_agg(turn ORDER BY turn) FROM turned), (SELECT array_agg(number ORDER BY turn) FROM turned),
  (SELECT array_agg(last ORDER BY turn) FROM turned)"""
RETURNING: Final = " RETURNING seq, queue, id, headers, body"
#: The limit is inside, so that no further rows are locked.
CLAIMED: Final = """, claimed AS MATERIALIZED (
  SELECT seq, id, headers, body FROM (SELECT * FROM put WHERE queue = %s ORDER BY seq LIMIT %s) AS first
  WHERE pg_try_advisory_lock(%s + seq)
)"""
#: The other columns are the same in each row.
CLAIMED_COLUMNS: Final = """,
  (SELECT count(*) FROM put WHERE queue = %s), claimed.seq, claimed.id, claimed.headers, claimed.body
FROM (SELECT 1) AS one LEFT JOIN claimed ON true ORDER BY claimed.seq"""
GROUPED: Final = """, grouped AS MATERIALIZED (
  SELECT destination, due, count(*)::int AS number FROM gone GROUP BY destination, due
)"""
COUNTS: Final = """,
  (SELECT array_agg(destination) FROM grouped), (SELECT array_agg(due) FROM grouped),
  (SELECT array_agg(number) FROM grouped)"""
EVER: Final = datetime.min.replace(tzinfo=UTC)
ALL: Final = "chosen AS (SELECT seq FROM due WHERE movable AND (SELECT sum(size) FROM due) <= %s)"
#: As many as fit, but not none: sorting them once more costs a tenth of the whole move.
SOME: Final = """
  sized AS (
    SELECT *, sum(size) OVER before <= %s OR row_number() OVER before = 1 AS fits
    FROM due WINDOW before AS (ORDER BY {turn}due, seq)
  ), chosen AS (SELECT seq FROM sized WHERE movable AND fits)
"""


class PostgresqlForwarding:
    """Moves the earliest due messages of a store's table, skipping locked messages."""

    one_statement = True

    def __init__(self, of_store: StoreStatements, tables: QueueTables, dialect: Postgresql) -> None:
        quote, table = dialect.sql.identifier_preparer.format_table, of_store.table
        tables_named = {"table": table, "queues": tables.queues, "queued": tables.queued}
        names = {name: quote(table) for name, table in tables_named.items()}
        names["unpaused"] = "".join(f" AND {_literal(condition, dialect)}" for condition in of_store.unpaused)
        self.can_claim: bool = not dialect.connections.pgbouncer
        """Messages are claimed by locks of a session, which clients of a pooler would share."""
        by_due_time = {"due": HEADS.format(**BY_DUE_TIME, **names), "next_due": NEXT_DUE.format(**names), "turned": ""}
        self.statements: Mapping[tuple[bool, bool], Sequence[Prepared]] = {
            (counted, claiming): tuple(
                Prepared.of_text(
                    MOVE_DUE.format(
                        chosen=chosen.format(turn=""),
                        grouped=GROUPED if counted else "",
                        counts=COUNTS if counted else "",
                        returning=RETURNING if claiming else "",
                        claimed=CLAIMED if claiming else "",
                        columns=CLAIMED_COLUMNS if claiming else "",
                        **by_due_time,
                        **names,
                    )
                )
                for chosen in (ALL, SOME)
            )
            for counted in (False, True)
            for claiming in (False, True)
        }
        self.fair_statements: Mapping[bool, Sequence[Prepared]] = (
            {} if fair_by_of(table) is None else _fair_statements(group_column(table).name, names)
        )

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
        since: object | None = None,
        turns: Sequence[Turn] = (),
    ) -> Moved:
        """Move messages, only from `since` on if given, and return the result, with `counts` if `counted`."""
        statements = self.fair_statements[counted] if turns else self.statements[counted, False]
        return PostgresqlMove(statements, until, limit, max_bytes, counted, since, turns=turns).run(connection)


def _literal(condition: ColumnElement[bool], dialect: Postgresql) -> str:
    """Return the condition with its values in it."""
    return str(condition.compile(dialect=dialect.sql, compile_kwargs={"literal_binds": True}))


def _fair_statements(group: str, names: Mapping[str, str]) -> Mapping[bool, Sequence[Prepared]]:
    """Return the statements that move messages in turn, by whether they count."""
    of_turn = {key: words.format(group=group) for key, words in OF_TURN.items()}
    due = IN_TURN.format(heads=HEADS.format(**of_turn, **names))
    fitting = {ALL: "due", SOME: "(SELECT * FROM sized WHERE fits)"}
    return {
        counted: [
            Prepared.of_text(
                MOVE_DUE.format(
                    due=due,
                    chosen=chosen.format(turn="turn, "),
                    grouped=GROUPED if counted else "",
                    counts=(COUNTS if counted else "") + TURN_COLUMNS,
                    returning="",
                    claimed="",
                    columns="",
                    turned=TURNED.format(fitting=found),
                    next_due="NULL",
                    **names,
                )
            )
            for chosen, found in fitting.items()
        ]
        for counted in (False, True)
    }


class PostgresqlMove(NamedTuple):
    """A move of due messages; see `Forwarding.run` and `ClaimsInStatements.move`."""

    statements: Sequence[Prepared]
    """One that moves all due messages if they fit in `max_bytes`, and one that moves those that fit."""
    until: object
    limit: int
    max_bytes: int
    counted: bool
    since: object | None
    queue: str | None = None
    """The queue in which moved messages are locked; None for none."""
    wanted: int = 0
    turns: Sequence[Turn] = ()
    """Whose messages are moved; none for a move by due time alone."""

    def statement(self, key: int) -> tuple[Prepared, tuple[Any, ...]]:
        """Return the statement that moves all due messages, and its parameters."""
        return self.statements[0], self._values(key)

    def run(self, connection: Connection, key: int = 0) -> Moved:
        """Move on the connection."""
        values = self._values(key)
        moved = self.moved(self.statements[0].rows(connection, *values))
        return self._read(self.statements[1].rows(connection, *values)) if moved is None else moved

    def moved(self, rows: Sequence[tuple[Any, ...]]) -> Moved | None:
        """Read the result of the first statement from its rows; None if the messages did not fit and none moved."""
        moved, _, due, left = rows[0][:4]
        return None if moved + left < due else self._read(rows)

    def _read(self, rows: Sequence[tuple[Any, ...]]) -> Moved:
        moved, queues, due, left, last, next_due, *groups = rows[0]
        claimed: list[tuple[Any, ...]] = []
        if self.queue is not None:
            *groups, put, _, _, _, _ = groups
            claimed = [row[-4:] for row in rows if row[-4] is not None]
            if put == len(claimed):  # there is nothing for others to look for
                queues = [queue for queue in queues if queue != self.queue]
        served = None
        if self.turns:
            *groups, turned, numbers, ends = groups
            served = self._served(
                turned or [], numbers or [], ends or [], left, cut=due == self.limit or moved + left < due
            )
        if left or self.turns:
            next_due = last = None
        if due == self.limit or moved + left < due or self.turns:
            next_due = self.until
        counts = None
        if self.counted and moved:
            destinations, due_times, numbers = groups
            counts = dict(zip(zip(destinations, due_times, strict=True), numbers, strict=True))
        return Moved(moved, set(queues), left, next_due, last, counts, served, claimed)

    def _served(
        self, turned: Sequence[int], numbers: Sequence[int], ends: Sequence[Any], left: int, *, cut: bool
    ) -> Served:
        """Return what each turn has given; a group is asked again from the same time on while any message is left."""
        each = [(self.turns[turn - 1], number, end) for turn, number, end in zip(turned, numbers, ends, strict=True)]
        return Served({turn.group: (number, turn.since if left else end) for turn, number, end in each}, cut)

    def _values(self, key: int) -> tuple[Any, ...]:
        if self.turns:
            asked = map(list, zip(*self.turns, strict=True))
            return (*asked, MARKER, EXPIRY_MARKER, self.until, self.limit, self.max_bytes)
        since = EVER if self.since is None else self.since
        bounds = (MARKER, EXPIRY_MARKER, self.until, since, self.limit, self.max_bytes)
        if self.queue is None:
            return (*bounds, self.limit)
        return (*bounds, self.queue, self.wanted, key, self.limit, self.queue)
