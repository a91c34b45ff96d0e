"""Place the rows of a job in the store, in the cold tier, or in a broker's delay levels.

Each row gets a sink by its due time. A task stages the rows for the store, writes the files of the cold tier and
then publishes the rows for the broker. The driver commits once: a single transaction moves the staged rows to the
store, registers the files and records the counts. A job that fails or is killed before its commit leaves nothing in the
store or the cold tier.

A broker has no such transaction: it keeps the messages that it has confirmed. The rows for a broker are therefore
divided by id into partitions, and a table in the store's database records each partition that the broker has confirmed.
A job that is run again under the same name skips them; a partition that was in flight may be published twice. As in
`delayline.spark.pieces`, each partition ends with a row that says so: a partition that was cut off is not recorded.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BooleanType, StructField, StructType

from delayline.backends import Backend, backend_of
from delayline.bulk.cold_catalog import MICROS_A_HOUR
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName
from delayline.bulk.known_ids import KnownIds
from delayline.bulk.ledger import Committed, JobLedger, RunKey, RunKind, Sink, check_input
from delayline.bulk.partitions import JobParameters, PublishedPartitions, PublishReport
from delayline.bulk.writer import Attempt, blocking, new_area
from delayline.clock import LATEST_TIME, SystemClock, from_microseconds, to_microseconds
from delayline.delayed.arrow import microseconds
from delayline.delayed.store import OnConflict
from delayline.errors import BackendUnavailable, ConfigurationError, DuplicateMessage
from delayline.spark.cold_tier import (
    NO_ROWS,
    ColdTier,
    check_job_duration,
    file_from_json,
    file_to_json,
    stage_journal_rows,
)
from delayline.spark.headers import HEADER_ALLOWANCE, SendHeaders, Validator, valid_rows
from delayline.spark.options import SOURCE_COLUMNS, choice
from delayline.spark.pieces import END, UNENDED, PieceJob, ends_of
from delayline.spark.sources import OWN_COLUMNS, content_type, prepared
from delayline.sql.database import Database
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from pyspark.sql import DataFrame, Observation
    from sqlalchemy import Connection, Table

    from delayline.backends import MessageSink, MessageWriter
    from delayline.bulk.cold_catalog import ColdFile
    from delayline.spark.options import StoreOptions
    from delayline.spark.schedule import JobTarget
    from delayline.spark.sources import Columns

Result = TypeVar("Result")
#: What is committed at once: each piece, or the whole job.
Atomic = Literal["piece", "job"]
#: The name of the broker connections.
SCHEDULE_CONNECTION: Final = "delayline schedule"
#: Partitions of the rows for a broker. A partition that was confirmed and not yet recorded may be sent twice.
HASH_PARTITIONS: Final = 1024
#: Column: the partition of a row for the broker, 0 or more; negative for the store and the cold tier.
PARTITION: Final = "_delayline_partition"
#: Column: whether the id is already in store or cold tier, or belongs to an earlier row of the job.
DUPLICATE: Final = "_delayline_duplicate"
DUE_HOUR: Final = "_delayline_hour"
#: The hash of an id, as in the index of the cold tier's ids, in hexadecimal digits.
INDEX_HASH: Final = "_delayline_index_hash"
#: The most destinations that the driver looks up before the job; the tasks look up the others.
MOST_DESTINATIONS: Final = 10_000
#: The most ids whose refusal by the broker is kept.
MOST_REFUSED: Final = 1000
RESULT: Final = "result STRING"
FINGERPRINT: Final = "fingerprint STRING"


class Placed(NamedTuple):
    """The numbers of placed messages of a job; `now` and `validator` find its rejected rows again."""

    run: str
    stored: int
    cold: int
    sent: int
    duplicates: int
    rejected: int
    repeated: bool
    now: datetime
    validator: Validator

    @property
    def rows(self) -> int:
        """How many rows the input had."""
        return self.stored + self.cold + self.sent + self.duplicates + self.rejected


class PartitionLedger:
    """The partitions of a job that a broker has confirmed, kept in the store's database; pickled to tasks.

    Every method but `opened` and `partitions` blocks.
    """

    def __init__(self, store: StoreOptions, job: str) -> None:
        self._store = store
        self._job = job

    def create(self) -> JobParameters | None:
        """Create the table if it is missing; return the parameters that an earlier attempt has saved."""
        self._write(PublishedPartitions.create)
        return self._write(PublishedPartitions.parameters)

    def save(self, parameters: JobParameters) -> JobParameters:
        """Save the parameters, and return the parameters that count: a concurrent attempt may have been first."""
        self._write(lambda table, connection: table.save_parameters(connection, parameters))
        return self._write(PublishedPartitions.parameters) or parameters

    def reports(self) -> list[PublishReport]:
        """Return the reports of all recorded partitions."""
        return list(self._write(PublishedPartitions.reports).values())

    def delete(self) -> None:
        """Delete all entries of the job."""
        self._write(PublishedPartitions.delete)

    def partitions(self, database: Database) -> PublishedPartitions:
        """Return the table of the job in that database."""
        return PublishedPartitions(database.dialect, self._job, database.dialect.catalog.schema_of(self._store.schema))

    async def opened(self, stack: AsyncExitStack) -> Database:
        """Open the database until the stack closes."""
        database = database_at(self._store.address)
        await database.open()
        stack.push_async_callback(database.close)
        return database

    def _write(self, work: Callable[[PublishedPartitions, Connection], Result]) -> Result:
        async def run() -> Result:
            async with AsyncExitStack() as stack:
                database = await self.opened(stack)
                return await database.write(partial(work, self.partitions(database)))

        return blocking(run())


@dataclass(frozen=True)
class Placement:
    """Settings of a job: its target, the source's columns, and the horizon between near and far messages.

    | target | due before the horizon | due later |
    |---|---|---|
    | store | store | store |
    | store with cold tier | store | cold tier |
    | store with broker | broker | store |
    | store with cold tier and broker | broker | cold tier |
    | broker | broker | rejected beyond the reach of delay levels |
    """

    target: JobTarget
    columns: Columns
    on_conflict: OnConflict
    hot_horizon: timedelta
    atomic: Atomic = "piece"

    @property
    def in_pieces(self) -> bool:
        """Whether tasks commit: for a store alone, unless a duplicate is an error or all rows must come at once."""
        alone = self.target.cold_tier is None and self.target.broker is None
        return alone and self.on_conflict != "raise" and self.atomic == "piece"

    def check(self) -> None:
        """Raise ConfigurationError for a target that cannot honour `on_conflict`."""
        choice({"on_conflict": self.on_conflict}, "on_conflict", get_args(OnConflict))
        choice({"atomic": self.atomic}, "atomic", get_args(Atomic))
        if self.target.broker is not None and self.on_conflict != "keep":
            raise ConfigurationError(
                f"on_conflict={self.on_conflict!r} needs a search by id, and delay levels have none. Use 'keep': it "
                "compares the ids of the job with each other and with the store"
            )
        if self.target.cold_tier is not None and self.on_conflict == "replace":
            raise ConfigurationError(
                "on_conflict='replace' cannot replace messages in a cold tier: cancel them first, or use 'keep' or "
                "'raise'"
            )

    def run(
        self, rows: DataFrame, run: JobName | None, *, batch: int | None = None, observation: Observation | None = None
    ) -> Placed:
        """Place the rows as a batch of a run. Blocks.

        Args:
            rows: the messages, with the columns of `spark.schema`.
            run: the name and version of the job: resumes an earlier attempt, or returns the counts of a committed one.
            batch: the number of a stream's micro-batch; None for a job that is none.
            observation: gets the sums of what the tasks do, if they commit.

        Raises:
            DifferentInput: A job of that name had other rows, or a stream has stored a later batch.
            DelaylineError: Nothing is placed in store and cold tier; a broker keeps the messages that it has confirmed.
        """
        self.check()
        job = _Job(self, run, batch)
        return job.place_pieces(rows, observation) if self.in_pieces else job.place(rows)


class _Job:
    """A batch of a run, on the driver."""

    def __init__(self, settings: Placement, run: JobName | None, batch: int | None) -> None:
        target = settings.target
        self._settings = settings
        self._named = run is not None
        self._name = run or JobName(uuid.uuid4().hex)
        self._run = str(self._name)
        self._kind = RunKind.JOB if batch is None else RunKind.STREAM
        self._batch = batch or 0
        self._store = target.store
        if self._store is None and run is not None and self._kind is RunKind.JOB:
            raise ConfigurationError(
                f"run={self._run!r} needs a database that records it: JobTarget('postgresql://...', delay_levels='amqp://...')"
            )
        self._tier = None if target.cold_tier is None else ColdTier(target.options, target.cold_tier)
        self._staging = None if self._store is None else self._store.staging(new_area())
        self._now = SystemClock().now() if self._staging is None else self._staging.now()
        self._backend = None if target.broker is None else backend_of(target.broker, kind="broker")
        self._broker: MessageSink | None = None
        if self._backend is not None and target.broker is not None:
            self._broker = self._backend.sink(target.broker, SCHEDULE_CONNECTION, endpoint=target.sender)
            blocking(self._broker.must_exist())
        self._ledger: PartitionLedger | None = None
        if self._store is not None and self._broker is not None:
            # A tab cannot be in the name of a job.
            self._ledger = PartitionLedger(self._store, self._run if batch is None else f"{self._run}\t{batch}")
        self._began = time.monotonic()

    @property
    def _takes_fingerprint(self) -> bool:
        """Whether the input may differ when it comes again; Spark repeats a batch of a stream with the same rows."""
        return self._named and self._staging is not None and self._kind is RunKind.JOB

    def place_pieces(self, rows: DataFrame, observation: Observation | None) -> Placed:
        """Let tasks commit the rows in pieces, unless the job has committed before there were pieces."""
        settings = self._settings
        if self._named and self._recorded(Sink.STORE) is not None:
            return self.place(rows)
        is_batch = self._kind is RunKind.STREAM
        name = JobName(self._run, self._batch) if is_batch else self._name
        pieces = PieceJob(
            settings.target, settings.columns, settings.on_conflict, name, named=self._named, stream=is_batch
        )
        now = to_microseconds(self._now)
        validator = self._validator(JobParameters(now, now, {}))
        job, repeated = pieces.run(rows, self._now, validator, observation)
        counts = job.committed
        numbers = (counts.stored, 0, 0, counts.duplicates, counts.rejected)
        return Placed(self._run, *numbers, repeated, from_microseconds(job.parameters.now), validator)

    def place(self, rows: DataFrame) -> Placed:
        """Run the tasks and commit their results, unless an earlier attempt has committed."""
        saved = None if self._ledger is None else self._ledger.create()
        before: Committed | None = None
        if self._staging is not None and self._named:
            self._staging.create_ledger()
            before = self._recorded(Sink.STORE)
        if before is None and self._store is not None and self._named and self._kind is RunKind.JOB:
            self._store.pieces().refuse(self._name)
        if before is not None:
            parameters = saved or self._parameters(None)
            placed = self._repeated(before, parameters)
            if self._takes_fingerprint:
                given, contents = self._fingerprint(rows, parameters), self._settings.on_conflict == "replace"
                check_input(self._run, before.fingerprint, placed.rows, given, contents=contents)
            return placed
        parameters = saved or self._parameters(rows)
        if self._ledger is not None and self._takes_fingerprint:  # before anything is published
            given = self._fingerprint(rows, parameters)
            parameters = saved or self._ledger.save(replace(parameters, fingerprint=str(given)))
            if parameters.fingerprint is not None:
                check_input(self._run, parameters.fingerprint, given.rows, given, contents=False)
        elif self._ledger is not None and saved is None:
            parameters = self._ledger.save(parameters)
        with ExitStack() as undo:
            if self._staging is not None:
                self._staging.create()
                undo.callback(self._staging.discard)
            if self._ledger is not None and not self._named:  # no later attempt can use its entries
                undo.callback(self._ledger.delete)
            results = _results(self._arranged(rows, parameters), self._task(rows, parameters))
            placed = self._commit(results, parameters)
            undo.pop_all()
        return placed

    def _parameters(self, rows: DataFrame | None) -> JobParameters:
        """Return the parameters of a new job; asks the broker for the destinations of near rows.

        Rows for a destination that has no queue are rejected, not published.
        """
        reach = self._settings.hot_horizon
        if self._backend is not None:
            longest = self._backend.longest_delay or LATEST_TIME - self._now
            reach = longest if self._store is None else min(reach, longest)
        refused: Mapping[str, str] = {}
        if rows is not None and self._broker is not None:
            near = prepared(rows, self._settings.columns, self._now).where(F.col("due") < F.lit(self._now + reach))
            destinations = near.select("destination").distinct().limit(MOST_DESTINATIONS).toArrow()
            refused = blocking(self._broker.refusals([name for name in destinations.column(0).to_pylist() if name]))
        return JobParameters(to_microseconds(self._now), to_microseconds(self._now + reach), refused)

    def _fingerprint(self, rows: DataFrame, parameters: JobParameters) -> Fingerprint:
        """Read the input once, without writing anything."""
        messages = prepared(rows, self._settings.columns, from_microseconds(parameters.now)).drop(*OWN_COLUMNS)
        take = partial(_fingerprints, since=self._due_since(parameters))
        parts, total = messages.mapInArrow(take, FINGERPRINT).toArrow(), Fingerprint()
        for part in parts.column(0).to_pylist():
            total = total.plus(Fingerprint.parse(part))
        return total

    def _due_since(self, parameters: JobParameters) -> int:
        """Return what due times are counted from in a fingerprint, so that delays are the same in each attempt."""
        return 0 if self._settings.columns.delay is None else parameters.now

    def _validator(self, parameters: JobParameters) -> Validator:
        holder = self._backend or Backend if self._staging is None else self._staging
        largest = holder.largest_message - HEADER_ALLOWANCE
        if self._broker is None:
            return Validator(largest)
        latest = parameters.far_from if self._store is None else None
        return Validator(largest, parameters.far_from, parameters.refused, latest=latest)

    def _task(self, rows: DataFrame, parameters: JobParameters) -> _Task:
        settings, now = self._settings, from_microseconds(parameters.now)
        return _Task(
            headers=SendHeaders(settings.target.sender, content_type(rows, settings.columns), now),
            validator=self._validator(parameters),
            far_from=parameters.far_from,
            store=self._store,
            area="" if self._staging is None else self._staging.name,
            folder=None if self._tier is None else self._tier.create(),
            journaled=self._tier is not None and self._tier.journaled,
            broker=self._broker,
            ledger=self._ledger,
            due_since=self._due_since(parameters) if self._takes_fingerprint and self._ledger is None else None,
        )

    def _arranged(self, rows: DataFrame, parameters: JobParameters) -> DataFrame:
        """Return the messages in the order that the writers need.

        A store alone takes any order, and its primary key finds duplicates; for the other sinks they are marked first.
        Files need the rows of an hour together. A partition for the broker is the work of a single task.
        """
        messages = prepared(rows, self._settings.columns, from_microseconds(parameters.now)).drop(*OWN_COLUMNS)
        if self._broker is None and self._tier is None:
            return self._bounded(messages)
        messages = self._with_duplicates_marked(messages)
        if self._broker is None:
            messages = messages.withColumn(DUE_HOUR, F.expr(f"unix_micros(due) div {MICROS_A_HOUR}"))
            return self._bounded(messages.hint("rebalance", DUE_HOUR)).sortWithinPartitions("due").drop(DUE_HOUR)
        far = F.expr(f"unix_micros(due) >= {parameters.far_from}")
        partition = F.when(far, F.expr(f"-1 - unix_micros(due) div {MICROS_A_HOUR}")).otherwise(
            F.pmod(F.xxhash64("id"), F.lit(HASH_PARTITIONS))
        )
        messages = messages.withColumn(PARTITION, partition.cast("long")).withColumn(END, F.lit(False))
        ended = messages.unionByName(ends_of(messages, PARTITION, HASH_PARTITIONS))
        return self._bounded(ended.repartition(PARTITION)).sortWithinPartitions(PARTITION, END, "due")

    def _bounded(self, messages: DataFrame) -> DataFrame:
        """Return the rows for no more tasks than may have a connection."""
        most = self._settings.target.max_connections if self._store is None else self._store.connections
        return messages if most is None else messages.coalesce(most)

    def _with_duplicates_marked(self, messages: DataFrame) -> DataFrame:
        """Add the column DUPLICATE: of rows with the same id the first is kept, as in a store.

        The tasks ask for the ids of the job only, in the order of the index of the cold tier's ids.
        """
        others = (name for name in SOURCE_COLUMNS.names if name not in {"id", "due"})
        hashed = messages.withColumn(INDEX_HASH, F.sha2(F.col("id").cast("binary"), 256))
        gathered = hashed.repartition(F.substring(INDEX_HASH, 1, 2))
        if self._store is not None:
            gathered = gathered.coalesce(self._store.connections)
        ordered = gathered.sortWithinPartitions(INDEX_HASH, F.col("due").asc_nulls_last(), *others)
        search = _DuplicateSearch(self._store, None if self._tier is None else ColdFolder(self._tier.path))
        columns = StructType([*SOURCE_COLUMNS, StructField(DUPLICATE, BooleanType())])
        return ordered.select(*SOURCE_COLUMNS.names).mapInArrow(search.run, columns)

    def _commit(self, results: list[_TaskResult], parameters: JobParameters) -> Placed:
        """Commit the results of the tasks in a transaction of the store, if there is a store."""
        published = PublishReport()
        for report in [result.published for result in results] if self._ledger is None else self._ledger.reports():
            published.add(report)
        duplicate = next((result.duplicate_id for result in results if result.duplicate_id is not None), None)
        if duplicate is not None and self._settings.on_conflict == "raise":
            raise DuplicateMessage(duplicate)
        published.duplicates += sum(result.duplicates for result in results)
        files, committed = [file for result in results for file in result.files], Committed(0)
        fingerprint = self._of_tasks(results, parameters) if self._takes_fingerprint else None
        if self._staging is not None:
            committed = self._staging.commit(
                [result.staged for result in results],
                on_conflict=self._settings.on_conflict,
                run=self._run,
                batch=self._batch,
                kind=self._kind,
                fingerprint=fingerprint,
                pre_commit=partial(self._register, files, published, parameters),
                journal_only=[result.journal for result in results if result.journal.rows],
            )
            if self._tier is not None:
                self._tier.keep_log()
            if committed.repeated:  # another driver has run the same job at the same time
                return self._repeated(committed, parameters)
        return Placed(
            self._run,
            committed.stored,
            sum(file.messages for file in files),
            published.sent,
            committed.duplicates + published.duplicates,
            committed.rejected + published.rejected,
            False,
            from_microseconds(parameters.now),
            replace(self._validator(parameters), ids=published.refused),
        )

    @staticmethod
    def _of_tasks(results: Sequence[_TaskResult], parameters: JobParameters) -> Fingerprint:
        """Return the fingerprint of the input: taken by the tasks, or before them."""
        total = Fingerprint() if parameters.fingerprint is None else Fingerprint.parse(parameters.fingerprint)
        for fingerprint in [result.fingerprint for result in results if result.fingerprint is not None]:
            total = total.plus(Fingerprint.parse(fingerprint))
        return total

    def _register(
        self,
        files: list[ColdFile],
        published: PublishReport,
        parameters: JobParameters,
        connection: Connection,
        staged: Table,
    ) -> None:
        """Register the files and record the counts of the other sinks, inside the transaction of the commit."""
        del staged
        if self._tier is not None:
            check_job_duration(self._began)
            self._tier.catalog.register(connection, files)
            duplicates = 0 if self._broker is not None else published.duplicates
            self._record(connection, Sink.COLD, Committed(sum(file.messages for file in files), duplicates))
        if self._ledger is not None:
            self._record(connection, Sink.LEVELS, Committed(published.sent, published.duplicates, published.rejected))
            partitions = self._ledger.partitions(self._database)
            partitions.delete(connection)
            if self._named and self._kind is RunKind.JOB:
                kept = replace(parameters, refused_ids=dict(published.refused))
                partitions.save_parameters(connection, kept)

    def _record(self, connection: Connection, sink: Sink, counts: Committed) -> None:
        dialect, key = self._database.dialect, RunKey(self._run, sink, self._kind)
        runs = JobLedger(dialect, None if self._store is None else dialect.catalog.schema_of(self._store.schema))
        runs.begin(connection, key, self._batch)
        runs.end(connection, key, self._batch, counts)

    @property
    def _database(self) -> Database:
        assert self._store is not None  # noqa: S101 - only a job with a store has a transaction
        return database_at(self._store.address)

    def _repeated(self, before: Committed, parameters: JobParameters) -> Placed:
        """Return the counts of the attempt that has committed."""
        cold = (None if self._tier is None else self._recorded(Sink.COLD)) or Committed(0)
        sent = (None if self._broker is None else self._recorded(Sink.LEVELS)) or Committed(0)
        return Placed(
            self._run,
            before.stored,
            cold.stored,
            sent.stored,
            before.duplicates + cold.duplicates + sent.duplicates,
            before.rejected + sent.rejected,
            True,
            from_microseconds(parameters.now),
            replace(self._validator(parameters), ids=parameters.refused_ids),
        )

    def _recorded(self, sink: Sink) -> Committed | None:
        assert self._staging is not None  # noqa: S101 - only a job with a store has a ledger
        return self._staging.committed(self._run, self._batch, sink=sink, kind=self._kind)


@dataclass(frozen=True)
class _DuplicateSearch:
    """Finds the rows whose ids are taken; the work of a task, pickled. Equal ids come one after the other."""

    store: StoreOptions | None
    folder: ColdFolder | None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the column DUPLICATE."""
        with asyncio.Runner() as runner, ExitStack() as until:
            known: KnownIds | None = None
            last: str | None = None
            for batch in batches:
                if not batch.num_rows:
                    continue
                ids = batch.column("id")
                texts = ids.to_pylist()
                taken = np.array(
                    [key == before for key, before in zip(texts, [last, *texts], strict=False)], dtype=bool
                )
                last = texts[-1]
                if self.store is not None:
                    known = known or runner.run(self._opened(self.store, runner, until))
                    taken |= runner.run(known.among(ids))
                columns = [*(batch.column(name) for name in SOURCE_COLUMNS.names), pa.array(taken)]
                yield pa.RecordBatch.from_arrays(columns, names=[*SOURCE_COLUMNS.names, DUPLICATE])

    async def _opened(self, store: StoreOptions, runner: asyncio.Runner, until: ExitStack) -> KnownIds:
        database = database_at(store.address)
        await database.open()
        until.callback(lambda: runner.run(database.close()))
        return KnownIds(database, database.dialect.catalog.store_table(store.table, store.schema), self.folder)


@dataclass
class _Counts:
    """The rows that a task has not passed on to a writer."""

    rejected: int = 0
    duplicates: int = 0
    duplicate_id: str | None = None
    """The first duplicate, for the error."""
    fingerprint: Fingerprint = Fingerprint()  # noqa: RUF009 - it is immutable


class _TaskResult(NamedTuple):
    """The rows that a finished task has written, for the driver to commit."""

    staged: Attempt
    journal: Attempt
    """Rows for the journal about the messages in the files."""
    files: list[ColdFile]
    duplicates: int
    """Duplicates among the rows that are not for the broker."""
    duplicate_id: str | None
    published: PublishReport
    fingerprint: str | None
    """Of the task's input; None where it is not taken."""

    def to_json(self) -> str:
        files = [file_to_json(file) for file in self.files]
        return json.dumps({**self._asdict(), "files": files, "published": asdict(self.published)})

    @classmethod
    def from_json(cls, text: str) -> _TaskResult:
        fields = json.loads(text)
        return cls(
            Attempt(*fields["staged"]),
            Attempt(*fields["journal"]),
            [file_from_json(file) for file in fields["files"]],
            fields["duplicates"],
            fields["duplicate_id"],
            PublishReport(**fields["published"]),
            fields["fingerprint"],
        )


def _results(rows: DataFrame, task: _Task) -> list[_TaskResult]:
    """Run the tasks. Only the results of attempts that Spark counts as finished come back."""
    texts = rows.mapInArrow(task.run, RESULT).toArrow().column(0).to_pylist()
    return [_TaskResult.from_json(encoded) for encoded in texts]


def _fingerprints(batches: Iterator[pa.RecordBatch], *, since: int) -> Iterator[pa.RecordBatch]:
    total = Fingerprint()
    for batch in batches:
        total = total.plus(Fingerprint.of(batch, since=since))
    yield pa.RecordBatch.from_arrays([pa.array([str(total)])], names=["fingerprint"])


@dataclass(frozen=True)
class _Task:
    """The work of a task; pickled."""

    headers: SendHeaders
    validator: Validator
    far_from: int
    store: StoreOptions | None
    area: str
    folder: ColdFolder | None
    journaled: bool
    broker: MessageSink | None
    ledger: PartitionLedger | None
    due_since: int | None
    """What due times are counted from in the fingerprint of the input; None to take none."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows to their sinks; yield a row with the result."""
        rows, counts = _TaskRows(batches, partitioned=self.broker is not None), _Counts()
        staged, journal = NO_ROWS, NO_ROWS
        files: list[ColdFile] = []
        if self.store is not None:
            staging = self.store.staging(self.area)
            writer = None if self.folder is None else HourWriter(self.folder)
            for_store = self._for_store(rows.not_for_broker(), writer, counts)
            staged = staging.write(for_store, rejected=lambda: counts.rejected)
            if self.folder is not None and writer is not None:
                files = writer.close()
                journal = stage_journal_rows(staging, self.folder, files) if self.journaled else NO_ROWS
        published = PublishReport()
        if self.broker is not None:
            published = asyncio.run(self._publish(self.broker, rows.for_broker()))
        taken = None if self.due_since is None else str(counts.fingerprint)
        result = _TaskResult(staged, journal, files, counts.duplicates, counts.duplicate_id, published, taken)
        yield pa.RecordBatch.from_arrays([pa.array([result.to_json()])], names=["result"])

    def _for_store(
        self, batches: Iterable[pa.RecordBatch], writer: HourWriter | None, counts: _Counts
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows for the store; write the rows for the cold tier to its files."""
        for batch in batches:
            new = self._accepted(batch, counts)
            if writer is None:
                yield new
                continue
            far = pc.greater_equal(microseconds(new.column("due")), self.far_from)
            writer.write(new.filter(far))
            yield new.filter(pc.invert(far))

    async def _publish(self, broker: MessageSink, batches: Iterable[pa.RecordBatch]) -> PublishReport:
        """Publish partition by partition; record each in the ledger once the broker has confirmed all of it."""
        total, writer = PublishReport(), None
        async with AsyncExitStack() as stack:
            database = None if self.ledger is None else await self.ledger.opened(stack)
            ledger = None if self.ledger is None or database is None else self.ledger.partitions(database)
            done = set() if ledger is None or database is None else set(await database.read(ledger.reports))
            for partition, parts in by_partition(batches):
                if partition in done:
                    continue
                counts, report = _Counts(), PublishReport()
                new = [rows for rows in (self._accepted(part, counts) for part in parts) if rows.num_rows]
                for messages in pa.Table.from_batches(new).combine_chunks().to_batches() if new else ():
                    writer = writer or await broker.writer(stack)
                    await _publish_batch(writer, messages, report)
                report.duplicates += counts.duplicates
                report.rejected += counts.rejected
                if ledger is not None and database is not None:
                    await database.write(partial(ledger.add, partition=partition, report=report))
                total.add(report)
        return total

    def _accepted(self, batch: pa.RecordBatch, counts: _Counts) -> pa.RecordBatch:
        """Return the valid, new rows with the headers of a send; count the others."""
        if self.due_since is not None:
            counts.fingerprint = counts.fingerprint.plus(Fingerprint.of(batch, since=self.due_since))
        rows = valid_rows(batch, self.validator.reasons(batch))
        counts.rejected += batch.num_rows - rows.num_rows
        if DUPLICATE in rows.schema.names:
            duplicate = rows.column(DUPLICATE)
            number = pc.sum(duplicate).as_py() or 0
            if number and counts.duplicate_id is None:
                counts.duplicate_id = rows.filter(duplicate).column("id")[0].as_py()
            counts.duplicates += number
            rows = rows.filter(pc.invert(duplicate)) if number else rows
        return self.headers.complete(rows.select(SOURCE_COLUMNS.names))


class _TaskRows:
    """The rows of a task. partitioned: rows for the broker come last, ordered by partition."""

    def __init__(self, batches: Iterator[pa.RecordBatch], *, partitioned: bool) -> None:
        self._batches = batches
        self._partitioned = partitioned
        self._first_for_broker: pa.RecordBatch | None = None

    def not_for_broker(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows for store and cold tier."""
        if not self._partitioned:
            yield from self._batches
            return
        for batch in self._batches:
            others = pc.sum(pc.less(batch.column(PARTITION), 0)).as_py() or 0
            if others:
                yield batch.slice(0, others)
            if others < batch.num_rows:
                self._first_for_broker = batch.slice(others)
                return

    def for_broker(self) -> Iterator[pa.RecordBatch]:
        """Yield the rest; exhaust `not_for_broker` first, where the job has a store."""
        if self._first_for_broker is not None:
            yield self._first_for_broker
        yield from self._batches


def by_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """Yield each partition with messages whole: when its end has come. The rows are ordered by partition.

    Raises BackendUnavailable if the last partition did not come to its end.
    """
    parts = list[pa.RecordBatch]()
    for batch in batches:
        start = 0
        for end in pc.indices_nonzero(batch.column(END)).to_pylist():
            parts.append(batch.slice(start, end - start))
            if any(part.num_rows for part in parts):
                yield batch.column(PARTITION)[end].as_py(), parts
            parts, start = [], end + 1
        if start < batch.num_rows:
            parts.append(batch.slice(start))
    if parts:
        raise BackendUnavailable(UNENDED)


async def _publish_batch(writer: MessageWriter, messages: pa.RecordBatch, report: PublishReport) -> None:
    refused = await writer.deliver(messages)
    report.sent += messages.num_rows - len(refused)
    report.rejected += len(refused)
    ids = messages.column("id")
    for position, reason in list(refused.items())[: MOST_REFUSED - len(report.refused)]:
        report.refused[ids[position].as_py()] = reason
