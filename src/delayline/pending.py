"""The pending messages of an endpoint: listed, counted, changed one by one or as sets, held back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.actions import OperatorAction, SetRequest
from delayline.delayed.pauses import SupportsDispatchPauses, checked_destination, pausable
from delayline.delayed.store import managed
from delayline.external import UNSET, checked_transaction, enlisted
from delayline.filters import checked_filter
from delayline.message import in_utc
from delayline.set_jobs import pending_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta

    from delayline.actions import ActionLog, ActionRecord, SetPreview
    from delayline.clock import Clock
    from delayline.delayed.pauses import DispatchPause
    from delayline.delayed.store import DueCount, Outcome
    from delayline.external import ExternalConnection, ExternalTransaction, Unset
    from delayline.filters import MessageFilter
    from delayline.message import DelayedMessage
    from delayline.set_jobs import MessageJobs
    from delayline.transaction import Transaction


class PendingMessages:
    """Manages the messages that wait in an endpoint's delayed delivery.

    Args:
        management: Lists and changes them: a store with SupportsManagement.
        clock: The endpoint's clock.
        endpoint: The endpoint's name.
        beside: What has a database to record jobs in, where the store has none.
        unkept: The record of jobs where there is no database.

    Raises:
        ConfigurationError: The store cannot list, cancel or reschedule messages.
    """

    def __init__(
        self,
        management: object,
        clock: Clock,
        endpoint: str,
        *,
        beside: object = None,
        unkept: ActionLog | None = None,
    ) -> None:
        self._management = managed(management)
        self._clock = clock
        self.jobs: MessageJobs = pending_jobs(management, endpoint, clock, beside=beside, unkept=unkept)
        """The jobs that change sets of these messages: listed, resumed and stopped by name."""

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

    async def count(self, where: MessageFilter, *, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages that an action on all of them would change.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            counted: Called now and then with how many messages were looked through.

        Returns:
            The number, with the ids of the first ones.

        Raises:
            ConfigurationError: The filter has a condition that pending messages cannot fulfil.
            BackendUnavailable: The back end did not answer.
        """
        request = SetRequest(OperatorAction.CANCEL, checked_filter(where))
        return await self.jobs.new_set().preview(request, counted)

    async def cancel_all(
        self,
        where: MessageFilter,
        *,
        rate: int | None = None,
        progress: Callable[[ActionRecord], None] | None = None,
        actor: str | None = None,
    ) -> ActionRecord:
        """Cancel all messages that match, as a job, and return when it is over.

        To it belong the messages that are there now, and that match when the job comes to them. A call for the same
        messages joins a job that runs, or goes on with one whose process has ended; so does `jobs.resume` by its name.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            rate: Messages a second at most, 1 to 1,000,000; by default as many as go.
            progress: Called with the job's record, its name and numbers, after each step.
            actor: Who does it, for the record; by default the user and host of this process.

        Returns:
            The record: how many were cancelled, and of those that were not the first reasons.

        Raises:
            ConfigurationError: The filter or the rate means nothing.
            BackendUnavailable: The back end did not answer for two minutes: the job is interrupted, and can be resumed.

        Example:
            ```python
            wrong = MessageFilter(destination="billing", message_id="order-17-*")
            print((await shop.delayed.count(wrong)).number)
            record = await shop.delayed.cancel_all(wrong, rate=1000, progress=lambda job: print(job.name, job.numbers))
            ```
        """
        request = SetRequest(OperatorAction.CANCEL, checked_filter(where))
        return await self.jobs.change(request, rate=rate, progress=progress, actor=actor)

    async def reschedule_all(
        self,
        where: MessageFilter,
        *,
        to: datetime | None = None,
        by: timedelta | None = None,
        rate: int | None = None,
        progress: Callable[[ActionRecord], None] | None = None,
        actor: str | None = None,
    ) -> ActionRecord:
        """Give all messages that match another due time, as a job, each once; see `cancel_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            to: The new due time, with a time zone; a past time means now.
            by: How much later each is due, or earlier where it is negative; excludes `to`.
            rate: Messages a second at most.
            progress: Called with the job's record after each step.
            actor: Who does it, for the record.

        Returns:
            The record of the job.

        Raises:
            ConfigurationError: Not one of `to` and `by` is given, or the filter or the rate means nothing.
            BackendUnavailable: The back end did not answer for two minutes: the job is interrupted, and can be resumed.
        """
        due = None if to is None else in_utc(to)
        request = SetRequest(OperatorAction.RESCHEDULE, checked_filter(where), to=due, by=by)
        return await self.jobs.change(request, rate=rate, progress=progress, actor=actor)

    async def send_now_all(
        self,
        where: MessageFilter,
        *,
        rate: int | None = None,
        progress: Callable[[ActionRecord], None] | None = None,
        actor: str | None = None,
    ) -> ActionRecord:
        """Make all messages that match due at once, as a job; see `cancel_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            rate: Messages a second at most.
            progress: Called with the job's record after each step.
            actor: Who does it, for the record.

        Returns:
            The record of the job.

        Raises:
            ConfigurationError: The filter or the rate means nothing.
            BackendUnavailable: The back end did not answer for two minutes: the job is interrupted, and can be resumed.
        """
        request = SetRequest(OperatorAction.SEND_NOW, checked_filter(where))
        return await self.jobs.change(request, rate=rate, progress=progress, actor=actor)

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
