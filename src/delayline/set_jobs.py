"""Jobs that change sets of messages: run at a rate, through outages, and taken up where their process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import os
import socket
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

from delayline.actions import (
    ActionRecord,
    JobState,
    OperatorAction,
    SetPreview,
    SupportsActionLog,
    SupportsMessageSet,
)
from delayline.delayed.store import SupportsClock
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.events import Event, emit
from delayline.failures import back_off
from delayline.message_sets import SetOfFailed, SetOfPending

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayline.actions import ActionLog, MessageSet, SetRequest
    from delayline.clock import Clock
    from delayline.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
#: Messages of a step without a rate.
CHANGED_AT_ONCE: Final = 10_000
HIGHEST_RATE: Final = 1_000_000
#: How many steps a second a rate is divided into, at most.
STEPS_A_SECOND: Final = 4
#: Seconds that a job waits for a back end, that it tries again what the poller has, and between looks at a job that
#: another process runs.
OUTAGE_LIMIT: Final = 120.0
TRIED_AGAIN_FOR: Final = 30.0
LOOKS_EVERY: Final = 1.0
#: Actions that are kept in memory where no database has a record of them.
KEPT_IN_MEMORY: Final = 200
#: What the log says of actions that no database has a record of.
NOT_RECORDED: Final = "not recorded: no database here keeps actions"
#: Seconds that a job takes to give back what it holds.
GIVES_BACK_FOR: Final = 5.0


class JobInterrupted(BackendUnavailable):
    """A job has waited in vain for its back end: it is not done, and another process can go on with it."""


def actor_here() -> str:
    """Return who runs this process, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for the number, as in containers
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"


class MemoryActionLog:
    """The actions of this process, where no database has a record of them: its jobs end with it.

    Args:
        endpoint: The endpoint, or the error queue.
        clock: The clock of the record.
    """

    def __init__(self, endpoint: str, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._records: dict[str, ActionRecord] = {}
        self._owners: dict[str, str] = {}
        self.is_kept: bool = False

    async def record(self, done: ActionRecord) -> None:
        """Keep an action that is over."""
        self._records[done.name] = done
        over = [name for name, record in self._records.items() if record.over]
        for name in over[:-KEPT_IN_MEMORY]:
            del self._records[name]

    async def actions(self, limit: int) -> Sequence[ActionRecord]:
        """Return the latest actions, the latest first."""
        names = list(reversed(self._records))[:limit]
        return [self._seen(self._records[name]) for name in names]

    async def action(self, name: str) -> ActionRecord | None:
        """Return the action with that name."""
        record = self._records.get(name)
        return None if record is None else self._seen(record)

    async def begin(
        self, request: SetRequest, preview: SetPreview, *, actor: str, rate: int | None = None
    ) -> ActionRecord:
        """Begin a job, or return the job that does the same already."""
        for record in self._records.values():
            if record.request == request and not record.over:
                return record
        name, at = f"{request.job_prefix}{uuid.uuid4().hex[:8]}", self._clock.now()
        begun = ActionRecord.begun(name, self._endpoint, request, preview, actor=actor, rate=rate, at=at)
        await self.record(begun)
        return begun

    async def take(self, name: str, owner: str) -> ActionRecord | None:
        """Make `owner` the one that goes on with a job."""
        record = self._records.get(name)
        if record is None or record.over or self._owners.setdefault(name, owner) != owner:
            return None
        return record

    async def advance(self, record: ActionRecord, owner: str) -> bool:
        """Keep how far a job is; False if it was stopped."""
        if self._owners.get(record.name) != owner or self._records[record.name].over:
            return False
        now = self._clock.now()
        self._records[record.name] = replace(record, seen=now, finished=now if record.over else None)
        return True

    async def leave(self, name: str, owner: str) -> None:
        """Let another task go on with the job."""
        if self._owners.get(name) == owner:
            del self._owners[name]

    async def stop(self, name: str) -> bool:
        """Stop the job with that name."""
        record = self._records.get(name)
        if record is None or record.over:
            return False
        now = self._clock.now()
        self._records[name] = replace(record, state=JobState.STOPPED, finished=now, result="stopped")
        return True

    def _seen(self, record: ActionRecord) -> ActionRecord:
        is_left = record.state is JobState.RUNNING and record.name not in self._owners
        return replace(record, state=JobState.INTERRUPTED) if is_left else record


def action_log(parts: Iterable[object], endpoint: str) -> ActionLog | None:
    """Return the record of actions in the database of the first part that has one; None where none has."""
    logs = (part.action_log(endpoint) for part in parts if isinstance(part, SupportsActionLog))
    return next((log for log in logs if log is not None), None)


def log_action(record: ActionRecord, result: str) -> None:
    """Write a line with what an action did to the log."""
    template = "%s by %s on %s, %s (%s): %s"
    said = (record.action.value, record.actor, record.endpoint, record.what, record.name, result)
    emit(logger, logging.INFO, Event.OPERATOR_ACTION, template, *said)


async def keep_action(
    log: ActionLog | None, endpoint: str, action: OperatorAction, actor: str, what: str, result: str, *, done: bool
) -> None:
    """Keep an action on a single message or schedule: in the log, and in the database if that has a record.

    What was done is done: that it cannot be recorded is a warning.
    """
    now = datetime.now(UTC)
    record = ActionRecord(
        name=uuid.uuid4().hex,
        endpoint=endpoint,
        action=action,
        actor=actor,
        what=what,
        state=JobState.DONE if done else JobState.FAILED,
        result=result,
        started=now,
        seen=now,
        finished=now,
        done=int(done),
        failed=int(not done),
    )
    log_action(record, result if log is not None else f"{result}; {NOT_RECORDED}")
    if log is not None:
        try:
            await log.record(record)
        except DelaylineError as error:
            template = "The action %s of %s could not be recorded in the database: %s"
            emit(logger, logging.WARNING, Event.OPERATOR_ACTION, template, action.value, actor, error)


class SetJob:
    """Runs a job until it is over, or until another process has to go on.

    Args:
        messages: The messages.
        log: The record of actions.
        record: The job.
        clock: Clock of the rate.
        progress: Called with the record after each step.
        outage_limit: Seconds to wait for a back end that does not answer.
    """

    def __init__(
        self,
        messages: MessageSet,
        log: ActionLog,
        record: ActionRecord,
        clock: Clock,
        *,
        progress: Callable[[ActionRecord], None] | None = None,
        outage_limit: float = OUTAGE_LIMIT,
    ) -> None:
        self._messages = messages
        self._log = log
        self.record: ActionRecord = record
        self._clock = clock
        self._progress = progress
        self._outage_limit = outage_limit
        self._owner = uuid.uuid4().hex

    async def run(self) -> ActionRecord:
        """Return the record once the job is over.

        Raises:
            JobInterrupted: The back end did not answer for too long.
        """
        try:
            while not self.record.over:
                taken = await self._through_outages(partial(self._log.take, self.record.name, self._owner))
                if taken is None:
                    await self._watch()
                else:
                    self._note(taken)
                    await self._steps()
        except BaseException as error:
            await self._leave(error)
            raise
        outcome = f"{self.record.state.value}: {self.record.numbers}"
        log_action(self.record, outcome if self._log.is_kept else f"{outcome}; {NOT_RECORDED}")
        return self.record

    async def _steps(self) -> None:
        """Change messages at the job's rate while the job is this process's."""
        began, changed, idle_since = self._clock.now(), 0, None
        while not self.record.over:
            most = CHANGED_AT_ONCE
            if (rate := self.record.rate) is not None:
                most = max(1, rate // STEPS_A_SECOND)
                early = changed / rate - (self._clock.now() - began).total_seconds()
                if early > 0:
                    await self._clock.sleep(early)
            final = idle_since is not None and time.monotonic() - idle_since > TRIED_AGAIN_FOR
            before = self.record
            step = partial(self._messages.step, before, self._owner, most, final=final)
            after = await self._through_outages(step)
            if after is None:
                await self._watch()
                return
            self._note(after)
            number = after.done + after.failed - before.done - before.failed
            changed += number
            if number or after.position != before.position or after.over:
                idle_since = None
            else:
                idle_since = time.monotonic() if idle_since is None else idle_since
                await self._clock.sleep(LOOKS_EVERY)

    async def _watch(self) -> None:
        """Follow a job that another process runs until it is over, or that process has ended."""
        while not self.record.over:
            record = await self._through_outages(partial(self._log.action, self.record.name))
            if record is None:
                raise ConfigurationError(f"job {self.record.name!r} is not recorded any more: begin it again")
            self._note(record)
            if record.state is JobState.INTERRUPTED:
                return
            if not record.over:
                await self._clock.sleep(LOOKS_EVERY)

    def _note(self, record: ActionRecord) -> None:
        self.record = record
        if self._progress is not None:
            self._progress(record)

    async def _through_outages(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer, however often the back end has to be asked within the limit."""
        attempts, since = 0, time.monotonic()
        while True:
            try:
                return await ask()
            except BackendUnavailable as error:
                attempts += 1
                if time.monotonic() - since > self._outage_limit:
                    raise JobInterrupted(self._interruption(error)) from error
                if attempts == 1:
                    template = "Job %s waits for its back end: %s"
                    emit(logger, logging.WARNING, Event.OPERATOR_ACTION, template, self.record.name, error)
                await self._clock.sleep(back_off(attempts).total_seconds() / 4)

    def _interruption(self, error: BackendUnavailable) -> str:
        name, so_far = self.record.name, self.record.numbers
        if not self._log.is_kept:
            return f"job {name} was interrupted, {so_far}: {error}. Begin it again once that is mended"
        return (
            f"job {name} is interrupted, {so_far}: {error}. Once that is mended, go on with: "
            f"delayline actions resume {name}"
        )

    async def _leave(self, error: BaseException) -> None:
        """Let another process go on at once."""
        with contextlib.suppress(DelaylineError, asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._messages.close()), GIVES_BACK_FOR)
            if not isinstance(error, JobInterrupted) or not self._log.is_kept:
                leaving = self._log.leave(self.record.name, self._owner)
                await asyncio.wait_for(asyncio.shield(leaving), GIVES_BACK_FOR)


class SetOptions(TypedDict, total=False):
    """How a job changes messages: its rate, who is told of its progress, and who does it."""

    rate: int | None
    progress: Callable[[ActionRecord], None] | None
    actor: str | None


class MessageJobs:
    """The jobs that change sets of an endpoint's pending messages, or of its error queue.

    Where the messages or the queues are in a SQL database, a job and how far it is are recorded there: it is found by
    its name, and goes on in another process if this one ends. Elsewhere, as in Azure Storage alone, it ends with its
    process, `is_recorded` is False, and only the log has what it did.

    Args:
        new_set: Returns the messages, for a job or a count.
        log: The record of actions.
        clock: Clock of the rate.
    """

    def __init__(self, new_set: Callable[[], MessageSet], log: ActionLog, clock: Clock) -> None:
        self.new_set: Callable[[], MessageSet] = new_set
        self.log: ActionLog = log
        self._clock = clock

    @property
    def is_recorded(self) -> bool:
        """Whether jobs outlive this process."""
        return self.log.is_kept

    async def list(self, limit: int = 50) -> Sequence[ActionRecord]:
        """Return the latest actions on these messages, jobs and single ones, the latest first.

        Args:
            limit: How many at most.

        Returns:
            The actions; none where nobody has acted yet.

        Raises:
            BackendUnavailable: The back end did not answer.
        """
        return await self.log.actions(limit)

    async def resume(self, name: str, *, progress: Callable[[ActionRecord], None] | None = None) -> ActionRecord:
        """Go on with a job whose process has ended, or follow it while another process runs it.

        Args:
            name: Its name, of an `ActionRecord`.
            progress: Called with the record after each step.

        Returns:
            The record of the job, which is over.

        Raises:
            ConfigurationError: There is no job of that name.
            BackendUnavailable: The back end did not answer for two minutes: the job is interrupted, and can be resumed.
        """
        record = await self.log.action(name)
        if record is None or record.request is None:
            raise ConfigurationError(
                f"there is no job {name!r} here: jobs.list() has the names of those that there are"
            )
        return record if record.over else await self.job(record, self.new_set(), progress=progress).run()

    async def stop(self, name: str) -> bool:
        """Stop a job, wherever it runs. What it has changed stays changed.

        Args:
            name: Its name.

        Returns:
            False if no job of that name runs.

        Raises:
            BackendUnavailable: The back end did not answer.
        """
        return await self.log.stop(name)

    async def change(
        self,
        request: SetRequest,
        *,
        rate: int | None,
        actor: str | None,
        progress: Callable[[ActionRecord], None] | None,
    ) -> ActionRecord:
        """Change all messages of a request, and return the record once the job is over."""
        if rate is not None and not 1 <= rate <= HIGHEST_RATE:
            raise ConfigurationError(f"rate must be 1 to {HIGHEST_RATE:,} messages a second, not {rate!r}")
        messages = self.new_set()
        preview = SetPreview(0, self._clock.now(), await messages.last(request), exact=False)
        record = await self.log.begin(request, preview, actor=actor or actor_here(), rate=rate)
        log_action(record, "started")
        return await self.job(record, messages, progress=progress).run()

    def job(
        self, record: ActionRecord, messages: MessageSet, *, progress: Callable[[ActionRecord], None] | None = None
    ) -> SetJob:
        """Return a job, to be run."""
        return SetJob(messages, self.log, record, self._clock, progress=progress)


def pending_jobs(
    store: object, endpoint: str, clock: Clock, *, beside: object = None, unkept: ActionLog | None = None
) -> MessageJobs:
    """Return the jobs of an endpoint's pending messages.

    Args:
        store: What has the messages.
        endpoint: The endpoint.
        clock: A clock, where the store has none.
        beside: What has a database to record jobs in, where the store has none: the transport.
        unkept: The record where there is no database.
    """
    clock = store.clock() if isinstance(store, SupportsClock) else clock
    log = action_log((store, beside), endpoint) or unkept or MemoryActionLog(endpoint, clock)

    def new_set() -> MessageSet:
        messages = store.message_set(endpoint) if isinstance(store, SupportsMessageSet) else None
        return SetOfPending(store, log, clock) if messages is None else messages

    return MessageJobs(new_set, log, clock)


def failed_jobs(
    transport: Transport, queue: str, clock: Clock, *, beside: object = None, unkept: ActionLog | None = None
) -> MessageJobs:
    """Return the jobs of an error queue.

    Args:
        transport: The transport.
        queue: The error queue.
        clock: Clock of the record.
        beside: What has a database to record jobs in, where the transport has none: the store.
        unkept: The record where there is no database.
    """
    log = action_log((transport, beside), queue) or unkept or MemoryActionLog(queue, clock)

    def new_set() -> MessageSet:
        messages = transport.message_set(queue) if isinstance(transport, SupportsMessageSet) else None
        return SetOfFailed(transport, log, clock) if messages is None else messages

    return MessageJobs(new_set, log, clock)
