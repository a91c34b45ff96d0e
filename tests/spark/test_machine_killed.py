"""A machine dies with everything in flight, and is started again: nothing is lost, early, or half there."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from tests.eventually import eventually
from tests.integration.test_rabbitmq_migration import conventional, taken
from tests.spark.blocked_statements import blocked_statements
from tests.spark.broker import on_broker
from tests.spark.pipeline_process import Pipeline, kill_session, pipeline_process
from tests.spark.stores import ENDPOINT, PAST, StoreAt
from tests.spark.test_commit_killed import LEDGER
from tests.spark.test_dispatch import PATIENCE, arrived, running, settings
from tests.spark.test_failures import staged

from delayline import SqlDelayedMessageStore
from delayline.bulk.writer import STREAMS, BulkWriter
from delayline.composition import endpoint_from
from delayline.spark import audit, export, read_journal, waiting_ids
from delayline.sql.staging import STAGE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.spark.tiers import Tiers

    from delayline.spark import Totals

#: Messages of a batch, a file, a chunk.
SOME: Final = 100
SOON: Final = timedelta(seconds=25)
#: Where four transactions are when the machine dies: a job's before it begins, a stream's third batch half way, one
#: that dispatches half way, and one that removes messages that a broker has confirmed.
IN_FLIGHT: Final = [
    f"BEFORE INSERT ON {LEDGER} FOR EACH ROW WHEN (NEW.name = 'campaign')",
    "BEFORE INSERT ON \"sales.timeouts\" FOR EACH ROW WHEN (NEW.id = 's2-50')",
    "BEFORE DELETE ON \"sales.timeouts\" FOR EACH ROW WHEN (OLD.id = 'd1-50')",
    "BEFORE DELETE ON \"shop.timeouts\" FOR EACH ROW WHEN (OLD.id = 'r1-50')",
]


def ids(*prefixes: str) -> list[str]:
    return sorted(f"{prefix}-{number}" for prefix in prefixes for number in range(SOME))


def write(spark: SparkSession, path: Path, prefix: str, due: datetime) -> None:
    """Add a file of messages."""
    data = spark.range(0, SOME, 1, 1).selectExpr(
        f"concat('{prefix}-', id) AS id",
        "'billing' AS destination",
        f"timestamp_micros({int(due.timestamp() * 1_000_000)}) AS due",
        "'{}' AS headers",
        "CAST(CAST(id AS STRING) AS BINARY) AS body",
    )
    data.write.mode("append").parquet(str(path))


def set_up(spark: SparkSession, sales: StoreAt, broker: str, folder: Path) -> Pipeline:
    """Provide two endpoints, one with its queues beside its store and one with a broker's; a campaign, and a stream."""
    settings(sales)
    asyncio.run(SqlDelayedMessageStore(sales.url, journal=True).setup_infrastructure(ENDPOINT))
    pipeline = Pipeline(sales.url, broker, str(folder))
    asyncio.run(endpoint_from(pipeline.settings[1]).setup())
    on_broker(broker, lambda channel: conventional(channel, "billing"))
    BulkWriter(sales.url, f"{ENDPOINT}.timeouts", name=STREAMS).create()  # for the ledger
    soon = datetime.now(UTC) + SOON
    write(spark, folder / "campaign.parquet", "near", soon)
    write(spark, folder / "campaign.parquet", "far", soon + timedelta(days=300))
    for batch in range(3):
        write(spark, folder / "stream", f"s{batch}", soon)
    return pipeline


def start_again(spark: SparkSession, pipeline: Pipeline, all_gone: Callable[[], bool]) -> None:
    """Run everything to its end."""
    query = pipeline.stream(spark, availableNow=True)
    done = pipeline.campaign(spark)
    assert (done.stored, done.cold, done.repeated) == (SOME, SOME, False)
    assert query.awaitTermination(100)
    with ExitStack() as stack:
        for dispatcher in pipeline.dispatchers(spark):
            stack.enter_context(running(dispatcher))
        eventually(all_gone)


def audited(spark: SparkSession, pipeline: Pipeline) -> Totals:
    """Return the journal's events of the endpoint that has one."""
    journal = f"{pipeline.folder}/journal"
    export(pipeline.target, journal, spark=spark)
    entries, waiting = read_journal(pipeline.target, journal, spark=spark), waiting_ids(pipeline.target, spark)
    with audit(entries, store=f"{ENDPOINT}.timeouts", waiting=waiting, patience=timedelta(0)) as seen:
        return seen.totals()


@pytest.mark.long
def test_everything_goes_on_where_it_was(spark: SparkSession, tiers: Tiers, rabbitmq_url: str, tmp_path: Path) -> None:
    sales, shop = tiers.hot, StoreAt(tiers.hot.url, "shop")
    pipeline = set_up(spark, sales, rabbitmq_url, tmp_path)
    # Given a machine that does all of it, and dies in the middle of each
    sales.put(*ids("d0"), due=PAST)
    shop.put(*ids("r0"), due=PAST)
    with blocked_statements(sales.url, *IN_FLIGHT) as flight, pipeline_process(pipeline) as process:
        eventually(lambda: sorted(arrived(sales)) == ids("d0") and shop.ids() == [], patience=2 * PATIENCE)
        sales.put(*ids("d1"), due=PAST)
        shop.put(*ids("r1"), due=PAST)
        flight.wait(len(IN_FLIGHT), lambda: process.poll() is not None)
        kill_session(process.pid)
        flight.release()

    # Then uncommitted work has no effect; the server may have finished single statements
    gone = sorted(arrived(sales))
    assert gone in (ids("d0"), ids("d0", "d1"))
    assert tiers.ids() == sales.ids() and sorted([*gone, *sales.ids()]) == ids("d0", "d1", "s0", "s1")
    assert shop.ids() == ids("r1")
    [left] = set(staged(sales)) - {STREAMS}
    strays = tiers.files()
    assert strays

    # When everything is started again, on a day when the leftovers are old
    with psycopg.connect(sales.url, autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{left}" RENAME TO "{STAGE_PREFIX}202001010000_0123456789ab"')
    for stray in strays:
        os.utime(stray, (0, 0))
    start_again(spark, pipeline, lambda: len(arrived(sales)) >= 6 * SOME and shop.ids() == [])

    # Then everything has arrived, or waits, once, and nothing was early
    assert sorted(arrived(sales)) == ids("d0", "d1", "s0", "s1", "s2", "near")
    assert tiers.ids() == ids("far")
    totals = audited(spark, pipeline)
    assert totals.clean and (totals.dispatched, totals.waiting, totals.overdue) == (6 * SOME, SOME, 0)
    # And messages that arrived twice had been confirmed, but not recorded
    there = [one.header.properties.message_id for one in on_broker(rabbitmq_url, lambda it: taken(it, "billing"))]
    twice = {one for one in there if there.count(one) > 1}
    assert sorted(set(there)) == ids("r0", "r1")
    assert "r1-50" in twice and len(there) - 2 * SOME == len(twice) <= pipeline.settings[1].batch_size
    # And nothing is left
    assert (staged(sales), tiers.compact().deleted) == ([STREAMS], len(strays))
