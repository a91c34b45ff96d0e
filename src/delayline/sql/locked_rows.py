"""Who may touch which row, on a server: whoever's transaction has locked it; everybody else skips it.

Messages fetched in a transaction are locked by it. For those fetched without one a transaction of the store's own
stays open, until they are removed, counted or released, or the connection ends with its process.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import bindparam, func, select

from delayline.delayed.store import Outcome
from delayline.sql.forwarding import Moved
from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection

    from delayline.message import DelayedMessage
    from delayline.sql.forwarding import Forwarding
    from delayline.sql.server_database import ServerDatabase
    from delayline.sql.statements import StoreStatements
    from delayline.sql.transactions import SqlTransaction
    from delayline.transaction import Transaction

Result = TypeVar("Result")


class LockStatements:
    """How rows are locked and read."""

    def __init__(self, statements: StoreStatements) -> None:
        columns, dialect = statements.table.c, statements.dialect
        in_order, by_ids = (columns.due, columns.seq), dialect.one_of(columns.id, "keys")
        due = select(columns.id, func.length(columns.headers) + func.length(columns.body))
        due = due.where(columns.due <= bindparam("until")).order_by(*in_order).limit(bindparam("number"))
        some = select(columns.id).where(by_ids)
        self.due = Prepared(due.with_for_update(skip_locked=True), dialect.sql, ["until", "number"])
        self.some = Prepared(some.with_for_update(skip_locked=True), dialect.sql, ["keys"])
        self.read = Prepared(statements.waiting.where(by_ids).order_by(*in_order), dialect.sql, ["keys"])


class LockedRows:
    """The rows of one store's table on a server."""

    def __init__(self, database: ServerDatabase, statements: StoreStatements, forwarding: Forwarding) -> None:
        self._database = database
        self._statements = statements
        self._locks = LockStatements(statements)
        self._forwarding = forwarding
        self._batches: list[LockedBatch] = []

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages."""
        fetch = partial(self._fetch, until=until, limit=limit, max_bytes=max_bytes)
        if transaction is not None:
            return await self._database.write(fetch, transaction)
        locked = LockedBatch(self._database.transaction())
        try:
            messages = await locked.transaction.run(fetch)
        except BaseException:
            await locked.end(committing=False)
            raise
        locked.ids = {message.id for message in messages}
        if messages:
            self._batches.append(locked)
        else:
            await locked.end(committing=False)
        return messages

    async def change(
        self,
        work: Callable[[Connection], Result],
        messages: Sequence[DelayedMessage],
        transaction: Transaction | None = None,
    ) -> Result:
        """Run `work` on the messages' rows; without a transaction it ends the locks on them."""
        ids = {message.id for message in messages}
        batches = [batch for batch in self._batches if batch.ids & ids]
        if transaction is not None or not batches:
            return await self._database.write(work, transaction, one_statement=True)
        locked, *others = batches
        for other in others:  # one transaction cannot have the other's locks
            await self._end(other, committing=False, but=other.ids - ids)
        try:
            result = await locked.transaction.run(work)
        except BaseException:
            await self._end(locked, committing=False)
            raise
        await self._end(locked, committing=True, but=locked.ids - ids)
        return result

    async def manage(self, message_id: str, work: Callable[[Connection], object]) -> Outcome:
        """Run `work` unless somebody has the message."""
        return await self._database.write(partial(self._if_unlocked, message_id, work))

    async def forward(self, until: object, limit: int, *, max_bytes: int) -> Moved:
        """Move due messages to their queues inside the server."""
        return await self._database.write(
            partial(self._forwarding.run, until=until, limit=limit, max_bytes=max_bytes),
            one_statement=self._forwarding.one_statement,
        )

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the locks on the messages."""
        ids = {message.id for message in messages}
        for locked in [batch for batch in self._batches if batch.ids & ids]:
            await self._end(locked, committing=False, but=locked.ids - ids)

    async def close(self) -> None:
        """Give up every lock."""
        for locked in list(self._batches):
            await self._end(locked, committing=False)

    async def _end(self, locked: LockedBatch, *, committing: bool, but: set[str] | None = None) -> None:
        """End the batch's transaction; `but` these go on in a new one, unless somebody is quicker."""
        self._batches.remove(locked)
        await locked.end(committing=committing)
        if but:
            rest = LockedBatch(self._database.transaction())
            again = list(but)
            found = await rest.transaction.run(lambda connection: self._locks.some.rows(connection, again))
            rest.ids = {message_id for (message_id,) in found}
            self._batches.append(rest)

    def _fetch(self, connection: Connection, *, until: object, limit: int, max_bytes: int) -> Sequence[DelayedMessage]:
        chosen: list[str] = []
        for message_id, size in self._locks.due.rows(connection, until, limit):
            max_bytes -= size
            if chosen and max_bytes < 0:
                break
            chosen.append(message_id)
        if not chosen:
            return []
        return [self._statements.message_of(row) for row in self._locks.read.rows(connection, chosen)]

    def _if_unlocked(self, message_id: str, work: Callable[[Connection], object], connection: Connection) -> Outcome:
        if self._locks.some.one(connection, [message_id]) is not None:
            work(connection)
            return Outcome.DONE
        exists = self._statements.number.one(connection, message_id) is not None
        return Outcome.DISPATCHING if exists else Outcome.NOT_PENDING


class LockedBatch:
    """Messages fetched without a transaction, and the one that holds their locks."""

    def __init__(self, transaction: SqlTransaction) -> None:
        self.transaction = transaction
        self.ids: set[str] = set()

    async def end(self, *, committing: bool) -> None:
        """Commit or roll back."""
        if committing:
            async with self.transaction:
                return
        with contextlib.suppress(_Undone):
            async with self.transaction:
                raise _Undone


class _Undone(Exception):
    """Rolls a transaction back."""
