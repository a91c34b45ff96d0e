"""The whole delivery suite in one class."""

from delayline.testing.conformance.delivery_failures import DeliveryFailures
from delayline.testing.conformance.delivery_faults import DeliveryBreakers, DeliveryFaults
from delayline.testing.conformance.delivery_forwarding import DeliveryForwarding
from delayline.testing.conformance.delivery_time import DeliveryTiming


class DeliveryConformance(DeliveryTiming, DeliveryFailures, DeliveryFaults, DeliveryBreakers, DeliveryForwarding):
    """The delivery suite of an endpoint on a transport and a store: subclass it, override `make_backends`, run pytest.

    Transaction modes that the two do not support together are reported as `not claimed`.
    """
