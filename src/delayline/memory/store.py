"""The reference store: every capability, in this process's memory, gone with it."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from dataclasses import replace
from itertools import count, islice, pairwise, takewhile
from typing import TYPE_CHECKING

from delayline.checks import time_span
from delayline.clock import EPOCH
from delayline.delayed.store import (
    DueBucket,
    DueCount,
    DueForecast,
    FoundMessage,
    Outcome,
    SingleMessageVerbs,
    StoreResult,
    checked_edges,
    found_of,
    postponed,
    spans_of,
)
from delayline.memory.pauses import MemoryDispatchPauses
from delayline.memory.schedules import MemoryScheduleRows
from delayline.memory.transaction import InMemory, in_memory
from delayline.message import in_utc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime, timedelta

    from delayline.delayed.fairness import FairBy
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction, TransactionMode

Key = tuple["datetime", int, str]  # due, order of arrival, id


class MemoryDelayedMessageStore(InMemory, SingleMessageVerbs):
    """Keeps delayed messages in memory: for tests, tutorials and messages that may die with the process."""

    def __init__(self) -> None:
        self._messages: dict[str, DelayedMessage] = {}
        self._arrivals: dict[str, int] = {}
        self._order: list[Key] = []
        self._locked: set[str] = set()
        self._arrival = count()
        self._listeners: list[Callable[[datetime], None]] = []
        self._fair_by: FairBy | None = None
        #: The order of each group's messages, where groups are served in turn; the group served last is at the end.
        self._groups: dict[str, list[Key]] = {}
        self._schedules = MemoryScheduleRows()
        self._pauses = MemoryDispatchPauses(self._overdue, self._move, self._wake, self.next_due)

    def be_fair(self, fair_by: FairBy) -> None:
        """Serve groups of due messages in turn."""
        self._fair_by, self._groups = fair_by, {}
        for key in self._order:
            self._groups.setdefault(fair_by.group_of(self._messages[key[2]]), []).append(key)

    @property
    def schedules(self) -> MemoryScheduleRows:
        """The schedules."""
        return self._schedules

    @property
    def dispatch_pauses(self) -> MemoryDispatchPauses:
        """What is paused."""
        return self._pauses

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Do nothing: every mode works."""

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message until it is due."""
        await self.store_many([message], transaction)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Keep the messages, all at once."""
        if transaction is None:
            self._insert(messages)
        else:
            in_memory(transaction).stored |= {message.id for message in messages}
            in_memory(transaction).on_commit(lambda: self._insert(messages))

    async def store_or_replace(
        self,
        message: DelayedMessage,
        *,
        replace: bool,
        at_most: timedelta | None = None,
        transaction: Transaction | None = None,
    ) -> StoreResult:
        """Store the message unless a message with its id is pending, which it may replace."""

        def change() -> None:
            pending = self._messages.get(message.id)
            changes = pending is not None and at_most is not None
            new = postponed(message, pending, at_most) if changes else message  # type: ignore[arg-type]
            self._delete([message.id])
            self._insert([new])

        started = None if transaction is None else in_memory(transaction)
        own = started is not None and message.id in started.stored
        outcome = Outcome.DONE if own else self._outcome(message.id)
        if outcome is not Outcome.NOT_PENDING and not replace:
            return StoreResult.KEPT
        if outcome is Outcome.DISPATCHING:
            return StoreResult.DISPATCHING
        if started is None:
            change()
        else:
            if outcome is Outcome.DONE and not own:
                self._locked.add(message.id)
                started.on_rollback(lambda: self._locked.discard(message.id))
            started.stored.add(message.id)
            started.on_commit(change)
        return StoreResult.STORED if outcome is Outcome.NOT_PENDING else StoreResult.REPLACED

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return the earliest due messages."""
        batch: list[DelayedMessage] = []
        size = 0
        for _, _, message_id in self._due(at):
            if len(batch) == limit:
                break
            message = self._messages[message_id]
            size += len(message.message.body) + len(message.message.encoded_headers)
            if batch and size > max_bytes:
                break
            batch.append(message)
        if self._fair_by is not None:
            for message in batch:
                group = self._fair_by.group_of(message)
                self._groups[group] = self._groups.pop(group)
            batch.sort(key=lambda message: (message.due, self._arrivals[message.id]))
        ids = {message.id for message in batch}
        self._locked |= ids
        if transaction is not None:
            in_memory(transaction).on_commit(lambda: self._locked.difference_update(ids))
            in_memory(transaction).on_rollback(lambda: self._locked.difference_update(ids))
        return batch

    def _due(self, at: datetime) -> Iterator[Key]:
        """Yield what is due and not locked: by due time, or one message of each group in turn."""
        orders = [self._order] if self._fair_by is None else list(self._groups.values())
        waiting = deque(takewhile(lambda key: key[0] <= at, filter(self._is_free, order)) for order in orders)
        while waiting:
            keys = waiting.popleft()
            if (key := next(keys, None)) is not None:
                yield key
                waiting.append(keys)

    def _is_free(self, key: Key) -> bool:
        return key[2] not in self._locked and not self._is_paused(key)

    def _is_paused(self, key: Key) -> bool:
        return self._pauses.is_any and self._pauses.holds(self._messages[key[2]].destination)

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message that is not paused."""
        return next((key[0] for key in self._order if not self._is_paused(key)), None)

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages; in a transaction they stay, locked, until its commit."""
        known_ids = [message.id for message in messages if message.id in self._messages]
        if transaction is None:
            self._delete(known_ids)
        else:
            in_memory(transaction).on_commit(lambda: self._delete(known_ids))
        return len(known_ids)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count failures, move the due times, unlock; in a transaction at its commit."""
        known_ids = [message.id for message in messages if message.id in self._messages]
        if transaction is None:
            self._retry(known_ids, at)
        else:
            in_memory(transaction).on_commit(lambda: self._retry(known_ids, at))
        return len(known_ids)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock."""
        self._locked.difference_update(message.id for message in messages)

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` with the earliest due time of every commit that stored something."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a waiting message."""
        return self._change(message_id, None, transaction)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Move a waiting message to another due time."""
        return self._change(message_id, in_utc(due), transaction)

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first."""
        waiting = (self._messages[message_id] for _, _, message_id in self._order)
        messages = [message for message in waiting if destination is None or message.destination == destination]
        return messages[offset : offset + limit]

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count pending messages by bucket and destination."""
        time_span("bucket", bucket)
        counts = Counter(
            (EPOCH + (message.due - EPOCH) // bucket * bucket, message.destination)
            for message in self._messages.values()
        )
        return [DueCount(start, destination, number) for (start, destination), number in sorted(counts.items())]

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None."""
        message = self._messages.get(message_id)
        return None if message is None else found_of(message, body_limit)

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return pending messages without their bodies, earliest due first."""
        first = 0 if start is None else bisect.bisect_left(self._order, (start, -1, ""))
        last = len(self._order) if end is None else bisect.bisect_left(self._order, (end, -1, ""))
        window = islice(self._order, min(first + offset, last), min(first + offset + limit, last))
        return [found_of(self._messages[message_id], 0) for _, _, message_id in window]

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count pending messages between the edges; see `SupportsDueForecast`."""
        edges = checked_edges(edges)
        ends = [0, *(bisect.bisect_left(self._order, (edge, -1, "")) for edge in edges), len(self._order)]
        buckets = []
        for span, (first, end) in zip(spans_of(edges), pairwise(ends), strict=True):
            shares: dict[str, int] = {}
            if by_destination:
                ids = (message_id for _, _, message_id in islice(self._order, first, end))
                shares = dict(Counter(self._messages[message_id].destination for message_id in ids).most_common())
            buckets.append(DueBucket(*span, end - first, destinations=shares))
        return DueForecast(buckets, self._order[0][0] if self._order else None)

    def _overdue(self, at: datetime, destination: str | None) -> Sequence[DelayedMessage]:
        """Return what is due and not locked, for a destination, or for all that are not paused."""
        free = (key[2] for key in takewhile(lambda key: key[0] <= at, self._order) if key[2] not in self._locked)
        messages = [self._messages[message_id] for message_id in free]
        if destination is None:
            return [message for message in messages if not self._pauses.holds(message.destination)]
        return [message for message in messages if message.destination == destination]

    def _move(self, messages: Sequence[DelayedMessage], due: datetime) -> None:
        self._delete([message.id for message in messages])
        self._insert([replace(message, due=due) for message in messages])

    def _wake(self) -> None:
        for listener in self._listeners:
            listener(EPOCH)

    def _outcome(self, message_id: str) -> Outcome:
        if message_id not in self._messages:
            return Outcome.NOT_PENDING
        return Outcome.DISPATCHING if message_id in self._locked else Outcome.DONE

    def _insert(self, messages: Sequence[DelayedMessage]) -> None:
        for message in messages:
            if message.id not in self._messages:
                arrival = self._arrivals[message.id] = next(self._arrival)
                self._messages[message.id] = message
                for order in self._orders_of(message):
                    bisect.insort(order, (message.due, arrival, message.id))
        for listener in self._listeners if messages else ():
            listener(min(message.due for message in messages))

    def _retry(self, ids: Sequence[str], at: datetime) -> None:
        failed = [self._messages[message_id] for message_id in ids if message_id in self._messages]
        self._delete(ids)
        self._insert([replace(message, due=at, number_of_retries=message.number_of_retries + 1) for message in failed])

    def _change(self, message_id: str, due: datetime | None, transaction: Transaction | None) -> Outcome:
        """Delete a waiting message, or move it to that due time; in a transaction it is locked until its end."""

        def change() -> None:
            message = self._messages[message_id]
            self._delete([message_id])
            self._insert([] if due is None else [replace(message, due=due)])

        outcome = self._outcome(message_id)
        if outcome is Outcome.DONE and transaction is None:
            change()
        elif outcome is Outcome.DONE and transaction is not None:
            self._locked.add(message_id)
            in_memory(transaction).on_commit(change)
            in_memory(transaction).on_rollback(lambda: self._locked.discard(message_id))
        elif outcome is Outcome.NOT_PENDING and transaction and message_id in in_memory(transaction).stored:
            outcome = Outcome.DONE
            if due is None:
                in_memory(transaction).stored.discard(message_id)
            in_memory(transaction).on_commit(change)
        return outcome

    def _orders_of(self, message: DelayedMessage) -> Iterator[list[Key]]:
        """Yield the lists that a message is in: that of all, and that of its group."""
        yield self._order
        if self._fair_by is not None:
            yield self._groups.setdefault(self._fair_by.group_of(message), [])

    def _delete(self, ids: Sequence[str]) -> None:
        for message_id in ids:
            message = self._messages.pop(message_id, None)
            if message is not None:
                key = (message.due, self._arrivals.pop(message_id), message_id)
                for order in self._orders_of(message):
                    del order[bisect.bisect_left(order, key)]
            self._locked.discard(message_id)
