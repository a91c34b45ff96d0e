"""An order and its reminder in one transaction: both exist, or neither does.

python order_and_reminder.py saves two orders; the second one fails after its reminder was sent.
"""

from contextlib import suppress
from datetime import timedelta

from sqlalchemy import Engine, String, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import delayline
from delayline import Endpoint, StoredDelivery, SyncEndpoint

URL = "sqlite:///shop.db"


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str] = mapped_column(String(100))


def save(session: Session, shop: SyncEndpoint, order: Order) -> None:
    """Save the order and remind billing of it in two weeks."""
    with session.begin():
        session.add(order)
        shop.send("billing", {"order": order.number}, delay=timedelta(days=14), transaction=session)
        if order.article == "moon":
            raise ValueError("not in stock")


def show(engine: Engine, shop: SyncEndpoint) -> None:
    """Print what there is."""
    with Session(engine) as session:
        print("orders:", [order.article for order in session.scalars(select(Order))])
    waiting = shop.run(shop.endpoint.delayed.pending())
    print("reminders:", [message.message.text for message in waiting])


def main() -> None:
    engine = create_engine(URL)
    Base.metadata.create_all(engine)
    delivery = StoredDelivery(delayline.SqlDelayedMessageStore(URL))
    shop = Endpoint("shop", transport=delayline.SqlTransport(URL), delayed_delivery=delivery, send_only=True)
    with SyncEndpoint(shop) as sync:
        sync.run(shop.transport.setup_infrastructure(["billing"]))  # as the endpoint billing does when it starts
        for order in (Order(number=17, article="lamp"), Order(number=18, article="moon")):
            with Session(engine) as session, suppress(ValueError):
                save(session, sync, order)
        show(engine, sync)
    engine.dispose()


if __name__ == "__main__":
    main()
