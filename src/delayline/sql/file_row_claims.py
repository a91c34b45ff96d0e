"""Row claims on SQLite, whose only lock is on the whole file: claims are kept beside the file.

Messages fetched in a transaction are locked by it. Messages fetched without one are claimed by this process until they
are removed, counted or released, or the process ends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import bindparam, select

from delayline.delayed.store import Outcome
from delayline.sql.forwarding import FileForwarding, Moved
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.message import DelayedMessage
    from delayline.sql.dialects.sqlite_claims import FileClaims
    from delayline.sql.file_database import FileDatabase
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements
    from delayline.transaction import Transaction

Result = TypeVar("Result")


class NumberStatements:
    """The statements by row number, which SQLite's tables have."""

    def __init__(self, statements: StoreStatements) -> None:
        columns, sql = statements.table.c, statements.dialect.sql
        is_due = columns.due <= bindparam("until")
        numbers = select(columns.seq).where(is_due).order_by(*in_order(statements.table))
        numbers = numbers.limit(bindparam("number")).offset(bindparam("skip"))
        claimed = statements.waiting.where(columns.seq == bindparam("sequence"), is_due)
        self.due_numbers = Prepared(numbers, sql, ["until", "number", "skip"])
        self.claimed_row = Prepared(claimed, sql, ["sequence", "until"])
        self.number = Prepared(select(columns.seq).where(columns.id == bindparam("key")), sql, ["key"])


class FileRowClaims:
    """The rows of one store's table in an SQLite file."""

    def __init__(self, database: FileDatabase, statements: StoreStatements, tables: QueueTables) -> None:
        self._database = database
        self._statements = statements
        self._numbers = NumberStatements(statements)
        self._claims: FileClaims = database.claims(statements.table.name)
        self._claimed: dict[str, int] = {}
        self._forwarding = FileForwarding(statements.table, tables, database.dialect)

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages."""
        claimed: dict[str, int] = {}
        if transaction is not None:
            fetch = partial(self._fetch_unclaimed, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
            transaction.after_end(lambda: self._claims.release(claimed.values()))
            return await self._database.write(fetch, transaction)
        # Under the write lock: messages fetched by another transaction are locked by it until it ends.
        claim = partial(self._claim_due, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
        try:
            batch = await self._database.write(claim)
        except BaseException:
            self._claims.release(claimed.values())  # the caller will never receive them
            raise
        self._claimed |= claimed
        return batch

    async def next_due(self) -> int | None:
        """Return the earliest due time of any message."""
        due: int | None = await self._database.read(self._statements.next_due.one)
        return due

    def stored(self, due: datetime) -> None:
        """Nothing to know: every look is at the whole table."""

    def look_fully(self, found: Callable[[datetime], None]) -> Callable[[], None]:
        """Do nothing: every look is a full one."""
        del found
        return lambda: None

    async def change(
        self,
        work: Callable[[Connection], Result],
        messages: Sequence[DelayedMessage],
        transaction: Transaction | None = None,
        *,
        one_statement: bool = True,
    ) -> Result:
        """Run `work` on the messages' rows; without a transaction it ends the claims on them."""
        result = await self._database.write(work, transaction, one_statement=one_statement)
        if transaction is None:
            self._unclaim(messages)
        return result

    async def manage(self, message_id: str, work: Callable[[Connection], object]) -> Outcome:
        """Run `work` unless another process has claimed the message."""
        taken: list[int] = []
        try:
            return await self._database.write(partial(self._if_unclaimed, message_id, work, taken))
        finally:
            self._claims.release(taken)  # after the commit: before it a poller would still see the row

    async def forward(self, until: object, limit: int, *, max_bytes: int) -> Moved:
        """Move due messages to their queues, unless messages are claimed."""
        return await self._database.write(partial(self._forward, until=until, limit=limit, max_bytes=max_bytes))

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the claims on the messages."""
        self._unclaim(messages)

    async def close(self) -> None:
        """Give up every claim."""
        self._claims.release(self._claimed.values())
        self._claimed.clear()

    def _forward(self, connection: Connection, *, until: object, limit: int, max_bytes: int) -> Moved:
        moved = Moved(0, set())
        if self._claims.nobody_holds_any():
            moved = self._forwarding.run(connection, until, limit=limit, max_bytes=max_bytes)
        return replace(moved, next_due=self._statements.next_due.one(connection))

    def _fetch_unclaimed(
        self, connection: Connection, *, until: object, limit: int, max_bytes: int, claimed: dict[str, int]
    ) -> Sequence[DelayedMessage]:
        """Fetch under the write lock, which suffices unless messages are claimed without a transaction."""
        if self._claims.nobody_holds_any():
            return self._statements.bounded(connection, until, limit=limit, max_bytes=max_bytes)
        return self._claim_due(connection, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)

    def _claim_due(
        self, connection: Connection, *, until: object, limit: int, max_bytes: int, claimed: dict[str, int]
    ) -> Sequence[DelayedMessage]:
        """Claim due rows page by page until there are enough; read those that are still there and still due."""
        batch: list[DelayedMessage] = []
        statements, size, skip = self._statements, 0, 0
        while len(batch) < limit and size < max_bytes:
            page = self._numbers.due_numbers.rows(connection, until, limit, skip)
            for (number,) in page:
                if len(batch) == limit or size >= max_bytes:
                    break
                if self._claims.take([number], 1):
                    row = self._numbers.claimed_row.run(connection, number, until).fetchone()
                    if row is None or (batch and size + len(row[3]) + len(row[4]) > max_bytes):
                        self._claims.release([number])
                        size = size if row is None else max_bytes
                        continue
                    size += len(row[3]) + len(row[4])
                    claimed[row[0]] = number
                    batch.append(statements.message_of(row))
            if len(page) < limit:
                break
            skip += limit
        return batch

    def _unclaim(self, messages: Iterable[DelayedMessage]) -> None:
        if self._claimed:
            numbers = [self._claimed.pop(message.id, None) for message in messages]
            self._claims.release(number for number in numbers if number is not None)

    def _if_unclaimed(
        self, message_id: str, work: Callable[[Connection], object], taken: list[int], connection: Connection
    ) -> Outcome:
        number = self._numbers.number.one(connection, message_id)
        if number is None:
            return Outcome.NOT_PENDING
        taken += self._claims.take([number], 1)
        if not taken:
            return Outcome.DISPATCHING
        work(connection)
        return Outcome.DONE
