"""The whole store suite in one class."""

from delayline.testing.conformance.store_batches import StoreBatches
from delayline.testing.conformance.store_content import StoreContent
from delayline.testing.conformance.store_management import StoreManagement, StoreSignals
from delayline.testing.conformance.store_transactions import StoreTransactionality
from delayline.testing.conformance.store_verbs import StoreVerbs


class StoreConformance(StoreVerbs, StoreContent, StoreBatches, StoreTransactionality, StoreManagement, StoreSignals):
    """The conformance suite of delayed message stores: subclass it, override `make_store`, run pytest.

    Capabilities are found as the endpoint finds them, with `isinstance`; tests of one that the store does not have
    are reported as `not claimed`.
    """
