"""The timeout manager: stored and dispatched messages, their times and headers."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import START
from tests.unit.timeout_scenario import DISPATCHER, SCOPES, TIMEOUTS, TimeoutScenario, build_timeouts

from delayline import (
    ConfigurationError,
    Endpoint,
    Guarantee,
    Headers,
    InvalidMessage,
    Message,
    NotStarted,
    QueueNotFound,
    Recoverability,
    TransactionMode,
)
from delayline.errors import UnsupportedTransactionMode
from delayline.memory import MemoryTransport
from delayline.message import TimeoutHeaders, to_wire_time
from delayline.receiving.handlers import Handlers
from delayline.testing.clock import settle
from delayline.timeouts import ExternalTimeoutManager, MemoryTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

SAGA = uuid.UUID("8f9c1a52-6f0e-4a57-9c5b-3d3f4b3f7b5c")
FIVE = timedelta(seconds=5)


@pytest.fixture(params=list(SCOPES))
def scenario(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutScenario:
    return build_timeouts(clock, **SCOPES[request.param])


async def test_a_delayed_message_waits_in_the_storage_and_arrives_when_it_is_due(scenario: TimeoutScenario) -> None:
    # Given
    await scenario.start()
    # When
    await scenario.endpoint.send("sales", b"body", message_id="m", delay=FIVE, headers={"k": "ключ 🔑"})
    await settle()
    # Then it waits
    assert await scenario.pending() == 1
    await scenario.clock.advance(4.999)
    assert scenario.handled == []
    # Then it is there, at that instant, and nothing is left anywhere
    await scenario.clock.advance(0.001)
    [(message, at)] = scenario.handled
    assert (message.id, message.body, message.headers["k"], at) == ("m", b"body", "ключ 🔑", START + FIVE)
    assert await scenario.pending() == 0
    assert (await scenario.ids(TIMEOUTS), await scenario.ids(DISPATCHER), await scenario.ids("error")) == ([], [], [])
    await scenario.endpoint.stop()


async def test_the_headers_match_the_reference(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    [timeout_id] = scenario.memory.kept
    await scenario.clock.advance(5)
    message = await scenario.only("out")
    assert message.id == message.headers[Headers.MESSAGE_ID] == "m"
    assert message.headers[TimeoutHeaders.EXPIRE] == to_wire_time(START + FIVE)
    assert message.headers[TimeoutHeaders.DESTINATION] == "out"
    assert message.headers[TimeoutHeaders.RELATED_TIMEOUT] == timeout_id
    assert message.headers[Headers.TIME_SENT] == to_wire_time(START + FIVE)
    await scenario.endpoint.stop()


async def test_a_request_contains_only_the_id_of_the_timeout(clock: ManualClock) -> None:
    # Given a dispatcher that does not run
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.delivery._satellites[1].stop()
    # When a timeout expires
    await scenario.endpoint.send("out", b"body", delay=FIVE)
    await settle()
    [timeout_id] = scenario.memory.kept
    await clock.advance(5)
    # Then
    request = await scenario.only(DISPATCHER)
    assert request.body == b""
    assert request.headers == {
        Headers.MESSAGE_ID: request.id,
        Headers.INTENT: "Send",
        Headers.TIME_SENT: to_wire_time(START + FIVE),
        "NServiceBus.ControlMessage": "True",
        "Timeout.Id": timeout_id,
    }
    await scenario.endpoint.stop()


async def test_a_request_of_version_4_is_understood(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=100))
    [timeout_id] = scenario.memory.kept
    await scenario.put(DISPATCHER, Message("request", {TimeoutHeaders.OLD_TIMEOUT_ID: timeout_id}, b""))
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.stop()


async def test_a_message_of_version_5_gets_its_reply_address_back(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    headers = {Headers.REPLY_TO: "sales", TimeoutHeaders.OLD_REPLY_TO: "billing"}
    await scenario.put(TIMEOUTS, scenario.expiring(after=5, **headers))
    await clock.advance(5)
    message = await scenario.only("out")
    assert message.headers[Headers.REPLY_TO] == "billing"
    assert TimeoutHeaders.OLD_REPLY_TO not in message.headers
    await scenario.endpoint.stop()


async def test_timeouts_due_within_a_second_are_not_stored_and_not_early(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=0.9))
    assert (await scenario.pending(), await scenario.ids("out")) == (0, [])
    await scenario.clock.advance(0.899)
    assert await scenario.ids("out") == []
    await scenario.clock.advance(0.001)
    message = await scenario.only("out")
    assert message.id == "m"
    assert TimeoutHeaders.RELATED_TIMEOUT not in message.headers
    assert scenario.faults.calls("add") == 0
    await scenario.endpoint.stop()


async def test_messages_that_do_not_fit_the_levels_are_stored(clock: ManualClock) -> None:
    scenario = build_timeouts(clock, concurrency=2)
    await scenario.start()
    for number in range(3):
        await scenario.put(TIMEOUTS, scenario.expiring(f"m{number}", after=0.9))
    assert await scenario.pending() == 2
    await clock.advance(0.9)
    assert sorted(await scenario.ids("out")) == ["m0", "m1", "m2"]
    await scenario.endpoint.stop()


async def test_a_stop_waits_for_no_message(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=0.9))
    await scenario.endpoint.stop()
    assert await scenario.pending() == 1


async def test_overdue_messages_are_forwarded_at_once(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=-3600))
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.send("out", b"", message_id="past", deliver_at=START - FIVE)
    assert await scenario.ids("out") == ["m", "past"]
    await scenario.endpoint.stop()


async def test_without_a_destination_it_goes_to_who_asked(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    expiring = scenario.expiring(after=5).with_headers({Headers.REPLY_TO: "out"}, without=(TimeoutHeaders.DESTINATION,))
    await scenario.put(TIMEOUTS, expiring)
    await clock.advance(5)
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.stop()


async def test_with_no_destination_at_all_it_goes_to_the_error_queue(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=5).with_headers({}, without=(TimeoutHeaders.DESTINATION,)))
    await scenario.clock.advance(5)
    failed = await scenario.only("error")
    assert "names no destination" in failed.headers[Headers.EXCEPTION_MESSAGE]
    assert (failed.id, failed.body, await scenario.pending()) == ("m", b"body", 0)
    await scenario.endpoint.stop()


async def test_a_message_without_an_id_header_keeps_its_id(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring("native", after=5))
    await clock.advance(5)
    assert (await scenario.only("out")).headers[Headers.MESSAGE_ID] == "native"
    await scenario.endpoint.stop()


async def test_a_sagas_timeouts_are_cleared(scenario: TimeoutScenario) -> None:
    await scenario.start()
    for id, saga in (("a", SAGA), ("b", SAGA), ("c", uuid.uuid4())):
        await scenario.put(TIMEOUTS, scenario.expiring(id, after=5, **{Headers.SAGA_ID: str(saga)}))
    await scenario.delivery.clear_timeouts(SAGA)
    await settle()
    assert await scenario.pending() == 1
    await scenario.clock.advance(5)
    assert await scenario.ids("out") == ["c"]
    await scenario.endpoint.stop()


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({}, "Non timeout message arrived at the timeout manager, id:m"),
        ({TimeoutHeaders.EXPIRE: "tomorrow"}, "not recognized as a valid DateTime"),
        (
            {TimeoutHeaders.CLEAR: "True"},
            "Invalid saga id specified, clear timeouts is only supported for saga instances",
        ),
        ({TimeoutHeaders.EXPIRE: to_wire_time(START + FIVE), Headers.SAGA_ID: "no guid"}, "not a GUID"),
    ],
)
async def test_messages_that_are_not_timeouts_go_to_the_error_queue(
    clock: ManualClock, headers: dict[str, str], text: str
) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, Message("m", headers, b"body"))
    failed = await scenario.only("error")
    assert text in failed.headers[Headers.EXCEPTION_MESSAGE]
    assert failed.headers[Headers.FAILED_QUEUE] == TIMEOUTS
    await scenario.endpoint.stop()


async def test_a_request_without_an_id_goes_to_the_error_queue(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(DISPATCHER, Message("m", {}, b""))
    assert "requests no timeout" in (await scenario.only("error")).headers[Headers.EXCEPTION_MESSAGE]
    await scenario.endpoint.stop()


async def test_a_request_for_a_removed_timeout_is_ignored(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.put(DISPATCHER, Message("m", {TimeoutHeaders.TIMEOUT_ID: str(uuid.uuid4())}, b""))
    assert (await scenario.ids(DISPATCHER), await scenario.ids("error"), await scenario.ids("out")) == ([], [], [])
    await scenario.endpoint.stop()


async def test_a_message_that_may_expire_is_refused(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    with pytest.raises(InvalidMessage, match="TimeToBeReceived set is not supported"):
        await scenario.endpoint.send("out", b"", delay=FIVE, headers={Headers.TIME_TO_BE_RECEIVED: "00:05:00"})
    await scenario.endpoint.stop()


async def test_an_endpoint_starts_again(scenario: TimeoutScenario) -> None:
    for number in range(2):
        await scenario.start()
        await scenario.endpoint.send("out", b"", message_id=f"m{number}", delay=FIVE)
        await scenario.clock.advance(5)
        await scenario.endpoint.stop()
    assert (await scenario.ids("out"), scenario.memory.opened) == (["m0", "m1"], 0)


async def test_one_that_only_routes_leaves_the_rest_to_others(clock: ManualClock) -> None:
    one = build_timeouts(clock)
    other = build_timeouts(clock, beside=one, polling=False)
    await other.start()
    await other.endpoint.send("out", b"", message_id="m", delay=FIVE)
    await clock.advance(10)
    assert (await one.pending(), await one.ids(TIMEOUTS), one.memory.opened) == (0, ["m"], 0)
    await one.start()
    assert await one.ids("out") == ["m"]
    await one.endpoint.stop()
    await other.endpoint.stop()


async def test_queues_are_created(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.endpoint.setup()
    assert (await scenario.ids(TIMEOUTS), await scenario.ids(DISPATCHER)) == ([], [])


async def test_a_deferred_message_of_a_handler_comes_back(scenario: TimeoutScenario) -> None:
    # Given a handler that defers its message, once
    seen: list[str] = []
    scenario.endpoint._handlers = Handlers()

    @scenario.endpoint.handler
    async def handle(message: Message, context: object) -> None:
        seen.append(message.id)
        if len(seen) == 1:
            await context.defer(FIVE)  # type: ignore[attr-defined]

    await scenario.start()
    await scenario.put("sales", Message("m", {}, b"body"))
    await scenario.clock.advance(5)
    assert seen == ["m", "m"]
    await scenario.endpoint.stop()


async def test_nothing_is_deferred_before_the_start() -> None:
    with pytest.raises(NotStarted):
        _ = TimeoutManagerDelivery(MemoryTimeoutPersister()).timeouts_queue
    delivery = TimeoutManagerDelivery(MemoryTimeoutPersister())
    Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delivery)
    with pytest.raises(NotStarted, match="not started"):
        await delivery.defer(None, START)  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [timedelta(seconds=-1), 5])
def test_a_negative_wait_is_refused(wait: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="zero or longer"):
        TimeoutManagerDelivery(MemoryTimeoutPersister(), time_to_wait_before_triggering_critical_error=wait)


def test_a_delivery_has_one_endpoint() -> None:
    delivery = TimeoutManagerDelivery(MemoryTimeoutPersister())
    Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delivery)
    with pytest.raises(ConfigurationError, match="another for endpoint 'billing'"):
        Endpoint("billing", transport=MemoryTransport(), delayed_delivery=delivery)


def test_a_name_that_leaves_no_room_for_the_satellites_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="shorter name"):
        Endpoint(
            "s" * 190, transport=MemoryTransport(), delayed_delivery=TimeoutManagerDelivery(MemoryTimeoutPersister())
        )


async def test_an_external_timeout_manager_stores_deferred_and_retried_messages(clock: ManualClock) -> None:
    # Given a timeout manager of one endpoint, and another endpoint that uses it
    scenario = build_timeouts(clock)
    await scenario.start()
    endpoint = Endpoint(
        "crm",
        transport=scenario.transport,
        delayed_delivery=ExternalTimeoutManager(TIMEOUTS),
        recoverability=Recoverability(immediate_retries=0, delayed_retries=1),
        clock=clock,
    )
    attempts: list[float] = []

    @endpoint.handler
    async def handle(message: Message, context: object) -> None:
        attempts.append((clock.now() - START).total_seconds())
        if len(attempts) == 1:
            raise ValueError("not yet")

    async with endpoint:
        assert endpoint.guarantee is Guarantee.AT_LEAST_ONCE
        # When it defers a message whose handler fails at first
        await endpoint.send("crm", b"body", message_id="m", delay=FIVE)
        await settle()
        [timeout] = scenario.memory.kept.values()
        assert (timeout.destination, timeout.due) == ("crm", START + FIVE)
        assert timeout.message.headers[TimeoutHeaders.EXPIRE] == to_wire_time(START + FIVE)
        await clock.advance(5)
        # Then the delayed retry is there as well, and comes
        assert (attempts, await scenario.pending()) == ([5.0], 1)
        await clock.advance(60)
        assert (len(attempts), await scenario.pending(), await scenario.ids("error")) == (2, 0, [])
        # And a saga's timeouts are cleared from afar; what may expire, or cannot be listed, is refused
        await scenario.put(TIMEOUTS, scenario.expiring(after=500, **{Headers.SAGA_ID: str(SAGA)}))
        assert isinstance(endpoint.delayed_delivery, ExternalTimeoutManager)
        await endpoint.delayed_delivery.clear_timeouts(SAGA)
        await settle()
        assert await scenario.pending() == 0
        with pytest.raises(InvalidMessage, match="TimeToBeReceived set is not supported"):
            await endpoint.send("crm", b"", delay=FIVE, headers={Headers.TIME_TO_BE_RECEIVED: "00:05:00"})
        with pytest.raises(ConfigurationError, match="ExternalTimeoutManager cannot list"):
            _ = endpoint.delayed
    await scenario.endpoint.stop()


async def test_an_external_timeout_manager_without_a_queue_is_an_error(clock: ManualClock) -> None:
    with pytest.raises(ConfigurationError, match="1 to 200 characters"):
        ExternalTimeoutManager("")
    delivery = ExternalTimeoutManager("nobody.Timeouts")
    async with Endpoint("crm", transport=MemoryTransport(), delayed_delivery=delivery, clock=clock) as endpoint:
        with pytest.raises(QueueNotFound, match=r"nobody\.Timeouts"):
            await endpoint.send("crm", b"", delay=FIVE)
        await endpoint.send("crm", b"", deliver_at=START - FIVE)
    with pytest.raises(NotStarted, match="not started"):
        await delivery.defer(None, START)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="another for endpoint 'billing'"):
        Endpoint("billing", transport=MemoryTransport(), delayed_delivery=delivery)
    with pytest.raises(UnsupportedTransactionMode):
        Endpoint(
            "crm",
            transport=MemoryTransport(),
            delayed_delivery=ExternalTimeoutManager("q"),
            transaction_mode=TransactionMode.TRANSACTION_SCOPE,
        )
