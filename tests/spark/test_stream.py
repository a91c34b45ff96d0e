"""Streams: written exactly once, read without loss, whatever is run again."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from tests.spark.stores import PAST, many

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.stores import StoreAt

FORMAT = "delayed_messages"


def files(spark: SparkSession, folder: Path) -> DataFrame:
    schema = "id string, destination string, due timestamp, headers string, body binary"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(str(folder))


def add(spark: SparkSession, folder: Path, first: int, number: int = 100) -> None:
    data = many(spark, first + number, 1).where(f"CAST(substr(id, 2) AS INT) >= {first}")
    data.coalesce(1).write.mode("append").parquet(str(folder))


def write(data: DataFrame, store: StoreAt, checkpoint: Path, **options: str) -> None:
    query = (
        data.writeStream.format(FORMAT)
        .options(**store.options, **options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(100)
    finally:
        query.stop()


def read(spark: SparkSession, store: StoreAt, app: str = "invoices", **options: str) -> DataFrame:
    return spark.readStream.format(FORMAT).options(**store.options, app=app, **options).load()


def keep(data: DataFrame, folder: Path, checkpoint: Path) -> None:
    """Append to files, exactly once as Spark's file sink is."""
    query = (
        data.writeStream.format("parquet")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(folder))
    )
    try:
        assert query.awaitTermination(100)
    finally:
        query.stop()


def kept(spark: SparkSession, folder: Path) -> list[str]:
    return sorted(spark.read.parquet(str(folder)).select("id").toArrow().column("id").to_pylist())


@pytest.mark.slow
def test_a_stream_is_stored_once_also_when_a_batch_comes_again(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given a stream of two batches that were stored
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    add(spark, source, 0)
    add(spark, source, 100)
    write(files(spark, source), store, checkpoint, txnAppId="loader")
    assert len(store.ids()) == 200
    # When Spark has not noted the last one, as after a crash in between
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    add(spark, source, 200)
    write(files(spark, source), store, checkpoint, txnAppId="loader")
    # Then that batch is not stored again, though ids that wait would be an error, and the next one is
    assert store.ids() == sorted(f"m{number}" for number in range(300))


def test_after_the_loss_of_its_checkpoint_a_stream_is_stored_again_rather_than_left_out(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    add(spark, source, 0)
    write(files(spark, source), store, checkpoint)
    shutil.rmtree(checkpoint)
    add(spark, source, 100)
    write(files(spark, source), store, checkpoint, onConflict="keep")
    assert store.ids() == sorted(f"m{number}" for number in range(200))


@pytest.mark.slow
def test_a_stream_removes_due_messages_from_pollers(spark: SparkSession, any_store: StoreAt, tmp_path: Path) -> None:
    # Given messages that are due, and one that is not
    any_store.put(*(f"d{number:03}" for number in range(250)), due=PAST)
    any_store.put("later")
    # When a stream reads, a hundred at a time
    keep(read(spark, any_store, maxMessagesPerTrigger="100"), tmp_path / "sink", tmp_path / "checkpoint")
    # Then it has all that was due, once, and the store the rest
    assert kept(spark, tmp_path / "sink") == [f"d{number:03}" for number in range(250)]
    assert any_store.ids() == ["later"]
    row = spark.read.parquet(str(tmp_path / "sink")).where("id = 'd007'").toArrow().to_pylist()[0]
    assert (row["destination"], row["due"], row["headers"], row["body"]) == ("billing", PAST, '{"n":"d007"}', b"d007")


@pytest.mark.slow
def test_a_stream_goes_on_where_it_was(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    sink, checkpoint = tmp_path / "sink", tmp_path / "checkpoint"
    store.put("a", "b", due=PAST)
    keep(read(spark, store), sink, checkpoint)
    store.put("c", due=datetime.now(UTC) - timedelta(days=3650))  # stored late, due long ago
    keep(read(spark, store), sink, checkpoint)
    keep(read(spark, store), sink, checkpoint)  # nothing new
    assert kept(spark, sink) == ["a", "b", "c"]
    assert taken(store) == []  # the last batch too: Spark has requested the one after it


def test_the_progress_of_a_stream_shows_what_is_left(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given more messages than a batch takes
    store.put(*(f"d{number:02}" for number in range(25)), due=PAST)
    source = read(spark, store, maxMessagesPerTrigger="10").writeStream.format("noop")
    query = source.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(100)
        # When the progress of its batches is asked for
        offsets = [
            (json.loads(one["endOffset"]), json.loads(one["latestOffset"]))
            for each in query.recentProgress
            for one in each["sources"]
        ]
    finally:
        query.stop()
    # Then the latest offset is as far ahead as messages waited
    assert [latest["claim"] - end["claim"] for end, latest in offsets][:3] == [15, 5, 0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_lost", [False, True])
def test_a_batch_that_was_not_finished_is_read_again(
    spark: SparkSession, store: StoreAt, tmp_path: Path, checkpoint_lost: bool
) -> None:
    # Given a query that fails in its second batch
    store.put(*(f"d{number:02}" for number in range(20)), due=PAST)
    sink, checkpoint = tmp_path / "sink", tmp_path / "checkpoint"

    def append(data: DataFrame, batch: int) -> None:
        data.write.mode("append").parquet(str(sink))

    def failing(data: DataFrame, batch: int) -> None:
        if batch == 1:
            raise RuntimeError("fails on purpose")
        append(data, batch)

    def run(work: Callable[[DataFrame, int], None]) -> None:
        source = read(spark, store, maxMessagesPerTrigger="10").writeStream.foreachBatch(work)
        query = source.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()

    with pytest.raises(PySparkException, match="fails on purpose"):
        run(failing)
    assert kept(spark, sink) == [f"d{number:02}" for number in range(10)]
    assert len(taken(store)) == 10
    # When it is started again, with its checkpoint or without
    if checkpoint_lost:
        shutil.rmtree(checkpoint)
    run(append)
    # Then nothing is lost and nothing comes twice
    assert kept(spark, sink) == [f"d{number:02}" for number in range(20)]


@pytest.mark.slow
def test_a_checkpoint_of_another_stream_is_refused(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given two streams of one store, of which the second has taken a message and failed
    store.put("a", due=PAST)
    keep(read(spark, store), tmp_path / "sink", tmp_path / "checkpoint")
    store.put("b", due=PAST)

    def failing(data: DataFrame, batch: int) -> None:
        raise RuntimeError("fails on purpose")

    other = read(spark, store, app="other").writeStream.foreachBatch(failing).trigger(availableNow=True)
    with pytest.raises(PySparkException, match="fails on purpose"):
        other.option("checkpointLocation", str(tmp_path / "others")).start().awaitTermination(100)
    # When it is started with the first one's checkpoint
    # Then that is reported, and its messages are not forgotten
    with pytest.raises(PySparkException, match="the checkpoint belongs to another stream"):
        keep(read(spark, store, app="other"), tmp_path / "others-sink", tmp_path / "checkpoint")
    assert "b" in taken(store)


@pytest.mark.slow
def test_a_stream_needs_a_name(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="needs a permanent name"):
        keep(read(spark, store, app=""), tmp_path / "sink", tmp_path / "checkpoint")


def taken(store: StoreAt) -> list[str]:
    import psycopg

    with psycopg.connect(store.url) as connection:
        return [one for (one,) in connection.execute("SELECT id FROM delayline_spark_taken ORDER BY id")]
