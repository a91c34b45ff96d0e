"""Conformance suites for stores, transports and deliveries: subclass, override a factory, run pytest."""

from delayline.testing.conformance.delivery import DeliveryConformance
from delayline.testing.conformance.native_delivery import NativeDeliveryConformance
from delayline.testing.conformance.store import StoreConformance
from delayline.testing.conformance.timeouts import TimeoutPersisterConformance
from delayline.testing.conformance.transport import TransportConformance

__all__ = [
    "DeliveryConformance",
    "NativeDeliveryConformance",
    "StoreConformance",
    "TimeoutPersisterConformance",
    "TransportConformance",
]
