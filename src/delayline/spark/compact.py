"""Compact the cold tier: merge small files, drop cancelled messages, delete files that are no longer needed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from time import monotonic
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from delayline.bulk.cold_catalog import OBSOLETE_FILES_KEPT_FOR, FileState
from delayline.bulk.cold_folder import ROWS_A_FILE, ROWS_AT_ONCE, ColdFolder, HourWriter
from delayline.delayed.arrow import MESSAGE_SCHEMA
from delayline.spark.cold_tier import (
    ColdTier,
    check_job_duration,
    file_from_json,
    file_to_json,
    planned,
    planned_groups,
)
from delayline.spark.errors import translated_errors
from delayline.spark.promote import delete_retired
from delayline.spark.session import session_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.spark.schedule import JobTarget

MERGED: Final = "sources ARRAY<STRING>, file STRING"


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

    Safe to kill, to repeat, and to run while messages are scheduled, promoted and cancelled.

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
        tier = ColdTier(target.options, target.cold_tier)
        files, dead = tier.files()
        groups = _groups(files, dead)
        merged: list[_Merge] = []
        if groups:
            began = monotonic()
            merges = _merged(session_for(spark), tier, groups, dead)
            merged = tier.write(partial(_register, tier=tier, merges=merges, dead=dead, began=began))
        after = sum(1 for merge in merged if merge.into is not None)
        return Compacted(
            sum(len(merge.sources) for merge in merged), after, delete_retired(tier) + delete_unregistered(tier)
        )


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
