"""Live parts of pages: fragments of HTML as server-sent events, read once for all browsers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delayline.clock import Clock

T = TypeVar("T")

EVERY: Final = 2.0
"""Seconds between updates."""
MOST_STREAMS: Final = 50
"""Browsers that are updated at once; others show the page without."""


class Shared(Generic[T]):
    """A value that is read at most once in a while, however many ask for it at the same time.

    Args:
        read: Returns the value.
        seconds: How old a value may be.
        clock: What its age is measured with.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], seconds: float, clock: Clock) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._reading: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def __call__(self) -> T:
        """Return the value: just read, or of the reading that goes on."""
        task = self._reading
        if task is None or (task.done() and self._clock.now().timestamp() - self._ended >= self._seconds):
            task = self._reading = asyncio.create_task(self._once())
        # A browser that disconnects must not cancel the reading for the others.
        return await asyncio.shield(task)

    async def _once(self) -> T:
        try:
            return await self._read()
        finally:
            self._ended = self._clock.now().timestamp()


def event(text: str) -> str:
    """Return the text as a server-sent event."""
    return "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"


async def updates(fragment: Callable[[], Awaitable[str]], clock: Clock) -> AsyncIterator[str]:
    """Yield the fragment as an event whenever it may have changed."""
    while True:
        yield event(await fragment())
        await clock.sleep(EVERY)
