"""Who in this process waits to be told that something was committed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Listeners:
    """Callbacks by channel, each called on the event loop that was running when it was added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_channel: dict[str, list[tuple[asyncio.AbstractEventLoop, Callable[[int], None]]]] = {}

    def add(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running event loop whenever `channel` is told; return how to stop."""
        entry = (asyncio.get_running_loop(), callback)
        with self._lock:
            self._by_channel.setdefault(channel, []).append(entry)

        def remove() -> None:
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._by_channel[channel].remove(entry)

        return remove

    @property
    def channels(self) -> set[str]:
        """Every channel with a listener so far."""
        with self._lock:
            return set(self._by_channel)

    def tell(self, channel: str, at: int) -> None:
        """Call everybody who listens to the channel."""
        for loop, callback in list(self._by_channel.get(channel, ())):
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(callback, at)

    def tell_all(self) -> None:
        """Call everybody: something may have been missed."""
        for channel in self.channels:
            self.tell(channel, 0)
