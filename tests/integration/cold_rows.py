"""Messages in the files of a cold tier, held as a Spark task and its driver do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.delayed.arrow import completed

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.bulk import TwoTierStore
    from delayline.bulk.cold_catalog import ColdFile


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
