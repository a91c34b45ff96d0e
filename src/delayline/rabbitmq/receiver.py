"""Receiving from a queue: messages are pushed ahead of their handling, acknowledgements leave in batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from pamqp import commands

from delayline.errors import BackendUnavailable, QueueNotFound
from delayline.events import Event, emit
from delayline.message import Headers, to_wire_time
from delayline.rabbitmq.acknowledgements import Acknowledgements
from delayline.rabbitmq.amqp.channel import retrieve_exception
from delayline.rabbitmq.decoding import crashes_of, message_from
from delayline.rabbitmq.delivery_limits import NACK_IS_NOT_COUNTED
from delayline.rabbitmq.overlapping_copies import OverlappingCopies, meant_for_another
from delayline.rabbitmq.prefetched import Prefetched
from delayline.rabbitmq.read_ahead import ReadAhead
from delayline.rabbitmq.refusals import NotFound
from delayline.transport import SUSPECT_FROM, ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery
    from delayline.rabbitmq.connection import BrokerConnection
    from delayline.rabbitmq.overlapping_copies import DeliveryBindings

logger: logging.Logger = logging.getLogger(__name__)

LONGEST_HELD: Final = 600.0
"""Seconds after which a message that the error queue does not take goes back to its queue: brokers close the channel,
and double all of its messages, if one is not acknowledged within `consumer_timeout`, 30 minutes by default."""
MOST_UNACKNOWLEDGED: Final = 65_535
STOP_PATIENCE: Final = 3.0
"""Seconds that each step of a stop waits for the broker."""
FIRST_PAUSE: Final = 1.0  # seconds until a message that the error queue did not take is tried again; doubles
LONGEST_PAUSE: Final = 60.0
POISON: Final = "A message in %s is classified as a poison message: %s"
NO_MARKS: Final[Mapping[str, str]] = MappingProxyType({})
NOT_SET_ASIDE: Final = "A poison message in %s cannot be moved to the error queue, and is held meanwhile: %s"
LEFT_TO: Final = (
    "%r is sent the delayed messages for %r too, whose name ends in it. They are dropped here while the broker shows "
    "that the other endpoint gets them, else they go to the error queue. Rename one of the endpoints (logged once)"
)
NOT_COPIED: Final = "A message of %s that the broker drops at its next return cannot be copied: %s"
NO_TAG: Final = 2**64
"""Above all delivery tags."""


class ReturnedTooOften(Exception):
    """A message that its queue would drop at its next return."""

    def __init__(self, returns: int) -> None:
        super().__init__(
            f"it was returned to its queue {returns} times, and the broker would drop it at the next return"
        )

    def marks(self, queue: str) -> Mapping[str, str]:
        """Return the headers that describe the failure, as of a message that a handler failed with."""
        return {
            Headers.FAILED_QUEUE: queue,
            Headers.EXCEPTION_TYPE: f"{type(self).__module__}.{type(self).__qualname__}",
            Headers.EXCEPTION_MESSAGE: str(self),
            Headers.TIME_OF_FAILURE: to_wire_time(datetime.now(UTC)),
        }


class DeliveryTag(NamedTuple):
    """A delivery's tag on its channel."""

    channel: int
    tag: int


class ReturnCounts:
    """How often messages came back to their queue, and which of them it would drop at the next return.

    Args:
        counted: whether the queue counts it, as quorum queues do.
        is_dropped_next: whether the queue would drop a message that was returned so often.
    """

    def __init__(self, *, counted: bool, is_dropped_next: Callable[[int], Awaitable[bool]]) -> None:
        self._counted = counted
        self._is_dropped_next = is_dropped_next
        self.nack_is_counted = True

    def earlier(self, delivered: Delivery) -> int:
        """Return how many deliveries of it have ended without an outcome; of a queue that counts none, up to 1."""
        if not self._counted:
            return int(delivered.redelivered)
        return crashes_of(delivered) + (delivered.returns if self.nack_is_counted else delivered.failures)

    async def would_drop(self, delivered: Delivery) -> bool:
        """Return whether the queue would drop the message instead of taking it back."""
        return self._counted and await self._is_dropped_next(delivered.returns)


class RabbitMQReceiver:
    """Receives messages from a queue. A lost connection or consumer is replaced by the next `receive`.

    It prefetches: the broker reserves more messages for it than `receive` has returned; `stop` returns them.

    Args:
        restore: declares this process's own queue again after its deletion; returns False for other queues.
        move_aside: moves a message that cannot be handled, with the headers added, before it is acknowledged.
        bindings: shows which destinations due messages get to.
        copy: sends a message to the queue again, with the number of its crashes.
        is_dropped_next: whether the queue would drop a message that was returned so often at its next return.
        counted: whether the queue counts how often it gets a message back, as quorum queues do.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        queue: str,
        *,
        restore: Callable[[str], Awaitable[bool]],
        move_aside: Callable[[Delivery, Mapping[str, str]], Awaitable[None]],
        bindings: DeliveryBindings,
        copy: Callable[[Delivery, int], Awaitable[None]],
        is_dropped_next: Callable[[int], Awaitable[bool]],
        counted: bool = True,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._restore = restore
        self._move_aside = move_aside
        self._copy = copy
        self._returns = ReturnCounts(counted=counted, is_dropped_next=is_dropped_next)
        self._one_by_one = True
        self._alone: int | None = None
        """The tag of the only message that may be held."""
        self._suspicious: dict[int, Delivery] = {}
        """Messages that are held and that were delivered before."""
        self._channel: Channel | None = None
        self._number = 0
        self._capacity = 0
        self._consumers: list[str] = []
        self._prefetched = Prefetched(self._return_buffer_soon)
        self._buffer = self._prefetched.messages
        self._held: set[int] = set()
        self._leaving: set[int] = set()
        """Messages on their way back to the queue."""
        self._acknowledgements = Acknowledgements(self._first_open)
        self._closing: asyncio.Task[None] | None = None
        self._retries: set[asyncio.Task[None]] = set()
        self._unmoved: set[int] = set()
        self._last: dict[int, Delivery] = {}
        self._ahead = ReadAhead()
        self._newest = self._detached = 0
        self._returning: asyncio.Task[None] | None = None
        self._left_to: set[str] = set()
        self._copies = OverlappingCopies(bindings, queue, drop=self._drop_copy, keep=self._keep_copy)
        self._changed = asyncio.Event()
        self._opening = asyncio.Lock()
        self._setting_aside = asyncio.Lock()
        self._lost: Exception | None = None
        self._stopped = False

    @property
    def answered_at(self) -> float:
        """When the broker last sent something, a heartbeat at least, on the connection that consumes from the queue."""
        if self._channel is None or not self._consumers:
            return -math.inf
        return time.monotonic() - self._channel.silent_for

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and return up to `limit` of the messages that the broker has pushed."""
        while not self._stopped:
            if self._buffer and self._alone is None:
                batch = await self._take(limit)
                if batch:
                    return batch
                continue
            self._changed.clear()
            if self._alone is None:
                await self._consume(limit)
            if (self._alone is not None or not self._buffer) and self._lost is None:
                await self._changed.wait()
            if self._lost is not None and not self._stopped:
                lost, self._lost = self._lost, None
                raise lost
        return []

    async def acknowledge(self, received: ReceivedMessage, transaction: object = None) -> bool:
        """Acknowledge the message, in a batch with others; False if the delivery has ended.

        A crash before the broker has read it duplicates the message, with the same id. Takes part in no transaction.
        """
        del transaction
        tag = self._tag(received)
        if tag is None:
            return False
        self._done(tag)
        if self._stopped:
            await self._close_when_done()
        return True

    async def release(self, received: ReceivedMessage) -> None:
        """Give the message back to the queue."""
        tag = self._tag(received)
        if tag is None:
            return
        delivered, channel = self._suspicious.get(tag), self._channel
        if delivered is not None and crashes_of(delivered) and channel is not None:
            self._let_go(tag)
            with contextlib.suppress(BackendUnavailable):
                await self._return(channel, delivered)
        else:
            self._give_back(tag)
        if self._stopped:
            await self._close_when_done()

    def counts_surely(self, received: ReceivedMessage) -> bool:
        """Return whether `earlier_deliveries` has crashes only: a queue counts looks and orderly returns as well."""
        tag = self._tag(received)
        return tag is None or tag not in self._suspicious or crashes_of(self._suspicious[tag]) > 0

    async def count_surely(self, received: ReceivedMessage, crashes: int) -> None:
        """Replace the message by a copy, behind the others, whose further returns are crashes only."""
        tag = self._tag(received)
        if tag is not None and (delivered := self._suspicious.get(tag)) is not None:
            await self._copy(delivered, crashes)
            self._done(tag)

    async def hold_only(self, received: ReceivedMessage) -> None:
        """Return others that count crashes, and take no more until the message is acknowledged or released.

        The return of any other would count as much as a crash.
        """
        tag = self._tag(received)
        async with self._opening:
            channel = self._channel
            if tag is None or channel is None:
                return
            self._one_by_one = True
            self._alone = tag
            try:
                await self._cancel_consumers(channel)
                while (delivered := next(filter(crashes_of, self._buffer), None)) is not None:
                    self._prefetched.remove(delivered)
                    await self._return(channel, delivered)
            except BaseException:
                self._let_go(tag, held=True)
                raise

    async def stop(self) -> None:
        """End a waiting receive, and return prefetched messages; returned messages can still be acknowledged."""
        if self._stopped:
            return
        self._stopped = True
        self._changed.set()
        self._end_retries()
        with contextlib.suppress(TimeoutError):  # a broker that does not answer gives all of it to others by itself
            async with asyncio.timeout(STOP_PATIENCE), self._setting_aside, self._opening:
                self._end_retries()
                if self._channel is not None:
                    with contextlib.suppress(BackendUnavailable):
                        await self._stop_consuming(self._channel)
        self._consumers.clear()
        self._prefetched.clear()
        await self._close_when_done()

    async def flushed(self) -> None:
        """Return once every acknowledgement so far is written.

        A quorum queue takes 32 of them at a time, and forgets the rest when the channel is closed just then: their
        messages come again. An acknowledgement of all that was received, as after a stop, is always heeded.
        """
        await self._acknowledgements.written()

    async def flush(self, received: ReceivedMessage) -> None:
        """Return once the broker has answered a method that follows the message's acknowledgement.

        A channel processes its methods in order: https://www.rabbitmq.com/docs/channels. Calls of the same turn of the
        loop share the method. The limit of quorum queues applies, see `flushed`.
        """
        answer = None
        if _receipt_of(received).channel == self._number:
            answer = self._closing if self._channel is None else self._acknowledgements.answer(self._channel)
        if answer is None:
            raise BackendUnavailable(f"the channel of {self._queue!r} ended before an acknowledgement was processed")
        await asyncio.shield(answer)

    def _tag(self, received: ReceivedMessage) -> int | None:
        delivery = _receipt_of(received)
        return delivery.tag if delivery.channel == self._number and delivery.tag in self._held else None

    def _done(self, tag: int) -> None:
        if tag not in self._held:  # of a channel that is lost: the broker delivers it again
            return
        self._let_go(tag)
        self._last.pop(tag, None)
        self._ahead.end(tag, _time())
        self._acknowledgements.add(self._channel, tag)

    def _first_open(self) -> int:
        """Return the lowest tag of a message that is here."""
        waiting = min((delivered.tag for delivered in self._buffer), default=NO_TAG)
        return min(min(self._held, default=NO_TAG), min(self._leaving, default=NO_TAG), waiting)

    def _let_go(self, tag: int, *, held: bool = False) -> None:
        if not held:
            self._held.discard(tag)
            self._suspicious.pop(tag, None)
        if self._alone == tag:
            self._alone = None
            self._changed.set()

    def _give_back(self, tag: int) -> None:
        self._let_go(tag)
        self._ahead.end(tag, _time())
        if self._channel is not None:
            with contextlib.suppress(BackendUnavailable):
                self._channel.requeue(tag)

    async def _take(self, limit: int) -> list[ReceivedMessage]:
        """Return prefetched messages; an unreadable message ends the batch, and is moved aside when it is next."""
        batch: list[ReceivedMessage] = []
        while self._buffer and len(batch) < limit and self._alone is None:
            delivered = self._buffer[0]
            if delivered.redelivered and await self._returns.would_drop(delivered):
                if not batch and self._is_next(delivered):
                    self._held.add(self._prefetched.pop().tag)
                    await self._set_aside(delivered, ReturnedTooOften(delivered.returns))
                return batch
            if not self._is_next(delivered):
                continue
            other = meant_for_another(delivered, self._queue)
            if other is not None:
                self._held.add(self._prefetched.pop().tag)
                self._unmoved.add(delivered.tag)
                self._copies.add(delivered, other)
                continue
            try:
                message = message_from(delivered)
            except Exception as error:  # whatever is wrong with a message stops no other
                if not batch:
                    self._held.add(self._prefetched.pop().tag)
                    await self._set_aside(delivered, error)
                return batch
            self._held.add(self._prefetched.pop().tag)
            tag = DeliveryTag(self._number, delivered.tag)
            self._ahead.begin(delivered.tag, _time())
            if earlier := self._returns.earlier(delivered):
                self._suspicious[delivered.tag] = delivered
            if crashes_of(delivered):
                # Others on their way when `hold_only` ends the consumers would count a crash:
                # https://github.com/rabbitmq/rabbitmq-server/issues/3729
                self._alone = delivered.tag
            batch.append(ReceivedMessage(message, tag, earlier))
        return batch

    def _is_next(self, delivered: Delivery) -> bool:
        """Return False if another message has come before it meanwhile, or the channel was lost."""
        return bool(self._buffer) and self._buffer[0] is delivered

    def _drop_copy(self, copy: Delivery, other: str) -> None:
        """Drop a delayed message that the other endpoint has got as well."""
        if other not in self._left_to:
            self._left_to.add(other)
            emit(logger, logging.WARNING, Event.BINDINGS_OVERLAP, LEFT_TO, self._queue, other)
        self._unmoved.discard(copy.tag)
        self._done(copy.tag)

    async def _keep_copy(self, copy: Delivery, other: str, reason: str) -> None:
        """Move a delayed message that the other endpoint may not have got to the error queue."""
        error = LookupError(f"it is a delayed message for {other!r}, which {self._queue!r} gets too, and {reason}")
        emit(logger, logging.ERROR, Event.POISON_MESSAGE, POISON, self._queue, error)
        marks = {
            Headers.FAILED_QUEUE: other,
            Headers.EXCEPTION_TYPE: type(error).__name__,
            Headers.EXCEPTION_MESSAGE: str(error),
        }
        self._set_aside_soon(copy, marks)

    def _return_buffer_soon(self) -> None:
        if not self._stopped and (self._returning is None or self._returning.done()):
            self._returning = asyncio.create_task(self._return_buffer())

    async def _return_buffer(self) -> None:
        """Give messages that were sent ahead back to the queue; the next `receive` has the broker send fewer."""
        async with self._opening:
            channel = self._channel
            if channel is None or self._stopped:
                return
            with contextlib.suppress(BackendUnavailable):
                await self._cancel_consumers(channel)
                await self._return_all(channel)
        self._changed.set()

    async def _set_aside(self, delivered: Delivery, error: Exception) -> None:
        emit(logger, logging.ERROR, Event.POISON_MESSAGE, POISON, self._queue, error)
        marks = NO_MARKS
        if isinstance(error, ReturnedTooOften):
            marks = error.marks(self._queue)
            self._last[delivered.tag] = delivered
        async with self._setting_aside:
            try:
                await self._move_aside(delivered, marks)
            except BaseException as failure:  # its return may be its last: another try, or `stop`, sees to it
                first = not self._retries
                self._unmoved.add(delivered.tag)
                self._set_aside_soon(delivered, marks, FIRST_PAUSE)
                if first or not isinstance(failure, Exception):
                    raise
            else:
                self._done(delivered.tag)

    def _set_aside_soon(self, delivered: Delivery, marks: Mapping[str, str], after: float = 0.0) -> None:
        moving = asyncio.create_task(self._set_aside_later(delivered, marks, after))
        self._retries.add(moving)
        moving.add_done_callback(self._retries.discard)

    async def _set_aside_later(self, delivered: Delivery, marks: Mapping[str, str], after: float) -> None:
        """Hold a message until the error queue has taken it, out of the others' way, and try again and again.

        Args:
            delivered: the message, whose tag is in `_unmoved`.
            marks: headers to add.
            after: seconds until the first try.
        """
        latest = _time() + LONGEST_HELD
        while True:
            await asyncio.sleep(after)
            after = min(max(2 * after, FIRST_PAUSE), LONGEST_PAUSE)
            try:
                await self._move_aside(delivered, marks)
            except Exception as error:
                emit(logger, logging.ERROR, Event.ERROR_MOVE_FAILED, NOT_SET_ASIDE, self._queue, error)
                channel = self._channel
                if channel is not None and _time() >= latest:
                    self._unmoved.discard(delivered.tag)
                    self._held.discard(delivered.tag)
                    self._last.pop(delivered.tag, None)
                    with contextlib.suppress(BackendUnavailable):
                        await self._return(channel, delivered)
                    return
            else:
                self._unmoved.discard(delivered.tag)
                self._done(delivered.tag)
                return

    async def _consume(self, limit: int) -> None:
        """See to it that the broker pushes as much as is wanted."""
        async with self._opening:
            if self._stopped:
                return
            wanted, ahead = self._wanted(limit)
            if self._channel is not None and wanted + ahead // 2 <= self._capacity:
                return
            try:
                await self._grow(wanted + ahead)
            except NotFound as error:
                self._forget()
                self._lost = None
                if not await self._restore(self._queue):
                    raise QueueNotFound(self._queue) from error
                await self._grow(wanted + ahead)

    def _wanted(self, limit: int) -> tuple[int, int]:
        """Return how many messages the consumers should have sent, unacknowledged: for handlers, and ahead of them."""
        at_work = sum(tag > self._detached for tag in self._held)
        if self._one_by_one:
            return at_work + 1, 0
        wanted = min(at_work + limit, MOST_UNACKNOWLEDGED)
        return wanted, min(self._ahead.number(wanted, _time()), MOST_UNACKNOWLEDGED - wanted)

    async def _grow(self, number: int) -> None:
        channel = self._channel
        if channel is None:
            channel = await self._open()
        more = number - self._capacity
        self._consumers.append(await channel.consume(self._queue, self._delivered, prefetch=more))
        self._capacity += more

    async def _open(self) -> Channel:
        channel = await self._connection.channel()
        self._returns.nack_is_counted = await self._connection.version() < NACK_IS_NOT_COUNTED
        self._number += 1
        self._channel = channel
        channel.on_end = partial(self._channel_ended, self._number)
        channel.on_cancel = self._cancelled
        return channel

    def _delivered(self, delivered: Delivery) -> None:
        """Queue a delivered message; redelivered messages come first, as they did in the queue.

        As long as they were returned twice and more, perhaps by crashes of their handlers, each `receive` has the
        broker send a single message: messages sent ahead would be returned with it.
        """
        if self._one_by_one and self._returns.earlier(delivered) < SUSPECT_FROM:
            self._one_by_one = False
        self._newest = delivered.tag
        self._prefetched.add(delivered)
        self._changed.set()

    def _cancelled(self) -> None:
        """Consume again: the broker ended it, because the queue was deleted or has moved to another node."""
        self._consumers_ended()
        self._changed.set()

    def _consumers_ended(self) -> None:
        """Note that what was received so far counts for no consumer."""
        self._consumers.clear()
        self._capacity, self._detached = 0, self._newest

    def _channel_ended(self, number: int, error: Exception) -> None:
        if number == self._number and self._channel is not None:
            self._forget()
            self._lost = error
            self._changed.set()

    def _forget(self) -> None:
        """Nothing that was received is ours any more: the broker gives it to others."""
        self._channel = None
        self._number += 1
        self._one_by_one = True
        self._capacity = self._newest = self._detached = 0
        self._ahead.forget()
        self._consumers.clear()
        self._prefetched.clear()
        self._held.clear()
        self._leaving.clear()
        self._acknowledgements.forget()
        self._end_retries()
        self._unmoved.clear()
        self._last.clear()
        self._suspicious.clear()
        self._alone = None

    def _end_retries(self) -> None:
        self._copies.forget()
        for retry in self._retries:
            retry.cancel()

    async def _stop_consuming(self, channel: Channel) -> None:
        await self._cancel_consumers(channel)
        for tag in self._unmoved:
            if (delivered := self._last.get(tag)) is None:
                self._give_back(tag)
                continue
            self._held.discard(tag)
            await self._return(channel, delivered)
        self._unmoved.clear()
        await self._return_all(channel)

    async def _cancel_consumers(self, channel: Channel) -> None:
        for consumer in self._consumers:
            await channel.cancel(consumer)
        self._consumers_ended()

    async def _return_all(self, channel: Channel) -> None:
        """Return the messages that were sent ahead, together where nothing before them is open.

        A quorum queue takes 32 single returns at a time, and counts the others as failed when the channel is closed.
        """
        plain: list[int] = []
        try:
            while self._buffer:
                delivered = self._prefetched.pop()
                self._leaving.add(delivered.tag)
                if crashes_of(delivered) or await self._returns.would_drop(delivered):
                    await self._return(channel, delivered)
                else:
                    plain.append(delivered.tag)
            await self.flushed()
        finally:
            self._leaving.difference_update(plain)
        if plain and not len(self._acknowledgements) and max(plain) < self._first_open():
            channel.requeue(max(plain), multiple=True)
            return
        for tag in plain:
            channel.requeue(tag)

    async def _return(self, channel: Channel, delivered: Delivery) -> None:
        """Return a message to the queue, as a copy if the queue would drop it.

        Until then no acknowledgement of later ones may include it, and its channel is not closed.
        """
        self._leaving.add(delivered.tag)
        try:
            if crashes_of(delivered) or await self._returns.would_drop(delivered):
                try:
                    await self._copy(delivered, crashes_of(delivered) and self._returns.earlier(delivered))
                except Exception as error:
                    emit(logger, logging.ERROR, Event.ERROR_MOVE_FAILED, NOT_COPIED, self._queue, error)
                else:
                    channel.acknowledge(delivered.tag)
                    return
            channel.requeue(delivered.tag)
        finally:
            self._leaving.discard(delivered.tag)

    async def _close_when_done(self) -> None:
        channel = self._channel
        # `stop` cancels the consumers and returns prefetched messages first, which needs the channel.
        if channel is None or self._held or self._leaving or self._buffer or self._consumers:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_PATIENCE):
                await self.flushed()
        if self._channel is channel:
            self._channel = None
            self._closing = asyncio.create_task(_close(channel, self._queue))
            self._closing.add_done_callback(retrieve_exception)
            with contextlib.suppress(BackendUnavailable):
                await asyncio.shield(self._closing)


async def _close(channel: Channel, queue: str) -> None:
    """Close the channel when the broker has processed every acknowledgement; raises BackendUnavailable if not."""
    try:
        async with asyncio.timeout(STOP_PATIENCE):
            try:
                await channel.call(commands.Channel.Flow(active=True))
            finally:
                await channel.close()
    except TimeoutError as error:
        raise BackendUnavailable(f"RabbitMQ has not answered the end of the channel of {queue!r}") from error


def _receipt_of(received: ReceivedMessage) -> DeliveryTag:
    if not isinstance(received.receipt, DeliveryTag):
        raise TypeError(f"receipt {received.receipt!r} was not given by this receiver")
    return received.receipt


def _time() -> float:
    return asyncio.get_running_loop().time()
