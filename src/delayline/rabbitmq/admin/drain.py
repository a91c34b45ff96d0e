"""Taking messages from delay levels batch by batch; unacknowledged messages return to their place."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable
from delayline.rabbitmq.amqp.methods import ExchangeDeclare
from delayline.rabbitmq.browsing import count
from delayline.rabbitmq.connection import LOST, BrokerConnection, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiormq.abc import DeliveredMessage
    from aiormq.channel import Channel

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.infrastructure import DelayInfrastructure

ADVICE: Final = "Create them with: delayline rabbitmq create"
SILENCE: Final = 1.0  # seconds without a message, before the level is counted again
PATIENCE: Final = 30  # number of such waits while other consumers seem to have the remaining messages


async def must_have_levels(
    levels: DelayInfrastructure, address: BrokerAddress, connection: BrokerConnection, *, advice: str = ADVICE
) -> None:
    """Raise BackendUnusable where they are not complete."""

    async def look(channel: Channel) -> None:
        await channel.rpc(ExchangeDeclare(exchange=levels.delivery, passive=True))
        for queue in levels.queues:
            await count(channel, queue.name)

    try:
        await connection.run(look)
    except NotFound as error:
        raise BackendUnusable(
            f"there are no complete delay levels {levels.prefix}* at {address}: {error}. {advice}"
        ) from error


@contextlib.asynccontextmanager
async def channel_of(connection: BrokerConnection) -> AsyncIterator[Channel]:
    """Provide a channel; messages taken on it and not acknowledged return to their queue afterwards."""
    channel = await connection.channel()
    try:
        with connection.explained():
            yield channel
    finally:
        with contextlib.suppress(*LOST):
            await channel.close()


async def batches(
    channel: Channel, queue: str, wanted: int, *, size: int, ahead: int
) -> AsyncIterator[list[DeliveredMessage]]:
    """Yield that many messages of the queue, in batches of `size` at most; fewer where the rest has left it.

    Args:
        channel: the channel to consume on.
        queue: the queue's name.
        wanted: how many messages to yield.
        size: messages of a batch, at most.
        ahead: how many unacknowledged messages the broker may send ahead.
    """
    inbox: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
    await channel.basic_qos(prefetch_count=ahead)
    await channel.basic_consume(queue, inbox.put)
    done = silences = 0
    while done < wanted and silences < PATIENCE:
        batch = await _next(inbox, min(size, wanted - done))
        if not batch:
            silences += 1
            if not await count(channel, queue):
                return
            continue
        silences = 0
        yield batch
        done += len(batch)


async def _next(inbox: asyncio.Queue[DeliveredMessage], limit: int) -> list[DeliveredMessage]:
    """Return the messages received so far, at least one unless the queue stays silent."""
    try:
        batch = [await asyncio.wait_for(inbox.get(), SILENCE)]
    except TimeoutError:
        return []
    while len(batch) < limit and not inbox.empty():
        batch.append(inbox.get_nowait())
    return batch
