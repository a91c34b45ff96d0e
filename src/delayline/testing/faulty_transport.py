"""A transport with injected faults."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, Self

from delayline.testing.faults import Fault, Faults, Faulty
from delayline.transport import (
    ReceivedMessage,
    Receiver,
    SupportsFlush,
    SupportsPrefetch,
    SupportsQualifiedQueues,
    SupportsQueueLookup,
    SupportsQueueManagement,
    SupportsQueuePass,
    SupportsTransportTransactions,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Sequence

    from delayline.message import Message
    from delayline.transaction import Transaction, TransactionMode
    from delayline.transport import QueuePass, TransportOperation


class _PrefetchReceiver(Receiver, SupportsPrefetch, Protocol): ...


class FaultyTransport(Faulty):
    """Wraps a transport and claims its capabilities; every call passes the injected faults.

    Its receivers pass them too: `receive`, `acknowledge`, `release` and `stop_receiver`.

    Args:
        transport: The wrapped transport.
        faults: Faults to inject from the start.
        shared: The faults and recorded calls of another faulty object, to share them.

    Example:
        The broker is down for two sends::

            transport = FaultyTransport(MyTransport(), Fault("dispatch", BackendUnavailable("down"), calls=range(1, 3)))
    """

    def __new__(cls, transport: Transport, *faults: Fault, shared: Faults | None = None) -> Self:
        """Return an instance of a class that has the capabilities of `transport`."""
        parts = tuple(part for capability, part in _CAPABILITIES if isinstance(transport, capability))
        made: Self = object.__new__(type(cls.__name__, (cls, *parts), {}))
        return made

    def __init__(self, transport: Transport, *faults: Fault, shared: Faults | None = None) -> None:
        super().__init__(*faults, shared=shared)
        self._inner = transport

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - the methods of the transport's capabilities

    @property
    def transaction_domain(self) -> Hashable | None:
        """The wrapped transport's domain, so that a store can still share its transactions."""
        return self._inner.transaction_domain

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """The wrapped transport's highest mode."""
        return self._inner.highest_transaction_mode

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        await self.faults.call("setup_infrastructure", lambda: self._inner.setup_infrastructure(queues), queues)

    async def start(self) -> None:
        await self.faults.call("start", self._inner.start)

    async def stop(self) -> None:
        await self.faults.call("stop", self._inner.stop)

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        await self.faults.call("dispatch", lambda: self._inner.dispatch(operations, transaction), operations)

    async def receiver(self, queue: str) -> FaultyReceiver:
        """Return a receiver under the same faults."""
        inner = await self.faults.call("receiver", lambda: self._inner.receiver(queue), queue)
        if isinstance(inner, SupportsPrefetch):
            return FaultyPrefetchReceiver(inner, self.faults)
        return FaultyReceiver(inner, self.faults)


class FaultyReceiver:
    """A receiver whose calls pass its transport's faults: `receive`, `acknowledge`, `release`, `stop_receiver`."""

    def __init__(self, receiver: Receiver, faults: Faults) -> None:
        self._receiver = receiver
        self._call = faults.call

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return await self._call("receive", lambda: self._receiver.receive(limit), limit)

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        return await self._call("acknowledge", lambda: self._receiver.acknowledge(received, transaction), received)

    async def flush(self, received: ReceivedMessage) -> None:
        if isinstance(self._receiver, SupportsFlush):
            await self._receiver.flush(received)

    async def release(self, received: ReceivedMessage) -> None:
        await self._call("release", lambda: self._receiver.release(received), received)

    async def stop(self) -> None:
        await self._call("stop_receiver", self._receiver.stop)


class FaultyPrefetchReceiver(FaultyReceiver):
    """A receiver with `SupportsPrefetch`: faults of `acknowledge` and `release` apply to several messages at once."""

    _receiver: _PrefetchReceiver

    async def acknowledge_many(
        self, received: Sequence[ReceivedMessage], transaction: Transaction | None = None
    ) -> Sequence[bool]:
        return await self._call("acknowledge", lambda: self._receiver.acknowledge_many(received, transaction), received)

    async def release_many(self, received: Sequence[ReceivedMessage]) -> None:
        await self._call("release", lambda: self._receiver.release_many(received), received)

    def holds(self, received: ReceivedMessage) -> bool:
        return self._receiver.holds(received)


class _Transactions(Faulty):
    _inner: SupportsTransportTransactions

    def transaction(self) -> Transaction:
        return self.faults.apply_to(self._inner.transaction())


class _Queues(Faulty):
    _inner: SupportsQueueManagement

    async def count(self, queue: str) -> int:
        return await self.faults.call("count", lambda: self._inner.count(queue), queue)

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        return await self.faults.call("browse", lambda: self._inner.browse(queue, limit, offset=offset), queue, limit)

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        return await self.faults.call(
            "take", lambda: self._inner.take(queue, message_id, transaction), queue, message_id
        )

    async def purge(self, queue: str) -> int:
        return await self.faults.call("purge", lambda: self._inner.purge(queue), queue)


class _Passes(Faulty):
    _inner: SupportsQueuePass

    @contextlib.asynccontextmanager
    async def passing(self, queue: str) -> AsyncIterator[QueuePass]:
        await self.faults.call("passing", _nothing, queue)
        async with self._inner.passing(queue) as messages:
            yield messages


async def _nothing() -> None: ...


class _Finds(Faulty):
    _inner: SupportsQueueLookup

    async def has_queue(self, queue: str) -> bool:
        return await self.faults.call("has_queue", lambda: self._inner.has_queue(queue), queue)

    async def queues(self) -> Sequence[str]:
        return await self.faults.call("queues", self._inner.queues)


class _Names(Faulty):
    _inner: SupportsQualifiedQueues

    def qualified(self, queue: str, qualifier: str) -> str:
        return self._inner.qualified(queue, qualifier)


_CAPABILITIES: tuple[tuple[Any, type[Faulty]], ...] = (
    (SupportsTransportTransactions, _Transactions),
    (SupportsQueueManagement, _Queues),
    (SupportsQueuePass, _Passes),
    (SupportsQualifiedQueues, _Names),
    (SupportsQueueLookup, _Finds),
)
