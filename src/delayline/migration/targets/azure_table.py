"""AzureTable: each batch is written row by row under keys made of due time and id, and counts when Azure has it all."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa

from delayline.azure.account import AzureAccount
from delayline.azure.envelope import LARGEST_TEXT, ROOM_FOR_FAILURE, check_size
from delayline.azure.names import Key, delays_name
from delayline.azure.requests import Requests
from delayline.azure.rows import ForeignRow, MessageIndex, from_entity, row_of, to_entity
from delayline.azure.table import ENTITY_PAGE, Table
from delayline.azure.transport import AzureStorageQueueTransport
from delayline.bulk.writer import blocking
from delayline.delayed.arrow import rows_in
from delayline.delayed.columns import message_of
from delayline.errors import BackendUnusable, InvalidDueTime, InvalidMessage, QueueNotFound
from delayline.message import in_utc
from delayline.migration.rows import WAITING_COLUMNS, waiting_batch
from delayline.migration.target import UNKNOWN_QUEUE, Delivered, DeliverySession, WithoutLedger
from delayline.migration.targets.sql_store import DUPLICATE_ID

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import AsyncExitStack

    from pyspark.sql import DataFrame, SparkSession

    from delayline.azure.rows import TableRow
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

        async def look() -> None:
            async with self.opened(name) as (_, table):
                await table.get(Key("0", "0"))

        try:
            blocking(look())
        except BackendUnusable as error:
            raise BackendUnusable(
                f"{self} have no table of endpoint {name!r}: {error}. Where it is spelt otherwise, as in Sales.Orders, "
                "name it so with --endpoint"
            ) from error
        return name

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that have no queue in the account."""

        async def look() -> Mapping[str, str]:
            async with self.opened("") as (account, _):
                queues = Queues(account)
                refusals = {queue: await queues.refusal(queue) for queue in destinations}
                return {queue: reason for queue, reason in refusals.items() if reason is not None}

        return blocking(look())

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

    @asynccontextmanager
    async def opened(self, endpoint: str) -> AsyncIterator[tuple[AzureAccount, Table]]:
        """Provide the open account, and the endpoint's table."""
        account = AzureAccount(self.url)
        await account.open()
        try:
            table = account.clients.tables.get_table_client(delays_name(endpoint))
            yield account, Table(table, Requests(account.server_timeout))
        finally:
            await account.close()

    async def _pages(self, endpoint: str) -> AsyncIterator[list[DelayedMessage]]:
        page: list[DelayedMessage] = []
        async with self.opened(endpoint) as (_, table):
            async for entity in table.waiting(columns=PENDING_COLUMNS):
                with contextlib.suppress(ForeignRow):
                    page.append(from_entity(entity).message)
                if len(page) == ENTITY_PAGE:
                    yield page
                    page = []
        yield page


class Queues:
    """The existing queues of an open account."""

    def __init__(self, account: AzureAccount) -> None:
        self._transport = AzureStorageQueueTransport(account)
        self._known: dict[str, str | None] = {}

    async def refusal(self, destination: str) -> str | None:
        """Return why the queue cannot receive a message; None if it can."""
        if destination not in self._known:
            try:
                await self._transport.count(destination)
                self._known[destination] = None
            except QueueNotFound:
                self._known[destination] = UNKNOWN_QUEUE.format(destination)
        return self._known[destination]


class AzureSession(DeliverySession):
    """Writes batches of an endpoint into its table."""

    largest_message: int = AzureTable.largest_message

    _table: Table
    _places: MessageIndex
    _queues: Queues

    def __init__(self, target: AzureTable, endpoint: str) -> None:
        self._target = target
        self._endpoint = endpoint

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the account."""
        account, self._table = await stack.enter_async_context(self._target.opened(self._endpoint))
        self._places = MessageIndex(self._table)
        self._queues = Queues(account)

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Write each message under its key; a message of an earlier attempt is overwritten."""
        refused: dict[int, str] = {}
        rows: dict[int, TableRow] = {}
        for position, row in enumerate(rows_in(messages)):
            reason = await self._queues.refusal(row.destination)
            if reason is not None:
                refused[position] = reason
                continue
            message = message_of(row, in_utc)
            try:
                check_size(message.message)
                rows[position] = row_of(message)
                to_entity(rows[position])
            except (InvalidMessage, InvalidDueTime) as error:
                refused[position] = str(error)
                rows.pop(position, None)
        wanted = await self._places.take(list(rows.values()))
        refused |= {position: DUPLICATE_ID for position, take in zip(rows, wanted, strict=True) if not take}
        await self._table.put_each([to_entity(row) for row, take in zip(rows.values(), wanted, strict=True) if take])
        return Delivered(attempt.number, refused)
