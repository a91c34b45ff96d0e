"""Scheduling into two tiers: near messages are stored in pieces, far ones registered after them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Observation
from sqlalchemy.exc import ProgrammingError
from tests.spark.driver_process import run_until_killed
from tests.spark.killed_drivers import TIERS, scheduling_tiers
from tests.spark.stores import frame
from tests.spark.test_dispatch import PATIENCE
from tests.spark.tiers import HOUR

from delayline import ConfigurationError
from delayline.bulk.jobs import JobState
from delayline.errors import DifferentInput
from delayline.spark import Columns, JobTarget, placement, schedule, schedule_stream
from delayline.spark.options import StoreOptions
from delayline.spark.pieces import PieceJob

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.stores import StoreAt
    from tests.spark.tiers import Tiers

    from delayline.bulk.jobs import Job

SOON: Final = timedelta(minutes=20)
#: Within the horizon that `again` has, and not within that of `Tiers.schedule`.
LATER: Final = timedelta(days=20)
NUMBER: Final = 300
NEAR: Final = sorted(f"m{number}" for number in range(NUMBER) if number % 10)
FAR: Final = sorted(f"m{number}" for number in range(0, NUMBER, 10))
REFUSE_STAGING: Final = """
CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity LIKE '%delayline_stage%')
    THEN RAISE 'a table to stage rows in'; END IF; END $$;
CREATE EVENT TRIGGER unstaged ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION refuse();
"""


def both(spark: SparkSession, number: int = NUMBER) -> DataFrame:
    """Return messages of which every tenth is far, due at instants that stay when they are read again."""
    now = datetime.now(UTC)
    due = [now + (SOON if row % 10 else LATER) for row in range(number)]
    return frame(spark, *(f"m{row}" for row in range(number)), due=pa.array(due, pa.timestamp("us", "UTC")))


def job_of(store: StoreAt) -> Job:
    """Return the job that has begun last, as `delayline spark jobs` lists it."""
    return StoreOptions.of(store.options).pieces().jobs(1)[0]


def fail(*_: object) -> None:
    raise ConnectionError("fails on purpose")


def test_no_row_of_a_job_is_staged(spark: SparkSession, tiers: Tiers) -> None:
    # Given a database in which there may be no table to stage rows in
    with psycopg.connect(tiers.url, autocommit=True) as admin:
        admin.execute(REFUSE_STAGING)
    # When a job has near and far rows
    done = tiers.schedule(both(spark), run="nightly")
    # Then they wait in their tiers, and its entries are those of pieces
    assert (done.stored, done.cold, done.duplicates, done.repeated) == (len(NEAR), len(FAR), 0, False)
    assert (tiers.hot.ids(), tiers.ids()) == (NEAR, sorted(NEAR + FAR))
    done_of_job = job_of(tiers).committed
    assert (job_of(tiers).state, done_of_job.stored, done_of_job.cold) == (JobState.DONE, len(NEAR), len(FAR))
    # And one with all rows at once would have had such a table
    with pytest.raises(ProgrammingError, match="a table to stage rows in"):
        tiers.schedule(both(spark, 5), atomic="job")


def test_of_rows_with_one_id_the_first_due_counts_in_both_tiers(spark: SparkSession, any_tiers: Tiers) -> None:
    # Given ids that wait in the files and in the store
    tiers, now = any_tiers, datetime.now(UTC)
    tiers.schedule(frame(spark, "cold 1", "cold 2", due=[now + LATER] * 2))
    tiers.hot.put("hot 1", "hot 2", due=now + LATER)
    # When a job has them near and far, others twice in either tier or once in both, and some that cannot be messages
    near = ["n", "n twice", "n twice", "both", "cold 1", "hot 1", "", "bad first"]
    far = ["f", "f twice", "f twice", "both", "cold 2", "hot 2", "", "bad first"]
    due = [*(now + SOON + timedelta(seconds=row) for row in range(len(near)))]
    due += [now + LATER + timedelta(seconds=row) for row in range(len(far))]
    headers, body = ["{" if n == 7 else "{}" for n in range(16)], [b"%d" % n for n in range(16)]
    rows = frame(spark, *near, *far, due=pa.array(due, pa.timestamp("us", "UTC")), headers=headers, body=body)
    observed = Observation("nightly")
    done = tiers.schedule(rows, run="nightly", observation=observed)
    # Then each waits once, as it is due first, and all rows are counted
    counts = {"stored": 3, "cold": 3, "duplicates": 7, "rejected": 3}
    assert {name: getattr(done, name) for name in counts} == counts and not done.repeated
    found = {message.id: message.message.body for message in tiers.messages()}
    waited = {"cold 1": b"cold 1", "cold 2": b"cold 2", "hot 1": b"hot 1", "hot 2": b"hot 2"}
    assert found == {"n": b"0", "n twice": b"1", "both": b"3", "f": b"8", "f twice": b"9", "bad first": b"15", **waited}
    assert tiers.hot.ids() == ["both", "hot 1", "hot 2", "n", "n twice"]
    assert {name: observed.get[name] for name in ("rows", *counts)} == {"rows": 16, **counts}
    # And the same rows again tell that, and others are refused
    again = tiers.schedule(rows.orderBy("body"), run="nightly", hot_horizon=2 * LATER)
    assert {name: getattr(again, name) for name in counts} == counts and again.repeated
    with pytest.raises(DifferentInput, match="the run 'nightly' was used for another input"):
        tiers.schedule(frame(spark, "x"), run="nightly")
    assert len(tiers.ids()) == len(found)


def test_a_job_that_has_stored_its_near_rows_goes_on_with_the_far_ones(
    spark: SparkSession, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = both(spark)
    # Given a job that fails when its near rows are stored, and the far ones have to be registered
    with monkeypatch.context() as patched, pytest.raises(ConnectionError, match="fails on purpose"):
        patched.setattr(placement, "check_job_duration", fail)
        tiers.schedule(rows, run="nightly")
    assert (tiers.ids(), job_of(tiers).state, job_of(tiers).committed.stored) == (NEAR, JobState.OPEN, len(NEAR))
    # And its near rows have been dispatched
    with psycopg.connect(tiers.url, autocommit=True) as admin:
        admin.execute('DELETE FROM "sales.timeouts"')
    # When other rows come under its name, then they are refused
    with pytest.raises(DifferentInput, match="the job 'nightly' has begun with another input"):
        tiers.schedule(rows.selectExpr("concat('x', id) AS id", "destination", "due", "headers", "body"), run="nightly")
    # When it is run again once the far ones have come near, in another way first
    with pytest.raises(ConfigurationError, match="begun in pieces"):
        tiers.schedule(rows, run="nightly", atomic="job")
    with pytest.raises(ConfigurationError, match="begun with a cold tier"):
        schedule(rows, tiers.alone, run="nightly", spark=spark)
    done = tiers.schedule(rows, run="nightly", hot_horizon=2 * LATER)
    # Then these alone are placed, where they would have been
    assert (done.stored, done.cold, done.duplicates, done.repeated) == (len(NEAR), len(FAR), 0, False)
    assert (tiers.hot.ids(), tiers.ids(), job_of(tiers).state) == ([], FAR, JobState.DONE)


def test_a_job_that_was_recorded_at_once_is_done(spark: SparkSession, tiers: Tiers) -> None:
    # Given a job with all rows at once, as an older delayline has recorded all with a cold tier
    rows = both(spark)
    done = tiers.schedule(rows, run="nightly", atomic="job")
    # Then it is done in pieces too, and other rows are refused
    again = tiers.schedule(rows, run="nightly")
    assert (again.stored, again.cold, again.repeated) == (done.stored, done.cold, True) == (len(NEAR), len(FAR), True)
    with pytest.raises(DifferentInput, match="the run 'nightly' was used for another input"):
        tiers.schedule(both(spark, 50), run="nightly")
    assert len(tiers.ids()) == NUMBER


def test_a_batch_of_a_stream_goes_on_with_the_far_rows(
    spark: SparkSession, tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rows = str(tmp_path / "source"), both(spark)

    def run() -> bool | None:
        stream = spark.readStream.schema(rows.schema).parquet(source)
        how: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "trigger": {"availableNow": True}}
        return schedule_stream(stream, tiers.target, hot_horizon=HOUR, **how).awaitTermination(PATIENCE)

    # Given a stream whose first batch has failed when its near rows were stored, and they have been dispatched since
    rows.write.parquet(source)
    with monkeypatch.context() as patched, pytest.raises(StreamingQueryException, match="fails on purpose"):
        patched.setattr(placement, "check_job_duration", fail)
        run()
    assert tiers.ids() == NEAR
    with psycopg.connect(tiers.url, autocommit=True) as admin:
        admin.execute('DELETE FROM "sales.timeouts"')
    # When it is started again, and has another batch
    assert run()
    assert (tiers.hot.ids(), tiers.ids()) == ([], FAR)
    rows.selectExpr("concat('x', id) AS id", "destination", "due", "headers", "body").write.mode("append").parquet(
        source
    )
    assert run()
    # Then each message was stored once, and the ledger has the last batch
    assert tiers.hot.ids() == [f"x{key}" for key in NEAR]
    assert tiers.ids() == sorted(FAR + [f"x{key}" for key in NEAR + FAR])
    assert (job_of(tiers).name.version, job_of(tiers).state) == (1, JobState.DONE)


@pytest.mark.parametrize("is_later", [True, False])
def test_due_times_that_differ_when_the_far_rows_are_read(
    spark: SparkSession, tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_later: bool
) -> None:
    # Given a source whose rows are due at other times once the near ones are stored
    changed, moved = str(tmp_path / "changed"), "m1" if is_later else "m0"

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            by = timedelta(days=10 if is_later else -20) if os.access(changed, os.F_OK) else timedelta()
            ids, due = (batch.column(name).to_pylist() for name in ("id", "due"))
            due = [at + by if key == moved else at for key, at in zip(ids, due, strict=True)]
            yield batch.set_column(2, "due", pa.array(due, batch.schema.field("due").type))

    def change(self: PieceJob, job: Job) -> int:
        (tmp_path / "changed").touch()
        return far_rows(self, job)

    far_rows, rows = PieceJob.far_rows, both(spark)
    monkeypatch.setattr(PieceJob, "far_rows", change)
    again = rows.mapInArrow(read, rows.schema)
    if is_later:
        # Then one that is far now is known to be stored, and all rows are counted once
        done = tiers.schedule(again, run="nightly")
        assert (done.stored, done.cold, done.duplicates) == (len(NEAR), len(FAR), 0)
        assert (tiers.hot.ids(), tiers.ids()) == (NEAR, sorted(NEAR + FAR))
    else:
        # Then one that is not far any more is not lost: the job ends when it is run again with due times that stay
        with pytest.raises(DifferentInput, match="has other due times each time it is read"):
            tiers.schedule(again, run="nightly")
        assert tiers.ids() == NEAR
        assert tiers.schedule(rows, run="nightly").cold == len(FAR)
        assert tiers.ids() == sorted(NEAR + FAR)


@pytest.mark.sample(1, group="Spark kills")
def test_a_driver_that_is_killed_between_the_tiers(spark: SparkSession, tiers: Tiers, tmp_path: Path) -> None:
    source = tmp_path / "source.parquet"
    both(spark).write.parquet(str(source))
    # When the driver is killed at a later step each time, and what is stored was dispatched since
    dispatched = list[str]()
    for step, (_, _, _, far) in TIERS.items():
        run_until_killed(spark, scheduling_tiers, step, tiers.target, str(source))
        dispatched += tiers.hot.ids()
        with psycopg.connect(tiers.url, autocommit=True) as admin:
            admin.execute('DELETE FROM "sales.timeouts"')
        # Then the far rows are registered once all near ones are stored
        assert (sorted(dispatched), tiers.ids()) == ([] if step == "begun" else NEAR, FAR if far else []), step
    # And a repeated run has nothing left to do
    done = tiers.schedule(source, run="campaign")
    assert (done.stored, done.cold, done.duplicates, done.repeated) == (len(NEAR), len(FAR), 0, True)
    assert (tiers.hot.ids(), tiers.ids()) == ([], FAR)


def test_a_store_without_staging_areas_takes_a_cold_tier_in_pieces_only() -> None:
    """Given SQL Server with a cold tier, then only a job whose tiers are to be had at once is refused."""
    target = JobTarget("mssql://me@127.0.0.1:1/shop", endpoint="sales", cold_tier="cold")
    placement.Placement(target, Columns(), "keep", LATER).check()
    for at_once in (
        placement.Placement(target, Columns(), "raise", LATER),
        placement.Placement(target, Columns(), "keep", LATER, atomic="job"),
    ):
        with pytest.raises(ConfigurationError, match="mssql: takes the messages of a job in pieces, and not both"):
            at_once.check()
