"""The error queue of an endpoint: in groups, message by message, and what people do to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from delayline import error_queue
from delayline.actions import OperatorAction, SetRequest
from delayline.checks import whole_number
from delayline.dashboard.actions import not_done
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.contents import details, one_line
from delayline.dashboard.forms import editable
from delayline.dashboard.model import (
    ActionOutcome,
    ErrorGroup,
    ErrorGroups,
    ErrorKind,
    ErrorPage,
    ErrorRow,
    ErrorsRead,
    MessageDetails,
    Unavailable,
)
from delayline.errors import DelaylineError
from delayline.failure_groups import headers_of, message_type
from delayline.failure_index import EVERY_MESSAGE, FailureIndex, GroupOrder, check_for_groups, time_of_failure
from delayline.failures import FAILURE_HEADERS, failed_queue_of
from delayline.message import Headers, Message

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from datetime import datetime

    from delayline.actions import ActionRecord
    from delayline.dashboard.actions import Actions
    from delayline.dashboard.back_ends import BackEnds
    from delayline.dashboard.contents import Form
    from delayline.failure_index import FailureGroup
    from delayline.filters import MessageFilter

#: Seconds that a page waits for the error queue to be read; it shows what is known by then.
READ_FOR: Final = 2.0
#: Days of the trend of failures.
TREND: Final = 14


class FailedMessages(PageQueries):
    """Shows the failed messages of an endpoint, and retries, edits or deletes them."""

    def __init__(self, back_ends: BackEnds, actions: Actions, search_time: float) -> None:
        super().__init__(back_ends)
        self._actions = actions
        self._queue = back_ends.error_queue
        self._search_time = search_time
        self._index: FailureIndex | None = None
        self._reading: asyncio.Task[None] | None = None

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the task that reads the error queue, if it runs."""
        return [] if self._reading is None else [self._reading]

    @within_limit
    async def groups(
        self,
        wanted: MessageFilter = EVERY_MESSAGE,
        *,
        order: GroupOrder = GroupOrder.NEWEST,
        since: datetime | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> ErrorGroups:
        """Return the error queue, grouped by exception and place, with the trend of the last days.

        Args:
            wanted: Which messages; conditions on ids and headers, for which each would be read, are refused.
            order: Which groups come first.
            since: Messages that have failed later are new.
            after: The key of the last group of the page before.
            limit: The most groups.
        """
        check_for_groups(wanted)
        index, known = await self._known()
        groups = order.sorted(index.groups(wanted, since))
        start = next((place for place, group in enumerate(groups, 1) if group.key == after), 0)
        page = groups[start : start + limit]
        newest = await index.queue.messages([group.all.newest for group in page])
        today = self.back_ends.clock.now().date()
        return ErrorGroups(
            known,
            sum(group.all.count for group in groups),
            sum(group.all.new for group in groups),
            index.latest,
            len(groups),
            [_shown(group, newest.get(group.all.newest)) for group in page],
            page[-1].key if start + limit < len(groups) else None,
            [(today - timedelta(days=back)).isoformat() for back in reversed(range(TREND))],
        )

    @within_limit
    async def page(
        self, wanted: MessageFilter = EVERY_MESSAGE, *, limit: int = 50, before: int | None = None
    ) -> ErrorPage:
        """Return failed messages, the newest first.

        Args:
            wanted: Which messages.
            limit: The most messages.
            before: Only messages with lower numbers, as `next_before` of the page before.
        """
        whole_number("limit", limit, at_least=1)
        wanted.check_of_failed()
        index, known = await self._known()
        left, began = index.numbers(wanted, before), time.monotonic()
        reads = wanted.asks_for_more_than_failure
        rows: list[tuple[int, ErrorRow]] = []
        looked_at, end, cut = 0, 0, False
        bodies = wanted.body is not None
        at_once = error_queue.BODIES_AT_ONCE if bodies else error_queue.NEWEST_AT_ONCE if reads else limit + 1
        while len(rows) <= limit and not cut and (numbers := list(islice(left, at_once))):
            messages = await index.queue.messages(numbers, bodies=bodies)
            for number in numbers:
                message = messages.get(number)
                looked_at, end = looked_at + 1, number
                if message is not None and wanted.matches(message, failed_queue_of(message)):
                    rows.append((number, error_row(message)))
                    if len(rows) > limit:
                        break
            cut = reads and len(rows) <= limit and time.monotonic() - began > self._search_time
        cut = cut and next(left, None) is not None
        more = rows[limit - 1][0] if len(rows) > limit else end if cut else None
        matching = None if reads else index.count(wanted)
        return ErrorPage(known, [row for _, row in rows[:limit]], matching, looked_at, more, cut)

    @within_limit
    async def message(self, message_id: str, *, form: Form | None = None) -> MessageDetails | None:
        """Return a failed message with headers and body, or None; `form` is that of the body."""
        message = await self.find(message_id)
        if message is None:
            return None
        headers, _ = headers_of(message)
        shown = details(message, headers.get(Headers.FAILED_QUEUE, ""), None, 0, len(message.body), form)
        return replace(shown, editable=editable(message))

    async def retry(self, ids: Sequence[str], *, actor: str, to: str | None = None) -> list[ActionOutcome]:
        """Send failed messages to the queue they failed in, or to `to`."""
        return await self._each_failed(OperatorAction.RETRY, ids, actor, partial(self._retry, to=to))

    async def retry_all(
        self, wanted: MessageFilter = EVERY_MESSAGE, *, actor: str, rate: float | None = 10.0, to: str | None = None
    ) -> ActionRecord:
        """Send all failed messages that fulfil a filter, as those of a group, to the queues they failed in, as a job.

        Messages that fail again meanwhile are not retried again. In a SQL database the job is recorded, and goes on in
        another process if this one ends.
        """
        request = SetRequest(
            OperatorAction.RETRY,
            wanted,
            queue=self._queue,
            destination=to,
            inbox_window=self.back_ends.inbox_window,
        )
        return await self._actions.start(request, actor=actor, rate=rate, expected=await self._expected(wanted))

    async def purge_all(self, wanted: MessageFilter, *, actor: str) -> ActionRecord:
        """Delete all failed messages that fulfil a filter, as a job."""
        request = SetRequest(OperatorAction.PURGE, wanted, queue=self._queue)
        return await self._actions.start(request, actor=actor, rate=None, expected=await self._expected(wanted))

    async def _expected(self, wanted: MessageFilter) -> int | None:
        """Return how many messages fulfil a filter; None where that is not known without reading each."""
        if wanted.asks_for_more_than_failure:
            return None
        index, known = await self._known()
        return None if known.text else index.count(wanted)

    async def edit(
        self, message_id: str, *, headers: Mapping[str, str], body: bytes, to: str | None = None, actor: str
    ) -> ActionOutcome:
        """Send an edited copy of a failed message in its place, with the same id.

        A transaction where the transport has them: the old message leaves as the new message arrives, or both stay
        as they are. On brokers the new message is sent first.

        Args:
            message_id: The failed message.
            headers: All headers of the copy; headers that describe the failure are left out.
            body: The body of the copy.
            to: The queue to send it to; by default the queue it failed in.
            actor: Who does it, for the log.
        """
        return (
            await self._each_failed(OperatorAction.EDIT, [message_id], actor, partial(self._edit, headers, body, to))
        )[0]

    async def purge(self, ids: Sequence[str], *, actor: str) -> list[ActionOutcome]:
        """Delete failed messages for ever."""
        return await self._each_failed(OperatorAction.PURGE, ids, actor, self._drop)

    async def export(self, wanted: MessageFilter = EVERY_MESSAGE) -> AsyncGenerator[Mapping[str, object], None]:
        """Yield failed messages, oldest first, as documents with id, headers and body (Base64 where it is not text)."""
        async with contextlib.aclosing(error_queue.browse(await self.back_ends.queues(), self._queue)) as messages:
            async for message in messages:
                if wanted.matches(message, failed_queue_of(message)):
                    yield exported(message)

    async def _known(self) -> tuple[FailureIndex, ErrorsRead]:
        """Return the index of the error queue, as it is now or as far as it was read in a while; reading goes on."""
        index = self._index
        if index is None:
            index = self._index = FailureIndex(error_queue.numbered(await self.back_ends.transport(), self._queue))
        ends = time.monotonic() + READ_FOR
        if self._reading is not None:  # it may have begun before the change that is to be seen
            await asyncio.wait([self._reading], timeout=READ_FOR)
        if self._reading is None:
            self._reading = asyncio.create_task(index.refresh(), name="delayline reading of errors")
            self._reading.add_done_callback(self._has_read)
        reading = self._reading
        done, _ = await asyncio.wait([reading], timeout=max(0.1, ends - time.monotonic()))
        if done:
            reading.result()
        newest = not isinstance(index.queue, error_queue.BrowsedQueue)
        return index, ErrorsRead(self._queue, index.total, index.read, not done, newest)

    def _has_read(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()  # told to whoever waits for it, if anybody does

    async def find(self, message_id: str) -> Message | None:
        """Return a failed message, or None."""
        queues = await self.back_ends.queues()
        return (await error_queue.find(queues, self._queue, {message_id})).get(message_id)

    async def _each_failed(
        self,
        action: OperatorAction,
        ids: Sequence[str],
        actor: str,
        change: Callable[[error_queue.HeldMessage], Awaitable[ActionOutcome]],
    ) -> list[ActionOutcome]:
        """Change failed messages in a single pass through the error queue."""
        wanted = list(dict.fromkeys(ids))
        outcomes: dict[str, ActionOutcome] = {}

        async def work() -> None:
            holding = error_queue.holding_ids(await self.back_ends.transport(), self._queue, set(wanted))
            async with contextlib.aclosing(holding) as messages:
                async for held in messages:
                    try:
                        outcomes[held.message.id] = await change(held)
                    except DelaylineError as error:
                        outcomes[held.message.id] = not_done(held.message.id, error)

        ended = await self.back_ends.ask((action, tuple(wanted), actor), work)
        for message_id in wanted:
            if isinstance(ended, Unavailable):
                outcomes.setdefault(message_id, not_done(message_id, ended.reason))
            missing = self._missing(message_id, ": nothing was sent" if action is OperatorAction.EDIT else "")
            outcome = outcomes.setdefault(message_id, missing)
            await self._actions.note(action, actor, message_id, outcome.text, done=outcome.done, failed=True)
        return [outcomes[message_id] for message_id in wanted]

    def _missing(self, message_id: str, consequence: str = "") -> ActionOutcome:
        return ActionOutcome(message_id, done=False, text=f"not in {self._queue} any more{consequence}")

    async def _retry(self, held: error_queue.HeldMessage, *, to: str | None) -> ActionOutcome:
        transport, window = await self.back_ends.transport(), self.back_ends.inbox_window
        return _of_retry(await error_queue.retry(transport, self._queue, held, to=to, window=window))

    async def _edit(
        self, headers: Mapping[str, str], body: bytes, to: str | None, held: error_queue.HeldMessage
    ) -> ActionOutcome:
        message = held.message
        destination = to or headers_of(message)[0].get(Headers.FAILED_QUEUE)
        if not destination:
            reason = f"it has no {Headers.FAILED_QUEUE} header: name the queue to send it to"
            return ActionOutcome(message.id, done=False, text=reason)
        kept = headers_of(message)[0]  # a header without a value stays so: a form cannot tell it from an empty text
        same = {name: kept[name] if kept.get(name) == value else value for name, value in headers.items()}
        copy = Message(message.id, same, body).with_headers({}, without=FAILURE_HEADERS)
        transport = await self.back_ends.transport()
        return _of_retry(await error_queue.replace(transport, self._queue, held, copy, destination))

    async def _drop(self, held: error_queue.HeldMessage) -> ActionOutcome:
        removed = await error_queue.remove(await self.back_ends.transport(), self._queue, held)
        return ActionOutcome(held.message.id, True, "deleted") if removed else self._missing(held.message.id)


def error_row(message: Message) -> ErrorRow:
    """Return a failed message as it is listed."""
    headers, damaged = headers_of(message)
    return ErrorRow(
        id=message.id,
        failed_at=time_of_failure(headers),
        queue=headers.get(Headers.FAILED_QUEUE, ""),
        exception_type=headers.get(Headers.EXCEPTION_TYPE, "")[:300],
        exception_text=one_line(damaged or headers.get(Headers.EXCEPTION_MESSAGE, "")),
        message_type=message_type(headers),
    )


def exported(message: Message) -> Mapping[str, object]:
    """Return a message as a document for JSON."""
    headers, damaged = headers_of(message)
    document: dict[str, object] = {"id": message.id, "headers": dict(headers)}
    if damaged is not None:
        document["damaged"] = message.encoded_headers.decode("utf-8", "backslashreplace")
    try:
        return document | {"body": message.body.decode()}
    except UnicodeDecodeError:
        import base64

        return document | {"body_base64": base64.b64encode(message.body).decode()}


def _shown(group: FailureGroup, newest: Message | None) -> ErrorGroup:
    return ErrorGroup(
        group.key,
        group.title,
        group.failure.place,
        group.all.count,
        group.all.new,
        group.all.first,
        group.all.last,
        "" if newest is None else error_row(newest).exception_text,
        {day.isoformat(): number for day, number in group.all.by_day.items()},
        [ErrorKind(queue, types, count.count, count.new) for queue, types, count in group.largest_kinds],
    )


def _of_retry(outcome: error_queue.RetryOutcome) -> ActionOutcome:
    result = f"sent to {outcome.queue}" if outcome.problem is None else outcome.problem
    return ActionOutcome(outcome.id, outcome.problem is None, result)
