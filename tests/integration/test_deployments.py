"""A deployment: processes of an older program run beside those of a newer one, which has a new type of message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async

from delayline import Endpoint, MessageContext, SqlDelayedMessageStore, SqlTransport
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.transport import SupportsQueueManagement

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class OrderPlaced:
    number: int


@dataclass
class OrderPaid:
    number: int


def endpoint_at(url: str, handled: list[object], *kinds: type) -> Endpoint:
    if url.startswith("amqp"):
        endpoint = Endpoint("shop", transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery())
    else:
        endpoint = Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))

    async def note(value: object, context: MessageContext) -> None:
        handled.append(value)

    for kind in kinds:
        endpoint.handles(kind)(note)
    return endpoint


@pytest.mark.parametrize("place", ["sqlite", "postgresql", "mariadb", "rabbitmq"])
async def test_messages_of_a_new_type_reach_the_newer_program(
    request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    # Given a process of the older program, to which messages of a new type come
    url = f"sqlite:///{tmp_path / 'shop.db'}" if place == "sqlite" else request.getfixturevalue(f"{place}_url")
    handled: list[object] = []
    older, newer = endpoint_at(url, handled, OrderPlaced), endpoint_at(url, handled, OrderPlaced, OrderPaid)
    async with older:
        sent = [OrderPaid(number) for number in range(20)]
        for paid in sent:
            await older.send("shop", paid)
        await older.send("shop", OrderPlaced(1))
        await eventually_async(lambda: handled == [OrderPlaced(1)])
        # When a process of the newer program comes, and the older one goes
        async with newer:
            await eventually_async(lambda: OrderPaid in map(type, handled))
            await older.stop()
            # Then each is handled, and none is an error
            await eventually_async(lambda: len(handled) == 21)
            assert isinstance(newer.transport, SupportsQueueManagement)
            assert await newer.transport.count("error") == 0
    assert sorted(map(repr, handled[1:])) == sorted(map(repr, sent))
