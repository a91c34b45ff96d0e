"""A channel of a connection: calls, consumed messages, confirms of publications, and its incoming frames."""

from __future__ import annotations

import asyncio
import struct
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pamqp import commands, frame
from pamqp.exceptions import PAMQPException

from delayline.rabbitmq.amqp.confirms import Confirms, PublishBatch
from delayline.rabbitmq.amqp.errors import AmqpError, ChannelEnded, Closed, Unavailable
from delayline.rabbitmq.amqp.methods import Consume, Get
from delayline.rabbitmq.amqp.properties import Delivery, message_id_in
from delayline.rabbitmq.amqp.wire import (
    BASIC,
    CONTENT_HEAD,
    FRAME_BODY,
    FRAME_END,
    FRAME_HEADER,
    FRAME_HEARTBEAT,
    FRAME_METHOD,
    FRAME_OVERHEAD,
    PublishFrames,
    method_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from delayline.rabbitmq.amqp.parameters import Parameters

_frame_start = struct.Struct(">BHI").unpack_from
_method_ids = struct.Struct(">HH").unpack_from
_tag = struct.Struct(">QB").unpack_from
_content_head = struct.Struct(">HHQ").unpack_from
_ack = struct.Struct(">HHQB").pack
#: Bytes in front of a frame's payload, and of a method's arguments.
FRAME_START: Final = FRAME_OVERHEAD - 1
METHOD_IDS: Final = 4
TAG_AND_FLAG: Final = 9
FRAME_MAX: Final = 1 << 17  # the largest frame that this side takes
PROTOCOL: Final = b"AMQP"
KINDS: Final = {FRAME_METHOD, FRAME_HEADER, FRAME_BODY, FRAME_HEARTBEAT}
#: The methods that end a channel or a connection, with the reason.
CLOSES: Final[Mapping[tuple[int, int], type[commands.Connection.Close | commands.Channel.Close]]] = {
    (10, 50): commands.Connection.Close,
    (20, 40): commands.Channel.Close,
}
RETURN, DELIVER, GET_OK, ACK, NACK = 50, 60, 71, 80, 120


class Connection(Protocol):
    """The connection that a channel belongs to."""

    parameters: Parameters
    frame_max: int

    @property
    def silent_for(self) -> float:
        """Seconds since something has come."""

    def write(self, data: bytes) -> None:
        """Send frames; raises AmqpError."""

    async def call(self, channel: int, method: frame.FrameTypes | bytes) -> Any:  # noqa: ANN401 - each has its own answer
        """Send a method and return the broker's answer; raises AmqpError."""

    def answer(self, channel: int, answer: object) -> None:
        """Complete the channel's oldest call with this answer."""


class _Content(NamedTuple):
    """The method in front of a message's content."""

    take: Callable[[Delivery], None]
    tag: int
    redelivered: bool
    exchange: str
    routing_key: str


class Channel:
    """A channel for declarations and for consumed messages.

    `on_end` is called once, when the broker closes the channel or the connection is lost, with the error;
    `on_cancel` when the broker ends a consumer because its queue was deleted or has moved.

    Args:
        connection: What it is a channel of.
        number: Its number there.
        explain: Returns the error to raise, and to call `on_end` with, in place of an error of this package.
    """

    def __init__(
        self, connection: Connection, number: int, explain: Callable[[AmqpError], Exception] | None = None
    ) -> None:
        self._explain = explain or _unchanged
        self._connection = connection
        self.number = number
        self.closed: Closed | None = None
        self.on_end: Callable[[Exception], None] = _ignore
        self.on_cancel: Callable[[], None] = _nothing
        self._closing: asyncio.Task[None] | None = None
        self._consumers: dict[str, Callable[[Delivery], None]] = {}
        self._content: _Content | None = None
        self._properties = b""
        self._size = self._received = 0
        self._body: list[bytes] = []

    @property
    def silent_for(self) -> float:
        """Seconds since something has come on the connection."""
        return self._connection.silent_for

    async def call(self, method: frame.FrameTypes) -> Any:  # noqa: ANN401 - each method has its own answer
        """Send a method and return the broker's answer.

        Raises what `explain` makes of ChannelEnded, where the broker refuses by closing the channel, or of Unavailable.
        """
        self._must_be_open()
        try:
            return await self._connection.call(self.number, method)
        except AmqpError as error:
            raise self._explain(error) from error.__cause__

    async def consume(self, queue: str, take: Callable[[Delivery], None], *, prefetch: int) -> str:
        """Have `take` called with each message of the queue, and return the consumer's tag.

        Args:
            queue: The queue's name.
            take: Called with each message, which is acknowledged or rejected later.
            prefetch: How many unacknowledged messages the broker sends, 1 to 65535.
        """
        tag = f"{self._connection.parameters.product}-{uuid.uuid4().hex}"
        self._consumers[tag] = take
        await self.call(commands.Basic.Qos(prefetch_count=prefetch))
        await self.call(Consume(queue=queue, consumer_tag=tag))
        return tag

    async def cancel(self, consumer: str) -> None:
        """End a consumer; messages that are on their way still come."""
        await self.call(commands.Basic.Cancel(consumer_tag=consumer))
        self._consumers.pop(consumer, None)

    async def get(self, queue: str) -> Delivery | None:
        """Return the queue's next message, to be acknowledged; None if no message is ready."""
        answer = await self.call(Get(queue=queue))
        return answer if isinstance(answer, Delivery) else None

    def acknowledge(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a message; with `multiple` all unacknowledged messages up to it."""
        self._must_be_open()
        self._connection.write(method_frame(self.number, _ack(BASIC, ACK, tag, multiple)))

    def requeue(self, tag: int, *, multiple: bool = False) -> None:
        """Return a message to its queue; with `multiple` all unacknowledged ones up to it.

        RabbitMQ 4.3 and later count a reject as a failed delivery, and a nack not.
        """
        self._must_be_open()
        self._connection.write(frame.marshal(commands.Basic.Nack(tag, multiple=multiple, requeue=True), self.number))

    async def requeue_all(self) -> None:
        """End the consumers, which would get the messages again, and return every unacknowledged one to its queue."""
        for consumer in tuple(self._consumers):
            await self.cancel(consumer)
        self._must_be_open()
        self._connection.write(frame.marshal(commands.Basic.Nack(0, multiple=True, requeue=True), self.number))

    @property
    def closing(self) -> bool:
        """Whether this side has begun to close it."""
        return self._closing is not None

    async def close(self) -> None:
        """Close the channel: unacknowledged messages return to their queues. Idempotent."""
        if self._closing is None and self.closed is None:
            self.on_end = _ignore
            # A common Close for all callers: the answer to a second would be taken for the answer to the next channel's
            # Open.
            self._closing = asyncio.ensure_future(self._send_close())
            self._closing.add_done_callback(retrieve_exception)
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _send_close(self) -> None:
        if self.closed is not None:  # by the broker before this task began: it would refuse a method on no channel
            return
        try:
            await self._connection.call(self.number, commands.Channel.Close(200, "closed", 0, 0))
        except ChannelEnded:
            return  # by the broker, just then
        except AmqpError as error:
            raise self._explain(error) from error.__cause__

    def _must_be_open(self) -> None:
        if self.closed is not None:
            label = self._connection.parameters.label
            raise self._explain(Unavailable(f"the channel to RabbitMQ at {label} is closed: {self.closed.text}"))

    # Methods from the broker.

    def end(self, closed: Closed) -> None:
        """Note that the channel is closed, by either side."""
        self.closed = closed
        label = self._connection.parameters.label
        error = Unavailable(f"RabbitMQ at {label} closed a channel: {closed.code} {closed.text}")
        self.on_end(self._explain(error))

    def lose(self, error: AmqpError) -> None:
        """Note that the connection is lost."""
        explained = self._explain(error)
        self.closed = Closed(0, str(explained))
        self.on_end(explained)

    def on_answer(self, kind: int, tag: int, bits: int) -> None:
        """Take a basic.ack or basic.nack, which come in confirm mode only."""

    def on_return(self, exchange: str, routing_key: str, reason: str, properties: bytes) -> None:
        """Take a message that came back, which only publishing channels get."""

    def on_cancelled(self, consumer: str) -> None:
        """Note that the broker has ended a consumer."""
        if self._consumers.pop(consumer, None) is not None:
            self.on_cancel()

    def on_method(self, kind: int, data: bytes) -> bool:
        """Take a method of class `basic` that is frequent, or has content behind it; False for another method.

        Args:
            kind: The method's number.
            data: The method's arguments.
        """
        if kind == DELIVER:
            consumer, at = _short_string(data, 0)
            self._expect(self._consumers.get(consumer, _drop), data, at)
        elif kind in (ACK, NACK):
            self.on_answer(kind, *_tag(data))
        elif kind == GET_OK:
            self._expect(lambda delivery: self._connection.answer(self.number, delivery), data, 0)
        elif kind == RETURN:
            code = int.from_bytes(data[:2], "big")
            reason, at = _short_string(data, 2)
            exchange, at = _short_string(data, at)
            key, _ = _short_string(data, at)
            self._content = _Content(
                lambda back: self.on_return(exchange, key, f"{code} {reason}", back.encoded_properties),
                0,
                False,
                exchange,
                key,
            )
        else:
            return False
        return True

    def _expect(self, take: Callable[[Delivery], None], data: bytes, at: int) -> None:
        tag, redelivered = _tag(data, at)
        exchange, at = _short_string(data, at + TAG_AND_FLAG)
        key, _ = _short_string(data, at)
        self._content = _Content(take, tag, bool(redelivered & 1), exchange, key)

    def on_header(self, data: bytes) -> None:
        """Take the size and the property flags and list of a message."""
        _, _, self._size = _content_head(data)
        self._properties = data[CONTENT_HEAD:]
        if not self._size:
            self._complete(b"")

    def on_body(self, part: bytes) -> None:
        """Take the next part of a message's body."""
        if len(part) == self._size and not self._body:
            self._complete(part)
            return
        self._body.append(part)
        self._received += len(part)
        if self._received >= self._size:
            self._complete(b"".join(self._body))

    def _complete(self, body: bytes) -> None:
        content, self._content = self._content, None
        self._body, self._received = [], 0
        if content is not None:
            take, tag, redelivered, exchange, routing_key = content
            take(Delivery(tag, redelivered, exchange, routing_key, self._properties, body))


class PublishChannel(Channel):
    """A channel in confirm mode, with the publications that are not settled yet."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self.confirms: Confirms = Confirms()
        self.frames: PublishFrames = PublishFrames(number, connection.frame_max)

    def write(self, batch: PublishBatch[Any], positions: Sequence[int], frames: Sequence[bytes]) -> None:
        """Write the frames of the publications."""
        self._connection.write(b"".join(frames))
        self.confirms.wrote(batch, positions)

    def end(self, closed: Closed) -> None:
        """Leave every outstanding publication to its sender; the broker takes no more here."""
        super().end(closed)
        self.confirms.abandon()

    def lose(self, error: AmqpError) -> None:
        """Fail every outstanding publication."""
        super().lose(error)
        self.confirms.lose(error)

    def on_answer(self, kind: int, tag: int, bits: int) -> None:
        """Settle the publications that the broker has confirmed or refused."""
        self.confirms.settle(tag, multiple=bool(bits & 1), acknowledged=kind == ACK)

    def on_return(self, exchange: str, routing_key: str, reason: str, properties: bytes) -> None:
        """Fail the publication of a message that came back."""
        self.confirms.returned(exchange, routing_key, message_id_in(properties), reason)


def read_frames(data: bytes, channels: Mapping[int, Channel], on_method: Callable[[int, Any], None]) -> bytes:
    """Handle every complete frame and return the rest. Raises ValueError or PAMQPException for a malformed frame."""
    start, length = 0, len(data)
    while length - start >= FRAME_OVERHEAD:
        kind, number, size = _frame_start(data, start)
        if kind not in KINDS:
            raise ValueError(_no_frame(data[start : start + 16]))
        if size > FRAME_MAX:
            raise ValueError(f"a frame of {size} bytes, {data[start : start + 16]!r}")
        payload = start + FRAME_START
        end = payload + size
        if end >= length:
            break
        if data[end] != FRAME_END[0]:
            raise ValueError(f"a frame without an end, {data[start : start + 16]!r}")
        channel = channels.get(number)
        if kind == FRAME_METHOD:
            group, method = _method_ids(data[payload:end])
            if channel is None or group != BASIC or not channel.on_method(method, data[payload + METHOD_IDS : end]):
                on_method(number, _method(data, start, end + 1))
        elif channel is not None and kind == FRAME_BODY:
            channel.on_body(data[payload:end])
        elif channel is not None and kind == FRAME_HEADER:
            channel.on_header(data[payload:end])
        start = end + 1
    return data[start:]


def _method(data: bytes, start: int, end: int) -> Any:  # noqa: ANN401 - each method has its own type
    """Return the method of a frame. Raises ValueError or PAMQPException for a malformed frame."""
    try:
        return frame.unmarshal(data[start:end])[2]
    except (PAMQPException, ValueError):
        close = CLOSES.get(_method_ids(data[start + FRAME_START : end]))
        if close is None:
            raise
        at = start + FRAME_START + METHOD_IDS
        reason, rest = _short_string(data[:end], at + 2)  # brokers cut it at 255 bytes, inside a character too
        return close(int.from_bytes(data[at : at + 2], "big"), reason, *_method_ids(data[rest:end]))


def _no_frame(start: bytes) -> str:
    if start.startswith(PROTOCOL):
        return f"it asks for another version of the protocol, {start[:8]!r}"
    return f"no frame begins with {start!r}"


def _short_string(data: bytes, at: int) -> tuple[str, int]:
    """Return the short string at this position, with invalid UTF-8 escaped, and its end."""
    end = at + 1 + data[at]
    if end > len(data):
        raise ValueError("a short string that ends behind its frame")
    return data[at + 1 : end].decode("utf-8", "backslashreplace"), end


def _drop(delivery: Delivery) -> None:
    """Take a message of a consumer that was cancelled: it returns to its queue with the channel's end."""


def retrieve_exception(task: asyncio.Future[None]) -> None:
    """Retrieve the exception of a task whose callers may all be cancelled, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _unchanged(error: AmqpError) -> Exception:
    return error


def _ignore(error: Exception) -> None:
    """Do nothing about the end of a channel."""


def _nothing() -> None:
    """Do nothing about the end of a consumer."""
