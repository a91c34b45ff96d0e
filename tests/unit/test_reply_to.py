"""A message may name another queue for its replies."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from delayline import Endpoint, Headers, InvalidMessage, MemoryTransport, Send, SyncEndpoint

if TYPE_CHECKING:
    from delayline import Message, MessageContext


async def test_every_send_names_the_queue_for_replies() -> None:
    # Given a handler that sends on
    endpoint, seen = Endpoint("sales", transport=MemoryTransport()), dict[str, str]()
    received = asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen[message.id] = message.headers[Headers.REPLY_TO]
        if message.id == "1":
            await context.send("sales", b"", message_id="3", reply_to="of handlers")
        if len(seen) == 3:
            received.set()

    # When messages are sent one by one, together and by the handler
    async with endpoint:
        await endpoint.send("sales", b"", message_id="1", reply_to="billing")
        await endpoint.send_many([Send("sales", b"", message_id="2", reply_to="shipping")])
        await asyncio.wait_for(received.wait(), 30)
        with pytest.raises(InvalidMessage, match="reply_to"):
            await endpoint.send("sales", b"", reply_to="")
    # Then each has its queue
    assert seen == {"1": "billing", "2": "shipping", "3": "of handlers"}


def test_threads_name_it_too() -> None:
    endpoint, seen, received = Endpoint("sales", transport=MemoryTransport()), list[str](), threading.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(message.headers[Headers.REPLY_TO])
        received.set()

    with SyncEndpoint(endpoint) as sync:
        sync.send("sales", b"", reply_to="billing")
        assert received.wait(30)
    assert seen == ["billing"]
