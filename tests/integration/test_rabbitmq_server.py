"""The RabbitMQ node that the tests start for themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aio_pika
import aio_pika.exceptions
import pytest

if TYPE_CHECKING:
    from tests.servers.rabbitmq import RabbitmqServer


@pytest.mark.sample(1, group="RabbitMQ kills")
async def test_a_killed_node_keeps_confirmed_messages(crashing_rabbitmq: RabbitmqServer) -> None:
    # Given a quorum queue with a message that the node has confirmed
    url = crashing_rabbitmq.new_vhost()
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.declare_queue("kept", durable=True, arguments={"x-queue-type": "quorum"})
    message = aio_pika.Message(b"still here", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, "kept")

    await connection.close()
    await asyncio.to_thread(crashing_rabbitmq.settle)

    # When the node is killed and started again
    await asyncio.to_thread(crashing_rabbitmq.kill)
    await asyncio.to_thread(crashing_rabbitmq.start)

    # Then it has the message
    async with await aio_pika.connect(url) as again:
        queue = await (await again.channel()).get_queue("kept")
        found = await queue.get(timeout=30)
        await found.ack()
    assert found.body == b"still here"


@pytest.mark.slow
async def test_a_memory_alarm_holds_confirms_back_until_it_is_over(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    # Given a connection that has published, and a node out of memory
    async with await aio_pika.connect(rabbitmq_url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("busy")
        await channel.default_exchange.publish(aio_pika.Message(b"before"), "busy")
        await asyncio.to_thread(rabbitmq.raise_memory_alarm)
        try:
            # When it publishes again
            second = asyncio.create_task(channel.default_exchange.publish(aio_pika.Message(b"during"), "busy"))
            await asyncio.wait([second], timeout=0.5)
            held_back = not second.done()
        finally:
            await asyncio.to_thread(rabbitmq.clear_memory_alarm)

        # Then the confirm comes after the alarm only
        await asyncio.wait_for(second, 30)
    assert held_back


async def test_connections_can_be_cut_from_the_servers_side(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    closed = asyncio.Event()
    async with await aio_pika.connect(rabbitmq_url) as connection:
        connection.close_callbacks.add(lambda *_: closed.set())
        await asyncio.to_thread(rabbitmq.cut_connections, rabbitmq_url)
        await asyncio.wait_for(closed.wait(), 30)


async def test_a_user_may_do_only_what_was_permitted(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    async with await aio_pika.connect(rabbitmq.new_user(rabbitmq_url, configure="mine")) as connection:
        await (await connection.channel()).declare_queue("mine")
        with pytest.raises(aio_pika.exceptions.ChannelClosed, match="ACCESS_REFUSED"):
            await (await connection.channel()).declare_queue("theirs")
