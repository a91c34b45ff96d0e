"""Place the rows of a job in the store, in the cold tier, or in a broker's delay levels.

Each row gets a sink by its due time. Rows for a store and for a broker are the pieces of `delayline.spark.pieces`.

Beside a cold tier the near rows are these pieces; then tasks write the far rows to files, and the driver registers all
files in a single transaction.

Where all rows have to be stored at once, tasks stage the rows for the store and write the files of the cold tier. The
driver commits once: a single transaction moves the staged rows to the store, registers the files and records the
counts. A job that fails or is killed before its commit leaves none of them.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BooleanType, StructField, StructType

from delayline.backends import Backend, BulkRoute, backend_of
from delayline.bulk.cold_catalog import MICROS_A_HOUR
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.job_folder import JobFolder
from delayline.bulk.jobs import Committed, JobName, JobState, PieceCounts, PieceParameters, check_input
from delayline.bulk.known_ids import KnownIds
from delayline.bulk.level_pieces import SENT_AT_ONCE, is_near
from delayline.bulk.whole_jobs import WholeJob
from delayline.bulk.writer import Attempt, blocking, new_area
from delayline.clock import LATEST_TIME, SystemClock, from_microseconds, to_microseconds
from delayline.delayed.arrow import microseconds
from delayline.delayed.store import OnConflict
from delayline.errors import ConfigurationError, DifferentInput, DuplicateMessage
from delayline.spark.cold_tier import ColdTier, check_job_duration, file_from_json, file_to_json
from delayline.spark.headers import HEADER_ALLOWANCE, SendHeaders, Validator, valid_rows
from delayline.spark.options import SOURCE_COLUMNS, choice
from delayline.spark.pieces import PieceJob, index_hash
from delayline.spark.sources import OWN_COLUMNS, content_type, prepared
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import timedelta

    from pyspark.sql import DataFrame, Observation
    from sqlalchemy import Connection, Table

    from delayline.backends import MessageSink
    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.jobs import Job
    from delayline.spark.options import StoreOptions
    from delayline.spark.schedule import JobTarget
    from delayline.spark.shards import JobOfShard, ShardSearch
    from delayline.spark.sources import Columns

#: What is committed at once: each piece, or the whole job.
Atomic = Literal["piece", "job"]
#: The name of the broker connections.
SCHEDULE_CONNECTION: Final = "delayline schedule"
#: Column: whether the id is already in store or cold tier, or belongs to an earlier row of the job.
DUPLICATE: Final = "_delayline_duplicate"
DUE_HOUR: Final = "_delayline_hour"
#: The hash of an id, as in the index of the cold tier's ids, in hexadecimal digits.
INDEX_HASH: Final = "_delayline_index_hash"
#: The most destinations that the driver looks up before the job; the tasks look up the others.
MOST_DESTINATIONS: Final = 10_000
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

    def plus(self, other: Placed) -> Placed:
        """Return the numbers with those of another shard."""
        counts = ("stored", "cold", "sent", "duplicates", "rejected")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return self._replace(**sums, repeated=self.repeated and other.repeated)


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
        """Whether tasks commit all rows: without a cold tier, unless it has to be all or none of them."""
        return self.target.cold_tier is None and not self._is_staged

    @property
    def is_decided(self) -> bool:
        """Whether all pieces are written to files before it is decided to store them."""
        alone = self.target.cold_tier is None and self.target.broker is None
        return alone and self._at_once and self.target.job_folder is not None

    @property
    def _is_staged(self) -> bool:
        return self._at_once and not self.is_decided

    @property
    def _at_once(self) -> bool:
        return self.on_conflict == "raise" or self.atomic == "job"

    def check(self) -> None:
        """Raise ConfigurationError for a target that cannot honour `on_conflict`."""
        choice({"on_conflict": self.on_conflict}, "on_conflict", get_args(OnConflict))
        choice({"atomic": self.atomic}, "atomic", get_args(Atomic))
        if self.target.broker is not None and self.on_conflict != "keep":
            raise ConfigurationError(
                f"on_conflict={self.on_conflict!r} needs a search by id, and delay levels have none. Use 'keep': it "
                "compares the ids of the job with each other and with the store"
            )
        if self.target.broker is not None and self.atomic == "job":
            raise ConfigurationError(
                "atomic='job' cannot be had from a broker, which keeps what it has confirmed if the job fails: use "
                "'piece'"
            )
        store = backend_of(self.target.store_url, kind="store that jobs can write to")
        if self.target.cold_tier is not None and self._is_staged and store.bulk_route is BulkRoute.STORED_ROWS:
            raise ConfigurationError(
                f"{store.scheme}: takes the messages of a job in pieces, and not both tiers at once: leave out "
                "atomic='job' and on_conflict='raise', or use PostgreSQL, MariaDB or SQLite"
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
        job = PlacementJob(self, run, batch)
        if self._is_staged:
            return job.place(rows)
        return job.place_pieces(rows, observation if self.in_pieces else None)


class PlacementJob:
    """A batch of a run, on the driver.

    Args:
        settings: Where the rows go.
        run: The name and version of the job, if it has a name.
        batch: The number of a stream's batch.
        shard: What it knows of the others, where it is the job of one shard of several.
    """

    def __init__(
        self, settings: Placement, run: JobName | None, batch: int | None, shard: JobOfShard | None = None
    ) -> None:
        target = settings.target
        self._settings = settings
        self._shard = shard
        self._named = run is not None and (shard is None or shard.is_named)
        self._name = run or JobName(uuid.uuid4().hex)
        self._run = str(self._name)
        self._is_batch = batch is not None
        #: The job's name in the ledger: a stream's is that of its batches, whose numbers are versions.
        self._entry = self._name if batch is None else JobName(self._run, batch)
        self._store = target.store
        if self._store is None and run is not None and not self._is_batch:
            raise ConfigurationError(
                f"run={self._run!r} needs a database that records it: JobTarget('postgresql://...', delay_levels='amqp://...')"
            )
        self._files = JobFolder(target.job_folder) if settings.is_decided and target.job_folder is not None else None
        self._tier = None if target.cold_tier is None else ColdTier(target.options, target.cold_tier)
        self._staging = None if self._store is None else self._store.staging(new_area())
        clock = self._staging or SystemClock()
        self._now = clock.now() if shard is None else shard.now
        self._backend = None if target.broker is None else backend_of(target.broker, kind="broker")
        self._broker: MessageSink | None = None
        if self._backend is not None and target.broker is not None:
            self._broker = self._backend.sink(target.broker, SCHEDULE_CONNECTION, endpoint=target.sender)
            blocking(self._broker.must_exist())
        self._began = time.monotonic()

    def begin(self) -> Job:
        """Begin the job in pieces, or go on with it; stores nothing. Raises ConfigurationError if it is of a store."""
        pieces = self._pieces()
        return pieces.open(self._parameters(pieces.number, None))

    def place_pieces(self, rows: DataFrame, observation: Observation | None) -> Placed:
        """Let tasks commit the rows in pieces, unless the job has committed all of them at once.

        Rows for a cold tier are placed after them, before the job is done.
        """
        pieces = self._pieces()
        if self._store is None:
            return self._send(pieces, rows, observation)
        if self._tier is not None:
            self._tier.create().make()  # before anything is placed that cannot be taken back
        begun = pieces.begun()
        if begun is not None and begun.parameters.at_once:
            return self.place(rows)
        job = pieces.open(self._parameters(pieces.number, rows if begun is None else None))
        repeated, validator = job.state is JobState.DONE, self._validator(job.parameters)
        was_decided = job.state is not JobState.OPEN
        if self._files is not None and not repeated:
            self._decide_and_load(pieces, rows, job, validator, observation)
        elif not repeated:
            pieces.store(rows, job, validator, observation)
        if self._tier is not None and not repeated and not pieces.has_far(job):
            self._place_far(rows, job, pieces)
        job = pieces.finish(job)
        if self._files is not None:
            self._files.clear(job.number)
        if was_decided and not self._is_batch:  # which Spark repeats with the same rows
            pieces.check_again(rows, job)
        return Placed(
            self._run,
            job.committed.stored,
            job.committed.cold,
            job.committed.sent,
            job.committed.duplicates,
            job.committed.rejected,
            repeated,
            from_microseconds(job.parameters.now),
            replace(validator, ids=job.refused),
        )

    def _pieces(self) -> PieceJob:
        return PieceJob(
            self._settings.target,
            self._settings.columns,
            self._entry,
            stream=self._is_batch,
            broker=self._broker,
            folder=None if self._tier is None else ColdFolder(self._tier.path),
            files=self._files,
            search=None if self._shard is None else self._shard.search,
        )

    def _decide_and_load(
        self, pieces: PieceJob, rows: DataFrame, job: Job, validator: Validator, observation: Observation | None
    ) -> None:
        """Write the pieces to files and decide to store them, unless that was decided; store them."""
        if job.state is JobState.OPEN:
            try:
                job = pieces.decide(rows, job, validator)
            except Exception:
                if self._files is not None and not self._named:  # nobody goes on with it
                    self._files.clear(job.number)
                raise
        try:
            pieces.load(rows, job, observation)
        except Exception:
            now = pieces.begun()
            if now is None or now.state is not JobState.DONE:  # by another process, which has deleted the files
                raise

    def _send(self, pieces: PieceJob, rows: DataFrame, observation: Observation | None) -> Placed:
        """Let tasks send the rows to a broker, without a store."""
        parameters = self._parameters(pieces.number, rows)
        validator = self._validator(parameters)
        counts, refused = pieces.send(rows, parameters, validator, observation)
        numbers = (counts.sent, counts.duplicates, counts.rejected)
        return Placed(self._run, 0, 0, *numbers, False, self._now, replace(validator, ids=refused))

    def place(self, rows: DataFrame) -> Placed:
        """Stage all rows in tasks and store them at once, unless an earlier attempt has."""
        assert self._staging is not None and self._store is not None  # noqa: S101 - a broker alone is sent to
        parameters = self._parameters(0, None)
        before: Committed | None = None
        is_named_job = self._named and not self._is_batch
        if self._named:
            self._staging.create_ledger()
            before = self._staging.committed(self._entry, stream=self._is_batch)
        if before is not None:
            placed = self._repeated(before, parameters)
            if is_named_job:
                given, contents = self._fingerprint(rows, parameters), self._settings.on_conflict == "replace"
                check_input(self._run, before.fingerprint, placed.rows, given, contents=contents)
            return placed
        with ExitStack() as undo:
            self._staging.create()
            undo.callback(self._staging.discard)
            task = self._task(rows, parameters, self._staging.name, takes_fingerprint=is_named_job)
            placed = self._commit(_results(self._arranged(rows, parameters), task), parameters)
            undo.pop_all()
        return placed

    def _place_far(self, rows: DataFrame, job: Job, pieces: PieceJob) -> None:
        """Write the far rows to the cold tier and register its files, unless another driver has done so meanwhile.

        Args:
            rows: The source.
            job: Its near rows are placed.
            pieces: Its pieces.

        Raises:
            DifferentInput: Rows that were far before are not now, or others are.
        """
        assert self._tier is not None  # noqa: S101 - there are far rows beside one only
        self._began, expected = time.monotonic(), pieces.far_rows(job)
        task = self._task(rows, job.parameters, None, takes_fingerprint=False)
        results = _results(self._arranged(rows, job.parameters, only_far=True), task)
        files, counts = [file for result in results for file in result.files], _far_counts(results)
        given = counts.cold + counts.duplicates + counts.rejected
        more = given - expected
        if pieces.has_far(job):
            return
        if not 0 <= more <= counts.duplicates:
            raise DifferentInput(
                f"{expected:,} rows of the job {self._run!r} were due after the horizon when its near rows were "
                f"placed, and {given:,} are now: the source has other due times each time it is read. The near "
                "rows are placed, the others are not. Write the rows to a file or table, and run the job again with it"
            )
        counts = counts._replace(duplicates=counts.duplicates - more)  # near rows, as due times have moved on
        if self._shard is not None:
            self._shard.search.check()
        self._tier.write(partial(self._record_far, job.number, files, counts))
        self._tier.keep_log()

    def _record_far(self, job: int, files: list[ColdFile], counts: PieceCounts, connection: Connection) -> None:
        tier = self._tier
        assert tier is not None  # noqa: S101 - as above

        def register() -> None:
            check_job_duration(self._began)
            tier.register(connection, files)

        tier.jobs.record_far(connection, job, counts, register)

    def _parameters(self, pieces: int, rows: DataFrame | None) -> PieceParameters:
        """Return the parameters of a new job in so many pieces; asks the broker for the destinations of near rows.

        Rows for a destination that has no queue are rejected, not published.
        """
        settings, reach = self._settings, self._settings.hot_horizon
        if self._backend is not None:
            longest = self._backend.longest_delay or LATEST_TIME - self._now
            reach = longest if self._store is None else min(reach, longest)
        refused: Mapping[str, str] = {}
        if rows is not None and self._broker is not None:
            near = prepared(rows, settings.columns, self._now).where(F.col("due") < F.lit(self._now + reach))
            destinations = near.select("destination").distinct().limit(MOST_DESTINATIONS).toArrow()
            refused = blocking(self._broker.refusals([name for name in destinations.column(0).to_pylist() if name]))
        return PieceParameters(
            to_microseconds(self._now),
            pieces,
            settings.on_conflict,
            named=self._named,
            stream=self._is_batch,
            part=0 if self._broker is None else SENT_AT_ONCE,
            far_from=to_microseconds(self._now + reach),
            has_cold_tier=self._tier is not None,
            refused=refused,
            is_decided=self._files is not None,
            shards=[] if self._shard is None else list(self._shard.among),
        )

    def _fingerprint(self, rows: DataFrame, parameters: PieceParameters) -> Fingerprint:
        """Read the input once, without writing anything."""
        messages = prepared(rows, self._settings.columns, from_microseconds(parameters.now)).drop(*OWN_COLUMNS)
        take = partial(_fingerprints, since=self._due_since(parameters))
        parts, total = messages.mapInArrow(take, FINGERPRINT).toArrow(), Fingerprint()
        for part in parts.column(0).to_pylist():
            total = total.plus(Fingerprint.parse(part))
        return total

    def _due_since(self, parameters: PieceParameters) -> int:
        """Return what due times are counted from in a fingerprint, so that delays are the same in each attempt."""
        return 0 if self._settings.columns.delay is None else parameters.now

    def _validator(self, parameters: PieceParameters) -> Validator:
        holder = self._backend or Backend if self._staging is None else self._staging
        largest = holder.largest_message - HEADER_ALLOWANCE
        if self._broker is None:
            return Validator(largest)
        latest = parameters.far_from if self._store is None else None
        return Validator(largest, parameters.far_from, parameters.refused, latest=latest)

    def _task(
        self, rows: DataFrame, parameters: PieceParameters, area: str | None, *, takes_fingerprint: bool
    ) -> _Task:
        settings, now = self._settings, from_microseconds(parameters.now)
        assert self._store is not None  # noqa: S101 - only a job with a store has these tasks
        return _Task(
            headers=SendHeaders(settings.target.sender, content_type(rows, settings.columns), now),
            validator=self._validator(parameters),
            far_from=parameters.far_from,
            store=self._store,
            area=area,
            folder=None if self._tier is None else self._tier.create(),
            due_since=self._due_since(parameters) if takes_fingerprint else None,
        )

    def _arranged(self, rows: DataFrame, parameters: PieceParameters, *, only_far: bool = False) -> DataFrame:
        """Return the messages in the order that the writers need, or the far ones of them.

        A store alone takes any order, and its primary key finds duplicates. With a cold tier they are marked first,
        and its files need the rows of an hour together.
        """
        messages = prepared(rows, self._settings.columns, from_microseconds(parameters.now)).drop(*OWN_COLUMNS)
        if self._tier is None:
            return self._bounded(messages)
        messages = self._with_duplicates_marked(messages, parameters, only_far=only_far)
        messages = messages.withColumn(DUE_HOUR, F.expr(f"unix_micros(due) div {MICROS_A_HOUR}"))
        return self._bounded(messages.hint("rebalance", DUE_HOUR)).sortWithinPartitions("due").drop(DUE_HOUR)

    def _bounded(self, messages: DataFrame) -> DataFrame:
        """Return the rows for no more tasks than may have a connection."""
        return messages if self._store is None else messages.coalesce(self._store.connections)

    def _with_duplicates_marked(self, messages: DataFrame, parameters: PieceParameters, *, only_far: bool) -> DataFrame:
        """Add the column DUPLICATE: of rows with the same id the first is kept that can be a message, as in a store.

        The tasks ask for the ids of the job only, in the order of the index of the cold tier's ids.
        """
        assert self._store is not None and self._tier is not None  # noqa: S101 - a key finds them without a cold tier
        others = (name for name in SOURCE_COLUMNS.names if name not in {"id", "due"})
        hashed = messages.withColumn(INDEX_HASH, index_hash())
        gathered = self._bounded(hashed.repartition(F.substring(INDEX_HASH, 1, 2)))
        ordered = gathered.sortWithinPartitions(INDEX_HASH, F.col("due").asc_nulls_last(), *others)
        far_from = parameters.far_from if only_far else None
        search = _DuplicateSearch(
            self._store,
            ColdFolder(self._tier.path),
            self._validator(parameters),
            far_from,
            None if self._shard is None else self._shard.search,
        )
        columns = StructType([*SOURCE_COLUMNS, StructField(DUPLICATE, BooleanType())])
        return ordered.select(*SOURCE_COLUMNS.names).mapInArrow(search.run, columns)

    def _commit(self, results: list[_TaskResult], parameters: PieceParameters) -> Placed:
        """Commit the results of the tasks in a transaction."""
        assert self._staging is not None  # noqa: S101 - only a store has a transaction
        duplicate = next((result.duplicate_id for result in results if result.duplicate_id is not None), None)
        if duplicate is not None and self._settings.on_conflict == "raise":
            raise DuplicateMessage(duplicate)
        files = [file for result in results for file in result.files]
        duplicates, taken = sum(result.duplicates for result in results), Fingerprint()
        beside = PieceCounts(duplicates=duplicates, cold=sum(file.messages for file in files))
        fingerprints = [result.fingerprint for result in results if result.fingerprint is not None]
        for fingerprint in fingerprints:
            taken = taken.plus(Fingerprint.parse(fingerprint))
        committed = self._staging.commit(
            [result.staged for result in results],
            on_conflict=self._settings.on_conflict,
            job=WholeJob(self._entry, replace(parameters, at_once=True), taken if fingerprints else None),
            beside=beside,
            pre_commit=partial(self._register, files),
        )
        if self._tier is not None:
            self._tier.keep_log()
        if committed.repeated:  # another driver has run the same job at the same time
            return self._repeated(committed, parameters)
        return Placed(
            self._run,
            committed.stored,
            committed.cold,
            0,
            committed.duplicates,
            committed.rejected,
            False,
            from_microseconds(parameters.now),
            self._validator(parameters),
        )

    def _register(self, files: list[ColdFile], connection: Connection, staged: Table) -> None:
        """Register the files, inside the transaction of the commit."""
        del staged
        if self._tier is not None:
            check_job_duration(self._began)
            self._tier.register(connection, files)

    def _repeated(self, before: Committed, parameters: PieceParameters) -> Placed:
        """Return the counts of the attempt that has committed."""
        return Placed(
            self._run,
            before.stored,
            before.cold,
            before.sent,
            before.duplicates,
            before.rejected,
            True,
            from_microseconds(parameters.now),
            self._validator(parameters),
        )


@dataclass(frozen=True)
class _DuplicateSearch:
    """Finds the rows whose ids are taken; the work of a task, pickled. Equal ids come one after the other."""

    store: StoreOptions
    folder: ColdFolder
    validator: Validator
    far_from: int | None
    """Where the near rows are placed, the due time of the first far ones: only these are asked for and passed on."""
    others: ShardSearch | None
    """Looks at the other shards, where the store is one of several."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the column DUPLICATE."""
        with asyncio.Runner() as runner, ExitStack() as until:
            known: KnownIds | None = None
            last: str | None = None
            for batch in batches:
                if not batch.num_rows:
                    continue
                ids, taken = batch.column("id"), np.zeros(batch.num_rows, dtype=bool)
                good = pc.is_null(self.validator.reasons(batch)).to_numpy(zero_copy_only=False)
                far = np.ones_like(good) if self.far_from is None else ~is_near(batch, self.far_from)
                texts = ids.filter(pa.array(good)).to_pylist()
                taken[good] = [key == before for key, before in zip(texts, [last, *texts], strict=False)]
                last = texts[-1] if texts else last
                asked = good & far
                if asked.any():
                    known = known or runner.run(self._opened(runner, until))
                    asked_ids = ids.filter(pa.array(asked))
                    taken[asked] |= runner.run(known.among(asked_ids))
                    if self.others is not None:
                        taken[asked] |= self.others.waiting(asked_ids, "keep")
                columns = [*(batch.column(name) for name in SOURCE_COLUMNS.names), pa.array(taken)]
                marked = pa.RecordBatch.from_arrays(columns, names=[*SOURCE_COLUMNS.names, DUPLICATE])
                yield marked.filter(pa.array(far))

    async def _opened(self, runner: asyncio.Runner, until: ExitStack) -> KnownIds:
        store, database = self.store, database_at(self.store.address)
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
    files: list[ColdFile]
    duplicates: int
    duplicate_id: str | None
    fingerprint: str | None
    """Of the task's input; None where it is not taken."""

    def to_json(self) -> str:
        files = [file_to_json(file) for file in self.files]
        return json.dumps({**self._asdict(), "files": files})

    @classmethod
    def from_json(cls, text: str) -> _TaskResult:
        fields = json.loads(text)
        return cls(
            Attempt(*fields["staged"]),
            [file_from_json(file) for file in fields["files"]],
            fields["duplicates"],
            fields["duplicate_id"],
            fields["fingerprint"],
        )


def _results(rows: DataFrame, task: _Task) -> list[_TaskResult]:
    """Run the tasks. Only the results of attempts that Spark counts as finished come back."""
    texts = rows.mapInArrow(task.run, RESULT).toArrow().column(0).to_pylist()
    return [_TaskResult.from_json(encoded) for encoded in texts]


def _far_counts(results: list[_TaskResult]) -> PieceCounts:
    """Return the counts of tasks that have staged nothing."""
    written = sum(file.messages for result in results for file in result.files)
    rejected = sum(result.staged.rejected for result in results)
    return PieceCounts(cold=written, duplicates=sum(result.duplicates for result in results), rejected=rejected)


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
    store: StoreOptions
    area: str | None
    """Where rows for the store are staged; None where all rows are far."""
    folder: ColdFolder | None
    due_since: int | None
    """What due times are counted from in the fingerprint of the input; None to take none."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows to their sinks; yield a row with the result."""
        counts = _Counts()
        writer = None if self.folder is None else HourWriter(self.folder)
        near = self._for_store(batches, writer, counts)
        if self.area is None:
            rows = sum(batch.num_rows for batch in near)  # none, but this writes the files
            staged = Attempt(0, rows, None, counts.rejected)
        else:
            staged = self.store.staging(self.area).write(near, rejected=lambda: counts.rejected)
        files = [] if writer is None else writer.close()
        taken = None if self.due_since is None else str(counts.fingerprint)
        result = _TaskResult(staged, files, counts.duplicates, counts.duplicate_id, taken)
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
