"""Frames as bytes: a `basic.publish` is encoded by hand, because encoding is most of the cost of a send."""

from __future__ import annotations

import struct
from typing import Final, Protocol

from delayline.rabbitmq.amqp.errors import Unsendable

FRAME_METHOD: Final = 1
FRAME_HEADER: Final = 2
FRAME_BODY: Final = 3
FRAME_HEARTBEAT: Final = 8
FRAME_END: Final = b"\xce"
FRAME_OVERHEAD: Final = 8
LONGEST_SHORT_STRING: Final = 255
BASIC: Final = 60
PUBLISH: Final = 40
MANDATORY: Final = 1
EXCHANGE: Final = 40
DECLARE: Final = 10
PASSIVE: Final = 1
#: Bytes in front of a message's properties in a header frame.
CONTENT_HEAD: Final = 12
MEMORY: Final = 4096
"""How many encoded texts are kept, as they come again and again."""

_frame_start = struct.Struct(">BHI").pack
_header_start = struct.Struct(">BHIHHQ").pack
_length = struct.Struct(">I").pack

CONTENT_TYPE_FLAG: Final = 1 << 15
HEADERS_FLAG: Final = 1 << 13
DELIVERY_MODE_FLAG: Final = 1 << 12
CORRELATION_ID_FLAG: Final = 1 << 10
REPLY_TO_FLAG: Final = 1 << 9
EXPIRATION_FLAG: Final = 1 << 8
MESSAGE_ID_FLAG: Final = 1 << 7
TYPE_FLAG: Final = 1 << 5
USER_ID_FLAG: Final = 1 << 4


class Publication(Protocol):
    """A message on its way to an exchange."""

    @property
    def exchange(self) -> str:
        """Where it is published."""

    @property
    def routing_key(self) -> str:
        """By which the exchange finds queues for it."""

    @property
    def message_id(self) -> str | None:
        """The property by which a returned message is told from others; None if its exchange and key are to do."""

    def content(self, room: int) -> tuple[bytes, bytes]:
        """Return property flags and list, of at most `room` bytes, and the body. Raises Unsendable."""


def short_string(string: str, what: str) -> bytes:
    """Return an AMQP short string; raises Unsendable for a text of more than 255 bytes."""
    try:
        raw = string.encode()
    except UnicodeEncodeError as error:
        raise Unsendable(f"{what} {string!r} is not valid Unicode: {error}") from error
    if len(raw) > LONGEST_SHORT_STRING:
        raise Unsendable(f"{what} has {len(raw)} bytes in UTF-8, AMQP carries 255 at most: {string[:40]!r}...")
    return bytes([len(raw)]) + raw


class PublishFrames:
    """Encodes publications for a channel of a connection."""

    def __init__(self, channel: int, frame_max: int) -> None:
        self._channel = channel
        self._most = frame_max - FRAME_OVERHEAD if frame_max else 1 << 17
        self._methods: dict[tuple[str, str], bytes] = {}

    def encode(self, publication: Publication) -> bytes:
        """Return all frames of a message; raises Unsendable for a message that AMQP cannot carry."""
        where = (publication.exchange, publication.routing_key)
        method = self._methods.get(where) or self._method(*where)
        properties, body = publication.content(self._most - CONTENT_HEAD)
        header = _header_start(FRAME_HEADER, self._channel, len(properties) + CONTENT_HEAD, BASIC, 0, len(body))
        if not body:
            return b"".join((method, header, properties, FRAME_END))
        if len(body) <= self._most:
            start = _frame_start(FRAME_BODY, self._channel, len(body))
            return b"".join((method, header, properties, FRAME_END, start, body, FRAME_END))
        return b"".join((method, header, properties, FRAME_END, *self._split(body)))

    def _method(self, exchange: str, routing_key: str) -> bytes:
        names = short_string(exchange, "exchange") + short_string(routing_key, "routing key")
        payload = struct.pack(">HHH", BASIC, PUBLISH, 0) + names + bytes([MANDATORY])
        frame = method_frame(self._channel, payload)
        if len(self._methods) >= MEMORY:
            self._methods.clear()
        self._methods[exchange, routing_key] = frame
        return frame

    def _split(self, body: bytes) -> list[bytes]:
        parts: list[bytes] = []
        for first in range(0, len(body), self._most):
            part = body[first : first + self._most]
            parts += (_frame_start(FRAME_BODY, self._channel, len(part)), part, FRAME_END)
        return parts


def method_frame(channel: int, payload: bytes) -> bytes:
    """Return the frame of a method: its two numbers, then its arguments."""
    return _frame_start(FRAME_METHOD, channel, len(payload)) + payload + FRAME_END


def passive_declare(exchange: str, channel: int) -> bytes:
    """Return the frame that asks whether an exchange is there; pamqp takes only some of the names that brokers do."""
    start = struct.pack(">HHH", EXCHANGE, DECLARE, 0)
    return method_frame(channel, start + short_string(exchange, "exchange") + b"\0" + bytes([PASSIVE]) + _length(0))
