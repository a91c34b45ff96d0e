"""Jobs that commit in pieces: a job that fails half way goes on where it was, and another input is refused."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from tests.spark.blocked_statements import blocked_statements
from tests.spark.stores import ENDPOINT, frame, many
from tests.spark.test_dispatch import PATIENCE

from delayline import BackendUnavailable, ConfigurationError, DuplicateMessage
from delayline.bulk.jobs import JobName, JobState, PieceParameters
from delayline.bulk.pieces import PieceWriter
from delayline.errors import DelaylineError, DifferentInput
from delayline.spark import JobTarget, schedule, schedule_stream
from delayline.spark.options import SOURCE_COLUMNS, StoreOptions
from delayline.spark.pieces import END_OF_PIECE, ORDER_IN_A_PLACE, PIECES, PLACE, PLACE_BITS, whole_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.spark.stores import StoreAt

    from delayline.bulk.jobs import Job

NUMBER: Final = 500
IDS: Final = sorted(f"m{number}" for number in range(NUMBER))
BAD: Final = "m250"
REFUSE: Final = f"""
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused on purpose'; END $$;
CREATE TRIGGER refused BEFORE INSERT ON "sales.timeouts" FOR EACH ROW WHEN (NEW.id = '{BAD}')
EXECUTE FUNCTION refuse();
"""


@pytest.fixture
def eight_tasks(spark: SparkSession) -> Iterator[None]:
    """Have a small job write in eight tasks."""
    settings = {"spark.sql.adaptive.coalescePartitions.enabled": "false", "spark.sql.shuffle.partitions": "8"}
    before = {name: str(spark.conf.get(name)) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


def target(store: StoreAt) -> JobTarget:
    return JobTarget(store.url, endpoint=ENDPOINT)


def job_of(store: StoreAt, name: str = "nightly") -> Job:
    options = StoreOptions.of(target(store).options)
    return options.pieces().open(JobName(name), PieceParameters(0, PIECES, "keep"))


@pytest.mark.usefixtures("eight_tasks")
def test_a_job_that_failed_half_way_goes_on_with_the_pieces_that_are_missing(
    spark: SparkSession, store: StoreAt
) -> None:
    # Given a job that has failed when some of its pieces were stored
    with psycopg.connect(store.url, autocommit=True) as admin:
        admin.execute(REFUSE)
        with pytest.raises((DelaylineError, PySparkException), match="refused on purpose"):
            schedule(many(spark, NUMBER), target(store), run="nightly", spark=spark)
        stored = store.ids()
        job = job_of(store)
        assert (job.state, job.committed.stored) == (JobState.OPEN, len(stored))
        assert 0 < len(stored) < NUMBER and BAD not in stored
        # And their messages have been dispatched since
        admin.execute('DELETE FROM "sales.timeouts"')
        admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    # When other rows come under its name, they are refused
    others = many(spark, NUMBER).selectExpr("concat('x', id) AS id", "destination", "due", "headers", "body")
    with pytest.raises(DifferentInput, match="the job 'nightly' has begun with another input"):
        schedule(others, target(store), run="nightly", spark=spark)
    assert store.ids() == []
    # When it is run again, in another order
    again = schedule(many(spark, NUMBER).orderBy("body"), target(store), run="nightly", spark=spark)
    # Then each message was stored once
    assert sorted(store.ids() + stored) == IDS
    assert (again.stored, again.duplicates, again.repeated) == (NUMBER, 0, False)
    assert schedule(many(spark, NUMBER), target(store), run="nightly", spark=spark).repeated


@pytest.mark.usefixtures("eight_tasks")
@pytest.mark.parametrize(
    "step",
    [
        "BEFORE INSERT ON delayline_job_pieces",
        f"BEFORE INSERT ON \"sales.timeouts\" FOR EACH ROW WHEN (NEW.id = '{BAD}')",
        "BEFORE UPDATE ON delayline_job_pieces",
        "AFTER UPDATE ON delayline_job_pieces DEFERRABLE INITIALLY DEFERRED FOR EACH ROW",
    ],
    ids=["claiming", "half stored", "stored", "committed"],
)
@pytest.mark.sample(1)
def test_a_worker_that_is_killed_in_a_piece_counts_once(spark: SparkSession, store: StoreAt, step: str) -> None:
    # Given a job whose tasks are held up at a step
    job_of(store, "for its tables")
    with blocked_statements(store.url, step) as held, ThreadPoolExecutor(1) as pool:
        job = pool.submit(schedule, many(spark, NUMBER), target(store), run="nightly", spark=spark)
        held.wait(1 if BAD in step else 2, job.done)
        # When they are killed
        for process in held.senders():
            os.kill(process, signal.SIGKILL)
        held.release()
        # Then others do the work, once
        done = job.result(PATIENCE)
    assert (done.stored, done.duplicates, store.ids()) == (NUMBER, 0, IDS)


@pytest.mark.usefixtures("eight_tasks")
def test_a_batch_of_a_stream_goes_on_with_the_pieces_that_are_missing(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given a stream whose first batch has failed when some of its pieces were stored and dispatched
    def run() -> bool | None:
        source = spark.readStream.schema(many(spark, 1).schema).parquet(str(tmp_path / "source"))
        how = {"checkpoint": tmp_path / "checkpoint", "trigger": {"availableNow": True}}
        return schedule_stream(source, target(store), **how).awaitTermination(PATIENCE)  # type: ignore[arg-type]

    many(spark, NUMBER).write.parquet(str(tmp_path / "source"))
    with psycopg.connect(store.url, autocommit=True) as admin:
        admin.execute(REFUSE)
        with pytest.raises(StreamingQueryException, match="refused on purpose"):
            run()
        stored = store.ids()
        assert 0 < len(stored) < NUMBER and BAD not in stored
        admin.execute('DELETE FROM "sales.timeouts"')
        admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    # When it is started again
    assert run()
    # Then each message was stored once, and the ledger knows the last batch
    assert sorted(store.ids() + stored) == IDS
    many(spark, 10).selectExpr("concat('x', id) AS id", "destination", "due", "headers", "body").write.mode(
        "append"
    ).parquet(str(tmp_path / "source"))
    assert run()
    assert len(store.ids()) == NUMBER - len(stored) + 10
    [job] = StoreOptions.of(target(store).options).pieces().jobs(10)
    assert (job.name.version, job.state, job.committed.stored) == (1, JobState.DONE, 10)


@pytest.mark.usefixtures("eight_tasks")
def test_a_batch_whose_ids_differ_each_time_is_stored_once_where_it_is_decided(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given a stream that makes its ids, and whose batch has failed when some of its pieces were stored
    many(spark, NUMBER).write.parquet(str(tmp_path / "source"))

    def run() -> bool | None:
        source = spark.readStream.schema(many(spark, 1).schema).parquet(str(tmp_path / "source"))
        how = {"checkpoint": tmp_path / "checkpoint", "trigger": {"availableNow": True}, "atomic": "job"}
        to = decided_target(store, tmp_path)
        return schedule_stream(source.withColumn("id", F.expr("uuid()")), to, **how).awaitTermination(PATIENCE)  # type: ignore[arg-type]

    with psycopg.connect(store.url, autocommit=True) as admin:
        admin.execute(REFUSE.replace(f"NEW.id = '{BAD}'", "NEW.body = '250'"))
        with pytest.raises(StreamingQueryException, match="refused on purpose"):
            run()
        assert 0 < len(store.ids()) < NUMBER
        admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    # When it is started again
    assert run()
    # Then each row was stored once
    assert sorted(int(message.message.body) for message in store.messages()) == list(range(NUMBER))
    assert files_in(tmp_path / "files") == []


@pytest.mark.usefixtures("eight_tasks")
@pytest.mark.sample(1)
def test_a_worker_of_a_stream_that_is_killed_in_a_piece_counts_once(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given a stream whose tasks are held up at a step
    many(spark, NUMBER).write.parquet(str(tmp_path / "source"))
    source = spark.readStream.schema(many(spark, 1).schema).parquet(str(tmp_path / "source"))
    job_of(store, "for its tables")
    with blocked_statements(store.url, "BEFORE UPDATE ON delayline_job_pieces") as held:
        query = schedule_stream(
            source, target(store), checkpoint=tmp_path / "checkpoint", trigger={"availableNow": True}
        )
        held.wait(2, lambda: not query.isActive)
        # When they are killed
        for process in held.senders():
            os.kill(process, signal.SIGKILL)
        held.release()
        # Then others do the work, once
        assert query.awaitTermination(PATIENCE)
    assert store.ids() == IDS


def test_of_rows_with_one_id_the_first_due_is_stored(spark: SparkSession, any_store: StoreAt) -> None:
    rows = frame(spark, "a", "b", "b", "b", "c", body=[b"1", b"2", b"1", b"3", b""])
    later = rows.selectExpr("id", "destination", "due + INTERVAL '1' DAY AS due", "headers", "body")
    done = schedule(later.union(rows), target(any_store), spark=spark)
    assert (done.stored, done.duplicates) == (3, 7)
    assert {message.id: message.message.body for message in any_store.messages()} == {"a": b"1", "b": b"1", "c": b""}


def test_a_job_at_once_is_all_or_nothing(spark: SparkSession, store: StoreAt) -> None:
    with psycopg.connect(store.url, autocommit=True) as admin:
        admin.execute(REFUSE)
        with pytest.raises(psycopg.Error, match="refused on purpose"):
            schedule(many(spark, NUMBER), target(store), run="nightly", atomic="job", spark=spark)
        assert store.ids() == []
        admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    assert schedule(many(spark, NUMBER), target(store), run="nightly", atomic="job", spark=spark).stored == NUMBER
    with pytest.raises(ConfigurationError, match="atomic='both' must be one of piece, job"):
        schedule(many(spark, 1), target(store), atomic="both", spark=spark)  # type: ignore[arg-type]


def test_a_name_is_that_of_one_job_however_it_commits(spark: SparkSession, store: StoreAt) -> None:
    # Given a job at once, which also older versions of delayline recorded, and one in pieces
    schedule(many(spark, 10), target(store), run="at once", atomic="job", spark=spark)
    schedule(many(spark, 10), target(store), run="in pieces", spark=spark)
    # Then neither is done again in the other way
    assert schedule(many(spark, 10), target(store), run="at once", spark=spark).repeated
    with pytest.raises(ConfigurationError, match="the job 'in pieces' has begun in pieces"):
        schedule(many(spark, 10), target(store), run="in pieces", atomic="job", spark=spark)


def cut(*rows: tuple[int, bool]) -> pa.RecordBatch:
    places = [
        (piece << PLACE_BITS) + (END_OF_PIECE if is_end else number) for number, (piece, is_end) in enumerate(rows)
    ]
    return pa.RecordBatch.from_pydict({PLACE: pa.array(places, pa.int64())})


def test_a_piece_whose_end_has_not_come_is_not_stored() -> None:
    # Given the rows of a task whose upstream fails in the middle of a piece
    batches = [cut((1, False), (1, True), (2, False)), cut((2, False)), cut((2, True), (3, False))]
    given = whole_pieces(iter(batches))
    # Then the pieces before it are stored, and the task fails
    assert [place >> PLACE_BITS for place in next(given).column(PLACE).to_pylist()] == [1, 1, 2, 2, 2]
    with pytest.raises(BackendUnavailable, match="in the middle of a piece"):
        next(given)
    assert list(whole_pieces(iter([]))) == []


def test_rows_of_one_place_are_put_into_the_order_that_spark_gives_texts_and_nulls(spark: SparkSession) -> None:
    """Given equal ids and ids of one hash, when pieces are read, then they are in order of ids, due times, contents."""
    ids = ("\U0001f600", "\uffff", "a", None)  # bytes of UTF-8 sort otherwise than those of UTF-16
    dues = (None, datetime(2027, 1, 1, tzinfo=UTC), datetime(1927, 1, 1, tzinfo=UTC))
    bodies = (None, b"", b"\x00", b"\xff")
    given = [
        {"id": message_id, "destination": "sales", "due": due, "headers": headers, "body": body}
        for message_id in ids
        for due in dues
        for headers in (None, "", "{}")
        for body in bodies
    ]
    random.Random(7).shuffle(given)  # noqa: S311 - the same order each time
    rows = spark.createDataFrame([tuple(row[name] for name in SOURCE_COLUMNS.names) for row in given], SOURCE_COLUMNS)
    in_order = rows.orderBy(
        *(F.col(name).asc_nulls_last() if name == "due" else F.col(name) for name in ORDER_IN_A_PLACE)
    )
    expected = in_order.toArrow().to_pylist()
    # When they have one place, others the next, and there are rows before and behind
    batch = rows.toArrow().combine_chunks().to_batches()[0]

    def at(place: int, some: pa.RecordBatch) -> pa.RecordBatch:
        return some.append_column(PLACE, pa.array([place] * some.num_rows, pa.int64()))

    first, last = at(4, batch.slice(0, 1)), at(END_OF_PIECE, batch.slice(1, 1))
    [piece] = whole_pieces(iter([first, at(5, batch), at(6, batch), last]))
    found = piece.select(SOURCE_COLUMNS.names).to_pylist()[1:-1]
    assert (found[: len(given)], found[len(given) :]) == (expected, expected)
    assert piece.slice(0, 1) == first and piece.slice(piece.num_rows - 1) == last


def decided_target(store: StoreAt, folder: Path) -> JobTarget:
    return JobTarget(store.url, endpoint=ENDPOINT, job_folder=str(folder / "files"))


def files_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.parquet"))


@pytest.mark.usefixtures("eight_tasks")
def test_a_job_that_is_decided_is_finished_by_whoever_goes_on(
    spark: SparkSession, store: StoreAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, given = decided_target(store, tmp_path), frame(spark, "a", "b", "b", "", *(f"m{n}" for n in range(NUMBER)))
    # Given a job whose driver dies before the decision
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(PieceWriter, "decide", died)
        schedule(given, to, run="nightly", atomic="job", spark=spark)
    # Then nothing is stored, and there are files only
    assert store.ids() == [] and files_in(tmp_path)
    # Given that it is run again, and fails when some of its pieces are stored
    with psycopg.connect(store.url, autocommit=True) as admin:
        admin.execute(REFUSE)
        with pytest.raises((DelaylineError, PySparkException), match="refused on purpose"):
            schedule(given, to, run="nightly", atomic="job", spark=spark)
        admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    [job] = [job for job in StoreOptions.of(store.options).pieces().jobs(10) if job.name.name == "nightly"]
    assert job.state is JobState.DECIDED and 0 < len(store.ids()) < NUMBER
    # When other rows come under its name, then those that were decided are stored, and the others refused
    with pytest.raises(DifferentInput, match="the run 'nightly' was used for another input"):
        schedule(frame(spark, "x"), to, run="nightly", atomic="job", spark=spark)
    assert store.ids() == sorted(["a", "b", *IDS])
    # And the same again tell what it has done
    again = schedule(given, to, run="nightly", atomic="job", spark=spark)
    assert (again.stored, again.duplicates, again.rejected, again.repeated) == (NUMBER + 2, 1, 1, True)
    assert files_in(tmp_path) == []


def died(*_: object, **__: object) -> None:
    raise ZeroDivisionError("dies on purpose")


def test_a_job_that_is_all_or_nothing_fails_for_an_id_that_is_taken(
    spark: SparkSession, any_store: StoreAt, tmp_path: Path
) -> None:
    to = decided_target(any_store, tmp_path)
    any_store.put("m7")
    # When ids wait already, or come twice, then nothing is stored
    for rows, taken in ((many(spark, 20), "m7"), (frame(spark, "a", "b", "c", "b"), "b")):
        with pytest.raises(DuplicateMessage, match=f"'{taken}'"):
            schedule(rows, to, on_conflict="raise", spark=spark)
        assert any_store.ids() == ["m7"]
    # And otherwise all is
    assert schedule(frame(spark, "a", "b", "c"), to, on_conflict="raise", run="nightly", spark=spark).stored == 3
    assert any_store.ids() == ["a", "b", "c", "m7"]
    # And a job goes on in the way that it began in
    schedule(frame(spark, "d"), to, atomic="job", run="weekly", spark=spark)
    with pytest.raises(ConfigurationError, match="the job 'weekly' has begun with files, to be all or nothing"):
        schedule(frame(spark, "a", "b", "c"), target(any_store), run="weekly", spark=spark)


@pytest.mark.usefixtures("eight_tasks")
def test_a_worker_that_is_killed_while_it_loads_files_counts_once(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given a job that is decided, and whose tasks are held up while they store its pieces
    job_of(store, "for its tables")
    with blocked_statements(store.url, "BEFORE UPDATE ON delayline_job_pieces") as held, ThreadPoolExecutor(1) as pool:
        to = decided_target(store, tmp_path)
        job = pool.submit(schedule, many(spark, NUMBER), to, run="nightly", atomic="job", spark=spark)
        held.wait(1, job.done)
        # When they are killed
        for process in held.senders():
            os.kill(process, signal.SIGKILL)
        held.release()
        # Then others do the work, once
        done = job.result(PATIENCE)
    assert (done.stored, done.duplicates, store.ids()) == (NUMBER, 0, IDS)
