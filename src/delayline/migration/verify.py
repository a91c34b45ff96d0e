"""Holds source, target and journal against each other, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from sqlalchemy import select

from delayline.bulk.writer import blocking
from delayline.clock import ONE_MICROSECOND
from delayline.errors import ConfigurationError
from delayline.migration.holding_table import read_batch
from delayline.migration.journal import BatchState, HeldPartition, MigrationJournal, MigrationRun
from delayline.migration.plan import ALL_ENDPOINTS
from delayline.migration.rows import WAITING_COLUMNS, WAITING_SCHEMA
from delayline.migration.source import BATCH_COLUMN, NUMBER_COLUMN, SkippedMessage, skipped_rows
from delayline.spark.errors import translated_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection

    from delayline.migration.journal import Progress
    from delayline.migration.source import TableSource
    from delayline.migration.target import Target

IDS_SHOWN: Final = 100
BATCHES_A_TASK: Final = 50


@dataclass(frozen=True)
class Verified:
    """The findings about a run."""

    run: MigrationRun
    rows: int
    """Rows in the source when the run began."""
    moved: int
    """Rows that are at the target, by the journal."""
    rejected: int
    unfinished: int
    restored: int
    waiting: int | None
    """How many of the moved messages are pending at the target unchanged; None if the target cannot list them."""
    gone: int
    """Number of messages that were due and have left the target: dispatched, or delivered."""
    missing: Sequence[str]
    """Ids, a hundred at most, of messages that are neither pending nor due: lost, or cancelled by a user."""
    changed: Sequence[str]
    """Ids of messages with another due time or destination than they were sent with."""
    doubled: Sequence[str]
    """Ids, a hundred at most, that were moved and are in the source as well."""
    skipped: int
    """Rows of the run's endpoints in the source without a readable due time, which no run moves."""
    repeatable: Sequence[str]
    """Every id that may have been delivered more often than once."""

    @property
    def ok(self) -> bool:
        """Whether source, journal and target agree."""
        counted = self.moved + self.rejected + self.unfinished + self.restored
        return counted == self.rows and not (self.missing or self.changed or self.doubled)


@dataclass(frozen=True)
class DeliveredBatches:
    """Reads the messages of a partition's marked batches; pickled to tasks."""

    source: TableSource
    run: str
    partition: HeldPartition

    def rows(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield id, destination and due time of the messages in the batches, without rejected rows."""
        journal = MigrationJournal(self.source.dialect, self.source.schema)
        for some in numbers:
            for batch in some.column(0).to_pylist():
                yield blocking(self.source.database.look(partial(self._of, journal=journal, batch=batch)))

    def _of(self, connection: Connection, journal: MigrationJournal, batch: int) -> pa.RecordBatch:
        rejected = select(journal.rejected.c.number).where(
            journal.rejected_in(self.run, self.partition.number), journal.rejected.c.batch == batch
        )
        left = set(connection.execute(rejected).scalars())
        rows = read_batch(connection, self.source, self.partition.held, batch)
        messages = self.source.messages([row[1:] for row in rows if row[0] not in left])
        return messages.select(WAITING_SCHEMA.names)


def runs_of(source: TableSource) -> list[MigrationRun]:
    """Return all migrations of a source, the latest first; changes nothing."""
    source.must_exist()
    journal = MigrationJournal(source.dialect, source.schema)
    return blocking(source.database.look(journal.list_runs))


def run_named(source: TableSource, name: str | None) -> MigrationRun:
    """Return the run of that name, or without a name the latest. Raises ConfigurationError if there is none."""
    runs = runs_of(source)
    for run in runs:
        if name in (None, run.name):
            return run
    if not runs:
        raise ConfigurationError(f"no migration has run in {source}")
    known = ", ".join(run.name for run in runs)
    raise ConfigurationError(f"migration {name!r} not found in {source}; known: {known}")


def verify(source: TableSource, target: Target, spark: SparkSession, *, run: str | None = None) -> Verified:
    """Compare the journal with the present contents of source and target; changes nothing.

    Raises ConfigurationError for an unknown run, or a run that went to another target.
    """
    kept = run_named(source, run)
    if kept.parameters.get("target") != str(target):
        raise ConfigurationError(
            f"migration {kept.name} went to {kept.parameters.get('target')}, not to {target}: give that target"
        )
    journal = MigrationJournal(source.dialect, source.schema)
    partitions = blocking(source.database.look(partial(journal.list_partitions, run=kept.name)))
    progress = blocking(source.database.look(partial(journal.progress, run=kept.name)))
    waiting, gone = None, 0
    missing: list[str] = []
    changed: list[str] = []
    doubled: list[str] = []
    repeatable: list[str] = []
    tables = set(blocking(source.database.look(source.table_names)))
    holding = [
        partition for partition in partitions if partition.held in tables
    ]  # in other batches, every row was rejected and returned
    for partition in holding:
        look = partial(_in_source, source=source, journal=journal, run=kept, partition=partition)
        doubled += blocking(source.database.look(look))
        repeatable += blocking(source.database.look(partial(source.doubtful, name=partition.held)))
        if not target.exactly_once:
            repeatable += _ids(source, journal, kept, partition)
    for endpoint in dict.fromkeys(partition.target for partition in holding if partition.rows):
        waits = target.waiting(endpoint, spark)
        if waits is not None:
            mine = [partition for partition in holding if partition.rows and partition.target == endpoint]
            with translated_errors():
                sent = [_sent(source, kept, partition, spark, journal) for partition in mine]
                counted = _compared(reduce(DataFrame.unionAll, sent), waits, target.grain)
            waiting = (waiting or 0) + counted[0]
            gone += counted[1]
            missing += counted[2]
            changed += counted[3]
    return Verified(
        kept, progress.rows, progress.moved, progress.marked - progress.moved, progress.staged + progress.delivered,
        progress.restored, waiting, gone, missing[:IDS_SHOWN], changed[:IDS_SHOWN], doubled[:IDS_SHOWN],
        sum(group.rows for group in left_in(source, kept)), repeatable,
    )  # fmt: skip


def _sent(
    source: TableSource, run: MigrationRun, partition: HeldPartition, spark: SparkSession, journal: MigrationJournal
) -> DataFrame:
    column = journal.batches.c.batch
    query = select(column).where(journal.batches_in(run.name, partition.number, [BatchState.MARKED.value]))
    marked = blocking(source.database.look(lambda connection: list(connection.execute(query).scalars())))
    table = pa.table({"id": pa.array(marked, pa.int64())})
    partitions = max(1, -(-len(marked) // BATCHES_A_TASK))
    numbers = spark.createDataFrame(table).repartition(partitions) if marked else spark.range(0)
    return numbers.mapInArrow(DeliveredBatches(source, run.name, partition).rows, WAITING_COLUMNS)


def _compared(sent: DataFrame, pending: DataFrame, grain: timedelta) -> tuple[int, int, list[str], list[str]]:
    """Return how many wait as they were sent, how many have left when due; ids of missing and of changed messages.

    Args:
        sent: the messages of the source, with the due times that they had there.
        pending: the messages that the target has now.
        grain: the resolution to which due times were rounded up.

    Returns:
        How many have the due time as sent, how many have left when due, and the ids of missing and of changed messages.
    """
    now = F.lit(datetime.now(UTC))
    theirs = pending.select(F.col("id").alias("there"), F.col("destination").alias("goes_to"), F.col("due").alias("at"))
    rounded = (F.unix_micros("at") - F.unix_micros("due")).between(0, grain // ONE_MICROSECOND - 1)
    same = (F.col("destination") == F.col("goes_to")) & rounded
    state = (
        F.when(F.col("there").isNull() & (F.col("due") <= now), "gone")
        .when(F.col("there").isNull(), "missing")
        .when(same, "waiting")
        .otherwise("changed")
    )
    joined = sent.join(theirs, F.col("id") == F.col("there"), "left").select("id", state.alias("state"))
    some = F.slice(F.collect_list(F.when(F.col("state").isin("missing", "changed"), F.col("id"))), 1, IDS_SHOWN)
    rows = joined.groupBy("state").agg(F.count("*").alias("rows"), some.alias("ids")).toArrow().to_pylist()
    by_state = {row["state"]: row for row in rows}
    ids = [by_state.get(name, {"ids": []})["ids"] for name in ("missing", "changed")]
    counts = [by_state.get(name, {"rows": 0})["rows"] for name in ("waiting", "gone")]
    return counts[0], counts[1], ids[0], ids[1]


def _in_source(
    connection: Connection,
    *,
    source: TableSource,
    journal: MigrationJournal,
    run: MigrationRun,
    partition: HeldPartition,
) -> list[str]:
    """Return ids that were moved, and are in the source's table as well."""
    held, table = source.held(partition.held), source.table(partition.source.table)
    marked = select(journal.batches.c.batch).where(
        journal.batches_in(run.name, partition.number, [BatchState.MARKED.value])
    )
    rejected = select(journal.rejected.c.number).where(journal.rejected_in(run.name, partition.number))
    query = select(source.name_column(held)).join(table, held.c[source.key] == table.c[source.key])
    query = query.where(held.c[BATCH_COLUMN].in_(marked), held.c[NUMBER_COLUMN].not_in(rejected)).limit(IDS_SHOWN)
    return [source.shown_name(value) for value in connection.execute(query).scalars()]


def _ids(source: TableSource, journal: MigrationJournal, run: MigrationRun, partition: HeldPartition) -> list[str]:
    """Return the ids of batches that may have reached the target more often than once."""
    held = source.held(partition.held)

    def look(connection: Connection) -> list[str]:
        names: list[str] = []
        for batch in journal.repeated(connection, run.name, partition.number):
            query = (
                select(source.name_column(held)).where(held.c[BATCH_COLUMN] == batch).order_by(held.c[NUMBER_COLUMN])
            )
            names += [source.shown_name(value) for value in connection.execute(query).scalars()]
        return names

    return blocking(source.database.look(look))


def left_in(source: TableSource, run: MigrationRun) -> list[SkippedMessage]:
    """Return the rows of the run's endpoints that no run moves."""
    endpoints = run.parameters.get("endpoints", ALL_ENDPOINTS)
    chosen = None if endpoints == ALL_ENDPOINTS else endpoints.split(", ")
    return blocking(source.database.look(partial(skipped_rows, source=source, endpoints=chosen)))


def details(
    source: TableSource, run: MigrationRun, limit: int
) -> tuple[Progress, Sequence[tuple[str, int]], Sequence[tuple[str, str]]]:
    """Return the progress of a run, the reasons for rejections, and ids of rejected rows with their reasons."""
    journal = MigrationJournal(source.dialect, source.schema)

    def look(connection: Connection) -> tuple[Progress, Sequence[tuple[str, int]], Sequence[tuple[str, str]]]:
        reasons = journal.reasons(connection, run.name)
        return journal.progress(connection, run.name), reasons, journal.list_rejected(connection, run.name, limit)

    return blocking(source.database.look(look))
