"""PostgreSQL 13 and newer, through psycopg 3."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, cast, extract, literal_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import any_, bindparam

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    InvalidMessage,
    StorageFull,
    TransactionAborted,
)
from delayline.sql.dialect import TableIdentity
from delayline.sql.dialects.postgresql_claims import AdvisoryLockClaims
from delayline.sql.dialects.postgresql_forwarding import PostgresqlForwarding
from delayline.sql.dialects.postgresql_notifications import PostgresqlNotifications
from delayline.sql.dialects.postgresql_rights import DENIED, UNKNOWN, missing_rights, remedy
from delayline.sql.dialects.postgresql_timeouts import PostgresqlTimeouts
from delayline.sql.dialects.postgresql_two_phase import PostgresqlTwoPhase
from delayline.sql.dialects.server import ServerDialect, cause_of, run, watch_of
from delayline.sql.dialects.staging import need_arrow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Insert, Table

    from delayline.sql.dialect import Finding
    from delayline.sql.dialects.postgresql_inserts import LoopInserts
    from delayline.sql.dialects.staging import Stage
    from delayline.sql.prepared import Prepared
    from delayline.sql.schema import QueueTables
    from delayline.sql.server_database import ServerDatabase
    from delayline.sql.statements import StoreStatements

OLDEST: Final = 13
SETUP_LOCK: Final = 0x64656C61796C696E  # "delaylin"
PART: Final = 250  # rows of a large insert that go to the server at once
#: Every statement has its index. Without statistics, as in a table that was filled a moment ago, the planner may read
#: and sort all that is due for each batch instead; and planning a small batch takes as long as moving it. A table
#: without an index then looks so dear that its statements would be compiled, for 25 ms each.
SETTINGS: Final = (
    "timezone=UTC",
    "enable_seqscan=off",
    "enable_bitmapscan=off",
    "jit=off",
    "plan_cache_mode=force_generic_plan",
)
OPTIONS: Final = " ".join(f"-c {setting}" for setting in SETTINGS)
#: A machine that is gone is noticed by the system, also where nothing is asked of it.
CONNECT_ARGS: Final = {
    "application_name": "delayline",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "prepare_threshold": 2,
}


#: A copy of a server has its identifier, but was not started at the same microsecond.
PLACE: Final = """
SELECT current_database(), to_regclass(%s)::oid::text, d.oid::text, c.system_identifier::text,
  extract(epoch FROM pg_postmaster_start_time())::text
FROM pg_database AS d, pg_control_system() AS c WHERE d.datname = current_database()
"""


class Postgresql(ServerDialect):
    """PostgreSQL as a dialect."""

    product = "PostgreSQL"
    driver = "postgresql+psycopg"
    extra = "postgresql"
    default_port = 5432
    longest_name = 63
    largest_message = 500_000_000  # a field has 1 GB, and others, pg_dump too, read bytes as hexadecimal text

    def __init__(self, url: URL) -> None:
        theirs = url.query.get("options", ())
        every = (
            (OPTIONS, theirs) if isinstance(theirs, str) else (OPTIONS, *theirs)
        )  # of two settings the last one wins
        url = url.set(query={**url.query, "options": " ".join(every)})
        super().__init__(url, connect_args=CONNECT_ARGS, paramstyle="format", use_native_hstore=False)
        from delayline.sql.dialects.postgresql_copy import Copies

        self._copies = Copies()

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Limit connecting, waits for locks and unacknowledged bytes."""
        arguments.setdefault("connect_timeout", max(1, round(self.connect_timeout)))
        arguments.setdefault("tcp_user_timeout", round(self.server_timeout * 1000))
        limit = (
            f"-c lock_timeout={max(1, round(self.lock_timeout * 1000))}"  # in front: of two settings the last one wins
        )
        arguments["options"] = f"{limit} {arguments.get('options', '')}"

    def descriptor(self, driver: Any) -> int | None:  # noqa: ANN401 - psycopg is an extra
        """Return libpq's socket."""
        return int(driver.fileno())

    def is_broken(self, connection: Connection) -> bool:
        """Tell whether libpq has found the connection's end, as in a pipeline, where the error does not say so."""
        return super().is_broken(connection) or bool(_driver(connection).closed)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, and UnicodeEncodeError in lists, which it does not wrap."""
        return (*super().errors, UnicodeEncodeError)

    def connect(self) -> Connection:
        """Return a new connection in autocommit."""
        from delayline.sql.dialects.postgresql_binary import use_binary

        connection = super().connect()
        use_binary(_driver(connection))
        return connection

    def check(self) -> None:
        """Connect once. Raises BackendUnusable for a version that is too old."""
        with self.connect() as connection:
            watch_of(connection).begin(self.server_timeout)
            version = int(run(connection, "SHOW server_version_num")[0][0])
        if version // 10_000 < OLDEST:
            raise BackendUnusable(f"{self} is version {version // 10_000}; delayline needs {OLDEST} or newer")

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
        version, durable, now = run(
            connection, "SELECT current_setting('server_version'), current_setting('synchronous_commit'), now()"
        )[0]
        off = (datetime.now(UTC) - now).total_seconds()
        return [
            ("server", True, f"PostgreSQL {version}"),
            ("synchronous_commit", durable != "off", f"{durable}"),
            ("clock", abs(off) < 1, f"this machine is {off:+.3f} s off; the server's clock decides"),
        ]

    def place(self, connection: Connection, table: Table) -> TableIdentity:
        """Return the server, the database and the table that the search path leads to."""
        name = self.sql.identifier_preparer.format_table(table).replace("%%", "%")  # a value, no part of a statement
        database, found, *server = run(connection, PLACE, name)[0]
        return TableIdentity(f"PostgreSQL database {database}", tuple(server), found)

    def stage(self, store: Table, name: str) -> Stage:
        """Return a staging table."""
        need_arrow()
        from delayline.sql.dialects.postgresql_staging import PostgresqlStage

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
        return insert(table).on_conflict_do_nothing(index_elements=[key])

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
        """Copy the rows, where their ids are new."""
        return self._copies.copied(_driver(connection), insert.sql, rows)

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

    def inserts(self, database: ServerDatabase) -> LoopInserts:
        """Let the event loop insert by itself."""
        from delayline.sql.dialects.postgresql_inserts import LoopInserts

        return LoopInserts(database, self)

    def notifications(self, database: ServerDatabase) -> PostgresqlNotifications:
        """LISTEN and NOTIFY."""
        return PostgresqlNotifications(database, self)

    def claims(self, database: ServerDatabase, table: str) -> AdvisoryLockClaims:
        """Advisory locks."""
        return AdvisoryLockClaims(database, table)

    def forwarding(self, statements: StoreStatements, tables: QueueTables) -> PostgresqlForwarding:
        """One statement."""
        return PostgresqlForwarding(statements, tables, self)

    def timeout_forwarding(self, table: Table, tables: QueueTables) -> PostgresqlTimeouts:
        """One statement."""
        return PostgresqlTimeouts(table, tables, self)

    def is_disconnect(self, error: Exception) -> bool:
        """Tell whether the server has gone, or this connection to it."""
        state = _state(error)
        return state.startswith(("08", "57P")) or (not state and _is_operational(error))

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction failed by a deadlock or a serialization conflict."""
        return _state(error) in GIVEN_UP

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        state, cause = _state(error), str(cause_of(error)).strip()
        if state == DENIED:
            refusal = cause.partition("\n")[0]  # behind it is a part of the statement
            return BackendUnusable(f"{self}: {refusal}. {self._remedy(refusal)}")
        for prefix, (kind, text) in TRANSLATIONS.items():
            if state.startswith(prefix):
                return kind(text.format(place=self, cause=cause))
        if _is_operational(error):
            return self._not_reached(cause)
        if "invalid connection option" in cause or "invalid URI" in cause:
            return ConfigurationError(f"the URL of {self} has an option that libpq does not know: {cause}")
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


def _state(error: BaseException) -> str:
    cause = cause_of(error)
    return str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or "")  # psycopg2 has the latter


def _is_operational(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(cause_of(error)).__mro__}
    return bool(names & {"OperationalError", "InterfaceError"})


INERROR: Final = 3  # psycopg.pq.TransactionStatus.INERROR
ABORTED: Final = (
    "the transaction on {place} is aborted, as a statement in it has failed before: roll it back, and repeat it in a "
    "new one"
)
GIVEN_UP: Final = {"40001", "40P01"}
#: What libpq says before there is a connection: it gives no SQLSTATE then.
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
TRANSLATIONS: Final[dict[str, tuple[type[Exception], str]]] = {
    "08": (BackendUnavailable, "the connection to {place} is lost: {cause}"),
    "22021": (InvalidMessage, "{place} cannot keep this text: {cause}"),
    "22001": (InvalidMessage, "{place} cannot keep a text of that length: {cause}"),
    "25006": (BackendUnavailable, "{place} is read-only, a standby perhaps: {cause}. Name the primary in the URL"),
    "25P02": (TransactionAborted, ABORTED),
    "28": (BackendUnusable, "{place} refuses this user: {cause}. Check the user and the password"),
    "3D000": (BackendUnusable, "{place} does not exist: {cause}. Create it: createdb"),
    "3F000": (BackendUnusable, "{place} has no such schema: {cause}. Create it, or leave out `schema`"),
    "40": (BackendUnavailable, "{place} gave this transaction up in favour of another: {cause}"),
    "42P01": (BackendUnusable, "{place} is not set up for this endpoint: {cause}. Run `delayline setup`"),
    "42703": (BackendUnusable, "{place} has a table of another shape: {cause}. Name another table_name"),
    "42804": (BackendUnusable, "{place} has a table of another shape: {cause}. Name another table_name"),
    "53100": (StorageFull, "{place} has no space left: {cause}"),
    "53": (BackendUnavailable, "{place} is short of resources: {cause}"),
    "54": (InvalidMessage, "{place} cannot keep something that large: {cause}"),
    "55P03": (BackendUnavailable, "{place} did not get a lock in time: {cause}"),
    "57": (BackendUnavailable, "{place} has ended the statement or the connection: {cause}"),
    "58": (BackendUnavailable, "{place} cannot read or write its files: {cause}. Check its disk"),
    "XX": (BackendUnavailable, "{place} reports an internal error: {cause}"),
}
