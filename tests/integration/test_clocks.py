"""Clocks that jump while several processes' worth of endpoints share one file: never early, and not much late."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from delayline.events import Event
from delayline.testing import ManualClock, Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from delayline import Endpoint, Message, MessageContext

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


async def test_clocks_that_disagree_make_nothing_early(make_endpoint: Callable[..., Endpoint]) -> None:
    # Given two endpoints on one file whose clocks are an hour apart, the slow one's poller asleep
    slow, fast = ManualClock(), ManualClock()
    fast.set(slow.now() + HOUR)
    handled: list[datetime] = []
    receiver = make_endpoint(clock=slow)

    @receiver.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(slow.now())

    sender = make_endpoint("sender", clock=fast)
    start = slow.now()
    with Signals() as signals:
        async with receiver, sender:
            await signals.wait_for(Event.SLEEPS, 2)
            # When the fast one stores a message that is due in ten seconds by its own clock
            await sender.send("orders", b"", message_id="m", delay=10 * SECOND)
            # And its clock goes on
            await fast.run_until(signals.wait_for(Event.HANDLED))
            # Then it left when it was due by the clock of the poller that had it
            assert fast.now() >= start + HOUR + 10 * SECOND
    assert len(handled) == 1


class WatchedClock(ManualClock):
    """Remembers the latest time that it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.latest = super().now()

    def now(self) -> datetime:
        self.latest = max(self.latest, super().now())
        return super().now()


async def test_a_clock_that_jumps_to_and_fro(make_endpoint: Callable[..., Endpoint]) -> None:
    # Given messages due every second
    clock = WatchedClock()
    start = clock.now()
    handled: dict[int, datetime] = {}
    endpoint = make_endpoint(clock=clock, concurrency=1)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[int(message.id)] = clock.latest

    with Signals() as signals:
        async with endpoint:
            for number in range(1, 21):
                await endpoint.send("orders", b"", message_id=str(number), deliver_at=start + number * SECOND)
            # When the clock is stepped back and forward while they arrive
            for count, jump in ((2, -2 * HOUR), (5, -5 * SECOND), (8, 3 * SECOND), (14, -4 * SECOND)):
                await clock.run_until(signals.wait_for(Event.HANDLED, count))
                clock.set(clock.now() + jump)
            await clock.run_until(signals.wait_for(Event.HANDLED, 20))
            assert signals.count(Event.HANDLED) == 20
    # Then each has arrived, none before the clock had shown its time
    assert set(handled) == set(range(1, 21))
    assert [number for number, latest in handled.items() if latest < start + number * SECOND] == []
