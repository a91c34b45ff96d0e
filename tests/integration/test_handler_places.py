"""Where connections of handlers' transactions lead is found out once, and what changes afterwards is noticed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import text
from tests.conftest import running
from tests.eventually import PATIENCE, eventually_async
from tests.servers.postgresql import PostgresqlServer

from delayline import Endpoint, Recoverability
from delayline.sql import SqlTransport
from delayline.sql.dialect import TableIdentity
from delayline.sql.postgresql.catalog import PostgresqlCatalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Table

    from delayline import Message, MessageContext

NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)
#: The queues' tables once more, with the same numbers, in another schema.
TENANT = """
CREATE SCHEMA tenant;
CREATE TABLE tenant.delayline_messages (LIKE public.delayline_messages INCLUDING ALL);
INSERT INTO tenant.delayline_messages OVERRIDING SYSTEM VALUE
SELECT * FROM (SELECT generate_series(1, 50)) AS numbers (seq), LATERAL (
  SELECT queue, id, headers, body, expires FROM public.delayline_messages LIMIT 1
) AS message
"""


class Shop:
    """An endpoint whose handler does as it is told, and what has become of its messages."""

    def __init__(self, url: str) -> None:
        self.transport = SqlTransport(url)
        self.endpoint = Endpoint("shop", transport=self.transport, recoverability=NO_RETRIES, concurrency=1)
        self.handled = 0

    async def send(self) -> None:
        """Send a message, and wait until it has left its queue."""
        await self.endpoint.send("shop", b"")

        async def is_empty() -> bool:
            return await self.transport.count("shop") == 0

        await eventually_async(is_empty, "the message is handled")

    async def failed(self) -> list[str]:
        """Return the reasons of the messages in the error queue."""
        messages = await self.transport.browse("error", 10)
        return [message.headers["NServiceBus.ExceptionInfo.Message"] for message in messages]


@pytest.mark.parametrize("kind", ["def", "coroutine"])
async def test_a_search_path_that_a_handler_changes_removes_no_message_of_others(
    postgresql_url: str, kind: str
) -> None:
    # Given a connection that has led to the queues, and queues of the same names in another schema
    shop = Shop(postgresql_url)
    path = "SELECT 1"

    def handle(message: Message, context: MessageContext) -> None:
        context.transaction().execute(text(path))
        shop.handled += 1

    async def handle_too(message: Message, context: MessageContext) -> None:
        connection = await context.transaction()
        await connection.execute(text(path))
        shop.handled += 1

    shop.endpoint.handler(handle if kind == "def" else handle_too)
    async with asyncio.timeout(3 * PATIENCE), shop.endpoint:
        for _ in range(3):
            await shop.send()
        await shop.endpoint.send("error", b"")
        with psycopg.connect(postgresql_url, autocommit=True) as administrator:
            administrator.execute(TENANT)
            before = administrator.execute("SELECT count(*) FROM tenant.delayline_messages").fetchall()
            # When a handler looks at the tables of a tenant
            path = "SET LOCAL search_path TO tenant"
            await shop.send()
            # Then its message fails, with the reason, and no message of the tenant's is gone
            assert administrator.execute("SELECT count(*) FROM tenant.delayline_messages").fetchall() == before
        reasons = [
            message.headers.get("NServiceBus.ExceptionInfo.Message", "")
            for message in await shop.transport.browse("error", 10)
        ]
        assert any("does not mean delayline's table" in reason for reason in reasons), reasons
        # And the next is handled on the same connection
        path = "SELECT 1"
        await shop.send()
        assert shop.handled == 5


async def test_a_source_that_leads_to_another_database_later_is_refused(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    # Given a function that has connected to the database of the queues
    elsewhere = postgresql.new_database()
    shop, url = Shop(postgresql_url), postgresql_url
    await SqlTransport(elsewhere).setup_infrastructure(["shop"])

    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        context.transaction(lambda: psycopg.connect(url)).execute("SELECT 1")
        shop.handled += 1

    async with asyncio.timeout(3 * PATIENCE), shop.endpoint:
        await shop.send()
        assert await shop.failed() == []
        # When it connects to another one
        url = elsewhere
        await shop.send()
        # Then the message fails, with the reason
        [reason] = await shop.failed()
        assert "and the messages are in the PostgreSQL database" in reason
        assert shop.handled == 2


async def test_a_place_is_looked_for_once_for_each_connection(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a handler that has had a connection of a pool of one
    looked: list[Table] = []
    identify = PostgresqlCatalog.identify

    def counted(self: PostgresqlCatalog, connection: Connection, table: Table) -> TableIdentity:
        looked.append(table)
        return identify(self, connection, table)

    shop = Shop(postgresql_url)

    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        context.transaction().execute(text("SELECT 1"))
        shop.handled += 1

    async with asyncio.timeout(3 * PATIENCE), shop.endpoint:
        for _ in range(2):
            await shop.send()
        monkeypatch.setattr(PostgresqlCatalog, "identify", counted)
        # When it has it again, then nobody asks where it leads
        await shop.send()
        assert (shop.handled, looked) == (3, [])
        # And after a failover both sides are asked
        monkeypatch.setattr(type(shop.transport._database), "usable_since", property(lambda _: 7))
        await shop.send()
        assert shop.handled == 4
        assert len(looked) >= 2


@pytest.fixture
def restarting() -> Iterator[PostgresqlServer]:
    """A server of the test's own, to restart."""
    with running(PostgresqlServer, "fsync=off") as server:
        yield server


@pytest.mark.slow
async def test_a_server_that_has_restarted_is_no_other_database(restarting: PostgresqlServer) -> None:
    """Given handlers' connections to a server that is started again, then messages are handled as before."""
    shop = Shop(restarting.new_database())

    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        context.transaction().execute(text("SELECT 1"))
        shop.handled += 1

    async with asyncio.timeout(4 * PATIENCE), shop.endpoint:
        await shop.send()
        restarting.stop("immediate")
        restarting.start()

        async def is_sent() -> bool:
            try:
                await shop.endpoint.send("shop", b"")
            except Exception:
                return False
            return True

        await eventually_async(is_sent, "the server is back")

        async def is_empty() -> bool:
            return await shop.transport.count("shop") == 0

        await eventually_async(is_empty, "the message is handled")
        assert await shop.failed() == []
