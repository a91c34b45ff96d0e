"""A timeout persister with injected faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from delayline.delayed.store import Forwarded, SupportsForwarding
from delayline.testing.faults import Fault, Faults, Faulty
from delayline.testing.faulty_store import CAPABILITIES as STORE_CAPABILITIES
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

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.transaction import Transaction


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
        parts = tuple(part for capability, part in _CAPABILITIES if isinstance(persister, capability))
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


class _Taking(Faulty):
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


_CAPABILITIES: tuple[tuple[Any, type[Faulty]], ...] = (
    *STORE_CAPABILITIES,
    (SupportsOpen, _Opening),
    (SupportsTake, _Taking),
    (SupportsTimeoutLocks, _Locks),
    (SupportsCount, _Counting),
    (SupportsForwarding, _Forwarding),
)
