"""Who subscribes to which events: a table of the storage account, as .NET endpoints have it.

See https://docs.particular.net/transports/azure-storage-queues/native-publish-subscribe.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from delayline.azure.names import Key, can_be_queue, topic_key
from delayline.azure.table import ENTITY_PAGE, MOST_REQUESTS, Table, run_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayline.azure.account import AzureAccount
    from delayline.azure.requests import Requests

#: The name that .NET endpoints use unless told otherwise.
SUBSCRIPTIONS: Final = "subscriptions"


class SubscriptionTable:
    """Rows of endpoints and types: `PartitionKey` is the type of event, `RowKey` the endpoint, `Address` its queue.

    Args:
        account: Where the table is.
        requests: Limits the requests.
        name: The table's name.
    """

    def __init__(self, account: AzureAccount, requests: Requests, name: str) -> None:
        self._account = account
        self._requests = requests
        self._name = name
        self._opened: Table | None = None

    async def make(self) -> None:
        """Create the table. Idempotent."""
        await self._table.make()

    def close(self) -> None:
        """Let go of the account's client."""
        self._opened = None

    async def queues(self, topics: Iterable[str]) -> dict[str, set[str]]:
        """Return the queues that subscribe to each of the topics."""
        table, slots = self._table, asyncio.Semaphore(MOST_REQUESTS)

        async def of_topic(topic: str) -> tuple[str, set[str]]:
            async with slots:  # a query for each: Azure would read the whole table for one with "or"
                key = {"topic": topic_key(topic)}
                found = table.query("PartitionKey eq @topic", ENTITY_PAGE, parameters=key)
                return topic, {_address(row.get("Address"), row["RowKey"]) async for row in found}

        return dict(await run_all(of_topic(topic) for topic in topics))

    async def add(self, endpoint_name: str, address: str, topics: Sequence[str]) -> None:
        """Let the endpoint subscribe, with its queue at that address."""
        rows = [
            {
                "PartitionKey": topic_key(topic),
                "RowKey": topic_key(endpoint_name),
                "Topic": topic,
                "Endpoint": endpoint_name,
                "Address": address,
            }
            for topic in dict.fromkeys(topics)
        ]
        await self._table.put_each(rows)

    async def remove(self, endpoint_name: str, topics: Sequence[str]) -> None:
        """End the subscriptions of the endpoint."""
        keys = [Key(topic_key(topic), topic_key(endpoint_name)) for topic in dict.fromkeys(topics)]
        await self._table.delete_each(keys)

    @property
    def _table(self) -> Table:
        if self._opened is None:
            self._opened = Table(self._account.clients.tables.get_table_client(self._name), self._requests)
        return self._opened


def _address(address: object, endpoint_name: str) -> str:
    """Return the queue in a row; the endpoint's name in a row that names none."""
    queue = address if isinstance(address, str) and address else endpoint_name
    return queue.lower() if can_be_queue(queue) else queue
