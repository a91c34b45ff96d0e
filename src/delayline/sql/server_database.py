"""A database on a server: its connections, and concurrent statements with row locks.

The pool of connections is our own. SQLAlchemy's QueuePool, or another ready pool, waits for a driver as long as that
takes, and knows each connection by itself. Here:

- Every answer has a deadline (`deadlines`): the socket of an answer that misses it is cut by another thread. A server
  that is silent costs a single wait then: callers fail at once, and only one at a time asks it again (`missed`,
  `probe`, `answers`).
- What a connection finds out holds for all of its generation: when the server is gone they are tried before they are
  used again (`lost`), after a switch to another primary they are replaced (`outdate`).
- Statements outside of transactions have connections and threads that transactions cannot take: a transaction that
  waits for a lock never keeps the statement from running that releases it. Transactions wait for a connection in their
  order.
- A stop has a single limit for all waits together, and a fork leaves the parent's connections as they are.

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

Threads: workers for statements, others for transactions, a listener (`notifications`), a watcher of the
deadlines of the process, and during a stop a thread that gives up work whose connection cannot be cut (`_abandon`).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import select

from delayline.errors import BackendUnavailable, NotStarted
from delayline.sql.database import Database
from delayline.sql.deadlines import ABANDONED_AFTER, STOPPING, StopLimit, long_work, watch_over
from delayline.sql.overdue import OverdueWork, Stops
from delayline.sql.prepared import Prepared
from delayline.sql.server_clock import ServerClock, steady
from delayline.sql.sessions import Session, SessionPool, inherited
from delayline.sql.workers import FairSemaphore, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.delayed.columns import StoredRow
    from delayline.sql.claims import ServerClaims
    from delayline.sql.database import RowsOf
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import StatementResult
    from delayline.sql.server import Server
    from delayline.sql.transactions import EnlistedTransaction
    from delayline.transaction import Transaction


Result = TypeVar("Result")


class SessionCheckout:
    """A connection for a transaction, and the transaction's permit of the semaphore."""

    def __init__(self, database: ServerDatabase) -> None:
        self._database = database
        self._semaphore, self._sessions = database.semaphore, database.sessions
        self._session: Session | None = None

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the connection."""
        if self._semaphore is not self._database.semaphore:
            raise NotStarted(f"{self._database.dialect} was closed in the middle of a transaction, which is undone")
        return await self._database.run_in_transaction(lambda: self._run(work))

    def leave(self) -> None:
        """Let the next transaction have it."""
        if self._session is not None:
            self._sessions.give_back(self._session)
        self._leave()

    def discard(self) -> None:
        """Withdraw the connection: its state is unknown."""
        if self._session is not None:
            self._sessions.discard(self._session)
        self._leave()

    def _leave(self) -> None:
        self._session = None
        self._semaphore.leave()

    def _run(self, work: Callable[[Connection], Result]) -> Result:
        if self._session is not None:
            return self._session.go_on(work)
        self._session = self._sessions.session()
        return self._session.run(work)


POOL_SIZE: Final = 4
LARGE_INSERT: Final = 8_000_000  # bytes of headers and bodies from which on the answer may take longer


def workers_of(pool_size: int) -> int:
    """Return how many connections of a pool are for statements outside transactions: a third, rounded up."""
    return math.ceil(pool_size / 3)


class ServerDatabase(Database):
    """A server's database. Statements outside transactions run on a few connections, a connection per worker thread.

    Each transaction has its own connection. A third of the pool, rounded up, is for statements, the rest for
    transactions; further transactions wait.
    """

    locks_rows = True
    dialect: Server

    def __init__(self, dialect: Server) -> None:
        super().__init__()
        self.dialect = dialect
        self._clock = ServerClock(lambda: self.spawn(self._ask_the_time), dialect.values.clock_tick)
        self._now = Prepared(select(dialect.values.in_seconds(0)), dialect.sql, [])
        self._stops = Stops(dialect.connections)
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
            self.semaphore: FairSemaphore = FairSemaphore(self.transactions)

    def _begin_anew(self) -> None:
        self.semaphore = FairSemaphore(self.transactions)
        self.sessions: SessionPool = SessionPool(
            self.dialect, close_soon=self._close_soon, outdated=self._outdated, rest=self._rest
        )
        self._workers: Workers | None = None
        self._transacting: Workers | None = None
        self._stop_watching: Callable[[], None] = _nothing
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

    async def set_up(self, missing: Callable[[Connection], object], work: Callable[[Connection], None]) -> None:
        """Write what is missing; where another server creates tables on a connection to that."""
        if not self.dialect.connections.sets_up_elsewhere:
            await super().set_up(missing, work)
        elif await self._is_missing(missing):
            await self.run(partial(self.sessions.set_up, work))

    async def insert(
        self, statement: Prepared, rows: Sequence[StoredRow], transaction: Transaction | None = None
    ) -> None:
        """Insert the rows."""
        if transaction is not None:
            await super().insert(statement, rows, transaction)
        elif len(rows) == 1:
            # The fast path has no limit but the server's; the other checks the product's limits of size.
            if await self._run_on_loop(statement, rows[0]) is None:
                await super().insert(statement, rows)
        else:
            insert = partial(self.insert_from, statement, lambda _: rows)
            is_large = sum(row.size for row in rows) > LARGE_INSERT
            await (long_work(insert) if is_large else insert)()

    async def insert_one(
        self, statement: Prepared, row: tuple[Any, ...], transaction: Transaction | None = None
    ) -> int:
        """Run the insert, the short way where a session is free."""
        if transaction is None and (result := await self._run_on_loop(statement, row)) is not None:
            return result.affected
        return await super().insert_one(statement, row, transaction)

    async def run_statement(self, statement: Prepared, *values: Any) -> StatementResult:  # noqa: ANN401
        """Run the statement, the short way where a session is free."""
        result = await self._run_on_loop(statement, values)
        return await super().run_statement(statement, *values) if result is None else result

    async def _run_on_loop(self, statement: Prepared, values: tuple[Any, ...]) -> StatementResult | None:
        return None if self._loop_statements is None else await self._loop_statements.run(statement, values)

    async def insert_from(self, statement: Prepared, rows_of: RowsOf, transaction: Transaction | None = None) -> None:
        """Insert the rows, by a statement that commits by itself where that is possible."""
        if transaction is None:
            await self.run(partial(self._insert_many, statement, rows_of))
        else:
            await super().insert_from(statement, rows_of, transaction)

    async def hold(self) -> SessionCheckout:
        """Wait for a connection for transactions; raises BackendUnavailable when none comes free."""
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

    async def _write_alone(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result:
        return await self.run(partial(self._write_in_session, work, one_statement=one_statement))

    def _write_in_session(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result:
        with self.sessions.idle_session() as session:
            whole = work if one_statement else partial(session.in_transaction, work)
            return session.run_despite_deadlocks(whole, commits=one_statement)

    def _insert_many(self, statement: Prepared, rows_of: RowsOf) -> None:
        with self.sessions.idle_session() as session:
            rows = session.run(rows_of)
            if not rows:
                return
            at_once = partial(self.dialect.bulk.inserts_at_once, insert=statement, rows=rows)
            if not session.run_despite_deadlocks(at_once, commits=True):
                each = partial(self.dialect.bulk.insert_rows, insert=statement, rows=rows)
                session.run_despite_deadlocks(partial(session.in_transaction, each))

    @property
    def usable_since(self) -> int:
        """The oldest generation of connections that are used; earlier generations are outdated, as by a failover."""
        return self.sessions.usable_since

    def session(self) -> Session:
        """Return the idle connection that was used last, or a new connection; on a worker thread."""
        return self.sessions.session()

    def use_session(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on an idle connection, or on a new connection; on a worker thread."""
        return self.sessions.use_session(work)

    def close_unused(self) -> None:
        """Close the connection that was used longest ago, if that is a while ago. Never blocks."""
        self.sessions.close_unused()

    def _close_soon(self, session: Session) -> None:
        if self._workers is None or not self._workers.spawn(session.close):
            session.close()

    def _outdated(self) -> None:
        if self._notifications is not None:
            self._notifications.renew()
        for claims in list(self._claims.values()):
            self.spawn(claims.lock_again)

    def _rest(self) -> None:
        if self._loop_statements is not None:
            self._loop_statements.rest()

    def _ask_the_time(self) -> None:
        def read(connection: Connection) -> None:
            requested = steady()
            self._clock.answered(self.dialect.values.from_due(self._now.one(connection)), requested)

        self.use_session(read)

    def _connect(self) -> None:
        self._translated(self.dialect.connections.check)
        self._ask_the_time()
        self._workers = Workers("delayline SQL", self.workers)
        self._transacting = Workers("delayline SQL transaction", self.transactions)
        self._stop_watching = watch_over(OverdueWork(self.dialect.connections, (self._workers, self._transacting)))
        self._notifications = self.dialect.notifications(self)

    def begin_stop(self) -> None:
        """Limit the waits."""
        self._stops.begin(lambda: [workers for workers in (self._transacting, self._workers) if workers is not None])

    def end_stop(self) -> None:
        """Go back to the usual limits, unless another stop is under way."""
        self._stops.end()

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
        if not self.sessions.silent:
            for claims in self._claims.values():
                claims.close()
        for workers in (self._transacting, self._workers):
            if workers is not None:
                workers.stop(left)
        self.sessions.close()

    def before_fork(self) -> None:
        """Exclude concurrent opens and closes."""
        self._opening.acquire()

    def after_fork(self) -> None:
        """Go on, in the parent."""
        self._opening.release()

    def after_fork_in_child(self) -> None:
        """Be as new; the parent's connections are kept for ever, as ending them would end the parent's."""
        inherited.append(self.__dict__.copy())
        self._begin_anew()
        self._users = 0
        self._opening = threading.Lock()
        self.dialect.connections.stops = StopLimit()
        self._stops = Stops(self.dialect.connections)


def _nothing() -> None:
    """Watch nothing, as there is nothing open."""
