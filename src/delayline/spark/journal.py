"""Export the journal of a store to Parquet, each entry exactly once, and read it."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import datetime
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from delayline.bulk.journal_export import EntryRange, JournalExport
from delayline.checks import whole_number
from delayline.delayed.columns import JOURNALED_COLUMNS
from delayline.errors import BackendUnavailable, ConfigurationError
from delayline.shards import named_errors
from delayline.spark.audit import SHARD, marked_as_read
from delayline.spark.cold_tier import ColdTier, waiting_messages
from delayline.spark.errors import translated_errors
from delayline.spark.options import StoreOptions, fields_of
from delayline.spark.reader import arrow_batch
from delayline.spark.session import activated, described, session_for
from delayline.spark.shards import parts_of
from delayline.sql.journal import LONGEST_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from delayline.spark.schedule import JobTarget

ENTRIES: Final = StructType(
    [
        StructField("seq", LongType()),
        StructField("store", StringType()),
        StructField("event", StringType()),
        *fields_of(JOURNALED_COLUMNS),
        StructField("at", TimestampType()),
        StructField("retries", IntegerType()),
    ]
)
#: The beginning of a URI, as opposed to a path of this machine.
URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
ENTRIES_AT_ONCE: Final = 1_000_000
#: The most entries that a task reads at once; a run of numbers may be longer.
LONGEST_RANGE: Final = 50_000


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        entries: Exported entries.
        batches: Directories that were written.
    """

    entries: int
    batches: int


def export(
    target: JobTarget,
    path: str | Path,
    *,
    partitions: int = 2,
    entries_at_once: int = ENTRIES_AT_ONCE,
    spark: SparkSession | None = None,
    progress: Callable[[int], object] = lambda entries: None,
) -> Exported:
    """Move the present entries of the journal to Parquet files, a directory per batch. Blocks.

    A single transaction deletes the entries of a batch from the journal and registers its directory, so each entry is
    exported once even if a process is killed. `read_journal` reads the registered directories.

    Args:
        target: The store.
        path: Folder or URI of the export; a relative path belongs to this process's working directory.
        partitions: Tasks that read, 1 or more; no more than the target's `max_connections`.
        entries_at_once: The most entries of a batch; 1 or more.
        spark: The session; `spark_session()` if None.
        progress: Called after each batch with the number of entries so far.

    Returns:
        The number of entries and batches.

    Raises:
        ConfigurationError: A value is out of range, or the Spark job failed.
        BackendUnusable: The store keeps no journal.
        BackendUnavailable: Another process exports the same journal; export again.
    """
    path = _checked(path)
    whole_number("partitions", partitions, at_least=1)
    whole_number("entries_at_once", entries_at_once, at_least=1)
    stores = [(part.shard, StoreOptions.of(part.target.options)) for part in parts_of(target)]
    entries, batches, session = 0, 0, session_for(spark)

    def told(more: int) -> None:
        progress(entries + more)

    for shard, store in stores:
        with named_errors(shard):
            done = _export_all(store, path, partitions, entries_at_once, session, told)
        entries, batches = entries + done.entries, batches + done.batches
    return Exported(entries, batches)


def _export_all(
    store: StoreOptions,
    path: str,
    partitions: int,
    entries_at_once: int,
    session: SparkSession,
    progress: Callable[[int], object],
) -> Exported:
    journal, tasks = JournalExport(store.address, schema=store.schema), min(partitions, store.connections)
    entries = batches = 0
    # Only the present entries: a busy store can write faster than this exports.
    left = sum(run.entries for run in journal.runs(1 << 31))
    while left > 0 and (runs := journal.runs(min(left, entries_at_once))):
        with translated_errors(), described(session, f"export of the journal of {store.table}"):
            _export(store, journal, path, runs, tasks, session)
        number = sum(run.entries for run in runs)
        entries, batches, left = entries + number, batches + 1, left - number
        progress(entries)
    return Exported(entries, batches)


def read_journal(target: JobTarget, path: str | Path, *, spark: SparkSession | None = None) -> DataFrame:
    """Return the entries that were exported to a path.

    Args:
        target: The store.
        path: As given to `export`.
        spark: The session; `spark_session()` if None.

    Returns:
        The columns seq, store, event, id, destination, due, at and retries; of a map of shards also shard.
    """
    stores = [(part.shard, StoreOptions.of(part.target.options)) for part in parts_of(target)]
    session, journals = session_for(spark), []
    for shard, store in stores:
        with named_errors(shard), translated_errors():
            entries = _read(store, path, session)
        journals.append(entries if shard is None else entries.withColumn(SHARD, F.lit(shard.name)))
    return reduce(DataFrame.unionByName, journals)


def _read(store: StoreOptions, path: str | Path, spark: SparkSession) -> DataFrame:
    folder = _checked(path)
    journal, before = JournalExport(store.address, schema=store.schema), str(path).rstrip("/")
    # An older delayline has recorded a relative path as it was given, from wherever.
    relative = [] if before == folder else [name for name in journal.directories(before) if Path(folder, name).is_dir()]
    directories = relative + journal.directories(folder)
    places = [f"{folder}/{directory}" for directory in directories]
    return spark.read.schema(ENTRIES).parquet(*places) if places else spark.createDataFrame([], ENTRIES)


def waiting_ids(target: JobTarget, spark: SparkSession) -> DataFrame:
    """Return the ids of the messages in the store, and in its cold tier if the target has any.

    The DataFrame knows the database's time at this call, of several shards the earliest, up to which `audit` judges
    messages: read it now, as by `cache()` and `count()`.

    Args:
        target: The store and, if it has any, its cold tier.
        spark: The session.

    Returns:
        The column id, of a map of shards also shard. Each action on the DataFrame reads the store again.
    """
    parts, times, waiting = parts_of(target), list[datetime](), list[DataFrame]()
    for part in parts:  # all times before the reading: what falls due meanwhile is not overdue
        with named_errors(part.shard):
            times.append(StoreOptions.of(part.target.options).staging().now())
    for part in parts:
        options, path = part.target.options, part.target.cold_tier
        with named_errors(part.shard):
            ids = waiting_messages(activated(spark), options, None if path is None else ColdTier(options, path))
        waiting.append(ids if part.shard is None else ids.withColumn(SHARD, F.lit(part.shard.name)))
    return marked_as_read(reduce(DataFrame.unionByName, waiting), min(times))


def _export(
    store: StoreOptions,
    journal: JournalExport,
    path: str,
    runs: Sequence[EntryRange],
    partitions: int,
    spark: SparkSession,
) -> None:
    directory = f"export-{uuid.uuid4().hex}"
    folder, shares = f"{path}/{directory}", _shares(runs, partitions)
    read = partial(_entries, store=store, shares=shares)
    spark.range(0, len(shares), 1, len(shares)).mapInArrow(read, ENTRIES).write.parquet(folder)
    written, wanted = spark.read.schema(ENTRIES).parquet(folder).count(), sum(run.entries for run in runs)
    if written != wanted:
        raise BackendUnavailable(
            f"{written} of {wanted} entries of the journal were read: another process exports it. Export again"
        )
    journal.finish(path, directory, runs)


def _entries(
    batches: Iterable[pa.RecordBatch], *, store: StoreOptions, shares: Sequence[Sequence[EntryRange]]
) -> Iterator[pa.RecordBatch]:
    journal = JournalExport(store.address, schema=store.schema)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for run in shares[number]:
                for rows in journal.entries(run):
                    yield arrow_batch(rows, ENTRIES)


def _shares(runs: Sequence[EntryRange], partitions: int) -> list[list[EntryRange]]:
    """Return the ranges of each task: about the same number of entries, in order."""
    ranges = [
        EntryRange(first, min(first + LONGEST_RANGE - 1, run.last))
        for run in runs
        for first in range(run.first, run.last + 1, LONGEST_RANGE)
    ]
    share, shares, size = sum(run.entries for run in runs) / partitions, [list[EntryRange]()], 0
    for entries in ranges:
        if size >= share * len(shares):
            shares.append([])
        shares[-1].append(entries)
        size += entries.entries
    return shares


def _checked(path: str | Path) -> str:
    """Return the path as it is recorded: absolute, or a URI. Raises ConfigurationError."""
    recorded = str(path)
    if recorded.lower().startswith("file:"):
        recorded = unquote(urlsplit(recorded).path)
    if recorded and URI.match(recorded) is None:
        recorded = str(Path(recorded).resolve())
    recorded = recorded.rstrip("/")
    if not recorded or len(recorded) > LONGEST_PATH:
        raise ConfigurationError(f"path={recorded!r} must be a path of at most {LONGEST_PATH} characters")
    return recorded
