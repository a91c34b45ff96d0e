"""When recurring messages are due: cron expressions in time zones, intervals, and what daylight saving does."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import pytest

from delayline import ConfigurationError, cron, interval
from delayline.delayed.recurrence import Recurrence, recurrence_of
from delayline.errors import MissingExtra

SINCE: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: Two years with their changes.
FIRST, END = datetime(2025, 7, 1, tzinfo=UTC), datetime(2027, 7, 1, tzinfo=UTC)
HALF_HOURS: Final = "*/30 * * * *"
ZONES: Final = sorted(available_timezones())


def due_times(recurrence: Recurrence, start: datetime, end: datetime) -> list[datetime]:
    found: list[datetime] = []
    at = recurrence.after(start, SINCE)
    while at is not None and at < end:
        found.append(at)
        at = recurrence.after(at, SINCE)
    return found


def changes_of(zone: ZoneInfo) -> list[datetime]:
    """Return the instants, to the hour, before which the zone's offset changes within the two years."""
    hours = range(int((END - FIRST) / timedelta(hours=1)))
    found, before = [], FIRST.astimezone(zone).utcoffset()
    for day in range(0, len(hours) + 24, 24):
        if (FIRST + timedelta(hours=day)).astimezone(zone).utcoffset() == before:
            continue
        for hour in range(day - 24, day + 1):
            offset = (FIRST + timedelta(hours=hour)).astimezone(zone).utcoffset()
            if offset != before:
                found.append(FIRST + timedelta(hours=hour))
                before = offset
    return found


def every_half_hour(zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """Return, minute by minute, the instants at which a local half hour begins for the first time, or a gap ends."""
    found: list[datetime] = []
    seen: set[datetime] = set()
    at, before = start, (start - timedelta(minutes=1)).astimezone(zone).replace(tzinfo=None)
    warm_up = start - timedelta(hours=3)
    while warm_up < start:
        seen.add(warm_up.astimezone(zone).replace(tzinfo=None))
        warm_up += timedelta(minutes=1)
    while at < end:
        local = at.astimezone(zone).replace(tzinfo=None)
        skipped = before + timedelta(minutes=1)
        passed = []
        while skipped <= local:
            passed.append(skipped)
            skipped += timedelta(minutes=1)
        if at != start and any(minute.minute % 30 == 0 and minute not in seen for minute in passed):
            found.append(at)
        seen.update(passed)
        at, before = at + timedelta(minutes=1), local
    return found


def test_local_times_follow_their_zone() -> None:
    """Given working days at nine in Berlin, then the instants follow summer time."""
    nine = cron("0 9 * * MON-FRI", tz="Europe/Berlin")
    found = due_times(nine, datetime(2026, 3, 26, 12, tzinfo=UTC), datetime(2026, 3, 31, tzinfo=UTC))
    assert found == [datetime(2026, 3, 27, 8, tzinfo=UTC), datetime(2026, 3, 30, 7, tzinfo=UTC)]


def test_a_skipped_time_runs_after_the_gap_and_a_repeated_time_once() -> None:
    half_past_two = cron("30 2 * * *", tz="Europe/Berlin")
    spring = due_times(half_past_two, datetime(2026, 3, 28, tzinfo=UTC), datetime(2026, 3, 31, tzinfo=UTC))
    assert [f"{at:%d %H:%M}" for at in spring] == ["28 01:30", "29 01:00", "30 00:30"]
    autumn = due_times(half_past_two, datetime(2026, 10, 24, tzinfo=UTC), datetime(2026, 10, 27, tzinfo=UTC))
    assert [f"{at:%d %H:%M}" for at in autumn] == ["24 00:30", "25 00:30", "26 01:30"]


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", ZONES)
def test_no_change_of_a_zone_misses_or_doubles_an_occurrence(name: str) -> None:
    """Given a schedule of each half hour, then around each change it has the times that a look at each minute finds."""
    zone, half_hours = ZoneInfo(name), cron(HALF_HOURS, tz=name)
    for change in [*changes_of(zone), datetime(2026, 6, 1, tzinfo=UTC)]:
        start, end = change - timedelta(hours=5), change + timedelta(hours=5)
        assert due_times(half_hours, start, end) == every_half_hour(zone, start, end), f"{name} at {change}"


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", ZONES)
def test_each_day_of_two_years_has_one_occurrence(name: str) -> None:
    """Given a daily schedule at a time that changes of zones skip or repeat, then each local day has exactly one."""
    zone, daily = ZoneInfo(name), cron("15 2 * * *", tz=name)
    days = [at.astimezone(zone).date() for at in due_times(daily, FIRST, END)]
    assert len(days) == len(set(days))
    assert set(days) == {days[0] + timedelta(days=number) for number in range((days[-1] - days[0]).days + 1)}
    assert len(days) >= (END - FIRST).days - 1


def test_intervals_count_from_their_beginning() -> None:
    six_hours = interval(hours=6)
    assert six_hours.after(SINCE - timedelta(days=1), SINCE) == SINCE + timedelta(hours=6)
    assert six_hours.after(SINCE + timedelta(hours=6), SINCE) == SINCE + timedelta(hours=12)
    assert six_hours.after(SINCE + timedelta(hours=100), SINCE) == SINCE + timedelta(hours=102)
    assert interval(days=36_000).after(datetime(9999, 1, 1, tzinfo=UTC), SINCE) is None


@pytest.mark.parametrize(
    "recurrence",
    [cron("*/5 8-17 * JAN,FEB mon-fri", tz="America/Argentina/Buenos_Aires"), cron("0 0 L * *"), interval(hours=6),
     interval(seconds=1.5), interval(weeks=5000)],
    ids=str,
)  # fmt: skip
def test_a_recurrence_is_read_as_it_was_written(recurrence: Recurrence) -> None:
    assert recurrence_of(str(recurrence)) == recurrence


@pytest.mark.parametrize(
    ("expression", "tz", "text"),
    [
        ("0 0 30 2 *", "UTC", "cron expression '0 0 30 2 [*]' (never matches|is invalid)"),
        ("0 0 * 2 MON#5", "UTC", None),
        ("* * * * * *", "UTC", "6 fields, not 5. Seconds cannot be given"),
        ("@daily", "UTC", "1 fields, not 5"),
        ("61 * * * *", "UTC", "is invalid: Bad minute"),
        ("0 9 * *", "UTC", "4 fields"),
        ("*/0 * * * *", "UTC", "Bad minute"),
        ("0 9 * * " + "1," * 500, "UTC", "fields, not 5|has"),
        ("0 9 * * *", "Mars/Olympus", "there is no time zone 'Mars/Olympus'"),
        ("0 9 * * *", "../../etc/passwd", "there is no time zone"),
        ("0 9 * * *", "", "there is no time zone ''"),
        (9, "UTC", "give two texts"),
    ],
)
def test_expressions_that_mean_nothing_are_refused(expression: str, tz: str, text: str | None) -> None:
    if text is None:
        assert cron(expression, tz=tz).after(SINCE, SINCE) is not None
        return
    with pytest.raises(ConfigurationError, match=text):
        cron(expression, tz=tz)


@pytest.mark.parametrize("length", [{}, {"seconds": 0.5}, {"hours": -1}, {"weeks": 1e9}, {"days": float("nan")}])
def test_intervals_out_of_range_are_refused(length: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="interval"):
        interval(**length)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingExtra, match=r"pip install 'delayline\[cron\]'"):
        cron("0 9 * * *")
    assert interval(hours=1).after(SINCE, SINCE)
