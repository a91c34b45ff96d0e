"""Files and tables become delayed messages; a row that cannot be one is reported with its file and line."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from tests.spark.stores import DUE, frame, many

from delayline import ConfigurationError, DuplicateMessage
from delayline.errors import BackendUnusable
from delayline.spark.errors import translated_errors
from delayline.spark.schedule import JobTarget, schedule, schedule_stream
from delayline.spark.sources import Columns, prepared

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.spark.stores import StoreAt


def target(store: StoreAt) -> JobTarget:
    return JobTarget(store.url, endpoint="sales")


def refused(rows: DataFrame) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in rows.toArrow().to_pylist()}


@pytest.mark.slow
def test_parquet_is_scheduled_once_however_often_it_is_run(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given a file of messages
    file = tmp_path / "reminders.parquet"
    many(spark, 1000).write.parquet(str(file))
    # When it is scheduled twice as one run, and once as another
    first = schedule(file, target(store), run="nightly", spark=spark)
    again = schedule(file, target(store), run="nightly", spark=spark)
    other = schedule(file, target(store), spark=spark)
    # Then each message is pending once
    assert (first.stored, first.duplicates, first.rejected, first.repeated) == (1000, 0, 0, False)
    assert (again.stored, again.repeated) == (1000, True)
    assert (other.stored, other.duplicates) == (0, 1000)
    assert len(store.ids()) == 1000
    assert first.rejected_rows.count() == 0


def test_csv_with_faults_keeps_them_apart_with_their_lines(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given a file in which four of six rows cannot be messages
    file = tmp_path / "reminders.csv"
    file.write_text(
        "id,queue,at,body\n"
        "a,billing,2030-01-02T03:04:05.678901Z,hello\n"
        '"b, quoted",billing,2030-01-02T04:04:05.678901+01:00,"say ""hi"""\n'
        ",billing,2030-01-02T03:04:05Z,x\n"
        "\n"
        "c,billing,2030-01-02T03:04:05,naive\n"
        "d,billing,tomorrow,x\n"
        "e,billing\n"
    )
    # When it is scheduled
    result = schedule(file, target(store), columns=Columns(destination="queue", due="at"), spark=spark)
    # Then the others wait
    assert (result.stored, result.rejected) == (2, 4)
    found = {message.id: message for message in store.messages()}
    assert {message.due for message in found.values()} == {DUE}
    assert found["b, quoted"].message.body == b'say "hi"'
    # And each fault is reported with its place
    rows = sorted(result.rejected_rows.toArrow().to_pylist(), key=lambda row: row["line"])
    assert [row["line"] for row in rows] == [4, 6, 7, 8]
    assert all(row["file"].endswith("reminders.csv") for row in rows)
    assert [row["id"] for row in rows[:3]] == [None, "c", "d"] and rows[3]["row"] == "e,billing"
    reasons = [row["reason"] for row in rows]
    assert "id must be a text" in reasons[0]
    assert reasons[1] == "at cannot be read: 2030-01-02T03:04:05"
    assert reasons[2] == "at cannot be read: tomorrow"


def test_json_lines_with_delays_count_from_one_moment(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    file = tmp_path / "reminders.jsonl"
    file.write_text(
        '{"id": "a", "after": 3600, "headers": {"x": "y"}, "body": {"total": 3}}\n'
        '{"id": "b", "after": "3600.5", "body": "text"}\n'
        '{"id": "c", "after": -1}\n'
        '{"id": "d", "after": 1, "headers": {"n": 1}}\n'
        "not json\n"
    )
    before = datetime.now(UTC)
    result = schedule(file, target(store), columns=Columns(to="billing", delay="after"), spark=spark)
    found = {message.id: message for message in store.messages()}
    assert sorted(found) == ["a", "b"] and result.rejected == 3
    assert found["b"].due - found["a"].due == timedelta(seconds=0.5)
    assert before - timedelta(seconds=5) < found["a"].due - timedelta(hours=1) < datetime.now(UTC)
    assert (found["a"].message.headers["x"], found["a"].message.body) == ("y", b'{"total":3}')
    assert found["b"].message.body == b"text"
    rows = {row["line"]: row["reason"] for row in result.rejected_rows.toArrow().to_pylist()}
    assert rows[3] == "after cannot be read: -1"
    assert "header 'n': 1 must be str to str" in rows[4]
    assert sorted(rows) == [3, 4, 5]


def test_a_stream_is_scheduled_batch_by_batch(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    many(spark, 100).write.parquet(str(tmp_path / "source"))
    source = spark.readStream.schema(many(spark, 1).schema).parquet(str(tmp_path / "source"))
    for _ in range(2):
        query = schedule_stream(
            source, target(store), checkpoint=tmp_path / "checkpoint", trigger={"availableNow": True}
        )
        assert query.awaitTermination(100)
    assert len(store.ids()) == 100


def test_failures_are_delaylines_own_without_a_stack(
    spark: SparkSession, store: StoreAt, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store.put("a")
    with pytest.raises(DuplicateMessage) as failure:
        schedule(frame(spark, "a"), target(store), on_conflict="raise", spark=spark)
    assert str(failure.value).startswith("message 'a' waits already") and "\n" not in str(failure.value)
    with pytest.raises(BackendUnusable, match="run `delayline setup` first"):
        schedule(frame(spark, "a"), JobTarget(store.url, endpoint="nobody"), spark=spark)
    with pytest.raises(ConfigurationError, match="PATH_NOT_FOUND") as missing:
        schedule(tmp_path / "nowhere.parquet", target(store), spark=spark)
    assert "\n" not in str(missing.value)
    assert "stacktrace" not in capfd.readouterr().err
    broken = many(spark, 10).selectExpr(
        "raise_error('fails on purpose') AS id", "destination", "due", "headers", "body"
    )
    with pytest.raises(ConfigurationError, match="fails on purpose"):
        schedule(broken, target(store), spark=spark)


def test_files_that_do_not_go_together_are_refused(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given CSV of which one file has its columns in another order
    csv = tmp_path / "csv"
    csv.mkdir()
    (csv / "a.csv").write_text("id,destination,due\na,billing,2030-01-01T00:00:00Z\n")
    (csv / "b.csv").write_text("destination,id,due\nbilling,b,2030-01-01T00:00:00Z\n")
    # And Parquet of which one file has times and the other one texts
    parquet = tmp_path / "parquet"
    data = many(spark, 10).coalesce(1)
    data.write.parquet(str(parquet))
    data.withColumn("due", data.due.cast("string")).write.mode("append").parquet(str(parquet))
    # Then each is reported in a line, and nothing is stored
    with pytest.raises(ConfigurationError, match=r"b\.csv' begins with 'destination,id,due', and .*a\.csv'"):
        schedule(csv, target(store), form="csv", spark=spark)
    with pytest.raises(ConfigurationError, match=r"(?i)parquet") as caught:
        schedule(parquet, target(store), form="parquet", spark=spark)
    assert "\n" not in str(caught.value) and "\tat " not in str(caught.value)
    assert store.ids() == []
    # And a folder without rows is accepted, and one without files is named in the error
    many(spark, 0).write.parquet(str(tmp_path / "none"))
    assert schedule(tmp_path / "none", target(store), form="parquet", spark=spark).stored == 0
    (tmp_path / "nothing").mkdir()
    for form, said in (("csv", "is empty"), ("parquet", "UNABLE_TO_INFER_SCHEMA")):
        with pytest.raises(ConfigurationError, match=said):
            schedule(tmp_path / "nothing", target(store), form=form, spark=spark)


def test_executors_without_delayline_are_reported(
    spark: SparkSession, store: StoreAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given executors whose Python has Spark's packages, and not ours
    packages = Path(pyspark.__file__).parents[1]
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S -m pyspark.daemon pyspark.worker\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    # Then the job says what to install there
    cold = JobTarget(store.url, endpoint="sales", cold_tier=str(tmp_path / "cold"))
    with pytest.raises(ConfigurationError, match="the executors cannot import 'delayline': install") as caught:
        schedule(frame(spark, "a"), cold, spark=spark)
    assert "\n" not in str(caught.value)
    assert store.ids() == []


def test_columns_that_cannot_be_a_messages_are_refused(spark: SparkSession, store: StoreAt) -> None:
    data = frame(spark, "a")
    for columns, said in (
        (Columns(id="key"), "no column 'key', only id, destination, due"),
        (Columns(due="day"), "no column 'day'"),
        (Columns(due="body"), "column 'body' is binary, which is not an instant"),
        (Columns(delay="body"), "column 'body' is binary, which is not a delay"),
        (Columns(headers="due"), "column 'due' is timestamp: headers are"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            schedule(data, target(store), columns=columns, spark=spark)


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_times_of_a_place_are_the_same_instants_in_every_session(
    spark: SparkSession, store: StoreAt, zone: str
) -> None:
    # Given nine o'clock in Berlin in winter, in columns of all types, in a session of another zone
    rows = spark.sql(
        "SELECT 'a' AS id, timestamp_ntz'2099-01-10 09:00:00.5' AS ntz, date'2099-01-10' AS day, "
        "' 2099-01-10T09:00:00.5 ' AS text, '2099-01-10' AS day_text, '2099-01-10 09:00:00+05:30' AS offset, "
        "'2099-01-10 09:00 America/New_York' AS named, timestamp_ntz'2026-03-29 02:30:00' AS skipped, "
        "timestamp_ntz'2026-10-25 02:30:00' AS twice, 4071513600L AS number, 4071513600.0000001BD AS fraction, "
        "'4071513600123' AS digits, 'soon' AS word, 9223372036854775807L AS huge"
    )
    nine = datetime(2099, 1, 10, 8, tzinfo=UTC)
    half, midnight = timedelta(seconds=0.5), datetime(2099, 1, 9, 23, tzinfo=UTC)
    berlin, epoch = {"time_zone": "Europe/Berlin"}, datetime(2099, 1, 8, tzinfo=UTC)
    wanted = [
        ("ntz", berlin, nine + half),
        ("day", berlin, midnight),
        ("text", berlin, nine + half),
        ("day_text", berlin, midnight),
        ("offset", berlin, datetime(2099, 1, 10, 3, 30, tzinfo=UTC)),
        ("named", berlin, None),
        ("skipped", berlin, datetime(2026, 3, 29, 1, 30, tzinfo=UTC)),
        ("twice", berlin, datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
        ("ntz", {"time_zone": "+05:30"}, datetime(2099, 1, 10, 3, 30, tzinfo=UTC) + half),
        ("number", {"epoch": "seconds"}, epoch),
        ("fraction", {"epoch": "seconds"}, epoch + timedelta(microseconds=1)),  # never early
        ("digits", {"epoch": "milliseconds"}, epoch + timedelta(milliseconds=123)),
        ("word", {"epoch": "seconds"}, None),
        ("huge", {"epoch": "milliseconds"}, None),
    ]
    # When each is read
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        parts = [
            prepared(rows, Columns(due=name, to="billing", **how), DUE).withColumn("place", F.lit(place))
            for place, (name, how, _) in enumerate(wanted)
        ]
        found = reduce(DataFrame.unionByName, parts).orderBy("place").toArrow()
        # Then it is that instant
        for (name, how, instant), due in zip(wanted, found.column("due").to_pylist(), strict=True):
            assert due == instant, (name, how)
        # And so is what the error of the data source advises
        advised = rows.selectExpr(
            "CAST(concat(ntz, ' Europe/Berlin') AS TIMESTAMP)",
            "CAST(concat(day, ' 00:00:00 Europe/Berlin') AS TIMESTAMP)",
        )
        assert [column[0].as_py() for column in advised.toArrow().columns] == [nine + half, midnight]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_due_columns_of_other_types_are_refused_with_the_right_advice(spark: SparkSession, store: StoreAt) -> None:
    rows = spark.sql(
        "SELECT 'a' AS id, 'billing' AS destination, timestamp_ntz'2099-01-10 09:00:00' AS ntz, "
        "date'2099-01-10' AS day, 4071456000L AS number, timestamp'2099-01-10T09:00:00Z' AS instant"
    )
    for columns, said in (
        (Columns(due="ntz"), r"use Columns\(due='ntz', time_zone='Europe/Berlin'\)"),
        (Columns(due="day"), r"use Columns\(due='day', time_zone='Europe/Berlin'\)"),
        (Columns(due="number"), r"use Columns\(due='number', epoch='seconds'\) or epoch='milliseconds'"),
        (Columns(due="number", time_zone="UTC"), "epoch is for numbers, and time_zone for times"),
        (Columns(due="day", epoch="seconds"), "epoch is for numbers, and time_zone for times"),
        (Columns(due="instant", time_zone="UTC"), "is a timestamp, an instant in every zone: leave time_zone out"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            schedule(rows, target(store), columns=columns, spark=spark)
    for name, advised in (("ntz", "' Europe/Berlin'"), ("day", "' 00:00:00 Europe"), ("number", "timestamp_millis")):
        data = rows.selectExpr("id", "destination", f"{name} AS due")
        with pytest.raises(ConfigurationError, match=advised), translated_errors():
            data.write.format("delayed_messages").mode("append").options(**store.options).save()


def test_other_sources_and_stores_are_refused(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ConfigurationError, match="give form="):
        schedule(tmp_path, target(store), spark=spark)
    with pytest.raises(ConfigurationError, match="is empty"):
        schedule(tmp_path / "empty.csv", target(store), spark=spark)
    with pytest.raises(ConfigurationError, match="memory: is not a store"):
        schedule(frame(spark, "a"), JobTarget("memory:", endpoint="sales"), spark=spark)
    with pytest.raises(ConfigurationError, match=r"use schedule\(\)"):
        schedule_stream(frame(spark, "a"), target(store), checkpoint=tmp_path / "checkpoint")


def test_fields_of_structs_are_columns_and_names_follow_the_case_setting(spark: SparkSession, store: StoreAt) -> None:
    # Given orders as structs, one of whose columns has a dot in its name
    orders = frame(spark, "a", "b").selectExpr(
        "named_struct('Key', id, 'remind', named_struct('at', due), 'text', 'hello') AS order",
        "destination AS `to.queue`",
    )
    columns = Columns(id="Order.key", due="order.remind.at", destination="TO.queue", body="order")
    # When their fields are scheduled, in another case
    done = schedule(orders, target(store), columns=columns, spark=spark)
    # Then each is a message with the whole order as its body
    assert (done.stored, done.rejected) == (2, 0)
    assert {(message.id, message.due, message.destination) for message in store.messages()} == {
        ("a", DUE, "billing"),
        ("b", DUE, "billing"),
    }
    assert all(b'"text":"hello"' in message.message.body for message in store.messages())
    # And in a session that tells cases apart they are refused
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(ConfigurationError, match=r"no column 'Order\.key', only order, to\.queue"):
            schedule(orders, target(store), columns=columns, spark=spark)
        exact = Columns(id="order.Key", due="order.remind.at", destination="to.queue")
        assert schedule(orders, target(store), columns=exact, spark=spark).duplicates == 2
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_fields_of_objects_are_columns_of_json_lines(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text(
        '{"order": {"id": "a", "at": {"due": "2030-01-02T03:04:05Z"}}}\n'
        '{"order": {"at": {"due": "2030-01-02T03:04:05Z"}}, "order.id": "b"}\n'
        '{"order": {"id": "c"}}\n'
    )
    columns = Columns(id="order.id", due="order.at.due", to="billing", body="order")
    done = schedule(file, target(store), columns=columns, spark=spark)
    assert (done.stored, done.rejected, store.ids()) == (2, 1, ["a", "b"])
    assert [row["line"] for row in done.rejected_rows.toArrow().to_pylist()] == [3]
    assert store.messages()[0].message.body.startswith(b'{"id":"a"')


def test_a_folder_whose_name_has_no_ending_is_asked_for_its_format(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    many(spark, 3).write.parquet(str(tmp_path / "orders"))
    with pytest.raises(ConfigurationError, match=r"/orders' does not end in a format.*form='parquet'.*--format"):
        schedule(tmp_path / "orders", target(store), spark=spark)
    assert schedule(tmp_path / "orders", target(store), form="parquet", spark=spark).stored == 3


def test_jobs_say_on_spark_s_pages_and_in_metrics_what_they_do(spark: SparkSession, store: StoreAt) -> None:
    # Given five rows, one of which waits already, one twice, and one cannot be a message
    store.put("a")
    rows, seen = frame(spark, "a", "b", "b", "c", ""), [Observation(f"{number}") for number in range(3)]
    # When they are scheduled, again as another job with all at once, and that again
    schedule(rows, target(store), observation=seen[0], spark=spark)
    for observation in seen[1:]:
        schedule(rows, target(store), atomic="job", run="whole", observation=observation, spark=spark)
    # Then each has its counts as metrics
    first, *others = [observation.get for observation in seen]
    assert first.pop("bytes") > 0
    assert first == {"rows": 5, "stored": 2, "duplicates": 2, "rejected": 1, "sent": 0, "cold": 0}
    assert others == [{"rows": 5, "stored": 0, "duplicates": 4, "rejected": 1, "sent": 0, "cold": 0, "bytes": None}] * 2
    # And its Spark jobs a description and a tag, which are gone with it
    found = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    jobs = [found.apply(number) for number in range(found.size())]
    described = [job.description().get() for job in jobs if job.description().isDefined()]
    assert (
        "schedule: delayed messages of sales" in described and "schedule whole: delayed messages of sales" in described
    )
    assert spark.getTags() == set()
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None
