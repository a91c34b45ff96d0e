"""Delayed messages in a table of Azure Storage, as a .NET endpoint of the same name keeps them.

See https://docs.particular.net/transports/azure-storage-queues/delayed-delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from azure.core.exceptions import AzureError

from delayline.azure.account import AzureAccount
from delayline.azure.envelope import check_size
from delayline.azure.lease import ContainerLease
from delayline.azure.names import Key, checked_table_name, delays_name, due_of, id_key
from delayline.azure.requests import Requests
from delayline.azure.rows import RETRIES_COLUMN, ForeignRow, MessageIndex, TableRow, from_entity, row_of, to_entity
from delayline.azure.table import ENTITY_PAGE, Table
from delayline.checks import positive_seconds, time_span
from delayline.clock import EPOCH, ONE_SECOND, SystemClock
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.store import (
    DueBucket,
    DueCount,
    DueForecast,
    FoundMessage,
    Outcome,
    SingleMessageVerbs,
    checked_edges,
    found_of,
    spans_of,
)
from delayline.errors import ConfigurationError, DelaylineError, NotStarted, UnsupportedTransactionMode
from delayline.events import Event, emit
from delayline.message import in_utc
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from datetime import datetime
    from typing import Any

    from delayline.clock import Clock
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction

logger: logging.Logger = logging.getLogger(__name__)

#: How long a process leaves another's lease alone, with messages due.
STAND_BY: Final = 1.0
#: How long cancelling waits for the lease, which a poller has while it dispatches; in steps.
PAUSES_FOR_LEASE: Final = (0.1, 0.2, 0.3, 0.5, 0.9)
#: A message due later than this cannot be in a poller's hands, whatever the machines' clock difference.
FAR: Final = timedelta(minutes=5)
MOST_REPORTED: Final = 1000
#: Seconds from the start until index rows without a message are deleted, up to twice that; then between two times ...
SWEEP_AFTER: Final = 60.0
SWEEP_EVERY: Final = 3600.0
#: ... and after each hundred of them.
SWEEP_PAUSE: Final = 1.0
#: How old such rows are at least: others may belong to messages that are just being stored.
ORPHANED_AFTER: Final = timedelta(minutes=10)
#: Requests of a forecast at a time.
FORECASTS_AT_ONCE: Final = 8
NOT_OPEN: Final = "the delayed messages table is not open: start its endpoint, or call initialize first"


class AzureDelayedTable(SingleMessageVerbs):
    """Delayed message store in an Azure table; the dispatching process holds a lease on a container.

    Due times are rounded up to whole seconds. Several messages are not stored together.

    Args:
        account: The storage account, or its URL.
        table_name: Name of table and container; by default `delays` and the SHA-1 of the endpoint's name.
        poll_interval: How often to look for messages of other processes.
        clock: Decides, when a message is cancelled, whether it may be being dispatched.
        server_timeout: Seconds that a request may take with its retries; by default the account's.
    """

    def __init__(
        self,
        account: str | AzureAccount,
        *,
        table_name: str | None = None,
        poll_interval: timedelta = ONE_SECOND,
        clock: Clock | None = None,
        server_timeout: float | None = None,
    ) -> None:
        if server_timeout is not None:
            positive_seconds("server_timeout", server_timeout)
        self._account = AzureAccount.at(account)
        self._requests = Requests(self._account.server_timeout if server_timeout is None else server_timeout)
        self._given_name = None if table_name is None else checked_table_name(table_name)
        self._poll_interval = time_span("poll_interval", poll_interval).total_seconds()
        self._clock = clock or SystemClock()
        self._table: Table | None = None
        self._places: MessageIndex | None = None
        self._lease: ContainerLease | None = None
        self._turn = asyncio.Lock()
        self._held: dict[tuple[str, datetime], TableRow] = {}
        self._drained = True
        self._reported: set[Key] = set()
        self._listeners: list[Callable[[datetime], None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """A table shares no transaction with queues."""
        return TransactionMode.SENDS_ATOMIC_WITH_RECEIVE

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create the table and the container."""
        await self._account.open()
        try:
            table, lease = self._parts(endpoint_name)
            await table.make()
            await lease.make_container()
        finally:
            await self._account.close()

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the table. Raises BackendUnusable where there is none, or where the credentials do not do."""
        if mode is TransactionMode.TRANSACTION_SCOPE:
            raise UnsupportedTransactionMode(
                "Azure Storage has no transactions over tables and queues: use TransactionMode.RECEIVE_ONLY, and "
                "handle duplicates"
            )
        await self.close()
        self._requests.begin()
        await self._account.open()
        self._table, self._lease = self._parts(endpoint_name)
        self._places = MessageIndex(self._table)
        try:
            await self.next_due()
        except BaseException:
            await self.close()
            raise

    def stop_soon(self) -> None:
        """From now on wait at most a few seconds for answers."""
        self._requests.stop_soon()

    async def close(self) -> None:
        """Give up the lease and every lock, and let go of the connections."""
        table, lease, places = self._table, self._lease, self._places
        self._stop_watching()
        self._table = self._lease = self._places = None
        self._held.clear()
        self._drained = True
        if lease is not None:
            await lease.release()
        if places is not None:
            await places.close()
        if table is not None:
            await self._account.close()

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message until it is due."""
        await self.store_many([message], transaction)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Keep the messages, some of them if it fails half-way. Raises InvalidMessage for a message too large."""
        _refuse(transaction)
        table = self._open
        rows: dict[str, TableRow] = {}
        for message in messages:
            check_size(message.message)
            rows.setdefault(id_key(message.id), row_of(message))
        entities = {key: to_entity(row) for key, row in rows.items()}
        wanted = await self._where.take(list(rows.values()))
        await table.create_each([entities[key] for key, take in zip(rows, wanted, strict=True) if take])
        if rows:
            self._notify(min(row.message.due for row in rows.values()))

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return the earliest due messages; none, after a second, while another process has the lease."""
        _refuse(transaction)
        async with self._turn:
            if await self._leased.acquire():
                due_rows = await self._due(at, limit, max_bytes)
                self._held |= {(row.message.id, row.message.due): row for row in due_rows}
                await self._settle()
                return [row.message for row in due_rows]
        await asyncio.sleep(STAND_BY)
        return []

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message."""
        async for row in self._rows(self._open.waiting(at_least=1 + len(self._reported))):
            return row.message.due
        return None

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages; their index rows are deleted later, when no message is due."""
        _refuse(transaction)
        rows = [self._row(message) for message in messages]
        deleted = await self._open.delete_each([row.key for row in rows])
        self._where.leave(row.message.id for row in rows if row.own)
        await self._unlock(messages)
        return sum(deleted)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count failures, move the due times, unlock."""
        _refuse(transaction)
        counted = 0
        for message in messages:
            again = replace(message, due=at, number_of_retries=message.number_of_retries + 1)
            counted += await self._move(self._row(message), row_of(again))
        await self._unlock(messages)
        return counted

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock."""
        await self._unlock(messages)

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` after each store here, and every poll_interval with the earliest due time."""
        self._listeners.append(callback)
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_now_and_then(), name="delayline watch")
            self._sweep = asyncio.create_task(self._sweep_now_and_then(), name="delayline sweep of orphans")

        def stop() -> None:
            self._listeners.remove(callback)
            if not self._listeners:
                self._stop_watching()

        return stop

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a waiting message; it is looked for in the whole table where a .NET endpoint has stored it."""
        _refuse(transaction)
        async with self._turn:
            row = await self._where.find(message_id)
            outcome = await self._outcome(row)
            if row is not None and outcome is Outcome.DONE:
                if not all(await self._open.delete_each([row.key])):
                    outcome = Outcome.NOT_PENDING
                self._where.leave([message_id])
            await self._settle()
            return outcome

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Move a waiting message to another due time."""
        _refuse(transaction)
        due = in_utc(due)
        async with self._turn:
            row = await self._where.find(message_id)
            outcome = await self._outcome(row)
            if row is not None and outcome is Outcome.DONE:
                again = row_of(replace(row.message, due=due))
                if not await self._move(row, again):
                    outcome = Outcome.NOT_PENDING
                self._notify(again.message.due)
            await self._settle()
            return outcome

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first."""
        only = {} if destination is None else {"Destination": destination}
        messages: list[DelayedMessage] = []
        async for row in self._rows(self._open.waiting(at_least=offset + limit, only=only)):
            if offset:
                offset -= 1
                continue
            if len(messages) == limit:
                break
            messages.append(row.message)
        return messages

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count pending messages by bucket and destination; reads the keys of the whole table."""
        time_span("bucket", bucket)
        counts: Counter[tuple[datetime, str]] = Counter()
        async for entity in self._open.waiting(columns=["PartitionKey", "RowKey", "Destination"]):
            due, destination = due_of(entity["RowKey"]), entity.get("Destination")
            if due is not None and isinstance(destination, str) and destination:
                counts[EPOCH + (due - EPOCH) // bucket * bucket, destination] += 1
        return [DueCount(start, destination, number) for (start, destination), number in sorted(counts.items())]

    async def count_orphans(self) -> int:
        """Count index rows that point at no message; reads the index."""
        return sum([len(chunk) async for chunk in self._where.orphans(self._clock.now() - ORPHANED_AFTER)])

    async def remove_orphans(self) -> int:
        """Delete index rows that point at no message, a hundred a second at most; return their number.

        A .NET endpoint leaves them when it dispatches messages that were stored here. Pollers do this once an hour.
        """
        number = 0
        async with contextlib.aclosing(self._where.orphans(self._clock.now() - ORPHANED_AFTER)) as orphans:  # type: ignore[type-var]
            async for chunk in orphans:
                number += await self._where.remove(chunk)
                await asyncio.sleep(SWEEP_PAUSE)
        return number

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None; .NET's own are searched in the whole table."""
        row = await self._where.find(message_id)
        return None if row is None else found_of(row.message, body_limit)

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return pending messages without their bodies, earliest due first."""
        messages: list[FoundMessage] = []
        reading = self._rows(self._open.between(start, end, at_least=offset + limit))
        async with contextlib.aclosing(reading) as rows:  # type: ignore[type-var]
            async for row in rows:
                if offset:
                    offset -= 1
                    continue
                messages.append(found_of(row.message, 0))
                if len(messages) >= limit:
                    break
        return messages

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count up to 1000 messages of each bucket, which is then at least as large: Azure keeps no statistics."""
        spans, room = spans_of(checked_edges(edges)), asyncio.Semaphore(FORECASTS_AT_ONCE)

        async def bucket(start: datetime | None, end: datetime | None) -> DueBucket:
            destinations: Counter[str] = Counter()
            reading = self._open.between(start, end, at_least=ENTITY_PAGE, columns=["RowKey", "Destination"])
            async with room, contextlib.aclosing(reading) as entities:  # type: ignore[type-var]
                async for entity in entities:
                    destination = entity.get("Destination")
                    if due_of(entity["RowKey"]) is not None and isinstance(destination, str) and destination:
                        destinations[destination] += 1
                        if destinations.total() == ENTITY_PAGE:
                            break
            number = destinations.total()
            shares = dict(destinations.most_common()) if by_destination else {}
            return DueBucket(start, end, number, number < ENTITY_PAGE, number == ENTITY_PAGE, shares)

        buckets = await asyncio.gather(*(bucket(*span) for span in spans))
        return DueForecast(buckets, await self.next_due())

    @property
    def _open(self) -> Table:
        if self._table is None:
            raise NotStarted(NOT_OPEN)
        self._account.check_process()
        return self._table

    @property
    def _where(self) -> MessageIndex:
        if self._places is None:
            raise NotStarted(NOT_OPEN)
        return self._places

    def measures(self) -> dict[str, float]:
        """Return whether this process holds the lease."""
        return {"lease.held": float(self._lease is not None and self._lease.held)}

    @property
    def _leased(self) -> ContainerLease:
        if self._lease is None:
            raise NotStarted(NOT_OPEN)
        return self._lease

    def _parts(self, endpoint_name: str) -> tuple[Table, ContainerLease]:
        name, clients = self._given_name or delays_name(endpoint_name), self._account.clients
        return (
            Table(clients.tables.get_table_client(name), self._requests),
            ContainerLease(clients.blobs.get_container_client(name), self._held.clear, self._requests),
        )

    async def _due(self, at: datetime, limit: int, max_bytes: int) -> list[TableRow]:
        due_rows: list[TableRow] = []
        size = 0
        self._drained = False
        reading = self._open.due(at, at_least=limit + len(self._held) + len(self._reported))
        async for row in self._rows(reading):
            message = row.message.message
            if (message.id, row.message.due) in self._held:
                continue
            size += len(message.body) + len(message.encoded_headers)
            if len(due_rows) == limit or (due_rows and size > max_bytes):
                return due_rows
            due_rows.append(row)
        self._drained = True
        return due_rows

    async def _rows(self, entities: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[TableRow]:
        """Yield the messages; a row that is not a message stays in the table and is logged once."""
        async with contextlib.aclosing(entities) as reading:  # type: ignore[type-var]
            async for entity in reading:
                try:
                    yield from_entity(entity)
                except ForeignRow as error:
                    key = Key(entity["PartitionKey"], entity["RowKey"])
                    if key not in self._reported and len(self._reported) < MOST_REPORTED:
                        self._reported.add(key)
                        log_text = "Row %s of table %s is not a delayed message and stays there: %s"
                        emit(logger, logging.ERROR, Event.FOREIGN_ROW, log_text, key.row, self._open.name, error)

    def _row(self, message: DelayedMessage) -> TableRow:
        held = self._held.get((message.id, message.due))
        return row_of(message) if held is None else replace(held, message=message)

    async def _move(self, old: TableRow, new: TableRow) -> bool:
        """Re-insert under the new due time, then delete the old row; False if it was gone.

        A crash in between duplicates.
        """
        table = self._open
        if old.key == new.key:
            return await table.merge(old.key, {RETRIES_COLUMN: new.message.number_of_retries})
        if old.key.partition != new.key.partition:
            if await table.get(old.key) is None:
                return False
            await table.put_each([to_entity(new)])
            if not all(await table.delete_each([old.key])):
                await table.delete_each([new.key])
                return False
        elif not await table.move(old.key, to_entity(new)):
            return False
        await self._where.put(new)
        return True

    async def _outcome(self, row: TableRow | None) -> Outcome:
        """Return whether a message can still be cancelled: not once a poller may be dispatching it."""
        if row is None:
            return Outcome.NOT_PENDING
        if (row.message.id, row.message.due) in self._held:
            return Outcome.DISPATCHING
        for wait in (*PAUSES_FOR_LEASE, 0.0):
            if await self._leased.acquire():
                return Outcome.DONE
            await asyncio.sleep(wait)
        return Outcome.DONE if row.message.due - self._clock.now() > FAR else Outcome.DISPATCHING

    async def _unlock(self, messages: Sequence[DelayedMessage]) -> None:
        for message in messages:
            self._held.pop((message.id, message.due), None)
        async with self._turn:
            await self._settle()

    async def _settle(self) -> None:
        """Let others dispatch once nothing is in hand here and nothing more is due."""
        if not self._held and self._drained and self._lease is not None:
            await self._lease.release()
            if self._places is not None:
                self._places.sweep()

    def _notify(self, due: datetime) -> None:
        for listener in tuple(self._listeners):
            listener(due)

    async def _look_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval)
            with contextlib.suppress(DelaylineError):  # the poller reports it
                if (due := await self.next_due()) is not None:
                    self._notify(due)

    async def _sweep_now_and_then(self) -> None:
        await asyncio.sleep(SWEEP_AFTER * (1 + random.random()))  # noqa: S311 - spreads load
        while True:
            with contextlib.suppress(DelaylineError, AzureError):  # the next time is soon enough
                await self.remove_orphans()
            await asyncio.sleep(SWEEP_EVERY)

    def _stop_watching(self) -> None:
        for task in (self._watch, self._sweep):
            if task is not None:
                task.cancel()
        self._watch = self._sweep = None


class DelayedTableDelivery(StoredDelivery):
    """Delayed delivery through the account's own table: StoredDelivery over an AzureDelayedTable, settings and all.

    Start it in as many processes as you like; only one dispatches at a time, and another takes over when it ends.
    """

    def __init__(
        self,
        account: str | AzureAccount,
        *,
        table_name: str | None = None,
        server_timeout: float | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(AzureDelayedTable(account, table_name=table_name, server_timeout=server_timeout), **settings)


def _refuse(transaction: Transaction | None) -> None:
    if transaction is not None:
        raise ConfigurationError("Azure Storage cannot take part in a transaction: send without transaction=")
