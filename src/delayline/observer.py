"""Observers: objects that an endpoint reports its work to, such as metrics and traces.

The parts of an endpoint call an observer once a batch where they work in batches. Without an observer they do nothing
for it but compare with None.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.message import DelayedMessage, Message

logger: logging.Logger = logging.getLogger(__name__)

#: The destination in `Observer.dispatched` where a store does not report it.
UNKNOWN_DESTINATION: Final = "(unknown)"


class Action(StrEnum):
    """What an endpoint did with a message that could not be handled or dispatched."""

    RETRIED = "retried"
    """Handled again at once."""
    DELAYED = "delayed"
    """Handled again later, through delayed delivery."""
    BACKED_OFF = "backed off"
    """Not dispatched; it stays in the store for a while."""
    MOVED = "moved"
    """Moved to the error queue."""
    DISCARDED = "discarded"
    """Removed without having been handled."""
    RETURNED = "returned"
    """Given back to its queue, because a back end was unavailable."""


class QueueRole(StrEnum):
    """What a queue is to an endpoint."""

    INPUT = "input"
    """It receives from it."""
    ERROR = "error"
    """It moves messages there that it cannot handle or dispatch."""
    SATELLITE = "satellite"
    """Its delayed delivery receives from it."""
    DESTINATION = "destination"
    """It sends there."""


class ObservedEndpoint(Protocol):
    """What an observer may read of an endpoint, at any time and from any thread."""

    @property
    def name(self) -> str:
        """The endpoint's name."""
        ...

    @property
    def started(self) -> bool:
        """Whether it is started."""
        ...

    @property
    def transport(self) -> object:
        """Its transport."""
        ...

    @property
    def queue_roles(self) -> Mapping[str, QueueRole]:
        """The queues that it knows from its settings, each with its role."""
        ...

    @property
    def running_handlers(self) -> int:
        """How many messages are being handled."""
        ...

    @property
    def clock(self) -> Clock:
        """Its clock."""
        ...

    @property
    def store(self) -> object | None:
        """The store of its delayed delivery, None for none."""
        ...

    @property
    def observers(self) -> Sequence[Observer]:
        """Its observers."""
        ...

    @property
    def messaging_system(self) -> str:
        """The system that its queues are in, as the semantic conventions of OpenTelemetry name it."""
        ...

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port of the server that its queues are on; None for none, or several."""
        ...

    def observe(self, observer: Observer) -> None:
        """Add an observer. Raises ConfigurationError once started.

        Args:
            observer: The observer.
        """
        ...

    def measures(self) -> Mapping[str, float]:
        """Return the present values of its transport and stores; see `SupportsMeasures`."""
        ...


@runtime_checkable
class SupportsServerAddress(Protocol):
    """Capability of transports: the server and the system that their queues are in, for metrics and traces."""

    messaging_system: str
    """As the semantic conventions of OpenTelemetry name it, such as `rabbitmq`; a name of our own where they do not."""

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port; None for a file, or for several servers."""
        ...


@runtime_checkable
class SupportsMeasures(Protocol):
    """Capability of transports and stores: values that are read when metrics are collected."""

    def measures(self) -> Mapping[str, float]:
        """Return values by name, such as `lease.held`; never blocks, and may be called from any thread."""
        ...


class Observer(Protocol):
    """Is called with each event of an endpoint: on its event loop, after the commit if there is a commit.

    A method must return at once. An exception that it raises is logged and suppressed.
    """

    def attached(self, endpoint: ObservedEndpoint) -> None:
        """The endpoint starts.

        Args:
            endpoint: The endpoint.
        """
        ...

    def sent(self, operation: str, destinations: Sequence[str], seconds: float, error: Exception | None) -> None:
        """Messages were sent, or failed to be.

        Args:
            operation: `send` for messages due now, `schedule` for delayed messages.
            destinations: The destination of each.
            seconds: How long that took.
            error: Why they were not sent; None if they were.
        """
        ...

    def stored(self, messages: Sequence[DelayedMessage]) -> None:
        """Messages were stored until they are due.

        Args:
            messages: The messages.
        """
        ...

    def dispatched(self, numbers: Mapping[tuple[str, datetime | None], int], at: datetime) -> None:
        """Due messages were moved to their destinations, a batch at a time.

        Args:
            numbers: How many by destination and due time; `UNKNOWN_DESTINATION` and None where a store reports none.
            at: The time, on the endpoint's clock.
        """
        ...

    def polled(self, due: int, error: Exception | None) -> None:
        """The poller has looked at the store.

        Args:
            due: How many messages it has moved.
            error: Why it failed; None if it did not.
        """
        ...

    def slept(self, seconds: float, *, notified: bool) -> None:
        """The poller has slept.

        Args:
            seconds: How long.
            notified: Whether a notification of an earlier message, or the stop, has ended the sleep.
        """
        ...

    def received(self, queue: str, number: int, error: Exception | None) -> None:
        """A receiver has received messages, or failed.

        Args:
            queue: The queue.
            number: How many messages.
            error: Why it failed; None if it did not.
        """
        ...

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None:
        """An attempt to handle a message has ended.

        Args:
            queue: The queue that the message came from.
            message: The message.
            seconds: How long its handlers took.
            error: Why it failed; None if the message is handled, and its removal is committed.
        """
        ...

    def recovered(self, action: Action, place: str, message: Message, error: Exception) -> None:
        """A message that could not be handled or dispatched was retried or removed.

        Args:
            action: How it was retried or removed.
            place: The queue that it came from or, dispatched by the poller, its destination.
            message: The message.
            error: Why.
        """
        ...

    def breaker_changed(self, name: str, state: int) -> None:
        """A circuit breaker is created or has another state.

        Args:
            name: The breaker's name.
            state: 0 disarmed, 1 armed, 2 triggered.
        """
        ...


@runtime_checkable
class SupportsTraces(Protocol):
    """Capability of an observer: spans around an endpoint's work, continued from sender to receiver.

    The first observer of an endpoint that has it is used.
    """

    def sending(self, operation: str, destinations: Sequence[str]) -> AbstractContextManager[object]:
        """Return a span around sending, to be entered.

        Args:
            operation: `send` or `schedule`.
            destinations: The destination of each message.
        """
        ...

    def headers(
        self, destination: str, message_id: str, due: datetime | None, delay: timedelta | None
    ) -> Mapping[str, str]:
        """Return the headers by which the receiver of a message continues the trace.

        Inside of `sending` they name that span, in a handler a new span.

        Args:
            destination: Where the message is sent to.
            message_id: Its id.
            due: Its due time; None if it is sent at once.
            delay: How long it waits; None likewise.
        """
        ...

    def processing(self, queue: str, message: Message) -> AbstractContextManager[object]:
        """Return a span around everything that is done with a received message, to be entered.

        Args:
            queue: The queue that it came from.
            message: The message.
        """
        ...

    def settling(self, queue: str) -> AbstractContextManager[object]:
        """Return a span around the removal of a message from its queue, to be entered.

        Args:
            queue: The queue.
        """
        ...


@runtime_checkable
class SupportsRun(Protocol):
    """Capability of observers: a task beside the endpoint, for example to write counts to a database."""

    async def run(self) -> None:
        """Run until cancelled; the endpoint starts it, and cancels it when it stops."""
        ...


METHODS: Final = (
    "attached",
    "sent",
    "stored",
    "dispatched",
    "polled",
    "slept",
    "received",
    "handled",
    "recovered",
    "breaker_changed",
)


class Observers:
    """The observers of an endpoint."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def each(self) -> Sequence[Observer]:
        """The observers, in the order in which they are called."""
        return tuple(self._observers)

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self._observers.append(observer)

    def attach(self, endpoint: ObservedEndpoint) -> None:
        """Attach each to the endpoint; their errors are raised."""
        for observer in self._observers:
            observer.attached(endpoint)

    def start(self) -> None:
        """Start the observers that run beside the endpoint; an error that ends an observer is logged."""
        running = [observer for observer in self._observers if isinstance(observer, SupportsRun)]
        self._tasks = [
            asyncio.create_task(_run(beside), name=f"delayline {type(beside).__name__}") for beside in running
        ]

    async def stop(self) -> None:
        """End them, and wait for their last work."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def traces(self) -> SupportsTraces | None:
        """The observer that makes spans, None for none."""
        return next((observer for observer in self._observers if isinstance(observer, SupportsTraces)), None)

    @property
    def all(self) -> Observer | None:
        """All observers as a single observer, None without any; parts of an endpoint ask for it when they start."""
        return cast("Observer", _Guarded(self._observers)) if self._observers else None


async def _run(observer: SupportsRun) -> None:
    try:
        await observer.run()
    except Exception as error:
        log_text = "The observer %s has stopped: %s"
        emit(logger, logging.ERROR, Event.OBSERVER_FAILED, log_text, type(observer).__name__, error, exception=error)


class _Guarded:
    """Calls each method of several observers; an error of theirs is logged, the first of each method as a warning."""

    __slots__ = METHODS

    def __init__(self, observers: Sequence[Observer]) -> None:
        for name in METHODS:
            setattr(self, name, _guarded(name, [getattr(observer, name) for observer in observers]))


def _guarded(name: str, calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    failed, first = False, calls[0]

    def call_one(*args: object, **named: object) -> None:
        try:
            first(*args, **named)
        except Exception as error:
            report(error)

    def call_all(*args: object, **named: object) -> None:
        for call in calls:
            try:
                call(*args, **named)
            except Exception as error:
                report(error)

    def report(error: Exception) -> None:
        nonlocal failed
        log_text = "An observer's method %r failed, and may go on to fail: %s"
        if failed:
            emit(logger, logging.DEBUG, Event.OBSERVER_FAILED, log_text, name, error)
        else:
            emit(logger, logging.WARNING, Event.OBSERVER_FAILED, log_text, name, error, exception=error)
        failed = True

    return call_one if len(calls) == 1 else call_all
