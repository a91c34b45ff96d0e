"""PostgreSQL 13 and newer, through psycopg 3."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BigInteger, String, Text, Uuid, and_, cast, extract, func, literal_column, null, select, tuple_
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import any_, bindparam
from sqlalchemy.sql.util import ClauseAdapter

from delayline.errors import ConfigurationError, TransactionAborted
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.dialect import BulkStatements, ColumnValues, RowValueGroups, StatementWords, conflict_columns
from delayline.sql.due_forecast import explanation
from delayline.sql.postgresql.catalog import USUAL, PostgresqlCatalog
from delayline.sql.postgresql.claims import AdvisoryLockClaims
from delayline.sql.postgresql.connections import PostgresqlConnections, driver_of
from delayline.sql.postgresql.errors import ABORTED
from delayline.sql.postgresql.moves import PostgresqlForwarding
from delayline.sql.postgresql.notifications import PostgresqlNotifications
from delayline.sql.postgresql.timeouts import PostgresqlTimeouts
from delayline.sql.postgresql.two_phase import PostgresqlTwoPhase
from delayline.sql.prepared import Prepared
from delayline.sql.server import Server, ServerTransactions, run
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import URL, ClauseElement, Column, ColumnElement, Connection, Dialect, Insert, Select, Table

    from delayline.sql.postgresql.binary import LoopStatements
    from delayline.sql.postgresql.errors import PostgresqlErrors
    from delayline.sql.schema import QueueTables
    from delayline.sql.server import ServerSessions
    from delayline.sql.staging import Stage
    from delayline.sql.statements import StoreStatements

PART: Final = 250  # rows of a large insert that go to the server at once
FOR_SCANS: Final = (
    "SET LOCAL enable_seqscan = on",
    "SET LOCAL enable_bitmapscan = on",
    "SET LOCAL plan_cache_mode = auto",
    "SET LOCAL jit = off",
    "SET LOCAL work_mem = '64MB'",  # a million rows are sorted in a single pass then
)
#: The columns that NServiceBus' script for PostgreSQL creates.
TIMEOUTS: Final = TimeoutShape(
    Uuid(),
    String(MAXIMUM_DESTINATION_LENGTH),
    postgresql.TIMESTAMP(),
    Text(),
    round_time=lambda due: due.replace(tzinfo=None),
    nullable=True,
    named_by_table=True,
    binary_keys=True,
)


class PostgresqlValues(ColumnValues):
    """timestamptz keeps microseconds, and a field has 1 GB: others, pg_dump too, read bytes as hexadecimal text."""

    def containing(self, column: ColumnElement[bytes], part: ColumnElement[bytes]) -> ColumnElement[bool]:
        """Return the condition that a column of bytes has the part."""
        return func.pg_catalog.position(column, part) > 0

    def from_due(self, kept: datetime) -> datetime:
        """Return the due time in UTC."""
        return kept.astimezone(UTC)

    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the column as microseconds since 1970: exact, as `extract` is numeric."""
        return cast(extract("epoch", due) * 1_000_000, BigInteger)

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the server's time so many seconds from now; Citus takes no other function in an UPDATE."""
        return literal_column(f"statement_timestamp() + interval '{seconds} seconds'")


class PostgresqlWords(StatementWords):
    """A list is an array, which is a single parameter."""

    deletes_by_list = True
    sees_whole_commits = True
    returns_deleted = True
    table_of_row: ClassVar[str | None] = "tableoid"

    transactions_in_progress: ClassVar[Sequence[ColumnElement[int]]] = tuple(
        cast(cast(function(func.pg_current_snapshot()), Text), BigInteger)
        for function in (func.pg_snapshot_xmin, func.pg_snapshot_xmax)
    )

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition with an array: a single statement, and plan, for lists of any length."""
        return column == any_(bindparam(name, type_=postgresql.ARRAY(column.type)))

    def by_key(
        self, column: ColumnElement[Any], name: str, within: ColumnElement[bool] | None = None
    ) -> ColumnElement[bool]:
        """Return the condition that looks the rows up each alone.

        Where statistics tell of few live rows in many pages, as beside an old snapshot, each index seems to cost the
        same. For a list of keys, or for a column of it, the planner then reads an index from end to end.
        """
        rows, keys = column.table.alias("keyed"), bindparam(name, type_=postgresql.ARRAY(column.type))
        each = func.unnest(keys).table_valued("key").render_derived()
        row: Select[Any] = select(literal_column("keyed.ctid")).where(rows.c[column.key] == each.c.key)
        if within is not None:
            row = row.where(ClauseAdapter(rows).traverse(within))
        keyed = select(row.correlate(each).scalar_subquery()).select_from(each).scalar_subquery()
        return literal_column("ctid") == any_(func.array(keyed))

    def queued_after(self, queued: Table, after: ColumnElement[int]) -> ColumnElement[bool]:
        """Return the condition that only the index of the queues' order fulfils, in that order.

        By the queue's name and numbers alone the planner may read the primary key: other queues' messages too.
        """
        columns, name = queued.c, bindparam("name", type_=queued.c.queue.type)
        return and_(tuple_(columns.queue, columns.seq) > tuple_(name, after), columns.queue <= name)

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is."""
        return insert(table).on_conflict_do_nothing(index_elements=conflict_columns(table, key))

    def known_lists(
        self, table: Table, lists: Sequence[str], others: Mapping[str, ColumnElement[Any]]
    ) -> ClauseElement:
        """Return the query with a subquery for each key: it has the same plan for an empty table and for a full one.

        A plan for an array may read the table from end to end, and stays in use when the table has grown.
        """
        arrays = [bindparam(name, type_=postgresql.ARRAY(table.c[name].type)) for name in lists]
        keys = func.unnest(*arrays).table_valued(*lists).render_derived(name="keys")
        given = [table.c[name] == value for name, value in others.items()]
        listed = [table.c[name] == keys.c[name] for name in lists]
        row = select(literal_column("true")).where(*given, *listed).correlate(keys).scalar_subquery()
        return select(*(keys.c[name] for name in lists)).where(row)

    def insert_lists(
        self, table: Table, key: str, lists: Sequence[str], others: Mapping[str, ColumnElement[Any]]
    ) -> ClauseElement:
        """Return an insert of arrays: a parameter for each column, and not for each value."""
        arrays = [func.unnest(bindparam(name, type_=postgresql.ARRAY(table.c[name].type))) for name in lists]
        new = self.insert_new(table, key).from_select([*others, *lists], select(*others.values(), *arrays))
        return new.returning(*(table.c[name] for name in lists))


INDEX_NAMES: Final = """
SELECT c.relname::text FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE i.indrelid = to_regclass(%s) AND i.indisvalid
"""


class PostgresqlGroups(RowValueGroups):
    """A single query finds all groups."""

    def __init__(self, sql: Dialect) -> None:
        self._sql = sql

    def due_groups(self, group: Column[str], due: Column[Any]) -> Select[str, Any]:
        """Return the query for groups with due messages: between two names each, with a step of the index for each."""
        bounds = (bindparam(name, type_=postgresql.ARRAY(group.type)) for name in ("after", "before"))
        between = func.unnest(*bounds).table_valued("after", "before").render_derived()
        names = (cast(name, group.type).label(name.name) for name in between.c)
        found = select(*names, cast(null(), due.type).label("earliest")).cte("found", recursive=True)
        following = select(group.label("name"), due.label("earliest")).order_by(group, due).limit(literal_column("1"))
        following = following.where(group > found.c.after, group < found.c.before)
        step = following.lateral("following")
        found = found.union_all(select(step.c.name, found.c.before, step.c.earliest).select_from(found, step))
        return select(found.c.after, found.c.earliest).where(found.c.earliest <= bindparam("until", type_=due.type))

    def index_names(self, connection: Connection, table: Table) -> set[str]:
        """Return the names of the valid indexes; SQLAlchemy's look does not read them in binary."""
        return {index for (index,) in run(connection, INDEX_NAMES, self._named(table))}

    def _named(self, table: Table) -> str:
        """Return the table's quoted name as a value."""
        return self._sql.identifier_preparer.format_table(table).replace("%%", "%")


INERROR: Final = 3  # psycopg.pq.TransactionStatus.INERROR


class PostgresqlTransactions(ServerTransactions):
    """Transactions that read what is committed, and can be prepared."""

    decides: PostgresqlTwoPhase
    two_phase: PostgresqlTwoPhase

    def __init__(self, connections: PostgresqlConnections) -> None:
        super().__init__(connections.errors)
        self._connections = connections
        self.two_phase = self.decides = PostgresqlTwoPhase(connections, self)

    def begin(self, connection: Connection) -> None:
        """Begin a transaction that reads what is committed, whatever the server's default is."""
        run(connection, f"{self.BEGIN} ISOLATION LEVEL {USUAL}" if self._connections.pgbouncer else self.BEGIN)

    def commit(self, connection: Connection) -> None:
        """Commit; durable on return. Raises TransactionAborted where the server would roll back without an error."""
        if driver_of(connection).info.transaction_status == INERROR:
            raise TransactionAborted(ABORTED.format(place=self._connections))
        super().commit(connection)


class PostgresqlBulk(BulkStatements):
    """COPY where ids are new, arrays where they are not; the planner's estimates."""

    locks_tables = True

    def __init__(self, dialect: Postgresql) -> None:
        from delayline.sql.postgresql.binary import Copies

        self._dialect = dialect
        self._copies = Copies()

    def lock_table(self, connection: Connection, table: Table, *, readers: bool = False) -> None:
        """Lock the table: EXCLUSIVE, or ACCESS EXCLUSIVE."""
        mode = "ACCESS EXCLUSIVE" if readers else "EXCLUSIVE"
        run(connection, f"LOCK TABLE {self._dialect.sql.identifier_preparer.format_table(table)} IN {mode} MODE")

    def begin_scan(self, connection: Connection) -> None:
        """Begin a transaction: cursors on the server and SET LOCAL need it."""
        self._dialect.transactions.begin(connection)

    def plan_for_scans(self, connection: Connection) -> None:
        """Undo the settings of connections, which are for small batches found by their index."""
        for setting in FOR_SCANS:
            run(connection, setting)

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return the planner's estimates, from the histogram of due times that ANALYZE keeps."""
        explain = explanation(table, self._dialect.sql, len(edges), "EXPLAIN (FORMAT JSON) ")
        self._dialect.transactions.begin(connection)
        try:
            run(connection, "SET LOCAL max_parallel_workers_per_gather = 0")  # which would hide and reorder the buckets
            explained = explain.one(connection, *edges)
        finally:
            self._dialect.transactions.rollback(connection)
        [plan] = json.loads(explained) if isinstance(explained, str) else explained
        return [float(bucket["Plan Rows"]) for bucket in plan["Plan"]["Plans"]]

    def stage(self, store: Table, name: str) -> Stage:
        """Return a staging table."""
        need_arrow()
        from delayline.sql.postgresql.staging import PostgresqlStage

        return PostgresqlStage(self._dialect, store, name)

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert every row; many of them in parts, so that the server inserts a part while the next is written."""
        if len(rows) == 1:
            insert.change(connection, *rows[0])
            return
        driver = getattr(connection.connection, "driver_connection", None)  # of a caller's there are only cursors
        many = _from_arrays(insert.sql)
        with driver.pipeline() if driver and len(rows) > PART else contextlib.nullcontext():
            for first in range(0, len(rows), PART):
                run(connection, many, *map(list, zip(*rows[first : first + PART], strict=True)))

    def inserts_at_once(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Copy the rows, where their ids are new; or insert them, where a statement has room for all."""
        if self._copies.copied(driver_of(connection), insert.sql, rows):
            return True
        if len(rows) <= PART:
            self.insert_rows(connection, insert, rows)
        return len(rows) <= PART


class Postgresql(Server):
    """A PostgreSQL database."""

    sql: Dialect
    values: PostgresqlValues
    words: PostgresqlWords
    groups: PostgresqlGroups
    bulk: PostgresqlBulk
    catalog: PostgresqlCatalog
    timeouts: TimeoutShape
    transactions: PostgresqlTransactions
    errors: PostgresqlErrors
    connections: PostgresqlConnections

    def __init__(self, url: URL) -> None:
        self.connections = connections = PostgresqlConnections(url)
        self.sql, self.errors = connections.engine.dialect, connections.errors
        self.values, self.words, self.bulk = PostgresqlValues(), PostgresqlWords(), PostgresqlBulk(self)
        self.groups = PostgresqlGroups(self.sql)
        self.catalog, self.transactions = PostgresqlCatalog(self), PostgresqlTransactions(connections)
        self.timeouts = replace(TIMEOUTS, forwarding=partial(PostgresqlTimeouts, sql=self.sql))

    def loop_statements(self, database: ServerSessions) -> LoopStatements | None:
        """Let the event loop run statements by itself, which takes prepared statements."""
        if self.connections.pgbouncer or self.connections.owned is not None:
            return None
        from delayline.sql.postgresql.binary import LoopStatements

        return LoopStatements(database, self.connections)

    def notifications(self, database: ServerSessions) -> PostgresqlNotifications:
        """LISTEN and NOTIFY."""
        return PostgresqlNotifications(database, self)

    def claims(self, database: ServerSessions, table: str) -> AdvisoryLockClaims:
        """Advisory locks. Raises ConfigurationError behind PgBouncer."""
        if self.connections.pgbouncer:
            raise ConfigurationError(
                f"{self} is reached through PgBouncer (pgbouncer=true), whose clients share sessions: receivers, take "
                "and purge claim messages by locks of a session. Name the server itself in the URL of endpoints that "
                "receive; those with send_only=True work through PgBouncer"
            )
        return AdvisoryLockClaims(database, table, self)

    def forwarding(self, statements: StoreStatements, tables: QueueTables) -> PostgresqlForwarding:
        """A statement."""
        return PostgresqlForwarding(statements, tables, self)


@lru_cache(maxsize=256)
def _from_arrays(insert: str) -> str:
    """Return the insert of a row as an insert of many: an array for each column, sent in binary."""
    start, _, rest = insert.rpartition(" VALUES (")  # the first may be in a name
    values, _, end = rest.partition(")")
    typed = [value if "::" in value else f"{value}::bytea" for value in values.split(", ")]
    arrays = ", ".join(f"{value.replace('%s', '%b')}[]" for value in typed)
    return f"{start} SELECT * FROM unnest({arrays}){end}"  # noqa: S608 - of SQLAlchemy's making
