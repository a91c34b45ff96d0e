"""The server's clock, told here between looks at it: the clocks of the machines around it do not matter."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

STALE_AFTER: Final = 30.0  # seconds; a quartz is off by a few parts in a million
#: Counts on while the machine sleeps, unlike the monotonic clock; nobody can set it.
STEADY: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ServerClock:
    """Goes on from what the server last said, by a clock that nobody can set.

    It is late by the time that an answer travels, never early. Until the server has said something it is this
    machine's clock.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._heard: tuple[datetime, float] | None = None  # replaced as a whole: any thread may read it meanwhile

    def now(self) -> datetime:
        """Return the server's time. Never blocks: a stale answer is used once more, and a new one asked for."""
        if self._heard is None:
            return SystemClock().now()
        said, at = self._heard
        since = time.clock_gettime(STEADY) - at
        if since > STALE_AFTER:
            self._ask()
        return said + timedelta(seconds=since)

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(max(0.0, seconds))

    def hear(self, said: datetime) -> None:
        """Learn the server's time from an answer that has just come."""
        self._heard = said, time.clock_gettime(STEADY)
