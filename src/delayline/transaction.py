"""Transactions, the four transaction modes, and the guarantee of each pair of parts."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar, runtime_checkable

from delayline.errors import BackendUnavailable, TransactionConflict, UnsupportedTransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType


Result = TypeVar("Result")
CONFLICTS_IN_A_ROW: Final = 5  # in a row; after that the caller decides
#: The task that waits for the working task, so that a transaction of the former is not waited for by the latter.
WAITING_TASK: Final[ContextVar[asyncio.Task[Any] | None]] = ContextVar("delayline_waiting_task", default=None)

#: Whether a thread waits for the task at work, so that a transaction of that thread does not end meanwhile.
THREAD_WAITS: Final[ContextVar[bool]] = ContextVar("delayline_thread_waits", default=False)


class TransactionMode(IntEnum):
    """How receiving, sending and storing hang together, weakest first."""

    NONE = 0
    """A message is gone from its queue when its handler starts: a crash or a failure without error queue loses it."""
    RECEIVE_ONLY = 1
    """A message is gone from its queue after its handler's sends went out: a crash between doubles them."""
    SENDS_ATOMIC_WITH_RECEIVE = 2
    """A handler's sends and the receive are one transaction; delayed sends are stored before it."""
    TRANSACTION_SCOPE = 3
    """The receive, the sends and the delayed message store are one transaction: exactly once."""


class Guarantee(StrEnum):
    """The guarantee of a transport and a delayed delivery in a transaction mode."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"
    BEST_EFFORT = "best effort"
    """Dispatched at least once, handled at most once: a crash may double a message, or lose it."""


class Transaction:
    """A unit of work: `async with` commits it on a normal exit and rolls it back on an exception.

    Technologies subclass it and supply `_commit` and `_rollback`. Everything done in it is seen by others at its
    commit or never. It belongs to a task; it is not safe to share.
    """

    def __init__(self, domain: Hashable) -> None:
        self.domain = domain
        self._after_commit: list[Callable[[], None]] = []
        self._after_end: list[Callable[[], None]] = []

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call a function once the transaction is durable, never before, and not at all when it is rolled back.

        Args:
            callback: The function; it must not raise.
        """
        self._after_commit.append(callback)

    def after_end(self, callback: Callable[[], None]) -> None:
        """Call a function when the transaction is over, whichever way.

        Args:
            callback: The function; it must not raise.
        """
        self._after_end.append(callback)

    def committed(self) -> None:
        """Call what is to be called after the commit and at the end, of a transaction that was committed elsewhere."""
        for callback in [*self._after_commit, *self._after_end]:
            callback()

    @contextlib.contextmanager
    def _undoing_callbacks(self) -> Iterator[None]:
        """Treat the callbacks registered inside as callbacks of a rollback when it is left with an exception."""
        commits, ends = len(self._after_commit), len(self._after_end)
        try:
            yield
        except BaseException:
            del self._after_commit[commits:]
            ended = self._after_end[ends:]
            del self._after_end[ends:]
            for callback in ended:
                callback()
            raise

    async def _commit(self) -> None:
        raise NotImplementedError

    async def _rollback(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                await self._rollback()
                return
            await self._commit()
            for callback in self._after_commit:
                callback()
        finally:
            for callback in self._after_end:
                callback()


@runtime_checkable
class SupportsSavepoints(Protocol):
    """Capability of a transaction: to undo a part of it and go on."""

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Return a part of the transaction: left with an exception it is undone, and the exception raised.

        Callbacks registered inside are undone too: callbacks for the end run at once, callbacks for the commit never.
        Savepoints nest; the transaction stays usable, unless the back end has gone away. Any error other than the error
        raised inside means that the part may not be undone: roll the whole transaction back.
        """
        ...


class SavepointLost(Exception):
    """A savepoint could not be set, rolled back or released: the state of its transaction is unknown."""


def savepoint(transaction: Transaction | None) -> AbstractAsyncContextManager[None]:
    """Return a savepoint of the transaction if it supports them, else a context that does nothing.

    Raises SavepointLost.
    """
    return _checked_savepoint(transaction) if isinstance(transaction, SupportsSavepoints) else contextlib.nullcontext()


@contextlib.asynccontextmanager
async def _checked_savepoint(transaction: SupportsSavepoints) -> AsyncIterator[None]:
    """Raise SavepointLost for an error of the savepoint itself; errors raised inside it pass through."""
    inside: list[Exception] = []
    try:
        async with transaction.savepoint():
            try:
                yield
            except Exception as error:
                inside.append(error)
                raise
    except Exception as error:
        if error in inside or isinstance(error, BackendUnavailable):
            raise
        outage = next((fault for fault in inside if isinstance(fault, BackendUnavailable)), None)
        raise outage or SavepointLost(f"a part of the transaction could not be undone: {error}") from error


def is_unusable(transaction: Transaction | None, error: Exception) -> bool:
    """Return whether the transaction has to be rolled back after `error` left a savepoint."""
    if transaction is None:
        return False
    return isinstance(error, BackendUnavailable | SavepointLost) or not isinstance(transaction, SupportsSavepoints)


async def again_after_conflicts(work: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of work that is undone as a whole when it fails; repeated after each TransactionConflict.

    Raises the last of several conflicts in a row, for the caller to decide.
    """
    for _ in range(CONFLICTS_IN_A_ROW):
        try:
            return await work()
        except TransactionConflict:
            continue
    return await work()


class TransactionParticipant(Protocol):
    """The properties of a transport or a delayed delivery that `guarantee` depends on."""

    @property
    def transaction_domain(self) -> Hashable | None:
        """Parts with equal domains can share a local transaction; None is never shared."""
        ...


@runtime_checkable
class SupportsHighestMode(Protocol):
    """Capability of a delayed message store or a delayed delivery: it says which transaction modes it supports."""

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """The strongest mode it can honour; all weaker modes are supported too. Known before it is opened."""
        ...


class TransportParticipant(TransactionParticipant, Protocol):
    """The properties of a transport that `guarantee` depends on."""

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """The strongest mode the transport can honour."""
        ...


def share_transactions(first: TransactionParticipant, second: TransactionParticipant) -> bool:
    """Return whether both parts can take part in the same local transaction."""
    return first.transaction_domain is not None and first.transaction_domain == second.transaction_domain


def guarantee(
    transport: TransportParticipant,
    delivery: TransactionParticipant | None,
    mode: TransactionMode,
    *,
    inbox: bool = False,
) -> Guarantee:
    """Return the guarantee of this pair: the only source for start-up, `doctor` and the table in the documentation.

    See https://docs.particular.net/transports/transactions.

    Args:
        transport: The endpoint's transport.
        delivery: Its delayed delivery; None for an endpoint without delayed delivery.
        mode: The transaction mode.
        inbox: Whether the endpoint keeps an inbox, for handlers whose effects are in its database.

    Raises:
        UnsupportedTransactionMode: The pair cannot honour the mode; the text has the remedy.
    """
    highest = transport.highest_transaction_mode
    if mode > highest:
        raise UnsupportedTransactionMode(
            f"{type(transport).__name__} supports transaction modes up to {highest.name}, not {mode.name}. "
            f"Use transaction_mode=TransactionMode.{highest.name} or a transport on a SQL database."
        )
    if delivery is not None and mode > (highest := _highest_of(delivery)):
        raise UnsupportedTransactionMode(
            f"the delayed message store supports transaction modes up to {highest.name}, not {mode.name}. "
            f"Use transaction_mode=TransactionMode.{highest.name}, or leave it out."
        )
    shared = delivery is None or share_transactions(transport, delivery)
    if inbox and mode is TransactionMode.RECEIVE_ONLY:
        return Guarantee.EXACTLY_ONCE
    if mode is TransactionMode.TRANSACTION_SCOPE:
        if not shared:
            raise UnsupportedTransactionMode(
                f"TRANSACTION_SCOPE needs one transaction over {type(transport).__name__} "
                f"({transport.transaction_domain}) and the delayed message store "
                f"({delivery.transaction_domain if delivery else None}). Keep both in the same database, give "
                f"both one TwoPhaseCommit where their databases can prepare transactions, or use "
                f"transaction_mode=TransactionMode.SENDS_ATOMIC_WITH_RECEIVE and handle duplicates."
            )
        return Guarantee.EXACTLY_ONCE
    if mode is TransactionMode.NONE:
        return Guarantee.AT_MOST_ONCE if shared else Guarantee.BEST_EFFORT
    return Guarantee.AT_LEAST_ONCE


def strongest_mode(transport: TransportParticipant, delivery: TransactionParticipant | None) -> TransactionMode:
    """Return the strongest mode this pair can honour: an endpoint's default."""
    shared = delivery is None or share_transactions(transport, delivery)
    limit = TransactionMode.TRANSACTION_SCOPE if shared else TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    return min(transport.highest_transaction_mode, limit, _highest_of(delivery))


def weaker_mode(refused: TransactionMode) -> TransactionMode | None:
    """Return the mode to try when a store has refused a mode: the next weaker that cannot lose messages."""
    return TransactionMode(refused - 1) if refused > TransactionMode.RECEIVE_ONLY else None


def _highest_of(delivery: object) -> TransactionMode:
    if isinstance(delivery, SupportsHighestMode):
        return delivery.highest_transaction_mode
    return TransactionMode.TRANSACTION_SCOPE
