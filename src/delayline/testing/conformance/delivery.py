"""The whole delivery suite in one class."""

from delayline.testing.conformance.delivery_failures import DeliveryFailures
from delayline.testing.conformance.delivery_faults import DeliveryBreakers, DeliveryFaults
from delayline.testing.conformance.delivery_forwarding import DeliveryInside
from delayline.testing.conformance.delivery_time import DeliveryInTime


class DeliveryConformance(DeliveryInTime, DeliveryFailures, DeliveryFaults, DeliveryBreakers, DeliveryInside):
    """What an endpoint owes over a transport and a store: subclass it, override `make_parts`, run pytest.

    Transaction modes that the two do not support together are reported as `not claimed`.
    """
