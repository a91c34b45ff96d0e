"""A delayed message store and a timeout persister with injected faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from delayline.delayed.store import (
    DelayedMessageStore,
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
from delayline.testing.faults import Fault, Faults, Faulty, with_capabilities
from delayline.timeouts.persister import (
    SupportsCount,
    SupportsOpen,
    SupportsTake,
    SupportsTimeoutLocks,
    Timeout,
    TimeoutPersister,
    TimeoutsChunk,
)
from delayline.transaction import SupportsHighestMode, TransactionMode

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


#: What a faulty store has if the wrapped store has it.
STORE_CAPABILITIES: Final = (
    SupportsSetup, SupportsTransactions, SupportsHighestMode, SupportsBatches, SupportsManagement, SupportsDueForecast,
    SupportsLookup, SupportsNotifications, SupportsClock, SupportsClose,
)  # fmt: skip
PERSISTER_CAPABILITIES: Final = (
    *STORE_CAPABILITIES, SupportsOpen, SupportsTake, SupportsTimeoutLocks, SupportsCount, SupportsForwarding,
)  # fmt: skip


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
        return with_capabilities(cls, store, () if verbs_only else STORE_CAPABILITIES)

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
        return with_capabilities(cls, persister, PERSISTER_CAPABILITIES)

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
