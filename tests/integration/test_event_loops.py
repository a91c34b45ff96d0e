"""Transports, stores and management used from several event loops of one process, on each server."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import ConfigurationError, Endpoint, StoredDelivery, SyncEndpoint
from delayline.azure import AzureStorageQueueTransport
from delayline.message import Message
from delayline.rabbitmq import RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from delayline import MessageContext

NUMBER = 30
LATER = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["postgresql_url", "mariadb_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def endpoint_at(url: str) -> Endpoint:
    return Endpoint("orders", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)))


def test_synchronous_endpoints_of_one_process_share_a_server(url: str) -> None:
    # Given three endpoints in one process, each with an event loop of its own, on one database
    handled, every = Counter[str](), threading.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.text] += 1
        if len(handled) == 3 * NUMBER:
            every.set()

    shops = [SyncEndpoint(endpoint_at(url)) for _ in range(3)]
    for shop in shops:
        shop.endpoint.handler(handle)

    def work(shop: SyncEndpoint, name: int) -> None:
        with shop:
            for number in range(NUMBER):
                delay = timedelta(milliseconds=50) if number % 2 else None
                shop.send("orders", f"{name} {number}", delay=delay)
            assert every.wait(60)

    # When all send and handle at once
    threads = [threading.Thread(target=work, args=(shop, name)) for name, shop in enumerate(shops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Then every message is handled once
    assert handled == Counter({f"{name} {number}": 1 for name in range(3) for number in range(NUMBER)})


async def test_pending_messages_are_managed_from_another_loop(url: str) -> None:
    # Given an endpoint on this loop, with a pending message
    async with endpoint_at(url) as endpoint:
        await endpoint.send("orders", "x", message_id="reminder", delay=timedelta(hours=1))

        # When a thread's loop manages it
        async def managed() -> list[str]:
            pending = [message.id for message in await endpoint.delayed.pending()]
            await endpoint.delayed.reschedule("reminder", LATER)
            return pending

        # Then it does what it says, while this loop goes on
        listed, *_ = await asyncio.gather(
            asyncio.to_thread(asyncio.run, managed()),
            *(endpoint.send("orders", "x", delay=timedelta(hours=1)) for _ in range(NUMBER)),
        )
        assert "reminder" in listed
        assert [message.due for message in await endpoint.delayed.pending() if message.id == "reminder"] == [LATER]


async def refused_elsewhere(work: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"started on another event loop.*SyncEndpoint"):
        await asyncio.to_thread(asyncio.run, work)


async def test_rabbitmq_refuses_another_loop(rabbitmq_url: str) -> None:
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.setup_infrastructure(["orders"])
    await transport.start()
    try:
        operation = TransportOperation(Message("one", {}, b""), "orders")
        await transport.dispatch([operation])
        # When another loop sends or counts, then it is refused, and this one goes on
        await refused_elsewhere(transport.dispatch([operation]))
        await refused_elsewhere(transport.count("orders"))
        await transport.dispatch([operation])
    finally:
        await transport.stop()


async def test_azure_refuses_another_loop(azure_url: str) -> None:
    transport = AzureStorageQueueTransport(azure_url)
    await transport.setup_infrastructure(["orders"])
    await transport.start()
    try:
        await transport.dispatch([TransportOperation(Message("one", {}, b""), "orders")])
        # When another loop counts, then it is refused, and this one goes on
        await refused_elsewhere(transport.count("orders"))
        assert await transport.count("orders") == 1
    finally:
        await transport.stop()
