"""Events: what publish and subscribes take and refuse, and what subscribers' handlers are given."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest

from delayline import (
    ConfigurationError,
    Endpoint,
    Headers,
    InvalidMessage,
    MemoryDelayedMessageStore,
    MemoryTransport,
    MessageContext,
    NotStarted,
    SyncEndpoint,
    message_type,
)
from delayline.events import Event
from delayline.serialization import names_of_value
from delayline.testing import Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing import ManualClock


@dataclass
class OrderEvent:
    number: int


@dataclass
class OrderPlaced(OrderEvent):
    pass


class Paid(pydantic.BaseModel):
    number: int


class PaidLate(Paid):
    days: int


class Packed(msgspec.Struct):
    number: int


@message_type("x" * 195)
@dataclass
class Long:
    number: int


class WithoutSubscriptions:
    """A transport that cannot publish."""

    def __init__(self) -> None:
        inner = MemoryTransport()
        for name in ("start", "stop", "dispatch", "receiver", "setup_infrastructure"):
            setattr(self, name, getattr(inner, name))
        self.transaction_domain, self.highest_transaction_mode = None, inner.highest_transaction_mode


NAME = f"{__name__}."


def types_of(context: MessageContext) -> list[str]:
    names = context.message.headers[Headers.ENCLOSED_MESSAGE_TYPES].split(";")
    return [name.removeprefix(NAME) for name in names]


async def test_handlers_get_events_of_their_type_and_of_derived_types() -> None:
    transport = MemoryTransport()
    shop, audit = Endpoint("shop", transport=transport), Endpoint("audit", transport=transport)
    got: list[tuple[object, object, object]] = []

    @audit.subscribes
    async def note(event: OrderEvent, context: MessageContext) -> None:
        got.append((event, types_of(context), context.message.headers[Headers.INTENT]))

    async with audit, shop:
        await shop.publish(OrderPlaced(1), headers={"k": "v"})
        await settle()
    assert got == [(OrderEvent(1), ["OrderPlaced", "OrderEvent"], "Publish")]


async def test_a_handler_publishes_when_it_has_succeeded(clock: ManualClock) -> None:
    transport = MemoryTransport()
    shop = Endpoint("shop", transport=transport, delayed_delivery=MemoryDelayedMessageStore(), clock=clock)
    got: list[int] = []

    async def note(event: OrderEvent, context: MessageContext) -> None:
        got.append(event.number)

    @shop.handles(Paid)
    async def paid(order: Paid, context: MessageContext) -> None:
        await context.publish(OrderEvent(order.number))
        context.publish(OrderEvent(order.number + 1), delay=timedelta(days=1))

    shop.subscribe(OrderEvent, note)
    async with shop:
        await shop.send_local(Paid(number=1))
        await settle()
        assert got == [1]
        await clock.advance(timedelta(days=1))
        await settle()
    assert got == [1, 2]


async def test_after_unsubscribing_no_copies_come_also_after_another_start() -> None:
    transport = MemoryTransport()
    shop, audit = Endpoint("shop", transport=transport), Endpoint("audit", transport=transport)
    got: list[int] = []

    @audit.subscribes(OrderEvent)
    async def note(event: OrderEvent, context: MessageContext) -> None:
        got.append(event.number)

    with pytest.raises(NotStarted):
        await audit.unsubscribe(OrderEvent)
    async with shop:
        async with audit:
            await audit.unsubscribe(OrderEvent)
        async with audit:
            with Signals() as signals:
                await shop.publish(OrderEvent(1))
                await settle()
                [record] = signals.records(Event.UNHEARD)
                assert record.levelno == logging.INFO
    assert got == []


def test_the_synchronous_endpoint_publishes_and_subscribes() -> None:
    transport = MemoryTransport()
    sync = SyncEndpoint(Endpoint("shop", transport=transport))
    got: list[int] = []

    @sync.subscribes(OrderEvent)
    def note(event: OrderEvent, context: MessageContext) -> None:
        got.append(event.number)

    with sync:
        assert sync.publish(OrderEvent(1), message_id="e") == "e"
        sync.unsubscribe(OrderEvent)
        sync.publish(OrderEvent(2))
    assert got == [1]


@pytest.mark.parametrize("event", [{"number": 1}, b"bytes", "text", 7, None, Long(1)], ids=repr)
async def test_what_has_no_type_to_subscribe_to_is_no_event(event: Any) -> None:  # noqa: ANN401
    async with Endpoint("shop", transport=MemoryTransport()) as shop:
        with pytest.raises(InvalidMessage, match="an event needs a type with a name of 1 to 194 characters"):
            await shop.publish(event)


async def test_a_type_in_the_header_makes_an_event_of_a_dict() -> None:
    transport = MemoryTransport()
    shop = Endpoint("shop", transport=transport)
    got: list[object] = []

    @shop.subscribes("Shop.Note")
    async def note(event: Any, context: MessageContext) -> None:  # noqa: ANN401
        got.append(event)

    async with shop:
        await shop.publish({"number": 1}, headers={Headers.ENCLOSED_MESSAGE_TYPES: "Shop.Note"})
        await settle()
    assert got == [{"number": 1}]


async def test_a_transport_without_subscriptions_is_refused_before_anything_is_sent() -> None:
    shop = Endpoint("shop", transport=WithoutSubscriptions())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="WithoutSubscriptions has no subscriptions"):

        @shop.subscribes(OrderEvent)
        async def note(event: OrderEvent, context: MessageContext) -> None: ...

    async with shop:
        with pytest.raises(ConfigurationError, match="have no subscriptions"):
            await shop.publish(OrderEvent(1))


def test_names_that_are_taken_or_too_long_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="like the topic of an event"):
        Endpoint("topic:Shop", transport=MemoryTransport())
    with pytest.raises(ConfigurationError, match="194 characters, not 195"):
        Endpoint("shop", transport=MemoryTransport()).subscribe(Long, print)
    with pytest.raises(ConfigurationError, match="send_only"):
        Endpoint("shop", transport=MemoryTransport(), send_only=True).subscribe(OrderEvent, print)


def test_the_types_of_an_event_are_its_classes_and_not_those_of_libraries() -> None:
    def names(value: object) -> list[str]:
        return [name.removeprefix(NAME) for name in (names_of_value(value) or "").split(";")]

    assert names(PaidLate(number=1, days=2)) == ["PaidLate", "Paid"]
    assert names(Packed(1)) == ["Packed"]
    assert names(OrderPlaced(1)) == ["OrderPlaced", "OrderEvent"]
