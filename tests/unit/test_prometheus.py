"""The metrics in Prometheus' format, from an endpoint on memory."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from wsgiref.util import setup_testing_defaults

import pytest
from prometheus_client.parser import text_string_to_metric_families

from delayline import Endpoint, MemoryDelayedMessageStore, MemoryTransport, StoredDelivery
from delayline.delayed.store import DueBucket, DueForecast
from delayline.message import Message
from delayline.observer import Action
from delayline.telemetry import Measurements, catalog, remembered
from delayline.telemetry.catalog import MESSAGING, NSERVICEBUS, OWN, Kind
from delayline.telemetry.probes import Probes
from delayline.telemetry.prometheus import Merger, PrometheusMetrics
from delayline.transport import QueueState

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTILE = 'a"b\\c\nd{}ü'


class ForecastStore(MemoryDelayedMessageStore):
    """A store whose forecast a test sets, delays or breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.overdue_since: datetime | None = None
        self.block = asyncio.Event()
        self.block.set()
        self.error: Exception | None = None

    async def due_forecast(self, edges: Any, *, by_destination: bool = False) -> Any:  # noqa: ANN401
        del by_destination
        self.asked += 1
        await self.block.wait()
        if self.error is not None:
            raise self.error
        assert len(edges) == 4
        buckets = [DueBucket(None, None, number, exact=number < 4) for number in range(1, 6)]
        return DueForecast(buckets, self.overdue_since)


def samples(text: str) -> dict[str, dict[frozenset[str], float]]:
    """Return the values by name, and by the labels that are neither empty nor common to all."""
    found: dict[str, dict[frozenset[str], float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            values = (value for name, value in one.labels.items() if name not in COMMON and value)
            found.setdefault(one.name, {})[frozenset(values)] = one.value
    return found


def of(*labels: str) -> frozenset[str]:
    return frozenset(labels)


COMMON = {"delayline_endpoint", "messaging_system"}


def watched(store: MemoryDelayedMessageStore | None = None) -> tuple[Endpoint, PrometheusMetrics, Measurements]:
    delivery = StoredDelivery(store or ForecastStore())
    endpoint = Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delivery)
    metrics = PrometheusMetrics(nservicebus=True)
    metrics.watch(endpoint)
    return endpoint, metrics, Measurements.of(endpoint)


async def scraped(metrics: PrometheusMetrics) -> dict[str, dict[frozenset[str], float]]:
    return samples((await asyncio.to_thread(metrics.text))[0])


def test_values_from_before_the_start_have_the_endpoints_name() -> None:
    _, metrics, _ = watched()
    text = metrics.text()[0]
    assert 'delayline_handlers_running{delayline_endpoint="sales"' in text
    assert 'delayline_endpoint=""' not in text


async def test_every_metric_is_described_with_its_type() -> None:
    _, metrics, _ = watched()
    text, content_type = metrics.text()
    assert content_type.startswith("text/plain")
    for metric in (*MESSAGING, *OWN, *NSERVICEBUS):
        name = metric.prometheus_name
        assert f"# TYPE {name} {metric.kind}\n" in text
        assert name.endswith("_total") is (metric.kind is Kind.COUNTER)


async def test_counts_and_histograms_have_their_labels() -> None:
    """Given what an endpoint reported, when it is scraped, then the samples say the same."""
    endpoint, metrics, measurements = watched()
    message = Message("1", {}, b"")
    async with endpoint:
        measurements.sent("schedule", ["billing"], 0.02, None)
        measurements.sent("send", ["billing"], 0.02, KeyError("x"))
        measurements.handled("sales", message, 0.3, None)
        measurements.handled("sales", message, 30, ValueError("x"))
        measurements.recovered(Action.MOVED, "sales", message, ValueError("x"))
        measurements.recovered(Action.BACKED_OFF, "billing", message, ValueError("x"))
        at = datetime.now(UTC)
        measurements.dispatched({("billing", at - timedelta(milliseconds=3)): 4}, at)
        found = await scraped(metrics)
    assert found["messaging_client_sent_messages_total"] == {
        of("schedule", "billing"): 1,
        of("send", "billing", "KeyError"): 1,
    }
    failed = of("sales", "process", "ValueError")
    assert found["messaging_process_duration_seconds_count"] == {of("sales", "process"): 1, failed: 1}
    assert found["messaging_process_duration_seconds_sum"][failed] == 30
    buckets = found["messaging_process_duration_seconds_bucket"]
    assert [buckets[of("sales", "process", bound)] for bound in ("0.25", "0.5")] == [0, 1]
    assert [buckets[failed | {bound}] for bound in ("10.0", "+Inf")] == [0, 1]
    assert found["delayline_delivery_lateness_seconds_bucket"][of("billing", "0.005")] == 4
    assert found["delayline_messages_dispatched_total"] == {of(): 4}
    assert found["delayline_errors_queued_total"] == {of("sales"): 1, of("billing"): 0}
    assert found["delayline_retries_total"] == {of("immediate"): 0, of("delayed"): 0, of("dispatch"): 1}
    assert found["delayline_breaker_state"][of("DelayedMessageFetch")] == 0
    assert found["nservicebus_messaging_successes_total"] == {of("sales"): 1}
    assert found["nservicebus_messaging_failures_total"] == {of("sales"): 1}
    assert found["nservicebus_recoverability_error_total"] == {of("sales"): 1}


async def test_pending_messages_are_counted_by_due_bucket() -> None:
    store = ForecastStore()
    endpoint, metrics, _ = watched(store)
    async with endpoint:
        store.overdue_since = endpoint.clock.now() - timedelta(seconds=5)
        found = await scraped(metrics)
        await scraped(metrics)
    assert found["delayline_messages_pending"] == {
        of("overdue"): 1,
        of("paused"): 0,
        of("1m"): 2,
        of("1h"): 3,
        of("1d"): 4,
        of("later"): 5,
    }
    flags = found["delayline_messages_pending_estimated"]
    assert {due for due, flag in flags.items() if flag} == {of("1d"), of("later")}
    assert found["delayline_messages_oldest_overdue_seconds"][of()] == pytest.approx(5, abs=2)
    assert store.asked == 1  # the second scrape came at once


async def test_a_store_that_hangs_or_fails_delays_a_scrape_by_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given numbers counted once, when the store then hangs, then scrapes return them quickly, and ask only once."""
    monkeypatch.setattr(remembered, "USABLE_FOR", 0.0)
    monkeypatch.setattr(remembered, "USABLE_FOR_SHARES", 0.0)
    monkeypatch.setattr(remembered, "READER_PATIENCE", 0.05)
    store = ForecastStore()
    endpoint, metrics, _ = watched(store)
    async with endpoint:
        await scraped(metrics)
        store.block.clear()
        began = time.monotonic()
        for _ in range(3):
            found = await scraped(metrics)
        assert time.monotonic() - began < 2
        assert found["delayline_messages_pending"][of("overdue")] == 1
        assert found["delayline_messages_pending_age_seconds"][of()] > 0
        assert store.asked == 2
        store.error = OSError("gone")
        store.block.set()
        assert (await scraped(metrics))["delayline_messages_pending"][of("overdue")] == 1


async def test_a_scrape_on_the_event_loop_does_not_wait_for_it() -> None:
    store = ForecastStore()
    store.block.clear()
    endpoint, metrics, _ = watched(store)
    async with endpoint:
        began = time.monotonic()
        metrics.text()
        assert time.monotonic() - began < 0.5
        store.block.set()


async def test_a_store_that_cannot_count_has_no_numbers() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    metrics = PrometheusMetrics()
    metrics.watch(endpoint)
    async with endpoint:
        found = await scraped(metrics)
    assert "delayline_messages_pending" not in found
    assert found["delayline_handlers_running"] == {of(): 0}


async def test_a_counter_of_a_known_destination_is_born_at_zero() -> None:
    """Given an endpoint that has done nothing, not even started, then what will count its failures is there."""

    class Bill:
        pass

    endpoint = Endpoint("sales", transport=MemoryTransport(), routes={Bill: "billing"})
    metrics = PrometheusMetrics()
    metrics.watch(endpoint)
    found = await scraped(metrics)
    for name in ("errors_queued", "messages_discarded", "messages_returned", "messages_stored"):
        assert found[f"delayline_{name}_total"] == {of("sales"): 0, of("billing"): 0}


async def test_an_endpoint_is_ready_once_it_has_started_and_until_it_stops() -> None:
    """Also without probes; with probes it is what they say."""
    endpoint, metrics, measurements = watched()
    assert (await scraped(metrics))["delayline_ready"] == {of(): 0}
    async with endpoint:
        assert (await scraped(metrics))["delayline_ready"] == {of(): 1}
        measurements.breaker_changed("poller", 2)
        assert (await scraped(metrics))["delayline_ready"] == {of(): 0}
        measurements.breaker_changed("poller", 0)
        async with Probes(measurements) as probes:
            assert (await scraped(metrics))["delayline_ready"] == {of(): 0}
            probes.started()
            assert (await scraped(metrics))["delayline_ready"] == {of(): 1}
            probes.stopping()
            assert (await scraped(metrics))["delayline_ready"] == {of(): 0}


class TellingTransport(MemoryTransport):
    """A transport that tells the states of queues, as a test has them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Sequence[str]] = []
        self.error: Exception | None = None

    async def queue_states(self, queues: Sequence[str] | None) -> Sequence[QueueState]:
        assert queues is not None
        self.asked.append(queues)
        if self.error is not None:
            raise self.error
        known = [QueueState("sales", 3, received=True, paused=False), QueueState("error", 2, False, False)]
        return [*known, QueueState("billing", 1, received=False, paused=True), QueueState("unknown")]


async def test_the_states_of_known_queues_are_exported_and_what_is_unknown_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered, "USABLE_FOR", 0.0)
    monkeypatch.setattr(remembered, "USABLE_FOR_SHARES", 0.0)
    transport = TellingTransport()
    endpoint = Endpoint("sales", transport=transport)
    metrics = PrometheusMetrics()
    metrics.watch(endpoint)
    measurements = Measurements.of(endpoint)
    async with endpoint:
        # Given destinations that were sent to, one in vain, and a topic
        for destination in ("billing", "unknown", "topic:A"):
            measurements.sent("send", [destination], 0.1, None)
        measurements.sent("send", ["nosuch"], 0.1, KeyError())
        # When it is scraped
        found = await scraped(metrics)
        # Then those that exist have been asked for together
        assert [sorted(queues) for queues in transport.asked] == [["billing", "error", "sales", "unknown"]]
        sales, error, billing = of("sales", "input"), of("error", "error"), of("billing", "destination")
        assert found["delayline_queue_messages"] == {sales: 3, error: 2, billing: 1}
        assert found["delayline_queue_paused"] == {sales: 0, error: 0, billing: 1}
        assert found["delayline_queue_received"] == {sales: 1, billing: 0}  # nobody receives from an error queue
        # When the back end fails, then the numbers stay for a while, and then are absent, not 0
        transport.error = OSError("gone")
        found = await scraped(metrics)
        assert found["delayline_queue_messages"][sales] == 3
        assert found["delayline_queue_age_seconds"][of()] >= 0
        monkeypatch.setattr(catalog, "LATEST_STATES", 0.0)
        found = await scraped(metrics)
        assert not [name for name in found if name.startswith("delayline_queue_")]


async def test_of_ten_thousand_destinations_two_hundred_have_series() -> None:
    transport = TellingTransport()
    endpoint = Endpoint("sales", transport=transport)
    metrics = PrometheusMetrics()
    metrics.watch(endpoint)
    measurements = Measurements.of(endpoint)
    async with endpoint:
        for number in range(10_000):
            measurements.sent("send", [f"q{number}"], 0.1, None)
            measurements.recovered(Action.MOVED, f"q{number}", Message("1", {}, b""), KeyError())
        found = await scraped(metrics)
    assert len(found["delayline_errors_queued_total"]) == 201
    assert sum(found["delayline_errors_queued_total"].values()) == 10_000
    assert found["delayline_errors_queued_total"][of("(other)")] == 10_000 - 199
    assert len(transport.asked[0]) == 199 + 2  # its own two; the input queue is among the 200
    assert len(found["messaging_client_sent_messages_total"]) == 200


async def test_processes_that_do_not_answer_are_not_ready() -> None:
    """Given two processes of which one ends, then its endpoints are not ready, before its first answer too."""
    endpoint, metrics, _ = watched()
    async with endpoint:
        text = (await asyncio.to_thread(metrics.text))[0]
    merger = Merger()
    found = samples(merger.merged({"1": text, "2": None}, "")[0])
    assert found["delayline_ready"] == {of("1"): 1, of("2"): 0}
    assert found["process_start_time_seconds"].keys() == {of("1")}
    body = merger.merged({"1": None, "2": text}, "")[0]
    assert samples(body)["delayline_ready"] == {of("1"): 0, of("2"): 1}
    assert 'delayline_ready{delayline_endpoint="sales",delayline_process="1",messaging_system="delayline"} 0.0' in body


async def test_hostile_names_are_escaped() -> None:
    endpoint, metrics, measurements = watched()
    async with endpoint:
        measurements.sent("send", [HOSTILE], 0.1, None)
        measurements.sent("send", ["lone \ud800"], 0.1, None)
        found = await scraped(metrics)
    assert set(found["messaging_client_sent_messages_total"]) == {of("send", HOSTILE), of("send", "lone \\ud800")}


async def test_it_can_be_mounted_as_an_asgi_application() -> None:
    endpoint, metrics, _ = watched()
    sent: list[Any] = []

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    async def receive() -> Any:  # noqa: ANN401
        raise AssertionError

    async with endpoint:
        headers = [(b"accept", b"application/openmetrics-text")]
        await metrics.asgi({"type": "http", "method": "GET", "headers": headers}, receive, send)
        await metrics.asgi({"type": "http", "method": "POST", "headers": []}, receive, send)
        with pytest.raises(ValueError, match="mount them at a path"):
            await metrics.asgi({"type": "websocket"}, receive, send)
    assert [one.get("status") for one in sent] == [200, None, 405, None]
    assert dict(sent[0]["headers"])[b"content-type"].startswith(b"application/openmetrics-text")
    assert sent[1]["body"].decode().endswith("# EOF\n")


def test_it_can_be_mounted_as_a_wsgi_application() -> None:
    _, metrics, _ = watched()
    statuses: list[str] = []
    for method in ("GET", "HEAD", "DELETE"):
        environ: dict[str, Any] = {"REQUEST_METHOD": method}
        setup_testing_defaults(environ)
        body = b"".join(metrics.wsgi(environ, lambda status, headers: statuses.append(status)))
        assert (b"delayline_handlers_running" in body) is (method == "GET")
    assert statuses == ["200 OK", "200 OK", "405 Method Not Allowed"]
