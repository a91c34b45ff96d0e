"""A message as it comes from a queue: AMQP properties and headers of any sender, read as NServiceBus reads them."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from pamqp import encode

from delayline.errors import InvalidMessage
from delayline.message import Headers, Message, in_utc, to_wire_time
from delayline.rabbitmq.amqp.stream import sent_on, unreadable
from delayline.rabbitmq.amqp.wire import (
    DAMAGED_HEADERS,
    ENCLOSED_TYPES,
    HEADERS_IN_BODY,
    LONGEST_SHORT_STRING,
    NON_PERSISTENT,
    NOT_SENT,
    goes_on,
    headers_in_body,
    short_string,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiormq.abc import DeliveredMessage
    from pamqp.commands import Basic

DEFAULT_CONTENT_TYPE: Final = "application/octet-stream"
"""The content type of messages that have none."""
CALLBACK_QUEUE: Final = "NServiceBus.RabbitMQ.CallbackQueue"
DELIVERY_COUNT: Final = "x-delivery-count"
NOT_PERSISTENT_MODE: Final = 1
NO_MESSAGE_ID: Final = (
    "A non-empty 'message-id' property is required when running NServiceBus on top of RabbitMQ: "
    "the sender of this message set none"
)
UNREADABLE_PROPERTIES: Final = (
    "its properties are not AMQP 0-9-1's: a text that is not UTF-8, a time beyond year 9999, a type of value that is "
    "not known, or tables nested too deeply"
)


def message_from(delivered: DeliveredMessage) -> Message:
    """Return the delivered message, its headers as texts, without those that brokers and transports added.

    Raises InvalidMessage for one that cannot be handled: without a message id nothing could name it, and properties
    that are not AMQP's could not be sent on.
    """
    properties, body = delivered.header.properties, delivered.body
    if unreadable(properties) is not None:
        raise InvalidMessage(UNREADABLE_PROPERTIES)
    fields: Mapping[str, Any] = properties.headers or {}
    message_id = properties.message_id or ""
    if not message_id.strip():
        message_id = _id_in(fields)
    if not message_id.strip():
        raise InvalidMessage(NO_MESSAGE_ID)
    damaged = fields.get(DAMAGED_HEADERS)
    if damaged is not None:
        if not isinstance(damaged, str | bytes | bytearray):
            raise InvalidMessage(f"its header {DAMAGED_HEADERS} is a {type(damaged).__name__}, and not a text")
        raw = damaged.encode("utf-8", "surrogatepass") if isinstance(damaged, str) else bytes(damaged)
        return Message.from_encoded(message_id, raw, body)
    if HEADERS_IN_BODY in fields:
        return headers_in_body(message_id, fields[HEADERS_IN_BODY], body)
    headers = {
        name: value if type(value) is str else as_text(value) for name, value in fields.items() if name not in NOT_SENT
    }
    _add_properties(headers, properties)
    return Message(message_id, headers, body)


def _id_in(fields: Mapping[str, Any]) -> str:
    """Return the id that a header names; raises InvalidMessage for one that no property could carry."""
    message_id = as_text(fields.get(Headers.MESSAGE_ID))
    try:
        size = len(message_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"its only message id, in a header, is not valid Unicode: {error}") from error
    if size > LONGEST_SHORT_STRING:
        raise InvalidMessage(f"its only message id, in a header, has {size} bytes: AMQP carries 255 at most")
    return message_id


def _add_properties(headers: dict[str, str], properties: Basic.Properties) -> None:
    """Let properties win over headers, as the sender's client may have set them alone."""
    if properties.reply_to:
        headers[Headers.REPLY_TO] = properties.reply_to
    if headers.get(CALLBACK_QUEUE):
        headers[Headers.REPLY_TO] = headers[CALLBACK_QUEUE]
    if properties.correlation_id:
        headers[Headers.CORRELATION_ID] = properties.correlation_id
    if properties.content_type and properties.content_type != DEFAULT_CONTENT_TYPE:
        headers[Headers.CONTENT_TYPE] = properties.content_type
    if properties.message_type:
        headers.setdefault(ENCLOSED_TYPES, properties.message_type)
    if properties.delivery_mode == NOT_PERSISTENT_MODE:
        headers[NON_PERSISTENT] = "True"


def delivery_count(properties: Basic.Properties) -> int:
    """Return how often a quorum queue has delivered the message before; 0 if unknown."""
    count = (properties.headers or {}).get(DELIVERY_COUNT, 0)
    return count if isinstance(count, int) else 0


def as_text(value: Any) -> str:  # noqa: ANN401 - whatever AMQP has
    """Return a header's value as the .NET transport turns it into text; never fails."""
    match value:
        case None:
            return ""
        case str():
            return value
        case bytes() | bytearray():
            return _decoded(bytes(value))
        case datetime():
            return to_wire_time(in_utc(value))
        case dict():
            return ",".join(f"{name}={as_text(one)}" for name, one in value.items())
        case list():
            return ";".join(map(as_text, value))
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case _:
            return str(value)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")


def unchanged(properties: Basic.Properties) -> bytes:
    """Return the property flags and list of an unchanged message, for Publication.properties.

    Decoded values have lost their width: integers are written as int32, or int64 if needed, as .NET writes them; floats
    as doubles. Headers that a broker interprets, such as x-death or CC, are omitted. Properties that no client decodes
    stay the original bytes.
    """
    raw = unreadable(properties)
    if raw is not None:
        return sent_on(raw)
    parts, flags = [], 0
    for name in properties.__slots__:
        value = getattr(properties, name)
        if name == "headers":
            value = {key: one for key, one in (value or {}).items() if goes_on(key)}
        if value in (None, "", {}):
            continue
        flags |= properties.flags[name]
        encoded = encode_table(value) if name == "headers" else encode.by_type(value, properties.amqp_type(name))
        parts.append(encoded)
    return struct.pack(">H", flags) + b"".join(parts)


def encode_table(fields: Mapping[str, Any]) -> bytes:
    """Return an AMQP table; raises InvalidMessage for a value that AMQP has no type for."""
    encoded = b"".join(short_string(name, "header name") + encode_field(value) for name, value in fields.items())
    return struct.pack(">I", len(encoded)) + encoded


def encode_field(value: Any) -> bytes:  # noqa: ANN401 - whatever AMQP has
    """Return a value of an AMQP table behind its type; raises InvalidMessage where AMQP has none for it."""
    match value:
        case bool() | None:
            return encode.encode_table_value(value)
        case int() if -(2**31) <= value < 2**31:
            return struct.pack(">ci", b"I", value)
        case int() if -(2**63) <= value < 2**63:
            return struct.pack(">cq", b"l", value)
        case float():
            return struct.pack(">cd", b"d", value)
        case str() | bytes():
            raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            return struct.pack(">cI", b"S", len(raw)) + raw
        case dict():
            return b"F" + encode_table(value)
        case list():
            encoded = b"".join(map(encode_field, value))
            return struct.pack(">cI", b"A", len(encoded)) + encoded
    try:
        return encode.encode_table_value(value)
    except (TypeError, ValueError, struct.error) as error:
        raise InvalidMessage(f"AMQP cannot carry the header value {value!r}: {error}") from error
