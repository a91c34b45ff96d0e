"""What every transport test stands on: a started transport with two queues, and its capabilities where claimed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import pytest
import pytest_asyncio

from delayline.testing.conformance.messages import PATIENCE
from delayline.transport import ManagedQueues, Transport, TransportTransactions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delayline.transport import ReceivedMessage, Receiver

QUEUES = ["billing", "sales", "error"]


class Transacting(Transport, TransportTransactions, Protocol):
    """A transport that claims transactions."""


class WithManagedQueues(Transport, ManagedQueues, Protocol):
    """A transport that claims queue management."""


async def received(receiver: Receiver, number: int = 1) -> list[ReceivedMessage]:
    """Return exactly `number` messages, in the order they came."""
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < number:
            found += await receiver.receive(number - len(found))
    return found


async def nothing_left(transport: Transport, queue: str) -> None:
    """Assert that nobody can receive anything from the queue."""
    receiver = await transport.receiver(queue)
    receiving = asyncio.create_task(receiver.receive(1))
    await transport.dispatch([])
    await receiver.stop()
    async with asyncio.timeout(PATIENCE):
        left = list(await receiving)
    assert left == [], f"{queue!r} still has {left}"


class TransportRoom:
    """Fixtures of the transport suite."""

    pytestmark = pytest.mark.asyncio

    async def make_transport(self, tmp_path: Path) -> Transport:
        """Return a new transport, not started, over storage that is empty when a test begins. Override this."""
        raise NotImplementedError("override make_transport in your subclass of TransportConformance")

    @pytest_asyncio.fixture
    async def transport(self, tmp_path: Path) -> AsyncIterator[Transport]:
        """Provide a started transport with its queues."""
        transport = await self.make_transport(tmp_path)
        await transport.start()
        await transport.setup_infrastructure(QUEUES)
        yield transport
        await transport.stop()

    @pytest.fixture
    def transacting(self, transport: Transport) -> Transacting:
        """Provide a started transport with transactions."""
        if not isinstance(transport, TransportTransactions):
            pytest.skip("not claimed: TransportTransactions")
        return transport

    @pytest.fixture
    def managed(self, transport: Transport) -> WithManagedQueues:
        """Provide a started transport whose queues people can look into."""
        if not isinstance(transport, ManagedQueues):
            pytest.skip("not claimed: ManagedQueues")
        return transport
