"""The whole transport suite in one class."""

from delayline.testing.conformance.transport_expiry import TransportExpiry
from delayline.testing.conformance.transport_management import TransportManagement
from delayline.testing.conformance.transport_queues import TransportContent, TransportQueues
from delayline.testing.conformance.transport_transactions import TransportTransactionality


class TransportConformance(
    TransportQueues, TransportContent, TransportExpiry, TransportTransactionality, TransportManagement
):
    """The conformance suite of transports: subclass it, override `make_transport`, run pytest.

    Capabilities are found as the endpoint finds them, with `isinstance`; tests of one that the transport does not
    have are reported as `not claimed`.
    """
