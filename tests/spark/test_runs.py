"""A run's name belongs to one input: the same rows may come again under it, others are refused."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from tests.integration.test_rabbitmq_migration import V2
from tests.spark.broker import in_levels, with_levels
from tests.spark.stores import ENDPOINT, frame, many

from delayline import ConfigurationError
from delayline.errors import DelaylineError, DifferentInput
from delayline.rabbitmq.backend import RabbitMQBackend
from delayline.rabbitmq.message_sink import DelayLevelSink
from delayline.spark import Columns, JobTarget, schedule
from delayline.spark.errors import translated_errors

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.stores import StoreAt
    from tests.spark.tiers import Tiers

    from delayline.rabbitmq.message_sink import DelayLevelWriter


def target(store: StoreAt) -> JobTarget:
    return JobTarget(store.url, endpoint=ENDPOINT)


def prefixed(spark: SparkSession, prefix: str, number: int) -> DataFrame:
    return many(spark, number).selectExpr(f"concat('{prefix}', id) AS id", "destination", "due", "headers", "body")


def test_other_rows_under_a_name_are_refused_and_the_same_ones_repeated(spark: SparkSession, store: StoreAt) -> None:
    # Given a run with delays, a rejected row and one that comes twice
    columns = Columns(delay="wait")
    first = frame(spark, "a", "b", "b", "", wait=[3600, 7200, 7200, 60])
    done = schedule(first, target(store), columns=columns, run="nightly", spark=spark)
    assert (done.stored, done.duplicates, done.rejected) == (2, 1, 1)
    # When the same rows come again, in another order and other tasks
    again = schedule(first.orderBy("id").repartition(3), target(store), columns=columns, run="nightly", spark=spark)
    # Then the first result comes back
    assert (again.stored, again.duplicates, again.rejected, again.repeated) == (2, 1, 1, True)
    # And when other rows come under that name, more of them or as many, nothing is stored
    for rows, how in (
        (prefixed(spark, "x", 50), "it had 4 rows, and this input has 50"),
        (frame(spark, "a", "b", "c", ""), "the rows of this input have other ids"),
    ):
        with pytest.raises(DifferentInput, match=f"the run 'nightly' was used for another input: {how}"):
            schedule(rows, target(store), run="nightly", spark=spark)
    assert store.ids() == ["a", "b"]


def test_a_run_that_replaces_may_not_come_again_with_other_contents(spark: SparkSession, store: StoreAt) -> None:
    changed = frame(spark, "a", body=[b"changed"])
    for data, run in ((frame(spark, "a"), "monday"), (changed, "tuesday")):
        assert schedule(data, target(store), on_conflict="replace", run=run, spark=spark).stored == 1
    with pytest.raises(DifferentInput, match="the rows of this input have other contents"):
        schedule(changed, target(store), on_conflict="replace", run="monday", spark=spark)
    assert store.messages()[0].message.body == b"changed"


def test_the_data_source_refuses_other_rows_too(spark: SparkSession, store: StoreAt) -> None:
    def write(data: DataFrame) -> None:
        with translated_errors():
            data.write.format("delayed_messages").mode("append").options(**store.options, runId="nightly").save()

    write(frame(spark, "a", "b"))
    write(frame(spark, "b", "a"))
    with pytest.raises(DifferentInput, match="it had 2 rows, and this input has 3"):
        write(frame(spark, "a", "b", "c"))
    assert store.ids() == ["a", "b"]


@pytest.mark.slow
def test_names_that_begin_as_a_sink_or_a_stream_are_runs_of_their_own(spark: SparkSession, tiers: Tiers) -> None:
    for number, run in enumerate(("weekly", "cold weekly", "levels weekly", "stream weekly", "migration weekly 0 1")):
        cold = run == "weekly"
        data = prefixed(spark, f"{number}-", 5)
        where = tiers.target if cold else target(tiers.hot)
        for repeated in (False, True):
            done = schedule(data, where, run=run, hot_horizon=timedelta(hours=1), spark=spark)
            assert (done.cold if cold else done.stored, done.repeated) == (5, repeated), run


@pytest.mark.slow
def test_a_broker_gets_nothing_of_other_rows_under_the_name_of_a_job(
    spark: SparkSession, store: StoreAt, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreachable(DelayLevelSink):
        async def writer(self, stack: AsyncExitStack) -> DelayLevelWriter:
            raise ConfigurationError("fails on purpose")

    def job(prefix: str) -> None:
        due = "now() + INTERVAL '2' HOUR AS due"  # as of each attempt
        data = prefixed(spark, prefix, 20).selectExpr("id", "destination", due, "headers", "body")
        place = JobTarget(store.url, endpoint=ENDPOINT, delay_levels=rabbitmq_url)
        schedule(data, place, run="nightly", spark=spark)

    # Given a job that has failed before anything was published, and was done then
    with_levels(rabbitmq_url, V2)
    with monkeypatch.context() as patched:
        patched.setattr(RabbitMQBackend, "sink", lambda self, *arguments, **_: Unreachable(*arguments))
        with pytest.raises((DelaylineError, PySparkException), match="fails on purpose"):
            job("a")
    job("a")
    assert len(in_levels(rabbitmq_url, V2)) == 20
    # Then other rows are refused under its name
    with pytest.raises(DifferentInput, match="'nightly'"):
        job("b")
    assert in_levels(rabbitmq_url, V2) == []
