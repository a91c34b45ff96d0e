"""Claims that are made in the statement that moves messages to their queue, or that looks into the queue.

A move may claim messages for a receiver of this process that waits for some, which saves the receiver's own look:

    poller -> ServerRowClaims.forward -> ClaimsInStatements.move -> WaitingReceiver.moved, on the receiver's loop
                     |                     a statement moves the messages to their queues, and locks some
                     +- WaitingReceivers.first: who waits, and for how many
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from delayline.sql.claims import ServerClaims

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Table

    from delayline.sql.moves import Forwarding, Moved


class WaitingReceiver(ABC):
    """A receiver of a queue for which a move may claim messages. Belongs to an event loop.

    Args:
        queue: The queue's name.
    """

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.wanted = 0
        """How many messages a move may claim; 0 while the receiver does not wait for any."""
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()

    @abstractmethod
    def moved(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Receive the messages, or give their claims up; on the receiver's event loop.

        Args:
            rows: Number, id, headers and body of each message that a move has claimed, in the order of their numbers.
        """


class WaitingReceivers:
    """The receivers of this process for which moves into a table of queues may claim messages."""

    def __init__(self) -> None:
        self._receivers: list[WaitingReceiver] = []

    def add(self, receiver: WaitingReceiver) -> Callable[[], None]:
        """Claim moved messages for the receiver while it waits for some; return how to stop."""
        self._receivers.append(receiver)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._receivers.remove(receiver)

        return remove

    def first(self) -> WaitingReceiver | None:
        """Return a receiver that waits for messages, if there is any."""
        for receiver in tuple(self._receivers):
            if receiver.wanted:
                return receiver
        return None


class Page(NamedTuple):
    """The numbers that a look into a queue has found."""

    claimed: list[int]
    last: int
    """The last number found, claimed or not."""
    more: bool
    """Whether as many were found as were asked for."""


class TransactionsInProgress(NamedTuple):
    """Which transactions are in progress, of all that can put messages into a queue."""

    oldest: float
    """The number of the oldest one, or the time of its beginning; all with lower ones have ended."""
    following: float
    """The number of the next one to begin."""
    first: int | None
    """The number of the first message that was looked for, in the same snapshot; None for none."""


@runtime_checkable
class ClaimsInStatements(ServerClaims, Protocol):
    """Claims that such a statement can make."""

    receivers: WaitingReceivers
    """For whom moves may claim messages."""

    async def move(
        self,
        forwarding: Forwarding,
        receiver: WaitingReceiver,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool,
        since: object | None,
    ) -> Moved:
        """Move messages as `Forwarding.run` does, and return the messages that are `claimed` too.

        Args:
            forwarding: What moves them; it `can_claim`.
            receiver: The receiver, which may get messages of its queue.
            until: The latest due time.
            limit: The most messages to move.
            max_bytes: The most bytes to move, if it is more than a message.
            counted: Whether the result has `counts`.
            since: The earliest due time, None for any.
        """
        ...

    async def take_next(self, queued: Table, queue: str, after: int, limit: int, among: int = 0) -> Page:
        """Claim up to `limit` messages of a queue after the number `after`; skips messages with other claims.

        `among`: how many messages to look at, `limit` of them if that is more.
        """
        ...

    def in_progress(self, connection: Connection, queued: Table, queue: str, after: int) -> TransactionsInProgress:
        """Return which transactions are in progress, and the queue's first message after the number `after`."""
        ...
