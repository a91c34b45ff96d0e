"""A due message that cannot be forwarded: attempts, back-off, error queue, and never a loss."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit import conftest
from tests.unit.conftest import START, Scenario, build, delayed

from delayline import DelayedMessage, Headers, Message
from delayline.failures import back_off
from delayline.testing import Fault
from delayline.testing.clock import settle
from delayline.testing.faults import COUNT_FAILURE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.spi import Transaction, TransportOperation
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
SCOPES = pytest.mark.parametrize("way", conftest.SCOPES.values(), ids=conftest.SCOPES)


async def start(scenario: Scenario) -> None:
    await scenario.transport.setup_infrastructure(["out"])
    await scenario.endpoint.start()
    await settle()


def break_destination(scenario: Scenario) -> list[float]:
    """Make sending to `out` fail and return the list of seconds at which it was tried."""
    tried: list[float] = []
    send = scenario.transport.dispatch

    async def dispatch(operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        if operations[0].destination == "out":
            tried.append((scenario.clock.now() - START).total_seconds())
            raise BOOM.with_traceback(None)
        await send(operations, transaction)

    scenario.transport.dispatch = dispatch  # type: ignore[method-assign]
    return tried


def test_the_back_off_doubles_up_to_a_minute() -> None:
    assert [back_off(number).total_seconds() for number in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert back_off(10_000) == timedelta(seconds=60)


@SCOPES
@pytest.mark.parametrize("retries", [0, 1, 4])
async def test_there_are_exactly_one_plus_number_of_retries_attempts(
    clock: ManualClock, way: dict[str, bool], retries: int
) -> None:
    scenario = build(clock, number_of_retries=retries, **way)
    tried = break_destination(scenario)
    await scenario.put(delayed())
    await start(scenario)
    await clock.advance(600)
    assert len(tried) == 1 + retries
    assert await scenario.ids("error") == ["m"]
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


@SCOPES
async def test_attempts_back_off_and_others_go_on_meanwhile(clock: ManualClock, way: dict[str, bool]) -> None:
    retries = 4 if "six" in way else 7  # six verbs look at the store every 50 ms meanwhile
    scenario = build(clock, number_of_retries=retries, **way)
    tried = break_destination(scenario)
    await scenario.put(delayed())
    await start(scenario)
    await scenario.put(delayed("good", to="error"))
    await clock.advance(0.1)
    assert await scenario.ids("error") == ["good"]
    await clock.advance(200)
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(tried)]
    assert gaps == [1, 2, 4, 8, 16, 32, 60][:retries]
    await scenario.endpoint.stop()


async def test_messages_in_the_error_queue_have_the_reason_and_the_failed_queue(scenario: Scenario) -> None:
    break_destination(scenario)
    await scenario.put(DelayedMessage(Message("m", {"mine": "1"}, b"body"), "out", START))
    await start(scenario)
    moved = await scenario.only("error")
    assert (moved.id, moved.body, moved.headers["mine"]) == ("m", b"body", "1")
    assert moved.headers[Headers.FAILED_QUEUE] == "out"
    assert moved.headers[Headers.PROCESSING_ENDPOINT] == "sales"
    assert moved.headers[Headers.EXCEPTION_MESSAGE] == "boom"
    await scenario.endpoint.stop()


async def test_a_missing_destination_goes_to_the_error_queue_at_once(clock: ManualClock) -> None:
    scenario = build(clock, number_of_retries=7)
    await scenario.put(delayed("lost", to="nowhere"), delayed("good"))
    await start(scenario)
    assert (await scenario.ids("out"), await scenario.ids("error")) == (["good"], ["lost"])
    assert "QueueNotFound" in (await scenario.only("error")).headers[Headers.EXCEPTION_TYPE]
    await scenario.endpoint.stop()


async def test_headers_that_cannot_be_read_move_as_they_are(scenario: Scenario) -> None:
    await scenario.put(DelayedMessage(Message.from_encoded("m", b"{broken", b"body"), "nowhere", START))
    await start(scenario)
    moved = await scenario.only("error")
    assert (moved.encoded_headers, moved.body) == (b"{broken", b"body")
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_without_an_error_queue_the_message_stays_and_is_tried_again(scenario: Scenario) -> None:
    await scenario.put(delayed(to="nowhere"))

    async def no_setup(queues: object) -> None:
        """Leave the error queue missing."""

    scenario.transport.setup_infrastructure = no_setup  # type: ignore[method-assign]
    await start(scenario)
    await scenario.clock.advance(10)
    assert [message.id for message in await scenario.pending()] == ["m"]
    # And once both queues exist it is delivered
    del scenario.transport.setup_infrastructure
    await scenario.transport.setup_infrastructure(["nowhere", "error"])
    await scenario.clock.advance(60)
    assert len(await scenario.ids("nowhere")) + len(await scenario.ids("error")) == 1
    await scenario.endpoint.stop()


@pytest.mark.parametrize("shared", [True, False])
async def test_an_error_queue_that_fails_doubles_none_of_the_messages_sent_with_it(
    clock: ManualClock, shared: bool
) -> None:
    # Given a batch with one message to a missing queue, and an error queue that fails
    scenario = build(clock, shared=shared)
    scenario.faults.inject(Fault("dispatch", BOOM, when=lambda sent: [one.message.id for one in sent] == ["lost"]))
    await scenario.put(delayed("a"), delayed("lost", to="nowhere"), delayed("b"))
    # When it is sent, over and over
    await start(scenario)
    await clock.advance(5)
    # Then the others went out once
    assert await scenario.ids("out") == ["a", "b"]
    assert [message.id for message in await scenario.pending()] == ["lost"]
    scenario.faults.heal()
    await clock.advance(60)
    assert await scenario.ids("error") == ["lost"]
    await scenario.endpoint.stop()


async def test_a_message_moved_to_the_error_queue_leaves_no_armed_breaker_behind(scenario: Scenario) -> None:
    # Given one bad message in a quiet system
    break_destination(scenario)
    await scenario.put(delayed())
    await start(scenario)
    assert await scenario.ids("error") == ["m"]
    # Then the following silence is not an outage
    await scenario.clock.advance(300)
    assert scenario.critical == []
    await scenario.endpoint.stop()


@SCOPES
async def test_a_message_that_backs_off_for_minutes_stops_no_endpoint(clock: ManualClock, way: dict[str, bool]) -> None:
    # Given one message whose destination fails, and nothing else to send
    scenario = build(clock, number_of_retries=6, **way)
    tried = break_destination(scenario)
    await scenario.put(delayed())
    # When its attempts take longer than the time of the dispatch breaker
    await start(scenario)
    await clock.advance(70)
    # Then they were counted, and that is all
    assert (len(tried), await scenario.ids("error")) == (7, ["m"])
    assert scenario.critical == []
    await scenario.endpoint.stop()


async def test_error_handling_that_fails_is_paced_and_becomes_critical(clock: ManualClock) -> None:
    # Given that sending, counting and moving all fail
    scenario = build(clock, maximum_recovery_failures_per_second=1)
    scenario.faults.inject(Fault("dispatch", BOOM))
    scenario.faults.inject(Fault(COUNT_FAILURE, BOOM))
    await scenario.put(delayed())
    await start(scenario)
    # Then it is tried once a second, not in a tight loop
    assert scenario.faults.calls(*COUNT_FAILURE) == 1
    await clock.advance(5)
    assert 5 <= scenario.faults.calls(*COUNT_FAILURE) <= 7
    # And the failure rate breaker reports it
    await clock.advance(60)
    assert "Failed to execute error handling for delayed message forwarding" in scenario.critical
    assert [message.id for message in await scenario.pending()] == ["m"]
    await scenario.endpoint.stop()


async def test_a_message_removed_by_another_process_is_not_moved_to_the_error_queue(clock: ManualClock) -> None:
    scenario = build(clock)
    break_destination(scenario)
    await scenario.put(delayed())

    remove = scenario.memory.remove_many

    async def gone(messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        await remove(messages)
        return 0

    scenario.memory.remove_many = gone  # type: ignore[method-assign]
    await start(scenario)
    assert await scenario.ids("error") == []
    await scenario.endpoint.stop()


async def test_six_verbs_count_a_failure_when_its_back_off_is_over(clock: ManualClock) -> None:
    scenario = build(clock, verbs_only=True, number_of_retries=3)
    tried = break_destination(scenario)
    await scenario.put(delayed())
    await start(scenario)
    assert (len(tried), scenario.faults.calls("increment_failure_count")) == (1, 0)
    await clock.advance(1.1)
    assert (len(tried), scenario.faults.calls("increment_failure_count")) == (2, 1)
    await scenario.endpoint.stop()
