"""Promote messages that come near from the files of the cold tier to the store, each message once."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from delayline.backends import backend_of
from delayline.bulk.cold_folder import ColdFolder
from delayline.bulk.jobs import NUMBER_BITS
from delayline.bulk.writer import blocking
from delayline.checks import time_span
from delayline.clock import LATEST_TIME, ONE_DAY, to_microseconds
from delayline.errors import ConfigurationError
from delayline.spark.cold_tier import ColdTier, planned, planned_files
from delayline.spark.errors import translated_errors
from delayline.spark.session import session_for, started
from delayline.spark.shards import over_shards
from delayline.spark.workers import keep_imports

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from sqlalchemy import Connection

    from delayline.backends import MessageSink
    from delayline.bulk.cold_catalog import ColdFile
    from delayline.spark.options import StoreOptions
    from delayline.spark.schedule import JobTarget

NOTHING: Final = "file STRING"
#: The name of the broker connections.
PROMOTE_CONNECTION: Final = "delayline promote"
#: How much further than the horizon messages of a file may be due.
ONE_HOUR: Final = timedelta(hours=1)


@dataclass(frozen=True)
class Promoted:
    """The result of a promotion, in messages.

    Attributes:
        stored: Messages moved to the store.
        duplicates: Messages left out because their id is already in the store.
        cancelled: Messages left out because they were cancelled.
        sent: Messages sent to the broker.
        files: Files that were promoted.
    """

    stored: int = 0
    duplicates: int = 0
    cancelled: int = 0
    files: int = 0
    sent: int = 0


def promote(target: JobTarget, *, horizon: timedelta = ONE_DAY, spark: SparkSession | None = None) -> Promoted:
    """Move the messages due within the horizon from the cold tier to the store, or to the target's broker. Blocks.

    Moves whole files, so the rest of an hour comes along, each file in one transaction of a task. Safe to kill, to
    repeat and to run in several processes.

    A target with `delay_levels` gets them from the files without a detour over the store: 5,000 at a time, recorded
    once they are confirmed. Those that were under way when a task was killed are sent again. What the broker refuses,
    as for a queue that does not exist, goes to the store.

    Over a map of shards each shard's messages go to that shard, side by side. One that does not answer stops only its
    own, and is an error once the others are done.

    Args:
        target: The store and its cold tier.
        horizon: How far ahead to promote; longer than the time until the next promotion.
        spark: The session; `spark_session()` if None.

    Returns:
        The counts of this promotion.

    Raises:
        ConfigurationError: The target has no cold tier, or a value is out of range.
        BackendUnusable: The broker has no delay levels, or the account no table.
        DelaylineError: The job failed. The files that it has promoted before remain so.
    """
    time_span("horizon", horizon)
    with translated_errors():
        return reduce(_sum, over_shards(target, partial(_promote, horizon=horizon), spark))


def _promote(target: JobTarget, spark: SparkSession | None, *, horizon: timedelta) -> Promoted:
    tier = ColdTier(target.options, target.cold_tier)
    if not tier.read(tier.catalog.exist):
        return Promoted()
    now = tier.store.staging().now()
    broker = None if target.broker is None else _sink(target, target.broker, horizon)
    until = to_microseconds(now + horizon if horizon < LATEST_TIME - now else LATEST_TIME)
    due = partial(tier.catalog.list_files, until=until)
    done = _promoted(tier, due, broker, spark) if tier.read(due) else Promoted()
    tier.keep_log()
    delete_retired(tier)
    return done


def _promoted(
    tier: ColdTier,
    due: Callable[[Connection], list[ColdFile]],
    broker: MessageSink | None,
    spark: SparkSession | None,
) -> Promoted:
    """Promote the files that are due until there are none."""
    folder, job, connections = tier.create(), secrets.randbits(NUMBER_BITS), tier.store.connections
    task = _PromotionTask(tier.store, folder, job, broker)
    while files := tier.read(due):  # again, where a compaction has replaced some of them
        plan = planned(session_for(spark), [[file] for file in files], {}, most=connections)
        plan.mapInArrow(task.run, NOTHING).toArrow()
    promoted, moved = tier.read(partial(tier.catalog.promoted, job=job))
    return Promoted(moved.stored, moved.duplicates, moved.cancelled, promoted, moved.published)


def _sink(target: JobTarget, url: str, horizon: timedelta) -> MessageSink:
    """Return the broker, which has to be set up. Raises ConfigurationError for a horizon beyond its reach."""
    backend = backend_of(url, kind="broker")
    if backend.longest_delay is not None and horizon + ONE_HOUR > backend.longest_delay:
        raise ConfigurationError(
            f"horizon={horizon} and the rest of the hour after it are more than the {backend.longest_delay} that "
            f"{backend.scheme}: can hold a message: give a shorter horizon"
        )
    sink = backend.sink(url, PROMOTE_CONNECTION, endpoint=target.sender)
    blocking(sink.must_exist())
    return sink


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
    session = session_for(spark)

    def tick(batch: DataFrame, number: int) -> None:
        del number
        promote(target, horizon=horizon, spark=batch.sparkSession)

    ticks = session.readStream.format("rate").option("rowsPerSecond", 1).load()
    writer = ticks.writeStream.option("checkpointLocation", str(checkpoint))
    return started(writer.trigger(processingTime=f"{interval.total_seconds()} seconds"), tick)


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


@dataclass(frozen=True)
class _PromotionTask:
    """The work of a task; pickled."""

    store: StoreOptions
    folder: ColdFolder
    job: int
    broker: MessageSink | None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Promote the files of the plan; yields nothing."""
        promoter = self.store.promoter(self.folder, self.job)
        for file, _ in planned_files(batches):
            if self.broker is None:
                promoter.store(file)
            else:
                promoter.send(file, self.broker)
        keep_imports()
        yield from ()


def _sum(first: Promoted, second: Promoted) -> Promoted:
    return Promoted(
        first.stored + second.stored,
        first.duplicates + second.duplicates,
        first.cancelled + second.cancelled,
        first.files + second.files,
        first.sent + second.sent,
    )


def _must_fit(interval: timedelta, horizon: timedelta) -> None:
    if time_span("interval", interval) > time_span("horizon", horizon) / 2:
        raise ConfigurationError(
            f"interval={interval} is longer than half of horizon={horizon}: messages could come late. "
            "Promote more often, or further ahead"
        )
