"""A process of endpoint `sales` on RabbitMQ, which journals the messages that it handles until it is killed.

`rabbitmq_worker.py URL STORE_URL JOURNAL [MODE STEP]` kills itself at a step of its first acknowledgement of dozens of
messages: before it, after it, or in a handler that runs after it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from delayline import Endpoint, Message, MessageContext, StoredDelivery, TransactionMode
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.acknowledgements import Acknowledgements
from delayline.sql import SqlDelayedMessageStore


def journal(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_acknowledging(path: str, step: str) -> list[int]:
    """Die at the step of the first acknowledgement of at least 24 messages; return a list that gets their number."""
    write, numbers = Acknowledgements._write, list[int]()

    async def fatal(acknowledgements: Acknowledgements) -> None:
        number = len(acknowledgements)
        if number >= 24 and not numbers:
            numbers.append(number)
            journal(f"{path}.acknowledged", str(number))
            if step == "before":
                die()
        await write(acknowledgements)
        if numbers and step == "after":
            die()

    Acknowledgements._write = fatal  # type: ignore[method-assign,assignment]
    return numbers


async def main(url: str, store_url: str, path: str, mode: str = "RECEIVE_ONLY", step: str = "") -> None:
    delivery = StoredDelivery(SqlDelayedMessageStore(store_url), batch_size=5) if store_url else DelayLevelDelivery()
    endpoint = Endpoint(
        "sales",
        transport=RabbitMQTransport(url),
        delayed_delivery=delivery,
        transaction_mode=TransactionMode[mode],
        concurrency=64 if step else 8,
    )
    acknowledged = die_acknowledging(path, step) if step else []
    # Handlers end 32 at a time, so that their messages are acknowledged together on a machine of any speed.
    together = asyncio.Barrier(32 if step in ("before", "after") else 1)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        journal(path, f"{message.id} {time.time()}")
        if acknowledged and step == "in handler":
            die()
        await together.wait()
        await asyncio.sleep(0.005)

    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    async with endpoint:
        await terminated.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
