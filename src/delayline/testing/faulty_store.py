"""A delayed message store in which things go wrong on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from delayline.delayed.store import (
    DelayedMessageStore,
    DueCount,
    Outcome,
    SupportsBatches,
    SupportsClock,
    SupportsClose,
    SupportsManagement,
    SupportsNotifications,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.testing.faults import Fault, Faulty

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction, TransactionMode


class FaultyStore(Faulty):
    """Wraps a store and claims its capabilities; every call passes the injected faults.

    SupportsForwarding is not claimed: faults apply only to messages that pass through this process.

    Args:
        store: The wrapped store.
        faults: Faults to inject from the start.
        verbs_only: Claim only the six verbs.
    """

    def __new__(cls, store: DelayedMessageStore, *faults: Fault, verbs_only: bool = False) -> Self:
        """Return an instance of a class that has the capabilities of `store`."""
        parts = tuple(part for capability, part in _CAPABILITIES if isinstance(store, capability))
        made: Self = object.__new__(type(cls.__name__, (cls, *(() if verbs_only else parts)), {}))
        return made

    def __init__(self, store: DelayedMessageStore, *faults: Fault, verbs_only: bool = False) -> None:
        super().__init__(*faults)
        self._inner = store

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the wrapped store."""
        await self._call("initialize", lambda: self._inner.initialize(endpoint_name, mode), endpoint_name, mode)

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message."""
        await self._call("store", lambda: self._inner.store(message, transaction), message)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        """Lock and return the earliest due message."""
        return await self._call("fetch_next_due", lambda: self._inner.fetch_next_due(at, transaction), at)

    async def next_due(self) -> datetime | None:
        """Return the earliest due time."""
        return await self._call("next_due", self._inner.next_due)

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message."""
        return await self._call("remove", lambda: self._inner.remove(message, transaction), message)

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Count a failure and unlock."""
        return await self._call(
            "increment_failure_count", lambda: self._inner.increment_failure_count(message), message
        )


class _Infrastructure(Faulty):
    _inner: SupportsSetup

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        await self._call("setup_infrastructure", lambda: self._inner.setup_infrastructure(endpoint_name), endpoint_name)


class _Transactions(Faulty):
    _inner: SupportsTransactions

    @property
    def transaction_domain(self) -> Hashable | None:
        return self._inner.transaction_domain

    @property
    def locks_rows(self) -> bool:
        return self._inner.locks_rows

    def transaction(self) -> Transaction:
        return self._faulty(self._inner.transaction())


class _Batches(Faulty):
    _inner: SupportsBatches

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        await self._call("store_many", lambda: self._inner.store_many(messages, transaction), messages)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        return await self._call(
            "fetch_due",
            lambda: self._inner.fetch_due(at, limit, max_bytes=max_bytes, transaction=transaction),
            at,
            limit,
        )

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        return await self._call("remove_many", lambda: self._inner.remove_many(messages, transaction), messages)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        return await self._call("retry_many", lambda: self._inner.retry_many(messages, at, transaction), messages, at)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        await self._call("release_many", lambda: self._inner.release_many(messages), messages)


class _Managed(Faulty):
    _inner: SupportsManagement

    async def cancel(self, message_id: str) -> Outcome:
        return await self._call("cancel", lambda: self._inner.cancel(message_id), message_id)

    async def reschedule(self, message_id: str, due: datetime) -> Outcome:
        return await self._call("reschedule", lambda: self._inner.reschedule(message_id, due), message_id, due)

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        return await self._call(
            "pending", lambda: self._inner.pending(destination=destination, limit=limit, offset=offset)
        )

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        return await self._call("count_by_due", lambda: self._inner.count_by_due(bucket), bucket)


class _WakeUps(Faulty):
    _inner: SupportsNotifications

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        return self._inner.on_stored(callback)


class _Clock(Faulty):
    _inner: SupportsClock

    def clock(self) -> Clock:
        return self._inner.clock()


class _Closable(Faulty):
    _inner: SupportsClose

    async def close(self) -> None:
        await self._call("close", self._inner.close)


_CAPABILITIES: tuple[tuple[Any, type[Faulty]], ...] = (
    (SupportsSetup, _Infrastructure),
    (SupportsTransactions, _Transactions),
    (SupportsBatches, _Batches),
    (SupportsManagement, _Managed),
    (SupportsNotifications, _WakeUps),
    (SupportsClock, _Clock),
    (SupportsClose, _Closable),
)
