"""A database on a server: its connections, and concurrent statements with row locks.

The pool of connections is our own. SQLAlchemy's QueuePool, or another ready one, waits for a driver as long as that
takes, and knows each connection by itself. Here:

- Every answer has a deadline (`deadlines`): the socket of one that misses it is cut by another thread. A server that is
  silent costs one wait then: callers fail at once, and one at a time asks it again (`missed`, `probe`, `answers`).
- What one connection finds out holds for all of its generation: when the server is gone they are tried before they are
  used again (`lost`), after a switch to another primary they are replaced (`outdate`).
- Statements outside of transactions have connections and threads that transactions cannot take: one that waits for a
  lock never keeps the statement from running that releases it. Transactions wait for a connection in their order.
- A stop has one limit for all waits together, and a fork leaves the parent's connections as they are.

A connection (`Session`)::

    none <--------------------------------------------------------------------------.
      | connect, at the next work                                                   |
      v                                                                             |
    AT WORK of one thread -- the deadline is missed, or the connection is lost -----+ the thread that waits closes it
      |   ^                                                                         |
      |   | taken; after 5 idle seconds, 30 s without one, or `lost`: pinged first, | no answer, or a replica's
      |   |                                                                         |
      v   |                                                                         |
    IDLE -+--- for 30 s while others are used, or `outdate` ------------------------'

Threads: workers for statements, others for transactions, one that listens (`notifications`), one that watches the
deadlines of the process, and during a stop one that gives up work whose connection cannot be cut (`_abandon`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from delayline.errors import BackendUnavailable, DelaylineError, NotStarted
from delayline.sql.database import Database
from delayline.sql.deadlines import ABANDONED_AFTER, FACTOR, STOPPING, WATCH, StopLimit, long_work, watch_over
from delayline.sql.overdue import OverdueWork
from delayline.sql.prepared import Prepared
from delayline.sql.server import IN_SESSION, NOT_COMMITTED
from delayline.sql.server_clock import ServerClock, steady
from delayline.sql.workers import FairSemaphore, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.sql.claims import ServerClaims
    from delayline.sql.database import RowsOf
    from delayline.sql.deadlines import AnswerDeadline
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import StatementResult
    from delayline.sql.server import Server
    from delayline.sql.transactions import EnlistedTransaction
    from delayline.transaction import Transaction


Result = TypeVar("Result")
UNKNOWN: Final = "The commit's outcome is unknown: check whether the data was written before repeating it"
PING_AFTER: Final = 5.0  # idle seconds after which a connection is tested before use
CLOSE_AFTER: Final = 30.0  # idle seconds after which a connection is closed while others are in use
CLOSE_EVERY: Final = 0.1  # seconds from one look for such a connection to the next
PING_TIMEOUT: Final = 5.0  # seconds at most that the answer to that may take
#: Seconds after which one in use is asked too: a server that has become a replica answers, and takes no writes.
PING_EVERY: Final = 30.0


class Session:
    """One connection, for as long as it lasts, and then another one. Used by one thread at a time."""

    def __init__(self, database: ServerDatabase) -> None:
        self._database = database
        dialect = database.dialect
        self._connections, self._errors, self._transactions = dialect.connections, dialect.errors, dialect.transactions
        self._connection: Connection | None = None
        self.driver: Any = None
        """The driver's connection; None while there is none."""
        self._watch: AnswerDeadline | None = None
        self._generation = 0
        self._used = 0.0
        self._pinged = 0.0
        self._process = os.getpid()
        self._thread: int | None = None
        """The thread whose work runs on the connection."""
        self._abandoned = False

    def run(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        if self._database.silent:
            self._database.probe()
        with self._at_work():
            try:
                connection = self._trusted()
            except self._errors.kinds as error:  # open connections may still work: the server may be full
                raise self._errors.translated(error) from error
            return self._run(work, connection, commits=commits)

    def go_on(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in the transaction that is open; never outside it, on a new connection."""
        if self._connection is None:
            raise BackendUnavailable(
                f"the connection to {self._connections} was lost in the middle of a transaction, which is undone: "
                "repeat it"
            )
        with self._at_work():
            return self._run(work, self._connection, commits=False)

    def in_transaction(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        """Run `work` in a separate transaction; inside `run`, on the session's connection."""
        self._transactions.begin(connection)
        try:
            result = work(connection)
            self._transactions.commit(connection)
        except BaseException:
            try:
                self._transactions.rollback(connection)
            except BaseException:
                self.close()
                raise
            raise
        return result

    @property
    def is_at_work(self) -> bool:
        """Whether work of some thread runs on the connection."""
        return self._thread is not None

    @property
    def trusted(self) -> bool:
        """Whether the connection can be used without trying it first."""
        now = time.monotonic()
        return (
            self._connection is not None
            and self._generation == self._database.generation
            and now - self._used <= PING_AFTER
            and now - self._pinged <= PING_EVERY
            and not self._missed
        )

    @property
    def used(self) -> float:
        """When the server has last answered here."""
        return self._used

    def waits(self) -> None:
        """Expect an answer within the limit."""
        if self._watch is not None:
            self._watch.begin(self._connections.server_timeout)

    def answered(self) -> None:
        """Note that the connection was alive a moment ago."""
        if self._watch is not None:
            self._watch.deadline = None
        self._used = time.monotonic()
        if self._database.silent:
            self._database.answers()

    def failed(self, error: Exception, *, commits: bool) -> Exception:
        """Return delayline's error for a driver's, having given the connection up if that was its end."""
        translated = self._errors.translated(error)
        connection = self._connection
        broken = connection is not None and self._errors.is_broken(connection)
        if connection is not None and not connection.invalidated:  # SQLAlchemy asks one that is for another one
            commits = connection.info.pop(NOT_COMMITTED, commits)
        missed = self._missed
        if missed or broken or self._errors.is_disconnect(error):
            if missed:
                translated = self._overdue(self._connections.server_timeout * FACTOR.get())
            elif not isinstance(translated, DelaylineError):
                translated = BackendUnavailable(f"the connection to {self._connections} is lost: {error}")
            if commits:
                translated = BackendUnavailable(f"{translated}. {UNKNOWN}")
            self._database.lost(self._generation)
            self.close()
        elif self._errors.outdates_sessions(error):  # which has had no effect
            self.answered()
            self._database.outdate(self._generation)
            self.close()
        else:
            self.answered()
            if self._errors.has_rolled_back(error):
                self.close()
        return translated

    def give_back(self) -> None:
        """Let others use the connection."""
        self._database.give_back(self)

    def close(self) -> None:
        """Disconnect. Idempotent; leaves a connection that another process has made to that one.

        A connection on which another thread still waits for the server is cut, and that thread disconnects.
        """
        if self._thread not in (None, threading.get_ident()):
            self._abandoned = True
            if self._watch is not None:
                self._watch.cut()
            return
        connection, self._connection, self.driver = self._connection, None, None
        watch, self._watch = self._watch, None
        if connection is None:
            return
        if self._process != os.getpid():
            _inherited.append(connection)
            return
        if watch is not None:
            if self._database.silent:
                watch.cut()  # ending a connection in order asks the server too
            else:
                watch.begin(min(self._connections.server_timeout, PING_TIMEOUT))
        began = time.monotonic()
        with contextlib.suppress(*self._errors.kinds):
            connection.close()
        if watch is not None and watch.missed and not self._database.silent:
            self._database.missed(self, began)

    def _run(self, work: Callable[[Connection], Result], connection: Connection, *, commits: bool) -> Result:
        watch = self._watch
        if watch is not None:
            watch.begin(self._connections.server_timeout * FACTOR.get())
        try:
            result = work(connection)
        except self._errors.kinds as error:
            raise self.failed(error, commits=commits) from error
        except BaseException:
            if watch is not None:
                watch.end()
            raise
        self.answered()
        return result

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        thread, this = self._thread, threading.get_ident()
        if thread not in (None, this):
            raise BackendUnavailable(f"{self._connections} has not answered an earlier request on this connection")
        self._thread = this
        try:
            yield
        finally:
            self._thread = thread
            if self._abandoned and thread is None:
                self.close()

    @property
    def _missed(self) -> bool:
        return self._watch is not None and self._watch.missed

    def _overdue(self, seconds: float) -> BackendUnavailable:
        seconds = min(seconds, self._connections.server_timeout * FACTOR.get())
        if self._watch is not None and self._connections.stops.at is not None:
            seconds = min(seconds, round(time.monotonic() - self._watch.since, 1))
        self._database.missed(self, time.monotonic() - seconds)
        return BackendUnavailable(
            f"no answer from {self._connections} within {seconds:g} s: check that the server and the network are "
            "alive, or raise server_timeout"
        )

    def _trusted(self) -> Connection:
        generation = self._database.generation
        if self._connection is not None and self._generation < self._database.usable_since:
            self.close()
        if self._connection is not None and not self.trusted:
            if self._watch is not None:
                self._watch.begin(min(self._connections.server_timeout, PING_TIMEOUT))
            try:
                if self._missed:
                    self.close()
                else:
                    writes = self._connections.ping(self._connection)
                    self.answered()
                    self._pinged = self._used
                    if not writes:
                        self._database.outdate(self._generation)
                        generation = self._database.generation
                        self.close()
            except self._errors.kinds:
                if self._missed:
                    overdue = self._overdue(PING_TIMEOUT)
                    self.close()
                    raise overdue from None
                self._database.lost(self._generation)
                generation = self._database.generation
                self.close()
        if self._connection is None:
            self._connection = self._connect()
            self._pinged = time.monotonic()
            self.driver = self._connection.connection.driver_connection
            self._watch = self._connection.info[WATCH]
            self._connection.info[IN_SESSION] = True
        if self._abandoned:
            raise BackendUnavailable(f"{self._connections} was closed before the server had answered")
        self._generation = generation
        return self._connection

    def _connect(self) -> Connection:
        began, limit = time.monotonic(), self._connections.connect_timeout
        try:
            return self._connections.connect()
        except self._errors.kinds:
            if time.monotonic() - began >= 0.9 * limit:
                self._database.missed(self, began)
            elif self._database.silent:  # a refusal is an answer
                self._database.answers()
            raise


class SessionCheckout:
    """A connection for one transaction, and the transaction's permit of the semaphore."""

    def __init__(self, database: ServerDatabase) -> None:
        self._database = database
        self._semaphore = database.semaphore
        self._session: Session | None = None

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the connection."""
        if self._semaphore is not self._database.semaphore:
            raise NotStarted(f"{self._database.dialect} was closed in the middle of a transaction, which is undone")
        return await self._database.run_in_transaction(lambda: self._run(work))

    def leave(self) -> None:
        """Let the next transaction have it."""
        if self._session is not None:
            self._database.give_back(self._session)
        self._leave()

    def discard(self) -> None:
        """Withdraw the connection: its state is unknown."""
        if self._session is not None:
            self._database.discard(self._session)
        self._leave()

    def _leave(self) -> None:
        self._session = None
        self._semaphore.leave()

    def _run(self, work: Callable[[Connection], Result]) -> Result:
        if self._session is not None:
            return self._session.go_on(work)
        self._session = self._database.session()
        return self._session.run(work)


POOL_SIZE: Final = 4
PROBE_AFTER: Final = 5.0  # seconds at most after a missed answer until the server is asked again
LARGE_INSERT: Final = 8_000_000  # bytes of headers and bodies from which on the answer may take longer
DEADLOCKS: Final = 5  # in a row; after that the caller decides


def workers_of(pool_size: int) -> int:
    """Return how many connections of a pool are for statements outside transactions: a third, rounded up."""
    return math.ceil(pool_size / 3)


class ServerDatabase(Database):
    """A server's database. Statements outside transactions run on a few connections, one per worker thread.

    Each transaction has its own connection. A third of the pool, rounded up, is for statements, the rest for
    transactions; further ones wait.
    """

    locks_rows = True
    dialect: Server

    def __init__(self, dialect: Server) -> None:
        super().__init__()
        self.dialect = dialect
        self._clock = ServerClock(lambda: self.spawn(self._ask_the_time), dialect.values.clock_tick)
        self._now = Prepared(select(dialect.values.in_seconds(0)), dialect.sql, [])
        self._abandoning: threading.Thread | None = None
        self._stops_over = threading.Event()
        self._limiting = threading.Lock()
        self._pool_sizes: list[int] = []
        self._begin_anew()

    @property
    def workers(self) -> int:
        """How many connections are for statements outside transactions."""
        return workers_of(max(self._pool_sizes, default=POOL_SIZE))

    @property
    def transactions(self) -> int:
        """How many transactions may be open at a time."""
        return max(self._pool_sizes, default=POOL_SIZE) - self.workers

    def resize_pool(self, size: int) -> None:
        """Use up to so many connections from the next `open` on, or as many as were given before if that is more."""
        self._pool_sizes.append(size)
        if self._workers is None:
            self.semaphore = FairSemaphore(self.transactions)

    def connect_with(self, connect: Callable[[], object]) -> None:
        """Make connections by a function of the user's."""
        self.dialect.connections.connect_with(connect)

    def _begin_anew(self) -> None:
        self.semaphore = FairSemaphore(self.transactions)
        self._probing = threading.Lock()
        self._workers: Workers | None = None
        self._transacting: Workers | None = None
        self._stop_watching: Callable[[], None] = _nothing
        self._all: set[Session] = set()
        self._idle: list[Session] = []
        self._closes_at = 0.0
        self._generation = 0
        self.usable_since = 0
        self.silent = False
        self._silent_until = 0.0
        self._notifications: ServerNotifications | None = None
        self._claims: dict[str, ServerClaims] = {}
        self._loop_statements = self.dialect.loop_statements(self)

    @property
    def clock(self) -> ServerClock:
        """The server's."""
        return self._clock

    @property
    def notifications(self) -> ServerNotifications:
        """The server's own where it has some."""
        if self._notifications is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return self._notifications

    async def notify_at_external_commit(
        self, notifications: Mapping[str, int], transaction: EnlistedTransaction
    ) -> None:
        """Notify inside the transaction, where the server delivers notifications at its commit."""
        for channel, at in notifications.items():
            await transaction.run(partial(self.notifications.notify_in, channel=channel, at=at))

    def claims(self, table: str) -> ServerClaims:
        """Locks that the server ends with the connection."""
        with self._opening:
            if table not in self._claims:
                self._claims[table] = self.dialect.claims(self, table)
            return self._claims[table]

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on some connection, each of its statements by itself."""
        return await self.run(partial(self.use_session, work))

    async def insert(
        self, statement: Prepared, rows: Sequence[tuple[Any, ...]], transaction: Transaction | None = None
    ) -> None:
        """Insert the rows."""
        if transaction is not None:
            await super().insert(statement, rows, transaction)
        elif len(rows) == 1:
            # The fast path has no limit but the server's; the other one checks the product's limits of size.
            if await self._run_on_loop(statement, rows[0]) is None:
                await super().insert(statement, rows)
        else:
            insert = partial(self.insert_from, statement, lambda _: rows)
            is_large = sum(len(row[3]) + len(row[4]) for row in rows) > LARGE_INSERT
            await (long_work(insert) if is_large else insert)()

    async def insert_one(
        self, statement: Prepared, row: tuple[Any, ...], transaction: Transaction | None = None
    ) -> int:
        """Run the insert, the short way where there is one that is free."""
        if transaction is None and (result := await self._run_on_loop(statement, row)) is not None:
            return result.affected
        return await super().insert_one(statement, row, transaction)

    async def run_statement(self, statement: Prepared, *values: Any) -> StatementResult:  # noqa: ANN401
        """Run the statement, the short way where there is one that is free."""
        result = await self._run_on_loop(statement, values)
        return await super().run_statement(statement, *values) if result is None else result

    async def _run_on_loop(self, statement: Prepared, values: tuple[Any, ...]) -> StatementResult | None:
        return None if self._loop_statements is None else await self._loop_statements.run(statement, values)

    async def insert_from(self, statement: Prepared, rows_of: RowsOf, transaction: Transaction | None = None) -> None:
        """Insert the rows, by one statement that commits by itself where that is possible."""
        if transaction is None:
            await self.run(partial(self._insert_many, statement, rows_of))
        else:
            await super().insert_from(statement, rows_of, transaction)

    async def hold(self) -> SessionCheckout:
        """Wait for one of the transactions' connections; raises BackendUnavailable when none comes free."""
        patience = self.dialect.connections.patience
        try:
            async with asyncio.timeout(patience):
                await self.semaphore.enter()
        except TimeoutError as error:
            raise BackendUnavailable(
                f"all {self.transactions} transactions on {self.dialect} have been busy for "
                f"{patience:g} s: end them sooner, handle fewer messages at once, or raise pool_size"
            ) from error
        return SessionCheckout(self)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a worker thread."""
        if self._workers is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._workers.run(work)

    def spawn(self, work: Callable[[], object]) -> None:
        """Schedule `work` on a worker thread without waiting for it. No-op once closed."""
        if self._workers is not None:
            self._workers.spawn(work)

    async def run_in_transaction(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a thread for transactions, so that waiting for a lock does not block the work that holds it."""
        if self._transacting is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._transacting.run(work)

    def session(self) -> Session:
        """Return the idle connection that was used last, or a new one; on a worker thread."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return self._new_session()

    def use_session(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        """Run `work` on an idle connection, or on a new one; on a worker thread."""
        with self._idle_session() as session:
            return session.run(work, commits=commits)

    @contextlib.contextmanager
    def _idle_session(self) -> Iterator[Session]:
        session = self.session()
        try:
            yield session
        finally:
            self.give_back(session)

    def give_back(self, session: Session) -> None:
        """Keep the connection for the next work."""
        self.close_unused()  # before, as it may give back another one, which is not as good
        if session in self._all and not session.is_at_work:
            self._idle.append(session)
        else:  # closed meanwhile, and perhaps opened again
            session.close()

    def close_unused(self) -> None:
        """Close the connection that was used longest ago, if that is a while ago. Never blocks."""
        now = time.monotonic()
        if now < self._closes_at:
            return
        self._closes_at = now + CLOSE_EVERY
        if self._loop_statements is not None:
            self._loop_statements.rest()
        with contextlib.suppress(IndexError):  # taken meanwhile
            if now - self._idle[0].used > CLOSE_AFTER:
                self.discard(self._idle.pop(0))

    def discard(self, session: Session) -> None:
        """Close a connection whose state is unknown."""
        self._all.discard(session)
        if self._workers is None:
            session.close()
        else:
            self._workers.spawn(session.close)

    def lost(self, generation: int) -> None:
        """Try every connection of this generation before it is used again: one of them has found the server gone."""
        if generation == self._generation:  # otherwise another one has found it before
            self._generation += 1

    def outdate(self, generation: int) -> None:
        """Replace every connection of this generation: one of them has answered, and is of no use any more."""
        self.lost(generation)
        if generation >= self.usable_since:
            self.usable_since = self._generation
            while self._idle:
                with contextlib.suppress(IndexError):  # taken meanwhile
                    self.discard(self._idle.pop())
            if self._notifications is not None:
                self._notifications.renew()

    def missed(self, session: Session, since: float) -> None:
        """Note that an answer is overdue since then; unless others have come meanwhile the server is silent.

        During a stop it is silent in any case.
        """
        if self.dialect.connections.stops.at is None and any(
            other is not session and other.used > since for other in list(self._all)
        ):
            return
        self._silent_until = time.monotonic() + min(PROBE_AFTER, self.dialect.connections.server_timeout / 3)
        self.silent = True

    def answers(self) -> None:
        """Note that the server is not silent any more."""
        self.silent = False

    def probe(self) -> None:
        """Return when it is time to ask a silent server again, for one caller; else raise BackendUnavailable.

        During a stop it is not asked again: every further wait would be one more that the stop takes.
        """
        with self._probing:
            now = time.monotonic()
            if self.silent and (now < self._silent_until or self.dialect.connections.stops.at is not None):
                raise BackendUnavailable(
                    f"{self.dialect} has left a request without an answer, and is asked again in a moment: "
                    "check that the server and the network are alive"
                )
            self._silent_until = now + self.dialect.connections.server_timeout

    @property
    def generation(self) -> int:
        """Counts how often the server was found gone."""
        return self._generation

    async def _write_alone(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result:
        return await self.run(partial(self._write_in_session, work, one_statement=one_statement))

    def _write_in_session(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result:
        with self._idle_session() as session:
            whole = work if one_statement else partial(session.in_transaction, work)
            return session.run(partial(self._again_after_deadlocks, whole), commits=one_statement)

    def _insert_many(self, statement: Prepared, rows_of: RowsOf) -> None:
        with self._idle_session() as session:
            rows = session.run(rows_of)
            if not rows:
                return
            at_once = partial(self.dialect.bulk.inserts_at_once, insert=statement, rows=rows)
            if not session.run(partial(self._again_after_deadlocks, at_once), commits=True):
                each = partial(self.dialect.bulk.insert_rows, insert=statement, rows=rows)
                session.run(partial(self._again_after_deadlocks, partial(session.in_transaction, each)))

    def has_rolled_back(self, error: Exception) -> bool:
        """Ask the dialect."""
        return self.dialect.errors.has_rolled_back(error)

    def gave_way(self, error: BaseException) -> bool:
        """Ask the dialect about the error, and those that it was raised from."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, Exception) and _is_of_driver(cause) and self.dialect.errors.is_deadlock(cause):
                return True
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        return False

    def _again_after_deadlocks(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        """Run work in its own transaction; retried if a deadlock has rolled it back as a whole."""
        for _ in range(DEADLOCKS):
            try:
                return work(connection)
            except self.dialect.errors.kinds as error:
                if not self.dialect.errors.is_deadlock(error):
                    raise
        return work(connection)

    def _new_session(self) -> Session:
        session = Session(self)
        self._all.add(session)
        return session

    def _ask_the_time(self) -> None:
        self.use_session(self._read_the_time)

    def _read_the_time(self, connection: Connection) -> None:
        requested = steady()
        self._clock.answered(self.dialect.values.from_due(self._now.one(connection)), requested)

    def _connect(self) -> None:
        self._translated(self.dialect.connections.check)
        self._ask_the_time()
        self._workers = Workers("delayline SQL", self.workers)
        self._transacting = Workers("delayline SQL transaction", self.transactions)
        self._stop_watching = watch_over(OverdueWork(self.dialect.connections, (self._workers, self._transacting)))
        self._notifications = self.dialect.notifications(self)

    def begin_stop(self) -> None:
        """Limit the waits."""
        with self._limiting:
            self.dialect.connections.stops.begin()
            if self._abandoning is None:
                self._stops_over.clear()
                self._abandoning = threading.Thread(target=self._abandon, name="delayline stop", daemon=True)
                self._abandoning.start()

    def end_stop(self) -> None:
        """Go back to the usual limits, unless another stop is under way."""
        with self._limiting:
            self.dialect.connections.stops.end()
            if self.dialect.connections.stops.at is None and self._abandoning is not None:
                self._stops_over.set()
                self._abandoning.join()
                self._abandoning = None

    def _abandon(self) -> None:
        """Fail, during stops, the work whose driver did not raise when its connection was cut, or cannot be cut.

        Resolving a name and connecting are such waits, and drivers without a socket that can be reached.
        """
        stops = self.dialect.connections.stops
        error = BackendUnavailable(
            f"{self.dialect} has not answered before its endpoint stopped. The statement may have taken effect: "
            "check whether the data was written before repeating it"
        )

        def is_overdue(given: float) -> bool:
            return stops.end_of(math.inf, given) < time.monotonic() - ABANDONED_AFTER

        while not self._stops_over.wait(ABANDONED_AFTER / 8):
            for workers in (self._transacting, self._workers):
                if workers is not None:
                    workers.abandon(is_overdue, error)

    @property
    def _closing_patience(self) -> float:
        return self.dialect.connections.stops.left(STOPPING) + ABANDONED_AFTER

    def _disconnect(self) -> None:
        self.begin_stop()
        try:
            self._end_connections()
        finally:
            self._begin_anew()
            self.end_stop()

    def _end_connections(self) -> None:
        end = time.monotonic() + self.dialect.connections.stops.left(STOPPING)

        def left() -> float:
            return max(0.0, end - time.monotonic())

        self._stop_watching()
        if self._loop_statements is not None:
            self._loop_statements.close()
        if self._notifications is not None:
            self._notifications.close()
        if not self.silent:
            for claims in self._claims.values():
                claims.close()
        for workers in (self._transacting, self._workers):
            if workers is not None:
                workers.stop(left)
        for session in self._all:
            session.close()

    def before_fork(self) -> None:
        """Exclude concurrent opens and closes."""
        self._opening.acquire()

    def after_fork(self) -> None:
        """Go on, in the parent."""
        self._opening.release()

    def after_fork_in_child(self) -> None:
        """Be as new; the parent's connections are kept for ever, as ending them would end the parent's."""
        _inherited.append(self.__dict__.copy())
        self._begin_anew()
        self._users = 0
        self._opening = threading.Lock()
        self.dialect.connections.stops = StopLimit()
        self._abandoning = None
        self._stops_over = threading.Event()
        self._limiting = threading.Lock()


def _nothing() -> None:
    """Watch nothing, as there is nothing open."""


#: Kept for ever: closing inherited connections would end those of the parent process.
_inherited: Final[list[object]] = []


def _is_of_driver(error: Exception) -> bool:
    """Return whether a driver, SQLAlchemy for one, or Django has raised it: PEP 249 names the base class of theirs."""
    return isinstance(error, DBAPIError) or any(kind.__name__ == "Error" for kind in type(error).__mro__)
