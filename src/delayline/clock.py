"""The only place that reads the time: everything else asks a Clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ONE_MICROSECOND = timedelta(microseconds=1)
ONE_SECOND = timedelta(seconds=1)
ONE_MINUTE = timedelta(minutes=1)
ONE_HOUR = timedelta(hours=1)
ONE_DAY = timedelta(days=1)
LATEST_TIME = datetime.max.replace(tzinfo=UTC)


class Clock(Protocol):
    """The time, and sleeping; tests pass a `delayline.testing.ManualClock`."""

    def now(self) -> datetime:
        """Return the current instant as an aware UTC datetime."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after a time; cancellable.

        Args:
            seconds: The time; zero or less returns at once.
        """
        ...


@runtime_checkable
class BoundedClock(Clock, Protocol):
    """A clock that is not read exactly, as a server's far away; its `now` is the earliest that the time can be."""

    def at_latest(self) -> datetime:
        """Return the upper bound of the present time: a delay is added to it, so that its end is never early."""
        ...


def latest_of(clock: Clock) -> Callable[[], datetime]:
    """Return how to ask the clock for the latest that the time can be."""
    return clock.at_latest if isinstance(clock, BoundedClock) else clock.now


class SystemClock:
    """The wall clock of this machine; its sleeps follow the monotonic clock."""

    def now(self) -> datetime:
        """Return the wall clock's UTC time."""
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(max(0.0, seconds))


def to_microseconds(instant: datetime) -> int:
    """Return whole microseconds since 1970 UTC: exact, unlike `datetime.timestamp()`."""
    since = instant - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def from_microseconds(microseconds: int) -> datetime:
    """Return the aware UTC datetime that many microseconds after 1970."""
    return EPOCH + timedelta(microseconds=microseconds)
