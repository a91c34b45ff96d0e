"""How many messages the broker may send ahead of the handlers that are free: as many as they soon get to.

A message that waits here is out of other receivers' reach, and the time in which the broker wants an acknowledgement
(`consumer_timeout`) runs already.
"""

from __future__ import annotations

from typing import Final

MOST_AHEAD: Final = 2
"""How many messages at most for each that is handled at once."""
READ_AHEAD_TIME: Final = 0.5
"""Seconds in which handlers should get to a message that was sent ahead."""
FORGETTING: Final = 0.99
"""How much of the longest time is left after each further message: a hundred quick ones after a slow one count."""
SHORTEST: Final = 0.000_1


class ReadAhead:
    """Measures how long messages are handled. Times are seconds of the same monotonic clock."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._longest: float | None = None

    def begin(self, tag: int, now: float) -> None:
        """Note that a message is handled from now on."""
        self._began[tag] = now

    def end(self, tag: int, now: float) -> None:
        """Note that a message was handled; a no-op for a message that was not."""
        began = self._began.pop(tag, None)
        if began is not None:
            self._longest = max(now - began, SHORTEST, (self._longest or 0.0) * FORGETTING)

    def forget(self) -> None:
        """Forget the messages that are being handled, whose tags will name others."""
        self._began.clear()

    def number(self, at_once: int, now: float) -> int:
        """Return how many messages to have sent ahead of handlers for so many; none before the first was handled."""
        if self._longest is None:
            return 0
        oldest = next(iter(self._began.values()), now)
        return min(MOST_AHEAD * at_once, int(at_once * READ_AHEAD_TIME / max(self._longest, now - oldest)))
