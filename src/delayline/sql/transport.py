"""The transport on SQL: queues are rows of one table beside a registry of their names."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, delete, func, insert, select

from delayline.checks import time_span
from delayline.errors import DispatchFailed, QueueNotFound
from delayline.message import Message
from delayline.sql import schema
from delayline.sql.database import Database, SqlTransaction
from delayline.sql.prepared import Prepared
from delayline.sql.schema import queued, queues
from delayline.transaction import TransactionMode
from delayline.transport import ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from sqlalchemy import Connection

    from delayline.sql.dialects.sqlite import Sqlite
    from delayline.sql.dialects.sqlite_claims import Claims
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation


ONE_SECOND: Final = timedelta(seconds=1)
BROWSE: Final = (
    select(queued.c.id, queued.c.headers, queued.c.body)
    .where(queued.c.queue == bindparam("name"))
    .order_by(queued.c.seq)
    .limit(bindparam("number"))
    .offset(bindparam("skip"))
)


class TransportStatements:
    """The statements on the way of every message."""

    def __init__(self, dialect: Sqlite) -> None:
        columns, sql, of_queue = queued.c, dialect.sql, queued.c.queue == bindparam("name")
        numbers = select(columns.seq).where(of_queue, columns.seq > bindparam("after")).order_by(columns.seq)
        by_number = columns.seq == bindparam("sequence")
        copies = select(columns.seq).where(of_queue, columns.id == bindparam("key")).order_by(columns.seq)
        kept = select(columns.id, columns.headers, columns.body)
        self.known = Prepared(select(queues.c.name).where(queues.c.name == bindparam("name")), sql, ["name"])
        self.put = Prepared(insert(queued), sql, ["queue", "id", "headers", "body"])
        self.numbers = Prepared(numbers.limit(bindparam("number")), sql, ["name", "after", "number"])
        self.claimed = Prepared(kept.where(by_number), sql, ["sequence"])
        self.delete = Prepared(delete(queued).where(by_number), sql, ["sequence"])
        self.count = Prepared(select(func.count()).where(of_queue), sql, ["name"])
        self.copies = Prepared(copies, sql, ["name", "key"])

    def must_exist(self, connection: Connection, queue: str) -> None:
        """Raise QueueNotFound unless the queue is registered."""
        if self.known.one(connection, queue) is None:
            raise QueueNotFound(queue)


class SqlTransport:
    """Moves messages between queues kept in a SQL database; `sqlite:///file.db` needs no server.

    poll_interval: how often a waiting receiver looks for messages by itself; wake-ups make it faster than that.
    """

    def __init__(self, url: str, *, poll_interval: timedelta = ONE_SECOND) -> None:
        self._database = Database.at(url)
        self._poll_interval = time_span("poll_interval", poll_interval)
        self._statements = TransportStatements(self._database.dialect)

    @property
    def transaction_domain(self) -> Hashable:
        """The database."""
        return self._database.domain

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """Every mode works."""
        return TransactionMode.TRANSACTION_SCOPE

    def transaction(self) -> SqlTransaction:
        """Return a transaction that a SqlDelayedMessageStore on the same database can join."""
        return self._database.transaction()

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the tables and register the queues."""
        await self._database.open()
        try:
            await self._database.write(partial(self._set_up, names=queues))
        finally:
            await self._database.close()

    async def start(self) -> None:
        """Open the database."""
        await self._database.open()

    async def stop(self) -> None:
        """Undo one `start`."""
        await self._database.close()

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Insert every message whose queue exists, in one transaction."""
        missing = await self._database.write(partial(self._put, operations=operations), transaction)
        reached = {operation.destination for operation in operations} - missing
        tell = partial(self._notify, reached)
        tell() if transaction is None else transaction.after_commit(tell)
        if missing:
            raise DispatchFailed(
                {
                    position: QueueNotFound(operation.destination)
                    for position, operation in enumerate(operations)
                    if operation.destination in missing
                }
            )

    async def receiver(self, queue: str) -> SqlReceiver:
        """Return a receiver on the queue."""
        await self._database.read(partial(self._statements.must_exist, queue=queue))
        return SqlReceiver(self._database, self._statements, queue, self._poll_interval)

    async def queues(self) -> Sequence[str]:
        """Return the names of all queues, in order."""
        query = select(queues.c.name).order_by(queues.c.name)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, hidden ones included."""

        def counted(connection: Connection) -> int:
            self._statements.must_exist(connection, queue)
            return int(self._statements.count.one(connection, queue))

        return await self._database.read(counted)

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, oldest first, hidden ones included."""

        def page(connection: Connection) -> list[Message]:
            self._statements.must_exist(connection, queue)
            rows = connection.execute(BROWSE, {"name": queue, "number": limit, "skip": offset})
            return [Message.from_encoded(row.id, row.headers, row.body) for row in rows]

        return await self._database.read(page)

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest copy of the message that nobody is handling."""
        free: list[int] = []

        def taken(connection: Connection) -> bool:
            copies = self._statements.copies.run(connection, queue, message_id).fetchall()
            free.extend(self._claims.take((number for (number,) in copies), 1))
            self._statements.delete.change_many(connection, [(number,) for number in free])
            return bool(free)

        release = partial(self._claims.release, free)
        if transaction is not None:
            transaction.after_end(release)
            return await self._database.write(taken, transaction)
        try:
            return await self._database.write(taken)
        finally:
            release()

    async def purge(self, queue: str) -> int:
        """Remove every message that nobody is handling."""
        free: list[int] = []

        def purged(connection: Connection) -> int:
            self._statements.must_exist(connection, queue)
            numbers = connection.execute(select(queued.c.seq).where(queued.c.queue == queue)).scalars().all()
            free.extend(self._claims.take(numbers, len(numbers)))
            self._statements.delete.change_many(connection, [(number,) for number in free])
            return len(free)

        try:
            return await self._database.write(purged)
        finally:
            self._claims.release(free)  # after the commit: before it a receiver would still see the rows

    @property
    def _claims(self) -> Claims:
        return self._database.dialect.claims(queued.name)

    def _set_up(self, connection: Connection, names: Sequence[str]) -> None:
        schema.set_up(connection)
        if names:
            register = self._database.dialect.insert_new(queues, "name")
            connection.execute(register, [{"name": name} for name in names])

    def _put(self, connection: Connection, operations: Sequence[TransportOperation]) -> set[str]:
        """Insert the messages whose queues exist and return the names of those that do not."""
        names = {operation.destination for operation in operations}
        missing = {name for name in names if self._statements.known.one(connection, name) is None}
        rows = [
            (operation.destination, operation.message.id, operation.message.encoded_headers, operation.message.body)
            for operation in operations
            if operation.destination not in missing
        ]
        self._statements.put.change_many(connection, rows)
        return missing

    def _notify(self, names: set[str]) -> None:
        for name in names:
            self._database.dialect.wake_ups.notify(queue_channel(name))


class SqlReceiver:
    """Takes messages from one queue; the claims of a process that ends are free again at once."""

    def __init__(
        self, database: Database, statements: TransportStatements, queue: str, poll_interval: timedelta
    ) -> None:
        self._database = database
        self._statements = statements
        self._queue = queue
        self._claims = database.dialect.claims(queued.name)
        self._poll_interval = poll_interval.total_seconds()
        self._news = asyncio.Event()
        self._stopped = False
        self._unsubscribe = database.dialect.wake_ups.subscribe(queue_channel(queue), lambda _: self._news.set())

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and claim up to `limit` of them."""
        while not self._stopped:
            self._news.clear()
            batch: list[ReceivedMessage] = []
            try:
                await self._database.read(partial(self._claim, limit=limit, batch=batch))
            except BaseException:
                self._claims.release(_number(received) for received in batch)  # nobody will ever know of them
                raise
            if batch:
                return batch
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._poll_interval)
        return []

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message, now or at the commit."""
        number = _number(received)
        delete = partial(self._statements.delete.change_many, rows=[(number,)])
        release = partial(self._claims.release, [number])
        deleted = await self._database.write(delete, transaction)
        release() if transaction is None else transaction.after_commit(release)
        return deleted == 1

    async def release(self, received: ReceivedMessage) -> None:
        """Give up the claim and wake receivers."""
        self._claims.release([_number(received)])
        self._database.dialect.wake_ups.notify(queue_channel(self._queue))

    async def stop(self) -> None:
        """End a waiting receive."""
        self._stopped = True
        self._unsubscribe()
        self._news.set()

    def _claim(self, connection: Connection, limit: int, batch: list[ReceivedMessage]) -> None:
        """Claim rows page by page until there are enough; read those that are still there."""
        after, size = 0, limit + self._claims.number_held
        while len(batch) < limit:
            page = self._statements.numbers.run(connection, self._queue, after, size).fetchall()
            for number in self._claims.take((number for (number,) in page), limit - len(batch)):
                row = self._statements.claimed.run(connection, number).fetchone()
                if row is None:
                    self._claims.release([number])
                else:
                    batch.append(ReceivedMessage(Message.from_encoded(*row), number))
            if len(page) < size:
                return
            after = page[-1][0]


def _number(received: ReceivedMessage) -> int:
    if not isinstance(received.receipt, int):
        raise TypeError(f"receipt {received.receipt!r} was not given by this receiver")
    return received.receipt


def queue_channel(queue: str) -> str:
    """Return the name under which writers tell a queue's receivers that something came."""
    return f"queue {queue}"
