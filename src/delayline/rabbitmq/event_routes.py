"""Events on RabbitMQ: the exchanges and bindings that lead from an event's type to its subscribers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable, ConfigurationError, InvalidMessage, QueueNotFound
from delayline.rabbitmq.amqp.methods import QueueBind, QueueDeclare
from delayline.rabbitmq.amqp.wire import LONGEST_SHORT_STRING
from delayline.rabbitmq.browsing import must_exist
from delayline.rabbitmq.refusals import NotFound, PreconditionFailed
from delayline.topics import topics_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pamqp.common import FieldTable

    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.connection import BrokerConnection
    from delayline.rabbitmq.topology import Topology
    from delayline.transport import TransportOperation

#: Gets a copy of each delayed event that is due, and drops it at once. The levels forward at least once: without any
#: queue an event that nobody subscribes to would stay in a level, and hold others up.
SINK: Final = "delayline.delayed-events"
SINK_ARGUMENTS: Final[FieldTable] = {"x-queue-type": "classic", "x-message-ttl": 0}
#: So many types are remembered as declared.
MOST_DECLARED: Final = 10_000


class EventRoutes:
    """Declares what events need on a broker, each once over a connection.

    Args:
        connection: The connection for declarations.
        topology: How events are routed.
    """

    def __init__(self, connection: BrokerConnection, topology: Topology) -> None:
        self._connection = connection
        self._topology = topology
        self._declared: set[tuple[str, ...]] = set()
        self._declared_over = 0
        self._declaring = asyncio.Lock()

    async def publishing(self, event: TransportOperation) -> tuple[str, str]:
        """Return the exchange and the key that an event is published to, declared.

        Raises InvalidMessage for a type that the broker cannot carry, and BackendUnusable.
        """
        topics = tuple(topics_of(event))
        exchange, key = _routed(self._topology, topics)
        if not self._is_declared(topics):
            async with self._declaring:
                if not self._is_declared(topics):
                    await self._declare(topics)
        return exchange, key

    def forget(self, event: TransportOperation) -> None:
        """Declare the event's type again before its next event: nothing was routed."""
        self._declared.discard(tuple(topics_of(event)))

    async def bind_delivery(self, event: TransportOperation, delivery_exchange: str) -> None:
        """Have an exchange pass delayed events of the type on to who subscribes then. Idempotent."""
        topics = topics_of(event)

        async def bind(channel: Channel) -> None:
            await self._topology.bind_delayed_events(channel, topics, delivery_exchange)
            await channel.call(QueueDeclare(queue=SINK, durable=True, arguments=SINK_ARGUMENTS))
            key = f"#.{self._topology.delayed_event_key(topics)}"
            await channel.call(QueueBind(queue=SINK, exchange=delivery_exchange, routing_key=key))

        try:
            await self._connection.run(bind)
        except (PreconditionFailed, NotFound) as error:
            raise BackendUnusable(f"delayed events of {topics[0]!r} cannot be routed: {error}") from error

    def delayed_key(self, event: TransportOperation) -> str:
        """Return the destination of a delayed event in the levels' routing keys."""
        return self._topology.delayed_event_key(topics_of(event))

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have events; see `SupportsPublishing`."""
        await self._change(queue, topics, undo=False)

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more events; see `SupportsPublishing`."""
        await self._change(queue, topics, undo=True)

    async def _change(self, queue: str, topics: Sequence[str], *, undo: bool) -> None:
        for topic in topics:
            try:
                _routed(self._topology, [topic])
            except InvalidMessage as error:
                raise ConfigurationError(str(error)) from error
        work = self._topology.unsubscribe if undo else self._topology.subscribe
        for topic in topics:
            try:
                await self._connection.run(partial(must_exist, queue=queue))
                await self._connection.run(partial(work, queue=queue, event_type=topic))
            except NotFound as error:
                if undo:  # neither binds what is not there
                    continue
                raise QueueNotFound(queue) from error
            except PreconditionFailed as error:
                raise BackendUnusable(
                    f"the exchange of {topic!r} is there already, and not as .NET has it: {error}"
                ) from error

    def _is_declared(self, topics: tuple[str, ...]) -> bool:
        if self._declared_over != self._connection.generation:
            self._declared.clear()
            self._declared_over = self._connection.generation
        return topics in self._declared

    async def _declare(self, topics: tuple[str, ...]) -> None:
        try:
            await self._connection.run(partial(self._topology.declare_event, topics=topics))
        except (PreconditionFailed, NotFound) as error:
            raise BackendUnusable(
                f"the exchange of {topics[0]!r}, or of a base of it, is there already, and not as .NET has it: {error}"
            ) from error
        if len(self._declared) >= MOST_DECLARED:
            self._declared.clear()
        self._declared_over = self._connection.generation
        self._declared.add(topics)


def _routed(topology: Topology, topics: Sequence[str]) -> tuple[str, str]:
    """Return exchange and key. Raises InvalidMessage for names that they cannot be made of."""
    exchange, key = topology.event_address(topics)
    longest = max([exchange, key, *(topology.event_address([topic])[0] for topic in topics)], key=_bytes)
    if _bytes(longest) > LONGEST_SHORT_STRING - len("#..#"):
        raise InvalidMessage(
            f"the type {topics[0][:60]!r} makes {longest[:60]!r}... of {_bytes(longest)} bytes, RabbitMQ takes "
            f"{LONGEST_SHORT_STRING - len('#..#')}: give it, and its bases, shorter names with @message_type"
        )
    if {"*", "#"} & {*topics}:
        raise InvalidMessage(
            "a type cannot be named * or #, which are patterns to RabbitMQ: name it with @message_type"
        )
    return exchange, key


def _bytes(name: str) -> int:
    return len(name.encode("utf-8", "surrogatepass"))
