"""An inbox whose database goes away, or is full: messages wait in their queue, and are handled once when it is back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.conftest import running
from tests.eventually import eventually_async
from tests.integration.test_bad_files import ON_TMPFS, in_namespace
from tests.integration.test_outbox import with_orders
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    MemoryTransport,
    Message,
    MessageContext,
    Recoverability,
    SqlInbox,
)
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MESSAGES = 300
NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)


@pytest.fixture(params=[PostgresqlServer, MariadbServer], ids=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running(request.param) as server:
        yield server


class Orders:
    """An endpoint that writes a row for each message and tells another endpoint."""

    def __init__(self, url: str) -> None:
        self.transport = MemoryTransport()
        inbox = SqlInbox(url)
        self.endpoint = Endpoint("orders", transport=self.transport, inbox=inbox, recoverability=NO_RETRIES)
        self.books = Endpoint("books", transport=self.transport)
        self.told: list[str] = []
        self.times = 0

        @self.endpoint.handler
        async def order(message: Message, context: MessageContext) -> None:
            self.times += 1
            if int(message.id) % 2:
                connection = await context.transaction()
                await connection.execute(text("INSERT INTO orders VALUES (:number)"), {"number": int(message.id)})
            context.send("books", message.id)

        @self.books.handler
        async def note(message: Message, context: MessageContext) -> None:
            del context
            self.told.append(message.body.decode())


@pytest.mark.parametrize("crashes", [True, False], ids=["kill -9", "restart"])
@pytest.mark.sample(2)
async def test_a_server_that_goes_away_and_comes_back(server: Any, *, crashes: bool) -> None:  # noqa: ANN401
    # Given messages that are being handled
    url = with_orders(server.new_database())
    orders = Orders(url)
    async with orders.books, orders.endpoint as endpoint:
        for number in range(MESSAGES):
            await endpoint.send("orders", b"", message_id=f"{number}")
        await eventually_async(lambda: orders.times > 20)
        # When the database goes away, for a while
        await asyncio.to_thread(server.kill if crashes else server.stop)
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        # Then every message is handled, and each has had its effects once
        await eventually_async(lambda: len(set(orders.told)) == MESSAGES)
        assert await orders.transport.count("error") == 0
    engine = create_engine(url.replace("mariadb:", "mariadb+pymysql:"), poolclass=NullPool)
    with engine.begin() as connection:
        rows = [row[0] for row in connection.execute(text("SELECT number FROM orders"))]
    assert sorted(rows) == list(range(1, MESSAGES, 2))


async def test_an_inbox_that_is_away_at_the_start(tmp_path: Path) -> None:
    del tmp_path
    endpoint = Orders("postgresql://nobody@127.0.0.1:1/none").endpoint
    with pytest.raises(BackendUnavailable):
        await endpoint.start()


async def test_an_inbox_without_its_table(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    endpoint = Endpoint("orders", transport=MemoryTransport(), inbox=SqlInbox(url), setup_infrastructure=False)
    with pytest.raises(BackendUnusable, match="run `delayline setup`"):
        await endpoint.start()


async def test_rows_in_another_database_than_the_inbox(tmp_path: Path) -> None:
    # Given a handler whose rows are in another database than promised
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    endpoint, transport = None, MemoryTransport()
    endpoint = Endpoint(
        "orders",
        transport=transport,
        inbox=SqlInbox(f"sqlite:///{tmp_path / 'rows.db'}"),
        recoverability=NO_RETRIES,
    )

    @endpoint.handler
    def order(message: Message, context: MessageContext) -> None:
        del message
        connection = context.transaction(other)
        connection.execute(text("CREATE TABLE IF NOT EXISTS orders (number INTEGER)"))

    async with endpoint:
        await endpoint.send("orders", b"", message_id="17")
        # Then the message is in the error queue, with the reason
        await eventually_async(lambda: transport.count("error"))
        [failed] = await transport.browse("error", 1)
        assert "begin it on a connection to that database" in failed.headers["NServiceBus.ExceptionInfo.Message"]
    other.dispose()


async def test_a_handler_that_commits_its_transaction_itself(tmp_path: Path) -> None:
    # Given a handler that ends the transaction that delayline has opened for it
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with_orders(url)
    transport, times = MemoryTransport(), 0
    endpoint = Endpoint("orders", transport=transport, inbox=SqlInbox(url), recoverability=NO_RETRIES)

    @endpoint.handler
    def order(message: Message, context: MessageContext) -> None:
        nonlocal times
        del message
        times += 1
        connection = context.transaction()
        connection.execute(text("INSERT INTO orders VALUES (17)"))
        connection.commit()

    async with endpoint:
        for _ in range(2):
            await endpoint.send("orders", b"", message_id="17")
            await eventually_async(lambda: _is_empty(transport))
    # Then its message is recorded all the same, in a transaction after it
    assert times == 1


async def _is_empty(transport: MemoryTransport) -> bool:
    return not await transport.count("orders")


async def test_an_inbox_of_another_endpoint(tmp_path: Path) -> None:
    inbox = SqlInbox(f"sqlite:///{tmp_path / 'rows.db'}")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(Endpoint("orders", transport=MemoryTransport(), inbox=inbox))
        other = Endpoint("billing", transport=MemoryTransport(), inbox=inbox)
        with pytest.raises(ConfigurationError, match="belongs to endpoint 'orders'"):
            await other.start()


def test_an_inbox_whose_disk_is_full(tmp_path: Path) -> None:
    # When the disk of an inbox is full while messages are handled
    answer = in_namespace(ON_TMPFS.replace("script} full", "script} inbox"), tmp_path)
    # Then they wait in their queue, no failure is counted, and each has its effect once
    assert answer["told"] == [f"{number:02}" for number in range(20)]
    assert answer["told_while_full"] < 20
    assert answer["failed"] == 0
