"""A migration that something stops is resumed or aborted: nothing is lost, and what may be double is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import delete, insert, text
from tests.eventually import PATIENCE, eventually
from tests.integration.earlier_ledger import make_earlier_ledger
from tests.integration.test_rabbitmq_migration import V2
from tests.spark.broker import count, in_levels, with_levels
from tests.spark.kills import DriverKilled, KillingTarget, TaskKills
from tests.spark.legacy import Legacy, Timeout, fill, some
from tests.spark.stores import StoreAt

from delayline.bulk.batches import CLOSED, BatchName
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.migration import Migration, Plan, source_at, target_at
from delayline.migration.holding_table import create_holding_table, drop_holding_table
from delayline.migration.journal import HeldPartition, MigrationJournal, MigrationRun, RunState
from delayline.migration.rows import record_batch
from delayline.migration.run import MigrationResult
from delayline.migration.source import BATCH_COLUMN, NUMBER_COLUMN, SourcePartition
from delayline.migration.targets.sql_store import SqlStore
from delayline.migration.verify import run_named, runs_of, verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.servers.rabbitmq import RabbitmqServer

ENDPOINT = "sales"


@pytest.fixture
def legacy(postgresql_url: str) -> Legacy:
    return Legacy(postgresql_url, ENDPOINT)


@pytest.fixture(params=["postgresql", "mariadb"])
def any_legacy(request: pytest.FixtureRequest) -> Legacy:
    return Legacy(request.getfixturevalue(f"{request.param}_url"), ENDPOINT)


def plan(legacy: Legacy, url: str, **how: Any) -> Plan:  # noqa: ANN401 - Plan's own
    return Plan(legacy.source, target_at(url), **{"endpoints": [ENDPOINT], "batch_size": 4, **how})


def plan_with_kills(legacy: Legacy, store: StoreAt, folder: Path, *, number: int, before: bool = False) -> Plan:
    """Return a plan whose tasks die around the batch of the first timeout."""
    target = target_at(store.url)
    assert target is not None
    killing: Any = KillingTarget(target, TaskKills(folder, number, Timeout(1).id, before))
    return Plan(legacy.source, killing, [ENDPOINT], batch_size=4)


@contextlib.contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, where: type, name: str, *, after: bool) -> Iterator[None]:
    """Have the driver die before or after something, once."""
    real = getattr(where, name)

    def die(self: object, *arguments: object, **named: object) -> object:
        if after:
            real(self, *arguments, **named)
        raise DriverKilled

    with monkeypatch.context() as patched:
        patched.setattr(where, name, die)
        with pytest.raises(DriverKilled):
            yield


@pytest.mark.slow
@pytest.mark.parametrize(("step", "after"), [("_deliver", False), ("_end", False)])
def test_a_driver_that_dies_between_steps_is_resumed(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    legacy.add(ENDPOINT, *some(10))
    with dying(monkeypatch, Migration, step, after=after):
        Migration(plan(legacy, store.url)).run(spark)
    assert Migration(plan(legacy, store.url)).resume(spark).complete
    assert len(store.ids()) == 10
    verified = verify(legacy.source, target_at(store.url), spark)  # type: ignore[arg-type]
    assert verified.ok
    assert verified.waiting == 10


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("then", ["resume", "abort"])
@pytest.mark.sample(1)
def test_a_commit_with_a_lost_answer_counts_once(
    spark: SparkSession, any_legacy: Legacy, store: StoreAt, tmp_path: Path, committed: bool, then: str
) -> None:
    legacy = any_legacy
    # Given a run whose tasks died around the target's commit of one batch, until it was given up
    legacy.add(ENDPOINT, *some(4))
    before = legacy.rows(ENDPOINT)
    with pytest.raises(DelaylineError):
        Migration(plan_with_kills(legacy, store, tmp_path, number=9, before=not committed)).run(spark)
    assert len(store.ids()) == (4 if committed else 0)
    # When it is resumed, or aborted
    if then == "resume":
        assert Migration(plan(legacy, store.url)).resume(spark).complete
    else:
        Migration(plan(legacy, store.url)).abort()
    # Then each message is in one place, as it was
    moved = committed or then == "resume"
    assert len(store.ids()) == (4 if moved else 0)
    assert legacy.rows(ENDPOINT) == ([] if moved else before)
    verified = verify(legacy.source, target_at(store.url), spark)  # type: ignore[arg-type]
    assert verified.ok
    assert verified.repeatable == []


@pytest.mark.parametrize("then", ["resume", "abort"])
def test_a_batch_that_an_older_delayline_has_stored_is_not_stored_again(
    spark: SparkSession, legacy: Legacy, store: StoreAt, tmp_path: Path, then: str
) -> None:
    # Given a run whose tasks died after the target's commit of its batch, which is recorded as an older delayline did
    legacy.add(ENDPOINT, *some(4))
    with pytest.raises(DelaylineError):
        Migration(plan_with_kills(legacy, store, tmp_path, number=9)).run(spark)
    run = f"migration {run_named(legacy.source, None).name} 0 0"
    make_earlier_ledger(store.url)
    with psycopg.connect(store.url, autocommit=True) as admin:
        moved = admin.execute(
            "INSERT INTO delayline_spark_runs (run, kind, batch, stored, duplicates, rejected) "
            "SELECT %s, 'migration', attempt, stored, 0, 0 FROM delayline_job_pieces RETURNING stored",
            [run],
        )
        assert moved.fetchall() == [(4,)]
        admin.execute("TRUNCATE delayline_jobs, delayline_job_pieces")
        # And whose messages have been dispatched since
        admin.execute('TRUNCATE "sales.timeouts"')
    # When it is resumed, or aborted
    if then == "resume":
        assert Migration(plan(legacy, store.url)).resume(spark).complete
    else:
        Migration(plan(legacy, store.url)).abort()
    # Then the messages neither come to the target again nor back to the source
    assert (store.ids(), legacy.ids(ENDPOINT)) == ([], [])


@pytest.mark.slow
def test_rejected_rows_are_those_of_the_counted_attempt(
    spark: SparkSession, legacy: Legacy, store: StoreAt, tmp_path: Path
) -> None:
    # Given a batch of which one id waits at the target, and a task that dies when the rest is committed
    legacy.add(ENDPOINT, *some(4))
    store.put(Timeout(2).id)
    # When it is tried again, and finds that all of its ids wait there now
    outcome = Migration(plan_with_kills(legacy, store, tmp_path, number=1)).run(spark)
    # Then one was rejected and returned; the others have moved
    assert [number for _, number in outcome.reasons] == [1]
    assert legacy.ids(ENDPOINT) == [Timeout(2).id]
    assert store.ids() == [Timeout(number).id for number in range(1, 5)]
    assert verify(legacy.source, target_at(store.url), spark).ok  # type: ignore[arg-type]


def test_a_task_that_outlives_an_abort_commits_nothing(
    spark: SparkSession, legacy: Legacy, store: StoreAt, tmp_path: Path
) -> None:
    # Given a batch that a task has read and not committed
    legacy.add(ENDPOINT, *some(4))
    with pytest.raises(DelaylineError):
        Migration(plan_with_kills(legacy, store, tmp_path, number=9, before=True)).run(spark)
    # When the run is aborted, and then the task goes on
    Migration(plan(legacy, store.url)).abort()
    writer = SqlStore(store.url).writer(ENDPOINT)

    async def go_on() -> int:
        async with contextlib.AsyncExitStack() as stack:
            await writer.open(stack)
            rows = record_batch((timeout.id, "billing", timeout.time, "{}", b"") for timeout in some(4))
            return await writer.store_batch(BatchName(run_named(legacy.source, None).name, 0, 0), 1, rows)

    # Then its batch is closed
    assert asyncio.run(go_on()) == CLOSED
    assert (store.ids(), len(legacy.ids(ENDPOINT))) == ([], 4)


def test_an_abort_returns_exactly_the_unfinished_rows(
    spark: SparkSession, any_legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy = any_legacy
    # Given several rounds, one of which was delivered, with distinct rows
    monkeypatch.setattr("delayline.migration.run.ROUND_ROWS", 8)
    rows = [*some(15), Timeout(16, state=None, saga=None, version="5"), Timeout(17, destination=None)]
    legacy.add(ENDPOINT, *rows)
    before = {str(row[0]): row for row in legacy.rows(ENDPOINT)}
    deliver, calls = Migration._deliver, []

    def die_at_second(self: Migration, *arguments: Any) -> None:  # noqa: ANN401 - as they are
        calls.append(arguments)
        if len(calls) == 2:
            raise DriverKilled
        deliver(self, *arguments)

    monkeypatch.setattr(Migration, "_deliver", die_at_second)
    with pytest.raises(DriverKilled):
        Migration(plan(legacy, store.url)).run(spark)

    # When it is aborted
    outcome = Migration(plan(legacy, store.url)).abort()

    # Then every row is in the store or in its table, and those are as they were, to the last column
    moved, back = set(store.ids()), legacy.rows(ENDPOINT)
    assert outcome.progress is not None
    assert (outcome.progress.marked, outcome.progress.restored) == (8, 9)
    assert moved | {str(row[0]) for row in back} == set(before)
    assert len(moved) + len(back) == len(before)
    assert back == [before[str(row[0])] for row in back]
    # And there is nothing to resume
    with pytest.raises(ConfigurationError, match="no unfinished migration"):
        Migration(plan(legacy, store.url)).resume(spark)


def test_a_run_that_died_while_it_prepared_is_cleared_away_by_the_next(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(ENDPOINT, *some(5))
    with dying(monkeypatch, Migration, "_hold", after=False):
        Migration(plan(legacy, store.url)).run(spark)
    assert len(legacy.ids(ENDPOINT)) == 5
    assert Migration(plan(legacy, store.url)).run(spark).complete
    assert [str(one.state) for one in runs_of(legacy.source)] == ["completed", "aborted"]
    assert len([name for name in legacy.everything() if name.startswith("delayline_holding")]) == 1


def test_there_is_nothing_to_resume_in_a_run_that_died_while_it_prepared(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(ENDPOINT, *some(5))
    with dying(monkeypatch, Migration, "_hold", after=False):
        Migration(plan(legacy, store.url)).run(spark)
    with pytest.raises(ConfigurationError, match="had not moved anything yet: run it anew"):
        Migration(plan(legacy, store.url)).resume(spark)
    assert len(legacy.ids(ENDPOINT)) == 5


def test_other_parameters_and_second_runs_are_refused(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(ENDPOINT, *some(5))
    with dying(monkeypatch, Migration, "_deliver", after=False):
        Migration(plan(legacy, store.url)).run(spark)
    with pytest.raises(ConfigurationError, match="batch_size was '4', now it is '5'"):
        Migration(plan(legacy, store.url, batch_size=5)).resume(spark)
    with pytest.raises(ConfigurationError, match=r"endpoints was 'sales', now it is '\*'"):
        Migration(plan(legacy, store.url, endpoints=None)).abort()
    with pytest.raises(ConfigurationError, match="is not finished: resume it, or abort it"):
        Migration(plan(legacy, store.url)).run(spark)


def test_two_migrations_of_one_source_at_once_are_refused(spark: SparkSession, legacy: Legacy, store: StoreAt) -> None:
    legacy.add(ENDPOINT, *some(5))
    first = Migration(plan(legacy, store.url))
    with first._locked(), pytest.raises(ConfigurationError, match="another process is working"):
        Migration(plan(legacy, store.url)).run(spark)
    assert len(legacy.ids(ENDPOINT)) == 5


def test_rows_that_vanish_while_they_are_on_their_way_stop_the_run(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(ENDPOINT, *some(10))
    hold = Migration._hold

    def hold_and_lose(self: Migration, connection: Any, **named: Any) -> HeldPartition:  # noqa: ANN401 - as they are
        held = hold(self, connection, **named)
        quote = legacy.source.dialect.sql.identifier_preparer.quote
        connection.execute(text(f"DELETE FROM {quote(held.held)} WHERE delayline_number = 3"))  # noqa: S608 - ours
        return held

    monkeypatch.setattr(Migration, "_hold", hold_and_lose)
    with pytest.raises(DelaylineError, match="has 3 of 4 rows of batch 0"):
        Migration(plan(legacy, store.url)).run(spark)
    assert not set(store.ids()) & {Timeout(number).id for number in range(1, 5)}


def test_rejected_rows_count_only_for_the_last_attempt_at_a_batch(tmp_path: Path) -> None:
    # Given a batch that a task was cut off from, and another one has begun
    source = source_at("delayline", f"sqlite:///{tmp_path / 'old.db'}")
    journal = MigrationJournal(source.dialect, source.schema)
    held = HeldPartition(0, SourcePartition(ENDPOINT, "sales.timeouts"), ENDPOINT, "held", 4, 1)

    async def work() -> None:
        write = source.database.write
        await source.database.open()
        try:
            await write(journal.set_up)
            await write(partial(journal.begin, name="r", parameters={}))
            await write(partial(journal.add_partition, run="r", held=held, batches={0: 4}))
            deliver = partial(journal.deliver, run="r", partition=0, batches=[0])
            first, second = [(await write(deliver))[0] for _ in range(2)]
            rejected = partial(journal.record_rejected, run="r", partition=0, batch=0)
            await write(partial(rejected, rejected={1: ("b", "no queue")}, attempt=second.number))
            # When the first one goes on, before and after the batch is marked
            late = partial(rejected, rejected=dict.fromkeys(range(4), ("x", "it waits already")), attempt=first.number)
            with pytest.raises(BackendUnavailable, match="another task works on batch 0"):
                await write(late)
            await write(partial(journal.mark, run="r", partition=0, attempts={0: second.number}))
            await write(late)
            # Then the rejections of the last one are kept
            assert await source.database.read(partial(journal.list_rejected, run="r", limit=9)) == [("b", "no queue")]
        finally:
            await source.database.close()

    asyncio.run(work())


def test_a_marked_batch_keeps_its_rejected_rows(tmp_path: Path) -> None:
    # Given two attempts at a batch, each of which has rejected a row
    source = source_at("delayline", f"sqlite:///{tmp_path / 'old.db'}")
    journal = MigrationJournal(source.dialect, source.schema)

    async def work() -> list[tuple[str, str]]:
        write = source.database.write
        await source.database.open()
        try:
            await write(journal.set_up)
            await write(partial(journal.begin, name="r", parameters={}))
            held = HeldPartition(0, SourcePartition(ENDPOINT, "sales.timeouts"), ENDPOINT, "held", 4, 1)
            await write(partial(journal.add_partition, run="r", held=held, batches={0: 4}))
            for number in (1, 2):
                begun = await write(partial(journal.deliver, run="r", partition=0, batches=[0]))
                rejected = {1: (f"of {number}", "no queue")}
                record_rejected = partial(journal.record_rejected, run="r", partition=0, batch=0, rejected=rejected)
                await write(partial(record_rejected, attempt=begun[0].number))
            # When both are marked, the first one first
            for number in (1, 2):
                await write(partial(journal.mark, run="r", partition=0, attempts={0: number}))
            return await source.database.read(partial(journal.list_rejected, run="r", limit=9))
        finally:
            await source.database.close()

    # Then the first one counts
    assert asyncio.run(work()) == [("of 1", "no queue")]


def test_a_driver_that_has_lost_its_turn_neither_goes_on_nor_ends_a_run_that_is_over(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that is aborted while its driver works on the first of several slices
    monkeypatch.setattr("delayline.migration.holding_table.SLICE_ROWS", 4)
    legacy.add(ENDPOINT, *some(10))
    ids, deliver = legacy.ids(ENDPOINT), Migration._deliver

    def abort_and_deliver(self: Migration, run: MigrationRun, *arguments: Any) -> None:  # noqa: ANN401 - as they are
        self._write(partial(self._journal.set_state, name=run.name, state=RunState.ABORTED))
        deliver(self, run, *arguments)

    with monkeypatch.context() as patched, pytest.raises(BackendUnavailable, match="was aborted by another process"):
        patched.setattr(Migration, "_deliver", abort_and_deliver)
        Migration(plan(legacy, store.url)).run(spark)
    # Then the run stays aborted, and rows that were not held yet are in the source
    [run] = runs_of(legacy.source)
    assert run.state is RunState.ABORTED
    assert set(legacy.ids(ENDPOINT)) >= set(ids[8:])


def test_a_table_that_holds_something_is_not_dropped(legacy: Legacy) -> None:
    source = legacy.source
    legacy.change(lambda connection: create_holding_table(connection, source, "delayline_holding_x"))
    legacy.change(lambda connection: connection.execute(insert(source.held("delayline_holding_x")).values(
        {BATCH_COLUMN: 0, NUMBER_COLUMN: 0}
    )))  # fmt: skip
    legacy.change(lambda connection: drop_holding_table(connection, source, "delayline_holding_x"))
    assert "delayline_holding_x" in legacy.everything()
    legacy.change(lambda connection: connection.execute(delete(source.held("delayline_holding_x"))))
    legacy.change(lambda connection: drop_holding_table(connection, source, "delayline_holding_x"))
    assert "delayline_holding_x" not in legacy.everything()


@pytest.mark.sample(1, group="Spark kills")
def test_a_killed_migration_to_rabbitmq_loses_nothing_and_lists_possible_doubles(
    spark: SparkSession, rabbitmq: RabbitmqServer, rabbitmq_url: str, postgresql_url: str
) -> None:
    # Given thousands of timeouts and a broker with levels
    del rabbitmq
    number, size = 6000, 100
    legacy = Legacy(postgresql_url, ENDPOINT)
    fill(postgresql_url, ENDPOINT, number)
    with_levels(rabbitmq_url, V2)
    arguments = [
        "--from", "nservicebus-sql", "--source", postgresql_url, "--target", rabbitmq_url, "--endpoint", ENDPOINT,
        "--batch-size", str(size),
    ]  # fmt: skip

    # When the process is killed in the middle
    process = subprocess.Popen(
        [sys.executable, "-m", "delayline", "migrate", "run", *arguments], start_new_session=True
    )
    try:
        eventually(
            lambda: process.poll() is not None or count(rabbitmq_url, V2) >= 500, "hundreds are moved", 3 * PATIENCE
        )
        assert process.poll() is None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert run_named(legacy.source, None).state == "running"

    # And it is resumed
    found = target_at(rabbitmq_url)
    assert found is not None
    outcome: MigrationResult = Migration(Plan(legacy.source, found, [ENDPOINT], batch_size=size)).resume(spark)

    # Then all messages are there, and verify lists those that are there twice
    assert outcome.complete
    verified = verify(legacy.source, found, spark)
    assert verified.ok
    assert verified.moved == number
    messages = in_levels(rabbitmq_url, V2)
    ids = [one.header.properties.message_id for one in messages]
    assert len(set(ids)) == number
    assert len(ids) - number <= len(verified.repeatable) <= 2 * size
