"""Where jobs send messages that wait in a delayed messages table: rows under keys made of due time and id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.azure.account import AzureAccount
from delayline.azure.envelope import check_size
from delayline.azure.message_scan import opened_table
from delayline.azure.names import Key, delays_name
from delayline.azure.rows import MessageIndex, row_of, to_entity
from delayline.azure.table import Table
from delayline.azure.transport import AzureStorageQueueTransport
from delayline.backends import DUPLICATE_ID, UNKNOWN_QUEUE
from delayline.delayed.columns import message_of
from delayline.errors import InvalidDueTime, InvalidMessage, QueueNotFound
from delayline.message import in_utc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AsyncExitStack

    import pyarrow as pa

    from delayline.azure.rows import TableRow


class DelayedTableSink:
    """The delayed messages table of an endpoint; pickled to tasks.

    Args:
        url: The storage account.
        endpoint: The endpoint, after which the table is named.
    """

    def __init__(self, url: str, endpoint: str) -> None:
        self.url = url
        self.endpoint = endpoint

    async def must_exist(self) -> None:
        """Raise BackendUnusable if the table is missing."""
        async with self.opened() as (_, table):
            await table.get(Key("0", "0"))

    async def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that have no queue in the account, with the reason."""
        async with self.opened() as (account, _):
            queues = _Queues(account)
            refusals = {queue: await queues.refusal(queue) for queue in destinations}
            return {queue: reason for queue, reason in refusals.items() if reason is not None}

    async def writer(self, stack: AsyncExitStack) -> DelayedTableWriter:
        """Return a connected writer, which closes with the stack."""
        account, table = await stack.enter_async_context(self.opened())
        return DelayedTableWriter(account, table)

    def opened(self) -> AbstractAsyncContextManager[tuple[AzureAccount, Table]]:
        """Provide the open account, and the endpoint's table."""
        return opened_table(self.url, delays_name(self.endpoint))


class DelayedTableWriter:
    """The connection of a task."""

    def __init__(self, account: AzureAccount, table: Table) -> None:
        self._table = table
        self._places = MessageIndex(table)
        self._queues = _Queues(account)

    async def deliver(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        """Write each message under its key, over that of an earlier attempt; return refused positions and why."""
        from delayline.delayed.arrow import rows_in

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
        return refused


class _Queues:
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
