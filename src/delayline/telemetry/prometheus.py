"""Metrics in Prometheus' text format: to be scraped from a port of `delayline run`, or mounted in a web application."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import MissingExtra
from delayline.telemetry.catalog import (
    ENDPOINT_ATTRIBUTE,
    MESSAGING,
    NSERVICEBUS,
    OWN,
    READY,
    SYSTEM,
    Kind,
    Metric,
    Reading,
    Source,
)
from delayline.telemetry.http_server import Response
from delayline.telemetry.measurements import Histogram

try:
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client import Metric as Family
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as _missing:
    raise MissingExtra("telemetry", "the Prometheus format") from _missing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence

    from delayline.endpoint import Endpoint

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FAMILIES: Final[Mapping[Kind, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}
COMMON: Final = (ENDPOINT_ATTRIBUTE, SYSTEM)
#: The label that tells the processes of `delayline run --processes` apart.
PROCESS_LABEL: Final = "delayline_process"
REFUSED_METHOD: Final = "only GET and HEAD\n"


class PrometheusMetrics:
    """The metrics of endpoints for Prometheus.

    They are counted by `Measurements`; a scrape reads them, and waits for the numbers of pending messages and the
    states of queues for a second at most. On Linux those of the process are there too: `process_start_time_seconds`.

    Args:
        nservicebus: Also expose metrics under the names that NServiceBus gives its own, for existing boards.

    Raises:
        MissingExtra: prometheus-client is not installed.

    Example:
        ```python
        metrics = PrometheusMetrics()
        metrics.watch(endpoint)
        app.mount("/metrics", metrics.asgi)
        ```
    """

    def __init__(self, *, nservicebus: bool = False) -> None:
        self._metrics = (*MESSAGING, *OWN, *(NSERVICEBUS if nservicebus else ()))
        self._sources: list[Source] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, endpoint: Endpoint) -> None:
        """Expose an endpoint's metrics. Raises ConfigurationError if it is started already."""
        self._sources.append(Source(endpoint))

    def text(self, accept: str = "") -> tuple[str, str]:
        """Return the metrics and their content type, in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry).decode(), content_type

    def respond(self, accept: str) -> Response:
        """Return the metrics as the answer of an `HttpServer`."""
        body, content_type = self.text(accept)
        return Response(body, content_type=content_type)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: an ASGI application, to be mounted."""
        del receive
        if scope["type"] != "http":
            raise ValueError(f"metrics are for HTTP requests, not for {scope['type']!r}: mount them at a path")
        headers = [(b"cache-control", b"no-store")]
        if scope["method"] not in ("GET", "HEAD"):
            status, body, content_type = HTTPStatus.METHOD_NOT_ALLOWED, REFUSED_METHOD, "text/plain"
        else:
            accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
            status, (body, content_type) = HTTPStatus.OK, await asyncio.to_thread(self.text, accept)
        headers.append((b"content-type", content_type.encode()))
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body.encode()})

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request: a WSGI application, to be mounted."""
        method = environ.get("REQUEST_METHOD", "GET")
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Content-Type", "text/plain")])
            return [REFUSED_METHOD.encode()]
        body, content_type = self.text(environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type), ("Cache-Control", "no-store")])
        return [] if method == "HEAD" else [body.encode()]

    def describe(self) -> Sequence[Family]:
        """Return nothing: prometheus-client needs no metrics before they are collected."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield every metric; called by prometheus-client."""
        readings = [source.read() for source in self._sources]
        for metric in self._metrics:
            yield _family(metric, readings)


class Merger:
    """Merges the metrics of several processes, and says of a process that does not answer that it is not ready."""

    def __init__(self) -> None:
        self._ready_labels: dict[str, list[Mapping[str, str]]] = {}
        """The labels that each process's endpoints had last."""

    def merged(self, texts: Mapping[str, str | None], accept: str) -> tuple[str, str]:
        """Return the metrics and their content type, in the format that an Accept header asks for.

        Args:
            texts: What each process exposes in the text format, by the value of its label `delayline_process`; None
                where it does not answer.
            accept: The header.
        """
        described = READY.prometheus_name, READY.meaning, "gauge"
        families = {READY.prometheus_name: Family(*described)}
        for process, text in texts.items():
            if text is None:
                for labels in self._ready_labels.get(process, [{}]):
                    named = {**labels, PROCESS_LABEL: process}
                    families[READY.prometheus_name].add_sample(READY.prometheus_name, named, 0.0)
                continue
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Family(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, PROCESS_LABEL: process}))
                if family.name == READY.prometheus_name:
                    self._ready_labels[process] = [sample.labels for sample in family.samples]
        registry = CollectorRegistry()
        registry.register(_Collected(list(families.values())))
        encode, content_type = choose_encoder(accept)
        return encode(registry).decode(), content_type


class _Collected:
    """A collector of families that are there already."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def describe(self) -> Sequence[Family]:
        """Return nothing: prometheus-client need not know names before."""
        return ()

    def collect(self) -> Sequence[Family]:
        """Return the families."""
        return self._families


def _family(metric: Metric, readings: Sequence[Reading]) -> Family:
    labels = [name.replace(".", "_") for name in (*COMMON, *metric.attributes)]
    name = metric.prometheus_name.removesuffix("_total")
    family: Any = FAMILIES[metric.kind](name, metric.meaning, labels=labels)
    for reading in readings:
        common = (reading.snapshot.endpoint, reading.system)
        for attributes, value in metric.read(reading):
            values = [_text(label) for label in (*common, *attributes)]
            if isinstance(value, Histogram):
                family.add_metric(values, _buckets(value), value.total)
            else:
                family.add_metric(values, value)
    typed: Family = family
    return typed


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def _text(value: str) -> str:
    """Return the value without lone surrogates, which have no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode()
