"""Measurements, metrics and traces of endpoints."""

import typing

from delayline.observer import Action, ObservedEndpoint, Observer, SupportsMeasures, SupportsTraces
from delayline.telemetry.http_server import HttpServer, Response
from delayline.telemetry.measurements import Activity, Histogram, Measurements, PollerCounts, Snapshot
from delayline.telemetry.probes import Probes, Verdict

if typing.TYPE_CHECKING:
    from delayline.telemetry.opentelemetry import OpenTelemetry as OpenTelemetry
    from delayline.telemetry.prometheus import PrometheusMetrics as PrometheusMetrics
else:
    #: Imported on first use: they need the extra `telemetry`.
    _LAZY = {
        "OpenTelemetry": "delayline.telemetry.opentelemetry",
        "PrometheusMetrics": "delayline.telemetry.prometheus",
    }

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})


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
