"""Transactions on SQL databases, shared by the store, the transport and the user's code they are passed to."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from sqlalchemy.exc import InvalidRequestError, PendingRollbackError

from delayline.errors import BackendUnavailable, ConfigurationError, NotStarted, TransactionAborted
from delayline.sql.deadlines import limited_answers
from delayline.sql.external import SyncConnectionAdapter
from delayline.sql.workers import in_thread
from delayline.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable

    from sqlalchemy import Connection

    from delayline.sql.dialect import Dialect, PreparedTransactions, TableIdentity, TransactionControl
    from delayline.sql.external import BorrowedConnection, ConnectionAdapter


Result = TypeVar("Result")
if TYPE_CHECKING:
    #: Work on a connection, with the place of the table that it is to look in; None for what its name means.
    WorkThere: TypeAlias = Callable[[Connection, TableIdentity | None], Result]


class Checkout(Protocol):
    """Exclusive use of a connection, from its database's `hold` to `leave`."""

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the connection, in a worker thread. Not cut short by cancellation."""
        ...

    def leave(self) -> None:
        """Give the connection back."""
        ...

    def discard(self) -> None:
        """Give the connection back although it may still be in the transaction."""
        ...


class CheckoutTransaction(Protocol):
    """The part of a database that its transactions use."""

    dialect: Dialect

    @property
    def domain(self) -> Hashable:
        """Equal for parts that can share a transaction."""
        ...

    async def hold(self) -> Checkout:
        """Wait for a connection that nothing else uses."""
        ...


class ElsewhereError(Exception):
    """A connection may lead to another database, or to another table, than it should."""


class Check(Protocol):
    """Checks where a connection leads."""

    def __call__(self, connection: Connection, *, rows_tell: bool = False) -> TableIdentity | None:
        """Raise ElsewhereError if it may lead elsewhere.

        Args:
            connection: The connection.
            rows_tell: Whether the rows of the table may be asked for by their table instead: then its place is returned
                where they can be, and what the table's name means was not checked.
        """
        ...


class EnlistedTransaction(Transaction):
    """An external transaction on a database: the user's code commits it or rolls it back.

    Args:
        domain: Equal for parts that can share a transaction.
        hold: The connection.
        dialect: The database's.
        of_handler: Whether delayline commits it or rolls it back, as the transaction of a handler.
        limits: Whether answers have a limit.
    """

    def __init__(
        self,
        domain: Hashable,
        hold: ConnectionAdapter,
        dialect: Dialect,
        *,
        of_handler: bool = False,
        limits: bool = False,
    ) -> None:
        super().__init__(domain)
        self.of_handler = of_handler
        self._limits = limits
        self._hold = hold
        self._errors, self._connections = dialect.errors, dialect.connections
        self._check: Check | None = None
        self._early: Future[Any] | None = None
        self._examine: Callable[[EnlistedTransaction], Awaitable[None]] | None = None

    def check_with_first_work(self, check: Check, examine: Callable[[EnlistedTransaction], Awaitable[None]]) -> None:
        """Check where the connection leads when it is used first: by itself that would take as long again.

        Args:
            check: Raises ElsewhereError if it may lead elsewhere.
            examine: Is awaited then; raises the reason if it does.
        """
        self._check, self._examine = check, examine

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in the transaction; of the connection it may use cursors only."""
        return await self.run_there(lambda connection, _: work(connection), rows_tell=False)

    async def run_there(self, work: WorkThere[Result], *, rows_tell: bool = True) -> Result:
        """Run `work` as `run` does, with the place of the table that was checked.

        Args:
            work: The work. Given a place its statement looks there only, and returns nothing where it finds nothing:
                what the table's name means is then checked only after that.
            rows_tell: False for work whose statements need that to be checked first.
        """
        if self._early is not None:
            early, self._early = self._early, None
            result: Result = early.result()
            return result
        try:
            return await self._run(self._checked(work, rows_tell=rows_tell), ends=True)
        except ElsewhereError:
            assert self._examine is not None  # noqa: S101 - as there was a check
            self._check = None
            await self._examine(self)
            return await self._run(lambda connection: work(connection, None), ends=True)

    def run_early(self, work: WorkThere[Any]) -> None:
        """Run `work` on the thread of the connection, for `run_there`, which is called later on the event loop."""
        assert isinstance(self._hold, SyncConnectionAdapter)  # noqa: S101 - others have no thread
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(self._hold.work(partial(self._work, self._checked(work, rows_tell=True)), ends=True))
        except ElsewhereError:  # both sides are asked on the event loop, where the work is run again
            return
        except Exception as error:
            failure = self._failure(error)
            if failure is not error:
                failure.__cause__ = error
            outcome.set_exception(failure)
        self._early = outcome

    async def look(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` that only reads: the end of the transaction does not follow."""
        return await self._run(work, ends=False)

    def _checked(self, work: WorkThere[Result], *, rows_tell: bool) -> Callable[[Connection], Result]:
        check = self._check
        if check is None:
            return lambda connection: work(connection, None)

        def checked(connection: Connection) -> Result:
            place = check(connection, rows_tell=rows_tell)
            result = work(connection, place)
            if not result and place is not None:
                check(connection)
            self._check = None
            return result

        return checked

    async def _run(self, work: Callable[[Connection], Result], *, ends: bool) -> Result:
        kinds: tuple[type[Exception], ...] = (InvalidRequestError, *self._errors.kinds)
        try:
            return await self._hold.run(partial(self._work, work), ends=ends)
        except kinds as error:
            raise await in_thread(partial(self._failure, error)) from error

    def _failure(self, error: Exception) -> Exception:
        """Return delayline's error for a driver's, or SQLAlchemy's; may ask the server."""
        if isinstance(error, PendingRollbackError):  # on any database; its text may contain parameters
            return TransactionAborted(
                "transaction= is aborted, as something in it has failed before or its connection was lost: roll it "
                "back, and send in a new transaction"
            )
        if isinstance(error, InvalidRequestError):
            return ConfigurationError(f"transaction= cannot be used: {str(error).partition(chr(10))[0]}")
        return self._errors.translated(error) if isinstance(error, self._errors.kinds) else error

    def _work(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        limit = limited_answers(connection, self._connections) if self._limits else contextlib.nullcontext()
        try:
            with limit:
                return work(connection)
        except Exception as error:
            if self._errors.has_rolled_back(error):
                cast("BorrowedConnection", connection).abort()
            raise

    def after_commit(self, callback: Callable[[], None]) -> None:
        """No-op but for a handler's: the end of others cannot be observed; see `Database.notify_on_commit`."""
        if self.of_handler:
            super().after_commit(callback)

    def after_end(self, callback: Callable[[], None]) -> None:
        """Raise ConfigurationError: the end of an external transaction cannot be observed."""
        raise TypeError("callbacks cannot be tied to the end of an external transaction")


class SqlTransaction(Transaction):
    """A transaction on a database; it begins with its first statement.

    Args:
        database: The database.
        control: How it begins and ends; None for the product's own way.
    """

    def __init__(self, database: CheckoutTransaction, control: TransactionControl | None = None) -> None:
        super().__init__(database.domain)
        self._database = database
        self._transactions = control or database.dialect.transactions
        self._hold: Checkout | None = None
        self._committed = False

    @property
    def begun(self) -> bool:
        """Whether it has had a statement, and is not over."""
        return self._hold is not None

    async def commit(self) -> None:
        """Commit as a branch: callbacks are the composite transaction's."""
        await self._commit()

    async def roll_back(self) -> None:
        """Roll back as a branch. Idempotent."""
        await self._rollback()

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in this transaction."""
        if self._hold is not None:
            return await self._hold.run(work)
        hold = await self._database.hold()
        try:
            return await hold.run(lambda connection: self._begin(hold, work, connection))
        finally:
            if self._hold is None:
                hold.leave()

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Roll back the work inside when it raises; the transaction goes on."""
        with self._undoing_callbacks():
            await self.run(self._transactions.set_savepoint)
            try:
                yield
            except BaseException:
                await self.run(self._transactions.roll_back_to_savepoint)
                raise
            finally:
                await self.run(self._transactions.release_savepoint)

    def _begin(self, hold: Checkout, work: Callable[[Connection], Result], connection: Connection) -> Result:
        self._transactions.begin(connection)
        self._hold = hold
        return work(connection)

    async def _commit(self) -> None:
        if self._hold is None:
            return
        try:
            await self._end(self._hold, self._commit_or_roll_back)
        except asyncio.CancelledError:
            if self._committed:  # cancelled too late: the effect has happened
                for callback in self._after_commit:
                    callback()
            raise

    async def _rollback(self) -> None:
        if self._hold is not None:
            with contextlib.suppress(BackendUnavailable, NotStarted):  # then the database has done it, or does so now
                await self._end(self._hold, self._transactions.rollback)

    def _commit_or_roll_back(self, connection: Connection) -> None:
        self._end_or_roll_back(self._transactions.commit, connection)
        self._committed = True

    def _end_or_roll_back(self, how: Callable[[Connection], None], connection: Connection) -> None:
        try:
            how(connection)
        except BaseException:
            self._transactions.rollback(connection)
            raise

    async def _end(self, hold: Checkout, how: Callable[[Connection], Result]) -> Result:
        ended = False
        try:
            result = await hold.run(how)
            ended = True
        finally:
            self._hold = None
            hold.leave() if ended else hold.discard()
        return result


class PreparableTransaction(SqlTransaction):
    """A transaction that may be prepared; it keeps its connection until it is over.

    Args:
        database: The database.
        prepares: How the database prepares transactions.
        name: The name to prepare it under.
    """

    def __init__(self, database: CheckoutTransaction, prepares: PreparedTransactions, name: str) -> None:
        super().__init__(database, prepares.control(name))
        self._prepares = prepares
        self.name = name
        self._prepared = False

    async def prepare(self) -> None:
        """Prepare it; from now on only `finish` ends it, also when this fails: its outcome may be unknown."""
        self._prepared = True
        await self.run(partial(self._end_or_roll_back, partial(self._prepares.prepare, name=self.name)))

    async def finish(self, *, commit: bool) -> bool:
        """Commit or roll back what is prepared, on its own connection; return whether it is over."""
        if self._hold is None:
            return False
        how = self._prepares.commit_prepared if commit else self._prepares.roll_back_prepared
        return await self._end(self._hold, partial(how, name=self.name))

    def leave(self) -> None:
        """Leave it prepared, if it is, for others to finish. Idempotent."""
        if self._prepared and self._hold is not None:
            hold, self._hold = self._hold, None
            hold.discard()

    async def _rollback(self) -> None:
        if not self._prepared:
            await super()._rollback()


class CompositeTransaction(Transaction):
    """A transaction over several databases, with a branch on each."""

    @abstractmethod
    def branch(self, database: Any) -> SqlTransaction:  # noqa: ANN401 - a `Database`, which imports this module
        """Return the branch in that database. Raises TypeError for a database that is not a member."""
