"""Metrics and traces through the API of OpenTelemetry; the application brings its SDK and exporters."""

from __future__ import annotations

import contextlib
import os
import time
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import CorruptHeaders, MissingExtra
from delayline.failures import brief
from delayline.message import Headers, from_wire_time
from delayline.telemetry.catalog import (
    DESTINATION,
    ENDPOINT_ATTRIBUTE,
    ERROR_TYPE,
    MESSAGING,
    NSERVICEBUS,
    NSERVICEBUS_QUEUE,
    OPERATION,
    OPERATION_TYPE,
    OWN,
    SYSTEM,
    Kind,
    Metric,
    Reading,
    Source,
)
from delayline.telemetry.measurements import DURATION_BOUNDS, LATENESS_BOUNDS, SEVERAL, Histogram, Names

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.metrics import Observation
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ImportError as _missing:
    raise MissingExtra("telemetry", "OpenTelemetry") from _missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from opentelemetry.metrics import CallbackOptions, MeterProvider
    from opentelemetry.metrics import Histogram as Recorder
    from opentelemetry.trace import Span, TracerProvider

    from delayline.endpoint import Endpoint
    from delayline.message import DelayedMessage, Message
    from delayline.observer import Action, ObservedEndpoint

SCOPE: Final = "delayline"
#: The environment variable that opts in to conventions that are not stable yet, and the values that do.
OPT_IN: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
OPTED_IN: Final = frozenset({"messaging", "messaging/dup"})
#: Values recorded in each histogram a second: recording a value costs about ten times as much as counting it.
MOST_RECORDED: Final = 100
#: Seconds for which the instruments of a collection share a reading.
SHARED: Final = 0.5
#: Messages that wait for longer start a new trace, with a link to the sender's.
LONGEST_TRACE: Final = timedelta(minutes=1)
TRACEPARENT: Final = "traceparent"
START_NEW_TRACE: Final = Headers.START_NEW_TRACE
MESSAGE_ID_ATTRIBUTE: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
BATCH_SIZE: Final = "messaging.batch.message_count"
DUE_TIME: Final = "delayline.due_time"
#: How many messages are sent inside of the current span, which their headers then name; 0 if it is not around a send.
IN_SEND: Final[ContextVar[int]] = ContextVar("delayline_in_send", default=0)


class OpenTelemetry:
    """Reports endpoints to OpenTelemetry: metrics, and spans that continue from sender to receiver.

    Metrics of the semantic conventions for messaging, which are not stable yet, need the environment variable
    `OTEL_SEMCONV_STABILITY_OPT_IN=messaging`. Counters and gauges are exact; a histogram records the first 100 values
    of each second.

    Args:
        meter_provider: Takes the metrics; by default the global provider.
        tracer_provider: Takes the spans; by default the global provider.
        metrics: Whether to report metrics.
        traces: Whether to make spans and to send their context in headers.
        nservicebus: Also report metrics under the names that NServiceBus gives its own, for existing boards.

    Raises:
        MissingExtra: opentelemetry-api is not installed.

    Example:
        ```python
        OpenTelemetry().watch(endpoint)
        ```
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        metrics: bool = True,
        traces: bool = True,
        nservicebus: bool = False,
    ) -> None:
        self._meter_provider = meter_provider
        self._tracer_provider = tracer_provider
        self._metrics = metrics
        self._traces = traces
        self._nservicebus = nservicebus
        self._sources: list[_SharedReading] = []
        self._histograms: dict[str, Recorder] = {}

    def watch(self, endpoint: Endpoint) -> None:
        """Report an endpoint. Raises ConfigurationError if it is started already."""
        if self._metrics:
            if not self._sources:
                self._create_instruments()
            self._sources.append(_SharedReading(Source(endpoint)))
            endpoint.observe(_Recording(endpoint, self._histograms))
        if self._traces:
            endpoint.observe(_Traces(endpoint, self._tracer_provider))

    def _create_instruments(self) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=self._meter_provider)
        wanted = [*OWN, *(MESSAGING if opted_in() else ()), *(NSERVICEBUS if self._nservicebus else ())]
        for metric in wanted:
            if metric.kind is Kind.HISTOGRAM:
                bounds = LATENESS_BOUNDS if metric.name == LATENESS else DURATION_BOUNDS
                self._histograms[metric.name] = meter.create_histogram(
                    metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=bounds
                )
                continue
            create: Callable[..., object] = (
                meter.create_observable_counter if metric.kind is Kind.COUNTER else meter.create_observable_gauge
            )
            create(metric.name, [self._observing(metric)], metric.unit, metric.meaning)

    def _observing(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterator[Observation]:
            del options
            for source in self._sources:
                reading = source.read()
                common = {ENDPOINT_ATTRIBUTE: reading.snapshot.endpoint, SYSTEM: reading.system}
                for values, value in metric.read(reading):
                    if not isinstance(value, Histogram):
                        named = {name: value for name, value in zip(metric.attributes, values, strict=True) if value}
                        yield Observation(value, common | named)

        return observe


def opted_in() -> bool:
    """Return whether the environment asks for the conventions of messaging."""
    return not OPTED_IN.isdisjoint(convention.strip() for convention in os.environ.get(OPT_IN, "").split(","))


class _SharedReading:
    """A source that is read once for all instruments of a collection."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read_at = float("-inf")
        self._reading: Reading | None = None

    def read(self) -> Reading:
        if self._reading is None or time.monotonic() - self._read_at > SHARED:
            self._reading, self._read_at = self._source.read(), time.monotonic()
        return self._reading


LATENESS: Final = "delayline.delivery.lateness"
OPERATION_DURATION: Final = "messaging.client.operation.duration"
PROCESS_DURATION: Final = "messaging.process.duration"
HANDLER_TIMES: Final = ("nservicebus.messaging.handler_time", "nservicebus.messaging.processing_time")


class _Allowance:
    """Permits so many recordings a second."""

    def __init__(self) -> None:
        self._left = 0
        self._until = 0.0

    def take(self) -> bool:
        if self._left == 0:
            now = time.monotonic()
            if now < self._until:
                return False
            self._left, self._until = MOST_RECORDED, now + 1.0
        self._left -= 1
        return True


class _Silent:
    """An observer of nothing, whose subclasses observe some of it."""

    def attached(self, endpoint: ObservedEndpoint) -> None: ...

    def sent(self, operation: str, destinations: Sequence[str], seconds: float, error: Exception | None) -> None: ...

    def stored(self, messages: Sequence[DelayedMessage]) -> None: ...

    def dispatched(self, numbers: Mapping[tuple[str, datetime | None], int], at: datetime) -> None: ...

    def polled(self, due: int, error: Exception | None) -> None: ...

    def slept(self, seconds: float, *, notified: bool) -> None: ...

    def received(self, queue: str, number: int, error: Exception | None) -> None: ...

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None: ...

    def recovered(self, action: Action, place: str, message: Message, error: Exception) -> None: ...

    def breaker_changed(self, name: str, state: int) -> None: ...


class _Recording(_Silent):
    """Records histograms, which the API takes value by value; not more than so many a second."""

    def __init__(self, endpoint: ObservedEndpoint, histograms: Mapping[str, Recorder]) -> None:
        self._common = {ENDPOINT_ATTRIBUTE: endpoint.name, SYSTEM: endpoint.messaging_system}
        self._lateness = histograms[LATENESS]
        self._operations = histograms.get(OPERATION_DURATION)
        self._process = histograms.get(PROCESS_DURATION)
        self._times = [histograms[name] for name in HANDLER_TIMES if name in histograms]
        self._late, self._sends, self._handled = _Allowance(), _Allowance(), _Allowance()
        self._names = Names()

    def sent(self, operation: str, destinations: Sequence[str], seconds: float, error: Exception | None) -> None:
        if self._operations is None or not self._sends.take():
            return
        destination = self._names.bounded(destinations[0]) if len(set(destinations)) == 1 else SEVERAL
        named = {OPERATION: operation, OPERATION_TYPE: "send", DESTINATION: destination} | _error_type(error)
        self._operations.record(seconds, self._common | named)

    def dispatched(self, numbers: Mapping[tuple[str, datetime | None], int], at: datetime) -> None:
        for (destination, due), number in numbers.items():
            if due is None:
                continue
            attributes = self._common | {DESTINATION: self._names.bounded(destination)}
            for _ in range(number):
                if not self._late.take():
                    return
                self._lateness.record(max(0.0, (at - due).total_seconds()), attributes)

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None:
        del message
        if (self._process is None and not self._times) or not self._handled.take():
            return
        if self._process is not None:
            named = {OPERATION: "process", DESTINATION: queue} | _error_type(error)
            self._process.record(seconds, self._common | named)
        if error is None:
            for recorder in self._times:
                recorder.record(seconds, self._common | {NSERVICEBUS_QUEUE: queue})


class _Traces(_Silent):
    """Spans of an endpoint."""

    def __init__(self, endpoint: ObservedEndpoint, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=provider)
        self._common: dict[str, Any] = {ENDPOINT_ATTRIBUTE: endpoint.name, SYSTEM: endpoint.messaging_system}
        if (server := endpoint.server_address) is not None:
            host, port = server
            self._common |= {"server.address": host} | ({} if port is None else {"server.port": port})

    @contextlib.contextmanager
    def sending(self, operation: str, destinations: Sequence[str]) -> Iterator[None]:
        destination = destinations[0] if len(set(destinations)) == 1 else ""
        attributes = {OPERATION: operation, OPERATION_TYPE: "send"}
        if destination:
            attributes[DESTINATION] = destination
        batch = {BATCH_SIZE: len(destinations)} if len(destinations) > 1 else {}
        with self._span(f"{operation} {destination}".strip(), SpanKind.PRODUCER, attributes | batch):
            token = IN_SEND.set(len(destinations))
            try:
                yield
            finally:
                IN_SEND.reset(token)

    def headers(
        self, destination: str, message_id: str, due: datetime | None, delay: timedelta | None
    ) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        attributes = {MESSAGE_ID_ATTRIBUTE: message_id} | ({} if due is None else {DUE_TIME: due.isoformat()})
        if sent := IN_SEND.get():
            if sent == 1:  # what differs between the messages of a batch is left out
                trace.get_current_span().set_attributes(attributes)
            propagate.inject(carrier)
        else:
            operation = "send" if due is None else "schedule"
            attributes |= {OPERATION: operation, OPERATION_TYPE: "send", DESTINATION: destination}
            with self._span(f"{operation} {destination}", SpanKind.PRODUCER, attributes):
                propagate.inject(carrier)
        if TRACEPARENT in carrier:
            carrier[START_NEW_TRACE] = str(delay is not None and delay > LONGEST_TRACE)
        return carrier

    @contextlib.contextmanager
    def processing(self, queue: str, message: Message) -> Iterator[None]:
        try:
            headers = message.headers
        except CorruptHeaders:
            headers = {}
        sender = propagate.extract(headers, context=context.Context()) if TRACEPARENT in headers else context.Context()
        links: list[Link] = []
        if _starts_anew(headers):
            links = [Link(trace.get_current_span(sender).get_span_context())]
            sender = trace.set_span_in_context(trace.INVALID_SPAN, sender)
        attributes = {OPERATION: "process", OPERATION_TYPE: "process", DESTINATION: queue}
        attributes[MESSAGE_ID_ATTRIBUTE] = headers.get(Headers.MESSAGE_ID) or message.id
        if conversation := headers.get(Headers.CONVERSATION_ID):
            attributes[CONVERSATION_ID] = conversation
        token = IN_SEND.set(0)
        try:
            with self._span(f"process {queue}", SpanKind.CONSUMER, attributes, within=sender, links=links):
                yield
        finally:
            IN_SEND.reset(token)

    @contextlib.contextmanager
    def settling(self, queue: str) -> Iterator[None]:
        attributes = {OPERATION: "settle", OPERATION_TYPE: "settle", DESTINATION: queue}
        with self._span(f"settle {queue}", SpanKind.CLIENT, attributes):
            yield

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None:
        del queue, message, seconds
        if error is not None:
            _failed(trace.get_current_span(), error)

    @contextlib.contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        *,
        within: context.Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        """Make a span the current span, with the error that leaves it."""
        span = self._tracer.start_span(name, within, kind, {**self._common, **attributes}, links)
        outer = context.get_current() if within is None else within
        token = context.attach(trace.set_span_in_context(span, outer))
        try:
            yield span
        except Exception as error:
            _failed(span, error)
            raise
        finally:
            context.detach(token)
            span.end()


def _starts_anew(headers: Mapping[str, str]) -> bool:
    """Return whether a received message starts a new trace: because of its header, or after a long wait."""
    if TRACEPARENT not in headers:
        return False
    if headers.get(START_NEW_TRACE, "").casefold() == "true":
        return True
    try:
        waited = from_wire_time(headers[Headers.DELIVER_AT]) - from_wire_time(headers[Headers.TIME_SENT])
    except (KeyError, ValueError):
        return False
    return waited > LONGEST_TRACE


def _failed(span: Span, error: Exception) -> None:
    span.record_exception(error)
    span.set_attribute(ERROR_TYPE, type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, brief(error)))


def _error_type(error: Exception | None) -> dict[str, str]:
    return {} if error is None else {ERROR_TYPE: type(error).__qualname__}
