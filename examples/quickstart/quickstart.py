"""Send a message to yourself, two seconds later, through one SQLite file."""

import asyncio
from datetime import timedelta

import delayline
from delayline import Endpoint, Message, MessageContext, StoredDelivery, TransactionMode

URL = "sqlite:///delayline.db"

sales = Endpoint(
    "sales",
    transport=delayline.SqlTransport(URL),
    delayed_delivery=StoredDelivery(delayline.SqlDelayedMessageStore(URL), number_of_retries=7),
    transaction_mode=TransactionMode.TRANSACTION_SCOPE,
)
handled = asyncio.Event()


@sales.handler
async def handle(message: Message, context: MessageContext) -> None:
    print("two seconds later:", message.json())
    handled.set()


async def main() -> None:
    async with sales:
        await sales.send("sales", {"order": 17}, delay=timedelta(seconds=2))
        await handled.wait()


asyncio.run(main())
