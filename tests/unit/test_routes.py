"""Messages sent without a destination go where their type has a route, and to nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict

import pytest

from delayline import (
    ConfigurationError,
    Endpoint,
    InvalidMessage,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    Send,
    SyncEndpoint,
)
from delayline.testing import ManualClock
from delayline.testing.clock import settle


@dataclass
class Bill:
    number: int


@dataclass
class LateBill(Bill):
    days: int = 0


class Point(NamedTuple):
    x: int


class Note(TypedDict):
    text: str


QUEUES = ["shop", "billing", "late"]


def shop(transport: MemoryTransport, clock: ManualClock | None = None, **settings: Any) -> Endpoint:  # noqa: ANN401
    store = MemoryDelayedMessageStore()
    return Endpoint(
        "shop", transport=transport, delayed_delivery=store, clock=clock, routes={Bill: "billing"}, **settings
    )


async def queued(transport: MemoryTransport, queue: str) -> list[str]:
    return [message.text for message in await transport.browse(queue, 10)]


@pytest.fixture
async def transport() -> MemoryTransport:
    transport = MemoryTransport()
    await transport.setup_infrastructure(QUEUES)
    return transport


async def test_a_message_goes_to_the_queue_of_its_type_or_of_its_nearest_base(transport: MemoryTransport) -> None:
    async with shop(transport) as endpoint:
        await endpoint.send(Bill(1))
        await endpoint.send(LateBill(2))
        endpoint.route(LateBill, "late")
        await endpoint.send(LateBill(3))
        await endpoint.send("late", Bill(4))  # a destination wins
        await endpoint.send_many([Send(body=Bill(5)), Send("late", b"six")])
    assert await queued(transport, "billing") == ['{"number":1}', '{"number":2,"days":0}', '{"number":5}']
    assert await queued(transport, "late") == ['{"number":3,"days":0}', '{"number":4}', "six"]


async def test_a_delayed_message_is_routed_when_it_is_sent(transport: MemoryTransport, clock: ManualClock) -> None:
    async with shop(transport, clock) as endpoint:
        await endpoint.send(Bill(1), delay=timedelta(days=14), message_id="b")
        await endpoint.send_many([Send(body=Bill(2), delay=timedelta(days=14), message_id="c")])
        assert [(waits.id, waits.destination) for waits in await endpoint.delayed.pending()] == [
            ("b", "billing"),
            ("c", "billing"),
        ]
        await clock.advance(timedelta(days=14))
        await settle()
    assert await queued(transport, "billing") == ['{"number":1}', '{"number":2}']


async def test_a_handler_sends_by_route_and_to_its_own_queue(transport: MemoryTransport) -> None:
    endpoint = shop(transport)
    seen: list[str] = []

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(message.text)
        if message.text == "begin":
            await context.send(Bill(1))
            await context.send_many([Send(body=Bill(2))])
            await context.send_local("again")

    async with endpoint:
        await endpoint.send_local("begin")
        await settle()
    assert seen == ["begin", "again"]
    assert await queued(transport, "billing") == ['{"number":1}', '{"number":2}']


def test_the_synchronous_endpoint_sends_by_route_and_to_its_own_queue() -> None:
    transport = MemoryTransport()
    endpoint = shop(transport)
    with SyncEndpoint(endpoint) as sync:
        sync.run(transport.setup_infrastructure(QUEUES))
        sync.send(Bill(1))
        sync.send_local("mine", message_id="m")
        assert sync.run(queued(transport, "billing")) == ['{"number":1}']
        assert sync.run(queued(transport, "shop")) == ["mine"]


async def test_a_type_without_a_route_is_refused_with_the_routes_there_are(transport: MemoryTransport) -> None:
    async with shop(transport) as endpoint:
        with pytest.raises(InvalidMessage, match=r"type .*Point has no route.*routes={Point: .*Bill to 'billing'"):
            await endpoint.send(Point(1))
        with pytest.raises(InvalidMessage, match=r"send\('billing'\) has no body: give send\('billing', body\)"):
            await endpoint.send("billing")
        with pytest.raises(InvalidMessage, match="neither destination nor body"):
            await endpoint.send()  # type: ignore[call-overload]
        with pytest.raises(InvalidMessage, match=r"message 1 of send_many: .*dict has no route"):
            await endpoint.send_many([Send(body=Bill(1)), Send(body={"number": 2})])
    assert await queued(transport, "billing") == []  # all are refused or none


async def test_without_any_route_the_text_says_so(transport: MemoryTransport) -> None:
    async with Endpoint("shop", transport=transport) as endpoint:
        with pytest.raises(InvalidMessage, match="The endpoint has no routes"):
            await endpoint.send(Bill(1))


@pytest.mark.parametrize(
    ("kind", "queue", "text"),
    [
        (Bill, "other", "go to 'billing' already, not to 'other'"),
        (LateBill, "", "must be the name of a queue, not ''"),
        (LateBill, 7, "must be the name of a queue, not 7"),
        (Note, "late", "no type of their own"),
        (dict, "late", "no type of their own"),
        (object, "late", "no type of their own"),
        ("Bill", "late", "not 'Bill'"),
    ],
)
def test_a_route_that_could_not_work_is_refused(kind: Any, queue: Any, text: str) -> None:  # noqa: ANN401
    endpoint = shop(MemoryTransport())
    with pytest.raises(ConfigurationError, match=text):
        endpoint.route(kind, queue)
    endpoint.route(Bill, "billing")  # the same once more is fine


async def test_an_endpoint_without_a_queue_has_no_local_sends(transport: MemoryTransport) -> None:
    async with Endpoint("shop", transport=transport, send_only=True) as endpoint:
        with pytest.raises(ConfigurationError, match="send_only"):
            await endpoint.send_local("mine")
