"""A delayed message store over several shards: a table of an endpoint in each, and a message in one of them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from delayline.clock import ONE_SECOND, SystemClock
from delayline.delayed.pauses import DispatchPause
from delayline.delayed.store import (
    DueBucket,
    DueCount,
    DueForecast,
    Outcome,
    SingleMessageVerbs,
    StoreResult,
)
from delayline.sql.shards.parts import OnShards
from delayline.sql.store import SqlDelayedMessageStore
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.delayed.store import FoundMessage
    from delayline.message import DelayedMessage
    from delayline.shards import Shard, ShardMap
    from delayline.sql.schedules import SqlScheduleRows
    from delayline.transaction import Transaction

BY_DUE: Final = attrgetter("due", "id")


class ShardedDelayedMessageStore(OnShards[SqlDelayedMessageStore], SingleMessageVerbs):
    """Delayed message store in tables of several SQL databases, or of several schemas.

    A `StoredDelivery` over it has a poller in each shard. Ids are unique in a shard: a message that is sent outside of
    handlers meets a pending one of its id in every shard where that may wait as a first send.

    Args:
        shards: Which shards there are.
        table_name: Name of the table; by default `{endpoint}.timeouts`.
        poll_interval: How often to look for messages of other processes, where a database has no notifications.
        journal: True records the events of each message, in its shard; False ends that.

    Raises:
        ConfigurationError: A URL or another argument is invalid.
        MissingExtra: A database's driver is not installed.
    """

    def __init__(
        self,
        shards: ShardMap,
        *,
        table_name: str | None = None,
        poll_interval: timedelta = ONE_SECOND,
        journal: bool | None = None,
    ) -> None:
        made = partial(self._made, table_name=table_name, poll_interval=poll_interval, journal=journal)
        super().__init__(shards, made, "its delayed messages")
        self.schedules: SqlScheduleRows = self._parts[shards.used[0].name].schedules
        """The schedules, all in the first shard."""
        self.dispatch_pauses: ShardedPauses = ShardedPauses(self._each, self._parts.values())
        """What is not dispatched, the same in every shard."""
        self._clock = LatestClock([part.clock() for part in self._parts.values()])
        self._callbacks: list[Callable[[datetime], None]] = []
        self._fetched: dict[str, str] = {}
        """The shards of messages that were fetched here, by their ids."""

    def _made(
        self, shard: Shard, *, table_name: str | None, poll_interval: timedelta, journal: bool | None
    ) -> SqlDelayedMessageStore:
        """Return the store of a shard."""
        return SqlDelayedMessageStore(
            shard.url, table_name=table_name, schema=shard.schema, poll_interval=poll_interval, journal=journal
        )

    def clock(self) -> Clock:
        """Return the latest of the shards' clocks: a delay that ends by it has ended by each of them."""
        return self._clock

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create the endpoint's table in every shard."""
        await asyncio.gather(*(self.set_up_part(name, endpoint_name) for name in self._parts))

    async def set_up_part(self, name: str, endpoint_name: str) -> None:
        """Create the endpoint's table in a shard, and keep the version of the map there."""
        await self._versions.publish(self._shards[name])
        await self._parts[name].setup_infrastructure(endpoint_name)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        rights = [await part.missing_rights(endpoint_name, takes=takes) for part in self._living]
        return [grant for grants in rights for grant in grants]

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the shards; those that are out of reach later. Raises BackendUnavailable if none answers."""
        await self.opening.open(
            {name: partial(self.initialize_part, name, endpoint_name, mode) for name in self._parts}
        )
        await self.check_map()

    async def initialize_part(self, name: str, endpoint_name: str, mode: TransactionMode) -> None:
        """Open a shard."""
        await self._parts[name].initialize(endpoint_name, mode)
        self._opened.add(name)

    async def close(self) -> None:
        """Release claimed messages and disconnect. Idempotent."""
        await self.opening.stop()
        await self._versions.stop()
        self._opened.clear()
        self._fetched.clear()
        await asyncio.gather(*(part.close() for part in self._parts.values()))

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message in its shard until it is due."""
        await self.store_many([message], transaction)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Keep the messages, those of a transaction all in its shard."""
        if not messages:
            return
        if transaction is not None:
            await self._part_in(transaction, messages[0].id).store_many(messages, transaction)
            return
        shards: dict[str, list[DelayedMessage]] = defaultdict(list)
        for message in messages:
            shards[await self.shard_to_store(message.id)].append(message)
        parts = {name: self._part(name) for name in shards}
        for name, those in shards.items():
            await parts[name].store_many(those)

    async def shard_to_store(self, message_id: str) -> str:
        """Return where a first send is kept: with a pending message of its id, or where it belongs by the map."""
        name = self.shard_of(message_id)
        for other in self._versions.places_of(message_id)[1:]:
            if await self._part(other).find(message_id, body_limit=0) is not None:
                return other
        return name

    async def store_or_replace(
        self,
        message: DelayedMessage,
        *,
        replace: bool,
        at_most: timedelta | None = None,
        transaction: Transaction | None = None,
    ) -> StoreResult:
        """Store the message unless a message with its id is pending in its shard, which it may replace."""
        if transaction is None:
            part = self._part(await self.shard_to_store(message.id))
        else:
            part = self._part_in(transaction, message.id)
        return await part.store_or_replace(message, replace=replace, at_most=at_most, transaction=transaction)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages: the earliest of all shards, or in a shard's transaction those of it."""
        if transaction is not None:
            return await self._part_in(transaction).fetch_due(at, limit, max_bytes=max_bytes, transaction=transaction)
        due_times = await self._each(lambda part: part.next_due())
        names = [name for name, due in due_times.items() if due is not None and due <= at]
        batches = await asyncio.gather(*(self._part(name).fetch_due(at, limit, max_bytes=max_bytes) for name in names))
        merged = sorted(
            ((message, name) for name, batch in zip(names, batches, strict=True) for message in batch),
            key=lambda found: BY_DUE(found[0]),
        )
        taken: list[DelayedMessage] = []
        left: dict[str, list[DelayedMessage]] = defaultdict(list)
        size = 0
        for message, name in merged:
            size += len(message.message.body) + len(message.message.encoded_headers)
            if len(taken) == limit or (taken and (left or size > max_bytes)) or message.id in self._fetched:
                left[name].append(message)
                continue
            self._fetched[message.id] = name
            taken.append(message)
        for name, messages in left.items():
            await self._part(name).release_many(messages)
        return taken

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message."""
        return min((due for due in (await self._each(lambda part: part.next_due())).values() if due), default=None)

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages."""
        if transaction is not None:
            return await self._part_in(transaction).remove_many(messages, transaction)
        return await self._change(messages, lambda part, those: part.remove_many(those))

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Count a failure and unlock."""

        async def count(part: SqlDelayedMessageStore, those: Sequence[DelayedMessage]) -> int:
            return int(await part.increment_failure_count(those[0]))

        return await self._change([message], count) == 1

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count failures, move the due times, unlock."""
        if transaction is not None:
            return await self._part_in(transaction).retry_many(messages, at, transaction)
        return await self._change(messages, lambda part, those: part.retry_many(those, at))

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the claims."""

        async def release(part: SqlDelayedMessageStore, those: Sequence[DelayedMessage]) -> int:
            await part.release_many(those)
            return 0

        await self._change([message for message in messages if message.id in self._fetched], release)

    async def _change(
        self,
        messages: Sequence[DelayedMessage],
        change: Callable[[SqlDelayedMessageStore, Sequence[DelayedMessage]], Awaitable[int]],
    ) -> int:
        """Change fetched messages in their shards, and forget them."""
        shards: dict[str, list[DelayedMessage]] = defaultdict(list)
        for message in messages:
            shards[self._fetched.get(message.id) or self.map.shard_of(message.id)].append(message)
        number = 0
        for name, those in shards.items():
            number += await change(self._part(name), those)
            for message in those:
                self._fetched.pop(message.id, None)
        return number

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` with the earliest due time after each commit, in any shard that is open now."""
        stops = [part.on_stored(callback) for part in self._living]

        def stop() -> None:
            for each in stops:
                each()

        return stop

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a waiting message, in whichever shard it waits; in a transaction in that of the transaction."""
        return await self._manage(message_id, transaction, lambda part, inner: part.cancel(message_id, inner))

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Move a waiting message to another due time, in whichever shard it waits; see `cancel`."""
        return await self._manage(message_id, transaction, lambda part, inner: part.reschedule(message_id, due, inner))

    async def _manage(
        self,
        message_id: str,
        transaction: Transaction | None,
        change: Callable[[SqlDelayedMessageStore, Transaction | None], Awaitable[Outcome]],
    ) -> Outcome:
        if transaction is None:
            return await self._search(
                message_id, lambda part: change(part, None), lambda outcome: outcome is not Outcome.NOT_PENDING
            )
        return await change(self._part_in(transaction, message_id), transaction)

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages of all shards, earliest due first."""
        found = await self._each(lambda part: part.pending(destination=destination, limit=limit + offset))
        merged = sorted((message for messages in found.values() for message in messages), key=BY_DUE)
        return merged[offset : offset + limit]

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count pending messages of all shards by bucket and destination."""
        counts: Counter[tuple[datetime, str]] = Counter()
        for of_shard in (await self._each(lambda part: part.count_by_due(bucket))).values():
            for count in of_shard:
                counts[count.start, count.destination] += count.count
        return [DueCount(start, destination, number) for (start, destination), number in sorted(counts.items())]

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None."""
        return await self._search(
            message_id, lambda part: part.find(message_id, body_limit=body_limit), lambda found: found is not None
        )

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return pending messages of all shards without their bodies, earliest due first."""
        found = await self._each(lambda part: part.due_between(start, end, limit=limit + offset))
        merged = sorted((each for those in found.values() for each in those), key=lambda each: BY_DUE(each.message))
        return merged[offset : offset + limit]

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count pending messages of all shards between the edges; see `SupportsDueForecast`."""
        forecasts = await self._each(lambda part: part.due_forecast(edges, by_destination=by_destination))
        return sum_of(list(forecasts.values()))


def sum_of(forecasts: Sequence[DueForecast]) -> DueForecast:
    """Return the forecast of all shards, from that of each between the same edges."""
    buckets = [_bucket(those) for those in zip(*(forecast.buckets for forecast in forecasts), strict=True)]
    return DueForecast(buckets, min((each.earliest for each in forecasts if each.earliest), default=None))


def _bucket(buckets: Sequence[DueBucket]) -> DueBucket:
    destinations: Counter[str] = Counter()
    for bucket in buckets:
        destinations.update(bucket.destinations)
    return replace(
        buckets[0],
        count=sum(bucket.count for bucket in buckets),
        exact=all(bucket.exact for bucket in buckets),
        at_least=any(bucket.at_least for bucket in buckets),
        destinations=dict(destinations.most_common()),
    )


class LatestClock:
    """The latest of several clocks.

    Args:
        clocks: The shards' clocks.
    """

    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks = clocks

    def now(self) -> datetime:
        """Return the latest time."""
        return max(clock.now() for clock in self._clocks)

    async def sleep(self, seconds: float) -> None:
        """Return after a time."""
        await SystemClock().sleep(seconds)


class ShardedPauses:
    """The pauses of a sharded store, which hold in every shard.

    Args:
        each: Calls something in every shard, and returns the results by name.
        parts: The stores of the shards.
    """

    def __init__(
        self,
        each: Callable[[Callable[[SqlDelayedMessageStore], Awaitable[Any]]], Awaitable[dict[str, Any]]],
        parts: Collection[SqlDelayedMessageStore],
    ) -> None:
        self._parts = parts
        self._each = each

    async def all(self) -> Sequence[DispatchPause]:
        """Return the pauses of any shard, each since its earliest time."""
        pauses: dict[str | None, DispatchPause] = {}
        for of_shard in (await self._each(lambda part: part.dispatch_pauses.all())).values():
            for pause in of_shard:
                known = pauses.get(pause.destination, pause)
                pauses[pause.destination] = min(known, pause, key=lambda each: each.since)
        return sorted(pauses.values(), key=lambda pause: pause.destination or "")

    async def pause(self, destination: str | None, at: datetime) -> bool:
        """Dispatch no more messages for the destination, or of the endpoint."""
        return any((await self._each(lambda part: part.dispatch_pauses.pause(destination, at))).values())

    async def resume(self, destination: str | None, at: datetime, rate: float | None = None) -> bool:
        """Dispatch them again, at the rate divided among the shards."""
        share = None if rate is None else rate / len(self._parts)

        async def resumed(part: SqlDelayedMessageStore) -> bool:
            return await part.dispatch_pauses.resume(destination, at, share)

        return any((await self._each(resumed)).values())

    async def earliest(self) -> datetime | None:
        """Return the earliest due time of what is not paused, in any shard."""
        due_times = (await self._each(lambda part: part.dispatch_pauses.earliest())).values()
        return min((due for due in due_times if due is not None), default=None)

    async def look(self) -> bool:
        """Read the pauses if it is time for that."""
        return any((await self._each(lambda part: part.dispatch_pauses.look())).values())

    @property
    def is_any(self) -> bool:
        """Whether there was a pause at the last look, in any shard."""
        return any(part.dispatch_pauses.is_any for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether the whole endpoint was paused at the last look, in every shard."""
        return all(part.dispatch_pauses.is_whole for part in self._parts)
