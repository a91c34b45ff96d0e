"""A delayed message store and a timeout persister with injected faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from delayline.delayed.store import (
    DelayedMessageStore,
    DueCount,
    DueForecast,
    Forwarded,
    FoundMessage,
    Outcome,
    SupportsBatches,
    SupportsClock,
    SupportsClose,
    SupportsDueForecast,
    SupportsForwarding,
    SupportsLookup,
    SupportsManagement,
    SupportsNotifications,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.testing.faults import Fault, Faults, Faulty
from delayline.timeouts.persister import (
    LockedTimeouts,
    SupportsCount,
    SupportsOpen,
    SupportsTake,
    SupportsTimeoutLocks,
    Timeout,
    TimeoutCount,
    TimeoutPersister,
    TimeoutsChunk,
)
from delayline.transaction import SupportsHighestMode, TransactionMode

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


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
        parts = tuple(part for capability, part in FAULTY_CAPABILITIES if isinstance(store, capability))
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


class _HighestMode(Faulty):
    _inner: SupportsHighestMode

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        return self._inner.highest_transaction_mode


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

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        return await self.faults.call("cancel", lambda: self._inner.cancel(message_id, transaction), message_id)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        return await self.faults.call(
            "reschedule", lambda: self._inner.reschedule(message_id, due, transaction), message_id, due
        )

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        return await self.faults.call(
            "pending", lambda: self._inner.pending(destination=destination, limit=limit, offset=offset)
        )

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        return await self.faults.call("count_by_due", lambda: self._inner.count_by_due(bucket), bucket)


class _Forecasts(Faulty):
    _inner: SupportsDueForecast

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        return await self.faults.call(
            "due_forecast", lambda: self._inner.due_forecast(edges, by_destination=by_destination)
        )


class _Lookups(Faulty):
    _inner: SupportsLookup

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        return await self.faults.call("find", lambda: self._inner.find(message_id, body_limit=body_limit), message_id)

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        return await self.faults.call(
            "due_between", lambda: self._inner.due_between(start, end, limit=limit, offset=offset)
        )


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


FAULTY_CAPABILITIES: tuple[tuple[Any, type[Faulty]], ...] = (
    (SupportsSetup, _Infrastructure),
    (SupportsTransactions, _Transactions),
    (SupportsHighestMode, _HighestMode),
    (SupportsBatches, _Batches),
    (SupportsManagement, _Management),
    (SupportsDueForecast, _Forecasts),
    (SupportsLookup, _Lookups),
    (SupportsNotifications, _Notifications),
    (SupportsClock, _Clock),
    (SupportsClose, _Closable),
)


class FaultyTimeoutPersister(Faulty):
    """Wraps a timeout persister and claims its capabilities; every call passes the injected faults.

    Args:
        persister: The wrapped persister.
        faults: Faults to inject from the start.
        shared: The faults and recorded calls of another faulty object, to share them.

    Example:
        The first timeout cannot be stored::

            persister = FaultyTimeoutPersister(MyPersister(), Fault("add", BackendUnavailable("down"), calls=1))
    """

    def __new__(cls, persister: TimeoutPersister, *faults: Fault, shared: Faults | None = None) -> Self:
        """Return an instance of a class that has the capabilities of `persister`."""
        parts = tuple(part for capability, part in PERSISTER_CAPABILITIES if isinstance(persister, capability))
        made: Self = object.__new__(type(cls.__name__, (cls, *parts), {}))
        return made

    def __init__(self, persister: TimeoutPersister, *faults: Fault, shared: Faults | None = None) -> None:
        super().__init__(*faults, shared=shared)
        self._inner = persister

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - the methods of the persister's capabilities

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        await self.faults.call("add", lambda: self._inner.add(timeout, transaction), timeout)

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        return await self.faults.call("peek", lambda: self._inner.peek(timeout_id, transaction), timeout_id)

    async def remove(self, timeout_id: str, transaction: Transaction | None = None) -> bool:
        return await self.faults.call("remove", lambda: self._inner.remove(timeout_id, transaction), timeout_id)

    async def remove_by_saga(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> int:
        return await self.faults.call(
            "remove_by_saga", lambda: self._inner.remove_by_saga(saga_id, transaction), saga_id
        )

    async def next_chunk(
        self, at: datetime, limit: int, *, lease_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        return await self.faults.call(
            "next_chunk",
            lambda: self._inner.next_chunk(at, limit, lease_until=lease_until, transaction=transaction),
            at,
            limit,
        )

    async def lease(self, ids: Sequence[str], until: datetime) -> None:
        await self.faults.call("lease", lambda: self._inner.lease(ids, until), ids, until)


class _Opening(Faulty):
    _inner: SupportsOpen

    async def open(self, endpoint_name: str) -> None:
        await self.faults.call("open", lambda: self._inner.open(endpoint_name), endpoint_name)

    async def close(self) -> None:
        await self.faults.call("close", self._inner.close)


class _Take(Faulty):
    _inner: SupportsTake

    async def take(self, timeout_id: str, transaction: Transaction) -> Timeout | None:
        return await self.faults.call("take", lambda: self._inner.take(timeout_id, transaction), timeout_id)


class _Locks(Faulty):
    _inner: SupportsTimeoutLocks

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        return await self.faults.call(
            "lock_due",
            lambda: self._inner.lock_due(at, limit, max_bytes=max_bytes, transaction=transaction),
            at,
            limit,
        )

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        return await self.faults.call("remove_many", lambda: self._inner.remove_many(ids, transaction), ids)

    async def lease_locked(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        await self.faults.call("lease_locked", lambda: self._inner.lease_locked(ids, until, transaction), ids, until)


class _Counting(Faulty):
    _inner: SupportsCount

    async def count(self) -> TimeoutCount:
        return await self.faults.call("count", self._inner.count)


class _Forwarding(Faulty):
    _inner: SupportsForwarding

    def forwards_to(self, transport: object) -> bool:
        return self._inner.forwards_to(transport)

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        forward = self._inner.forward_due
        return await self.faults.call("forward_due", lambda: forward(at, limit, max_bytes=max_bytes), at, limit)


PERSISTER_CAPABILITIES: tuple[tuple[Any, type[Faulty]], ...] = (
    *FAULTY_CAPABILITIES,
    (SupportsOpen, _Opening),
    (SupportsTake, _Take),
    (SupportsTimeoutLocks, _Locks),
    (SupportsCount, _Counting),
    (SupportsForwarding, _Forwarding),
)
