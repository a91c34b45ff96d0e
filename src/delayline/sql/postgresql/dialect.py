"""PostgreSQL 13 and newer, through psycopg 3."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, String, Text, Uuid, cast, extract, literal_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import any_, bindparam

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    InvalidMessage,
    TransactionAborted,
)
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.dialect import BulkStatements, Catalog, ColumnValues, StatementWords, conflict_columns
from delayline.sql.due_forecast import explanation
from delayline.sql.postgresql import numbers
from delayline.sql.postgresql.catalog import USUAL, PostgresqlCatalog
from delayline.sql.postgresql.claims import AdvisoryLockClaims
from delayline.sql.postgresql.errors import (
    ABORTED,
    FULL,
    GIVEN_UP,
    READ_ONLY,
    REFUSES_OPTIONS,
    TRANSLATIONS,
    UNIQUE,
    UNSUPPORTED,
    UNUSABLE,
)
from delayline.sql.postgresql.moves import PostgresqlForwarding
from delayline.sql.postgresql.notifications import PostgresqlNotifications
from delayline.sql.postgresql.rights import DENIED, UNKNOWN, remedy
from delayline.sql.postgresql.timeouts import PostgresqlTimeouts
from delayline.sql.postgresql.two_phase import PostgresqlTwoPhase
from delayline.sql.prepared import Prepared
from delayline.sql.server import ServerDialect, cause_of, run, watch_of
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape
from delayline.sql.urls import Host, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Insert, Table

    from delayline.sql.dialect import ServerSessions, Stage
    from delayline.sql.postgresql.binary import LoopStatements
    from delayline.sql.schema import QueueTables

OLDEST: Final = 13
PART: Final = 250  # rows of a large insert that go to the server at once
#: Every statement has its index. Without statistics, as in a table that was filled a moment ago, the planner may read
#: and sort all that is due for each batch instead; and planning a small batch takes as long as moving it. A table
#: without an index then looks so dear that its statements would be compiled, for 25 ms each.
SETTINGS: Final = {
    "timezone": "UTC",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": USUAL,
    "quote_all_identifiers": "off",  # which changes the names of types that the server tells
    "datestyle": "ISO",
}
#: Claims last as long as their session, however long that is idle.
SINCE_14: Final = {"idle_session_timeout": "0"}
SET: Final = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)"
#: Is refused by poolers in transaction mode, whose other clients would get a session with these settings.
OPTIONS: Final = "-c jit=off"
#: Names of settings in the options of a URL.
NAMED: Final = re.compile(r"(?:-c\s*|--)([\w.-]+)=")
FOR_SCANS: Final = (
    "SET LOCAL enable_seqscan = on",
    "SET LOCAL enable_bitmapscan = on",
    "SET LOCAL plan_cache_mode = auto",
    "SET LOCAL jit = off",
    "SET LOCAL work_mem = '64MB'",  # a million rows are sorted in one pass then
)
PREPARE_THRESHOLD: Final = 2  # times that a statement runs before the server prepares it
#: A machine that is gone is noticed by the system, also where nothing is asked of it.
CONNECT_ARGS: Final = {
    "application_name": "delayline",
    "client_encoding": "UTF8",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "prepare_threshold": PREPARE_THRESHOLD,
}


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

    def from_due(self, kept: datetime) -> datetime:
        """Return the due time in UTC."""
        return kept.astimezone(UTC)

    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the column as microseconds since 1970: exact, as `extract` is numeric."""
        return cast(extract("epoch", due) * 1_000_000, BigInteger)

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the server's time so many seconds from now."""
        return literal_column(f"clock_timestamp() + interval '{seconds} seconds'")


class PostgresqlWords(StatementWords):
    """A list is an array, which is one parameter."""

    deletes_by_list = True
    returns_deleted = True

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition with an array: one statement, and one plan, for lists of any length."""
        return column == any_(bindparam(name, type_=postgresql.ARRAY(column.type)))

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is."""
        return insert(table).on_conflict_do_nothing(index_elements=conflict_columns(table, key))


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
        """Begin a transaction: cursors on the server and SET LOCAL need one."""
        self._dialect.begin(connection)

    def plan_for_scans(self, connection: Connection) -> None:
        """Undo the settings of connections, which are for small batches found by their index."""
        for setting in FOR_SCANS:
            run(connection, setting)

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return the planner's estimates, from the histogram of due times that ANALYZE keeps."""
        explain = explanation(table, self._dialect.sql, len(edges), "EXPLAIN (FORMAT JSON) ")
        self._dialect.begin(connection)
        try:
            run(connection, "SET LOCAL max_parallel_workers_per_gather = 0")  # which would hide and reorder the buckets
            found = explain.one(connection, *edges)
        finally:
            self._dialect.rollback(connection)
        [plan] = json.loads(found) if isinstance(found, str) else found
        return [float(bucket["Plan Rows"]) for bucket in plan["Plan"]["Plans"]]

    def stage(self, store: Table, name: str) -> Stage:
        """Return a staging table."""
        need_arrow()
        from delayline.sql.postgresql.staging import PostgresqlStage

        return PostgresqlStage(self._dialect, store, name)

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert every row; many of them in parts, so that the server inserts one while the next is written."""
        if len(rows) == 1:
            insert.change(connection, *rows[0])
            return
        driver = getattr(connection.connection, "driver_connection", None)  # of a caller's there are only cursors
        many = _from_arrays(insert.sql)
        with driver.pipeline() if driver and len(rows) > PART else contextlib.nullcontext():
            for first in range(0, len(rows), PART):
                run(connection, many, *map(list, zip(*rows[first : first + PART], strict=True)))

    def inserts_at_once(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Copy the rows, where their ids are new; or insert them, where one statement has room for all."""
        if self._copies.copied(_driver(connection), insert.sql, rows):
            return True
        if len(rows) <= PART:
            self.insert_rows(connection, insert, rows)
        return len(rows) <= PART


class Postgresql(ServerDialect):
    """PostgreSQL as a dialect."""

    product = "PostgreSQL"
    driver = "postgresql+psycopg"
    extra = "postgresql"
    default_port = 5432

    def __init__(self, url: URL) -> None:
        self.pgbouncer = _flag("pgbouncer", url.query.get("pgbouncer", "false"))
        url, arguments = url.difference_update_query(["pgbouncer"]), CONNECT_ARGS
        self._given: frozenset[str] = frozenset()
        if self.pgbouncer:
            arguments = {**CONNECT_ARGS, "prepare_threshold": None}
        else:
            theirs = url.query.get("options", ())
            options = theirs if isinstance(theirs, str) else " ".join(theirs)
            self._given = frozenset(name.lower().replace("-", "_") for name in NAMED.findall(options))
            url = url.set(query={**url.query, "options": f"{OPTIONS} {options}".strip()})
        super().__init__(url, connect_args=arguments, paramstyle="format", use_native_hstore=False)
        self.values: ColumnValues = PostgresqlValues()
        self.words: StatementWords = PostgresqlWords()
        self.bulk: BulkStatements = PostgresqlBulk(self)
        self.catalog: Catalog = PostgresqlCatalog(self)
        self.timeouts = replace(TIMEOUTS, forwarding=partial(PostgresqlTimeouts, sql=self.sql))
        one_writes = self.url.query.get("target_session_attrs") in ("read-write", "primary")
        self._any_order = one_writes and len(self.hosts) > 1 and "hostaddr" not in self.url.query
        self._reached: Host | None = None

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Limit connecting, for which several hosts share the time, and unacknowledged bytes.

        Where only one host takes writes, the one that did so last is tried first: each connection would wait for one in
        front of it whose machine is gone.
        """
        hosts = self.hosts
        arguments.setdefault("connect_timeout", max(1, round(self.connect_timeout / len(hosts))))
        if self._any_order and self._reached in hosts:
            arguments |= listed(sorted(hosts, key=lambda host: host != self._reached))
        arguments.setdefault("tcp_user_timeout", round(self.server_timeout * 1000))

    def adopt(self, driver: Any) -> object:  # noqa: ANN401 - psycopg is an extra
        """Return the connection in autocommit; `connect` does the rest."""
        from psycopg import Connection as Driver

        if not isinstance(driver, Driver):
            raise self.not_a_connection(driver, "psycopg.Connection objects, as of postgresql+psycopg:// Engines")
        driver.rollback()
        driver.autocommit = True
        driver.prepare_threshold = None if self.pgbouncer else PREPARE_THRESHOLD
        driver.execute("SET client_encoding TO UTF8")
        return driver

    def descriptor(self, driver: Any) -> int | None:  # noqa: ANN401 - psycopg is an extra
        """Return libpq's socket."""
        return int(driver.fileno())

    def is_broken(self, connection: Connection) -> bool:
        """Return whether libpq has found the connection's end, which in a pipeline the error does not show."""
        return super().is_broken(connection) or bool(_driver(connection).closed)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, and UnicodeEncodeError in lists, which it does not wrap."""
        return (*super().errors, UnicodeEncodeError)

    def connect(self) -> Connection:
        """Return a new connection in autocommit, with the settings that statements need."""
        from delayline.sql.postgresql.binary import use_binary

        connection = self.engine.connect()
        try:
            if self._any_order:
                info = _driver(connection).info
                self._reached = Host(info.host, info.port)
            use_binary(_driver(connection))
            if not self.pgbouncer:  # which gives the session to another client after each transaction
                self._set_up_session(connection)
        except BaseException:
            connection.close()
            raise
        watch_of(connection).end()
        return connection

    def _set_up_session(self, connection: Connection) -> None:
        """Make the settings, but for those that the URL has made."""
        settings = {"lock_timeout": str(max(1, round(self.lock_timeout * 1000))), **SETTINGS}
        if _driver(connection).info.server_version >= 14_00_00:
            settings |= SINCE_14
        ours = {name: value for name, value in settings.items() if name not in self._given}
        run(connection, SET, list(ours), list(ours.values()))

    def check(self) -> None:
        """Connect once. Raises BackendUnusable for a version that is too old."""
        with self.connect() as connection:
            watch_of(connection).begin(self.server_timeout)
            version = int(run(connection, "SHOW server_version_num")[0][0])
        if version // 10_000 < OLDEST:
            raise BackendUnusable(f"{self} is version {version // 10_000}; delayline needs {OLDEST} or newer")

    def begin(self, connection: Connection) -> None:
        """Begin a transaction that reads what is committed, whatever the server's default is."""
        run(connection, f"{self.BEGIN} ISOLATION LEVEL {USUAL}" if self.pgbouncer else self.BEGIN)

    def commit(self, connection: Connection) -> None:
        """Commit; durable on return. Raises TransactionAborted where the server would roll back without an error."""
        if _driver(connection).info.transaction_status == INERROR:
            raise TransactionAborted(ABORTED.format(place=self))
        super().commit(connection)

    @property
    def decides(self) -> PostgresqlTwoPhase:
        """Rows that lock_timeout does not wait for."""
        return PostgresqlTwoPhase(self)

    @property
    def two_phase(self) -> PostgresqlTwoPhase:
        """PREPARE TRANSACTION."""
        return PostgresqlTwoPhase(self)

    def loop_statements(self, database: ServerSessions) -> LoopStatements | None:
        """Let the event loop run statements by itself, which takes prepared ones."""
        if self.pgbouncer:
            return None
        from delayline.sql.postgresql.binary import LoopStatements

        return LoopStatements(database, self)

    def notifications(self, database: ServerSessions) -> PostgresqlNotifications:
        """LISTEN and NOTIFY."""
        return PostgresqlNotifications(database, self)

    def claims(self, database: ServerSessions, table: str) -> AdvisoryLockClaims:
        """Advisory locks. Raises ConfigurationError behind PgBouncer."""
        if self.pgbouncer:
            raise ConfigurationError(
                f"{self} is reached through PgBouncer (pgbouncer=true), whose clients share sessions: receivers, take "
                "and purge claim messages by locks of a session. Name the server itself in the URL of endpoints that "
                "receive; those with send_only=True work through PgBouncer"
            )
        return AdvisoryLockClaims(database, table, self)

    def forwarding(self, table: Table, tables: QueueTables) -> PostgresqlForwarding:
        """One statement."""
        return PostgresqlForwarding(table, tables, self)

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the server has gone, or this connection to it."""
        state = _state(error)
        return state.startswith(("08", "57P")) or (not state and _is_operational(error))

    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether the session is read-only, or its prepared statements are for tables of another shape."""
        return _state(error) in {READ_ONLY, UNSUPPORTED}

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the session is not read-only."""
        return bool(run(connection, "SHOW transaction_read_only")[0][0] == "off")

    def ping(self, connection: Connection) -> bool:
        """Ask whether the session has become read-only."""
        return self.takes_writes(connection)

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction failed by a deadlock or a serialization conflict."""
        return _state(error) in GIVEN_UP

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        state, cause = _state(error), str(cause_of(error)).strip()
        if state == DENIED:
            refusal = _brief(cause)
            return BackendUnusable(f"{self}: {refusal}. {self._remedy(refusal)}")
        if state == UNIQUE and numbers.is_number_taken(cause_of(error)):
            return BackendUnavailable(f"{self} {self._catch_up(cause_of(error))}: {_brief(cause)}")
        for prefix, (kind, text) in TRANSLATIONS.items():
            if state.startswith(prefix):
                return kind(text.format(place=self, cause=_brief(cause) if kind is InvalidMessage else cause))
        if "unsupported startup parameter" in cause:
            return BackendUnusable(REFUSES_OPTIONS.format(place=self, cause=cause))
        if _is_operational(error):
            return self._not_reached(cause)
        if "invalid connection option" in cause or "invalid URI" in cause:
            return ConfigurationError(f"the URL of {self} has an option unknown to libpq: {cause}")
        if "bad value for" in cause:
            return ConfigurationError(f"the URL of {self} has an option with a value that cannot be used: {cause}")
        if "NUL" in cause or "surrogates" in cause:
            return InvalidMessage(f"{self} cannot keep this text: {cause}")
        return error

    def _remedy(self, refusal: str) -> str:
        try:
            with self.connect() as connection:
                watch_of(connection).begin(self.server_timeout)
                return remedy(connection, refusal)
        except self.errors:
            return UNKNOWN

    def _catch_up(self, error: BaseException) -> str:
        """Set the sequence behind the rows whose number the error has found taken; return what was done."""
        try:
            with self.connect() as connection:
                watch_of(connection).begin(self.server_timeout)
                return numbers.catch_up(connection, error)
        except self.errors:
            return numbers.BEHIND

    def _not_reached(self, cause: str) -> Exception:
        for sign, advice in UNUSABLE.items():
            if sign in cause:
                return BackendUnusable(f"cannot use {self}: {cause}. {advice}")
        if any(sign in cause for sign in FULL):
            return BackendUnavailable(f"{self} is full: {cause}. Raise max_connections, or start fewer processes")
        return BackendUnavailable(f"cannot reach {self}: {cause}. Check that the server runs and answers there")


@lru_cache(maxsize=256)
def _from_arrays(insert: str) -> str:
    """Return the insert of one row as one of many: an array for each column, sent in binary."""
    start, _, rest = insert.rpartition(" VALUES (")  # the first one may be in a name
    values, _, end = rest.partition(")")
    typed = [value if "::" in value else f"{value}::bytea" for value in values.split(", ")]
    arrays = ", ".join(f"{value.replace('%s', '%b')}[]" for value in typed)
    return f"{start} SELECT * FROM unnest({arrays}){end}"  # noqa: S608 - of SQLAlchemy's making


def _driver(connection: Connection) -> Any:  # noqa: ANN401 - psycopg is an extra
    return connection.connection.driver_connection


def _brief(cause: str) -> str:
    """Return the server's text without its details and a part of the statement, which are in further lines."""
    return cause.partition("\n")[0]


def _state(error: BaseException) -> str:
    cause = cause_of(error)
    return str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or "")  # psycopg2 has the latter


def _is_operational(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(cause_of(error)).__mro__}
    return bool(names & {"OperationalError", "InterfaceError"})


INERROR: Final = 3  # psycopg.pq.TransactionStatus.INERROR


def _flag(name: str, value: object) -> bool:
    """Return the value of a parameter of the URL. Raises ConfigurationError unless it is true or false."""
    if value not in ("true", "false"):
        raise ConfigurationError(f"{name} must be true or false, not {value!r}")
    return value == "true"
