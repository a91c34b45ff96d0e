"""The catalog of metrics: name, type, unit, attributes, and how each is read from measurements.

OpenTelemetry, Prometheus and the reference page are made from it.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from delayline.observer import Action
from delayline.telemetry.measurements import Histogram, Measurements, Snapshot
from delayline.telemetry.pending import BUCKETS, Pending, PendingCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from delayline.observer import ObservedEndpoint

    #: Values of a metric with values of its attributes, in order.
    Values = Iterable[tuple[tuple[str, ...], float | Histogram]]

ENDPOINT_ATTRIBUTE: Final = "delayline.endpoint"
SYSTEM: Final = "messaging.system"
OPERATION: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
ERROR_TYPE: Final = "error.type"
DUE_METRIC: Final = "delayline.due"
RETRY: Final = "delayline.retry"
BREAKER: Final = "delayline.breaker"
NSERVICEBUS_QUEUE: Final = "nservicebus.queue"
#: The actions that count as retries.
RETRY_KINDS: Final = {Action.RETRIED: "immediate", Action.DELAYED: "delayed", Action.BACKED_OFF: "dispatch"}


class Kind(StrEnum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Reading:
    """What metrics are read from: measurements, and the numbers of pending messages as they were last counted."""

    snapshot: Snapshot
    pending: Pending | None
    system: str
    """The messaging system."""


class Source:
    """An endpoint's values, for metrics."""

    def __init__(self, endpoint: ObservedEndpoint) -> None:
        self.endpoint = endpoint
        self.measurements: Measurements = Measurements.of(endpoint)
        self._pending = PendingCounts(self.measurements)

    def read(self) -> Reading:
        """Return the present values; waits for a second at most, and not at all on the endpoint's event loop."""
        return Reading(self.measurements.snapshot(), self._pending.read(), self.endpoint.messaging_system)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; every value also has the endpoint's name and the messaging system as attributes."""

    name: str
    kind: Kind
    unit: str
    """In the notation of UCUM: `s` for seconds, `{message}` for messages."""
    meaning: str
    attributes: tuple[str, ...]
    read: Callable[[Reading], Values]

    @property
    def prometheus_name(self) -> str:
        """The name for Prometheus, with the unit and, for a counter, `_total` at its end."""
        name = self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")
        return f"{name}_total" if self.kind is Kind.COUNTER else name


def _sent(reading: Reading) -> Values:
    return reading.snapshot.sent.items()


def _consumed(reading: Reading) -> Values:
    return (((queue, "receive"), number) for queue, number in reading.snapshot.received.items())


def _operations(reading: Reading) -> Values:
    seconds = reading.snapshot.send_seconds
    return (
        ((operation, "send", destination, error), histogram)
        for (operation, destination, error), histogram in seconds.items()
    )


def _processed(reading: Reading) -> Values:
    return (((queue, "process", error), histogram) for (queue, error), histogram in reading.snapshot.handled.items())


def _lateness(reading: Reading) -> Values:
    return (((destination,), histogram) for destination, histogram in reading.snapshot.lateness.items())


def _stored(reading: Reading) -> Values:
    return (((destination,), number) for destination, number in reading.snapshot.stored.items())


def _done(reading: Reading, action: Action) -> Values:
    counts = reading.snapshot.recovered.items()
    return [((destination,), number) for (done, destination), number in counts if done is action]


def _retries(reading: Reading) -> Values:
    tally = Tally(dict.fromkeys(RETRY_KINDS.values(), 0))
    for (action, _), number in reading.snapshot.recovered.items():
        if action in RETRY_KINDS:
            tally[RETRY_KINDS[action]] += number
    return (((kind,), number) for kind, number in tally.items())


def _one(read: Callable[[Snapshot], float]) -> Callable[[Reading], Values]:
    return lambda reading: [((), read(reading.snapshot))]


def _measure(name: str) -> Callable[[Reading], Values]:
    def read(reading: Reading) -> Values:
        value = reading.snapshot.measures.get(name)
        return [] if value is None else [((), value)]

    return read


def _pending(reading: Reading) -> Values:
    return [] if reading.pending is None else [((due,), reading.pending.numbers[due]) for due in BUCKETS]


def _estimated(reading: Reading) -> Values:
    pending = reading.pending
    return [] if pending is None else [((due,), float(due in pending.estimated)) for due in BUCKETS]


def _of_pending(read: Callable[[Pending], float]) -> Callable[[Reading], Values]:
    return lambda reading: [] if reading.pending is None else [((), read(reading.pending))]


def _receivers_failing(reading: Reading) -> Values:
    return (((queue,), receiver.failing_for) for queue, receiver in reading.snapshot.receiving.items())


def _breakers(reading: Reading) -> Values:
    return (((name,), state) for name, state in reading.snapshot.breakers.items())


COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
MESSAGES: Final = "{message}"

#: Of the semantic conventions, https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics/
MESSAGING: Final = (
    Metric(
        "messaging.client.sent.messages",
        COUNTER,
        MESSAGES,
        "Messages sent, or attempted to be, now (`send`) or delayed (`schedule`).",
        (OPERATION, DESTINATION, ERROR_TYPE),
        _sent,
    ),
    Metric(
        "messaging.client.consumed.messages",
        COUNTER,
        MESSAGES,
        "Messages received from a queue.",
        (DESTINATION, OPERATION),
        _consumed,
    ),
    Metric(
        "messaging.client.operation.duration",
        HISTOGRAM,
        "s",
        "Duration of sending or scheduling.",
        (OPERATION, OPERATION_TYPE, DESTINATION, ERROR_TYPE),
        _operations,
    ),
    Metric(
        "messaging.process.duration",
        HISTOGRAM,
        "s",
        "Duration of the handlers, an attempt to handle a message each.",
        (DESTINATION, OPERATION, ERROR_TYPE),
        _processed,
    ),
)

OWN: Final = (
    Metric(
        "delayline.handler.attempts",
        COUNTER,
        "{attempt}",
        "Attempts to handle a message, by queue and, where they failed, by exception type.",
        (DESTINATION, ERROR_TYPE),
        lambda reading: [(key, histogram.count) for key, histogram in reading.snapshot.handled.items()],
    ),
    Metric(
        "delayline.delivery.lateness",
        HISTOGRAM,
        "s",
        "Time from a message's due time to its dispatch.",
        (DESTINATION,),
        _lateness,
    ),
    Metric("delayline.messages.stored", COUNTER, MESSAGES, "Delayed messages stored.", (DESTINATION,), _stored),
    Metric(
        "delayline.messages.dispatched",
        COUNTER,
        MESSAGES,
        "Due messages moved to their destinations.",
        (),
        _one(lambda snapshot: snapshot.dispatched),
    ),
    Metric(
        "delayline.messages.pending",
        GAUGE,
        MESSAGES,
        "Pending messages by the time until they are due: `overdue`, within `1m`, `1h`, `1d`, or `later`.",
        (DUE_METRIC,),
        _pending,
    ),
    Metric(
        "delayline.messages.pending.estimated",
        GAUGE,
        "1",
        "1 where the number of pending messages is an estimate of the database's statistics, else 0.",
        (DUE_METRIC,),
        _estimated,
    ),
    Metric(
        "delayline.messages.pending.age",
        GAUGE,
        "s",
        "Time since the pending messages were counted.",
        (),
        _of_pending(lambda pending: pending.age),
    ),
    Metric(
        "delayline.messages.oldest_overdue",
        GAUGE,
        "s",
        "Time since the due time of the earliest pending message; 0 if none is overdue.",
        (),
        _of_pending(lambda pending: pending.oldest_overdue),
    ),
    Metric(
        "delayline.errors.queued",
        COUNTER,
        MESSAGES,
        "Messages moved to the error queue, by the queue or destination where they failed.",
        (DESTINATION,),
        lambda reading: _done(reading, Action.MOVED),
    ),
    Metric(
        "delayline.messages.discarded",
        COUNTER,
        MESSAGES,
        "Messages that a retry policy has discarded.",
        (DESTINATION,),
        lambda reading: _done(reading, Action.DISCARDED),
    ),
    Metric(
        "delayline.messages.returned",
        COUNTER,
        MESSAGES,
        "Messages given back to their queue, because a back end was unavailable.",
        (DESTINATION,),
        lambda reading: _done(reading, Action.RETURNED),
    ),
    Metric(
        "delayline.retries",
        COUNTER,
        "{retry}",
        "Retries: of handlers at once (`immediate`) or later (`delayed`), or of the poller (`dispatch`).",
        (RETRY,),
        _retries,
    ),
    Metric(
        "delayline.handlers.running",
        GAUGE,
        MESSAGES,
        "Messages that are being handled.",
        (),
        _one(lambda snapshot: snapshot.running_handlers),
    ),
    Metric(
        "delayline.poller.batches",
        COUNTER,
        "{batch}",
        "Batches of due messages that the poller has moved.",
        (),
        _one(lambda snapshot: snapshot.poller.batches),
    ),
    Metric(
        "delayline.poller.sleeps",
        COUNTER,
        "{sleep}",
        "How often the poller has slept until the next due time.",
        (),
        _one(lambda snapshot: snapshot.poller.sleeps),
    ),
    Metric(
        "delayline.poller.sleep.duration",
        COUNTER,
        "s",
        "How long the poller has slept.",
        (),
        _one(lambda snapshot: snapshot.poller.slept),
    ),
    Metric(
        "delayline.poller.notifications",
        COUNTER,
        "{notification}",
        "Sleeps that a notification of an earlier message has ended.",
        (),
        _one(lambda snapshot: snapshot.poller.notifications),
    ),
    Metric(
        "delayline.poller.failures",
        COUNTER,
        "{failure}",
        "Failed looks of the poller at the store.",
        (),
        _one(lambda snapshot: snapshot.poller.failures),
    ),
    Metric(
        "delayline.poller.failing",
        GAUGE,
        "s",
        "Time since the poller's first failure after a success; 0 if it works.",
        (),
        _one(lambda snapshot: snapshot.polling.failing_for),
    ),
    Metric(
        "delayline.receiver.failing",
        GAUGE,
        "s",
        "Time since a receiver's first failure after a success, by queue; 0 if it works.",
        (DESTINATION,),
        _receivers_failing,
    ),
    Metric(
        "delayline.breaker.state",
        GAUGE,
        "1",
        "State of a circuit breaker: 0 disarmed, 1 armed, 2 triggered.",
        (BREAKER,),
        _breakers,
    ),
    Metric(
        "delayline.lease.held",
        GAUGE,
        "{lease}",
        "Leases held, which let one process at a time dispatch (Azure Storage only).",
        (),
        _measure("lease.held"),
    ),
    Metric(
        "delayline.two_phase.in_doubt",
        GAUGE,
        "{transaction}",
        "Prepared transactions whose outcome is not settled yet (two databases only).",
        (),
        _measure("two_phase.in_doubt"),
    ),
)


def _handled(snapshot: Snapshot, *, failed: bool) -> dict[tuple[str, ...], float]:
    tally: Tally[tuple[str, ...]] = Tally()
    for (queue, error), histogram in snapshot.handled.items():
        if bool(error) is failed:
            tally[queue,] += histogram.count
    return dict(tally)


def _seconds(reading: Reading) -> Values:
    return (((queue,), histogram) for (queue, error), histogram in reading.snapshot.handled.items() if not error)


def _recoverability(*actions: Action) -> Callable[[Reading], Values]:
    def read(reading: Reading) -> Values:
        counts: Mapping[tuple[Action, str], int] = reading.snapshot.recovered
        return [((destination,), number) for (action, destination), number in counts.items() if action in actions]

    return read


#: Named as NServiceBus names its own, https://docs.particular.net/nservicebus/operations/opentelemetry
NSERVICEBUS: Final = tuple(
    Metric(f"nservicebus.{name}", kind, unit, meaning, (NSERVICEBUS_QUEUE,), read)
    for name, kind, unit, meaning, read in (
        (
            "messaging.fetches",
            COUNTER,
            MESSAGES,
            "Messages fetched from the queue by the endpoint.",
            lambda reading: (((queue,), number) for queue, number in reading.snapshot.received.items()),
        ),
        (
            "messaging.successes",
            COUNTER,
            MESSAGES,
            "Messages processed successfully by the endpoint.",
            lambda reading: _handled(reading.snapshot, failed=False).items(),
        ),
        (
            "messaging.failures",
            COUNTER,
            MESSAGES,
            "Messages processed unsuccessfully by the endpoint.",
            lambda reading: _handled(reading.snapshot, failed=True).items(),
        ),
        ("messaging.handler_time", HISTOGRAM, "s", "Time that the handlers took to handle a message.", _seconds),
        ("messaging.processing_time", HISTOGRAM, "s", "Time that the endpoint took to process a message.", _seconds),
        (
            "recoverability.immediate",
            COUNTER,
            "{retry}",
            "Immediate retries requested.",
            _recoverability(Action.RETRIED),
        ),
        ("recoverability.delayed", COUNTER, "{retry}", "Delayed retries requested.", _recoverability(Action.DELAYED)),
        ("recoverability.error", COUNTER, MESSAGES, "Messages sent to the error queue.", _recoverability(Action.MOVED)),
    )
)
