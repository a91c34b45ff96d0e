"""The error queue of an endpoint: in groups, message by message, and what people do to it."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline import error_queue
from delayline.actions import OperatorAction, SetRequest
from delayline.checks import whole_number
from delayline.dashboard.actions import not_done
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.contents import details, one_line, wire_time
from delayline.dashboard.forms import editable
from delayline.dashboard.model import (
    ActionOutcome,
    ErrorGroup,
    ErrorGroups,
    ErrorPage,
    ErrorRow,
    MessageDetails,
    Unavailable,
)
from delayline.errors import DelaylineError
from delayline.failure_groups import group_key, headers_of, message_type, place_of
from delayline.failures import FAILURE_HEADERS
from delayline.filters import MessageFilter
from delayline.message import Headers, Message
from delayline.transport import SupportsQueuePass, SupportsTransportTransactions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from delayline.actions import ActionRecord
    from delayline.dashboard.actions import Actions
    from delayline.dashboard.back_ends import BackEnds
    from delayline.dashboard.contents import Form

#: Failed messages that are read to be grouped.
MOST_GROUPED: Final = 10_000
#: Failed messages that are read where each has to be taken from the broker and given back.
MOST_TAKEN: Final = 1_000
#: More than a queue has.
WHOLE_QUEUE: Final = 2**31
#: Days of the trend of failures.
TREND: Final = 14


class FailedMessages(PageQueries):
    """Shows the failed messages of an endpoint, and retries, edits or deletes them."""

    def __init__(self, back_ends: BackEnds, actions: Actions) -> None:
        super().__init__(back_ends)
        self._actions = actions
        self._queue = back_ends.error_queue

    @within_limit
    async def groups(self) -> ErrorGroups:
        """Return the error queue, grouped by exception, place, queue and type, with the trend of the last days."""
        queues = await self.back_ends.queues()
        total = await queues.count(self._queue)
        by_key: dict[str, ErrorGroup] = {}
        looked_at = 0
        async with contextlib.aclosing(self._failed(None, MOST_GROUPED)) as messages:
            async for message in messages:
                looked_at += 1
                _add_to_group(by_key, message)
        today = self.back_ends.clock.now().date()
        days = [(today - timedelta(days=back)).isoformat() for back in reversed(range(TREND))]
        groups = heapq.nlargest(len(by_key), by_key.values(), key=lambda group: (group.count, group.key))
        return ErrorGroups(self._queue, total, looked_at, groups, days)

    @within_limit
    async def page(self, group: str | None = None, *, limit: int = 50, offset: int = 0) -> ErrorPage:
        """Return failed messages of a group, or all; oldest first."""
        whole_number("limit", limit, at_least=1)
        whole_number("offset", offset, at_least=0)
        rows: list[ErrorRow] = []
        number = 0
        async with contextlib.aclosing(self._failed(group, MOST_GROUPED)) as messages:
            async for message in messages:
                if offset <= number < offset + limit:
                    rows.append(error_row(message))
                number += 1
        more = number > offset + limit
        return ErrorPage(rows, number, offset, offset + limit if more else None)

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
        self, group: str | None = None, *, actor: str, rate: float | None = 10.0, to: str | None = None
    ) -> ActionRecord:
        """Send all failed messages of a group, or all, to the queues they failed in, as a job.

        Messages that fail again meanwhile are not retried again. In a SQL database the job is recorded, and goes on in
        another process if this one ends.
        """
        request = SetRequest(
            OperatorAction.RETRY,
            MessageFilter(group=group),
            queue=self._queue,
            destination=to,
            inbox_window=self.back_ends.inbox_window,
        )
        return await self._actions.start(request, actor=actor, rate=rate)

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

    async def purge(self, ids: Sequence[str] | None = None, *, actor: str) -> list[ActionOutcome] | Unavailable:
        """Delete failed messages for ever: the messages with the ids, or all that the error queue has."""
        if ids is not None:
            return await self._each_failed(OperatorAction.PURGE, ids, actor, self._drop)
        number = await self._purge_all()
        if isinstance(number, Unavailable):
            return number
        result = f"{number} deleted"
        await self._actions.note(OperatorAction.PURGE, actor, f"all of {self._queue}", result, done=True, failed=True)
        return [ActionOutcome("", done=True, text=f"{number} deleted")]

    async def export(self, group: str | None = None) -> AsyncGenerator[Mapping[str, object], None]:
        """Yield all failed messages as documents with id, headers and body (Base64 where it is not text)."""
        async for message in self._failed(group, None):
            yield exported(message)

    async def _failed(self, group: str | None, most: int | None) -> AsyncGenerator[Message, None]:
        """Yield failed messages, oldest first.

        Args:
            group: The group's key; None for all.
            most: How many to look at; where the broker has to give them back, a thousand at most. None for all.
        """
        queues, number = await self.back_ends.queues(), 0
        transport = await self.back_ends.transport()
        shared = isinstance(transport, SupportsTransportTransactions)
        if not shared and (most is not None or not isinstance(transport, SupportsQueuePass)):
            for message in await queues.browse(self._queue, WHOLE_QUEUE if most is None else min(most, MOST_TAKEN)):
                if group in (None, group_key(message)):
                    yield message
            return
        async with contextlib.aclosing(error_queue.browse(queues, self._queue)) as messages:
            async for message in messages:
                if group in (None, group_key(message)):
                    yield message
                number += 1
                if number == most:
                    return

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

    @within_limit
    async def _purge_all(self) -> int:
        return await (await self.back_ends.queues()).purge(self._queue)


def error_row(message: Message) -> ErrorRow:
    """Return a failed message as it is listed."""
    headers, damaged = headers_of(message)
    return ErrorRow(
        id=message.id,
        failed_at=wire_time(headers, Headers.TIME_OF_FAILURE),
        queue=headers.get(Headers.FAILED_QUEUE, ""),
        exception_type=headers.get(Headers.EXCEPTION_TYPE, "")[:300],
        exception_text=one_line(damaged or headers.get(Headers.EXCEPTION_MESSAGE, "")),
        message_type=message_type(headers),
        size=len(message.encoded_headers) + len(message.body),
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


def _add_to_group(groups: dict[str, ErrorGroup], message: Message) -> None:
    key, row = group_key(message), error_row(message)
    headers, damaged = headers_of(message)
    group = groups.get(key)
    if group is None:
        kind = row.exception_type or ("(headers that cannot be read)" if damaged else "(unknown)")
        group = ErrorGroup(key, kind, place_of(headers), row.queue, row.message_type, 0, None, None, "", {})
    by_day = dict(group.by_day)
    if row.failed_at is not None:
        day = row.failed_at.date().isoformat()
        by_day[day] = by_day.get(day, 0) + 1
    times = [time for time in (group.first, group.last, row.failed_at) if time is not None]
    groups[key] = replace(
        group,
        count=group.count + 1,
        first=min(times, default=None),
        last=max(times, default=None),
        example=row.exception_text,
        by_day=by_day,
    )


def _of_retry(outcome: error_queue.RetryOutcome) -> ActionOutcome:
    result = f"sent to {outcome.queue}" if outcome.problem is None else outcome.problem
    return ActionOutcome(outcome.id, outcome.problem is None, result)
