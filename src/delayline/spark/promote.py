"""Promote messages that come near from the files of the cold tier to the store, each message once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from sqlalchemy import delete

from delayline.bulk.cold_catalog import FileState
from delayline.bulk.cold_folder import ColdFolder
from delayline.bulk.writer import Attempt, new_area
from delayline.checks import time_span, whole_number
from delayline.clock import LATEST_TIME, ONE_DAY, to_microseconds
from delayline.errors import ConfigurationError
from delayline.spark.cold_tier import ColdTier, planned, planned_files
from delayline.spark.errors import translated_errors
from delayline.spark.session import spark_session
from delayline.sql.journal import JournalEvent
from delayline.sql.prepared import LONGEST_LIST

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from sqlalchemy import Connection, Table

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.ledger import Committed
    from delayline.spark.options import StoreOptions
    from delayline.spark.schedule import JobTarget

#: Messages of a transaction, about; a cancellation among them waits for the transaction.
PROMOTED_ROWS: Final = 1_000_000
STAGED: Final = "number LONG, rows LONG, earliest LONG"


@dataclass(frozen=True)
class Promoted:
    """The result of a promotion, in messages.

    Attributes:
        stored: Messages moved to the store.
        duplicates: Messages left out because their id is already in the store.
        cancelled: Messages left out because they were cancelled.
        files: Files that were promoted.
    """

    stored: int = 0
    duplicates: int = 0
    cancelled: int = 0
    files: int = 0


class _Overtaken(Exception):
    """Another process has promoted or compacted some of the files."""


class _Moved(NamedTuple):
    committed: Committed
    cancelled: int


def promote(
    target: JobTarget, *, horizon: timedelta = ONE_DAY, at_once: int = PROMOTED_ROWS, spark: SparkSession | None = None
) -> Promoted:
    """Move the messages due within the horizon from the cold tier to the store. Blocks.

    Moves whole files, so the rest of an hour comes along. Safe to kill, to repeat and to run in several processes.

    Args:
        target: The store and its cold tier.
        horizon: How far ahead to promote; longer than the time until the next promotion.
        at_once: Messages of a transaction, about; earliest due first.
        spark: The session; `spark_session()` if None.

    Returns:
        The counts of all transactions.

    Raises:
        ConfigurationError: The target has no cold tier, or a value is out of range.
        DelaylineError: The job failed. Transactions that were committed before remain.
    """
    time_span("horizon", horizon)
    whole_number("at_once", at_once, at_least=1)
    with translated_errors():
        tier = ColdTier(target.options, target.cold_tier)
        now = tier.store.staging().now()
        until = to_microseconds(now + horizon if horizon < LATEST_TIME - now else LATEST_TIME)
        done = Promoted()
        while True:
            files, dead = tier.files(until=until)
            if not files:
                break
            chosen = _first(files, at_once)
            try:
                moved = _move(spark or spark_session(), tier, chosen, dead)
            except _Overtaken:
                continue
            stored, duplicates = moved.committed.stored, moved.committed.duplicates - moved.cancelled
            done = _sum(done, Promoted(stored, duplicates, moved.cancelled + _buried(chosen, dead), len(chosen)))
        delete_retired(tier)
        return done


def promote_every(
    target: JobTarget,
    interval: timedelta,
    *,
    until: threading.Event,
    horizon: timedelta = ONE_DAY,
    spark: SparkSession | None = None,
    progress: Callable[[Promoted], object] = lambda so_far: None,
) -> Promoted:
    """Promote at an interval until the event is set. Blocks.

    Args:
        target: The store and its cold tier.
        interval: Pause between two promotions; at most half of `horizon`, or messages could come late.
        until: The event that ends it after the current promotion.
        horizon: As for `promote`.
        spark: The session; `spark_session()` if None.
        progress: Called after each promotion with the counts so far.

    Returns:
        The counts of all promotions.

    Raises:
        ConfigurationError: The interval is longer than half of the horizon.
        DelaylineError: A promotion failed.
    """
    _must_fit(interval, horizon)
    done = Promoted()
    while not until.is_set():
        done = _sum(done, promote(target, horizon=horizon, spark=spark))
        progress(done)
        until.wait(interval.total_seconds())
    return done


def promote_stream(
    target: JobTarget,
    interval: timedelta,
    *,
    checkpoint: str | Path,
    horizon: timedelta = ONE_DAY,
    spark: SparkSession | None = None,
) -> StreamingQuery:
    """Start a streaming query that promotes once an interval, for platforms that supervise queries.

    Args:
        target: The store and its cold tier.
        interval: Pause between two promotions; at most half of `horizon`.
        checkpoint: Folder of the query's checkpoint.
        horizon: As for `promote`.
        spark: The session; `spark_session()` if None.

    Returns:
        The running query.

    Raises:
        ConfigurationError: The interval is longer than half of the horizon.
    """
    _must_fit(interval, horizon)
    session = spark or spark_session()

    def tick(batch: DataFrame, number: int) -> None:
        del number
        promote(target, horizon=horizon, spark=batch.sparkSession)

    ticks = session.readStream.format("rate").option("rowsPerSecond", 1).load()
    writer = ticks.writeStream.foreachBatch(tick).option("checkpointLocation", str(checkpoint))
    return writer.trigger(processingTime=f"{interval.total_seconds()} seconds").start()


def delete_retired(tier: ColdTier) -> int:
    """Delete files that were promoted or compacted more than a day ago; return their number."""
    if tier.read(tier.catalog.exist):
        tier.write(tier.catalog.retire_old_ids)
    retired = tier.read(lambda connection: tier.catalog.retired(connection) if tier.catalog.exist(connection) else [])
    if retired:
        folder = ColdFolder(tier.path)
        for name, place in retired:
            folder.delete(name, place)
        tier.write(partial(tier.catalog.forget, names=[name for name, _ in retired]))
    return len(retired)


def _move(spark: SparkSession, tier: ColdTier, files: Sequence[ColdFile], dead: dict[str, list[str]]) -> _Moved:
    """Stage the rows of the files and commit them in a single transaction. Raises _Overtaken."""
    staging = tier.store.staging(new_area())
    staging.create()
    cancelled = 0
    with ExitStack() as undone:
        undone.callback(staging.discard)
        stage = partial(_stage, store=tier.store, area=staging.name, folder=ColdFolder(tier.path))
        plan = planned(spark, [[file] for file in files], dead)
        rows = plan.mapInArrow(stage, STAGED).toArrow().to_pylist()
        attempts = [Attempt(row["number"], row["rows"], row["earliest"]) for row in rows]

        def flip(connection: Connection, staged: Table) -> None:
            nonlocal cancelled
            names = [file.name for file in files]
            if len(tier.catalog.lock(connection, names)) != len(names):
                raise _Overtaken
            late = tier.catalog.buried(connection, names)  # complete only now: the lock stops further cancellations
            cancelled = _remove(connection, staged, late, dead)
            tier.catalog.retire(connection, names, FileState.PROMOTED)

        committed = staging.commit(attempts, on_conflict="keep", pre_commit=flip, arrival=JournalEvent.PROMOTED)
        undone.pop_all()
    return _Moved(committed, cancelled)


def _stage(
    batches: Iterator[pa.RecordBatch], *, store: StoreOptions, area: str, folder: ColdFolder
) -> Iterator[pa.RecordBatch]:
    files = list(planned_files(batches))
    if not files:
        return
    staging = store.staging(area)
    attempt = staging.write(batch for file, dead in files for batch in folder.batches(file, dead))
    names = [part.split()[0] for part in STAGED.split(", ")]
    values = [pa.array([value], pa.int64()) for value in attempt[: len(names)]]
    yield pa.RecordBatch.from_arrays(values, names=names)


def _remove(connection: Connection, staged: Table, late: dict[str, dict[str, str]], dead: dict[str, list[str]]) -> int:
    """Delete staged rows that were cancelled after the files were read; return their number."""
    ids = sorted({key for name, buried in late.items() for key in buried if key not in dead.get(name, ())})
    removed = 0
    for first in range(0, len(ids), LONGEST_LIST):
        some = ids[first : first + LONGEST_LIST]
        removed += connection.execute(delete(staged).where(staged.c.id.in_(some))).rowcount
    return removed


def _first(files: Sequence[ColdFile], at_once: int) -> list[ColdFile]:
    chosen: list[ColdFile] = []
    messages = 0
    for file in files:
        if chosen and messages + file.messages > at_once:
            break
        chosen.append(file)
        messages += file.messages
    return chosen


def _buried(files: Iterable[ColdFile], dead: dict[str, list[str]]) -> int:
    return sum(len(dead.get(file.name, ())) for file in files)


def _sum(first: Promoted, second: Promoted) -> Promoted:
    return Promoted(
        first.stored + second.stored,
        first.duplicates + second.duplicates,
        first.cancelled + second.cancelled,
        first.files + second.files,
    )


def _must_fit(interval: timedelta, horizon: timedelta) -> None:
    if time_span("interval", interval) > time_span("horizon", horizon) / 2:
        raise ConfigurationError(
            f"interval={interval} is longer than half of horizon={horizon}: messages could come late. "
            "Promote more often, or further ahead"
        )
