"""One batch of due messages on its way: fetched, dispatched, removed, in the transaction there is for it."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.delayed.ahead import Ahead, Fetched
from delayline.delayed.scope import savepoint, spoilt
from delayline.errors import BackendUnavailable, CorruptHeaders, DispatchFailed
from delayline.events import Event, emit
from delayline.message import Headers
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.recovery import Failures, Recovery
    from delayline.delayed.scope import Scope
    from delayline.message import DelayedMessage, Message
    from delayline.transaction import Transaction
    from delayline.transport import Transport

logger = logging.getLogger(__name__)

#: How long what was fetched ahead is good for: a store's lock may be a lease, and a transport may block for minutes.
FRESH: Final = timedelta(seconds=5)


@dataclass(slots=True)
class Batch:
    """What was fetched, and what became of it."""

    messages: Sequence[DelayedMessage] = ()
    sent: list[DelayedMessage] = field(default_factory=list)
    """Those that have their next place, destination or error queue, and leave the store."""
    kept: list[DelayedMessage] = field(default_factory=list)
    """Those that stay in the store as they were."""
    trouble: Exception | None = None
    """Why: the back end's fault, so that it is left alone for a while."""


class Mover:
    """Moves batches from a store to their destinations.

    What was sent, but is not known to be removed, is remembered; until it is removed nothing else may be moved
    (reference H7).
    looks_ahead: fetch the next batch while a full one is sent and removed. Only where the two have no transaction in
    common, so that what was sent is confirmed before it is removed, and the next batch is sent after that as ever.
    """

    def __init__(
        self,
        store: PolledStore,
        transport: Transport,
        *,
        scope: Scope,
        recovery: Recovery,
        batch_bytes: int,
        looks_ahead: bool = False,
    ) -> None:
        self._store = store
        self._transport = transport
        self._scope = scope
        self._recovery = recovery
        self._batch_bytes = batch_bytes
        self._looks_ahead = looks_ahead and not scope.shared
        self._ahead = Ahead()
        self._unremoved: list[DelayedMessage] = []
        self._unreleased: list[DelayedMessage] = []

    @property
    def unremoved(self) -> Sequence[DelayedMessage]:
        """What was sent outside a transaction and still has to be removed."""
        return self._unremoved

    async def move(self, batch: Batch, now: datetime, limit: int) -> None:
        """Fetch up to `limit` messages and move them; those that fail by themselves are recovered.

        An error with nothing in `batch` is the fetch's. Any other has undone all but what is `unremoved`.
        """
        async with await self._next(now, limit) as fetched:
            batch.messages = fetched.messages
            if batch.messages:
                if self._looks_ahead and limit > 1 and len(batch.messages) == limit:
                    self._ahead.begin(self._fetch(now, limit))
                await self._forward(batch, fetched.transaction)
        self._unremoved = []

    @property
    def is_ahead(self) -> bool:
        """Whether the next batch is fetched already, or being fetched."""
        return bool(self._ahead)

    async def give_back_ahead(self) -> None:
        """Leave what was fetched ahead to the store, or, without a transaction, to the next `release`."""
        fetched = await self._ahead.take()
        if fetched is not None:
            await self._undo(fetched)

    async def recover(self, batch: Batch, error: Exception) -> None:
        """Deal with a batch of one, for whose failure its transaction was rolled back."""
        (message,) = batch.messages
        try:
            async with self._scope.open() as transaction:
                await self._finish(batch, [(message, error)], transaction)
            self._unremoved = []
        except Exception as trouble:
            if self._unremoved:
                batch.trouble = trouble
            else:
                batch.sent.clear()
                await self._recovery.keep(batch, message, trouble, None)

    async def remove_sent(self) -> None:
        """Remove what was sent and is not known to be removed."""
        await self._remove(self._unremoved, None)
        self._unremoved = []

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock messages that stay as they were, and those for which it failed; a transaction unlocks at its end."""
        if self._scope.begin is None:
            self._unreleased += messages
        if self._unreleased:
            await self._store.release_many(self._unreleased)
            self._unreleased = []

    async def _next(self, now: datetime, limit: int) -> Fetched:
        fetched = await self._ahead.take()
        if fetched is None:
            return await self._fetch(now, limit)
        if fetched.messages and now - fetched.at <= FRESH:
            return fetched
        await self._undo(fetched)
        await self.release(())
        return await self._fetch(now, limit)

    async def _undo(self, fetched: Fetched) -> None:
        await fetched.undo()
        self._unreleased += fetched.messages if self._scope.begin is None else ()

    async def _fetch(self, now: datetime, limit: int) -> Fetched:
        async with contextlib.AsyncExitStack() as holds:
            transaction = await holds.enter_async_context(self._scope.open())
            due = await self._store.fetch_due(now, limit, max_bytes=self._batch_bytes, transaction=transaction)
            if due:
                emit(logger, logging.DEBUG, Event.FETCHED, "fetched %d due messages", len(due), messages=due)
            return Fetched(due, now, transaction, holds.pop_all())

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
        """Send and return what failed, by position; raise what is the back end's fault, or one of several messages'."""
        alone = transaction if len(operations) == 1 else None
        try:
            async with savepoint(alone):
                await self._transport.dispatch(operations, transaction)
        except DispatchFailed as failed:
            return failed.failures
        except Exception as error:
            if len(operations) > 1 or isinstance(error, BackendUnavailable) or spoilt(transaction, error):
                raise
            return {0: error}
        return {}

    async def _remove(self, sent: Sequence[DelayedMessage], transaction: Transaction | None) -> None:
        if not sent:
            return
        removed = await self._store.remove_many(sent, transaction)
        gone = len(sent) - removed
        if gone and self._scope.of_dispatch(transaction) is not None:
            raise RuntimeError(f"{gone} of {len(sent)} messages were removed by somebody else: nothing was sent")
        if gone:
            text = "Potential more-than-once dispatch as delayed message already removed from storage. (%d of %d)"
            emit(logger, logging.WARNING, Event.ALREADY_REMOVED, text, gone, len(sent), messages=tuple(sent))
        emit(logger, logging.DEBUG, Event.REMOVED, "removed %d messages", removed, messages=tuple(sent))


def _as_sent(message: Message) -> Message:
    if Headers.DISPATCH_PROPERTIES.encode() not in message.encoded_headers:
        return message  # as good as always, and nothing is parsed
    try:
        return message.with_headers({}, without=(Headers.DISPATCH_PROPERTIES,))
    except CorruptHeaders:
        return message
