"""A store with a cold tier, and messages in its files, held as a Spark task and its driver do."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from delayline import TransactionMode
from delayline.bulk import TwoTierStore
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.delayed.arrow import completed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime
    from pathlib import Path

    from delayline.bulk.cold_catalog import ColdFile


@asynccontextmanager
async def opened_tiers(url: str, folder: Path) -> AsyncIterator[TwoTierStore]:
    """Provide the store of endpoint `sales`, set up, with its files below the folder."""
    store = TwoTierStore(url, cold_tier=str(folder / "cold"))
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


def rows(*messages: tuple[str, datetime], destination: str = "billing") -> pa.RecordBatch:
    columns = {
        "id": [message_id for message_id, _ in messages],
        "destination": [destination] * len(messages),
        "due": [due for _, due in messages],
        "headers": ['{"n":"ü"}'] * len(messages),
        "body": [message_id.encode() for message_id, _ in messages],
    }
    return completed(pa.RecordBatch.from_pydict(columns))


async def hold(store: TwoTierStore, *messages: tuple[str, datetime], destination: str = "billing") -> list[ColdFile]:
    """Hold the messages."""
    tier = await store._database.write(store._catalog.create)
    writer = HourWriter(ColdFolder(store._folder.path, tier))
    writer.write(rows(*messages, destination=destination))
    files = writer.close()
    await store._database.write(partial(store._catalog.register, files=files))
    return files
