"""A handler failed: try again at once, try again later, or move the message to the error queue."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.checks import time_span, whole_number
from delayline.errors import ConfigurationError
from delayline.message import Headers, from_wire_time, to_wire_time

if TYPE_CHECKING:
    from collections.abc import Mapping


DEFAULT_DELAYED_RETRIES: Final = 3
LONGEST_IMMEDIATE_PAUSE: Final = timedelta(milliseconds=100)
LONGEST_RETRY_SPAN: Final = timedelta(hours=24)  # as NServiceBus limits delayed retries
LONGEST_ROUND_NUMBER: Final = 9  # digits
MOST_RETRIES: Final = 1000
#: The shortest and the longest time until another process may look whether it has a handler of a message's type.
SHORTEST_WAIT_FOR_TYPE: Final = timedelta(seconds=1)
LONGEST_WAIT_FOR_TYPE: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Run the handlers again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Send the message to its own queue again, `delay` from now, with `headers` added."""

    delay: timedelta
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MoveToErrors:
    """Decision of a retry policy: send the message to the error queue."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Decision of a retry policy: handle the message again.

    Args:
        after: How long it waits; at once by default. A delay needs delayed delivery.
    """

    after: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class Discard:
    """Decision of a retry policy: drop the message. The failure is logged."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Leave the message on its queue for a while: the fault is a back end's and counts against no message."""


Decision = RetryNow | RetryLater | MoveToErrors | Discard | GiveBack
#: Decides after each failure of a handler, given its exception and the number of attempts so far, from 1.
RetryPolicy = Callable[[Exception, int], Retry | Discard | MoveToErrors]


@dataclass(frozen=True, slots=True)
class Recoverability:
    """How often a failing handler is tried again before its message goes to the error queue.

    With the defaults a message is tried 6 times within a fifth of a second, and 6 times again after 10, 20 and 30
    seconds.
    """

    immediate_retries: int = 5
    """Further attempts at once; 0 or more."""
    delayed_retries: int | None = None
    """Further rounds, each through delayed delivery; 0 or more. None: 3 where the endpoint can delay, else 0."""
    time_increase: timedelta = timedelta(seconds=10)
    """Round n waits n times this; above zero."""
    unrecoverable: tuple[type[Exception], ...] = field(default=())
    """Exceptions that go to the error queue at the first failure."""
    immediate_pause: timedelta = timedelta(milliseconds=10)
    """How long the second of them waits; 0 or more. The first one waits for nothing, each further one twice as long, up
    to 0.1 s, or up to this where it is longer. The message keeps its place among those that are handled meanwhile."""
    delays: Sequence[timedelta] | None = None
    """How long each further round waits, each above zero; replaces `delayed_retries` and `time_increase`. See
    `exponential`."""
    jitter: float = 0.0
    """The share, from 0 to 1, by which delays of further rounds are longer at random, so that messages that failed
    together are not retried together."""
    policy: RetryPolicy | None = None
    """Decides after each failure; replaces all settings above."""
    maximum_crashes: int = 5
    """A message whose deliveries ended so often without an outcome, as when it kills its process, goes to the error
    queue; 2 or more, and no fewer than 4 on RabbitMQ, whose queues also count messages that a process only held.
    After the second it is handled alone. Only the endpoint's own setting counts, not those of handlers."""
    unknown_type_wait: timedelta = timedelta(minutes=10)
    """How long in all a message of a type that this process has no handler for waits in delayed delivery for a process
    that has one, as during a deployment; then it goes to the error queue. Zero: at once, as where the endpoint cannot
    delay. Only the endpoint's own setting counts."""

    def __post_init__(self) -> None:
        whole_number("immediate_retries", self.immediate_retries, at_least=0)
        if self.delayed_retries is not None:
            whole_number("delayed_retries", self.delayed_retries, at_least=0)
        whole_number("maximum_crashes", self.maximum_crashes, at_least=2)
        time_span("time_increase", self.time_increase)
        if not isinstance(self.immediate_pause, timedelta) or self.immediate_pause < timedelta(0):
            raise ConfigurationError(
                f"immediate_pause must be a timedelta of zero or more, not {self.immediate_pause!r}"
            )
        if not isinstance(self.unknown_type_wait, timedelta) or self.unknown_type_wait < timedelta(0):
            raise ConfigurationError(
                f"unknown_type_wait must be a timedelta of zero or more, not {self.unknown_type_wait!r}"
            )
        if self.delays is not None:
            if self.delayed_retries is not None:
                raise ConfigurationError("delays and delayed_retries exclude each other: give one of them")
            for delay in self.delays:
                time_span("each of delays", delay)
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"jitter must be a number from 0 to 1, not {self.jitter!r}")
        if self.policy is not None and not callable(self.policy):
            raise ConfigurationError(f"policy must be a function of an exception and a number, not {self.policy!r}")
        named = self.unrecoverable
        if not isinstance(named, tuple) or not all(isinstance(kind, type) for kind in named):
            raise ConfigurationError(f"unrecoverable must be a tuple of exception classes, not {named!r}")

    def pause_after(self, attempt: int) -> timedelta:
        """Return how long to wait between a failure and the next immediate attempt.

        Args:
            attempt: The number of failures in this round, from 1.
        """
        if attempt <= 1:
            return timedelta(0)
        longest = max(self.immediate_pause, LONGEST_IMMEDIATE_PAUSE)
        return min(self.immediate_pause * (1 << min(attempt - 2, 10)), longest)

    def decide(self, error: Exception, attempt: int, headers: Mapping[str, str], now: datetime) -> Decision:
        """Return the action after a failure.

        The `NServiceBus.Retries` header has the number of the round; none follows a round begun more than 24 hours ago.

        Args:
            error: The handler's exception.
            attempt: The number of failures in this round, from 1.
            headers: The message's headers.
            now: The present time.
        """
        if self.policy is not None:
            return self._by_policy(self.policy, error, attempt, headers, now)
        if self.unrecoverable and isinstance(error, self.unrecoverable):
            return MoveToErrors()
        if attempt <= self.immediate_retries:
            return RetryNow()
        rounds = _count(headers, Headers.RETRIES)
        if self.delays is not None:
            if rounds >= len(self.delays):
                return MoveToErrors()
            return self._later(self.delays[rounds], rounds, now)
        allowed = DEFAULT_DELAYED_RETRIES if self.delayed_retries is None else self.delayed_retries
        if rounds >= allowed or _too_old(headers, now):
            return MoveToErrors()
        return self._later(self.time_increase * (rounds + 1), rounds, now)

    def await_type(self, headers: Mapping[str, str], now: datetime) -> RetryLater | MoveToErrors:
        """Return what becomes of a message of a type that no handler of this process takes.

        It waits a second, then each time as long as it has waited so far, up to a minute. That counts as no retry of a
        handler.

        Args:
            headers: The message's headers.
            now: The present time.
        """
        since = min(_time(headers, Headers.UNKNOWN_SINCE) or now, now)
        waited = now - since
        if waited >= self.unknown_type_wait:
            return MoveToErrors()
        delay = min(max(waited, SHORTEST_WAIT_FOR_TYPE), LONGEST_WAIT_FOR_TYPE, self.unknown_type_wait - waited)
        own = {Headers.UNKNOWN_SINCE: to_wire_time(since), Headers.RETRIES: str(_count(headers, Headers.RETRIES))}
        return RetryLater(delay, own | {Headers.RETRIES_TIMESTAMP: to_wire_time(now)})

    @property
    def delays_retries(self) -> bool:
        """Whether retries may need delayed delivery by an explicit setting."""
        return bool(self.delayed_retries or self.delays or self.policy)

    def _later(self, delay: timedelta, rounds: int, now: datetime, **headers: str) -> RetryLater:
        if self.jitter:
            delay *= 1 + random.random() * self.jitter  # noqa: S311 - spreads load
        count = {Headers.RETRIES: str(rounds + 1), Headers.RETRIES_TIMESTAMP: to_wire_time(now)}
        return RetryLater(delay=delay, headers=count | headers)

    def _by_policy(
        self, policy: RetryPolicy, error: Exception, attempt: int, headers: Mapping[str, str], now: datetime
    ) -> Decision:
        attempts = _count(headers, Headers.ATTEMPTS) + attempt
        try:
            decided: object = policy(error, attempts)
        except Exception as broken:
            error.add_note(f"the retry policy failed: {broken!r}")
            return MoveToErrors()
        match decided:
            case Discard() | MoveToErrors():
                return decided
            case Retry(after=timedelta() as after):
                if after <= timedelta(0):
                    return RetryNow()
                later = self._later(after, _count(headers, Headers.RETRIES), now)
                return replace(later, headers={**later.headers, Headers.ATTEMPTS: str(attempts)})
        error.add_note(f"the retry policy returned {decided!r}, not Retry, Discard or MoveToErrors")
        return MoveToErrors()


def exponential(
    first: timedelta, *, retries: int, factor: float = 2.0, longest: timedelta = timedelta(hours=1)
) -> tuple[timedelta, ...]:
    """Return delays that grow exponentially, for `Recoverability(delays=...)`.

    Args:
        first: The first delay, above zero.
        retries: How many delays; 1 to 1000.
        factor: How many times longer each delay is than the delay before; 1 or more.
        longest: No delay is longer than this.

    Raises:
        ConfigurationError: A value is out of range.

    Example:
        >>> from datetime import timedelta
        >>> second = timedelta(seconds=1)
        >>> [delay / second for delay in exponential(second, retries=4, longest=5 * second)]
        [1.0, 2.0, 4.0, 5.0]
    """
    time_span("first", first)
    time_span("longest", longest)
    if whole_number("retries", retries, at_least=1) > MOST_RETRIES:
        raise ConfigurationError(f"retries must be {MOST_RETRIES} at most, not {retries}")
    if not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise ConfigurationError(f"factor must be a number of 1 or more, not {factor!r}")
    delays, delay = [], min(first, longest)
    for _ in range(retries):
        delays.append(delay)
        delay = min(longest, timedelta(seconds=min(longest.total_seconds(), delay.total_seconds() * factor)))
    return tuple(delays)


def _count(headers: Mapping[str, str], name: str) -> int:
    """Return the number in a header; 0 for none, and for a header that is not a number."""
    written = headers.get(name, "")
    return int(written) if written.isascii() and written.isdigit() and len(written) <= LONGEST_ROUND_NUMBER else 0


def _too_old(headers: Mapping[str, str], now: datetime) -> bool:
    began = _time(headers, Headers.RETRIES_TIMESTAMP)
    return began is not None and now - began > LONGEST_RETRY_SPAN


def _time(headers: Mapping[str, str], name: str) -> datetime | None:
    """Return the time in a header; None for none, and for a header that is not a time."""
    try:
        return from_wire_time(headers[name])
    except (KeyError, ValueError):
        return None
