"""The server's clock, estimated between its answers: the clocks of the machines around it do not matter."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.clock import EPOCH, ONE_MICROSECOND, SystemClock, to_microseconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

BOUNDS_STALE_AFTER: Final = 5.0  # seconds after which another answer is asked for
ASK_AGAIN_AFTER: Final = 1.0  # seconds, while none has come
#: How far two clocks may drift apart: NTP slews a clock by 500 parts in a million at most.
DRIFT: Final = 500e-6
#: Counts on while the machine sleeps, unlike the monotonic clock, and cannot be set.
STEADY: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class _Bounds(NamedTuple):
    """The server's time minus the steady clock's, in microseconds: between `low` and `high` at the instant `at`."""

    low: int
    high: int
    at: int

    def drift(self, now: int) -> int:
        """Return how far the two clocks may have drifted apart by a later instant."""
        return int((now - self.at) * DRIFT)

    def aged(self, now: int) -> _Bounds:
        """Return the bounds at a later instant, widened by the clocks' drift."""
        drifted = self.drift(now)
        return _Bounds(self.low - drifted, self.high + drifted, now)


class ServerClock:
    """Bounds the server's time from both sides, by a clock that cannot be set.

    The server reads its clock at some moment between request and answer, so an answer bounds the difference of the
    two clocks: the slower, the wider. Bounds are intersected, so that a slow answer does not widen the bounds of a fast
    answer, and are widened with age. Bounds that exclude each other mean that the server's clock was set: the new ones
    count. Before the first answer it is this machine's clock.

    Args:
        tick: the resolution of the server's clock.
    """

    def __init__(self, ask: Callable[[], None], tick: timedelta = ONE_MICROSECOND) -> None:
        self._ask = ask
        self._tick = tick // ONE_MICROSECOND
        self._lock = threading.Lock()
        self._bounds: _Bounds | None = None  # replaced as a whole: any thread may read it meanwhile
        self._requested = 0
        self._asked_at = 0

    def now(self) -> datetime:
        """Return the earliest that the server's time can be. Never blocks; a stale estimate is asked for anew."""
        now, bounds = steady(), self._bounds
        if bounds is None:
            return SystemClock().now()
        if now - bounds.at > BOUNDS_STALE_AFTER * 1_000_000:
            self._ask_again(now)
        return EPOCH + timedelta(microseconds=now + bounds.low - bounds.drift(now))

    def at_latest(self) -> datetime:
        """Return the latest that the server's time can be: a delay is added to this."""
        now, bounds = steady(), self._bounds
        if bounds is None:
            return SystemClock().now()
        if now - bounds.at > BOUNDS_STALE_AFTER * 1_000_000:
            self._ask_again(now)
        return EPOCH + timedelta(microseconds=now + bounds.high + bounds.drift(now))

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(max(0.0, seconds))

    def answered(self, answer: datetime, requested: int) -> None:
        """Update the bounds from an answer that has just arrived.

        Args:
            answer: the server's time in its answer.
            requested: the value of `steady()` before the request.
        """
        now, answered_at = steady(), to_microseconds(answer)
        sample = _Bounds(answered_at - now - 1, answered_at - requested + self._tick, now)
        with self._lock:
            if self._bounds is None:
                self._bounds = sample
            else:
                old = self._bounds.aged(now)
                if sample.low <= old.high and old.low <= sample.high:
                    self._bounds = _Bounds(max(sample.low, old.low), min(sample.high, old.high), now)
                elif requested >= self._requested:  # an older answer may come last, from before the clock was set
                    self._bounds = sample
            self._requested = max(self._requested, requested)

    def _ask_again(self, now: int) -> None:
        if now - self._asked_at > ASK_AGAIN_AFTER * 1_000_000:
            self._asked_at = now
            self._ask()


def steady() -> int:
    """Return the steady clock's time in microseconds."""
    return time.clock_gettime_ns(STEADY) // 1000
