"""Messages that are sent on as they came: their properties byte for byte, but for what would end their way."""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from delayline.errors import InvalidMessage
from delayline.rabbitmq.amqp.properties import Undecodable, value_at, walk_properties
from delayline.rabbitmq.amqp.wire import (
    DELIVERY_MODE_FLAG,
    EXPIRATION_FLAG,
    HEADERS_FLAG,
    USER_ID_FLAG,
    short_string,
)
from delayline.rabbitmq.encoding import NOT_SENT

if TYPE_CHECKING:
    from collections.abc import Mapping

PERSISTENT: Final = b"\x02"
#: Messages in an error queue do not expire, and brokers refuse messages that name another user.
NOT_FOR_ERROR_QUEUE: Final = frozenset([EXPIRATION_FLAG, USER_ID_FLAG])

_length = struct.Struct(">I")


def sent_on(
    encoded: bytes,
    marks: Mapping[str, str | int] = MappingProxyType({}),
    *,
    without: str | tuple[str, ...] = (),
    expires: bool = False,
) -> bytes:
    """Return the property flags and list of a message that is sent on as it came, for Publication.properties.

    It is durable, even if it came as a transient message. An expiration would end its way, and brokers refuse messages
    that name another user: both are left out, and so are headers that a broker interprets, such as x-death or CC.

    Args:
        encoded: The message's property flags and list.
        marks: Headers to add, if the message's own can be parsed.
        without: Prefix, or prefixes, of the names of headers to leave out.
        expires: Whether it keeps its expiration.

    Raises:
        InvalidMessage: The properties cannot be parsed.
    """
    parts: dict[int, bytes] = {}
    added = b"".join(_encoded_mark(name, value) for name, value in marks.items())
    try:
        for flag, start, end in walk_properties(encoded):
            if flag in NOT_FOR_ERROR_QUEUE and not (expires and flag == EXPIRATION_FLAG):
                continue
            table = flag == HEADERS_FLAG
            parts[flag] = _fields_that_go_on(encoded, start + 4, end, added, without) if table else encoded[start:end]
    except (ValueError, IndexError, struct.error) as error:
        raise InvalidMessage(f"the properties of a message cannot be sent on: {error}") from error
    if added:
        parts.setdefault(HEADERS_FLAG, _length.pack(len(added)) + added)
    parts[DELIVERY_MODE_FLAG] = PERSISTENT
    return struct.pack(">H", sum(parts)) + b"".join(parts[flag] for flag in sorted(parts, reverse=True))


def _fields_that_go_on(encoded: bytes, at: int, end: int, added: bytes, without: str | tuple[str, ...]) -> bytes:
    """Return the table without headers that a broker interprets; unchanged if its fields cannot be separated."""
    first, kept = at, []
    try:
        while at < end:
            entry, behind = at, at + 1 + encoded[at]
            name = encoded[at + 1 : behind].decode(errors="replace")
            _, _, at = value_at(encoded, behind, end)
            if _goes_on(name) and not name.startswith(without):
                kept.append(encoded[entry:at])
        fields = b"".join((*kept, added))
    except (ValueError, IndexError, struct.error, Undecodable):
        fields = encoded[first:end]
    return _length.pack(len(fields)) + fields


def _encoded_mark(name: str, value: str | int) -> bytes:
    if isinstance(value, int):
        return short_string(name, "header name") + struct.pack(">ci", b"I", value)
    raw = value.encode("utf-8", "surrogatepass")
    return short_string(name, "header name") + struct.pack(">cI", b"S", len(raw)) + raw


def _goes_on(name: str) -> bool:
    """Return whether a header of that name stays on a message that is sent on unchanged."""
    return name not in NOT_SENT or not name.startswith(("x-", "CC", "BCC"))
