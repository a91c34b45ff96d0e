"""A handler failed: try again at once, try again later, or move the message to the error queue."""

from __future__ import annotations

import platform
import socket
import traceback
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.checks import time_span, whole_number
from delayline.errors import ConfigurationError, CorruptHeaders
from delayline.message import Headers, from_wire_time, to_wire_time
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.message import Message

MAXIMUM_EXCEPTION_MESSAGE: Final = 16_384  # characters; reference 1.9
DEFAULT_DELAYED_RETRIES: Final = 3
LONGEST_RETRY_SPAN: Final = timedelta(hours=24)  # reference 2.8
#: Headers that describe a failure: removed when a message is sent on its way again.
FAILURE_HEADERS: Final = (
    Headers.EXCEPTION_PREFIX,
    Headers.FAILED_QUEUE,
    Headers.TIME_OF_FAILURE,
    Headers.PROCESSING_MACHINE,
    Headers.PROCESSING_ENDPOINT,
    Headers.HOST_DISPLAY_NAME,
    Headers.RETRIES,
)


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Run the handlers again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Send the message to its own queue again, `delay` from now, with `headers` added."""

    delay: timedelta
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MoveToError:
    """Give up: send the message to the error queue."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Leave the message on its queue for a while: the fault is a back end's and counts against no message."""


Decision = RetryNow | RetryLater | MoveToError | GiveBack


@dataclass(frozen=True, slots=True)
class Recoverability:
    """How often a failing handler is tried again before its message goes to the error queue.

    With the defaults a message is tried 6 times at once, and 6 times again after 10, 20 and 30 seconds.
    """

    immediate_retries: int = 5
    """Further attempts at once; 0 or more."""
    delayed_retries: int | None = None
    """Further rounds, each through delayed delivery; 0 or more. None: 3 where the endpoint can delay, else 0."""
    time_increase: timedelta = timedelta(seconds=10)
    """Round n waits n times this; above zero."""
    unrecoverable: tuple[type[Exception], ...] = field(default=())
    """Exceptions that go to the error queue at the first failure."""

    def __post_init__(self) -> None:
        whole_number("immediate_retries", self.immediate_retries, at_least=0)
        if self.delayed_retries is not None:
            whole_number("delayed_retries", self.delayed_retries, at_least=0)
        time_span("time_increase", self.time_increase)
        named = self.unrecoverable
        if not isinstance(named, tuple) or not all(isinstance(kind, type) for kind in named):
            raise ConfigurationError(f"unrecoverable must be a tuple of exception classes, not {named!r}")

    def decide(self, error: Exception, attempt: int, headers: Mapping[str, str], now: datetime) -> Decision:
        """Return what to do after the `attempt`-th failure (from 1) of this round.

        Which round it is stands in the `NServiceBus.Retries` header; none follows one begun more than 24 hours ago.
        """
        if self.unrecoverable and isinstance(error, self.unrecoverable):
            return MoveToError()
        if attempt <= self.immediate_retries:
            return RetryNow()
        rounds = _rounds_so_far(headers)
        allowed = DEFAULT_DELAYED_RETRIES if self.delayed_retries is None else self.delayed_retries
        if rounds >= allowed or _too_old(headers, now):
            return MoveToError()
        return RetryLater(
            delay=self.time_increase * (rounds + 1),
            headers={Headers.RETRIES: str(rounds + 1), Headers.RETRIES_TIMESTAMP: to_wire_time(now)},
        )


def error_operation(
    message: Message, error: Exception, *, failed_queue: str, error_queue: str, endpoint_name: str, now: datetime
) -> TransportOperation:
    """Return the send that moves a message to the error queue, with headers that say why.

    `failed_queue` is the queue to send the message to when it is retried. Headers that cannot be read stay as they are.
    """
    try:
        moved = message.logical.with_headers(failure_headers(error, failed_queue, endpoint_name, now))
    except CorruptHeaders:
        moved = message
    return TransportOperation(moved, error_queue)


def failure_headers(error: BaseException, failed_queue: str, endpoint_name: str, now: datetime) -> dict[str, str]:
    """Return the headers that tell, on a message in the error queue, what failed, where and when (reference 1.9).

    `failed_queue` is the queue to send the message to when it is retried.
    """
    inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    headers = {
        Headers.EXCEPTION_TYPE: _type_name(error),
        Headers.EXCEPTION_HELP_LINK: "",
        Headers.EXCEPTION_MESSAGE: _text_of(error)[:MAXIMUM_EXCEPTION_MESSAGE],
        Headers.EXCEPTION_SOURCE: type(error).__module__,
        Headers.EXCEPTION_STACK_TRACE: "".join(traceback.format_exception(error)),
        Headers.TIME_OF_FAILURE: to_wire_time(now),
        Headers.FAILED_QUEUE: failed_queue,
        Headers.PROCESSING_MACHINE: MACHINE,
        Headers.PROCESSING_ENDPOINT: endpoint_name,
        Headers.HOST_DISPLAY_NAME: f"{MACHINE} ({platform.python_implementation()})",
    }
    if inner is not None:
        headers[Headers.INNER_EXCEPTION_TYPE] = _type_name(inner)
    return headers


def _type_name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose text cannot be had>"


def _rounds_so_far(headers: Mapping[str, str]) -> int:
    try:
        return max(0, int(headers.get(Headers.RETRIES, "0")))
    except ValueError:
        return 0


def _too_old(headers: Mapping[str, str], now: datetime) -> bool:
    try:
        return now - from_wire_time(headers[Headers.RETRIES_TIMESTAMP]) > LONGEST_RETRY_SPAN
    except (KeyError, ValueError):
        return False


MACHINE: Final = socket.gethostname()
