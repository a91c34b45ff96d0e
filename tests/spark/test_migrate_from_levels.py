"""Messages in RabbitMQ's delay levels move to a store, or to other levels."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from tests.integration.test_rabbitmq_migration import V1, V2
from tests.spark.arrivals import arrivals_at
from tests.spark.broker import count, in_levels, with_levels
from tests.spark.kills import DriverKilled
from tests.spark.stores import StoreAt

from delayline.delayed.delivery import StoredDelivery
from delayline.errors import BackendUnavailable, ConfigurationError
from delayline.message import Headers, Message, to_wire_time
from delayline.migration import Migration, Plan, preview, source_at, target_at
from delayline.migration.sources import rabbitmq_levels
from delayline.migration.sources.rabbitmq_levels import RabbitmqLevelsSource
from delayline.migration.verify import verify
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.levels import DELAY_HEADER, MAXIMUM_DELAY, parse
from delayline.rabbitmq.publisher import Publisher
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from delayline.rabbitmq.infrastructure import DelayInfrastructure

ENDPOINT = "sales"


@dataclass(frozen=True)
class Sent:
    """A message as a .NET endpoint publishes it."""

    id: str
    delay: int
    destination: str = ENDPOINT
    body: bytes = b"{}"
    more: tuple[tuple[str, Any], ...] = ()

    def publication(self, levels: DelayInfrastructure, now: datetime) -> Publication:
        """Return it with AMQP's properties and headers, of all types."""
        headers = {
            DELAY_HEADER: self.delay, Headers.TIME_SENT: to_wire_time(now), Headers.MESSAGE_ID: self.id,
            **dict(self.more),
        }  # fmt: skip
        properties = Basic.Properties(
            headers={name: value for name, value in headers.items() if value is not None},
            message_id=self.id, delivery_mode=2, reply_to="sales", content_type="text/plain",
        )  # fmt: skip
        exchange, key = levels.route(self.delay, self.destination)
        encoded = ContentHeader(0, 0, properties).marshal()[12:]
        return Publication(Message(self.id, {}, self.body), exchange, key, properties=encoded)


def send(url: str, levels: DelayInfrastructure, messages: Sequence[Sent]) -> datetime:
    """Publish messages and return when."""

    async def run() -> datetime:
        now = datetime.now(UTC)
        publisher = Publisher(BrokerAddress.parse(url))
        await publisher.open()
        assert not await publisher.publish([one.publication(levels, now) for one in messages])
        await publisher.close()
        return now

    return asyncio.run(run())


MESSAGES = (
    Sent("odd", 3600, more=(("Ключ 🔑", "Größe"), ("wide", 2**40), ("raw", bytearray(b"\xff")))),
    Sent("empty", 7200, body=b""),
    Sent("far", MAXIMUM_DELAY),
    Sent("twice", 4000), Sent("twice", 4000, destination="billing"),
    Sent("nowhere", 5000, destination="gone"),
    Sent("timeless", 6000, more=((Headers.TIME_SENT, None),)),
)  # fmt: skip


@pytest.mark.sample(3, group="migration round trips")
def test_levels_move_to_a_store_whose_endpoint_delivers_them(
    spark: SparkSession, rabbitmq_url: str, postgresql_url: str
) -> None:
    # Given levels with messages of all sorts, of which two cannot move
    with_levels(rabbitmq_url, V1)
    store = StoreAt(postgresql_url)
    source = source_at("rabbitmq-levels", f"{rabbitmq_url}?delays=v1", journal=postgresql_url)
    target = target_at(postgresql_url)
    assert target is not None
    plan = Plan(source, target, [ENDPOINT], batch_size=2)
    asyncio.run(SqlTransport(postgresql_url).setup_infrastructure(["billing"]))
    sent: list[datetime] = []

    def work() -> None:
        sent.append(send(rabbitmq_url, V1, MESSAGES))
        # When they are looked at, nothing changes
        [shown] = preview(plan, spark)
        assert (shown.rows, shown.unseen, shown.endpoint) == (7, 0, ENDPOINT)
        assert dict(shown.destinations) == {ENDPOINT: 5, "billing": 1, "gone": 1}
        assert sorted(number for _, number, _ in shown.unmovable) == [1, 1]
        assert count(rabbitmq_url, V1) == 7
        sent.append(send(rabbitmq_url, V1, [Sent("soon", 30, body="früh".encode())]))
        # and when they are moved, what cannot go is back
        outcome = Migration(plan).run(spark)
        reasons = sorted(reason for reason, _ in outcome.reasons)
        assert reasons[0].startswith("its header NServiceBus.TimeSent is missing")
        assert "queue 'gone' does not exist" in reasons[1]

    delivery = StoredDelivery(SqlDelayedMessageStore(postgresql_url))
    [arrived] = arrivals_at(ENDPOINT, SqlTransport(postgresql_url), delivery, 1, work)

    # Then one arrives when it was due
    assert arrived.body.decode() == "früh"
    assert arrived.on_time(sent[1] + timedelta(seconds=30))
    assert arrived.headers[Headers.MESSAGE_ID] == "soon"
    # the others wait for theirs
    waiting = {one.id: one for one in store.messages()}
    assert sorted(waiting)[:4] == ["empty", "far", "odd", "twice"]
    assert {one.destination for name, one in waiting.items() if name.startswith("twice")} == {ENDPOINT, "billing"}
    assert waiting["odd"].message.headers["Ключ 🔑"] == "Größe"
    assert waiting["odd"].message.headers["wide"] == str(2**40)
    for name, delay in (("odd", 3600), ("empty", 7200), ("far", MAXIMUM_DELAY)):
        due = sent[0] + timedelta(seconds=delay)
        assert due <= waiting[name].due <= due + timedelta(seconds=2)
    # and those that cannot move are where they were, as they were
    left = {one.header.properties.message_id: one for one in in_levels(rabbitmq_url, V1)}
    assert set(left) == {"nowhere", "timeless"}
    parsed = parse(left["nowhere"].routing_key)
    assert parsed is not None
    assert (parsed[1], 4900 < parsed[0] <= 5001) == ("gone", True)
    assert left["nowhere"].header.properties.headers[DELAY_HEADER] == 5000
    assert verify(source, target, spark).ok


def test_a_driver_that_dies_while_it_takes_loses_and_doubles_nothing(
    spark: SparkSession, rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given levels that are to move to other levels, and a driver that dies before, and after, an acknowledgement
    monkeypatch.setattr(rabbitmq_levels, "COPIED_AT_ONCE", 3)
    with_levels(rabbitmq_url, V1)
    with_levels(rabbitmq_url, V2)
    send(rabbitmq_url, V1, [Sent(f"m{number}", 100_000 + number, "billing") for number in range(10)])
    journal = f"sqlite:///{tmp_path / 'journal.db'}"
    source = source_at("rabbitmq-levels", f"{rabbitmq_url}?delays=v1", journal=journal)
    target = target_at(rabbitmq_url)
    assert target is not None
    plan = Plan(source, target, [ENDPOINT], batch_size=4)
    acknowledge, calls = RabbitmqLevelsSource._acknowledge, []

    async def die(self: RabbitmqLevelsSource, *arguments: Any) -> None:  # noqa: ANN401 - its own
        calls.append(arguments)
        if len(calls) == 4:
            await acknowledge(self, *arguments)
        if len(calls) in (2, 4):
            raise DriverKilled
        await acknowledge(self, *arguments)

    monkeypatch.setattr(RabbitmqLevelsSource, "_acknowledge", die)
    for _ in range(2):
        with pytest.raises(DriverKilled):
            Migration(plan).run(spark)

    # When it runs again
    outcome = Migration(plan).run(spark)

    # Then all messages are there once, and those that the old levels may have delivered are listed
    assert outcome.complete
    assert count(rabbitmq_url, V1) == 0
    assert sorted(one.header.properties.message_id for one in in_levels(rabbitmq_url, V2)) == [
        f"m{n}" for n in range(10)
    ]
    verified = verify(source, target, spark)
    assert verified.ok
    assert 1 <= len(verified.repeatable) <= 3


def test_an_abort_gives_everything_back_to_the_levels(
    spark: SparkSession, rabbitmq_url: str, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that ended before its first batch, and what levels do not take
    with_levels(rabbitmq_url, V2)
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing"]))
    sent = send(rabbitmq_url, V2, [Sent(f"m{number}", 5000, "billing", more=(("Größe", "🚀"),)) for number in range(5)])
    source = source_at("rabbitmq-levels", rabbitmq_url, journal=store.url)
    plan = Plan(source, target_at(store.url), [ENDPOINT], batch_size=2)

    def fail(*_: object) -> None:
        raise BackendUnavailable("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(Migration, "_deliver", fail)
        with pytest.raises(BackendUnavailable):
            Migration(plan).run(spark)
    assert count(rabbitmq_url, V2) == 0
    for wrong, why in (
        (Plan(source, plan.target, None), "name with --endpoint the endpoint"),
        (Plan(source, plan.target, [ENDPOINT], sent), "leave out --cutoff"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            preview(wrong, spark)
    # When it is aborted
    outcome = Migration(plan).abort()
    # Then the levels have them, as they were, for the rest of their time
    assert outcome.progress is not None
    assert outcome.progress.restored == 5
    found = in_levels(rabbitmq_url, V2)
    assert sorted(one.header.properties.message_id for one in found) == [f"m{number}" for number in range(5)]
    for one in found:
        parsed = parse(one.routing_key)
        assert parsed is not None
        assert 4880 < parsed[0] <= 5001
        assert one.header.properties.headers["Größe"] == "🚀"
        assert one.header.properties.reply_to == "sales"
    assert store.messages() == []


def test_a_run_is_resumed_when_nothing_is_left_to_take(
    spark: SparkSession, rabbitmq_url: str, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that ended when everything was taken, and held
    with_levels(rabbitmq_url, V2)
    send(rabbitmq_url, V2, [Sent(f"m{number}", 5000, "billing") for number in range(3)])
    source = source_at("rabbitmq-levels", rabbitmq_url, journal=store.url)
    plan = Plan(source, target_at(store.url), [ENDPOINT])

    def fail(*_: object) -> None:
        raise BackendUnavailable("on purpose")

    with monkeypatch.context() as patched, pytest.raises(BackendUnavailable):
        patched.setattr(Migration, "_deliver", fail)
        Migration(plan).run(spark)
    # When it is resumed, then it moves
    assert Migration(plan).resume(spark).complete
    assert store.ids() == ["m0", "m1", "m2"]
