"""The store in front of delay levels: how it names messages that go to the levels later, and their management.

Such a message is stored under a destination that has its due time in front, and is due in the store when the levels can
take the rest of its delay. Management shows and changes it as it was sent.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from delayline.actions import SupportsActionLog
from delayline.clock import EPOCH, SystemClock
from delayline.delayed.store import (
    DueBucket,
    DueCount,
    DueForecast,
    FoundMessage,
    Outcome,
    StoreResult,
    SupportsClock,
    SupportsDueForecast,
    SupportsLookup,
    SupportsManagement,
    SupportsReplacement,
    found_of,
)
from delayline.errors import ConfigurationError, InvalidMessage
from delayline.message import MAXIMUM_DESTINATION_LENGTH, DelayedMessage, from_wire_time, in_utc, to_wire_time
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.actions import ActionLog
    from delayline.clock import Clock
    from delayline.transaction import Transaction

    Deferred = tuple[TransportOperation, datetime]

#: The destination of a stored message that goes to the levels later. No queue has such a name: a poller that
#: cannot parse it moves the message to the error queue instead of delivering it years early.
PARKED: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d:\d{6} Z)\|(.+)", re.DOTALL)
#: Characters in front of the destination in the name that `parked` gives.
PARKED_PREFIX: Final = len("2026-11-24 08:00:00:000000 Z|")
ALL_TIME: Final = timedelta(days=365_000)
PAGE: Final = 200
#: How long a message that is being rescheduled is out of the poller's way; if the process ends meanwhile, it enters
#: the levels afterwards, with its earlier due time.
HELD_FOR: Final = timedelta(minutes=1)
WHOLE_BODY: Final = 2**31 - 1


def can_be_parked(operation: TransportOperation) -> bool:
    """Return whether the name of the destination is short enough for `parked`."""
    return len(operation.destination) + PARKED_PREFIX <= MAXIMUM_DESTINATION_LENGTH


def parked(operation: TransportOperation, due: datetime) -> TransportOperation:
    """Return the delayed message to store for an operation. Raises InvalidMessage for a name that is too long."""
    name = f"{to_wire_time(due)}|{operation.destination}"
    if len(name) > MAXIMUM_DESTINATION_LENGTH:
        longest = MAXIMUM_DESTINATION_LENGTH - len(name) + len(operation.destination)
        raise InvalidMessage(
            f"destination {operation.destination[:40]!r}... has {len(operation.destination)} characters: a message "
            f"that waits in a store until the delay levels can take it goes to names of {longest} at most"
        )
    return TransportOperation(operation.message, name)


def released(operation: TransportOperation) -> Deferred | None:
    """Return the operation as it was before `parked`, and when it is due; None for another operation."""
    sent = sent_to(operation.destination)
    return None if sent is None else (TransportOperation(operation.message, sent[0]), sent[1])


def sent_to(destination: str) -> tuple[str, datetime] | None:
    """Return the destination and the due time in a name that `parked` gave; None for another name.

    A destination in that form without a valid time is ordinary: an unknown sender may ask for replies there.
    """
    match = PARKED.fullmatch(destination)
    if match is None:
        return None
    try:
        return match[2], from_wire_time(match[1])
    except ValueError:
        return None


def as_sent(message: DelayedMessage) -> DelayedMessage:
    """Return the stored message with the destination and the due time that it was sent with."""
    sent = sent_to(message.destination)
    return message if sent is None else replace(message, destination=sent[0], due=sent[1])


def managed_as_sent(store: object) -> object:
    """Return the management of a store in front of delay levels; the store itself if it has none."""
    if not isinstance(store, SupportsManagement):
        return store
    if isinstance(store, SupportsLookup) and isinstance(store, SupportsDueForecast):
        return SearchedAsSent(store)
    return ManagedAsSent(store)


class ManagedAsSent:
    """A store's management, which shows and changes messages as they were sent, wherever they go from the store."""

    def __init__(self, store: SupportsManagement) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the store has
        return getattr(self._store, name)

    def clock(self) -> Clock:
        """Return the clock that due times are measured with: the store's, else this machine's."""
        return self._store.clock() if isinstance(self._store, SupportsClock) else SystemClock()

    def message_set(self, endpoint_name: str) -> None:
        """Return None: the store's statements know messages as they are stored, so that they are changed one by one."""
        del endpoint_name

    def action_log(self, endpoint_name: str) -> ActionLog | None:
        """Return the record of the actions on an endpoint's messages in the store's database, if it has one."""
        return self._store.action_log(endpoint_name) if isinstance(self._store, SupportsActionLog) else None

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a pending message, unless the poller has it already."""
        return await self._store.cancel(message_id, transaction)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Give a pending message a new due time, until which it waits in the store, unless the poller has it already.

        Raises ConfigurationError for a message for the levels in a store that cannot replace messages.
        """
        message = await self._whole(message_id)
        sent = None if message is None else as_sent(message)
        if message is None or sent is message or sent is None:
            return await self._store.reschedule(message_id, due, transaction)
        if transaction is not None:
            raise ConfigurationError(
                f"message {message_id!r} waits in the store for the delay levels, and cannot be rescheduled in a "
                "transaction: leave transaction= out, or cancel the message in it and send another"
            )
        if not isinstance(self._store, SupportsReplacement):
            raise ConfigurationError(
                f"{type(self._store).__name__} cannot replace messages, so {message_id!r}, which waits there for the "
                "delay levels, cannot be rescheduled: cancel it, and send it again"
            )
        outcome = await self._store.reschedule(message_id, max(message.due, self.clock().now() + HELD_FOR))
        if outcome is not Outcome.DONE:
            return outcome
        result = await self._store.store_or_replace(replace(sent, due=in_utc(due)), replace=True)
        if result is StoreResult.STORED:  # it was cancelled just now
            await self._store.cancel(message_id)
            return Outcome.NOT_PENDING
        return Outcome.DONE if result is StoreResult.REPLACED else Outcome.DISPATCHING

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first, without locking them."""
        number = offset + limit
        messages = await self._parked(number, lambda name, _: destination in (None, name))
        messages += await self._plain(
            number, lambda limit, offset: self._store.pending(destination=destination, limit=limit, offset=offset)
        )
        return sorted(messages, key=lambda message: message.due)[offset:number]

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Return counts by destination and due bucket, earliest first."""
        counts: Counter[tuple[datetime, str]] = Counter()
        for counted in await self._store.count_by_due(bucket):
            sent = sent_to(counted.destination)
            if sent is None:
                counts[counted.start, counted.destination] += counted.count
            else:
                destination, due = sent
                counts[EPOCH + (due - EPOCH) // bucket * bucket, destination] += counted.count
        return [DueCount(start, destination, number) for (start, destination), number in sorted(counts.items())]

    async def _whole(self, message_id: str) -> DelayedMessage | None:
        """Return the message with that id as it is stored, with its whole body."""
        offset = 0
        while page := await self._store.pending(limit=PAGE, offset=offset):
            for message in page:
                if message.id == message_id:
                    return message
            offset += len(page)
        return None

    async def _parked(self, number: int, wanted: Callable[[str, datetime], bool]) -> list[DelayedMessage]:
        """Return the first messages, as they were sent, that go to the levels later."""
        names = {
            counted.destination: (sent[1], counted.count)
            for counted in await self._store.count_by_due(ALL_TIME)
            if (sent := sent_to(counted.destination)) is not None and wanted(*sent)
        }
        messages: list[DelayedMessage] = []
        for name, _ in sorted(names.items(), key=lambda item: item[1]):
            if len(messages) >= number:
                break
            messages += map(as_sent, await self._store.pending(destination=name, limit=number - len(messages)))
        return messages

    async def _plain(self, number: int, page_of: Callable[[int, int], Any]) -> list[DelayedMessage]:
        """Return the first messages that do not go to the levels, from pages by limit and offset."""
        messages: list[DelayedMessage] = []
        offset = 0
        while len(messages) < number and (page := await page_of(min(PAGE, number), offset)):
            messages += [message for message in page if sent_to(message.destination) is None]
            offset += len(page)
        return messages[:number]


class SearchedAsSent(ManagedAsSent):
    """The same for a store that finds messages and forecasts their number."""

    @property
    def _search(self) -> SupportsLookup:
        return cast("SupportsLookup", self._store)

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None."""
        searched = await self._search.find(message_id, body_limit=body_limit)
        return None if searched is None else replace(searched, message=as_sent(searched.message))

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return messages without their bodies, earliest due first."""
        number = offset + limit
        later = await self._parked(
            number, lambda _, due: (start is None or due >= start) and (end is None or due < end)
        )
        results = [found_of(message, 0) for message in later]
        at = 0
        while len(results) - len(later) < number and (
            page := await self._search.due_between(start, end, limit=min(PAGE, number), offset=at)
        ):
            results += [result for result in page if sent_to(result.message.destination) is None]
            at += len(page)
        return sorted(results, key=lambda result: result.message.due)[offset:number]

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count the messages in each bucket of due times; an estimate counts messages as they leave the store."""
        forecast = await cast("SupportsDueForecast", self._store).due_forecast(edges, by_destination=True)
        buckets = list(forecast.buckets)
        counts = [bucket.count for bucket in buckets]
        named: list[defaultdict[str, int]] = [defaultdict(int) for _ in buckets]
        limits = [in_utc(edge) for edge in edges]
        for position, bucket in enumerate(buckets):
            for name, number in bucket.destinations.items():
                destination, due = sent_to(name) or (name, None)
                goes = position if due is None else bisect_right(limits, due)
                named[goes][destination] += number
                counts[goes] += number
                counts[position] -= number
        return DueForecast(
            [
                _bucket(bucket, number, names if by_destination else {})
                for bucket, number, names in zip(buckets, counts, named, strict=True)
            ],
            await self._earliest(),
        )

    async def _earliest(self) -> datetime | None:
        """Return the earliest due time; a message that goes to the levels later leaves the store before it is due."""
        first = next(iter(await self._store.pending(limit=1)), None)
        if first is not None and sent_to(first.destination) is not None:
            first = next(iter(await self.pending(limit=1)), None)
        return None if first is None else first.due

    async def _whole(self, message_id: str) -> DelayedMessage | None:
        message = await self._search.find(message_id, body_limit=WHOLE_BODY)
        return None if message is None else message.message


def _bucket(bucket: DueBucket, number: int, names: dict[str, int]) -> DueBucket:
    largest_first = dict(sorted(names.items(), key=lambda item: (-item[1], item[0])))
    return replace(bucket, count=max(0, number), destinations=largest_first)
