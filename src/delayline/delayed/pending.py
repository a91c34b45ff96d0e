"""The pending messages of an endpoint: listed, counted, cancelled, rescheduled, sent now, held back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.delayed.pauses import SupportsDispatchPauses, checked_destination, pausable
from delayline.delayed.store import managed
from delayline.external import UNSET, checked_transaction, enlisted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.delayed.pauses import DispatchPause
    from delayline.delayed.store import DueCount, Outcome
    from delayline.external import ExternalConnection, ExternalTransaction, Unset
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


class PendingMessages:
    """Manages the messages that wait in an endpoint's delayed delivery.

    Args:
        management: Lists and changes them: a store with SupportsManagement.
        clock: The endpoint's clock.

    Raises:
        ConfigurationError: The store cannot list, cancel or reschedule messages.
    """

    def __init__(self, management: object, clock: Clock) -> None:
        self._management = managed(management)
        self._clock = clock

    async def cancel(
        self, message_id: str, *, transaction: ExternalConnection | ExternalTransaction | Transaction | Unset = UNSET
    ) -> Outcome:
        """Delete a pending message, unless the poller has it already.

        Args:
            message_id: Id of the message.
            transaction: An external transaction on the database of the store, as for `Endpoint.send`: the message is
                gone if and only if you commit, and is not dispatched before. Left out, it is gone on return.

        Returns:
            `DONE`; `DISPATCHING` if the poller has the message, so that it arrives; `NOT_PENDING` if there is none.

        Raises:
            ConfigurationError: The message cannot be changed in the transaction.
            BackendUnavailable: The back end did not answer.

        Example:
            ```python
            with engine.begin() as connection:
                connection.execute(update(orders).where(orders.c.number == 17).values(paid=True))
                await shop.delayed.cancel("order-17-reminder", transaction=connection)
            ```
        """
        return await self._management.cancel(message_id, *await self._enlisted(transaction))

    async def reschedule(
        self,
        message_id: str,
        due: datetime,
        *,
        transaction: ExternalConnection | ExternalTransaction | Transaction | Unset = UNSET,
    ) -> Outcome:
        """Give a pending message a new due time, unless the poller has it already.

        Args:
            message_id: Id of the message.
            due: The new due time, with a time zone; a past time means now.
            transaction: An external transaction, in which the due time changes; see `cancel`.

        Returns:
            What has become of the message; see `cancel`.

        Raises:
            InvalidDueTime: The store cannot keep that time.
            ConfigurationError: The message cannot be changed in the transaction.
            BackendUnavailable: The back end did not answer.
        """
        return await self._management.reschedule(message_id, due, *await self._enlisted(transaction))

    async def send_now(
        self, message_id: str, *, transaction: ExternalConnection | ExternalTransaction | Transaction | Unset = UNSET
    ) -> Outcome:
        """Dispatch a pending message now: it is due at once.

        Args:
            message_id: Id of the message.
            transaction: An external transaction, after whose commit the message is dispatched; see `cancel`.

        Returns:
            What has become of the message; see `cancel`.

        Raises:
            ConfigurationError: The message cannot be changed in the transaction.
            BackendUnavailable: The back end did not answer.
        """
        return await self.reschedule(message_id, self._clock.now(), transaction=transaction)

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first, without locking them.

        Args:
            destination: The destination of the messages; by default all.
            limit: The most messages to return.
            offset: How many messages to leave out first.

        Returns:
            The messages.
        """
        return await self._management.pending(destination=destination, limit=limit, offset=offset)

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Return counts by destination and due bucket, earliest first.

        Args:
            bucket: The length of a bucket; buckets are aligned to 1970 UTC.

        Returns:
            The counts that are not zero.
        """
        return await self._management.count_by_due(bucket)

    async def pause(self, destination: str | None = None) -> bool:
        """Dispatch no more messages for a destination, or of the endpoint, in any process, until `resume`.

        Messages that a poller has already leave still: within a second and the time of a batch none does any more.

        Args:
            destination: The destination; by default all messages of the endpoint are paused.

        Returns:
            Whether that was not paused already.

        Raises:
            ConfigurationError: The messages cannot be held back where they wait.
            BackendUnavailable: The back end did not answer.

        Example:
            ```python
            await shop.delayed.pause("billing")
            ```
        """
        return await pausable(self._management).pause(checked_destination(destination), self._clock.now())

    async def resume(self, destination: str | None = None, *, rate: float | None = None) -> bool:
        """Dispatch messages again after `pause`. Overdue messages leave at once, or at a bounded rate.

        Args:
            destination: The destination; by default the pause of the whole endpoint ends, not those of destinations.
            rate: The most overdue messages that leave in a second, over all processes: they get later due times, those
                that were due first the earliest. By default they leave as fast as they can.

        Returns:
            Whether that was paused.

        Raises:
            ConfigurationError: The rate is not above 0, or nothing can be paused there.
            BackendUnavailable: The back end did not answer; nothing, or a part, has later due times, and all is paused.
        """
        return await pausable(self._management).resume(checked_destination(destination), self._clock.now(), rate)

    async def pauses(self) -> Sequence[DispatchPause]:
        """Return what is paused: the whole endpoint first, then destinations by name.

        Returns:
            The pauses; none where nothing can be paused.

        Raises:
            BackendUnavailable: The back end did not answer.
        """
        if not isinstance(self._management, SupportsDispatchPauses):
            return []
        return await self._management.dispatch_pauses.all()

    async def _enlisted(
        self, given: ExternalConnection | ExternalTransaction | Transaction | Unset
    ) -> tuple[Transaction, ...]:
        """Return the transaction that a change is part of, if one was given."""
        transaction = checked_transaction(given)
        if transaction is None:
            return ()
        refusal = (
            f"a transaction of yours does not reach a {type(self._management).__name__}, where the messages wait: keep "
            "them in a SqlDelayedMessageStore, or leave transaction= out and change them after your commit"
        )
        return (await enlisted(transaction, self._management, refusal),)
