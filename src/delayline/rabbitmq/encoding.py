"""Messages as AMQP properties and bodies, with headers as NServiceBus.RabbitMQ writes them.

Libraries encode an integer header in the smallest type that fits; NServiceBus reads the delay only as an int32, so that
header is always written so.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.errors import CorruptHeaders, InvalidMessage
from delayline.message import NO_VALUE, UNUSABLE_ID_NAMESPACE, Headers, Message, encode_headers, id_from
from delayline.rabbitmq.amqp.errors import Unsendable
from delayline.rabbitmq.amqp.wire import (
    CONTENT_HEAD,
    CONTENT_TYPE_FLAG,
    CORRELATION_ID_FLAG,
    DELIVERY_MODE_FLAG,
    EXPIRATION_FLAG,
    HEADERS_FLAG,
    LONGEST_SHORT_STRING,
    MEMORY,
    MESSAGE_ID_FLAG,
    REPLY_TO_FLAG,
    TYPE_FLAG,
    short_string,
)
from delayline.rabbitmq.levels import DELAY_HEADER, MAXIMUM_DELAY

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "NServiceBus.Transport.RabbitMQ."
NON_PERSISTENT: Final = PREFIX + "UseNonPersistentDelivery"
CONFIRMATION_ID: Final = PREFIX + "ConfirmationId"
#: Carries headers that could not be read, as they were stored: so such a message can be kept, whole, in a queue.
DAMAGED_HEADERS: Final = "Delayline.DamagedHeaders"
#: How many bytes at the beginning of a body are its message's headers, as stored: of a failed message that has more of
#: them than a frame holds, or an unsendable one.
HEADERS_IN_BODY: Final = "Delayline.HeadersInBody"
ENCLOSED_TYPES: Final = "NServiceBus.EnclosedMessageTypes"
#: Headers that a failed message keeps as headers when the others are in its body.
SHOWN_BESIDE_BODY: Final = (
    Headers.MESSAGE_ID,
    Headers.CORRELATION_ID,
    Headers.CONVERSATION_ID,
    Headers.CONTENT_TYPE,
    ENCLOSED_TYPES,
    Headers.FAILED_QUEUE,
    Headers.TIME_OF_FAILURE,
    Headers.EXCEPTION_TYPE,
    Headers.EXCEPTION_MESSAGE,
    Headers.PROCESSING_ENDPOINT,
    Headers.RETRIES,
    Headers.RETRIES_TIMESTAMP,
)
LONGEST_BOUNDED_HEADER: Final = 250  # bytes of each, so that all of them fit into the smallest frame
LONGEST_EXPIRATION: Final = 315_360_000_000
"""Milliseconds, ten years of 365 days: brokers close the channel over longer ones."""

#: Never sent on: brokers before 4.0.1 take a client's x-death for their own and drop the message, and
#: all of them send copies to the queues in CC and BCC, or refuse the message if either is no list.
CRASHES_HEADER: Final = "x-delayline-crashes"
"""The header that counts the deliveries of a message that have ended with a crash, where they are counted by copies."""
NOT_SENT: Final = frozenset(
    [
        DELAY_HEADER,
        NON_PERSISTENT,
        CONFIRMATION_ID,
        DAMAGED_HEADERS,
        HEADERS_IN_BODY,
        CRASHES_HEADER,
        "x-delivery-count",
        "x-acquired-count",
        "x-death",
    ]
    + ["x-dotnet-pub-seq-no", "CC", "BCC"]
    + [f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")]
)

DELAY_START: Final = bytes([len(DELAY_HEADER)]) + DELAY_HEADER.encode() + b"I"

_length = struct.Struct(">I").pack
_int32 = struct.Struct(">i").pack
_flags = struct.Struct(">H").pack


class Publication(NamedTuple):
    """A message on its way to an exchange."""

    message: Message
    exchange: str
    routing_key: str
    delay: int | None = None
    """Seconds, of a delayed send: 0 to 268435455."""
    properties: bytes | None = None
    """AMQP property flags and list to send as they are, in place of the message's id and headers."""

    @property
    def message_id(self) -> str | None:
        """The message id among its properties; None if the properties are sent as they are."""
        return self.message.id if self.properties is None else None

    def content(self, room: int) -> tuple[bytes, bytes]:
        """Return its property flags and list, of at most `room` bytes, and the body; raises InvalidMessage.

        A failed message, on its way to the error queue or to another attempt, has a form that always fits: its headers
        in its body.
        """
        message, delay = self.message, self.delay
        if delay is not None and not 0 <= delay <= MAXIMUM_DELAY:
            raise InvalidMessage(
                f"message {message.id!r} has a delay of {delay} s, RabbitMQ's levels hold 0 to {MAXIMUM_DELAY}"
            )
        try:
            properties = self.properties or encode_properties(message, delay)
            if len(properties) > room:
                raise _too_many_headers(message, properties, room)
        except (InvalidMessage, Unsendable) as error:
            wrapped = None if self.properties is not None else with_headers_in_body(message)
            if wrapped is None and isinstance(error, InvalidMessage):
                raise
            if wrapped is None:
                raise InvalidMessage(str(error)) from error
            properties = encode_properties(wrapped, delay, len(wrapped.body) - len(message.body))
            if len(properties) > room:
                raise _too_many_headers(wrapped, properties, room) from None
            return properties, wrapped.body
        return properties, message.body


def _too_many_headers(message: Message, properties: bytes, room: int) -> InvalidMessage:
    return InvalidMessage(
        f"message {message.id!r} has {len(properties) + CONTENT_HEAD} bytes of headers, a frame of this broker holds "
        f"{room + CONTENT_HEAD}: put large values into the body"
    )


class _HeaderNames(dict[str, bytes]):
    """Each header's name as it begins a field of type 'S'."""

    def __missing__(self, name: str) -> bytes:
        if not isinstance(name, str):
            raise InvalidMessage(f"header name {name!r} is not a str: names and values of headers are text")
        encoded = short_string(name, "header name") + b"S"
        if len(self) < MEMORY:
            self[name] = encoded
        return encoded


class _ShortStrings(dict[str, bytes]):
    """Values that come again and again, as AMQP short strings; nothing where a value is empty or too long for that."""

    def __missing__(self, string: str) -> bytes:
        encoded = _short(string)
        if len(self) < MEMORY:
            self[string] = encoded
        return encoded


_names: Final = _HeaderNames()
_shorts: Final = _ShortStrings()


def with_headers_in_body(message: Message) -> Message | None:
    """Return a failed message with all its headers, also damaged ones, in front of its body; None for other messages.

    The remaining headers describe the failure and are bounded. An id that no property can carry is replaced by an id
    derived from it.
    """
    try:
        headers = message.headers
    except CorruptHeaders:
        return Message(_usable(message.id), {}, message.encoded_headers + message.body)
    if Headers.FAILED_QUEUE not in headers and Headers.RETRIES not in headers:
        return None
    shown = {
        name: headers[name].encode("utf-8", "backslashreplace")[:LONGEST_BOUNDED_HEADER].decode("utf-8", "ignore")
        for name in SHOWN_BESIDE_BODY
        if isinstance(headers.get(name), str)
    }
    return Message(_usable(message.id), shown, encode_headers(headers) + message.body)


def _usable(message_id: str) -> str:
    return message_id if _short(message_id) else id_from(UNUSABLE_ID_NAMESPACE, message_id)


def encode_properties(message: Message, delay: int | None, in_body: int | None = None) -> bytes:
    """Return a message's property flags and list as NServiceBus.RabbitMQ writes them. Raises InvalidMessage.

    Every header is a field of type 'S', or 'V' without a value. A value that is too long for a property is only in its
    header. Failed messages and copies for further attempts are always durable.

    Args:
        message: The message to send.
        delay: Seconds to wait in the delay levels; None without a delay.
        in_body: Number of bytes at the start of the body that are headers; None if there are none.
    """
    try:
        headers = message.headers
    except CorruptHeaders:
        return _damaged(message, delay)
    table = _table(headers, message.id, delay, in_body)
    express = NON_PERSISTENT in headers and Headers.FAILED_QUEUE not in headers and Headers.RETRIES not in headers
    kept = b"\x01" if express else b"\x02"
    content_type = _shorts[headers.get(Headers.CONTENT_TYPE) or "application/octet-stream"]
    correlation_id = _short(headers.get(Headers.CORRELATION_ID, ""))
    reply_to = _shorts[headers.get(Headers.REPLY_TO, "")]
    kind = _shorts[headers.get(ENCLOSED_TYPES, "").partition(",")[0]]
    expiration = _expiration(message, delay) if Headers.TIME_TO_BE_RECEIVED in headers else b""
    message_id = short_string(message.id, "message id")
    flags = HEADERS_FLAG | DELIVERY_MODE_FLAG | MESSAGE_ID_FLAG
    flags |= CONTENT_TYPE_FLAG if content_type else 0
    flags |= CORRELATION_ID_FLAG if correlation_id else 0
    flags |= REPLY_TO_FLAG if reply_to else 0
    flags |= EXPIRATION_FLAG if expiration else 0
    flags |= TYPE_FLAG if kind else 0
    return b"".join((_flags(flags), content_type, table, kept, correlation_id, reply_to, expiration, message_id, kind))


def _damaged(message: Message, delay: int | None) -> bytes:
    raw = message.encoded_headers
    field = short_string(DAMAGED_HEADERS, "header name") + b"S" + _length(len(raw)) + raw + _delay_field(delay)
    flags = HEADERS_FLAG | DELIVERY_MODE_FLAG | MESSAGE_ID_FLAG
    message_id = short_string(message.id, "message id")
    return b"".join((_flags(flags), _length(len(field)), field, b"\x02", message_id))


def _table(headers: Mapping[str, str], message_id: str, delay: int | None, in_body: int | None) -> bytes:
    if not NOT_SENT.isdisjoint(headers):
        headers = {name: value for name, value in headers.items() if name not in NOT_SENT}
    try:
        if "" in headers.values():
            fields = [_field(name, value, "strict") for name, value in headers.items()]
        else:
            fields = [_names[name] + _length(len(raw := value.encode())) + raw for name, value in headers.items()]
    except UnicodeEncodeError:
        # A message that could be stored with lone surrogates, as JSON has them, is not refused.
        fields = [_field(name, value, "surrogatepass") for name, value in headers.items()]
    except AttributeError as error:
        name, value = next(header for header in headers.items() if not isinstance(header[1], str))
        raise InvalidMessage(
            f"header {name!r} of message {message_id!r} is {value!r}, no str: convert it, as in str({value!r})"
        ) from error
    if in_body is not None:
        fields.append(short_string(HEADERS_IN_BODY, "header name") + b"I" + _int32(in_body))
    encoded = _delay_field(delay) + b"".join(fields)
    return _length(len(encoded)) + encoded


def _field(name: str, value: str, errors: str) -> bytes:
    """Return a header as a field of type 'S', or 'V' where it has no value."""
    if value is NO_VALUE:
        return short_string(name, "header name") + b"V"
    raw = value.encode("utf-8", errors)
    return _names[name] + _length(len(raw)) + raw


def _delay_field(delay: int | None) -> bytes:
    return b"" if delay is None else DELAY_START + _int32(delay)


def _expiration(message: Message, delay: int | None) -> bytes:
    """Return how long it may wait, in whole milliseconds, rounded up; nothing where the protocol cannot express it."""
    span = message.time_to_be_received
    if span is None:
        return b""
    if delay is not None:
        raise InvalidMessage(
            "Postponed delivery of messages with TimeToBeReceived set is not supported. "
            "Remove the TimeToBeReceived attribute to postpone messages of this type."
        )
    milliseconds = -(-span // timedelta(milliseconds=1))
    return _short(str(milliseconds)) if milliseconds <= LONGEST_EXPIRATION else b""


def _short(string: str) -> bytes:
    try:
        raw = string.encode()
    except UnicodeEncodeError:
        return b""
    return bytes([len(raw)]) + raw if 0 < len(raw) <= LONGEST_SHORT_STRING else b""
