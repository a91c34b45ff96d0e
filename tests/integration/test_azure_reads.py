"""Jobs read an endpoint's delayed messages table in Azure Storage, without Java here."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

from delayline import DelayedMessage, Message, TransactionMode
from delayline.azure import AzureDelayedTable
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from delayline.spark.table_reader import TableReader

DUE: Final = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def reader(url: str, endpoint: str = "sales", **options: str) -> TableReader:
    pytest.importorskip("pyspark")
    from delayline.spark.datasource import DelayedMessages
    from delayline.spark.table_reader import TableReader

    source = DelayedMessages({"url": url, "endpoint": endpoint, **options})
    schema: StructType = source.schema()
    found = source.reader(schema)
    assert isinstance(found, TableReader)
    return found


def rows(found: TableReader) -> list[dict[str, Any]]:
    return [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]


def test_the_messages_of_a_table_are_read_in_parts_of_their_time(azure_url: str) -> None:
    # Given messages in the table of an endpoint, an hour apart
    async def stored() -> None:
        table = AzureDelayedTable(azure_url)
        await table.setup_infrastructure("sales")
        await table.initialize("sales", TransactionMode.RECEIVE_ONLY)
        for hour in range(4):
            message = Message(f"h{hour}", {"n": "1"}, b"x")
            queue = "even" if hour % 2 == 0 else "odd"
            await table.store(DelayedMessage(message, queue, DUE + timedelta(hours=hour)))
        await table.close()

    asyncio.run(stored())
    # When all are read, those of a time in two parts, and some columns of a destination
    everything = rows(reader(azure_url))
    bounds = {"dueFrom": DUE + timedelta(hours=1), "dueTo": DUE + timedelta(hours=3, seconds=1)}
    some = reader(azure_url, numPartitions="2", **{name: at.isoformat() for name, at in bounds.items()})
    odd = reader(azure_url, destination="odd", columns="id")
    # Then each is read once
    assert [(row["id"], row["destination"], row["body"]) for row in everything[:2]] == [
        ("h0", "even", b"x"),
        ("h1", "odd", b"x"),
    ]
    assert (everything[0]["due"], json.loads(everything[0]["headers"])["n"]) == (DUE, "1")
    assert len(everything) == 4 and len(some.partitions()) == 2
    assert [row["id"] for row in rows(some)] == ["h1", "h2", "h3"]
    assert rows(odd) == [{"id": "h1"}, {"id": "h3"}]
    # And a table that is not there is an error
    with pytest.raises(BackendUnusable):
        rows(reader(azure_url, "nobody"))
