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
from typing import TYPE_CHECKING, Final, TypeVar

from delayline import error_queue
from delayline.actions import (
    ActionRecord,
    JobState,
    OperatorAction,
    SetPreview,
    SupportsActionLog,
    SupportsMessageSet,
)
from delayline.clock import latest_of
from delayline.delayed.store import Outcome, managed
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.events import Event, emit
from delayline.failures import NAME_THE_QUEUE, back_off, failed_queue_of
from delayline.filters import pattern_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from delayline.actions import ActionLog, MessageSet, SetRequest
    from delayline.clock import Clock
    from delayline.message import DelayedMessage, Message
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
#: Messages that are read at once where a back end has no sets.
READ_AT_ONCE: Final = 500
#: How long a pass through the error queue may keep messages from others, in seconds; brokers end it after half an hour.
PASS_SECONDS: Final = 600.0


class JobInterrupted(BackendUnavailable):
    """A job has waited in vain for its back end: it is not done, and another process can go on with it."""


def actor_here() -> str:
    """Return who runs this process, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for the number, as in containers
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"


def pending_set(store: object, endpoint: str, clock: Clock) -> MessageSet:
    """Return the pending messages as sets: of the store if it has them, else message by message."""
    messages = store.message_set(endpoint) if isinstance(store, SupportsMessageSet) else None
    return SetOfPending(store, endpoint, clock) if messages is None else messages


def failed_set(transport: Transport, endpoint: str, clock: Clock) -> MessageSet:
    """Return the failed messages as sets: of the transport if it has them, else message by message."""
    messages = transport.message_set(endpoint) if isinstance(transport, SupportsMessageSet) else None
    return SetOfFailed(transport, endpoint, clock) if messages is None else messages


def action_log(part: object, endpoint: str) -> ActionLog | None:
    """Return the record of actions in the database of a store or a transport; None where it has none."""
    return part.action_log(endpoint) if isinstance(part, SupportsActionLog) else None


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
    log_action(record, result)
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
        log: The record of actions; None where there is none, and the job is known to this process only.
        record: The job.
        clock: Clock of the rate.
        progress: Called with the record after each step.
        outage_limit: Seconds to wait for a back end that does not answer.
    """

    def __init__(
        self,
        messages: MessageSet,
        log: ActionLog | None,
        record: ActionRecord,
        clock: Clock,
        *,
        progress: Callable[[ActionRecord], None] | None = None,
        outage_limit: float = OUTAGE_LIMIT,
    ) -> None:
        self._messages = messages
        self._log = log
        self.record = record
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
                taken = await self._through_outages(partial(self._messages.take, self.record.name, self._owner))
                if taken is None:
                    await self._watch()
                else:
                    self._note(taken)
                    await self._steps()
        except BaseException as error:
            await self._leave(error)
            raise
        log_action(self.record, f"{self.record.state.value}: {self.record.numbers}")
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
            step = partial(self._messages.step, before.name, self._owner, most, final=final)
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
        log = self._log
        while not self.record.over and log is not None:
            record = await self._through_outages(partial(log.action, self.record.name))
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
        if self._log is None:
            return f"job {name} was interrupted, {so_far}: {error}. Begin it again once that is mended"
        return (
            f"job {name} is interrupted, {so_far}: {error}. Once that is mended, go on with: "
            f"delayline actions resume {name}"
        )

    async def _leave(self, error: BaseException) -> None:
        """Let another process go on at once."""
        if not isinstance(error, JobInterrupted):
            with contextlib.suppress(DelaylineError, asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._messages.leave(self.record.name, self._owner)), 5)


class SetInMemory:
    """The part of a set that has no table: the job is known to this process only, and ends with it."""

    def __init__(self, endpoint: str, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._record: ActionRecord | None = None

    async def begin(
        self, request: SetRequest, preview: SetPreview, *, actor: str, rate: int | None = None
    ) -> ActionRecord:
        """Begin a job."""
        name = f"{request.job_prefix}{uuid.uuid4().hex[:8]}"
        self._record = ActionRecord.begun(
            name, self._endpoint, request, preview, actor=actor, rate=rate, at=self._clock.now()
        )
        return self._record

    async def last(self, request: SetRequest) -> int:
        """Return 0: the messages have no numbers, and are read when the job begins."""
        del request
        return 0

    async def take(self, name: str, owner: str) -> ActionRecord | None:
        """Return the job: nobody else knows it."""
        del name, owner
        return self._record

    async def leave(self, name: str, owner: str) -> None:
        """Do nothing: nobody else could go on."""

    def _through(self, record: ActionRecord) -> ActionRecord:
        return replace(record.ended(), finished=self._clock.now())


class SetOfPending(SetInMemory):
    """The pending messages of what lists and changes them one by one.

    Args:
        management: Lists, cancels and reschedules messages.
        endpoint: The endpoint.
        clock: The clock that decides whether a message is due.
    """

    def __init__(self, management: object, endpoint: str, clock: Clock) -> None:
        super().__init__(endpoint, clock)
        self._management = managed(management)
        self._messages: list[tuple[str, datetime]] | None = None

    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages, and keep their ids: these are changed."""
        at, looked_at = self._clock.now(), 0
        found: list[tuple[str, datetime]] = []
        ask, named = self._management.pending, request.filter.destination
        destination = None if named is None else pattern_of(named).exact
        while page := await ask(destination=destination, limit=READ_AT_ONCE, offset=looked_at):
            looked_at += len(page)
            found += [(each.id, each.due) for each in page if _matches(request, each)]
            if counted is not None:
                counted(looked_at)
        self._messages = found
        return SetPreview(len(found), at, len(found), looked_at, examples=[message_id for message_id, _ in found[:5]])

    async def step(self, name: str, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages, one by one."""
        del name, owner, final
        record = self._record
        assert record is not None  # noqa: S101 - it was begun
        request, now = record.request, latest_of(self._clock)()
        assert request is not None  # noqa: S101 - by a request
        if self._messages is None:
            await self.preview(request)
        messages = self._messages or []
        for message_id, due in messages[record.position : record.position + min(most, READ_AT_ONCE)]:
            record = replace(record, position=record.position + 1)
            try:
                outcome = await self._change(request, message_id, due, now)
            except BackendUnavailable:
                raise
            except (DelaylineError, OverflowError) as error:
                record = record.with_problem(message_id, str(error))
            else:
                if outcome is Outcome.DONE:
                    record = replace(record, done=record.done + 1)
                else:
                    record = record.with_problem(message_id, outcome.meaning)
            self._record = record
        self._record = self._through(record) if record.position >= len(messages) else record
        return self._record

    async def _change(self, request: SetRequest, message_id: str, due: datetime, now: datetime) -> Outcome:
        if request.action is OperatorAction.CANCEL:
            return await self._management.cancel(message_id)
        return await self._management.reschedule(message_id, due + request.by if request.by else request.to or now)


def _matches(request: SetRequest, delayed: DelayedMessage) -> bool:
    return request.filter.matches(delayed.message, delayed.destination, delayed.due)


class SetOfFailed(SetInMemory):
    """The failed messages of a transport that takes them one by one, or lends them for a pass through the queue.

    Args:
        transport: The transport.
        endpoint: The endpoint.
        clock: Clock of the record.
    """

    def __init__(self, transport: Transport, endpoint: str, clock: Clock) -> None:
        super().__init__(endpoint, clock)
        self._transport = transport
        self._held: AsyncGenerator[error_queue.HeldMessage, None] | None = None
        self._tried: set[str] = set()

    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages."""
        at, number, looked_at = self._clock.now(), 0, 0
        found: list[str] = []
        queues = error_queue.managed_queues(self._transport)
        async with contextlib.aclosing(error_queue.browse(queues, request.queue or "")) as messages:
            async for message in messages:
                looked_at += 1
                if request.filter.matches(message, failed_queue_of(message)):
                    number += 1
                    found += [message.id] if number <= 5 else []
                if counted is not None and looked_at % READ_AT_ONCE == 0:
                    counted(looked_at)
        return SetPreview(number, at, number, looked_at, examples=found)

    async def step(self, name: str, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages, one by one."""
        del name, owner, final
        record = self._record
        assert record is not None  # noqa: S101 - it was begun
        if self._held is None:
            self._held = self._holding(record)
        try:
            for _ in range(min(most, READ_AT_ONCE)):
                held = await anext(self._held, None)
                if held is None:
                    await self.close()
                    self._record = self._through(record)
                    return self._record
                record = self._record = await self._change(record, held)
        except BaseException:
            await self.close()
            raise
        return record

    async def close(self) -> None:
        """Give back what the pass holds."""
        if self._held is not None:
            held, self._held = self._held, None
            await held.aclose()

    async def leave(self, name: str, owner: str) -> None:
        """Give back what the pass holds."""
        del name, owner
        await self.close()

    async def _change(self, record: ActionRecord, held: error_queue.HeldMessage) -> ActionRecord:
        request, message_id = record.request, held.message.id
        assert request is not None  # noqa: S101 - it is a job
        queue = request.queue or ""
        if request.action is OperatorAction.PURGE:
            removed = await error_queue.remove(self._transport, queue, held)
            problem = None if removed else "another process took it meanwhile"
        else:
            outcome = await error_queue.retry(
                self._transport,
                queue,
                held,
                to=request.destination,
                remedy=NAME_THE_QUEUE,
                window=request.inbox_window,
            )
            problem = outcome.problem
        return replace(record, done=record.done + 1) if problem is None else record.with_problem(message_id, problem)

    async def _holding(self, record: ActionRecord) -> AsyncGenerator[error_queue.HeldMessage, None]:
        """Yield the messages that match, each once: messages that fail again meanwhile are left out.

        A pass keeps the messages that it has seen from others, and brokers end a pass that keeps them for long.
        """
        request, tried = record.request, self._tried
        assert request is not None  # noqa: S101 - it is a job

        def wanted(message: Message) -> bool:
            return message.id not in tried and request.filter.matches(message, failed_queue_of(message))

        in_a_pass = None if record.rate is None else max(1, int(record.rate * PASS_SECONDS))
        while True:
            held_now: list[str] = []
            passing = error_queue.holding(self._transport, request.queue or "", wanted, most=in_a_pass)
            try:
                async with contextlib.aclosing(passing) as messages:
                    async for held in messages:
                        yield held  # once it is asked for the next, this one was changed
                        held_now.append(held.message.id)
            finally:
                tried.update(held_now)
            if in_a_pass is None or len(held_now) < in_a_pass:
                return
