"""Browsing a queue: AMQP can only take messages and return them, so browsing does that.

Messages are returned by closing the channel, because rejected messages go to the end of a quorum queue. Many of them
may return in another order. RabbitMQ 4.3 and later do not count a nack, so there a nack returns them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from pamqp import commands

from delayline.errors import BackendUnavailable, BackendUnusable, InvalidMessage, QueueNotFound
from delayline.message import Message
from delayline.rabbitmq.amqp.methods import QueueDeclare, QueuePurge
from delayline.rabbitmq.decoding import crashes_of, message_from
from delayline.transport import QueueState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery
    from delayline.rabbitmq.delivery_limits import DeliveryLimit

LEADER_PATIENCE: Final = 0.25
"""Seconds after which a broker answers for the leader of a quorum queue, that it has no messages."""
COUNT_TRIES: Final = 20
"""How often a queue is counted whose leader does not answer, before its number is said to be unknown."""
STATE_TRIES: Final = 4
"""The same where many queues are looked at, one after the other, of the first whose leader does not answer."""
RETURN_LOOKS: Final = 40
"""How often a queue is counted that gets no more messages back, before they are believed to be elsewhere."""
RETURN_INTERVAL: Final = 0.05
"""Seconds between these."""
RETURNED_AT_ONCE: Final = 32
"""Nacks that a broker passes on at once to a quorum queue. It forgets those behind them when the channel is closed just
then, and the queue counts the return of their messages as a failure."""
RETURNS_UNSEEN: Final = 10
"""How often a queue takes a message back whose limit cannot be seen: half of version 4's default."""


async def must_exist(channel: Channel, queue: str) -> int:
    """Return how many messages the broker says the queue has, 0 also where it cannot say. Raises NotFound for none."""
    return (await _declared(channel, queue)).message_count or 0


async def state(channel: Channel, queue: str, tries: int) -> QueueState:
    """Return how many messages a queue has, and whether a consumer takes them. Raises NotFound if there is no queue.

    The number is unknown of a quorum queue whose leader does not answer in so many tries; see `count`.
    """
    answer, number = await _asked(channel, queue, tries)
    return QueueState(queue, number, received=bool(answer.consumer_count), paused=False)


async def count(channel: Channel, queue: str) -> int:
    """Return the number of messages that no consumer has.

    Raises BackendUnavailable where it is unknown: of a quorum queue whose leader has not answered in time a broker says
    that it has none.
    """
    _, number = await _asked(channel, queue, COUNT_TRIES)
    if number is None:
        raise BackendUnavailable(
            f"it is unknown how many messages {queue!r} has: its leader has not answered RabbitMQ. Try again later"
        )
    return number


async def _asked(channel: Channel, queue: str, tries: int) -> tuple[commands.Queue.DeclareOk, int | None]:
    """Return the broker's last answer of the queue and the number of its messages, None where it is unknown.

    An answer of no messages that was long on its way is asked for again: the leader may not have answered, or the
    broker or this machine was busy. It is believed where a question that needs no leader takes as long.
    """
    time = asyncio.get_running_loop().time
    while True:
        tries -= 1
        asked = time()
        answer = await _declared(channel, queue)
        answered = time()
        if answer.message_count or answered - asked < LEADER_PATIENCE:
            return answer, answer.message_count or 0
        await channel.call(commands.Channel.Flow(active=True))
        if 2 * answered - asked - time() < LEADER_PATIENCE / 2:
            return answer, 0
        if not tries:
            return answer, None


async def _declared(channel: Channel, queue: str) -> commands.Queue.DeclareOk:
    answer: commands.Queue.DeclareOk = await channel.call(QueueDeclare(queue=queue, passive=True))
    return answer


async def await_returned(channel: Channel, queue: str, number: int) -> None:
    """Wait until the queue has so many messages again, or gets no more back: others may have taken some."""
    most = unchanged = 0
    while unchanged < RETURN_LOOKS and most < number:
        counted = await must_exist(channel, queue)
        unchanged = unchanged + 1 if counted <= most else 0
        most = max(most, counted)
        if counted < number:
            await asyncio.sleep(RETURN_INTERVAL)


class QueuePass:
    """A look through a queue: each message is taken once, and all but the removed ones return at the end.

    RabbitMQ counts returns, and may drop a message that was returned too often. Such a message is replaced by a copy,
    at the end of the queue, whose count begins at none, once it has used half of its returns.

    Args:
        channel: A channel of its own.
        queue: The queue.
        limit_of: Reads how often the queue takes a message back.
        copy: Sends a message to the queue again. Raises BackendUnavailable, InvalidMessage or QueueNotFound.
    """

    def __init__(
        self,
        channel: Channel,
        queue: str,
        *,
        limit_of: Callable[[str], Awaitable[DeliveryLimit]],
        copy: Callable[[str, Delivery], Awaitable[None]],
    ) -> None:
        self._channel = channel
        self._queue = queue
        self._limit_of = limit_of
        self._copy = copy
        self._exists = False
        self._last: Delivery | None = None
        self._held = 0
        self._gone: set[str] = set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Return the next message, oldest first, of messages that no consumer has.

        The end is a message that left during this pass and has come back: as a copy, or from where it was sent to.
        """
        await self.let_go()
        if not self._exists:
            await must_exist(self._channel, self._queue)  # a missing one is an error, as for every other look
            self._exists = True
        delivered = await self._channel.get(self._queue)
        if delivered is None:
            raise StopAsyncIteration
        self._held += 1
        message = _shown(delivered)
        if message.id in self._gone and not delivered.redelivered:
            raise StopAsyncIteration
        self._last = delivered
        return message

    async def remove(self) -> bool:
        """Remove the message that was returned last from the queue; False if another process may have it by now."""
        delivered, self._last = self._last, None
        if delivered is None or self._channel.closed is not None:
            return False
        self._leave(delivered)
        await self._channel.call(commands.Channel.Flow(active=True))  # answered after it
        return True

    async def let_go(self) -> None:
        """Leave the message that was returned last in the queue, as a copy where the broker might soon drop it."""
        delivered, self._last = self._last, None
        if delivered is None or not (delivered.returns or crashes_of(delivered)):
            return
        limit = await self._limit_of(self._queue)
        most = limit.returns if limit.seen else RETURNS_UNSEEN
        # A message that counts its crashes would count a return as a crash.
        if not crashes_of(delivered) and (most is None or delivered.returns <= most // 2):
            return
        try:
            await self._copy(self._queue, delivered)
        except (BackendUnusable, InvalidMessage, QueueNotFound) as error:
            raise BackendUnusable(
                f"{limit}. Looking at more would lose some, as they cannot be copied: {error}"
            ) from error
        self._leave(delivered)

    async def give_back(self) -> None:
        """Return what was taken by a nack, before the channel is closed."""
        await self.let_go()
        ready = await must_exist(self._channel, self._queue) if self._held > RETURNED_AT_ONCE else 0
        await self._channel.requeue_all()
        if self._held > RETURNED_AT_ONCE:
            await await_returned(self._channel, self._queue, ready + self._held)

    def _leave(self, delivered: Delivery) -> None:
        self._channel.acknowledge(delivered.tag)
        self._held -= 1
        if message_id := _shown(delivered).id:
            self._gone.add(message_id)


async def purge(channel: Channel, queue: str) -> int:
    """Remove every message that no consumer has; return their number."""
    answer = await channel.call(QueuePurge(queue=queue))
    return answer.message_count if isinstance(answer, commands.Queue.PurgeOk) and answer.message_count else 0


def _shown(delivered: Delivery) -> Message:
    try:
        return message_from(delivered)
    except InvalidMessage:
        return Message("", {}, delivered.body)
