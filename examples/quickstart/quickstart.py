"""Send a message to yourself, two seconds later, through one SQLite file."""

import asyncio
from datetime import timedelta

from delayline import Endpoint, Message, MessageContext

sales = Endpoint("sales", url="sqlite:///delayline.db")
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
