"""Common parts of the server dialects: connections in autocommit, transactions by statements, and session claims.

Session claims on queue rows end with their holder's connection: they are a session's locks on names or numbers. A row
lock would need a transaction that stays open while a handler runs, and an open transaction keeps the server from
cleaning up behind all others. A claim hides a message from other receivers; what makes its handling count once is
the row, which can be deleted once only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from sqlalchemy import (
    URL,
    and_,
    bindparam,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, PendingRollbackError
from sqlalchemy.pool import NullPool

from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError, MissingExtra
from delayline.sql.deadlines import (
    LOCK_TIMEOUT,
    LONG_WORK,
    SERVER_TIMEOUT,
    STOPPING_EACH,
    WATCH,
    AnswerDeadline,
    StopLimit,
)
from delayline.sql.dialect import Connections, Dialect, DriverErrors, TransactionControl
from delayline.sql.moves import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order
from delayline.sql.statements import EXPIRY_MARKER, MARKER
from delayline.sql.urls import hosts_of
from delayline.sql.workers import is_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Column, ColumnElement, Connection, Table
    from sqlalchemy.sql.base import ReadOnlyColumnCollection

    from delayline.sql.claims import ServerClaims
    from delayline.sql.moves import Forwarding
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import StatementResult
    from delayline.sql.schema import QueueTables
    from delayline.sql.server_clock import ServerClock
    from delayline.sql.urls import Host

    Columns = ReadOnlyColumnCollection[str, Column[Any]]


Result = TypeVar("Result")
LEASE: Final = 60  # seconds; a dispatch takes less


#: Set on a connection whose commit failed: if the connection is lost as well, the outcome is unknown.
NOT_COMMITTED: Final = "delayline not committed"


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
        self.url = url.set(drivername=self.driver)
        self.identity = self.url.set(port=url.port or self.default_port)
        self.stops = StopLimit()
        self.server_timeout = SERVER_TIMEOUT
        self._connect: Callable[[], object] | None = None
        # The URL itself wins over our defaults.
        arguments = {name: value for name, value in connect_args.items() if name not in url.query}
        try:
            self.engine = create_engine(
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

    def connect(self) -> Connection:
        """Return a new connection in autocommit."""
        connection = self.engine.connect()
        watch_of(connection).end()
        return connection

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
    def forwarding(self, table: Table, tables: QueueTables) -> Forwarding:
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
        self.free = or_(until.is_(None), until < dialect.values.in_seconds(0))
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


RECLAIM_EVERY: Final = 1.0  # seconds between looks whether the session of claims is used by something that has ended
FORGOTTEN_AT_ONCE: Final = 100  # locks on rows that are gone; a server has room for some thousands


class SessionClaims(ABC):
    """This process's claims on the rows of a table. Safe to call from any thread; `take` blocks for a round trip."""

    def __init__(self, database: ServerSessions) -> None:
        self._database = database
        self._session = database.session()
        self._claimed: set[int] = set()
        self._released: list[int] = []
        self._lock = threading.Lock()  # never held for long: `release` is called on event loops
        self._in_use = threading.Lock()
        self._locked_by: Connection | None = None

    @abstractmethod
    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock rows that no other session has locked, without waiting, and return them."""

    @abstractmethod
    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock rows that this session has locked."""

    def exchange(self, connection: Connection, released: Sequence[int], rows: Sequence[int]) -> set[int]:
        """Unlock the released rows, if any, then lock rows as `try_lock` does."""
        if released:
            self.unlock(connection, released)
        return self.try_lock(connection, rows)

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        with self._in_session():
            with self._lock:
                wanted = [row for row in rows if row not in self._claimed]
            claimed: list[int] = []
            try:
                while wanted and len(claimed) < limit:
                    some, wanted = wanted[: limit - len(claimed)], wanted[limit - len(claimed) :]
                    claimed += self._session.run(partial(self._try, rows=some))
            except BaseException:
                self._session.close()  # the session's end also ends locks whose acquisition was not confirmed
                raise
            with self._lock:
                if is_given_up():
                    self._released += claimed
                    return []
                self._claimed.update(claimed)
            return claimed

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims: here at once, for other sessions with the next `flush`."""
        if self._give_up(rows):
            self._database.spawn(self.flush)

    def forget(self, rows: Iterable[int]) -> None:
        """Give up claims on rows that are gone: the next `take` unlocks them on its way, a round trip cheaper."""
        if self._give_up(rows) > FORGOTTEN_AT_ONCE:
            self._database.spawn(self.flush)

    def flush(self) -> None:
        """Make released rows available to other sessions; blocks for a round trip."""
        with self._in_session():
            if self._released:
                self._session.run(self._unlock_released)

    def number_claimed_after(self, row: int) -> int:
        """Return how many rows this process holds whose numbers are higher."""
        with self._lock:
            return sum(claimed > row for claimed in self._claimed)

    def holds(self, row: int) -> bool:
        """Return whether this process holds the row, as of its last request."""
        return row in self._claimed

    def close(self) -> None:
        """Give up every claim."""
        in_use = self._in_use.acquire(timeout=STOPPING_EACH)
        try:
            self._session.close()  # which ends the claims; a thread that still uses it is cut off
            with self._lock:
                self._claimed.clear()
                self._released.clear()
        finally:
            if in_use:
                self._in_use.release()

    @contextlib.contextmanager
    def _in_session(self) -> Iterator[None]:
        """Keep other threads from the session. Raises BackendUnavailable where others keep it for too long."""
        dialect, begun = self._database.dialect, time.monotonic()
        end = begun + 2 * dialect.connections.server_timeout
        while not self._in_use.acquire(timeout=RECLAIM_EVERY):
            self._reclaim()
            if time.monotonic() > dialect.connections.stops.end_of(end, begun):
                raise BackendUnavailable(
                    f"{dialect} has not answered an earlier request on the connection of the claims: check that the "
                    "server and the network are alive, or raise server_timeout"
                )
        try:
            yield
        finally:
            self._in_use.release()

    def _reclaim(self) -> None:  # noqa: B027 - for sessions that an event loop uses too
        """End a use of the session that cannot end by itself."""

    def _give_up(self, rows: Iterable[int]) -> int:
        """Give them up here; return how many are to be unlocked."""
        with self._lock:
            known = self._claimed.intersection(rows)
            self._claimed -= known
            self._released += known
            return len(self._released)

    def _try(self, connection: Connection, rows: list[int]) -> list[int]:
        locked = self.exchange(connection, self._settle(connection), rows)
        return [row for row in rows if row in locked]

    def _unlock_released(self, connection: Connection) -> None:
        if released := self._settle(connection):
            self.unlock(connection, released)

    def _settle(self, connection: Connection) -> list[int]:
        """Return the rows to unlock; after a lost connection, lock again the rows that are still free."""
        self._lock_again(connection)
        return self._take_released()

    def _take_released(self) -> list[int]:
        """Return the rows to unlock; the caller unlocks them."""
        with self._lock:
            released, self._released = self._released, []
        return released

    def _lock_again(self, connection: Connection) -> None:
        """Lock rows that are still free again after a lost connection."""
        if connection is not self._locked_by:
            with self._lock:
                before = set(self._claimed)
                self._released.clear()
            again = self.try_lock(connection, list(before)) if before else before
            with self._lock:
                self._claimed -= before - again
            self._locked_by = connection


class LockedForwarding:
    """Moves the earliest due messages that are not locked, on servers that need a statement per step."""

    one_statement = False

    def __init__(self, table: Table, tables: QueueTables, dialect: Server) -> None:
        columns, sql = table.c, dialect.sql
        size = func.length(columns.headers) + func.length(columns.body)
        known = exists().where(tables.queues.c.name == dialect.words.exact(columns.destination))
        movable = self.movable(columns, known)
        is_due = and_(columns.due <= bindparam("until"), dialect.leases(table, tables).free)
        heads = select(columns.id, columns.due, columns.destination, size, movable).where(is_due)
        heads = heads.order_by(*in_order(table)).limit(bindparam("number")).with_for_update(skip_locked=True)
        chosen = dialect.words.one_of(columns.id, "keys")
        moved = select(columns.destination, columns.id, columns.headers, self.body(columns)).where(chosen)
        move = insert(tables.queued).from_select(["queue", "id", "headers", "body"], moved.order_by(*in_order(table)))
        since = columns.due >= bindparam("since")
        self._heads = Prepared(heads, sql, ["until", "number"])
        self._heads_since = Prepared(heads.where(since), sql, ["until", "number", "since"])
        self._move = Prepared(move, sql, ["keys"])
        self._remove = Prepared(delete(table).where(chosen), sql, ["keys"])

    def movable(self, columns: Columns, known: ColumnElement[bool]) -> ColumnElement[Any]:
        """Return the condition for messages that only need moving; `known`: their queue exists."""
        markers: list[ColumnElement[bytes]] = [bindparam("marker", MARKER), bindparam("expiry", EXPIRY_MARKER)]
        return and_(*(func.instr(columns.headers, marker) == literal_column("0") for marker in markers), known)

    def body(self, columns: Columns) -> ColumnElement[bytes]:
        """Return the body, as the queue takes it."""
        return columns.body

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
        """Move messages, only from `since` on if given, and return the result, with `counts` if `counted`."""
        if since is None:
            heads = self._heads.rows(connection, until, limit)
        else:
            heads = self._heads_since.rows(connection, until, limit, since)
        movable = [head for head in heads if head[-1]]
        chosen, left = _fitting(movable, max_bytes), len(heads) - len(movable)
        if not chosen:
            return Moved(0, set(), left, until if heads else None)
        if not self.move(connection, [head[0] for head in chosen]):
            return Moved(0, set(), len(heads), until)
        more, reached = len(chosen) < len(movable) or len(heads) == limit, chosen[-1][1]
        return Moved(
            len(chosen),
            {head[2] for head in chosen},
            left,
            until if more else None,
            None if left else reached,
            Counter((head[2], head[1]) for head in chosen) if counted else None,
        )

    def move(self, connection: Connection, ids: Sequence[str]) -> bool:
        """Move messages that are locked; False where that is left to the poller's own hands, and nothing is done."""
        moved = self._move.change_each(connection, keys=ids)
        removed = self._remove.change_each(connection, keys=ids)
        if not moved == removed == len(ids):
            raise RuntimeError(f"{len(ids)} messages were locked, {moved} were moved and {removed} removed")
        return True


def _fitting(heads: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Return as many as fit, at least the first."""
    for number, (_, _, _, size, _) in enumerate(heads):
        max_bytes -= size
        if number and max_bytes < 0:
            return heads[:number]
    return heads
