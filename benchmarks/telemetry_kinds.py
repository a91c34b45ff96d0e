"""Telemetry as the benchmarks switch it on."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from delayline.telemetry import Measurements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    from delayline import Endpoint


class DispatchLateness(Measurements):
    """Appends a line for each message to a file: by how many milliseconds it was dispatched after it was due."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def dispatched(self, numbers: Mapping[tuple[str, datetime | None], int], at: datetime) -> None:
        """Write the lines of one batch."""
        late = [f"{(at - due).total_seconds() * 1000}\n" * number for (_, due), number in numbers.items() if due]
        os.write(self._file, "".join(late).encode())


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
        elif kind == "dispatch":
            endpoint.observe(DispatchLateness(os.environ["BENCHMARK_DISPATCHED"]))
        yield
