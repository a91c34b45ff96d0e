"""A table of Azure Storage: many entities in few requests, with an answer for each of them."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.data.tables import TableTransactionError, UpdateMode

from delayline.azure.names import BEHIND_DIGITS, Key, latest_before, latest_due
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from azure.data.tables.aio import TableClient

    from delayline.azure.requests import Requests

    Entity = dict[str, Any]
    Operation = tuple[str, Entity] | tuple[str, Entity, Mapping[str, Any]]

Result = TypeVar("Result")

LARGEST_TRANSACTION: Final = 100
#: Azure accepts 4 MiB; only bodies are counted here.
TRANSACTION_BYTES: Final = 2 * 1024 * 1024
ENTITY_PAGE: Final = 1000
MOST_REQUESTS: Final = 16
#: Errors of an entity that is missing, exists already, or was changed.
UNEXPECTED: Final = frozenset({404, 409, 412})


class Table:
    """The entities of a table; a verb that ends in `each` answers True for those that it changed."""

    def __init__(self, client: TableClient, requests: Requests) -> None:
        self._client = client
        self._requests = requests
        self._slots = asyncio.Semaphore(MOST_REQUESTS)

    @property
    def name(self) -> str:
        """The table's name on Azure."""
        return self._client.table_name

    async def make(self) -> None:
        """Create the table. Idempotent."""
        async with self._requests.ask(f"create table {self.name!r}"):
            try:
                await self._client.create_table()
            except ResourceExistsError as error:
                if "TableBeingDeleted" in str(error):
                    raise BackendUnusable(f"table {self.name!r} is being deleted: try again in a minute") from error

    async def due(self, at: datetime, *, at_least: int) -> AsyncIterator[Entity]:
        """Yield the messages due not after `at`, earliest first, over as many pages as there are."""
        key = latest_due(at)
        query = f"PartitionKey le '{key.partition}' and RowKey le '{key.row}'"
        async for entity in self.query(query, min(at_least, ENTITY_PAGE)):
            yield entity

    async def waiting(
        self, *, at_least: int = ENTITY_PAGE, only: Mapping[str, str] | None = None, columns: list[str] | None = None
    ) -> AsyncIterator[Entity]:
        """Yield all messages, earliest first, or only entities whose columns have the given values."""
        only = only or {}
        query = " and ".join([f"PartitionKey lt '{BEHIND_DIGITS}'", *(f"{name} eq @{name}" for name in only)])
        async for entity in self.query(query, min(at_least, ENTITY_PAGE), parameters=only, select=columns):
            yield entity

    async def between(
        self, start: datetime | None, end: datetime | None, *, at_least: int, columns: list[str] | None = None
    ) -> AsyncIterator[Entity]:
        """Yield messages due from `start` on and before `end`, earliest first, with the given columns, or all."""
        first, last = (None if edge is None else latest_before(edge) for edge in (start, end))
        parts = [f"PartitionKey lt '{BEHIND_DIGITS}'"]
        if first is not None:
            parts.append(f"PartitionKey ge '{first.partition}' and RowKey gt '{first.row}'")
        if last is not None:
            parts.append(f"PartitionKey le '{last.partition}' and RowKey le '{last.row}'")
        async for entity in self.query(" and ".join(parts), min(at_least, ENTITY_PAGE), select=columns):
            yield entity

    async def get(self, key: Key, *, columns: list[str] | None = None) -> Any | None:  # noqa: ANN401
        """Return the entity, its etag in its metadata, or only the given columns of it; None if there is none."""
        async with self._asking("read", self._slots):
            try:
                return await self._client.get_entity(key.partition, key.row, select=columns)
            except ResourceNotFoundError as error:
                self._must_exist(error)
                return None

    async def create_each(self, entities: Sequence[Entity]) -> list[bool]:
        """Insert entities; False for an entity whose key is there already."""
        return await self.change_each([("create", entity) for entity in entities])

    async def delete_each(self, keys: Sequence[Key]) -> list[bool]:
        """Delete entities; False for an entity that was gone."""
        return await self.change_each([("delete", _keys(key)) for key in keys])

    async def put_each(self, entities: Sequence[Entity]) -> list[bool]:
        """Insert entities, replacing entities that are there."""
        return await self.change_each([("upsert", entity, {"mode": UpdateMode.REPLACE}) for entity in entities])

    async def merge(self, key: Key, values: Entity) -> bool:
        """Change columns of an entity; False when it was gone."""
        return await self.change_together([("update", _keys(key) | values, {"mode": UpdateMode.MERGE})])

    async def replace(self, entity: Entity, etag: str) -> bool:
        """Write an entity in place of an entity that is as it was read; False when it is not."""
        conditions = {"mode": UpdateMode.REPLACE, "etag": etag, "match_condition": MatchConditions.IfNotModified}
        return await self.change_together([("update", entity, conditions)])

    async def delete_unchanged_each(self, entities: Sequence[Any]) -> list[bool]:
        """Delete entities; False for an entity that is not as it was read."""
        unmodified = MatchConditions.IfNotModified
        return await self.change_each(
            [("delete", row, {"etag": row.metadata["etag"], "match_condition": unmodified}) for row in entities]
        )

    async def move(self, old: Key, entity: Entity) -> bool:
        """Delete an entity and insert another of the same partition, together; False when neither happened."""
        return await self.change_together([("delete", _keys(old)), ("create", entity)])

    async def change_together(self, operations: Sequence[Operation]) -> bool:
        """Run a transaction on a partition; False when an entity was not as expected, and nothing was changed."""
        async with self._asking("write to", self._slots):
            try:
                await self._client.submit_transaction(operations)
            except TableTransactionError as error:
                if error.status_code not in UNEXPECTED:
                    raise
                self._must_exist(error)
                return False
        return True

    async def change_each(self, operations: Sequence[Operation]) -> list[bool]:
        """Run operations, in as few transactions as there can be; False where the entity was not as expected."""
        answers = [False] * len(operations)

        async def change(positions: Sequence[int]) -> None:
            if await self.change_together([operations[position] for position in positions]):
                for position in positions:
                    answers[position] = True
            elif len(positions) > 1:
                await run_all(change([position]) for position in positions)

        await run_all(change(chunk) for chunk in _chunks(operations))
        return answers

    async def query(
        self, query: str, page: int, *, parameters: Mapping[str, str] | None = None, select: list[str] | None = None
    ) -> AsyncIterator[Entity]:
        """Yield the entities that the query finds, so many to a page."""
        pages = self._client.query_entities(
            query, parameters=dict(parameters or {}), results_per_page=page, select=select
        )
        entities = pages.__aiter__()
        while True:
            async with self._asking("read"):
                try:
                    entity = await entities.__anext__()
                except StopAsyncIteration:
                    return
                except ResourceNotFoundError as error:
                    self._must_exist(error)
                    raise
            yield entity

    def _asking(self, doing: str, semaphore: asyncio.Semaphore | None = None) -> AbstractAsyncContextManager[None]:
        return self._requests.ask(f"{doing} table {self.name!r}", semaphore=semaphore)

    def _must_exist(self, error: HttpResponseError) -> None:
        if "TableNotFound" in str(error) or getattr(error, "error_code", None) == "TableNotFound":
            raise BackendUnusable(
                f"table {self.name!r} does not exist: run `delayline setup`, or start the endpoint with "
                "setup_infrastructure=True"
            ) from error


def _keys(key: Key) -> Entity:
    return {"PartitionKey": key.partition, "RowKey": key.row}


def _chunks(operations: Sequence[Operation]) -> list[list[int]]:
    """Return the positions of operations that can share a transaction: same partition, not too many, not too large."""
    chunks: list[list[int]] = []
    by_partition = sorted(range(len(operations)), key=lambda position: operations[position][1]["PartitionKey"])
    for _, positions in groupby(by_partition, key=lambda position: operations[position][1]["PartitionKey"]):
        chunks.append([])
        size = 0
        for position in positions:
            entity = operations[position][1]
            bytes_of = len(entity.get("Body", b"")) + len(entity.get("Headers", ""))
            full = len(chunks[-1]) == LARGEST_TRANSACTION or size + bytes_of > TRANSACTION_BYTES
            if full and chunks[-1]:
                chunks.append([])
                size = 0
            chunks[-1].append(position)
            size += bytes_of
    return chunks


async def run_all(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run them all to their ends and return their results, or raise the first error: none goes on unseen."""
    results: list[Result] = []
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
