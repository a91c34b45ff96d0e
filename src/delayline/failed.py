"""The failed messages of an endpoint: counted, retried and deleted as sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.actions import OperatorAction, SetRequest
from delayline.filters import checked_filter
from delayline.set_jobs import failed_jobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from delayline.actions import ActionLog, ActionRecord, SetPreview
    from delayline.clock import Clock
    from delayline.filters import MessageFilter
    from delayline.set_jobs import MessageJobs
    from delayline.transport import Transport


class FailedMessages:
    """Manages the messages of an endpoint's error queue.

    Args:
        transport: The transport.
        queue: The error queue.
        clock: The endpoint's clock.
        beside: What has a database to record jobs in, where the transport has none.
        unkept: The record of jobs where there is no database.
        inbox_window: How long the endpoint's inbox keeps records.
    """

    def __init__(
        self,
        transport: Transport,
        queue: str,
        clock: Clock,
        *,
        beside: object = None,
        unkept: ActionLog | None = None,
        inbox_window: timedelta | None = None,
    ) -> None:
        self._queue = queue
        self._inbox_window = inbox_window
        self.jobs: MessageJobs = failed_jobs(transport, queue, clock, beside=beside, unkept=unkept)
        """The jobs that change sets of these messages: listed, resumed and stopped by name."""

    async def count(self, where: MessageFilter, *, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the failed messages that match.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            counted: Called now and then with how many messages were looked through.

        Returns:
            The number, with the ids of the first ones.

        Raises:
            ConfigurationError: The filter has a condition that failed messages cannot fulfil, or the transport's queues
                cannot be looked into.
            BackendUnavailable: The back end did not answer.
        """
        request = SetRequest(OperatorAction.PURGE, checked_filter(where), queue=self._queue)
        return await self.jobs.new_set().preview(request, counted)

    async def retry_all(
        self,
        where: MessageFilter,
        *,
        to: str | None = None,
        past_window: bool = False,
        rate: int | None = None,
        progress: Callable[[ActionRecord], None] | None = None,
        actor: str | None = None,
    ) -> ActionRecord:
        """Send all failed messages that match to the queues they failed in, as a job, and return when it is over.

        To it belong the messages that are there now: what fails again meanwhile is not retried again. A call for the
        same messages joins a job that runs, or goes on with one whose process has ended; so does `jobs.resume`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            to: The queue to send them to instead.
            past_window: Whether to retry messages that failed before the inbox's oldest record, too.
            rate: Messages a second at most, 1 to 1,000,000; by default as many as go.
            progress: Called with the job's record, its name and numbers, after each step.
            actor: Who does it, for the record; by default the user and host of this process.

        Returns:
            The record: how many were retried, and of those that were not the first reasons.

        Raises:
            ConfigurationError: The filter or the rate means nothing.
            BackendUnavailable: The back end did not answer for two minutes: the job is interrupted, and can be resumed.

        Example:
            ```python
            await shop.errors.retry_all(MessageFilter(exception="TimeoutError"), rate=50)
            ```
        """
        window = None if past_window else self._inbox_window
        wanted = checked_filter(where)
        request = SetRequest(OperatorAction.RETRY, wanted, queue=self._queue, destination=to, inbox_window=window)
        return await self.jobs.change(request, rate=rate, progress=progress, actor=actor)

    async def purge_all(
        self,
        where: MessageFilter,
        *,
        rate: int | None = None,
        progress: Callable[[ActionRecord], None] | None = None,
        actor: str | None = None,
    ) -> ActionRecord:
        """Delete all failed messages that match, for good, as a job; see `retry_all`.

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
        request = SetRequest(OperatorAction.PURGE, checked_filter(where), queue=self._queue)
        return await self.jobs.change(request, rate=rate, progress=progress, actor=actor)
