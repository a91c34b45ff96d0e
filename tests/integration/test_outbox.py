"""An outbox: what is sent in a transaction on one database reaches queues that are elsewhere, after the commit."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.eventually import eventually_async

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    Send,
    SqlOutbox,
    StoredDelivery,
)
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from sqlalchemy import Connection
    from tests.servers.rabbitmq import RabbitmqServer

LATER = timedelta(days=1)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The database of the user's rows."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


def begun(url: str) -> AbstractContextManager[Connection]:
    return create_engine(url.replace("mariadb:", "mariadb+pymysql:"), poolclass=NullPool).begin()


@contextlib.contextmanager
def rows_in(url: str) -> Iterator[Connection]:
    """A transaction of the user's."""
    with begun(url) as connection:
        connection.execute(text("INSERT INTO orders VALUES (17)"))
        yield connection


@pytest.fixture
def orders(url: str) -> str:
    return with_orders(url)


def with_orders(url: str) -> str:
    with begun(url) as connection:
        connection.execute(text("CREATE TABLE orders (number INTEGER)"))
    return url


class Shop:
    """An endpoint whose queues are in memory, and the bodies that it has handled."""

    def __init__(self, transport: MemoryTransport, url: str, **parts: Any) -> None:  # noqa: ANN401 - of Endpoint
        delivery = StoredDelivery(MemoryDelayedMessageStore())
        self.endpoint = Endpoint(
            "shop",
            transport=transport,
            outbox=SqlOutbox(url),
            on_critical_error=self._note_critical,
            **({"delayed_delivery": delivery} | parts),
        )
        self.handled: list[str] = []
        self.critical: list[str] = []
        if not self.endpoint.send_only:
            self.endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        del context
        self.handled.append(message.body.decode())

    async def _note_critical(self, endpoint: Endpoint, text: str, error: Exception) -> None:
        """Go on: on a busy machine a broker's start takes longer than the breaker of receiving waits."""
        del endpoint, error
        self.critical.append(text)

    async def handles(self, *bodies: str) -> None:
        await eventually_async(lambda: self.handled == list(bodies), f"{bodies} handled")


async def test_a_send_is_forwarded_after_the_commit_and_never_after_a_rollback(orders: str) -> None:
    shop = Shop(MemoryTransport(), orders)
    async with shop.endpoint as endpoint:
        # Given a transaction that is rolled back
        with contextlib.suppress(ZeroDivisionError), rows_in(orders) as connection:
            await endpoint.send("shop", "undone", transaction=connection)
            raise ZeroDivisionError
        # And one that commits
        with rows_in(orders) as connection:
            await endpoint.send("shop", "done", transaction=connection)
            # Then nothing is sent before the commit
            await asyncio.sleep(0)
            assert shop.handled == []
        await shop.handles("done")


async def test_a_delayed_send_waits_in_the_delayed_delivery_with_its_id(orders: str) -> None:
    # Given a delayed send in a transaction
    shop = Shop(MemoryTransport(), orders)
    async with shop.endpoint as endpoint:
        with rows_in(orders) as connection:
            await endpoint.send("shop", "reminder", delay=LATER, message_id="order/17", transaction=connection)
        # Then it waits where others wait, and can be sent now
        await eventually_async(endpoint.delayed.pending)
        [waiting] = await endpoint.delayed.pending()
        assert waiting.id == "order/17"
        await endpoint.delayed.send_now("order/17")
        await shop.handles("reminder")


@pytest.mark.sample(2)
async def test_messages_arrive_in_the_order_of_the_commits_of_several_processes(orders: str) -> None:
    # Given two processes of an endpoint
    transport = MemoryTransport()
    shop, web = Shop(transport, orders, concurrency=1), Shop(transport, orders, send_only=True)
    async with shop.endpoint, web.endpoint:
        # When they send in turn, each after the commit of the other
        for number in range(40):
            with rows_in(orders) as connection:
                sender = (shop, web)[number % 2].endpoint
                sends = [Send("shop", f"{number}.{part}") for part in range(3)]
                await sender.send_many(sends, transaction=connection)
        await eventually_async(lambda: len(shop.handled) == 120)
    assert shop.handled == [f"{number}.{part}" for number in range(40) for part in range(3)]


async def test_messages_with_the_same_id_are_all_forwarded(orders: str) -> None:
    shop = Shop(MemoryTransport(), orders)
    longest = "x" * 250
    async with shop.endpoint as endpoint:
        with rows_in(orders) as connection:
            await endpoint.send("shop", "first", message_id=longest, transaction=connection)
            await endpoint.send("shop", "second", message_id=longest, transaction=connection)
        await shop.handles("first", "second")


async def test_a_message_for_a_queue_that_is_gone_goes_to_the_error_queue(orders: str) -> None:
    transport = MemoryTransport()
    shop = Shop(transport, orders)
    async with shop.endpoint as endpoint:
        with rows_in(orders) as connection:
            await endpoint.send("gone", "lost?", message_id="17", transaction=connection)
            await endpoint.send("shop", "next", transaction=connection)
        await shop.handles("next")
        await eventually_async(lambda: transport.count("error"))
        [failed] = await transport.browse("error", 10)
        assert (failed.id, failed.body) == ("17", b"lost?")


async def test_another_process_forwards_when_the_first_stops(orders: str) -> None:
    # Given two processes, of which the first forwards
    transport = MemoryTransport()
    web, shop = Shop(transport, orders, send_only=True), Shop(transport, orders)
    await web.endpoint.start()
    async with shop.endpoint as endpoint:
        await web.endpoint.stop()
        # When it has stopped
        with rows_in(orders) as connection:
            await endpoint.send("shop", "done", transaction=connection)
        # Then the other does
        await shop.handles("done")


async def test_an_endpoint_forwards_again_after_a_restart(orders: str) -> None:
    shop = Shop(MemoryTransport(), orders)
    for number in range(2):
        async with shop.endpoint as endpoint:
            with rows_in(orders) as connection:
                await endpoint.send("shop", f"{number}", transaction=connection)
            await shop.handles(*map(str, range(number + 1)))


async def test_of_two_endpoints_in_a_process_one_forwards(orders: str) -> None:
    # Given two of the same name, of which the first forwards
    transport = MemoryTransport()
    web, shop = Shop(transport, orders, send_only=True), Shop(transport, orders)
    outboxes: list[Any] = [each.endpoint._outbox for each in (web, shop)]
    async with web.endpoint:
        await eventually_async(lambda: outboxes[0]._is_forwarding)
        async with shop.endpoint as endpoint:
            assert not await outboxes[1].outbox.take_turn()
            with rows_in(orders) as connection:
                await endpoint.send("shop", "done", transaction=connection)
            await shop.handles("done")
            assert not outboxes[1]._is_forwarding


@pytest.mark.parametrize("row_id", ["other", "a/b", "a/x/17", f"a/{'9' * 40}/17", "a//"])
async def test_a_row_that_another_program_has_written_is_sent_as_it_is(orders: str, row_id: str) -> None:
    shop = Shop(MemoryTransport(), orders)
    async with shop.endpoint:
        with begun(orders) as connection:
            quoted = connection.dialect.identifier_preparer.quote("shop.outbox")
            due = {"sqlite": "1", "postgresql": "now()"}.get(connection.dialect.name, "UTC_TIMESTAMP(6)")
            row = {"id": row_id, "headers": b"{}", "body": b"foreign"}
            into = f"INSERT INTO {quoted} (id, destination, due, headers, body, retry_count) VALUES"
            connection.execute(text(f"{into} (:id, 'shop', {due}, :headers, :body, 0)"), row)
        await shop.handles("foreign")


async def test_what_was_committed_before_a_stop_is_forwarded_at_the_next_start(orders: str) -> None:
    web = Shop(MemoryTransport(), orders, send_only=True)
    web.endpoint.transport.dispatch = _away  # type: ignore[assignment, method-assign]
    async with web.endpoint as endpoint:
        with rows_in(orders) as connection:
            await endpoint.send("shop", "done", transaction=connection)
    shop = Shop(MemoryTransport(), orders)
    async with shop.endpoint:
        await shop.handles("done")


async def _away(*_: object) -> None:
    raise BackendUnavailable("the broker is away")


async def test_without_an_outbox_the_error_says_how_to_have_one(orders: str) -> None:
    endpoint = Endpoint("shop", transport=MemoryTransport())
    async with endpoint:
        with rows_in(orders) as connection, pytest.raises(ConfigurationError, match=r"outbox=SqlOutbox\(url\)"):
            await endpoint.send("shop", "done", transaction=connection)


async def test_an_outbox_in_another_database_than_the_transaction_is_refused(orders: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    shop = Shop(MemoryTransport(), other)
    async with shop.endpoint as endpoint:
        with rows_in(orders) as connection, pytest.raises(ConfigurationError, match="messages are in"):
            await endpoint.send("shop", "done", transaction=connection)


def test_the_outbox_of_an_endpoint_is_a_table_of_its_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    asyncio.run(Endpoint("shop", transport=MemoryTransport(), outbox=SqlOutbox(url)).setup())
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "shop.outbox" in tables


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "levels": lambda _: {"delayed_delivery": DelayLevelDelivery()},
    "store": lambda url: {"delayed_delivery": StoredDelivery(SqlDelayedMessageStore(url))},
}


@pytest.mark.parametrize("delays", PARTS)
async def test_rows_in_postgresql_and_queues_on_rabbitmq(postgresql_url: str, rabbitmq_url: str, delays: str) -> None:
    # Given a web process and a worker, with rows in PostgreSQL and queues on RabbitMQ
    with_orders(postgresql_url)
    worker, web = (
        Shop(RabbitMQTransport(rabbitmq_url), postgresql_url, send_only=only, **PARTS[delays](postgresql_url))  # type: ignore[arg-type]
        for only in (False, True)
    )
    async with worker.endpoint, web.endpoint as endpoint:
        # When it sends at once and delayed in a transaction with its rows
        with rows_in(postgresql_url) as connection:
            await endpoint.send("shop", "soon", delay=timedelta(seconds=1), transaction=connection)
            await endpoint.send("shop", "now", transaction=connection)
        # Then both arrive
        await worker.handles("now", "soon")


@pytest.mark.slow
async def test_sends_succeed_while_the_broker_is_away(postgresql_url: str, crashing_rabbitmq: RabbitmqServer) -> None:
    # Given a web process and a worker, and a broker that is killed
    with_orders(postgresql_url)
    url = crashing_rabbitmq.new_vhost()
    parts: dict[str, Any] = {"delayed_delivery": DelayLevelDelivery()}
    worker, web = (Shop(RabbitMQTransport(url), postgresql_url, send_only=only, **parts) for only in (False, True))  # type: ignore[arg-type]
    async with worker.endpoint, web.endpoint as endpoint:
        with rows_in(postgresql_url) as connection:
            await endpoint.send("shop", "before", transaction=connection)
        await worker.handles("before")
        await asyncio.to_thread(crashing_rabbitmq.kill)
        # When the web process sends meanwhile
        for number in range(10):
            with rows_in(postgresql_url) as connection:
                await endpoint.send("shop", f"{number}", transaction=connection)
        with rows_in(postgresql_url) as connection:
            await endpoint.send("shop", "delayed", delay=timedelta(seconds=1), transaction=connection)
        await asyncio.to_thread(crashing_rabbitmq.start)
        # Then all arrive when it is back
        await eventually_async(lambda: {"delayed", *map(str, range(10))} <= set(worker.handled), patience=120)
    # And the outbox's outage was critical for none; only receiving is, after its 30 s
    assert web.critical == []
    assert {text.partition(" from ")[0] for text in worker.critical} <= {"Failed to receive"}


async def test_queues_in_another_database(postgresql_url: str, tmp_path: Path) -> None:
    with_orders(postgresql_url)
    queues = f"sqlite:///{tmp_path / 'queues.db'}"
    delivery = StoredDelivery(SqlDelayedMessageStore(queues))
    shop = Shop(SqlTransport(queues), postgresql_url, delayed_delivery=delivery)  # type: ignore[arg-type]
    async with shop.endpoint as endpoint:
        with rows_in(postgresql_url) as connection:
            await endpoint.send("shop", "soon", delay=timedelta(milliseconds=300), transaction=connection)
            await endpoint.send("shop", "now", transaction=connection)
        await shop.handles("now", "soon")
