"""Messages that are received ahead of their handlers, and completed together."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import Scenario, build
from tests.unit.test_pipeline import DOWN, STRONGER, start

from delayline import Message, MessageContext, TransactionMode
from delayline.receiving.pipeline import Pipeline
from delayline.testing import Fault
from delayline.testing.clock import settle
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

IDS = [f"m{number}" for number in range(20)]
SCOPE = TransactionMode.TRANSACTION_SCOPE


class Gate:
    """A handler that waits until the gate opens, sends one message and, for some messages, fails."""

    def __init__(self, *, destination: str = "out") -> None:
        self.opened = asyncio.Event()
        self.destination = destination
        self.bad: dict[str, str] = {}
        """Other destinations, by message id."""

    async def __call__(self, message: Message, context: MessageContext) -> None:
        await self.opened.wait()
        await context.send(self.bad.get(message.id, self.destination), f"from {message.id}")


async def fill(scenario: Scenario, *ids: str) -> None:
    await scenario.transport.dispatch([TransportOperation(Message(one, {}, b"body"), "sales") for one in ids])
    await settle()


@pytest.mark.parametrize("mode", STRONGER)
async def test_messages_whose_handlers_end_together_are_completed_together(
    clock: ManualClock, mode: TransactionMode
) -> None:
    # Given 20 handlers at work
    scenario, gate = build(clock, transaction_mode=mode, concurrency=20), Gate()
    await start(scenario, gate)
    await fill(scenario, *IDS)
    # When all end
    gate.opened.set()
    await settle()
    # Then the messages leave their queue in few transactions, each once, with one send for each
    calls = scenario.faults.recorded("acknowledge")
    assert len(calls) <= 3
    assert sorted(one for call in calls for one in call.ids) == sorted(IDS)
    assert (await scenario.transport.count("sales"), len(await scenario.ids("out"))) == (0, 20)
    await scenario.endpoint.stop()


async def test_a_message_that_cannot_be_completed_fails_alone(clock: ManualClock) -> None:
    # Given 20 handlers, one of which sends to a queue that does not exist
    scenario, gate = build(clock, transaction_mode=SCOPE, concurrency=20), Gate()
    gate.bad["m7"] = "nowhere"
    seen = await start(scenario, gate)
    await fill(scenario, *IDS)
    # When all end
    gate.opened.set()
    await settle()
    # Then the others are completed after one attempt each
    assert len(await scenario.ids("out")) == 19
    assert {one for one, attempt in seen if attempt > 1} <= {"m7"}
    assert [one for one, _ in seen].count("m8") == 1
    await scenario.endpoint.stop()


async def test_sends_of_a_message_that_another_receiver_has_handled_are_dropped(clock: ManualClock) -> None:
    # Given 20 handlers at work, and a message that leaves the queue meanwhile
    scenario, gate = build(clock, transaction_mode=SCOPE, concurrency=20), Gate()
    seen = await start(scenario, gate)
    await fill(scenario, *IDS)
    hidden = scenario.queues.queue("sales")
    hidden.drop(next(sequence for sequence, message in hidden.hidden.items() if message.id == "m3"))
    # When all end
    gate.opened.set()
    await settle()
    # Then its send is dropped, and the others' are dispatched
    bodies = {message.body for message in await scenario.transport.browse("out", 100)}
    assert bodies == {f"from {one}".encode() for one in IDS if one != "m3"}
    assert len(seen) == 20
    await scenario.endpoint.stop()


@pytest.mark.parametrize("effect", [False, True])
async def test_an_outage_during_a_commit_fails_all_its_messages(clock: ManualClock, effect: bool) -> None:
    """Given a commit that fails, or fails after it has taken effect, then each message is handled until it is gone."""
    scenario, gate = build(clock, transaction_mode=SCOPE, concurrency=20), Gate()
    seen = await start(scenario, gate)
    await fill(scenario, *IDS)
    scenario.transport.inject(Fault("commit", DOWN, calls=1, takes_effect=effect))
    gate.opened.set()
    await settle()
    await clock.advance(1)
    assert await scenario.transport.count("sales") == 0
    assert {one for one, _ in seen} == set(IDS)
    assert len(await scenario.ids("out")) == 20
    await scenario.endpoint.stop()


async def test_fast_handlers_get_messages_ahead(clock: ManualClock) -> None:
    # Given handlers that end at once
    scenario, done = build(clock, concurrency=2), asyncio.Event()

    async def act(message: Message, context: MessageContext) -> None:
        if message.id == "last":
            done.set()

    seen = await start(scenario, act)
    # When many messages come
    ids = [*(f"m{number}" for number in range(3000)), "last"]
    await fill(scenario, *ids)
    async with asyncio.timeout(30):
        await done.wait()
        await settle()
    # Then the receiver was asked for more than two at a time
    assert sorted(one for one, _ in seen) == sorted(ids)
    assert scenario.faults.calls("receive") < len(ids) / 4
    await scenario.endpoint.stop()


async def test_messages_received_ahead_go_back_to_the_queue_at_a_stop(clock: ManualClock) -> None:
    # Given fast handlers, and then slow ones, with messages received ahead
    scenario, gate = build(clock, concurrency=2), asyncio.Event()
    await _with_messages_ahead(scenario, gate)
    # When the endpoint stops
    stopping = asyncio.create_task(scenario.endpoint.stop())
    await settle()
    gate.set()
    await stopping
    # Then all others are in the queue, visible
    assert len(scenario.queues.queue("sales").visible) == 300


async def test_messages_received_ahead_go_back_when_handlers_take_long(clock: ManualClock) -> None:
    # Given messages received ahead of handlers that turn out to be slow
    scenario, gate = build(clock, concurrency=2), asyncio.Event()
    await _with_messages_ahead(scenario, gate)
    # When a second and more passes
    await clock.advance(1.5)
    await clock.advance(1.5)
    # Then other processes can have them
    assert len(scenario.queues.queue("sales").hidden) == 2
    gate.set()
    await scenario.endpoint.stop()


async def test_a_message_whose_claim_was_lost_is_not_handled(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that has lost a message to another one before its handler starts
    scenario = build(clock, concurrency=2)
    seen = await start(scenario, _succeed)
    receiver = scenario.queues.receivers["sales"]
    monkeypatch.setattr(type(receiver), "holds", lambda self, received: received.message.id != "lost")
    # When it is its turn
    await fill(scenario, "a", "lost", "b")
    # Then only the others are handled
    assert [one for one, _ in seen] == ["a", "b"]
    await scenario.endpoint.stop()


async def _succeed(message: Message, context: MessageContext) -> None:
    """Do nothing."""


async def _with_messages_ahead(scenario: Scenario, gate: asyncio.Event) -> None:
    """Start an endpoint whose two handlers wait for the gate, with messages received ahead of them."""
    waiting, both = [], asyncio.Event()

    async def act(message: Message, context: MessageContext) -> None:
        if message.id == "slow":
            waiting.append(message)
            if len(waiting) == 2:
                both.set()
            await gate.wait()

    await start(scenario, act)
    await fill(scenario, *(f"m{number}" for number in range(5000)), "slow", "slow", *(["later"] * 300))
    async with asyncio.timeout(30):
        await both.wait()
    await settle()
    assert len(scenario.queues.queue("sales").hidden) > 2


async def test_handlers_get_a_grace_period_at_a_stop_and_are_cancelled_then(clock: ManualClock) -> None:
    # Given a handler that ends soon, and one that does not end
    scenario, cancelled = build(clock, concurrency=2), []

    async def act(message: Message, context: MessageContext) -> None:
        try:
            await clock.sleep(10 if message.id == "soon" else 10_000)
        except asyncio.CancelledError:
            cancelled.append(message.id)
            raise

    await start(scenario, act)
    await fill(scenario, "soon", "never")
    # When the endpoint stops with a grace period of 20 s
    stopping = asyncio.create_task(scenario.endpoint.stop(timedelta(seconds=20)))
    await clock.advance(10)
    assert (stopping.done(), await scenario.ids("sales")) == (False, ["never"])
    await clock.advance(10)
    await stopping
    # Then the one that has not ended was cancelled, and its message is visible in the queue
    assert cancelled == ["never"]
    assert [message.id for _, message in scenario.queues.queue("sales").visible] == ["never"]


async def test_a_handler_that_ignores_its_cancellation_does_not_stop_a_stop(clock: ManualClock) -> None:
    scenario = build(clock, concurrency=2)
    end = asyncio.Event()

    async def act(message: Message, context: MessageContext) -> None:
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    await start(scenario, act)
    await fill(scenario, "stubborn")
    stopping = asyncio.create_task(scenario.endpoint.stop(timedelta(seconds=20)))
    await clock.advance(20)
    await clock.advance(5)
    async with asyncio.timeout(5):
        await stopping
    end.set()
    await settle()


async def test_a_message_that_is_being_completed_when_its_handler_is_cancelled_is_not_given_back(
    clock: ManualClock,
) -> None:
    # Given a message whose removal from the queue is under way
    scenario, gate = build(clock, concurrency=2), asyncio.Event()
    await start(scenario, _succeed)
    scenario.transport.inject(Fault("acknowledge", until=gate))
    await fill(scenario, "m")
    # When the endpoint stops and cancels the remaining handlers
    stopping = asyncio.create_task(scenario.endpoint.stop(timedelta(seconds=1)))
    await clock.advance(1)
    assert not stopping.done()
    gate.set()
    await stopping
    # Then it has left the queue, and was never visible in it
    assert (await scenario.ids("sales"), scenario.faults.calls("acknowledge")) == ([], 1)


async def test_a_receiver_without_prefetching_releases_messages_at_a_stop(clock: ManualClock) -> None:
    # Given a receiver that cannot receive ahead, and a stop while it returns messages
    scenario, gate = build(clock, concurrency=2), asyncio.Event()
    seen = await start(scenario, _succeed)
    pipeline = scenario.endpoint._pipeline
    assert isinstance(pipeline, Pipeline)
    pipeline._prefetch._prefetching = None
    scenario.transport.inject(Fault("receive", until=gate))
    await fill(scenario, "first")
    await fill(scenario, "second")
    # When the messages come after the stop has begun
    stopping = asyncio.create_task(scenario.endpoint.stop())
    await settle()
    gate.set()
    await stopping
    # Then each was handled, or is visible in the queue
    queue = scenario.queues.queue("sales")
    assert sorted([*(one for one, _ in seen), *(message.id for _, message in queue.visible)]) == ["first", "second"]
    assert not queue.hidden
