"""Messages that the broker has sent ahead of the handlers that take them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.rabbitmq.amqp.properties import Delivery

LONGEST_WAIT: Final = 2.0
"""Seconds without a handler that gets free after which messages that were sent ahead go back to the queue."""


class Prefetched:
    """The messages in the order of their queue: redelivered ones come first, as they did there.

    Args:
        overdue: called when messages have waited for long without one being taken.
    """

    def __init__(self, overdue: Callable[[], None]) -> None:
        self._overdue = overdue
        self.messages: deque[Delivery] = deque()
        """The messages, to read."""
        self._redelivered = 0
        self._moved_on = 0.0
        self._patience: asyncio.TimerHandle | None = None

    def add(self, delivered: Delivery) -> None:
        """Keep a message until it is taken."""
        loop = asyncio.get_running_loop()
        if not self.messages:
            self._moved_on = loop.time()
        if self._patience is None:
            self._patience = loop.call_later(LONGEST_WAIT, self._look)
        if delivered.redelivered:
            self.messages.insert(self._redelivered, delivered)
            self._redelivered += 1
        else:
            self.messages.append(delivered)

    def pop(self) -> Delivery:
        """Take the first message."""
        self._redelivered = max(0, self._redelivered - 1)
        self._moved_on = asyncio.get_running_loop().time()
        return self.messages.popleft()

    def remove(self, delivered: Delivery) -> None:
        """Take this message."""
        self.messages.remove(delivered)
        self._redelivered -= delivered.redelivered

    def clear(self) -> None:
        """Forget all."""
        self.messages.clear()
        self._redelivered = 0

    def _look(self) -> None:
        self._patience = None
        if not self.messages:
            return
        loop = asyncio.get_running_loop()
        left = self._moved_on + LONGEST_WAIT - loop.time()
        if left > 0:
            self._patience = loop.call_later(left, self._look)
        else:
            self._overdue()
