"""The example of a third party's store keeps what it claims."""

import importlib.util
from pathlib import Path
from types import ModuleType

from delayline import DelayedMessageStore, MemoryTransport, Transport
from delayline.testing import DeliveryConformance, StoreConformance

EXAMPLE = Path(__file__).parents[2] / "examples/custom_store/custom_store.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load(EXAMPLE)


class TestDirectoryStore(StoreConformance):
    durable = True

    async def make_store(self, tmp_path: Path) -> DelayedMessageStore:
        store: DelayedMessageStore = example.DirectoryStore(tmp_path)
        return store


class TestDirectoryStoreDelivery(DeliveryConformance):
    burst = 200  # six verbs: a few file operations for each message

    async def make_parts(self, tmp_path: Path) -> tuple[Transport, DelayedMessageStore]:
        return MemoryTransport(), example.DirectoryStore(tmp_path)
