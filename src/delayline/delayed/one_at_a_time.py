"""Stores that implement the six verbs only: the poller moves message by message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from delayline.delayed.set_aside import Reason, SetAside
from delayline.delayed.store import SupportsBatches
from delayline.errors import BackendUnavailable
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.circuit_breaker import FailureRate
    from delayline.clock import Clock
    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


logger: logging.Logger = logging.getLogger(__name__)


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

    The six verbs cannot store a later due time, so a message that backs off is set aside. Fetched without a transaction
    it stays locked, and its failure is counted at the end, as counting unlocks it: after a crash in between its last
    attempt is not counted; the message is not lost. Fetched in a transaction it is counted at once.

    Args:
        store: The store.
        clock: Decides when back-offs end.
        aside: What the poller sets aside.
        failure_rate: Counts attempts to count that have failed.
        in_transactions: Whether messages are fetched in transactions, whose end unlocks them.
    """

    def __init__(
        self,
        store: DelayedMessageStore,
        clock: Clock,
        aside: SetAside | None = None,
        *,
        failure_rate: FailureRate | None = None,
        in_transactions: bool = False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._aside = SetAside() if aside is None else aside
        self._failure_rate = failure_rate
        self._in_transactions = in_transactions
        self._released: list[DelayedMessage] = []
        #: Messages whose transaction has ended, to be counted at once, and when to send them again.
        self._failed: list[tuple[DelayedMessage, datetime]] = []

    async def next_due(self) -> datetime | None:
        """Return the store's next due time, or the end of the first back-off if that is earlier."""
        if self._failed:
            return self._clock.now()
        first_end = self._aside.first_end
        times = [*(message.due for message in self._released), *([] if first_end is None else [first_end])]
        stored = await self._store.next_due()
        return min([*times, stored] if stored is not None else times, default=None)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        for message in messages:
            await self._store.store(message, transaction)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        del limit, max_bytes
        if transaction is None:
            await self.end_back_offs()
        if self._released:
            return [self._released.pop(0)]
        backing_off = {aside.message.id for aside in self._aside.of(Reason.UNCOUNTED)}
        while (message := await self._store.fetch_next_due(at, transaction)) is not None:
            if transaction is not None or message.id not in backing_off:
                return [message]
            backing_off.discard(message.id)  # its lease ran out and we have it again: fetch the next
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

    async def end_back_offs(self) -> None:
        """Count the failures whose time has come. No transaction of the caller's may lock any of the messages."""
        failed, self._failed = self._failed, []
        while failed:
            message, until = failed[0]
            try:
                counted = await self._count(message)
            except BackendUnavailable:
                self._failed += failed
                raise
            if counted:
                self._aside.add(message, Reason.BACKS_OFF, until)
            else:
                self._aside.add_failed(message, Reason.UNCOUNTED, self._clock.now())
            del failed[0]
        for aside in sorted(self._aside.of(Reason.UNCOUNTED), key=lambda aside: aside.until):
            if aside.until > self._clock.now():
                break
            await aside.end_lock()
            if await self._count(aside.message):
                self._aside.forget([aside.message])
            else:
                self._aside.add_failed(aside.message, Reason.UNCOUNTED, self._clock.now())

    def _back_off(self, messages: Sequence[DelayedMessage], at: datetime) -> None:
        for message in messages:
            if self._in_transactions:
                self._failed.append((message, at))
            else:
                self._aside.add(message, Reason.UNCOUNTED, at)

    async def _count(self, message: DelayedMessage) -> bool:
        """Count a failed attempt; return False if that fails for this message, which must not delay the others."""
        try:
            await self._store.increment_failure_count(message)
        except BackendUnavailable:
            raise
        except Exception as error:
            log_text = "Failed to count a failed attempt to forward delayed message %s: %s"
            emit(
                logger,
                logging.ERROR,
                Event.ERROR_MOVE_FAILED,
                log_text,
                message.id,
                error,
                exception=error,
                message=message,
            )
            if self._failure_rate is not None:
                self._failure_rate.failure(error)
            return False
        return True


def batches_of(
    store: DelayedMessageStore,
    clock: Clock,
    aside: SetAside | None = None,
    *,
    failure_rate: FailureRate | None = None,
    in_transactions: bool = False,
) -> PolledStore:
    """Return the store itself if it supports batches, else an adapter that moves message by message."""
    if isinstance(store, SupportsBatches):
        return store
    return OneAtATime(store, clock, aside, failure_rate=failure_rate, in_transactions=in_transactions)
