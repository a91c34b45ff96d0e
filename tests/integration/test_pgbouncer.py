"""Sending through PgBouncer in transaction mode, which gives each transaction any of its sessions."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.conftest import not_installed
from tests.eventually import eventually_async
from tests.servers.pgbouncer import PgbouncerServer

from delayline import ConfigurationError, Endpoint
from delayline.errors import BackendUnusable
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.postgresql import PostgresqlServer

    from delayline import Message, MessageContext


@pytest.fixture
def pooled_url(postgresql: PostgresqlServer, postgresql_url: str) -> Iterator[str]:
    """Provide the URL of the database through PgBouncer."""
    if not PgbouncerServer.installed():
        not_installed(PgbouncerServer.product, PgbouncerServer.install)
    pooler = PgbouncerServer(str(postgresql.port))
    try:
        yield pooler.url(postgresql_url)
    finally:
        pooler.close()


def endpoint_at(url: str, *, send_only: bool = False) -> Endpoint:
    return Endpoint(
        "sender" if send_only else "shop",
        transport=SqlTransport(url),
        delayed_delivery=SqlDelayedMessageStore(url),
        send_only=send_only,
    )


async def test_messages_are_sent_through_pgbouncer(postgresql_url: str, pooled_url: str) -> None:
    """Given a send-only endpoint behind PgBouncer, when it sends in every way, then all messages are handled once."""
    handled: list[str] = []
    receiving, sending = endpoint_at(postgresql_url), endpoint_at(f"{pooled_url}?pgbouncer=true", send_only=True)

    @receiving.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)

    async with receiving, sending:
        soon = timedelta(milliseconds=10)
        await asyncio.gather(*(sending.send("shop", b"x", message_id=f"now {n}") for n in range(150)))
        await asyncio.gather(*(sending.send("shop", b"x", delay=soon, message_id=f"soon {n}") for n in range(150)))
        for number in range(5):
            await sending.send("shop", b"x", message_id=f"one {number}")
            await sending.send("shop", b"x", delay=soon, message_id=f"one soon {number}")
        await eventually_async(lambda: len(handled) == 310)
    assert len(handled) == len(set(handled)) == 310


async def test_receivers_are_refused_behind_pgbouncer(pooled_url: str) -> None:
    """Given an endpoint that receives, when it starts behind PgBouncer, then the error says what works."""
    endpoint = endpoint_at(f"{pooled_url}?pgbouncer=true")

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None: ...

    with pytest.raises(ConfigurationError, match=r"pgbouncer=true.* those with send_only=True work"):
        async with endpoint:
            pass


async def test_pgbouncer_without_the_parameter_is_named(pooled_url: str) -> None:
    """Given a URL without the parameter, when an endpoint starts behind PgBouncer, then the error names it."""
    with pytest.raises(BackendUnusable, match=r"Add \?pgbouncer=true to the URL"):
        async with endpoint_at(pooled_url, send_only=True):
            pass


def test_the_parameter_is_true_or_false() -> None:
    with pytest.raises(ConfigurationError, match="pgbouncer must be true or false, not 'yes'"):
        SqlTransport("postgresql://shop@db.example/shop?pgbouncer=yes")
