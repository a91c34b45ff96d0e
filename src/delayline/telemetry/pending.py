"""Numbers of pending messages, counted now and then and remembered in between."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.delayed.store import SupportsDueForecast

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from delayline.clock import Clock
    from delayline.telemetry.measurements import Measurements

#: The ends of the buckets, from the present time on; the last bucket has none.
ENDS: Final = {"1m": timedelta(minutes=1), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
BUCKETS: Final = ("overdue", *ENDS, "later")
#: Seconds for which numbers are used again: several scrapers, and an eager scraper, cost no more.
COUNT_USABLE_FOR: Final = 10.0
#: Seconds that a reader waits for new numbers; after that it gets the last numbers.
READER_PATIENCE: Final = 1.0
#: Seconds until a count is given up.
COUNT_PATIENCE: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pending:
    """Pending messages by due bucket: `overdue`, within `1m`, `1h`, `1d`, or `later`."""

    numbers: Mapping[str, int]
    """How many, by bucket."""
    estimated: frozenset[str]
    """The buckets whose number is an estimate."""
    oldest_overdue: float
    """Seconds since the earliest due time; 0 if it is not past."""
    age: float
    """Seconds since this was counted."""


class PendingCounts:
    """Counts an endpoint's pending messages on its event loop; reading never waits for long.

    Args:
        measurements: The measurements of the endpoint.
    """

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements
        self._lock = threading.Lock()
        self._counting: Future[None] | None = None
        self._last: Pending | None = None
        self._counted_at = float("-inf")

    def read(self) -> Pending | None:
        """Return the numbers; None if they were never counted: the store cannot, or is not available.

        May be called from any thread. On the event loop it does not wait, and returns the numbers counted before.
        """
        if time.monotonic() - self._counted_at >= COUNT_USABLE_FOR:
            counting = self._begin()
            if counting is not None and not self._runs_here():
                with contextlib.suppress(Exception):
                    counting.result(READER_PATIENCE)
        last = self._last
        return None if last is None else replace(last, age=time.monotonic() - self._counted_at)

    def _runs_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._measurements.loop
        except RuntimeError:
            return False

    def _begin(self) -> Future[None] | None:
        """Begin to count, unless that is going on or impossible."""
        endpoint, loop = self._measurements.endpoint, self._measurements.loop
        if endpoint is None or loop is None or not isinstance(endpoint.store, SupportsDueForecast):
            return None
        with self._lock:
            if self._counting is None or self._counting.done():
                counting = self._count(endpoint.store, endpoint.clock)
                try:
                    self._counting = asyncio.run_coroutine_threadsafe(counting, loop)
                except RuntimeError:  # the loop is closed
                    counting.close()
            return self._counting

    async def _count(self, store: SupportsDueForecast, clock: Clock) -> None:
        now = clock.now()
        async with asyncio.timeout(COUNT_PATIENCE):
            forecast = await store.due_forecast([now, *(now + end for end in ENDS.values())])
        named = dict(zip(BUCKETS, forecast.buckets, strict=True))
        overdue = 0.0 if forecast.earliest is None else (now - forecast.earliest).total_seconds()
        self._last = Pending(
            {name: bucket.count for name, bucket in named.items()},
            frozenset(name for name, bucket in named.items() if not bucket.exact),
            max(0.0, overdue),
            0.0,
        )
        self._counted_at = time.monotonic()
