"""Messages that are received ahead of their handlers: as many as the handlers finish in a tenth of a second.

They go back to their queue when no handler has ended for a while, so that other processes can have them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from delayline.transport import SupportsPrefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.transport import ReceivedMessage, Receiver

#: Messages are received ahead of their handlers: as many as were handled in this time ...
PREFETCH_TIME: Final = 0.1
#: ... measured over at least this time ...
PREFETCH_MEASURED: Final = 0.02
#: ... but no more than so many, in number and in bytes of their bodies.
MOST_PREFETCHED: Final = 1000
MOST_BYTES_PREFETCHED: Final = 16 << 20


class Prefetch:
    """The messages of a receiver that wait for their handlers; of a receiver that cannot prefetch only for a moment."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._prefetching = receiver if isinstance(receiver, SupportsPrefetch) else None
        self._messages: deque[ReceivedMessage] = deque()
        self._bytes = 0
        self._mean_bytes = 1.0
        self._target = 0
        self._handled = 0
        self._since = 0.0
        self.ended: int = 0
        """How many handlers have ended."""

    def __bool__(self) -> bool:
        return bool(self._messages)

    def wanted(self, free: int) -> int:
        """Return how many messages to ask for, given how many handlers are free; 0 or less for none."""
        if self._prefetching is None:
            return free
        elapsed = time.monotonic() - self._since
        if elapsed >= PREFETCH_MEASURED:
            self._target = min(MOST_PREFETCHED, int(self._handled * PREFETCH_TIME / elapsed))
            self._handled, self._since = 0, time.monotonic()
        if self._messages and not self.is_low:
            return 0
        affordable = int((MOST_BYTES_PREFETCHED - self._bytes) / self._mean_bytes)
        return free + min(self._target - len(self._messages), affordable)

    @property
    def is_low(self) -> bool:
        """Whether it is time for more messages."""
        return len(self._messages) <= self._target // 2

    def add(self, batch: Sequence[ReceivedMessage], *, waited: float) -> None:
        """Append messages for which the receiver has waited for so many seconds."""
        if waited >= PREFETCH_TIME:  # the queue was empty: start to measure anew
            self._target, self._handled, self._since = 0, 0, time.monotonic()
        size = sum(len(received.message.body) for received in batch)
        self._messages.extend(batch)
        self._bytes += size
        self._mean_bytes = max(1.0, size / max(1, len(batch)))

    def pop(self) -> ReceivedMessage | None:
        """Return the next message; None if another receiver may have it since a connection was lost."""
        received = self._messages.popleft()
        self._bytes -= len(received.message.body)
        return received if self._prefetching is None or self._prefetching.holds(received) else None

    def handled(self) -> None:
        """Count a message whose handler has ended."""
        self._handled += 1
        self.ended += 1

    async def give_back(self, but: Callable[[ReceivedMessage], bool] = lambda _: False) -> None:
        """Give the messages back to the queue, except messages for which `but` is true."""
        kept: list[ReceivedMessage] = []
        released: list[ReceivedMessage] = []
        for received in self._messages:
            (kept if but(received) else released).append(received)
        self._messages.clear()
        self._bytes = self._target = 0
        if kept:
            self.add(kept, waited=0.0)
        if released and self._prefetching is not None:
            await self._prefetching.release_many(released)
            return
        for received in released:
            await self._receiver.release(received)
