"""PostgreSQL 13 and newer, through psycopg 3."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import BigInteger, String, Text, Uuid, cast, extract, literal_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import any_, bindparam

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    DelaylineError,
    InvalidMessage,
    StorageFull,
    TransactionAborted,
    TransactionConflict,
)
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, TimeoutHeaders
from delayline.sql import journal_triggers
from delayline.sql.dialect import (
    Moved,
    Page,
    TableIdentity,
    TimeoutShape,
    TransactionsInProgress,
    conflict_columns,
)
from delayline.sql.due_forecast import explanation
from delayline.sql.postgresql import numbers
from delayline.sql.postgresql.notifications import PostgresqlNotifications
from delayline.sql.prepared import Prepared
from delayline.sql.server import ServerDialect, SessionClaims, cause_of, run, watch_of
from delayline.sql.staging import need_arrow
from delayline.sql.statements import EXPIRY_MARKER, MARKER
from delayline.sql.urls import Host, listed
from delayline.sql.workers import is_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Executable, Insert, Table

    from delayline.sql.dialect import ClaimingMove, Finding, ServerSessions, Stage, WaitingReceiver
    from delayline.sql.postgresql.binary import LoopStatements
    from delayline.sql.prepared import StatementResult
    from delayline.sql.schema import QueueTables

Result = TypeVar("Result")

OLDEST: Final = 13
SETUP_LOCK: Final = 0x64656C61796C696E  # "delaylin"
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
    "default_transaction_isolation": "read committed",
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


#: A copy of a server has its identifier, but was not started at the same microsecond.
PLACE: Final = """
SELECT current_database(), to_regclass(%s)::oid::text, d.oid::text, c.system_identifier::text,
  extract(epoch FROM pg_postmaster_start_time())::text
FROM pg_database AS d, pg_control_system() AS c WHERE d.datname = current_database()
"""


FINDINGS: Final = """
SELECT current_setting('server_version'), current_setting('synchronous_commit'), now(),
  (SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_isolation')
"""
USUAL: Final = SETTINGS["default_transaction_isolation"]
OF_OTHERS: Final = (
    f": delayline's own transactions are {USUAL} all the same; yours, as in context.transaction(), may be given up in "
    "favour of others and have to be repeated"
)


class Postgresql(ServerDialect):
    """PostgreSQL as a dialect."""

    product = "PostgreSQL"
    driver = "postgresql+psycopg"
    extra = "postgresql"
    default_port = 5432
    longest_name = 63
    journal = journal_triggers.POSTGRESQL
    folds_column_case = False
    deletes_by_list = True
    returns_deleted = True
    locks_tables = True
    largest_message = 500_000_000  # a field has 1 GB, and others, pg_dump too, read bytes as hexadecimal text

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
        from delayline.sql.postgresql.binary import Copies

        self._copies = Copies()
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

    def further_tables(self, tables: QueueTables) -> Sequence[Table]:
        """Return the table of sleeping pollers, which NOTIFY uses."""
        return (tables.sleeping,)

    def mending(self, connection: Connection, table: Table) -> Sequence[Executable]:
        """Return the statements that set sequences behind their rows: replication does not copy sequences.

        Raises BackendUnusable for a table that Citus has distributed.
        """
        name = self.sql.identifier_preparer.format_table(table).replace("%%", "%")  # a value, no part of a statement
        if distributed(connection, OF_TABLE, name):
            raise BackendUnusable(DISTRIBUTED.format(place=self, tables=repr(table.name)))
        return numbers.catching_up(connection, name)

    @contextlib.contextmanager
    def setting_up(self, connection: Connection) -> Iterator[None]:
        """Let one process at a time create tables: IF NOT EXISTS alone still collides in the catalogs."""
        run(connection, f"SET LOCAL lock_timeout = '{round(self.setup_patience * 1000)}'")
        run(connection, "SELECT pg_advisory_xact_lock(%s)", SETUP_LOCK)
        yield

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables."""
        return missing_rights(connection, needed)

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the version, how durable a commit is, and how far this machine's clock is off."""
        version, durable, now, isolation = run(connection, FINDINGS)[0]
        off = (datetime.now(UTC) - now).total_seconds()
        return [
            ("server", True, f"PostgreSQL {version}"),
            ("synchronous_commit", durable != "off", f"{durable}"),
            ("default_transaction_isolation", True, isolation + ("" if isolation == USUAL else OF_OTHERS)),
            numbers.numbers_finding(connection),
            *_distributed_findings(self, connection),
            ("clock", abs(off) < 1, f"this machine is {off:+.3f} s off; the server's clock decides"),
        ]

    def place(self, connection: Connection, table: Table) -> TableIdentity:
        """Return the server, the database and the table that the search path leads to."""
        name = self.sql.identifier_preparer.format_table(table).replace("%%", "%")  # a value, no part of a statement
        database, found, *server = run(connection, PLACE, name)[0]
        return TableIdentity(f"PostgreSQL database {database}", tuple(server), found)

    def lock_table(self, connection: Connection, table: Table, *, readers: bool = False) -> None:
        """Lock the table: EXCLUSIVE, or ACCESS EXCLUSIVE."""
        mode = "ACCESS EXCLUSIVE" if readers else "EXCLUSIVE"
        run(connection, f"LOCK TABLE {self.sql.identifier_preparer.format_table(table)} IN {mode} MODE")

    def begin_scan(self, connection: Connection) -> None:
        """Begin a transaction: cursors on the server and SET LOCAL need one."""
        self.begin(connection)

    def plan_for_scans(self, connection: Connection) -> None:
        """Undo the settings of connections, which are for small batches found by their index."""
        for setting in FOR_SCANS:
            run(connection, setting)

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return the planner's estimates, from the histogram of due times that ANALYZE keeps."""
        explain = explanation(table, self.sql, len(edges), "EXPLAIN (FORMAT JSON) ")
        self.begin(connection)
        try:
            run(connection, "SET LOCAL max_parallel_workers_per_gather = 0")  # which would hide and reorder the buckets
            found = explain.one(connection, *edges)
        finally:
            self.rollback(connection)
        [plan] = json.loads(found) if isinstance(found, str) else found
        return [float(bucket["Plan Rows"]) for bucket in plan["Plan"]["Plans"]]

    @property
    def timeout_shape(self) -> TimeoutShape:
        """The columns that NServiceBus' script for PostgreSQL creates."""
        return TimeoutShape(
            Uuid(),
            String(MAXIMUM_DESTINATION_LENGTH),
            postgresql.TIMESTAMP(),
            Text(),
            round_time=lambda due: due.replace(tzinfo=None),
            nullable=True,
            named_by_table=True,
            binary_keys=True,
        )

    def stage(self, store: Table, name: str) -> Stage:
        """Return a staging table."""
        need_arrow()
        from delayline.sql.postgresql.staging import PostgresqlStage

        return PostgresqlStage(self, store, name)

    def to_due(self, due: datetime) -> datetime:
        """Return the instant: timestamptz keeps microseconds."""
        return due

    def from_due(self, kept: datetime) -> datetime:
        """Return the due time in UTC."""
        return kept.astimezone(UTC)

    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the column as microseconds since 1970: exact, as `extract` is numeric."""
        return cast(extract("epoch", due) * 1_000_000, BigInteger)

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the server's time so many seconds from now."""
        return literal_column(f"clock_timestamp() + interval '{seconds} seconds'")

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition with an array: one statement, and one plan, for lists of any length."""
        return column == any_(bindparam(name, type_=postgresql.ARRAY(column.type)))

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is."""
        return insert(table).on_conflict_do_nothing(index_elements=conflict_columns(table, key))

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

    def timeout_forwarding(self, table: Table, tables: QueueTables) -> PostgresqlTimeouts:
        """One statement."""
        return PostgresqlTimeouts(table, tables, self)

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


#: Citus' list of tables that it has distributed, reference tables included.
LIST_OF_DISTRIBUTED: Final = "SELECT to_regclass('pg_dist_partition') IS NOT NULL"
OF_TABLE: Final = "SELECT logicalrelid::text FROM pg_dist_partition WHERE logicalrelid = to_regclass(%s)"
OF_SCHEMAS: Final = """
SELECT logicalrelid::text FROM pg_dist_partition JOIN pg_class AS c ON c.oid = logicalrelid
WHERE c.relname LIKE 'delayline\\_%%' OR EXISTS (
  SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = 'seq' AND EXISTS (
    SELECT FROM pg_class AS q WHERE q.relnamespace = c.relnamespace AND q.relname = 'delayline_messages'))
ORDER BY 1
"""
DISTRIBUTED: Final = (
    "{place} has distributed {tables} over several servers, as Citus does: claims would exclude nobody there, and "
    "notifications arrive nowhere. Keep delayline's tables local (SELECT undistribute_table(...)), or name a server "
    "that is not distributed"
)


def distributed(connection: Connection, query: str, *values: str) -> list[str]:
    """Return the distributed tables that a query of Citus' list finds; none where there is no such list."""
    if not run(connection, LIST_OF_DISTRIBUTED)[0][0]:
        return []
    return [name for (name,) in run(connection, query, *values)]


def _distributed_findings(dialect: Postgresql, connection: Connection) -> list[Finding]:
    found = distributed(connection, OF_SCHEMAS)
    return [("distributed tables", False, DISTRIBUTED.format(place=dialect, tables=", ".join(found)))] if found else []


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


ABORTED: Final = (
    "the transaction on {place} is aborted, as a statement in it has failed before: roll it back, and repeat it in a "
    "new one"
)
GIVEN_UP: Final = {"40001", "40P01"}
READ_ONLY: Final = "25006"
#: Of a prepared statement too, when a table that it reads has changed.
UNSUPPORTED: Final = "0A000"
UNIQUE: Final = "23505"
#: Texts of libpq before a connection is established, when there is no SQLSTATE.
UNUSABLE: Final = {
    "authentication failed": "Check the user and the password",
    "no password supplied": "Put the password into the URL or into ~/.pgpass",
    "no pg_hba.conf entry": "Allow this user and host in pg_hba.conf",
    "does not support SSL": "Set sslmode in the URL to what the server offers",
    "SSL": "Check sslmode and the certificates",
    "permission denied for database": "As its owner: GRANT CONNECT ON DATABASE",
    "does not exist": "Create it, or name another one in the URL",
}
FULL: Final = ("too many clients", "too many connections", "connection slots are reserved", "connection limit exceeded")
BEHIND_PGBOUNCER: Final = (
    "{place} shares its sessions between clients, as PgBouncer does in transaction mode: {cause}. Add ?pgbouncer=true "
    "to the URL of endpoints that only send; for others name the server itself"
)
REFUSES_OPTIONS: Final = (
    "{place} is behind a pooler that refuses options: {cause}. If it is PgBouncer in session mode, set "
    "ignore_startup_parameters = options in its settings. In transaction mode clients share sessions: Add "
    "?pgbouncer=true to the URL of endpoints that only send; for others name the server itself"
)
TRANSLATIONS: Final[dict[str, tuple[type[Exception], str]]] = {
    "08": (BackendUnavailable, "the connection to {place} is lost: {cause}"),
    "0A": (BackendUnavailable, "{place} does not support a statement now, as after a change of its tables: {cause}"),
    "22021": (InvalidMessage, "{place} cannot keep this text: {cause}"),
    "22P05": (InvalidMessage, "{place} cannot keep this text: {cause}. Its encoding has to be UTF8 for that"),
    "22001": (InvalidMessage, "{place} cannot keep a text of that length: {cause}"),
    READ_ONLY: (BackendUnavailable, "{place} is read-only, a standby perhaps: {cause}. Name the primary in the URL"),
    "25P02": (TransactionAborted, ABORTED),
    "25": (BackendUnavailable, "{place} has ended a transaction: {cause}"),
    "28": (BackendUnusable, "{place} refuses this user: {cause}. Check the user and the password"),
    "3D000": (BackendUnusable, "{place} does not exist: {cause}. Create it: createdb"),
    "3F000": (BackendUnusable, "{place} has no such schema: {cause}. Create it, or leave out `schema`"),
    **dict.fromkeys(GIVEN_UP, (TransactionConflict, "{place} gave this transaction up in favour of another: {cause}")),
    "40": (BackendUnavailable, "{place} has undone this transaction: {cause}"),
    "26000": (BackendUnusable, BEHIND_PGBOUNCER),
    "42P05": (BackendUnusable, BEHIND_PGBOUNCER),
    "42P01": (BackendUnusable, "{place} is not set up for this endpoint: {cause}. Run `delayline setup`"),
    "42703": (BackendUnusable, "{place} has a table of another shape: {cause}. Name another table_name"),
    "42804": (BackendUnusable, "{place} has a table of another shape: {cause}. Name another table_name"),
    "42": (BackendUnusable, "{place} refuses a statement of delayline's: {cause}. `delayline doctor` says what it is"),
    "53100": (StorageFull, "{place} has no space left: {cause}"),
    "53": (BackendUnavailable, "{place} is short of resources: {cause}"),
    "54": (InvalidMessage, "{place} cannot keep something that large: {cause}"),
    "55P03": (BackendUnavailable, "{place} did not get a lock in time: {cause}"),
    "55": (BackendUnavailable, "{place} cannot do that now: {cause}"),
    "57": (BackendUnavailable, "{place} has ended the statement or the connection: {cause}"),
    "58": (BackendUnavailable, "{place} cannot read or write its files: {cause}. Check its disk"),
    "XX": (BackendUnavailable, "{place} reports an internal error: {cause}"),
}


# Claims on queue rows in PostgreSQL: advisory locks of a session.

ADVISORY_LOCK: Final = "SELECT k FROM unnest(%s::bigint[]) AS k WHERE pg_try_advisory_lock(%s + k)"
#: The first part returns no rows: an unlock is never null.
ADVISORY_EXCHANGE: Final = f"""
SELECT k FROM unnest(%s::bigint[]) AS k WHERE pg_advisory_unlock(%s + k) IS NULL
UNION ALL {ADVISORY_LOCK}
"""  # noqa: S608 - our own
#: A key is in two parts: https://www.postgresql.org/docs/current/view-pg-locks.html
ADVISORY_UNLOCK_OTHERS: Final = """
SELECT pg_advisory_unlock(key) FROM (
  SELECT (classid::bigint << 32) | objid::bigint AS key FROM pg_locks
  WHERE locktype = 'advisory' AND objsubid = 1 AND pid = pg_backend_pid()
) AS locked WHERE key <> ALL (ARRAY(SELECT %s + k FROM unnest(%s::bigint[]) AS k))
"""
#: The first part returns no rows. The limit is inside, so that no further rows are locked.
ADVISORY_TAKE_NEXT: Final = """
SELECT k, false FROM unnest(%s::bigint[]) AS k WHERE pg_advisory_unlock(%s + k) IS NULL
UNION ALL SELECT seq, pg_try_advisory_lock(%s + seq) FROM (
  SELECT seq FROM {queued} WHERE queue = %s AND seq > %s AND seq <> ALL (%s::bigint[]) ORDER BY seq LIMIT %s
) AS page
"""
#: The same for a page that is longer than what is wanted: no more is locked. Its last row is that of the page.
ADVISORY_TAKE_AMONG: Final = """
WITH page AS MATERIALIZED (
  SELECT seq FROM {queued} WHERE queue = %s AND seq > %s AND seq <> ALL (%s::bigint[]) ORDER BY seq LIMIT %s
), locked AS MATERIALIZED (
  SELECT seq FROM page WHERE pg_try_advisory_lock(%s + seq) LIMIT %s
)
SELECT k, false, 0 FROM unnest(%s::bigint[]) AS k WHERE pg_advisory_unlock(%s + k) IS NULL
UNION ALL SELECT seq, true, 0 FROM locked
UNION ALL SELECT max(seq), false, count(*) FROM page
"""
IN_PROGRESS: Final = """
SELECT pg_snapshot_xmin(taken)::text::bigint, pg_snapshot_xmax(taken)::text::bigint,
  (SELECT seq FROM {queued} WHERE queue = %s AND seq > %s ORDER BY seq LIMIT 1)
FROM pg_current_snapshot() AS taken
"""
ADVISORY_UNLOCK: Final = "SELECT pg_advisory_unlock(%s + k) FROM unnest(%s::bigint[]) AS k"


class AdvisoryLockClaims(SessionClaims):
    """This process's claims on the rows of one table."""

    def __init__(self, database: ServerSessions, table: str, dialect: Postgresql) -> None:
        from delayline.sql.postgresql.binary import LoopStatements, SharedSession

        super().__init__(database)
        self._dialect = dialect
        shared = SharedSession(self._session, self._in_use, self._in_session, self._lock_again)
        self._statements = LoopStatements(database, dialect, shared)
        digest = hashlib.sha256(table.encode()).digest()
        self._base = int.from_bytes(digest[:3], "big", signed=True) << 40  # row numbers stay below
        self._receivers: list[WaitingReceiver] = []

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows in one round trip."""
        return {row for (row,) in run(connection, ADVISORY_LOCK, list(rows), self._base)}

    def exchange(self, connection: Connection, released: Sequence[int], rows: Sequence[int]) -> set[int]:
        """Unlock the released rows, then lock free ones, in one round trip."""
        found = run(connection, ADVISORY_EXCHANGE, list(released), self._base, list(rows), self._base)
        return {row for (row,) in found}

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, in one round trip."""
        run(connection, ADVISORY_UNLOCK, self._base, list(rows))

    def register(self, receiver: WaitingReceiver) -> Callable[[], None]:
        """Claim moved messages for the receiver while it waits for some; return how to stop."""
        self._receivers.append(receiver)

        def unregister() -> None:
            with contextlib.suppress(ValueError):
                self._receivers.remove(receiver)

        return unregister

    def waiting_receiver(self) -> WaitingReceiver | None:
        """Return a receiver that waits for messages, if there is one."""
        return next((receiver for receiver in list(self._receivers) if receiver.wanted), None)

    async def move(self, move: ClaimingMove) -> Moved:
        """Run the move on the claims' connection, and claim the rows that it has locked."""

        def claimed(moved: Moved) -> tuple[Moved, list[int]]:
            return moved, [row[0] for row in moved.claimed]

        def read(result: StatementResult) -> tuple[Moved, list[int]] | None:
            moved = move.moved(result.rows)
            return None if moved is None else claimed(moved)

        statement, values = move.statement(self._base)
        return await self._claim(statement, values, read, lambda connection: claimed(move.run(connection, self._base)))

    def in_progress(self, connection: Connection, queued: Table, queue: str, after: int) -> TransactionsInProgress:
        """Return which transactions are in progress, and the queue's first message after the number `after`."""
        return TransactionsInProgress(*_written(IN_PROGRESS, queued, self._dialect).rows(connection, queue, after)[0])

    async def take_next(self, queued: Table, queue: str, after: int, limit: int, among: int = 0) -> Page:
        """Claim up to `limit` messages of a queue after the number `after`; skips messages with other claims.

        `among`: how many messages to look at, `limit` of them if that is more.
        """
        statement, released = _written(ADVISORY_TAKE_NEXT, queued, self._dialect), self._take_released()
        with self._lock:
            own = [row for row in self._claimed if row > after]
        among = max(among, limit)
        values: tuple[Any, ...] = (released, self._base, self._base, queue, after, own, limit)
        if among > limit:
            statement = _written(ADVISORY_TAKE_AMONG, queued, self._dialect)
            values = (queue, after, own, among, self._base, limit, released, self._base)

        def read(result: StatementResult) -> tuple[Page, list[int]]:
            locked = [number for number, is_locked, *_ in result.rows if is_locked]
            with self._lock:  # another event loop's look may have claimed some since `own` was read
                claimed = [number for number in locked if number not in self._claimed]
                self._released += set(locked).difference(claimed)
            released.clear()  # they are unlocked
            last = result.rows[-1][0] if result.rows else None
            number = result.rows[-1][2] if among > limit else len(result.rows)
            if len(locked) == limit:  # where the page is longer, the rest of it was not looked at
                last, number = locked[-1], among
            return Page(claimed, after if last is None else last, number == among), claimed

        try:
            return await self._claim(
                statement, values, read, lambda connection: read(statement.result(connection, *values))
            )
        except asyncio.CancelledError:
            with self._lock:  # those of a statement that has not run
                self._released += released
            raise

    async def _claim(
        self,
        statement: Prepared,
        values: tuple[Any, ...],
        read: Callable[[StatementResult], tuple[Result, list[int]] | None],
        on_thread: Callable[[Connection], tuple[Result, list[int]]],
    ) -> Result:
        """Run a statement that locks rows on the claims' connection, and claim these rows.

        Args:
            statement: The statement.
            values: Its parameters.
            read: Returns the result and the locked rows; None if nothing was done and `on_thread` must be called.
            on_thread: The same on a worker thread, where the event loop cannot run the statement.
        """
        found: list[tuple[Result, list[int]]] = []

        def claim(one: tuple[Result, list[int]] | None) -> None:
            if one is not None:
                with self._lock:
                    if is_given_up():
                        self._released += one[1]
                        return
                    self._claimed.update(one[1])
                found.append(one)

        def run_in_session() -> None:
            with self._in_session():
                claim(self._session.run(partial(self._run_locking, on_thread), commits=True))

        try:
            await self._statements.run(statement, values, lambda result: claim(read(result)))
            if not found:
                await self._database.run(run_in_session)
        except asyncio.CancelledError:
            self.release(row for _, claimed in found for row in claimed)
            raise
        except BaseException:  # locks outlast the transaction that has taken them
            with contextlib.suppress(DelaylineError):  # the locks of a lost connection end with it
                await self._database.run(self._unlock_others)
            raise
        return found[0][0]

    def _run_locking(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        self._lock_again(connection)
        try:
            return work(connection)
        except BaseException:
            self._unlock_unclaimed(connection)
            raise

    def _unlock_others(self) -> None:
        """Unlock rows that a failed statement has locked."""
        with self._in_session():
            self._session.run(self._unlock_unclaimed)

    def _reclaim(self) -> None:
        self._statements.reclaim()

    def _unlock_unclaimed(self, connection: Connection) -> None:
        with self._lock:
            known = [*self._claimed, *self._released]
        with contextlib.suppress(*self._dialect.errors):  # the locks of a lost connection end with it
            run(connection, ADVISORY_UNLOCK_OTHERS, self._base, known)


@lru_cache(maxsize=64)
def _written(text: str, queued: Table, dialect: Postgresql) -> Prepared:
    return Prepared.of_text(text.format(queued=dialect.sql.identifier_preparer.format_table(queued)))


# Due messages go from store to queue in PostgreSQL in one statement: one round trip, no body leaves the server.

#: `due` takes the locks; skipped rows are unlocked when the statement ends, which commits.
MOVE_DUE: Final = """
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
  SELECT destination, id, headers, body FROM gone ORDER BY due, seq{returning}
){grouped}{claimed}
SELECT (SELECT count(*) FROM gone), ARRAY(SELECT DISTINCT destination FROM due WHERE movable),
  (SELECT count(*) FROM due), (SELECT count(*) FROM due WHERE NOT movable), (SELECT max(due) FROM gone),
  CASE WHEN (SELECT count(*) FROM due) < %s THEN (
    SELECT due FROM {table} WHERE due >= (SELECT max(due) FROM gone) AND seq NOT IN (SELECT seq FROM gone)
    ORDER BY due, seq LIMIT 1) END{counts}{columns}
"""
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

    def __init__(self, table: Table, tables: QueueTables, dialect: Postgresql) -> None:
        self.can_claim = not dialect.pgbouncer
        quote = dialect.sql.identifier_preparer.format_table
        tables_named = {"table": table, "queues": tables.queues, "queued": tables.queued}
        names = {name: quote(table) for name, table in tables_named.items()}
        self._statements = {
            (counted, claiming): tuple(
                Prepared.of_text(
                    MOVE_DUE.format(
                        chosen=chosen,
                        grouped=GROUPED if counted else "",
                        counts=COUNTS if counted else "",
                        returning=RETURNING if claiming else "",
                        claimed=CLAIMED if claiming else "",
                        columns=CLAIMED_COLUMNS if claiming else "",
                        **names,
                    )
                )
                for chosen in (ALL, SOME)
            )
            for counted in (False, True)
            for claiming in (False, True)
        }

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
        since: object | None = None,
    ) -> Moved:
        """Move messages, those due from `since` on if given, and return the result, with `counts` if `counted`."""
        statements = self._statements[counted, False]
        return PostgresqlMove(statements, until, limit, max_bytes, counted, since).run(connection)

    def claiming(
        self,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool,
        since: object | None,
        queue: str,
        wanted: int,
    ) -> PostgresqlMove:
        """Return a move that locks up to `wanted` messages of the queue."""
        statements = self._statements[counted, True]
        return PostgresqlMove(statements, until, limit, max_bytes, counted, since, queue, wanted)


class PostgresqlMove(NamedTuple):
    """One move of due messages; see `ClaimingForwarding.claiming`."""

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
                queues = [one for one in queues if one != self.queue]
        if left:
            next_due = last = None
        if due == self.limit or moved + left < due:
            next_due = self.until
        counts = None
        if self.counted and moved:
            destinations, due_times, numbers = groups
            counts = dict(zip(zip(destinations, due_times, strict=True), numbers, strict=True))
        return Moved(moved, set(queues), left, next_due, last, counts, claimed)

    def _values(self, key: int) -> tuple[Any, ...]:
        since = EVER if self.since is None else self.since
        bounds = (MARKER, EXPIRY_MARKER, self.until, since, self.limit, self.max_bytes)
        if self.queue is None:
            return (*bounds, self.limit)
        return (*bounds, self.queue, self.wanted, key, self.limit, self.queue)


# Expired timeouts go to their queues in PostgreSQL in one statement, which also returns when the next one expires.

#: Headers in which one of these words occurs need more than moving.
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
    """Moves the earliest expired timeouts of one table, skipping locked and leased ones."""

    def __init__(self, table: Table, tables: QueueTables, dialect: Postgresql) -> None:
        named = {"table": table, "leases": tables.leases, "queues": tables.queues, "queued": tables.queued}
        quote = dialect.sql.identifier_preparer.format_table
        self._move = MOVE_EXPIRED.format(**{name: quote(one) for name, one in named.items()})
        self._name = str(table.name)
        self._patterns = [f"%{marker}%" for marker in TIMEOUT_MARKERS]

    def run(self, connection: Connection, at: object, until: object, sent: str, *, limit: int, max_bytes: int) -> Moved:
        """Move expired timeouts and return the result."""
        names = (Headers.MESSAGE_ID, Headers.TIME_SENT, sent, TimeoutHeaders.RELATED_TIMEOUT)
        values = (self._name, at, self._patterns, until, limit, max_bytes, *names)
        [(number, queues, left, next_due)] = run(connection, self._move, *values)
        return Moved(number, set(queues), left, next_due)


# Missing rights of a PostgreSQL user: a refusal names the table or schema, but not the right.

DENIED: Final = "42501"
UNKNOWN: Final = (
    "As its owner, GRANT this user the missing rights: delayline needs USAGE on the schema, CREATE on it for "
    "`delayline setup`, and SELECT, INSERT, UPDATE and DELETE on the tables"
)
#: Whatever has a name that is in the refusal, which may be in any language.
LACKING: Final = """
SELECT kind, format(CASE kind WHEN 'SCHEMA' THEN '%%2$I' ELSE '%%1$I.%%2$I' END, place, name), name::text,
  CASE WHEN NOT pg_has_role(owner, 'USAGE') THEN pg_get_userbyid(owner) END, quote_ident(current_user),
  ARRAY(SELECT need FROM unnest(needs) AS need WHERE NOT CASE kind
    WHEN 'TABLE' THEN has_table_privilege(one, need)
    WHEN 'SEQUENCE' THEN has_sequence_privilege(one, need)
    ELSE has_schema_privilege(one, need) END)
FROM (
  SELECT 'TABLE', c.oid, n.nspname, c.relname, c.relowner, ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p', 'v')
  UNION ALL
  SELECT 'SEQUENCE', c.oid, n.nspname, c.relname, c.relowner, ARRAY['USAGE']
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'S'
  UNION ALL
  SELECT 'SCHEMA', oid, NULL, nspname, nspowner, ARRAY['USAGE', 'CREATE'] FROM pg_namespace
) AS everything (kind, one, place, name, owner, needs)
WHERE strpos(%s::text, name) > 0
"""


#: A table by its name, in its schema; where none is named, on the search path, or in a `public` that is not to be used.
ON_TABLE: Final = """
SELECT format('%%I.%%I', n.nspname, c.relname), quote_ident(n.nspname), has_schema_privilege(n.oid, 'USAGE'),
  ARRAY(SELECT need FROM unnest(%s::text[]) AS need WHERE NOT has_table_privilege(c.oid, need)),
  quote_ident(current_user)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relname = %s AND (
  n.nspname = %s::text OR %s::text IS NULL AND (
    pg_table_is_visible(c.oid) OR n.nspname = 'public' AND NOT has_schema_privilege(n.oid, 'USAGE')))
"""


class MissingRights(NamedTuple):
    """Rights that the user lacks on one object."""

    kind: str
    quoted: str
    name: str
    owner: str | None
    """Who owns it, None where that is the user."""
    user: str
    rights: Sequence[str]

    @property
    def remedy(self) -> str:
        """The remedy."""
        if not self.rights:
            return f"Only its owner may do that: run it as {self.owner}"
        for_setup = ", CREATE for `delayline setup` only" if self.kind == "SCHEMA" and len(self.rights) > 1 else ""
        return (
            f"Run as its owner{for_setup}: GRANT {', '.join(self.rights)} ON {self.kind} {self.quoted} TO {self.user}"
        )


def missing_rights(connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
    """Return the GRANT statements for missing rights on existing tables."""
    schemas, grants = {}, []
    for table, needs in needed.items():
        for quoted, schema, may_use, rights, user in run(
            connection, ON_TABLE, list(needs), table.name, table.schema, table.schema
        ):
            if not may_use:
                schemas[schema] = f"GRANT USAGE ON SCHEMA {schema} TO {user};"
            if rights:
                grants.append(f"GRANT {', '.join(rights)} ON TABLE {quoted} TO {user};")
    return [*schemas.values(), *grants]


def remedy(connection: Connection, refusal: str) -> str:
    """Return the rights to grant after a refusal by PostgreSQL."""
    named = [
        found for found in map(MissingRights._make, run(connection, LACKING, refusal)) if found.rights or found.owner
    ]
    if not named:
        return UNKNOWN
    best = max(_likeness(found, refusal) for found in named)
    return "; ".join(found.remedy for found in named if _likeness(found, refusal) == best)


def _likeness(found: MissingRights, refusal: str) -> tuple[bool, int]:
    """Return how surely the refusal is about that: in most languages the name comes last."""
    return refusal.endswith(found.name), len(found.name)


# PostgreSQL's prepared transactions, which survive the connection and the server.

IN_DOUBT: Final = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
IDENTITY: Final = """
SELECT c.system_identifier::text, d.oid::text FROM pg_control_system() AS c, pg_database AS d
WHERE d.datname = current_database()
"""
#: A transaction that decides holds its row for a few milliseconds.
WAIT_BRIEFLY: Final = "SET LOCAL lock_timeout = '200ms'"
UNDEFINED: Final = "42704"


class PostgresqlTwoPhase:
    """Prepares transactions in one database and finishes them later, from any process."""

    def __init__(self, dialect: Postgresql) -> None:
        self._dialect = dialect

    def check(self, connection: Connection) -> str:
        """Return a short name of the database. Raises BackendUnusable where nothing can be prepared."""
        if run(connection, "SHOW max_prepared_transactions")[0][0] == "0":
            raise BackendUnusable(
                f"{self._dialect} cannot prepare transactions: set max_prepared_transactions in postgresql.conf to the "
                "number of messages handled at once and pollers, 100 for example, and restart the server"
            )
        return hashlib.sha256(":".join(run(connection, IDENTITY)[0]).encode()).hexdigest()[:12]

    def prepare(self, connection: Connection, name: str) -> None:
        """Prepare the open transaction; the connection has none afterwards, also when that fails."""
        cursor: Any = connection.connection.cursor()
        cursor.execute(f"PREPARE TRANSACTION '{name}'")
        done = cursor.statusmessage
        cursor.close()
        if done != "PREPARE TRANSACTION":  # of a transaction that has failed PostgreSQL makes a rollback, and no fuss
            raise BackendUnavailable(f"{self._dialect} has rolled the transaction back instead of preparing it")

    def commit_prepared(self, connection: Connection, name: str) -> None:
        """Commit the prepared transaction, unless it is finished."""
        self._finish(connection, f"COMMIT PREPARED '{name}'")

    def roll_back_prepared(self, connection: Connection, name: str) -> None:
        """Roll back the prepared transaction, unless it is finished or was never prepared."""
        self._finish(connection, f"ROLLBACK PREPARED '{name}'")

    def in_doubt(self, connection: Connection, prefix: str) -> list[str]:
        """Return the names of prepared transactions."""
        return [name for (name,) in run(connection, IN_DOUBT, prefix)]

    def wait_briefly(self, connection: Connection) -> None:
        """Let the transaction's statements fail that would have to wait for others'."""
        run(connection, WAIT_BRIEFLY)

    def wait_as_usual(self, connection: Connection) -> None:
        """Do nothing: it was for the transaction only."""

    def _finish(self, connection: Connection, sql: str) -> None:
        try:
            run(connection, sql)
        except self._dialect.errors as error:
            cause: Any = cause_of(error)
            if getattr(cause, "sqlstate", None) != UNDEFINED:
                raise
