"""A process of endpoint `sales` on RabbitMQ, which journals the messages that it handles until it is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from delayline import Endpoint, Message, MessageContext, StoredDelivery
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore


def journal(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


async def main(url: str, store_url: str, path: str) -> None:
    delivery = StoredDelivery(SqlDelayedMessageStore(store_url), batch_size=5) if store_url else DelayLevelDelivery()
    endpoint = Endpoint("sales", transport=RabbitMQTransport(url), delayed_delivery=delivery, concurrency=8)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        journal(path, f"{message.id} {time.time()}")
        await asyncio.sleep(0.005)

    async with endpoint:
        await endpoint.wait_stopped()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
