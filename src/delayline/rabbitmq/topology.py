"""How queues hang together with exchanges: as NServiceBus' conventional or direct routing has it.

See https://docs.particular.net/transports/rabbitmq/routing-topology.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from delayline.rabbitmq.amqp.methods import ExchangeBind, ExchangeDeclare, QueueBind, QueueDeclare, ask

if TYPE_CHECKING:
    from aiormq.channel import Channel

#: Arguments of a queue declaration; classic is the default and has none.
QUEUE_ARGUMENTS: Final = {"quorum": {"x-queue-type": "quorum"}, "classic": {}}


class Topology(Protocol):
    """A routing topology. Its methods raise aiormq's errors: 404 for a missing object, 406 for one that differs."""

    def address_of(self, destination: str) -> tuple[str, str]:
        """Return the exchange and the routing key that lead to the destination's queue."""
        ...

    async def declare(self, channel: Channel, queue: str, queue_type: str) -> None:
        """Create the queue with its exchange and bindings. Idempotent."""
        ...

    async def check(self, channel: Channel, destination: str) -> None:
        """Raise ChannelNotFoundEntity if the object that `address_of` names does not exist."""
        ...

    async def bind_delivery(self, channel: Channel, destination: str, delivery_exchange: str) -> None:
        """Have delayed messages for the destination get there: bind `#.<destination>`. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ConventionalTopology:
    """A fanout exchange of each queue's name leads to it: others may bind to that as well."""

    def address_of(self, destination: str) -> tuple[str, str]:
        """Return the exchange of the destination's name."""
        return destination, ""

    async def declare(self, channel: Channel, queue: str, queue_type: str) -> None:
        """Create the queue, its exchange and their binding."""
        await ask(channel, QueueDeclare(queue=queue, durable=True, arguments=dict(QUEUE_ARGUMENTS[queue_type])))
        await ask(channel, ExchangeDeclare(exchange=queue, exchange_type="fanout", durable=True))
        await ask(channel, QueueBind(queue=queue, exchange=queue))

    async def check(self, channel: Channel, destination: str) -> None:
        """Look whether the exchange is there: publishing to one that is not would end the publisher's channel."""
        await channel.rpc(ExchangeDeclare(exchange=destination, passive=True))

    async def bind_delivery(self, channel: Channel, destination: str, delivery_exchange: str) -> None:
        """Bind the destination's exchange."""
        await ask(
            channel, ExchangeBind(destination=destination, source=delivery_exchange, routing_key=f"#.{destination}")
        )


@dataclass(frozen=True, slots=True)
class DirectTopology:
    """The broker's default exchange leads to every queue by its name."""

    def address_of(self, destination: str) -> tuple[str, str]:
        """Return the default exchange, and the destination as key."""
        return "", destination

    async def declare(self, channel: Channel, queue: str, queue_type: str) -> None:
        """Create the queue."""
        await ask(channel, QueueDeclare(queue=queue, durable=True, arguments=dict(QUEUE_ARGUMENTS[queue_type])))

    async def check(self, channel: Channel, destination: str) -> None:
        """No-op: the broker returns messages without a queue."""

    async def bind_delivery(self, channel: Channel, destination: str, delivery_exchange: str) -> None:
        """Bind the queue."""
        await ask(channel, QueueBind(queue=destination, exchange=delivery_exchange, routing_key=f"#.{destination}"))


TOPOLOGIES: Final[dict[str, Topology]] = {"conventional": ConventionalTopology(), "direct": DirectTopology()}
