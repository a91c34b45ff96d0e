"""The timeout manager: what is stored, what is dispatched, when, and with which headers."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import START
from tests.unit.timeout_house import DISPATCHER, PAIRS, TIMEOUTS, TimeoutHouse, build_timeouts

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
    UnsupportedTransactionMode,
)
from delayline.memory import MemoryTransport
from delayline.message import TimeoutHeaders, to_wire_time
from delayline.testing.clock import settle
from delayline.timeouts import ExternalTimeoutManager, MemoryTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

SAGA = uuid.UUID("8f9c1a52-6f0e-4a57-9c5b-3d3f4b3f7b5c")
FIVE = timedelta(seconds=5)


@pytest.fixture(params=list(PAIRS))
def house(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutHouse:
    return build_timeouts(clock, **PAIRS[request.param])


async def test_a_delayed_message_waits_in_the_storage_and_arrives_when_it_is_due(house: TimeoutHouse) -> None:
    # Given
    await house.start()
    # When
    await house.endpoint.send("sales", b"body", message_id="m", delay=FIVE, headers={"k": "ключ 🔑"})
    await settle()
    # Then it waits
    assert await house.waiting() == 1
    await house.clock.advance(4.999)
    assert house.handled == []
    # Then it is there, at that instant, and nothing is left anywhere
    await house.clock.advance(0.001)
    [(message, at)] = house.handled
    assert (message.id, message.body, message.headers["k"], at) == ("m", b"body", "ключ 🔑", START + FIVE)
    assert await house.waiting() == 0
    assert (await house.ids(TIMEOUTS), await house.ids(DISPATCHER), await house.ids("error")) == ([], [], [])
    await house.endpoint.stop()


async def test_the_headers_are_those_of_the_reference(house: TimeoutHouse) -> None:
    await house.start()
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    [timeout_id] = house.persister._timeouts
    await house.clock.advance(5)
    message = await house.one("out")
    assert message.id == message.headers[Headers.MESSAGE_ID] == "m"
    assert message.headers[TimeoutHeaders.EXPIRE] == to_wire_time(START + FIVE)
    assert message.headers[TimeoutHeaders.DESTINATION] == "out"
    assert message.headers[TimeoutHeaders.RELATED_TIMEOUT] == timeout_id
    assert message.headers[Headers.TIME_SENT] == to_wire_time(START + FIVE)
    await house.endpoint.stop()


async def test_a_request_says_which_timeout_and_nothing_else(clock: ManualClock) -> None:
    # Given a dispatcher that does not run
    house = build_timeouts(clock)
    await house.start()
    await house.delivery._satellites[1].stop()
    # When a timeout expires
    await house.endpoint.send("out", b"body", delay=FIVE)
    await settle()
    [timeout_id] = house.persister._timeouts
    await clock.advance(5)
    # Then
    request = await house.one(DISPATCHER)
    assert request.body == b""
    assert request.headers == {
        Headers.MESSAGE_ID: request.id,
        Headers.INTENT: "Send",
        Headers.TIME_SENT: to_wire_time(START + FIVE),
        "NServiceBus.ControlMessage": "True",
        "Timeout.Id": timeout_id,
    }
    await house.endpoint.stop()


async def test_a_request_of_version_4_is_understood(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=100))
    [timeout_id] = house.persister._timeouts
    await house.put(DISPATCHER, Message("request", {TimeoutHeaders.OLD_TIMEOUT_ID: timeout_id}, b""))
    assert await house.ids("out") == ["m"]
    await house.endpoint.stop()


async def test_a_message_of_version_5_gets_its_reply_address_back(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    headers = {Headers.REPLY_TO: "sales", TimeoutHeaders.OLD_REPLY_TO: "billing"}
    await house.put(TIMEOUTS, house.expiring(after=5, **headers))
    await clock.advance(5)
    message = await house.one("out")
    assert message.headers[Headers.REPLY_TO] == "billing"
    assert TimeoutHeaders.OLD_REPLY_TO not in message.headers
    await house.endpoint.stop()


async def test_what_is_due_within_a_second_is_not_stored_and_not_early(house: TimeoutHouse) -> None:
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=0.9))
    assert (await house.waiting(), await house.ids("out")) == (0, [])
    await house.clock.advance(0.899)
    assert await house.ids("out") == []
    await house.clock.advance(0.001)
    message = await house.one("out")
    assert message.id == "m"
    assert TimeoutHeaders.RELATED_TIMEOUT not in message.headers
    assert house.faults.count("add") == 0
    await house.endpoint.stop()


async def test_those_that_find_no_room_to_wait_in_are_stored(clock: ManualClock) -> None:
    house = build_timeouts(clock, concurrency=2)
    await house.start()
    for number in range(3):
        await house.put(TIMEOUTS, house.expiring(f"m{number}", after=0.9))
    assert await house.waiting() == 2
    await clock.advance(0.9)
    assert sorted(await house.ids("out")) == ["m0", "m1", "m2"]
    await house.endpoint.stop()


async def test_a_stop_waits_for_no_message(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=0.9))
    await house.endpoint.stop()
    assert await house.waiting() == 1


async def test_what_is_overdue_is_forwarded_at_once(house: TimeoutHouse) -> None:
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=-3600))
    assert await house.ids("out") == ["m"]
    await house.endpoint.send("out", b"", message_id="past", deliver_at=START - FIVE)
    assert await house.ids("out") == ["m", "past"]
    await house.endpoint.stop()


async def test_without_a_destination_it_goes_to_who_asked(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    expiring = house.expiring(after=5).with_headers({Headers.REPLY_TO: "out"}, without=(TimeoutHeaders.DESTINATION,))
    await house.put(TIMEOUTS, expiring)
    await clock.advance(5)
    assert await house.ids("out") == ["m"]
    await house.endpoint.stop()


async def test_with_no_destination_at_all_it_goes_to_the_error_queue(house: TimeoutHouse) -> None:
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=5).with_headers({}, without=(TimeoutHeaders.DESTINATION,)))
    await house.clock.advance(5)
    failed = await house.one("error")
    assert "names no destination" in failed.headers[Headers.EXCEPTION_MESSAGE]
    assert (failed.id, failed.body, await house.waiting()) == ("m", b"body", 0)
    await house.endpoint.stop()


async def test_a_message_without_an_id_header_keeps_its_id(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring("native", after=5))
    await clock.advance(5)
    assert (await house.one("out")).headers[Headers.MESSAGE_ID] == "native"
    await house.endpoint.stop()


async def test_a_sagas_timeouts_are_cleared(house: TimeoutHouse) -> None:
    await house.start()
    for id, saga in (("a", SAGA), ("b", SAGA), ("c", uuid.uuid4())):
        await house.put(TIMEOUTS, house.expiring(id, after=5, **{TimeoutHeaders.SAGA_ID: str(saga)}))
    await house.delivery.clear_timeouts(SAGA)
    await settle()
    assert await house.waiting() == 1
    await house.clock.advance(5)
    assert await house.ids("out") == ["c"]
    await house.endpoint.stop()


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({}, "Non timeout message arrived at the timeout manager, id:m"),
        ({TimeoutHeaders.EXPIRE: "tomorrow"}, "not recognized as a valid DateTime"),
        (
            {TimeoutHeaders.CLEAR: "True"},
            "Invalid saga id specified, clear timeouts is only supported for saga instances",
        ),
        ({TimeoutHeaders.EXPIRE: to_wire_time(START + FIVE), TimeoutHeaders.SAGA_ID: "no guid"}, "not a GUID"),
    ],
)
async def test_what_is_no_timeout_goes_to_the_error_queue(
    clock: ManualClock, headers: dict[str, str], text: str
) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, Message("m", headers, b"body"))
    failed = await house.one("error")
    assert text in failed.headers[Headers.EXCEPTION_MESSAGE]
    assert failed.headers[Headers.FAILED_QUEUE] == TIMEOUTS
    await house.endpoint.stop()


async def test_a_request_without_an_id_goes_to_the_error_queue(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.put(DISPATCHER, Message("m", {}, b""))
    assert "requests no timeout" in (await house.one("error")).headers[Headers.EXCEPTION_MESSAGE]
    await house.endpoint.stop()


async def test_a_request_for_what_is_gone_ends_in_silence(house: TimeoutHouse) -> None:
    await house.start()
    await house.put(DISPATCHER, Message("m", {TimeoutHeaders.TIMEOUT_ID: str(uuid.uuid4())}, b""))
    assert (await house.ids(DISPATCHER), await house.ids("error"), await house.ids("out")) == ([], [], [])
    await house.endpoint.stop()


async def test_a_message_that_may_expire_is_refused(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    with pytest.raises(InvalidMessage, match="TimeToBeReceived set is not supported"):
        await house.endpoint.send("out", b"", delay=FIVE, headers={Headers.TIME_TO_BE_RECEIVED: "00:05:00"})
    await house.endpoint.stop()


async def test_an_endpoint_starts_again(house: TimeoutHouse) -> None:
    for number in range(2):
        await house.start()
        await house.endpoint.send("out", b"", message_id=f"m{number}", delay=FIVE)
        await house.clock.advance(5)
        await house.endpoint.stop()
    assert (await house.ids("out"), house.persister.opened) == (["m0", "m1"], 0)


async def test_one_that_only_routes_leaves_the_rest_to_others(clock: ManualClock) -> None:
    one = build_timeouts(clock)
    other = build_timeouts(clock, transport=one.transport, persister=one.persister, polling=False)
    await other.start()
    await other.endpoint.send("out", b"", message_id="m", delay=FIVE)
    await clock.advance(10)
    assert (await one.waiting(), await one.ids(TIMEOUTS), one.persister.opened) == (0, ["m"], 0)
    await one.start()
    assert await one.ids("out") == ["m"]
    await one.endpoint.stop()
    await other.endpoint.stop()


async def test_queues_are_created(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.endpoint.setup()
    assert (await house.ids(TIMEOUTS), await house.ids(DISPATCHER)) == ([], [])


async def test_a_deferred_message_of_a_handler_comes_back(house: TimeoutHouse) -> None:
    # Given a handler that defers what it gets, once
    seen: list[str] = []
    house.endpoint._handlers.clear()

    @house.endpoint.handler
    async def handle(message: Message, context: object) -> None:
        seen.append(message.id)
        if len(seen) == 1:
            await context.defer(FIVE)  # type: ignore[attr-defined]

    await house.start()
    await house.put("sales", Message("m", {}, b"body"))
    await house.clock.advance(5)
    assert seen == ["m", "m"]
    await house.endpoint.stop()


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
    with pytest.raises(ConfigurationError, match="another one for endpoint 'billing'"):
        Endpoint("billing", transport=MemoryTransport(), delayed_delivery=delivery)


def test_a_name_that_leaves_no_room_for_the_satellites_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="shorter name"):
        Endpoint(
            "s" * 190, transport=MemoryTransport(), delayed_delivery=TimeoutManagerDelivery(MemoryTimeoutPersister())
        )


async def test_an_external_timeout_manager_keeps_what_is_deferred_and_what_is_retried_later(clock: ManualClock) -> None:
    # Given a timeout manager of one endpoint, and another endpoint that uses it
    house = build_timeouts(clock)
    await house.start()
    endpoint = Endpoint(
        "crm",
        transport=house.transport,
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
        [timeout] = house.persister._timeouts.values()
        assert (timeout.destination, timeout.due) == ("crm", START + FIVE)
        assert timeout.message.headers[TimeoutHeaders.EXPIRE] == to_wire_time(START + FIVE)
        await clock.advance(5)
        # Then the delayed retry is there as well, and comes
        assert (attempts, await house.waiting()) == ([5.0], 1)
        await clock.advance(60)
        assert (len(attempts), await house.waiting(), await house.ids("error")) == (2, 0, [])
        # And a saga's timeouts are cleared from afar; what may expire, or cannot be listed, is refused
        await house.put(TIMEOUTS, house.expiring(after=500, **{TimeoutHeaders.SAGA_ID: str(SAGA)}))
        assert isinstance(endpoint.delayed_delivery, ExternalTimeoutManager)
        await endpoint.delayed_delivery.clear_timeouts(SAGA)
        await settle()
        assert await house.waiting() == 0
        with pytest.raises(InvalidMessage, match="TimeToBeReceived set is not supported"):
            await endpoint.send("crm", b"", delay=FIVE, headers={Headers.TIME_TO_BE_RECEIVED: "00:05:00"})
        with pytest.raises(ConfigurationError, match="ExternalTimeoutManager cannot list"):
            _ = endpoint.delayed
    await house.endpoint.stop()


async def test_an_external_timeout_manager_that_is_not_there_is_said(clock: ManualClock) -> None:
    with pytest.raises(ConfigurationError, match="1 to 200 characters"):
        ExternalTimeoutManager("")
    delivery = ExternalTimeoutManager("nobody.Timeouts")
    async with Endpoint("crm", transport=MemoryTransport(), delayed_delivery=delivery, clock=clock) as endpoint:
        with pytest.raises(QueueNotFound, match=r"nobody\.Timeouts"):
            await endpoint.send("crm", b"", delay=FIVE)
        await endpoint.send("crm", b"", deliver_at=START - FIVE)
    with pytest.raises(NotStarted, match="not started"):
        await delivery.defer(None, START)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="another one for endpoint 'billing'"):
        Endpoint("billing", transport=MemoryTransport(), delayed_delivery=delivery)
    with pytest.raises(UnsupportedTransactionMode):
        Endpoint(
            "crm",
            transport=MemoryTransport(),
            delayed_delivery=ExternalTimeoutManager("q"),
            transaction_mode=TransactionMode.TRANSACTION_SCOPE,
        )
