"""The timeout manager during outages of its storage or transport: no message fails, and a critical error is raised."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.timeout_scenario import PEEKING, SCOPES, TIMEOUTS, TimeoutScenario, build_timeouts

from delayline import BackendUnavailable
from delayline.endpoint import log_and_stop
from delayline.testing import Fault
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the database does not answer")
FIVE = timedelta(seconds=5)
FETCHING_FAILED = "Repeated failures when fetching timeouts from storage, endpoint will be terminated."


@pytest.fixture(params=list(PEEKING))
def peeking(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutScenario:
    return build_timeouts(clock, **PEEKING[request.param])


@pytest.fixture(params=list(SCOPES))
def scenario(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutScenario:
    return build_timeouts(clock, **SCOPES[request.param])


async def test_an_outage_counts_against_no_message(scenario: TimeoutScenario) -> None:
    # Given storage that cannot be reached
    await scenario.start()
    scenario.faults.inject(Fault("add", DOWN))
    await scenario.endpoint.send("out", b"body", message_id="m", delay=timedelta(seconds=100))
    # When it lasts for more than five attempts
    await scenario.clock.advance(20)
    assert (scenario.faults.calls("add") > 5, await scenario.ids("error")) == (True, [])
    # Then the message is still there
    scenario.faults.heal()
    await scenario.clock.advance(1)
    assert await scenario.pending() == 1
    await scenario.endpoint.stop()


async def test_requests_made_before_an_outage_are_dispatched_during_it(scenario: TimeoutScenario) -> None:
    await scenario.start()
    scenario.faults.inject(Fault("add", DOWN))
    await scenario.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await scenario.clock.advance(5)
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.stop()


async def test_an_outage_while_dispatching_counts_against_no_message(peeking: TimeoutScenario) -> None:
    await peeking.start()
    await peeking.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    peeking.faults.inject(Fault("peek", DOWN))
    await peeking.clock.advance(30)
    assert (await peeking.ids("error"), peeking.faults.calls("peek") > 5) == ([], True)
    peeking.faults.heal()
    await peeking.clock.advance(1)
    assert await peeking.ids("out") == ["m"]
    await peeking.endpoint.stop()


async def test_an_outage_of_two_minutes_is_a_critical_error_with_the_documents_text(clock: ManualClock) -> None:
    # Given an endpoint with nothing to do
    scenario = build_timeouts(clock)
    await scenario.start()
    # When its storage is gone
    scenario.faults.inject(Fault("next_chunk", DOWN))
    await clock.advance(timedelta(minutes=2))
    assert scenario.critical == []
    # Then the alarm comes in time: it is not noticed a minute late
    await clock.advance(timedelta(seconds=12))
    assert scenario.critical == [FETCHING_FAILED]
    await scenario.endpoint.stop()


async def test_a_critical_error_stops_the_endpoint_by_default(clock: ManualClock) -> None:
    scenario = build_timeouts(clock, on_critical_error=log_and_stop)
    await scenario.start()
    scenario.faults.inject(Fault("next_chunk", DOWN))
    stopped = asyncio.create_task(scenario.endpoint.wait_stopped())
    await clock.advance(timedelta(minutes=2, seconds=12))
    await settle()
    assert stopped.done()
    assert scenario.memory.opened == 0


async def test_outages_that_pass_are_no_critical_error(clock: ManualClock) -> None:
    scenario = build_timeouts(clock, time_to_wait_before_triggering_critical_error=timedelta(seconds=3))
    await scenario.start()
    for _ in range(20):
        scenario.faults.inject(Fault("next_chunk", DOWN))
        await clock.advance(1)
        scenario.faults.heal()
        await clock.advance(1)
    assert scenario.critical == []
    await scenario.endpoint.stop()


async def test_a_wait_of_zero_alarms_at_the_second_failure(clock: ManualClock) -> None:
    scenario = build_timeouts(clock, time_to_wait_before_triggering_critical_error=timedelta(0))
    await scenario.start()
    scenario.faults.inject(Fault("next_chunk", DOWN))
    await clock.advance(3)
    assert scenario.critical == [FETCHING_FAILED]
    await scenario.endpoint.stop()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("setup_infrastructure", DOWN, when=lambda name: name == "sales"),
        Fault("open", DOWN),
        Fault("next_chunk", DOWN),
    ],
    ids=lambda fault: fault.on,
)
async def test_the_endpoint_starts_while_the_storage_is_down(clock: ManualClock, fault: Fault) -> None:
    # Given
    scenario = build_timeouts(clock)
    scenario.faults.inject(fault)
    # When
    await scenario.start()
    # Then it works as far as possible: delayed messages wait in the queue
    await scenario.endpoint.send("sales", b"", message_id="now")
    await scenario.endpoint.send("sales", b"", message_id="later", delay=FIVE)
    await clock.advance(3)
    assert [message.id for message, _ in scenario.handled] == ["now"]
    # Then everything is made up for
    scenario.faults.heal()
    await clock.advance(2)
    assert [message.id for message, _ in scenario.handled] == ["now", "later"]
    await scenario.endpoint.stop()
    assert scenario.memory.opened == 0


async def test_a_storage_that_stays_down_from_the_start_is_a_critical_error(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    scenario.faults.inject(Fault("open", DOWN))
    await scenario.start()
    await clock.advance(timedelta(minutes=2, seconds=2))
    assert scenario.critical == [FETCHING_FAILED]
    await scenario.endpoint.stop()


async def test_a_storage_that_turns_out_to_be_of_no_use_is_a_critical_error_at_once(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    scenario.faults.inject(Fault("open", DOWN))
    await scenario.start()
    scenario.faults.heal()
    scenario.faults.inject(Fault("open", BOOM))
    await clock.advance(1)
    assert scenario.critical == ["Failed to open the timeout storage"]
    await scenario.endpoint.stop()


async def test_setup_does_not_pretend(clock: ManualClock) -> None:
    scenario = build_timeouts(clock)
    scenario.faults.inject(Fault("setup_infrastructure", DOWN, when=lambda name: name == "sales"))
    with pytest.raises(BackendUnavailable):
        await scenario.endpoint.setup()


async def test_requests_wait_while_the_transport_is_down(scenario: TimeoutScenario) -> None:
    await scenario.start()
    await scenario.put(TIMEOUTS, scenario.expiring(after=5))
    scenario.faults.inject(Fault("dispatch", DOWN))
    await scenario.clock.advance(10)
    assert await scenario.ids("out") == []
    scenario.faults.heal()
    await scenario.clock.advance(2)
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.stop()


async def test_on_the_short_way_an_outage_counts_against_no_message(clock: ManualClock) -> None:
    direct = build_timeouts(clock, direct=True)
    await direct.start()
    await direct.put(TIMEOUTS, direct.expiring(after=5))
    direct.faults.inject(Fault("lock_due", DOWN))
    await direct.clock.advance(60)
    direct.faults.heal()
    direct.faults.inject(Fault("dispatch", DOWN))
    await direct.clock.advance(60)
    assert (await direct.ids("out"), await direct.ids("error"), direct.critical) == ([], [], [])
    direct.faults.heal()
    await direct.clock.advance(10)
    assert await direct.ids("out") == ["m"]
    await direct.endpoint.stop()
