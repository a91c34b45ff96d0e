"""Moves of due messages from a store to their queues inside one database.

A move may claim messages for a receiver of this process that waits for some, which saves the receiver's own look:
`ServerRowClaims.forward` asks the claims on the queues' rows for a `WaitingReceiver`, a `ClaimingForwarding` makes the
move, whose statement locks rows as well, and `WaitingReceiver.moved` gets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.sql.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Moved:
    """How many messages moved, to which queues, and how many due ones were passed over."""

    number: int
    queues: set[str]
    left: int = 0
    next_due: Any = None
    """What the due column keeps of the earliest message left, or `until` where more may be due; None for none left."""
    reached: Any = None
    """What the due column keeps of a message such that nothing movable is due before it; None where unknown."""
    counts: Mapping[tuple[str, Any], int] | None = None
    """How many moved by destination and what the due column keeps; None where that was not asked for."""
    claimed: Sequence[tuple[Any, ...]] = ()
    """Number, id, headers and body of the moved messages that were claimed for a receiver."""


class Forwarding(Protocol):
    """Moves the earliest due messages of one store's table on a server."""

    one_statement: bool
    """Whether `run` is a single statement."""

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
        since: object | None = None,
    ) -> Moved:
        """Move messages, those due from `since` on if given, and return the result, with `counts` if `counted`.

        `next_due` is `until` where more may be due; else the due time of the next message, or None where it is unknown.

        Those that need more than moving are passed over: their queue does not exist, or their headers hold
        properties that are meant for the dispatch only, or a time to be received.
        """
        ...


class ClaimingMove(Protocol):
    """One move of due messages that locks some of them for a `WaitingReceiver`."""

    def moved(self, rows: Sequence[tuple[Any, ...]]) -> Moved | None:
        """Read the result of `statement` from its rows; None if it has moved nothing and `run` must be called."""
        ...

    def statement(self, key: int) -> tuple[Prepared, tuple[Any, ...]]:
        """Return the statement that moves and locks, and its parameters.

        Args:
            key: The lock of row 0.
        """
        ...

    def run(self, connection: Connection, key: int) -> Moved:
        """Move and lock on the connection of the claims.

        Args:
            connection: The connection.
            key: The lock of row 0.
        """
        ...


@runtime_checkable
class ClaimingForwarding(Forwarding, Protocol):
    """Forwarding whose moves can lock messages for a receiver."""

    can_claim: bool
    """False behind a pooler whose clients share sessions, which hold the locks."""

    def claiming(
        self,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool,
        since: object | None,
        queue: str,
        wanted: int,
    ) -> ClaimingMove:
        """Return a move like that of `run`.

        Args:
            until: The latest due time.
            limit: The most messages to move.
            max_bytes: The most bytes to move, if it is more than one message.
            counted: Whether the result has `counts`.
            since: The earliest due time, None for any.
            queue: The queue in which moved messages are locked.
            wanted: The most messages to lock.
        """
        ...


class WaitingReceiver(Protocol):
    """A receiver of one queue for which a move may claim messages, which saves the receiver's own look."""

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
