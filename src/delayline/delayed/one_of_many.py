"""The verbs for one message of a store that has those for many: each is a batch of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.delayed.store import SupportsBatches
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


class OneOfMany:
    """Part of a SupportsBatches: fetches, removes and counts the failure of a single message."""

    async def fetch_next_due(
        self: SupportsBatches, at: datetime, transaction: Transaction | None = None
    ) -> DelayedMessage | None:
        """Lock and return the earliest due message."""
        batch = await self.fetch_due(at, 1, max_bytes=1, transaction=transaction)
        return batch[0] if batch else None

    async def remove(self: SupportsBatches, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message."""
        return await self.remove_many([message], transaction) == 1

    async def increment_failure_count(self: SupportsBatches, message: DelayedMessage) -> bool:
        """Count a failure and unlock."""
        return await self.retry_many([message], message.due) == 1
