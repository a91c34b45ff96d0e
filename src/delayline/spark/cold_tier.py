"""The cold tier on the driver, and plans that distribute its files over tasks."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa

from delayline.bulk.cold_catalog import ColdFile, ColdFiles
from delayline.bulk.cold_folder import ColdFolder
from delayline.bulk.delta_log import DeltaLog
from delayline.bulk.jobs import JobPieces
from delayline.bulk.writer import blocking
from delayline.delayed.columns import JOURNALED_NAMES
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.events import Event, emit
from delayline.spark.options import FORMAT, StoreOptions
from delayline.sql.databases import database_at
from delayline.sql.deadlines import job_work
from delayline.sql.journal import Journal, JournalEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection

Result = TypeVar("Result")
logger: logging.Logger = logging.getLogger(__name__)
#: `compact` deletes unregistered files that are older than a day; a job has to register its files well before.
LONGEST_JOB: Final = timedelta(hours=12)


class ColdTier:
    """The cold tier of a store, on the driver. Every method blocks."""

    def __init__(self, options: Mapping[str, str], path: str | None) -> None:
        if path is None:
            raise ConfigurationError(
                'the cold tier is missing: --cold-tier s3://bucket/reminders, or JobTarget(..., cold_tier="s3://bucket/reminders")'
            )
        self.options = options
        self.store: StoreOptions = StoreOptions.of(options)
        self.path = path
        self._database = database_at(self.store.address)
        dialect = self._database.dialect
        table = dialect.catalog.store_table(self.store.table, self.store.schema)
        self.catalog: ColdFiles = ColdFiles(dialect, table)
        self.jobs: JobPieces = JobPieces(dialect, table)
        self._journal = Journal(table, dialect)
        _ = ColdFolder(path)

    def create(self) -> ColdFolder:
        """Create the catalog if it is missing; return the folder to write to.

        Raises MissingExtra if the folder has a Delta log, and the extra to keep it is not installed.
        """
        folder = self._created()
        DeltaLog.of(folder)
        return folder

    def register(self, connection: Connection, files: Sequence[ColdFile]) -> None:
        """Make the files exist, and say in the journal, where one is kept, that their messages are scheduled.

        That is read from the files, some messages at a time.
        """
        self.catalog.register(connection, files)
        self._journal.look(connection)
        if self._journal.kept:
            folder = ColdFolder(self.path)
            for file in files:
                for batch in folder.batches(file, columns=JOURNALED_NAMES):
                    messages = zip(*(batch.column(name).to_pylist() for name in JOURNALED_NAMES), strict=True)
                    self._journal.note_each(connection, JournalEvent.SCHEDULED, messages)

    def held(self) -> list[ColdFile]:
        """Return all files."""
        return self.read(self.catalog.list_files)

    def keep_log(self) -> None:
        """Bring the Delta log up to date, if the folder has one, after a change of the catalog.

        If that fails, it is logged only: what the job has done stays, and the next job makes up for it.
        """
        log = DeltaLog.of(self._created())
        if log is not None:
            try:
                log.update(self.held)
            except BackendUnusable as error:
                log_text = "%s: the next job with this cold tier will try it again"
                emit(logger, logging.WARNING, Event.DELTA_LOG_BEHIND, log_text, error)

    def files(self, *, until: int | None = None) -> tuple[list[ColdFile], dict[str, list[str]]]:
        """Return the files with messages due at or before `until`, and the cancelled ids by file.

        Args:
            until: in microseconds since 1970; all files if None.
        """

        def read(connection: Connection) -> tuple[list[ColdFile], dict[str, list[str]]]:
            if not self.catalog.exist(connection):
                return [], {}
            files = self.catalog.list_files(connection, until=until)
            dead = self.catalog.buried(connection, [file.name for file in files])
            return files, {name: list(ids) for name, ids in dead.items()}

        return self.read(read)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a read transaction."""
        return blocking(self._opened(work, writing=False))

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a write transaction."""
        return blocking(self._opened(work, writing=True))

    def _created(self) -> ColdFolder:
        return ColdFolder(self.path, blocking(self._opened(self.catalog.create, writing=True)))

    @job_work
    async def _opened(self, work: Callable[[Connection], Result], *, writing: bool) -> Result:
        await self._database.open()
        try:
            return await (self._database.write(work) if writing else self._database.read(work))
        finally:
            await self._database.close()


def check_job_duration(began: float) -> None:
    """Raise BackendUnavailable for a job whose files may have been deleted as unregistered. began: monotonic time."""
    if time.monotonic() - began > LONGEST_JOB.total_seconds():
        raise BackendUnavailable(
            f"the job took longer than {LONGEST_JOB}, and was rolled back. Schedule fewer rows at once"
        )


def planned(
    spark: SparkSession,
    groups: Sequence[Sequence[ColdFile]],
    dead: Mapping[str, Sequence[str]],
    *,
    most: int | None = None,
) -> DataFrame:
    """Return groups of files as a DataFrame whose partitions have about the same number of messages.

    Args:
        spark: the session.
        groups: cold files by the range of due times that they share.
        dead: cancelled ids by file.
        most: how many partitions there may be.
    """
    limit = most or 4 * int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    slots = [0] * min(len(groups), limit)
    rows = []
    for messages, group in sorted(((sum(file.messages for file in some), some) for some in groups), reverse=True):
        slot = slots.index(min(slots))
        slots[slot] += messages
        rows.append((slot, [file_to_json(file) for file in group], [list(dead.get(file.name, ())) for file in group]))
    numbers, files, ids = (list(column) for column in zip(*rows, strict=True))
    texts = pa.list_(pa.string())
    columns = [pa.array(numbers, pa.int32()), pa.array(files, texts), pa.array(ids, pa.list_(texts))]
    plan = pa.Table.from_arrays(columns, names=["slot", "files", "dead"])
    return spark.createDataFrame(plan).repartitionById(len(slots), "slot")


def planned_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[tuple[ColdFile, list[str]]]]:
    """Yield the groups of a task's plan; each file comes with its cancelled ids."""
    for batch in batches:
        for texts, ids in zip(batch.column("files").to_pylist(), batch.column("dead").to_pylist(), strict=True):
            yield [(file_from_json(file_text), dead) for file_text, dead in zip(texts, ids, strict=True)]


def planned_files(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[ColdFile, list[str]]]:
    """Yield the files of a task's plan, each with its cancelled ids."""
    for group in planned_groups(batches):
        yield from group


def file_to_json(file: ColdFile) -> str:
    """Encode a file for a column."""
    return json.dumps(file)


def file_from_json(text: str) -> ColdFile:
    """Decode a file."""
    return ColdFile(*json.loads(text))


def waiting_messages(
    spark: SparkSession, options: Mapping[str, str], tier: ColdTier | None, *, columns: str = "id STRING"
) -> DataFrame:
    """Return the messages in the store and in its cold tier.

    A message that is promoted while the DataFrame is read may appear twice.

    Args:
        spark: the session.
        options: options of the data source, for the hot store.
        tier: the store's cold tier, if it has any.
        columns: the columns to read, as DDL, the id first.
    """
    files, dead = (
        ([], {}) if tier is None else tier.files()
    )  # before the store, so that a promoted message is not missed
    hot = spark.read.format(FORMAT).options(**options).schema(columns).load()
    if tier is None or not files:
        return hot
    names = [column.split()[0] for column in columns.split(", ")]
    plan = planned(spark, [[file] for file in files], dead)
    return hot.union(plan.mapInArrow(partial(_rows, folder=ColdFolder(tier.path), columns=names), columns))


def _rows(batches: Iterator[pa.RecordBatch], *, folder: ColdFolder, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for file, dead in planned_files(batches):
        yield from folder.batches(file, dead, columns=columns)
