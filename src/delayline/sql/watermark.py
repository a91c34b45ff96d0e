"""The watermark of a store's queries.

It lets queries for due messages skip index entries of messages that were dispatched before. A server removes
the index entries of deleted rows only when no older transaction is open. Until then every query at the head of the
index reads them all (50 000 of them cost 25 ms). Therefore queries start at a watermark. A message can be committed
below the watermark, if its transaction took longer than its delay, or if another process released its claim. Full
looks find such messages. They run beside the poller, on a separate connection, at most `FULL_LOOK_WITHIN` seconds
apart.

While an old transaction stays open for an hour, a full look from the beginning would read millions of entries. Where
the server tells which transactions are in progress, full looks therefore begin at the settled due time
(`SettledBound`). A later transaction can store a message below it only if that is overdue by more than `OVERDUE_WITHIN`
already and its notification is lost; a look from the beginning, which is repeated the later the longer it takes, finds
that message too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.errors import DelaylineError, NotStarted
from delayline.sql.settled_bound import SettledBound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

FULL_LOOK_EVERY: Final = 1.0  # seconds between full looks that cost little
FULL_LOOK_SHARE: Final = 20  # costlier looks pause for so many times as long as they take ...
FULL_LOOK_WITHIN: Final = 5.0  # ... but never longer: this bounds how late a message below the watermark is found
OVERDUE_WITHIN: Final = timedelta(seconds=15)


class DueQuery:
    """A look in progress, from `since` on; from the beginning, which is a full look too, if that is None."""

    __slots__ = ("began", "full", "lowest", "since", "stale")

    def __init__(self, since: datetime | None, began: float, *, full: bool) -> None:
        self.since: datetime | None = since
        self.began: float = began
        self.full: bool = full or since is None
        self.lowest: datetime | None = None
        """The earliest message stored meanwhile: the look may have missed it."""
        self.stale: bool = False
        """Whether a message with an unknown due time was stored meanwhile."""


class Seen(NamedTuple):
    """What a full look has seen, on a server that tells which transactions are in progress."""

    earliest: datetime | None
    """The earliest due time from the look's beginning on, of messages that are claimed too; None without a message."""
    now: datetime
    oldest: int
    """The oldest transaction in progress."""
    following: int
    """The number that the next transaction gets."""


class Watermark:
    """The due time before which this process expects no message. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: datetime | None = None
        self._settled: SettledBound[datetime] = SettledBound()
        self._looks: set[DueQuery] = set()
        self._looked_at = 0.0
        self._pause = FULL_LOOK_EVERY

    @property
    def pause(self) -> float:
        """Seconds to wait before the next full look."""
        return self._pause

    @property
    def is_unchecked(self) -> bool:
        """Whether the last full look is longer ago than its pause."""
        return time.monotonic() - self._looked_at >= self._pause

    def begin(self, *, full: bool = False) -> DueQuery:
        """Begin a look, which must be ended or abandoned. Without a watermark it is a full look, too."""
        with self._lock:
            settled = None if self._settled.begins_anew else self._settled.bound
            look = DueQuery(settled if full else self._since, time.monotonic(), full=full)
            self._looks.add(look)
            return look

    def end(self, look: DueQuery, reached: datetime | None = None, seen: Seen | None = None) -> None:
        """End a look; `reached` is the due time before which it left nothing that is not claimed by others."""
        with self._lock:
            self._looks.discard(look)
            if look.stale:
                return
            if seen is not None:
                self._settle(look, seen)
            if look.full:
                self._looked_at = time.monotonic()
                cost = FULL_LOOK_SHARE * (self._looked_at - look.began)
                self._pause = min(FULL_LOOK_WITHIN, max(FULL_LOOK_EVERY, cost))
            if reached is not None:
                self._since = reached if look.lowest is None else min(reached, look.lowest)

    def _settle(self, look: DueQuery, seen: Seen) -> None:
        """Note what a full look has seen."""
        if look.since is None:
            self._settled.began_anew(look.began)
        lowest = min((due for due in (seen.earliest, look.lowest) if due is not None), default=None)
        proposed = seen.now - OVERDUE_WITHIN
        self._settled.look(seen.oldest, seen.following, lowest, proposed if lowest is None else min(proposed, lowest))

    def abandon(self, look: DueQuery) -> None:
        """End a look that failed."""
        with self._lock:
            self._looks.discard(look)

    def lower(self, due: datetime) -> bool:
        """Lower the watermark to a message stored with that due time; return whether it was above it."""
        with self._lock:
            for look in self._looks:
                look.lowest = due if look.lowest is None else min(due, look.lowest)
            self._settled.lower(due)
            if self._since is None or due >= self._since:
                return False
            self._since = due
            return True

    def forget(self) -> None:
        """Make the next look full: a message was stored, and its due time is unknown."""
        with self._lock:
            self._since = None
            self._settled.forget()
            for look in self._looks:
                look.stale = True


class FullLooks:
    """A task that takes a full look after others, so that messages below the watermark are found.

    `look` returns the earliest due time below the watermark, or None; `found` is called with it.
    """

    def __init__(
        self, watermark: Watermark, look: Callable[[], Awaitable[datetime | None]], found: Callable[[datetime], None]
    ) -> None:
        self._watermark = watermark
        self._look = look
        self._found = found
        self._scheduled = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="delayline full looks")

    def schedule(self) -> None:
        """Schedule a full look: a look from the watermark on has ended."""
        self._scheduled.set()

    def stop(self) -> None:
        """End the task. Idempotent."""
        self._task.cancel()

    async def _run(self) -> None:
        with contextlib.suppress(NotStarted):  # closed meanwhile
            while True:
                await self._scheduled.wait()
                await asyncio.sleep(self._watermark.pause)
                self._scheduled.clear()
                due = await self._look_once()
                if due is not None:
                    self._found(due)

    async def _look_once(self) -> datetime | None:
        try:
            return await self._look()
        except NotStarted:
            raise
        except DelaylineError:  # the poller finds and reports the same fault
            self._scheduled.set()
            return None
