"""A start that does not come to its end is undone, whatever ended it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from delayline import Endpoint, MemoryTransport, Message, MessageContext, NotStarted
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence
    from datetime import datetime

    from delayline.spi import DeliveryHost, Transaction, TransportOperation

BOOM = RuntimeError("boom")
UNDONE = {
    "transport.start": [],
    "transport.setup": ["transport.stop"],
    "delivery.setup": ["transport.stop"],
    "delivery.start": ["delivery.stop", "transport.stop"],
    "transport.receiver": ["delivery.stop", "transport.stop"],
}
"""What has to be undone where which step does not come to its end."""


class Steps:
    """Every step that was taken, and what happens at one of them."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.at: str | None = None
        self.happens: Callable[[], Awaitable[Any]] = asyncio.Event().wait

    async def take(self, step: str) -> None:
        if step == self.at:
            await self.happens()
        self.taken.append(step)

    @property
    def undone(self) -> list[str]:
        return [step for step in self.taken if step.endswith("stop")]


class Queues(MemoryTransport):
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps

    async def start(self) -> None:
        await self.steps.take("transport.start")

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        await self.steps.take("transport.setup")
        await super().setup_infrastructure(queues)

    async def receiver(self, queue: str) -> Any:  # noqa: ANN401 - a MemoryReceiver
        await self.steps.take("transport.receiver")
        return await super().receiver(queue)

    async def stop(self) -> None:
        await self.steps.take("transport.stop")


class Delivery:
    transaction_domain: Hashable | None = None

    clock = None
    store = None

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def bind(self, host: DeliveryHost) -> None:
        self.host = host

    async def setup_infrastructure(self) -> None:
        await self.steps.take("delivery.setup")

    async def start(self) -> None:
        await self.steps.take("delivery.start")

    async def stop(self) -> None:
        await self.steps.take("delivery.stop")

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Keep nothing."""


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def endpoint(steps: Steps) -> Endpoint:
    endpoint = Endpoint("sales", transport=Queues(steps), delayed_delivery=Delivery(steps))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        """Handle nothing."""

    return endpoint


async def is_as_new(endpoint: Endpoint, steps: Steps) -> None:
    with pytest.raises(NotStarted):
        await endpoint.send("sales", b"")
    steps.at = None
    steps.taken.clear()
    async with endpoint:
        await endpoint.send("sales", b"")
    assert steps.taken == [*UNDONE, "delivery.stop", "transport.stop"]


@pytest.mark.parametrize("step", UNDONE)
async def test_a_step_that_fails(endpoint: Endpoint, steps: Steps, step: str) -> None:
    async def fail() -> None:
        raise BOOM

    steps.at, steps.happens = step, fail
    with pytest.raises(RuntimeError, match="boom"):
        await endpoint.start()
    assert steps.undone == UNDONE[step]
    await is_as_new(endpoint, steps)


@pytest.mark.parametrize("step", UNDONE)
async def test_a_start_that_is_cancelled(endpoint: Endpoint, steps: Steps, step: str) -> None:
    steps.at = step
    starting = asyncio.create_task(endpoint.start())
    await settle()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert steps.undone == UNDONE[step]
    await is_as_new(endpoint, steps)


@pytest.mark.parametrize("step", UNDONE)
async def test_a_critical_error_meanwhile(endpoint: Endpoint, steps: Steps, step: str) -> None:
    steps.at = step
    starting = asyncio.create_task(endpoint.start())
    await settle()
    ended = asyncio.create_task(endpoint.wait_stopped())
    endpoint._critical_error("The roof is on fire", BOOM)
    with pytest.raises(NotStarted, match="'sales' was stopped while it started"):
        await starting
    await ended
    assert steps.undone == UNDONE[step]
    await is_as_new(endpoint, steps)


async def test_a_second_cancellation_does_not_cut_the_undoing_short(endpoint: Endpoint, steps: Steps) -> None:
    """Given a cancelled start that is being undone, when it is cancelled again, then the undoing goes on."""
    go_on = asyncio.Event()
    steps.at = "transport.receiver"
    starting = asyncio.create_task(endpoint.start())
    await settle()
    steps.at, steps.happens = "delivery.stop", go_on.wait
    starting.cancel()
    await settle()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    ended = asyncio.create_task(endpoint.wait_stopped())
    go_on.set()
    await ended
    assert steps.undone == ["delivery.stop", "transport.stop"]
    await is_as_new(endpoint, steps)


async def test_callers_that_wait_for_a_failing_start_get_its_error(endpoint: Endpoint, steps: Steps) -> None:
    failing = asyncio.Event()

    async def fail() -> None:
        await failing.wait()
        raise BOOM

    steps.at, steps.happens = "delivery.start", fail
    starting = asyncio.create_task(endpoint.start())
    await settle()
    ended = asyncio.create_task(endpoint.wait_stopped())
    await settle()
    failing.set()
    with pytest.raises(RuntimeError, match="boom"):
        await starting
    await ended
