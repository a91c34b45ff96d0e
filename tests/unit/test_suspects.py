"""Messages whose deliveries have ended without an outcome before: handled alone, and moved after some times."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import Scenario, build

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Headers,
    Message,
    MessageContext,
    Recoverability,
    TransactionMode,
)
from delayline.events import Event
from delayline.memory.transport import MemoryReceiver
from delayline.testing.clock import settle
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayline.testing import ManualClock
    from delayline.transport import ReceivedMessage


class Handling:
    """What is handled, until it is let go."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.running: set[str] = set()
        self.done: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}
        scenario.endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        self.running.add(message.id)
        try:
            await self._gates.setdefault(message.id, asyncio.Event()).wait()
        finally:
            self.running.discard(message.id)
        self.done.append(message.id)

    async def end(self, *ids: str) -> None:
        for id in ids:
            self._gates.setdefault(id, asyncio.Event()).set()
        await settle()

    async def send(self, *ids: str) -> None:
        await self.scenario.transport.dispatch([TransportOperation(Message(id, {}, b""), "sales") for id in ids])
        await settle()


def counted(monkeypatch: pytest.MonkeyPatch, earlier: Mapping[str, int]) -> None:
    """Let receivers say how many deliveries of messages have ended without an outcome, by id."""
    receive = MemoryReceiver.receive

    async def receive_counted(receiver: MemoryReceiver, limit: int) -> Sequence[ReceivedMessage]:
        batch = await receive(receiver, limit)
        return [replace(one, earlier_deliveries=earlier.get(one.message.id, 0)) for one in batch]

    monkeypatch.setattr(MemoryReceiver, "receive", receive_counted)


@pytest.mark.parametrize("maximum", [2, 5])
async def test_a_suspect_is_handled_alone(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, maximum: int
) -> None:
    # Given two messages that may have killed their process before, among others
    counted(monkeypatch, dict.fromkeys(["x", "y"], 1 if maximum == 2 else 2))
    handling = Handling(build(clock, concurrency=4, recoverability=Recoverability(maximum_crashes=maximum)))
    await handling.scenario.endpoint.start()
    await handling.send("a", "x", "b", "y")
    # Then each of them is handled when nothing else is, and nothing else begins meanwhile
    assert handling.running == {"a"}
    await handling.send("c")
    await handling.end("a")
    assert handling.running == {"x"}
    await handling.send("d")
    await handling.end("b")
    assert handling.running == {"x"}
    await handling.end("x")
    await handling.end("c", "d")
    assert handling.running == {"y"}
    await handling.end("y")
    assert sorted(handling.done) == ["a", "b", "c", "d", "x", "y"]
    assert [record.event for record in caplog.records].count(Event.HANDLED_ALONE) == 2  # type: ignore[attr-defined]
    await handling.scenario.endpoint.stop()


async def test_a_suspect_does_not_wait_for_ever_for_the_others(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, {"x": 3})
    handling = Handling(build(clock))
    await handling.scenario.endpoint.start()
    await handling.send("long", "x")
    assert handling.running == {"long"}
    await clock.advance(61)
    assert handling.running == {"long", "x"}
    await handling.end("x", "long")
    await handling.scenario.endpoint.stop()


async def test_a_first_crash_lets_a_message_be_handled_beside_others(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, dict.fromkeys(["x", "y"], 1))
    handling = Handling(build(clock))
    await handling.scenario.endpoint.start()
    await handling.send("a", "x", "y")
    assert handling.running == {"a", "x", "y"}
    await handling.end("a", "x", "y")
    await handling.scenario.endpoint.stop()


async def test_a_message_that_has_crashed_too_often_goes_to_the_error_queue(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, {"x": 5, "y": 4})
    handling = Handling(build(clock))
    await handling.scenario.endpoint.start()
    await handling.send("x", "y")
    moved = await handling.scenario.only("error")
    assert (moved.id, moved.headers[Headers.CRASHES], handling.running) == ("x", "5", {"y"})
    assert moved.headers[Headers.EXCEPTION_TYPE] == "delayline.errors.TooManyCrashes"
    await handling.end("y")
    await handling.scenario.endpoint.stop()


async def test_a_mode_in_which_a_crash_loses_the_message_counts_nothing(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, {"x": 9})
    handling = Handling(build(clock, transaction_mode=TransactionMode.NONE))
    await handling.scenario.endpoint.start()
    await handling.send("a", "x")
    assert handling.running == {"a", "x"}
    await handling.end("a", "x")
    await handling.scenario.endpoint.stop()


async def test_a_stop_does_not_begin_a_suspect_that_waits(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch, {"x": 2})
    handling = Handling(build(clock))
    await handling.scenario.endpoint.start()
    await handling.send("a", "x")
    stopping = asyncio.create_task(handling.scenario.endpoint.stop())
    await settle()
    await handling.end("a")
    await stopping
    assert (handling.done, await handling.scenario.ids("sales")) == (["a"], ["x"])


async def test_two_endpoints_of_a_process_handle_their_suspects_in_turn(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, {"x": 2, "y": 2})
    first, second = (Handling(build(clock)) for _ in range(2))
    for handling in (first, second):
        await handling.scenario.endpoint.start()
    await first.send("x")
    await second.send("y")
    assert (first.running, second.running) == ({"x"}, set())
    await first.end("x")
    await clock.advance(1)
    assert (first.running, second.running) == (set(), {"y"})
    await second.end("y")
    for handling in (first, second):
        await handling.scenario.endpoint.stop()


async def test_a_suspect_whose_beginning_cannot_be_noted_waits(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that notes what begins, and a back end that is away once
    counted(monkeypatch, {"x": 1})
    begun: list[str] = []

    class Notes:
        async def begin(self, received: ReceivedMessage) -> None:
            begun.append(received.message.id)
            if len(begun) == 1:
                raise BackendUnavailable("down")

    handling = Handling(build(clock))
    await handling.scenario.endpoint.start()
    handling.scenario.endpoint._pipeline._suspects._notes = Notes()  # type: ignore[union-attr]
    await handling.send("x")
    # Then it is not handled without a note, and handled later
    assert (begun, handling.running) == (["x"], set())
    await clock.advance(5)
    assert (begun, handling.running) == (["x", "x"], {"x"})
    await handling.end("x")
    await handling.scenario.endpoint.stop()


@pytest.mark.parametrize("number", [1, 0, -1, 2.5, True, "5"])
def test_a_maximum_that_would_move_innocent_messages_is_refused(number: object) -> None:
    with pytest.raises(ConfigurationError, match="maximum_crashes"):
        Recoverability(maximum_crashes=number)  # type: ignore[arg-type]
