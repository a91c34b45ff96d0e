"""Scheduling into two tiers: near messages go to the store, far ones to files, in one transaction."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.window import Window

from delayline.bulk.cold_catalog import HOUR, ColdFile, ColdFiles
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.bulk.runs import Committed, Runs
from delayline.bulk.staging import Attempt, blocking, new_area
from delayline.clock import to_microseconds
from delayline.errors import BackendUnavailable, ConfigurationError, DuplicateMessage
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.spark.headers import HEADER_ALLOWANCE, SendHeaders
from delayline.spark.options import COLUMNS, FORMAT, StoreOptions
from delayline.spark.validation import invalid_reasons, valid_rows
from delayline.spark.writer import completed
from delayline.sql.database import Database
from delayline.sql.dialects.staging import OnConflict
from delayline.sql.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection, Table

    from delayline.bulk.staging import Staging

Result = TypeVar("Result")
#: Whether a message with that id waits already, or comes earlier in the same job.
WAITS: Final = "_delayline_waits"
DUE_HOUR: Final = "_delayline_hour"
KNOWN: Final = "_delayline_known"
COLD: Final = "cold"
NOTHING: Final = Attempt(0, 0, None)
PLACED: Final = (
    "number LONG, rows LONG, earliest LONG, rejected LONG, duplicates LONG, noted LONG, noted_rows LONG, "
    "doubled STRING, files ARRAY<STRING>"
)
#: Unregistered files are swept after a day; a writer has to register them within that time.
LONGEST_JOB: Final = timedelta(hours=12)


class ColdTier:
    """The cold tier of one store, seen from the driver; every method blocks."""

    def __init__(self, options: Mapping[str, str], path: str | None) -> None:
        if path is None:
            raise ConfigurationError(
                'there is no cold tier: --cold-tier s3://bucket/reminders, or JobTarget(..., cold_tier="s3://bucket/reminders")'
            )
        self.options = options
        self.store = StoreOptions.of(options)
        self.path = path
        self._database = Database.at(self.store.address)
        dialect = self._database.dialect
        table = dialect.timeouts_table(dialect.kept_name(self.store.table), dialect.schema_of(self.store.schema))
        self.catalog = ColdFiles(dialect, table)
        self.runs = Runs(dialect, table.schema)
        self._journal = Journal(table, dialect)
        _ = ColdFolder(path)

    @property
    def journaled(self) -> bool:
        """Whether the store keeps a journal now."""

        def look(connection: Connection) -> bool:
            self._journal.look(connection)
            return self._journal.kept

        return self.read(look)

    def create(self) -> ColdFolder:
        """Make the catalog, unless it is there, and return the folder to write to."""
        return ColdFolder(self.path, blocking(self._opened(self.catalog.create, writing=True)))

    def held(self, *, until: int | None = None) -> tuple[list[ColdFile], dict[str, list[str]]]:
        """Return the files with messages due not after `until`, and the ids that are cancelled, by file."""

        def read(connection: Connection) -> tuple[list[ColdFile], dict[str, list[str]]]:
            if not self.catalog.exist(connection):
                return [], {}
            files = self.catalog.held(connection, until=until)
            dead = self.catalog.buried(connection, [one.name for one in files])
            return files, {name: list(ids) for name, ids in dead.items()}

        return self.read(read)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the committed rows."""
        return blocking(self._opened(work, writing=False))

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a transaction."""
        return blocking(self._opened(work, writing=True))

    async def _opened(self, work: Callable[[Connection], Result], *, writing: bool) -> Result:
        await self._database.open()
        try:
            return await (self._database.write(work) if writing else self._database.read(work))
        finally:
            await self._database.close()


class Placed(NamedTuple):
    """The results of a job's finished tasks."""

    attempts: list[Attempt]
    files: list[ColdFile]
    noted: list[Attempt]
    """What is in the files, for the journal."""
    duplicates: int
    doubled: str | None

    @property
    def held(self) -> int:
        """How many messages are in the files."""
        return sum(one.messages for one in self.files)


@dataclass(frozen=True)
class _Placing:
    """Settings of a task."""

    store: StoreOptions
    area: str
    folder: ColdFolder
    far_from: int
    sender: SendHeaders
    journaled: bool


def schedule_in_tiers(
    messages: DataFrame,
    tier: ColdTier,
    sender: SendHeaders,
    *,
    run: str,
    batch: int = 0,
    on_conflict: str,
    far_from: datetime,
) -> tuple[Committed, int]:
    """Store messages due before `far_from`, write the others to files, in one transaction; return the counts.

    messages: a DataFrame with exactly the columns of a message, unchecked.
    """
    if on_conflict == OnConflict.REPLACE:
        raise ConfigurationError(
            "on_conflict='replace' reaches no messages in a cold tier: cancel them first, or use 'ignore' or 'fail'"
        )
    staging = tier.store.staging(new_area())
    before = staging.committed(run, batch)
    if before is not None:
        return before, (staging.committed(ledger_key(run, COLD), batch) or Committed(0)).stored
    began = time.monotonic()
    staging.create()
    folder = tier.create()
    with ExitStack() as undone:
        undone.callback(staging.discard)
        rows = _by_hour(marked(messages, waiting_messages(messages.sparkSession, tier.options, tier)))
        task = _Placing(tier.store, staging.name, folder, to_microseconds(far_from), sender, tier.journaled)
        placed = _gathered(rows.mapInArrow(partial(_place, task=task), PLACED))
        if placed.doubled is not None and on_conflict == OnConflict.FAIL:
            raise DuplicateMessage(placed.doubled)
        stored = staging.commit(
            placed.attempts,
            on_conflict=OnConflict(on_conflict),
            run=run,
            batch=batch,
            pre_commit=partial(_register, tier, placed, (run, batch), began),
            journal_only=placed.noted,
        )
        undone.pop_all()
    return Committed(stored.stored, stored.duplicates + placed.duplicates, stored.rejected), placed.held


def _register(
    tier: ColdTier, placed: Placed, turn: tuple[str, int], began: float, connection: Connection, staged: Table
) -> None:
    """Register the files in the transaction that stores the near messages."""
    del staged
    check_job_duration(began)
    run, batch = turn
    tier.catalog.register(connection, placed.files)
    tier.runs.begin(connection, ledger_key(run, COLD), batch)
    tier.runs.end(connection, ledger_key(run, COLD), batch, Committed(placed.held, placed.duplicates))


def check_job_duration(began: float) -> None:
    """Raise BackendUnavailable where files could have been swept that are to be registered now."""
    if time.monotonic() - began > LONGEST_JOB.total_seconds():
        raise BackendUnavailable(f"the job took longer than {LONGEST_JOB}: nothing was kept. Schedule less at once")


def ledger_key(run: str, part: str) -> str:
    """Return the ledger's name for the rows of a run that are stored elsewhere."""
    name = f"{part} {run}"
    return name if len(name) <= MAXIMUM_ID_LENGTH else f"{part} {hashlib.sha256(run.encode()).hexdigest()}"


def planned(spark: SparkSession, groups: Sequence[Sequence[ColdFile]], dead: Mapping[str, Sequence[str]]) -> DataFrame:
    """Return groups of files as rows, about as many messages in each partition as in the others."""
    slots = [0] * min(len(groups), 4 * int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
    rows = []
    for messages, group in sorted(((sum(one.messages for one in some), some) for some in groups), reverse=True):
        slot = slots.index(min(slots))
        slots[slot] += messages
        rows.append((slot, [file_to_json(one) for one in group], [list(dead.get(one.name, ())) for one in group]))
    numbers, files, ids = (list(column) for column in zip(*rows, strict=True))
    texts = pa.list_(pa.string())
    columns = [pa.array(numbers, pa.int32()), pa.array(files, texts), pa.array(ids, pa.list_(texts))]
    plan = pa.Table.from_arrays(columns, names=["slot", "files", "dead"])
    return spark.createDataFrame(plan).repartitionById(len(slots), "slot")


def planned_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[tuple[ColdFile, list[str]]]]:
    """Yield a task's share of a plan: groups of files, each with its deleted ids."""
    for batch in batches:
        for texts, ids in zip(batch.column("files").to_pylist(), batch.column("dead").to_pylist(), strict=True):
            yield [(file_from_json(text), dead) for text, dead in zip(texts, ids, strict=True)]


def planned_files(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[ColdFile, list[str]]]:
    """Yield the files that a task has of a plan."""
    for group in planned_groups(batches):
        yield from group


def file_to_json(file: ColdFile) -> str:
    """Return a file as text, for a column."""
    return json.dumps(file)


def file_from_json(text: str) -> ColdFile:
    """Return the file of a text."""
    return ColdFile(*json.loads(text))


def waiting_messages(
    spark: SparkSession, options: Mapping[str, str], tier: ColdTier | None, *, columns: str = "id STRING"
) -> DataFrame:
    """Return the pending messages of the store, and of its cold tier if there is one: these columns, the id first.

    A message that is promoted meanwhile may be returned twice.
    """
    files, dead = ([], {}) if tier is None else tier.held()  # before the store: then nothing is missed
    hot = spark.read.format(FORMAT).options(**options).schema(columns).load()
    if tier is None or not files:
        return hot
    names = [one.split()[0] for one in columns.split(", ")]
    plan = planned(spark, [[one] for one in files], dead)
    return hot.union(plan.mapInArrow(partial(_rows, folder=ColdFolder(tier.path), columns=names), columns))


def _rows(batches: Iterator[pa.RecordBatch], *, folder: ColdFolder, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for file, dead in planned_files(batches):
        yield from folder.batches(file, dead, columns=columns)


def marked(messages: DataFrame, known: DataFrame | None) -> DataFrame:
    """Return the messages with whether their id is taken, by one that is known or by an earlier one of the job."""
    first = Window.partitionBy("id").orderBy("due", F.xxhash64(*COLUMNS.names))  # the same when tasks are repeated
    found = messages.withColumn(WAITS, F.row_number().over(first) > 1)
    if known is None:
        return found
    known = known.select(F.col("id").alias(KNOWN)).distinct()
    found = found.join(known, F.col("id") == F.col(KNOWN), "left")
    return found.withColumn(WAITS, F.col(WAITS) | F.col(KNOWN).isNotNull()).drop(KNOWN)


def _by_hour(messages: DataFrame) -> DataFrame:
    """Return the messages with those of an hour together, ordered by due time."""
    with_hour = messages.withColumn(DUE_HOUR, F.expr(f"unix_micros(due) div {HOUR}"))
    return with_hour.hint("rebalance", DUE_HOUR).sortWithinPartitions("due").drop(DUE_HOUR)


def _place(batches: Iterator[pa.RecordBatch], *, task: _Placing) -> Iterator[pa.RecordBatch]:
    """Stage near messages and write far ones to files; the results of a task that fails afterwards are ignored."""
    staging: Staging = task.store.staging(task.area)
    largest, writer = staging.largest_message - HEADER_ALLOWANCE, HourWriter(task.folder)
    rejected, duplicates, doubled = 0, 0, None

    def near() -> Iterator[pa.RecordBatch]:
        nonlocal rejected, duplicates, doubled
        for batch in batches:
            reasons = invalid_reasons(batch, largest=largest)
            sound = valid_rows(batch, reasons)
            rejected += batch.num_rows - sound.num_rows
            waits = sound.column(WAITS)
            taken = sound.filter(waits)
            duplicates += taken.num_rows
            doubled = doubled or (taken.column("id")[0].as_py() if taken.num_rows else None)
            new = task.sender.complete(sound.filter(pc.invert(waits)).select(COLUMNS.names))
            due = new.column("due").cast(pa.timestamp("us", "UTC"), safe=False).cast(pa.int64())
            far = pc.greater_equal(due, task.far_from)
            writer.write(new.filter(far))
            yield new.filter(pc.invert(far))

    attempt = staging.write(near(), rejected=lambda: rejected)
    files = writer.close()
    noted = stage_journal_rows(staging, task.folder, files) if task.journaled else NOTHING
    row = [*attempt, duplicates, noted.number, noted.rows, doubled, [file_to_json(one) for one in files]]
    kinds = [*[pa.int64()] * 7, pa.string(), pa.list_(pa.string())]
    names = [part.split()[0] for part in PLACED.split(", ")]
    yield pa.RecordBatch.from_arrays(
        [pa.array([value], kind) for value, kind in zip(row, kinds, strict=True)], names=names
    )


def stage_journal_rows(staging: Staging, folder: ColdFolder, files: Sequence[ColdFile]) -> Attempt:
    """Stage the messages that a task has written to files, for the journal."""
    if not files:
        return NOTHING
    columns = ("id", "destination", "due")
    return staging.write(completed(batch) for file in files for batch in folder.batches(file, columns=columns))


def _gathered(results: DataFrame) -> Placed:
    rows = results.toArrow().to_pylist()
    attempts = [Attempt(row["number"], row["rows"], row["earliest"], row["rejected"]) for row in rows]
    return Placed(
        attempts,
        [file_from_json(text) for row in rows for text in row["files"]],
        [Attempt(row["noted"], row["noted_rows"], None) for row in rows if row["noted_rows"]],
        sum(row["duplicates"] for row in rows),
        next((row["doubled"] for row in rows if row["doubled"] is not None), None),
    )
