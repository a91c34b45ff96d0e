"""Telemetry as the benchmarks switch it on."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline import Endpoint


@contextlib.contextmanager
def watched(endpoint: Endpoint, kind: str) -> Iterator[None]:
    """Watch the endpoint with telemetry of that kind."""
    with contextlib.ExitStack() as stack:
        if kind == "prometheus":
            from delayline.telemetry import PrometheusMetrics
            from delayline.telemetry.http_server import HttpServer

            metrics = PrometheusMetrics()
            metrics.watch(endpoint)
            stack.enter_context(HttpServer("127.0.0.1:0", {"/metrics": metrics.respond}))
        elif kind == "opentelemetry":
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import InMemoryMetricReader

            from delayline.telemetry import OpenTelemetry

            os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "messaging"
            provider = MeterProvider([InMemoryMetricReader()])
            OpenTelemetry(meter_provider=provider, traces=False).watch(endpoint)
            stack.callback(provider.shutdown)
        yield
