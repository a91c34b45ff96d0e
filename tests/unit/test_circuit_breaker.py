"""Circuit breakers trigger when a fault has lasted too long."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.circuit_breaker import BreakerState, FailureLog, FailureRate, RepeatedFailuresOverTime, first_of
from delayline.errors import BackendUnavailable
from delayline.events import Event
from delayline.testing import Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
OUTAGE = BackendUnavailable("gone")


class Probe:
    """A breaker and what its actions did."""

    def __init__(self, clock: ManualClock, *, arm: Exception | None = None, disarm: Exception | None = None) -> None:
        self.armed = self.disarmed = 0
        self.triggered: list[Exception] = []
        self.breaker = RepeatedFailuresOverTime(
            "probe",
            time_to_trigger=timedelta(seconds=30),
            trigger=self.triggered.append,
            clock=clock,
            arm=self._action("armed", arm),
            disarm=self._action("disarmed", disarm),
        )

    def _action(self, name: str, error: Exception | None) -> Callable[[], None]:
        def run() -> None:
            setattr(self, name, getattr(self, name) + 1)
            if error is not None:
                raise error

        return run


async def test_success_disarms(clock: ManualClock) -> None:
    probe = Probe(clock)
    probe.breaker.note(BOOM)
    assert probe.breaker.state is BreakerState.ARMED
    probe.breaker.success()
    assert (probe.armed, probe.disarmed, probe.breaker.state) == (1, 1, BreakerState.DISARMED)


async def test_success_on_a_disarmed_breaker_does_nothing(clock: ManualClock) -> None:
    probe = Probe(clock)
    probe.breaker.success()
    assert probe.disarmed == 0


async def test_the_disarm_actions_exception_is_raised_and_the_breaker_is_disarmed(clock: ManualClock) -> None:
    probe = Probe(clock, disarm=BOOM)
    probe.breaker.note(BOOM)
    with pytest.raises(RuntimeError, match="boom"):
        probe.breaker.success()
    assert probe.breaker.state is BreakerState.DISARMED


async def test_the_arm_actions_exception_is_raised_and_the_breaker_stays_armed_without_a_timer(
    clock: ManualClock,
) -> None:
    probe = Probe(clock, arm=BOOM)
    with pytest.raises(RuntimeError, match="boom"):
        await probe.breaker.failure(ValueError("first"))
    assert probe.breaker.state is BreakerState.ARMED
    await clock.advance(31)
    probe.breaker.note(BOOM)
    assert probe.triggered == []


async def test_it_triggers_once_at_the_first_failure_after_the_time_with_that_error(clock: ManualClock) -> None:
    probe = Probe(clock)
    probe.breaker.note(ValueError("first"))
    await clock.advance(29.9)
    probe.breaker.note(ValueError("second"))
    assert probe.triggered == []
    await clock.advance(0.1)
    probe.breaker.note(BOOM)
    assert (probe.triggered, probe.breaker.state) == ([BOOM], BreakerState.TRIGGERED)
    probe.breaker.note(BOOM)
    await clock.advance(100)
    probe.breaker.note(BOOM)
    assert len(probe.triggered) == 1


async def test_silence_after_a_failure_is_no_lasting_fault(clock: ManualClock) -> None:
    # Given one failure, and nothing that could succeed or fail after it
    probe = Probe(clock)
    probe.breaker.note(BOOM)
    # When hours pass
    await clock.advance(10_000)
    # Then the breaker does not trigger
    assert (probe.triggered, probe.breaker.state) == ([], BreakerState.ARMED)
    # And a success is the end of it
    probe.breaker.success()
    probe.breaker.note(BOOM)
    assert (probe.triggered, probe.breaker.state) == ([], BreakerState.ARMED)


async def test_it_does_not_trigger_when_disarmed_first(clock: ManualClock) -> None:
    probe = Probe(clock)
    probe.breaker.note(BOOM)
    await clock.advance(29)
    probe.breaker.success()
    await clock.advance(60)
    assert probe.triggered == []


async def test_it_triggers_again_after_a_success(clock: ManualClock) -> None:
    probe = Probe(clock)
    for _ in range(2):
        probe.breaker.note(BOOM)
        await clock.advance(30)
        probe.breaker.note(BOOM)
        probe.breaker.success()
    assert len(probe.triggered) == 2


@pytest.mark.parametrize(("already", "seconds"), [(0, 1), (30, 10)], ids=["armed: 1 s", "triggered: 10 s"])
async def test_a_failure_waits(clock: ManualClock, already: int, seconds: int) -> None:
    probe = Probe(clock)
    probe.breaker.note(BOOM)
    await clock.advance(already)
    waiting = asyncio.create_task(probe.breaker.failure(BOOM))
    await clock.advance(seconds - 0.1)
    assert not waiting.done()
    await clock.advance(0.2)
    assert waiting.done()


async def test_the_wait_of_a_failure_can_be_cancelled(clock: ManualClock) -> None:
    probe = Probe(clock)
    waiting = asyncio.create_task(probe.breaker.failure(BOOM))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert probe.breaker.state is BreakerState.ARMED


async def test_a_thousand_interleaved_failures_and_one_success(clock: ManualClock) -> None:
    # Given 1000 failures in flight at once
    probe = Probe(clock)
    failures = [asyncio.create_task(probe.breaker.failure(BOOM)) for _ in range(1000)]
    await settle()
    # When successes arrive before the time is over
    for _ in range(1000):
        probe.breaker.success()
    await clock.advance(60)
    await asyncio.gather(*failures)
    # Then it was armed once, disarmed once and never triggered
    assert (probe.armed, probe.disarmed, probe.triggered) == (1, 1, [])


async def test_a_failing_trigger_action_is_logged_as_critical(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(error: Exception) -> None:
        raise LookupError("no one home")

    breaker = RepeatedFailuresOverTime("x", time_to_trigger=timedelta(seconds=1), trigger=explode, clock=clock)
    breaker.note(BOOM)
    await clock.advance(1)
    breaker.note(BOOM)
    assert [record.levelno for record in caplog.records if "trigger action" in record.message] == [logging.CRITICAL]
    assert breaker.state is BreakerState.TRIGGERED


async def test_a_closed_breaker_neither_triggers_nor_arms_again(clock: ManualClock) -> None:
    probe = Probe(clock)
    probe.breaker.note(BOOM)
    probe.breaker.close()
    probe.breaker.success()
    probe.breaker.note(BOOM)
    probe.breaker.close()
    await clock.advance(100)
    assert (probe.armed, probe.triggered) == (1, [])


async def test_success_inside_the_trigger_action_disarms(clock: ManualClock) -> None:
    breaker = RepeatedFailuresOverTime(
        "x", time_to_trigger=timedelta(seconds=1), trigger=lambda _: breaker.success(), clock=clock
    )
    breaker.note(BOOM)
    await clock.advance(1)
    breaker.note(BOOM)
    assert breaker.state is BreakerState.DISARMED


@pytest.mark.parametrize("per_second", [1, 2])
async def test_the_failure_rate_triggers_beyond_thirty_per_window_and_for_every_further_failure(
    clock: ManualClock, per_second: int
) -> None:
    seen: list[Exception] = []
    rate = FailureRate("x", maximum_per_second=per_second, trigger=seen.append, clock=clock)
    for _ in range(30 * per_second):
        rate.failure(BOOM)
    assert seen == []
    rate.failure(BOOM)
    assert seen == [BOOM]
    rate.failure(BOOM)
    assert len(seen) == 2
    rate.close()


async def test_the_failure_rates_windows_tumble_from_its_construction(clock: ManualClock) -> None:
    # Given 30 failures late in the first window
    seen: list[Exception] = []
    rate = FailureRate("x", maximum_per_second=1, trigger=seen.append, clock=clock)
    await clock.advance(29)
    for _ in range(30):
        rate.failure(BOOM)
    # When the next window begins, a second later
    await clock.advance(1)
    for _ in range(30):
        rate.failure(BOOM)
    # Then they count alone
    assert seen == []
    rate.failure(BOOM)
    assert len(seen) == 1
    rate.close()


async def test_the_failure_rate_logs_an_error_of_its_trigger_and_stops_its_timer(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(error: Exception) -> None:
        raise LookupError("no one home")

    rate = FailureRate("x", maximum_per_second=1, trigger=explode, clock=clock)
    for _ in range(31):
        rate.failure(BOOM)
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)
    rate.close()
    rate.close()


async def test_first_of_cancels_the_losers(clock: ManualClock) -> None:
    lost = asyncio.Event()

    async def loser() -> None:
        try:
            await clock.sleep(10)
        except asyncio.CancelledError:
            lost.set()
            raise

    racing = asyncio.create_task(first_of(loser(), clock.sleep(1)))
    await clock.advance(1)
    await racing
    assert lost.is_set()


def loud(signals: Signals, event: Event) -> list[logging.LogRecord]:
    return [record for record in signals.records(event) if record.levelno >= logging.WARNING]


def log(failures: FailureLog, event: Event = Event.FETCH_FAILED) -> None:
    logger = logging.getLogger("delayline.test")
    failures.log_failure(logger, logging.ERROR, event, "no answer: %s", "gone", exception=BOOM)


async def test_a_failure_that_repeats_is_counted_at_growing_intervals(clock: ManualClock) -> None:
    failures = FailureLog(clock)
    at: list[int] = []
    with Signals() as signals:
        for second in range(301):
            before = len(loud(signals, Event.FETCH_FAILED))
            log(failures)
            if len(loud(signals, Event.FETCH_FAILED)) > before:
                at.append(second)
            await clock.advance(1)
    assert at == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    lines = loud(signals, Event.FETCH_FAILED)
    assert lines[2].getMessage() == "Still failing, 4 attempts in 3 s: no answer: gone"
    assert [bool(line.exc_info) for line in lines] == [True] + [False] * 9
    assert signals.count(Event.FETCH_FAILED) == 301  # each stays an event


async def test_another_event_of_the_same_outage_is_logged_without_a_traceback(clock: ManualClock) -> None:
    failures = FailureLog(clock)
    with Signals() as signals:
        log(failures)
        log(failures, Event.REMOVE_FAILED)
    assert [bool(line.exc_info) for line in loud(signals, Event.REMOVE_FAILED)] == [False]


def gone(part: FailureLog) -> None:
    part.log_failure(
        logging.getLogger("delayline.test"), logging.ERROR, Event.FETCH_FAILED, "no answer", exception=OUTAGE
    )


async def test_an_outage_is_logged_once_for_all_that_share_a_back_end(clock: ManualClock) -> None:
    """Given a receiver and a poller of a back end, when it is away, then that is a line, and its end is another."""
    receiver, poller = FailureLog(clock, "Receive", "database"), FailureLog(clock, "poller", "database")
    elsewhere = FailureLog(clock, "Receive", "broker")
    with Signals() as signals:
        for _ in range(8):
            gone(receiver)
            gone(poller)
            await clock.advance(1)
        # When one of them succeeds, and the other fails once more before it does
        receiver.over()
        gone(poller)
        poller.over()
        gone(elsewhere)
    # Then
    assert [line.getMessage() for line in signals.records(Event.OUTAGE_BEGAN)] == [
        "A back end is out of reach. no answer"
    ] * 2
    assert [line.getMessage().partition(". ")[0] for line in signals.records(Event.OUTAGE_LASTS)] == [
        "A back end is out of reach for 1 s: 3 failures of Receive, poller",
        "A back end is out of reach for 3 s: 7 failures of Receive, poller",
        "A back end is out of reach for 7 s: 15 failures of Receive, poller",
    ]
    [over] = signals.records(Event.OUTAGE_ENDED)
    assert over.getMessage() == "The back end is in reach again, after 8 s and 16 failures."
    assert loud(signals, Event.FETCH_FAILED) == []
    assert signals.count(Event.FETCH_FAILED) == 18
    elsewhere.leave()


async def test_an_outage_begins_anew_after_the_parts_have_stopped_or_long_after_its_end(clock: ManualClock) -> None:
    first, second = FailureLog(clock, "first", "database"), FailureLog(clock, "second", "database")
    with Signals() as signals:
        gone(first)
        first.leave()
        gone(second)
        gone(first)
        second.over()
        await clock.advance(60)
        gone(first)  # has not succeeded meanwhile
        first.over()
    assert (signals.count(Event.OUTAGE_BEGAN), signals.count(Event.OUTAGE_ENDED)) == (3, 2)


async def test_a_wall_clock_that_is_set_back_silences_nothing(clock: ManualClock) -> None:
    failures = FailureLog(clock)
    with Signals() as signals:
        log(failures)
        clock.set(clock.now() - timedelta(hours=1))
        log(failures)
    assert len(loud(signals, Event.FETCH_FAILED)) == 2


async def test_a_breaker_that_disarms_logs_how_long_it_was_and_begins_anew(clock: ManualClock) -> None:
    breaker = Probe(clock).breaker
    with Signals() as signals:
        for _ in range(3):
            log(breaker)
            breaker.note(BOOM)
            await clock.advance(1)
        breaker.success()
        log(breaker)
    (over,) = signals.records(Event.BREAKER_DISARMED)
    assert over.getMessage().endswith("is now disarmed, after 3 failures in 3 s.")
    assert [bool(line.exc_info) for line in loud(signals, Event.FETCH_FAILED)] == [True, False, True]
    breaker.close()
