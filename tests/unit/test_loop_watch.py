"""What blocks an event loop is logged while it does, from a thread; and for how long the oldest handler has run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE, eventually_async

from delayline import Endpoint, Event, MemoryTransport
from delayline.receiving import loop_watch
from delayline.receiving.loop_watch import watch_running_loop
from delayline.telemetry import Measurements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline import Message, MessageContext


@dataclass
class Order:
    number: int


class Heard(logging.Handler):
    """Notes the records of the watch, and tells when there are so many."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.records.append(record)
            self._changed.notify_all()

    def texts(self, event: Event) -> list[str]:
        return [record.getMessage() for record in self.records if vars(record)["event"] is event]

    def wait_for(self, event: Event, number: int) -> bool:
        """Block the calling thread until there are so many records of the event."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.texts(event)) >= number, PATIENCE)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setattr(loop_watch, "LOOKED_AT_EVERY", 0.05)
    handler, logger = Heard(), logging.getLogger(loop_watch.__name__)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_blocked_loop_is_logged_while_it_is_blocked(heard: Heard) -> None:
    """Given a handler that blocks the loop, when nothing else runs, then a thread says which, again and again."""
    endpoint = Endpoint("sales", transport=MemoryTransport())
    while_blocked: list[str] = []

    @endpoint.handles
    async def place(order: Order, context: MessageContext) -> None:
        while len(while_blocked) < 2:
            time.sleep(0.01)  # noqa: ASYNC251 - the fault
            while_blocked[:] = heard.texts(Event.LOOP_STUCK)

    # When
    async with endpoint:
        await endpoint.send("sales", Order(1), message_id="order-1")
        await eventually_async(lambda: heard.texts(Event.LOOP_TURNS), "the loop turns again")
    # Then
    for text in while_blocked:
        assert "place with message order-1 of type " in text
        assert "Order. Nothing else runs meanwhile." in text
        assert f'File "{__file__}", line ' in text
        assert "time.sleep(0.01)" in text
        assert "asyncio/runners" not in text
    assert {vars(record)["facts"]["message"].id for record in heard.records if record.levelno == logging.WARNING} == {
        "order-1"
    }


async def test_what_blocks_the_loop_need_not_be_a_handler(heard: Heard) -> None:
    end = watch_running_loop()
    try:
        # When the application's own code blocks
        assert heard.wait_for(Event.LOOP_STUCK, 1)
        # Then the line says where
        [text] = heard.texts(Event.LOOP_STUCK)[:1]
        assert " by handler " not in text
        assert "heard.wait_for(Event.LOOP_STUCK, 1)" in text
    finally:
        end()


async def test_a_loop_of_several_endpoints_has_a_single_thread_until_the_last_stops(heard: Heard) -> None:
    def watching() -> int:
        return sum(thread.name == "delayline loop watch" for thread in threading.enumerate())

    # Given
    first, second = (Endpoint(name, transport=MemoryTransport()) for name in ("first", "second"))
    for endpoint in (first, second):

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            pass

    # When, then
    async with first:
        async with second:
            assert watching() == 1
        assert watching() == 1
    assert watching() == 0
    assert heard.records == []


def test_a_loop_that_is_not_running_is_not_blocked(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a loop that runs now and then, and was closed in the end without a stop, then no line is logged."""
    loop = asyncio.new_event_loop()
    looks: list[object] = []
    look = loop_watch._look

    def counted(loop: asyncio.AbstractEventLoop, watched: loop_watch._WatchedLoop) -> None:
        look(loop, watched)
        looks.append(loop)

    monkeypatch.setattr(loop_watch, "_look", counted)

    async def begin() -> None:
        watch_running_loop()

    loop.run_until_complete(begin())
    # When it stands still for many looks, beside another that runs
    asyncio.run(eventually_async(lambda: len(looks) > 10, "the thread has looked"))
    assert heard.records == []
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    # Then the thread forgets it
    async def ended() -> None:
        end = watch_running_loop()
        await eventually_async(lambda: loop not in loop_watch._watch._loops, "the closed loop is forgotten")
        end()

    asyncio.run(ended())


async def test_the_age_of_the_oldest_handler_is_a_measure() -> None:
    """Given handlers, when some run, then the measure is the age of the oldest; 0 when none runs."""
    endpoint, running, end = Endpoint("sales", transport=MemoryTransport()), asyncio.Event(), asyncio.Event()
    measurements = Measurements.of(endpoint)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        running.set()
        await end.wait()

    def oldest() -> float:
        return measurements.snapshot().measures["handlers.oldest"]

    async with endpoint:
        assert oldest() == 0
        await endpoint.send("sales", "x")
        await running.wait()
        first = oldest()
        assert first > 0
        await endpoint.send("sales", "y")
        await eventually_async(lambda: endpoint.running_handlers == 2, "both run")
        assert oldest() > first
        end.set()
        await eventually_async(lambda: oldest() == 0, "none runs")
