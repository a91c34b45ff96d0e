"""Events on SQL databases: with the user's transaction, between processes, on queues that are removed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine, delete
from tests.eventually import eventually_async

from delayline import Endpoint, MessageContext, SqlDelayedMessageStore, SqlTransport, SyncEndpoint, message_type
from delayline.events import Event
from delayline.sql.databases import database_at
from delayline.sql.schema import queue_tables
from delayline.testing import Signals

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection


@message_type("Shop.OrderPlaced")
@dataclass
class OrderPlaced:
    number: int


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/delayline.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def new_engine(url: str) -> Engine:
    engine = SqlTransport(url).new_engine(1, asynchronous=False)
    assert isinstance(engine, Engine)
    return engine


def shop(url: str) -> Endpoint:
    return Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))


def billing(url: str, got: list[int]) -> Endpoint:
    endpoint = Endpoint("billing", transport=SqlTransport(url))

    @endpoint.subscribes(OrderPlaced)
    async def bill(order: OrderPlaced, context: MessageContext) -> None:
        got.append(order.number)

    return endpoint


async def test_an_event_waits_for_a_subscriber_that_does_not_run(url: str) -> None:
    got: list[int] = []
    async with billing(url, got):
        pass
    async with shop(url) as publisher:
        await publisher.publish(OrderPlaced(1))
    async with billing(url, got):
        await eventually_async(lambda: got == [1])


async def test_an_event_exists_if_and_only_if_the_users_transaction_commits(url: str) -> None:
    transport = SqlTransport(url)
    await transport.setup_infrastructure(["billing", "error"])
    await transport.start()
    await transport.subscribe("billing", ["Shop.OrderPlaced"])

    def work() -> None:
        engine = new_engine(url)
        with SyncEndpoint(shop(url)) as publisher, engine.connect() as connection:
            publisher.publish(OrderPlaced(1), transaction=connection)
            connection.rollback()
            publisher.publish(OrderPlaced(2), transaction=connection)
            connection.commit()
        engine.dispose()

    await asyncio.to_thread(work)
    assert [message.text for message in await transport.browse("billing", 10)] == ['{"number":2}']
    await transport.stop()


async def test_a_subscription_whose_queue_was_removed_is_logged_and_delays_nobody(url: str) -> None:
    got: list[int] = []
    transport = SqlTransport(url)
    async with billing(url, got), shop(url) as publisher:
        await transport.start()
        await transport.setup_infrastructure(["gone"])
        await transport.subscribe("gone", ["Shop.OrderPlaced"])

        def remove(connection: Connection) -> None:
            queues = queue_tables(database_at(url).dialect.catalog.schema_of(None)).queues
            connection.execute(delete(queues).where(queues.c.name == "gone"))

        await database_at(url).write(remove)
        with Signals() as signals:
            await publisher.publish(OrderPlaced(1))
            await eventually_async(lambda: got == [1])
            [record] = signals.records(Event.SUBSCRIBER_GONE)
            assert "queue gone subscribes" in record.getMessage()
        await transport.stop()
