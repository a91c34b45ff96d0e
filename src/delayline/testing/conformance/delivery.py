"""The delivery suite of an endpoint on a transport and a store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
import pytest_asyncio

from delayline.clock import ONE_HOUR, ONE_SECOND
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.fairness import FairBy, SupportsFairness
from delayline.delayed.mover import scope_between
from delayline.delayed.pauses import SupportsDispatchPauses
from delayline.delayed.store import (
    DelayedMessageStore,
    SupportsBatches,
    SupportsForwardedCounts,
    SupportsForwarding,
    SupportsNotifications,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.endpoint import Endpoint
from delayline.errors import BackendUnavailable, ConfigurationError, QueueNotFound, UnsupportedTransactionMode
from delayline.events import Event
from delayline.failures import back_off
from delayline.message import DelayedMessage, Headers, Message, from_wire_time
from delayline.receiving.recoverability import Recoverability
from delayline.testing.clock import ManualClock, settle
from delayline.testing.conformance.messages import (
    AT,
    AWKWARD_HEADERS,
    ENDPOINT,
    OTHER_QUEUE,
    PATIENCE,
    PLENTY,
    TICK,
    delayed,
)
from delayline.testing.conformance.processes import DeliveryBetweenProcesses
from delayline.testing.conformance.publishing import DeliveryPublishing
from delayline.testing.conformance.store import closed, opened
from delayline.testing.conformance.transport_fixtures import nothing_left, received
from delayline.testing.faults import FETCH, REMOVE, STORE, Fault
from delayline.testing.faulty_store import FaultyStore
from delayline.testing.faulty_transport import FaultyTransport
from delayline.testing.signals import Signals
from delayline.transaction import Guarantee, TransactionMode, guarantee, share_transactions
from delayline.transport import SupportsQueueLookup, TransportOperation

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from datetime import datetime
    from pathlib import Path
    from typing import Protocol

    from delayline.delayed.store import Forwarded
    from delayline.receiving.context import MessageContext
    from delayline.transport import Transport

    class Forwards(DelayedMessageStore, SupportsForwarding, Protocol):
        """A store that claims forwarding."""


Result = TypeVar("Result")

EVERY_MODE = list(TransactionMode)


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids of a signal's messages."""
    facts: dict[str, Any] = vars(record)["facts"]
    return facts


@dataclass
class DeliveryScenario:
    """A test's endpoint and everything around it; the transport is started, no endpoint is."""

    transport: FaultyTransport
    store: FaultyStore
    signals: Signals
    clock: ManualClock = field(default_factory=lambda: ManualClock(AT))
    handled: list[tuple[Message, datetime]] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)

    def endpoint(
        self,
        mode: TransactionMode | None = None,
        *,
        handles: bool = True,
        concurrency: int = 8,
        number_of_retries: int = 0,
        batch_size: int = 500,
        store_breaker: timedelta = timedelta(seconds=30),
    ) -> Endpoint:
        """Return an endpoint that records handled messages and critical errors; skips if `mode` is not claimed."""
        delivery = StoredDelivery(
            self.store,
            number_of_retries=number_of_retries,
            batch_size=batch_size,
            time_to_trigger_store_circuit_breaker=store_breaker,
        )
        try:
            guarantee(self.transport, delivery, TransactionMode.NONE if mode is None else mode)
        except UnsupportedTransactionMode:
            pytest.skip(f"not claimed: {mode.name if mode is not None else 'any mode'}")
        endpoint = Endpoint(
            ENDPOINT,
            transport=self.transport,
            delayed_delivery=delivery,
            transaction_mode=mode,
            concurrency=concurrency,
            on_critical_error=self.note_critical,
            clock=self.clock,
        )
        if handles:
            endpoint.handler(self._note_handled)
        return endpoint

    @property
    def shared(self) -> bool:
        """Whether transport and store share a transaction: then a batch is fetched, sent and removed in it."""
        return isinstance(self.store, SupportsTransactions) and share_transactions(self.store, self.transport)

    @property
    def transactional(self) -> bool:
        """Whether a transaction, with the transport or without it, holds a batch from its fetch to its removal."""
        return scope_between(self.store, self.transport).begin is not None

    def note_dispatches(self) -> list[datetime]:
        """Return a list that gets the instant of each dispatch from now on: when messages leave the store."""
        instants: list[datetime] = []
        self.transport.inject(Fault("dispatch", before=lambda: instants.append(self.clock.now())))
        return instants

    def handled_ids(self) -> list[str]:
        """Return the ids of handled messages, in the order they were handled."""
        return [message.id for message, _ in self.handled]

    async def _note_handled(self, message: Message, context: MessageContext) -> None:
        self.handled.append((message, self.clock.now()))

    async def note_critical(self, endpoint: Endpoint, text: str, error: Exception) -> None:
        """Take note of a critical error and go on: for Endpoint(on_critical_error=...)."""
        self.critical.append(text)

    async def poller_sleeps(self, until: datetime) -> None:
        """Return once the poller is about to sleep until that instant."""
        await self.signals.wait_for(
            Event.SLEEPS, timeout=PATIENCE, where=lambda record: facts(record)["until"] == until
        )

    async def advance_to(self, due: datetime) -> None:
        """Wait until the poller sleeps towards `due`, then move time exactly there."""
        await self.poller_sleeps(due)
        await self.clock.advance(due - self.clock.now())

    async def happens(self, event: Event, count: int = 1) -> None:
        """Return once `event` has happened, while time stands still."""
        await self.signals.wait_for(event, count, timeout=PATIENCE)

    async def comes(self, event: Event, count: int = 1) -> None:
        """Move time on until `event` has happened."""
        await self.runs_until(self.signals.wait_for(event, count, timeout=PATIENCE))

    async def runs_until(self, done: Coroutine[None, None, Result]) -> Result:
        """Move time on until `done` has finished, never while a call to store or transport is under way."""
        return await self.clock.run_until(done, quiet=self._quiet)

    async def emptied(self) -> None:
        """Move time on until the store is empty."""
        await self.runs_until(asyncio.wait_for(self._empty(), PATIENCE))

    async def _empty(self) -> None:
        while await self.store.next_due() is not None:
            await self.happens(Event.SLEEPS, self.signals.count(Event.SLEEPS) + 1)

    async def _quiet(self) -> None:
        while self.store.busy or self.transport.busy:
            await self.store.quiet()
            await self.transport.quiet()
            await settle()

    async def have_been_handled(self, ids: Sequence[str]) -> None:
        """Return once each of the messages has been given to the handler; some may have been twice."""
        async with asyncio.timeout(PATIENCE):
            while set(ids) - set(self.handled_ids()):
                await self.happens(Event.HANDLED, self.signals.count(Event.HANDLED) + 1)

    async def removed(self, number: int) -> None:
        """Return once that many messages have been removed from the store."""
        while sum(len(facts(record)["messages"]) for record in self.signals.records(Event.REMOVED)) < number:
            await self.happens(Event.REMOVED, self.signals.count(Event.REMOVED) + 1)

    async def nothing_waits(self) -> None:
        """Return once the store is empty: a removal may be committed a moment after its log record."""
        async with asyncio.timeout(PATIENCE):
            while await self.store.next_due() is not None:
                await settle()

    async def received(self, queue: str, number: int = 1) -> list[Message]:
        """Take that many messages from a queue that no endpoint receives from."""
        receiver = await self.transport.receiver(queue)
        messages = await received(receiver, number)
        for message in messages:
            await receiver.acknowledge(message)
        await receiver.stop()
        return [message.message for message in messages]

    def heal(self) -> None:
        """End all faults."""
        self.store.heal()
        self.transport.heal()


async def send_all(endpoint: Endpoint, ids: Sequence[str], delay: timedelta, destination: str = ENDPOINT) -> None:
    """Send a delayed message for each id, all at once."""
    async with asyncio.timeout(PATIENCE * 3):
        await asyncio.gather(
            *(
                endpoint.send(destination, b"body", message_id=message_id, delay=delay, check_destination=False)
                for message_id in ids
            )
        )


def to(destination: str, operations: Sequence[TransportOperation]) -> bool:
    """Return whether a dispatch has something for the destination: for Fault.when."""
    return any(operation.destination == destination for operation in operations)


class DeliveryFixtures:
    """Fixtures of the delivery suite."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    #: How many messages fall due at the same instant in the burst tests.
    burst: int = 1000
    #: As in the store's suite: the steps of due times, and whether ties are in the order of storing or of their ids.
    step: timedelta = TICK
    keeps_order: bool = True
    #: Whether the transport hands messages out in the order in which they were dispatched to it.
    arrives_in_order: bool = True

    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedMessageStore]:
        """Return a new transport and a new store over storage that is empty when a test begins. Override this."""
        raise NotImplementedError("override make_backends in your subclass of DeliveryConformance")

    @pytest_asyncio.fixture
    async def scenario(self, tmp_path: Path) -> AsyncIterator[DeliveryScenario]:
        """Provide the parts, the transport started and set up."""
        transport, store = await self.make_backends(tmp_path)
        with Signals() as signals:
            scenario = DeliveryScenario(FaultyTransport(transport), FaultyStore(store), signals)
            await scenario.transport.start()
            await scenario.transport.setup_infrastructure([ENDPOINT, OTHER_QUEUE])
            if isinstance(store, SupportsSetup):
                await store.setup_infrastructure(ENDPOINT)
            yield scenario
            scenario.heal()
            await closed(store)
            await scenario.transport.stop()


class DeliveryTiming(DeliveryFixtures):
    """Arrival."""

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_a_message_arrives_when_due_and_never_early(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Not a microsecond before its due time, and at it; then the store is empty."""
        async with scenario.endpoint(mode) as endpoint:
            await endpoint.send(ENDPOINT, b"body", message_id="m", delay=5 * ONE_SECOND, headers={"k": "v"})
            await scenario.poller_sleeps(AT + 5 * ONE_SECOND)
            await scenario.clock.advance(5 * ONE_SECOND - TICK)
            assert scenario.handled == []
            await scenario.clock.advance(TICK)
            await scenario.happens(Event.HANDLED)
            await scenario.removed(1)
            [(message, at)] = scenario.handled
            assert (message.id, message.body, message.headers["k"]) == ("m", b"body", "v")
            assert at == AT + 5 * ONE_SECOND
            await scenario.nothing_waits()

    async def test_a_past_due_time_is_now(self, scenario: DeliveryScenario) -> None:
        """Overdue when sent: it arrives while the clock stands still."""
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"", message_id="past", deliver_at=AT - timedelta(days=400))
            await endpoint.send(ENDPOINT, b"", message_id="now", deliver_at=AT)
            await scenario.happens(Event.HANDLED, 2)
        assert sorted(scenario.handled_ids()) == ["now", "past"]

    async def test_messages_that_came_due_while_stopped_arrive_at_start(self, scenario: DeliveryScenario) -> None:
        """An endpoint that was down for a day catches up."""
        endpoint = scenario.endpoint()
        async with endpoint:
            await send_all(endpoint, ["a", "b", "c"], ONE_HOUR)
        scenario.clock.set(AT + timedelta(days=1))
        async with endpoint:
            await scenario.happens(Event.HANDLED, 3)
        assert sorted(scenario.handled_ids()) == ["a", "b", "c"]

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_a_burst_is_handled_whole(self, scenario: DeliveryScenario, mode: TransactionMode) -> None:
        """Many messages due at the same instant: each handled once, the store empty at the end."""
        ids = [f"m{number}" for number in range(self.burst)]
        async with scenario.endpoint(mode) as endpoint:
            await send_all(endpoint, ids, 25 * ONE_SECOND)
            assert scenario.handled == []
            await scenario.advance_to(AT + 25 * ONE_SECOND)
            await scenario.signals.wait_for(Event.HANDLED, self.burst, timeout=100)
            await scenario.removed(self.burst)
            assert sorted(scenario.handled_ids()) == sorted(ids)
            await scenario.nothing_waits()

    async def test_something_earlier_wakes_the_poller(self, scenario: DeliveryScenario) -> None:
        """It sleeps for a message due in two minutes; a message due in five seconds comes in five seconds."""
        async with scenario.endpoint() as endpoint:
            left = scenario.note_dispatches()
            await endpoint.send(ENDPOINT, b"", message_id="later", delay=120 * ONE_SECOND)
            await scenario.poller_sleeps(AT + 60 * ONE_SECOND)
            await endpoint.send(ENDPOINT, b"", message_id="sooner", delay=5 * ONE_SECOND)
            await scenario.advance_to(AT + 5 * ONE_SECOND)
            await scenario.happens(Event.HANDLED)
            assert scenario.handled_ids() == ["sooner"]
            await scenario.comes(Event.HANDLED, 2)
            assert left == [AT + 5 * ONE_SECOND, AT + 120 * ONE_SECOND]

    async def test_messages_of_other_processes_arrive_within_a_minute(self, scenario: DeliveryScenario) -> None:
        """The sleep is capped: no signal is needed for safety."""
        left = scenario.note_dispatches()
        async with scenario.endpoint():
            await scenario.poller_sleeps(AT + 60 * ONE_SECOND)
            await scenario.store.store(delayed(due=AT, destination=ENDPOINT))
            await scenario.comes(Event.HANDLED)
        assert left[0] <= AT + 60 * ONE_SECOND

    async def test_messages_of_other_processes_wake_the_poller(self, scenario: DeliveryScenario) -> None:
        """With wake-ups it arrives while the clock stands still."""
        if not isinstance(scenario.store, SupportsNotifications):
            pytest.skip("not claimed: SupportsNotifications")
        async with scenario.endpoint():
            await scenario.poller_sleeps(AT + 60 * ONE_SECOND)
            await scenario.store.store(delayed(due=AT, destination=ENDPOINT))
            await scenario.happens(Event.HANDLED)
        assert scenario.handled[0][1] == AT

    async def test_messages_arrive_in_the_order_of_their_due_times(self, scenario: DeliveryScenario) -> None:
        """Strictly, at a single receiver that handles one at a time, ties as they were sent, or by their ids."""
        if not self.arrives_in_order:
            pytest.skip("not claimed: queues in the order of dispatch")
        async with scenario.endpoint(concurrency=1) as endpoint:
            expected = []
            for number in range(40):
                position = number * 7 % 20
                delay = (position + 1) * ONE_SECOND
                message_id = await endpoint.send(ENDPOINT, b"", delay=delay)
                expected.append((position, number if self.keeps_order else 0, message_id))
            await scenario.poller_sleeps(AT + ONE_SECOND)
            await scenario.clock.advance(ONE_HOUR)
            await scenario.happens(Event.HANDLED, 40)
        assert scenario.handled_ids() == [message_id for _, _, message_id in sorted(expected)]

    async def test_a_message_sent_twice_with_one_id_arrives_once(self, scenario: DeliveryScenario) -> None:
        """Repeating a delayed send while it waits changes nothing."""
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"first", message_id="m", delay=5 * ONE_SECOND)
            await endpoint.send(ENDPOINT, b"second", message_id="m", delay=9 * ONE_SECOND)
            await endpoint.send(ENDPOINT, b"end", message_id="end", delay=20 * ONE_SECOND)
            await scenario.comes(Event.HANDLED, 2)
        assert [(message.id, message.body) for message, _ in scenario.handled] == [("m", b"first"), ("end", b"end")]

    async def test_a_clock_that_steps_back_makes_nothing_early(self, scenario: DeliveryScenario) -> None:
        """The poller's sleep ends by elapsed time; it looks at the clock again and goes on waiting."""
        left = scenario.note_dispatches()
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"", delay=30 * ONE_SECOND)
            await scenario.poller_sleeps(AT + 30 * ONE_SECOND)
            await settle()
            scenario.clock.set(AT - ONE_HOUR)
            await scenario.comes(Event.HANDLED)
        assert left == [AT + 30 * ONE_SECOND]

    async def test_a_clock_that_steps_forward_is_noticed_within_a_minute(self, scenario: DeliveryScenario) -> None:
        """Due by the new time, it leaves at the end of the sleep at the latest."""
        left = scenario.note_dispatches()
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ENDPOINT, b"", delay=ONE_HOUR)
            await scenario.poller_sleeps(AT + 60 * ONE_SECOND)
            await settle()
            scenario.clock.set(AT + 2 * ONE_HOUR)
            await scenario.comes(Event.HANDLED)
        assert AT + 2 * ONE_HOUR <= left[0] <= AT + 2 * ONE_HOUR + 60 * ONE_SECOND

    async def test_a_message_locked_by_another_process_is_not_hammered(self, scenario: DeliveryScenario) -> None:
        """The poller looks again now and then, not in a tight loop, and others arrive meanwhile."""
        async with scenario.endpoint() as endpoint:
            await scenario.poller_sleeps(AT + 60 * ONE_SECOND)
            await scenario.store.store(delayed("theirs", AT + ONE_SECOND, destination=ENDPOINT))
            assert await scenario.store.fetch_next_due(AT + ONE_SECOND) is not None  # before the poller may
            await endpoint.send(ENDPOINT, b"", message_id="mine", delay=2 * ONE_SECOND)
            before, started = scenario.store.calls(*FETCH), scenario.clock.now()
            await scenario.comes(Event.HANDLED)
            assert scenario.handled_ids() == ["mine"]
            seconds = (scenario.clock.now() - started) / ONE_SECOND  # time goes on until a busy machine has handled it
            assert scenario.store.calls(*FETCH) - before < 50 * seconds

    async def test_headers_arrive_as_sent(self, scenario: DeliveryScenario) -> None:
        """Whatever they hold; messages that NServiceBus keeps for itself in the store stay there."""
        properties = {
            "NServiceBus.Timeouts.Properties.DelayDeliveryWith": "00:00:05",
            "NServiceBus.Timeouts.Properties.": "",
        }
        stored = Message("m", AWKWARD_HEADERS | properties, b"body")
        async with scenario.endpoint():
            await scenario.store.store(DelayedMessage(stored, ENDPOINT, AT + ONE_SECOND))
            await scenario.comes(Event.HANDLED)
        assert dict(scenario.handled[0][0].headers) == AWKWARD_HEADERS

    @pytest.mark.parametrize("mode", EVERY_MODE[1:])
    async def test_a_handler_that_fails_has_delayed_nothing(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """A handler's delayed sends are stored when it has succeeded: once, after a failed and a successful attempt."""
        endpoint = scenario.endpoint(mode, handles=False)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send(OTHER_QUEUE, f"attempt {context.attempt}", delay=5 * ONE_SECOND)
            if context.attempt == 1:
                raise RuntimeError("the first attempt fails")

        async with endpoint:
            await endpoint.send(ENDPOINT, b"")
            await scenario.happens(Event.HANDLED)
            await scenario.advance_to(AT + 5 * ONE_SECOND)
            await scenario.removed(1)
            [message] = await scenario.received(OTHER_QUEUE)
            assert message.text == "attempt 2"
            stored = [facts(record)["messages"] for record in scenario.signals.records(Event.FETCHED)]
            assert sum(len(messages) for messages in stored) == 1
            await scenario.nothing_waits()


DUE_IN_5_SECONDS = AT + 5 * ONE_SECOND
BROKEN = "broken"
#: The headers that describe a failure.
FAILURE = [
    Headers.EXCEPTION_TYPE,
    Headers.EXCEPTION_MESSAGE,
    Headers.EXCEPTION_SOURCE,
    Headers.EXCEPTION_STACK_TRACE,
    Headers.EXCEPTION_HELP_LINK,
    Headers.TIME_OF_FAILURE,
    Headers.FAILED_QUEUE,
    Headers.PROCESSING_ENDPOINT,
    Headers.PROCESSING_MACHINE,
    Headers.HOST_DISPLAY_NAME,
]


def chained(number: int) -> ValueError:
    """Return an exception with a chain of so many causes."""
    error = ValueError("boom 0")
    for link in range(1, number):
        outer = ValueError(f"boom {link}")
        outer.__cause__ = error
        error = outer
    return error


#: Exceptions that a handler may raise.
FAILURES = {
    "200 kB of text": lambda: ValueError("x" * 200_000),
    "20 MB of text": lambda: ValueError("x" * 20_000_000),
    "400 causes": lambda: chained(400),
    "control characters": lambda: ValueError("\0\x1b\n" * 10_000),
}
#: Values that foreign senders may write into the header of the message id, and no column or property accepts.
UNUSABLE_ID_VALUES = {"300 characters": "i" * 300, "a lone surrogate": "a\ud800b", "NUL": "a\0b"}


async def send_checked(endpoint: Endpoint, ids: Sequence[str]) -> None:
    """Send delayed messages to ELSEWHERE, each after the other."""
    for message_id in ids:
        await endpoint.send(OTHER_QUEUE, b"", message_id=message_id, delay=5 * ONE_SECOND)


def broken() -> Fault:
    """Return a fault that strikes every dispatch with something for BROKEN."""
    return Fault("dispatch", error=RuntimeError("it is broken"), when=functools.partial(to, BROKEN))


class DeliveryFailures(DeliveryFixtures):
    """Messages that cannot be forwarded."""

    @pytest.mark.parametrize("mode", EVERY_MODE)
    @pytest.mark.parametrize("retries", [0, 1, 3])
    async def test_attempts_are_one_more_than_retries(
        self, scenario: DeliveryScenario, mode: TransactionMode, retries: int
    ) -> None:
        """Exactly; then the message is in the error queue, with the reason in its headers."""
        attempts: list[str] = []
        scenario.transport.inject(
            broken(), Fault("dispatch", before=lambda: attempts.append("!"), when=functools.partial(to, BROKEN))
        )
        async with scenario.endpoint(mode, number_of_retries=retries) as endpoint:
            await endpoint.send(
                BROKEN, b"body", message_id="m", headers={"mine": "kept"}, delay=5 * ONE_SECOND, check_destination=False
            )
            await scenario.comes(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
            await scenario.emptied()
        assert len(attempts) == scenario.signals.count(Event.DISPATCH_FAILED) == 1 + retries
        assert (message.id, message.body, message.headers["mine"]) == ("m", b"body", "kept")
        assert [name for name in FAILURE if name not in message.headers] == []
        assert message.headers[Headers.EXCEPTION_TYPE].endswith("RuntimeError")
        assert message.headers[Headers.EXCEPTION_MESSAGE] == "it is broken"
        assert "it is broken" in message.headers[Headers.EXCEPTION_STACK_TRACE]
        assert message.headers[Headers.FAILED_QUEUE] == BROKEN
        assert message.headers[Headers.PROCESSING_ENDPOINT] == ENDPOINT
        assert DUE_IN_5_SECONDS <= from_wire_time(message.headers[Headers.TIME_OF_FAILURE]) <= scenario.clock.now()
        assert scenario.handled == []

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_a_failing_message_blocks_no_others(self, scenario: DeliveryScenario, mode: TransactionMode) -> None:
        """Messages due with it and after it arrive while the clock stands still."""
        scenario.transport.inject(broken())
        async with scenario.endpoint(mode, number_of_retries=3) as endpoint:
            await send_all(endpoint, ["bad"], 4 * ONE_SECOND, BROKEN)
            await send_all(endpoint, ["a", "b", "c"], 5 * ONE_SECOND)
            await scenario.poller_sleeps(AT + 4 * ONE_SECOND)
            scenario.clock.set(DUE_IN_5_SECONDS)
            await scenario.clock.advance(4 * ONE_SECOND)
            await scenario.happens(Event.HANDLED, 3)
        assert sorted(scenario.handled_ids()) == ["a", "b", "c"]

    async def test_a_message_that_fails_backs_off(self, scenario: DeliveryScenario) -> None:
        """It waits longer each time, instead of being hammered."""
        scenario.transport.inject(broken())
        async with scenario.endpoint(number_of_retries=4) as endpoint:
            await endpoint.send(BROKEN, b"", delay=5 * ONE_SECOND, check_destination=False)
            await scenario.comes(Event.MOVED_TO_ERROR)
        backed_off = [facts(record)["until"] for record in scenario.signals.records(Event.BACKED_OFF)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(backed_off)]
        assert len(backed_off) == 4
        # An attempt may come late, so that the next gap is longer; none is shorter than its wait
        assert all(gap >= back_off(attempts) for attempts, gap in enumerate(gaps, start=2)), gaps

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_a_missing_destination_goes_to_the_error_queue_at_once(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Trying again would not help; the others in the batch arrive."""
        async with scenario.endpoint(mode, number_of_retries=7) as endpoint:
            await send_all(endpoint, ["lost"], 5 * ONE_SECOND, "nowhere")
            await send_all(endpoint, ["good"], 5 * ONE_SECOND)
            await scenario.advance_to(DUE_IN_5_SECONDS)
            await scenario.happens(Event.HANDLED)
            await scenario.happens(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
        assert message.id == "lost"
        assert message.headers[Headers.FAILED_QUEUE] == "nowhere"
        assert message.headers[Headers.EXCEPTION_TYPE].endswith("QueueNotFound")
        assert scenario.handled_ids() == ["good"]

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_without_an_error_queue_the_message_stays(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Nothing is removed before the next place has it."""
        scenario.transport.inject(Fault("dispatch", error=RuntimeError("no"), when=functools.partial(to, "error")))
        async with scenario.endpoint(mode) as endpoint:
            await endpoint.send("nowhere", b"body", message_id="m", delay=5 * ONE_SECOND, check_destination=False)
            await scenario.comes(Event.ERROR_MOVE_FAILED, 3)
            assert await scenario.store.next_due() is not None
            scenario.transport.heal()
            await scenario.comes(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
            assert (message.id, message.body) == ("m", b"body")
            await scenario.emptied()

    async def test_a_misspelt_destination_of_a_delayed_send_is_refused(self, scenario: DeliveryScenario) -> None:
        """By the send, not when it is due; a destination that is there is asked for once."""
        if not isinstance(scenario.transport, SupportsQueueLookup):
            pytest.skip("not claimed: SupportsQueueLookup")
        asked: list[str] = []
        scenario.transport.inject(Fault("has_queue", before=lambda: asked.append("!")))
        async with scenario.endpoint() as endpoint:
            with pytest.raises(QueueNotFound, match=r"'elsewhere2' does not exist.*check_destination=False") as refused:
                await endpoint.send("elsewhere2", b"", delay=5 * ONE_SECOND)
            assert refused.value.similar in {(), (OTHER_QUEUE,)}
            assert await scenario.store.next_due() is None
            await send_checked(endpoint, ["a", "b", "c"])
            assert len(asked) == 2
            await endpoint.send("elsewhere2", b"", delay=5 * ONE_SECOND, check_destination=False)
            assert len(asked) == 2

    async def test_a_destination_that_cannot_be_looked_for_is_stored(self, scenario: DeliveryScenario) -> None:
        """An outage of the queues is none of the store."""
        if not isinstance(scenario.transport, SupportsQueueLookup):
            pytest.skip("not claimed: SupportsQueueLookup")
        scenario.transport.inject(Fault("has_queue", error=BackendUnavailable("no answer")))
        async with scenario.endpoint() as endpoint:
            await endpoint.send(OTHER_QUEUE, b"", delay=5 * ONE_SECOND)
            assert await scenario.store.next_due() is not None

    async def test_an_error_queue_that_does_not_exist_loses_nothing(self, scenario: DeliveryScenario) -> None:
        """Once the queue exists, the message gets there."""
        endpoint = Endpoint(
            ENDPOINT,
            transport=scenario.transport,
            delayed_delivery=StoredDelivery(scenario.store),
            error_queue="errors-of-another-name",
            setup_infrastructure=False,
            clock=scenario.clock,
            on_critical_error=scenario.note_critical,
        )
        async with endpoint:
            await endpoint.send("nowhere", b"body", message_id="m", delay=5 * ONE_SECOND, check_destination=False)
            await scenario.comes(Event.ERROR_MOVE_FAILED, 2)
            assert await scenario.store.next_due() is not None
            await scenario.transport.setup_infrastructure(["errors-of-another-name"])
            await scenario.comes(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("errors-of-another-name")
        assert message.id == "m"

    async def test_damaged_headers_reach_the_error_queue_whole(self, scenario: DeliveryScenario) -> None:
        """A message that cannot be parsed can still be moved."""
        damaged = Message.from_encoded("m", b"\xff{not json", b"body")
        async with scenario.endpoint():
            await scenario.store.store(DelayedMessage(damaged, "nowhere", AT))
            await scenario.comes(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
            await scenario.emptied()
        assert (message.id, message.encoded_headers, message.body) == ("m", b"\xff{not json", b"body")

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_a_store_that_fails_once_is_an_error_to_the_sender(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """The send raises, and nothing is in the error queue for it."""
        scenario.store.inject(Fault(STORE, error=BackendUnavailable("gone for a second"), calls=1))
        async with scenario.endpoint(mode) as endpoint:
            with pytest.raises(BackendUnavailable, match="gone for a second"):
                await scenario.runs_until(endpoint.send(ENDPOINT, b"", delay=5 * ONE_SECOND))
            await endpoint.send(ENDPOINT, b"", message_id="second", delay=5 * ONE_SECOND)
            await scenario.comes(Event.HANDLED)
        assert scenario.handled_ids() == ["second"]
        assert scenario.signals.count(Event.MOVED_TO_ERROR) == 0

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_a_handler_whose_delayed_send_cannot_be_stored_loses_nothing(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Its message goes to the error queue, in mode NONE too."""
        scenario.store.inject(Fault(STORE, error=ValueError("cannot be stored")))
        endpoint = scenario.endpoint(mode, handles=False)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send(OTHER_QUEUE, b"", delay=5 * ONE_SECOND)

        async with endpoint:
            await endpoint.send(ENDPOINT, b"body", message_id="m")
            await scenario.comes(Event.HANDLER_FAILED)
            await scenario.comes(Event.ERROR_MOVE_FAILED if mode > TransactionMode.NONE else Event.MOVED_TO_ERROR)
            if mode > TransactionMode.NONE:
                scenario.heal()
                await scenario.comes(Event.HANDLED)
                await scenario.comes(Event.REMOVED)
                return
            [message] = await scenario.received("error")
        assert (message.id, message.body) == ("m", b"body")
        assert message.headers[Headers.FAILED_QUEUE] == ENDPOINT

    async def test_a_delay_without_delayed_delivery_is_explained(self, scenario: DeliveryScenario) -> None:
        """Not an obscure error from the depths."""
        async with Endpoint("plain", transport=scenario.transport, clock=scenario.clock) as endpoint:
            with pytest.raises(ConfigurationError, match="delayed_delivery="):
                await endpoint.send(ENDPOINT, b"", delay=ONE_SECOND)

    @pytest.mark.parametrize("failure", FAILURES)
    async def test_a_handler_may_fail_with_anything(self, scenario: DeliveryScenario, failure: str) -> None:
        """However long the exception's text or chain is: the message reaches the error queue, the next its handler.

        No critical error comes of it.
        """
        endpoint = scenario.endpoint(handles=False)
        endpoint.recoverability = Recoverability(immediate_retries=0, delayed_retries=0)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            if message.id == "bad":
                raise FAILURES[failure]()

        async with endpoint:
            await endpoint.send(ENDPOINT, b"body", message_id="bad", headers={"mine": "kept"})
            await scenario.comes(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
            await endpoint.send(ENDPOINT, b"", message_id="good")
            await scenario.comes(Event.HANDLED)
        assert (message.id, message.body, message.headers["mine"]) == ("bad", b"body", "kept")
        assert message.headers[Headers.FAILED_QUEUE] == ENDPOINT
        assert message.headers[Headers.EXCEPTION_TYPE] == "builtins.ValueError"
        assert scenario.critical == []

    @pytest.mark.parametrize("named", UNUSABLE_ID_VALUES)
    async def test_a_message_id_header_may_be_anything(self, scenario: DeliveryScenario, named: str) -> None:
        """A handler that fails is tried as often as any other, and the header is in the error queue as it was."""
        header, seen = UNUSABLE_ID_VALUES[named], []
        endpoint = scenario.endpoint(handles=False)
        endpoint.recoverability = Recoverability(immediate_retries=1, delayed_retries=1)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            seen.append(message.id)
            raise ValueError(message.id)

        async with endpoint:
            bad = Message("m", {Headers.MESSAGE_ID: header}, b"body")
            await scenario.transport.dispatch([TransportOperation(bad, ENDPOINT)])
            await scenario.comes(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
        assert len(seen) == 4
        assert {message.id} == set(seen)
        assert (message.headers[Headers.MESSAGE_ID], message.body) == (header, b"body")
        assert scenario.critical == []


IDS = [f"m{number}" for number in range(10)]
ERRORS: list[Exception] = [BackendUnavailable("gone for a moment"), RuntimeError("unexpected")]
Step = str | tuple[str, ...]
DELIVERY_STEPS: list[Step] = ["next_due", FETCH, "dispatch", REMOVE, "commit"]


def name_of(step: object) -> str:
    """Return a test id."""
    if isinstance(step, Exception):
        return type(step).__name__
    return step[0] if isinstance(step, tuple) else str(step)


class DeliveryFaults(DeliveryFixtures):
    """Faults that pass."""

    @pytest.mark.parametrize("mode", EVERY_MODE)
    @pytest.mark.parametrize("error", ERRORS, ids=name_of)
    @pytest.mark.parametrize("step", DELIVERY_STEPS, ids=name_of)
    async def test_a_step_that_fails_once_neither_loses_nor_doubles(
        self, scenario: DeliveryScenario, mode: TransactionMode, error: Exception, step: Step
    ) -> None:
        """While the process runs and its log is complete, every message is handled exactly once."""
        async with scenario.endpoint(mode, number_of_retries=3) as endpoint:
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, error=error, calls=1))
            await scenario.comes(Event.HANDLED, len(IDS))
            await scenario.emptied()
        assert Counter(scenario.handled_ids()) == Counter(IDS)
        assert scenario.signals.count(Event.MOVED_TO_ERROR) == 0

    @pytest.mark.parametrize("mode", EVERY_MODE)
    @pytest.mark.parametrize("error", ERRORS, ids=name_of)
    @pytest.mark.parametrize("step", [FETCH, "dispatch", REMOVE, "commit"], ids=name_of)
    async def test_a_step_that_was_done_but_reported_as_failed(
        self, scenario: DeliveryScenario, mode: TransactionMode, error: Exception, step: Step
    ) -> None:
        """The nastiest fault: nothing is lost, and where the guarantee is exactly once nothing is doubled."""
        endpoint = scenario.endpoint(mode, number_of_retries=3)
        if step == FETCH and not scenario.transactional:
            pytest.skip("not claimed: a fetch that is rolled back; its lock ends with the lease, in real time")
        async with endpoint:
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, error=error, calls=1, takes_effect=True))
            await scenario.emptied()
            await scenario.have_been_handled(IDS)
        assert set(scenario.handled_ids()) == set(IDS)
        if endpoint.guarantee is Guarantee.EXACTLY_ONCE:
            assert Counter(scenario.handled_ids()) == Counter(IDS)

    @pytest.mark.parametrize("takes_effect", [False, True], ids=["rolled back", "committed"])
    async def test_a_receive_whose_commit_is_reported_as_failed_has_its_effects_once(
        self, scenario: DeliveryScenario, takes_effect: bool
    ) -> None:
        """The handler may run again; its sends and delayed sends leave once."""
        endpoint = scenario.endpoint(TransactionMode.TRANSACTION_SCOPE, handles=False)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send(OTHER_QUEUE, b"", message_id="now")
            await context.send(OTHER_QUEUE, b"", message_id="later", delay=5 * ONE_SECOND)

        async with endpoint:
            scenario.transport.inject(
                Fault("commit", error=BackendUnavailable("no answer"), calls=1, takes_effect=takes_effect)
            )
            await endpoint.send(ENDPOINT, b"")
            await scenario.comes(Event.RECEIVE_LOST if takes_effect else Event.HANDLED)
            await scenario.runs_until(scenario.removed(1))
            await endpoint.send(OTHER_QUEUE, b"", message_id="end")
            messages = await scenario.received(OTHER_QUEUE, 3)
        assert sorted(message.id for message in messages) == ["end", "later", "now"]

    async def test_a_delayed_commit_sends_nothing_early(self, scenario: DeliveryScenario) -> None:
        """Dispatched messages are invisible until the commit."""
        gate, reached = asyncio.Event(), asyncio.Event()
        async with scenario.endpoint(TransactionMode.TRANSACTION_SCOPE) as endpoint:
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            scenario.store.inject(Fault("commit", calls=1, before=reached.set, until=gate))
            await scenario.clock.advance(5 * ONE_SECOND)
            async with asyncio.timeout(PATIENCE):
                await reached.wait()
            await settle()
            assert scenario.handled == []
            gate.set()
            await scenario.happens(Event.HANDLED, len(IDS))
        assert Counter(scenario.handled_ids()) == Counter(IDS)

    @pytest.mark.parametrize("mode", EVERY_MODE)
    @pytest.mark.parametrize("step", [FETCH, "dispatch", REMOVE], ids=name_of)
    async def test_a_stop_in_the_middle_of_a_batch(
        self, scenario: DeliveryScenario, mode: TransactionMode, step: Step
    ) -> None:
        """The batch in flight is finished, and after the next start every message was handled once."""
        gate, reached = asyncio.Event(), asyncio.Event()
        endpoint = scenario.endpoint(mode, batch_size=4)
        async with endpoint:
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, calls=2, before=reached.set, until=gate))
            await scenario.clock.advance(5 * ONE_SECOND)
            async with asyncio.timeout(PATIENCE):
                await reached.wait()
            stopping = asyncio.create_task(endpoint.stop())
            await settle()
            assert not stopping.done()
            gate.set()
            async with asyncio.timeout(PATIENCE):
                await stopping
        async with endpoint:
            await scenario.happens(Event.HANDLED, len(IDS))
            await scenario.removed(len(IDS))
            await scenario.nothing_waits()
        assert Counter(scenario.handled_ids()) == Counter(IDS)

    async def test_a_stop_does_not_wait_for_a_due_time(self, scenario: DeliveryScenario) -> None:
        """Pending messages are not lost either."""
        endpoint = scenario.endpoint()
        async with endpoint:
            await send_all(endpoint, IDS, timedelta(days=300))
        async with asyncio.timeout(PATIENCE), endpoint:
            assert await scenario.store.next_due() == AT + timedelta(days=300)


class DeliveryBreakers(DeliveryFixtures):
    """Faults that last become critical errors, with documented texts."""

    async def critical(self, scenario: DeliveryScenario, text: str) -> None:
        """Move time on until the critical error has come; assert that it has this text."""
        await scenario.comes(Event.CRITICAL_ERROR)
        await settle()
        assert scenario.critical[0] == text

    async def test_one_failed_send_is_no_lasting_fault(self, scenario: DeliveryScenario) -> None:
        """The send raises; without a further failure the endpoint goes on."""
        async with scenario.endpoint() as endpoint:
            scenario.store.inject(Fault(STORE, error=BackendUnavailable("down")))
            with pytest.raises(BackendUnavailable):
                await scenario.runs_until(endpoint.send(ENDPOINT, b"", delay=ONE_SECOND))
            await scenario.clock.advance(100 * ONE_SECOND)
        assert scenario.critical == []

    async def test_storing_keeps_failing(self, scenario: DeliveryScenario) -> None:
        """The store's breaker."""
        scenario.store.inject(Fault(STORE, error=BackendUnavailable("down")))
        trigger = 5 * ONE_SECOND
        async with scenario.endpoint(store_breaker=trigger) as endpoint:

            async def keep_sending() -> None:
                while not scenario.critical:
                    with pytest.raises(BackendUnavailable):
                        await endpoint.send(ENDPOINT, b"", delay=ONE_SECOND)
                    await scenario.clock.sleep(0.1)  # time stands still while the store is at work

            sending = asyncio.create_task(keep_sending())
            await self.critical(scenario, "Failed to store delayed message")
            assert scenario.clock.now() >= AT + trigger
            await scenario.runs_until(asyncio.wait_for(sending, PATIENCE))
            scenario.store.heal()
            await endpoint.send(ENDPOINT, b"", message_id="m", delay=ONE_SECOND)
            await scenario.comes(Event.HANDLED)
        assert scenario.handled_ids() == ["m"]

    @pytest.mark.parametrize("step", [FETCH, "next_due"], ids=name_of)
    async def test_fetching_keeps_failing(self, scenario: DeliveryScenario, step: Step) -> None:
        """The fetch breaker: for a store whose fetch fails, and for a store whose `next_due` fails."""
        async with scenario.endpoint() as endpoint:
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            scenario.store.inject(Fault(step, error=BackendUnavailable("down")))
            await self.critical(scenario, "Failed to fetch due delayed messages from the storage")
            assert scenario.clock.now() >= DUE_IN_5_SECONDS + 30 * ONE_SECOND
            scenario.store.heal()
            await scenario.comes(Event.HANDLED, len(IDS))
        assert Counter(scenario.handled_ids()) == Counter(IDS)

    @pytest.mark.parametrize("mode", EVERY_MODE)
    @pytest.mark.parametrize("step", ["dispatch", REMOVE, "commit"], ids=name_of)
    async def test_dispatching_keeps_failing(
        self, scenario: DeliveryScenario, mode: TransactionMode, step: Step
    ) -> None:
        """The dispatch breaker: no success between, so nothing disarms it, wherever dispatching fails."""
        async with scenario.endpoint(mode) as endpoint:
            if step == "commit" and not scenario.shared:
                pytest.skip("not claimed: one transaction over transport and store; sends are removed without")
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, error=BackendUnavailable("down")))
            await self.critical(scenario, "Failed to dispatch delayed messages to destination")
            assert scenario.clock.now() >= DUE_IN_5_SECONDS + 30 * ONE_SECOND
            scenario.heal()
            await scenario.comes(Event.HANDLED, len(IDS))
            await scenario.runs_until(scenario.removed(len(IDS)))
        assert Counter(scenario.handled_ids()) == Counter(IDS)
        assert scenario.signals.count(Event.MOVED_TO_ERROR) == 0

    @pytest.mark.parametrize("mode", EVERY_MODE)
    async def test_failure_handling_keeps_failing(self, scenario: DeliveryScenario, mode: TransactionMode) -> None:
        """More than a failed recovery a second, over half a minute; and nothing is lost by it."""
        ids = [f"m{number}" for number in range(40)]
        async with scenario.endpoint(mode) as endpoint:
            await send_all(endpoint, ids, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            scenario.transport.inject(Fault("dispatch", error=RuntimeError("all dispatches fail")))
            await scenario.clock.advance(5 * ONE_SECOND)
            # All of them: a message whose dispatch has failed, but not its move yet, would be moved once the transport
            # heals.
            await scenario.happens(Event.ERROR_MOVE_FAILED, len(ids))
            await settle()
            assert scenario.critical == ["Failed to execute error handling for delayed message forwarding"] * 10
            scenario.heal()
            await scenario.comes(Event.HANDLED, len(ids))
        assert Counter(scenario.handled_ids()) == Counter(ids)

    async def test_a_critical_error_stops_the_endpoint(self, scenario: DeliveryScenario) -> None:
        """Unless the host decides otherwise; pending messages stay stored."""
        endpoint = Endpoint(
            ENDPOINT,
            transport=scenario.transport,
            delayed_delivery=StoredDelivery(scenario.store),
            clock=scenario.clock,
        )
        async with endpoint:
            await send_all(endpoint, IDS, 5 * ONE_SECOND)
            await scenario.poller_sleeps(DUE_IN_5_SECONDS)
            scenario.transport.inject(Fault("dispatch", error=BackendUnavailable("down")))
            await scenario.runs_until(asyncio.wait_for(endpoint.wait_stopped(), PATIENCE))
        assert scenario.handled == []
        await opened(scenario.store)
        assert await scenario.store.next_due() == DUE_IN_5_SECONDS


BILLING = "billing"
NOWHERE = "nowhere"


class Inside(NamedTuple):
    """A store, open, and the transport whose queues it moves messages to, started."""

    transport: Transport
    store: Forwards

    async def hold(self, *messages: DelayedMessage) -> None:
        """Store message after message."""
        for message in messages:
            await self.store.store(message)

    async def forward(self, limit: int = 100, max_bytes: int = PLENTY) -> Forwarded:
        """Let the store move due messages."""
        return await self.store.forward_due(AT, limit, max_bytes=max_bytes)

    async def takes(self, number: int, queue: str = BILLING) -> list[str]:
        """Take that many messages, and no more, from a queue; return their ids in order."""
        receiver = await self.transport.receiver(queue)
        messages = await received(receiver, number) if number else []
        for message in messages:
            await receiver.acknowledge(message)
        await receiver.stop()
        await nothing_left(self.transport, queue)
        return [message.message.id for message in messages]

    async def waiting(self) -> list[str]:
        """Return the ids of the remaining messages, by taking them out of the store."""
        ids: list[str] = []
        while (message := await self.store.fetch_next_due(AT + timedelta(days=1))) is not None:
            ids.append(message.id)
            await self.store.remove(message)
        return ids


class DeliveryForwarding(DeliveryFixtures):
    """Messages that the store moves inside its database, and messages that it leaves to the poller."""

    @pytest_asyncio.fixture
    async def forwarding(self, tmp_path: Path) -> AsyncIterator[Inside]:
        """Provide the parts as they are, without faults: faults would have to pass through this process."""
        async with self.opened_inside(tmp_path) as inside:
            yield inside

    @pytest_asyncio.fixture
    async def fair_forwarding(self, tmp_path: Path) -> AsyncIterator[Inside]:
        """Provide them with a store that is fair by destination."""
        async with self.opened_inside(tmp_path, "destination") as inside:
            yield inside

    @contextlib.asynccontextmanager
    async def opened_inside(self, tmp_path: Path, fair_by: str | None = None) -> AsyncIterator[Inside]:
        """Provide the parts, open."""
        transport, store = await self.make_backends(tmp_path)
        if not isinstance(store, SupportsForwarding) or not store.forwards_to(transport):
            pytest.skip("not claimed: SupportsForwarding")
        if fair_by is not None:
            if not isinstance(store, SupportsFairness):
                pytest.skip("not claimed: SupportsFairness")
            store.be_fair(FairBy.of(fair_by))
        await transport.start()
        await transport.setup_infrastructure([BILLING, OTHER_QUEUE, "error"])
        await opened(store)
        yield Inside(transport, store)
        await closed(store)
        await transport.stop()

    async def test_due_messages_move_in_the_order_of_due_times(self, forwarding: Inside) -> None:
        """Down to the step, ties in the order stored; nothing that is due later moves."""
        before, later = delayed("first", AT - self.step), delayed("early", AT + self.step)
        await forwarding.hold(delayed("second"), delayed("third"), before, later)
        forwarded = await forwarding.forward()
        assert (forwarded.number, forwarded.next_due, forwarded.left) == (3, AT + self.step, 0)
        assert await forwarding.takes(3) == ["first", "second", "third"]
        assert await forwarding.waiting() == ["early"]

    async def test_paused_messages_do_not_move(self, forwarding: Inside) -> None:
        """Given a full batch for a paused queue, then messages for others move; the paused move once resumed."""
        store = forwarding.store
        if not isinstance(store, SupportsDispatchPauses):
            pytest.skip("not claimed: SupportsDispatchPauses")
        others = await self.hold_backlog(forwarding, 20)
        await store.dispatch_pauses.pause(BILLING, AT)
        await store.dispatch_pauses.look()
        forwarded = await forwarding.forward(10)
        assert (forwarded.number, forwarded.next_due, forwarded.left) == (5, None, 0)
        assert sorted(await forwarding.takes(5, OTHER_QUEUE)) == others
        assert (await forwarding.forward(10)).number == 0
        await store.dispatch_pauses.resume(BILLING, AT)
        await store.dispatch_pauses.look()
        assert [(await forwarding.forward(10)).number for _ in range(3)] == [10, 10, 0]
        await forwarding.takes(20)

    async def hold_backlog(self, inside: Inside, number: int = 300, body: bytes = b"body") -> list[str]:
        """Store so many messages for a queue, and then some for another; return the ids of these."""
        busy = [delayed(f"a{position:03}", AT - 2 * self.step, body=body) for position in range(number)]
        others = [delayed(f"b{position}", destination=OTHER_QUEUE) for position in range(5)]
        for messages in (busy, others):
            await asyncio.gather(*map(inside.store.store, messages[1:]), inside.store.store(messages[0]))
        return [message.id for message in others]

    async def test_a_backlog_of_one_queue_delays_no_other(self, fair_forwarding: Inside) -> None:
        """Given a backlog for a queue, when the third batch has moved, then so have the messages for another.

        All move once, and are counted.
        """
        if isinstance(fair_forwarding.store, SupportsForwardedCounts):
            fair_forwarding.store.count_forwarded()
        others = await self.hold_backlog(fair_forwarding)
        moved = [await fair_forwarding.forward(30) for _ in range(3)]
        assert sorted(await fair_forwarding.takes(5, OTHER_QUEUE)) == others
        while moved[-1].number:
            moved.append(await fair_forwarding.forward(30))
        assert sum(each.number for each in moved) == 305
        if isinstance(fair_forwarding.store, SupportsForwardedCounts):
            counts = Counter[str]()
            for each in moved:
                counts.update({destination: number for (destination, _), number in (each.moved or {}).items()})
            assert counts == {BILLING: 300, OTHER_QUEUE: 5}
        assert (moved[-1].number, moved[-1].left, moved[-1].next_due) == (0, 0, None)
        assert sorted(await fair_forwarding.takes(300)) == [f"a{position:03}" for position in range(300)]

    async def test_a_backlog_of_large_messages_delays_no_other_queue(self, fair_forwarding: Inside) -> None:
        """Given batches that have room for three messages of a backlog, then five move what another waits for."""
        others = await self.hold_backlog(fair_forwarding, 30, b"x" * 1000)
        numbers = [(await fair_forwarding.forward(20, max_bytes=3500)).number for _ in range(5)]
        assert sorted(await fair_forwarding.takes(5, OTHER_QUEUE)) == others
        assert all(0 < number < 20 for number in numbers)
        while number := (await fair_forwarding.forward(20, max_bytes=3500)).number:
            numbers.append(number)
        assert sum(numbers) == 35
        await fair_forwarding.takes(30)

    async def test_a_backlog_for_an_unknown_queue_delays_no_other(self, fair_forwarding: Inside) -> None:
        """Given a backlog that only the poller can dispatch, when it fetches after each move, then others move too."""
        unknown = [delayed(f"n{position:03}", AT - 3 * self.step, destination=NOWHERE) for position in range(100)]
        store, fetched = fair_forwarding.store, set[str]()
        await asyncio.gather(*map(store.store, unknown))
        others = await self.hold_backlog(fair_forwarding, 100)
        for _ in range(5):
            moved = await fair_forwarding.forward(20)
            if (moved.left or not moved.number) and isinstance(store, SupportsBatches):
                messages = await store.fetch_due(AT, 20, max_bytes=PLENTY)
                await store.remove_many(messages)
                fetched |= {message.id for message in messages}
        by_moves = set(others) - fetched
        assert set(await fair_forwarding.takes(len(by_moves), OTHER_QUEUE)) == by_moves

    async def test_moves_are_counted_by_destination_and_due_time(self, forwarding: Inside) -> None:
        """Given messages for two queues and another that stays, when they move, then the moved messages are counted."""
        if not isinstance(forwarding.store, SupportsForwardedCounts):
            pytest.skip("not claimed: SupportsForwardedCounts")
        first = AT - self.step
        await forwarding.hold(delayed("a"), delayed("b"), delayed("c", first), delayed("e", destination=OTHER_QUEUE))
        assert (await forwarding.forward(limit=1)).moved is None
        forwarding.store.count_forwarded()
        forwarded = await forwarding.forward()
        assert (forwarded.number, forwarded.moved) == (3, {(BILLING, AT): 2, (OTHER_QUEUE, AT): 1})
        assert not (await forwarding.forward()).moved

    async def test_an_empty_store_forwards_nothing(self, forwarding: Inside) -> None:
        """And reports that nothing is due."""
        forwarded = await forwarding.forward()
        assert (forwarded.number, forwarded.next_due, forwarded.left) == (0, None, 0)

    async def test_each_destination_gets_its_own_untouched(self, forwarding: Inside) -> None:
        """Headers and bodies, byte for byte."""
        message = delayed("a", headers=AWKWARD_HEADERS, body=bytes(range(256)))
        await forwarding.hold(message, delayed("b", destination=OTHER_QUEUE))
        assert (await forwarding.forward()).number == 2
        [forwarded_message] = await received(await forwarding.transport.receiver(BILLING))
        assert (forwarded_message.message.id, forwarded_message.message.body) == ("a", message.message.body)
        assert forwarded_message.message.encoded_headers == message.message.encoded_headers
        assert await forwarding.takes(1, OTHER_QUEUE) == ["b"]

    async def test_the_limit_holds(self, forwarding: Inside) -> None:
        """At most `limit`, the earliest; the next, due as well, is not to be waited for."""
        await forwarding.hold(*(delayed(f"m{number}", AT - (5 - number) * self.step) for number in range(5)))
        forwarded = await forwarding.forward(limit=2)
        assert forwarded.number == 2
        assert forwarded.next_due is not None
        assert forwarded.next_due <= AT
        assert await forwarding.takes(2) == ["m0", "m1"]

    async def test_max_bytes_bounds_a_move(self, forwarding: Inside) -> None:
        """Bodies and headers count, as in a fetch; a message that is too large moves alone."""
        await forwarding.hold(
            *(delayed(f"m{number}", headers={"h": "x" * 5000}, body=b"x" * 5000) for number in range(5))
        )
        assert (await forwarding.forward(max_bytes=35_000)).number == 3
        assert (await forwarding.forward(max_bytes=1)).number == 1
        assert await forwarding.takes(4) == ["m0", "m1", "m2", "m3"]

    async def test_a_missing_queue_is_stopped_at_or_passed_over(self, forwarding: Inside) -> None:
        """Messages move in order; the next remaining message is returned."""
        await forwarding.hold(delayed("a"), delayed("lost", destination=NOWHERE), delayed("b"))
        first = await forwarding.forward()
        assert first.next_due == AT
        if first.left:
            assert (first.number, first.left) == (2, 1)
            assert await forwarding.takes(2) == ["a", "b"]
            assert await forwarding.waiting() == ["lost"]
        else:
            assert (first.number, (await forwarding.forward()).number) == (1, 0)
            assert await forwarding.takes(1) == ["a"]
            assert await forwarding.waiting() == ["lost", "b"]

    async def test_messages_leased_without_a_transaction_are_not_forwarded(self, forwarding: Inside) -> None:
        """Another process is dispatching the message."""
        await forwarding.hold(delayed("held", AT - self.step), delayed("free"))
        held = await forwarding.store.fetch_next_due(AT)
        assert held is not None
        forwarded = await forwarding.forward()
        taken = await forwarding.takes(forwarded.number)
        assert await forwarding.store.remove(held) is True
        assert [*taken, *await forwarding.waiting()] == ["free"]

    async def test_competing_moves_double_nothing(self, forwarding: Inside) -> None:
        """Every message moves once."""
        ids = [f"m{number:02}" for number in range(40)]
        await forwarding.hold(*map(delayed, ids))
        moves = await asyncio.gather(*(forwarding.forward(limit=10) for _ in range(4)))
        number = sum(move.number for move in moves)
        assert sorted([*await forwarding.takes(number), *await forwarding.waiting()]) == ids

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
    async def test_a_move_that_is_cancelled_moves_all_or_nothing(self, forwarding: Inside, turns: int) -> None:
        """And is over when the cancellation is raised: no message is in two places, or in none."""
        ids = [f"m{number:02}" for number in range(20)]
        await forwarding.hold(*map(delayed, ids))
        moving = asyncio.create_task(forwarding.forward())
        for _ in range(turns):
            await asyncio.sleep(0)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        left = await forwarding.waiting()
        assert left in ([], ids)
        assert await forwarding.takes(len(ids) - len(left)) == (ids if not left else [])

    async def test_a_message_that_expires_is_left_to_the_poller(self, forwarding: Inside) -> None:
        """Its time to be received begins when it is sent, which moving is not."""
        await forwarding.hold(delayed("expires", headers={Headers.TIME_TO_BE_RECEIVED: "00:00:00"}))
        assert (await forwarding.forward()).number == 0
        assert await forwarding.waiting() == ["expires"]

    async def test_the_poller_dispatches_the_remaining_messages(self, forwarding: Inside) -> None:
        """A missing queue: to the error queue. Dispatch properties: no receiver sees them. The others: just moved."""
        marked = {Headers.DISPATCH_PROPERTIES + "DeliverAt": "x", "kept": "yes"}
        await forwarding.hold(
            delayed("a"), delayed("marked", headers=marked), delayed("lost", destination=NOWHERE), delayed("b")
        )
        endpoint = Endpoint(
            ENDPOINT,
            transport=forwarding.transport,
            delayed_delivery=StoredDelivery(forwarding.store),
            send_only=True,
            clock=ManualClock(AT),
        )
        with Signals() as signals:
            async with endpoint:
                await signals.wait_for(Event.SLEEPS, timeout=PATIENCE)
                receiver = await forwarding.transport.receiver(BILLING)
                forwarded_messages = {message.message.id: message.message for message in await received(receiver, 3)}
                [failed] = await received(await forwarding.transport.receiver("error"))
        assert sorted(forwarded_messages) == ["a", "b", "marked"]
        assert dict(forwarded_messages["marked"].headers) == {"kept": "yes"}
        assert (failed.message.id, failed.message.headers[Headers.FAILED_QUEUE]) == ("lost", NOWHERE)
        assert await (await opened(forwarding.store)).next_due() is None


class DeliveryConformance(
    DeliveryTiming,
    DeliveryFailures,
    DeliveryFaults,
    DeliveryBreakers,
    DeliveryForwarding,
    DeliveryPublishing,
    DeliveryBetweenProcesses,
):
    """The delivery suite of an endpoint on a transport and a store: subclass it, override `make_backends`, run pytest.

    Override `urls` too where other processes can reach the two.

    Transaction modes that the two do not support together are reported as `not claimed`.
    """
