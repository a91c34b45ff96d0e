"""Moves of due messages from a store to their queues inside a database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.delayed.fairness import Served, Turn


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
    served: Served | None = None
    """What the turns of groups have given; None for a move by due time alone."""
    claimed: Sequence[tuple[Any, ...]] = ()
    """Number, id, headers and body of the moved messages that were claimed for a receiver."""


class Forwarding(Protocol):
    """Moves the earliest due messages of a store's table on a server."""

    one_statement: bool
    """Whether `run` is a single statement."""
    can_claim: bool
    """Whether `ClaimsInStatements.move` can run it."""

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
        since: object | None = None,
        turns: Sequence[Turn] = (),
    ) -> Moved:
        """Move messages, only from `since` on if given, and return the result, with `counts` if `counted`.

        `next_due` is `until` where more may be due; else the due time of the next message, or None where it is unknown.

        With turns the messages of each are moved instead, in the order of the turns, and the result has `served`.

        Messages that need more than moving are passed over: their queue does not exist, or their headers hold
        properties that are meant for the dispatch only, or a time to be received.
        """
        ...
