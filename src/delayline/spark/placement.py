"""Scheduling to a broker: near messages go to its delay levels, confirmed; far ones to the store, or to files.

A broker's confirmed messages cannot be rolled back. Therefore near rows are partitioned by their ids, and a ledger in
the store's database records the partitions that the broker has confirmed. A repeated job skips these.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from delayline.bulk.cold_catalog import HOUR
from delayline.bulk.cold_folder import HourWriter
from delayline.bulk.partitions import Facts, Pieces, PublishReport
from delayline.bulk.runs import Committed, Runs
from delayline.bulk.staging import Attempt, blocking, new_area
from delayline.clock import from_microseconds, to_microseconds
from delayline.spark.broker_sink import ANY_SIZE, LONGEST
from delayline.spark.cold_tier import (
    COLD,
    NOTHING,
    WAITS,
    ColdTier,
    check_job_duration,
    file_from_json,
    file_to_json,
    ledger_key,
    marked,
    stage_journal_rows,
    waiting_messages,
)
from delayline.spark.columns import prepared
from delayline.spark.headers import HEADER_ALLOWANCE
from delayline.spark.options import COLUMNS
from delayline.spark.sources import HIDDEN
from delayline.spark.validation import Validator, valid_rows
from delayline.sql.database import Database
from delayline.sql.dialects.staging import OnConflict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from datetime import datetime, timedelta

    from pyspark.sql import DataFrame
    from sqlalchemy import Connection, Table

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.cold_folder import ColdFolder
    from delayline.spark.broker_sink import BrokerSink, BrokerWriter
    from delayline.spark.columns import Columns
    from delayline.spark.headers import SendHeaders
    from delayline.spark.options import StoreOptions

Result = TypeVar("Result")
#: Number of partitions of a job's near rows; a partition that is confirmed and not yet marked may be sent twice.
PIECES: Final = 1024
#: Of a near row its piece, 0 or more; of a far one something below.
KEY: Final = "_delayline_key"
LEVELS: Final = "levels"
#: Destinations that are asked for before the job; those of more are found out by its tasks.
MOST_DESTINATIONS: Final = 10_000
#: Refusals by id that are remembered.
MOST_REFUSED: Final = 1000
DONE: Final = "done STRING"


class Handling(NamedTuple):
    """The results of a run."""

    stored: int
    held: int
    handed: PublishReport
    repeated: bool
    facts: Facts
    validator: Validator


class Ledger:
    """The pieces of one run, in the store's own database; pickled to tasks."""

    def __init__(self, store: StoreOptions, run: str) -> None:
        self._store = store
        self._run = run

    def pieces(self, database: Database) -> Pieces:
        """Return what reads and writes them there."""
        return Pieces(database.dialect, self._run, database.dialect.schema_of(self._store.schema))

    async def opened(self, stack: AsyncExitStack) -> Database:
        """Return the open database, which closes with the stack."""
        database = Database.at(self._store.address)
        await database.open()
        stack.push_async_callback(database.close)
        return database

    def parts(self) -> tuple[Pieces, Runs]:
        """Return the partitions, and the ledger of committed ones."""
        database = Database.at(self._store.address)
        pieces = self.pieces(database)
        return pieces, Runs(database.dialect, pieces.table.schema)

    def write(self, work: Callable[[Pieces, Connection], Result]) -> Result:
        """Run `work` in a transaction. Blocks."""

        async def run() -> Result:
            async with AsyncExitStack() as stack:
                database = await self.opened(stack)
                return await database.write(partial(work, self.pieces(database)))

        return blocking(run())


class _Turn(NamedTuple):
    """Which batch of which run it is, and whether its facts are kept when it is over."""

    run: str
    batch: int
    keeps: bool
    ledger: Ledger


@dataclass(frozen=True)
class Handing:
    """A job that sends near messages to a broker and far ones to the store or its cold tier. Every method blocks.

    store: None if the broker gets all messages.
    """

    levels: BrokerSink
    sender: SendHeaders
    store: StoreOptions | None
    tier: ColdTier | None

    def run(
        self, rows: DataFrame, columns: Columns, *, run: str | None, batch: int, horizon: timedelta, now: datetime
    ) -> Handling:
        """Schedule the rows, which are a batch of a run.

        run: continues an earlier attempt of that name, or returns its result. Raises DelaylineError: the store then has
        none of the messages, and the broker keeps the confirmed ones.
        """
        self.levels.must_exist()
        if self.store is None:
            return self._without_store(rows, columns, now)
        staging = self.store.staging(new_area())
        name = run or staging.name
        ledger = Ledger(self.store, name if batch == 0 else f"{name} {batch}")
        turn = _Turn(name, batch, run is not None and batch == 0, ledger)
        ledger.write(Pieces.create)
        facts = ledger.write(Pieces.facts)
        before = None if run is None else staging.committed(turn.run, batch)
        if before is not None:
            return self._earlier(turn, before, facts or Facts(to_microseconds(now), to_microseconds(now), {}))
        if facts is None:
            first = self._facts(rows, columns, now, now + min(horizon, LONGEST))
            ledger.write(lambda pieces, connection: pieces.settle(connection, first))
            facts = ledger.write(Pieces.facts) or first  # another process's, if it was faster
        return self._beside_store(rows, columns, turn, facts)

    def _without_store(self, rows: DataFrame, columns: Columns, now: datetime) -> Handling:
        latest = now + LONGEST
        facts = self._facts(rows, columns, now, latest)
        validator = self._door(facts, latest=to_microseconds(latest))
        task = _Task(self.levels, replace(self.sender, sent=now), validator, None, None, "", None, journaled=False)
        handed = PublishReport()
        for one in _results(self._placed(rows, columns, facts, None), task):
            handed.add(PublishReport(**one["near"]))
        return Handling(0, 0, handed, False, facts, replace(validator, ids=handed.refused))

    def _beside_store(self, rows: DataFrame, columns: Columns, turn: _Turn, facts: Facts) -> Handling:
        assert self.store is not None  # noqa: S101 - or there were no ledger
        staging, validator, began = self.store.staging(new_area()), self._door(facts), time.monotonic()
        staging.create()
        folder, journaled = (None, False) if self.tier is None else (self.tier.create(), self.tier.journaled)
        sender = replace(self.sender, sent=from_microseconds(facts.now))
        with ExitStack() as undone:
            undone.callback(staging.discard)
            if turn.batch == 0 and not turn.keeps:  # the run cannot be repeated
                undone.callback(turn.ledger.write, Pieces.forget)
            task = _Task(self.levels, sender, validator, turn.ledger, self.store, staging.name, folder, journaled)
            known = waiting_messages(rows.sparkSession, self.store.options, self.tier)
            results = _results(self._placed(rows, columns, facts, known), task)
            files = [file_from_json(text) for one in results for text in one["files"]]
            handed = PublishReport(duplicates=sum(one["duplicates"] for one in results))
            for near in turn.ledger.write(Pieces.marked).values():
                handed.add(near)
            end = partial(self._register, turn, facts, files, handed, began)
            attempts = [Attempt(*one["attempt"]) for one in results]
            noted = [Attempt(*one["noted"]) for one in results if one["files"] and journaled]
            stored = staging.commit(
                attempts,
                on_conflict=OnConflict.IGNORE,
                run=turn.run,
                batch=turn.batch,
                pre_commit=end,
                journal_only=noted,
            )
            undone.pop_all()
        held = sum(one.messages for one in files)
        handed.duplicates += stored.duplicates
        handed.rejected += stored.rejected
        return Handling(stored.stored, held, handed, False, facts, replace(validator, ids=handed.refused))

    def _register(
        self,
        turn: _Turn,
        facts: Facts,
        files: list[ColdFile],
        handed: PublishReport,
        began: float,
        connection: Connection,
        staged: Table,
    ) -> None:
        del staged
        check_job_duration(began)
        pieces, runs = turn.ledger.parts()
        if self.tier is not None:
            self.tier.catalog.register(connection, files)
        held = Committed(sum(one.messages for one in files))
        sent = Committed(handed.sent, handed.duplicates, handed.rejected)
        for part, done in ((COLD, held), (LEVELS, sent)):
            runs.begin(connection, ledger_key(turn.run, part), turn.batch)
            runs.end(connection, ledger_key(turn.run, part), turn.batch, done)
        pieces.forget(connection)
        if turn.keeps:
            pieces.settle(connection, replace(facts, refused_ids=dict(handed.refused)))

    def _earlier(self, turn: _Turn, before: Committed, facts: Facts) -> Handling:
        """Return the counts."""
        assert self.store is not None  # noqa: S101 - or there were no ledger
        staging = self.store.staging()
        sent = staging.committed(ledger_key(turn.run, LEVELS)) or Committed(0)
        held = staging.committed(ledger_key(turn.run, COLD)) or Committed(0)
        handed = PublishReport(sent.stored, before.duplicates + sent.duplicates, before.rejected + sent.rejected)
        validator = replace(self._door(facts), ids=facts.refused_ids)
        return Handling(before.stored, held.stored, handed, True, facts, validator)

    def _facts(self, rows: DataFrame, columns: Columns, now: datetime, far_from: datetime) -> Facts:
        """Ask the broker for the destinations of near messages, so that undeliverable rows are not sent to it."""
        near = prepared(rows, columns, now).where(F.col("due") < F.lit(far_from))
        destinations = near.select("destination").distinct().limit(MOST_DESTINATIONS).toArrow()
        names = [one for one in destinations.column(0).to_pylist() if one]
        return Facts(to_microseconds(now), to_microseconds(far_from), self.levels.refusals(names))

    def _door(self, facts: Facts, latest: int | None = None) -> Validator:
        largest = ANY_SIZE if self.store is None else self.store.staging().largest_message
        return Validator(largest - HEADER_ALLOWANCE, facts.far_from, facts.refused, latest=latest)

    def _placed(self, rows: DataFrame, columns: Columns, facts: Facts, known: DataFrame | None) -> DataFrame:
        """Return the rows with their keys: a key is the work of one task, and far messages come first."""
        messages = marked(prepared(rows, columns, from_microseconds(facts.now)).drop(*HIDDEN), known)
        far = F.expr(f"unix_micros(due) >= {facts.far_from}")
        key = F.when(far, F.expr(f"-1 - unix_micros(due) div {HOUR}")).otherwise(
            F.pmod(F.xxhash64("id"), F.lit(PIECES))
        )
        return messages.withColumn(KEY, key).repartition(KEY).sortWithinPartitions(KEY, "due")


def _results(rows: DataFrame, task: _Task) -> list[dict[str, Any]]:
    return [json.loads(text) for text in rows.mapInArrow(task.run, DONE).toArrow().column(0).to_pylist()]


@dataclass(frozen=True)
class _Task:
    """Settings of a task."""

    levels: BrokerSink
    sender: SendHeaders
    validator: Validator
    ledger: Ledger | None
    store: StoreOptions | None
    area: str
    folder: ColdFolder | None
    journaled: bool

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write far messages, then publish near ones."""
        rows, far = _Rows(batches), PublishReport()
        files: list[ColdFile] = []
        attempt: Attempt | None = None
        noted = NOTHING
        if self.store is not None:
            writer = None if self.folder is None else HourWriter(self.folder)
            staged = self._far(rows.far(), far, writer)
            staging = self.store.staging(self.area)
            attempt = staging.write(staged, rejected=lambda: far.rejected)
            files = [] if writer is None else writer.close()
            if self.folder is not None and self.journaled:
                noted = stage_journal_rows(staging, self.folder, files)
        near = asyncio.run(self._near(rows.near()))
        texts = [file_to_json(one) for one in files]
        done = {"attempt": attempt, "noted": noted, "files": texts, "duplicates": far.duplicates, "near": asdict(near)}
        yield pa.RecordBatch.from_arrays([pa.array([json.dumps(done)])], names=["done"])

    def _far(
        self, batches: Iterable[pa.RecordBatch], far: PublishReport, writer: HourWriter | None
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            new = self._new(batch, far)
            if writer is None:
                yield new
            else:
                writer.write(new)

    async def _near(self, batches: Iterable[pa.RecordBatch]) -> PublishReport:
        total, session, marks = PublishReport(), None, None
        async with AsyncExitStack() as stack:
            if self.ledger is not None:
                marks = _Marks(await self.ledger.opened(stack), self.ledger)
                await marks.look()
            for piece, parts in _pieces(batches):
                if marks is not None and piece in marks.there:
                    continue
                handed = PublishReport()
                new = [one for one in (self._new(part, handed) for part in parts) if one.num_rows]
                for messages in pa.Table.from_batches(new).combine_chunks().to_batches() if new else ():
                    session = session or await self.levels.session(stack)
                    await _deliver(session, messages, handed)
                if marks is not None:
                    await marks.mark(piece, handed)
                total.add(handed)
        return total

    def _new(self, batch: pa.RecordBatch, counts: PublishReport) -> pa.RecordBatch:
        """Return valid new rows, with the headers of a send; count the others."""
        sound = valid_rows(batch, self.validator.reasons(batch))
        new = sound.filter(pc.invert(sound.column(WAITS))).select(COLUMNS.names)
        counts.rejected += batch.num_rows - sound.num_rows
        counts.duplicates += sound.num_rows - new.num_rows
        return self.sender.complete(new)


class _Marks:
    """The pieces that are marked, and more of them."""

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self.there: set[int] = set()
        self._database = database
        self._pieces = ledger.pieces(database)

    async def look(self) -> None:
        self.there = set(await self._database.read(self._pieces.marked))

    def mark(self, piece: int, handed: PublishReport) -> Awaitable[None]:
        return self._database.write(partial(self._pieces.mark, piece=piece, handed=handed))


class _Rows:
    """A task's rows in two parts, of which the far ones come first."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._first_near: pa.RecordBatch | None = None

    def far(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            far = pc.sum(pc.less(batch.column(KEY), 0)).as_py() or 0
            if far:
                yield batch.slice(0, far)
            if far < batch.num_rows:
                self._first_near = batch.slice(far)
                return

    def near(self) -> Iterator[pa.RecordBatch]:
        """Yield the others; call it when the far ones are through."""
        if self._first_near is not None:
            yield self._first_near
        yield from self._batches


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """Yield each piece whole; the rows come ordered by their key."""
    current, parts = 0, list[pa.RecordBatch]()
    for batch in batches:
        keys = batch.column(KEY).to_numpy()
        changes = (keys[1:] != keys[:-1]).nonzero()[0] + 1
        for start, end in pairwise([0, *changes.tolist(), batch.num_rows]):
            if start == end:
                continue
            if parts and keys[start] != current:
                yield current, parts
                parts = []
            current = int(keys[start])
            parts.append(batch.slice(start, end - start))
    if parts:
        yield current, parts


async def _deliver(session: BrokerWriter, messages: pa.RecordBatch, handed: PublishReport) -> None:
    refused = await session.deliver(messages)
    handed.sent += messages.num_rows - len(refused)
    handed.rejected += len(refused)
    ids = messages.column("id")
    for position, reason in list(refused.items())[: MOST_REFUSED - len(handed.refused)]:
        handed.refused[ids[position].as_py()] = reason
