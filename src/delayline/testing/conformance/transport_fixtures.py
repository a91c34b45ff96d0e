"""Fixtures of the transport suite, and what its tests do with receivers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import pytest
import pytest_asyncio

from delayline.errors import ConfigurationError
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import PATIENCE
from delayline.transport import (
    ReceivedMessage,
    Receiver,
    SupportsPrefetch,
    SupportsQueueManagement,
    SupportsTransportTransactions,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


TRANSPORT_QUEUES = ["billing", "sales", "error"]


class TransactionalTransport(Transport, SupportsTransportTransactions, Protocol):
    """A transport that claims transactions."""


class PrefetchingReceiver(Receiver, SupportsPrefetch, Protocol):
    """A receiver that claims prefetching."""


class ManagedTransport(Transport, SupportsQueueManagement, Protocol):
    """A transport that claims queue management."""


async def received(receiver: Receiver, number: int = 1) -> list[ReceivedMessage]:
    """Return exactly `number` messages, in the order they came."""
    messages: list[ReceivedMessage] = []
    async with asyncio.timeout(PATIENCE):
        while len(messages) < number:
            messages += await receiver.receive(number - len(messages))
    return messages


async def prefetching(transport: Transport, queue: str) -> PrefetchingReceiver:
    """Return a receiver that supports prefetching; skips where it is not claimed."""
    receiver = await transport.receiver(queue)
    if not isinstance(receiver, SupportsPrefetch):
        pytest.skip("not claimed: SupportsPrefetch")
    return cast("PrefetchingReceiver", receiver)


async def nothing_left(transport: Transport, queue: str) -> None:
    """Assert that no receiver gets anything from the queue."""
    receiver = await transport.receiver(queue)
    receiving = asyncio.create_task(receiver.receive(1))
    await settle()
    await transport.dispatch([])
    await receiver.stop()
    async with asyncio.timeout(PATIENCE):
        left = list(await receiving)
    assert left == [], f"{queue!r} still has {left}"


class TransportFixtures:
    """Fixtures of the transport suite."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    #: Whether a receiver holds more than `receive` has returned, until it is stopped.
    reads_ahead: bool = False
    #: Whether messages held by a receiver are counted and listed with the queue.
    shows_hidden: bool = True
    #: Whether this process deletes expired messages, and so can log them.
    logs_expired: bool = True
    #: How many bytes a body may have; a larger body is refused with InvalidMessage.
    largest_body: int = 5 * 1024 * 1024
    #: Whether messages are received in the order in which they were sent.
    keeps_order: bool = True
    #: Whether queues are named as the user likes; otherwise some names are refused with ConfigurationError.
    takes_any_name: bool = True
    #: Whether browsing lists messages held by a receiver, where they are counted.
    browses_hidden: bool = True

    def in_order(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of received messages, as they came or, where order is not kept, sorted: to compare them."""
        return list(ids) if self.keeps_order else sorted(ids)

    async def has_queues(self, transport: Transport, *names: str) -> None:
        """Create the queues; skips where the transport refuses a queue with ConfigurationError that names it."""
        try:
            await transport.setup_infrastructure(names)
        except ConfigurationError as error:
            assert any(repr(name) in str(error) for name in names)
            if self.takes_any_name:
                raise
            pytest.skip("not claimed: queues of any name")

    async def make_transport(self, tmp_path: Path) -> Transport:
        """Return a new transport, not started, over storage that is empty when a test begins. Override this."""
        raise NotImplementedError("override make_transport in your subclass of TransportConformance")

    @pytest_asyncio.fixture
    async def transport(self, tmp_path: Path) -> AsyncIterator[Transport]:
        """Provide a started transport with its queues."""
        transport = await self.make_transport(tmp_path)
        await transport.start()
        await transport.setup_infrastructure(TRANSPORT_QUEUES)
        yield transport
        await transport.stop()

    async def holds_no_more(self, receiver: Receiver) -> None:
        """Return once the receiver holds no more than it has returned: a reader ahead has to stop for that."""
        if self.reads_ahead:
            await receiver.stop()

    async def counted(self, managed: ManagedTransport, queue: str, *, visible: int, hidden: int = 0) -> None:
        """Assert how many messages are in the queue; a back end that others change counts soon."""
        expected = visible + hidden if self.shows_hidden else visible
        async with asyncio.timeout(PATIENCE if self.reads_ahead else None):
            while (number := await managed.count(queue)) != expected and self.reads_ahead:
                pass
        assert number == expected

    @pytest.fixture
    def transactional(self, transport: Transport) -> TransactionalTransport:
        """Provide a started transport with transactions."""
        if not isinstance(transport, SupportsTransportTransactions):
            pytest.skip("not claimed: SupportsTransportTransactions")
        return transport

    @pytest.fixture
    def managed(self, transport: Transport) -> ManagedTransport:
        """Provide a started transport whose queues people can look into."""
        if not isinstance(transport, SupportsQueueManagement):
            pytest.skip("not claimed: SupportsQueueManagement")
        return transport


def ids(messages: list[ReceivedMessage]) -> list[str]:
    """Return the ids of received messages."""
    return [entry.message.id for entry in messages]
