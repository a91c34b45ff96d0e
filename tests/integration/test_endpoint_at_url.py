"""`Endpoint(name, url=...)` has queues and delayed messages at one place, on each server."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from delayline import Endpoint, Guarantee, Message, MessageContext

SERVERS = [
    ("postgresql_url", Guarantee.EXACTLY_ONCE),
    ("mariadb_url", Guarantee.EXACTLY_ONCE),
    ("rabbitmq_url", Guarantee.AT_LEAST_ONCE),
    ("azure_url", Guarantee.AT_LEAST_ONCE),
]


@pytest.mark.parametrize(("server", "expected"), SERVERS, ids=[server for server, _ in SERVERS])
async def test_a_delayed_message_goes_round(request: pytest.FixtureRequest, server: str, expected: Guarantee) -> None:
    # Given an endpoint at nothing but a URL
    url = request.getfixturevalue(server)
    url = url.replace("postgresql:", "postgres:", 1)  # as hosting services write it
    endpoint = Endpoint("sales", url=url)
    arrived: asyncio.Queue[str] = asyncio.Queue()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await arrived.put(message.text)

    # When it sends itself a message for later
    async with endpoint:
        assert endpoint.guarantee is expected
        await endpoint.send("sales", "later", delay=timedelta(seconds=1))
        # Then it handles the message
        assert await asyncio.wait_for(arrived.get(), 60) == "later"
