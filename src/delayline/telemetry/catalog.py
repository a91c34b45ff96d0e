"""The catalog of metrics: name, type, unit, attributes, and how each is read from measurements.

OpenTelemetry, Prometheus and the reference page are made from it.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from delayline.observer import Action, QueueRole
from delayline.receiving.pipeline import OLDEST_HANDLER
from delayline.shards import OUT_OF_REACH
from delayline.telemetry.measurements import Histogram, Measurements, Snapshot
from delayline.telemetry.pending import BUCKETS, Pending, pending_question
from delayline.telemetry.probes import ready_of
from delayline.telemetry.queues import LATEST_STATES, KnownQueue, queues_question
from delayline.telemetry.remembered import Remembered, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from delayline.observer import ObservedEndpoint
    from delayline.transport import QueueState

    #: Values of a metric with values of its attributes, in order.
    Values = Iterable[tuple[tuple[str, ...], float | Histogram]]

ENDPOINT_ATTRIBUTE: Final = "delayline.endpoint"
SYSTEM: Final = "messaging.system"
OPERATION: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
ERROR_TYPE: Final = "error.type"
DUE_METRIC: Final = "delayline.due"
#: The destination that stands for a pause of the whole endpoint.
ALL_DESTINATIONS: Final = "(all)"
RETRY: Final = "delayline.retry"
BREAKER: Final = "delayline.breaker"
ROLE: Final = "delayline.queue.role"
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
    system: str
    """The messaging system."""
    ready: bool
    """Whether the endpoint is ready, as `/ready` says."""
    pending: tuple[Pending, float] | None
    """Its pending messages, and how many seconds ago they were counted; None if they were never."""
    queues: tuple[Sequence[KnownQueue], float] | None
    """The queues that it knows, and how many seconds ago they were asked for; None for long ago, or never."""


class Source:
    """An endpoint's values, for metrics."""

    def __init__(self, endpoint: ObservedEndpoint) -> None:
        self.endpoint = endpoint
        self.measurements: Measurements = Measurements.of(endpoint)
        self._pending = Remembered(self.measurements, lambda: pending_question(endpoint))
        self._queues = Remembered(self.measurements, lambda: queues_question(endpoint, self.measurements.snapshot()))

    def read(self) -> Reading:
        """Return the present values; waits for a second at most, and not at all on the endpoint's event loop."""
        wait_for([self._pending.ask(), self._queues.ask()], self.measurements)
        queues = self._queues.read()
        return Reading(
            self.measurements.snapshot(),
            self.endpoint.messaging_system,
            ready_of(self.measurements).ok,
            self._pending.read(),
            None if queues is None or queues[1] > LATEST_STATES else queues,
        )


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
    counts = dict.fromkeys(reading.snapshot.names, 0) | dict(reading.snapshot.stored)
    return (((destination,), number) for destination, number in counts.items())


def _done(reading: Reading, action: Action) -> Values:
    """Yield the number of each known place: a counter that is born with its first value never increases."""
    counts = dict.fromkeys(reading.snapshot.names, 0)
    counts |= {place: number for (done, place), number in reading.snapshot.recovered.items() if done is action}
    return [((place,), number) for place, number in counts.items()]


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
    return [] if reading.pending is None else [((due,), reading.pending[0].numbers[due]) for due in BUCKETS]


def _paused(reading: Reading) -> Values:
    if reading.pending is None:
        return []
    paused = {name or ALL_DESTINATIONS: 1.0 for name in reading.pending[0].paused}
    known = dict.fromkeys([*reading.snapshot.names, ALL_DESTINATIONS], 0.0)
    return [((destination,), value) for destination, value in (known | paused).items()]


def _estimated(reading: Reading) -> Values:
    pending = reading.pending
    return [] if pending is None else [((due,), float(due in pending[0].estimated)) for due in BUCKETS]


def _age(answer: tuple[object, float] | None) -> Values:
    return [] if answer is None else [((), answer[1])]


def _of_queues(read: Callable[[QueueState], float | None], *roles: QueueRole) -> Callable[[Reading], Values]:
    """Return what reads a value of each queue, of those in the roles; what is unknown is left out."""

    def values(reading: Reading) -> Values:
        for queue in () if reading.queues is None else reading.queues[0]:
            value = read(queue.state)
            if value is not None and (not roles or queue.role in roles):
                yield (queue.state.queue, queue.role), float(value)

    return values


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

READY: Final = Metric(
    "delayline.ready",
    GAUGE,
    "1",
    "1 while the endpoint is started and works, as `/ready` says, else 0; from the first second of the process on.",
    (),
    lambda reading: [((), float(reading.ready))],
)

OWN: Final = (
    READY,
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
        "Time from a message's due time to its dispatch, with the time for which it was paused.",
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
        "Pending messages by the time until they are due: `overdue`, within `1m`, `1h`, `1d`, or `later`; `paused` are "
        "overdue and wait until somebody resumes dispatching to their destination, which is no alarm.",
        (DUE_METRIC,),
        _pending,
    ),
    Metric(
        "delayline.dispatch.paused",
        GAUGE,
        "1",
        "1 while dispatching to a destination is paused, as `(all)` that of the whole endpoint, else 0.",
        (DESTINATION,),
        _paused,
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
        lambda reading: _age(reading.pending),
    ),
    Metric(
        "delayline.messages.oldest_overdue",
        GAUGE,
        "s",
        "Time since the due time of the earliest pending message that is not paused; 0 if none is overdue.",
        (),
        lambda reading: [] if reading.pending is None else [((), reading.pending[0].oldest_overdue)],
    ),
    Metric(
        "delayline.queue.messages",
        GAUGE,
        MESSAGES,
        "Messages in a queue: in the endpoint's own and, where a back end tells of many at once, in its destinations.",
        (DESTINATION, ROLE),
        _of_queues(lambda state: state.messages),
    ),
    Metric(
        "delayline.queue.paused",
        GAUGE,
        "1",
        "1 while a queue is paused, else 0.",
        (DESTINATION, ROLE),
        _of_queues(lambda state: state.paused),
    ),
    Metric(
        "delayline.queue.received",
        GAUGE,
        "1",
        "1 while any process receives from a queue, else 0; absent where a back end cannot tell (Azure, memory).",
        (DESTINATION, ROLE),
        _of_queues(lambda state: state.received, *(set(QueueRole) - {QueueRole.ERROR})),
    ),
    Metric(
        "delayline.queue.age",
        GAUGE,
        "s",
        "Time since the queues were asked for; after 5 minutes their metrics are absent, as what they have is unknown.",
        (),
        lambda reading: _age(reading.queues),
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
        "delayline.handlers.oldest",
        GAUGE,
        "s",
        "For how long the oldest of the messages that are being handled has been so; 0 if none is.",
        (),
        _measure(OLDEST_HANDLER),
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
    Metric(
        "delayline.shards.out_of_reach",
        GAUGE,
        "{shard}",
        "Shards that do not answer, whose messages wait (several shards only).",
        (),
        _measure(OUT_OF_REACH),
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
