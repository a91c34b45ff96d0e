"""Delayed delivery by a back end that holds the messages itself: subclass, override `make_backends`, run pytest.

Nothing here looks into a store. The back end's clock decides, so the tests take the seconds that they delay for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.clock import ONE_SECOND, SystemClock
from delayline.endpoint import Endpoint
from delayline.errors import InvalidMessage, NotStarted, QueueNotFound
from delayline.message import Headers, Message
from delayline.receiving.recoverability import Recoverability
from delayline.testing.conformance.messages import AWKWARD_HEADERS, ENDPOINT, PATIENCE
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from pathlib import Path

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.receiving.context import MessageContext
    from delayline.transport import Transport


class Arrivals:
    """The messages that an endpoint has handled, with their times."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.messages: list[Message] = []
        self.instants: dict[str, float] = {}
        self._event = asyncio.Event()
        endpoint.handler(self.note)

    async def note(self, message: Message, context: MessageContext) -> None:
        """Take note of a message: a handler."""
        self.messages.append(message)
        self.instants[message.id] = time.monotonic()
        self._event.set()

    async def number(self, number: int, within: float = PATIENCE) -> list[str]:
        """Return the ids of handled messages once there are `number`."""
        async with asyncio.timeout(within):
            while len(self.messages) < number:
                self._event.clear()
                await self._event.wait()
        return [message.id for message in self.messages]


class NativeDeliveryConformance:
    """The delivery suite for back ends that delay messages themselves."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    #: How late a message may be handled here, in seconds, rounding up to the back end's steps included.
    lateness: float = 3.0

    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedDelivery]:
        """Return a new transport and delivery over storage that is empty when a test begins. Override this."""
        raise NotImplementedError("override make_backends in your subclass of NativeDeliveryConformance")

    async def make_endpoint(self, tmp_path: Path, recoverability: Recoverability | None = None) -> Endpoint:
        """Return an endpoint over new parts."""
        transport, delivery = await self.make_backends(tmp_path)
        return Endpoint(ENDPOINT, transport=transport, delayed_delivery=delivery, recoverability=recoverability)

    async def test_messages_arrive_once_and_never_early(self, tmp_path: Path) -> None:
        """Whole seconds and parts of them, mixed, none before its time and none much later."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        delays = [0.001, 0.5, 1, 1.3, 2, 3]
        async with endpoint:
            sent = {}
            for delay in delays:
                began = time.monotonic()
                message_id = await endpoint.send(ENDPOINT, b"body", delay=timedelta(seconds=delay))
                sent[message_id] = (began, time.monotonic(), delay)
            ids = await arrivals.number(len(delays))
        assert Counter(ids) == Counter(sent.keys())
        for message_id, (began, ended, delay) in sent.items():
            assert arrivals.instants[message_id] - began >= delay, f"a delay of {delay} s was cut short"
            assert arrivals.instants[message_id] - ended <= delay + self.lateness

    async def test_a_long_delay_holds_no_short_one_up(self, tmp_path: Path) -> None:
        """The second is handled while the first waits."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        async with endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="long", delay=timedelta(days=3000))
            await endpoint.send(ENDPOINT, b"", message_id="short", delay=ONE_SECOND)
            assert await arrivals.number(1) == ["short"]

    async def test_a_past_due_time_is_now(self, tmp_path: Path) -> None:
        """However long past."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        async with endpoint:
            for years in (0, 1, 2000):
                due = SystemClock().now() - timedelta(days=365 * years)
                await endpoint.send(ENDPOINT, b"", message_id=str(years), deliver_at=due)
            assert sorted(await arrivals.number(3)) == ["0", "1", "2000"]

    async def test_messages_that_came_due_while_stopped_arrive_at_start(self, tmp_path: Path) -> None:
        """No process of ours has to run for that."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        async with endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="m", delay=ONE_SECOND)
        async with endpoint:
            assert await arrivals.number(1) == ["m"]

    async def test_sent_messages_arrive_unchanged(self, tmp_path: Path) -> None:
        """Headers and body, and nothing that the back end added on the way."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        message = Message("m", AWKWARD_HEADERS, bytes(range(256)))
        async with endpoint:
            assert endpoint.delayed_delivery is not None
            due = SystemClock().now() + ONE_SECOND
            await endpoint.delayed_delivery.defer(TransportOperation(message, ENDPOINT), due)
            await arrivals.number(1)
        assert arrivals.messages == [message]

    async def test_a_missing_destination_is_an_error_to_the_sender(self, tmp_path: Path) -> None:
        """At once: no process could move the message to an error queue later. Other destinations still work."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        async with endpoint:
            with pytest.raises(QueueNotFound, match="nowhere"):
                await endpoint.send("nowhere", b"", delay=ONE_SECOND)
            await endpoint.send(ENDPOINT, b"", message_id="m", delay=ONE_SECOND)
            assert await arrivals.number(1) == ["m"]

    async def test_a_message_that_expires_is_refused(self, tmp_path: Path) -> None:
        """Its time to be received would run while it waits, or be lost on the way."""
        endpoint = await self.make_endpoint(tmp_path)
        async with endpoint:
            with pytest.raises(InvalidMessage, match="TimeToBeReceived"):
                await endpoint.send(ENDPOINT, b"", headers={Headers.TIME_TO_BE_RECEIVED: "00:01:00"}, delay=ONE_SECOND)

    async def test_nothing_is_delayed_before_the_start(self, tmp_path: Path) -> None:
        """An error, not a hang."""
        endpoint = await self.make_endpoint(tmp_path)
        with pytest.raises(NotStarted):
            await endpoint.send(ENDPOINT, b"", delay=ONE_SECOND)

    async def test_a_handler_that_fails_is_tried_again_later(self, tmp_path: Path) -> None:
        """Delayed retries wait in the back end too; handlers see the same id."""
        later = Recoverability(immediate_retries=0, delayed_retries=1, time_increase=ONE_SECOND)
        endpoint = await self.make_endpoint(tmp_path, later)
        instants: list[float] = []

        @endpoint.handler
        async def fail_once(message: Message, context: MessageContext) -> None:
            instants.append(time.monotonic())
            if len(instants) == 1:
                raise RuntimeError("not yet")

        arrivals = Arrivals(endpoint)
        async with endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="m")
            assert await arrivals.number(1) == ["m"]
        assert instants[1] - instants[0] >= 1.0

    async def test_delayed_sends_of_a_handler_are_stored_after_it_has_succeeded(self, tmp_path: Path) -> None:
        """Once, after a failed attempt and a good attempt."""
        endpoint = await self.make_endpoint(tmp_path)

        @endpoint.handler
        async def pass_on(message: Message, context: MessageContext) -> None:
            if message.id == "first":
                await context.send(ENDPOINT, b"", message_id=f"second after {context.attempt}", delay=ONE_SECOND)
                if context.attempt == 1:
                    raise RuntimeError("the first attempt fails")

        arrivals = Arrivals(endpoint)
        async with endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="first")
            assert await arrivals.number(2) == ["first", "second after 2"]

    async def test_setup_may_run_again(self, tmp_path: Path) -> None:
        """Also several at once, while messages wait."""
        endpoint = await self.make_endpoint(tmp_path)
        arrivals = Arrivals(endpoint)
        async with endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="m", delay=ONE_SECOND)
            assert endpoint.delayed_delivery is not None
            await asyncio.gather(*(endpoint.delayed_delivery.setup_infrastructure() for _ in range(3)))
            assert await arrivals.number(1) == ["m"]
