"""Batches: written messages can be read, and invalid rows are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from tests.spark.stores import DUE, frame, many

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.stores import StoreAt

FORMAT = "delayed_messages"


def write(data: DataFrame, store: StoreAt, **options: str) -> None:
    data.write.format(FORMAT).mode("append").options(**store.options, **options).save()


def read(spark: SparkSession, store: StoreAt, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format(FORMAT).options(**store.options, **options)
    return (reader if schema is None else reader.schema(schema)).load()


def test_spark_finds_the_data_source_and_reads_written_messages(spark: SparkSession, any_store: StoreAt) -> None:
    # Given text of every kind, no body and no headers
    ids = ["a", "naïve 日本 🚀"]
    data = frame(spark, *ids, headers=['{"x":"日本"}', None], body=[b"\x00\xff", None])
    # When it is written, with a name that Spark looks up
    write(data, any_store)
    # Then it waits, and is read as it was written
    assert any_store.ids() == ids
    table = read(spark, any_store).orderBy("id").toArrow()
    assert table.column("id").to_pylist() == ids
    assert table.column("due").to_pylist() == [DUE, DUE]
    assert table.column("headers").to_pylist() == ['{"x":"日本"}', ""]
    assert table.column("body").to_pylist() == [b"\x00\xff", b""]


def test_headers_and_body_may_be_left_out(spark: SparkSession, store: StoreAt) -> None:
    write(frame(spark, "a").select("due", "destination", "id"), store)
    [message] = store.messages()
    assert (message.id, message.message.body, message.message.headers) == ("a", b"", {})


def test_partitions_cover_everything_once(spark: SparkSession, store: StoreAt) -> None:
    write(many(spark, 1000), store)
    data = read(spark, store, numPartitions="7", fetchSize="33")
    ids = data.select("id").toArrow().column("id").to_pylist()
    assert sorted(ids) == sorted(f"m{number}" for number in range(1000))
    assert data.rdd.getNumPartitions() == 7


def test_partitions_are_even_though_nearly_all_is_due_in_one_hour(spark: SparkSession, store: StoreAt) -> None:
    hour = many(spark, 500).withColumn(
        "due", F.expr("timestamp_seconds(1900000000 + CAST(substr(id, 2) AS INT) % 3600)")
    )
    far = frame(spark, "far", due=pa.array([datetime(2099, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")))
    write(hour.union(far), store)
    for order in ("due", "id"):
        data = read(spark, store, numPartitions="5", partitionBy=order)
        sizes = data.groupBy(F.spark_partition_id()).count().toArrow().column("count").to_pylist()
        assert sum(sizes) == 501
        assert max(sizes) == 101


def test_a_read_has_no_more_partitions_than_connections_or_messages(spark: SparkSession, store: StoreAt) -> None:
    write(many(spark, 100), store)
    assert read(spark, store, numPartitions="7", maxConnections="3").rdd.getNumPartitions() == 3
    assert read(spark, store, numPartitions="300").rdd.getNumPartitions() == 32  # of 200 connections
    assert read(spark, store).rdd.getNumPartitions() == 1
    with pytest.raises(PySparkException, match="maxConnections='0' must be a whole number of 1"):
        read(spark, store, maxConnections="0").count()


def test_an_empty_store_has_no_rows_and_its_columns(spark: SparkSession, store: StoreAt) -> None:
    assert read(spark, store).count() == 0
    assert read(spark, store, "due timestamp").toArrow().schema.names == ["due"]


def test_columns_and_due_times_are_chosen_by_the_reader(spark: SparkSession, any_store: StoreAt) -> None:
    for hour in range(4):
        any_store.put(f"h{hour}", due=DUE + timedelta(hours=hour), destination="even" if hour % 2 == 0 else "odd")
    bounds = {"dueFrom": (DUE + timedelta(hours=1)).isoformat(), "dueTo": (DUE + timedelta(hours=3)).isoformat()}
    table = read(spark, any_store, "due timestamp, id string", **bounds).orderBy("id").toArrow()
    assert table.to_pylist() == [{"due": DUE + timedelta(hours=hour), "id": f"h{hour}"} for hour in (1, 2)]
    assert read(spark, any_store, destination="odd").select("id").count() == 2


def test_filters_are_pushed_down_when_asked_for_and_the_answer_is_the_same(spark: SparkSession, store: StoreAt) -> None:
    for hour in range(4):
        store.put(f"h{hour}", due=DUE + timedelta(hours=hour))
    condition = (
        "due > TIMESTAMP '2030-01-02 03:05:00Z' AND id IN ('h1', 'h2', 'x') AND id LIKE 'h%' AND body IS NOT NULL"
    )
    pushed = read(spark, store, filterPushdown="true").where(condition)
    plain = read(spark, store).where(condition)
    assert sorted(row["id"] for row in pushed.toArrow().to_pylist()) == ["h1", "h2"]
    assert plain.select("id").count() == 2


def test_instants_stay_the_same_whatever_the_sessions_time_zone(spark: SparkSession, store: StoreAt) -> None:
    zone = "Asia/Kathmandu"
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        instant = f"TIMESTAMP '2030-01-02 03:04:05.678901 {zone}'"
        data = spark.sql(f"SELECT 'a' AS id, 'billing' AS destination, {instant} AS due")
        expected = data.toArrow().column("due")[0].as_py()
        write(data, store)
        [message] = store.messages()
        assert message.due == expected.astimezone(UTC)
        found = read(spark, store).toArrow().column("due")[0].as_py()
        assert found.astimezone(UTC) == message.due
        pushed = read(spark, store, filterPushdown="true").where(f"due = {instant}")
        assert pushed.count() == 1
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_other_columns_are_refused_before_any_task(spark: SparkSession, store: StoreAt) -> None:
    with pytest.raises(PySparkException, match="column 'due' is date, not timestamp: use"):
        write(frame(spark, "a").selectExpr("id", "destination", "CAST(due AS DATE) AS due"), store)
    assert store.ids() == []


def test_a_bad_message_fails_the_job_and_is_named_and_nothing_is_visible(spark: SparkSession, store: StoreAt) -> None:
    bad = frame(spark, "bad", headers=['{"a":1}'])
    with pytest.raises(PySparkException, match="message 'bad': header 'a': 1 must be str to str"):
        write(frame(spark, "good").union(bad), store)
    assert store.ids() == []


def test_bad_messages_may_be_skipped(spark: SparkSession, store: StoreAt) -> None:
    write(frame(spark, "good", "", "x", headers=["{}", "{}", "{"]), store, invalid="skip")
    assert store.ids() == ["good"]


def test_ids_that_wait_already(spark: SparkSession, store: StoreAt) -> None:
    store.put("a")
    with pytest.raises(PySparkException, match="message 'a' waits already"):
        write(frame(spark, "b", "a"), store)
    assert store.ids() == ["a"]
    write(frame(spark, "b", "a"), store, onConflict="keep")
    assert store.ids() == ["a", "b"]
    write(frame(spark, "b", "a", destination=["new", "new"]), store, onConflict="replace")
    assert {message.destination for message in store.messages()} == {"new"}


def test_a_run_that_is_run_again_adds_nothing(spark: SparkSession, store: StoreAt) -> None:
    for _ in range(2):
        write(frame(spark, "a"), store, runId="nightly")
    assert store.ids() == ["a"]
    # And another input under its name is refused
    with pytest.raises(PySparkException, match="the run 'nightly' was used for another input"):
        write(frame(spark, "a", "b"), store, runId="nightly")
    assert store.ids() == ["a"]


def test_modes_other_than_append_are_refused(spark: SparkSession, store: StoreAt) -> None:
    for mode in ("errorifexists", "overwrite"):
        with pytest.raises(PySparkException, match=r"append|UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
            frame(spark, "a").write.format(FORMAT).mode(mode).options(**store.options).save()
    assert store.ids() == []


def test_a_password_is_read_on_the_machine_that_needs_it(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p@ss/word\n")
    write(frame(spark, "a"), store, passwordFile=str(tmp_path / "secret"))
    assert store.ids() == ["a"]


def test_due_times_at_the_edges(spark: SparkSession, store: StoreAt) -> None:
    edges = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)]
    write(frame(spark, "first", "last", due=pa.array(edges, pa.timestamp("us", "UTC"))), store)
    assert [message.due for message in store.messages()] == edges
    assert read(spark, store).orderBy("due").toArrow().column("due").to_pylist() == edges


def test_a_table_of_a_catalog_is_read_and_inserted_into(spark: SparkSession, any_store: StoreAt) -> None:
    # Given a table that was created with a store's options, and one with some columns
    any_store.put("x")
    options = ", ".join(f"{name} '{value}'" for name, value in any_store.options.items())
    spark.sql(f"CREATE TABLE reminders USING {FORMAT} OPTIONS ({options})")
    spark.sql(f"CREATE TABLE ids USING {FORMAT} OPTIONS ({options}, columns 'id, due', onConflict 'keep')")
    try:
        # When a message is inserted, and others are left out because their ids wait
        body = "'{}' AS headers, CAST('hello' AS BINARY) AS body"
        values = f"'billing' AS destination, TIMESTAMP '2030-01-01 00:00:00Z' AS due, {body}"
        spark.sql(f"INSERT INTO reminders SELECT 'y' AS id, {values}")
        # Then both tables have it
        assert spark.sql("SELECT id FROM ids ORDER BY id").toArrow().column("id").to_pylist() == ["x", "y"]
        [row] = spark.sql("SELECT * FROM reminders WHERE id = 'y'").toArrow().to_pylist()
        assert (row["destination"], row["body"]) == ("billing", b"hello")
        assert spark.table("ids").columns == ["id", "due"]
        with pytest.raises(PySparkException, match="can only append"):
            spark.sql(f"INSERT OVERWRITE reminders SELECT 'z' AS id, {values}")
    finally:
        spark.sql("DROP TABLE reminders")
        spark.sql("DROP TABLE ids")
    assert any_store.ids() == ["x", "y"]


def test_a_table_with_a_password_or_without_its_options_is_refused(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="the URL of a table may have no password"):
        spark.sql(f"CREATE TABLE t USING {FORMAT} OPTIONS (url 'postgresql://me:secret@host/db', endpoint 'sales')")
    spark.sql(f"CREATE TABLE t (id STRING) USING {FORMAT} OPTIONS (url 'postgresql://me@host/db', endpoint 'sales')")
    try:
        with pytest.raises(PySparkException, match="To CREATE TABLE, name no columns"):
            spark.table("t").count()
    finally:
        spark.sql("DROP TABLE t")


def test_names_of_columns_may_be_in_any_case(spark: SparkSession, store: StoreAt) -> None:
    # Given columns named as in another system
    write(frame(spark, "a").withColumnsRenamed({"id": "ID", "due": "Due", "body": "BODY"}), store)
    # Then they are written, and read under the names that are asked for
    table = read(spark, store, "Due timestamp, ID string", filterPushdown="true").where("id = 'a'").toArrow()
    assert table.to_pylist() == [{"Due": DUE, "ID": "a"}]
    with pytest.raises(PySparkException, match=r"there is no column 'ids' to read"):
        read(spark, store, "ids string").count()


def test_columns_are_chosen_by_an_option(spark: SparkSession, store: StoreAt) -> None:
    store.put("a")
    assert read(spark, store, columns="due, id").toArrow().to_pylist() == [{"due": DUE, "id": "a"}]
    with pytest.raises(PySparkException, match="there is no column 'when' to read; choose from id, destination, due"):
        read(spark, store, columns="when")


def test_a_misspelt_option_is_refused(spark: SparkSession, store: StoreAt) -> None:
    with pytest.raises(PySparkException, match="no option 'onconflit': did you mean 'onConflict'"):
        write(frame(spark, "a"), store, onConflit="keep")
    with pytest.raises(PySparkException, match="no option 'destinations': did you mean 'destination'"):
        read(spark, store, destinations="billing").count()
    with pytest.raises(PySparkException, match=r"no option 'zzz'. The options are url, endpoint"):
        read(spark, store, zzz="1").count()
    assert store.ids() == []
