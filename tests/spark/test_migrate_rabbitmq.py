"""Timeouts of .NET move to RabbitMQ's delay levels, and from there to a real endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from tests.integration.test_rabbitmq_migration import V1, V2
from tests.spark.broker import in_levels, with_levels
from tests.spark.legacy import Legacy, Timeout, some

from delayline import Endpoint, Message, MessageContext
from delayline.errors import DelaylineError
from delayline.migration import Migration, Plan, preview, target_at
from delayline.migration.targets.rabbitmq_levels import LevelsSession, RabbitmqLevelsTarget
from delayline.migration.verify import verify
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.levels import MAXIMUM_DELAY, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from tests.servers.rabbitmq import RabbitmqServer

    from delayline.migration.target import Attempted, Delivered

ENDPOINT = "sales"


@pytest.fixture
def legacy(postgresql_url: str) -> Legacy:
    return Legacy(postgresql_url, ENDPOINT)


def plan(legacy: Legacy, url: str, **how: Any) -> Plan:  # noqa: ANN401 - Plan's own
    return Plan(legacy.source, target_at(url), **{"endpoints": [ENDPOINT], **how})


@pytest.mark.parametrize("delays", ["v2", "v1"])
def test_each_message_waits_for_its_remaining_delay(
    spark: SparkSession, legacy: Legacy, rabbitmq_url: str, delays: str
) -> None:
    # Given timeouts in an hour, overdue, as far as levels reach, and farther
    levels, url = (V2, rabbitmq_url) if delays == "v2" else (V1, f"{rabbitmq_url}?delays=v1")
    with_levels(rabbitmq_url, levels)
    now = datetime.now(UTC).replace(microsecond=0)
    hour, limit = timedelta(hours=1), timedelta(seconds=MAXIMUM_DELAY)
    legacy.add(
        ENDPOINT,
        Timeout(1, time=now + hour),
        Timeout(2, time=now + limit - hour),
        Timeout(3, time=now + limit + hour),
        Timeout(4, time=now + hour, destination="gone"),
        Timeout(5, time=now + hour, headers=None, state=None),
    )
    # When they are looked at, and moved
    [shown] = preview(plan(legacy, url), spark)
    assert sorted(number for _, number, _ in shown.unmovable) == [1, 1]
    outcome = Migration(plan(legacy, url)).run(spark)

    # Then each has its id, its headers, and the rest of its delay, rounded up
    assert legacy.ids(ENDPOINT) == [Timeout(3).id, Timeout(4).id]
    assert [number for _, number in outcome.reasons] == [1, 1]
    found = {one.header.properties.message_id: one for one in in_levels(rabbitmq_url, levels)}
    assert set(found) == {"message-1", "message-2", Timeout(5).id}
    for name, due in (("message-1", now + hour), ("message-2", now + limit - hour), (Timeout(5).id, now + hour)):
        parsed = parse(found[name].routing_key)
        assert parsed is not None
        assert parsed[1] == "billing"
        assert 0 <= (due - now).total_seconds() - parsed[0] < 120
        headers = found[name].header.properties.headers
        assert headers["NServiceBus.Transport.RabbitMQ.DelayInSeconds"] == parsed[0]
    assert found["message-1"].header.properties.headers["Ключ 🔑"] == "Größe"
    assert bytes(found["message-1"].body) == b"{}"
    assert bytes(found[Timeout(5).id].body) == b""


@pytest.mark.sample(3, group="migration round trips")
def test_messages_arrive_at_an_endpoint_on_time(spark: SparkSession, legacy: Legacy, rabbitmq_url: str) -> None:
    # Given an endpoint on the broker, and timeouts for it, one overdue
    arrived: list[tuple[str, datetime, Mapping[str, str]]] = []
    due = datetime.now(UTC) + timedelta(seconds=20)
    headers = '{"NServiceBus.MessageId": "late", "Größe": "🚀"}'
    legacy.add(
        ENDPOINT,
        Timeout(1, time=due, destination="crm"),
        Timeout(2, time=datetime(2020, 1, 1, tzinfo=UTC), destination="crm", headers=headers),
    )

    async def receive() -> None:
        endpoint = Endpoint("crm", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=DelayLevelDelivery())
        both = asyncio.Event()

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            arrived.append((message.id, datetime.now(UTC), message.headers))
            if len(arrived) == 2:
                both.set()

        await endpoint.setup()
        outcome = await asyncio.to_thread(Migration(plan(legacy, rabbitmq_url)).run, spark)
        assert outcome.complete
        async with endpoint:
            await asyncio.wait_for(both.wait(), 60)

    # When they are moved and the endpoint runs
    asyncio.run(receive())

    # Then the overdue one came at once, the other one when it was due, with their headers
    assert [message_id for message_id, _, _ in arrived] == ["late", "message-1"]
    assert arrived[0][2]["Größe"] == "🚀"
    assert due <= arrived[1][1]
    assert arrived[1][2]["NServiceBus.EnclosedMessageTypes"] == "Sales.Remind, Sales"


@pytest.mark.slow
def test_a_batch_in_doubt_is_given_back_by_an_abort_and_named(
    spark: SparkSession, legacy: Legacy, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that failed after some batch was published, before it was marked
    with_levels(rabbitmq_url, V2)
    legacy.add(ENDPOINT, *some(6))

    class Failing(LevelsSession):
        async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
            await super().deliver(messages, attempt)
            raise ConnectionError("the task fails on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(RabbitmqLevelsTarget, "begin", lambda self, endpoint: Failing(self.sink))
        with pytest.raises(DelaylineError, match="fails on purpose"):
            Migration(plan(legacy, rabbitmq_url, batch_size=3)).run(spark)

    # When it is aborted
    Migration(plan(legacy, rabbitmq_url, batch_size=3)).abort()

    # Then all rows are back, and those that the broker may have as well are named, all of them
    assert len(legacy.ids(ENDPOINT)) == 6
    target = target_at(rabbitmq_url)
    assert target is not None
    verified = verify(legacy.source, target, spark)
    there = {one.header.properties.message_id for one in in_levels(rabbitmq_url, V2)}
    assert verified.ok
    assert there
    assert {f"message-{int(one.replace('-', ''), 16)}" for one in verified.repeatable} == there


def test_an_executor_that_is_killed_is_replaced(
    spark: SparkSession, legacy: Legacy, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_levels(rabbitmq_url, V2)
    legacy.add(ENDPOINT, *some(40))
    flag = str(tmp_path / "killed")

    class Dying(LevelsSession):
        async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
            delivered = await super().deliver(messages, attempt)
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return delivered
            os.kill(os.getpid(), signal.SIGKILL)
            return delivered

    monkeypatch.setattr(RabbitmqLevelsTarget, "begin", lambda self, endpoint: Dying(self.sink))
    outcome = Migration(plan(legacy, rabbitmq_url, batch_size=5)).run(spark)

    assert outcome.complete
    target = target_at(rabbitmq_url)
    assert target is not None
    verified = verify(legacy.source, target, spark)
    ids = [one.header.properties.message_id for one in in_levels(rabbitmq_url, V2)]
    assert len(set(ids)) == 40
    assert (len(ids) - 40, len(verified.repeatable)) == (5, 5)
    assert verified.ok


@pytest.mark.sample(1, group="Spark kills")
def test_a_broker_that_dies_stops_the_run_which_goes_on_with_it(
    spark: SparkSession, legacy: Legacy, crashing_rabbitmq: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a broker that stops when the second round begins
    url = crashing_rabbitmq.new_vhost()
    with_levels(url, V2)
    crashing_rabbitmq.settle()
    legacy.add(ENDPOINT, *some(20))
    monkeypatch.setattr("delayline.migration.run.ROUND_ROWS", 10)
    begin, rounds = RabbitmqLevelsTarget.begin, []

    def stop_at_second(self: RabbitmqLevelsTarget, endpoint: str) -> LevelsSession:
        rounds.append(endpoint)
        if len(rounds) == 2:
            crashing_rabbitmq.stop()
        return begin(self, endpoint)

    monkeypatch.setattr(RabbitmqLevelsTarget, "begin", stop_at_second)
    with pytest.raises(DelaylineError):
        Migration(plan(legacy, url, batch_size=5)).run(spark)

    # When it is back, and the run resumed
    crashing_rabbitmq.start()
    outcome = Migration(plan(legacy, url, batch_size=5)).resume(spark)

    # Then everything has arrived
    assert outcome.complete
    assert {one.header.properties.message_id for one in in_levels(url, V2)} == {
        f"message-{number}" for number in range(1, 21)
    }


def test_a_table_that_vanished_is_reported_in_one_line(spark: SparkSession, legacy: Legacy, rabbitmq_url: str) -> None:
    with_levels(rabbitmq_url, V2)
    legacy.change(lambda connection: connection.execute(text('DROP TABLE "sales_TimeoutData"')))
    with pytest.raises(DelaylineError, match="there are: none at all"):
        Migration(plan(legacy, rabbitmq_url)).run(spark)
