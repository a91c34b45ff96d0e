"""Moves of due messages from a store to their queues inside a database.

A move may claim messages for a receiver of this process that waits for some, which saves the receiver's own look:

    poller -> ServerRowClaims.forward -> ClaimingForwarding.run_for -> WaitingReceiver.moved, on the receiver's loop
                     |                     a statement moves the messages to their queues, and locks some
                     +- ClaimsInStatements.waiting_receiver: who waits, and for how many
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.sql.claims import ClaimsInStatements, WaitingReceiver


@dataclass(frozen=True, slots=True)
class Moved:
    """How many messages moved, to which queues, and how many due messages were passed over."""

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
    """Moves the earliest due messages of a store's table on a server."""

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
        """Move messages, only from `since` on if given, and return the result, with `counts` if `counted`.

        `next_due` is `until` where more may be due; else the due time of the next message, or None where it is unknown.

        Messages that need more than moving are passed over: their queue does not exist, or their headers hold
        properties that are meant for the dispatch only, or a time to be received.
        """
        ...


@runtime_checkable
class ClaimingForwarding(Forwarding, Protocol):
    """Forwarding whose moves can claim messages for a receiver, in the statement that moves them."""

    async def run_for(
        self,
        receiver: WaitingReceiver,
        claims: ClaimsInStatements,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool,
        since: object | None,
    ) -> Moved:
        """Move messages as `run` does, on the connection of the claims, and return the messages that are `claimed` too.

        Args:
            receiver: The receiver, which may get messages of its queue.
            claims: This process's claims on the rows of the queues.
            until: The latest due time.
            limit: The most messages to move.
            max_bytes: The most bytes to move, if it is more than a message.
            counted: Whether the result has `counts`.
            since: The earliest due time, None for any.
        """
        ...
