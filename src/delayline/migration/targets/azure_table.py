"""AzureTable: each batch is written row by row under keys made of due time and id, and counts when Azure has it all."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa

from delayline.azure.account import AzureAccount
from delayline.azure.envelope import LARGEST_TEXT, ROOM_FOR_FAILURE
from delayline.azure.message_scan import pages_of
from delayline.azure.message_sink import DelayedTableSink
from delayline.bulk.writer import blocking
from delayline.errors import BackendUnusable
from delayline.migration.rows import WAITING_COLUMNS, waiting_batch
from delayline.migration.target import Delivered, DeliverySession, WithoutLedger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import AsyncExitStack

    from pyspark.sql import DataFrame, SparkSession

    from delayline.azure.message_sink import DelayedTableWriter
    from delayline.message import DelayedMessage
    from delayline.migration.target import Attempted

PENDING_COLUMNS: Final = ["PartitionKey", "RowKey", "MessageId", "Destination"]


class AzureTable(WithoutLedger):
    """The delayed messages tables of a storage account, each named after its endpoint; pickled to tasks."""

    kind: ClassVar[str] = "azure-table"
    exactly_once: ClassVar[bool] = False
    longest: ClassVar[timedelta | None] = None
    grain: ClassVar[timedelta] = timedelta(seconds=1)

    #: The most bytes of a queue message, base64 twice, before headers and the envelope are considered.
    largest_message: ClassVar[int] = (LARGEST_TEXT - ROOM_FOR_FAILURE) * 3 // 4

    def __init__(self, url: str) -> None:
        self.url = url
        self.name: str = AzureAccount(url).name

    def __str__(self) -> str:
        return f"the delayed messages of storage account {self.name}"

    def endpoint_named(self, name: str) -> str:
        """Return the name: the table name does not reveal another spelling. Raises BackendUnusable without a table."""
        try:
            blocking(self.sink(name).must_exist())
        except BackendUnusable as error:
            raise BackendUnusable(
                f"{self} have no table of endpoint {name!r}: {error}. Where it is spelt otherwise, as in Sales.Orders, "
                "name it so with --endpoint"
            ) from error
        return name

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that have no queue in the account."""
        return blocking(self.sink("").refusals(destinations))

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame:
        """Return the pending messages of the endpoint's table; a single task reads it page by page."""
        self.endpoint_named(endpoint)

        def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            if sum(batch.num_rows for batch in numbers):
                yield from self.pages(endpoint)

        return spark.range(0, 1, 1, 1).mapInArrow(read, WAITING_COLUMNS)

    def pages(self, endpoint: str) -> Iterator[pa.RecordBatch]:
        """Yield id, destination and due time of pending messages."""
        pages = self._pages(endpoint)

        async def following() -> list[DelayedMessage] | None:
            return await anext(pages, None)

        with asyncio.Runner() as runner:
            while (page := runner.run(following())) is not None:
                yield waiting_batch(page)

    def begin(self, endpoint: str) -> AzureSession:
        """Return a session; nothing is staged."""
        return AzureSession(self, endpoint)

    def sink(self, endpoint: str) -> DelayedTableSink:
        """Return the endpoint's table, to be written to."""
        return DelayedTableSink(self.url, endpoint)

    async def _pages(self, endpoint: str) -> AsyncIterator[list[DelayedMessage]]:
        async with self.sink(endpoint).opened() as (_, table):
            async for page in pages_of(table.waiting(columns=PENDING_COLUMNS)):
                yield page


class AzureSession(DeliverySession):
    """Writes batches of an endpoint into its table."""

    largest_message: int = AzureTable.largest_message

    _writer: DelayedTableWriter

    def __init__(self, target: AzureTable, endpoint: str) -> None:
        self._sink = target.sink(endpoint)

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the account."""
        self._writer = await self._sink.writer(stack)

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Write each message under its key; a message of an earlier attempt is overwritten."""
        return Delivered(attempt.number, await self._writer.deliver(messages))
