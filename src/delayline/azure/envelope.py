"""The wrapper in which NServiceBus sends messages through Azure Storage Queues. Pure.

See https://docs.particular.net/transports/azure-storage-queues/.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import CorruptHeaders, InvalidMessage
from delayline.message import NO_VALUE, Headers, Message

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST_TEXT: Final = 64 * 1024
#: Reserved in every message for the headers that explain why it is in the error queue.
ROOM_FOR_FAILURE: Final = 2 * 1024
SHORTEST_TRACE: Final = 200
INTENTS: Final = ("", "Send", "Publish", "Subscribe", "Unsubscribe", "Reply")
LONGEST_ERROR_TEXT: Final = 500
UTF8_MARK: Final = b"\xef\xbb\xbf"
#: Headers removed, in this order, from a message too large for the error queue; the reason goes last.
DISPENSABLE: Final = (
    (Headers.EXCEPTION_STACK_TRACE,),
    (Headers.EXCEPTION_MESSAGE,),
    (Headers.EXCEPTION_PREFIX, Headers.HOST_ID, Headers.HOST_DISPLAY_NAME),
    (Headers.PROCESSING_MACHINE, Headers.PROCESSING_ENDPOINT),
    (Headers.TIME_OF_FAILURE,),
    (Headers.FAILED_QUEUE,),
)


class UnwrappedMessage(Message):
    """A queue message without an envelope: its body is the text, and it is forwarded unchanged."""

    __slots__ = ("reason",)

    def __init__(self, id: str, text: str, reason: str) -> None:
        super().__init__(id, {}, (text or "").encode("utf-8", "surrogatepass"))
        self.reason: str = reason

    @property
    def headers(self) -> Mapping[str, str]:
        """Raise CorruptHeaders: there are none."""
        raise CorruptHeaders(f"message {self.id!r} cannot be unwrapped: {self.reason}")


#: The member of a text that notes the delivery of a message that has crashed before, and how many crashes there were.
NOTE: Final = "DelaylineDelivery"
BEGUN: Final = "begun"
HANDLING_ENDED: Final = "ended"
LONGEST_COUNT: Final = 9  # digits


def wrap(message: Message) -> str:
    """Return the text that a queue keeps for the message.

    Raises InvalidMessage for a message that is too large for it, or whose id is no UTF-8.

    A failed message is shortened to fit: its stack trace is cut first.
    """
    if isinstance(message, UnwrappedMessage):
        return message.body.decode("utf-8", "surrogatepass")
    wrapped = _text(message)
    if len(wrapped) <= LARGEST_TEXT:
        return wrapped
    try:
        failed = Headers.FAILED_QUEUE in message.headers
    except CorruptHeaders:
        failed = False
    if not failed:
        raise too_large(message, len(wrapped), LARGEST_TEXT)
    return _shortened(message, len(wrapped))


def crashes_noted(text: str) -> int:
    """Return how many deliveries have ended with a crash by the note in a queue's text; 1 where there is none.

    A note of a delivery that has begun is there when it is delivered again only if it has crashed.
    """
    try:
        kind, _, number = str(json.loads(_decoded(text))[NOTE]).partition(" ")
        return int(number) + (kind == BEGUN) if len(number) <= LONGEST_COUNT else 1
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1


def with_note(text: str, kind: str, crashes: int) -> str:
    """Return a queue's text with a note of a delivery, which .NET ignores; unchanged where it has no room for it."""
    try:
        wrapper = json.loads(_decoded(text))
        noted = _encoded(wrapper | {NOTE: f"{kind} {crashes}"})
    except (ValueError, TypeError, RecursionError):
        return text
    return noted if len(noted) <= LARGEST_TEXT else text


def check_size(message: Message) -> None:
    """Raise InvalidMessage for a message that could not be dispatched or moved to the error queue later."""
    if isinstance(message, UnwrappedMessage):
        return
    size, limit = len(_text(message)), LARGEST_TEXT - ROOM_FOR_FAILURE
    if size > limit:
        raise too_large(message, size, limit)


def too_large(message: Message, size: int, limit: int) -> InvalidMessage:
    """Return the error that names the sizes."""
    return InvalidMessage(
        f"message {message.id!r} takes {size} bytes in a queue of Azure Storage, which has room for {limit}: its body "
        f"has {len(message.body)} bytes, about 35000 fit beside ordinary headers. Keep the body elsewhere (a blob) "
        "and send where it is"
    )


def unwrap(native_id: str, text: str) -> Message:
    """Return the message in a queue's text; an UnwrappedMessage for any text that is none.

    Raises nothing: the text is untrusted, and a message's error must not keep its page from being handled.
    """
    try:
        return _unwrapped(json.loads(_decoded(text)))
    except Exception as error:
        return UnwrappedMessage(native_id, text, f"{type(error).__name__}: {error}"[:LONGEST_ERROR_TEXT])


def _decoded(text: str) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its text is not base64: {error}") from error
    return decoded.removeprefix(UTF8_MARK)


def _unwrapped(wrapper: Any) -> Message:  # noqa: ANN401 - whatever JSON there is
    if not isinstance(wrapper, dict):
        raise ValueError(f"it is a {type(wrapper).__name__}, not an object")  # noqa: TRY004 - one kind of error
    message_id, headers = wrapper.get("Id"), wrapper.get("Headers")
    if not isinstance(message_id, str) or not message_id or not isinstance(headers, dict):
        raise ValueError("it has no Id or no Headers")
    body = _bytes_of(wrapper, "Body")
    if "EncodedHeaders" in wrapper:
        return Message.from_encoded(message_id, _bytes_of(wrapper, "EncodedHeaders"), body)
    merged = {name: NO_VALUE if value is None else str(value) for name, value in headers.items()}
    if isinstance(reply_to := wrapper.get("ReplyToAddress"), str):
        merged[Headers.REPLY_TO] = reply_to
    if isinstance(correlation := wrapper.get("CorrelationId"), str):
        merged[Headers.CORRELATION_ID] = correlation
    intent = wrapper.get("MessageIntent")
    if isinstance(intent, int) and 0 < intent < len(INTENTS):
        merged[Headers.INTENT] = INTENTS[intent]
    return Message(message_id, merged, body)


def _bytes_of(wrapper: Mapping[str, Any], name: str) -> bytes:
    value = wrapper.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"its {name} is a {type(value).__name__}, not base64")
    return base64.b64decode(value or "", validate=True)


def _text(message: Message) -> str:
    """Return the wrapper, base64 over UTF-8 JSON, its members in the order that .NET writes them."""
    body = base64.b64encode(message.body).decode()
    wrapper: dict[str, Any] = {"IdForCorrelation": None, "Id": message.id}
    try:
        headers = dict(message.headers)
        wrapper |= {
            "MessageIntent": _intent(headers),
            "ReplyToAddress": headers.get(Headers.REPLY_TO),
            "TimeToBeReceived": "00:00:00",
            "Headers": {name: None if value is NO_VALUE else value for name, value in headers.items()},
            "Body": body,
            "CorrelationId": headers.get(Headers.CORRELATION_ID),
            "Recoverable": False,
        }
        return _encoded(wrapper)
    except (CorruptHeaders, UnicodeEncodeError):
        encoded = base64.b64encode(message.encoded_headers).decode()
        damaged = {"MessageIntent": 1, "Headers": {}, "Body": body, "Recoverable": False, "EncodedHeaders": encoded}
        try:
            return _encoded({"Id": message.id} | damaged)
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"message {message.id!r} has an id that is no UTF-8, and queues take nothing else: give it another id"
            ) from error


def _encoded(wrapper: Mapping[str, Any]) -> str:
    return base64.b64encode(json.dumps(wrapper, ensure_ascii=False, separators=(",", ":")).encode()).decode()


def _intent(headers: Mapping[str, str]) -> int:
    intent = headers.get(Headers.INTENT, "")
    return INTENTS.index(intent) if intent in INTENTS else 0


def _shortened(message: Message, size: int) -> str:
    """Cut the stack trace until the message fits, then leave out headers."""
    trace = message.headers.get(Headers.EXCEPTION_STACK_TRACE, "")
    length = len(trace) - (size - LARGEST_TEXT)  # each character takes several bytes of text
    if length > SHORTEST_TRACE:
        wrapped = _text(message.with_headers({Headers.EXCEPTION_STACK_TRACE: "..." + trace[-(length - 3) :]}))
        if len(wrapped) <= LARGEST_TEXT:
            return wrapped
    without: tuple[str, ...] = ()
    for further in DISPENSABLE:
        without += further
        wrapped = _text(message.with_headers({}, without=without))
        if len(wrapped) <= LARGEST_TEXT:
            return wrapped
    raise too_large(message, len(wrapped), LARGEST_TEXT)
