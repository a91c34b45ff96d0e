"""A clock that only the test moves."""

from __future__ import annotations

import asyncio
import heapq
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

Result = TypeVar("Result")

NO_TIME: Final = timedelta(0)
TURNS: Final = 100


class ManualClock:
    """A Clock for tests: `now()` stands still and `sleep()` waits until `advance` has moved time far enough.

    Like a machine's, it has two hands: sleeps follow elapsed time, which only grows; `now()` can also be `set`.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = _aware(start)
        self._elapsed = NO_TIME
        self._sleepers: list[tuple[timedelta, int, asyncio.Event]] = []
        self._order = count()
        self._slept = asyncio.Event()

    def now(self) -> datetime:
        """Return the instant the test has set."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return once time was advanced by `seconds`."""
        wait = timedelta(seconds=seconds)
        if wait <= NO_TIME:
            await asyncio.sleep(0)
            return
        sleeper = (self._elapsed + wait, next(self._order), asyncio.Event())
        heapq.heappush(self._sleepers, sleeper)
        self._slept.set()
        try:
            await sleeper[2].wait()
        except asyncio.CancelledError:
            self._sleepers = [waiting for waiting in self._sleepers if waiting is not sleeper]
            heapq.heapify(self._sleepers)
            raise

    async def advance(self, delta: timedelta | float) -> None:
        """Move time on; each sleeper wakes at its own instant and may sleep again.

        Args:
            delta: A timedelta, or seconds.
        """
        step = delta if isinstance(delta, timedelta) else timedelta(seconds=delta)
        if step < NO_TIME:
            raise ValueError(f"time cannot be advanced by {step}: step the wall clock back with set()")
        await settle()
        end = self._elapsed + step
        while self._sleepers and self._sleepers[0][0] <= end:
            await self._wake_next()
        self._move_to(end)
        await settle()

    async def run_until(
        self, done: Coroutine[None, None, Result], *, quiet: Callable[[], Awaitable[None]] | None = None
    ) -> Result:
        """Wake sleeper after sleeper, each at its instant, until `done` has finished; return its result.

        Waits, without moving time, while there is no sleeper.

        Args:
            done: The coroutine to finish; give it a timeout.
            quiet: Returns once no thread works on something that may sleep, as `FaultyStore.quiet` does.
        """
        task = asyncio.ensure_future(done)
        try:
            while not task.done():
                await settle()
                if quiet is not None:
                    await quiet()
                if task.done():
                    break
                if self._sleepers:
                    await self._wake_next()
                else:
                    self._slept.clear()
                    sleeper = asyncio.ensure_future(self._slept.wait())
                    await asyncio.wait({task, sleeper}, return_when=asyncio.FIRST_COMPLETED)
                    sleeper.cancel()
            return await task
        finally:
            task.cancel()

    def set(self, instant: datetime) -> None:
        """Set the wall clock, forwards or backwards, as an administrator would; wakes no sleeper.

        Args:
            instant: The time that `now()` returns.
        """
        self._now = _aware(instant)

    async def _wake_next(self) -> None:
        at, _, woken = heapq.heappop(self._sleepers)
        self._move_to(at)
        woken.set()
        await settle()

    def _move_to(self, elapsed: timedelta) -> None:
        self._now += elapsed - self._elapsed
        self._elapsed = elapsed


async def settle() -> None:
    """Let every task that can run without waiting for a thread or a server do so."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _aware(instant: datetime) -> datetime:
    if instant.utcoffset() is None:
        raise ValueError(f"{instant!r} has no time zone: add tzinfo=UTC")
    return instant.astimezone(UTC)
