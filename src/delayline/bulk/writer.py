"""Bulk writing to a delayed message store, in two ways.

Staged: tasks write to a staging area, and a single transaction moves the attempts that the driver names to the store. A
task that fails, is repeated or outlives its job leaves rows of attempts that are never named.

Batch by batch: a task stores each batch in a transaction with the batch's entry in the ledger. A later attempt finds
the entry, so that each batch is stored once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import Table, select

from delayline.bulk.batches import CLOSED, BatchLedger
from delayline.bulk.earlier_runs import EarlierRuns
from delayline.bulk.jobs import Committed, JobName, PieceCounts, check_run
from delayline.bulk.whole_jobs import WholeJob, WholeJobs
from delayline.delayed.store import OnConflict
from delayline.errors import BackendUnavailable, DuplicateMessage
from delayline.sql.database import Database
from delayline.sql.databases import database_at
from delayline.sql.deadlines import job_work
from delayline.sql.row_claims import row_claims
from delayline.sql.schema import QUEUES, queue_tables
from delayline.sql.setup import RequiredTables
from delayline.sql.staging import STAGE_PREFIX, doubled_id
from delayline.sql.statements import StoreStatements, store_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from contextlib import AsyncExitStack

    import pyarrow as pa
    from sqlalchemy import Connection

    from delayline.bulk.batches import BatchName
    from delayline.sql.dialect import DriverErrors
    from delayline.sql.staging import Stage

Result = TypeVar("Result")
#: The staging area of all streams.
STREAMS: Final = f"{STAGE_PREFIX}streams"
MINUTE_FORMAT: Final = "%Y%m%d%H%M"
#: Of an attempt's number; the rest is the hour in which it began.
RANDOM_BITS: Final = 44
SWEPT_AFTER: Final = timedelta(days=1)


class Attempt(NamedTuple):
    """The staged rows of a task attempt, named by the driver at the commit."""

    number: int
    rows: int
    earliest: int | None
    """The first due time, in microseconds since 1970."""
    rejected: int = 0


class IdTaken(Exception):
    """An id of a batch is pending in the store already, or is in the batch twice; nothing of the batch was stored."""


class BulkWriter:
    """Bulk writer of a job to a delayed message store; pickled to its tasks. Every method blocks, except coroutines.

    Args:
        url: The store's database.
        table_name: The store's table.
        schema: The table's schema; by default the connection's.
        name: The staging area. A job has its own, removed at its end; all streams share `STREAMS`, which stays.
    """

    def __init__(self, url: str, table_name: str, *, schema: str | None = None, name: str | None = None) -> None:
        self.url = url
        self.table_name = table_name
        self.schema = schema
        self.name: str = name or new_area()
        _ = self._stage

    @property
    def table(self) -> Table:
        """The store's table."""
        return self._database.dialect.catalog.store_table(self.table_name, self.schema)

    @property
    def largest_message(self) -> int:
        """How many bytes the headers and the body of a message may have together."""
        return self._database.dialect.values.largest_message

    def create(self) -> None:
        """Create the staging area and the ledger, on the driver, and remove areas of jobs that are older than a day.

        Raises BackendUnusable if the store is not set up.
        """
        self._database.dialect.connections.must_exist()
        blocking(self._opened(self._create))

    def create_ledger(self) -> None:
        """Create the ledger, for writing batch by batch. Raises BackendUnusable if the store is not set up."""
        self._database.dialect.connections.must_exist()
        blocking(self._opened(self._create_ledger))

    def write(self, batches: Iterable[pa.RecordBatch], *, rejected: Callable[[], int] = int) -> Attempt:
        """Stage the rows of a task: columns of messages, times in UTC, headers as JSON; missing columns are null.

        They were checked. `rejected` is asked at the end for how many were not staged. Raises BackendUnusable when
        the job has ended meanwhile.
        """
        from delayline.delayed.arrow import completed

        rows, earliest = 0, None

        def counted() -> Iterable[pa.RecordBatch]:
            nonlocal rows, earliest
            for batch in batches:
                if batch.num_rows:
                    rows += batch.num_rows
                    first = earliest_due(batch)
                    earliest = first if earliest is None else min(first, earliest)
                    yield completed(batch)

        number = _first_number(timedelta(0)) + secrets.randbits(RANDOM_BITS)
        self._stage.write(number, counted())
        return Attempt(number, rows, earliest, rejected())

    def commit(
        self,
        attempts: Sequence[Attempt],
        *,
        on_conflict: OnConflict = "raise",
        job: WholeJob | None = None,
        beside: PieceCounts | None = None,
        pre_commit: Callable[[Connection, Table], object] | None = None,
    ) -> Committed:
        """Move the staged attempts to the store in a single transaction, and notify its pollers.

        Args:
            attempts: The attempts that count, one per task.
            on_conflict: For an id that exists.
            job: What the ledger keeps of the job; one of that name that has committed is not committed again.
            beside: What became of other rows of the job, in the transaction.
            pre_commit: Runs inside the transaction before the move, and may delete staged rows; an exception rolls
                everything back.

        Raises:
            DuplicateMessage: An id exists already.
            DifferentInput: The job has committed another input, or its stream a later batch.
            ConfigurationError: The job has begun in pieces.
            BackendUnavailable: The database has lost staged rows; nothing was stored.
        """
        if job is not None:
            check_run(job.name.name)
        work = partial(self._work, attempts, on_conflict, pre_commit, beside or PieceCounts())
        move = partial(self._move, job=job, work=work)
        committed: Committed = blocking(self._opened(self._move_and_notify, move, attempts))
        if self.name != STREAMS:
            self.discard()
        return committed

    def discard(self, attempts: Sequence[Attempt] = ()) -> None:
        """Remove the area, or, for streams, the rows of the attempts. Rows of late tasks are left to the sweep."""
        numbers = [attempt.number for attempt in attempts]
        clear = partial(self._stage.clear, attempts=numbers, before=_first_number(SWEPT_AFTER))
        with contextlib.suppress(BackendUnavailable):
            blocking(self._opened(self._database.write, clear if self.name == STREAMS else self._stage.drop))

    def committed(self, name: JobName, *, stream: bool = False) -> Committed | None:
        """Return what the job has committed; None if there is none, or none yet for the batch of a stream.

        The ledger must be there: see `create_ledger`. Raises ConfigurationError for a job that commits in pieces.
        """
        find = partial(self._jobs.committed, name=name, stream=stream)
        committed: Committed | None = blocking(self._opened(self._database.write, find))
        return committed

    def committed_batches(self, names: Sequence[BatchName]) -> dict[BatchName, int]:
        """Return the attempt that has committed each of a migration's batches; uncommitted batches are left out.

        A task of an older delayline, which may have begun the migration, commits none of them any more.
        """
        return blocking(self._opened(self._database.write, partial(self._attempts, names=names)))

    def close_batches(self, names: Sequence[BatchName]) -> None:
        """Prevent later commits of the batches; committed batches are unaffected."""
        blocking(self._opened(self._database.write, partial(self._close, names=names)))

    def record_batches(self, connection: Connection, attempts: Mapping[BatchName, int]) -> bool:
        """Record the attempts in the caller's transaction; False if another attempt was or the batch is closed."""
        self._batches.add(connection, attempts)
        return self._batches.attempts(connection, list(attempts)) == attempts

    async def open(self, stack: AsyncExitStack) -> Database:
        """Return the database, open for `store_batch`; it closes with the stack."""
        database = self._database
        await database.open()
        stack.push_async_callback(database.close)
        register_table(self._database, self.table)
        return database

    @job_work
    async def store_batch(self, name: BatchName, attempt: int, batch: pa.RecordBatch) -> int:
        """Store the batch in a single transaction with its entry, and return the attempt that has stored it.

        Args:
            name: The batch's name.
            attempt: The number of this attempt.
            batch: Columns id, destination, due (in UTC), headers (JSON) and body; nulls are empty.

        Returns:
            This attempt, an earlier attempt, or CLOSED if the batch may not be stored any more.

        Raises:
            IdTaken: An id is pending already or is in the batch twice.
        """
        counts: int = await self._database.write(partial(self._store_batch, name=name, attempt=attempt, batch=batch))
        if counts == attempt and batch.num_rows:
            await self._database.notify_on_commit({store_channel(self.table): earliest_due(batch)})
        return counts

    def now(self) -> datetime:
        """Return the upper bound of the time on the clock that decides whether a message is due, in UTC."""
        now = select(self._database.dialect.values.in_seconds(0))
        kept = blocking(self._opened(lambda: self._database.read(lambda connection: connection.execute(now).scalar())))
        dialect = self._database.dialect
        return dialect.values.from_due(kept) + dialect.values.clock_tick

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_kept")}

    @property
    def _database(self) -> Database:
        database: Database | None = self.__dict__.get("_kept_database")
        if database is None:
            database = self.__dict__["_kept_database"] = database_at(self.url)
        return database

    @property
    def _stage(self) -> Stage:
        stage: Stage | None = self.__dict__.get("_kept_stage")
        if stage is None:
            stage = self.__dict__["_kept_stage"] = self._database.dialect.bulk.stage(self.table, self.name)
        return stage

    @property
    def _jobs(self) -> WholeJobs:
        return WholeJobs(self._database.dialect, self.table)

    @property
    def _batches(self) -> BatchLedger:
        return BatchLedger(self._database.dialect, self.table)

    @property
    def _earlier(self) -> EarlierRuns:
        return EarlierRuns(self._database.dialect, self.table)

    @job_work
    async def _opened(self, work: Callable[..., Coroutine[Any, Any, Result]], *arguments: object) -> Result:
        await self._database.open()
        try:
            return await work(*arguments)
        finally:
            await self._database.close()

    async def _create(self) -> None:
        await self._create_ledger()
        await self._database.write(self._create_stage)
        for name in await self._database.read(self._left_over):
            with contextlib.suppress(BackendUnavailable):  # a task still holds it: next time
                await self._database.write(self._stage.named(name).drop)

    async def _create_ledger(self) -> None:
        await check_store(self._database, self.table)
        await self._database.write(self._jobs.create)

    def _create_stage(self, connection: Connection) -> None:
        dialect = self._database.dialect
        with dialect.catalog.setting_up(connection):
            self._stage.create(connection)

    def _left_over(self, connection: Connection) -> list[str]:
        return [name for name in self._stage.found(connection) if _is_old(name)]

    def _store_batch(self, connection: Connection, name: BatchName, attempt: int, batch: pa.RecordBatch) -> int:
        return self._batches.store(connection, name, attempt, partial(self._append, connection, batch))

    def _append(self, connection: Connection, batch: pa.RecordBatch) -> PieceCounts:
        from delayline.delayed.arrow import completed

        if batch.num_rows:
            try:
                self._stage.append(
                    connection, completed(batch).sort_by("id")
                )  # neighbours in the index of ids, the largest
            except self._database.dialect.errors.kinds as error:
                if not breaks_a_key(error, self._database.dialect.errors):
                    raise
                raise IdTaken from error
        return PieceCounts(batch.num_rows, bytes=batch.nbytes)

    def _attempts(self, connection: Connection, names: Sequence[BatchName]) -> dict[BatchName, int]:
        self._jobs.create(connection)
        self._earlier.close(connection, names)
        return self._earlier.attempts(connection, names) | self._batches.attempts(connection, names)

    def _close(self, connection: Connection, names: Sequence[BatchName]) -> None:
        self._jobs.create(connection)
        self._batches.add(connection, dict.fromkeys(names, CLOSED))

    async def _move_and_notify(self, move: Callable[[Connection], Committed], attempts: Sequence[Attempt]) -> Committed:
        register_table(self._database, self.table)
        committed = await self._database.write(move)
        earliest = [attempt.earliest for attempt in attempts if attempt.earliest is not None]
        if committed.stored and earliest and not committed.repeated:
            await self._database.notify_on_commit({store_channel(self.table): min(earliest)})
        return committed

    def _move(
        self, connection: Connection, *, job: WholeJob | None, work: Callable[[Connection], Committed]
    ) -> Committed:
        return work(connection) if job is None else self._jobs.commit(connection, job, partial(work, connection))

    def _work(
        self,
        attempts: Sequence[Attempt],
        on_conflict: OnConflict,
        pre_commit: Callable[[Connection, Table], object] | None,
        beside: PieceCounts,
        connection: Connection,
    ) -> Committed:
        numbers = self._gathered(connection, attempts)
        if pre_commit is not None:
            pre_commit(connection, self._stage.table)
        stored = self._stored(connection, numbers, on_conflict)
        if self.name == STREAMS:
            self._stage.clear(connection, numbers, _first_number(SWEPT_AFTER))
        duplicates = sum(attempt.rows for attempt in attempts) - stored + beside.duplicates
        rejected = sum(attempt.rejected for attempt in attempts) + beside.rejected
        return Committed(stored, duplicates, rejected, cold=beside.cold)

    def _gathered(self, connection: Connection, attempts: Sequence[Attempt]) -> list[int]:
        """Make the rows ready, and return the numbers of their attempts."""
        numbers, rows = [attempt.number for attempt in attempts], sum(attempt.rows for attempt in attempts)
        ready = self._stage.gather(connection, numbers)
        if ready != rows:
            raise BackendUnavailable(
                f"{self._database.dialect} has {ready} of {rows} staged rows: it has crashed since they were written. "
                "Nothing was stored; run the job again"
            )
        return numbers

    def _stored(self, connection: Connection, numbers: list[int], on_conflict: OnConflict) -> int:
        dialect = self._database.dialect
        dialect.transactions.set_savepoint(connection)
        try:
            stored = self._stage.move(connection, numbers, on_conflict)
        except dialect.errors.kinds as error:
            if not breaks_a_key(error, dialect.errors):
                raise
            dialect.transactions.roll_back_to_savepoint(connection)
            doubled = doubled_id(connection, self._stage.table, self.table)
            dialect.transactions.release_savepoint(connection)
            raise DuplicateMessage(doubled) from error
        dialect.transactions.release_savepoint(connection)
        return stored


async def check_store(database: Database, table: Table) -> None:
    """Raise BackendUnusable if the store's table or the queues' are missing or have another shape."""
    await database.read(RequiredTables(database.dialect, table.schema, QUEUES, others=[table]).check)


def register_table(database: Database, table: Table) -> None:
    """Let notifications of new messages in the table reach its pollers."""
    row_claims(database, StoreStatements(table, database.dialect), queue_tables(table.schema))


def earliest_due(batch: pa.RecordBatch) -> int:
    """Return the first due time of the rows, in microseconds since 1970."""
    import pyarrow.compute as pc

    from delayline.delayed.arrow import microseconds

    return int(pc.min(microseconds(batch.column("due"))).as_py())


def new_area() -> str:
    """Return a name for the staging area of a job."""
    return f"{STAGE_PREFIX}{datetime.now(UTC).strftime(MINUTE_FORMAT)}_{uuid.uuid4().hex[:12]}"


def _first_number(ago: timedelta) -> int:
    return int((datetime.now(UTC) - ago).timestamp()) // 3600 << RANDOM_BITS


def _is_old(name: str) -> bool:
    made = name.removeprefix(STAGE_PREFIX).partition("_")[0]
    try:
        return datetime.now(UTC) - datetime.strptime(made, MINUTE_FORMAT).replace(tzinfo=UTC) > SWEPT_AFTER
    except ValueError:  # a stream's, which stays
        return False


def blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end, also where this thread's event loop is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="delayline staging")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def breaks_a_key(error: Exception, errors: DriverErrors) -> bool:
    """Return whether the driver's error is a violation of a primary or unique key, and not the database's own fault."""
    is_violation = "IntegrityError" in {kind.__name__ for kind in type(error).__mro__}
    return is_violation and not isinstance(errors.translated(error), BackendUnavailable)
