"""Conformance of the example of a third party's store."""

import asyncio
import importlib.util
from datetime import timedelta
from pathlib import Path
from types import ModuleType

from tests.sampling import OtherLayout

from delayline import MemoryTransport, TransactionMode
from delayline.spi import DelayedMessageStore, Transport
from delayline.testing import StoreConformance
from delayline.testing.conformance.messages import AT, delayed, same

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


async def test_the_messages_of_a_dead_process_are_fetched_by_the_next_one(tmp_path: Path) -> None:
    dead, next_one = (example.DirectoryStore(tmp_path, lease=timedelta(0)) for _ in range(2))
    for store in (dead, next_one):
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await dead.store(delayed())
    same(await dead.fetch_next_due(AT), delayed())
    same(await next_one.fetch_next_due(AT), delayed())


async def test_a_crash_while_writing_leaves_no_message(tmp_path: Path) -> None:
    store = example.DirectoryStore(tmp_path)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store(delayed())
    [file] = await asyncio.to_thread(lambda: list(tmp_path.rglob("*.json")))
    file.rename(file.with_suffix(".draft"))
    assert await store.next_due() is None
    assert await store.fetch_next_due(AT) is None


class TestDirectoryStoreDelivery(OtherLayout):
    burst = 200  # six verbs: a few file operations for each message

    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedMessageStore]:
        return MemoryTransport(), example.DirectoryStore(tmp_path)
