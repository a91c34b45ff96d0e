"""Failures of the timeout manager: five attempts, and differences from the published one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import START, sent_to
from tests.unit.timeout_scenario import DISPATCHER, PEEKING, SCOPES, TIMEOUTS, TimeoutScenario, build_timeouts

from delayline import BackendUnavailable, ConfigurationError, Headers, Message, QueueNotFound, TransactionMode
from delayline.events import Event
from delayline.message import TimeoutHeaders
from delayline.testing import Fault, Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.spi import TransportOperation
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the database does not answer")
FIVE = timedelta(seconds=5)


@pytest.fixture(params=list(SCOPES))
def scenario(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutScenario:
    return build_timeouts(clock, **SCOPES[request.param])


@pytest.fixture(params=list(PEEKING))
def peeking(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutScenario:
    return build_timeouts(clock, **PEEKING[request.param])


async def test_a_timeout_that_cannot_be_stored_goes_to_the_error_queue_after_five_attempts(
    scenario: TimeoutScenario,
) -> None:
    await scenario.start()
    scenario.faults.inject(Fault("add", BOOM))
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    assert scenario.faults.calls("add") == 5
    failed = await scenario.only("error")
    assert (failed.id, failed.headers[Headers.FAILED_QUEUE]) == ("m", TIMEOUTS)
    await scenario.endpoint.stop()


async def test_a_request_that_fails_five_times_goes_to_the_error_queue_and_the_timeout_stays(
    peeking: TimeoutScenario,
) -> None:
    # Given
    await peeking.start()
    await peeking.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    peeking.faults.inject(Fault("peek", BOOM))
    # When it is due
    await peeking.clock.advance(5)
    # Then
    assert peeking.faults.calls("peek") == 5
    failed = await peeking.only("error")
    assert failed.headers[Headers.FAILED_QUEUE] == DISPATCHER
    assert (await peeking.ids("out"), await peeking.pending()) == ([], 1)
    # Then it is not requested again and again
    await peeking.clock.advance(timedelta(minutes=10))
    assert peeking.faults.calls("peek") == 5
    # When the request is retried from the error queue
    peeking.faults.heal()
    await peeking.put(DISPATCHER, failed)
    # Then
    assert (await peeking.ids("out"), await peeking.pending()) == (["m"], 0)
    await peeking.endpoint.stop()


async def test_a_removal_that_fails_undoes_the_dispatch_where_both_are_one_transaction(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    scenario.faults.inject(Fault("remove", BOOM))
    await clock.advance(5)
    assert (await scenario.ids("out"), await scenario.pending(), len(await scenario.ids("error"))) == ([], 1, 1)
    await scenario.endpoint.stop()


async def test_a_removal_that_fails_elsewhere_doubles_the_message_under_the_same_id(clock: ManualClock) -> None:
    scenario = build_timeouts(clock, shared=False, rows=True)
    await scenario.start()
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    scenario.faults.inject(Fault("remove", BOOM, calls=1))
    await clock.advance(5)
    assert (await scenario.ids("out"), await scenario.pending(), await scenario.ids("error")) == (["m", "m"], 0, [])
    await scenario.endpoint.stop()


async def test_a_message_removed_by_another_process_is_retried_and_found_missing(clock: ManualClock) -> None:
    # Given storage without transactions, where another process is faster after our query
    scenario = build_timeouts(clock, shared=False)
    await scenario.start()
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    scenario.faults.inject(Fault("remove", before=scenario.memory.kept.clear))
    with Signals() as signals:
        await clock.advance(5)
        [failed] = signals.records(Event.HANDLER_FAILED)
    assert "was concurrently processed." in failed.getMessage()
    assert (await scenario.ids("out"), await scenario.ids("error"), await scenario.ids(DISPATCHER)) == (["m"], [], [])
    await scenario.endpoint.stop()


async def test_a_destination_that_does_not_exist_costs_no_further_attempts(scenario: TimeoutScenario) -> None:
    # Given
    await scenario.start()
    await scenario.endpoint.send("nowhere", b"body", message_id="m", delay=FIVE, check_destination=False)
    await settle()
    # When
    await scenario.clock.advance(5)
    # Then the message itself is in the error queue, and a retry sends it where it was to go
    failed = await scenario.only("error")
    assert (failed.id, failed.body, failed.headers[Headers.FAILED_QUEUE]) == ("m", b"body", "nowhere")
    assert str(QueueNotFound("nowhere")) == failed.headers[Headers.EXCEPTION_MESSAGE]
    assert await scenario.pending() == 0
    await scenario.endpoint.stop()


async def test_headers_that_cannot_be_read_go_to_the_error_queue_as_they_are(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=5))
    [(timeout_id, timeout)] = scenario.memory.kept.items()
    damaged = Message.from_encoded(timeout_id, b'{"a', b"body")
    object.__setattr__(timeout, "message", damaged)
    await scenario.clock.advance(5)
    assert (await scenario.only("error")).encoded_headers == b'{"a'
    assert await scenario.pending() == 0
    await scenario.endpoint.stop()


async def test_a_timeout_committed_late_is_not_stranded(clock: ManualClock) -> None:
    # Given a timeout that was dispatched, so that the published poller's slice has moved on to its due time
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring("first", after=5))
    await clock.advance(5)
    assert await scenario.ids("out") == ["first"]
    # When a transaction of before commits, behind our back: it is due earlier
    await scenario.put(TIMEOUTS, scenario.expiring("late", after=100))
    [(_, timeout)] = scenario.memory.kept.items()
    object.__setattr__(timeout, "due", START + timedelta(seconds=3))
    # Then the next look finds it
    await clock.advance(10)
    assert await scenario.ids("out") == ["first", "late"]
    await scenario.endpoint.stop()


async def test_two_instances_ask_for_a_timeout_once(clock: ManualClock) -> None:
    # Given two endpoints of one name on the same queues and storage
    one = build_timeouts(clock)
    other = build_timeouts(clock, beside=one)
    await one.start()
    await other.start()
    requests: list[Any] = []
    dispatch = one.transport.dispatch

    async def counted(operations: Any, transaction: Any = None) -> None:  # noqa: ANN401
        requests.extend(operation for operation in operations if operation.destination == DISPATCHER)
        await dispatch(operations, transaction)

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
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring("next", after=5))
    looks = scenario.faults.calls("next_chunk")
    # When later ones come in
    for number in range(100):
        await scenario.put(TIMEOUTS, scenario.expiring(f"m{number}", after=6 + number))
    # Then it sleeps on
    assert scenario.faults.calls("next_chunk") == looks
    # When an earlier one comes in, it looks once
    await scenario.put(TIMEOUTS, scenario.expiring("earlier", after=3))
    assert scenario.faults.calls("next_chunk") == looks + 1
    await scenario.endpoint.stop()


async def test_timeouts_of_other_processes_are_found_within_ten_seconds(clock: ManualClock) -> None:
    # Given a poller that sleeps towards a timeout far away, and one that another instance stores and forgets
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring("far", after=1000))
    [(_, far)] = scenario.memory.kept.items()
    await scenario.persister.add(replace(far, id="other", due=START + timedelta(seconds=15)))
    # Then it is not late by the whole sleep
    await clock.advance(15)
    assert await scenario.ids("out") == ["far"]
    await scenario.endpoint.stop()


async def test_a_lost_request_is_made_again_within_a_minute(peeking: TimeoutScenario) -> None:
    await peeking.start()
    await peeking.delivery._satellites[1].stop()
    await peeking.put(TIMEOUTS, peeking.expiring(after=5))
    await peeking.clock.advance(5)
    await peeking.transport.purge(DISPATCHER)
    await peeking.clock.advance(59)
    assert await peeking.ids(DISPATCHER) == []
    await peeking.clock.advance(1)
    assert len(await peeking.ids(DISPATCHER)) == 1
    await peeking.endpoint.stop()


@pytest.mark.parametrize("mode", [TransactionMode.NONE, TransactionMode.RECEIVE_ONLY])
async def test_nothing_is_lost_on_the_way_in_any_mode(clock: ManualClock, mode: TransactionMode) -> None:
    # Given the weaker modes, in which a handler's message is off its queue before it is handled
    scenario = build_timeouts(clock, shared=False, transaction_mode=mode)
    await scenario.start()
    scenario.faults.inject(Fault("add", BOOM, calls=1))
    scenario.faults.inject(Fault("remove", BOOM, calls=1))
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await clock.advance(5)
    assert set(await scenario.ids("out")) == {"m"}
    assert await scenario.pending() == 0
    await scenario.endpoint.stop()


async def test_a_message_stored_twice_by_a_redelivery_waits_once(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=5))
    await scenario.put(TIMEOUTS, scenario.expiring(after=5))
    assert await scenario.pending() == 1
    other = scenario.expiring(after=5).with_headers({TimeoutHeaders.DESTINATION: "error"})
    await scenario.put(TIMEOUTS, other)
    assert await scenario.pending() == 2
    await scenario.endpoint.stop()


async def test_a_request_that_cannot_be_sent_backs_off_alone(peeking: TimeoutScenario) -> None:
    # Given a dispatcher's queue that takes nothing, twice
    await peeking.start()
    await peeking.put(TIMEOUTS, peeking.expiring(after=5))
    peeking.faults.inject(Fault("dispatch", BOOM, when=sent_to(DISPATCHER), calls=range(1, 3)))
    # When it is due
    await peeking.clock.advance(timedelta(minutes=2, seconds=10))
    # Then it arrives all the same, and is not an error
    assert (await peeking.ids("out"), await peeking.ids("error")) == (["m"], [])
    await peeking.endpoint.stop()


async def test_a_send_raises_when_the_timeouts_queue_is_gone(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    await scenario.start()
    del scenario.queues._queues[TIMEOUTS]
    with pytest.raises(QueueNotFound, match=r"sales\.Timeouts"):
        await scenario.endpoint.send("out", b"", delay=FIVE)
    await scenario.endpoint.stop()


async def test_a_transport_that_cannot_join_is_reported(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    with pytest.raises(ConfigurationError, match="cannot take part in an external transaction"):
        await scenario.delivery.enlist(None)  # type: ignore[arg-type]


@pytest.fixture
def direct(clock: ManualClock) -> TimeoutScenario:
    return build_timeouts(clock, direct=True)


async def test_direct_dispatch_backs_off_for_five_attempts_and_delays_no_others(direct: TimeoutScenario) -> None:
    # Given a queue that takes nothing
    await direct.start()
    tried: list[float] = []

    def refuse(_: Sequence[TransportOperation]) -> Exception:
        tried.append((direct.clock.now() - START).total_seconds())
        return BOOM

    direct.faults.inject(Fault("dispatch", refuse, when=sent_to("out")))
    await direct.put(TIMEOUTS, direct.expiring("bad", after=5))
    other = direct.expiring("good", after=5.5).with_headers({TimeoutHeaders.DESTINATION: "sales"})
    await direct.put(TIMEOUTS, other)
    # When both are due
    await direct.clock.advance(30)
    # Then the message itself is in the error queue, and a retry sends it where it was to go
    assert tried == [5, 6, 8, 12, 20]
    failed = await direct.only("error")
    assert (failed.id, failed.headers[Headers.FAILED_QUEUE]) == ("bad", "out")
    assert [(message.id, at) for message, at in direct.handled] == [("good", START + timedelta(seconds=5.5))]
    assert (await direct.pending(), await direct.ids(DISPATCHER)) == (0, [])
    await direct.endpoint.stop()


async def test_direct_dispatch_is_one_transaction_without_a_request(direct: TimeoutScenario) -> None:
    # Given a removal that fails once
    await direct.start()
    await direct.put(TIMEOUTS, direct.expiring(after=5))
    direct.faults.inject(Fault("remove_many", BOOM, calls=1))
    # When it is due
    await direct.clock.advance(5)
    assert (await direct.ids("out"), await direct.pending()) == ([], 1)
    await direct.clock.advance(2)
    # Then it was sent once, without the dispatcher, which may be away
    assert (await direct.ids("out"), await direct.pending(), direct.faults.calls("peek")) == (["m"], 0, 0)
    await direct.endpoint.stop()
