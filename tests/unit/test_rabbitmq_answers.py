"""Whatever a broker, a proxy or another program answers: an error of the connection, in bounded time, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat
from pamqp.frame import marshal

from delayline import BackendUnavailable, Message
from delayline.errors import BackendUnusable, DelaylineError
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.management_api import ManagementApi
from delayline.rabbitmq.amqp.channel import FRAME_MAX, Channel, PublishChannel
from delayline.rabbitmq.amqp.confirms import PublishBatch
from delayline.rabbitmq.amqp.connection import AmqpConnection
from delayline.rabbitmq.amqp.properties import Delivery
from delayline.rabbitmq.decoding import message_from
from delayline.rabbitmq.encoding import Publication

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

PATIENCE = 60.0
ADDRESS = BrokerAddress(server_timeout=PATIENCE, heartbeat=0)
HASTY = BrokerAddress(server_timeout=0.05, heartbeat=0)


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


async def connected(answers: Sequence[bytes], address: BrokerAddress = ADDRESS) -> AmqpConnection:
    """Return a connection whose broker gave these answers; raises what opening it would."""
    connection = AmqpConnection(address, "test")
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
    with pytest.raises(BackendUnavailable, match=said):
        await asyncio.wait_for(connected(answers), PATIENCE)


async def test_an_impossible_confirm_ends_the_connection_at_once() -> None:
    """Given messages on their way, when all up to the 2^62nd are confirmed, then their outcome is unknown."""
    connection = await connected(GREETING)
    channel = PublishChannel(connection, 1)
    connection._channels[1] = channel
    batch = PublishBatch([Publication(Message("m", {}, b""), "", "q")])
    channel.confirms.wrote(batch, [0])
    connection.data_received(marshal(commands.Basic.Ack(2**62, True), 1))
    with pytest.raises(BackendUnavailable, match=r"does not speak AMQP.*confirms message 4611686018427387904 of 1"):
        await batch.settled
    assert connection.lost is not None


async def test_an_answer_to_another_method_is_an_error_of_the_connection() -> None:
    """Given a method that asks, when the answer is another method's, then the error names both."""
    connection = await connected(GREETING)
    channel = connection._channels[2] = Channel(connection, 2)
    asking = asyncio.ensure_future(channel.call(commands.Queue.Declare(0, "q")))
    await asyncio.sleep(0)
    connection.data_received(marshal(commands.Basic.ConsumeOk("c"), 2))
    with pytest.raises(BackendUnavailable, match=r"Queue\.Declare was answered with Basic\.ConsumeOk"):
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
    """Given damaged frames, when they come, then each call ends with an answer or an error of ours."""

    async def receive() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, found: unexpected.append(found))
        try:
            connection = await connected(greeting, HASTY)
        except DelaylineError:
            return
        taken: list[Delivery] = []
        pipeline, channel = PublishChannel(connection, 1), Channel(connection, 2)
        connection._channels.update({1: pipeline, 2: channel})
        channel._consumers["mine"] = taken.append
        publications = [Publication(Message("m", {}, b"x" * 20_000), "e", "k")] * 3
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
            error
            for error in found
            if isinstance(error, BaseException) and not isinstance(error, DelaylineError | LookupError)
        )
        for delivery in taken:
            with contextlib.suppress(DelaylineError):
                message_from(delivery)
        connection.abort()

    unexpected: list[object] = []
    asyncio.run(asyncio.wait_for(receive(), PATIENCE))
    assert unexpected == []


@contextlib.asynccontextmanager
async def answering(answer: bytes, status: str = "200 OK", headers: str = "") -> AsyncIterator[str]:
    """Provide the URL of a web server that answers every request with this."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            length = f"Content-Length: {len(answer)}\r\nConnection: close\r\n{headers}\r\n"
            writer.write(f"HTTP/1.1 {status}\r\n{length}".encode() + answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


READS: list[Callable[[ManagementApi], Awaitable[Any]]] = [
    getattr(ManagementApi, name) for name in ("version", "feature_flags", "exchanges", "queues", "bindings", "policies")
]


@pytest.mark.parametrize(
    "answer",
    [None, 5, "text", [5], ["x"], [None], [[]], [{}], {"a": 5}, [{"name": "q"}], [{"name": [], "type": "fanout"}]],
    ids=repr,
)
async def test_an_answer_that_is_not_the_management_apis_is_an_error_of_ours(answer: object) -> None:
    """Given JSON of another shape, when the management API is read, then it is told to be none."""
    async with answering(json.dumps(answer).encode()) as url, ManagementApi(ADDRESS, url) as api:
        for read in READS:
            if (answer, read) == ({"a": 5}, cast("Any", ManagementApi.version)):
                continue  # which is unknown then
            with pytest.raises(BackendUnusable, match=rf"{url} is not a RabbitMQ management API: Switch it on"):
                await read(api)


@pytest.mark.parametrize(
    ("answer", "status", "headers", "kind"),
    [
        (b"<html>", "200 OK", "", BackendUnusable),
        (b"[" * 100_000, "200 OK", "", BackendUnusable),
        (b"\xff\xfe", "200 OK", "", BackendUnusable),
        (b"no gzip", "200 OK", "Content-Encoding: gzip\r\n", BackendUnavailable),
        (b"", "302 Found", "Location: http://[\r\n", BackendUnusable),
        (b"\xff", "503 Busy", "Content-Type: text/plain; charset=nonsense\r\n", BackendUnavailable),
        (b"", "999 What", "", BackendUnavailable),
    ],
)
async def test_answers_that_are_no_json_are_errors_of_ours(
    answer: bytes, status: str, headers: str, kind: type[Exception]
) -> None:
    """Given answers that cannot be read, when the management API is asked, then the error is ours."""
    async with answering(answer, status, headers) as url, ManagementApi(ADDRESS, url) as api:
        with pytest.raises(kind):
            await api.queues()


async def test_no_error_of_the_management_api_has_the_password_in_its_url() -> None:
    """Given a user in the URL, when the API refuses, fails or is not there, then the error has no password."""
    login = "http://admin:sesame@"
    for status in ("401 Unauthorized", "404 Not Found", "500 Oops", "418 Teapot", "200 OK"):
        async with answering(b"<html>", status) as url, ManagementApi(ADDRESS, login + url.partition("//")[2]) as api:
            with pytest.raises(DelaylineError) as refused:
                await api.queues()
        assert "sesame" not in str(refused.value)
        assert url in str(refused.value)
    async with ManagementApi(BrokerAddress.parse("amqp://h?management=http://admin:sesame@127.0.0.1:1")) as api:
        with pytest.raises(BackendUnavailable, match=r"no management API at http://127\.0\.0\.1:1: ") as gone:
            await api.queues()
    assert "sesame" not in str(gone.value)
