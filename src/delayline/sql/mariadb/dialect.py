"""MariaDB 10.6 and newer, and MySQL 8, through PyMySQL."""

from __future__ import annotations

import contextlib
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

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    DelaylineError,
    InvalidMessage,
    MissingExtra,
    StorageFull,
    TransactionConflict,
)
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql import journal_triggers
from delayline.sql.dialect import BulkStatements, ColumnValues, StatementWords, TableIdentity, waiting_briefly
from delayline.sql.due_forecast import explanation
from delayline.sql.notifications import LocalNotifications
from delayline.sql.prepared import LONGEST_LIST, Prepared
from delayline.sql.schema import TO_PUT, must_fit
from delayline.sql.server import LockedForwarding, ServerDialect, SessionClaims, cause_of, run, watch_of
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Delete, Dialect, FromClause, Insert, Select, Table, Update
    from sqlalchemy.sql.dml import _DMLTableElement

    from delayline.sql.dialect import Finding, ServerSessions, Stage
    from delayline.sql.schema import QueueTables


#: The connection is of no use any more: the server shuts down, has killed it, or is not there.
DISCONNECTS: Final = {0, 1053, 1152, 1153, 1158, 1159, 1160, 1161, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031}
#: The transaction gave way to another. 1020: that one has changed a row since this one's snapshot
#: (innodb_snapshot_isolation, which is on since MariaDB 11.6.2).
GAVE_WAY: Final = {1020, 1213, 1614}
#: These errors end the whole transaction, 1206 for want of room for its locks; others undo their statement only.
ROLLED_BACK: Final = GAVE_WAY | {1206}
#: The server, or the session, takes no writes: a primary that has become a replica.
NO_WRITES: Final = (1290, 1792, 1836)
#: A node of a cluster that is not a part of it now; others may be reached by a new connection.
APART: Final = (1047, 3100)
DENIED: Final = frozenset({1142, 1143})
LOCK_WAIT_TIMEOUT: Final = 1205
NO_SPACE: Final = ("errno: 28", "error 28 ", "Errcode: 28", "No space left")

UNUSABLE, UNAVAILABLE = BackendUnusable, BackendUnavailable
CREDENTIALS: Final = "{place} refuses this user: {cause}. Check the user and the password"
RIGHTS: Final = "{place} does not allow this user that: {cause}. Run as an administrator: GRANT {missing}"
#: A refusal names the missing commands, unless the user has no right at all on the database.
REFUSED: Final = re.compile(r"(.+?) command denied to user .*? for (?:table|column) (.+)")
EVERY_RIGHT: Final = "SELECT, INSERT, UPDATE, DELETE on its tables, and CREATE, ALTER and INDEX for `delayline setup`"
SHAPE: Final = "{place} has a table of another shape: {cause}. Name another table_name"
LOST: Final = "the connection to {place} is lost: {cause}"
NAME: Final = "{place} cannot have a table of that name: {cause}. Choose another endpoint name or table_name"
TLS: Final = "{place} and this machine agree on no encryption: {cause}. Check the ssl_ options in the URL"
TEXT: Final = "{place} cannot keep this text: {cause}"
FULL: Final = "{place} has no space left: {cause}"
SHORT: Final = "{place} is short of resources: {cause}. Raise its limits, or connect less often"
READ_ONLY: Final = "{place} is read-only, a replica perhaps: {cause}. Name the primary in the URL"
STATEMENT_LOG: Final = (
    "{place} writes statements to its binary log, which it refuses to do for transactions that read what is committed: "
    "{cause}. Set binlog_format to MIXED or ROW"
)
REFUSES: Final = "{place} does not do that now: {cause}"
NOT_REACHED: Final = "cannot reach {place}: {cause}. Check that the server runs and answers there"

TRANSLATIONS: Final[dict[tuple[int, ...], tuple[type[Exception], str]]] = {
    (1045, 1130, 1251, 1698, 1820, 1862, 2059): (UNUSABLE, CREDENTIALS),
    (1044, 1142, 1143, 1227, 1370): (UNUSABLE, RIGHTS),
    (1049,): (UNUSABLE, "{place} does not exist: {cause}. Create it: CREATE DATABASE, or name another in the URL"),
    (1146, 1932): (UNUSABLE, "{place} is not set up for this endpoint: {cause}. Run `delayline setup`"),
    (1054, 1136, 1364): (UNUSABLE, SHAPE),
    (1059, 1102, 1103, 1300): (ConfigurationError, NAME),
    (2026, 3159, 4052): (UNUSABLE, TLS),
    (1153, 1301): (InvalidMessage, "{place} cannot take something that large: {cause}. Raise max_allowed_packet"),
    (1264, 1292, 1366, 1406): (InvalidMessage, TEXT),
    (1021, 1114): (StorageFull, FULL),
    (1037, 1038, 1040, 1041, 1129, 1135, 1203, 1206, 1226): (UNAVAILABLE, SHORT),
    (1684,): (UNAVAILABLE, "another process is setting up {place}: {cause}"),
    (1205, 3572): (UNAVAILABLE, "{place} did not get a lock in time: {cause}"),
    (1020, 1213, 1614): (TransactionConflict, "{place} gave this transaction up in favour of another: {cause}"),
    (1305, 1613): (UNAVAILABLE, "{place} has ended this transaction: {cause}"),
    NO_WRITES: (UNAVAILABLE, READ_ONLY),
    APART: (UNAVAILABLE, "{place} is a node that is not a part of its cluster now: {cause}"),
    (1197, 1467, 1594, 1595, 1596, 1598, 1637, 1785): (UNAVAILABLE, "{place} cannot write that now: {cause}"),
    (1665,): (UNUSABLE, STATEMENT_LOG),
    (1317, 1969, 3024): (UNAVAILABLE, "{place} has ended the statement: {cause}"),
    (1053, 1927, 2006, 2013, 2014, 2055, 4031, 0): (UNAVAILABLE, LOST),
    (1152, 1158, 1159, 1160, 1161): (UNAVAILABLE, LOST),
    (1005, 1026, 1030, 1180, 1181): (UNAVAILABLE, "{place} cannot read or write its files: {cause}. Check its disk"),
}
BY_NUMBER: Final = {number: meaning for numbers, meaning in TRANSLATIONS.items() for number in numbers}


#: Classes of errors that no message causes by its contents ...
OF_SERVERS: Final = frozenset({"OperationalError", "InternalError", "NotSupportedError", "InterfaceError"})
#: ... but for these: a trigger's refusal, a constraint's, and those of values that do not fit.
OF_ROWS: Final = frozenset({1048, 1062, 1169, 1216, 1217, 1364, 1365, 1451, 1452, 1557, 1586, 1644, 1690, 3819, 4025})


def number_of(error: BaseException) -> int | None:
    """Return the server's or the driver's number of an error, None for one that has none."""
    arguments = cause_of(error).args
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def is_disconnect(error: Exception) -> bool:
    """Return whether the connection is unusable."""
    return number_of(error) in DISCONNECTS


def translated(error: Exception, place: str) -> Exception:
    """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
    cause, number = _text(error), number_of(error)
    if isinstance(error, UnicodeEncodeError):
        return InvalidMessage(
            TEXT.format(place=place, cause=f"{error.reason}: {error.object[error.start : error.end]!r}")
        )
    if number in {2002, 2003}:
        if "SSL" in cause or "certificate" in cause:
            return BackendUnusable(TLS.format(place=place, cause=cause))
        return BackendUnavailable(NOT_REACHED.format(place=place, cause=cause))
    if any(sign in cause for sign in NO_SPACE):
        return StorageFull(FULL.format(place=place, cause=cause))
    if number in BY_NUMBER:
        kind, text = BY_NUMBER[number]
        return kind(text.format(place=place, cause=cause, missing=_missing(cause)))
    kinds = {kind.__name__ for kind in type(cause_of(error)).__mro__}
    if number not in OF_ROWS and kinds & OF_SERVERS:
        return BackendUnavailable(REFUSES.format(place=place, cause=cause))
    if number is not None and "ProgrammingError" in kinds:
        return BackendUnusable(REFUSES.format(place=place, cause=cause))
    return error


def _missing(cause: str) -> str:
    """Return the missing rights that a refusal names, and their table."""
    refused = REFUSED.match(cause)
    return EVERY_RIGHT if refused is None else f"{refused[1]} ON {refused[2]}"


def _text(error: BaseException) -> str:
    """Return the server's text without the error numbers around it."""
    arguments = cause_of(error).args
    return str(arguments[1] if len(arguments) > 1 else arguments[0] if arguments else error).strip().rstrip(".")


LONGEST_NAME: Final = 64  # characters
LONGEST_FILE_NAME: Final = 250  # bytes; a table is a file, in whose name every special character takes five
HEADROOM: Final = 64 * 1024  # bytes of a statement beside body and headers, and for the headers of a failure
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
TABLE_EXISTS: Final = "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
SETUP_LOCK: Final = "delayline setup"

#: Statements that need one right only, and affect no row.
EXPLAINED: Final = {
    "SELECT": "SELECT 1 FROM {table} WHERE FALSE",
    "INSERT": "INSERT INTO {table} VALUES ()",
    "UPDATE": "UPDATE {table} SET {one} = 1 WHERE FALSE",
    "DELETE": "DELETE FROM {table} WHERE FALSE",
}


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
        largest = _largest(self._dialect.room)
        for row in rows:
            size = sum(len(value) for value in row if isinstance(value, bytes))
            if size > largest:
                raise InvalidMessage(
                    f"a message of {size} bytes is too large for {self._dialect}, which takes {largest}: "
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
    journal = journal_triggers.MYSQL
    rights_to_store = (*TO_PUT, "UPDATE")  # its insert of a row that may be there already is an update
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

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, and UnicodeEncodeError, which it does not wrap."""
        return (*super().errors, UnicodeEncodeError)

    def kept_name(self, table: str) -> str:
        """Return the name, with characters that names cannot have replaced by a hash of the whole."""
        must_fit(table, len(table), LONGEST_NAME, "characters", self)
        kept = re.sub(r"[^\x01-\uffff]|[\ud800-\udfff]", "_", table)
        if kept != table:
            kept = (
                f"{kept[: LONGEST_NAME - 9]}~{hashlib.sha256(table.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
            )
        bytes_of_file = sum(1 if one.isascii() and (one.isalnum() or one == "_") else 5 for one in kept)
        must_fit(table, bytes_of_file, LONGEST_FILE_NAME, "bytes of a file's name", self)
        return kept

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

    @contextlib.contextmanager
    def setting_up(self, connection: Connection) -> Iterator[None]:
        """Let one process at a time create tables."""
        patience = int(self.setup_patience)
        if not run(connection, "SELECT GET_LOCK(%s, %s)", SETUP_LOCK, patience)[0][0]:
            raise BackendUnavailable(f"another process has been setting up {self} for {patience} s: try again")
        try:
            yield
        finally:
            if not self.is_broken(connection):  # with which the lock ends
                run(connection, "SELECT RELEASE_LOCK(%s)", SETUP_LOCK)

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables.

        An EXPLAIN of a statement checks the same rights as running it, those of roles included. A table that another
        session has locked is left out, as EXPLAIN would wait for that session.
        """
        with waiting_briefly(self, connection):
            return self._missing_rights(connection, needed)

    def _missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        grants, user = [], ""
        for table, needs in needed.items():
            name = self.sql.identifier_preparer.format_table(table)
            column = self.sql.identifier_preparer.quote(next(iter(table.columns)).name)
            lacking = []
            for need in needs:
                refusal = self._refusal(connection, EXPLAINED[need].format(table=name, one=column))
                if refusal == LOCK_WAIT_TIMEOUT:
                    break
                if refusal in DENIED:
                    lacking.append(need)
            if lacking:
                user = user or _quoted_user(run(connection, "SELECT CURRENT_USER()")[0][0])
                place = name if table.schema else f"`{str(self.url.database).replace('`', '``')}`.{name}"
                grants.append(f"GRANT {', '.join(lacking)} ON {place.replace('%%', '%')} TO {user};")
        return grants

    def _refusal(self, connection: Connection, statement: str) -> int | None:
        try:
            run(connection, f"EXPLAIN {statement}")
        except self.errors as error:
            if self.is_disconnect(error):
                raise
            return number_of(error)
        return None

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the version, how durable a commit is, how large a message may be, and how far our clock is off."""
        version, flush, packet, now = run(
            connection,
            "SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@max_allowed_packet, UTC_TIMESTAMP(6)",
        )[0]
        off = (datetime.now(UTC) - self.values.from_due(now)).total_seconds()
        return [
            ("server", True, f"{self.product} {version}"),
            ("innodb_flush_log_at_trx_commit", flush == 1, f"{flush}" + ("" if flush == 1 else ": set it to 1")),
            ("max_allowed_packet", True, f"{packet} bytes: a message may have {_largest(packet)}"),
            ("clock", abs(off) < 1, f"this machine is {off:+.3f} s off; the server's clock decides"),
        ]

    def place(self, connection: Connection, table: Table) -> TableIdentity:
        """Return the server, and the table in the database that it or the connection names."""
        [(database, *server)] = run(connection, "SELECT DATABASE(), @@hostname, @@port, @@datadir")
        inside = table.schema or database
        found = run(connection, TABLE_EXISTS, inside, table.name)
        return TableIdentity(f"{self.product} database {inside}", (*server, inside), table.name if found else None)

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


def _quoted_user(user: str) -> str:
    """Return the account, `name@host` as the server writes it, as GRANT takes it."""
    name, _, host = user.rpartition("@")
    return "@".join("'" + part.replace("\\", "\\\\").replace("'", "''") + "'" for part in (name, host))


def _largest(packet: int) -> int:
    """Return how many bytes of body and headers fit into a statement, where each is written as two digits."""
    return packet // 2 - min(HEADROOM, packet // 8)


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
