"""MariaDB 10.6 and newer, and MySQL 8, through PyMySQL."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BinaryExpression, Column, Table, UniqueConstraint, cast, collate, func, literal_column
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.dialects.mysql.base import MySQLCompiler
from sqlalchemy.sql.operators import in_op
from sqlalchemy.sql.visitors import iterate

from delayline.errors import InvalidMessage
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.dialect import (
    BulkStatements,
    ColumnValues,
    StatementWords,
    before_key_by_columns,
    from_key_by_columns,
)
from delayline.sql.due_forecast import explanation
from delayline.sql.locked_moves import LockedForwarding
from delayline.sql.mariadb.catalog import HEADROOM, MariadbCatalog, largest
from delayline.sql.mariadb.connections import MariadbConnections, MysqlConnections
from delayline.sql.mariadb.two_phase import MariadbTwoPhase
from delayline.sql.notifications import LocalNotifications
from delayline.sql.prepared import LONGEST_LIST, Prepared
from delayline.sql.server import Server, ServerTransactions, run
from delayline.sql.session_claims import SessionClaims
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Delete, Dialect, FromClause, Insert, Select, Update
    from sqlalchemy.sql.dml import _DMLTableElement

    from delayline.sql.mariadb.errors import MariadbErrors
    from delayline.sql.schema import QueueTables
    from delayline.sql.server import ServerSessions
    from delayline.sql.staging import Stage
    from delayline.sql.statements import StoreStatements


LONGEST_BATCH: Final = 1_000_000  # bytes of a statement that inserts several rows

#: What a doubled estimate is multiplied with at least, as the number of a table's rows is an estimate too.
ABOUT_HALF: Final = 0.45
#: About how many rows a table has.
ROWS_ESTIMATE: Final = (
    "SELECT table_rows FROM information_schema.tables WHERE table_schema = COALESCE(%s, DATABASE()) AND table_name = %s"
)


class MariadbJson(mysql.LONGTEXT):
    """JSON on MariaDB, where it is an alias of LONGTEXT."""

    __visit_name__ = "JSON"


def _whole_seconds(due: datetime) -> datetime:
    """Return the time without its zone, rounded up to a second."""
    down = due.replace(microsecond=0, tzinfo=None)
    return down + timedelta(seconds=1) if due.microsecond else down


#: The columns that NServiceBus' script for MySQL creates.
TIMEOUTS: Final = TimeoutShape(
    mysql.VARCHAR(38),
    mysql.NVARCHAR(MAXIMUM_DESTINATION_LENGTH),
    mysql.DATETIME(),
    MariadbJson(),
    round_time=_whole_seconds,
    time_lost=timedelta(seconds=1),  # MariaDB cuts the fraction off, MySQL rounds it
    json_headers=True,
)


class MariadbValues(ColumnValues):
    """DATETIME(6) keeps microseconds, in UTC."""

    def containing(self, column: ColumnElement[bytes], part: ColumnElement[bytes]) -> ColumnElement[bool]:
        """Return the condition that a column of bytes has the part."""
        return func.locate(part, column) > 0

    def to_due(self, due: datetime) -> datetime:
        """Return the instant in UTC without its zone: DATETIME(6) keeps microseconds."""
        return due.astimezone(UTC).replace(tzinfo=None)

    def from_due(self, kept: datetime) -> datetime:
        """Return the due time in UTC."""
        return kept.replace(tzinfo=UTC)

    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the column as microseconds since 1970."""
        return func.timestampdiff(literal_column("MICROSECOND"), literal_column("'1970-01-01'"), due)

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the server's time so many seconds from now."""
        return literal_column(f"(UTC_TIMESTAMP(6) + INTERVAL {seconds} SECOND)")


class MariadbWords(StatementWords):
    """Indexes are forced, and NServiceBus' columns have a collation of their own."""

    forces_indexes = True
    fails_for_duplicates = True

    def __init__(self, sql: Dialect, collation: str) -> None:
        self._sql = sql
        self._collation = collation

    def exact(self, column: ColumnElement[str]) -> ColumnElement[str]:
        """Return the column under the collation of delayline's own names, which NServiceBus' table does not have."""
        if getattr(column.type.dialect_impl(self._sql), "collation", None) == self._collation:
            return column
        return collate(cast(column, mysql.CHAR(charset="utf8mb4")), self._collation)

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is; INSERT IGNORE would hide other errors too."""
        return insert(table).on_duplicate_key_update({key: table.c[key]})

    def insert_counted(self, table: Table, key: str) -> Insert:
        """Return an insert that fails for a row that is there: most drivers count rows that were left as changed."""
        del key
        return insert(table)


class MariadbBulk(BulkStatements):
    """Many rows in a statement; the optimizer's estimates."""

    def __init__(self, dialect: Mariadb) -> None:
        self._dialect = dialect

    def delete_copied(self, connection: Connection, table: Table, copy: Table, key: str) -> int:
        """Delete the rows by a join that forces no index, which is slower here; return their number."""
        quoted = self._dialect.sql.identifier_preparer
        old, new, name = quoted.format_table(table), quoted.format_table(copy), quoted.quote(key)
        return connection.exec_driver_sql(f"DELETE {old} FROM {old} JOIN {new} ON {old}.{name} = {new}.{name}").rowcount

    def stage(self, store: Table, name: str) -> Stage:
        """Return a staging table."""
        need_arrow()
        from delayline.sql.mariadb.staging import MariadbStage

        return MariadbStage(self._dialect, store, name)

    def from_key(self, columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
        """Return the condition column by column."""
        return from_key_by_columns(columns, key)

    def before_key(self, columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
        """Return the condition column by column."""
        return before_key_by_columns(columns, key)

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return the optimizer's estimates, from some pages of the index of due times."""
        explain = explanation(table, self._dialect.sql, len(edges), "EXPLAIN ")
        cursor = explain.run(connection, *edges)
        column = [str(name).lower() for name, *_ in cursor.description or ()].index("rows")
        rows = [row for row in cursor.fetchall() if row[0] is not None]  # the union itself has no number
        cursor.close()
        estimates = [float(row[column] or 0) for row in rows]
        [(total,)] = run(connection, ROWS_ESTIMATE, table.schema, table.name)
        return _adding_up(estimates, total or 0)

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert many rows in a statement. Raises InvalidMessage for a message that the server would not take."""
        most = largest(self._dialect.connections.room)
        for row in rows:
            size = sum(len(value) for value in row if isinstance(value, bytes))
            if size > most:
                raise InvalidMessage(
                    f"a message of {size} bytes is too large for {self._dialect}, which takes {most}: "
                    f"send less, or raise the server's max_allowed_packet above {2 * (size + HEADROOM)}"
                )
        cursor: Any = connection.connection.cursor()
        # SQLAlchemy's cursor of a driver for asyncio has the driver's inside
        getattr(cursor, "_cursor", cursor).max_stmt_length = min(LONGEST_BATCH, self._dialect.connections.room)
        cursor.executemany(insert.sql, rows)
        cursor.close()


class MariadbTransactions(ServerTransactions):
    """Transactions that can wait for others' locks no longer than a second, and can be prepared."""

    decides: MariadbTransactions
    two_phase: MariadbTwoPhase

    def __init__(self, connections: MariadbConnections) -> None:
        super().__init__(connections.errors)
        self._connections = connections
        self.decides, self.two_phase = self, MariadbTwoPhase(connections)

    def wait_briefly(self, connection: Connection) -> None:
        """Wait a second for others' locks, of rows and of tables: there is nothing shorter."""
        run(connection, "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1")

    def wait_as_usual(self, connection: Connection) -> None:
        """Wait as every session of ours does."""
        patience = self._connections.lock_patience
        run(connection, f"SET SESSION innodb_lock_wait_timeout = {patience}, lock_wait_timeout = {patience}")


class Mariadb(Server):
    """A MariaDB database."""

    exact_collation: ClassVar[str] = "utf8mb4_nopad_bin"
    connections_of: ClassVar[type[MariadbConnections]] = MariadbConnections
    connections: MariadbConnections
    sql: Dialect
    values: MariadbValues = MariadbValues()
    words: MariadbWords
    bulk: MariadbBulk
    catalog: MariadbCatalog
    transactions: MariadbTransactions
    errors: MariadbErrors
    timeouts = TIMEOUTS

    def __init__(self, url: URL) -> None:
        self.connections = connections = self.connections_of(url)
        self.sql, self.errors = connections.engine.dialect, connections.errors
        self.sql.statement_compiler = IndexedSql
        self.words, self.bulk = MariadbWords(self.sql, self.exact_collation), MariadbBulk(self)
        self.catalog, self.transactions = MariadbCatalog(self), MariadbTransactions(connections)

    def notifications(self, database: ServerSessions) -> LocalNotifications:
        """Notifications in this process only: the server has none."""
        del database
        return LocalNotifications()

    def claims(self, database: ServerSessions, table: str) -> NamedLocks:
        """Named locks, which all databases of a server share."""
        return NamedLocks(database, table if "." in table else f"{self.connections.url.database}.{table}")

    def forwarding(self, statements: StoreStatements, tables: QueueTables) -> LockedForwarding:
        """Three statements."""
        return LockedForwarding(statements, tables, self)


class Mysql(Mariadb):
    """A MySQL database."""

    exact_collation = "utf8mb4_0900_bin"
    connections_of: ClassVar[type[MariadbConnections]] = MysqlConnections
    timeouts: TimeoutShape = replace(TIMEOUTS, headers=mysql.JSON())


def _adding_up(estimates: list[float], total: float) -> list[float]:
    """Return InnoDB's estimates of ranges that make up a table of so many rows, corrected where they do not.

    InnoDB doubles the estimate of a range of more than some ten pages; up to version 10.11 it then takes half of the
    table instead of more than that.
    """
    excess = sum(estimates) - total
    if excess < 0:
        estimates[estimates.index(max(estimates))] -= excess
        return estimates
    doubled: set[int] = set()
    for position in sorted(range(len(estimates)), key=estimates.__getitem__, reverse=True):
        doubled.add(position)
        among = sum(estimates[bucket] for bucket in doubled)
        if among and (factor := 1 - excess / among) >= ABOUT_HALF:
            return [about * factor if bucket in doubled else about for bucket, about in enumerate(estimates)]
    return estimates


# Claims on queue rows in MariaDB and MySQL: named locks of a session.

NAMED_LOCK: Final = "GET_LOCK(%s, 0)"
NAMED_UNLOCK: Final = "RELEASE_LOCK(%s)"


class NamedLocks(SessionClaims):
    """This process's claims on the rows of a table. The names of locks are shared by all databases of the server."""

    def __init__(self, database: ServerSessions, table: str) -> None:
        super().__init__(database)
        self._prefix = f"delayline {hashlib.sha256(table.encode()).hexdigest()[:24]} "  # 64 characters with the number

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows, some hundreds in a round trip."""
        return {row for row, locked in self._each(connection, NAMED_LOCK, rows) if locked}

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, some hundreds in a round trip."""
        self._each(connection, NAMED_UNLOCK, rows)

    def _each(self, connection: Connection, function: str, rows: Sequence[int]) -> list[tuple[int, int | None]]:
        answers: list[int | None] = []
        for first in range(0, len(rows), LONGEST_LIST):
            names = [f"{self._prefix}{row}" for row in rows[first : first + LONGEST_LIST]]
            answers += run(connection, f"SELECT {', '.join([function] * len(names))}", *names)[0]
        return list(zip(rows, answers, strict=True))


# SQL for MariaDB and MySQL that forces an index on locking reads.
#
# InnoDB locks every row that it scans. On a small table the optimizer prefers a full scan, which waits for rows
# locked by other transactions, or locks all rows where a few are wanted.


class IndexedSql(MySQLCompiler):
    """Forces an index wherever rows are locked."""

    def visit_select(self, select_stmt: Select[Any], *arguments: object, **options: object) -> str:
        """Force an index in SELECT ... FOR UPDATE that names none, and go through a list in the order it has."""
        locks = select_stmt._for_update_arg
        if locks is not None and not (
            locks.skip_locked or select_stmt._order_by_clauses or select_stmt._has_row_limiting_clause
        ):
            listed, columns = self._listed(select_stmt.whereclause), map(self.process, select_stmt.selected_columns)
            if listed and len(select_stmt.get_final_froms()) == 1:
                return f"SELECT {', '.join(columns)} FROM {listed} FOR UPDATE"  # noqa: S608 - our own
        if locks is not None and not select_stmt._hints:
            for table in select_stmt.get_final_froms():
                hint = self._by_index(table).strip().replace("%", "%%")  # hints are templates
                select_stmt = select_stmt.with_hint(table, hint)
        statement: str = super().visit_select(select_stmt, *arguments, **options)  # type: ignore[no-untyped-call]
        return statement

    def update_tables_clause(
        self, update_stmt: Update, from_table: _DMLTableElement, extra_froms: list[FromClause], **options: object
    ) -> str:
        """Force an index in UPDATE."""
        return super().update_tables_clause(update_stmt, from_table, extra_froms, **options) + self._by_index(
            from_table
        )

    def visit_delete(self, delete_stmt: Delete, *arguments: object, **options: object) -> str:
        """Go through a list in the order it has, and delete each row by its index.

        With as many ids in the list as there are rows left, the optimizer would read the table, whichever index is
        forced: pollers would wait for each other's rows, and deadlock.
        """
        if listed := self._listed(delete_stmt.whereclause):
            return f"DELETE {self.preparer.format_table(delete_stmt.table)} FROM {listed}"
        statement: str = super().visit_delete(delete_stmt, *arguments, **options)  # type: ignore[no-untyped-call]
        return statement

    def _listed(self, where: object) -> str:
        """Return a table's rows by the list of the condition, each found by its index; empty for another condition."""
        if not (isinstance(where, BinaryExpression) and where.operator is in_op and isinstance(where.left, Column)):
            return ""
        column, table = where.left, where.left.table
        kind = self.dialect.type_compiler_instance.process(column.type)
        listed = f"JSON_TABLE(JSON_ARRAY{self.process(where.right)}, '$[*]' COLUMNS (one {kind} PATH '$')) AS listed"
        name = self.preparer.format_table(table)
        return f"{listed} STRAIGHT_JOIN {name}{self._by_index(table)} ON {self.process(column)} = listed.one"

    def delete_table_clause(
        self, delete_stmt: Delete, from_table: _DMLTableElement, extra_froms: list[FromClause], **options: object
    ) -> str:
        """Force an index in DELETE, whose form for several tables allows it, unless rows go by their number.

        The optimizer takes the primary key for the table itself: forced to use it, it reads all of it.
        """
        name = super().delete_table_clause(delete_stmt, from_table, extra_froms, **options)
        key = list(from_table.primary_key) if isinstance(from_table, Table) else []
        if delete_stmt.whereclause is None or any(element in key for element in iterate(delete_stmt.whereclause)):
            return name
        return f"{name} USING {name}{self._by_index(from_table)}"

    def _by_index(self, table: object) -> str:
        if not isinstance(table, Table):
            return ""
        unique = [next(iter(key.columns)).name for key in table.constraints if isinstance(key, UniqueConstraint)]
        names = ["PRIMARY", *sorted(unique), *sorted(str(index.name) for index in table.indexes)]
        return f" FORCE INDEX ({', '.join(map(self.preparer.quote, names))})"
