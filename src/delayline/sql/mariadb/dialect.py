"""MariaDB 10.6 and newer, and MySQL 8, through PyMySQL."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BinaryExpression, Table, UniqueConstraint, cast, collate, event, func, literal_column
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.dialects.mysql.base import MySQLCompiler
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.sql.operators import in_op
from sqlalchemy.sql.visitors import iterate

from delayline.errors import BackendUnusable, ConfigurationError, DelaylineError, InvalidMessage, MissingExtra
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.dialect import BulkStatements, Catalog, ColumnValues, StatementWords
from delayline.sql.due_forecast import explanation
from delayline.sql.mariadb.catalog import HEADROOM, MariadbCatalog, largest
from delayline.sql.mariadb.errors import (
    APART,
    GAVE_WAY,
    NO_WRITES,
    ROLLED_BACK,
    STATEMENT_LOG,
    is_disconnect,
    number_of,
    translated,
)
from delayline.sql.notifications import LocalNotifications
from delayline.sql.prepared import LONGEST_LIST, Prepared
from delayline.sql.server import LockedForwarding, ServerDialect, SessionClaims, run, watch_of
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Delete, Dialect, FromClause, Insert, Select, Table, Update
    from sqlalchemy.sql.dml import _DMLTableElement

    from delayline.sql.dialect import ServerSessions, Stage
    from delayline.sql.schema import QueueTables


LONGEST_BATCH: Final = 1_000_000  # bytes of a statement that inserts several rows
OPTIONS: Final = (
    "connect_timeout", "read_timeout", "write_timeout", "unix_socket", "ssl_ca", "ssl_cert", "ssl_key",
    "ssl_check_hostname",
)  # fmt: skip
CONNECT_ARGS: Final = {
    "charset": "utf8mb4",
    "sql_mode": "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION",
    "init_command": "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "program_name": "delayline",
}
SESSION: Final = (
    "SET SESSION time_zone = '+00:00', default_storage_engine = 'InnoDB', wait_timeout = 2147483, "
    "innodb_lock_wait_timeout = {patience}, lock_wait_timeout = {patience}, "
    "sql_safe_updates = 0, sql_big_selects = 1, sql_select_limit = DEFAULT"
)
#: Both are there in each version, or none.
BINARY_LOG: Final = "SHOW VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_format')"

#: What a doubled estimate is multiplied with at least, as the number of a table's rows is an estimate too.
ABOUT_HALF: Final = 0.45
#: About how many rows a table has.
ROWS: Final = (
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

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return the optimizer's estimates, from some pages of the index of due times."""
        explain = explanation(table, self._dialect.sql, len(edges), "EXPLAIN ")
        cursor = explain.run(connection, *edges)
        column = [str(name).lower() for name, *_ in cursor.description or ()].index("rows")
        rows = [row for row in cursor.fetchall() if row[0] is not None]  # the union itself has no number
        cursor.close()
        estimates = [float(row[column] or 0) for row in rows]
        [(total,)] = run(connection, ROWS, table.schema, table.name)
        return _adding_up(estimates, total or 0)

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert many rows in a statement. Raises InvalidMessage for one that the server would not take."""
        most = largest(self._dialect.room)
        for row in rows:
            size = sum(len(value) for value in row if isinstance(value, bytes))
            if size > most:
                raise InvalidMessage(
                    f"a message of {size} bytes is too large for {self._dialect}, which takes {most}: "
                    f"send less, or raise the server's max_allowed_packet above {2 * (size + HEADROOM)}"
                )
        cursor: Any = connection.connection.cursor()
        # SQLAlchemy's cursor of a driver for asyncio has the driver's inside
        getattr(cursor, "_cursor", cursor).max_stmt_length = min(LONGEST_BATCH, self._dialect.room)
        cursor.executemany(insert.sql, rows)
        cursor.close()


class Mariadb(ServerDialect):
    """MariaDB as a dialect."""

    product = "MariaDB"
    driver = "mariadb+pymysql"
    extra = "mariadb"
    default_port = 3306
    oldest: ClassVar[tuple[int, ...]] = (10, 6)
    exact_collation: ClassVar[str] = "utf8mb4_nopad_bin"
    values: ColumnValues = MariadbValues()
    timeouts = TIMEOUTS

    def __init__(self, url: URL) -> None:
        unknown = sorted(set(url.query) - set(OPTIONS))
        if unknown:
            raise ConfigurationError(
                f"a {url.get_backend_name()}:// URL has no option {unknown[0]!r}. The options are {', '.join(OPTIONS)}"
            )
        arguments: dict[str, object] = dict(CONNECT_ARGS)
        if url.password is not None:
            arguments["password"] = url.password.encode()  # PyMySQL would make Latin-1 of it
        super().__init__(url, connect_args=arguments, paramstyle="format")
        self.engine.dialect.statement_compiler = IndexedSql
        event.listen(self.engine, "do_connect", _connected)
        self.room = 0
        """Bytes that a statement may have; unknown before `check`."""
        self.words: StatementWords = MariadbWords(self.sql, self.exact_collation)
        self.bulk: BulkStatements = MariadbBulk(self)
        self.catalog: Catalog = MariadbCatalog(self)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, and UnicodeEncodeError, which it does not wrap."""
        return (*super().errors, UnicodeEncodeError)

    def connect(self) -> Connection:
        """Return a new connection: autocommit, UTC, strict mode, READ COMMITTED."""
        try:
            connection = self.engine.connect()
        except DelaylineError:  # from the user's function
            raise
        except InvalidRequestError as error:  # SQLAlchemy has asked for the version
            raise BackendUnusable(f"{self} is MySQL: write mysql:// in its URL") from error
        except RuntimeError as error:
            raise MissingExtra("mysql", f"the way in which {self} checks passwords") from error
        except OSError as error:
            raise BackendUnusable(
                f"a certificate in the URL of {self} cannot be read: {error}. Check ssl_ca"
            ) from error
        run(connection, SESSION.format(patience=self._lock_patience))
        connection.info[WAS_READ_ONLY] = not self.takes_writes(connection)
        driver: Any = connection.connection.driver_connection
        if "read_timeout" not in self.url.query:
            driver._read_timeout = None  # the watch limits each wait, and long work's differently
        if "write_timeout" not in self.url.query:
            driver._write_timeout = None
        watch_of(connection).end()
        return connection

    @property
    def _lock_patience(self) -> int:
        return max(1, int(self.lock_timeout))

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Limit connecting, in which the driver's socket cannot be watched yet."""
        arguments.setdefault("connect_timeout", max(1, round(self.connect_timeout)))
        arguments.setdefault("read_timeout", max(1, round(self.connect_timeout)))
        arguments.setdefault("write_timeout", max(1, round(self.connect_timeout)))

    def adopt(self, driver: Any) -> object:  # noqa: ANN401 - PyMySQL is an extra
        """Return the connection in strict mode, at READ COMMITTED; `connect` does the rest."""
        from pymysql.connections import Connection as Driver

        if not isinstance(driver, Driver):
            raise self.not_a_connection(driver, "pymysql.connections.Connection objects, as of +pymysql:// Engines")
        driver.rollback()
        driver.set_character_set(CONNECT_ARGS["charset"])
        with driver.cursor() as cursor:
            cursor.execute("SET SESSION sql_mode = %s", (CONNECT_ARGS["sql_mode"],))
            cursor.execute(CONNECT_ARGS["init_command"])
        return driver

    def descriptor(self, driver: Any) -> int | None:  # noqa: ANN401 - PyMySQL is an extra
        """Return PyMySQL's socket."""
        return int(driver._sock.fileno())

    def is_broken(self, connection: Connection) -> bool:
        """Return whether PyMySQL has given the connection up."""
        if super().is_broken(connection):
            return True
        driver: Any = connection.connection.driver_connection
        return not driver.open

    def check(self) -> None:
        """Connect once. Raises BackendUnusable for another product, or a version that is too old."""
        with self.connect() as connection:
            watch_of(connection).begin(self.server_timeout)
            text, packet = run(connection, "SELECT VERSION(), @@max_allowed_packet")[0]
            log = dict(run(connection, BINARY_LOG))
        if ("mariadb" in text.lower()) != (self.product == "MariaDB"):
            raise BackendUnusable(f"{self} is version {text}, which is MariaDB: write mariadb:// in its URL")
        version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
        if version < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            raise BackendUnusable(f"{self} is version {text}; delayline needs {oldest} or newer")
        if log == {"log_bin": "ON", "binlog_format": "STATEMENT"}:
            raise BackendUnusable(STATEMENT_LOG.format(place=self, cause="binlog_format=STATEMENT"))
        self.room = int(packet)

    @property
    def decides(self) -> Mariadb:
        """Rows that innodb_lock_wait_timeout waits for no longer than it has to."""
        return self

    def wait_briefly(self, connection: Connection) -> None:
        """Wait a second for others' locks, of rows and of tables: there is nothing shorter."""
        run(connection, "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1")

    def wait_as_usual(self, connection: Connection) -> None:
        """Wait as every session of ours does."""
        patience = self._lock_patience
        run(connection, f"SET SESSION innodb_lock_wait_timeout = {patience}, lock_wait_timeout = {patience}")

    def notifications(self, database: ServerSessions) -> LocalNotifications:
        """Notifications in this process only: the server has none."""
        del database
        return LocalNotifications()

    def claims(self, database: ServerSessions, table: str) -> NamedLocks:
        """Named locks, which all databases of a server share."""
        return NamedLocks(database, table if "." in table else f"{self.url.database}.{table}")

    def forwarding(self, table: Table, tables: QueueTables) -> LockedForwarding:
        """Three statements."""
        return LockedForwarding(table, tables, self)

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the server has gone, or this connection to it."""
        return is_disconnect(error)

    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether the server is read-only, or not a part of its cluster."""
        return number_of(error) in (*NO_WRITES, *APART)

    def ping(self, connection: Connection) -> bool:
        """Ask whether the server has become read-only: administrators may write to one that is."""
        return connection.info.get(WAS_READ_ONLY, False) or self.takes_writes(connection)

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the server is not read-only."""
        [values] = run(connection, "SELECT @@GLOBAL.read_only, @@GLOBAL.innodb_read_only")
        return all(str(value) in {"0", "OFF"} for value in values)  # MariaDB 12 has words for the first one

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction gave way to another."""
        return number_of(error) in GAVE_WAY

    def has_rolled_back(self, error: Exception) -> bool:
        """Return whether the whole transaction is rolled back, after a deadlock for instance."""
        return number_of(error) in ROLLED_BACK

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        return translated(error, str(self))


class Mysql(Mariadb):
    """MySQL as a dialect."""

    product = "MySQL"
    driver = "mysql+pymysql"
    extra = "mysql"
    oldest = (8, 0, 17)  # the first with a collation for names that are equal only when they are the same
    exact_collation = "utf8mb4_0900_bin"
    timeouts = replace(TIMEOUTS, headers=mysql.JSON())


def _connected(dialect: object, record: object, arguments: Sequence[Any], options: Mapping[str, Any]) -> object:
    """Return a connection of the driver's, for SQLAlchemy."""
    from delayline.sql.mariadb.tls import SharingConnection

    del dialect, record
    return SharingConnection(*arguments, **options)


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
        among = sum(estimates[one] for one in doubled)
        if among and (factor := 1 - excess / among) >= ABOUT_HALF:
            return [about * factor if one in doubled else about for one, about in enumerate(estimates)]
    return estimates


# Claims on queue rows in MariaDB and MySQL: named locks of a session.

NAMED_LOCK: Final = "GET_LOCK(%s, 0)"
NAMED_UNLOCK: Final = "RELEASE_LOCK(%s)"


class NamedLocks(SessionClaims):
    """This process's claims on the rows of one table. The names of locks are shared by all databases of the server."""

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
        """Force an index in SELECT ... FOR UPDATE."""
        if select_stmt._for_update_arg is not None:
            for table in select_stmt.get_final_froms():
                hint = self._by_index(table).strip().replace("%", "%%")  # hints are templates
                select_stmt = select_stmt.with_hint(table, hint)
        text: str = super().visit_select(select_stmt, *arguments, **options)  # type: ignore[no-untyped-call]
        return text

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
        table, where = delete_stmt.table, delete_stmt.whereclause
        if not (isinstance(table, Table) and isinstance(where, BinaryExpression) and where.operator is in_op):
            text: str = super().visit_delete(delete_stmt, *arguments, **options)  # type: ignore[no-untyped-call]
            return text
        name, column = self.preparer.format_table(table), where.left
        kind = self.dialect.type_compiler_instance.process(column.type)
        listed = f"JSON_TABLE(JSON_ARRAY{self.process(where.right)}, '$[*]' COLUMNS (one {kind} PATH '$')) AS listed"
        joined = f"{name}{self._by_index(table)} ON {self.process(column)} = listed.one"
        return f"DELETE {name} FROM {listed} STRAIGHT_JOIN {joined}"

    def delete_table_clause(
        self, delete_stmt: Delete, from_table: _DMLTableElement, extra_froms: list[FromClause], **options: object
    ) -> str:
        """Force an index in DELETE, whose form for several tables allows it, unless rows go by their number.

        The optimizer takes the primary key for the table itself: forced to use it, it reads all of it.
        """
        name = super().delete_table_clause(delete_stmt, from_table, extra_froms, **options)
        key = list(from_table.primary_key) if isinstance(from_table, Table) else []
        if delete_stmt.whereclause is None or any(one in key for one in iterate(delete_stmt.whereclause)):
            return name
        return f"{name} USING {name}{self._by_index(from_table)}"

    def _by_index(self, table: object) -> str:
        if not isinstance(table, Table):
            return ""
        unique = [next(iter(one.columns)).name for one in table.constraints if isinstance(one, UniqueConstraint)]
        names = ["PRIMARY", *sorted(unique), *sorted(str(index.name) for index in table.indexes)]
        return f" FORCE INDEX ({', '.join(map(self.preparer.quote, names))})"


WAS_READ_ONLY: Final = "delayline read-only"  # the key in SQLAlchemy's `Connection.info`
