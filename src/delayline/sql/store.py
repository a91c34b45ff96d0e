"""The delayed message store on SQL: one table an endpoint, every capability."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.checks import time_span
from delayline.clock import from_microseconds, to_microseconds
from delayline.delayed.store import DueCount, Forwarded, Outcome
from delayline.errors import ConfigurationError, NotStarted
from delayline.message import in_utc
from delayline.sql import schema
from delayline.sql.database import Database, SqlTransaction
from delayline.sql.statements import StoreStatements, bounded, message_of, row_of
from delayline.sql.transport import SqlTransport, queue_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.message import DelayedMessage
    from delayline.sql.dialects.sqlite_claims import Claims
    from delayline.transaction import Transaction, TransactionMode

MICROSECOND: Final = timedelta(microseconds=1)


class SqlDelayedMessageStore:
    """Keeps delayed messages in a table of a SQL database; `sqlite:///file.db` needs no server.

    table_name: `{endpoint}.timeouts` when left out (reference 0.1, D1). A store belongs to one endpoint at a time.
    Messages fetched in a transaction are locked by it; those fetched without one are claimed by this process until
    they are removed, counted, released, or the process ends.
    """

    def __init__(self, url: str, *, table_name: str | None = None) -> None:
        if table_name is not None and (not table_name or table_name in schema.shared.tables):
            raise ConfigurationError(f"table_name={table_name!r} is empty or one of delayline's own: choose another")
        self._database = Database.at(url)
        self._table_name = table_name
        self._open: StoreStatements | None = None
        self._claimed: dict[str, int] = {}

    @property
    def transaction_domain(self) -> Hashable:
        """The database."""
        return self._database.domain

    def transaction(self) -> SqlTransaction:
        """Return a transaction that a SqlTransport on the same database can join."""
        return self._database.transaction()

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create the endpoint's table. Raises NewerSchema, BackendUnusable or BackendUnavailable."""
        table = schema.timeouts_table(self._name(endpoint_name))
        await self._database.open()
        try:
            await self._database.write(lambda connection: schema.set_up(connection, table))
        finally:
            await self._database.close()

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the database and check that the endpoint's table is there."""
        del mode
        if self._open is not None:
            return
        table = schema.timeouts_table(self._name(endpoint_name))
        await self._database.open()
        try:
            await self._database.read(lambda connection: schema.check(connection, table))
        except BaseException:
            await self._database.close()
            raise
        self._open = StoreStatements(table, self._database.dialect)

    async def close(self) -> None:
        """Release what is claimed and disconnect. Idempotent."""
        if self._open is not None:
            self._claims.release(self._claimed.values())
            self._claimed.clear()
            self._open = None
            await self._database.close()

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message until it is due."""
        await self.store_many([message], transaction)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Keep the messages, all in one transaction."""
        if not messages:
            return
        rows = [row_of(message) for message in messages]
        await self._database.write(partial(self._statements.insert.change_many, rows=rows), transaction)
        self._notify(min(row[2] for row in rows), transaction)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        """Lock and return the earliest due message."""
        batch = await self.fetch_due(at, 1, max_bytes=1, transaction=transaction)
        return batch[0] if batch else None

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return the earliest due messages."""
        until = to_microseconds(at)
        if transaction is None:
            return await self._claim(until, limit, max_bytes)
        claimed: dict[str, int] = {}
        fetch = partial(self._fetch_unclaimed, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
        transaction.after_end(lambda: self._claims.release(claimed.values()))
        return await self._database.write(fetch, transaction)

    def forwards_to(self, transport: object) -> bool:
        """Tell whether the transport keeps its queues in this store's database."""
        return isinstance(transport, SqlTransport) and transport.transaction_domain == self.transaction_domain

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Move due messages to their queues inside the database."""
        forward = partial(self._forward, until=to_microseconds(at), limit=limit, max_bytes=max_bytes)
        number, names, next_due = await self._database.write(forward)
        for name in names:
            self._database.dialect.wake_ups.notify(queue_channel(name))
        return Forwarded(number, None if next_due is None else from_microseconds(next_due))

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message."""
        due = await self._database.read(self._statements.next_due.one)
        return None if due is None else from_microseconds(due)

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message."""
        return await self.remove_many([message], transaction) == 1

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages."""
        ids = [(message.message.id,) for message in messages]
        removed = await self._database.write(partial(self._statements.delete.change_many, rows=ids), transaction)
        if transaction is None:
            self._unclaim(messages)
        return removed

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Count a failure and unlock."""
        count = self._statements.count_failure
        counted = await self._database.write(lambda connection: count.change(connection, message.id))
        self._unclaim([message])
        return counted == 1

    async def retry_many(self, messages: Sequence[DelayedMessage], at: datetime) -> int:
        """Count failures, move the due times, unlock."""
        due = to_microseconds(at)
        rows = [(due, message.id) for message in messages]
        counted = await self._database.write(partial(self._statements.retry.change_many, rows=rows))
        self._unclaim(messages)
        self._notify(due, None)
        return counted

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the claims."""
        self._unclaim(messages)

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` with the earliest due time after each commit, by whichever process."""
        return self._database.dialect.wake_ups.subscribe(self._channel, lambda due: callback(from_microseconds(due)))

    async def cancel(self, message_id: str) -> Outcome:
        """Delete a waiting message."""
        deletion = self._statements.delete
        return await self._manage(message_id, lambda connection: deletion.change(connection, message_id))

    async def reschedule(self, message_id: str, due: datetime) -> Outcome:
        """Move a waiting message to another due time."""
        at, move = to_microseconds(in_utc(due)), self._statements.move
        outcome = await self._manage(message_id, lambda connection: move.change(connection, at, message_id))
        if outcome is Outcome.DONE:
            self._notify(at, None)
        return outcome

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return what waits, earliest due first."""
        columns = self._statements.table.c
        query = self._statements.waiting.order_by(columns.due, columns.seq).limit(limit).offset(offset)
        if destination is not None:
            query = query.where(columns.destination == destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [message_of(row) for row in rows]

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count what waits by bucket and destination."""
        query = self._statements.by_due(time_span("bucket", bucket) // MICROSECOND)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [DueCount(from_microseconds(start), destination, number) for start, destination, number in rows]

    @property
    def _statements(self) -> StoreStatements:
        if self._open is None:
            raise NotStarted(
                "the delayed message store is not open: start its endpoint, or await initialize(...) first"
            )
        return self._open

    @property
    def _channel(self) -> str:
        return f"timeouts {self._statements.table.name}"

    @property
    def _claims(self) -> Claims:
        return self._database.dialect.claims(self._statements.table.name)

    def _name(self, endpoint_name: str) -> str:
        return self._table_name or f"{endpoint_name}.timeouts"

    def _notify(self, due: int, transaction: Transaction | None) -> None:
        tell = partial(self._database.dialect.wake_ups.notify, self._channel, due)
        tell() if transaction is None else transaction.after_commit(tell)

    async def _claim(self, until: int, limit: int, max_bytes: int) -> Sequence[DelayedMessage]:
        """Claim in the write lane: what somebody's transaction has fetched is locked by it until it ends."""
        claimed: dict[str, int] = {}
        claim = partial(self._claim_due, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
        try:
            batch = await self._database.write(claim)
        except BaseException:
            self._claims.release(claimed.values())  # nobody will ever know that we have them
            raise
        self._claimed |= claimed
        return batch

    def _forward(
        self, connection: Connection, *, until: int, limit: int, max_bytes: int
    ) -> tuple[int, set[str], int | None]:
        number, names = 0, set[str]()
        if self._claims.nobody_holds_any():
            number, names = self._statements.forwarding.run(connection, until, limit=limit, max_bytes=max_bytes)
        return number, names, self._statements.next_due.one(connection)

    def _fetch_unclaimed(
        self, connection: Connection, *, until: int, limit: int, max_bytes: int, claimed: dict[str, int]
    ) -> Sequence[DelayedMessage]:
        """Fetch under the write lock, which is lock enough unless somebody holds rows without a transaction."""
        if self._claims.nobody_holds_any():
            return bounded(connection, self._statements.due, until, limit=limit, max_bytes=max_bytes)
        return self._claim_due(connection, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)

    def _claim_due(
        self, connection: Connection, *, until: int, limit: int, max_bytes: int, claimed: dict[str, int]
    ) -> Sequence[DelayedMessage]:
        """Claim due rows page by page until there are enough; read those that are still there and still due."""
        batch: list[DelayedMessage] = []
        statements, size, skip = self._statements, 0, 0
        while len(batch) < limit and size < max_bytes:
            page = statements.due_numbers.run(connection, until, limit, skip).fetchall()
            for (number,) in page:
                if len(batch) == limit or size >= max_bytes:
                    break
                if self._claims.take([number], 1):
                    row = statements.claimed.run(connection, number, until).fetchone()
                    if row is None or (batch and size + len(row[3]) + len(row[4]) > max_bytes):
                        self._claims.release([number])
                        size = size if row is None else max_bytes
                        continue
                    size += len(row[3]) + len(row[4])
                    claimed[row[0]] = number
                    batch.append(message_of(row))
            if len(page) < limit:
                break
            skip += limit
        return batch

    def _unclaim(self, messages: Iterable[DelayedMessage]) -> None:
        if self._claimed:
            numbers = [self._claimed.pop(message.id, None) for message in messages]
            self._claims.release(number for number in numbers if number is not None)

    async def _manage(self, message_id: str, work: Callable[[Connection], object]) -> Outcome:
        taken: list[int] = []
        try:
            return await self._database.write(partial(self._if_unclaimed, message_id, work, taken))
        finally:
            self._claims.release(taken)  # after the commit: before it a poller would still see the row

    def _if_unclaimed(
        self, message_id: str, work: Callable[[Connection], object], taken: list[int], connection: Connection
    ) -> Outcome:
        number = self._statements.number.one(connection, message_id)
        if number is None:
            return Outcome.NOT_PENDING
        taken += self._claims.take([number], 1)
        if not taken:
            return Outcome.DISPATCHING
        work(connection)
        return Outcome.DONE
