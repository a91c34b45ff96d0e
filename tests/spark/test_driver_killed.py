"""The driver of a job is killed at each step: uncommitted work has no effect, and committed work is complete."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import pytest
from tests.eventually import eventually
from tests.spark.driver_process import run_until_killed
from tests.spark.killed_drivers import (
    COMMIT,
    EXPORT,
    PIECES,
    PROMOTION,
    UNTIL,
    dispatching,
    exporting,
    promoting,
    scheduling,
    scheduling_pieces,
)
from tests.spark.stores import ENDPOINT, PAST, many
from tests.spark.test_dispatch import arrived, running, settings
from tests.spark.tiers import spread

from delayline import SqlDelayedMessageStore
from delayline.spark import Dispatcher, JobTarget, export, read_journal, schedule

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.spark.stores import StoreAt
    from tests.spark.tiers import Tiers

NUMBER: Final = 500
IDS: Final = sorted(f"m{number}" for number in range(NUMBER))


@pytest.mark.sample(1, group="Spark kills")
def test_scheduling_and_promoting(spark: SparkSession, tiers: Tiers, tmp_path: Path) -> None:
    # Given messages in files
    source = tmp_path / "source.parquet"
    spread(spark, NUMBER, hours=4).write.parquet(str(source))
    # When the driver that schedules them is killed, at a later step each time
    for step in COMMIT:
        run_until_killed(spark, scheduling, step, tiers.target, str(source))
        # Then everything or nothing has happened
        held = sum(one.messages for one in tiers.tier.files()[0])
        assert (held, tiers.hot.ids()) == (NUMBER if step == "committed" else 0, []), step
    assert tiers.schedule(source, run="campaign", spark=spark).repeated
    # When the one that promotes them is killed
    for step in PROMOTION:
        run_until_killed(spark, promoting, step, tiers.target)
        held = sum(one.messages for one in tiers.tier.files()[0])
        assert (held, len(tiers.hot.ids())) == ((0, NUMBER) if step == "promoted" else (NUMBER, 0)), step
    # Then nothing is left to do, and every message is there once
    assert tiers.promote(UNTIL).files == 0
    assert tiers.hot.ids() == IDS


@pytest.mark.slow
def test_scheduling_to_a_store_alone(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given messages, and drivers that are killed, each at a later step
    source, target = tmp_path / "source.parquet", JobTarget(store.url, endpoint=ENDPOINT)
    many(spark, NUMBER).write.parquet(str(source))
    for step in PIECES:
        run_until_killed(spark, scheduling_pieces, step, target, str(source))
        # Then its pieces are stored, or it has not come to them
        assert len(store.ids()) == (0 if step == "begun" else NUMBER), step
    # And a repeated run has nothing left to do
    done = schedule(source, target, run="campaign", spark=spark)
    assert (done.stored, done.repeated, len(store.ids())) == (NUMBER, True, NUMBER)


@pytest.mark.slow
def test_exporting(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given a journal
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    target = JobTarget(store.url, endpoint=ENDPOINT)
    schedule(many(spark, NUMBER), target, spark=spark)
    # When the driver that exports it is killed, at a later step each time
    for step in EXPORT:
        run_until_killed(spark, exporting, step, target, str(tmp_path))
        # Then everything or nothing counts
        found = read_journal(target, tmp_path, spark=spark).count()
        assert found == (NUMBER if step == "finished" else 0), step
    assert export(target, tmp_path, spark=spark).entries == 0


@pytest.mark.parametrize("step", ["begin", "next_generation"])
def test_dispatching(spark: SparkSession, store: StoreAt, step: str) -> None:
    # Given a driver that has begun a generation, or is about to, and is killed
    store.put("a", due=PAST)
    run_until_killed(spark, dispatching, step, store.url)
    assert store.ids() == ["a"]
    # When another one begins under the same name
    with running(Dispatcher(settings(store), shards=1, spark=spark)):
        # Then it takes over at once
        eventually(lambda: arrived(store) == ["a"])
