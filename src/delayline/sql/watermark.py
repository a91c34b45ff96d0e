"""From where on to look for due messages: what lies before has been dispatched, and its index entries are still there.

A server cleans up behind deleted rows only when no older transaction is open anywhere; until then every look at the
head of the index steps over all of them (50 000 of them cost 25 ms a look). So looks begin where the last one ended.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime

FULL_LOOK_EVERY: Final = 1.0  # seconds, at least: what others stored with an earlier due time is found by then
FULL_LOOK_SHARE: Final = 20  # and so many times as long as a full look takes


class Watermark:
    """The due time before which nothing waits, as far as this process knows. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: datetime | None = None
        self._full_look_at = 0.0

    def since(self) -> datetime | None:
        """Return where to begin; None for the very beginning, which is due again from time to time."""
        with self._lock:
            return None if time.monotonic() >= self._full_look_at else self._since

    def looked(self, seconds: float) -> None:
        """Note how long a look from the very beginning took."""
        with self._lock:
            self._full_look_at = time.monotonic() + max(FULL_LOOK_EVERY, FULL_LOOK_SHARE * seconds)

    def reached(self, due: datetime) -> None:
        """Know that everything due before has been dispatched or is in somebody's hands."""
        with self._lock:
            self._since = due

    def lower(self, due: datetime) -> None:
        """Know that something due then was stored."""
        with self._lock:
            if self._since is not None and due < self._since:
                self._since = due

    def forget(self) -> None:
        """Know that something was stored, but not when it is due: look from the very beginning."""
        with self._lock:
            self._since, self._full_look_at = None, 0.0
