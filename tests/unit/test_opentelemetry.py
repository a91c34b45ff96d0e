"""Metrics and spans as the SDK of OpenTelemetry exports them, from endpoints on memory."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from delayline import Endpoint, Headers, MemoryDelayedMessageStore, MemoryTransport, QueueNotFound, Send, StoredDelivery
from delayline.message import Message
from delayline.telemetry import Measurements, OpenTelemetry
from delayline.telemetry.catalog import MESSAGING, OWN
from delayline.telemetry.opentelemetry import MOST_RECORDED, OPT_IN, opted_in
from delayline.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline import MessageContext

SENDER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """An endpoint on memory whose spans and metrics are kept."""

    def __init__(self, spans: SpanExporter | None = None) -> None:
        self.exported = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans or self.exported))
        self.reader = InMemoryMetricReader()
        self.clock = ManualClock()
        self.endpoint = Endpoint(
            "sales",
            transport=MemoryTransport(self.clock),
            delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()),
            clock=self.clock,
        )
        telemetry = OpenTelemetry(
            meter_provider=MeterProvider([self.reader]), tracer_provider=provider, nservicebus=True
        )
        telemetry.watch(self.endpoint)
        self.done = asyncio.Semaphore(0)
        self.received: list[Message] = []
        self.baggage: list[object] = []
        self.endpoint.observe(Ending(self.done))
        self.error: Exception | None = None
        self.endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        self.received.append(message)
        self.baggage.append(baggage.get_baggage("tenant"))
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if message.text == "again":
            context.send("sales", "last", delay=timedelta(seconds=5))

    async def handled(self) -> None:
        async with asyncio.timeout(5):
            await self.done.acquire()

    def span(self, name: str) -> ReadableSpan:
        [found] = [one for one in self.exported.get_finished_spans() if one.name == name]
        return found

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            one.name: one
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for one in scope.metrics
        }


class Ending(Measurements):
    """Counts handled messages for a test to wait for."""

    def __init__(self, done: asyncio.Semaphore) -> None:
        super().__init__()
        self._done = done

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None:
        if error is None:
            self._done.release()


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Traced:
    monkeypatch.setenv(OPT_IN, "http, messaging")
    return Traced()


async def test_the_handler_continues_the_trace_of_the_sender(shop: Traced) -> None:
    """Given a message delayed by five seconds, when it is handled, then its span is a child of schedule."""
    async with shop.endpoint:
        message_id = await shop.endpoint.send("sales", "x", delay=timedelta(seconds=5))
        await shop.clock.advance(timedelta(seconds=5))
        await shop.handled()
    schedule, process, settle = map(shop.span, ("schedule sales", "process sales", "settle sales"))
    assert (schedule.kind, process.kind, settle.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT)
    assert process.parent is not None
    assert process.parent.span_id == schedule.context.span_id
    assert settle.parent is not None
    assert settle.parent.span_id == process.context.span_id
    assert len({one.context.trace_id for one in (schedule, process, settle)}) == 1
    assert not process.links
    assert process.attributes is not None
    assert process.attributes["messaging.operation.name"] == "process"
    assert process.attributes["messaging.operation.type"] == "process"
    assert process.attributes["messaging.destination.name"] == "sales"
    assert process.attributes["messaging.system"] == "delayline"
    assert process.attributes["messaging.message.id"] == message_id
    headers = shop.received[0].headers
    assert headers["traceparent"].startswith(f"00-{schedule.context.trace_id:032x}-{schedule.context.span_id:016x}-")
    assert headers[Headers.START_NEW_TRACE] == "False"


async def test_a_message_delayed_for_over_a_minute_starts_a_trace_with_a_link(shop: Traced) -> None:
    async with shop.endpoint:
        await shop.endpoint.send("sales", "x", delay=timedelta(minutes=2))
        await shop.clock.advance(timedelta(minutes=2))
        await shop.handled()
    schedule, process = shop.span("schedule sales"), shop.span("process sales")
    assert process.parent is None
    assert process.context.trace_id != schedule.context.trace_id
    assert [link.context.span_id for link in process.links] == [schedule.context.span_id]
    assert shop.received[0].headers[Headers.START_NEW_TRACE] == "True"


@pytest.mark.parametrize(
    ("headers", "continues"),
    [
        ({"traceparent": SENDER}, True),
        ({"traceparent": SENDER, Headers.START_NEW_TRACE: "False"}, True),
        ({"traceparent": SENDER, Headers.START_NEW_TRACE: "True"}, False),
        ({"traceparent": SENDER, Headers.START_NEW_TRACE: "True\ud800"}, True),
        ({"traceparent": "00-zz"}, False),
        ({"traceparent": "\x00" * 10_000}, False),
        ({"traceparent": SENDER, "tracestate": "=" * 5000, "baggage": ";;,,=" * 5000}, True),
        ({}, False),
    ],
)
async def test_headers_of_other_senders_are_followed_where_they_make_sense(
    shop: Traced, headers: dict[str, str], *, continues: bool
) -> None:
    """Given headers as .NET writes them, or damaged ones, when a message is handled, then it is, with a span."""
    traces = next(one for one in shop.endpoint.observers if type(one).__name__ == "_Traces")
    with traces.processing("sales", Message("1", headers, b"")):  # type: ignore[attr-defined]
        pass
    process = shop.span("process sales")
    assert (process.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C) is continues


async def test_baggage_travels(shop: Traced) -> None:
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    async with shop.endpoint:
        await shop.endpoint.send("sales", "x")
        context.detach(token)
        await shop.handled()
    assert shop.baggage == ["acme"]


async def test_sends_of_handlers_are_children_of_process(shop: Traced) -> None:
    async with shop.endpoint:
        await shop.endpoint.send("sales", "again")
        await shop.handled()
        await shop.clock.advance(timedelta(seconds=5))
        await shop.handled()
    first, schedule = shop.span("send sales"), shop.span("schedule sales")
    processes = [one for one in shop.exported.get_finished_spans() if one.name == "process sales"]
    assert schedule.parent is not None
    assert schedule.parent.span_id == processes[0].context.span_id
    assert processes[1].parent is not None
    assert processes[1].parent.span_id == schedule.context.span_id
    assert processes[1].context.trace_id == first.context.trace_id


async def test_errors_are_on_the_spans(shop: Traced) -> None:
    """Given a handler that fails once and a send to a missing queue, when they do, then their spans have the errors."""
    shop.error = KeyError("no such order")
    async with shop.endpoint:
        with pytest.raises(QueueNotFound):
            await shop.endpoint.send("nowhere", "x")
        await shop.endpoint.send("sales", "x")
        await shop.handled()
    refused, process = shop.span("send nowhere"), shop.span("process sales")
    assert refused.attributes is not None
    assert refused.attributes["error.type"] == "QueueNotFound"
    assert refused.status.status_code is StatusCode.ERROR
    assert process.attributes is not None
    assert process.attributes["error.type"] == "KeyError"
    assert [event.name for event in process.events] == ["exception"]


async def test_spans_of_sends_name_the_message_and_its_due_time(shop: Traced) -> None:
    """Given sends of the application and of a handler, when they are exported, then each is found by its id."""
    async with shop.endpoint:
        sent = await shop.endpoint.send("sales", "again")
        await shop.handled()
        due = shop.clock.now() + timedelta(seconds=5)
        scheduled = await shop.endpoint.send("error", "x", delay=timedelta(seconds=5))
        await shop.endpoint.send_many([Send("sales", "x", delay=timedelta(hours=1))] * 2)
    spans = [(span.name, span.attributes or {}) for span in shop.exported.get_finished_spans()]
    named = {
        attributes.get("messaging.message.id"): attributes.get("delayline.due_time")
        for name, attributes in spans
        if name.startswith(("send", "schedule"))
    }
    of_handler = next(iter(set(named) - {sent, scheduled, None}))
    assert named == {sent: None, scheduled: due.isoformat(), of_handler: due.isoformat(), None: None}


async def test_send_many_has_one_span(shop: Traced) -> None:
    async with shop.endpoint:
        await shop.endpoint.send_many([Send("sales", "x"), Send("error", "x")])
        await shop.handled()
    span = shop.span("send")
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 2
    assert shop.received[0].headers["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"


async def test_every_metric_is_exported(shop: Traced) -> None:
    """Given a handled and a failed message, when metrics are collected, then all with values are, with their units."""
    shop.error = KeyError("no such order")
    async with shop.endpoint:
        await shop.endpoint.send("sales", "x", delay=timedelta(seconds=1))
        await shop.clock.advance(timedelta(seconds=1))
        await shop.handled()
        found = shop.metrics()
    without = {  # of this store and endpoint
        *("delayline.messages.pending", "delayline.messages.pending.estimated", "delayline.messages.pending.age"),
        *("delayline.messages.oldest_overdue", "delayline.lease.held", "delayline.two_phase.in_doubt"),
        *("delayline.dispatch.paused", "delayline.shards.out_of_reach"),
        *("delayline.queue.messages", "delayline.queue.paused", "delayline.queue.received", "delayline.queue.age"),
    }
    for metric in (*MESSAGING, *OWN):
        if metric.name not in without:
            assert found[metric.name].unit == metric.unit, metric.name
            assert found[metric.name].description == metric.meaning
    [sent] = found["messaging.client.sent.messages"].data.data_points
    assert (sent.value, sent.attributes["messaging.operation.name"]) == (1, "schedule")
    assert "error.type" not in sent.attributes
    process = found["messaging.process.duration"].data.data_points
    assert {one.attributes.get("error.type") for one in process} == {None, "KeyError"}
    assert all(one.explicit_bounds[0] == 0.005 for one in process)
    assert found["nservicebus.messaging.successes"].data.data_points[0].value == 1


async def test_conventions_that_are_not_stable_need_an_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPT_IN, raising=False)
    shop = Traced()
    async with shop.endpoint:
        await shop.endpoint.send("sales", "x")
        await shop.handled()
        found = shop.metrics()
    assert not [name for name in found if name.startswith("messaging.")]
    assert "delayline.handler.attempts" in found


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("", False), ("http", False), ("messaging", True), ("a, messaging/dup", True), ("xmessaging", False)],
)
def test_the_opt_in_is_a_list(monkeypatch: pytest.MonkeyPatch, value: str, *, wanted: bool) -> None:
    monkeypatch.setenv(OPT_IN, value)
    assert opted_in() is wanted


async def test_histograms_take_a_bounded_number_a_second_and_counters_are_exact(shop: Traced) -> None:
    recording = next(one for one in shop.endpoint.observers if type(one).__name__ == "_Recording")
    measurements = Measurements.of(shop.endpoint)
    async with shop.endpoint:
        for _ in range(5 * MOST_RECORDED):
            for one in (recording, measurements):
                one.handled("sales", Message("1", {}, b""), 0.01, None)
        found = shop.metrics()
    assert MOST_RECORDED <= found["messaging.process.duration"].data.data_points[0].count < 3 * MOST_RECORDED
    assert found["delayline.handler.attempts"].data.data_points[0].value == 5 * MOST_RECORDED


class Hanging(SpanExporter):
    """An exporter whose collector does not answer."""

    def __init__(self) -> None:
        self.asked, self.release = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.release.wait(30)
        return SpanExportResult.FAILURE


class Down(MetricExporter):
    """An exporter whose collector refuses connections."""

    def export(self, *args: object, **named: object) -> MetricExportResult:
        raise ConnectionRefusedError("no collector")

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **named: object) -> None: ...


async def test_exporters_that_hang_or_are_down_delay_no_message() -> None:
    """Given a hanging and a refusing exporter, when messages are sent, then they are handled meanwhile."""
    hanging = Hanging()
    spans = TracerProvider()
    processor = BatchSpanProcessor(hanging, schedule_delay_millis=1)
    spans.add_span_processor(processor)
    meters = MeterProvider([PeriodicExportingMetricReader(Down(), export_interval_millis=10)])
    endpoint = Endpoint("sales", transport=MemoryTransport())
    OpenTelemetry(meter_provider=meters, tracer_provider=spans).watch(endpoint)
    done = asyncio.Semaphore(0)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        done.release()

    async with endpoint, asyncio.timeout(5):
        await endpoint.send("sales", "first")
        await done.acquire()
        await asyncio.to_thread(hanging.asked.wait, 5)
        for _ in range(20):
            await endpoint.send("sales", "x")
            await done.acquire()
    hanging.release.set()
    spans.shutdown()
    meters.shutdown()
