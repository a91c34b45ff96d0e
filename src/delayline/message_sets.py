"""Sets of messages of back ends that change them one by one: what a job has changed is recorded after each few."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline import error_queue
from delayline.actions import OperatorAction, SetPreview
from delayline.clock import EPOCH, latest_of
from delayline.delayed.store import Outcome, SupportsLookup, managed
from delayline.errors import BackendUnavailable, DelaylineError
from delayline.failures import NAME_THE_QUEUE, failed_at_of, failed_queue_of
from delayline.filters import pattern_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from delayline.actions import ActionLog, ActionRecord, SetRequest
    from delayline.clock import Clock
    from delayline.message import DelayedMessage, Message
    from delayline.transport import Transport

#: Messages that are read at once.
READ_AT_ONCE: Final = 500
#: Messages between two records of how far a job is: a killed process may have changed as many more.
CHANGED_AT_ONCE: Final = 100
#: Ids that a preview shows.
EXAMPLES: Final = 5
#: How long a pass through the error queue may keep messages from others, in seconds; brokers end it after half an hour.
PASS_SECONDS: Final = 600.0
MICROSECOND: Final = timedelta(microseconds=1)


class SetOfPending:
    """The pending messages of what lists and changes them one by one, for a job.

    The job goes through them by due time, in the direction from which no message that it has moved comes again, and its
    record has the due time that it has come to. So a process that goes on with a job of a killed one moves no message
    twice, without a list of those that were changed.

    Args:
        management: Lists, cancels and reschedules messages.
        log: The record of the job.
        clock: The clock that decides whether a message is due.
    """

    def __init__(self, management: object, log: ActionLog, clock: Clock) -> None:
        self._management = managed(management)
        self._log = log
        self._clock = clock
        self._left: deque[tuple[str, datetime]] | None = None
        self._ahead: ActionRecord | None = None
        """The job with what was changed since it was recorded last."""

    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages, and keep their ids: these are changed."""
        at, looked_at = self._clock.now(), 0
        found: deque[tuple[str, datetime]] = deque()
        named = request.filter.destination
        destination = None if named is None else pattern_of(named).exact
        while page := await self._management.pending(destination=destination, limit=READ_AT_ONCE, offset=looked_at):
            looked_at += len(page)
            found += [(each.id, each.due) for each in page if _matches(request, each)]
            if counted is not None:
                counted(looked_at)
        self._left = found
        examples = [message_id for message_id, _ in [*found][:EXAMPLES]]
        return SetPreview(len(found), at, len(found), looked_at, examples=examples)

    async def last(self, request: SetRequest) -> int:
        """Return 0: the messages have no numbers, and are read when the job begins."""
        del request
        return 0

    async def step(self, record: ActionRecord, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages, one by one, and keep the record of it."""
        del final
        record = self._ahead or record
        request = record.request
        assert request is not None  # noqa: S101 - it is a job
        if self._ahead is None:
            await self._begin(record, request)
        self._ahead, now = record, latest_of(self._clock)()
        left, reached = self._left or deque(), _instant(record.position)
        for number in range(min(most, CHANGED_AT_ONCE)):
            if not left or not _may_move(request, left[0][1], reached):
                if not number and left:
                    self._ahead = replace(self._ahead, position=_position(request, left[0][1]))
                break
            due = left[0][1]
            after = await self._changed(self._ahead, request, *left[0], now)
            left.popleft()
            self._ahead = replace(after, position=_position(request, due))
        record = self._ahead if left else self._ahead.ended()
        if not await self._log.advance(record, owner):
            await self.close()
            return None
        self._ahead = record
        return record

    async def close(self) -> None:
        """Forget the messages: they are read again."""
        self._left = self._ahead = None

    async def _begin(self, record: ActionRecord, request: SetRequest) -> None:
        """Read the messages, unless they were counted and nobody has begun; without those that the job has had."""
        if self._left is None or record.position:
            await self.preview(request)
        left, now, reached = self._left or deque(), self._clock.now(), _instant(record.position)
        if _goes_back(request):
            left.reverse()
        if reached is not None:
            left = deque(
                (message_id, due)
                for message_id, due in left
                if (due <= reached if _goes_back(request) else due >= reached)
                and not (request.action is OperatorAction.SEND_NOW and due <= now)
                and due != request.to
            )
        self._left = left

    async def _changed(
        self, record: ActionRecord, request: SetRequest, message_id: str, due: datetime, now: datetime
    ) -> ActionRecord:
        """Return the record after a message was changed."""
        store = self._management
        try:
            if isinstance(store, SupportsLookup):
                found = await store.find(message_id, body_limit=0)
                if found is None:
                    return record.with_problem(message_id, Outcome.NOT_PENDING.meaning)
                if not _matches(request, found.message):
                    return record
                due = found.message.due
            if request.action is OperatorAction.CANCEL:
                outcome = await store.cancel(message_id)
            else:
                outcome = await store.reschedule(message_id, due + request.by if request.by else request.to or now)
        except BackendUnavailable:
            raise
        except (DelaylineError, OverflowError) as error:
            return record.with_problem(message_id, str(error))
        if outcome is not Outcome.DONE:
            return record.with_problem(message_id, outcome.meaning)
        return replace(record, done=record.done + 1)


def _matches(request: SetRequest, delayed: DelayedMessage) -> bool:
    return request.filter.matches(delayed.message, delayed.destination, delayed.due)


def _goes_back(request: SetRequest) -> bool:
    """Return whether a job begins with the latest due time: the messages that it moves become due later."""
    return request.by is not None and request.by > timedelta(0)


def _may_move(request: SetRequest, due: datetime, reached: datetime | None) -> bool:
    """Return whether a message that is moved now is beyond what the job's record says it has come to."""
    if not request.by:
        return True
    return reached is not None and abs(due - reached) <= abs(request.by) / 2


def _position(request: SetRequest, due: datetime) -> int:
    """Return a due time as the position of a job, which is 0 for none."""
    return (due - EPOCH) // MICROSECOND or (1 if _goes_back(request) else -1)


def _instant(position: int) -> datetime | None:
    return EPOCH + position * MICROSECOND if position else None


class SetOfFailed:
    """The failed messages of a transport that takes them one by one or lends them for a pass, for a job.

    What was retried or deleted has left the queue, so that a process that goes on with a job of a killed one makes
    another pass. Where the transport has no transactions a message that was sent in the moment of the kill is sent
    again, with the same id.

    Args:
        transport: The transport.
        log: The record of the job.
        clock: Clock of the record.
    """

    def __init__(self, transport: Transport, log: ActionLog, clock: Clock) -> None:
        self._transport = transport
        self._log = log
        self._clock = clock
        self._held: AsyncGenerator[error_queue.HeldMessage, None] | None = None
        self._tried: set[str] = set()
        self._ahead: ActionRecord | None = None
        """The job with what was changed since it was recorded last."""

    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages."""
        at, number, looked_at = self._clock.now(), 0, 0
        examples: list[str] = []
        queues = error_queue.managed_queues(self._transport)
        async with contextlib.aclosing(error_queue.browse(queues, request.queue or "")) as messages:
            async for message in messages:
                looked_at += 1
                if request.filter.matches(message, failed_queue_of(message)):
                    number += 1
                    examples += [message.id] if number <= EXAMPLES else []
                if counted is not None and looked_at % READ_AT_ONCE == 0:
                    counted(looked_at)
        return SetPreview(number, at, number, looked_at, examples=examples)

    async def last(self, request: SetRequest) -> int:
        """Return 0: the messages have no numbers, and are read when the job begins."""
        del request
        return 0

    async def step(self, record: ActionRecord, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages, one by one, and keep the record of it."""
        del final
        record = self._ahead or record
        if self._held is None:
            self._held = self._holding(record)
        self._ahead, is_through = record, False
        try:
            for _ in range(min(most, CHANGED_AT_ONCE)):
                held = await anext(self._held, None)
                if held is None:
                    is_through = True
                    break
                self._ahead = await self._changed(self._ahead, held)
        except BaseException:
            await self._give_back()
            raise
        record = self._ahead.ended() if is_through else self._ahead
        if is_through:
            await self._give_back()
        if not await self._log.advance(record, owner):
            await self.close()
            return None
        self._ahead = record
        return record

    async def close(self) -> None:
        """Give back what the pass holds."""
        self._ahead = None
        await self._give_back()

    async def _give_back(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            await held.aclose()

    async def _changed(self, record: ActionRecord, held: error_queue.HeldMessage) -> ActionRecord:
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
        begun = record.started if record.done or record.failed else None

        def wanted(message: Message) -> bool:
            if message.id in tried or not request.filter.matches(message, failed_queue_of(message)):
                return False
            failed_at = None if begun is None else failed_at_of(message)
            return begun is None or failed_at is None or failed_at <= begun

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
