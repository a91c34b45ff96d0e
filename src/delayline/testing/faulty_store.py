"""A delayed message store with injected faults."""

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
from delayline.testing.faults import Fault, Faults, Faulty

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
        shared: The faults and recorded calls of another faulty object, to share them.

    Example:
        The third batch cannot be removed::

            store = FaultyStore(MyStore(), Fault("remove_many", BackendUnavailable("down"), calls=3))
    """

    def __new__(
        cls, store: DelayedMessageStore, *faults: Fault, verbs_only: bool = False, shared: Faults | None = None
    ) -> Self:
        """Return an instance of a class that has the capabilities of `store`."""
        parts = tuple(part for capability, part in CAPABILITIES if isinstance(store, capability))
        made: Self = object.__new__(type(cls.__name__, (cls, *(() if verbs_only else parts)), {}))
        return made

    def __init__(
        self, store: DelayedMessageStore, *faults: Fault, verbs_only: bool = False, shared: Faults | None = None
    ) -> None:
        super().__init__(*faults, shared=shared)
        self._inner = store

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - the methods of the store's capabilities

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        await self.faults.call("initialize", lambda: self._inner.initialize(endpoint_name, mode), endpoint_name, mode)

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        await self.faults.call("store", lambda: self._inner.store(message, transaction), message)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        return await self.faults.call("fetch_next_due", lambda: self._inner.fetch_next_due(at, transaction), at)

    async def next_due(self) -> datetime | None:
        return await self.faults.call("next_due", self._inner.next_due)

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        return await self.faults.call("remove", lambda: self._inner.remove(message, transaction), message)

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        return await self.faults.call(
            "increment_failure_count", lambda: self._inner.increment_failure_count(message), message
        )


class _Infrastructure(Faulty):
    _inner: SupportsSetup

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        await self.faults.call(
            "setup_infrastructure", lambda: self._inner.setup_infrastructure(endpoint_name), endpoint_name
        )


class _Transactions(Faulty):
    _inner: SupportsTransactions

    @property
    def transaction_domain(self) -> Hashable | None:
        return self._inner.transaction_domain

    @property
    def locks_rows(self) -> bool:
        return self._inner.locks_rows

    def transaction(self) -> Transaction:
        return self.faults.apply_to(self._inner.transaction())


class _Batches(Faulty):
    _inner: SupportsBatches

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        await self.faults.call("store_many", lambda: self._inner.store_many(messages, transaction), messages)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        return await self.faults.call(
            "fetch_due",
            lambda: self._inner.fetch_due(at, limit, max_bytes=max_bytes, transaction=transaction),
            at,
            limit,
        )

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        return await self.faults.call("remove_many", lambda: self._inner.remove_many(messages, transaction), messages)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        return await self.faults.call(
            "retry_many", lambda: self._inner.retry_many(messages, at, transaction), messages, at
        )

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        await self.faults.call("release_many", lambda: self._inner.release_many(messages), messages)


class _Management(Faulty):
    _inner: SupportsManagement

    async def cancel(self, message_id: str) -> Outcome:
        return await self.faults.call("cancel", lambda: self._inner.cancel(message_id), message_id)

    async def reschedule(self, message_id: str, due: datetime) -> Outcome:
        return await self.faults.call("reschedule", lambda: self._inner.reschedule(message_id, due), message_id, due)

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        return await self.faults.call(
            "pending", lambda: self._inner.pending(destination=destination, limit=limit, offset=offset)
        )

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        return await self.faults.call("count_by_due", lambda: self._inner.count_by_due(bucket), bucket)


class _Notifications(Faulty):
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
        await self.faults.call("close", self._inner.close)


CAPABILITIES: tuple[tuple[Any, type[Faulty]], ...] = (
    (SupportsSetup, _Infrastructure),
    (SupportsTransactions, _Transactions),
    (SupportsBatches, _Batches),
    (SupportsManagement, _Management),
    (SupportsNotifications, _Notifications),
    (SupportsClock, _Clock),
    (SupportsClose, _Closable),
)
