"""The pending messages of a delayed messages table, as jobs read them: a range of due times at a time. Blocks."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from delayline.azure.account import AzureAccount
from delayline.azure.names import checked_table_name, delays_name
from delayline.azure.requests import Requests
from delayline.azure.rows import ForeignRow, from_entity
from delayline.azure.table import ENTITY_PAGE, Table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from datetime import datetime

    from delayline.azure.table import Entity
    from delayline.message import DelayedMessage


class DelayedTableScan:
    """The table of an endpoint; pickled to tasks.

    Args:
        url: The storage account.
        endpoint: The endpoint that the table is named after.
        table_name: The table's name, if it is another.
    """

    def __init__(self, url: str, endpoint: str | None, table_name: str | None = None) -> None:
        self.url = url
        self.table: str = delays_name(endpoint or "") if table_name is None else checked_table_name(table_name)
        _ = AzureAccount(url)

    def messages(self, start: datetime | None, end: datetime | None) -> Iterator[list[DelayedMessage]]:
        """Yield messages due from `start` on and before `end`, earliest first, some at a time; rows of others are left.

        Raises BackendUnusable if there is no such table.
        """
        with asyncio.Runner() as runner:
            pages = self._pages(start, end)
            try:
                while page := runner.run(anext(pages, None)):
                    yield page
            finally:
                runner.run(pages.aclose())  # type: ignore[attr-defined]

    async def _pages(self, start: datetime | None, end: datetime | None) -> AsyncIterator[list[DelayedMessage]]:
        async with opened_table(self.url, self.table) as (_, table):
            async for page in pages_of(table.between(start, end, at_least=ENTITY_PAGE)):
                yield page


@asynccontextmanager
async def opened_table(url: str, name: str) -> AsyncIterator[tuple[AzureAccount, Table]]:
    """Provide an open account, and a delayed messages table of it."""
    account = AzureAccount(url)
    await account.open()
    try:
        client = account.clients.tables.get_table_client(name)
        yield account, Table(client, Requests(account.server_timeout))
    finally:
        await account.close()


async def pages_of(entities: AsyncIterator[Entity]) -> AsyncIterator[list[DelayedMessage]]:
    """Yield the messages of entities, some at a time; rows of others are left out."""
    page: list[DelayedMessage] = []
    async for entity in entities:
        with contextlib.suppress(ForeignRow):
            page.append(from_entity(entity).message)
        if len(page) == ENTITY_PAGE:
            yield page
            page = []
    if page:
        yield page
