"""Protocol of row claims: the locks and leases of a store's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.delayed.store import Outcome
    from delayline.message import DelayedMessage
    from delayline.sql.forwarding import Moved
    from delayline.transaction import Transaction

Result = TypeVar("Result")


class RowClaims(Protocol):
    """The rows of one store's table."""

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages: until the transaction ends, or until `change` or `release`."""
        ...

    async def next_due(self) -> Any:  # noqa: ANN401 - what the due column keeps
        """Return the earliest due time of any message, or None."""
        ...

    def stored(self, due: datetime) -> None:
        """Know that something due then was stored, by whichever process."""
        ...

    def look_fully(self, found: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `found` with the due time of each message that ordinary looks passed over; return how to stop."""
        ...

    async def change(
        self,
        work: Callable[[Connection], Result],
        messages: Sequence[DelayedMessage],
        transaction: Transaction | None = None,
        *,
        one_statement: bool = True,
    ) -> Result:
        """Run `work`, without a transaction all of it in one; it then unlocks the messages as well.

        one_statement: it is one, or one for every 500 of the messages.
        """
        ...

    async def manage(self, message_id: str, work: Callable[[Connection], object]) -> Outcome:
        """Run `work` unless another process has claimed the message."""
        ...

    async def forward(self, until: object, limit: int, *, max_bytes: int) -> Moved:
        """Move due messages to their queues inside the database."""
        ...

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock the messages. Idempotent."""
        ...

    async def close(self) -> None:
        """Unlock everything."""
        ...
