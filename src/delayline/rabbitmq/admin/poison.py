"""The poison queue of a move: messages that could not be moved, each with the reason and its former level."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delayline.message import Message, from_wire_time, to_wire_time
from delayline.rabbitmq.admin.drain import LevelMessage
from delayline.rabbitmq.browsing import count, must_exist
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.forwarding import sent_on
from delayline.rabbitmq.levels import parse
from delayline.rabbitmq.publisher import Publisher
from delayline.rabbitmq.refusals import NotFound
from delayline.rabbitmq.topology import queue_declaration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery
    from delayline.rabbitmq.connection import BrokerConnection

#: Prefix of the headers with the reason, the former routing key and level, and the due time if it is known.
MARK: Final = "Delayline.Poison."
REASON: Final = f"{MARK}Reason"
ROUTING_KEY: Final = f"{MARK}RoutingKey"
LEVEL: Final = f"{MARK}Level"
DUE_MARK: Final = f"{MARK}Due"


class PoisonMessage(NamedTuple):
    """A message that cannot be moved, with the reason, and its due time if it is known."""

    delivered: Delivery
    reason: str
    waits: LevelMessage | None


class PoisonQueue:
    """The queue for messages that a move cannot move; a classic queue, as .NET's tool creates it."""

    def __init__(self, address: BrokerAddress, connection: BrokerConnection, name: str) -> None:
        self.queue: str = f"delays-{name}-poison-messages"
        self._connection = connection
        self._publisher = Publisher(address, connection_name=f"delayline {name} poison")

    async def open(self) -> None:
        """Create the queue where it is missing. Raises BackendUnavailable or BackendUnusable."""
        try:
            await self._connection.run(lambda channel: must_exist(channel, self.queue))
        except NotFound:
            await self._connection.run(lambda channel: channel.call(queue_declaration(self.queue, "classic")))
        await self._publisher.open()

    async def close(self) -> None:
        """Disconnect the publisher. Idempotent."""
        await self._publisher.close()

    async def keep(self, unmoved: Sequence[PoisonMessage], level: int) -> None:
        """Publish messages to the queue and wait for the broker's confirms. Raises the first error."""
        refused = await self._publisher.publish([self._publication(message, level) for message in unmoved])
        for error in refused.values():
            raise error

    async def movable(self, channel: Channel) -> AsyncIterator[tuple[Delivery, LevelMessage]]:
        """Yield messages that only lacked a destination; unacknowledged messages return when the channel is closed."""
        for _ in range(await count(channel, self.queue)):
            delivered = await channel.get(self.queue)
            if delivered is None:
                return
            waits = _waiting(delivered.properties.headers)
            if waits is not None:
                yield delivered, waits

    def _publication(self, message: PoisonMessage, level: int) -> Publication:
        marks: dict[str, str | int] = {REASON: message.reason, ROUTING_KEY: message.delivered.routing_key, LEVEL: level}
        if message.waits is not None:
            marks[DUE_MARK] = to_wire_time(message.waits.due)
        return Publication(content(message.delivered), "", self.queue, properties=carried(message.delivered, marks))


def content(delivered: Delivery) -> Message:
    """Return the body as a message for a publication that brings its properties along."""
    return Message(delivered.properties.message_id, {}, delivered.body)


def carried(delivered: Delivery, marks: Mapping[str, str | int] = MappingProxyType({})) -> bytes:
    """Return the properties to send on, with the marks and no older marks."""
    return sent_on(delivered.encoded_properties, marks, without=MARK)


def _waiting(headers: Mapping[str, Any]) -> LevelMessage | None:
    """Return destination and due time of a poison message; None for other faults, or another tool's."""
    parsed = parse(str(headers.get(ROUTING_KEY, "")))
    try:
        due = from_wire_time(str(headers.get(DUE_MARK, "")))
    except ValueError:
        return None
    return None if parsed is None else LevelMessage(parsed[1], due, stale=False)
