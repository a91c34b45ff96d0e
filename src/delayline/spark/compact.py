"""Compact the cold tier: merge small files, drop cancelled messages, delete files that are no longer needed."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayline.bulk.cold_catalog import BUCKETS, OBSOLETE_FILES_KEPT_FOR, FileState, IdsFile
from delayline.bulk.cold_folder import IDS_AT_ONCE, ROWS_A_FILE, ROWS_AT_ONCE, ColdFolder, HourWriter
from delayline.bulk.cold_ids import IdHashes, ids_in, in_order
from delayline.delayed.arrow import MESSAGE_SCHEMA
from delayline.spark.cold_tier import (
    ColdTier,
    check_job_duration,
    file_from_json,
    file_to_json,
    planned,
    planned_files,
    planned_groups,
)
from delayline.spark.errors import translated_errors
from delayline.spark.promote import delete_retired
from delayline.spark.session import session_for
from delayline.spark.shards import over_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.spark.schedule import JobTarget

MERGED: Final = "sources ARRAY<STRING>, file STRING"
INDEXED: Final = "files ARRAY<STRING>, ids STRING"
MERGED_IDS: Final = "name STRING, entries LONG, first_bucket LONG, last_bucket LONG"


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction, in files.

    Attributes:
        before: Files that were merged.
        after: Files that they were merged into.
        deleted: Files that were deleted: merged or promoted more than a day ago, or never registered.
    """

    before: int
    after: int
    deleted: int


@dataclass(frozen=True)
class _Merge:
    """The files of an hour that are merged."""

    sources: list[ColdFile]
    into: ColdFile | None


def compact(target: JobTarget, *, spark: SparkSession | None = None) -> Compacted:
    """Merge the files of each hour in a single transaction, and delete files that are no longer needed. Blocks.

    Merges the indexes of ids too, and drops the ids that have left the tier.

    Safe to kill, to repeat, and to run while messages are scheduled, promoted and cancelled. Over a map of shards the
    files of each shard are merged for themselves, as by `promote`.

    Args:
        target: The store and its cold tier.
        spark: The session; `spark_session()` if None.

    Returns:
        The number of files before and after, and of deleted files.

    Raises:
        ConfigurationError: The target has no cold tier.
        DelaylineError: The job failed; the catalog is unchanged.
    """
    with translated_errors():
        done = over_shards(target, _compact, spark)
        return Compacted(*(sum(numbers) for numbers in zip(*map(astuple, done), strict=True)))


def _compact(target: JobTarget, spark: SparkSession | None) -> Compacted:
    tier = ColdTier(target.options, target.cold_tier)
    files, dead = tier.files()
    begun = tier.read(partial(tier.catalog.sent, names=[file.name for file in files]))
    groups = _groups([file for file in files if file.name not in begun], dead)
    merged: list[_Merge] = []
    if groups:
        began = monotonic()
        merges = _merged(session_for(spark), tier, groups, dead)
        merged = tier.write(partial(_register, tier=tier, merges=merges, dead=dead, began=began))
    if files:
        tier.keep_log()
    merge_ids(spark, tier)
    after = sum(1 for merge in merged if merge.into is not None)
    return Compacted(
        sum(len(merge.sources) for merge in merged), after, delete_retired(tier) + delete_unregistered(tier)
    )


def merge_ids(spark: SparkSession | None, tier: ColdTier) -> None:
    """Merge the indexes of ids, if there are many or much of them is old, and index files that are in none."""
    began = monotonic()
    if not tier.read(tier.catalog.exist):
        return
    folder = tier.create()  # and the tables, which an older delayline has made without indexes
    others = tier.read(tier.catalog.ids_snapshot).others
    if others:
        plan = planned(session_for(spark), [[file] for file in others], {})
        rows = plan.mapInArrow(partial(_index, folder=folder), INDEXED).toArrow().to_pylist()
        tier.write(partial(_register_indexed, tier=tier, files=others, rows=rows, began=began))
    indexes = tier.read(tier.catalog.ids_snapshot).indexes
    held, _ = tier.files()  # after the indexes, so that the files of all of their ids are among them
    messages = sum(file.messages for file in held)
    width = BUCKETS // min(BUCKETS, 1 << max(0, messages // IDS_AT_ONCE).bit_length())
    if len(indexes) <= BUCKETS // width and sum(index.entries for index in indexes) <= 2 * messages:
        return
    ranges = session_for(spark).range(0, BUCKETS, width, BUCKETS // width)
    merge = _IdsMerge(folder, [index.name for index in indexes], [file.name for file in held], width)
    merged = [IdsFile(**row) for row in ranges.mapInArrow(merge.run, MERGED_IDS).toArrow().to_pylist()]
    tier.write(partial(_replace_ids, tier=tier, indexes=indexes, merged=merged, held=held, began=began))


def delete_unregistered(tier: ColdTier) -> int:
    """Delete the tier's files that are not in the catalog and older than a day; return their number.

    Tasks and drivers that died have left them. Lists the whole folder.
    """
    if not tier.read(tier.catalog.exist):
        return 0
    folder = tier.create()
    now = datetime.now(UTC)
    old = [lying for lying in folder.lying() if now - lying.changed.astimezone(UTC) > OBSOLETE_FILES_KEPT_FOR]
    known = tier.read(tier.catalog.known)  # after the listing: a new file is registered after it was written
    unknown = [lying for lying in old if lying.name not in known]
    for lying in unknown:
        folder.delete(lying.name, lying.due_hour)
    return len(unknown)


def _groups(files: Sequence[ColdFile], dead: Mapping[str, Sequence[str]]) -> list[list[ColdFile]]:
    """Return the groups worth merging: small files of an hour, and files of which half is cancelled."""
    groups: list[list[ColdFile]] = []
    for _, some in groupby(sorted(files, key=lambda file: (file.due_hour, file.messages)), lambda file: file.due_hour):
        group: list[ColdFile] = []
        for file in some:
            if group and sum(member.messages for member in group) + file.messages > ROWS_A_FILE:
                groups.append(group)
                group = []
            group.append(file)
        groups.append(group)
    return [group for group in groups if len(group) > 1 or 2 * len(dead.get(group[0].name, ())) > group[0].messages]


def _merged(
    spark: SparkSession, tier: ColdTier, groups: Sequence[Sequence[ColdFile]], dead: Mapping[str, Sequence[str]]
) -> list[_Merge]:
    """Write the new files, which are not registered yet. A group is the work of a task."""
    files = {file.name: file for group in groups for file in group}
    plan = planned(spark, groups, dead)
    rows = plan.mapInArrow(partial(_merge, folder=tier.create()), MERGED).toArrow().to_pylist()
    return [
        _Merge([files[name] for name in row["sources"]], None if row["file"] is None else file_from_json(row["file"]))
        for row in rows
    ]


def _merge(batches: Iterator[pa.RecordBatch], *, folder: ColdFolder) -> Iterator[pa.RecordBatch]:
    for group in planned_groups(batches):
        rows = [batch for file, dead in group for batch in folder.batches(file, dead)]
        writer = HourWriter(folder)
        for batch in pa.Table.from_batches(rows, MESSAGE_SCHEMA).sort_by("due").to_batches(ROWS_AT_ONCE):
            writer.write(batch)
        written = writer.close()  # a single file, as no group is larger, or none where all are dead
        file = file_to_json(written[0]) if written else None
        sources = pa.array([[file.name for file, _ in group]], pa.list_(pa.string()))
        yield pa.RecordBatch.from_arrays([sources, pa.array([file], pa.string())], names=["sources", "file"])


def _register(
    connection: Connection, *, tier: ColdTier, merges: Sequence[_Merge], dead: Mapping[str, Sequence[str]], began: float
) -> list[_Merge]:
    """Replace the old files by the new files, unless another process has changed them; keep later cancellations."""
    check_job_duration(began)
    catalog = tier.catalog
    locked = catalog.lock(connection, [file.name for merge in merges for file in merge.sources])
    locked -= {*catalog.sent(connection, sorted(locked))}  # a promotion has begun with them
    done = [merge for merge in merges if all(file.name in locked for file in merge.sources)]
    names = [file.name for merge in done for file in merge.sources]
    buried = catalog.buried(connection, names)
    catalog.retire(connection, names, FileState.COMPACTED)
    catalog.register(connection, [merge.into for merge in done if merge.into is not None])
    for merge in done:
        late = {
            message_id: destination
            for file in merge.sources
            for message_id, destination in buried.get(file.name, {}).items()
            if message_id not in dead.get(file.name, ())
        }
        if merge.into is not None and late:
            catalog.bury(connection, {merge.into.name: late})
    return done


def _index(batches: Iterator[pa.RecordBatch], *, folder: ColdFolder) -> Iterator[pa.RecordBatch]:
    """Write an index of the files of a task."""
    files = [file for file, _ in planned_files(batches)]
    if files:
        read = ((file, folder.batches(file, columns=("id",))) for file in files)
        ids = [ids_in(file.name, [IdHashes.of(batch.column("id")) for batch in some]) for file, some in read]
        names = pa.array([[file.name for file in files]], pa.list_(pa.string()))
        yield pa.RecordBatch.from_arrays([names, pa.array([folder.write_ids(in_order(ids))])], names=["files", "ids"])


def _register_indexed(
    connection: Connection,
    *,
    tier: ColdTier,
    files: Sequence[ColdFile],
    rows: Sequence[Mapping[str, Any]],
    began: float,
) -> None:
    check_job_duration(began)
    by_name = {file.name: file for file in files}
    for row in rows:
        some = [by_name[name] for name in row["files"]]
        index = IdsFile(row["ids"], sum(file.messages for file in some), 0, BUCKETS - 1)
        tier.catalog.register_ids(connection, [index], max(file.max_due for file in some))
        tier.catalog.mark_indexed(connection, row["files"])


@dataclass(frozen=True)
class _IdsMerge:
    """Merges indexes; the work of a task, pickled."""

    folder: ColdFolder
    indexes: list[str]
    held: list[str]
    """The files whose ids are kept."""
    width: int
    """How many buckets a new index has."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write an index for each first bucket."""
        held = pa.array(self.held, pa.string())
        for first in (first for batch in batches for first in batch.column("id").to_pylist()):
            last = first + self.width - 1
            entries = in_order(self.folder.ids_of_buckets(name, first, last) for name in self.indexes)
            kept = entries.filter(pc.is_in(entries.column("file").cast(pa.string()), value_set=held))
            if kept.num_rows:
                row = IdsFile(self.folder.write_ids(kept), kept.num_rows, first, last)
                yield pa.RecordBatch.from_pylist([row._asdict()])


def _replace_ids(
    connection: Connection,
    *,
    tier: ColdTier,
    indexes: Sequence[IdsFile],
    merged: Sequence[IdsFile],
    held: Sequence[ColdFile],
    began: float,
) -> None:
    """Replace the indexes by the new ones, unless another process has replaced some of them."""
    check_job_duration(began)
    names = [index.name for index in indexes]
    if len(tier.catalog.lock_ids(connection, names)) == len(names):
        tier.catalog.retire_ids(connection, names)
        tier.catalog.register_ids(connection, merged, max((file.max_due for file in held), default=0))
