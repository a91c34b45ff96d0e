"""The memory room keeps every promise."""

from pathlib import Path

from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.testing.conformance import StoreConformance, TransportConformance
from delayline.testing.faulty_store import FaultyStore


class TestMemoryStore(StoreConformance):
    async def make_store(self, tmp_path: Path) -> MemoryDelayedMessageStore:
        return MemoryDelayedMessageStore()


class TestSixVerbs(StoreConformance):
    """The memory store with all its capabilities hidden: what the least of stores has to do."""

    async def make_store(self, tmp_path: Path) -> FaultyStore:
        return FaultyStore(MemoryDelayedMessageStore(), verbs_only=True)


class TestFaultyStoreWithoutFaults(StoreConformance):
    """Wrapping a store changes nothing about it."""

    async def make_store(self, tmp_path: Path) -> FaultyStore:
        return FaultyStore(MemoryDelayedMessageStore())


class TestMemoryTransport(TransportConformance):
    async def make_transport(self, tmp_path: Path) -> MemoryTransport:
        return MemoryTransport()
