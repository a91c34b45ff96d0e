"""A failing message delays no other and is never lost: retries, the error queue, its headers."""

from __future__ import annotations

import functools
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.delayed.delivery import StoredDelivery
from delayline.endpoint import Endpoint
from delayline.errors import BackendUnavailable, ConfigurationError, QueueNotFound
from delayline.events import Event
from delayline.message import DelayedMessage, Headers, Message, from_wire_time
from delayline.recoverability import Recoverability
from delayline.testing.conformance.delivery_fixtures import ELSEWHERE, MODES, DeliveryFixtures, facts, send_all, to
from delayline.testing.conformance.messages import AT, ENDPOINT
from delayline.testing.faults import STORE, Fault
from delayline.transaction import TransactionMode
from delayline.transport import SupportsQueueLookup, TransportOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.pipeline import MessageContext
    from delayline.testing.conformance.delivery_fixtures import DeliveryScenario

SECOND = timedelta(seconds=1)
DUE = AT + 5 * SECOND
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
UNUSABLE_IDS = {"300 characters": "i" * 300, "a lone surrogate": "a\ud800b", "NUL": "a\0b"}


async def send_checked(endpoint: Endpoint, ids: Sequence[str]) -> None:
    """Send delayed messages to ELSEWHERE, one after the other."""
    for message_id in ids:
        await endpoint.send(ELSEWHERE, b"", message_id=message_id, delay=5 * SECOND)


def broken() -> Fault:
    """Return a fault that strikes every dispatch with something for BROKEN."""
    return Fault("dispatch", error=RuntimeError("it is broken"), when=functools.partial(to, BROKEN))


class DeliveryFailures(DeliveryFixtures):
    """Messages that cannot be forwarded."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("retries", [0, 1, 3])
    async def test_attempts_are_one_more_than_retries(
        self, scenario: DeliveryScenario, mode: TransactionMode, retries: int
    ) -> None:
        """Exactly; then the message is in the error queue, and says why."""
        attempts: list[str] = []
        scenario.transport.inject(
            broken(), Fault("dispatch", before=lambda: attempts.append("!"), when=functools.partial(to, BROKEN))
        )
        async with scenario.endpoint(mode, number_of_retries=retries) as endpoint:
            await endpoint.send(
                BROKEN, b"body", message_id="m", headers={"mine": "kept"}, delay=5 * SECOND, check_destination=False
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
        assert DUE <= from_wire_time(message.headers[Headers.TIME_OF_FAILURE]) <= scenario.clock.now()
        assert scenario.handled == []

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_failing_message_holds_nobody_up(self, scenario: DeliveryScenario, mode: TransactionMode) -> None:
        """Those due with it and after it arrive while the clock stands still."""
        scenario.transport.inject(broken())
        async with scenario.endpoint(mode, number_of_retries=3) as endpoint:
            await send_all(endpoint, ["bad"], 4 * SECOND, BROKEN)
            await send_all(endpoint, ["a", "b", "c"], 5 * SECOND)
            await scenario.poller_sleeps(AT + 4 * SECOND)
            scenario.clock.set(DUE)
            await scenario.clock.advance(4 * SECOND)
            await scenario.happens(Event.HANDLED, 3)
        assert sorted(scenario.handled_ids()) == ["a", "b", "c"]

    async def test_a_message_that_fails_backs_off(self, scenario: DeliveryScenario) -> None:
        """It waits longer each time, instead of being hammered."""
        scenario.transport.inject(broken())
        async with scenario.endpoint(number_of_retries=4) as endpoint:
            await endpoint.send(BROKEN, b"", delay=5 * SECOND, check_destination=False)
            await scenario.comes(Event.MOVED_TO_ERROR)
        backed_off = [facts(record)["until"] for record in scenario.signals.records(Event.BACKED_OFF)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(backed_off)]
        assert len(backed_off) == 4
        assert gaps == sorted(gaps)
        assert gaps[0] >= SECOND

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_missing_destination_goes_to_the_error_queue_at_once(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Trying again would not help; the others in the batch arrive."""
        async with scenario.endpoint(mode, number_of_retries=7) as endpoint:
            await send_all(endpoint, ["lost"], 5 * SECOND, "nowhere")
            await send_all(endpoint, ["good"], 5 * SECOND)
            await scenario.advance_to(DUE)
            await scenario.happens(Event.HANDLED)
            await scenario.happens(Event.MOVED_TO_ERROR)
            [message] = await scenario.received("error")
        assert message.id == "lost"
        assert message.headers[Headers.FAILED_QUEUE] == "nowhere"
        assert message.headers[Headers.EXCEPTION_TYPE].endswith("QueueNotFound")
        assert scenario.handled_ids() == ["good"]

    @pytest.mark.parametrize("mode", MODES)
    async def test_without_an_error_queue_the_message_stays(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Nothing is removed before the next place has it."""
        scenario.transport.inject(Fault("dispatch", error=RuntimeError("no"), when=functools.partial(to, "error")))
        async with scenario.endpoint(mode) as endpoint:
            await endpoint.send("nowhere", b"body", message_id="m", delay=5 * SECOND, check_destination=False)
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
                await endpoint.send("elsewhere2", b"", delay=5 * SECOND)
            assert refused.value.similar in {(), (ELSEWHERE,)}
            assert await scenario.store.next_due() is None
            await send_checked(endpoint, ["a", "b", "c"])
            assert len(asked) == 2
            await endpoint.send("elsewhere2", b"", delay=5 * SECOND, check_destination=False)
            assert len(asked) == 2

    async def test_a_destination_that_cannot_be_looked_for_is_stored(self, scenario: DeliveryScenario) -> None:
        """An outage of the queues is none of the store."""
        if not isinstance(scenario.transport, SupportsQueueLookup):
            pytest.skip("not claimed: SupportsQueueLookup")
        scenario.transport.inject(Fault("has_queue", error=BackendUnavailable("no answer")))
        async with scenario.endpoint() as endpoint:
            await endpoint.send(ELSEWHERE, b"", delay=5 * SECOND)
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
            await endpoint.send("nowhere", b"body", message_id="m", delay=5 * SECOND, check_destination=False)
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

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_store_that_fails_once_is_an_error_to_the_sender(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """The sender knows, and nothing is in the error queue for it."""
        scenario.store.inject(Fault(STORE, error=BackendUnavailable("gone for a second"), calls=1))
        async with scenario.endpoint(mode) as endpoint:
            with pytest.raises(BackendUnavailable, match="gone for a second"):
                await scenario.runs_until(endpoint.send(ENDPOINT, b"", delay=5 * SECOND))
            await endpoint.send(ENDPOINT, b"", message_id="second", delay=5 * SECOND)
            await scenario.comes(Event.HANDLED)
        assert scenario.handled_ids() == ["second"]
        assert scenario.signals.count(Event.MOVED_TO_ERROR) == 0

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_handler_whose_delayed_send_cannot_be_stored_loses_nothing(
        self, scenario: DeliveryScenario, mode: TransactionMode
    ) -> None:
        """Its message goes to the error queue, in mode NONE too."""
        scenario.store.inject(Fault(STORE, error=ValueError("cannot be stored")))
        endpoint = scenario.endpoint(mode, handles=False)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send(ELSEWHERE, b"", delay=5 * SECOND)

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
                await endpoint.send(ENDPOINT, b"", delay=SECOND)

    @pytest.mark.parametrize("failure", FAILURES)
    async def test_a_handler_may_fail_with_anything(self, scenario: DeliveryScenario, failure: str) -> None:
        """However long the exception's text or chain is: the message reaches the error queue, the next one its handler.

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

    @pytest.mark.parametrize("named", UNUSABLE_IDS)
    async def test_a_message_id_header_may_be_anything(self, scenario: DeliveryScenario, named: str) -> None:
        """A handler that fails is tried as often as any other, and the header is in the error queue as it was."""
        header, seen = UNUSABLE_IDS[named], []
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
