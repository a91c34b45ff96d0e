"""A clock that moves when the test says so."""

from __future__ import annotations

import asyncio
import heapq
from datetime import UTC, datetime, timedelta
from itertools import count


class ManualClock:
    """A Clock for tests: `now()` stands still and `sleep()` waits until `advance` has moved time far enough."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._sleepers: list[tuple[datetime, int, asyncio.Event]] = []
        self._order = count()

    def now(self) -> datetime:
        """Return the instant the test has set."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return once time was advanced by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self._now + timedelta(seconds=seconds), next(self._order), woken))
        await woken.wait()
