"""Common parts of the server dialects: connections in autocommit, and transactions by statements."""

from __future__ import annotations

import contextlib
import random
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from sqlalchemy import (
    URL,
    create_engine,
    event,
    null,
    or_,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, PendingRollbackError
from sqlalchemy.pool import NullPool

from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError, MissingExtra
from delayline.sql.deadlines import (
    JOB_WORK,
    LOCK_TIMEOUT,
    LONG_WORK,
    SERVER_TIMEOUT,
    WATCH,
    AnswerDeadline,
    StopLimit,
)
from delayline.sql.dialect import Connections, Dialect, DriverErrors, TransactionControl
from delayline.sql.prepared import Prepared
from delayline.sql.urls import hosts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy import Column, ColumnElement, Connection, Engine, Table
    from sqlalchemy.sql.base import ReadOnlyColumnCollection

    from delayline.sql.claims import ServerClaims
    from delayline.sql.moves import Forwarding
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import StatementResult
    from delayline.sql.schema import QueueTables
    from delayline.sql.server_clock import ServerClock
    from delayline.sql.statements import StoreStatements
    from delayline.sql.urls import Host

    Columns = ReadOnlyColumnCollection[str, Column[Any]]


Result = TypeVar("Result")
LEASE: Final = 60  # seconds; a dispatch takes less
#: Seconds between attempts to connect to a full server, doubling.
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0


#: Set on a connection whose commit failed: if the connection is lost as well, the outcome is unknown.
NOT_COMMITTED: Final = "delayline not committed"


@contextlib.contextmanager
def committing_itself(connection: Connection, *errors: type[Exception]) -> Iterator[None]:
    """Run a statement that commits by itself: if one of the errors ends its connection, the outcome is unknown."""
    try:
        yield
    except errors:
        connection.info[NOT_COMMITTED] = True
        raise


#: Noted of a connection whose session limits its waits.
IN_SESSION: Final = "delayline session"


class ServerErrors(DriverErrors):
    """The errors of a server's driver, and what they mean."""

    def __init__(self, connections: ServerConnections) -> None:
        self._connections = connections

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, raw and wrapped by SQLAlchemy, including the exceptions of a lost connection."""
        return (DBAPIError, PendingRollbackError, self._connections.engine.dialect.loaded_dbapi.Error)

    def is_broken(self, connection: Connection) -> bool:
        """Return whether SQLAlchemy or the driver has found the connection's end, whatever the error is."""
        return connection.invalidated

    @abstractmethod
    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether open sessions are useless, though new ones may be useful; the statement had no effect.

        So after a failover that leaves them open, read-only, and where tables have changed under prepared statements.
        """


class ServerConnections(Connections):
    """The connections to a database of a server, in autocommit, through a SQLAlchemy driver."""

    product: ClassVar[str]
    driver: str
    """SQLAlchemy's name for the dialect and driver."""
    extra: str
    """The extra of delayline that installs the driver."""
    default_port: ClassVar[int]
    errors: ServerErrors
    """What the driver's errors mean."""

    def __init__(self, url: URL, *, connect_args: Mapping[str, object], **engine_options: object) -> None:
        if not url.database:
            raise ConfigurationError(
                f"the URL names no database: write it like {url.get_backend_name()}://user@host/database"
            )
        if any("@" in (part or "") for part in (url.host, url.database)):  # then they hold a part of the password
            raise ConfigurationError(
                f"the {url.get_backend_name()} URL has more than one '@': write special characters in the password "
                "as %XX, @ as %40 and / as %2F"
            )
        self.url: URL = url.set(drivername=self.driver)
        self.identity: URL = self.url.set(port=url.port or self.default_port)
        self.stops: StopLimit = StopLimit()
        self.server_timeout = SERVER_TIMEOUT
        self.job_patience: float | None = None
        """Seconds that a job waits for a full server to have a connection; None where no job makes the connections."""
        self._connect: Callable[[], object] | None = None
        # The URL itself wins over our defaults.
        arguments = {name: value for name, value in connect_args.items() if name not in url.query}
        try:
            self.engine: Engine = create_engine(
                self.url,
                poolclass=NullPool,
                isolation_level="AUTOCOMMIT",
                connect_args=arguments,
                hide_parameters=True,
                pool_reset_on_return=None,  # a connection is given back to be closed: no round trip for that
                **engine_options,
            )
        except ModuleNotFoundError as error:
            raise MissingExtra(self.extra, f"a {url.get_backend_name()}:// URL") from error
        except (ArgumentError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the URL of {self} has an option that cannot be used: {error}") from error
        event.listen(self.engine, "do_connect", self._make_connection)
        event.listen(self.engine, "connect", self._watch, insert=True)
        event.listen(self.engine, "close", _forget)
        event.listen(self.engine, "before_cursor_execute", _begins)
        event.listen(self.engine, "after_cursor_execute", _ends)

    @property
    def patience(self) -> float:
        """Seconds to wait for a connection."""
        return self.server_timeout

    @abstractmethod
    def check(self) -> None:
        """Connect once and refuse unusable servers: an old version, missing rights. Raises BackendUnusable."""

    @property
    def connect_timeout(self) -> float:
        """Seconds that connecting may take."""
        return self.stops.left(min(10.0, self.server_timeout))

    @property
    def lock_timeout(self) -> float:
        """Seconds that a statement waits for a lock, after which the server itself ends it."""
        return min(LOCK_TIMEOUT, self.server_timeout * 2 / 3)

    @property
    def setup_patience(self) -> float:
        """Seconds that a set-up waits for another: less than its answers may take."""
        return min(60.0, self.server_timeout * LONG_WORK * 2 / 3)

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Add the time limits to the driver's connect options; options in the URL win."""

    def url_of_engine(self, url: URL) -> URL:
        """Return the URL of an Engine for the same tables."""
        return url

    def descriptor(self, driver: Any) -> int | None:  # noqa: ANN401 - each driver has its own
        """Return the socket of the driver's connection; None where the driver limits its waits itself."""
        del driver
        return None

    def connect_with(self, connect: Callable[[], object]) -> None:
        """Make connections by a function of the user's."""
        self._connect = connect

    @abstractmethod
    def adopt(self, driver: Any) -> object:  # noqa: ANN401 - each driver has its own
        """Return a connection that the user's function has made, with the session settings that statements need.

        Raises ConfigurationError for a connection that is not the driver's.
        """

    def not_a_connection(self, driver: object, wanted: str) -> ConfigurationError:
        """Return the error for an object that is not a connection of the driver."""
        kind = f"{type(driver).__module__}.{type(driver).__qualname__}"
        return ConfigurationError(f"connect= or the Engine of {self} makes {kind} objects: they have to be {wanted}")

    def _make_connection(self, dialect: object, record: object, arguments: object, options: dict[str, Any]) -> object:
        """Return the user's connection, or None for SQLAlchemy to make one."""
        del dialect, record, arguments
        if self._connect is None:
            self.limit_connect(options)
            return None
        try:
            driver = self._connect()
        except Exception as error:
            if isinstance(error, (*self.errors.kinds, DelaylineError)):
                raise
            raise BackendUnavailable(f"no connection to {self}: connect= has failed: {error!r}") from error
        return self.adopt(driver)

    def _watch(self, driver: object, record: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        watch = record.info[WATCH] = AnswerDeadline(self.descriptor(driver), self.server_timeout, self.stops)
        watch.begin(self.server_timeout)  # until `connect` has finished

    def __str__(self) -> str:
        user = f"{self.url.username}@" if self.url.username else ""
        return f"{self.product} database {user}{','.join(map(str, self.hosts))}/{self.url.database}"

    @property
    def hosts(self) -> Sequence[Host]:
        """Where the server may be."""
        return hosts_of(self.url, self.default_port)

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port of the server, the first of several."""
        return self.hosts[0]

    def look(self) -> Connection:
        """Return a connection: being connected changes nothing on a server."""
        return self.connect()

    @property
    def sets_up_elsewhere(self) -> bool:
        """Whether another server creates tables than the one that is connected to."""
        return False

    def connect_to_set_up(self) -> Connection:
        """Return a new connection to the server that creates tables."""
        return self.connect()

    def connect(self) -> Connection:
        """Return a new connection in autocommit."""
        connection = self.connect_driver()
        watch_of(connection).end()
        return connection

    def connect_driver(self) -> Connection:
        """Return a new connection without settings; for a job it waits while the server is full."""
        until, pause = time.monotonic() + (self.job_patience or 0.0), FIRST_PAUSE
        while True:
            try:
                return self.engine.connect()
            except self.errors.kinds as error:
                left = until - time.monotonic()
                if left <= 0 or self.stops.at is not None or not self.errors.is_full(error):
                    raise
            time.sleep(min(left, pause * random.uniform(0.5, 1.5)))  # noqa: S311 - spreads load
            pause = min(pause * 2, LONGEST_PAUSE)

    @property
    def idle_transaction_timeout(self) -> float:
        """Seconds after which the server ends a job's transaction in which nothing is asked of it."""
        return self.server_timeout * JOB_WORK

    def ping(self, connection: Connection) -> bool:
        """Ask the server for a sign of life; writes are not asked for."""
        run(connection, "SELECT 1")
        return True


class ServerTransactions(TransactionControl):
    """Transactions that begin and end by statements."""

    BEGIN: ClassVar[str] = "BEGIN"
    COMMIT: ClassVar[str] = "COMMIT"
    ROLLBACK: ClassVar[str] = "ROLLBACK"
    SAVEPOINT: ClassVar[str] = "SAVEPOINT delayline"
    ROLLBACK_TO: ClassVar[str] = "ROLLBACK TO SAVEPOINT delayline"
    RELEASE: ClassVar[str] = "RELEASE SAVEPOINT delayline"

    def __init__(self, errors: ServerErrors) -> None:
        self._errors = errors

    def begin(self, connection: Connection) -> None:
        """Begin a transaction."""
        run(connection, self.BEGIN)

    def commit(self, connection: Connection) -> None:
        """Commit; durable on return."""
        try:
            run(connection, self.COMMIT)
        except self._errors.kinds:
            connection.info[NOT_COMMITTED] = True
            raise

    def rollback(self, connection: Connection) -> None:
        """Roll back; a connection that is lost has been rolled back by the server."""
        if not self._errors.is_broken(connection):
            run(connection, self.ROLLBACK)

    def set_savepoint(self, connection: Connection) -> None:
        """Mark where `roll_back_to_savepoint` goes back to."""
        run(connection, self.SAVEPOINT)

    def roll_back_to_savepoint(self, connection: Connection) -> None:
        """Roll back to the savepoint, which stays set."""
        run(connection, self.ROLLBACK_TO)

    def release_savepoint(self, connection: Connection) -> None:
        """Release the savepoint and keep the work since."""
        run(connection, self.RELEASE)


class Server(Dialect):
    """A database of a server: besides its parts, how its product claims, notifies and moves."""

    connections: ServerConnections
    errors: ServerErrors

    def loop_statements(self, database: ServerSessions) -> LoopStatements | None:
        """Return the fast route for single statements; None where a worker thread has to run them."""
        del database
        return None

    @abstractmethod
    def notifications(self, database: ServerSessions) -> ServerNotifications:
        """Return the notifications of this server."""

    @abstractmethod
    def claims(self, database: ServerSessions, table: str) -> ServerClaims:
        """Return claims on the rows of that table."""

    def leases(self, table: Table, tables: QueueTables) -> Leases:
        """Return the leases on a store's messages that are fetched without a transaction: by default a column."""
        del tables
        return LeaseColumn(table, self)

    @abstractmethod
    def forwarding(self, statements: StoreStatements, tables: QueueTables) -> Forwarding:
        """Return how due messages of a store move inside the server."""


class LoopStatements(Protocol):
    """A short way for single statements outside transactions, without a worker thread."""

    async def run(self, statement: Prepared, values: tuple[Any, ...]) -> StatementResult | None:
        """Run the statement, which commits by itself; None if it has to go the ordinary way, and nothing was done."""

    def rest(self) -> None:
        """Give a connection that has not been used for a while back to the pool. Never blocks."""

    def close(self) -> None:
        """Finish the work in progress and accept no more; blocks."""


class ServerSession(Protocol):
    """A connection to a server that is made anew when it was lost. Used by a single thread at a time."""

    driver: Any
    """The driver's connection; None while there is none."""

    @property
    def trusted(self) -> bool:
        """Whether the connection can be used without trying it first."""

    def run(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        """Run `work` while no transaction is open; driver errors are raised as delayline's.

        Args:
            work: the function to run.
            commits: whether the statement commits by itself, so that a lost answer leaves its outcome unknown.
        """

    def waits(self) -> None:
        """Expect an answer within the limit."""

    def answered(self) -> None:
        """Note that the connection was alive a moment ago."""

    def failed(self, error: Exception, *, commits: bool) -> Exception:
        """Return delayline's error for a driver's, having given the connection up if that was its end."""

    def give_back(self) -> None:
        """Let others use the connection."""

    def close(self) -> None:
        """Disconnect. Idempotent."""


class ServerSessions(Protocol):
    """The sessions and worker threads of a server's database."""

    dialect: Server

    @property
    def clock(self) -> ServerClock:
        """The server's."""

    def session(self) -> ServerSession:
        """Return an idle connection, or a new connection; on a worker thread."""

    def use_session(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on an idle connection, or on a new connection; on a worker thread."""

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a worker thread."""

    def spawn(self, work: Callable[[], object]) -> None:
        """Schedule `work` on a worker thread without waiting for it. No-op once closed."""

    def close_unused(self) -> None:
        """Close the connection that was used longest ago, if that is a while ago. Never blocks."""


class Leases(Protocol):
    """The leases on a store's messages."""

    in_row: ClassVar[bool]
    """Whether leases are columns of the row: then they end with it, and a transaction that locks it sees the latest."""
    free: ColumnElement[bool]
    """The condition that the row is not leased."""

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease messages whose rows are locked; return the messages that no other process leased at the same moment."""

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases on the messages."""


class LeaseColumn:
    """Leases in a column of the store's table."""

    in_row: ClassVar[bool] = True

    def __init__(self, table: Table, dialect: Server) -> None:
        sql, until, by_ids = dialect.sql, table.c.leased_until, dialect.words.one_of(table.c.id, "keys")
        self.free: ColumnElement[bool] = or_(until.is_(None), until < dialect.values.in_seconds(0))
        self._take = Prepared(
            update(table).where(by_ids).values(leased_until=dialect.values.in_seconds(LEASE)), sql, ["keys"]
        )
        self._end = Prepared(update(table).where(by_ids).values(leased_until=null()), sql, ["keys"])

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease the messages."""
        self._take.change_each(connection, keys=ids)
        return ids

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases."""
        self._end.change_each(connection, keys=ids)


def watch_of(connection: Connection) -> AnswerDeadline:
    """Return the watch over the waits of a connection of ours."""
    watch: AnswerDeadline = connection.info[WATCH]
    return watch


def _forget(driver: object, record: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
    del driver
    watch = record.info.pop(WATCH, None)
    if watch is not None:
        watch.close()


def _begins(connection: Connection, *_: object) -> None:
    """Limit a statement of a connection that no session uses, which limits whole pieces of work."""
    watch = watch_of(connection)
    if watch.deadline is None:
        watch.begin(watch.limit * LONG_WORK)


def _ends(connection: Connection, *_: object) -> None:
    watch = watch_of(connection)
    if not connection.info.get(IN_SESSION):
        watch.end()


def run(connection: Connection, sql: str, *values: Any) -> list[Any]:  # noqa: ANN401
    """Execute on the driver's own cursor and return the rows, if it gives any."""
    cursor = connection.connection.cursor()
    cursor.execute(sql, values)
    rows = list(cursor.fetchall()) if cursor.description else []
    cursor.close()
    return rows


def cause_of(error: BaseException) -> BaseException:
    """Return the driver's error inside SQLAlchemy's."""
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
