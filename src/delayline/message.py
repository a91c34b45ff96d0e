"""Messages and the words on them: ids, headers, bodies, the wire's time format."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from delayline.clock import from_microseconds, to_microseconds
from delayline.errors import CorruptBody, CorruptHeaders, InvalidDueTime, InvalidMessage
from delayline.header_xml import from_xml
from delayline.serialization import JsonSerializer, Serializer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: A body before encoding: bytes as they are, str as UTF-8, typed messages and anything else by the serializer.
Body = Any
JSON_SERIALIZER: Final = JsonSerializer()

_decode_texts: Final = msgspec.json.Decoder(dict[str, str]).decode
_encode_texts: Final = msgspec.json.Encoder().encode
_encode_values: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

MAXIMUM_ID_LENGTH: Final = 250  # NServiceBus's column Id nvarchar(250)
MAXIMUM_DESTINATION_LENGTH: Final = 200  # NServiceBus's column Destination nvarchar(200)
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
UNUSABLE_IN_IDS: Final = re.compile("[\0\ud800-\udfff]")  # PostgreSQL keeps no NUL, UTF-8 has no lone surrogates
UNUSABLE_ID_NAMESPACE: Final = uuid.UUID("c3b0f4f2-7c0b-4b43-8a53-0f6f2f0d6c1e")
TIME_SPAN: Final = re.compile(r"(?:([0-9]{1,8})\.)?([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,7}))?")
#: yyyy-MM-dd HH:mm:ss:ffffff Z; .NET's parser accepts nothing else.
_WIRE_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}:[0-9]{6} Z")


class _NoValue(str):
    """An empty text that stands for no text at all."""

    __slots__ = ()


#: The value of a header without a value, as .NET writes it for null: handlers see an empty text, and queues keep it so.
NO_VALUE: Final = _NoValue()


class Headers:
    """Header names as NServiceBus writes them, so that both worlds can exchange messages."""

    MESSAGE_ID: Final = "NServiceBus.MessageId"
    CORRELATION_ID: Final = "NServiceBus.CorrelationId"
    CONVERSATION_ID: Final = "NServiceBus.ConversationId"
    RELATED_TO: Final = "NServiceBus.RelatedTo"
    START_NEW_TRACE: Final = "NServiceBus.OpenTelemetry.StartNewTrace"
    REPLY_TO: Final = "NServiceBus.ReplyToAddress"
    CONTENT_TYPE: Final = "NServiceBus.ContentType"
    ENCLOSED_MESSAGE_TYPES: Final = "NServiceBus.EnclosedMessageTypes"
    INTENT: Final = "NServiceBus.MessageIntent"
    ORIGINATING_ENDPOINT: Final = "NServiceBus.OriginatingEndpoint"
    ORIGINATING_MACHINE: Final = "NServiceBus.OriginatingMachine"
    ORIGINATING_SAGA_ID: Final = "NServiceBus.OriginatingSagaId"
    ORIGINATING_SAGA_TYPE: Final = "NServiceBus.OriginatingSagaType"
    SAGA_ID: Final = "NServiceBus.SagaId"
    SAGA_TYPE: Final = "NServiceBus.SagaType"
    TIME_SENT: Final = "NServiceBus.TimeSent"
    TIME_TO_BE_RECEIVED: Final = "NServiceBus.TimeToBeReceived"
    DELIVER_AT: Final = "NServiceBus.DeliverAt"
    RETRIES: Final = "NServiceBus.Retries"
    #: Attempts before the present round, where a retry policy counts them.
    ATTEMPTS: Final = "Delayline.Attempts"
    #: Since when the message waits for a process with a handler of its type.
    UNKNOWN_SINCE: Final = "Delayline.UnknownSince"
    #: When the first message with the id was sent, where later ones have postponed it.
    FIRST_SENT: Final = "Delayline.FirstSent"
    #: The name of the schedule that a recurring message is an occurrence of.
    SCHEDULE: Final = "Delayline.Schedule"
    #: How many deliveries have ended without an outcome, as when the process was killed.
    CRASHES: Final = "Delayline.Crashes"
    RETRIES_TIMESTAMP: Final = "NServiceBus.Retries.Timestamp"
    FAILED_QUEUE: Final = "NServiceBus.FailedQ"
    TIME_OF_FAILURE: Final = "NServiceBus.TimeOfFailure"
    PROCESSING_MACHINE: Final = "NServiceBus.ProcessingMachine"
    PROCESSING_ENDPOINT: Final = "NServiceBus.ProcessingEndpoint"
    RETRY_ID: Final = "ServiceControl.Retry.UniqueMessageId"
    RETRY_ACKNOWLEDGEMENT_QUEUE: Final = "ServiceControl.Retry.AcknowledgementQueue"
    RETRY_SUCCESSFUL: Final = "ServiceControl.Retry.Successful"
    HOST_ID: Final = "$.diagnostics.hostid"
    HOST_DISPLAY_NAME: Final = "$.diagnostics.hostdisplayname"
    #: Properties that a .NET sender left for the dispatch only: they never reach a receiver.
    DISPATCH_PROPERTIES: Final = "NServiceBus.Timeouts.Properties."
    EXCEPTION_PREFIX: Final = "NServiceBus.ExceptionInfo."
    EXCEPTION_TYPE: Final = "NServiceBus.ExceptionInfo.ExceptionType"
    INNER_EXCEPTION_TYPE: Final = "NServiceBus.ExceptionInfo.InnerExceptionType"
    EXCEPTION_HELP_LINK: Final = "NServiceBus.ExceptionInfo.HelpLink"
    EXCEPTION_MESSAGE: Final = "NServiceBus.ExceptionInfo.Message"
    EXCEPTION_SOURCE: Final = "NServiceBus.ExceptionInfo.Source"
    EXCEPTION_STACK_TRACE: Final = "NServiceBus.ExceptionInfo.StackTrace"


class TimeoutHeaders:
    """Header names of the timeout manager, as NServiceBus writes them."""

    EXPIRE: Final = "NServiceBus.Timeout.Expire"
    DESTINATION: Final = "NServiceBus.Timeout.RouteExpiredTimeoutTo"
    CLEAR: Final = "NServiceBus.ClearTimeouts"
    TIMEOUT_ID: Final = "Timeout.Id"
    RELATED_TIMEOUT: Final = "NServiceBus.RelatedToTimeoutId"
    CONTROL_MESSAGE: Final = "NServiceBus.ControlMessage"
    #: Before version 5: the id on a request to dispatch.
    OLD_TIMEOUT_ID: Final = "NServiceBus.Timeout.TimeoutIdToDispatch"
    #: Version 5: the reply address of a message in the timeouts table.
    OLD_REPLY_TO: Final = "NServiceBus.Timeout.ReplyToAddress"
    #: The value of a header that is a flag.
    TRUE: Final = "True"


class Message:
    """An id, headers (str to str) and a body (bytes); immutable.

    Headers are decoded and encoded on first use only, so a message that merely moves from a store to a queue is
    never parsed, and a message whose stored headers are damaged can still be moved, whole, to the error queue.

    Args:
        id: The message id, 1 to 250 characters.
        headers: The headers, which are not copied.
        body: The body.
    """

    __slots__ = ("_encoded", "_headers", "_template", "_values", "body", "id")
    _values: tuple[str, ...]

    def __init__(self, id: str, headers: Mapping[str, str], body: bytes) -> None:
        self.id: str = id
        self.body: bytes = body
        self._headers: Mapping[str, str] | None = headers
        self._encoded: bytes | None = None
        self._template: HeaderTemplate | None = None

    @classmethod
    def from_encoded(cls, id: str, encoded_headers: bytes, body: bytes) -> Message:
        """Return a message over encoded headers, which are not read here.

        Args:
            id: The message id.
            encoded_headers: Headers as `encoded_headers` returns them, or as NServiceBus writes them in XML.
            body: The body.
        """
        message = cls.__new__(cls)
        message.id = id
        message.body = body
        message._headers = message._template = None
        message._encoded = encoded_headers
        return message

    @classmethod
    def from_template(cls, id: str, template: HeaderTemplate, values: tuple[str, ...], body: bytes) -> Message:
        """Return a message whose headers the template makes of the values, on first use.

        Args:
            id: The message id.
            template: Makes the headers.
            values: The template's values for this message.
            body: The body.
        """
        message = cls.__new__(cls)
        message.id = id
        message.body = body
        message._headers = message._encoded = None
        message._template = template
        message._values = values
        return message

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, read only. Raises CorruptHeaders when the stored bytes cannot be read."""
        if self._headers is None:
            self._headers = (
                decode_headers(self._encoded or b"", self.id)
                if self._template is None
                else self._template.headers(self._values)
            )
        return MappingProxyType(self._headers) if isinstance(self._headers, dict) else self._headers

    @property
    def encoded_headers(self) -> bytes:
        """The headers as UTF-8 JSON, as stores and queues keep them; damaged headers unchanged."""
        if self._encoded is None:
            self._encoded = (
                encode_headers(self._headers or {}) if self._template is None else self._template.encoded(self._values)
            )
        elif is_xml(self._encoded):
            with contextlib.suppress(CorruptHeaders):
                self._encoded = encode_headers(self.headers)
        return self._encoded

    @property
    def time_to_be_received(self) -> timedelta | None:
        """How long it may wait in a queue; None for ever, as for a message received before, or damaged."""
        if self._headers is None and Headers.TIME_TO_BE_RECEIVED.encode() not in (self._encoded or b""):
            return None
        try:
            headers = self.headers
            span = headers.get(Headers.TIME_TO_BE_RECEIVED)
            if span is None or Headers.FAILED_QUEUE in headers or Headers.RETRIES in headers:
                return None
            return from_time_span(span)
        except ValueError:
            return None

    def with_headers(self, added: Mapping[str, str], *, without: tuple[str, ...] = ()) -> Message:
        """Return a copy with other headers.

        Args:
            added: Headers to set.
            without: Prefixes of the names of headers that are left out first.
        """
        kept = {name: value for name, value in self.headers.items() if not (without and name.startswith(without))}
        return Message(self.id, kept | dict(added), self.body)

    @property
    def logical(self) -> Message:
        """The message under the id its headers give it: several copies, as of a retried message, share that id.

        An id that a back end could not keep, such as more than 250 characters, is replaced by an id that follows from
        it; the header stays as it is.
        """
        headers = self._headers or self.headers
        return self.under(usable_id(headers.get(Headers.MESSAGE_ID) or self.id))

    def under(self, message_id: str) -> Message:
        """Return the same message under another id, its headers as they are.

        Args:
            message_id: The other id.
        """
        if message_id == self.id:
            return self
        if self._headers is None and self._template is None:
            return Message.from_encoded(message_id, self._encoded or b"", self.body)
        return Message(message_id, self.headers, self.body)

    @property
    def content_type(self) -> str:
        """The content type header, or `application/octet-stream` where there is none."""
        return self.headers.get(Headers.CONTENT_TYPE, "application/octet-stream")

    @property
    def text(self) -> str:
        """The body as UTF-8 text, without a byte order mark. Raises CorruptBody for invalid UTF-8."""
        try:
            return self.body.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise CorruptBody(
                f"the body of message {self.id!r} is not UTF-8 text: {error}. Use message.body"
            ) from error

    def json(self) -> Any:  # noqa: ANN401 - JSON has no narrower type
        """Return the body parsed as JSON. Raises CorruptBody for invalid JSON."""
        decoded = self.text
        try:
            return json.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise CorruptBody(
                f"the body of message {self.id!r}, {len(self.body)} bytes of {self.content_type[:100]!r}, is not JSON: "
                f"{error}"
            ) from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (self.id, dict(self.headers), self.body) == (other.id, dict(other.headers), other.body)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Message(id={self.id!r}, body={len(self.body)} bytes)"


class HeaderTemplate:
    """Makes headers from the values that differ: as a mapping, or as stores keep them, whichever is wanted first.

    JSON's encoder would take as long as all the rest of a send, and its decoder half of that.

    Args:
        varying: the names of the varying values, in their order.
        fixed: the other headers.
    """

    def __init__(self, varying: Sequence[str], fixed: Mapping[str, str]) -> None:
        self._varying = tuple(varying)
        self._fixed = dict(fixed)
        places = encode_headers(dict.fromkeys(varying, "%s")).decode()
        self._json = f"{places[:-1]},{encode_headers(fixed).decode()[1:].replace('%', '%%')}"

    def message(self, id: str, values: tuple[str, ...], body: bytes) -> Message:
        """Return a message with the values, which JSON writes as they are: no quotes, backslashes, controls."""
        return Message.from_template(id, self, values, body)

    def headers(self, values: tuple[str, ...]) -> dict[str, str]:
        """Return all headers."""
        return dict(zip(self._varying, values, strict=True)) | self._fixed

    def encoded(self, values: tuple[str, ...]) -> bytes:
        """Return all headers as `encode_headers` does."""
        return (self._json % values).encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits: where it goes, when it is due, how often forwarding it has failed."""

    message: Message
    destination: str
    due: datetime
    number_of_retries: int = 0

    @property
    def id(self) -> str:
        """The message's id: the store's key."""
        return self.message.id


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return the stored form of headers: UTF-8 JSON without spaces."""
    headers = dict(headers)
    try:
        return _encode_texts(headers)  # as the other does, in a fifth of the time
    except (TypeError, ValueError):  # subclasses of str, lone surrogates
        return _encode_values(headers).encode("utf-8", "surrogatepass")


def is_xml(encoded: bytes) -> bool:
    """Return whether stored headers are XML, as NServiceBus writes them; JSON never begins like that."""
    return encoded[:1] == b"<" or encoded[:4] == _BYTE_ORDER_MARK + b"<"


def decode_headers(encoded: bytes, message_id: str) -> dict[str, str]:
    """Return headers from their stored form, JSON or XML; raises CorruptHeaders. Empty bytes are no headers."""
    if not encoded:
        return {}
    if is_xml(encoded):
        return from_xml(encoded, message_id)
    try:
        return _decode_texts(encoded)
    except (msgspec.MsgspecError, ValueError):  # also null, numbers and lone surrogates, which are read below
        return _decode_values(encoded, message_id)


def _decode_values(encoded: bytes, message_id: str) -> dict[str, str]:
    try:
        headers = json.loads(encoded.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise CorruptHeaders(f"message {message_id!r} has corrupted headers: {error}") from error
    if not isinstance(headers, dict):
        raise CorruptHeaders(f"message {message_id!r} has corrupted headers: {type(headers).__name__}, not an object")
    return {name: NO_VALUE if value is None else str(value) for name, value in headers.items()}


def encode_body(body: Body, serializer: Serializer = JSON_SERIALIZER) -> tuple[bytes, str]:
    """Return the body's bytes and content type; raises InvalidMessage if it cannot be serialized."""
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), "application/octet-stream"
    if isinstance(body, str):
        try:
            return body.encode(), "text/plain; charset=utf-8"
        except ValueError as error:
            raise InvalidMessage(f"body cannot be encoded as UTF-8: {error}") from error
    try:
        return serializer.dumps(body), serializer.content_type
    except InvalidMessage:
        raise
    except Exception as error:
        raise InvalidMessage(f"body of type {type(body).__name__} cannot be serialized: {error}") from error


def in_utc(due: datetime) -> datetime:
    """Return the instant in UTC; raises InvalidDueTime for an instant without a time zone or beyond year 9999."""
    if not isinstance(due, datetime):
        raise InvalidDueTime(f"a due time must be an aware datetime, not {due!r}")
    if due.utcoffset() is None:
        raise InvalidDueTime(
            f"{due!r} has no time zone: give one, as in datetime(2026, 5, 1, 9, tzinfo=ZoneInfo('Europe/Berlin'))"
        )
    try:
        return due.astimezone(UTC)
    except OverflowError as error:
        raise InvalidDueTime(f"{due!r} lies beyond year 9999 in UTC") from error


def usable_id(text: str) -> str:
    """Return the text where every back end can keep it as a message id, else a UUID that follows from it."""
    if len(text) <= MAXIMUM_ID_LENGTH and UNUSABLE_IN_IDS.search(text) is None:
        return text
    return id_from(UNUSABLE_ID_NAMESPACE, text)


def id_from(namespace: uuid.UUID, text: str) -> str:
    """Return a UUID that follows from the text, which may be any: lone surrogates included."""
    digest = hashlib.sha1(namespace.bytes + text.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()
    return str(uuid.UUID(bytes=digest[:16], version=5))


def new_message_id(now: datetime) -> str:
    """Return a fresh UUID of version 7, which sorts by time and so keeps a store's index together (RFC 9562)."""
    random = os.urandom(10)
    time = f"{to_microseconds(now) // 1000 & (1 << 48) - 1:012x}"
    end = f"{random[0] & 0x3F | 0x80:02x}{random[1:8].hex()}"
    return f"{time[:8]}-{time[8:]}-7{random[8:].hex()[1:]}-{end[:4]}-{end[4:]}"


def to_wire_time(instant: datetime) -> str:
    """Return `yyyy-MM-dd HH:mm:ss:ffffff Z`, always UTC."""
    second, microsecond = divmod(to_microseconds(instant), 1_000_000)
    return f"{_wire_second(second)}:{microsecond:06} Z"


@functools.lru_cache(maxsize=1024)
def _wire_second(second: int) -> str:
    return from_microseconds(second * 1_000_000).isoformat(" ")[:19]


def from_wire_time(text: str) -> datetime:
    """Return the instant a wire time names; raises ValueError with .NET's text."""
    instant = f"{text[:19]}.{text[20:26]}+00:00" if _WIRE_TIME.fullmatch(text) else ""
    try:
        return datetime.fromisoformat(instant)
    except ValueError as error:
        raise ValueError(f"String was not recognized as a valid DateTime: {text!r}") from error


def control_message(now: datetime, headers: dict[str, str]) -> Message:
    """Return a message without a body whose headers are an instruction."""
    message_id = new_message_id(now)
    fixed = {
        Headers.MESSAGE_ID: message_id,
        Headers.INTENT: "Send",
        Headers.TIME_SENT: to_wire_time(now),
        TimeoutHeaders.CONTROL_MESSAGE: TimeoutHeaders.TRUE,
    }
    return Message(message_id, fixed | headers, b"")


def to_time_span(span: timedelta) -> str:
    """Return the length as .NET writes it: `[d.]hh:mm:ss[.ffffff]`."""
    hours, rest = divmod(span.seconds, 3600)
    fraction = f".{span.microseconds:06d}" if span.microseconds else ""
    days = f"{span.days}." if span.days else ""
    return f"{days}{hours:02d}:{rest // 60:02d}:{rest % 60:02d}{fraction}"


def from_time_span(text: str) -> timedelta:
    """Return the length that .NET writes as `[d.]hh:mm:ss[.fffffff]`, rounded up to microseconds; raises ValueError."""
    parts = TIME_SPAN.fullmatch(text)
    if parts is None:
        raise ValueError(f"String was not recognized as a valid TimeSpan: {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups()[:4])
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(f"a part of the TimeSpan {text!r} is out of range")
    ticks = int((parts[5] or "").ljust(7, "0"))
    return timedelta(days, seconds, -(-ticks // 10), minutes=minutes, hours=hours)
