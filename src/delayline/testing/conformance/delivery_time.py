"""Never early, hardly late: when delayed messages arrive, in which order, whatever the clock does."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.delayed.store import SupportsNotifications
from delayline.events import Event
from delayline.message import DelayedMessage, Message
from delayline.testing.clock import settle
from delayline.testing.conformance.delivery_fixtures import ELSEWHERE, MODES, DeliveryFixtures, facts, send_all
from delayline.testing.conformance.messages import AT, AWKWARD_HEADERS, ENDPOINT, TICK, delayed
from delayline.testing.faults import FETCH

if TYPE_CHECKING:
    from delayline.pipeline import MessageContext
    from delayline.testing.conformance.delivery_fixtures import DeliveryScenario
    from delayline.transaction import TransactionMode

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


class DeliveryTiming(DeliveryFixtures):
    """Arrival."""

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_message_arrives_when_due_and_never_early(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Not a microsecond before its due time, and at it; then the store is empty."""
        async with scenario.endpoint(mode) as endpoint:
            await endpoint.send(ENDPOINT, b"body", message_id="m", delay=5 * SECOND, headers={"k": "v"})
            await scenario.poller_sleeps(AT + 5 * SECOND)
            await scenario.clock.advance(5 * SECOND - TICK)
            assert scenario.handled == []
            await scenario.clock.advance(TICK)
            await scenario.happens(Event.HANDLED)
            await scenario.removed(1)
            [(message, at)] = scenario.handled
            assert (message.id, message.body, message.headers["k"]) == ("m", b"body", "v")
            assert at == AT + 5 * SECOND
            await scenario.nothing_waits()

    async def test_a_past_due_time_is_now(self, scenario: DeliveryScenario) -> None:
        """Overdue when sent: it arrives while the clock stands still."""
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="past", deliver_at=AT - timedelta(days=400))
            await endpoint.send(ENDPOINT, b"", message_id="now", deliver_at=AT)
            await scenario.happens(Event.HANDLED, 2)
        assert sorted(scenario.handled_ids()) == ["now", "past"]

    async def test_what_fell_due_while_nobody_ran_arrives_at_start(self, scenario: DeliveryScenario) -> None:
        """An endpoint that was down for a day catches up."""
        endpoint = scenario.endpoint()
        async with endpoint:
            await send_all(endpoint, ["a", "b", "c"], HOUR)
        scenario.clock.set(AT + timedelta(days=1))
        async with endpoint:
            await scenario.happens(Event.HANDLED, 3)
        assert sorted(scenario.handled_ids()) == ["a", "b", "c"]

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_burst_is_handled_whole(self, scenario: DeliveryScenario, mode: TransactionMode) -> None:
        """Many messages due at one instant: each handled once, the store empty at the end."""
        ids = [f"m{number}" for number in range(self.burst)]
        async with scenario.endpoint(mode) as endpoint:
            await send_all(endpoint, ids, 25 * SECOND)
            assert scenario.handled == []
            await scenario.advance_to(AT + 25 * SECOND)
            await scenario.signals.wait_for(Event.HANDLED, self.burst, timeout=100)
            await scenario.removed(self.burst)
            assert sorted(scenario.handled_ids()) == sorted(ids)
            await scenario.nothing_waits()

    async def test_something_earlier_wakes_the_poller(self, scenario: DeliveryScenario) -> None:
        """It sleeps for a message due in two minutes; one due in five seconds comes in five seconds."""
        async with scenario.endpoint() as endpoint:
            left = scenario.note_dispatches()
            await endpoint.send(ENDPOINT, b"", message_id="later", delay=120 * SECOND)
            await scenario.poller_sleeps(AT + 60 * SECOND)
            await endpoint.send(ENDPOINT, b"", message_id="sooner", delay=5 * SECOND)
            await scenario.advance_to(AT + 5 * SECOND)
            await scenario.happens(Event.HANDLED)
            assert scenario.handled_ids() == ["sooner"]
            await scenario.comes(Event.HANDLED, 2)
            assert left == [AT + 5 * SECOND, AT + 120 * SECOND]

    async def test_what_somebody_else_stores_arrives_within_a_minute(self, scenario: DeliveryScenario) -> None:
        """The sleep is capped: no signal is needed for safety."""
        left = scenario.note_dispatches()
        async with scenario.endpoint():
            await scenario.poller_sleeps(AT + 60 * SECOND)
            await scenario.store.store(delayed(due=AT, destination=ENDPOINT))
            await scenario.comes(Event.HANDLED)
        assert left[0] <= AT + 60 * SECOND

    async def test_what_somebody_else_stores_wakes_the_poller(self, scenario: DeliveryScenario) -> None:
        """With wake-ups it arrives while the clock stands still."""
        if not isinstance(scenario.store, SupportsNotifications):
            pytest.skip("not claimed: SupportsNotifications")
        async with scenario.endpoint():
            await scenario.poller_sleeps(AT + 60 * SECOND)
            await scenario.store.store(delayed(due=AT, destination=ENDPOINT))
            await scenario.happens(Event.HANDLED)
        assert scenario.handled[0][1] == AT

    async def test_messages_arrive_in_the_order_of_their_due_times(self, scenario: DeliveryScenario) -> None:
        """Strictly, at one receiver that handles one at a time, ties as they were sent, or by their ids."""
        if not self.arrives_in_order:
            pytest.skip("not claimed: queues in the order of dispatch")
        async with scenario.endpoint(concurrency=1) as endpoint:
            expected = []
            for number in range(40):
                place = number * 7 % 20
                delay = (place + 1) * SECOND
                message_id = await endpoint.send(ENDPOINT, b"", delay=delay)
                expected.append((place, number if self.keeps_order else 0, message_id))
            await scenario.poller_sleeps(AT + SECOND)
            await scenario.clock.advance(HOUR)
            await scenario.happens(Event.HANDLED, 40)
        assert scenario.handled_ids() == [message_id for _, _, message_id in sorted(expected)]

    async def test_a_message_sent_twice_with_one_id_arrives_once(self, scenario: DeliveryScenario) -> None:
        """Repeating a delayed send while it waits changes nothing."""
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"first", message_id="m", delay=5 * SECOND)
            await endpoint.send(ENDPOINT, b"second", message_id="m", delay=9 * SECOND)
            await endpoint.send(ENDPOINT, b"end", message_id="end", delay=20 * SECOND)
            await scenario.comes(Event.HANDLED, 2)
        assert [(message.id, message.body) for message, _ in scenario.handled] == [("m", b"first"), ("end", b"end")]

    async def test_a_clock_that_steps_back_makes_nothing_early(self, scenario: DeliveryScenario) -> None:
        """The poller's sleep ends by elapsed time; it looks at the clock again and goes on waiting."""
        left = scenario.note_dispatches()
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"", delay=30 * SECOND)
            await scenario.poller_sleeps(AT + 30 * SECOND)
            await settle()
            scenario.clock.set(AT - HOUR)
            await scenario.comes(Event.HANDLED)
        assert left == [AT + 30 * SECOND]

    async def test_a_clock_that_steps_forward_is_noticed_within_a_minute(self, scenario: DeliveryScenario) -> None:
        """Due by the new time, it leaves at the end of the sleep at the latest."""
        left = scenario.note_dispatches()
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"", delay=HOUR)
            await scenario.poller_sleeps(AT + 60 * SECOND)
            await settle()
            scenario.clock.set(AT + 2 * HOUR)
            await scenario.comes(Event.HANDLED)
        assert AT + 2 * HOUR <= left[0] <= AT + 2 * HOUR + 60 * SECOND

    async def test_a_message_locked_by_somebody_else_is_not_hammered(self, scenario: DeliveryScenario) -> None:
        """The poller looks again now and then, not in a tight loop, and others arrive meanwhile."""
        async with scenario.endpoint() as endpoint:
            await scenario.poller_sleeps(AT + 60 * SECOND)
            await scenario.store.store(delayed("theirs", AT + SECOND, destination=ENDPOINT))
            assert await scenario.store.fetch_next_due(AT + SECOND) is not None  # before the poller may
            await endpoint.send(ENDPOINT, b"", message_id="mine", delay=2 * SECOND)
            before, started = scenario.store.calls(*FETCH), scenario.clock.now()
            await scenario.comes(Event.HANDLED)
            assert scenario.handled_ids() == ["mine"]
            seconds = (scenario.clock.now() - started) / SECOND  # time goes on until a busy machine has handled it
            assert scenario.store.calls(*FETCH) - before < 50 * seconds

    async def test_headers_arrive_as_sent(self, scenario: DeliveryScenario) -> None:
        """Whatever they hold; those that NServiceBus keeps for itself in the store stay there."""
        properties = {
            "NServiceBus.Timeouts.Properties.DelayDeliveryWith": "00:00:05",
            "NServiceBus.Timeouts.Properties.": "",
        }
        stored = Message("m", AWKWARD_HEADERS | properties, b"body")
        async with scenario.endpoint():
            await scenario.store.store(DelayedMessage(stored, ENDPOINT, AT + SECOND))
            await scenario.comes(Event.HANDLED)
        assert dict(scenario.handled[0][0].headers) == AWKWARD_HEADERS

    @pytest.mark.parametrize("mode", MODES[1:])
    async def test_a_handler_that_fails_has_delayed_nothing(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """A handler's delayed sends are stored when it has succeeded: once, after a failed and a successful attempt."""
        endpoint = scenario.endpoint(mode, handles=False)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send(ELSEWHERE, f"attempt {context.attempt}", delay=5 * SECOND)
            if context.attempt == 1:
                raise RuntimeError("the first attempt fails")

        async with endpoint:
            await endpoint.send(ENDPOINT, b"")
            await scenario.happens(Event.HANDLED)
            await scenario.advance_to(AT + 5 * SECOND)
            await scenario.removed(1)
            [message] = await scenario.received(ELSEWHERE)
            assert message.text == "attempt 2"
            stored = [facts(record)["messages"] for record in scenario.signals.records(Event.FETCHED)]
            assert sum(len(messages) for messages in stored) == 1
            await scenario.nothing_waits()
