"""A store that tests look at, and DataFrames of messages."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from delayline import DelayedMessage, Message, TransactionMode
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

DUE: Final = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
PAST: Final = datetime(2020, 1, 1, tzinfo=UTC)
ENDPOINT: Final = "sales"


class StoreAt:
    """The store of an endpoint at a URL, set up."""

    def __init__(self, url: str, endpoint: str = ENDPOINT) -> None:
        self.url = url
        self.endpoint = endpoint
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(endpoint))
        self.options = {"url": url, "endpoint": endpoint}

    def messages(self) -> list[DelayedMessage]:
        """Return the pending messages."""

        async def look(store: SqlDelayedMessageStore) -> list[DelayedMessage]:
            return list(await store.pending(limit=1_000_000))

        found: list[DelayedMessage] = self.run(look)
        return found

    def ids(self) -> list[str]:
        """Return the ids of the pending messages."""
        return sorted(message.id for message in self.messages())

    def put(self, *ids: str, due: datetime = DUE, destination: str = "billing") -> None:
        """Store messages as an endpoint does."""
        messages = [DelayedMessage(Message(one, {"n": one}, one.encode()), destination, due) for one in ids]
        self.run(lambda store: store.store_many(messages))

    def due(self) -> list[str]:
        """Return the ids that a poller would fetch."""

        async def fetch(store: SqlDelayedMessageStore) -> list[str]:
            found = await store.fetch_due(datetime.now(UTC), 1_000_000, max_bytes=1 << 30)
            await store.release_many(found)
            return sorted(message.id for message in found)

        found: list[str] = self.run(fetch)
        return found

    def make(self) -> SqlDelayedMessageStore:
        """Return a new store, which is not open."""
        return SqlDelayedMessageStore(self.url)

    def run(self, work: Callable[[Any], Awaitable[Any]]) -> Any:  # noqa: ANN401 - what it returns
        """Run something on the open store."""

        async def opened() -> Any:  # noqa: ANN401
            store = self.make()
            await store.initialize(self.endpoint, TransactionMode.RECEIVE_ONLY)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(opened())


def frame(spark: SparkSession, *ids: str, **columns: Sequence[Any]) -> DataFrame:
    """Return a DataFrame of messages; through Arrow, which keeps instants."""
    number = len(ids)
    table = {
        "id": pa.array(ids, pa.string()),
        "destination": pa.array(["billing"] * number, pa.string()),
        "due": pa.array([DUE] * number, pa.timestamp("us", "UTC")),
        "headers": pa.array(['{"n":"1"}'] * number, pa.string()),
        "body": pa.array([one.encode() for one in ids], pa.binary()),
    }
    return spark.createDataFrame(pa.table({**table, **columns}))


def many(spark: SparkSession, number: int, partitions: int = 4) -> DataFrame:
    """Return a DataFrame that tasks make: m0, m1, ..."""
    return spark.range(0, number, 1, partitions).selectExpr(
        "concat('m', id) AS id",
        "'billing' AS destination",
        "timestamp_seconds(1900000000 + id) AS due",
        "'{}' AS headers",
        "CAST(CAST(id AS STRING) AS BINARY) AS body",
    )
