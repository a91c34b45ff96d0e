"""What tasks do: deliver batches one after the other, each counted, or look through rows that stay where they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import and_, select

from delayline.errors import BackendUnavailable
from delayline.migration.holding import read_batch
from delayline.migration.journal import Journal
from delayline.migration.rows import reasons_of, sound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from delayline.migration.journal import HeldPart
    from delayline.migration.source import Part, TableSource
    from delayline.migration.target import Session, Staged, Wave

STAGED: Final = "staged STRING"
STAGED_SCHEMA: Final = pa.schema([("staged", pa.string())])
LOOKED: Final = "reason STRING, rows BIGINT, id STRING"
LOOKED_SCHEMA: Final = pa.schema([("reason", pa.string()), ("rows", pa.int64()), ("id", pa.string())])
ROWS_AT_ONCE: Final = 10_000


@dataclass(frozen=True)
class Delivery:
    """The batches of one part that a job delivers; pickled to its tasks."""

    source: TableSource
    wave: Wave
    run: str
    part: HeldPart

    def deliver(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Deliver the batches with these numbers and yield what the driver has to commit."""
        for some in numbers:
            staged = asyncio.run(self._deliver(some.column(0).to_pylist()))
            yield pa.RecordBatch.from_pylist([{"staged": one.text} for one in staged], STAGED_SCHEMA)

    async def _deliver(self, batches: Sequence[int]) -> Sequence[Staged]:
        database = self.source.database
        journal = Journal(database.dialect, self.source.schema)
        await database.open()
        try:
            async with contextlib.AsyncExitStack() as stack:
                session = await self.wave.session(stack)
                for batch in batches:
                    await self._one(journal, session, batch)
                return await session.end()
        finally:
            await database.close()

    async def _one(self, journal: Journal, session: Session, batch: int) -> None:
        database, part = self.source.database, self.part.number
        attempted = await database.write(partial(journal.deliver, run=self.run, part=part, batch=batch))
        if attempted is None:
            return
        read = partial(read_batch, source=self.source, name=self.part.held, batch=batch)
        found = await database.read(read)
        if len(found) != attempted.rows:
            raise BackendUnavailable(
                f"{self.part.held} has {len(found)} of {attempted.rows} rows of batch {batch}: who took them?"
            )
        numbers = [row[0] for row in found]
        messages = self.source.messages([row[1:] for row in found])
        aside = await self._sent(session, messages, numbers)
        finish = partial(journal.finish, run=self.run, part=part, batch=batch, aside=aside, attempt=attempted.number)
        await database.write(partial(finish, mark=self.wave.confirms))

    async def _sent(
        self, session: Session, messages: pa.RecordBatch, numbers: Sequence[int]
    ) -> Mapping[int, tuple[str, str]]:
        """Hand over the messages that are sound; return the id and the reason of each other, by its row's number."""
        reasons = reasons_of(messages, largest=self.wave.largest_message)
        going = sound(messages, reasons)
        places = [place for place, reason in enumerate(reasons.to_pylist()) if reason is None]
        aside = {place: reason for place, reason in enumerate(reasons.to_pylist()) if reason is not None}
        if going.num_rows:
            refused = await session.deliver(going)
            aside |= {places[position]: reason for position, reason in refused.items()}
        ids = messages.column("id")
        return {numbers[place]: (ids[place].as_py() or "", reason) for place, reason in aside.items()}


@dataclass(frozen=True)
class Look:
    """Rows that stay where they are, read as messages: what would be wrong with them. Pickled to tasks."""

    source: TableSource
    part: Part
    cutoff: datetime | None
    cuts: Sequence[datetime]
    """Where the due times are cut into spans."""
    bodies: bool
    largest: int

    def through(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look through the spans with these numbers; yield how many rows have each reason, null for none."""
        for some in numbers:
            for span in some.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist(self._through(span), LOOKED_SCHEMA)

    def _through(self, span: int) -> list[dict[str, object]]:
        counts: Counter[str | None] = Counter()
        first: dict[str | None, str | None] = {}
        for rows in self._rows(span):
            messages = self.source.messages(rows)
            reasons = reasons_of(messages, largest=self.largest)
            counts[None] += reasons.null_count
            for place in pc.indices_nonzero(pc.is_valid(reasons)).to_pylist():
                reason = reasons[place].as_py()
                counts[reason] += 1
                first.setdefault(reason, messages.column("id")[place].as_py())
        return [{"reason": reason, "rows": number, "id": first.get(reason)} for reason, number in counts.items()]

    def _rows(self, span: int) -> Iterator[Sequence[Sequence[Any]]]:
        source = self.source
        table = source.table(self.part.table)
        due, bounds = table.c[source.due], [source.movable(self.part, self.cutoff)]
        if span > 0:
            bounds.append(due >= source.kept_due(self.cuts[span - 1]))
        if span < len(self.cuts):
            bounds.append(due < source.kept_due(self.cuts[span]))
        query = select(*source.selected(table, bodies=self.bodies)).where(and_(*bounds))
        dialect = source.dialect
        try:
            with dialect.look() as connection:
                if dialect.sql.name == "postgresql":  # whose cursors on the server live in transactions
                    dialect.begin(connection)
                streaming = connection.execution_options(stream_results=True, yield_per=ROWS_AT_ONCE)
                with streaming.execute(query) as result:
                    yield from result.partitions(ROWS_AT_ONCE)
        except dialect.errors as error:
            raise dialect.translated(error) from error
