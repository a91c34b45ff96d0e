"""Row claims on a server: rows locked by a transaction are skipped by all others.

Messages fetched in a transaction are locked by it. Messages fetched without one are leased for a minute, by the
server's clock, or until they are removed, counted or released.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import bindparam, func, select

from delayline.clock import EPOCH
from delayline.delayed.store import Outcome
from delayline.sql.prepared import LONGEST_LIST, Prepared
from delayline.sql.schema import in_order
from delayline.sql.server_clock import steady
from delayline.sql.statements import store_channel
from delayline.sql.watermark import FullLooks, Watermark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.message import DelayedMessage
    from delayline.sql.forwarding import Moved
    from delayline.sql.leases import Leases
    from delayline.sql.schema import QueueTables
    from delayline.sql.server import Server
    from delayline.sql.server_database import ServerDatabase
    from delayline.sql.statements import StoreStatements
    from delayline.transaction import Transaction

Result = TypeVar("Result")


class LockStatements:
    """How rows are locked, leased and read."""

    def __init__(self, statements: StoreStatements, dialect: Server, leases: Leases) -> None:
        table, sql = statements.table, dialect.sql
        columns, by_ids, by_id = table.c, dialect.one_of(table.c.id, "keys"), table.c.id == bindparam("key")
        size = func.length(columns.headers) + func.length(columns.body)
        is_due, since = columns.due <= bindparam("until"), columns.due >= bindparam("since")
        due = (
            select(columns.id, size, columns.due)
            .where(is_due, leases.free)
            .order_by(*in_order(table))
            .limit(bindparam("number"))
        )
        due = due.with_for_update(skip_locked=True)
        next_due = select(func.min(columns.due), dialect.in_seconds(0))
        one = select(columns.id).where(by_id, leases.free).with_for_update(skip_locked=True)
        read = statements.waiting.where(by_ids).order_by(*in_order(table))
        self.due = Prepared(due, sql, ["until", "number"])
        self.due_since = Prepared(due.where(since), sql, ["until", "since", "number"])
        self.next_due = Prepared(next_due, sql, [])
        self.next_due_since = Prepared(next_due.where(since), sql, ["since"])
        self.one = Prepared(one, sql, ["key"])
        exists = select(columns.id).where(by_id).with_hint(table, "WITH (READCOMMITTEDLOCK)", "mssql")  # waits
        self.exists = Prepared(exists, sql, ["key"])
        self.read = Prepared(read if leases.in_row else read.where(leases.free), sql, ["keys"])


class ServerRowClaims:
    """The rows of one store's table on a server."""

    def __init__(self, database: ServerDatabase, statements: StoreStatements, tables: QueueTables) -> None:
        self._database = database
        self._statements = statements
        self._leases = database.dialect.leases(statements, tables)
        self._locks = LockStatements(statements, database.dialect, self._leases)
        self._forwarding = database.dialect.forwarding(statements, tables)
        self._from_due = database.dialect.from_due
        self._channel = store_channel(statements.table)
        database.notifications.knows(self._channel, statements.table.schema)
        self._leased: set[str] = set()
        self._watermark = Watermark()
        self._full_looks: FullLooks | None = None
        self._held: list[datetime] = []
        """The earliest due time of each transaction with messages of ours: undone, they wait again."""

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages."""
        fetch = partial(self._fetch, until=until, limit=limit, max_bytes=max_bytes, leasing=transaction is None)
        with self._looking():
            messages = await self._database.write(fetch, transaction)
        if transaction is None:
            self._leased.update(message.id for message in messages)
        elif messages:
            first = messages[0].due
            self._held.append(first)
            self._watermark.lower(first)  # another look may have skipped these rows and raised it
            transaction.after_end(lambda: self._held.remove(first))
        return messages

    async def next_due(self) -> Any:  # noqa: ANN401 - what the due column keeps
        """Return the earliest due time of any message; others know from then on how long this process sleeps."""
        with self._looking():
            return await self._database.read(self._next_due)

    def look_fully(self, found: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `found` with the due time of each message found below the watermark; return how to stop."""
        self._full_looks = looks = FullLooks(self._watermark, self._overlooked, found)

        def stop() -> None:
            looks.stop()
            if self._full_looks is looks:
                self._full_looks = None

        return stop

    def stored(self, due: datetime) -> None:
        """Look there again."""
        if due == EPOCH:  # EPOCH: the notification had no due time
            self._watermark.forget()
        else:
            self._watermark.lower(due)

    async def change(
        self,
        work: Callable[[Connection], Result],
        messages: Sequence[DelayedMessage],
        transaction: Transaction | None = None,
        *,
        one_statement: bool = True,
    ) -> Result:
        """Run `work` on the messages' rows; it ends the leases on them."""
        leased = [message.id for message in messages if message.id in self._leased]
        one_statement = one_statement and len(messages) <= LONGEST_LIST
        if leased and not self._leases.in_row:
            work, one_statement = partial(self._and_end, work, leased), False
        result = await self._database.write(work, transaction, one_statement=one_statement)
        for message in messages:
            self._watermark.lower(message.due)
        self._leased.difference_update(message.id for message in messages)
        return result

    async def manage(self, message_id: str, work: Callable[[Connection], object]) -> Outcome:
        """Run `work` unless the message is locked or leased."""
        return await self._database.write(partial(self._if_free, message_id, work))

    async def forward(self, until: object, limit: int, *, max_bytes: int) -> Moved:
        """Move due messages to their queues inside the server."""
        forward = partial(self._forward, until=until, limit=limit, max_bytes=max_bytes)
        with self._looking():
            moved = await self._database.write(forward, one_statement=self._forwarding.one_statement)
        return moved if moved.next_due is not None else replace(moved, next_due=await self.next_due())

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the leases on the messages."""
        await self._release({message.id for message in messages} & self._leased)
        for message in messages:
            self._watermark.lower(message.due)

    async def close(self) -> None:
        """Give up every lease."""
        await self._release(self._leased)

    async def _release(self, ids: set[str]) -> None:
        if ids:
            await self._database.write(partial(self._leases.end, ids=list(ids)))
            self._leased -= ids

    def _fetch(
        self, connection: Connection, *, until: object, limit: int, max_bytes: int, leasing: bool
    ) -> Sequence[DelayedMessage]:
        chosen: list[str] = []
        for message_id, size, _ in self._lock_due(connection, until, limit):
            max_bytes -= size
            if chosen and max_bytes < 0:
                break
            chosen.append(message_id)
        if not chosen:
            return []
        rows = self._locks.read.rows_each(connection, keys=chosen)
        if leasing:
            taken = set(self._leases.take(connection, [row[0] for row in rows]))
            rows = [row for row in rows if row[0] in taken]
        return [self._statements.message_of(row) for row in rows]

    def _and_end(self, work: Callable[[Connection], Result], leased: Sequence[str], connection: Connection) -> Result:
        result = work(connection)
        self._leases.end(connection, leased)
        return result

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Schedule a full look after one from the watermark on."""
        try:
            yield
        finally:
            if self._full_looks is not None:
                self._full_looks.want()

    def _lock_due(self, connection: Connection, until: object, limit: int) -> Sequence[Any]:
        """Lock due rows from the watermark on; it rises to the first: its lock keeps other transactions off."""
        locks, held = self._locks, list(self._held)

        def look(since: object | None) -> tuple[Sequence[Any], datetime | None]:
            if since is None:
                rows = locks.due.rows(connection, until, limit)
            else:
                rows = locks.due_since.rows(connection, until, since, limit)
            return rows, min([self._from_due(rows[0][2]), *held]) if rows else None

        return self._from_watermark(look)

    def _forward(self, connection: Connection, *, until: object, limit: int, max_bytes: int) -> Moved:
        run = partial(self._forwarding.run, connection, until, limit=limit, max_bytes=max_bytes)

        def look(since: object | None) -> tuple[Moved, datetime | None]:
            moved = run(since=since)
            return moved, None if moved.reached is None else self._from_due(moved.reached)

        return self._from_watermark(look)

    async def _overlooked(self) -> datetime | None:
        """Return the earliest due time of all messages if it is below the watermark, which is then lowered to it."""

        def look(connection: Connection) -> datetime | None:
            look = partial(self._earliest, connection)
            due = self._from_watermark(lambda since: (look(since), None), full=True)
            return None if due is None else self._from_due(due)

        due = await self._database.read(look)
        return due if due is not None and self._watermark.lower(due) else None

    def _next_due(self, connection: Connection) -> Any:  # noqa: ANN401
        """Look; where others have to know how long we sleep tell them, and look again: they may have come between."""
        due = self._look(connection)
        if self._database.notifications.sleeps(connection, self._channel, None if due is None else self._from_due(due)):
            due = self._look(connection)
        return due

    def _look(self, connection: Connection) -> Any:  # noqa: ANN401
        return self._from_watermark(lambda since: (self._earliest(connection, since), None))

    def _earliest(self, connection: Connection, since: object | None) -> Any:  # noqa: ANN401
        locks, requested = self._locks, steady()
        rows = locks.next_due.rows(connection) if since is None else locks.next_due_since.rows(connection, since)
        ((due, now),) = rows
        self._database.clock.answered(self._from_due(now), requested)
        return due

    def _from_watermark(
        self, run: Callable[[object | None], tuple[Result, datetime | None]], *, full: bool = False
    ) -> Result:
        """Run a query from the watermark on, or a full one; it returns its findings and how far it looked."""
        look = self._watermark.begin(full=full or (self._full_looks is None and self._watermark.is_unchecked))
        try:
            found, reached = run(None if look.since is None else self._database.dialect.to_due(look.since))
        except BaseException:
            self._watermark.abandon(look)
            raise
        self._watermark.end(look, reached)
        return found

    def _if_free(self, message_id: str, work: Callable[[Connection], object], connection: Connection) -> Outcome:
        if self._locks.one.one(connection, message_id) is not None:
            work(connection)
            return Outcome.DONE
        exists = self._locks.exists.one(connection, message_id) is not None
        return Outcome.DISPATCHING if exists else Outcome.NOT_PENDING
