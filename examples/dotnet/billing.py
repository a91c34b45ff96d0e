"""The Python half of two endpoints on one broker: bills an order that a .NET endpoint sends, and replies in a while.

python billing.py; then start Program.cs. It needs a RabbitMQ broker at BROKER.
"""

import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

from delayline import Endpoint, MessageContext, message_type
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport

BROKER = os.environ.get("BROKER", "amqp://guest:guest@localhost")

billing = Endpoint("Billing", transport=RabbitMQTransport(BROKER), delayed_delivery=DelayLevelDelivery())


@message_type("Contoso.Messages.BillOrder")
@dataclass
class BillOrder:
    """A command of the .NET endpoint; its serializer writes the property names as they are."""

    OrderId: str


@message_type("Contoso.Messages.OrderBilled")
@dataclass
class OrderBilled:
    """The answer, which .NET finds by the namespace-qualified name of the type."""

    OrderId: str


@billing.handles(BillOrder)
async def bill(order: BillOrder, context: MessageContext) -> None:
    """Answer at once, and remind the sender in five seconds."""
    print(f"billed {order.OrderId}", flush=True)
    context.reply(OrderBilled(order.OrderId))
    context.reply(OrderBilled(order.OrderId), delay=timedelta(seconds=5))


async def main() -> None:
    async with billing:
        await billing.wait_stopped()


if __name__ == "__main__":
    asyncio.run(main())
