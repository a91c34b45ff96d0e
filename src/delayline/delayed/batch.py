"""One batch of due messages: fetch it, dispatch it and remove it, in the strongest transaction that is available."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Self

from delayline.delayed.store import SupportsBatches, SupportsTransactions
from delayline.errors import BackendUnavailable, CorruptHeaders, DispatchFailed
from delayline.events import Event, emit
from delayline.message import Headers
from delayline.transaction import is_unusable, savepoint, share_transactions
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime
    from types import TracebackType

    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.recovery import Failures, Recovery
    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import DelayedMessage, Message
    from delayline.transaction import Transaction
    from delayline.transport import Transport

logger = logging.getLogger(__name__)

#: How long a prefetched batch may be used: a store's lock may be a lease, and a transport may block for minutes.
FRESH: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class BatchScope:
    """The transaction of a batch: shared with the transport, the store's own, or none."""

    begin: Callable[[], Transaction] | None
    """Returns a new transaction; None where the store locks messages without one."""
    shared: bool
    """Whether the messages are dispatched in the same transaction."""

    def open(self) -> AbstractAsyncContextManager[Transaction | None]:
        """Return the transaction for one batch, to be entered."""
        return contextlib.nullcontext() if self.begin is None else self.begin()

    def of_dispatch(self, transaction: Transaction | None) -> Transaction | None:
        """Return the transaction to dispatch the messages of a batch in `transaction` with."""
        return transaction if self.shared else None


def scope_between(store: DelayedMessageStore, transport: Transport) -> BatchScope:
    """Return the strongest scope that the store and the transport support together.

    A store with the six verbs alone cannot count a failure in a transaction, so its own transactions are not used.
    """
    scope = scope_of(store, transport)
    return scope if scope.shared or isinstance(store, SupportsBatches) else BatchScope(None, shared=False)


def scope_of(storage: object, transport: Transport) -> BatchScope:
    """Return the strongest scope that the storage's transactions, where it has some, make possible."""
    if isinstance(storage, SupportsTransactions):
        if share_transactions(storage, transport):
            return BatchScope(storage.transaction, shared=True)
        if storage.locks_rows:
            return BatchScope(storage.transaction, shared=False)
    return BatchScope(None, shared=False)


@dataclass(slots=True)
class Batch:
    """Fetched messages, and the outcome of each."""

    messages: Sequence[DelayedMessage] = ()
    sent: list[DelayedMessage] = field(default_factory=list)
    """Messages dispatched to their destination or to the error queue; they leave the store."""
    kept: list[DelayedMessage] = field(default_factory=list)
    """Messages that stay in the store unchanged."""
    backend_error: Exception | None = None
    """The back end's fault because of which messages were kept; the poller pauses after it."""


class FetchedBatch:
    """Due messages, and the transaction that locks them, if there is one, until this context is left."""

    def __init__(
        self,
        messages: Sequence[DelayedMessage],
        at: datetime,
        transaction: Transaction | None,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self.messages = messages
        self.at = at
        self.transaction = transaction
        self._stack = stack

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def undo(self) -> None:
        """Roll the transaction back."""
        with contextlib.suppress(_Undo):
            async with self:
                raise _Undo


class _Undo(Exception):
    """Rolls back a transaction in which nothing was changed."""


class Mover:
    """Moves batches from a store to their destinations.

    Messages that were sent, but may not have been removed, are remembered. Until they are removed no other batch is
    moved: a store that answers again would return them as due, and each round would send them once more.

    Args:
        prefetches: Fetch the next batch while a full one is sent and removed. Used only where the two share no
            transaction: a batch is then confirmed before it is removed, and before the next one is sent.
    """

    def __init__(
        self,
        store: PolledStore,
        transport: Transport,
        *,
        scope: BatchScope,
        recovery: Recovery,
        batch_bytes: int,
        prefetches: bool = False,
    ) -> None:
        self._store = store
        self._transport = transport
        self._scope = scope
        self._recovery = recovery
        self._batch_bytes = batch_bytes
        self._prefetches = prefetches and not scope.shared
        self._prefetch: asyncio.Task[FetchedBatch] | None = None
        self._unremoved: list[DelayedMessage] = []
        self._unreleased: list[DelayedMessage] = []

    @property
    def unremoved(self) -> Sequence[DelayedMessage]:
        """Messages that were sent outside a transaction and still have to be removed."""
        return self._unremoved

    @property
    def has_prefetched(self) -> bool:
        """Whether the next batch has been fetched, or is being fetched."""
        return self._prefetch is not None

    async def move(self, batch: Batch, now: datetime, limit: int) -> None:
        """Fetch up to `limit` messages and move them; messages that fail alone are recovered.

        An error that leaves `batch` empty comes from the fetch. After any other, only `unremoved` has taken effect.
        """
        async with await self._next(now, limit) as fetched:
            batch.messages = fetched.messages
            if batch.messages:
                if self._prefetches and limit > 1 and len(batch.messages) == limit:
                    self._prefetch = asyncio.create_task(self._fetch(now, limit), name="delayline prefetch")
                await self._forward(batch, fetched.transaction)
        self._unremoved = []

    async def return_prefetched(self) -> None:
        """Return a prefetched batch to the store, or, if it has no transaction, leave that to the next `release`."""
        fetched = await self._take_prefetched()
        if fetched is not None:
            await self._undo(fetched)

    async def recover(self, batch: Batch, error: Exception) -> None:
        """Recover a batch of one message, whose failure has rolled its transaction back."""
        (message,) = batch.messages
        try:
            async with self._scope.open() as transaction:
                await self._finish(batch, [(message, error)], transaction)
            self._unremoved = []
        except Exception as failure:
            if self._unremoved:
                batch.backend_error = failure
            else:
                batch.sent.clear()
                await self._recovery.keep(batch, message, failure, None)

    async def remove_sent(self) -> None:
        """Remove the messages in `unremoved`."""
        await self._remove(self._unremoved, None)
        self._unremoved = []

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock messages that stay unchanged, also those for which that failed before."""
        if self._scope.begin is None:
            self._unreleased += messages
        if self._unreleased:
            await self._store.release_many(self._unreleased)
            self._unreleased = []

    async def _take_prefetched(self) -> FetchedBatch | None:
        """Wait for the prefetch and return its batch; raises its error. A cancellation leaves it for the next call."""
        prefetch = self._prefetch
        if prefetch is None:
            return None
        await asyncio.wait([prefetch])
        self._prefetch = None
        return prefetch.result()

    async def _next(self, now: datetime, limit: int) -> FetchedBatch:
        fetched = await self._take_prefetched()
        if fetched is None:
            return await self._fetch(now, limit)
        if fetched.messages and now - fetched.at <= FRESH:
            return fetched
        await self._undo(fetched)
        await self.release(())
        return await self._fetch(now, limit)

    async def _undo(self, fetched: FetchedBatch) -> None:
        await fetched.undo()
        self._unreleased += fetched.messages if self._scope.begin is None else ()

    async def _fetch(self, now: datetime, limit: int) -> FetchedBatch:
        async with contextlib.AsyncExitStack() as stack:
            transaction = await stack.enter_async_context(self._scope.open())
            due = await self._store.fetch_due(now, limit, max_bytes=self._batch_bytes, transaction=transaction)
            if due:
                emit(logger, logging.DEBUG, Event.FETCHED, "fetched %d due messages", len(due), messages=due)
            return FetchedBatch(due, now, transaction, stack.pop_all())

    async def _forward(self, batch: Batch, transaction: Transaction | None) -> None:
        operations = [TransportOperation(_as_sent(message.message), message.destination) for message in batch.messages]
        unsent = await self._dispatch(operations, self._scope.of_dispatch(transaction))
        failures = [(batch.messages[position], error) for position, error in unsent.items()]
        batch.sent += [message for position, message in enumerate(batch.messages) if position not in unsent]
        if sent := tuple(batch.sent):
            text = "dispatched %d messages"
            emit(logger, logging.DEBUG, Event.DISPATCHED, text, len(sent), messages=sent, count=len(sent))
        await self._finish(batch, failures, transaction)

    async def _finish(self, batch: Batch, failures: Failures, transaction: Transaction | None) -> None:
        if not self._scope.shared:
            self._unremoved = batch.sent
        await self._recovery.recover(batch, failures, transaction)
        await self._remove(batch.sent, transaction)

    async def _dispatch(
        self, operations: Sequence[TransportOperation], transaction: Transaction | None
    ) -> Mapping[int, Exception]:
        """Dispatch, and return the failures by position; raise an error that cannot be blamed on a single message."""
        alone = transaction if len(operations) == 1 else None
        try:
            async with savepoint(alone):
                await self._transport.dispatch(operations, transaction)
        except DispatchFailed as failed:
            return failed.failures
        except Exception as error:
            if len(operations) > 1 or isinstance(error, BackendUnavailable) or is_unusable(transaction, error):
                raise
            return {0: error}
        return {}

    async def _remove(self, sent: Sequence[DelayedMessage], transaction: Transaction | None) -> None:
        if not sent:
            return
        removed = await self._store.remove_many(sent, transaction)
        gone = len(sent) - removed
        if gone and self._scope.of_dispatch(transaction) is not None:
            raise RuntimeError(f"{gone} of {len(sent)} messages were removed by another process: nothing was sent")
        if gone:
            text = "Potential more-than-once dispatch as delayed message already removed from storage. (%d of %d)"
            emit(logger, logging.WARNING, Event.ALREADY_REMOVED, text, gone, len(sent), messages=tuple(sent))
        emit(logger, logging.DEBUG, Event.REMOVED, "removed %d messages", removed, messages=tuple(sent))


def _as_sent(message: Message) -> Message:
    if Headers.DISPATCH_PROPERTIES.encode() not in message.encoded_headers:
        return message  # nearly always: the headers need not be decoded
    try:
        return message.with_headers({}, without=(Headers.DISPATCH_PROPERTIES,))
    except CorruptHeaders:
        return message
