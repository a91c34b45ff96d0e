"""The timeout manager while its storage or transport cannot be reached: no message pays for it; somebody is told."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.timeout_house import ASKING, PAIRS, TIMEOUTS, TimeoutHouse, build_timeouts

from delayline import BackendUnavailable
from delayline.endpoint import log_and_stop
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the database does not answer")
FIVE = timedelta(seconds=5)
FETCHING_FAILED = "Repeated failures when fetching timeouts from storage, endpoint will be terminated."


@pytest.fixture(params=list(ASKING))
def asking(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutHouse:
    return build_timeouts(clock, **ASKING[request.param])


@pytest.fixture(params=list(PAIRS))
def house(request: pytest.FixtureRequest, clock: ManualClock) -> TimeoutHouse:
    return build_timeouts(clock, **PAIRS[request.param])


async def test_an_outage_counts_against_no_message(house: TimeoutHouse) -> None:
    # Given storage that cannot be reached
    await house.start()
    house.faults.always("add", DOWN)
    await house.endpoint.send("out", b"body", message_id="m", delay=timedelta(seconds=100))
    # When it lasts for more than five attempts
    await house.clock.advance(20)
    assert (house.faults.count("add") > 5, await house.ids("error")) == (True, [])
    # Then the message is still there
    house.faults.heal()
    await house.clock.advance(1)
    assert await house.waiting() == 1
    await house.endpoint.stop()


async def test_what_falls_due_in_an_outage_of_the_storage_needs_it_no_more(house: TimeoutHouse) -> None:
    await house.start()
    house.faults.always("add", DOWN)
    await house.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await house.clock.advance(5)
    assert await house.ids("out") == ["m"]
    await house.endpoint.stop()


async def test_an_outage_while_dispatching_counts_against_no_message(asking: TimeoutHouse) -> None:
    await asking.start()
    await asking.endpoint.send("out", b"body", message_id="m", delay=FIVE)
    await settle()
    asking.faults.always("peek", DOWN)
    await asking.clock.advance(30)
    assert (await asking.ids("error"), asking.faults.count("peek") > 5) == ([], True)
    asking.faults.heal()
    await asking.clock.advance(1)
    assert await asking.ids("out") == ["m"]
    await asking.endpoint.stop()


async def test_an_outage_of_two_minutes_is_a_critical_error_with_the_documents_text(clock: ManualClock) -> None:
    # Given an endpoint with nothing to do
    house = build_timeouts(clock)
    await house.start()
    # When its storage is gone
    house.faults.always("look", DOWN)
    await clock.advance(timedelta(minutes=2))
    assert house.critical == []
    # Then the alarm comes in time: it is not noticed a minute late
    await clock.advance(timedelta(seconds=12))
    assert house.critical == [FETCHING_FAILED]
    await house.endpoint.stop()


async def test_the_endpoint_stops_by_itself_unless_told_otherwise(clock: ManualClock) -> None:
    house = build_timeouts(clock, on_critical_error=log_and_stop)
    await house.start()
    house.faults.always("look", DOWN)
    stopped = asyncio.create_task(house.endpoint.wait_stopped())
    await clock.advance(timedelta(minutes=2, seconds=12))
    await settle()
    assert stopped.done()
    assert house.persister.opened == 0


async def test_outages_that_pass_are_no_critical_error(clock: ManualClock) -> None:
    house = build_timeouts(clock, time_to_wait_before_triggering_critical_error=timedelta(seconds=3))
    await house.start()
    for _ in range(20):
        house.faults.always("look", DOWN)
        await clock.advance(1)
        house.faults.heal()
        await clock.advance(1)
    assert house.critical == []
    await house.endpoint.stop()


async def test_a_wait_of_zero_alarms_at_the_second_failure(clock: ManualClock) -> None:
    house = build_timeouts(clock, time_to_wait_before_triggering_critical_error=timedelta(0))
    await house.start()
    house.faults.always("look", DOWN)
    await clock.advance(3)
    assert house.critical == [FETCHING_FAILED]
    await house.endpoint.stop()


@pytest.mark.parametrize("verb", ["setup", "open", "look"])
async def test_the_endpoint_starts_while_the_storage_is_down(clock: ManualClock, verb: str) -> None:
    # Given
    house = build_timeouts(clock)
    house.faults.always(verb, DOWN)
    # When
    await house.start()
    # Then it works as far as it can: what is delayed waits in the queue
    await house.endpoint.send("sales", b"", message_id="now")
    await house.endpoint.send("sales", b"", message_id="later", delay=FIVE)
    await clock.advance(3)
    assert [message.id for message, _ in house.handled] == ["now"]
    # Then everything is made up for
    house.faults.heal()
    await clock.advance(2)
    assert [message.id for message, _ in house.handled] == ["now", "later"]
    await house.endpoint.stop()
    assert house.persister.opened == 0


async def test_a_storage_that_stays_down_from_the_start_is_a_critical_error(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    house.faults.always("open", DOWN)
    await house.start()
    await clock.advance(timedelta(minutes=2, seconds=2))
    assert house.critical == [FETCHING_FAILED]
    await house.endpoint.stop()


async def test_a_storage_that_turns_out_to_be_of_no_use_is_a_critical_error_at_once(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    house.faults.always("open", DOWN)
    await house.start()
    house.faults.always("open", BOOM)
    await clock.advance(1)
    assert house.critical == ["Failed to open the timeout storage"]
    await house.endpoint.stop()


async def test_setup_does_not_pretend(clock: ManualClock) -> None:
    house = build_timeouts(clock)
    house.faults.always("setup", DOWN)
    with pytest.raises(BackendUnavailable):
        await house.endpoint.setup()


async def test_requests_wait_while_the_transport_is_down(house: TimeoutHouse) -> None:
    await house.start()
    await house.put(TIMEOUTS, house.expiring(after=5))
    house.faults.always("dispatch", DOWN)
    await house.clock.advance(10)
    assert await house.ids("out") == []
    house.faults.heal()
    await house.clock.advance(2)
    assert await house.ids("out") == ["m"]
    await house.endpoint.stop()


async def test_on_the_short_way_an_outage_counts_against_no_message(clock: ManualClock) -> None:
    direct = build_timeouts(clock, direct=True)
    await direct.start()
    await direct.put(TIMEOUTS, direct.expiring(after=5))
    direct.faults.always("lock_due", DOWN)
    await direct.clock.advance(60)
    direct.faults.heal()
    direct.faults.always("dispatch", DOWN)
    await direct.clock.advance(60)
    assert (await direct.ids("out"), await direct.ids("error"), direct.critical) == ([], [], [])
    direct.faults.heal()
    await direct.clock.advance(10)
    assert await direct.ids("out") == ["m"]
    await direct.endpoint.stop()
