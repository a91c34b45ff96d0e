"""The timeout manager when something fails: five attempts, and what the published one gets wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import START, FaultyTransport
from tests.unit.timeout_house import ASKING, DISPATCHER, PAIRS, TIMEOUTS, TimeoutHouse, build_timeouts

from delayline import BackendUnavailable, ConfigurationError, Headers, Message, QueueNotFound, TransactionMode
from delayline.events import Event
from delayline.message import TimeoutHeaders
from delayline.testing import Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the database does not answer")
FIVE = timedelta(seconds=5)


@pytest.fixture(params=list(PAIRS))
def house(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutHouse:
    return build_timeouts(clock, **PAIRS[request.param])


@pytest.fixture(params=list(ASKING))
def asking(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutHouse:
    return build_timeouts(clock, **ASKING[request.param])


async def test_a_timeout_that_cannot_be_stored_goes_to_the_error_queue_after_five_attempts(house: TimeoutHouse) -> None:
    await house.start()
    house.faults.always("add", BOOM)
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    assert house.faults.count("add") == 5
    failed = await house.one("error")
    assert (failed.id, failed.headers[Headers.FAILED_QUEUE]) == ("m", TIMEOUTS)
    await house.endpoint.stop()


async def test_a_request_that_fails_five_times_goes_to_the_error_queue_and_the_timeout_stays(
    asking: TimeoutHouse,
) -> None:
    # Given
    await asking.start()
    await asking.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    asking.faults.always("peek", BOOM)
    # When it is due
    await asking.clock.advance(5)
    # Then
    assert asking.faults.count("peek") == 5
    failed = await asking.one("error")
    assert failed.headers[Headers.FAILED_QUEUE] == DISPATCHER
    assert (await asking.ids("out"), await asking.waiting()) == ([], 1)
    # Then nobody asks for it again and again
    await asking.clock.advance(timedelta(minutes=10))
    assert asking.faults.count("peek") == 5
    # When the request is retried from the error queue
    asking.faults.heal()
    await asking.put(DISPATCHER, failed)
    # Then
    assert (await asking.ids("out"), await asking.waiting()) == (["m"], 0)
    await asking.endpoint.stop()


async def test_a_removal_that_fails_undoes_the_dispatch_where_both_are_one_transaction(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    house.faults.always("remove", BOOM)
    await clock.advance(5)
    assert (await house.ids("out"), await house.waiting(), len(await house.ids("error"))) == ([], 1, 1)
    await house.endpoint.stop()


async def test_a_removal_that_fails_elsewhere_doubles_the_message_under_the_same_id(clock: ManualClock) -> None:
    house = build_timeouts(clock, shared=False, rows=True)
    await house.start()
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    house.faults.on["remove"] = lambda _: BOOM if house.faults.count("remove") == 1 else None
    await clock.advance(5)
    assert (await house.ids("out"), await house.waiting(), await house.ids("error")) == (["m", "m"], 0, [])
    await house.endpoint.stop()


async def test_what_somebody_else_has_removed_meanwhile_is_tried_again_and_found_gone(clock: ManualClock) -> None:
    # Given storage without transactions, where somebody else is faster after our look
    house = build_timeouts(clock, shared=False)
    await house.start()
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()

    def stolen(_: tuple[str, ...]) -> None:
        house.persister._timeouts.clear()

    house.faults.on["remove"] = stolen
    with Signals() as signals:
        await clock.advance(5)
        [failed] = signals.records(Event.HANDLER_FAILED)
    assert "was concurrently processed." in failed.getMessage()
    assert (await house.ids("out"), await house.ids("error"), await house.ids(DISPATCHER)) == (["m"], [], [])
    await house.endpoint.stop()


async def test_a_destination_that_does_not_exist_costs_no_further_attempts(house: TimeoutHouse) -> None:
    # Given
    await house.start()
    await house.endpoint.send("nowhere", b"body", message_id="m", delay=FIVE, check_destination=False)
    await settle()
    # When
    await house.clock.advance(5)
    # Then the message itself is in the error queue, and a retry sends it where it was to go
    failed = await house.one("error")
    assert (failed.id, failed.body, failed.headers[Headers.FAILED_QUEUE]) == ("m", b"body", "nowhere")
    assert str(QueueNotFound("nowhere")) == failed.headers[Headers.EXCEPTION_MESSAGE]
    assert await house.waiting() == 0
    await house.endpoint.stop()


async def test_headers_that_cannot_be_read_go_to_the_error_queue_as_they_are(house: TimeoutHouse) -> None:
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=5))
    [(timeout_id, timeout)] = house.persister._timeouts.items()
    damaged = Message.from_encoded(timeout_id, b'{"a', b"body")
    object.__setattr__(timeout, "message", damaged)
    await house.clock.advance(5)
    assert (await house.one("error")).encoded_headers == b'{"a'
    assert await house.waiting() == 0
    await house.endpoint.stop()


async def test_a_timeout_committed_late_is_not_stranded(clock: ManualClock) -> None:
    # Given a timeout that was dispatched, so that the published poller's slice has moved on to its due time
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring("first", after=5))
    await clock.advance(5)
    assert await house.ids("out") == ["first"]
    # When a transaction of before commits, behind our back: it is due earlier
    await house.put(TIMEOUTS, house.expiring("late", after=100))
    [(_, timeout)] = house.persister._timeouts.items()
    object.__setattr__(timeout, "due", START + timedelta(seconds=3))
    # Then the next look finds it
    await clock.advance(10)
    assert await house.ids("out") == ["first", "late"]
    await house.endpoint.stop()


async def test_two_instances_ask_for_a_timeout_once(clock: ManualClock) -> None:
    # Given two endpoints of one name on the same queues and storage
    one = build_timeouts(clock)
    other = build_timeouts(clock, transport=one.transport, persister=one.persister)
    await one.start()
    await other.start()
    requests: list[Any] = []
    dispatch = FaultyTransport.dispatch

    async def counted(operations: Any, transaction: Any = None) -> None:  # noqa: ANN401
        requests.extend(operation for operation in operations if operation.destination == DISPATCHER)
        await dispatch(one.transport, operations, transaction)

    one.transport.dispatch = counted  # type: ignore[method-assign]
    # When many timeouts expire at one instant
    for number in range(50):
        await one.put(TIMEOUTS, one.expiring(f"m{number}", after=5))
    await clock.advance(5)
    await clock.advance(timedelta(minutes=3))
    # Then each was asked for once, and arrived once
    assert len(requests) == 50
    assert sorted(await one.ids("out")) == sorted(f"m{number}" for number in range(50))
    await one.endpoint.stop()
    await other.endpoint.stop()


async def test_timeouts_that_come_in_do_not_make_the_poller_look(clock: ManualClock) -> None:
    # Given a poller that sleeps towards a timeout
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring("next", after=5))
    looks = house.faults.count("look")
    # When later ones come in
    for number in range(100):
        await house.put(TIMEOUTS, house.expiring(f"m{number}", after=6 + number))
    # Then it sleeps on
    assert house.faults.count("look") == looks
    # When an earlier one comes in, it looks once
    await house.put(TIMEOUTS, house.expiring("earlier", after=3))
    assert house.faults.count("look") == looks + 1
    await house.endpoint.stop()


async def test_what_was_stored_by_others_is_found_within_ten_seconds(clock: ManualClock) -> None:
    # Given a poller that sleeps towards a timeout far away, and one that another instance stores and forgets
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring("far", after=1000))
    [(_, far)] = house.persister._timeouts.items()
    await house.persister.add(replace(far, id="other", due=START + timedelta(seconds=15)))
    # Then it is not late by the whole sleep
    await clock.advance(15)
    assert await house.ids("out") == ["far"]
    await house.endpoint.stop()


async def test_a_lost_request_is_made_again_within_a_minute(asking: TimeoutHouse) -> None:
    await asking.start()
    await asking.delivery._satellites[1].stop()
    await asking.put(TIMEOUTS, asking.expiring(after=5))
    await asking.clock.advance(5)
    await asking.transport.purge(DISPATCHER)
    await asking.clock.advance(59)
    assert await asking.ids(DISPATCHER) == []
    await asking.clock.advance(1)
    assert len(await asking.ids(DISPATCHER)) == 1
    await asking.endpoint.stop()


@pytest.mark.parametrize("mode", [TransactionMode.NONE, TransactionMode.RECEIVE_ONLY])
async def test_nothing_is_lost_on_the_way_in_any_mode(clock: ManualClock, mode: TransactionMode) -> None:
    # Given the weaker modes, in which a handler's message is off its queue before it is handled
    house = build_timeouts(clock, shared=False, transaction_mode=mode)
    await house.start()
    house.faults.on["add"] = lambda _: BOOM if house.faults.count("add") == 1 else None
    house.faults.on["remove"] = lambda _: BOOM if house.faults.count("remove") == 1 else None
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await clock.advance(5)
    assert set(await house.ids("out")) == {"m"}
    assert await house.waiting() == 0
    await house.endpoint.stop()


async def test_a_message_stored_twice_by_a_redelivery_waits_once(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=5))
    await house.put(TIMEOUTS, house.expiring(after=5))
    assert await house.waiting() == 1
    other = house.expiring(after=5).with_headers({TimeoutHeaders.DESTINATION: "error"})
    await house.put(TIMEOUTS, other)
    assert await house.waiting() == 2
    await house.endpoint.stop()


async def test_a_request_that_cannot_be_sent_backs_off_by_itself(asking: TimeoutHouse) -> None:
    # Given a dispatcher's queue that takes nothing, twice
    await asking.start()
    await asking.put(TIMEOUTS, asking.expiring(after=5))
    refused: list[str] = []

    def refuse(_: tuple[str, ...]) -> Exception | None:
        if asking.transport.sends_to != DISPATCHER or len(refused) == 2:
            return None
        refused.append(DISPATCHER)
        return BOOM

    asking.faults.on["dispatch"] = refuse
    # When it is due
    await asking.clock.advance(timedelta(minutes=2, seconds=10))
    # Then it arrives all the same, and is nobody's error
    assert (await asking.ids("out"), await asking.ids("error"), len(refused)) == (["m"], [], 2)
    await asking.endpoint.stop()


async def test_a_send_is_told_that_the_timeouts_queue_is_gone(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    await house.start()
    del house.transport._queues[TIMEOUTS]
    with pytest.raises(QueueNotFound, match=r"sales\.Timeouts"):
        await house.endpoint.send("out", b"", delay=FIVE)
    await house.endpoint.stop()


async def test_a_transport_that_cannot_join_says_so(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    with pytest.raises(ConfigurationError, match="cannot take part in an external transaction"):
        await house.delivery.enlist(None)  # type: ignore[arg-type]


@pytest.fixture
def direct(clock: ManualClock) -> TimeoutHouse:
    return build_timeouts(clock, direct=True)


async def test_on_the_short_way_five_attempts_back_off_and_delay_nobody(direct: TimeoutHouse) -> None:
    # Given a queue that takes nothing
    await direct.start()
    tried: list[float] = []

    def refuse(_: tuple[str, ...]) -> Exception | None:
        if direct.transport.sends_to != "out":
            return None
        tried.append((direct.clock.now() - START).total_seconds())
        return BOOM

    direct.faults.on["dispatch"] = refuse
    await direct.put(TIMEOUTS, direct.expiring("bad", after=5))
    other = direct.expiring("good", after=5.5).with_headers({TimeoutHeaders.DESTINATION: "sales"})
    await direct.put(TIMEOUTS, other)
    # When both are due
    await direct.clock.advance(30)
    # Then the message itself is in the error queue, and a retry sends it where it was to go
    assert tried == [5, 6, 8, 12, 20]
    failed = await direct.one("error")
    assert (failed.id, failed.headers[Headers.FAILED_QUEUE]) == ("bad", "out")
    assert [(message.id, at) for message, at in direct.handled] == [("good", START + timedelta(seconds=5.5))]
    assert (await direct.waiting(), await direct.ids(DISPATCHER)) == (0, [])
    await direct.endpoint.stop()


async def test_on_the_short_way_nobody_is_asked_and_both_happen_or_neither(direct: TimeoutHouse) -> None:
    # Given a removal that fails once
    await direct.start()
    await direct.put(TIMEOUTS, direct.expiring(after=5))
    direct.faults.on["remove_many"] = lambda _: BOOM if direct.faults.count("remove_many") == 1 else None
    # When it is due
    await direct.clock.advance(5)
    assert (await direct.ids("out"), await direct.waiting()) == ([], 1)
    await direct.clock.advance(2)
    # Then it was sent once, without the dispatcher, which may be away
    assert (await direct.ids("out"), await direct.waiting(), direct.faults.count("peek")) == (["m"], 0, 0)
    await direct.endpoint.stop()
