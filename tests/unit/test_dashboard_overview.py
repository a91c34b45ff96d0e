"""What the overview and the forecast say of minute rows: silence, what was drained, and the order of endpoints."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from delayline.dashboard.model import DueCounts, Now, ProcessState, Unavailable
from delayline.dashboard.overview import _bar, _throughput, highest_drain, rates_of
from delayline.dashboard.summary import lines
from delayline.delayed.pauses import DispatchPause
from delayline.delayed.store import DueBucket
from delayline.telemetry.history import MinuteRow
from delayline.telemetry.measurements import LATENESS_BOUNDS

NOW = datetime(2026, 11, 26, 14, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
IN_TIME = [1] + [0] * len(LATENESS_BOUNDS)
LATE = [0] * len(LATENESS_BOUNDS) + [1]


def row(minute: int, dispatched: int, lateness: list[int], process: str = "p") -> MinuteRow:
    start = NOW + minute * MINUTE
    counts = {"billing": [dispatched * each for each in lateness]}
    return MinuteRow(process, start, 1, start + MINUTE, dispatched=dispatched, lateness=counts)


def test_traffic_that_leaves_in_time_is_no_capacity() -> None:
    assert highest_drain([row(minute, 60_000, IN_TIME) for minute in range(10)]) is None


def test_few_late_messages_are_no_backlog() -> None:
    assert highest_drain([row(minute, 20, LATE) for minute in range(10)]) is None


def test_the_capacity_is_what_a_backlog_left_at_for_two_minutes() -> None:
    # Given a backlog that two processes drain, a minute that is higher, and minutes apart from each other
    rows = [row(0, 3000, LATE), row(0, 3000, LATE, "q"), row(1, 5400, LATE), row(2, 90_000, IN_TIME)]
    rows += [row(5, 70_000, LATE), row(7, 70_000, LATE)]
    assert highest_drain(rows) == 90


def test_a_bar_counts_the_destinations_of_each_tier_apart() -> None:
    both = DueBucket(NOW, NOW + MINUTE, 2639, destinations={"billing": 1430, "mail": 1209})
    files = DueBucket(NOW, NOW + MINUTE, 1000, destinations={"billing": 800, "mail": 200})
    bar = _bar(both, files, None)
    assert (bar.hot, bar.cold, dict(bar.destinations)) == (1639, 1000, {"mail": 1009, "billing": 630})


def test_a_dead_endpoint_is_silent_since_its_last_row() -> None:
    found = _throughput(NOW, [row(-3000, 5, IN_TIME)])
    assert isinstance(found, Unavailable)
    assert found.reason.startswith("silent since ")
    assert "history = true" not in found.reason


def test_rates_add_the_processes_up_and_leave_minutes_without_a_row_unknown() -> None:
    hour = replace(row(-60, 5000, IN_TIME), minutes=60)
    rows = [hour, row(-3, 5, IN_TIME), row(-1, 7, IN_TIME), replace(row(-1, 4, IN_TIME), process="b")]
    found = rates_of(rows, NOW + timedelta(seconds=30), 4)
    assert found.start == NOW - 3 * MINUTE
    assert found.dispatched == [5, None, 11, None]
    assert found.failed == [0, None, 0, None]


def state(*, overdue: int = 0, paused: int = 0, errors: int = 0, alive: bool = True) -> Now:
    nothing = DueBucket(NOW, None, 0)
    due = DueCounts(
        replace(nothing, count=overdue),
        replace(nothing, count=paused),
        *(nothing, nothing, nothing, nothing),
        earliest=NOW - timedelta(hours=1) if overdue else None,
        pauses=[DispatchPause("billing", NOW)] if paused else [],
    )
    processes = [ProcessState(row(-2, 5, IN_TIME), alive)]
    unknown = Unavailable("unknown")
    return Now(NOW, due, unknown, unknown, processes, unknown, errors, None)


def test_the_worst_endpoint_comes_first_and_says_why() -> None:
    found = lines(
        [
            ("well", state()),
            ("errors", state(errors=400)),
            ("dead", state(alive=False)),
            ("late", state(overdue=7)),
            ("held", state(paused=3)),
            ("gone", Unavailable("no answer")),
        ]
    )
    assert [(line.name, line.kind) for line in found] == [
        ("late", "bad"),
        ("dead", "bad"),
        ("gone", "bad"),
        ("errors", "warn"),
        ("held", "warn"),
        ("well", "good"),
    ]
    assert found[0].state.startswith("overdue for 1 h")
    assert found[4].state == "paused: dispatching to billing (3 overdue)"
    assert found[1].state.startswith("silent since ")
    assert found[3].state == "400 in the error queue"
