"""Failures: how they are told in logs, and in the headers of messages on their way to the error queue."""

from __future__ import annotations

import contextlib
import platform
import socket
import traceback
import uuid
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    CorruptHeaders,
    DispatchFailed,
    MessageRejected,
    NotStarted,
    QueueNotFound,
    TooManyCrashes,
)
from delayline.message import NO_VALUE, Headers, Message, from_wire_time, to_wire_time, usable_id
from delayline.readable import duration
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Iterator

MACHINE: Final = socket.gethostname()
MAXIMUM_EXCEPTION_MESSAGE: Final = 16_384  # bytes of UTF-8; bounds the error headers
MAXIMUM_STACK_TRACE: Final = 16_384  # bytes of UTF-8
MAXIMUM_TYPE_NAME: Final = 300  # bytes of UTF-8
BRIEF_TEXT: Final = 300  # characters of an exception in a line of a log
#: The largest sizes of text and stack trace in the forms of a failed message, largest form first.
EXCEPTION_TEXT_LIMITS: Final = (MAXIMUM_EXCEPTION_MESSAGE, 512, 0)
#: Of a longer chain of causes the stack trace has as many from each end.
CAUSES_AT_EACH_END: Final = 4
FIRST_RETRY_DELAY: Final = timedelta(seconds=1)
LONGEST_RETRY_DELAY: Final = timedelta(seconds=60)
#: The remedy for a message without a header that names its queue.
NAME_THE_QUEUE: Final = "Name the queue with --to QUEUE"
#: Headers that describe a failure: removed when a message is sent on its way again.
FAILURE_HEADERS: Final = (
    Headers.EXCEPTION_PREFIX,
    Headers.FAILED_QUEUE,
    Headers.TIME_OF_FAILURE,
    Headers.PROCESSING_MACHINE,
    Headers.PROCESSING_ENDPOINT,
    Headers.HOST_ID,
    Headers.HOST_DISPLAY_NAME,
    Headers.RETRIES,
    Headers.ATTEMPTS,
    Headers.UNKNOWN_SINCE,
    Headers.CRASHES,
)


#: Parts of the texts of OpenSSL, libpq and the drivers for a peer that went away during the handshake, in lower case.
CUT_HANDSHAKE: Final = ("eof", "has been closed", "closed unexpectedly", "reset by peer", "broken pipe", "econnreset")


def is_cut_handshake(text: str) -> bool:
    """Return whether an error of TLS says that the peer went away, as a server that is stopped does, and no more."""
    text = text.lower()
    return any(sign in text for sign in CUT_HANDSHAKE)


def back_off(attempts: int) -> timedelta:
    """Return how long a message waits after that many failed attempts: 1 s, doubling, 60 s at most."""
    return min(FIRST_RETRY_DELAY * (1 << min(attempts - 1, 6)), LONGEST_RETRY_DELAY)


def as_shown(message: Message) -> Message:
    """Return the message under the id that it has in the error queue, and that the commands and the dashboard show."""
    try:
        return message.logical
    except CorruptHeaders:
        return message.under(usable_id(message.id))


def error_operations(
    message: Message, error: Exception, *, failed_queue: str, error_queue: str, endpoint_name: str, now: datetime
) -> Iterator[TransportOperation]:
    """Yield the sends that move a message to the error queue: each is for where the send before did not fit.

    The first has headers with the whole story, the last has the message alone, as it was received. `failed_queue` is
    the queue to send the message to when it is retried. Headers that cannot be read stay as they are.
    """
    named = as_shown(message)
    with contextlib.suppress(CorruptHeaders):
        for size in EXCEPTION_TEXT_LIMITS:
            headers = failure_headers(error, failed_queue, endpoint_name, now, size=size)
            own = {name: value for name, value in named.headers.items() if name != Headers.RETRIES}
            yield TransportOperation(Message(named.id, own | headers, named.body), error_queue)
    yield TransportOperation(named, error_queue)


def retry_of(
    message: Message, *, to: str | None = None, remedy: str = NAME_THE_QUEUE, window: timedelta | None = None
) -> TransportOperation | str:
    """Return the send that retries a failed message, without the headers that describe the failure; or why not.

    Args:
        message: The message, as it is in the error queue.
        to: The queue to send it to; by default the queue it failed in.
        remedy: How the caller's user names a queue where the message does not.
        window: How long the endpoint's inbox keeps records: a message that failed longer ago stays, as a copy of it may
            have been handled. None for any age.
    """
    if window is not None and (too_old := _failed_before(message, window)) is not None:
        return too_old
    try:
        destination = to or message.headers.get(Headers.FAILED_QUEUE)
        again = message.with_headers({}, without=FAILURE_HEADERS)
    except CorruptHeaders as error:
        if to is None:
            return f"{error}. {remedy}"
        return TransportOperation(message, to)
    if not destination:
        return f"it has no {Headers.FAILED_QUEUE} header. {remedy}"
    return TransportOperation(again, destination)


def failed_queue_of(message: Message) -> str:
    """Return the queue that a message failed in; empty if that is unknown."""
    try:
        return message.headers.get(Headers.FAILED_QUEUE, "")
    except CorruptHeaders:
        return ""


def failed_at_of(message: Message) -> datetime | None:
    """Return when a message has failed; None if that is unknown."""
    try:
        return from_wire_time(message.headers[Headers.TIME_OF_FAILURE])
    except (CorruptHeaders, KeyError, ValueError):
        return None


def no_queue(destination: str, queue: str) -> str:
    """Return why a message was not sent from a queue to a destination that does not exist."""
    stays = f"it stays in {queue}. Create it with: delayline setup --queue {destination}"
    return f"queue {destination!r} does not exist; {stays}"


def _failed_before(message: Message, window: timedelta) -> str | None:
    """Return why a message is not retried that failed longer ago than an inbox keeps records; None if it is."""
    failed_at = failed_at_of(message)
    if failed_at is None:
        since = "it is not known when it failed"
    else:
        if datetime.now(UTC) - failed_at <= window:
            return None
        since = f"it failed at {failed_at:%Y-%m-%d %H:%M} UTC"
    return (
        f"{since}, and the inbox keeps records for {duration(window)}: whether a copy of it was handled may not be "
        "known any more. Handle it, perhaps a second time, with: delayline errors retry --past-window"
    )


def is_outage(error: Exception) -> bool:
    """Return whether only a back end's fault kept something from being sent or stored."""
    if isinstance(error, DispatchFailed):
        return all(map(is_outage, error.failures.values()))
    return isinstance(error, BackendUnavailable)


def may_fit_smaller(error: Exception) -> bool:
    """Return whether a message that was not sent because of `error` may be taken in a smaller form."""
    if isinstance(error, DispatchFailed):
        return all(map(may_fit_smaller, error.failures.values()))
    elsewhere = (
        BackendUnavailable,
        BackendUnusable,
        ConfigurationError,
        MessageRejected,
        NotStarted,
        QueueNotFound,
    )
    return not isinstance(error, elsewhere)


def failure_headers(
    error: BaseException,
    failed_queue: str,
    endpoint_name: str,
    now: datetime,
    *,
    size: int = MAXIMUM_EXCEPTION_MESSAGE,
) -> dict[str, str]:
    """Return the headers of a message in the error queue that describe the failure.

    Args:
        error: The exception of a handler or a dispatch.
        failed_queue: The queue to send the message to when it is retried.
        endpoint_name: Whose handler it was.
        now: When it failed.
        size: How many bytes of UTF-8 the exception's text, and again its stack trace, may have: 0 to 16384. Longer
            texts are cut in the middle; with 0 there are neither, and no id of the host.

    Returns:
        Names and values, all of them valid Unicode.
    """
    inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    headers = {Headers.EXCEPTION_TYPE: _type_name(error)}
    if size:
        headers |= {
            Headers.EXCEPTION_HELP_LINK: NO_VALUE,
            Headers.EXCEPTION_MESSAGE: cut(_text_of(error), min(size, MAXIMUM_EXCEPTION_MESSAGE)),
            Headers.EXCEPTION_SOURCE: cut(str(type(error).__module__), MAXIMUM_TYPE_NAME),
            Headers.EXCEPTION_STACK_TRACE: cut(_stack_trace(error), min(size, MAXIMUM_STACK_TRACE)),
            Headers.HOST_ID: host_id(endpoint_name),
        }
    headers |= {
        Headers.TIME_OF_FAILURE: to_wire_time(now),
        Headers.FAILED_QUEUE: failed_queue,
        Headers.PROCESSING_MACHINE: MACHINE,
        Headers.PROCESSING_ENDPOINT: endpoint_name,
        Headers.HOST_DISPLAY_NAME: f"{MACHINE} ({platform.python_implementation()})",
    }
    if isinstance(error, TooManyCrashes):
        headers[Headers.CRASHES] = str(error.crashes)
    if inner is not None:
        headers[Headers.INNER_EXCEPTION_TYPE] = _type_name(inner)
    return headers


@lru_cache(maxsize=64)
def host_id(endpoint_name: str) -> str:
    """Return an id of this machine and the endpoint, the same at each start, as NServiceBus' tools group hosts by."""
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{endpoint_name}@{MACHINE}").hex


def brief(error: BaseException) -> str:
    """Return an exception's type and the beginning of its text, as a line of a log."""
    shown = " ".join(_text_of(error)[: 2 * BRIEF_TEXT].split()).encode("utf-8", "backslashreplace").decode()
    shown = shown if len(shown) <= BRIEF_TEXT else f"{shown[:BRIEF_TEXT]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def cut(text: str, size: int) -> str:
    """Return the text in at most `size` bytes of UTF-8, both ends of it where it is longer; without lone surrogates."""
    ends = text if len(text) <= 2 * size else text[:size] + text[-size:]
    raw = ends.encode("utf-8", "backslashreplace")
    if len(raw) <= size:
        return raw.decode()
    note = f" ... (cut, {len(text)} characters in all) ... ".encode()
    left = max(0, size - len(note))
    head, tail = raw[: left - left // 2], raw[len(raw) - left // 2 :]
    return (head.decode("utf-8", "ignore") + note.decode() + tail.decode("utf-8", "ignore"))[:size]


def _stack_trace(error: BaseException) -> str:
    try:
        links = list(_chain(traceback.TracebackException.from_exception(error, compact=True)))
        left_out = len(links) - 2 * CAUSES_AT_EACH_END
        parts: list[str] = []
        for number, (link, joint) in enumerate(links):
            if left_out > 0 and number == CAUSES_AT_EACH_END:
                parts.append(f"\n... {left_out} exceptions of the chain are left out ...\n{joint}")
            if left_out > 0 and CAUSES_AT_EACH_END <= number < CAUSES_AT_EACH_END + left_out:
                continue
            parts.append("".join(link.format(chain=False)) + joint)
    except Exception as failed:  # repr and str of a user's exception class may raise anything
        return f"{_type_name(error)}: its stack trace cannot be formatted: {_type_name(failed)}\n"
    return "".join(parts)


def _chain(outermost: traceback.TracebackException) -> Iterator[tuple[traceback.TracebackException, str]]:
    """Yield the exceptions that led to an exception, innermost first, each with the line that leads on to the next."""
    links: list[tuple[traceback.TracebackException, str]] = []
    link: traceback.TracebackException | None = outermost
    joint = ""
    while link is not None:
        links.append((link, joint))
        if link.__cause__ is not None:
            link, joint = link.__cause__, CAUSED
        elif link.__context__ is not None and not link.__suppress_context__:
            link, joint = link.__context__, MEANWHILE
        else:
            link = None
    return reversed(links)


CAUSED: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
MEANWHILE: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


def _type_name(error: BaseException) -> str:
    return cut(f"{type(error).__module__}.{type(error).__qualname__}", MAXIMUM_TYPE_NAME)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose text cannot be had>"
