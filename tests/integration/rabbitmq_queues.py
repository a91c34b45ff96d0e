"""Queues of one virtual host, through aio-pika, for tests of the publisher."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aio_pika

from delayline import Message
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.infrastructure import DelayInfrastructure


def a_message(id: str = "m-1", body: bytes = b"hello", **headers: str) -> Message:
    return Message(id, headers, body)


def to_queue(name: str, message: Message | None = None) -> Publication:
    """Return a publication straight to a queue, by the default exchange."""
    return Publication(message or a_message(), "", name)


@contextlib.asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[Publisher]:  # noqa: ANN401
    publisher = Publisher(BrokerAddress.parse(url), **settings)
    await publisher.open()
    try:
        yield publisher
    finally:
        await publisher.close()


@contextlib.asynccontextmanager
async def a_channel(url: str) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect(url)
    async with connection:
        yield await connection.channel()


@contextlib.asynccontextmanager
async def own_channel(url: str) -> AsyncIterator[Channel]:
    """Provide a channel of delayline's."""
    connection = BrokerConnection(BrokerAddress.parse(url), "tests")
    try:
        yield await connection.channel()
    finally:
        await connection.close()


async def declare_levels(url: str, *levels: DelayInfrastructure) -> None:
    async with own_channel(url) as channel:
        for one in levels:
            await one.declare(channel)


async def declare(url: str, name: str, **arguments: object) -> None:
    """Declare a durable queue; arguments are those of AMQP with _ for -."""
    async with a_channel(url) as channel:
        given: Any = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        await channel.declare_queue(name, durable=True, arguments=given)


async def drain(url: str, name: str) -> list[AbstractIncomingMessage]:
    """Take everything that is in the queue."""
    messages: list[AbstractIncomingMessage] = []
    async with a_channel(url) as channel:
        await channel.set_qos(500)
        while (number := (await channel.declare_queue(name, passive=True)).declaration_result.message_count or 0) > 0:
            async with (await channel.get_queue(name)).iterator() as taken:
                for _ in range(number):
                    message = await anext(taken)
                    await message.ack()
                    messages.append(message)
    return messages


async def until_outstanding(publisher: Publisher, number: int) -> None:
    """Return when so many publications are written and none of them is settled."""
    async with asyncio.timeout(10):
        while publisher.outstanding < number:  # noqa: ASYNC110 - there is no notification
            await asyncio.sleep(0)
