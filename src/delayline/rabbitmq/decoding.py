"""Received messages of any sender: AMQP properties and headers, read as NServiceBus reads them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import InvalidMessage
from delayline.message import NO_VALUE, Headers, Message, in_utc, to_wire_time
from delayline.rabbitmq.amqp.properties import Undecodable
from delayline.rabbitmq.amqp.wire import LONGEST_SHORT_STRING
from delayline.rabbitmq.encoding import CRASHES_HEADER, DAMAGED_HEADERS, ENCLOSED_TYPES, HEADERS_IN_BODY, NOT_SENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.rabbitmq.amqp.properties import Delivery, Properties

DEFAULT_CONTENT_TYPE: Final = "application/octet-stream"
"""The content type of messages that have none."""
CALLBACK_QUEUE: Final = "NServiceBus.RabbitMQ.CallbackQueue"
NO_MESSAGE_ID: Final = (
    "A non-empty 'message-id' property is required when running NServiceBus on top of RabbitMQ: "
    "the sender of this message set none"
)
UNREADABLE_PROPERTIES: Final = (
    "its properties are not AMQP 0-9-1's: a text that is not UTF-8, a time beyond year 9999, a type of value that is "
    "not known, or tables nested too deeply"
)


def message_from(delivery: Delivery) -> Message:
    """Return the delivered message, its headers as texts, without headers that brokers and transports added.

    Raises InvalidMessage for a message that cannot be handled: without a message id nothing could name it, and
    properties that are not AMQP's could not be sent on.
    """
    try:
        properties = delivery.decoded()
    except Undecodable as error:
        raise InvalidMessage(UNREADABLE_PROPERTIES) from error
    fields, body = properties.headers, delivery.body
    message_id = properties.message_id
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
    """Return the id that a header names; raises InvalidMessage for an id that no property could carry."""
    message_id = as_text(fields.get(Headers.MESSAGE_ID))
    try:
        size = len(message_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"its only message id, in a header, is not valid Unicode: {error}") from error
    if size > LONGEST_SHORT_STRING:
        raise InvalidMessage(f"its only message id, in a header, has {size} bytes: AMQP carries 255 at most")
    return message_id


def _add_properties(headers: dict[str, str], properties: Properties) -> None:
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


def as_text(value: Any) -> str:  # noqa: ANN401 - whatever AMQP has
    """Return a header's value as the .NET transport turns it into text; never fails."""
    match value:
        case None:
            return NO_VALUE
        case str():
            return value
        case bytes() | bytearray():
            return _decoded(bytes(value))
        case datetime():
            return to_wire_time(in_utc(value))
        case dict():
            return ",".join(f"{name}={as_text(field)}" for name, field in value.items())
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


def headers_in_body(message_id: str, field: object, body: bytes) -> Message:
    """Return the message whose headers are in front of its body, of `field` bytes; raises InvalidMessage."""
    if not isinstance(field, int) or isinstance(field, bool) or not 0 <= field <= len(body):
        raise InvalidMessage(
            f"its header {HEADERS_IN_BODY} is not a number from 0 to {len(body)}, the size of its body"
        )
    return Message.from_encoded(message_id, body[:field], body[field:])


def crashes_of(delivery: Delivery) -> int:
    """Return how many deliveries of it have ended with a crash, as a copy of it says."""
    count = delivery.properties.headers.get(CRASHES_HEADER)
    return count if isinstance(count, int) and count > 0 else 0
