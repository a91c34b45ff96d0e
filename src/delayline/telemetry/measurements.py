"""Counters and histograms of an endpoint in plain Python: what metrics, the dashboard and probes are made of."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Self, TypeVar

from delayline.errors import ConfigurationError
from delayline.observer import QueueRole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayline.message import DelayedMessage, Message
    from delayline.observer import Action, ObservedEndpoint
    from delayline.telemetry.probes import Probes

#: Upper bounds of the lateness histogram's buckets in seconds, 1 ms to 1 h; the last bucket has none.
LATENESS_BOUNDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
#: Upper bounds for durations, as the semantic conventions of OpenTelemetry have them.
DURATION_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
#: Destinations, queues and exception types that are counted by name; further names are counted together, as `OTHER`.
MOST_NAMES: Final = 200
OTHER: Final = "(other)"
#: The destination of an operation that sent to several.
SEVERAL: Final = "(several)"

Key = TypeVar("Key", str, tuple[str, str], tuple[str, str, str])


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values are in each bucket."""

    bounds: Sequence[float]
    """The upper bound of each bucket but the last, which has none; a value equal to a bound is in its bucket."""
    counts: Sequence[int]
    """How many values, by bucket."""
    total: float
    """The sum of all values."""

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the upper bound of the bucket with the value that `share`, from 0 to 1, of all are not above.

        None without values. The last bucket stands for its lower bound.
        """
        wanted, seen = share * self.count, 0
        for count, bound in zip(self.counts, (*self.bounds, self.bounds[-1]), strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return None


@dataclass(frozen=True, slots=True)
class Activity:
    """When a poller or receiver last succeeded."""

    last_success: float | None
    """On this process's monotonic clock; None for never."""
    last_success_utc: datetime | None
    """The same as a time."""
    failing_since: float | None
    """The first failure since then, on the monotonic clock; None for none."""
    failing_for: float
    """Seconds since that failure; 0 for none."""


@dataclass(frozen=True, slots=True)
class PollerCounts:
    """The poller's counts."""

    batches: int
    """Batches of due messages that it has moved."""
    messages: int
    """The messages in them."""
    failures: int
    """Failed looks at the store, and batches that an outage has interrupted."""
    sleeps: int
    """How often it has slept until the next due time."""
    slept: float
    """Seconds for which it has slept."""
    notifications: int
    """Sleeps that a notification of an earlier message has ended."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The measurements of an endpoint at a moment; counts and histograms are of the process's lifetime."""

    endpoint: str
    """Its name; empty until it has started."""
    names: Sequence[str]
    """The queues and destinations that are counted by name; at first those of the endpoint's settings."""
    taken: datetime
    """When the snapshot was taken, in UTC."""
    sent: Mapping[tuple[str, str, str], int]
    """Messages by operation (`send` or `schedule`), destination, and exception type: empty if they were sent."""
    send_seconds: Mapping[tuple[str, str, str], Histogram]
    """How long operations took, by the same."""
    stored: Mapping[str, int]
    """Delayed messages stored by this process, by destination."""
    lateness: Mapping[str, Histogram]
    """Seconds between due time and dispatch, by destination."""
    uncounted: int
    """Dispatched messages whose destination and lateness the store did not report."""
    received: Mapping[str, int]
    """Messages received, by queue."""
    handled: Mapping[tuple[str, str], Histogram]
    """Seconds that attempts to handle a message took, by queue and exception type: empty if it was handled."""
    recovered: Mapping[tuple[Action, str], int]
    """Messages that could not be handled or dispatched, by what was done with them and queue or destination."""
    poller: PollerCounts
    """The poller's counts."""
    polling: Activity
    """When the poller last succeeded."""
    receiving: Mapping[str, Activity]
    """When each receiver last succeeded, by queue."""
    breakers: Mapping[str, int]
    """The state of each circuit breaker: 0 disarmed, 1 armed, 2 triggered."""
    running_handlers: int
    """Messages that are being handled."""
    measures: Mapping[str, float]
    """The present values of transport and stores, such as `lease.held` and `two_phase.in_doubt`."""

    @property
    def dispatched(self) -> int:
        """Messages that the poller has moved to their destinations."""
        return self.uncounted + sum(histogram.count for histogram in self.lateness.values())


class Measurements:
    """An observer that counts, without any dependency: `Endpoint(..., observers=[measurements])`.

    Belongs to an endpoint. Destinations, queues and exception types are counted by name up to 200 each, so that memory
    is bounded; further names together as `(other)`.

    Example:
        ```python
        measurements = Measurements()
        endpoint = Endpoint("sales", transport=transport, observers=[measurements])
        async with endpoint:
            await endpoint.wait_stopped()
        print(measurements.snapshot().dispatched)
        ```
    """

    def __init__(self) -> None:
        self._endpoint: ObservedEndpoint | None = None
        self._name = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: Counter[tuple[str, str, str]] = Counter()
        self._send_seconds: dict[tuple[str, str, str], _Counts] = {}
        self._stored: Counter[str] = Counter()
        self._lateness: dict[str, _Counts] = {}
        self._uncounted = 0
        self._received: Counter[str] = Counter()
        self._handled: dict[tuple[str, str], _Counts] = {}
        self._recovered: Counter[tuple[Action, str]] = Counter()
        self._batches = self._moved = self._poll_failures = self._sleeps = self._notifications = 0
        self._slept = 0.0
        self._polling = _Activity()
        self._receiving: dict[str, _Activity] = {}
        self._breakers: dict[str, int] = {}
        self._names = Names()
        self._errors = Names()
        self.probes: Probes | None = None
        """The probes that watch the endpoint, and its event loop."""

    @classmethod
    def of(cls, endpoint: ObservedEndpoint) -> Self:
        """Return the measurements among the endpoint's observers, or add some. Raises ConfigurationError once started.

        Metrics, dashboard and probes share them in this way.
        """
        measurements = next((observer for observer in endpoint.observers if isinstance(observer, cls)), None)
        if measurements is None:
            measurements = cls()
            endpoint.observe(measurements)
        measurements._belong(endpoint)  # also for values that are asked for before it has started
        return measurements

    @property
    def endpoint(self) -> ObservedEndpoint | None:
        """The endpoint; None until it has started."""
        return self._endpoint

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The endpoint's event loop; None until it has started."""
        return self._loop

    def snapshot(self) -> Snapshot:
        """Return the present values; may be called from any thread."""
        endpoint = self._endpoint
        now, elapsed = datetime.now(UTC), time.monotonic()
        return Snapshot(
            endpoint=self._name,
            names=self._names.known,
            taken=now,
            sent=self._sent.copy(),
            send_seconds=_frozen(self._send_seconds, DURATION_BOUNDS),
            stored=self._stored.copy(),
            lateness=_frozen(self._lateness, LATENESS_BOUNDS),
            uncounted=self._uncounted,
            received=self._received.copy(),
            handled=_frozen(self._handled, DURATION_BOUNDS),
            recovered=self._recovered.copy(),
            poller=PollerCounts(
                self._batches, self._moved, self._poll_failures, self._sleeps, self._slept, self._notifications
            ),
            polling=self._polling.frozen(now, elapsed),
            receiving={queue: receiver.frozen(now, elapsed) for queue, receiver in self._receiving.copy().items()},
            breakers=self._breakers.copy(),
            running_handlers=0 if endpoint is None else endpoint.running_handlers,
            measures={} if endpoint is None else endpoint.measures(),
        )

    def attached(self, endpoint: ObservedEndpoint) -> None:
        """Belong to that endpoint. Raises ConfigurationError if this belongs to another endpoint."""
        if self._endpoint is not None and self._endpoint is not endpoint:
            raise ConfigurationError(
                f"these Measurements belong to endpoint {self._endpoint.name!r}: create others for {endpoint.name!r}"
            )
        self._endpoint, self._loop = endpoint, asyncio.get_running_loop()
        self._belong(endpoint)

    def _belong(self, endpoint: ObservedEndpoint) -> None:
        self._name = endpoint.name
        for queue, role in endpoint.queue_roles.items():
            if role is not QueueRole.ERROR:
                self._names.bounded(queue)

    def sent(self, operation: str, destinations: Sequence[str], seconds: float, error: Exception | None) -> None:
        failure = "" if error is None else self._errors.bounded(type(error).__qualname__)
        if len(destinations) == 1:
            destination = self._names.bounded(destinations[0])
            self._sent[operation, destination, failure] += 1
        else:
            for destination in destinations:
                self._sent[operation, self._names.bounded(destination), failure] += 1
            destination = self._names.bounded(destinations[0]) if len(set(destinations)) == 1 else SEVERAL
        _record(self._send_seconds, (operation, destination, failure), DURATION_BOUNDS, seconds)

    def stored(self, messages: Sequence[DelayedMessage]) -> None:
        for message in messages:
            self._stored[self._names.bounded(message.destination)] += 1

    def dispatched(self, numbers: Mapping[tuple[str, datetime | None], int], at: datetime) -> None:
        for (destination, due), number in numbers.items():
            if due is None:
                self._uncounted += number
            else:
                late = max(0.0, (at - due).total_seconds())
                _record(self._lateness, self._names.bounded(destination), LATENESS_BOUNDS, late, number)

    def polled(self, due: int, error: Exception | None) -> None:
        if error is not None:
            self._poll_failures += 1
        self._polling.note(error)
        if due:
            self._batches += 1
            self._moved += due

    def slept(self, seconds: float, *, notified: bool) -> None:
        self._sleeps += 1
        self._slept += seconds
        self._notifications += notified

    def received(self, queue: str, number: int, error: Exception | None) -> None:
        self._received[queue] += number
        activity = self._receiving.get(queue)
        if activity is None:
            activity = self._receiving[queue] = _Activity()
        activity.note(error)

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None:
        del message
        if error is None and (histogram := self._handled.get((queue, ""))) is not None:  # nearly always
            histogram.counts[bisect_left(DURATION_BOUNDS, seconds)] += 1
            histogram.total += seconds
            return
        failure = "" if error is None else self._errors.bounded(type(error).__qualname__)
        _record(self._handled, (queue, failure), DURATION_BOUNDS, seconds)

    def recovered(self, action: Action, place: str, message: Message, error: Exception) -> None:
        del message, error
        self._recovered[action, self._names.bounded(place)] += 1

    def breaker_changed(self, name: str, state: int) -> None:
        self._breakers[name] = state


class _Counts:
    """The buckets of a histogram while it grows."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


def _record(histograms: dict[Key, _Counts], key: Key, bounds: tuple[float, ...], value: float, number: int = 1) -> None:
    histogram = histograms.get(key)
    if histogram is None:
        histogram = histograms[key] = _Counts(len(bounds) + 1)
    histogram.counts[bisect_left(bounds, value)] += number
    histogram.total += value * number


def _frozen(histograms: dict[Key, _Counts], bounds: tuple[float, ...]) -> dict[Key, Histogram]:
    return {key: Histogram(bounds, tuple(counts.counts), counts.total) for key, counts in histograms.copy().items()}


class Names:
    """Names from outside, of which there may be any number: the first names, and a name for all others."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    @property
    def known(self) -> Sequence[str]:
        """The first names, and `OTHER` if there may be others; from any thread."""
        known = tuple(self._known.copy())
        return known if len(known) < MOST_NAMES else (*known, OTHER)

    def bounded(self, name: str) -> str:
        """Return the name if it is among the first, else `OTHER`."""
        if name in self._known:
            return name
        if len(self._known) >= MOST_NAMES:
            return OTHER
        self._known[name] = None
        return name


@dataclass(slots=True)
class _Activity:
    last_success: float | None = None
    failing_since: float | None = field(default=None)

    def note(self, error: Exception | None) -> None:
        if error is None:
            self.last_success, self.failing_since = time.monotonic(), None
        elif self.failing_since is None:
            self.failing_since = time.monotonic()

    def frozen(self, now: datetime, elapsed: float) -> Activity:
        last, since = self.last_success, self.failing_since
        last_utc = None if last is None else now - timedelta(seconds=elapsed - last)
        return Activity(last, last_utc, since, 0.0 if since is None else elapsed - since)
