"""The properties of a message: read singly, and decoded when they are asked for.

A message is decoded by itself, after its frame was read: text that is not UTF-8, a time beyond year 9999 or an unknown
type of value is a fault of that message, and of nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pamqp import decode

from delayline.rabbitmq.amqp.wire import HEADERS_FLAG

if TYPE_CHECKING:
    from collections.abc import Iterator

DELIVERY_COUNT: Final = "x-delivery-count"
ACQUIRED_COUNT: Final = "x-acquired-count"
"""The header in which a quorum queue counts how often a message was returned to it."""
DEEPEST: Final = 32
"""How deep tables and lists may be nested: decoders call themselves for each level."""
LAST_TIMESTAMP: Final = 253_402_300_799_000
"""The last second of year 9999, in milliseconds: pamqp takes numbers beyond 2106 for those."""

#: The properties in their order: flag, and how many bytes each has; None for a short string.
PROPERTIES: Final = (
    (1 << 15, None),
    (1 << 14, None),
    (HEADERS_FLAG, -1),
    (1 << 12, 1),
    (1 << 11, 1),
    (1 << 10, None),
    (1 << 9, None),
    (1 << 8, None),
    (1 << 7, None),
    (1 << 6, 8),
    (1 << 5, None),
    (1 << 4, None),
    (1 << 3, None),
    (1 << 2, None),
)
MESSAGE_ID: Final = 1 << 7
TIMESTAMP: Final = 1 << 6
#: The properties that a message is read from, by flag; of the others only the encoding is checked.
NAMES: Final = {
    1 << 15: "content_type",
    1 << 10: "correlation_id",
    1 << 9: "reply_to",
    MESSAGE_ID: "message_id",
    1 << 5: "message_type",
}
DELIVERY_MODE: Final = 1 << 12
PRIORITY: Final = 1 << 11
#: Bytes of a value of each type; the others begin with their length.
SIZES: Final = dict(zip(b"tbBsuIilLfdTVD", (1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 8, 0, 5), strict=True))
WITH_LENGTH: Final = frozenset(b"SxFA")
TEXT: Final = ord("S")
NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})

_length = struct.Struct(">I")


class Undecodable(Exception):
    """Property flags and list that are not AMQP 0-9-1's."""


class Properties(NamedTuple):
    """The properties that a message is read from; empty where the sender set none."""

    content_type: str = ""
    headers: Mapping[str, Any] = NO_HEADERS
    correlation_id: str = ""
    reply_to: str = ""
    message_id: str = ""
    message_type: str = ""


class Delivery(NamedTuple):
    """A message as a channel receives it."""

    tag: int
    """Its number on the channel, by which it is acknowledged."""
    redelivered: bool
    """Whether another consumer may have had it before."""
    exchange: str
    routing_key: str
    encoded_properties: bytes
    """Property flags and list, as the sender encoded them."""
    body: bytes

    def decoded(self) -> Properties:
        """Return the properties. Raises Undecodable."""
        return decode_properties(self.encoded_properties)

    @property
    def returns(self) -> int:
        """How often a quorum queue has got the message back. Of a classic queue only 0 is right: it does not count.

        From version 4.3 on it counts no nack, and shows no number then beside that of all deliveries.
        """
        if not self.redelivered:  # then a count would be the sender's
            return 0
        headers = self.properties.headers
        count = headers.get(DELIVERY_COUNT)
        return count if isinstance(count, int) and count > 0 else int(ACQUIRED_COUNT not in headers)

    @property
    def failures(self) -> int:
        """How many deliveries of it have ended otherwise than by a nack, as quorum queues count from version 4.3 on.

        They count all earlier deliveries too: a larger number is the sender's.
        """
        headers = self.properties.headers
        failures, deliveries = headers.get(DELIVERY_COUNT), headers.get(ACQUIRED_COUNT)
        if not self.redelivered or not isinstance(failures, int) or not isinstance(deliveries, int):
            return 0
        return failures if 0 < failures <= deliveries else 0

    @property
    def properties(self) -> Properties:
        """The properties; none where they are undecodable."""
        try:
            return self.decoded()
        except Undecodable:
            return Properties()


def decode_properties(encoded: bytes) -> Properties:
    """Return the properties in a message's property flags and list. Raises Undecodable."""
    values: dict[str, Any] = {}
    try:
        for flag, start, end in walk_properties(encoded):
            if flag == HEADERS_FLAG:
                values["headers"] = _decode_table(encoded, start + 4, end, 0)
            elif flag == TIMESTAMP:
                _check_time(encoded[start:end])
            elif flag not in (DELIVERY_MODE, PRIORITY):
                string = encoded[start + 1 : end].decode()
                if flag in NAMES:
                    values[NAMES[flag]] = string
    except (ValueError, IndexError, struct.error) as error:
        raise Undecodable(str(error)) from error
    return Properties(**values)


def message_id_in(encoded: bytes) -> str | None:
    """Return the message id in property flags and list, whatever else is in them; None where there is none."""
    try:
        for flag, start, end in walk_properties(encoded):
            if flag == MESSAGE_ID:
                return encoded[start + 1 : end].decode(errors="replace")
    except (ValueError, IndexError, struct.error):
        return None
    return None


def walk_properties(encoded: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each property that is there: its flag, where it begins and where it ends."""
    (flags,) = struct.unpack_from(">H", encoded)
    if flags & 1:
        raise ValueError("more than one word of property flags")
    at = 2
    for flag, size in PROPERTIES:
        if not flags & flag:
            continue
        start = at
        if size is None:
            at += 1 + encoded[at]
        elif size < 0:
            at += 4 + _length.unpack_from(encoded, at)[0]
        else:
            at += size
        if at > len(encoded):
            raise ValueError("a property ends behind the frame")
        yield flag, start, at


def value_at(encoded: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return a value's type, which is at that position, and where the value begins and ends."""
    kind = encoded[at]
    size = SIZES.get(kind)
    if size is None:
        if kind not in WITH_LENGTH:
            raise Undecodable(f"a value of type {bytes([kind])!r}")
        size = 4 + _length.unpack_from(encoded, at + 1)[0]
    if at + 1 + size > end:
        raise ValueError("a value ends behind its table")
    return kind, at + 1, at + 1 + size


def _decode_table(encoded: bytes, at: int, end: int, depth: int) -> dict[str, Any]:
    """Return the fields of a table; texts that are not UTF-8 stay bytes."""
    fields: dict[str, Any] = {}
    while at < end:
        behind = at + 1 + encoded[at]
        name = encoded[at + 1 : behind].decode()
        kind, start, at = value_at(encoded, behind, end)
        fields[name] = (
            _text(encoded[start + 4 : at]) if kind == TEXT else _decode_value(encoded, kind, start, at, depth)
        )
    return fields


def _decode_list(encoded: bytes, at: int, end: int, depth: int) -> list[Any]:
    values = []
    while at < end:
        kind, start, at = value_at(encoded, at, end)
        values.append(_decode_value(encoded, kind, start, at, depth))
    return values


def _decode_value(encoded: bytes, kind: int, start: int, end: int, depth: int) -> Any:  # noqa: ANN401 - whatever AMQP has
    if kind == TEXT:
        return _text(encoded[start + 4 : end])
    if kind in b"FA":
        if depth >= DEEPEST:
            raise Undecodable(f"tables nested more than {DEEPEST} deep")
        decoded = _decode_table if kind == ord("F") else _decode_list
        return decoded(encoded, start + 4, end, depth + 1)
    if kind == ord("T"):
        _check_time(encoded[start:end])
    return decode.embedded_value(encoded[start - 1 : end])[1]


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _check_time(raw: bytes) -> None:
    if int.from_bytes(raw, "big") > LAST_TIMESTAMP:
        raise Undecodable("a time beyond year 9999")
