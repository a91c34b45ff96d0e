"""Claims of a process on rows, which end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection


class LockFree(Protocol):
    """Locks many messages until the transaction ends."""

    def __call__(self, connection: Connection, numbers: Sequence[int]) -> set[int]:
        """Lock those of the messages with the numbers that nobody has claimed, and return theirs."""
        ...


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

    def lock_again(self) -> None:
        """Lock what is claimed again, if the connection that has locked it is lost; blocks."""
        ...

    def close(self) -> None:
        """Give up every claim."""
        ...
