"""Timeouts of Azure Storage persistence: rows of a table that all endpoints share, bodies in blobs.

See https://docs.particular.net/persistence/azure-table/.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from azure.core import MatchConditions
from azure.core.exceptions import ResourceNotFoundError
from azure.data.tables import UpdateMode

from delayline.azure.account import AzureAccount
from delayline.azure.names import Key
from delayline.azure.requests import Requests
from delayline.azure.table import ENTITY_PAGE, Table
from delayline.bulk.writer import blocking
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.migration.collected import ROWS_A_PAGE, SURE, UNSURE, CollectedMessage, CollectedSource, Selection
from delayline.migration.tally import Bounds, Tally

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from azure.storage.blob.aio import ContainerClient
    from pyspark.sql import SparkSession

#: Default names of the persistence; the first is literally that text.
TABLE: Final = "TimeoutDataTableName"
CONTAINER: Final = "timeoutstate"
OWNER: Final = "OwningTimeoutManager"
#: The prefix with which .NET's migration tool, and delayline's, hides rows from endpoints.
HIDDEN: Final = "__hidden__"
BLOBS_AT_ONCE: Final = 32
#: Of the three rows of a timeout only that which is kept by its time counts; the main row has no row key.
NOT_MAIN: Final = "RowKey ne ''"


class AzureStorage(CollectedSource):
    """Timeouts in a storage account. Moved timeouts and their bodies stay there, hidden from their endpoint.

    Args:
        table, container: names from the endpoints' settings.
    """

    kind: ClassVar[str] = "azure-storage"

    def __init__(
        self, place: str, journal: str, *, schema: str | None = None, table: str = TABLE, container: str = CONTAINER
    ) -> None:
        super().__init__(place, journal, schema=schema)
        self.table_name = table
        self.container = container
        self.account_name: str = AzureAccount(place).name

    def __str__(self) -> str:
        return f"table {self.table_name} and container {self.container} of storage account {self.account_name}"

    async def drain(self, which: Selection, spark: SparkSession) -> None:
        """Take timeouts, and hide their rows. Raises BackendUnavailable where an endpoint still works on them."""
        del spark
        changed = 0
        async with self._opened_account() as (table, blobs, requests):
            async for some in self._pages(table, which):
                rows = await asyncio.gather(*_limited(_with_body(requests, blobs, entity) for entity in some))
                rows = [row for row in rows if which.includes(row.due)]
                await self.database.write(partial(self.keep, rows=rows))
                gone = await self._hide(table, rows, {entity["RowKey"]: entity.metadata["etag"] for entity in some})
                changed += len(gone)
                await self.database.write(partial(self.forget, keys=gone))
                hidden = [row.key for row in rows if row.key not in gone]
                await self.database.write(partial(self.set_state, keys=hidden, state=SURE))
        if changed:
            raise BackendUnavailable(
                f"{changed} timeouts in {self} changed while they were read. None of them was collected: stop the "
                "endpoints, and run the migration again"
            )

    async def restore(self, rows: Sequence[CollectedMessage]) -> Mapping[str, str]:
        """Show the rows to their endpoints again."""
        async with self._opened_account() as (table, _, _):
            operations = [("update", _keys(row) | {OWNER: row.endpoint}, {"mode": UpdateMode.MERGE}) for row in rows]
            answers = await table.change_each(operations)
        return {row.key: f"its row is gone from {self}" for row, back in zip(rows, answers, strict=True) if not back}

    def looked_at(self, which: Selection, bounds: Bounds, spark: SparkSession) -> Tally:
        """Read the rows; the bodies only where everything is to be read."""
        del spark
        tally = Tally()

        async def look() -> None:
            async with self._opened_account() as (table, blobs, requests):
                async for some in self._pages(table, which):
                    if bounds.bodies:
                        rows = await asyncio.gather(*_limited(_with_body(requests, blobs, entity) for entity in some))
                    else:
                        rows = [_collected(entity, None, None) for entity in some]
                    tally.add(rows, which, bounds)

        blocking(look())
        return tally

    @asynccontextmanager
    async def _opened_account(self) -> AsyncIterator[tuple[Table, ContainerClient, Requests]]:
        account = AzureAccount(self.place)
        await account.open()
        try:
            clients, requests = account.clients, Requests(account.server_timeout)
            yield (
                Table(clients.tables.get_table_client(self.table_name), requests),
                clients.blobs.get_container_client(self.container),
                requests,
            )
        finally:
            await account.close()

    async def _pages(self, table: Table, which: Selection) -> AsyncIterator[list[Any]]:
        """Yield the timeouts of the endpoints, each once, a page of them at a time."""
        page: list[Any] = []
        try:
            async for entity in table.query(NOT_MAIN, ENTITY_PAGE):
                owner = entity.get(OWNER) or ""
                by_time = _is_guid(entity["RowKey"]) and not _is_guid(entity["PartitionKey"])
                if owner and by_time and not owner.startswith(HIDDEN) and which.names(owner):
                    page.append(entity)
                if len(page) == ROWS_A_PAGE:
                    yield page
                    page = []
        except BackendUnusable as error:
            raise BackendUnusable(f"cannot read {self}: {error}. Name the endpoints' table with --table") from error
        if page:
            yield page

    async def _hide(self, table: Table, rows: Sequence[CollectedMessage], etags: Mapping[str, str]) -> list[str]:
        """Hide rows that are as they were read; return the keys of the others."""
        operations = [
            ("update", _keys(row) | {OWNER: _hidden(row)},
             {"mode": UpdateMode.MERGE, "etag": etags[row.key], "match_condition": MatchConditions.IfNotModified})
            for row in rows
        ]  # fmt: skip
        answers = await table.change_each(operations)
        gone = []
        for row, hidden in zip(rows, answers, strict=True):
            if not hidden:  # perhaps it is, and the answer was lost
                now = await table.get(Key(_keys(row)["PartitionKey"], row.key))
                if now is None or now.get(OWNER) != _hidden(row):
                    gone.append(row.key)
        return gone


async def _with_body(requests: Requests, blobs: ContainerClient, entity: Any) -> CollectedMessage:  # noqa: ANN401 - an entity
    """Return the timeout with the body that its blob has."""
    name = entity.get("StateAddress")
    if not name:
        return _collected(entity, b"", None)
    async with requests.ask(f"read blob {name!r}"):
        try:
            content = await (await blobs.download_blob(name)).readall()
        except ResourceNotFoundError:
            return _collected(
                entity, None, f"its body is missing: container {blobs.container_name} has no blob {name!r}"
            )
    return _collected(entity, content, None)


def _collected(entity: Any, body: bytes | None, why: str | None) -> CollectedMessage:  # noqa: ANN401 - an entity
    key, destination, headers = entity["RowKey"], entity.get("Destination"), entity.get("Headers")
    original = json.dumps({"partition": entity["PartitionKey"]}).encode()
    return CollectedMessage(
        key, entity[OWNER], key, destination, _due(entity.get("Time")), headers or None, body, why, original, UNSURE
    )


def _due(time: Any) -> datetime | None:  # noqa: ANN401 - what the client makes of an entity's time
    """Return the time, rounded up to a microsecond: Azure keeps a tenth of it."""
    if not isinstance(time, datetime):
        return None
    _, _, fraction = str(getattr(time, "tables_service_value", "")).rstrip("Z").partition(".")
    due = datetime(*time.timetuple()[:6], time.microsecond, tzinfo=UTC)
    return due + timedelta(microseconds=1) if fraction[6:].strip("0") else due


def _keys(row: CollectedMessage) -> dict[str, str]:
    return {"PartitionKey": json.loads(row.original or b"{}")["partition"], "RowKey": row.key}


def _hidden(row: CollectedMessage) -> str:
    return f"{HIDDEN}delayline__{row.endpoint}"


def _is_guid(name: str) -> bool:
    try:
        uuid.UUID(name)
    except ValueError:
        return False
    return True


def _limited(works: Any) -> list[Any]:  # noqa: ANN401 - coroutines
    """Let so many run at once."""
    slots = asyncio.Semaphore(BLOBS_AT_ONCE)

    async def limited(work: Any) -> Any:  # noqa: ANN401
        async with slots:
            return await work

    return [limited(work) for work in works]
