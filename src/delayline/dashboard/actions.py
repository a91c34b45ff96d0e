"""What people ask for messages: done message by message or in the background, at a rate, and kept for the audit."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.dashboard.back_ends import PageQueries
from delayline.dashboard.model import ActionJob, ActionOutcome, AuditEntry, JobState, OperatorAction
from delayline.error_queue import HeldMessage
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.events import Event, emit

if TYPE_CHECKING:
    from delayline.clock import Clock
    from delayline.dashboard.back_ends import BackEnds

logger: logging.Logger = logging.getLogger(__name__)

Changed = TypeVar("Changed", str, HeldMessage)

#: Messages that an action on all that match changes at most.
MOST_CHANGED: Final = 100_000
#: Actions that are kept for the audit page, and jobs that are listed.
AUDITED: Final = 500
JOBS_LISTED: Final = 50
PROBLEMS_LISTED: Final = 20
HIGHEST_JOB_RATE: Final = 1_000


@dataclass(slots=True)
class RunningAction:
    """An action on many messages while it runs."""

    shown: ActionJob
    clock: Clock
    task: asyncio.Task[None] | None = None
    problems: list[str] = field(default_factory=list)

    async def change_ids(self, ids: Sequence[str], change: Callable[[str], Awaitable[ActionOutcome]]) -> None:
        """Change the messages with the ids, which are all that are expected."""
        self.shown = replace(self.shown, expected=len(ids))

        async def each() -> AsyncIterator[str]:
            for message_id in ids:
                yield message_id

        await self.change_each(each(), change)

    async def change_each(
        self, messages: AsyncIterator[Changed], change: Callable[[Changed], Awaitable[ActionOutcome]]
    ) -> None:
        """Change message after message, no faster than the job's rate."""
        began, number = self.clock.now(), 0
        async for message in messages:
            early = number / self.shown.rate - (self.clock.now() - began).total_seconds()
            number += 1
            if early > 0:
                await self.clock.sleep(early)
            message_id = message if isinstance(message, str) else message.message.id
            try:
                outcome = await change(message)
            except BackendUnavailable as error:
                outcome = ActionOutcome(message_id, done=False, text=str(error))
            if outcome.done:
                self.shown = replace(self.shown, done=self.shown.done + 1)
                continue
            if len(self.problems) < PROBLEMS_LISTED:
                self.problems.append(f"{message_id}: {outcome.text}")
            self.shown = replace(self.shown, failed=self.shown.failed + 1, problems=tuple(self.problems))


class Actions(PageQueries):
    """The actions on an endpoint's messages."""

    def __init__(self, back_ends: BackEnds) -> None:
        super().__init__(back_ends)
        self._running: dict[str, RunningAction] = {}
        self._audit: deque[AuditEntry] = deque(maxlen=AUDITED)

    def jobs(self) -> list[ActionJob]:
        """Return the jobs of this process, the latest first."""
        return [job.shown for job in reversed(self._running.values())]

    def stop(self, job_id: str, *, actor: str) -> bool:
        """Stop a job; the messages that it has changed stay changed. False if it does not run."""
        job = self._running.get(job_id)
        if job is None or job.task is None or job.task.done():
            return False
        job.task.cancel()
        self.note(job.shown.action, actor, job.shown.what, "stopped")
        return True

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the jobs."""
        return [job.task for job in self._running.values() if job.task is not None]

    def audit(self) -> list[AuditEntry]:
        """Return the actions that were taken, the latest first; all of them are in the log."""
        return list(reversed(self._audit))

    def note(self, action: OperatorAction, actor: str, what: str, result: str) -> None:
        """Keep what an action did."""
        name = self.back_ends.name
        self._audit.append(AuditEntry(self.back_ends.clock.now(), actor, name, action, what, result))
        template = "Dashboard: %s by %s on endpoint %s: %s: %s"
        emit(logger, logging.INFO, Event.OPERATOR_ACTION, template, action.value, actor, name, what, result)

    async def each(
        self, action: OperatorAction, ids: Sequence[str], actor: str, change: Callable[[str], Awaitable[ActionOutcome]]
    ) -> list[ActionOutcome]:
        """Change message after message."""
        outcomes = []
        for message_id in dict.fromkeys(ids):
            answer = await self.back_ends.ask((action, message_id, actor), partial(change, message_id))
            outcome = answer if isinstance(answer, ActionOutcome) else not_done(message_id, answer.reason)
            outcomes.append(outcome)
            self.note(action, actor, message_id, outcome.text)
        return outcomes

    def start(
        self,
        action: OperatorAction,
        actor: str,
        what: str,
        expected: int,
        rate: float,
        work: Callable[[RunningAction], Awaitable[None]],
    ) -> ActionJob:
        """Begin an action on many messages.

        Args:
            action: What is done.
            actor: Who does it.
            what: Which messages, as a sentence.
            expected: How many messages there are.
            rate: Messages a second at most, above 0 and up to 1000.
            work: Changes the messages.
        """
        if not isinstance(rate, int | float) or not 0 < rate <= HIGHEST_JOB_RATE:
            raise ConfigurationError(
                f"rate must be above 0 and up to {HIGHEST_JOB_RATE} messages a second, not {rate!r}"
            )
        clock = self.back_ends.clock
        shown = ActionJob(
            id=uuid.uuid4().hex[:12],
            action=action,
            actor=actor,
            what=what,
            started=clock.now(),
            expected=expected,
            rate=float(rate),
        )
        job = self._running[shown.id] = RunningAction(shown, clock)
        ended = [key for key, running in self._running.items() if running.task is not None and running.task.done()]
        for key in ended[:-JOBS_LISTED]:
            del self._running[key]
        self.note(action, actor, what, f"started: {expected} messages, {rate:g} a second")
        job.task = asyncio.create_task(self._run(job, work), name=f"delayline {action.value} {shown.id}")
        return shown

    async def _run(self, job: RunningAction, work: Callable[[RunningAction], Awaitable[None]]) -> None:
        state = JobState.FAILED
        try:
            await work(job)
            state = JobState.DONE
        except asyncio.CancelledError:
            state = JobState.STOPPED
            raise
        except DelaylineError as error:
            job.problems.append(str(error))
        finally:
            shown = job.shown = replace(
                job.shown, state=state, finished=job.clock.now(), problems=job.problems[:PROBLEMS_LISTED]
            )
            result = f"{state.value}: {shown.done} done, {shown.failed} not"
            self.note(shown.action, shown.actor, shown.what, result)


def not_done(message_id: str, reason: object) -> ActionOutcome:
    """Return the outcome for a message of which it is unknown what happened to it."""
    return ActionOutcome(message_id, done=False, text=f"{reason}: look at it again")
