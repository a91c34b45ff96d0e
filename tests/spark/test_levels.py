"""Scheduling to RabbitMQ's delay levels: near messages go there, confirmed; far ones to a store or files."""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.test_rabbitmq_migration import V2
from tests.spark.broker import in_levels
from tests.spark.stores import ENDPOINT, StoreAt, frame

from delayline import ConfigurationError, Headers
from delayline.bulk.jobs import JobState
from delayline.errors import BackendUnusable, DelaylineError, DifferentInput
from delayline.message import to_wire_time
from delayline.rabbitmq.backend import RabbitMQBackend
from delayline.rabbitmq.message_sink import DelayLevelSink
from delayline.spark import JobTarget, placement, schedule, schedule_stream
from delayline.spark.options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AsyncExitStack
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.tiers import Tiers

    from delayline.bulk.jobs import Job
    from delayline.rabbitmq.message_sink import DelayLevelWriter

HOUR = timedelta(hours=1)


def beside(store: StoreAt, broker: str, **more: Any) -> JobTarget:  # noqa: ANN401 - JobTarget's own
    return JobTarget(store.url, endpoint=ENDPOINT, delay_levels=broker, **more)


def job_of(store: StoreAt) -> Job:
    """Return the only job, as `delayline spark jobs` lists it."""
    [job] = StoreOptions.of(store.options).pieces().jobs(10)
    return job


def sent(broker: str) -> Counter[str]:
    """Take everything out of the levels, and return how often each id was there."""
    return Counter(one.header.properties.message_id for one in in_levels(broker, V2))


def numbered(spark: SparkSession, number: int) -> DataFrame:
    """Return messages of which every tenth is far; tasks make them."""
    return spark.range(0, number, 1, 4).selectExpr(
        "concat('m', id) AS id",
        "'billing' AS destination",
        "now() + IF(id % 10 = 0, INTERVAL '20' DAY, INTERVAL '2' HOUR) AS due",
        "CAST(CAST(id AS STRING) AS BINARY) AS body",
    )


@pytest.mark.slow
def test_near_messages_go_to_the_levels_and_far_ones_to_the_store(
    spark: SparkSession, tiers: Tiers, broker: str
) -> None:
    # Given messages near and far, some of which can go nowhere, and one that waits already
    now = datetime.now(UTC)
    due = {"near": HOUR, "twice": HOUR, "waits": HOUR, "far": 48 * HOUR, "nowhere": HOUR, "bad": HOUR}
    ids = [*due, "twice"]
    tiers.hot.put("waits", due=now + 72 * HOUR)
    data = frame(
        spark,
        *ids,
        due=pa.array([now + due[one] for one in ids], pa.timestamp("us", "UTC")),
        destination=["nowhere" if one == "nowhere" else "billing" for one in ids],
        headers=["{" if one == "bad" else "{}" for one in ids],
    )
    target = beside(tiers.hot, broker, cold_tier=str(tiers.folder))
    # When they are scheduled, twice as one run
    done, again = (schedule(data, target, run="nightly") for _ in range(2))
    # Then each waits in one place, with the headers of a send
    assert (done.sent, done.stored, done.cold, done.duplicates, done.rejected) == (2, 0, 1, 2, 2)
    there = {one.header.properties.message_id: one.header.properties for one in in_levels(broker, V2)}
    assert sorted(there) == ["near", "twice"]
    headers = there["near"].headers
    assert headers[Headers.DELIVER_AT] == to_wire_time(now + HOUR) and headers[Headers.ORIGINATING_ENDPOINT] == ENDPOINT
    assert tiers.hot.ids() == ["waits"] and tiers.ids() == ["far", "waits"]
    # And rows that went nowhere are reported, by the repeated run too
    assert (again.sent, again.cold, again.duplicates, again.rejected, again.repeated) == (2, 1, 2, 2, True)
    for one in (done, again):
        reasons = {row["id"]: row["reason"] for row in one.rejected_rows.toArrow().to_pylist()}
        assert reasons["nowhere"].startswith("queue 'nowhere' does not exist") and "not JSON" in reasons["bad"]
        assert len(reasons) == 2


@pytest.mark.slow
def test_a_job_that_dies_goes_on_where_the_broker_has_confirmed(
    spark: SparkSession, store: StoreAt, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, at_once = 3000, 12
    monkeypatch.setattr(placement, "SENT_AT_ONCE", at_once)
    (tmp_path / "broken").touch()
    broken, killed = str(tmp_path / "broken"), str(tmp_path / "killed")

    def is_there(path: str) -> bool:
        return os.access(path, os.F_OK)

    class Dying(DelayLevelSink):
        async def writer(self, stack: AsyncExitStack) -> DelayLevelWriter:
            session = await super().writer(stack)
            deliver, delivered = session.deliver, 0

            async def deliver_and_die(messages: pa.RecordBatch) -> Mapping[int, str]:
                nonlocal delivered
                refused, delivered = await deliver(messages), delivered + 1
                if delivered == 20 and not is_there(killed):
                    os.close(os.open(killed, os.O_CREAT))
                    os.kill(os.getpid(), signal.SIGKILL)
                if delivered == 40 and is_there(broken):
                    raise ConnectionError("fails on purpose")
                return refused

            session.deliver = deliver_and_die  # type: ignore[method-assign]
            return session

    monkeypatch.setattr(RabbitMQBackend, "sink", lambda self, *arguments, **_: Dying(*arguments))
    # Given a job of which a worker is killed, and which fails for good, between the broker's confirm and the record
    with pytest.raises(DelaylineError, match="fails on purpose"):
        schedule(numbered(spark, numbers), beside(store, broker), run="nightly")
    before, job = sent(broker), job_of(store)
    assert job.state is JobState.OPEN and 0 < job.committed.sent < before.total() < numbers
    assert len(store.ids()) == job.committed.stored > 0
    # When other rows come under its name, they are refused
    with pytest.raises(DifferentInput, match="the job 'nightly' has begun with another input"):
        schedule(numbered(spark, numbers).withColumn("id", prefixed(1)), beside(store, broker), run="nightly")
    assert not sent(broker)
    # When it is run again
    (tmp_path / "broken").unlink()
    done = schedule(numbered(spark, numbers), beside(store, broker), run="nightly")
    # Then nothing is missing, and only what was under way in a task that was killed or failed arrived twice
    after = sent(broker)
    assert (done.sent, done.stored, done.duplicates) == (numbers * 9 // 10, numbers // 10, 0)
    assert len(before.keys() | after.keys()) == done.sent and len(store.ids()) == done.stored
    assert 0 < (before + after).total() - done.sent <= 2 * 3 * at_once
    assert (job_of(store).state, job_of(store).committed.sent) == (JobState.DONE, done.sent)
    # And nothing is left to do
    again = schedule(numbered(spark, numbers), beside(store, broker), run="nightly")
    assert (again.repeated, again.sent, again.stored) == (True, done.sent, done.stored)
    assert not sent(broker)


@pytest.mark.slow
def test_a_job_that_has_sent_its_near_messages_goes_on_with_the_files(
    spark: SparkSession, tiers: Tiers, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that fails when its near messages are in the levels, and the far ones have to be registered
    target = beside(tiers.hot, broker, cold_tier=str(tiers.folder))

    def fail(began: float) -> None:
        raise ConnectionError("fails on purpose")

    with monkeypatch.context() as patched, pytest.raises(ConnectionError, match="fails on purpose"):
        patched.setattr(placement, "check_job_duration", fail)
        schedule(numbered(spark, 30), target, run="nightly")
    assert (sent(broker).total(), tiers.ids(), job_of(tiers.hot).state) == (27, [], JobState.OPEN)
    # When it is run again
    done = schedule(numbered(spark, 30), target, run="nightly")
    # Then these alone are placed
    assert (done.sent, done.cold, done.duplicates, done.repeated) == (27, 3, 0, False)
    assert (len(tiers.ids()), job_of(tiers.hot).state) == (3, JobState.DONE)
    assert not sent(broker)


def test_a_broker_alone_gets_everything_it_can_hold(
    spark: SparkSession, store: StoreAt, broker: str, rabbitmq_url: str
) -> None:
    now = datetime.now(UTC)
    due = [now - HOUR, now + HOUR, now + timedelta(days=3000), now + timedelta(days=3200)]
    data = frame(spark, "past", "near", "far", "further", due=pa.array(due, pa.timestamp("us", "UTC")))
    target = JobTarget(broker, endpoint=ENDPOINT)
    done = schedule(data, target)
    assert (done.sent, done.stored, done.rejected) == (3, 0, 1)
    assert [row["id"] for row in done.rejected_rows.toArrow().to_pylist()] == ["further"]
    assert sorted(sent(broker)) == ["far", "near"]
    wrong: list[tuple[JobTarget, dict[str, Any], str]] = [
        (target, {"run": "nightly"}, "needs a database that records it"),
        (target, {"on_conflict": "replace"}, "needs a search by id, and delay levels have none"),
        (beside(store, broker), {"atomic": "job"}, "cannot be had from a broker"),
        (JobTarget(broker, endpoint=ENDPOINT, cold_tier="cold"), {}, "needs a database for its catalog"),
        (JobTarget(broker, endpoint=ENDPOINT, delay_levels=broker), {}, "are two brokers"),
        (beside(store, f"{rabbitmq_url}?delays=v1"), {}, "there are no complete delay levels"),
    ]
    for how, settings, said in wrong:
        with pytest.raises((ConfigurationError, BackendUnusable), match=said):
            schedule(data, how, **settings)
    assert not sent(broker)


@pytest.mark.slow
def test_a_stream_goes_to_levels_and_files_each_batch_once(
    spark: SparkSession, tiers: Tiers, broker: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", beside(tiers.hot, broker, cold_tier=str(tiers.folder))

    def run_to_the_end() -> None:
        stream = spark.readStream.schema(numbered(spark, 0).schema).parquet(str(source))
        how: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "trigger": {"availableNow": True}}
        query = schedule_stream(stream, target, **how)
        query.awaitTermination(120)
        assert query.exception() is None

    # Given a stream of which each run brings more
    total: Counter[str] = Counter()
    for batch in range(2):
        numbered(spark, 30).withColumn("id", prefixed(batch)).write.mode("append").parquet(str(source))
        run_to_the_end()
        total += sent(broker)
    # Then each message is in one place, once
    assert len(total) == total.total() == 54
    assert len(tiers.ids()) == 6 and tiers.hot.ids() == []


def prefixed(batch: int) -> Any:  # noqa: ANN401 - a column
    from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

    return F.concat(F.lit(f"b{batch}-"), "id")
