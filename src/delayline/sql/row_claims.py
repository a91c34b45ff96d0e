"""Row claims: the locks and leases of a store's messages.

On a server, messages fetched in a transaction are locked by it; others skip the locked rows. Messages fetched without
a transaction are leased for a minute, by the server's clock, or until they are removed, counted or released. SQLite's
only lock is on the whole file: there, claims are kept beside the file, until the messages are removed, counted or
released, or the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from sqlalchemy import bindparam, func, select

from delayline.clock import EPOCH
from delayline.delayed.store import Outcome
from delayline.sql.fair_groups import OF_TURN, DueGroups, fair_by_of, in_turn, in_turns, served_by
from delayline.sql.prepared import LONGEST_LIST, Prepared
from delayline.sql.schema import in_order
from delayline.sql.server_clock import steady
from delayline.sql.server_database import ServerDatabase
from delayline.sql.statements import WAITING, store_channel
from delayline.sql.watermark import FullLooks, Seen, Watermark
from delayline.transaction import again_after_conflicts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.delayed.fairness import Turn
    from delayline.message import DelayedMessage
    from delayline.sql.claims import LockFree
    from delayline.sql.claims_in_statements import ClaimsInStatements
    from delayline.sql.database import Database
    from delayline.sql.file_database import FileDatabase
    from delayline.sql.moves import Moved
    from delayline.sql.schema import QueueTables
    from delayline.sql.server import Leases, Server
    from delayline.sql.statements import StoreStatements
    from delayline.sql.watermark import DueQuery
    from delayline.transaction import Transaction


Result = TypeVar("Result")
#: How long a change in a transaction waits for the lock of another, in seconds, and how often it looks.
LOCKED_FOR: Final = 2.0
LOOKS_AT_LOCK_EVERY: Final = 0.02


class RowClaims(Protocol):
    """The rows of a store's table."""

    def use(self, statements: StoreStatements) -> None:
        """Fetch and move from now on what these statements find; they are of the same table."""
        ...

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages: until the transaction ends, or until `change` or `release`."""
        ...

    async def next_due(self) -> Any:  # noqa: ANN401 - what the due column keeps
        """Return the earliest due time of any message, or None."""
        ...

    def stored(self, due: datetime) -> None:
        """Note that a message with this due time was stored, in this process or another."""
        ...

    def look_fully(self, found: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `found` with the due time of each message that ordinary looks passed over; return how to stop."""
        ...

    async def change(
        self,
        work: Callable[[Connection], Result],
        messages: Sequence[DelayedMessage],
        transaction: Transaction | None = None,
        *,
        one_statement: bool = True,
    ) -> Result:
        """Run `work`, without a transaction in a new one; it then unlocks the messages as well.

        Args:
            work: runs the statements.
            messages: the messages that the statements change or delete.
            transaction: the external transaction; a new transaction if None.
            one_statement: whether it is a single statement, or a statement for every 500 of the messages.
        """
        ...

    async def manage(
        self, message_id: str, work: Callable[[Connection], object], transaction: Transaction | None = None
    ) -> Outcome:
        """Run `work` unless another process has claimed the message, which none can before the transaction's end."""
        ...

    async def manage_many(self, work: Callable[[Connection, LockFree], Result]) -> Result:
        """Run `work` in a transaction, with a function that locks those of many messages that nobody has claimed."""
        ...

    async def forward(self, until: object, limit: int, *, max_bytes: int, counted: bool = False) -> Moved:
        """Move due messages to their queues inside the database; with `counts` if `counted`."""
        ...

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock the messages. Idempotent."""
        ...

    async def close(self) -> None:
        """Unlock everything."""
        ...


class LockStatements:
    """How rows are locked, leased and read."""

    def __init__(self, statements: StoreStatements, dialect: Server, leases: Leases) -> None:
        table, sql = statements.table, dialect.sql
        columns, by_ids, by_id = table.c, dialect.words.by_key(table.c.id, "keys"), table.c.id == bindparam("key")
        size = func.length(columns.headers) + func.length(columns.body)
        is_due, since = columns.due <= bindparam("until"), columns.due >= bindparam("since")
        heads = select(columns.id, size, columns.due).limit(bindparam("number")).with_for_update(skip_locked=True)
        due = heads.where(is_due, leases.free, *statements.unpaused).order_by(*in_order(table))
        next_due, next_due_since = (
            statements.earliest_due(*where).add_columns(dialect.values.in_seconds(0)) for where in ((), (since,))
        )
        free = select(columns.id).where(by_id, leases.free).with_for_update(skip_locked=True)
        read = statements.waiting.where(by_ids)  # in no order: it may bring a scan of that order's index
        self.due: Prepared = Prepared(due, sql, ["until", "number"])
        self.due_since: Prepared = Prepared(due.where(since), sql, ["until", "since", "number"])
        if fair_by_of(table) is not None:
            self.due_in_turn: Prepared = Prepared(
                in_turn(heads, table, dialect).where(leases.free, *statements.unpaused), sql, [*OF_TURN, "number"]
            )
        self.next_due: Prepared = Prepared(next_due, sql, [])
        self.next_due_since: Prepared = Prepared(next_due_since, sql, ["since"])
        in_progress = dialect.words.transactions_in_progress
        self.full: Prepared = Prepared(next_due.add_columns(*in_progress), sql, [])
        self.full_since: Prepared = Prepared(next_due_since.add_columns(*in_progress), sql, ["since"])
        self.one: Prepared = Prepared(free, sql, ["key"])
        if "seq" in columns:
            by_numbers = dialect.words.by_key(columns.seq, "numbers")
            many = select(columns.seq).where(by_numbers, leases.free).with_for_update(skip_locked=True)
            self.many: Prepared = Prepared(many, sql, ["numbers"])
        exists = select(columns.id).where(by_id).with_hint(table, *WAITING)
        self.exists: Prepared = Prepared(exists, sql, ["key"])
        self.read: Prepared = Prepared(read if leases.in_row else read.where(leases.free), sql, ["keys"])


class ServerRowClaims:
    """The rows of a store's table on a server."""

    def __init__(self, database: ServerDatabase, statements: StoreStatements, tables: QueueTables) -> None:
        self._database = database
        self._statements = statements
        self._tables = tables
        self._leases = database.dialect.leases(statements.table, tables)
        self.use(statements)
        fair = fair_by_of(statements.table) is not None
        self._groups = DueGroups(statements.table, database.dialect) if fair else None
        self._queued = tables.queued.fullname
        self._last_moved = 0
        self._from_due = database.dialect.values.from_due
        self._channel = store_channel(statements.table)
        database.notifications.register_store(self._channel, statements.table.schema)
        self._leased: set[str] = set()
        self._watermark = Watermark()
        self._full_looks: FullLooks | None = None
        self._fetched: list[datetime] = []
        """The earliest due time of each transaction with messages of ours: undone, they wait again."""

    def use(self, statements: StoreStatements) -> None:
        """Fetch and move what these statements find."""
        dialect = self._database.dialect
        self._locks = LockStatements(statements, dialect, self._leases)
        self._forwarding = dialect.forwarding(statements, self._tables)

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages."""
        fetch = partial(self._fetch, until=until, limit=limit, max_bytes=max_bytes, leasing=transaction is None)
        with self._then_look_fully():
            messages = await self._database.write(fetch, transaction)
        if transaction is None:
            self._leased.update(message.id for message in messages)
        elif messages:
            first = min(message.due for message in messages)
            self._fetched.append(first)
            self._watermark.lower(first)  # another look may have skipped the rows and raised it
            transaction.after_end(lambda: self._fetched.remove(first))
        return messages

    async def next_due(self) -> Any:  # noqa: ANN401 - what the due column keeps
        """Return the earliest due time of any message; registers how long this process sleeps, for the others."""
        with self._then_look_fully():
            return await again_after_conflicts(partial(self._database.read, self._next_due))

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

    async def manage(
        self, message_id: str, work: Callable[[Connection], object], transaction: Transaction | None = None
    ) -> Outcome:
        """Run `work` unless the message is locked or leased.

        In a transaction it waits a moment for a lock: it may be that of another transaction that changes the message,
        and may be rolled back.
        """
        change = partial(self._if_free, message_id, work)
        outcome = await self._database.write(change, transaction)
        patience = time.monotonic() + LOCKED_FOR
        while outcome is Outcome.DISPATCHING and transaction is not None and time.monotonic() < patience:
            await asyncio.sleep(LOOKS_AT_LOCK_EVERY)
            outcome = await self._database.write(change, transaction)
        return outcome

    async def manage_many(self, work: Callable[[Connection, LockFree], Result]) -> Result:
        """Run `work` in a transaction, which may lock many messages."""

        def lock(connection: Connection, numbers: Sequence[int]) -> set[int]:
            return {number for (number,) in self._locks.many.rows_each(connection, keys=numbers)}

        return await self._database.write(lambda connection: work(connection, lock))

    async def forward(self, until: object, limit: int, *, max_bytes: int, counted: bool = False) -> Moved:
        """Move due messages to their queues inside the server."""
        settings: dict[str, Any] = {"until": until, "limit": limit, "max_bytes": max_bytes, "counted": counted}
        with self._then_look_fully():
            moved = await self._forward_in_turn(settings) or await self._forward_by_due_time(settings)
        self._last_moved = moved.number
        due = moved.next_due
        if due is not None and not self._database.notifications.must_register_sleep(self._channel, self._from_due(due)):
            return moved
        return replace(moved, next_due=await self.next_due())

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
        chosen = self._lock_in_turn(connection, until, limit, max_bytes)
        if not chosen:
            due = self._lock_due(connection, until, limit)
            chosen = _fitting(due, max_bytes)
            if self._groups is not None:
                self._groups.taken_in_order(all_found=len(chosen) < limit and len(chosen) == len(due))
        if not chosen:
            return []
        read = {row[0]: row for row in self._locks.read.rows_each(connection, keys=chosen)}
        rows = [read[message_id] for message_id in chosen if message_id in read]
        if leasing:
            leased = set(self._leases.take(connection, [row[0] for row in rows]))
            rows = [row for row in rows if row[0] in leased]
        return [self._statements.message_of(row) for row in rows]

    def _and_end(self, work: Callable[[Connection], Result], leased: Sequence[str], connection: Connection) -> Result:
        result = work(connection)
        self._leases.end(connection, leased)
        return result

    @contextlib.contextmanager
    def _then_look_fully(self) -> Iterator[None]:
        """Schedule a full look after a look from the watermark on."""
        try:
            yield
        finally:
            if self._full_looks is not None:
                self._full_looks.schedule()

    def _lock_due(self, connection: Connection, until: object, limit: int) -> Sequence[Any]:
        """Lock due rows from the watermark on; it rises to the first: its lock keeps other transactions off."""
        locks, fetched = self._locks, list(self._fetched)

        def look(since: object | None) -> tuple[Sequence[Any], datetime | None]:
            if since is None:
                rows = locks.due.rows(connection, until, limit)
            else:
                rows = locks.due_since.rows(connection, until, since, limit)
            return rows, min([self._from_due(rows[0][2]), *fetched]) if rows else None

        return self._from_watermark(look)

    def _lock_in_turn(self, connection: Connection, until: object, limit: int, max_bytes: int) -> list[str]:
        """Lock due rows of several groups while there is a backlog, and return their ids."""
        groups, locks = self._groups, self._locks
        if groups is None:
            return []
        if groups.must_look:
            groups.look(connection, until)

        def rows_of(turn: Turn, number: int) -> Sequence[Any]:
            return locks.due_in_turn.rows(connection, turn.group, turn.since, until, number)

        turns = groups.turns(limit)
        found = in_turns(turns, limit, rows_of)
        chosen = _fitting([row for _, row in found], max_bytes)
        if turns:
            groups.served(turns, served_by([(turn, row[2]) for turn, row in found], len(chosen), limit))
        return chosen

    async def _forward_in_turn(self, settings: Mapping[str, Any]) -> Moved | None:
        """Move messages of several groups; None where there is no backlog, or none of its messages is free."""
        groups = self._groups
        if groups is None:
            return None
        if groups.must_look:
            await self._database.read(partial(groups.look, until=settings["until"]))
        if not (turns := groups.turns(settings["limit"])):
            return None
        run = partial(self._forwarding.run, **settings, turns=turns)
        moved = await self._database.write(run, one_statement=self._forwarding.one_statement)
        if moved.served is not None:
            groups.served(turns, moved.served)
        return moved if moved.number or moved.left else None

    async def _forward_by_due_time(self, settings: Mapping[str, Any]) -> Moved:
        """Move the messages that are due longest."""
        moved = await self._forward_to_receiver(settings)
        if moved is None:
            forward = partial(self._forward, run=partial(self._forwarding.run, **settings))
            moved = await self._database.write(forward, one_statement=self._forwarding.one_statement)
        if self._groups is not None:
            found = moved.number + moved.left
            cut_by_size = moved.number > 0 and moved.next_due == settings["until"]
            self._groups.taken_in_order(all_found=found < settings["limit"] and not cut_by_size)
        return moved

    def _forward(self, connection: Connection, run: Callable[..., Moved]) -> Moved:
        def look(since: object | None) -> tuple[Moved, datetime | None]:
            moved = run(connection, since=since)
            return moved, None if moved.reached is None else self._from_due(moved.reached)

        return self._from_watermark(look)

    async def _forward_to_receiver(self, settings: Mapping[str, Any]) -> Moved | None:
        """Move messages, claiming some for a receiver that waits, and pass them to it; None where none waits."""
        if not self._forwarding.can_claim:
            return None
        claims = cast("ClaimsInStatements", self._database.claims(self._queued))
        receiver = claims.receivers.first()
        # After a large move the next would keep the claims' connection from acknowledgements and looks.
        if receiver is None or self._last_moved > receiver.wanted:
            return None
        query, since = self._begin()
        try:
            moved = await claims.move(self._forwarding, receiver, **settings, since=since)
        except BaseException:
            self._watermark.abandon(query)
            raise
        self._watermark.end(query, None if moved.reached is None else self._from_due(moved.reached))
        if moved.claimed:
            try:
                receiver.loop.call_soon_threadsafe(receiver.moved, moved.claimed)
            except RuntimeError:  # that loop is closed
                claims.release(row[0] for row in moved.claimed)
        return moved

    async def _overlooked(self) -> datetime | None:
        """Return the earliest due time of all messages if it is below the watermark, which is then lowered to it."""
        due = await self._database.read(self._look_fully)
        return due if due is not None and self._watermark.lower(due) else None

    def _look_fully(self, connection: Connection) -> datetime | None:
        locks, requested = self._locks, steady()
        query, since = self._begin(full=True)
        try:
            rows = locks.full.rows(connection) if since is None else locks.full_since.rows(connection, since)
        except BaseException:
            self._watermark.abandon(query)
            raise
        ((due, now, *in_progress),) = rows
        earliest, now = None if due is None else self._from_due(due), self._from_due(now)
        self._database.clock.answered(now, requested)
        self._watermark.end(query, None, Seen(earliest, now, *in_progress) if in_progress else None)
        return earliest

    def _next_due(self, connection: Connection) -> Any:  # noqa: ANN401
        """Look; register the sleep where it is not, and look again: messages may have been stored between."""
        due = self._look(connection)
        if self._database.notifications.register_sleep(
            connection, self._channel, None if due is None else self._from_due(due)
        ):
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

    def _from_watermark(self, run: Callable[[object | None], tuple[Result, datetime | None]]) -> Result:
        """Run a query from the watermark on; it returns its findings and how far it looked."""
        query, since = self._begin()
        try:
            result, reached = run(since)
        except BaseException:
            self._watermark.abandon(query)
            raise
        self._watermark.end(query, reached)
        return result

    def _begin(self, *, full: bool = False) -> tuple[DueQuery, object | None]:
        """Begin a query and return it with the earliest due time that it reads, None for a full query."""
        query = self._watermark.begin(full=full or (self._full_looks is None and self._watermark.is_unchecked))
        return query, None if query.since is None else self._database.dialect.values.to_due(query.since)

    def _if_free(self, message_id: str, work: Callable[[Connection], object], connection: Connection) -> Outcome:
        # The column's collation may take another id for the same.
        if self._locks.one.one(connection, message_id) == message_id:
            work(connection)
            return Outcome.DONE
        exists = self._locks.exists.one(connection, message_id) == message_id
        return Outcome.DISPATCHING if exists else Outcome.NOT_PENDING


def _fitting(rows: Sequence[Any], max_bytes: int) -> list[str]:
    """Return the ids of as many rows, of ids and sizes, as fit; at least the first."""
    chosen: list[str] = []
    for message_id, size, _ in rows:
        max_bytes -= size
        if chosen and max_bytes < 0:
            break
        chosen.append(message_id)
    return chosen


def row_claims(database: Database, statements: StoreStatements, tables: QueueTables) -> RowClaims:
    """Return the row claims of a store's table."""
    if isinstance(database, ServerDatabase):
        return ServerRowClaims(database, statements, tables)
    from delayline.sql.file_database import FileRowClaims  # which need fcntl

    return FileRowClaims(cast("FileDatabase", database), statements, tables)
