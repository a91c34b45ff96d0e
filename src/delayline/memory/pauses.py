"""What is paused in the store in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.delayed.pauses import DispatchPause, Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from delayline.message import DelayedMessage


class MemoryDispatchPauses:
    """Pauses in memory.

    Args:
        overdue: Returns the messages due by a time, in order, for a destination or, for None, of all that are not
            paused.
        moved: Gives messages a new due time.
        resumed: Called when messages may leave that were paused.
        next_due: Returns the earliest due time of what is not paused by destination.
    """

    def __init__(
        self,
        overdue: Callable[[datetime, str | None], Sequence[DelayedMessage]],
        moved: Callable[[Sequence[DelayedMessage], datetime], None],
        resumed: Callable[[], None],
        next_due: Callable[[], Awaitable[datetime | None]],
    ) -> None:
        self._overdue = overdue
        self._moved = moved
        self._resumed = resumed
        self._next_due = next_due
        self._since: dict[str | None, datetime] = {}
        self._seen: frozenset[str | None] = frozenset()

    async def all(self) -> Sequence[DispatchPause]:
        """Return the pauses: that of the whole endpoint first, then by destination."""
        return [DispatchPause(name, self._since[name]) for name in sorted(self._since, key=lambda name: name or "")]

    async def pause(self, destination: str | None, at: datetime) -> bool:
        """Dispatch no more messages for the destination, or of the endpoint."""
        if destination in self._since:
            return False
        self._since[destination] = at
        return True

    async def resume(self, destination: str | None, at: datetime, rate: float | None = None) -> bool:
        """Dispatch them again, those that are overdue at a bounded rate if one is given."""
        slots = None if rate is None else Slots(at, rate)
        if destination not in self._since:
            return False
        if slots is not None:
            overdue = self._overdue(at, destination)
            for first in range(0, len(overdue), slots.size):
                self._moved(overdue[first : first + slots.size], slots.next())
        del self._since[destination]
        self._resumed()
        return True

    async def earliest(self) -> datetime | None:
        """Return the earliest due time of what is not paused."""
        return None if self.is_whole else await self._next_due()

    async def look(self) -> bool:
        """Return whether the pauses have changed since the last look."""
        seen, self._seen = self._seen, frozenset(self._since)
        return seen != self._seen

    @property
    def is_any(self) -> bool:
        """Whether anything is paused."""
        return bool(self._since)

    @property
    def is_whole(self) -> bool:
        """Whether the whole endpoint is paused."""
        return None in self._since

    def holds(self, destination: str) -> bool:
        """Return whether messages for that destination are paused."""
        return destination in self._since
