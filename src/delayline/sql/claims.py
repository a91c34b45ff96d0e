"""Claims of a process on rows, which end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Connection, Table


class Claims(Protocol):
    """This process's claims on rows of a table, which end with the process. Safe to call from any thread."""

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        ...

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims. Idempotent; never blocks for long."""
        ...

    def forget(self, rows: Iterable[int]) -> None:
        """Drop claims on deleted rows, without notifying other processes."""
        ...

    def flush(self) -> None:
        """Make released rows available to other processes; may block for a round trip."""
        ...

    def number_claimed_after(self, row: int) -> int:
        """Return how many rows this process holds whose numbers are higher."""
        ...

    def holds(self, row: int) -> bool:
        """Return whether this process holds the row, as of its last request."""
        ...


class ServerClaims(Claims, Protocol):
    """Claims on the rows of a table, held by a connection."""

    def close(self) -> None:
        """Give up every claim."""
        ...


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


class WaitingReceiver(Protocol):
    """A receiver of a queue for which a move may claim messages, which saves the receiver's own look."""

    queue: str
    wanted: int
    """How many messages the move may claim; 0 while the receiver does not wait for any."""
    loop: asyncio.AbstractEventLoop

    def moved(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Receive the messages, or give their claims up; on the receiver's event loop.

        Args:
            rows: Number, id, headers and body of each message that a move has claimed, in the order of their numbers.
        """
        ...


@runtime_checkable
class ClaimsInStatements(ServerClaims, Protocol):
    """Claims that are made in the statement that moves the messages to their queue, or that looks into the queue."""

    def register(self, receiver: WaitingReceiver) -> Callable[[], None]:
        """Claim moved messages for the receiver while it waits for some; return how to stop."""
        ...

    def waiting_receiver(self) -> WaitingReceiver | None:
        """Return a receiver that waits for messages, if there is any."""
        ...

    async def take_next(self, queued: Table, queue: str, after: int, limit: int, among: int = 0) -> Page:
        """Claim up to `limit` messages of a queue after the number `after`; skips messages with other claims.

        `among`: how many messages to look at, `limit` of them if that is more.
        """
        ...

    def in_progress(self, connection: Connection, queued: Table, queue: str, after: int) -> TransactionsInProgress:
        """Return which transactions are in progress, and the queue's first message after the number `after`."""
        ...
