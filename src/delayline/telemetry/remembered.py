"""What an endpoint's back end is asked for now and then, and remembered in between: no scrape waits for it for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from delayline.telemetry.measurements import Measurements

#: Seconds for which an answer is used again: several scrapers, and an eager scraper, cost no more.
USABLE_FOR: Final = 10.0
#: ... and how many times as long as the answer took: a twentieth of the time at most goes into asking.
USABLE_FOR_SHARES: Final = 19.0
#: Seconds that a reader waits for new answers; after that it gets the last ones.
READER_PATIENCE: Final = 1.0
#: Seconds until a question is given up.
ANSWER_PATIENCE: Final = 10.0

Answer = TypeVar("Answer")
Question = Callable[[], "Awaitable[Answer]"]


class Remembered(Generic[Answer]):
    """An answer that is asked for on an endpoint's event loop; reading it never waits, and may be in any thread.

    Args:
        measurements: The measurements of the endpoint.
        question: Returns what asks the back end; None where that is impossible.
    """

    def __init__(self, measurements: Measurements, question: Callable[[], Question[Answer] | None]) -> None:
        self._measurements = measurements
        self._question = question
        self._lock = threading.Lock()
        self._asking: futures.Future[None] | None = None
        self._last: tuple[Answer, float] | None = None
        self._ask_again_at = float("-inf")

    def read(self) -> tuple[Answer, float] | None:
        """Return the last answer and its age in seconds; None if there was none."""
        if self._last is None:
            return None
        answer, at = self._last
        return answer, time.monotonic() - at

    def ask(self) -> futures.Future[None] | None:
        """Begin to ask if the answer is old, unless that is going on or impossible; return what can be waited for."""
        loop = self._measurements.loop
        if loop is None or time.monotonic() < self._ask_again_at:
            return None
        with self._lock:
            if (self._asking is None or self._asking.done()) and (question := self._question()) is not None:
                answering = self._ask(question)
                try:
                    self._asking = asyncio.run_coroutine_threadsafe(answering, loop)
                except RuntimeError:  # the loop is closed
                    answering.close()
            return self._asking

    async def _ask(self, question: Question[Answer]) -> None:
        asked = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_PATIENCE):
                answer = await question()
            self._last = answer, time.monotonic()
        finally:
            now = time.monotonic()
            self._ask_again_at = now + max(USABLE_FOR, USABLE_FOR_SHARES * (now - asked))


def wait_for(asked: Sequence[futures.Future[None] | None], measurements: Measurements) -> None:
    """Wait for answers of an endpoint for a second at most; not at all on its event loop."""
    try:
        here = asyncio.get_running_loop() is measurements.loop
    except RuntimeError:
        here = False
    waiting = [future for future in asked if future is not None]
    if waiting and not here:
        futures.wait(waiting, READER_PATIENCE)
