"""A transport with injected faults."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from delayline.testing.faults import Fault, Faults, Faulty, with_capabilities
from delayline.transport import (
    ReceivedMessage,
    Receiver,
    SupportsAnswers,
    SupportsFlush,
    SupportsPrefetch,
    SupportsPublishing,
    SupportsQualifiedQueues,
    SupportsQueueLookup,
    SupportsQueueManagement,
    SupportsQueuePass,
    SupportsTransportTransactions,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Sequence

    from delayline.transaction import Transaction, TransactionMode
    from delayline.transport import QueuePass, TransportOperation


class _PrefetchReceiver(Receiver, SupportsPrefetch, Protocol): ...


#: What a faulty transport has if the wrapped transport has it.
TRANSPORT_CAPABILITIES: Final = (
    SupportsTransportTransactions, SupportsQueueManagement, SupportsQueuePass, SupportsQualifiedQueues,
    SupportsQueueLookup, SupportsPublishing,
)  # fmt: skip


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

    _inner: Transport

    def __new__(cls, transport: Transport, *faults: Fault, shared: Faults | None = None) -> Self:
        """Return an instance of a class that has the capabilities of `transport`."""
        return with_capabilities(cls, transport, TRANSPORT_CAPABILITIES, passing=_passing)

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
        self._asked_at = -math.inf

    @property
    def answered_at(self) -> float:
        return self._receiver.answered_at if isinstance(self._receiver, SupportsAnswers) else self._asked_at

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return await self._call("receive", lambda: self._receive(limit), limit)

    async def _receive(self, limit: int) -> Sequence[ReceivedMessage]:
        self._asked_at = time.monotonic()
        return await self._receiver.receive(limit)

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


async def _nothing() -> None: ...


@contextlib.asynccontextmanager
async def _passing(wrapper: Faulty, queue: str) -> AsyncIterator[QueuePass]:
    """Look through a queue, under the faults of `passing`."""
    await wrapper.faults.call("passing", _nothing, queue)
    async with wrapper._inner.passing(queue) as messages:
        yield messages
