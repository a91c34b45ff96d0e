"""Endpoints on uvloop, which many web servers bring: its transports are no `asyncio.Transport`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import uvloop

from delayline import Message, MessageContext
from delayline.composition import endpoint_from
from delayline.settings import Settings


@pytest.mark.parametrize("place", ["rabbitmq_url", "postgresql_url", "azure_url"])
def test_an_endpoint_on_uvloop_delivers_messages(place: str, request: pytest.FixtureRequest) -> None:
    endpoint = endpoint_from(Settings(endpoint="sales", url=request.getfixturevalue(place)))
    handled: list[str] = []

    async def work() -> None:
        both = asyncio.Event()

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            handled.append(message.text)
            if len(handled) == 2:
                both.set()

        async with endpoint:
            await endpoint.send("sales", "later", delay=timedelta(seconds=1))
            await endpoint.send("sales", "now")
            await asyncio.wait_for(both.wait(), 60)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    assert handled == ["now", "later"]
