"""Conformance of the reference implementations in memory."""

from pathlib import Path

from tests.sampling import OtherLayout

from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.testing import DeliveryConformance, FaultyStore, StoreConformance, TransportConformance


class TestMemoryStore(StoreConformance):
    async def make_store(self, tmp_path: Path) -> MemoryDelayedMessageStore:
        return MemoryDelayedMessageStore()


class TestSixVerbs(StoreConformance):
    """The memory store without its capabilities: the minimum of a store."""

    async def make_store(self, tmp_path: Path) -> FaultyStore:
        return FaultyStore(MemoryDelayedMessageStore(), verbs_only=True)


class TestFaultyStoreWithoutFaults(StoreConformance):
    """Wrapping a store changes nothing about it."""

    async def make_store(self, tmp_path: Path) -> FaultyStore:
        return FaultyStore(MemoryDelayedMessageStore())


class TestMemoryTransport(TransportConformance):
    async def make_transport(self, tmp_path: Path) -> MemoryTransport:
        return MemoryTransport()


class TestMemoryDelivery(DeliveryConformance):
    async def make_backends(self, tmp_path: Path) -> tuple[MemoryTransport, MemoryDelayedMessageStore]:
        return MemoryTransport(), MemoryDelayedMessageStore()


class TestSixVerbDelivery(DeliveryConformance):
    async def make_backends(self, tmp_path: Path) -> tuple[MemoryTransport, FaultyStore]:
        return MemoryTransport(), FaultyStore(MemoryDelayedMessageStore(), verbs_only=True)


class SeparateStore(MemoryDelayedMessageStore):
    """A memory store whose transactions no transport can join."""

    @property
    def transaction_domain(self) -> str:
        return "separate"


class TestStoreTransactionDelivery(OtherLayout):
    """The store's transaction locks a batch that is sent outside it."""

    async def make_backends(self, tmp_path: Path) -> tuple[MemoryTransport, SeparateStore]:
        return MemoryTransport(), SeparateStore()
