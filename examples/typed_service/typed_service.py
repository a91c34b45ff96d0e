"""A shop with five kinds of message: an order is paid or reminded of, shipped, and at last archived.

python typed_service.py places two orders, of which one is paid, and ends when both are archived.
"""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from delayline import Endpoint, MessageContext, Recoverability, message_type

URL = "sqlite:///shop.db"
PAYMENT_TERM = timedelta(seconds=1)  # fourteen days in a real shop

shop = Endpoint("shop", url=URL)
paid: set[str] = set()
archived: list[str] = []
all_archived = asyncio.Event()


@message_type("Shop.OrderPlaced")
@dataclass
class OrderPlaced:
    """A customer has ordered."""

    order: str
    total: Decimal


@message_type("Shop.PaymentReceived")
@dataclass
class PaymentReceived:
    """The bank has the money."""

    order: str


@message_type("Shop.PaymentDue")
@dataclass
class PaymentDue:
    """The term of an order is over."""

    order: str
    total: Decimal


@message_type("Shop.ShipOrder")
@dataclass
class ShipOrder:
    """The warehouse is to pack an order."""

    order: str


@message_type("Shop.ArchiveOrder")
@dataclass
class ArchiveOrder:
    """Nothing more will happen to an order."""

    order: str


@shop.handles(OrderPlaced)
async def place(placed: OrderPlaced, context: MessageContext) -> None:
    """Look at the order again when its term is over."""
    context.send("shop", PaymentDue(placed.order, placed.total), delay=PAYMENT_TERM)


@shop.handles(PaymentReceived)
async def pay(payment: PaymentReceived, context: MessageContext) -> None:
    """Ship what is paid."""
    paid.add(payment.order)
    context.send("shop", ShipOrder(payment.order))


@shop.handles(PaymentDue)
async def look(due: PaymentDue, context: MessageContext) -> None:
    """Remind the customer if the order is not paid."""
    if due.order not in paid:
        print(f"reminded of {due.order}: {due.total} EUR")
        context.send("shop", ArchiveOrder(due.order))


@shop.handles(ShipOrder, recoverability=Recoverability(delays=[timedelta(seconds=1), timedelta(minutes=1)]))
def ship(wanted: ShipOrder, context: MessageContext) -> None:
    """Pack, in a thread; tried again after a second and after a minute if it fails."""
    print(f"shipped {wanted.order}")
    context.send("shop", ArchiveOrder(wanted.order))


@shop.handles(ArchiveOrder)
async def archive(wanted: ArchiveOrder, context: MessageContext) -> None:
    """Close the order."""
    archived.append(wanted.order)
    if len(archived) == 2:
        all_archived.set()


async def main() -> None:
    async with shop:
        await shop.send("shop", OrderPlaced("17", Decimal("9.90")))
        await shop.send("shop", OrderPlaced("18", Decimal("20.00")))
        await shop.send("shop", PaymentReceived("17"))
        await all_archived.wait()
    print("archived", ", ".join(sorted(archived)))


if __name__ == "__main__":
    asyncio.run(main())
