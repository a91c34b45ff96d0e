"""Stores that implement the six verbs only: the poller moves one message at a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from delayline.delayed.store import SupportsBatches
from delayline.errors import BackendUnavailable
from delayline.events import Event, emit
from delayline.recoverability import LONGEST_BACK_OFF

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


logger = logging.getLogger(__name__)


class PolledStore(Protocol):
    """The methods of a store that the poller calls, as in `SupportsBatches`."""

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message, or None."""
        ...

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return up to `limit` messages due not after `at`."""
        ...

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages and return how many were still there."""
        ...

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count a failure of each, make each due at `at`, unlock."""
        ...

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock messages that were fetched without a transaction, uncounted."""
        ...


class OneAtATime:
    """Adapts a store with the six verbs to `PolledStore`.

    A message that backs off stays locked and is counted as failed at the end of its back-off: the six verbs cannot
    store a later due time. After a crash in between its last attempt is not counted; the message is not lost.
    """

    def __init__(self, store: DelayedMessageStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._released: list[DelayedMessage] = []
        self._backing_off: list[tuple[datetime, DelayedMessage]] = []

    async def next_due(self) -> datetime | None:
        """Return the store's next due time, or the end of the first back-off if that is earlier."""
        times = [at for at, _ in self._backing_off] + [message.due for message in self._released]
        stored = await self._store.next_due()
        return min([*times, stored] if stored is not None else times, default=None)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        for message in messages:
            await self._store.store(message, transaction)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        del limit, max_bytes
        await self._end_back_off()
        if self._released:
            return [self._released.pop(0)]
        backing_off = {message.id for _, message in self._backing_off}
        while (message := await self._store.fetch_next_due(at, transaction)) is not None:
            if message.id not in backing_off:
                return [message]
            backing_off.discard(message.id)  # its lease ran out and we have it again: fetch the next one
        return []

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        return sum([await self._store.remove(message, transaction) for message in messages])

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        if transaction is None:
            self._back_off(messages, at)
        else:
            transaction.after_commit(lambda: self._back_off(messages, at))
        return len(messages)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        self._released += messages

    def _back_off(self, messages: Sequence[DelayedMessage], at: datetime) -> None:
        self._backing_off += [(at, message) for message in messages]
        self._backing_off.sort(key=lambda entry: entry[0])

    async def _end_back_off(self) -> None:
        while self._backing_off and self._backing_off[0][0] <= self._clock.now():
            _, message = self._backing_off[0]
            counted = await self._count(message)
            del self._backing_off[0]
            if not counted:
                self._back_off([message], self._clock.now() + LONGEST_BACK_OFF)

    async def _count(self, message: DelayedMessage) -> bool:
        """Count a failed attempt; return False if that fails for this message, which must not delay the others."""
        try:
            await self._store.increment_failure_count(message)
        except BackendUnavailable:
            raise
        except Exception as error:
            text = "Failed to count a failed attempt to forward delayed message %s: %s"
            emit(
                logger,
                logging.ERROR,
                Event.ERROR_MOVE_FAILED,
                text,
                message.id,
                error,
                exception=error,
                message=message,
            )
            return False
        return True


def batches_of(store: DelayedMessageStore, clock: Clock) -> PolledStore:
    """Return the store itself if it supports batches, else an adapter that moves one message at a time."""
    return store if isinstance(store, SupportsBatches) else OneAtATime(store, clock)
