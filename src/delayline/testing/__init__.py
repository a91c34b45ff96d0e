"""Testing kit for delayline and for stores and transports: clock, signals, faults, conformance suites. Needs pytest."""

from delayline.errors import MissingExtra

try:
    import pytest

    pytest.register_assert_rewrite("delayline.testing.conformance")
    from delayline.testing.conformance import (
        DeliveryConformance,
        NativeDeliveryConformance,
        StoreConformance,
        TimeoutPersisterConformance,
        TransportConformance,
    )
except ModuleNotFoundError as _error:
    if _error.name is None or not _error.name.startswith("pytest"):
        raise
    raise MissingExtra("testing", "delayline.testing") from _error
from delayline.testing.clock import ManualClock
from delayline.testing.faults import Call, Fault, Faults
from delayline.testing.faulty_store import FaultyStore, FaultyTimeoutPersister
from delayline.testing.faulty_transport import FaultyTransport
from delayline.testing.signals import Signals

__all__ = [
    "Call",
    "DeliveryConformance",
    "Fault",
    "Faults",
    "FaultyStore",
    "FaultyTimeoutPersister",
    "FaultyTransport",
    "ManualClock",
    "NativeDeliveryConformance",
    "Signals",
    "StoreConformance",
    "TimeoutPersisterConformance",
    "TransportConformance",
]
