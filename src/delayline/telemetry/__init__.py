"""Measurements, metrics and traces of endpoints."""

from delayline.observer import Action, ObservedEndpoint, Observer, SupportsMeasures
from delayline.telemetry.measurements import Activity, Histogram, Measurements, PollerCounts, Snapshot

__all__ = [
    "Action",
    "Activity",
    "Histogram",
    "Measurements",
    "ObservedEndpoint",
    "Observer",
    "PollerCounts",
    "Snapshot",
    "SupportsMeasures",
]
