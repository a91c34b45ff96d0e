"""A store with a cold tier: finds, cancels and reschedules messages in both. Needs no Spark."""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

from delayline.bulk.cold_catalog import MICROS_A_HOUR, ColdFiles
from delayline.bulk.cold_folder import ColdFolder
from delayline.checks import time_span
from delayline.clock import EPOCH, ONE_MICROSECOND, from_microseconds, to_microseconds
from delayline.delayed.columns import message_of
from delayline.delayed.store import (
    DueBucket,
    DueCount,
    DueForecast,
    FoundMessage,
    Outcome,
    checked_edges,
    found_of,
    spans_of,
)
from delayline.errors import ConfigurationError
from delayline.message import in_utc
from delayline.places import MessagePlace, PlaceKind, PlacePage, pending_match
from delayline.sql.deadlines import long_work
from delayline.sql.journal import JournalEvent
from delayline.sql.schema import STORE_SUFFIX
from delayline.sql.shards.store import ShardedDelayedMessageStore, sum_of
from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.transactions import EnlistedTransaction

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection, Table

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.known_ids import ColdIds
    from delayline.delayed.columns import StoredRow
    from delayline.filters import MessageFilter
    from delayline.message import DelayedMessage
    from delayline.places import Key, MessageMatch, SearchablePlace
    from delayline.shards import Shard, ShardMap
    from delayline.transaction import Transaction


Result = TypeVar("Result")

WHOLE_BODY: Final = 1 << 40


class CatalogSnapshot(NamedTuple):
    """The catalog's contents at a moment."""

    files: list[ColdFile]
    dead: dict[str, list[str]]
    """The ids of cancelled messages, by file."""


class SearchedColdTier:
    """The messages in the files, for searches by id: for anything else all files would have to be read.

    Args:
        endpoint: The endpoint.
        find: Finds a message in the files.
    """

    def __init__(self, endpoint: str, find: Callable[..., Awaitable[FoundMessage | None]]) -> None:
        self.place: MessagePlace = MessagePlace(PlaceKind.PENDING, f"{endpoint} in the cold tier")
        self._find = find

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Look for the message that the filter names. Raises ConfigurationError for a filter that names none."""
        del after, most
        if not wanted.ids:
            raise ConfigurationError("files of the cold tier are searched by id only: id=...")
        matches: list[MessageMatch] = []
        for message_id in wanted.ids:
            found = await self._find(message_id, body_limit=WHOLE_BODY)
            if found is not None:
                delayed = found.message
                if wanted.matches(delayed.message, delayed.destination, delayed.due):
                    matches.append(pending_match(self.place, delayed, len(delayed.message.body)))
        return PlacePage(matches, None, 1, 1.0)


class TwoTierStore(SqlDelayedMessageStore):
    """A store whose far messages wait in Parquet files until Spark promotes them; a poller sees only the others.

    Args:
        cold_tier: a folder, or a URI that begins with file, s3, gs, hdfs or abfss. The other arguments are
            passed to SqlDelayedMessageStore.

    Raises:
        MissingExtra: pyarrow is not installed; the extra `spark` brings it.
    """

    def __init__(
        self,
        url: str,
        *,
        cold_tier: str,
        table_name: str | None = None,
        schema: str | None = None,
        journal: bool | None = None,
    ) -> None:
        super().__init__(url, table_name=table_name, schema=schema, journal=journal)
        self._folder = ColdFolder(cold_tier)
        of_tables = self.searched_places
        self.searched_places: Callable[[str], Sequence[SearchablePlace]] = lambda endpoint: [
            *of_tables(endpoint),
            SearchedColdTier(endpoint, self.find_cold),
        ]
        of_neighbours = self.neighbour_places

        async def with_cold_tiers() -> Sequence[SearchablePlace]:
            places = await of_neighbours()
            names = [each.place.name for each in places]
            return [*places, *(SearchedColdTier(name, partial(self.find_cold, endpoint=name)) for name in names)]

        self.neighbour_places: Callable[[], Awaitable[Sequence[SearchablePlace]]] = with_cold_tiers

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a waiting message, in the files by the index of their ids."""
        return await self._wherever(message_id, partial(super().cancel, transaction=transaction), None, transaction)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Move a waiting message to another due time; it waits in the database from then on, however far that is."""
        due = in_utc(due)
        move = partial(super().reschedule, due=due, transaction=transaction)
        return await self._wherever(message_id, move, due, transaction)

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first; of the files only the first messages are read."""
        number = limit + offset
        snapshot = (
            await self._snapshot()
        )  # before the store: a message promoted meanwhile is seen twice instead of being missed
        cold = await asyncio.to_thread(self._first, snapshot, destination, number)
        hot = await super().pending(destination=destination, limit=number)
        both = heapq.merge(hot, cold, key=lambda message: message.due)
        return list({message.id: message for message in both}.values())[offset:number]

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count pending messages; files are read only for buckets smaller than an hour."""
        width = time_span("bucket", bucket) // ONE_MICROSECOND
        counts: dict[tuple[datetime, str], int] = defaultdict(int)
        counting = self._count_hours(width) if width % MICROS_A_HOUR == 0 else self._count_rows(width)
        for (start, destination), number in (await counting).items():
            counts[from_microseconds(start), destination] += number
        for bucket_count in await super().count_by_due(bucket):
            counts[bucket_count.start, bucket_count.destination] += bucket_count.count
        return [DueCount(*key, number) for key, number in sorted(counts.items())]

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None; in the files by the index of their ids."""
        cold = await self._cold_ids()  # before the store, as in `pending`
        hot = await super().find(message_id, body_limit=body_limit)
        if hot is not None:
            return hot
        rows, gone, _ = await self._cold_rows(cold, message_id)
        if not rows and gone:  # promoted since
            return await super().find(message_id, body_limit=body_limit)
        return self._found(rows, body_limit)

    async def find_cold(self, message_id: str, *, body_limit: int, endpoint: str | None = None) -> FoundMessage | None:
        """Return the message with that id in the files, or None; in those of another endpoint if one is given."""
        rows, *_ = await self._cold_rows(await self._cold_ids(endpoint), message_id)
        return self._found(rows, body_limit)

    @staticmethod
    def _found(rows: Mapping[str, StoredRow], body_limit: int) -> FoundMessage | None:
        row = next(iter(rows.values()), None)
        return None if row is None else found_of(message_of(row, in_utc), body_limit)

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return pending messages without their bodies, earliest due first; only files of that time are read."""
        first = None if start is None else to_microseconds(in_utc(start))
        last = None if end is None else to_microseconds(in_utc(end))
        snapshot = await self._snapshot()  # before the store, as in `pending`
        files = [
            file
            for file in snapshot.files
            if (first is None or file.max_due >= first) and (last is None or file.min_due < last)
        ]

        def read() -> list[FoundMessage]:
            rows = self._folder.rows(files, snapshot.dead, None)
            wanted = (row for row in rows if (start is None or row.due >= start) and (end is None or row.due < end))
            return [found_of(message_of(row, in_utc), 0) for row in islice(wanted, limit + offset)]

        cold = await asyncio.to_thread(read)
        hot = await super().due_between(start, end, limit=limit + offset)
        both = heapq.merge(hot, cold, key=lambda found: found.message.due)
        return list({listed.message.id: listed for listed in both}.values())[offset : offset + limit]

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count pending messages of both tiers between the edges; see `SupportsDueForecast`."""
        cold = await self.cold_forecast(edges, by_destination=by_destination)  # before the store, as in `pending`
        hot = await super().due_forecast(edges, by_destination=by_destination)
        buckets = []
        for hot_bucket, cold_bucket in zip(hot.buckets, cold.buckets, strict=True):
            shares = Counter(hot_bucket.destinations) + Counter(cold_bucket.destinations)
            both, exact = hot_bucket.count + cold_bucket.count, hot_bucket.exact and cold_bucket.exact
            buckets.append(replace(hot_bucket, count=both, exact=exact, destinations=dict(shares.most_common())))
        known = [each for each in (hot.earliest, cold.earliest) if each is not None]
        return DueForecast(buckets, min(known, default=None))

    async def cold_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count the messages in files between the edges, from the catalog; an hour is divided evenly at an edge."""
        catalog, checked = self._catalog, checked_edges(edges)
        bounds = [to_microseconds(edge) for edge in checked]
        shares: list[Counter[str]] = [Counter() for _ in range(len(bounds) + 1)]
        exact = [True] * len(shares)

        def read(connection: Connection) -> tuple[Mapping[tuple[str, str], int], int | None]:
            if not catalog.exist(connection):
                return {}, None
            return catalog.waiting(connection), catalog.earliest(connection)

        hours, earliest = await self._database.read(read)
        for (hour, destination), number in hours.items():
            start, left = _start_of(hour), number
            first, last = bisect_right(bounds, start), bisect_left(bounds, start + MICROS_A_HOUR)
            since = start
            for position in range(first, last):
                part = number * (bounds[position] - since) // MICROS_A_HOUR
                shares[position][destination] += part
                left, since = left - part, bounds[position]
            shares[last][destination] += left
            if first != last:
                exact[first : last + 1] = [False] * (last + 1 - first)
        return DueForecast(
            [
                DueBucket(
                    *span, share.total(), known, destinations=dict((+share).most_common()) if by_destination else {}
                )
                for span, share, known in zip(spans_of(checked), shares, exact, strict=True)
            ],
            None if earliest is None else from_microseconds(earliest),
        )

    @long_work
    async def _count_hours(self, width: int) -> Mapping[tuple[int, str], int]:
        counts: dict[tuple[int, str], int] = defaultdict(int)
        catalog = self._catalog

        def read(connection: Connection) -> dict[tuple[str, str], int]:
            return catalog.waiting(connection) if catalog.exist(connection) else {}

        for (hour, destination), number in (await self._database.read(read)).items():
            counts[_start_of(hour) // width * width, destination] += number
        return counts

    @long_work
    async def _count_rows(self, width: int) -> Mapping[tuple[int, str], int]:
        snapshot = await self._snapshot()

        def count() -> Mapping[tuple[int, str], int]:
            counts: dict[tuple[int, str], int] = defaultdict(int)
            for file in snapshot.files:
                dead = snapshot.dead.get(file.name, ())
                for batch in self._folder.batches(file, dead, columns=("id", "destination", "due")):
                    columns = batch.column("due").to_pylist(), batch.column("destination").to_pylist()
                    for due, destination in zip(*columns, strict=True):
                        counts[to_microseconds(due) // width * width, destination] += 1
            return counts

        return await asyncio.to_thread(count)

    async def _wherever(
        self,
        message_id: str,
        in_the_store: Callable[[str], Awaitable[Outcome]],
        due: datetime | None,
        transaction: Transaction | None,
    ) -> Outcome:
        """Change the message in the store, or else take it out of the files and, given a due time, store it."""
        promoted: set[str] = set()
        while True:
            cold = await self._cold_ids()  # before the store: who is in neither of them now was promoted, or never was
            outcome = await in_the_store(message_id)
            if outcome is not Outcome.NOT_PENDING:
                return outcome
            rows, gone, sent = await self._cold_rows(cold, message_id)
            if not rows and gone <= promoted:
                return Outcome.NOT_PENDING
            if not rows:  # promoted since the store was asked, or long ago
                promoted |= gone
                continue
            if isinstance(transaction, EnlistedTransaction):
                raise ConfigurationError(
                    f"message {message_id!r} waits in the cold tier, whose catalog takes no part in a transaction of "
                    "yours: leave transaction= out, after your commit"
                )
            if transaction is not None:
                taken_out = await self._take_out(rows, sent, due, transaction)
            else:
                async with self.transaction() as own:
                    taken_out = await self._take_out(rows, sent, due, own)
            if taken_out:
                return Outcome.DONE

    async def _take_out(
        self, rows: Mapping[str, StoredRow], sent: Mapping[str, int], due: datetime | None, transaction: Transaction
    ) -> bool:
        """Cancel the message in its files; False where they were promoted, compacted or looked at elsewhere."""
        dead = {name: {row.id: row.destination} for name, row in rows.items()}
        buried = await self._database.write(partial(self._catalog.bury, dead=dead, sent=sent), transaction)
        if buried:
            message, journal = message_of(next(iter(rows.values())), in_utc), self._kept_journal
            if due is None:
                note = partial(journal.note_one, event=JournalEvent.CANCELLED, message=message)
                await self._noted(note, transaction)
            else:
                since = await self._noted(journal.last, transaction) or 0
                await self.store(replace(message, due=due), transaction)
                note = partial(journal.rename, since=since, ids=[message.id], event=JournalEvent.RESCHEDULED)
                await self._noted(note, transaction)
        return buried

    async def _noted(self, note: Callable[[Connection], Result], transaction: Transaction) -> Result | None:
        """Write in the journal, where a journal is kept."""
        return await self._database.write(note, transaction) if self._kept_journal.kept else None

    def _first(self, snapshot: CatalogSnapshot, destination: str | None, number: int) -> list[DelayedMessage]:
        rows = self._folder.rows(snapshot.files, snapshot.dead, destination)
        return [message_of(row, in_utc) for row in islice(rows, number)]

    async def _cold_ids(self, endpoint: str | None = None) -> ColdIds:
        from delayline.bulk.known_ids import ColdIds

        cold = ColdIds(self._database, self._table_of(endpoint), self._folder)
        await cold.open()
        return cold

    async def _cold_rows(
        self, cold: ColdIds, message_id: str
    ) -> tuple[Mapping[str, StoredRow], set[str], Mapping[str, int]]:
        """Return the message in each file that it waits in, the files that have left the tier, how much left others."""
        import pyarrow as pa

        located = await cold.locate(pa.array([message_id], pa.string()))
        files = [file for _, file in located.files]
        sent = await self._database.read(partial(cold.catalog.sent, names=[file.name for file in files]))

        def find() -> Mapping[str, StoredRow]:
            places = {file.name: self._folder.position(file, message_id) for file in files if file.name in sent}
            waiting = [file for file in files if places.get(file.name, 0) >= sent.get(file.name, 0)]
            return self._folder.find(waiting, message_id)

        return await asyncio.to_thread(find), located.gone, sent

    async def _snapshot(self) -> CatalogSnapshot:
        catalog = self._catalog

        def read(connection: Connection) -> CatalogSnapshot:
            if not catalog.exist(connection):
                return CatalogSnapshot([], {})
            files = catalog.list_files(connection)
            buried = catalog.buried(connection, [file.name for file in files])
            return CatalogSnapshot(files, {name: list(dead) for name, dead in buried.items()})

        return await self._database.read(read)

    def _table_of(self, endpoint: str | None) -> Table:
        if endpoint is None:
            return self._statements.table
        return self._database.dialect.catalog.store_table(f"{endpoint}{STORE_SUFFIX}", self._schema)

    @property
    def _catalog(self) -> ColdFiles:
        return ColdFiles(self._database.dialect, self._statements.table)


class ShardedTwoTierStore(ShardedDelayedMessageStore):
    """A store over several shards, whose far messages wait in files: those of all shards are in one folder.

    Args:
        shards: Which shards there are.
        cold_tier: As of TwoTierStore.
        table_name: Name of the table; by default `{endpoint}.timeouts`.
        journal: True records the events of each message, in its shard; False ends that.

    Raises:
        MissingExtra: pyarrow is not installed; the extra `spark` brings it.
    """

    def __init__(
        self, shards: ShardMap, *, cold_tier: str, table_name: str | None = None, journal: bool | None = None
    ) -> None:
        self._cold_tier = cold_tier
        super().__init__(shards, table_name=table_name, journal=journal)

    def _made(
        self, shard: Shard, *, table_name: str | None, poll_interval: timedelta, journal: bool | None
    ) -> TwoTierStore:
        del poll_interval
        return TwoTierStore(
            shard.url, cold_tier=self._cold_tier, table_name=table_name, schema=shard.schema, journal=journal
        )

    async def cold_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count the messages in files of all shards; see TwoTierStore."""

        async def forecast(part: SqlDelayedMessageStore) -> DueForecast:
            return await cast("TwoTierStore", part).cold_forecast(edges, by_destination=by_destination)

        return sum_of(list((await self._each(forecast)).values()))


def _start_of(hour: str) -> int:
    """Return when a due hour begins, in microseconds since 1970."""
    year, month, day, of_day = int(hour[:4]), int(hour[4:6]), int(hour[6:8]), int(hour[8:])
    return to_microseconds(EPOCH.replace(year=year, month=month, day=day, hour=of_day))
