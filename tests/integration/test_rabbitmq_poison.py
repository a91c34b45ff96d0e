"""What any AMQP client may publish stops no endpoint: handled, or in the error queue byte for byte."""

from __future__ import annotations

import asyncio
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE, eventually_async
from tests.integration.raw_amqp import RawClient, field, long, nested, properties, short, text

from delayline import Endpoint, Headers, Message, MessageContext, Recoverability
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.amqp.methods import ExchangeDelete
from delayline.rabbitmq.encoding import DAMAGED_HEADERS, HEADERS_IN_BODY

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_UTF8 = b"\xff\xfe\x80"

#: Go to the error queue, byte for byte.
REFUSED = {
    "timestamp property 2^63": properties(b"", "p", timestamp=struct.pack(">Q", 2**63)),
    "timestamp header 2^62": properties(field("x", b"T", struct.pack(">Q", 2**62)), "p"),
    "header name not UTF-8": properties(text(NOT_UTF8, "y"), "p"),
    "message id not UTF-8": properties(b"", NOT_UTF8),
    "message id a lone surrogate": properties(b"", b"\xed\xa0\x80"),
    "correlation id not UTF-8": properties(b"", "p", correlation_id=short(NOT_UTF8)),
    "reply-to not UTF-8": properties(b"", "p", reply_to=short(NOT_UTF8)),
    "content type not UTF-8": properties(b"", "p", content_type=short(NOT_UTF8)),
    "type not UTF-8": properties(b"", "p", type=short(NOT_UTF8)),
    "app id not UTF-8": properties(b"", "p", app_id=short(NOT_UTF8)),
    "tables nested 2000 deep": properties(nested(2000), "p"),
    "damaged headers a table": properties(field(DAMAGED_HEADERS, b"F", long(text("q", "w"))), "p"),
    "damaged headers a double": properties(field(DAMAGED_HEADERS, b"d", struct.pack(">d", 1.5)), "p"),
    "damaged headers a list": properties(field(DAMAGED_HEADERS, b"A", long(b"S" + long("a"))), "p"),
    "damaged headers a timestamp": properties(field(DAMAGED_HEADERS, b"T", struct.pack(">Q", 1000)), "p"),
    "damaged headers a negative int": properties(field(DAMAGED_HEADERS, b"I", struct.pack(">i", -5)), "p"),
    "damaged headers an int64": properties(field(DAMAGED_HEADERS, b"l", struct.pack(">q", 2**62)), "p"),
    "damaged headers 2147483647": properties(field(DAMAGED_HEADERS, b"I", struct.pack(">i", 2**31 - 1)), "p"),
    "headers in the body, too many": properties(field(HEADERS_IN_BODY, b"I", struct.pack(">i", 3)), "p"),
    "headers in the body, below 0": properties(field(HEADERS_IN_BODY, b"I", struct.pack(">i", -3)), "p"),
    "only id is a header of 300": properties(text(Headers.MESSAGE_ID, "h" * 300)),
    "only id is a surrogate header": properties(text(Headers.MESSAGE_ID, b"\xed\xa0\x80")),
}
#: Are handled, and where the handler fails they go to the error queue.
HANDLED = {
    "header value not UTF-8": properties(text("x", NOT_UTF8), "p"),
    "header value a lone surrogate": properties(text("x", b"\xed\xa0\x80"), "p"),
    "id header of 300": properties(text(Headers.MESSAGE_ID, "h" * 300), "p"),
    "id header of 200 Cyrillic letters": properties(text(Headers.MESSAGE_ID, "ж" * 200), "p"),
    "headers of 130 800 bytes": properties(text("x", "y" * 130_800), "p"),
    "9000 numbers as headers": properties(
        b"".join(field(f"{n}", b"l", struct.pack(">q", -n)) for n in range(7000)), "p"
    ),
    "CC to its own queue": properties(field("CC", b"A", long(b"S" + long("elsewhere"))), "p"),
    "damaged headers": properties(text(DAMAGED_HEADERS, "[" * 60_000), "p"),
    "headers in the body, no JSON": properties(field(HEADERS_IN_BODY, b"I", struct.pack(">i", 1)), "p"),
    "delivered to a key not UTF-8": properties(b"", "p"),
    "expiration a day": properties(b"", "p", expiration=short("86400000")),
}


class RecordingEndpoint:
    """An endpoint under test, with its handled messages and its errors."""

    def __init__(self, url: str, fails: Callable[[], Exception] | None = None) -> None:
        self.handled: list[str] = []
        self.bad: list[Message] = []
        self.critical: list[str] = []
        self._fails = fails
        self.endpoint = Endpoint(
            "shop",
            transport=RabbitMQTransport(url),
            delayed_delivery=DelayLevelDelivery(),
            concurrency=2,
            on_critical_error=self._on_critical,
            recoverability=Recoverability(immediate_retries=0, delayed_retries=1, time_increase=timedelta(seconds=1)),
        )
        self.endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        if message.id.startswith("good"):
            self.handled.append(message.id)
            return
        self.bad.append(message)
        if self._fails is not None:
            raise self._fails()

    async def _on_critical(self, endpoint: Endpoint, text: str, error: Exception) -> None:
        self.critical.append(f"{text}: {error!r}")


def as_published(encoded: bytes) -> bytes:
    """Return property flags and list without the count that a queue adds to the table."""
    count = short("x-delivery-count") + b"l"
    at = encoded.find(count)
    if at < 0:
        return encoded
    size, table = len(count) + 8, 2
    if encoded[0] & 0x80:  # a content type comes first
        table += 1 + encoded[2]
    shorter = struct.pack(">I", struct.unpack_from(">I", encoded, table)[0] - size)
    return encoded[:table] + shorter + encoded[table + 4 : at] + encoded[at + size :]


def taken(client: RawClient, queue: str) -> tuple[bytes, bytes]:
    """Take one message, which may be a moment away."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = client.take(queue)
        if found is not None:
            return as_published(found[0]), found[1]
        time.sleep(0.05)
    raise AssertionError(f"nothing came to {queue}")


def durable(encoded: bytes) -> bytes:
    """Return property flags and list with the delivery mode of a durable message, which copies have."""
    (flags,), at = struct.unpack_from(">H", encoded), 2
    for _ in range((flags >> 15 & 1) + (flags >> 14 & 1)):
        at += 1 + encoded[at]
    if flags >> 13 & 1:
        at += 4 + struct.unpack_from(">I", encoded, at)[0]
    assert not flags & 1 << 12
    return struct.pack(">H", flags | 1 << 12) + encoded[2:at] + b"\x02" + encoded[at:]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sample(6)
async def test_a_hostile_message_goes_to_the_error_queue_byte_for_byte(name: str, rabbitmq_url: str) -> None:
    """Given one among good ones, when received, then it is durable in the error queue, else as it was."""
    shop = RecordingEndpoint(rabbitmq_url)
    async with shop.endpoint:
        with RawClient(rabbitmq_url) as client:
            client.publish("shop", REFUSED[name], b"{}")
            for number in range(3):
                client.publish("shop", properties(b"", f"good-{number}"))
            await eventually_async(lambda: len(shop.handled) == 3)
            found = await asyncio.to_thread(taken, client, "error")
    assert (sorted(shop.handled), shop.critical, shop.bad) == (["good-0", "good-1", "good-2"], [], [])
    assert found == (durable(REFUSED[name]), b"{}")


@pytest.mark.parametrize("name", HANDLED)
async def test_an_odd_message_is_handled_and_may_fail(name: str, rabbitmq_url: str) -> None:
    """Given a handler that fails, when it gets one, then it is in the error queue, and the others are handled."""
    shop = RecordingEndpoint(rabbitmq_url, fails=lambda: ValueError("x" * 200_000))
    async with shop.endpoint:
        with RawClient(rabbitmq_url) as client:
            key = NOT_UTF8 if name == "delivered to a key not UTF-8" else b""
            client.publish("shop", HANDLED[name], b"{}", routing_key=key)
            for number in range(3):
                client.publish("shop", properties(b"", f"good-{number}"))
            await eventually_async(lambda: len(shop.handled) == 3)
            await asyncio.to_thread(taken, client, "error")
            assert client.take("error") is None
    assert (sorted(shop.handled), shop.critical) == (["good-0", "good-1", "good-2"], [])
    assert len(shop.bad) == (0 if name in ("damaged headers", "headers in the body, no JSON") else 2)


async def test_headers_larger_than_a_frame_come_back_from_the_error_queue(rabbitmq_url: str) -> None:
    """Given a failed message whose headers fill a frame, when moved, then its headers are all there."""
    shop = RecordingEndpoint(rabbitmq_url, fails=lambda: ValueError("no"))
    async with shop.endpoint:
        with RawClient(rabbitmq_url) as client:
            client.publish("shop", HANDLED["headers of 130 800 bytes"], b"body")
        async with asyncio.timeout(PATIENCE):
            while not await shop.endpoint.transport.count("error"):  # type: ignore[attr-defined] # noqa: ASYNC110
                await asyncio.sleep(0.05)
        [moved] = await shop.endpoint.transport.browse("error", 1)  # type: ignore[attr-defined]
    assert (moved.id, moved.body, moved.headers["x"]) == ("p", b"body", "y" * 130_800)
    assert moved.headers[Headers.FAILED_QUEUE] == "shop"
    assert moved.headers[Headers.EXCEPTION_MESSAGE] == "no"


@pytest.mark.slow
async def test_a_poison_message_without_an_error_queue_delays_no_other(rabbitmq_url: str) -> None:
    """Given an error queue that is gone, when a poison message is received, then it is held, and goes there later."""
    shop = RecordingEndpoint(rabbitmq_url)
    async with shop.endpoint:
        with RawClient(rabbitmq_url) as client:
            await shop.endpoint.transport.connection.run(  # type: ignore[attr-defined]
                lambda channel: channel.call(ExchangeDelete(exchange="error"))
            )
            client.publish("shop", REFUSED["app id not UTF-8"], b"{}")
            for number in range(3):
                client.publish("shop", properties(b"", f"good-{number}"))
            await eventually_async(lambda: len(shop.handled) == 3)
            await shop.endpoint.transport.setup_infrastructure(["error"])
            found = await asyncio.to_thread(taken, client, "error")
    assert found == (durable(REFUSED["app id not UTF-8"]), b"{}")
    assert shop.critical == []
