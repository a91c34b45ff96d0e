"""Destinations of delayed sends: looked for when they are sent to, so that no misspelt one is found weeks later."""

from __future__ import annotations

import asyncio
import difflib
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.errors import DelaylineError, QueueNotFound
from delayline.transport import SupportsQueueLookup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.transport import Transport

#: A send waits no longer for the answer; without one the message is stored unchecked.
PATIENCE: Final = 2.0  # seconds
UNCHECKED_FOR: Final = timedelta(minutes=1)
#: For so long a queue that is missing is not asked for again, as in a file with thousands of lines for it.
MISSING_FOR: Final = timedelta(seconds=1)
MOST_MISSING: Final = 1000
MOST_COMPARED: Final = 10_000
SIMILAR: Final = 2


class Destinations:
    """The queues that were found once; a further send to one of them asks nothing. Belongs to one event loop."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._found: set[str] = set()
        self._missing: dict[str, tuple[datetime, Sequence[str]]] = {}
        self._unchecked_until: datetime | None = None
        self._asking = asyncio.Lock()

    def needs_check(self, queue: str) -> bool:
        """Return whether `check` asks the transport."""
        return queue not in self._found and isinstance(self._transport, SupportsQueueLookup)

    async def check(self, queue: str) -> None:
        """Raise QueueNotFound for a queue that does not exist; pass where the transport cannot say so now."""
        if queue in self._found or not isinstance(self._transport, SupportsQueueLookup):
            return
        async with self._asking:  # many sends at once to one queue ask once
            if queue not in self._found:
                await self._ask(self._transport, queue)

    async def _ask(self, transport: SupportsQueueLookup, queue: str) -> None:
        now = self._clock.now()
        if self._unchecked_until is not None and now < self._unchecked_until:
            return
        until, similar = self._missing.pop(queue, (now, ()))
        if until <= now:
            try:
                async with asyncio.timeout(PATIENCE):
                    there = await transport.has_queue(queue)
            except (DelaylineError, TimeoutError):  # the message can be stored all the same
                self._unchecked_until = self._clock.now() + UNCHECKED_FOR
                return
            if there:
                self._found.add(queue)
                return
            until, similar = self._clock.now() + MISSING_FOR, await _similar(transport, queue)
        if len(self._missing) < MOST_MISSING:
            self._missing[queue] = until, similar
        unless = ", or pass check_destination=False where it will exist in time"
        raise QueueNotFound(queue, similar=similar, unless=unless)


async def _similar(transport: SupportsQueueLookup, queue: str) -> list[str]:
    try:
        async with asyncio.timeout(PATIENCE):
            names = await transport.queues()
    except (DelaylineError, TimeoutError):
        return []
    return difflib.get_close_matches(queue, list(names)[:MOST_COMPARED], n=SIMILAR)
