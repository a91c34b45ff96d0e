"""A connection to a broker: opened, kept alive, read frame by frame. An ended connection is not used again."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from pamqp import commands, frame, header, heartbeat
from pamqp.exceptions import PAMQPException

from delayline.rabbitmq.amqp.channel import FRAME_MAX, Channel, PublishChannel, read_frames
from delayline.rabbitmq.amqp.errors import (
    AmqpError,
    ChannelEnded,
    Closed,
    ConnectionEnded,
    NoFreeChannel,
    NotConnected,
    Unavailable,
)
from delayline.rabbitmq.amqp.methods import ConnectionOpen
from delayline.rabbitmq.amqp.properties import Delivery
from delayline.rabbitmq.amqp.wire import passive_declare

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.rabbitmq.amqp.parameters import Parameters

AnyChannel = TypeVar("AnyChannel", bound=Channel)

MOST_CHANNELS: Final = 65_535
WRITE_BUFFER: Final = 1 << 20  # bytes beyond which senders wait for the socket
FRAME_MIN: Final = 1 << 12  # what the protocol asks for
HEARTBEAT: Final = heartbeat.Heartbeat().marshal()
CAPABILITIES: Final = {
    "publisher_confirms": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


class AmqpConnection(asyncio.Protocol):
    """An AMQP 0-9-1 connection to a node, to be opened once; `lost` is the reason for its end.

    Args:
        parameters: The node.
        on_blocked: Called with the reason when the broker begins to take no messages, and with None when it does again.
    """

    def __init__(self, parameters: Parameters, on_blocked: Callable[[str | None], None]) -> None:
        self.parameters = parameters
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._unsent: list[bytes] = []
        self._replies: dict[int, deque[tuple[frame.FrameTypes | bytes, asyncio.Future[Any]]]] = {}
        """The calls of each channel that wait for an answer, oldest first."""
        self._channels: dict[int, Channel] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._paused = False
        self._ended = asyncio.Event()
        self._heartbeat = 0
        self._ticking: asyncio.TimerHandle | None = None
        self._received = self._sent = False
        self._received_at = self._loop.time()
        self._silent = 0
        self._most_channels = MOST_CHANNELS
        self.frame_max: int = FRAME_MAX
        self.lost: AmqpError | None = None
        self.blocked: str | None = None
        self.version: str = ""

    async def open(self, limit: float) -> None:
        """Connect and log in, within so many seconds. Raises NotConnected, ConnectionEnded or Unavailable."""
        node = self.parameters
        try:
            async with asyncio.timeout(limit):
                await self._loop.create_connection(
                    lambda: self, node.host, node.port, ssl=node.tls, server_hostname=node.server_name
                )
                await self._handshake()
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise NotConnected(str(error)) from error
            raise

    async def _handshake(self) -> None:
        start = await self.call(0, header.ProtocolHeader())
        self.version = str((start.server_properties or {}).get("version", ""))
        properties: dict[str, Any] = {
            "product": self.parameters.product,
            "connection_name": self.parameters.connection_name,
            "capabilities": CAPABILITIES,
        }
        secret = f"\0{self.parameters.user}\0{self.parameters.password}"
        tune = await self.call(
            0, commands.Connection.StartOk(client_properties=properties, mechanism="PLAIN", response=secret)
        )
        if 0 < tune.frame_max < FRAME_MIN:
            raise self._misunderstood(f"it takes frames of {tune.frame_max} bytes at most")
        self.frame_max = min(tune.frame_max or FRAME_MAX, FRAME_MAX)
        self._most_channels = tune.channel_max or MOST_CHANNELS
        heartbeat = self.parameters.heartbeat
        self._heartbeat = min(tune.heartbeat or heartbeat, heartbeat)
        self.send(0, commands.Connection.TuneOk(tune.channel_max, self.frame_max, self._heartbeat))
        if self._heartbeat:
            self._ticking = self._loop.call_later(self._heartbeat / 2, self._tick)
        await self.call(0, ConnectionOpen(virtual_host=self.parameters.vhost))

    async def channel(self, explain: Callable[[AmqpError], Exception]) -> Channel:
        """Open a channel. Raises what `explain` makes of NoFreeChannel or Unavailable, as the channel does."""
        number = next((free for free in range(1, self._most_channels + 1) if free not in self._channels), None)
        if number is None:
            raise explain(
                NoFreeChannel(
                    f"RabbitMQ at {self.parameters.label} allows {self._most_channels} channels, and all are open"
                )
            )
        return await self._open_channel(Channel(self, number, explain))

    async def publish_channel(self, number: int) -> PublishChannel:
        """Open a channel of that number in confirm mode. Raises Unavailable."""
        channel = await self._open_channel(PublishChannel(self, number))
        await channel.call(commands.Confirm.Select())
        return channel

    async def _open_channel(self, channel: AnyChannel) -> AnyChannel:
        self._channels[channel.number] = channel
        try:
            await channel.call(commands.Channel.Open())
        except BaseException:
            if self._channels.get(channel.number) is channel:  # cancelled: the answer removes it
                with contextlib.suppress(AmqpError):
                    self.send(channel.number, commands.Channel.Close(200, "not needed", 0, 0))
            raise
        return channel

    async def ask_for_exchange(self, channel: Channel, exchange: str) -> None:
        """Declare the exchange passively; the broker closes the channel if it does not exist.

        Raises Unavailable.
        """
        with contextlib.suppress(ChannelEnded):
            await self.call(channel.number, passive_declare(exchange, channel.number))

    @property
    def flows(self) -> bool:
        """Whether more may be written now."""
        return self.lost is None and self._flowing.is_set()

    async def flowing(self) -> None:
        """Return when more may be written: the socket takes it and the broker is not blocked.

        Raises Unavailable when the connection is lost, or the broker took nothing for the limit.
        """
        limit = self.parameters.answer_timeout
        try:
            async with asyncio.timeout(limit):
                while not self._flowing.is_set():
                    await self._flowing.wait()
        except TimeoutError:
            if self.blocked is None:
                raise self.give_up() from None
            raise Unavailable(
                f"RabbitMQ at {self.parameters.label} has taken no messages for {limit:g} s: {self.blocked}. Messages "
                "without a confirm have an unknown outcome"
            ) from None
        if self.lost is not None:
            raise self.lost

    def write(self, data: bytes) -> None:
        """Send frames, together with others of this turn of the loop.

        Raises Unavailable if the connection is lost.
        """
        if self.lost is not None:
            raise self.lost
        if not self._unsent:
            self._loop.call_soon(self._send_now)
        self._unsent.append(data)

    def _send_now(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self.lost is None and self._transport is not None:
            self._sent = True
            self._transport.write(data)

    def send(self, channel: int, method: frame.FrameTypes) -> None:
        """Send a method."""
        self.write(frame.marshal(method, channel))

    @property
    def silent_for(self) -> float:
        """Seconds since something has come."""
        return self._loop.time() - self._received_at

    async def close(self, patience: float) -> None:
        """Send Connection.Close and wait `patience` seconds for the answer, then disconnect. Idempotent."""
        if self.lost is None:
            with contextlib.suppress(OSError, AmqpError):
                async with asyncio.timeout(patience):
                    await self.call(0, commands.Connection.Close(200, "closed", 0, 0))
        self.abort()
        if self._transport is not None:
            await self._ended.wait()

    def abort(self) -> None:
        """Disconnect at once."""
        self._end(Unavailable(f"the connection to RabbitMQ at {self.parameters.label} is closed"))
        if self._transport is not None:
            self._transport.abort()

    async def call(self, channel: int, method: frame.FrameTypes | bytes) -> Any:  # noqa: ANN401 - each has its own answer
        """Send a method that the broker answers and return the answer; raises ChannelEnded where it closes instead."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._replies.setdefault(channel, deque()).append((method, answer))
        self.write(method if isinstance(method, bytes) else frame.marshal(method, channel))
        try:
            async with asyncio.timeout(self.parameters.answer_timeout):
                answered = await answer
        except TimeoutError:
            raise self.give_up() from None
        if not _answers(method, answered):
            asked = getattr(method, "name", "a method")
            raise self._misunderstood(f"{asked} was answered with {getattr(answered, 'name', 'a message')}")
        return answered

    def give_up(self) -> Unavailable:
        """Disconnect from a broker that has not answered within the limit, and return that error."""
        return self.hang_up(self.parameters.answer_timeout)

    def hang_up(self, seconds: float) -> Unavailable:
        """Disconnect from a broker that was silent for so many seconds, and return that error."""
        error = self._silence(seconds)
        self._end(error)
        self.abort()
        return error

    def _silence(self, seconds: float) -> Unavailable:
        return Unavailable(
            f"RabbitMQ at {self.parameters.label} was silent for {seconds:g} s: the connection is given up. What "
            "was not confirmed has an unknown outcome: it may have arrived"
        )

    def _misunderstood(self, reason: str) -> Unavailable:
        """Disconnect from what sends something else than AMQP, and return that error."""
        error = Unavailable(
            f"RabbitMQ at {self.parameters.label} does not speak AMQP 0-9-1: {reason}. Check host and port"
        )
        self._end(error)
        self.abort()
        return error

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the socket."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has its methods, but is no subclass
        self._transport.set_write_buffer_limits(WRITE_BUFFER)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whatever waits."""
        reason = str(exc) if exc else "the broker hung up"
        self._end(Unavailable(f"the connection to RabbitMQ at {self.parameters.label} is lost: {reason}"))
        self._ended.set()

    def pause_writing(self) -> None:
        """Make senders wait: the socket is full."""
        self._paused = True
        self._set_flow()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._paused = False
        self._set_flow()

    def data_received(self, data: bytes) -> None:
        """Take the broker's frames."""
        self._received = True
        self._received_at = self._loop.time()
        try:
            self._rest = read_frames(self._rest + data if self._rest else data, self._channels, self._on_method)
        except (PAMQPException, ValueError, IndexError, OverflowError, RecursionError, struct.error) as error:
            self._misunderstood(str(error))

    def _set_flow(self) -> None:
        if self.lost is not None or not (self._paused or self.blocked is not None):
            self._flowing.set()
        else:
            self._flowing.clear()

    def _end(self, error: AmqpError) -> None:
        if self.lost is not None:
            return
        self.lost = error
        if self._ticking is not None:
            self._ticking.cancel()
        for answers in self._replies.values():
            while answers:
                _fail(answers.popleft()[1], error)
        for channel in self._channels.values():
            channel.lose(error)
        self._channels.clear()  # deliveries that come in the same bytes after the broker's close find no consumer
        self._set_flow()

    def _tick(self) -> None:
        """Send a heartbeat and check the broker's; called twice a heartbeat interval."""
        if not self._sent:
            self.write(HEARTBEAT)
        self._silent = 0 if self._received else self._silent + 1
        self._sent = self._received = False
        if self._silent >= 4:
            self._end(self._silence(2 * self._heartbeat))
            self.abort()
            return
        self._ticking = self._loop.call_later(self._heartbeat / 2, self._tick)

    def _on_method(self, number: int, method: Any) -> None:  # noqa: ANN401 - any of pamqp's
        if self.lost is not None:  # the broker has closed in the same bytes
            return
        match method:
            case commands.Connection.Close():
                self._on_connection_close(Closed(method.reply_code or 0, method.reply_text))
            case commands.Channel.Close():
                self._on_channel_close(number, Closed(method.reply_code or 0, method.reply_text))
            case commands.Connection.Blocked():
                self._set_blocked(method.reason)
            case commands.Connection.Unblocked():
                self._set_blocked(None)
            case commands.Channel.Flow():
                self.send(number, commands.Channel.FlowOk(method.active))
            case commands.Basic.Cancel():
                if number in self._channels:
                    self._channels[number].on_cancelled(method.consumer_tag or "")
            case commands.Channel.CloseOk():
                self.answer(number, method)
                self._end_channel(number, Closed(200, "by this side"))
            case _:
                self.answer(number, method)

    def answer(self, channel: int, answer: object) -> None:
        """Complete the channel's oldest call that it answers, or the oldest of all.

        RabbitMQ answers Consume through the queue's process, and so perhaps after a later Flow.
        """
        waiting = self._replies.get(channel)
        if waiting:
            call = next((call for call in waiting if _answers(call[0], answer)), waiting[0])
            waiting.remove(call)
            if not call[1].done():
                call[1].set_result(answer)

    def _on_connection_close(self, closed: Closed) -> None:
        with contextlib.suppress(AmqpError):
            self.send(0, commands.Connection.CloseOk())
            self._send_now()
        self._end(ConnectionEnded(closed))
        assert self._transport is not None  # noqa: S101
        self._transport.close()

    def _on_channel_close(self, number: int, closed: Closed) -> None:
        self.send(number, commands.Channel.CloseOk())
        self._end_channel(number, closed)

    def _end_channel(self, number: int, closed: Closed) -> None:
        """Fail the calls that have no answer yet: the number may be another channel's from now on."""
        answers = self._replies.pop(number, deque())
        while answers:
            method, answer = answers.popleft()
            _fail(answer, ChannelEnded(closed, method))
        channel = self._channels.pop(number, None)
        if channel is not None:
            channel.end(closed)

    def _set_blocked(self, reason: str | None) -> None:
        self.blocked = reason
        self._set_flow()
        self._on_blocked(reason)


def _answers(method: frame.FrameTypes | bytes, answered: object) -> bool:
    """Return whether this is an answer to the method."""
    match method:
        case header.ProtocolHeader():
            return isinstance(answered, commands.Connection.Start)
        case commands.Connection.StartOk():
            return isinstance(answered, commands.Connection.Tune)
        case commands.Basic.Get():
            return isinstance(answered, Delivery | commands.Basic.GetEmpty)
    expected = getattr(method, "valid_responses", None)
    return expected is None or getattr(answered, "name", None) in expected


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # the waiting task may have been cancelled
