"""Promotions of files: each is a transaction of a task, which counts once whoever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from tests.conftest import running
from tests.integration.test_rabbitmq_migration import V2
from tests.servers.postgresql import PostgresqlServer
from tests.spark.blocked_statements import blocked_statements
from tests.spark.broker import in_levels, with_levels
from tests.spark.stores import DUE, ENDPOINT, StoreAt, frame
from tests.spark.test_dispatch import PATIENCE
from tests.spark.test_migrate_to_azure import waiting
from tests.spark.tiers import FIRST, HOUR, Tiers, spread

from delayline import ConfigurationError
from delayline.azure import AzureDelayedTable, AzureStorageQueueTransport
from delayline.rabbitmq.backend import RabbitMQBackend
from delayline.rabbitmq.message_sink import DelayLevelSink
from delayline.spark import Promoted, promote
from delayline.spi import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AsyncExitStack
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from delayline.rabbitmq.message_sink import DelayLevelWriter

NUMBER: Final = 500
IDS: Final = sorted(f"m{number}" for number in range(NUMBER))
BAD: Final = "m250"
UNTIL: Final = FIRST + 5 * HOUR
HALF_STORED: Final = f"BEFORE INSERT ON \"sales.timeouts\" FOR EACH ROW WHEN (NEW.id = '{BAD}')"
#: The module, not the function of its name.
PROMOTING: Any = import_module("delayline.spark.promote")


@pytest.fixture
def crashing() -> Iterator[PostgresqlServer]:
    """Provide a server of the test's own, to be crashed."""
    with running(PostgresqlServer, "fsync=off") as server:
        yield server


@pytest.mark.parametrize(
    "step",
    [
        HALF_STORED,
        "BEFORE INSERT ON delayline_cold_promotions",
        "BEFORE UPDATE ON delayline_cold_files",
        "AFTER UPDATE ON delayline_cold_files DEFERRABLE INITIALLY DEFERRED FOR EACH ROW",
    ],
    ids=["half stored", "stored", "recorded", "committed"],
)
@pytest.mark.sample(1)
def test_a_worker_that_is_killed_in_a_file_counts_once(spark: SparkSession, tiers: Tiers, step: str) -> None:
    # Given a promotion whose tasks are held up at a step
    tiers.schedule(spread(spark, NUMBER, hours=4))
    with blocked_statements(tiers.url, step) as held, ThreadPoolExecutor(1) as pool:
        promotion = pool.submit(tiers.promote, UNTIL)
        held.wait(1 if BAD in step else 2, promotion.done)
        # When they are killed
        for process in held.senders():
            os.kill(process, signal.SIGKILL)
        held.release()
        # Then others do the work, once, and all of it is counted
        done = promotion.result(PATIENCE)
    assert (done.stored, done.duplicates, tiers.hot.ids()) == (NUMBER, 0, IDS)
    assert done.files == len({path.name for path in tiers.files()})
    assert tiers.promote(UNTIL) == Promoted()


@pytest.mark.sample(1, group="Spark kills")
def test_a_database_that_crashes_in_the_middle_of_a_promotion(
    spark: SparkSession, crashing: PostgresqlServer, tmp_path: Path
) -> None:
    tiers = Tiers(StoreAt(crashing.new_database()), tmp_path / "cold", spark)
    tiers.schedule(spread(spark, NUMBER, hours=4))
    # Given a promotion whose file is half stored
    with ThreadPoolExecutor(1) as pool:
        with blocked_statements(tiers.url, HALF_STORED) as held:
            promotion = pool.submit(tiers.promote, UNTIL)
            held.wait(1, promotion.done)
            # When the database crashes, and comes back
            crashing.stop("immediate")
        crashing.start()
        # Then the tasks have waited for it, and done it once
        done = promotion.result(PATIENCE)
    assert (done.stored, done.duplicates, tiers.hot.ids()) == (NUMBER, 0, IDS)


def test_a_message_that_is_cancelled_while_its_file_is_promoted_is_cancelled_in_the_store(
    spark: SparkSession, tiers: Tiers
) -> None:
    # Given a promotion whose file is half stored
    tiers.schedule(spread(spark, NUMBER, hours=1))
    with blocked_statements(tiers.url, HALF_STORED) as held, ThreadPoolExecutor(2) as pool:
        promotion = pool.submit(tiers.promote, UNTIL)
        held.wait(1, promotion.done)
        # When a message of it is cancelled, which waits for the promotion
        cancelled = pool.submit(tiers.cancel, "m2")
        held.release()
        # Then both are done
        assert promotion.result(PATIENCE).stored + promotion.result(PATIENCE).cancelled == NUMBER
        assert cancelled.result(PATIENCE) is Outcome.DONE
    assert tiers.hot.ids() == tiers.ids() == sorted({*IDS} - {"m2"})


def test_ids_that_are_in_the_store_already_are_left_there(spark: SparkSession, any_tiers: Tiers) -> None:
    # Given a message of a file that a user has stored under its id since
    any_tiers.schedule(frame(spark, "a", "b", "c"))
    any_tiers.hot.put("b")
    # When its file is promoted
    done = any_tiers.promote(FIRST + timedelta(days=400))
    # Then the one in the store stays, and the others come
    assert (done.stored, done.duplicates, done.cancelled, done.files) == (2, 1, 0, 1)
    found = {message.id: message.message.headers for message in any_tiers.hot.messages()}
    assert sorted(found) == ["a", "b", "c"] and found["b"] == {"n": "b"}


@pytest.mark.slow
def test_a_promotion_that_is_overtaken_by_a_compaction_begins_again(
    spark: SparkSession, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prefix in ("a", "b"):
        tiers.schedule(spread(spark, 60, hours=1, prefix=prefix))
    planned = PROMOTING.planned

    def late(*arguments: Any, **settings: Any) -> Any:  # noqa: ANN401 - as it takes
        monkeypatch.setattr(PROMOTING, "planned", planned)
        tiers.compact()
        return planned(*arguments, **settings)

    monkeypatch.setattr(PROMOTING, "planned", late)
    assert tiers.promote(UNTIL).stored == 120
    assert tiers.hot.ids() == sorted(f"{prefix}{number}" for prefix in "ab" for number in range(60))


@pytest.mark.sample(1, group="Spark kills")
def test_messages_go_to_delay_levels_from_their_files(
    spark: SparkSession, tiers: Tiers, rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = str(tmp_path / "killed")

    class Dying(DelayLevelSink):
        async def writer(self, stack: AsyncExitStack) -> DelayLevelWriter:
            session = await super().writer(stack)
            deliver = session.deliver

            async def deliver_and_die(messages: pa.RecordBatch) -> Mapping[int, str]:
                refused = await deliver(messages)
                if not os.access(killed, os.F_OK):
                    os.close(os.open(killed, os.O_CREAT))
                    os.kill(os.getpid(), signal.SIGKILL)
                return refused

            session.deliver = deliver_and_die  # type: ignore[method-assign]
            return session

    monkeypatch.setattr(RabbitMQBackend, "sink", lambda self, *arguments, **_: Dying(*arguments))
    # Given messages in files, of which one can go nowhere and one is cancelled
    with_levels(rabbitmq_url, V2)
    tiers.schedule(spread(spark, NUMBER, hours=4).withColumn("destination", F.lit("billing")))
    tiers.schedule(frame(spark, "nowhere", destination=["nowhere"], due=[FIRST]))
    tiers.cancel("m1")
    largest = max(file.messages for file in tiers.tier.files()[0])
    # When they are promoted, and a task is killed when the broker has its messages and this was not recorded
    target = replace(tiers.target, delay_levels=rabbitmq_url)
    done = promote(target, horizon=UNTIL - datetime.now(UTC), spark=spark)
    # Then each is there, and only those of the task twice; what can go nowhere is in the store
    assert (done.sent, done.stored, done.cancelled) == (NUMBER - 1, 1, 1)
    sent = Counter(message.header.properties.message_id for message in in_levels(rabbitmq_url, V2))
    assert sorted(sent) == sorted({*IDS} - {"m1"})
    assert 0 < sent.total() - len(sent) <= largest
    assert tiers.ids() == tiers.hot.ids() == ["nowhere"]
    with pytest.raises(ConfigurationError, match="can hold a message: give a shorter horizon"):
        promote(target, horizon=timedelta(days=4000), spark=spark)


def test_messages_go_to_a_table_of_azure_from_their_files(spark: SparkSession, tiers: Tiers, azure_url: str) -> None:
    # Given messages in files, and the table and a queue of an account
    asyncio.run(AzureDelayedTable(azure_url).setup_infrastructure(ENDPOINT))
    asyncio.run(AzureStorageQueueTransport(azure_url).setup_infrastructure(["billing"]))
    tiers.schedule(frame(spark, "a", "b", "c"))
    tiers.cancel("b")
    # When they are promoted
    target = replace(tiers.target, delay_levels=azure_url)
    done = promote(target, horizon=DUE - datetime.now(UTC), spark=spark)
    # Then they wait there
    assert (done.sent, done.stored, done.cancelled, tiers.ids()) == (2, 0, 1, [])
    assert sorted(waiting(azure_url)) == ["a", "c"]
