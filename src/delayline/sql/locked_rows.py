"""Who may touch which row, on a server: whoever's transaction has locked it; everybody else skips it.

Messages fetched in a transaction are locked by it. Those fetched without one are leased for a minute, by the server's
clock, or until they are removed, counted or released.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy import bindparam, func, null, or_, select, update

from delayline.delayed.store import Outcome
from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection

    from delayline.message import DelayedMessage
    from delayline.sql.forwarding import Forwarding, Moved
    from delayline.sql.server import Server
    from delayline.sql.server_database import ServerDatabase
    from delayline.sql.statements import StoreStatements
    from delayline.transaction import Transaction

Result = TypeVar("Result")
LEASE: Final = 60  # seconds; a dispatch takes less


class LockStatements:
    """How rows are locked, leased and read."""

    def __init__(self, statements: StoreStatements, dialect: Server) -> None:
        table, sql = statements.table, dialect.sql
        columns, by_ids, by_id = table.c, dialect.one_of(table.c.id, "keys"), table.c.id == bindparam("key")
        in_order = (columns.due, columns.seq)
        free = or_(columns.leased_until.is_(None), columns.leased_until < dialect.in_seconds(0))
        due = select(columns.id, func.length(columns.headers) + func.length(columns.body)).where(free)
        due = due.where(columns.due <= bindparam("until")).order_by(*in_order).limit(bindparam("number"))
        one = select(columns.id).where(by_id, free).with_for_update(skip_locked=True)
        lease = update(table).where(by_ids).values(leased_until=dialect.in_seconds(LEASE))
        self.due = Prepared(due.with_for_update(skip_locked=True), sql, ["until", "number"])
        self.one = Prepared(one, sql, ["key"])
        self.exists = Prepared(select(columns.id).where(by_id), sql, ["key"])
        self.read = Prepared(statements.waiting.where(by_ids).order_by(*in_order), sql, ["keys"])
        self.lease = Prepared(lease, sql, ["keys"])
        self.release = Prepared(update(table).where(by_ids).values(leased_until=null()), sql, ["keys"])


class LockedRows:
    """The rows of one store's table on a server."""

    def __init__(self, database: ServerDatabase, statements: StoreStatements, forwarding: Forwarding) -> None:
        self._database = database
        self._statements = statements
        self._locks = LockStatements(statements, database.dialect)
        self._forwarding = forwarding
        self._leased: set[str] = set()

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages."""
        fetch = partial(self._fetch, until=until, limit=limit, max_bytes=max_bytes, leasing=transaction is None)
        messages = await self._database.write(fetch, transaction)
        if transaction is None:
            self._leased.update(message.id for message in messages)
        return messages

    async def change(
        self,
        work: Callable[[Connection], Result],
        messages: Sequence[DelayedMessage],
        transaction: Transaction | None = None,
    ) -> Result:
        """Run `work` on the messages' rows; it ends the leases on them."""
        result = await self._database.write(work, transaction, one_statement=True)
        self._leased.difference_update(message.id for message in messages)
        return result

    async def manage(self, message_id: str, work: Callable[[Connection], object]) -> Outcome:
        """Run `work` unless somebody has the message."""
        return await self._database.write(partial(self._if_free, message_id, work))

    async def forward(self, until: object, limit: int, *, max_bytes: int) -> Moved:
        """Move due messages to their queues inside the server."""
        moved = await self._database.write(
            partial(self._forwarding.run, until=until, limit=limit, max_bytes=max_bytes),
            one_statement=self._forwarding.one_statement,
        )
        if moved.next_due is None:
            moved = replace(moved, next_due=await self._database.read(self._statements.next_due.one))
        return moved

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the leases on the messages."""
        await self._release({message.id for message in messages} & self._leased)

    async def close(self) -> None:
        """Give up every lease."""
        await self._release(self._leased)

    async def _release(self, ids: set[str]) -> None:
        if ids:
            await self._database.write(partial(self._locks.release.change_each, keys=list(ids)))
            self._leased -= ids

    def _fetch(
        self, connection: Connection, *, until: object, limit: int, max_bytes: int, leasing: bool
    ) -> Sequence[DelayedMessage]:
        chosen: list[str] = []
        for message_id, size in self._locks.due.rows(connection, until, limit):
            max_bytes -= size
            if chosen and max_bytes < 0:
                break
            chosen.append(message_id)
        if not chosen:
            return []
        if leasing:
            self._locks.lease.change(connection, chosen)
        return [self._statements.message_of(row) for row in self._locks.read.rows(connection, chosen)]

    def _if_free(self, message_id: str, work: Callable[[Connection], object], connection: Connection) -> Outcome:
        if self._locks.one.one(connection, message_id) is not None:
            work(connection)
            return Outcome.DONE
        exists = self._locks.exists.one(connection, message_id) is not None
        return Outcome.DISPATCHING if exists else Outcome.NOT_PENDING
