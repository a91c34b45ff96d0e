"""The work of tasks: deliver batch after batch, or check rows for a preview without moving them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import and_, select

from delayline.bulk.batches import BatchName
from delayline.errors import BackendUnavailable
from delayline.migration.holding_table import read_batch
from delayline.migration.journal import MigrationJournal
from delayline.migration.rows import reasons_of, sound
from delayline.migration.target import Attempted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
    from datetime import datetime

    from delayline.migration.journal import HeldPartition, StartedRun
    from delayline.migration.source import SourcePartition, TableSource
    from delayline.migration.target import DeliverySession, Staged

DELIVERY_RESULT: Final = "staged STRING, batch BIGINT, attempt BIGINT"
DONE_SCHEMA: Final = pa.schema([("staged", pa.string()), ("batch", pa.int64()), ("attempt", pa.int64())])
LOOKED: Final = "reason STRING, rows BIGINT, id STRING"
LOOKED_SCHEMA: Final = pa.schema([("reason", pa.string()), ("rows", pa.int64()), ("id", pa.string())])
ROWS_AT_ONCE: Final = 10_000
#: Batches that are begun, and marked, together, where it does no harm that all of them are delivered again.
BATCHES_AT_ONCE: Final = 4


@contextlib.contextmanager
def rows_only() -> Iterator[None]:
    """Keep the garbage collector from looking at rows again and again, none of which is in a cycle."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class BatchDelivery:
    """The batches of a partition that a job delivers; pickled to its tasks."""

    source: TableSource
    session: DeliverySession
    run: str
    partition: HeldPartition
    once: bool
    """Whether a batch that is delivered again leaves no second copy at the target."""

    def deliver(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Deliver the batches with the numbers; yield the deliveries to commit, with their sessions."""
        for some in numbers:
            with rows_only():
                staged, attempts = asyncio.run(self._deliver(some.column(0).to_pylist()))
            rows: list[dict[str, object]] = [{"staged": part.text} for part in staged]
            rows += [{"batch": batch, "attempt": attempt} for batch, attempt in attempts.items()]
            yield pa.RecordBatch.from_pylist(rows, DONE_SCHEMA)

    async def _deliver(self, batches: Sequence[int]) -> tuple[Sequence[Staged], Mapping[int, int]]:
        database = self.source.database
        journal = MigrationJournal(database.dialect, self.source.schema)
        await database.open()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self.session.open(stack)
                attempts: dict[int, int] = {}
                at_once = BATCHES_AT_ONCE if self.once else 1
                for first in range(0, len(batches), at_once):
                    attempts |= await self._some(journal, batches[first : first + at_once])
                return await self.session.end(), attempts
        finally:
            await database.close()

    async def _some(self, journal: MigrationJournal, batches: Sequence[int]) -> Mapping[int, int]:
        """Deliver batches and return the attempts that count; finished batches are left out."""
        write, run, partition = self.source.database.write, self.run, self.partition.number
        begun = await write(partial(journal.deliver, run=run, partition=partition, batches=batches))
        attempts: dict[int, int] = {}
        async with contextlib.aclosing(self._read_ahead(begun)) as ahead:
            async for batch, numbers, messages in ahead:
                attempts[batch] = await self._one(journal, batch, begun[batch].number, numbers, messages)
        if self.session.confirms:
            await write(partial(journal.mark, run=run, partition=partition, attempts=attempts))
        return attempts

    async def _one(
        self,
        journal: MigrationJournal,
        batch: int,
        number: int,
        numbers: Sequence[int],
        messages: pa.RecordBatch,
    ) -> int:
        """Deliver a batch and return the attempt that counts."""
        write, run, partition = self.source.database.write, self.run, self.partition.number
        reasons = reasons_of(messages, largest=self.session.largest_message)
        known = {position: reason for position, reason in enumerate(reasons.to_pylist()) if reason is not None}
        places = [position for position in range(messages.num_rows) if position not in known]
        record_rejected = partial(journal.record_rejected, run=run, partition=partition, batch=batch, attempt=number)

        async def record_refusals(refused: Mapping[int, str]) -> None:
            if not known and not refused:
                return
            ids, every = messages.column("id"), known | {places[at]: reason for at, reason in refused.items()}
            rejected = {numbers[position]: (ids[position].as_py() or "", reason) for position, reason in every.items()}
            await write(partial(record_rejected, rejected=rejected))

        attempt = Attempted(BatchName(run, partition, batch), number, record_refusals)
        await record_refusals({})
        counts, refused = await self.session.deliver(sound(messages, reasons), attempt)
        if refused:
            await record_refusals(refused)
        return counts

    async def _read_ahead(
        self, begun: Mapping[int, StartedRun]
    ) -> AsyncGenerator[tuple[int, Sequence[int], pa.RecordBatch]]:
        """Yield each batch, its rows' numbers and its messages, while the next is read."""
        following: asyncio.Task[Sequence[Sequence[Any]]] | None = None
        try:
            waiting = iter(begun)
            batch = next(waiting, None)
            while batch is not None:
                rows = await (following or self._read(batch, begun[batch]))
                here, batch = batch, next(waiting, None)
                following = None if batch is None else asyncio.create_task(self._read(batch, begun[batch]))
                yield here, [row[0] for row in rows], self.source.messages([row[1:] for row in rows])
        finally:
            if following is not None:
                await asyncio.wait([following])

    async def _read(self, batch: int, begun: StartedRun) -> Sequence[Sequence[Any]]:
        read = partial(read_batch, source=self.source, name=self.partition.held, batch=batch)
        rows = await self.source.database.read(read)
        if len(rows) != begun.rows:
            raise BackendUnavailable(
                f"{self.partition.held} has {len(rows)} of {begun.rows} rows of batch {batch}: another process "
                "deleted rows"
            )
        return rows


@dataclass(frozen=True)
class PreviewWork:
    """Checks rows of the source for a preview, and counts the reasons for rejection. Pickled to tasks."""

    source: TableSource
    partition: SourcePartition
    cutoff: datetime | None
    cuts: Sequence[datetime]
    """Where the due times are cut into spans."""
    bodies: bool
    largest: int

    def through(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look through the spans with the numbers; yield how many rows have each reason, null for none."""
        for some in numbers:
            for span in some.column(0).to_pylist():
                with rows_only():
                    looked = self._through(span)
                yield pa.RecordBatch.from_pylist(looked, LOOKED_SCHEMA)

    def _through(self, span: int) -> list[dict[str, object]]:
        counts: Counter[str | None] = Counter()
        first: dict[str | None, str | None] = {}
        for rows in self._rows(span):
            messages = self.source.messages(rows)
            reasons = reasons_of(messages, largest=self.largest)
            counts[None] += reasons.null_count
            for position in pc.indices_nonzero(pc.is_valid(reasons)).to_pylist():
                reason = reasons[position].as_py()
                counts[reason] += 1
                first.setdefault(reason, messages.column("id")[position].as_py())
        return [{"reason": reason, "rows": number, "id": first.get(reason)} for reason, number in counts.items()]

    def _rows(self, span: int) -> Iterator[Sequence[Sequence[Any]]]:
        source = self.source
        table = source.table(self.partition.table)
        due, bounds = table.c[source.due], [source.movable(self.partition, self.cutoff)]
        if span > 0:
            bounds.append(due >= source.kept_due(self.cuts[span - 1]))
        if span < len(self.cuts):
            bounds.append(due < source.kept_due(self.cuts[span]))
        query = select(*source.selected(table, bodies=self.bodies)).where(and_(*bounds))
        dialect = source.dialect
        try:
            with dialect.connections.look() as connection:
                dialect.bulk.begin_scan(connection)
                streaming = connection.execution_options(stream_results=True, yield_per=ROWS_AT_ONCE)
                with streaming.execute(query) as result:
                    yield from result.partitions(ROWS_AT_ONCE)
        except dialect.errors.kinds as error:
            raise dialect.errors.translated(error) from error
