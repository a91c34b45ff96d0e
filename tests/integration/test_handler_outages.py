"""The database goes away, or falls silent, while handlers have transactions of their own: no failure of theirs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from tests.eventually import eventually_async
from tests.integration.wire_between import wire_to

from delayline import Endpoint, Message, MessageContext, Recoverability, SqlDatabase, SqlTransport

if TYPE_CHECKING:
    from tests.servers.postgresql import PostgresqlServer

NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)


@pytest.mark.parametrize("when", ["in the handler", "at its end"])
async def test_a_session_that_ends_is_no_failure_of_a_message(
    postgresql: PostgresqlServer, postgresql_url: str, when: str
) -> None:
    # Given a handler with a transaction of its own, and no retries
    transport = SqlTransport(postgresql_url)
    endpoint = Endpoint("sales", transport=transport, recoverability=NO_RETRIES)
    attempts = 0

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        nonlocal attempts
        attempts += 1
        connection = await context.transaction()
        await connection.execute(text("CREATE TABLE IF NOT EXISTS handled (id TEXT)"))
        await connection.execute(text("INSERT INTO handled VALUES ('one')"))
        own = await connection.execute(text("SELECT pg_backend_pid()"))
        if attempts == 1:
            with postgresql.administrator("postgres") as administrator:
                administrator.execute("SELECT pg_terminate_backend(%s, 5000)", (own.scalar(),))
            if when == "in the handler":
                await connection.execute(text("SELECT 1"))

    async with endpoint:
        # When its session ends
        await endpoint.send("sales", b"")
        # Then the message is handled again, and is not in the error queue
        await eventually_async(lambda: attempts >= 2)
        async with asyncio.timeout(60):
            while await transport.count("sales"):  # noqa: ASYNC110 - a state without an event
                await asyncio.sleep(0.05)
        assert await transport.count("error") == 0


async def test_a_silent_server_keeps_no_handler_for_ever(postgresql_url: str) -> None:
    # Given handlers whose transactions are open when the server falls silent
    async with wire_to(postgresql_url) as (wire, url):
        transport = SqlTransport(SqlDatabase(url, server_timeout=2))
        endpoint = Endpoint("sales", transport=transport, recoverability=NO_RETRIES, concurrency=4)
        begun, silent, handled = 0, asyncio.Event(), 0

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            nonlocal begun, handled
            connection = await context.transaction()
            await connection.execute(text("SELECT 1"))
            begun += 1
            await silent.wait()
            await connection.execute(text("SELECT 2"))
            handled += 1

        async with endpoint:
            for _ in range(4):
                await endpoint.send("sales", b"")
            await eventually_async(lambda: begun == 4)
            # When no answer comes any more on their connections, as after a failover, and new ones work
            assert wire.hold_answers_to(b"") > 0
            silent.set()
            # Then all messages are handled, and none is in the error queue
            await eventually_async(lambda: handled >= 4)
            seen = SqlTransport(postgresql_url)
            await seen.start()
            async with asyncio.timeout(60):
                while await seen.count("sales"):  # noqa: ASYNC110 - a state without an event
                    await asyncio.sleep(0.05)
            assert await seen.count("error") == 0
            await seen.stop()
