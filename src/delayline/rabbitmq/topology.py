"""Exchanges and bindings of queues, as NServiceBus' conventional or direct routing creates them.

See https://docs.particular.net/transports/rabbitmq/routing-topology.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from delayline.rabbitmq.amqp.methods import (
    ExchangeBind,
    ExchangeDeclare,
    ExchangeUnbind,
    QueueBind,
    QueueDeclare,
    QueueUnbind,
)
from delayline.rabbitmq.browsing import must_exist
from delayline.rabbitmq.refusals import NotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.connection import BrokerConnection


#: The exchange that the direct topology publishes events to.
EVENTS: Final = "amq.topic"
#: Milliseconds after which a queue is removed that nobody receives from.
EXPIRES: Final = "x-expires"
#: Arguments of a queue declaration. Classic queues name their type too, as a virtual host may have another default; to
#: a broker that equals the declarations of .NET, which do not.
LONGEST_COMPARED: Final = 85
"""Bytes of a queue's and its virtual host's name that fit into an answer of 255, beside two values of an argument."""
QUEUE_ARGUMENTS: Final = {"quorum": {"x-queue-type": "quorum"}, "classic": {"x-queue-type": "classic"}}


class Topology(Protocol):
    """A routing topology. Its methods raise NotFound for missing objects and PreconditionFailed for others."""

    def address_of(self, destination: str) -> tuple[str, str]:
        """Return the exchange and the routing key that lead to the destination's queue."""
        ...

    async def declare(self, channel: Channel, queue: str, queue_type: str | None, arguments: Mapping[str, int]) -> None:
        """Create the queue with its exchange and bindings. Idempotent.

        Args:
            channel: An open channel.
            queue: The queue's name.
            queue_type: `quorum` or `classic`; None for a queue that exists, whatever its type.
            arguments: Further arguments of a new queue.
        """
        ...

    async def check(self, channel: Channel, destination: str) -> None:
        """Raise NotFound if the object that `address_of` names does not exist."""
        ...

    async def bind_delivery(self, channel: Channel, destination: str, delivery_exchange: str) -> None:
        """Have delayed messages for the destination get there: bind `#.<destination>`. Idempotent."""
        ...

    async def subscribe(self, channel: Channel, queue: str, event_type: str) -> None:
        """Have events of the type, by its full name, get into the queue, as .NET publishes them. Idempotent."""
        ...

    async def unsubscribe(self, channel: Channel, queue: str, event_type: str) -> None:
        """Undo `subscribe`. Idempotent."""
        ...

    def event_address(self, topics: Sequence[str]) -> tuple[str, str]:
        """Return the exchange and the routing key that an event of the first type goes to; others are its bases."""
        ...

    async def declare_event(self, channel: Channel, topics: Sequence[str]) -> None:
        """Create what an event of the first type needs, so that subscribers to the others get it too. Idempotent."""
        ...

    def delayed_event_key(self, topics: Sequence[str]) -> str:
        """Return the destination of such an event in the routing keys of the levels."""
        ...

    async def bind_delayed_events(self, channel: Channel, topics: Sequence[str], delivery_exchange: str) -> None:
        """Have due events get where `event_address` leads to. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ConventionalTopology:
    """A fanout exchange of each queue's name leads to it: others may bind to that as well."""

    def address_of(self, destination: str) -> tuple[str, str]:
        """Return the exchange of the destination's name."""
        return destination, ""

    async def declare(self, channel: Channel, queue: str, queue_type: str | None, arguments: Mapping[str, int]) -> None:
        """Create the queue, its exchange and their binding; the exchange of a queue that expires goes with it."""
        await channel.call(queue_declaration(queue, queue_type, arguments))
        expires = EXPIRES in arguments
        await channel.call(ExchangeDeclare(exchange=queue, exchange_type="fanout", durable=True, auto_delete=expires))
        await channel.call(QueueBind(queue=queue, exchange=queue))

    async def check(self, channel: Channel, destination: str) -> None:
        """Look whether the exchange is there: publishing to a missing exchange would end the publisher's channel."""
        await channel.call(ExchangeDeclare(exchange=destination, passive=True))

    async def bind_delivery(self, channel: Channel, destination: str, delivery_exchange: str) -> None:
        """Bind the destination's exchange."""
        await channel.call(
            ExchangeBind(destination=destination, source=delivery_exchange, routing_key=f"#.{destination}")
        )

    async def subscribe(self, channel: Channel, queue: str, event_type: str) -> None:
        """Bind the queue's exchange to that of the type, which publishers and subscribers create."""
        events = _event_exchange(event_type)
        await channel.call(ExchangeDeclare(exchange=events, exchange_type="fanout", durable=True))
        await channel.call(ExchangeBind(destination=queue, source=events))

    async def unsubscribe(self, channel: Channel, queue: str, event_type: str) -> None:
        """Undo the binding; the exchange stays, as others may use it."""
        await channel.call(ExchangeUnbind(destination=queue, source=_event_exchange(event_type)))

    def event_address(self, topics: Sequence[str]) -> tuple[str, str]:
        """Return the exchange of the type."""
        return _event_exchange(topics[0]), ""

    async def declare_event(self, channel: Channel, topics: Sequence[str]) -> None:
        """Create an exchange for each type, and bind those of the bases to that of the first."""
        own, *bases = dict.fromkeys(map(_event_exchange, topics))
        for exchange in (own, *bases):
            await channel.call(ExchangeDeclare(exchange=exchange, exchange_type="fanout", durable=True))
        for base in bases:
            await channel.call(ExchangeBind(destination=base, source=own))

    def delayed_event_key(self, topics: Sequence[str]) -> str:
        """Return a key of a single word, which no other type's ends in."""
        return f"topic:{_event_exchange(topics[0]).replace('%', '%25').replace('.', '%2E')}"

    async def bind_delayed_events(self, channel: Channel, topics: Sequence[str], delivery_exchange: str) -> None:
        """Bind the exchange of the type."""
        key = f"#.{self.delayed_event_key(topics)}"
        await channel.call(
            ExchangeBind(destination=_event_exchange(topics[0]), source=delivery_exchange, routing_key=key)
        )


@dataclass(frozen=True, slots=True)
class DirectTopology:
    """The broker's default exchange leads to every queue by its name."""

    def address_of(self, destination: str) -> tuple[str, str]:
        """Return the default exchange, and the destination as key."""
        return "", destination

    async def declare(self, channel: Channel, queue: str, queue_type: str | None, arguments: Mapping[str, int]) -> None:
        """Create the queue."""
        await channel.call(queue_declaration(queue, queue_type, arguments))

    async def check(self, channel: Channel, destination: str) -> None:
        """No-op: the broker returns messages without a queue."""

    async def bind_delivery(self, channel: Channel, destination: str, delivery_exchange: str) -> None:
        """Bind the queue."""
        await channel.call(QueueBind(queue=destination, exchange=delivery_exchange, routing_key=f"#.{destination}"))

    async def subscribe(self, channel: Channel, queue: str, event_type: str) -> None:
        """Bind the queue to the broker's topic exchange, by the type's name."""
        await channel.call(QueueBind(queue=queue, exchange=EVENTS, routing_key=_event_key(event_type)))

    async def unsubscribe(self, channel: Channel, queue: str, event_type: str) -> None:
        """Undo the binding."""
        await channel.call(QueueUnbind(queue=queue, exchange=EVENTS, routing_key=_event_key(event_type)))

    def event_address(self, topics: Sequence[str]) -> tuple[str, str]:
        """Return the broker's topic exchange, and a key with a word for each type, the bases first."""
        return EVENTS, ".".join(map(_event_word, reversed(topics)))

    async def declare_event(self, channel: Channel, topics: Sequence[str]) -> None:
        """No-op: the broker has its topic exchange."""

    def delayed_event_key(self, topics: Sequence[str]) -> str:
        """Return the key of the event itself: subscribers' bindings match it behind the bits of the delay too."""
        return self.event_address(topics)[1]

    async def bind_delayed_events(self, channel: Channel, topics: Sequence[str], delivery_exchange: str) -> None:
        """Bind the topic exchange."""
        key = f"#.{self.delayed_event_key(topics)}"
        await channel.call(ExchangeBind(destination=EVENTS, source=delivery_exchange, routing_key=key))


def _event_exchange(event_type: str) -> str:
    """Return the exchange of a .NET type: `Namespace:Type`."""
    namespace, _, name = event_type.rpartition(".")
    return event_type if ":" in event_type else f"{namespace}:{name}"


def _event_key(event_type: str) -> str:
    """Return the binding key for a .NET type and for types derived from it, whose keys contain its own."""
    return f"#.{_event_word(event_type)}.#"


def _event_word(event_type: str) -> str:
    """Return the word for a .NET type in the keys of its events."""
    return event_type.replace(":", ".").replace(".", "-")


def queue_declaration(
    queue: str, queue_type: str | None, arguments: Mapping[str, int] = MappingProxyType({})
) -> QueueDeclare:
    """Return the declaration of a queue; without a type a declaration that fails unless the queue exists."""
    if queue_type is None:
        return QueueDeclare(queue=queue, passive=True)
    return QueueDeclare(queue=queue, durable=True, arguments={**QUEUE_ARGUMENTS[queue_type], **arguments})


def can_be_compared(queue: str, vhost: str) -> bool:
    """Return whether a broker answers the declaration of an existing queue with other arguments.

    RabbitMQ 4 ends the connection over an answer of more than 255 bytes that is not ASCII.
    """
    return (queue + vhost).isascii() or len((queue + vhost).encode()) <= LONGEST_COMPARED


TOPOLOGY_TYPES: Final[dict[str, Topology]] = {"conventional": ConventionalTopology(), "direct": DirectTopology()}


CONVENTIONAL: Final = ConventionalTopology()
DIRECT: Final = DirectTopology()


class Routability:
    """The destinations of a broker; each is asked for once.

    Args:
        only_look: bind nothing, for a dry run.
    """

    def __init__(self, connection: BrokerConnection, delivery_exchange: str, *, only_look: bool) -> None:
        self._connection = connection
        self._delivery = delivery_exchange
        self._only_look = only_look
        self._known: dict[str, bool] = {}

    async def includes(self, destination: str) -> bool:
        """Bind the destination's exchange, or its queue where it has none; False where there is neither."""
        if destination not in self._known:
            self._known[destination] = await self._any_of(*self._ways(destination))
        return self._known[destination]

    def _ways(self, destination: str) -> tuple[Callable[[Channel], Awaitable[object]], ...]:
        if self._only_look:
            return (
                lambda channel: CONVENTIONAL.check(channel, destination),
                lambda channel: must_exist(channel, destination),
            )
        return (
            lambda channel: CONVENTIONAL.bind_delivery(channel, destination, self._delivery),
            lambda channel: DIRECT.bind_delivery(channel, destination, self._delivery),
        )

    async def _any_of(self, *ways: Callable[[Channel], Awaitable[object]]) -> bool:
        for way in ways:
            try:
                await self._connection.run(way)
            except NotFound:
                continue
            return True
        return False
