"""When recurring messages are due: by a cron expression in a time zone, or at a fixed interval.

A cron expression names local times. A local time that daylight saving skips is taken for the first instant after the
gap, a repeated local time for the first of the two: each is due once. Intervals are elapsed time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from delayline.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from cronsim import CronSim

FIELDS: Final = 5
LONGEST_EXPRESSION: Final = 250
SHORTEST_INTERVAL: Final = timedelta(seconds=1)
LONGEST_INTERVAL: Final = timedelta(days=36_525)
ONE_SECOND: Final = timedelta(seconds=1)
#: How an interval is written.
EVERY: Final = re.compile(r"every (\d{1,10}(?:\.\d{1,6})?) s")
#: 2024-01-01, a leap year: where the search for a first match of an expression begins.
A_TIME: Final = datetime(2024, 1, 1)  # noqa: DTZ001 - a local time
REMEDY: Final = "Write minute, hour, day of the month, month and day of the week, as in '0 9 * * MON-FRI'"


class Recurrence(Protocol):
    """When a schedule's occurrences are due; `str` writes it, and `recurrence_of` reads that."""

    def after(self, instant: datetime, since: datetime) -> datetime | None:
        """Return the first occurrence after an instant, in UTC; None for none before year 9999.

        Args:
            instant: The instant.
            since: When the schedule began, which intervals count from.
        """
        ...


@dataclass(frozen=True, slots=True)
class Interval:
    """Occurrences at a fixed interval."""

    length: timedelta

    def after(self, instant: datetime, since: datetime) -> datetime | None:
        """Return the first multiple of the interval since the beginning that is after the instant."""
        try:
            return max(since + self.length, since + ((instant - since) // self.length + 1) * self.length)
        except OverflowError:
            return None

    def __str__(self) -> str:
        return f"every {self.length.total_seconds():.6f}".rstrip("0").rstrip(".") + " s"


@dataclass(frozen=True, slots=True)
class Cron:
    """Occurrences at the local times of a cron expression in a time zone."""

    expression: str
    zone: str

    def after(self, instant: datetime, since: datetime) -> datetime | None:
        """Return the first occurrence after the instant."""
        del since
        zone = zone_of(self.zone)
        try:
            for local in parsed(self.expression, instant.astimezone(zone).replace(tzinfo=None)):
                due = instant_of(local, zone)
                if due > instant:
                    return due
        except OverflowError:
            pass
        return None

    def __str__(self) -> str:
        return f"{self.expression} {self.zone}"


def cron(expression: str, *, tz: str = "UTC") -> Cron:
    """Return the recurrence of a cron expression.

    A local time that daylight saving skips runs at the first instant after the gap; a repeated one runs once, the first
    time.

    Args:
        expression: Minute, hour, day of the month, month and day of the week, as in `0 9 * * MON-FRI`.
        tz: The time zone of these times, a name of the tz database.

    Returns:
        The recurrence, for `Endpoint.every`.

    Raises:
        ConfigurationError: The expression or the zone is invalid, or no time matches the expression.
        MissingExtra: The extra `cron` is not installed.
    """
    if not isinstance(expression, str) or not isinstance(tz, str):
        raise ConfigurationError(f"cron({expression!r}, tz={tz!r}): give two texts. {REMEDY}")
    words = expression.upper().split()
    if len(expression) > LONGEST_EXPRESSION or len(words) != FIELDS:
        cut = expression if len(expression) <= LONGEST_EXPRESSION else expression[:40] + "..."
        seconds = " Seconds cannot be given: use interval(seconds=...)." if len(words) == FIELDS + 1 else ""
        raise ConfigurationError(f"cron expression {cut!r} has {len(words)} fields, not {FIELDS}.{seconds} {REMEDY}")
    zone_of(tz)
    recurrence = Cron(" ".join(words), tz)
    if next(parsed(recurrence.expression, A_TIME), None) is None:
        raise ConfigurationError(f"cron expression {expression!r} never matches: no such day comes. {REMEDY}")
    return recurrence


def interval(
    *, weeks: float = 0, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
) -> Interval:
    """Return the recurrence of a fixed interval, in elapsed time, counted from when the schedule is first declared.

    Args:
        weeks: Weeks of the interval.
        days: Days of 24 hours.
        hours: Hours.
        minutes: Minutes.
        seconds: Seconds; the interval is a second to a hundred years.

    Returns:
        The recurrence, for `Endpoint.every`.

    Raises:
        ConfigurationError: The interval is out of range.
    """
    try:
        length = timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigurationError(f"interval(...) cannot be that long, or not a number: {error}") from error
    if not SHORTEST_INTERVAL <= length <= LONGEST_INTERVAL:
        raise ConfigurationError(f"an interval must be a second to a hundred years, not {length}")
    return Interval(length)


def recurrence_of(text: str) -> Recurrence:
    """Return the recurrence that `str` has written. Raises ConfigurationError or MissingExtra."""
    if (match := EVERY.fullmatch(text)) is not None:
        return interval(seconds=float(match[1]))
    expression, _, zone = text.rpartition(" ")
    return cron(expression, tz=zone)


def parsed(expression: str, after: datetime) -> CronSim:
    """Return an iterator over the local times after `after` that match. Raises ConfigurationError or MissingExtra."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise MissingExtra("cron", "a cron expression") from error
    try:
        return CronSim(expression, after)
    except CronSimError as error:
        raise ConfigurationError(f"cron expression {expression!r} is invalid: {error}. {REMEDY}") from error


@lru_cache(maxsize=128)
def zone_of(name: str) -> ZoneInfo:
    """Return the time zone. Raises ConfigurationError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"there is no time zone {name!r}: use a name of the tz database, as in 'Europe/Berlin'. Where this machine "
            "has none of them, run: pip install tzdata"
        ) from error


def instant_of(local: datetime, zone: ZoneInfo) -> datetime:
    """Return the instant of a local time: the first of two, or, where it is skipped, the first after the gap."""
    earlier = local.replace(tzinfo=zone, fold=0)
    instant = earlier.astimezone(UTC)
    if instant.astimezone(zone).replace(tzinfo=None) == local:
        return instant
    # The gap ends between the two instants that the offsets before and after it make of the local time.
    before = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    offset = before.astimezone(zone).utcoffset()
    while instant - before > ONE_SECOND:
        middle = before + (instant - before) // 2
        middle = middle.replace(microsecond=0) if middle.replace(microsecond=0) > before else middle
        if middle.astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            instant = middle
    return instant
