"""Events on RabbitMQ: as NServiceBus publishes them and subscribes to them, in both topologies, at once and delayed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from tests.eventually import eventually_async
from tests.integration.recordings import body_of, look, publish, recorded, tap

from delayline import Endpoint, Headers, MessageContext, message_type
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport


@message_type("Contoso.Lab.Happened")
@dataclass
class Happened:
    Label: str


@message_type("Contoso.Lab.HappenedAgain")
@dataclass
class HappenedAgain(Happened):
    pass


#: Whose name the other's ends in.
@message_type("Lab.HappenedAgain")
@dataclass
class Alike(Happened):
    pass


#: Its name ends in another's, which no binding may take for the other's.
@message_type("Other.Contoso.Lab.Happened")
@dataclass
class HappenedElsewhere:
    Label: str


TOPOLOGIES = pytest.mark.parametrize(
    ("topology", "exchange", "key"),
    [("conventional", "Contoso.Lab:Happened", ""), ("direct", "amq.topic", "Contoso-Lab-Happened")],
)


def the_event(topology: str, exchange: str, key: str) -> dict[str, Any]:
    rows = recorded(f"rabbitmq-v2-{topology}")
    return next(row for row in rows if (row["exchange"], row["routing_key"]) == (exchange, key))


def shop(url: str, topology: str) -> Endpoint:
    transport = RabbitMQTransport(url, topology=topology)
    return Endpoint("shop", transport=transport, delayed_delivery=DelayLevelDelivery())


def subscriber(url: str, topology: str, name: str, kind: Any, got: list[str]) -> Endpoint:  # noqa: ANN401
    endpoint = Endpoint(name, transport=RabbitMQTransport(url, topology=topology))

    async def note(event: Happened, context: MessageContext) -> None:
        got.append(event.Label)

    endpoint.subscribe(kind, note)
    return endpoint


@TOPOLOGIES
async def test_an_event_is_published_as_dotnet_publishes_it(
    rabbitmq_url: str, topology: str, exchange: str, key: str
) -> None:
    """Given .NET's event, when ours of that type is published, then exchange, key, type and intent are the same."""
    row = the_event(topology, exchange, key)
    got: list[str] = []
    async with shop(rabbitmq_url, topology) as publisher, subscriber(rabbitmq_url, topology, "other", Happened, got):
        await tap(rabbitmq_url, [exchange])
        await publisher.publish(Happened("event"))
        await eventually_async(lambda: got == ["event"])
    [ours] = await look(rabbitmq_url, "tap")
    assert (ours.exchange, ours.routing_key, ours.body) == (row["exchange"], row["routing_key"], body_of(row))
    assert ours.properties["message_type"] == row["properties"]["type"]
    assert ours.values[Headers.INTENT] == row["headers"][Headers.INTENT]["value"] == "Publish"
    theirs = row["headers"][Headers.ENCLOSED_MESSAGE_TYPES]["value"]
    assert ours.values[Headers.ENCLOSED_MESSAGE_TYPES] == theirs.partition(",")[0]


@TOPOLOGIES
async def test_an_event_of_dotnet_reaches_subscribers(
    rabbitmq_url: str, topology: str, exchange: str, key: str
) -> None:
    """Given a subscriber, when .NET publishes, then its handler gets the event; and none once it has unsubscribed."""
    row = the_event(topology, exchange, key)
    got: list[str] = []
    async with subscriber(rabbitmq_url, topology, "other", Happened, got) as endpoint:
        await publish(rabbitmq_url, [row], exchange, key)
        await eventually_async(lambda: got == ["event"])
        await endpoint.unsubscribe(Happened)
        await publish(rabbitmq_url, [row], exchange, key)
        await endpoint.send("other", Happened("last"))
        await eventually_async(lambda: "last" in got)
    assert got == ["event", "last"]


@pytest.mark.parametrize("topology", ["conventional", "direct"])
async def test_delayed_events_go_through_the_levels_to_who_subscribes_when_they_are_due(
    rabbitmq_url: str, topology: str
) -> None:
    """Also to subscribers of a base, and to none of a type whose name ends alike; nobody holds no level up."""
    early: list[str] = []
    base: list[str] = []
    alike: list[str] = []
    delay = timedelta(seconds=3)
    async with (
        shop(rabbitmq_url, topology) as publisher,
        subscriber(rabbitmq_url, topology, "early", HappenedAgain, early) as first,
    ):
        await publisher.publish(HappenedAgain("both"), delay=delay)
        await publisher.publish(HappenedElsewhere("nobody"), delay=delay)
        async with (
            subscriber(rabbitmq_url, topology, "base", Happened, base),
            subscriber(rabbitmq_url, topology, "alike", Alike, alike),
        ):
            await eventually_async(lambda: early == ["both"] and base == ["both"])
            await publisher.publish(HappenedAgain("later"), delay=delay)
            await first.unsubscribe(HappenedAgain)
            await eventually_async(lambda: base == ["both", "later"])
            await publisher.publish(HappenedAgain("now"))
            await eventually_async(lambda: base == ["both", "later", "now"])
    assert (early, alike) == (["both"], [])
