"""A handler that fails for a while, and one that fails for good: retries at once, retries later, the error queue."""

import asyncio
import logging
from datetime import timedelta

from delayline import (
    Endpoint,
    Event,
    Headers,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    Recoverability,
    StoredDelivery,
)
from delayline.testing import Signals

logging.getLogger("delayline").addHandler(logging.NullHandler())
logging.getLogger("delayline").propagate = False

transport = MemoryTransport()
bank = Endpoint(
    "bank",
    transport=transport,
    delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()),
    recoverability=Recoverability(
        immediate_retries=1,
        delayed_retries=1,
        time_increase=timedelta(seconds=0.5),
        unrecoverable=(ValueError,),
    ),
)
attempts = 0


@bank.handler
async def pay(message: Message, context: MessageContext) -> None:
    global attempts
    if message.text == "-1":
        raise ValueError("a negative amount")
    attempts += 1
    if attempts <= 2:
        raise ConnectionError("the bank does not answer")
    print(f"{message.id} paid at attempt {attempts}, round {message.headers[Headers.RETRIES]}")


async def main() -> None:
    with Signals() as signals:
        async with bank:
            await bank.send("bank", "-1", message_id="wrong")
            await bank.send("bank", "100", message_id="right")
            await signals.wait_for(Event.MOVED_TO_ERROR)
            await signals.wait_for(Event.HANDLED)
        for failed in await transport.browse("error", 10):
            why = failed.headers[Headers.EXCEPTION_MESSAGE]
            print(f"{failed.id} is in the error queue: {why}; a retry goes to {failed.headers[Headers.FAILED_QUEUE]}")


asyncio.run(main())
