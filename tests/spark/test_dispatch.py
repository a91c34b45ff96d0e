"""Resident tasks dispatch due messages; they are stopped, renewed, lost and restarted without losing messages."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from tests.eventually import eventually
from tests.integration.test_rabbitmq_migration import conventional, taken
from tests.spark.broker import on_broker
from tests.spark.stores import ENDPOINT, PAST, StoreAt

from delayline import ConfigurationError, SqlTransport
from delayline.bulk.dispatchers import Generation, ShardMetrics
from delayline.composition import endpoint_from
from delayline.errors import BackendUnusable
from delayline.settings import Settings
from delayline.spark import Dispatcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

PATIENCE = 60
CHUNKS = 8
CHUNK = 400


def settings(store: StoreAt) -> Settings:
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing", "error", ENDPOINT]))
    return Settings(endpoint=ENDPOINT, url=store.url)


def arrived(store: StoreAt) -> list[str]:
    async def look() -> list[str]:
        transport = SqlTransport(store.url)
        await transport.start()
        try:
            return [message.id for message in await transport.browse("billing", 1_000_000)]
        finally:
            await transport.stop()

    return asyncio.run(look())


@contextmanager
def running(dispatcher: Dispatcher) -> Iterator[None]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            dispatcher.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: failures or (shards(dispatcher) and dispatcher._control.goes_on(_generation(dispatcher))))
        yield
    finally:
        dispatcher.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive() and not failures, failures


def shards(dispatcher: Dispatcher) -> Sequence[ShardMetrics]:
    try:
        return dispatcher.metrics()
    except BackendUnusable:  # before the first one ever
        return []


def _generation(dispatcher: Dispatcher) -> Generation:
    found = shards(dispatcher)
    return Generation(dispatcher.name, dispatcher._owner, found[0].generation if found else -1)


def test_shards_share_due_messages_and_stop(spark: SparkSession, store: StoreAt) -> None:
    # Given messages that are due before and after two tasks begin
    dispatcher = Dispatcher(settings(store), shards=2, spark=spark)
    before, after = [f"a{number}" for number in range(300)], [f"b{number}" for number in range(300)]
    store.put(*before, due=PAST)
    # When they run
    with running(dispatcher):
        store.put(*after, due=PAST)
        eventually(lambda: len(arrived(store)) == 600)
    # Then each has left once, and the tasks say how many they sent
    assert sorted(arrived(store)) == sorted([*before, *after])
    metrics = dispatcher.metrics()
    assert [one.shard for one in metrics] == [0, 1]
    assert sum(one.dispatched for one in metrics) == 600
    assert store.ids() == []


@pytest.mark.slow
def test_a_generation_follows_when_a_lease_is_over(spark: SparkSession, store: StoreAt) -> None:
    dispatcher = Dispatcher(settings(store), shards=1, lease=timedelta(seconds=1), spark=spark)
    with running(dispatcher):
        eventually(lambda: dispatcher.metrics()[0].generation >= 3)
        store.put("x", due=PAST)
        eventually(lambda: arrived(store) == ["x"])


def test_a_task_that_is_killed_is_started_again(spark: SparkSession, store: StoreAt) -> None:
    # Given a task in a separate process
    dispatcher = Dispatcher(settings(store), shards=1, spark=spark)
    with running(dispatcher):
        first = int(dispatcher.metrics()[0].place.split()[-1])
        # When that is killed
        os.kill(first, signal.SIGKILL)
        # Then another one goes on
        eventually(lambda: int(dispatcher.metrics()[0].place.split()[-1]) != first)
        store.put("x", due=PAST)
        eventually(lambda: arrived(store) == ["x"])


@pytest.mark.slow
def test_shards_dispatch_to_a_broker_and_one_of_them_is_killed(
    spark: SparkSession, store: StoreAt, rabbitmq_url: str
) -> None:
    # Given a store on PostgreSQL, and a queue of RabbitMQ's
    place = Settings(endpoint=ENDPOINT, store_url=store.url, transport_url=rabbitmq_url, batch_size=50)
    asyncio.run(endpoint_from(place).setup())
    on_broker(rabbitmq_url, lambda channel: conventional(channel, "billing"))
    chunks = [[f"m{chunk}-{number}" for number in range(CHUNK)] for chunk in range(CHUNKS)]
    # When two tasks send what falls due, and one is killed in the middle
    dispatcher = Dispatcher(place, shards=2, spark=spark)
    with running(dispatcher):
        for number, chunk in enumerate(chunks):
            store.put(*chunk, due=PAST)
            if number == CHUNKS // 2:
                os.kill(int(dispatcher.metrics()[0].place.split()[-1]), signal.SIGKILL)
        eventually(lambda: store.ids() == [])
    # Then all have arrived, and what arrived twice was in flight there: at least once is what this pair guarantees
    there = [one.header.properties.message_id for one in on_broker(rabbitmq_url, lambda it: taken(it, "billing"))]
    assert sorted(set(there)) == sorted(one for chunk in chunks for one in chunk)
    assert len(there) - CHUNKS * CHUNK <= place.batch_size


def test_who_begins_under_the_same_name_takes_over(spark: SparkSession, store: StoreAt) -> None:
    first = Dispatcher(settings(store), shards=1, spark=spark)
    thread = threading.Thread(target=first.run)
    thread.start()
    eventually(lambda: shards(first))
    with running(Dispatcher(settings(store), shards=1, spark=spark)):
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_stream_dispatches_where_only_streams_run(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    dispatcher = Dispatcher(settings(store), shards=1, lease=timedelta(seconds=2), spark=spark)
    query = dispatcher.stream(tmp_path)
    try:
        store.put("a", due=PAST)
        eventually(lambda: arrived(store) == ["a"])
        eventually(lambda: any(one.generation >= 2 for one in shards(dispatcher)))
        store.put("b", due=PAST)
        eventually(lambda: sorted(arrived(store)) == ["a", "b"])
        dispatcher.stop()
        eventually(lambda: not query.status["isTriggerActive"])
    finally:
        query.stop()


@pytest.mark.parametrize("written", ["true", "TRUE", " True "])
def test_a_session_that_runs_tasks_twice_is_refused(store: StoreAt, written: str) -> None:
    session = cast("SparkSession", SimpleNamespace(conf={"spark.speculation": written}))
    with pytest.raises(ConfigurationError, match=r"spark\.speculation is on"):
        Dispatcher(settings(store), spark=session).run()


def test_messages_in_the_memory_of_one_process_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the memory of one process"):
        Dispatcher(Settings(endpoint=ENDPOINT, url="memory:"))
