"""The rule by which queries over due times and over row numbers skip what is gone: the settled bound.

A row below a bound that was seen to be empty may still appear: its transaction was in progress, and the row not
visible. It cannot any more once every transaction has ended that was in progress then, so only then the bound is
settled. Queries begin at the settled bound. They begin anew, at the beginning, now and then: a failover, a lost
notification or a server that does not tell which transactions are in progress can leave a row below the bound all the
same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from datetime import datetime

BEGINNING_EVERY: Final = 10.0  # seconds between queries from the beginning; after a costly one it is longer ...
BEGINNING_SHARE: Final = 50  # ... so many times as long as it took
Bound = TypeVar("Bound", "datetime", int)


class SettledBound(Generic[Bound]):
    """The due time or number below which no row is, nor can appear. Not safe to call from several threads.

    Args:
        every: Seconds between two queries from the beginning, at least.
    """

    def __init__(self, every: float = BEGINNING_EVERY) -> None:
        self.bound: Bound | None = None
        self._next: tuple[Bound, float] | None = None
        """A bound that is settled once all transactions before this number have ended, and no row is below it."""
        self._every = every
        self._beginning_at = time.monotonic() + every

    @property
    def begins_anew(self) -> bool:
        """Whether the next query should begin at the beginning."""
        return time.monotonic() >= self._beginning_at

    def began_anew(self, since: float) -> None:
        """Note that a query from the beginning, which began at that monotonic time, has ended."""
        ended = time.monotonic()
        self._beginning_at = ended + max(self._every, BEGINNING_SHARE * (ended - since))

    def look(self, oldest: float, following: float, lowest: Bound | None, proposed: Bound) -> None:
        """Note what a query from the bound on has seen, and settle the bound that was proposed by an earlier one.

        Args:
            oldest: The oldest transaction in progress, or the time it began.
            following: The number that the next transaction gets.
            lowest: The highest bound that no row of the query is below; None without rows.
            proposed: The bound to settle next.
        """
        if self._next is not None:
            bound, before = self._next
            if oldest < before:
                return
            self.bound = bound if lowest is None else min(bound, lowest)
        self._next = proposed, following

    def lower(self, bound: Bound) -> None:
        """Lower it: a row is there."""
        if self.bound is not None:
            self.bound = min(self.bound, bound)
        if self._next is not None:
            self._next = min(self._next[0], bound), self._next[1]

    def forget(self) -> None:
        """Begin anew: where rows are is unknown."""
        self.bound = self._next = None
