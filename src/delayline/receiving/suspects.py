"""Messages that may have killed the process that handled them: handled singly, beside no others.

The turn is the process's: of two endpoints in it each may have such a message.
"""

from __future__ import annotations

import os
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from delayline.errors import TooManyCrashes
from delayline.transport import SUSPECT_FROM, SupportsDeliveryNotes, SupportsHoldingOne, SupportsSureCounts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delayline.receiving.recoverability import Recoverability
    from delayline.transport import ReceivedMessage, Receiver

#: Seconds until a suspect that waits for other endpoints' in this process looks whether it is its turn.
WAIT_FOR_TURN: Final = 0.05

_turn = threading.Lock()


def _begin_anew() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class Suspects:
    """Decides on the messages of a receiver whose deliveries have ended without an outcome.

    Args:
        receiver: The receiver of the messages.
        recoverability: How often that may be.
    """

    def __init__(self, receiver: Receiver, recoverability: Recoverability) -> None:
        self._notes = receiver if isinstance(receiver, SupportsDeliveryNotes) else None
        self._sure = receiver if isinstance(receiver, SupportsSureCounts) else None
        # A queue that counts for us counts messages too that only waited when others ended the process: one crash of a
        # message that is handled alone is not enough.
        self._maximum = max(recoverability.maximum_crashes, 2 if self._sure is None else 4)
        self._alone_from = min(SUSPECT_FROM, self._maximum - 1)
        self._holds_one = receiver if isinstance(receiver, SupportsHoldingOne) else None

    def must_be_alone(self, received: ReceivedMessage) -> bool:
        """Return whether the message is handled beside no others."""
        earlier = received.earlier_deliveries
        return earlier >= self._alone_from and (earlier < self._maximum or not self._has_sure_count(received))

    def may_wait(self, received: ReceivedMessage) -> bool:
        """Return whether the message may be held while a suspect is handled.

        If that crashes, the message is counted too. Where its queue counts every return, giving it back counts as much.
        """
        return self._sure is not None and not (self.must_be_alone(received) and self._has_sure_count(received))

    async def count_surely(self, received: ReceivedMessage) -> bool:
        """Have a suspect received again, with a count of crashes only; return False if it has a count."""
        if self._sure is None or self._has_sure_count(received):
            return False
        await self._sure.count_surely(received, self._alone_from)
        return True

    def _has_sure_count(self, received: ReceivedMessage) -> bool:
        return self._sure is None or self._sure.counts_surely(received)

    async def begin(self, received: ReceivedMessage) -> None:
        """Note that the message is handled now. Raises TooManyCrashes if it must not be."""
        if received.earlier_deliveries >= self._maximum:
            raise TooManyCrashes(received.message.id, received.earlier_deliveries)
        if self._notes is not None:
            await self._notes.begin(received)

    @asynccontextmanager
    async def alone(
        self, received: ReceivedMessage, sleep: Callable[[float], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """Wait until no other suspect of this process is handled, and hold no other message meanwhile."""
        turn = _turn
        while not turn.acquire(blocking=False):
            await sleep(WAIT_FOR_TURN)
        try:
            if self._holds_one is not None:
                await self._holds_one.hold_only(received)
            yield
        finally:
            turn.release()
