"""Browsing a queue: AMQP can only take messages and return them, so browsing does that.

Messages are returned by closing the channel, because rejected messages go to the end of a quorum queue. Many of them
may return in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pamqp import commands

from delayline.errors import InvalidMessage
from delayline.message import Message
from delayline.rabbitmq.amqp.methods import QueueDeclare, QueuePurge
from delayline.rabbitmq.amqp.properties import message_from

if TYPE_CHECKING:
    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery


async def count(channel: Channel, queue: str) -> int:
    """Return the number of messages that no consumer has."""
    answer = await channel.call(QueueDeclare(queue=queue, passive=True))
    return answer.message_count if isinstance(answer, commands.Queue.DeclareOk) and answer.message_count else 0


async def browse(channel: Channel, queue: str, limit: int, offset: int) -> list[Message]:
    """Return messages that no consumer has, oldest first; they return to the queue when the channel is closed."""
    await count(channel, queue)
    seen: list[Message] = []
    number = 0
    while number < offset + limit and (delivered := await channel.get(queue)) is not None:
        number += 1
        if number > offset:
            seen.append(_shown(delivered))
    return seen


async def take(channel: Channel, queue: str, message_id: str) -> bool:
    """Remove the oldest such copy; messages before it return to the queue when the channel is closed."""
    await count(channel, queue)
    while (delivered := await channel.get(queue)) is not None:
        if _shown(delivered).id == message_id:
            channel.acknowledge(delivered.tag)
            return True
    return False


async def purge(channel: Channel, queue: str) -> int:
    """Remove every message that no consumer has; return their number."""
    answer = await channel.call(QueuePurge(queue=queue))
    return answer.message_count if isinstance(answer, commands.Queue.PurgeOk) and answer.message_count else 0


def _shown(delivered: Delivery) -> Message:
    try:
        return message_from(delivered)
    except InvalidMessage:
        return Message("", {}, delivered.body)
