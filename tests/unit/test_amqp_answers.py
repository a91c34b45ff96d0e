"""Whatever a broker, a proxy or another program answers: an error of the protocol, in bounded time, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat
from pamqp.frame import marshal

from delayline.rabbitmq.amqp.channel import FRAME_MAX, Channel, PublishChannel
from delayline.rabbitmq.amqp.confirms import PublishBatch
from delayline.rabbitmq.amqp.connection import AmqpConnection
from delayline.rabbitmq.amqp.errors import AmqpError, Unavailable
from delayline.rabbitmq.amqp.parameters import Parameters
from delayline.rabbitmq.amqp.properties import Delivery, Undecodable

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 60.0
NODE = Parameters("localhost", 5672, "guest", "guest", "/", "tests", "test", "localhost", None, None, 0, PATIENCE)
HASTY = replace(NODE, answer_timeout=0.05)


class Publication(NamedTuple):
    """A message of the protocol alone."""

    exchange: str
    routing_key: str
    body: bytes
    message_id: str = "m"

    def content(self, room: int) -> tuple[bytes, bytes]:
        properties = b"\0\x80\x01m"
        assert len(properties) <= room
        return properties, self.body


class Socket(asyncio.Transport):
    """Takes what is sent, and keeps nothing."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


def content(method: frame.FrameTypes, channel: int) -> bytes:
    properties = commands.Basic.Properties(message_id="m", headers={"a": "b"})
    parts = (method, header.ContentHeader(0, 5, properties), body.ContentBody(b"hello"))
    return b"".join(marshal(part, channel) for part in parts)


GREETING = [
    marshal(commands.Connection.Start(0, 9, {"version": "3.10"}, "PLAIN", "en_US"), 0),
    marshal(commands.Connection.Tune(2047, FRAME_MAX, 0), 0),
    marshal(commands.Connection.OpenOk(), 0),
]
LATER = [
    marshal(commands.Basic.Ack(1, False), 1),
    marshal(commands.Basic.Ack(3, True), 1),
    marshal(commands.Basic.Nack(2, False, False), 1),
    content(commands.Basic.Return(312, "NO_ROUTE", "e", "k"), 1),
    content(commands.Basic.Deliver("mine", 1, False, "e", "k"), 2),
    content(commands.Basic.GetOk(1, False, "e", "k", 3), 2),
    marshal(commands.Basic.GetEmpty(), 2),
    marshal(commands.Basic.Cancel("mine"), 2),
    marshal(commands.Queue.DeclareOk("q", 1, 2), 2),
    marshal(commands.Channel.OpenOk(), 2),
    marshal(commands.Channel.Flow(True), 1),
    marshal(commands.Channel.Close(404, "NOT_FOUND", 1, 2), 2),
    marshal(commands.Channel.CloseOk(), 1),
    marshal(commands.Connection.Blocked("memory"), 0),
    marshal(commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
    marshal(heartbeat.Heartbeat(), 0),
]


async def connected(answers: Sequence[bytes], node: Parameters = NODE) -> AmqpConnection:
    """Return a connection whose broker gave these answers; raises what opening it would."""
    blocked: list[str | None] = []
    connection = AmqpConnection(node, blocked.append)
    connection.connection_made(Socket())
    opening = asyncio.ensure_future(connection._handshake())
    for answer in answers:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if connection.lost is None:
            connection.data_received(answer)
    await opening
    return connection


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([GREETING[1]], "ProtocolHeader was answered with Connection.Tune"),
        ([GREETING[0], GREETING[0]], "Connection.StartOk was answered with Connection.Start"),
        ([GREETING[0], marshal(commands.Connection.Tune(0, 8, 0), 0)], "takes frames of 8 bytes at most"),
        ([*GREETING[:2], GREETING[1]], "Connection.Open was answered with Connection.Tune"),
        ([b"\x01\x00\x00\x40\x00\x00\x00\x00"], "a frame of 1073741824 bytes"),
        ([b"HTTP/1.1 400 Bad Request\r\n"], "does not speak AMQP"),
    ],
)
async def test_another_greeting_than_a_brokers_is_an_error_of_the_connection(answers: list[bytes], said: str) -> None:
    """Given answers that do not fit, when opening a connection, then the error names them."""
    with pytest.raises(Unavailable, match=said):
        await asyncio.wait_for(connected(answers), PATIENCE)


async def test_an_impossible_confirm_ends_the_connection_at_once() -> None:
    """Given messages on their way, when all up to the 2^62nd are confirmed, then their outcome is unknown."""
    connection = await connected(GREETING)
    channel = PublishChannel(connection, 1)
    connection._channels[1] = channel
    batch = PublishBatch([Publication("", "q", b"")])
    channel.confirms.wrote(batch, [0])
    connection.data_received(marshal(commands.Basic.Ack(2**62, True), 1))
    with pytest.raises(Unavailable, match=r"does not speak AMQP.*confirms message 4611686018427387904 of 1"):
        await batch.settled
    assert connection.lost is not None


async def test_an_answer_to_another_method_is_an_error_of_the_connection() -> None:
    """Given a method that asks, when the answer is another method's, then the error names both."""
    connection = await connected(GREETING)
    channel = connection._channels[2] = Channel(connection, 2)
    asking = asyncio.ensure_future(channel.call(commands.Queue.Declare(0, "q")))
    await asyncio.sleep(0)
    connection.data_received(marshal(commands.Basic.ConsumeOk("c"), 2))
    with pytest.raises(Unavailable, match=r"Queue\.Declare was answered with Basic\.ConsumeOk"):
        await asking


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the data with up to three bytes changed, left out or put in."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(changed)))
        changed[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(changed)


FRAMES = st.sampled_from([*GREETING, *LATER])


@settings(max_examples=60)
@given(
    greeting=st.just(GREETING) | st.tuples(*map(damaged, GREETING)) | st.lists(FRAMES.flatmap(damaged), max_size=3),
    later=st.lists(FRAMES.flatmap(damaged), max_size=6),
)
def test_any_bytes_of_a_broker_are_read_or_are_an_error_of_the_connection(
    greeting: Sequence[bytes], later: Sequence[bytes]
) -> None:
    """Given damaged frames, when they come, then each call ends with an answer or an error of the protocol."""

    async def receive() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, found: unexpected.append(found))
        try:
            connection = await connected(greeting, HASTY)
        except AmqpError:
            return
        taken: list[Delivery] = []
        pipeline, channel = PublishChannel(connection, 1), Channel(connection, 2)
        connection._channels.update({1: pipeline, 2: channel})
        channel._consumers["mine"] = taken.append
        publications = [Publication("e", "k", b"x" * 20_000)] * 3
        batch = PublishBatch(publications)
        assert all(pipeline.frames.encode(publication) for publication in publications)
        pipeline.confirms.wrote(batch, range(3))
        calls = [
            asyncio.ensure_future(asking) for asking in (channel.get("q"), channel.call(commands.Queue.Declare(0, "q")))
        ]
        for answer in later:
            await asyncio.sleep(0)
            if connection.lost is None:
                connection.data_received(answer)
        found = await asyncio.gather(*calls, return_exceptions=True)
        unexpected.extend(
            error for error in found if isinstance(error, BaseException) and not isinstance(error, AmqpError)
        )
        for delivery in taken:
            with contextlib.suppress(Undecodable):
                delivery.decoded()
        connection.abort()

    unexpected: list[object] = []
    asyncio.run(asyncio.wait_for(receive(), PATIENCE))
    assert unexpected == []


METHOD = st.sampled_from([(60, 50), (60, 60), (60, 71), (60, 80), (60, 120), (10, 50), (20, 40), (50, 11), (10, 60)])
PAYLOAD = st.binary(max_size=60) | st.builds(lambda ids, rest: struct.pack(">HH", *ids) + rest, METHOD, st.binary())
ANY_FRAME = st.builds(
    lambda kind, number, payload: struct.pack(">BHI", kind, number, len(payload)) + payload + b"\xce",
    st.sampled_from([1, 2, 3, 8]),
    st.integers(0, 3),
    PAYLOAD,
)


CLOSED_AND_PAUSED = [
    marshal(commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
    marshal(commands.Channel.Flow(active=True), 1),
]


CLOSED_AND_DELIVERED = [
    marshal(commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
    marshal(commands.Basic.Deliver("mine", 1, False, "e", "k"), 2),
    marshal(header.ContentHeader(0, 5, commands.Basic.Properties()), 2),
    marshal(body.ContentBody(b"hello"), 2),
]


@settings(max_examples=60)
@example(CLOSED_AND_PAUSED, 1)
@example(CLOSED_AND_DELIVERED, 1)
@given(st.lists(ANY_FRAME | FRAMES | st.binary(max_size=20), max_size=8), st.integers(1, 40))
def test_any_frames_are_read_alike_whole_and_in_pieces(frames: Sequence[bytes], size: int) -> None:
    """Given frames with any payload, when they come whole or in pieces, then the same is received, or ends it."""

    async def receive(data: bytes, size: int) -> tuple[list[Delivery], bool]:
        connection = await connected(GREETING)
        taken: list[Delivery] = []
        channel = Channel(connection, 2)
        connection._channels.update({1: PublishChannel(connection, 1), 2: channel})
        channel._consumers["mine"] = taken.append
        for at in range(0, len(data), size):
            if connection.lost is None:
                connection.data_received(data[at : at + size])
        lost = connection.lost
        assert lost is None or isinstance(lost, AmqpError)
        connection.abort()
        return taken, lost is not None

    data = b"".join(frames)
    whole, pieces = asyncio.run(receive(data, len(data) or 1)), asyncio.run(receive(data, size))
    assert whole == pieces


HEADER_OF_NO_SIZE = struct.pack(">BHI", 2, 2, 0) + b"\xce"
DELIVERY_WITHOUT_KEY = struct.pack(">BHIHH", 1, 2, 4 + 5, 60, 60) + b"\x04mine" + b"\xce"


@pytest.mark.parametrize("frame", [HEADER_OF_NO_SIZE, DELIVERY_WITHOUT_KEY], ids=["header", "method"])
async def test_a_frame_that_is_too_short_is_not_read_into_the_next(frame: bytes) -> None:
    """Given a frame whose payload ends too early, when others come with it, then the connection ends all the same."""
    connection = await connected(GREETING)
    channel = Channel(connection, 2)
    connection._channels[2] = channel
    channel._consumers["mine"] = lambda delivery: None
    connection.data_received(frame + 10 * (struct.pack(">BHI", 8, 0, 0) + b"\xce"))
    assert isinstance(connection.lost, Unavailable)
    connection.abort()
