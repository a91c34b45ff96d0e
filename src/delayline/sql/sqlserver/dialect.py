"""SQL Server 2016 and newer, Azure SQL too, through Microsoft's driver mssql-python, or pymssql."""

from __future__ import annotations

import contextlib
import hashlib
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import (
    BigInteger,
    Table,
    and_,
    bindparam,
    case,
    cast,
    collate,
    delete,
    exists,
    func,
    insert,
    literal_column,
    not_,
)
from sqlalchemy import cast as cast_to
from sqlalchemy import insert as insert_into
from sqlalchemy.dialects import mssql

from delayline.errors import BackendUnusable, CorruptHeaders
from delayline.header_xml import to_xml
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, encode_headers
from delayline.sql.dialect import (
    BulkStatements,
    ColumnValues,
    StatementWords,
    before_key_by_columns,
    conflict_columns,
    from_key_by_columns,
)
from delayline.sql.locked_moves import LockedForwarding
from delayline.sql.notifications import LocalNotifications
from delayline.sql.prepared import Prepared
from delayline.sql.schema import BINARY, untyped
from delayline.sql.server import LEASE, Server, ServerTransactions, run
from delayline.sql.session_claims import SessionClaims
from delayline.sql.sqlserver.catalog import SqlServerCatalog, only_row
from delayline.sql.sqlserver.connections import SqlServerConnections
from delayline.sql.sqlserver.errors import DUPLICATE_KEY, NO_SUCH_OBJECT, number_of, text_of
from delayline.sql.sqlserver.statements import LATEST, NEW_ROWS_OPTION, DueTime, rounded_down, rounded_up
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import URL, Column, ColumnElement, Connection, Dialect, Insert

    from delayline.message import Message
    from delayline.sql.schema import QueueTables
    from delayline.sql.server import Columns, ServerSessions
    from delayline.sql.sqlserver.errors import SqlServerErrors
    from delayline.sql.staging import Stage
    from delayline.sql.statements import StoreStatements


#: The columns that NServiceBus' script for SQL Server creates.
TIMEOUTS: Final = TimeoutShape(
    untyped.UNIQUEIDENTIFIER(),
    mssql.NVARCHAR(MAXIMUM_DESTINATION_LENGTH),
    DueTime(),
    untyped.NVARCHAR("max"),
    time_lost=timedelta(milliseconds=2),  # datetime is rounded to a 300th of a second
    inserts_new=False,
)


class SqlServerValues(ColumnValues):
    """The document's table keeps times as `datetime` and headers as XML."""

    clock_tick: ClassVar[timedelta] = timedelta(milliseconds=16)  # on Windows the clock may stand still for 15.625 ms

    def to_due(self, due: datetime) -> datetime:
        """Return the instant in UTC without its zone, rounded up to the type's resolution. Raises InvalidDueTime."""
        return rounded_up(due).replace(tzinfo=None)

    def to_until(self, at: datetime) -> datetime:
        """Return the instant in UTC without its zone, rounded down to the resolution of `datetime`."""
        return rounded_down(at).replace(tzinfo=None)

    def from_due(self, kept: datetime | None) -> datetime:
        """Return the due time in UTC; a foreign row without it is never due."""
        return LATEST if kept is None else kept.replace(tzinfo=UTC)

    def headers_of(self, message: Message) -> bytes:
        """Return the headers in the XML form; damaged headers, or JSON that we would write otherwise, as they are."""
        encoded = message.encoded_headers
        with contextlib.suppress(CorruptHeaders):
            if encode_headers(message.headers) == encoded:
                return to_xml(message.headers)
        return encoded

    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the column as microseconds since 1970, by days and milliseconds: the whole would not fit an int."""
        day = cast_to(cast_to(due, mssql.DATE), mssql.DATETIME)
        days = cast_to(func.datediff(literal_column("day"), literal_column("'19700101'"), due), BigInteger)
        within = cast_to(func.datediff(literal_column("millisecond"), day, due), BigInteger)
        return days * literal_column("86400000000") + within * literal_column("1000")

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the server's time so many seconds from now."""
        return literal_column(f"DATEADD(second, {seconds}, SYSUTCDATETIME())" if seconds else "SYSUTCDATETIME()")


class SqlServerWords(StatementWords):
    """An insert of a new row is a condition, and names have a collation of their own."""

    returns_deleted = True

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is; a key that only looks the same is an error."""
        return insert_into(table).execution_options(**{NEW_ROWS_OPTION: conflict_columns(table, key)})

    def exact(self, column: ColumnElement[str]) -> ColumnElement[str]:
        """Return the column under the collation of delayline's own names, which the document's table does not have."""
        return collate(column, BINARY)


class SqlServerBulk(BulkStatements):
    """Row by row; the histograms of indexes."""

    def __init__(self, dialect: SqlServer) -> None:
        self._dialect = dialect

    def stage(self, store: Table, name: str) -> Stage:
        """Return the way of pieces into the table; it has no staging area. Raises MissingExtra without pyarrow."""
        need_arrow()
        from delayline.sql.sqlserver.staging import SqlServerStage

        return SqlServerStage(self._dialect, store, name)

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert every row; if another transaction inserted the same key meanwhile, retry the rows singly."""
        try:
            insert.change_many(connection, rows)
        except self._dialect.errors.kinds as error:
            if number_of(error) not in DUPLICATE_KEY:
                raise
            for row in rows:
                insert.change(connection, *row)

    def from_key(self, columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
        """Return the condition column by column."""
        return from_key_by_columns(columns, key)

    def before_key(self, columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
        """Return the condition column by column."""
        return before_key_by_columns(columns, key)

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return estimates from the histogram of the index of due times."""
        name = self._dialect.sql.identifier_preparer.format_table(table)
        try:
            steps = run(connection, HISTOGRAM.format(mark=self._dialect.connections.mark), name, "Index_Time")
        except self._dialect.errors.kinds as error:
            if number_of(error) != NO_SUCH_OBJECT:
                raise
            raise BackendUnusable(
                f"a forecast of so many messages needs SQL Server 2016 SP1 CU2 or newer: {self._dialect} has no "
                f"histograms ({text_of(error)})"
            ) from error
        [(rows,)] = run(connection, ROWS_COUNTED.format(mark=self._dialect.connections.mark), name)
        below = [_rows_before(edge, steps) for edge in edges]
        counted = sum(between + equal for _, between, equal in steps)
        scale = float(rows or 0) / counted if counted else 0.0
        return [(end - start) * scale for start, end in pairwise([0.0, *below, counted])]


class SqlServerTransactions(ServerTransactions):
    """Savepoints cannot be released: each depth has its own name."""

    BEGIN: ClassVar[str] = "BEGIN TRANSACTION"
    COMMIT: ClassVar[str] = "COMMIT TRANSACTION"
    ROLLBACK: ClassVar[str] = "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION"
    prepares_nothing = (
        "prepares transactions for Microsoft's distributed transaction coordinator only (MS DTC), which its drivers "
        "for Python do not speak to"
    )

    def begin(self, connection: Connection) -> None:
        """Begin a transaction."""
        connection.info["savepoints"] = 0
        super().begin(connection)

    def rollback(self, connection: Connection) -> None:
        """Roll back; a connection that is lost has been rolled back by the server."""
        try:
            super().rollback(connection)
        except self._errors.kinds as error:
            if not self._errors.is_disconnect(error):
                raise

    def set_savepoint(self, connection: Connection) -> None:
        """Set a savepoint; SQL Server cannot release savepoints, so each depth has its own name."""
        connection.info["savepoints"] = connection.info.get("savepoints", 0) + 1
        run(connection, f"SAVE TRANSACTION delayline{connection.info['savepoints']}")

    def roll_back_to_savepoint(self, connection: Connection) -> None:
        """Roll back to the savepoint, which stays set."""
        run(connection, f"ROLLBACK TRANSACTION delayline{connection.info['savepoints']}")

    def release_savepoint(self, connection: Connection) -> None:
        """Release the savepoint and keep the work since."""
        connection.info["savepoints"] -= 1


class SqlServer(Server):
    """An SQL Server database."""

    sql: Dialect
    values: SqlServerValues = SqlServerValues()
    words: SqlServerWords = SqlServerWords()
    bulk: SqlServerBulk
    catalog: SqlServerCatalog
    transactions: SqlServerTransactions
    errors: SqlServerErrors
    timeouts = TIMEOUTS
    connections: SqlServerConnections

    def __init__(self, url: URL) -> None:
        self.connections = connections = SqlServerConnections(url)
        self.sql, self.errors = connections.engine.dialect, connections.errors
        self.bulk, self.catalog = SqlServerBulk(self), SqlServerCatalog(self)
        self.transactions = SqlServerTransactions(connections.errors)

    def notifications(self, database: ServerSessions) -> LocalNotifications:
        """Notifications in this process only: the server has none."""
        del database
        return LocalNotifications()

    def claims(self, database: ServerSessions, table: str) -> ApplicationLocks:
        """Application locks of a session."""
        return ApplicationLocks(database, table)

    def leases(self, table: Table, tables: QueueTables) -> LeaseTable:
        """Leases in a separate table."""
        return LeaseTable(table, tables, self)

    def forwarding(self, statements: StoreStatements, tables: QueueTables) -> SqlServerForwarding:
        """Three statements."""
        return SqlServerForwarding(statements, tables, self)


#: The steps of an index's histogram: the highest time of each, the rows before it, and the rows equal to it.
HISTOGRAM: Final = """
SELECT CAST(step.range_high_key AS datetime), step.range_rows, step.equal_rows
FROM sys.stats AS kept CROSS APPLY sys.dm_db_stats_histogram(kept.object_id, kept.stats_id) AS step
WHERE kept.object_id = OBJECT_ID({mark}) AND kept.name = {mark}
ORDER BY step.step_number
"""
#: How many rows a table has, as its partitions have counted them.
ROWS_COUNTED: Final = "SELECT SUM(rows) FROM sys.partitions WHERE object_id = OBJECT_ID({mark}) AND index_id IN (0, 1)"


def _rows_before(edge: datetime, steps: Sequence[tuple[datetime, float, float]]) -> float:
    """Return how many rows of a histogram are before the edge, as if rows of a step were evenly distributed."""
    before, start = 0.0, None
    for end, between, equal in steps:
        if edge <= end:
            share = 1.0 if start is None or start >= end else max(0.0, (edge - start) / (end - start))
            return before + between * min(1.0, share)
        before, start = before + between + equal, end
    return before


# Claims on queue rows in SQL Server: application locks of a session.

AT_ONCE: Final = 100  # each lock is a procedure call; this many fit into a round trip
APPLICATION_LOCK: Final = (
    "EXEC @r{n} = sp_getapplock @Resource = N'{name}', @LockMode = N'Exclusive', @LockOwner = N'Session', "
    "@LockTimeout = 0;"
)
APPLICATION_UNLOCK: Final = "EXEC sp_releaseapplock @Resource = N'{name}', @LockOwner = N'Session';"


class ApplicationLocks(SessionClaims):
    """This process's claims on the rows of a table."""

    def __init__(self, database: ServerSessions, table: str) -> None:
        super().__init__(database)
        self._prefix = f"delayline {hashlib.sha256(table.encode()).hexdigest()[:16]} "

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows, many in a round trip."""
        claimed: set[int] = set()
        for some in _chunks(rows):
            results = only_row(connection, self.lock_sql(some))
            claimed.update(row for row, result in zip(some, results, strict=True) if result >= 0)
        return claimed

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, many in a round trip."""
        for some in _chunks(rows):
            run(connection, " ".join(APPLICATION_UNLOCK.format(name=self._name(row)) for row in some))

    def lock_sql(self, rows: Sequence[int]) -> str:
        """Return the batch that tries for each row, and answers with a row of results: negative where refused."""
        names = [f"@r{n}" for n in range(len(rows))]
        locks = [APPLICATION_LOCK.format(n=n, name=self._name(row)) for n, row in enumerate(rows)]
        return f"DECLARE {', '.join(f'{name} int' for name in names)}; {' '.join(locks)} SELECT {', '.join(names)}"

    def _name(self, row: int) -> str:
        return f"{self._prefix}{row:d}"


def _chunks(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    return (rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE))


# Leases in a separate table, because NServiceBus' table has no column for them.
#
# Application locks would do as well, and end with their connection; but every fetch would have to lock each message
# separately. A lease is a row, which the query for due messages joins. A .NET endpoint ignores both kinds: messages
# that it dispatches meanwhile are found missing when they are removed.


class LeaseTable:
    """The leases on a store's messages."""

    in_row: ClassVar[bool] = False

    def __init__(self, table: Table, tables: QueueTables, dialect: SqlServer) -> None:
        leases, sql, self._dialect, self._store = tables.leases, dialect.sql, dialect, table.name
        now, of_store = dialect.values.in_seconds(0), leases.c.store == bindparam("store")
        ours = leases.c.store == bindparam("this_store", table.name)
        self.free: ColumnElement[bool] = not_(
            exists().where(ours, leases.c.id == table.c.id.collate(BINARY), leases.c.until >= now)
        )
        of_ids = delete(leases).where(of_store, dialect.words.one_of(leases.c.id, "keys"))
        take = insert(leases).values(until=dialect.values.in_seconds(LEASE))
        self._take = Prepared(take, sql, ["store", "id"])
        self._sweep = Prepared(of_ids.where(leases.c.until < now), sql, ["store", "keys"])
        self._end = Prepared(of_ids, sql, ["store", "keys"])

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease the messages; if the server ignored the row locks, the messages that no other process leased."""
        self._sweep.change_each(connection, self._store, keys=ids)
        return [message_id for message_id in ids if self._take_one(connection, message_id)]

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases."""
        self._end.change_each(connection, self._store, keys=ids)

    def _take_one(self, connection: Connection, message_id: str) -> bool:
        try:
            self._take.change(connection, self._store, message_id)
        except self._dialect.errors.kinds as error:
            if number_of(error) not in DUPLICATE_KEY:
                raise
            return False
        return True


# Due messages go from store to queue in SQL Server in three statements: no body leaves the server.

#: Headers with any of these words in them need more than moving, in JSON and in XML.
MARKERS: Final = (Headers.DISPATCH_PROPERTIES, Headers.TIME_TO_BE_RECEIVED)


class SqlServerForwarding(LockedForwarding):
    """Moves the earliest due messages of a store's table, skipping locked messages.

    Headers are moved unchanged: a reader distinguishes XML from JSON. A server that ignores lock hints may return the
    same messages to two movers. Only one mover can delete them; the other rolls back and leaves them to the poller,
    which counts deleted rows.
    """

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: SqlServer) -> None:
        self._dialect = dialect
        super().__init__(statements, tables, dialect)

    def movable(self, columns: Columns, known: ColumnElement[bool]) -> ColumnElement[Any]:
        """Return a CASE of 1 or 0: in T-SQL a condition is not a value."""
        return case(
            (and_(known, *map(_without(columns.headers), MARKERS)), literal_column("1")), else_=literal_column("0")
        )

    def body(self, columns: Columns) -> ColumnElement[bytes]:
        """Return a missing body as an empty body."""
        return func.coalesce(columns.body, literal_column("0x"))

    def move(self, connection: Connection, ids: Sequence[str]) -> bool:
        """Move messages, unless another process has removed any of them."""
        self._dialect.transactions.set_savepoint(connection)
        moved = self._move.change_each(connection, keys=ids)
        alone = moved == self._remove.change_each(connection, keys=ids) == len(ids)
        if not alone:
            self._dialect.transactions.roll_back_to_savepoint(connection)
        self._dialect.transactions.release_savepoint(connection)
        return alone


def _without(headers: ColumnElement[bytes]) -> Any:  # noqa: ANN401 - from a name to a condition
    as_text = collate(cast(headers, mssql.VARCHAR("max")), BINARY)  # type: ignore[arg-type]
    return lambda name: func.charindex(literal_column(f"'{name}'"), as_text) == literal_column("0")
