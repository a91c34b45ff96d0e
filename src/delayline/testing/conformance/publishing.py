"""The part of the conformance suites about events: what subscribers get, at once and when events are due."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import pytest

from delayline.clock import ONE_SECOND
from delayline.errors import DispatchFailed
from delayline.message import Headers, Message
from delayline.serialization import message_type
from delayline.testing.conformance.messages import AT, ENDPOINT, HOSTILE_NAMES, OTHER_QUEUE
from delayline.testing.conformance.transport_fixtures import TransportFixtures, nothing_left, received
from delayline.topics import MAXIMUM_TOPIC_LENGTH, topic_address
from delayline.transport import SupportsPublishing, SupportsTransportTransactions, Transport, TransportOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.testing.conformance.delivery import DeliveryScenario


class PublishingTransport(Transport, SupportsPublishing, Protocol):
    """A transport that claims publishing."""


class RolledBackError(Exception):
    """Rolls a transaction back."""


def event(id: str = "e", *types: str) -> TransportOperation:
    """Return an event of the first type, which derives from the others."""
    names = types or ("Shop.OrderPlaced",)
    return TransportOperation(
        Message(id, {Headers.ENCLOSED_MESSAGE_TYPES: ";".join(names)}, b"body"), topic_address(names[0])
    )


class TransportPublishing(TransportFixtures):
    """Tests of SupportsPublishing."""

    @pytest.fixture
    def publishing(self, transport: Transport) -> PublishingTransport:
        """Provide a started transport that publishes."""
        if not isinstance(transport, SupportsPublishing):
            pytest.skip("not claimed: SupportsPublishing")
        return transport

    async def taken(self, transport: Transport, queue: str, number: int) -> list[str]:
        """Take that many messages from a queue, and return their ids; there must be no more."""
        receiver = await transport.receiver(queue)
        messages = await received(receiver, number) if number else []
        for message in messages:
            await receiver.acknowledge(message)
        await receiver.stop()
        await nothing_left(transport, queue)
        return [message.message.id for message in messages]

    async def test_each_subscriber_gets_a_copy(self, publishing: PublishingTransport) -> None:
        """Also beside messages to queues, in a single dispatch; subscribing twice is subscribing once."""
        for queue in ("billing", "sales", "billing"):
            await publishing.subscribe(queue, ["Shop.OrderPlaced", "Shop.OrderPaid"])
        sent = TransportOperation(Message("m", {}, b"body"), "sales")
        await publishing.dispatch([event("e1"), sent, event("e2", "Shop.OrderPaid")])
        assert sorted(await self.taken(publishing, "billing", 2)) == ["e1", "e2"]
        assert sorted(await self.taken(publishing, "sales", 3)) == ["e1", "e2", "m"]

    async def test_an_event_without_subscribers_goes_to_nobody(self, publishing: PublishingTransport) -> None:
        """It is dispatched all the same, alone and among others."""
        await publishing.subscribe("billing", ["Shop.OrderPaid"])
        await publishing.dispatch([event("alone")])
        await publishing.dispatch([event("first"), event("second", "Shop.OrderPaid")])
        assert await self.taken(publishing, "billing", 1) == ["second"]

    async def test_a_subscriber_to_a_base_type_gets_one_copy(self, publishing: PublishingTransport) -> None:
        """Whatever the number of types that it subscribes to; assemblies of .NET do not matter."""
        await publishing.subscribe("billing", ["Shop.Order"])
        await publishing.subscribe("sales", ["Shop.Order", "Shop.OrderPlaced"])
        await publishing.dispatch([event("e", "Shop.OrderPlaced", "Shop.Order, Contoso, Version=1.0.0.0")])
        assert await self.taken(publishing, "billing", 1) == ["e"]
        assert await self.taken(publishing, "sales", 1) == ["e"]

    async def test_who_has_unsubscribed_gets_no_copies(self, publishing: PublishingTransport) -> None:
        """From then on; other types and other queues keep theirs, and ending what is not there is fine."""
        for queue in ("billing", "sales"):
            await publishing.subscribe(queue, ["Shop.OrderPlaced", "Shop.OrderPaid"])
        for _ in range(2):
            await publishing.unsubscribe("billing", ["Shop.OrderPlaced", "Shop.Never"])
        await publishing.dispatch([event("e1"), event("e2", "Shop.OrderPaid")])
        assert await self.taken(publishing, "billing", 1) == ["e2"]
        assert sorted(await self.taken(publishing, "sales", 2)) == ["e1", "e2"]

    async def test_a_subscriber_whose_queue_is_gone_keeps_nobody_from_theirs(
        self, publishing: PublishingTransport
    ) -> None:
        """The others get their copies, and the event counts as dispatched."""
        await publishing.subscribe("billing", ["Shop.OrderPlaced"])
        await self.subscribe_without_queue(publishing, "gone", ["Shop.OrderPlaced"])
        await publishing.dispatch([event("e")])
        assert await self.taken(publishing, "billing", 1) == ["e"]

    async def subscribe_without_queue(self, transport: PublishingTransport, queue: str, topics: Sequence[str]) -> None:
        """Leave a subscription of a queue that is not there; override it where queues take theirs along."""
        await transport.subscribe(queue, topics)

    async def test_damaged_headers_reach_the_subscribers_of_the_type(self, publishing: PublishingTransport) -> None:
        """They have to see what cannot be read, as with messages that are sent."""
        await publishing.subscribe("billing", ["Shop.OrderPlaced"])
        damaged = Message.from_encoded("e", b"{no headers", b"body")
        await publishing.dispatch([TransportOperation(damaged, topic_address("Shop.OrderPlaced"))])
        receiver = await publishing.receiver("billing")
        assert len(await received(receiver)) == 1
        await receiver.stop()

    @pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if len(name) <= MAXIMUM_TOPIC_LENGTH])
    async def test_names_of_types_are_told_apart_whatever_they_are(
        self, publishing: PublishingTransport, name: str
    ) -> None:
        """Each is a topic of its own, also beside one that differs in a letter's case."""
        if {",", ";"} & {*name}:
            pytest.skip("not claimed: types with a comma or semicolon, which message_type refuses")
        await publishing.subscribe("billing", [name])
        await publishing.subscribe("sales", [name[:-1] or "y", f"{name[:-1]}ß"])
        await publishing.dispatch([event("e", name)])
        assert await self.taken(publishing, "billing", 1) == ["e"]
        assert await self.taken(publishing, "sales", 0) == []

    async def test_long_ids_and_types_arrive(self, publishing: PublishingTransport) -> None:
        """An id of 250 characters, a type of the most that are possible; a longer one in the header is passed over."""
        name, message_id = "t" * MAXIMUM_TOPIC_LENGTH, "i" * 250
        await publishing.subscribe("billing", [name])
        await publishing.dispatch([event(message_id, name, "b" * 5000)])
        assert await self.taken(publishing, "billing", 1) == [message_id]

    async def test_an_event_of_hundreds_of_types_arrives_or_is_refused(self, publishing: PublishingTransport) -> None:
        """A stranger's header: it fails alone, with what to do, where a broker cannot carry so many."""
        await publishing.subscribe("billing", ["Shop.OrderPlaced"])
        await publishing.subscribe("sales", ["base7"])
        many = event("many", "Shop.OrderPlaced", *(f"base{number}" for number in range(300)))
        try:
            await publishing.dispatch([many, event("e")])
        except DispatchFailed as failed:
            assert "@message_type" in str(failed.failures.pop(0))
            assert failed.failures == {}
            assert await self.taken(publishing, "billing", 1) == ["e"]
        else:
            assert sorted(await self.taken(publishing, "billing", 2)) == ["e", "many"]
            assert await self.taken(publishing, "sales", 1) == ["many"]

    async def test_an_event_is_published_with_the_transaction_or_not_at_all(
        self, publishing: PublishingTransport
    ) -> None:
        """After a rollback nobody has a copy."""
        if not isinstance(publishing, SupportsTransportTransactions):
            pytest.skip("not claimed: SupportsTransportTransactions")
        await publishing.subscribe("billing", ["Shop.OrderPlaced"])
        with pytest.raises(RolledBackError):
            async with publishing.transaction() as transaction:
                await publishing.dispatch([event("undone")], transaction)
                raise RolledBackError
        async with publishing.transaction() as transaction:
            await publishing.dispatch([event("done")], transaction)
        assert await self.taken(publishing, "billing", 1) == ["done"]


@message_type("Shop.Order")
@dataclass
class Order:
    """A base of events."""

    number: int


@message_type("Shop.OrderPlaced")
@dataclass
class OrderPlaced(Order):
    """An event."""


class DeliveryPublishing:
    """Tests of delayed events; a part of the delivery suite."""

    @pytest.fixture
    def publisher(self, scenario: DeliveryScenario) -> SupportsPublishing:
        """Provide the transport, which publishes."""
        transport = scenario.transport
        if not isinstance(transport, SupportsPublishing):
            pytest.skip("not claimed: SupportsPublishing")
        return transport

    async def test_a_delayed_event_goes_to_who_subscribes_when_it_is_due(
        self, scenario: DeliveryScenario, publisher: SupportsPublishing
    ) -> None:
        """A subscription that came meanwhile counts, one that was removed does not, and nobody is no failure."""
        await publisher.subscribe(ENDPOINT, ["Shop.OrderPlaced"])
        async with scenario.endpoint(handles=False) as endpoint:
            await endpoint.publish(OrderPlaced(1), message_id="both", delay=5 * ONE_SECOND)
            await endpoint.publish(OrderPlaced(2), message_id="other", delay=10 * ONE_SECOND)
            await endpoint.publish(OrderPlaced(3), message_id="nobody", delay=15 * ONE_SECOND)
            await publisher.subscribe(OTHER_QUEUE, ["Shop.Order"])  # a base
            await scenario.advance_to(AT + 5 * ONE_SECOND)
            await scenario.removed(1)
            await publisher.unsubscribe(ENDPOINT, ["Shop.OrderPlaced"])
            await scenario.advance_to(AT + 10 * ONE_SECOND)
            await scenario.removed(2)
            await publisher.unsubscribe(OTHER_QUEUE, ["Shop.Order"])
            await scenario.advance_to(AT + 15 * ONE_SECOND)
            await scenario.removed(3)
            await scenario.nothing_waits()
        assert [message.id for message in await scenario.received(ENDPOINT)] == ["both"]
        others = await scenario.received(OTHER_QUEUE, 2)
        assert sorted(message.id for message in others) == ["both", "other"]
        assert others[0].headers[Headers.INTENT] == "Publish"
        assert others[0].headers[Headers.ENCLOSED_MESSAGE_TYPES] == "Shop.OrderPlaced;Shop.Order"

    async def test_an_event_of_250_characters_of_id_waits_and_arrives_among_messages(
        self, scenario: DeliveryScenario, publisher: SupportsPublishing
    ) -> None:
        """Due at the same time as messages to queues, none is late or lost."""
        await publisher.subscribe(OTHER_QUEUE, ["Shop.OrderPlaced"])
        async with scenario.endpoint(handles=False) as endpoint:
            for message_id in ("a", "b"):
                await endpoint.send(OTHER_QUEUE, b"", message_id=message_id, delay=timedelta(seconds=5))
            await endpoint.publish(OrderPlaced(1), message_id="i" * 250, delay=timedelta(seconds=5))
            await scenario.advance_to(AT + 5 * ONE_SECOND)
            await scenario.removed(1)
            await scenario.nothing_waits()
        messages = await scenario.received(OTHER_QUEUE, 3)
        assert sorted(message.id for message in messages) == ["a", "b", "i" * 250]
