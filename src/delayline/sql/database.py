"""A database, shared by every store and transport of this process that names it, so that they share transactions."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from delayline.clock import to_microseconds
from delayline.errors import ConfigurationError, DelaylineError
from delayline.sql.deadlines import ABANDONED_AFTER, STOPPING
from delayline.sql.enlisting import Enlisting
from delayline.sql.setup import texts
from delayline.sql.transactions import CompositeTransaction, EnlistedTransaction, SqlTransaction
from delayline.sql.workers import in_thread, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from sqlalchemy import Connection, Executable, Table

    from delayline.clock import Clock
    from delayline.delayed.columns import StoredRow
    from delayline.external import ExternalTransaction
    from delayline.sql.claims import Claims
    from delayline.sql.dialect import Dialect
    from delayline.sql.notifications import Notifications
    from delayline.sql.prepared import Prepared, StatementResult
    from delayline.sql.transactions import Checkout
    from delayline.transaction import Transaction

    RowsOf = Callable[[Connection], Sequence[tuple[Any, ...]]]

Result = TypeVar("Result")
#: Due times further away than this need no notification: a poller sleeps a minute at most.
SOON: Final = timedelta(hours=1)


class Database(ABC):
    """Runs SQL in worker threads. Get one with `database_at`; every `open` needs a `close`.

    May be used from several event loops.
    """

    dialect: Dialect
    #: Whether a transaction locks only the rows it touches, so that it may stay open for a while.
    locks_rows: ClassVar[bool]

    def __init__(self) -> None:
        self._users = 0
        self._server_timeouts: list[float] = []
        self._opening = threading.Lock()
        self.enlisting: Enlisting = Enlisting(self)

    def limit_waits(self, server_timeout: float) -> None:
        """Wait so many seconds for an answer, or the earlier limit if that is shorter."""
        self._server_timeouts.append(server_timeout)
        self.dialect.connections.server_timeout = min(self._server_timeouts)

    def resize_pool(self, size: int) -> None:
        """Use up to so many connections from the next `open` on, or as many as were given before if that is more."""
        raise ConfigurationError(f"pool_size= is for servers: {self.dialect} has one writer. Leave it out")

    def connect_with(self, connect: Callable[[], object]) -> None:
        """Make connections by a function of the user's."""
        self.dialect.connections.connect_with(connect)

    @property
    def usable_since(self) -> int:
        """The oldest generation of connections that are used; earlier generations are outdated, as by a failover."""
        return 0

    @property
    def domain(self) -> Hashable:
        """Equal for parts that can share a transaction."""
        return self.dialect.connections.identity

    async def open(self) -> None:
        """Connect, unless connected. Raises BackendUnusable or BackendUnavailable. Undone if cancelled."""
        wanted = threading.Event()
        wanted.set()

        def opened() -> bool:
            self._open()
            if wanted.is_set():
                return True
            self._close()
            return False

        thread, opening = start_thread(opened)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            wanted.clear()
            done, _ = await asyncio.wait([opening], timeout=self._closing_patience)
            if any(task.exception() is None and task.result() for task in done):
                await self.close()
            raise
        finally:
            if opening.done():
                thread.join()  # it has nothing left to do

    async def close(self) -> None:
        """Undo an `open`; the last disconnects.

        Connections to a silent server are closed later, in the background.
        """
        if threading.main_thread().is_alive():
            thread, closing = start_thread(self._close)
            if (await asyncio.wait([closing], timeout=self._closing_patience))[0]:
                thread.join()  # it has nothing left to do
                closing.result()
        else:  # the interpreter ends, as in atexit: no thread can be started any more
            self._close()

    @abstractmethod
    def begin_stop(self) -> None:
        """Limit waits from now on, so that an endpoint stops in time; needs an `end_stop`."""

    @abstractmethod
    def end_stop(self) -> None:
        """Undo `begin_stop`."""

    @property
    def _closing_patience(self) -> float:
        """Seconds to wait for the end of threads and connections."""
        return STOPPING + ABANDONED_AFTER

    async def look(self, work: Callable[[Connection], Result]) -> Result:
        """Run a read-only `work` on a separate connection; the database need not be open."""

        def looked() -> Result:
            with self.dialect.connections.look() as connection:
                return work(connection)

        return await in_thread(partial(self._translated, looked))

    async def plan(
        self, work: Callable[[Connection], list[Executable]], whole: Callable[[], list[Executable]]
    ) -> Sequence[str]:
        """Return the SQL of the steps that `work` finds missing; the script of `whole` if the server cannot be asked.

        The statements of `whole` are idempotent.
        """
        try:
            return texts(await self.look(work), self.dialect)
        except DelaylineError as error:
            if not self.dialect.errors.plans_without(error):
                raise
            reason = " ".join(str(error).split())
            return [f"-- the server was not asked, so this is all of it: {reason}", *texts(whole(), self.dialect)]

    async def set_up(self, missing: Callable[[Connection], object], work: Callable[[Connection], None]) -> None:
        """Write what is missing, and nothing where all is there: a write waits for other sessions' locks.

        Args:
            missing: returns what `work` would write, or whether it would; reads only.
            work: writes it, unless another process has done so meanwhile.
        """
        if await self._is_missing(missing):
            await self.write(work)

    async def _is_missing(self, missing: Callable[[Connection], object]) -> bool:
        try:
            return bool(await self.read(missing))
        except (DelaylineError, SQLAlchemyError):
            return True  # another process may be setting up: `work` waits for it, and raises what is wrong

    @abstractmethod
    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on a reading connection, which sees committed rows. Not interrupted by cancellation."""

    async def write(
        self,
        work: Callable[[Connection], Result],
        transaction: Transaction | None = None,
        *,
        one_statement: bool = False,
    ) -> Result:
        """Run `work` in `transaction`, or, without, in a transaction that commits it alone.

        Args:
            work: runs the statements; it may run again after a deadlock.
            transaction: the external transaction; a new transaction if None.
            one_statement: whether `work` runs a single statement, which some servers commit implicitly, saving a round
                trip.

        Raises:
            CancelledError: After a cancellation, once the effect is certain.
            TypeError: `transaction` belongs to another database.
        """
        if transaction is None:
            return await self._write_alone(work, one_statement=one_statement)
        if isinstance(transaction, CompositeTransaction):
            return await transaction.branch(self).run(work)
        if isinstance(transaction, SqlTransaction | EnlistedTransaction):
            ours, theirs = self.domain, transaction.domain
            if theirs is ours or theirs == ours:  # to compare URLs takes long
                return await transaction.run(work)
        raise TypeError(f"a transaction on {transaction.domain} cannot span {self.dialect}")

    async def insert(
        self, statement: Prepared, rows: Sequence[StoredRow], transaction: Transaction | None = None
    ) -> None:
        """Insert rows of delayed messages, as `write` does: all of them or none."""
        insert = partial(self.dialect.bulk.insert_rows, insert=statement, rows=rows)
        await self.write(insert, transaction, one_statement=len(rows) == 1)

    async def insert_one(
        self, statement: Prepared, row: tuple[Any, ...], transaction: Transaction | None = None
    ) -> int:
        """Run an insert that may find nothing to insert, as `write` does; return how many rows it has inserted."""
        return await self.write(lambda connection: statement.change(connection, *row), transaction, one_statement=True)

    async def run_statement(self, statement: Prepared, *values: Any) -> StatementResult:  # noqa: ANN401
        """Run the statement, commit it, and return its result."""
        return await self.write(lambda connection: statement.result(connection, *values), one_statement=True)

    async def insert_from(self, statement: Prepared, rows_of: RowsOf, transaction: Transaction | None = None) -> None:
        """Insert the rows that `rows_of` returns on the same connection: all of them or none."""

        def insert(connection: Connection) -> None:
            if rows := rows_of(connection):
                self.dialect.bulk.insert_rows(connection, statement, rows)

        await self.write(insert, transaction)

    def transaction(self) -> SqlTransaction:
        """Return a new transaction."""
        return SqlTransaction(self)

    async def enlist(self, external: ExternalTransaction, table: Table) -> EnlistedTransaction:
        """Return the external transaction if it is on this database; `table` is a table that it will write to.

        Raises ConfigurationError for a transaction on another database, without a transaction, or for an object that is
        not a connection; of a handler's transaction with the first statement in it.
        """
        return await self.enlisting.enlist(external, table)

    async def notify_on_commit(self, notifications: Mapping[str, int], transaction: Transaction | None = None) -> None:
        """Notify the listeners of each channel of the earliest new due time, after the commit."""
        if isinstance(transaction, EnlistedTransaction) and not transaction.of_handler:
            soon = to_microseconds(self.clock.now() + SOON)
            notifications = {channel: at for channel, at in notifications.items() if at < soon}
            if notifications:
                await self.notify_at_external_commit(notifications, transaction)
        elif transaction is not None:
            transaction.after_commit(partial(self.notify, notifications))
        else:
            self.notify(notifications)

    def notify(self, notifications: Mapping[str, int]) -> None:
        """Notify the listeners of each channel now."""
        for channel, at in notifications.items():
            self.notifications.notify(channel, at)

    @abstractmethod
    async def notify_at_external_commit(
        self, notifications: Mapping[str, int], transaction: EnlistedTransaction
    ) -> None:
        """Notify the listeners once the external transaction has committed."""

    @abstractmethod
    async def hold(self) -> Checkout:
        """Wait for an exclusive connection, on which to begin a transaction."""

    @property
    @abstractmethod
    def clock(self) -> Clock:
        """The clock that decides whether a message is due."""

    @property
    @abstractmethod
    def notifications(self) -> Notifications:
        """The notifications of this database."""

    @abstractmethod
    def claims(self, table: str) -> Claims:
        """Return this process's claims on a table's rows."""

    @abstractmethod
    def before_fork(self) -> None:
        """Finish running work and disconnect."""

    @abstractmethod
    def after_fork(self) -> None:
        """Go on, in the parent."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Reset the state: threads and connections belong to the parent."""

    @abstractmethod
    async def _write_alone(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result: ...

    @abstractmethod
    def _connect(self) -> None: ...

    @abstractmethod
    def _disconnect(self) -> None: ...

    def _open(self) -> None:
        with self._opening:
            if self._users == 0:
                self._connect()
            self._users += 1

    def _close(self) -> None:
        with self._opening:
            self._users -= 1
            if self._users == 0:
                self._disconnect()

    def _translated(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except self.dialect.errors.kinds as error:
            raise self.dialect.errors.translated(error) from error
