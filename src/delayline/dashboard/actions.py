"""What people ask for messages: done message by message, or as jobs in the background, and recorded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.actions import OF_PENDING, ActionRecord, JobState, OperatorAction, SetPreview
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import ActionOutcome
from delayline.errors import ConfigurationError, DelaylineError
from delayline.events import Event, emit
from delayline.set_jobs import (
    HIGHEST_RATE,
    MemoryActionLog,
    action_log,
    failed_jobs,
    keep_action,
    log_action,
    pending_jobs,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.actions import ActionLog, SetRequest
    from delayline.dashboard.back_ends import BackEnds
    from delayline.set_jobs import MessageJobs, SetJob

logger: logging.Logger = logging.getLogger(__name__)

#: Actions that are shown.
SHOWN: Final = 200


class Actions(PageQueries):
    """The actions on an endpoint's messages."""

    def __init__(self, back_ends: BackEnds) -> None:
        super().__init__(back_ends)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._here: dict[bool, ActionLog] = {
            failed: MemoryActionLog(self._name(failed), back_ends.clock) for failed in (True, False)
        }

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the jobs that run in this process."""
        return list(self._tasks.values())

    @within_limit
    async def recorded(self) -> list[ActionRecord]:
        """Return the latest actions, single ones and jobs, the latest first."""
        records: dict[str, ActionRecord] = {}
        for log in await self._logs():
            records |= {record.name: record for record in await log.actions(SHOWN)}
        return sorted(records.values(), key=lambda record: record.started, reverse=True)[:SHOWN]

    @within_limit
    async def are_kept(self) -> bool:
        """Return whether a database keeps the actions; else they are in the log, and gone with this process."""
        await self.back_ends.transport()
        with contextlib.suppress(ConfigurationError):  # none of its own, as in delay levels
            await self.back_ends.store()
        return all(log.is_kept for log in await self._logs())

    async def note(
        self, action: OperatorAction, actor: str, what: str, result: str, *, done: bool, failed: bool = False
    ) -> None:
        """Record an action on a single message, queue or schedule.

        Args:
            action: What was done.
            actor: Who did it.
            what: The message, queue or schedule.
            result: The outcome, as a person reads it.
            done: Whether it was done.
            failed: Whether it was about failed messages: the transport's database keeps these.
        """
        await keep_action(await self._log(failed=failed), self._name(failed), action, actor, what, result, done=done)

    async def each(
        self, action: OperatorAction, ids: Sequence[str], actor: str, change: Callable[[str], Awaitable[ActionOutcome]]
    ) -> list[ActionOutcome]:
        """Change message after message."""
        outcomes = []
        for message_id in dict.fromkeys(ids):
            answer = await self.back_ends.ask((action, message_id, actor), partial(change, message_id))
            outcome = answer if isinstance(answer, ActionOutcome) else not_done(message_id, answer.reason)
            outcomes.append(outcome)
            await self.note(action, actor, message_id, outcome.text, done=outcome.done)
        return outcomes

    async def start(
        self, request: SetRequest, *, actor: str, rate: float | None, expected: int | None = None
    ) -> ActionRecord:
        """Begin a job that changes all messages of a request, or go on with the job that does this already.

        Args:
            request: What is done, with which messages.
            actor: Who does it.
            rate: Messages a second at most, 1 to 1,000,000; None for as many as go.
            expected: How many messages there are, if they were counted.
        """
        if rate is not None and (not isinstance(rate, int | float) or not 1 <= rate <= HIGHEST_RATE):
            raise ConfigurationError(f"rate must be 1 to {HIGHEST_RATE:,} messages a second, not {rate!r}")
        jobs = await self._jobs_of(request.action)
        messages = jobs.new_set()
        preview = SetPreview(
            expected or 0, self.back_ends.clock.now(), await messages.last(request), exact=expected is not None
        )
        record = await jobs.log.begin(request, preview, actor=actor, rate=None if rate is None else int(rate))
        if record.name not in self._tasks:
            log_action(record, "started" if expected is None else f"started: {expected:,} messages")
            self._run(jobs.job(record, messages))
        return record

    async def resume(self, name: str, *, actor: str) -> bool:
        """Go on with a job whose process has ended; False if there is none of that name."""
        for log in await self._logs():
            record = await log.action(name)
            if record is not None and record.state is JobState.INTERRUPTED and record.request is not None:
                if name not in self._tasks:
                    jobs = await self._jobs_of(record.action)
                    self._run(jobs.job(record, jobs.new_set()))
                failed = record.action not in OF_PENDING
                await self.note(record.action, actor, name, "resumed the job", done=True, failed=failed)
                return True
        return False

    async def stop(self, name: str, *, actor: str) -> bool:
        """Stop a job, wherever it runs; the messages that it has changed stay changed. False if it does not run."""
        task = self._tasks.get(name)
        stopped, action = False, OperatorAction.CANCEL
        for log in await self._logs():
            record = await log.action(name)
            if record is not None:
                action = record.action
                stopped = await log.stop(name) or stopped
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if stopped:
            await self.note(action, actor, name, "stopped the job", done=True, failed=action not in OF_PENDING)
        return stopped

    def _run(self, job: SetJob) -> None:
        name = job.record.name
        task = asyncio.create_task(self._until_over(job), name=f"delayline job {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _until_over(self, job: SetJob) -> None:
        try:
            await job.run()
        except DelaylineError as error:
            emit(logger, logging.WARNING, Event.OPERATOR_ACTION, "Job %s: %s", job.record.name, error)

    async def _jobs_of(self, action: OperatorAction) -> MessageJobs:
        back_ends, failed = self.back_ends, action not in OF_PENDING
        name, here = self._name(failed), self._here[failed]
        if failed:
            return failed_jobs(
                await back_ends.transport(), name, back_ends.clock, beside=await self._store(), unkept=here
            )
        return pending_jobs(await back_ends.store(), name, back_ends.clock, unkept=here)

    async def _store(self) -> object:
        try:
            return await self.back_ends.store()
        except DelaylineError:
            return None

    async def _logs(self) -> list[ActionLog]:
        return [await self._log(failed=False), await self._log(failed=True)]

    async def _log(self, *, failed: bool) -> ActionLog:
        """Return the record of the actions on pending or failed messages: in the database, else in this process."""
        try:
            parts = [await self.back_ends.transport()] if failed else []
        except DelaylineError:
            return self._here[failed]
        return action_log([*parts, await self._store()], self._name(failed)) or self._here[failed]

    def _name(self, failed: bool) -> str:
        """Return whose messages they are, as the table of actions has it."""
        return self.back_ends.error_queue if failed else self.back_ends.name


def not_done(message_id: str, reason: object) -> ActionOutcome:
    """Return the outcome for a message of which it is unknown what happened to it."""
    return ActionOutcome(message_id, done=False, text=f"{reason}: look at it again")
