"""Runs a migration, resumes it after any interruption, or aborts it. Possible duplicates are listed."""

from __future__ import annotations

import contextlib
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from delayline.bulk.batches import BatchName
from delayline.bulk.writer import blocking
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.migration.collected import CollectedSource
from delayline.migration.holding_table import create_holding_table, drop_holding_table, give_back, hold, slices_of
from delayline.migration.journal import (
    MIGRATIONS_TABLE,
    HeldPartition,
    MigrationJournal,
    MigrationRun,
    Progress,
    RunState,
)
from delayline.migration.plan import ROUND_ROWS, partitions_of, preview, waits
from delayline.migration.source import skipped_rows
from delayline.migration.target import Staged
from delayline.migration.work import DELIVERY_RESULT, BatchDelivery
from delayline.spark.errors import translated_errors
from delayline.spark.session import parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection

    from delayline.migration.holding_table import Slice
    from delayline.migration.plan import Plan
    from delayline.migration.target import Target

Result = TypeVar("Result")
#: Id of the row that a migrating process locks.
LOCK_KEY: Final = 1
#: Ids of rejected rows in a result.
REJECTED_IDS: Final = 10
#: Seconds between two looks at how far a run is.
PROGRESS_INTERVAL: Final = 0.5


@dataclass(frozen=True)
class MigrationResult:
    """The result of a run."""

    run: str
    state: RunState
    progress: Progress | None
    reasons: Sequence[tuple[str, int]]
    """Reasons of rejected rows, with their numbers."""
    seconds: float = 0.0
    left: int = 0
    """Messages drained from a queue or file that could not be returned; kept in `delayline_collected_*`."""
    examples: Sequence[tuple[str, str]] = ()
    """Ids of the first rejected rows, with the reasons."""
    skipped: int = 0
    """Rows without a readable due time, which no run moves; included in `reasons`."""

    @property
    def complete(self) -> bool:
        """Whether everything has moved."""
        return self.state is RunState.COMPLETED and not self.reasons and not self.left


class Migration:
    """Runs a plan. One process at a time works on the migrations of a source; every method blocks.

    Args:
        plan: The rows to move, and their target.
        progress: Called repeatedly with the number of finished rows and of all rows.
    """

    def __init__(self, plan: Plan, *, progress: Callable[[int, int], None] | None = None) -> None:
        self.plan = plan
        self._source = plan.source
        self._database = plan.source.database
        self._journal = MigrationJournal(self._database.dialect, plan.source.schema)
        self._progress = progress
        self._rows = 0

    def run(self, spark: SparkSession) -> MigrationResult:
        """Move all rows through the holding tables; rejected rows go back to the source, with a reason in the journal.

        Args:
            spark: The session that runs the jobs.

        Returns:
            The numbers of moved and rejected rows.

        Raises:
            ConfigurationError: An earlier migration is not finished; nothing was changed.
            BackendUnusable: The target is not ready; nothing was changed.
            DelaylineError: Any other error leaves a run to resume or to abort.
        """
        self._source.must_exist()
        target = self.plan.target
        if target is None:
            return self._read_only(spark)
        for endpoint in self._endpoints_to_move():  # even before a journal exists
            target.endpoint_named(endpoint)
        with self._locked():
            self._nothing_else_open()
            self._source.collect(self.plan.endpoints, self.plan.cutoff, spark)
            run = MigrationRun(_new_name(), RunState.PREPARING, self.plan.parameters, datetime.now(UTC), None)
            try:
                slices = self._slices(target)
                if not slices:
                    self._source.put_back()
                    nothing = MigrationResult("", RunState.COMPLETED, Progress(0, 0, 0, 0, 0, 0), [])
                    return self._with_skipped(nothing)
                self._write(lambda connection: self._journal.begin(connection, run.name, run.parameters))
                return self._move(run, target, slices, spark)
            except DelaylineError:
                with contextlib.suppress(DelaylineError):  # then the next run does so
                    if not self._partitions(run):
                        self._give_up(run)
                raise

    def resume(self, spark: SparkSession) -> MigrationResult:
        """Go on with the run that is not finished.

        Args:
            spark: The session that runs the jobs.

        Returns:
            The numbers of rows moved and rejected by the whole run.

        Raises:
            ConfigurationError: There is no such run, or it was begun with other parameters.
        """
        with self._locked():
            run = self._open_run()
            self.plan.must_match(run.parameters)
            if self.plan.target is None:
                raise ConfigurationError("a run that moves nothing leaves nothing to resume")
            if run.state is RunState.PREPARING:
                self._give_up(run)
                raise ConfigurationError(f"migration {run.name} had not moved anything yet: run it anew")
            left = self._slices(self.plan.target, each=False)
            return self._move(run, self.plan.target, left, spark)

    def abort(self) -> MigrationResult:
        """Return undelivered rows to the source unchanged. Raises ConfigurationError if there is no run."""
        with self._locked():
            try:
                run = self._open_run()
            except ConfigurationError:
                if not self._read(self._source.number_kept):
                    raise
                return MigrationResult("", RunState.ABORTED, None, [], left=self._source.put_back())  # no run had begun
            self.plan.must_match(run.parameters)
            if run.state is RunState.PREPARING:
                return self._give_up(run)
            for partition in self._partitions(run):
                self._settle(run, partition, close=True)
            return self._ended(run, RunState.ABORTED)

    def _endpoints_to_move(self) -> Sequence[str]:
        if isinstance(self._source, CollectedSource):  # which is emptied before its endpoints are known
            return self.plan.endpoints or ()
        return [partition.endpoint for partition in partitions_of(self.plan) if waits(self.plan, partition)]

    def _slices(self, target: Target, *, each: bool = True) -> list[tuple[Slice, str]]:
        """Return the slices to move, each with the target's name for its endpoint. each: as in `parts_of`."""
        pieces: list[tuple[Slice, str]] = []
        for partition in partitions_of(self.plan, each=each):
            look = partial(slices_of, source=self._source, partition=partition, cutoff=self.plan.cutoff)
            slices, rows = self._write(look)
            self._rows += rows
            if slices:
                name = target.endpoint_named(partition.endpoint)
                pieces += [(piece, name) for piece in slices]
        return pieces

    def _move(
        self, run: MigrationRun, target: Target, slices: Sequence[tuple[Slice, str]], spark: SparkSession
    ) -> MigrationResult:
        """Deliver held rows, and each slice while the next is being held, if the source supports both at once."""
        began, partitions, waiting = datetime.now(UTC), self._partitions(run), iter(slices)
        self._rows += sum(partition.rows for partition in partitions)
        numbers = count(len(partitions))
        with ThreadPoolExecutor(1, "delayline migrate") as ahead, self._reporting(run):

            def hold_next() -> Future[HeldPartition] | None:
                some = next(waiting, None)
                return None if some is None else ahead.submit(self._hold_slice, run, next(numbers), *some)

            together = self._database.locks_rows
            held = hold_next() if together else None
            for partition in partitions:
                self._settle(run, partition)
                self._deliver_partition(run, target, partition, spark)
            while held := held or hold_next():
                partition, held = held.result(), hold_next() if together else None
                self._deliver_partition(run, target, partition, spark)
        return self._ended(run, RunState.COMPLETED, (datetime.now(UTC) - began).total_seconds())

    def _deliver_partition(
        self, run: MigrationRun, target: Target, partition: HeldPartition, spark: SparkSession
    ) -> None:
        at_once = max(1, ROUND_ROWS // self.plan.batch_rows)
        unfinished = self._unfinished(run, partition)
        for first in range(0, len(unfinished), at_once):
            self._deliver(run, target, partition, unfinished[first : first + at_once], spark)

    def _partitions(self, run: MigrationRun) -> list[HeldPartition]:
        return self._read(partial(self._journal.list_partitions, run=run.name))

    def _unfinished(self, run: MigrationRun, partition: HeldPartition) -> list[int]:
        return self._read(partial(self._journal.unfinished, run=run.name, partition=partition.number))

    def _settle(self, run: MigrationRun, partition: HeldPartition, *, close: bool = False) -> None:
        """Mark batches that the target has committed and the source has not recorded yet.

        Args:
            run: the run to bring up to date.
            partition: the held partition whose batches to compare.
            close: also prevent later commits, for example by a task that outlived its driver.
        """
        names = [BatchName(run.name, partition.number, batch) for batch in self._unfinished(run, partition)]
        target = self.plan.target
        if target is None or not names:
            return
        if close:
            target.close(partition.target, names)
        committed = target.committed(partition.target, names)
        if committed:
            attempts = {name.batch: attempt for name, attempt in committed.items()}
            self._write(partial(self._journal.mark, run=run.name, partition=partition.number, attempts=attempts))

    def _deliver(
        self, run: MigrationRun, target: Target, partition: HeldPartition, batches: Sequence[int], spark: SparkSession
    ) -> None:
        session = target.begin(partition.target)
        delivery = BatchDelivery(self._source, session, run.name, partition, target.exactly_once)
        try:
            with translated_errors():
                tasks = min(len(batches), parallelism(spark))
                numbers = _numbers(spark, batches, tasks)
                done = numbers.mapInArrow(delivery.deliver, DELIVERY_RESULT).toArrow().to_pylist()
            if not session.confirms:
                staged = [Staged.of(row["staged"]) for row in done if row["staged"] is not None]
                attempts = {row["batch"]: row["attempt"] for row in done if row["batch"] is not None}
                self._must_add_up(run, partition, attempts, staged)
                named = {BatchName(run.name, partition.number, batch): attempt for batch, attempt in attempts.items()}
                session.commit(staged, named)
                self._write(partial(self._journal.mark, run=run.name, partition=partition.number, attempts=attempts))
        except BaseException:
            with contextlib.suppress(Exception):
                session.discard()
            raise

    def _must_add_up(
        self, run: MigrationRun, partition: HeldPartition, attempts: Mapping[int, int], staged: Sequence[Staged]
    ) -> None:
        expected = self._read(
            partial(self._journal.expected, run=run.name, partition=partition.number, attempts=attempts)
        )
        rows = sum(attempt.rows for attempt in staged)
        if rows != expected:
            raise BackendUnavailable(
                f"staged {rows} of {expected} rows for {partition.source.endpoint}. None of them was committed; run "
                "delayline migrate resume"
            )

    def _hold_slice(self, run: MigrationRun, number: int, some: Slice, target: str) -> HeldPartition:
        holding_table = f"{_holding_prefix(run)}{number}_{secrets.token_hex(3)}"
        self._write(partial(create_holding_table, source=self._source, name=holding_table))
        return self._write(
            partial(self._hold, run=run, number=number, some=some, target=target, holding_table=holding_table)
        )

    def _hold(
        self, connection: Connection, run: MigrationRun, number: int, some: Slice, target: str, holding_table: str
    ) -> HeldPartition:
        """Move the rows of a slice to the holding table and record it in the journal, in a single transaction."""
        self._journal.must_be_open(connection, run.name)
        plan = self.plan
        batches = hold(connection, self._source, some, holding_table, cutoff=plan.cutoff, size=plan.batch_rows)
        partition = HeldPartition(number, some.partition, target, holding_table, sum(batches.values()), len(batches))
        self._journal.add_partition(connection, run.name, partition, batches)
        self._journal.set_state(connection, run.name, RunState.RUNNING)
        return partition

    def _ended(self, run: MigrationRun, state: RunState, seconds: float = 0.0) -> MigrationResult:
        self._write(lambda connection: self._end(connection, run, state))
        self._drop_holding_tables(run)
        ended = self._outcome(run.name, state, seconds, left=self._source.put_back())
        return self._with_skipped(ended) if state is RunState.COMPLETED else ended

    def _end(self, connection: Connection, run: MigrationRun, state: RunState) -> None:
        """Return unmoved rows and record the end of the run, in a single transaction."""
        self._journal.must_be_open(connection, run.name)
        for partition in self._journal.list_partitions(connection, run.name):
            give_back(connection, self._source, self._journal, run.name, partition)
        if state is RunState.ABORTED:
            self._journal.restore(connection, run.name)
        self._journal.set_state(connection, run.name, state)

    def _give_up(self, run: MigrationRun) -> MigrationResult:
        """End a run that died before it moved a row."""
        self._drop_holding_tables(run)
        self._write(partial(self._journal.set_state, name=run.name, state=RunState.ABORTED))
        return self._outcome(run.name, RunState.ABORTED, left=self._source.put_back())

    def _drop_holding_tables(self, run: MigrationRun) -> None:
        """Drop the run's empty holding tables."""
        for holding_table in self._read(self._source.table_names):
            if holding_table.startswith(_holding_prefix(run)):
                self._write(partial(drop_holding_table, source=self._source, name=holding_table))

    def _nothing_else_open(self) -> None:
        for run in self._read(self._journal.list_runs):
            if run.state is RunState.PREPARING:
                self._give_up(run)
            elif run.state is RunState.RUNNING:
                raise ConfigurationError(
                    f"migration {run.name} of {self._source} is not finished: resume it, or abort it first"
                )

    def _open_run(self) -> MigrationRun:
        for run in self._read(self._journal.list_runs):
            if run.state in (RunState.PREPARING, RunState.RUNNING):
                return run
        raise ConfigurationError(f"there is no unfinished migration in {self._source}")

    def _read_only(self, spark: SparkSession) -> MigrationResult:
        """Read all rows as a run would, and change nothing."""
        looked = preview(self.plan, spark, bodies=True)
        reasons = [(reason, number) for shown in looked for reason, number, _ in shown.unmovable]
        examples = [(key, why) for shown in looked for why, _, key in shown.unmovable if key is not None]
        skipped = sum(shown.skipped for shown in looked)
        rows, rejected = sum(shown.rows for shown in looked), sum(number for _, number in reasons) - skipped
        progress = Progress(rows, 0, 0, 0, 0, rejected)
        return MigrationResult(
            "", RunState.COMPLETED, progress, reasons, examples=examples[:REJECTED_IDS], skipped=skipped
        )

    def _with_skipped(self, outcome: MigrationResult) -> MigrationResult:
        """Return the result, with the rows that the run left in the source, and the reasons."""
        left = self._read(partial(skipped_rows, source=self._source, endpoints=self.plan.endpoints))
        reasons = [*outcome.reasons, *((group.reason, group.rows) for group in left)]
        examples = [*outcome.examples, *((name, group.reason) for group in left for name in group.names)][:REJECTED_IDS]
        return replace(outcome, reasons=reasons, examples=examples, skipped=sum(group.rows for group in left))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the migrations of this source; the lock ends with the process."""
        self._source.must_exist()
        blocking(self._database.open())
        try:
            claims = self._database.claims(MIGRATIONS_TABLE)
            if not claims.take([LOCK_KEY], 1):
                raise ConfigurationError(
                    f"another process is working on a migration of {self._source}: wait until it has ended"
                )
            try:
                self._write(self._journal.set_up)
                yield
            finally:
                claims.release([LOCK_KEY])
                claims.flush()
        finally:
            blocking(self._database.close())

    def _outcome(self, run: str, state: RunState, seconds: float = 0.0, left: int = 0) -> MigrationResult:
        progress = self._read(partial(self._journal.progress, run=run))
        reasons = self._read(partial(self._journal.reasons, run=run))
        examples = self._read(partial(self._journal.list_rejected, run=run, limit=REJECTED_IDS))
        return MigrationResult(run, state, progress, reasons, seconds, left, examples)

    @contextlib.contextmanager
    def _reporting(self, run: MigrationRun) -> Iterator[None]:
        """Report progress every PROGRESS_INTERVAL seconds, and at the end."""
        report, over = self._progress, threading.Event()
        if report is None:
            yield
            return

        def report_now() -> None:
            progress = self._read(partial(self._journal.progress, run=run.name))
            report(progress.marked, max(progress.rows, self._rows))

        def repeat() -> None:
            while not over.wait(PROGRESS_INTERVAL):
                with contextlib.suppress(DelaylineError):  # the user of the database reports the error
                    report_now()

        thread = threading.Thread(target=repeat, name="delayline migrate progress")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        report_now()

    def _read(self, work: Callable[[Connection], Result]) -> Result:
        return blocking(self._database.read(work))

    def _write(self, work: Callable[[Connection], Result]) -> Result:
        return blocking(self._database.write(work))


def _holding_prefix(run: MigrationRun) -> str:
    """Return the prefix of the names of the holding tables."""
    return f"delayline_holding_{run.name}_"


def _new_name() -> str:
    return f"{datetime.now(UTC):%Y%m%d%H%M%S}_{secrets.token_hex(3)}"


def _numbers(spark: SparkSession, batches: Sequence[int], tasks: int) -> Any:  # noqa: ANN401 - a DataFrame
    """Return the numbers of the batches, in a partition for each task."""
    import pyarrow as pa

    first, last = batches[0], batches[-1]
    if last - first + 1 == len(batches):
        return spark.range(first, last + 1, 1, tasks)
    return spark.createDataFrame(pa.table({"id": pa.array(batches, pa.int64())})).repartition(tasks)
