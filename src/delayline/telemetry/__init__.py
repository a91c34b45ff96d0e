"""Measurements, metrics and traces of endpoints."""

import typing

from delayline.lazy_imports import lazy_imports as _lazy_imports
from delayline.observer import Action, ObservedEndpoint, Observer, SupportsMeasures, SupportsTraces
from delayline.telemetry.http_server import HttpServer, Response
from delayline.telemetry.measurements import Activity, Histogram, Measurements, PollerCounts, Snapshot
from delayline.telemetry.probes import Probes, Verdict

if typing.TYPE_CHECKING:
    from delayline.telemetry.opentelemetry import OpenTelemetry as OpenTelemetry
    from delayline.telemetry.prometheus import PrometheusMetrics as PrometheusMetrics
else:
    #: Imported on first use: they need the extra `telemetry`.
    __getattr__, __dir__ = _lazy_imports(
        __name__,
        {
            "OpenTelemetry": "delayline.telemetry.opentelemetry",
            "PrometheusMetrics": "delayline.telemetry.prometheus",
        },
    )


__all__ = [
    "Action",
    "Activity",
    "Histogram",
    "HttpServer",
    "Measurements",
    "ObservedEndpoint",
    "Observer",
    "PollerCounts",
    "Probes",
    "Response",
    "Snapshot",
    "SupportsMeasures",
    "SupportsTraces",
    "Verdict",
]
