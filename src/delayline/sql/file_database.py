"""A database in a file: reads side by side, writes a transaction at a time, claims on rows beside the file.

Concurrent writes share a commit, the most expensive part of a short transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sqlalchemy import and_, bindparam, select, update

from delayline.clock import SystemClock
from delayline.delayed.columns import StoredRow
from delayline.delayed.fairness import Served
from delayline.delayed.store import Outcome
from delayline.errors import BackendUnavailable, BackendUnusable, NotStarted
from delayline.sql.database import Database
from delayline.sql.fair_groups import OF_TURN, DueGroups, fair_by_of, in_turn, in_turns, served_by
from delayline.sql.moves import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order
from delayline.sql.sqlite.commit_watch import CommitWatch
from delayline.sql.sqlite.dialect import Sqlite
from delayline.sql.sqlite.moves import FileForwarding
from delayline.sql.workers import FairSemaphore, Workers
from delayline.transaction import THREAD_WAITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import URL, Connection

    from delayline.delayed.fairness import Turn
    from delayline.message import DelayedMessage
    from delayline.sql.claims import LockFree
    from delayline.sql.schema import QueueTables
    from delayline.sql.sqlite.claims import FileClaims
    from delayline.sql.sqlite.notifications import PipeNotifications
    from delayline.sql.statements import StoreStatements
    from delayline.sql.transactions import EnlistedTransaction
    from delayline.transaction import Transaction


Result = TypeVar("Result")
READERS: Final = 2
DUE: Final = StoredRow._fields.index("due")


class FileDatabase(Database):
    """An SQLite file: a single writer at a time; concurrent writes share a commit."""

    locks_rows = False

    def __init__(self, url: URL) -> None:
        super().__init__()
        self.dialect: Sqlite = Sqlite(url)
        self.semaphore: FairSemaphore = FairSemaphore()
        self._group = GroupCommit(self.dialect)
        self._writer: Workers | None = None
        self._readers: Workers | None = None
        self._write_connection: Connection | None = None
        self._read_connections: list[Connection] = []
        self._thread = threading.local()
        self._lost: list[Connection] | None = None
        self._commits = self._new_commit_watch()

    @property
    def clock(self) -> SystemClock:
        """The machine's clock: a file has no clock."""
        return SystemClock()

    @property
    def notifications(self) -> PipeNotifications:
        """Pipes beside the file."""
        return self.dialect.notifications

    async def notify_at_external_commit(
        self, notifications: Mapping[str, int], transaction: EnlistedTransaction
    ) -> None:
        """Watch the file for the commit: SQLite sends no notifications."""
        del transaction
        await self.read(lambda _: self._commits.expect(notifications))

    def claims(self, table: str) -> FileClaims:
        """Byte-range locks beside the file."""
        return self.dialect.claims(table)

    def begin_stop(self) -> None:
        """Limit the waits for other processes' transactions."""
        self.dialect.connections.stops.begin()

    def end_stop(self) -> None:
        """Wait as long as usual again."""
        self.dialect.connections.stops.end()

    async def open(self) -> None:
        """Connect, unless connected. Raises BackendUnusable or BackendUnavailable. Undone if cancelled."""
        self.dialect.connections.thread_waits = THREAD_WAITS.get()
        await super().open()

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on a reading connection."""
        if self._readers is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._readers.run(lambda: self._translated(lambda: work(self._read_connection())))

    async def set_up(self, missing: Callable[[Connection], object], work: Callable[[Connection], None]) -> None:
        """Write what is missing; a transaction that may be that of the waiting caller is not waited for as long."""
        if await self._is_missing(missing):
            if THREAD_WAITS.get():
                await self.read(lambda _: self.dialect.transactions.wait_for_own_process())
            await self.write(work)

    async def hold(self) -> WriterCheckout:
        """Wait for other writers."""
        asked_at = time.monotonic()
        await self.semaphore.enter()
        self.dialect.transactions.asked_at = asked_at
        return WriterCheckout(self)

    async def on_writer(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the writing connection; the caller must have entered the semaphore."""
        if self._writer is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._writer.run(lambda: self._translated(lambda: work(self._writing_connection())))

    async def _write_alone(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result:
        """Commit the work with that of other waiting writers; cancelled before that, it has no effect."""
        del one_statement
        write = Write(work)
        self._group.add(write)
        try:
            await self.semaphore.enter()
        except asyncio.CancelledError:
            if not self._group.withdraw(write):
                await self._until_committed()
            raise
        try:
            if not write.finished:
                group = self._group.take()
                self.dialect.transactions.asked_at = max((member.asked_at for member in group), default=write.asked_at)
                await self.on_writer(lambda connection: self._group.run(group, connection))
        finally:
            self.semaphore.leave()
        return write.result()

    async def _until_committed(self) -> None:
        entered = asyncio.ensure_future(self.semaphore.enter())
        while not entered.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([entered])
        self.semaphore.leave()

    def _connect(self) -> None:
        if self._lost is not None:
            raise BackendUnusable(
                f"this process was forked in the middle of a transaction on {self.dialect}: "
                "start endpoints after the fork, or use multiprocessing's spawn method"
            )
        connection = self._translated(lambda: self.dialect.connections.connect(writing=True))
        try:
            self.dialect.opened()
        except BaseException:
            connection.close()
            raise
        self._write_connection = connection
        self._writer = Workers("delayline writer", 1)
        self._readers = Workers("delayline reader", READERS)

    def _disconnect(self) -> None:
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.stop()
        self._writer = self._readers = None
        self._commits.close()
        self.dialect.closed()
        self._close_connections()

    def before_fork(self) -> None:
        """Stop the threads and disconnect: SQLite's connections must not be inherited.

        In the middle of a transaction they are inherited, and the child cannot use this database.
        """
        self._opening.acquire()
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.pause()
        self._commits.pause()
        writing = self._write_connection
        if writing is not None and not self.dialect.transactions.in_transaction(writing):
            self._close_connections()

    def after_fork(self) -> None:
        """Go on, in the parent: connections come back when they are needed."""
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.resume()
        self._commits.resume()
        self._opening.release()

    def after_fork_in_child(self) -> None:
        """Be as new: the threads, claims and pipes are the parent's."""
        if self._write_connection is not None:
            self._lost = [self._write_connection, *self._read_connections]  # for ever: closing them is not safe
        self.dialect.forked()
        self._commits = self._new_commit_watch()
        self.semaphore = FairSemaphore()
        self._group = GroupCommit(self.dialect)
        self._users = 0
        self._writer = self._readers = self._write_connection = None
        self._read_connections = []
        self._thread = threading.local()
        self._opening = threading.Lock()

    def _new_commit_watch(self) -> CommitWatch:
        return CommitWatch(lambda: self.dialect.connections.connect(writing=False), self.notify)

    def _close_connections(self) -> None:
        if self._write_connection is not None:
            self._read_connections.append(self._write_connection)
        for connection in self._read_connections:
            connection.close()
        self._read_connections, self._write_connection = [], None
        self._thread = threading.local()

    def _writing_connection(self) -> Connection:
        if self._write_connection is None:  # since a fork
            self._write_connection = self.dialect.connections.connect(writing=True)
        return self._write_connection

    def _read_connection(self) -> Connection:
        connection: Connection | None = getattr(self._thread, "connection", None)
        if connection is None:
            connection = self._thread.connection = self.dialect.connections.connect(writing=False)
            self._read_connections.append(connection)
        return connection


class WriterCheckout:
    """The writing connection, for the task that has entered the semaphore."""

    def __init__(self, database: FileDatabase) -> None:
        self._database = database
        self._begun = False

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the writing connection. Raises BackendUnavailable when SQLite has undone the transaction."""
        result = await self._database.on_writer(self._unless_undone(work))
        self._begun = True
        return result

    def _unless_undone(self, work: Callable[[Connection], Result]) -> Callable[[Connection], Result]:
        def checked(connection: Connection) -> Result:
            if self._begun and not self._database.dialect.transactions.in_transaction(connection):
                raise BackendUnavailable(
                    f"{self._database.dialect} has undone the transaction by itself, as it does on a full disk or an "
                    "I/O error: try again from its beginning"
                )
            return work(connection)

        return checked

    def leave(self) -> None:
        """Let the next writer enter."""
        self._database.semaphore.leave()

    def discard(self) -> None:
        """Release the writing connection; the next writer rolls back first."""
        self.leave()


MOST_WRITES_A_COMMIT: Final = 200


class Write(Generic[Result]):
    """A caller's work and its result."""

    def __init__(self, work: Callable[[Connection], Result]) -> None:
        self.work = work
        self.asked_at: float = time.monotonic()
        self.finished = False
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self, connection: Connection) -> None:
        """Run the work; its effect lasts only once the group is committed."""
        self._results.append(self.work(connection))

    def fail(self, error: BaseException) -> None:
        """Note why it failed, unless that is known."""
        self._error = self._error or error

    def result(self) -> Result:
        """Return or raise the result of the work."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class GroupCommit:
    """Collects writes; the first writer to enter runs all of them, each behind a savepoint."""

    def __init__(self, dialect: Sqlite) -> None:
        self._transactions, self._errors = dialect.transactions, dialect.errors
        self._waiting: deque[Write[Any]] = deque()

    def add(self, write: Write[Any]) -> None:
        """Add the write to the next group."""
        self._waiting.append(write)

    def withdraw(self, write: Write[Any]) -> bool:
        """Take the write back; False when a group has it already."""
        try:
            self._waiting.remove(write)
        except ValueError:
            return False
        return True

    def take(self) -> list[Write[Any]]:
        """Return the writes of the next group."""
        group: list[Write[Any]] = []
        with contextlib.suppress(IndexError):  # not by the length: another loop's thread may withdraw work
            while len(group) < MOST_WRITES_A_COMMIT:
                group.append(self._waiting.popleft())
        return group

    def run(self, group: list[Write[Any]], connection: Connection) -> None:
        """Run the group in a single transaction: works that fail alone are undone alone, the others committed."""
        try:
            self._transactions.begin(connection)
            try:
                for write in group:
                    if len(group) == 1:
                        write.run(connection)
                    else:
                        self._run_apart(write, connection)
                self._transactions.commit(connection)
            except BaseException:
                self._transactions.rollback(connection)
                raise
        except BaseException as error:
            failure = self._errors.translated(error) if isinstance(error, self._errors.kinds) else error
            for write in group:
                write.fail(failure)
        for write in group:
            write.finished = True

    def _run_apart(self, write: Write[Any], connection: Connection) -> None:
        self._transactions.set_savepoint(connection)
        try:
            write.run(connection)
        except Exception as error:
            if not self._transactions.in_transaction(connection):
                raise  # SQLite has undone everything: a full disk, an I/O error
            self._transactions.roll_back_to_savepoint(connection)
            write.fail(self._errors.translated(error) if isinstance(error, self._errors.kinds) else error)
        self._transactions.release_savepoint(connection)


def _number_fitting(rows: Sequence[StoredRow], max_bytes: int) -> int:
    """Return how many rows fit; at least the first."""
    for number, row in enumerate(rows):
        max_bytes -= row.size
        if number and max_bytes < 0:
            return number
    return len(rows)


class NumberStatements:
    """The statements by row number, which SQLite's tables have."""

    def __init__(self, statements: StoreStatements) -> None:
        columns, sql = statements.table.c, statements.dialect.sql
        is_due = and_(columns.due <= bindparam("until"), *statements.unpaused)
        numbers = select(columns.seq).where(is_due).order_by(*in_order(statements.table))
        numbers = numbers.limit(bindparam("number")).offset(bindparam("skip"))
        claimed = statements.waiting.where(columns.seq == bindparam("sequence"), is_due)
        self.due_numbers: Prepared = Prepared(numbers, sql, ["until", "number", "skip"])
        self.claimed_row: Prepared = Prepared(claimed, sql, ["sequence", "until"])
        if fair_by_of(statements.table) is not None:
            fair = partial(in_turn, table=statements.table, dialect=statements.dialect)
            unpaused = statements.unpaused
            numbered = fair(select(columns.seq)).where(*unpaused).limit(bindparam("number")).offset(bindparam("skip"))
            self.numbers_of_turn: Prepared = Prepared(numbered, sql, [*OF_TURN, "number", "skip"])
            self.due_of_turn: Prepared = Prepared(
                fair(statements.waiting).where(*unpaused).limit(bindparam("number")), sql, [*OF_TURN, "number"]
            )
        self.touch: Prepared = Prepared(
            update(statements.table).values(seq=columns.seq).where(columns.seq == 0), sql, []
        )
        self.number: Prepared = Prepared(select(columns.seq).where(columns.id == bindparam("key")), sql, ["key"])


class FileBatch:
    """A batch of messages that are claimed, each beside the file.

    Args:
        connection: The connection with the write lock.
        rows: The statements and claims of the store.
        until: What the due column keeps of the latest due time.
        limit: The most messages.
        max_bytes: The most bytes, if it has more than a message.
        claimed: Where the numbers of claimed messages are noted, by id.
    """

    def __init__(
        self,
        connection: Connection,
        rows: FileRowClaims,
        until: object,
        limit: int,
        max_bytes: int,
        claimed: dict[str, int],
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._until = until
        self._limit = limit
        self._bytes_left = max_bytes
        self._claimed = claimed
        self.messages: list[DelayedMessage] = []

    @property
    def is_full(self) -> bool:
        """Whether it has as many messages or bytes as it may."""
        return len(self.messages) >= self._limit or self._bytes_left <= 0

    def claim(self, page_of: Callable[[int, int], Sequence[Any]], most: int) -> None:
        """Claim free rows until the batch has `most` messages; `page_of` returns so many numbers after so many."""
        skip, size = 0, self._limit
        while len(self.messages) < most and not self.is_full:
            page = page_of(size, skip)
            for (number,) in page:
                if len(self.messages) == most or self.is_full:
                    break
                self._claim(number)
            if len(page) < size:
                break
            skip += size

    def _claim(self, number: int) -> None:
        """Claim the row if it is free and fits."""
        rows = self._rows
        if not rows.claims.take([number], 1):
            return
        kept = rows.numbers.claimed_row.run(self._connection, number, self._until).fetchone()
        row = None if kept is None else StoredRow._make(kept)
        if row is None or (self.messages and row.size > self._bytes_left):
            rows.claims.release([number])
            self._bytes_left = self._bytes_left if row is None else 0
            return
        self._bytes_left -= row.size
        self._claimed[row.id] = number
        self.messages.append(rows.statements.message_of(row))


class FileRowClaims:
    """The rows of a store's table in an SQLite file."""

    def __init__(self, database: FileDatabase, statements: StoreStatements, tables: QueueTables) -> None:
        self._database = database
        self._tables = tables
        self.use(statements)
        self.claims: FileClaims = database.claims(statements.table.name)
        self._claimed: dict[str, int] = {}
        fair = fair_by_of(statements.table) is not None
        self._groups = DueGroups(statements.table, database.dialect) if fair else None

    def use(self, statements: StoreStatements) -> None:
        """Fetch and move what these statements find."""
        self.statements: StoreStatements = statements
        self.numbers: NumberStatements = NumberStatements(statements)
        self._forwarding = FileForwarding(statements, self._tables, self._database.dialect)

    async def fetch(
        self, until: object, limit: int, *, max_bytes: int, transaction: Transaction | None
    ) -> Sequence[DelayedMessage]:
        """Lock and return due messages."""
        claimed: dict[str, int] = {}
        if transaction is not None:
            fetch = partial(self._fetch_unclaimed, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
            transaction.after_end(lambda: self.claims.release(claimed.values()))
            return await self._database.write(fetch, transaction)
        # Under the write lock: messages fetched by another transaction are locked by it until it ends.
        claim = partial(self._claim_due, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
        try:
            batch = await self._database.write(claim)
        except BaseException:
            self.claims.release(claimed.values())  # the caller will never receive them
            raise
        self._claimed |= claimed
        return batch

    async def next_due(self) -> int | None:
        """Return the earliest due time of any message."""
        due: int | None = await self._database.read(self.statements.next_due.one)
        return due

    def stored(self, due: datetime) -> None:
        """Do nothing: every look reads the whole table."""

    def look_fully(self, found: Callable[[datetime], None]) -> Callable[[], None]:
        """Do nothing: every look is full."""
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

    async def manage(
        self, message_id: str, work: Callable[[Connection], object], transaction: Transaction | None = None
    ) -> Outcome:
        """Run `work` unless another process has claimed the message."""
        taken: list[int] = []
        try:
            return await self._database.write(partial(self._if_unclaimed, message_id, work, taken), transaction)
        finally:
            self.claims.release(taken)  # after the commit: before it a poller would still see the row

    async def manage_many(self, work: Callable[[Connection, LockFree], Result]) -> Result:
        """Run `work` under the file's write lock, under which messages are claimed."""
        taken: list[int] = []

        def lock(connection: Connection, numbers: Sequence[int]) -> set[int]:
            del connection
            if self.claims.are_all_free():
                return {*numbers}
            free = self.claims.take(numbers, len(numbers))
            taken.extend(free)
            return {*free}

        try:
            return await self._database.write(lambda connection: work(connection, lock))
        finally:
            self.claims.release(taken)  # after the commit: before it a poller would still see the rows

    async def forward(self, until: object, limit: int, *, max_bytes: int, counted: bool = False) -> Moved:
        """Move due messages to their queues, unless messages are claimed."""
        return await self._database.write(
            partial(self._forward, until=until, limit=limit, max_bytes=max_bytes, counted=counted)
        )

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the claims on the messages."""
        self._unclaim(messages)

    async def close(self) -> None:
        """Give up every claim."""
        self.claims.release(self._claimed.values())
        self._claimed.clear()

    def _forward(self, connection: Connection, *, until: object, limit: int, max_bytes: int, counted: bool) -> Moved:
        run = partial(self._forwarding.run, connection, until, limit=limit, max_bytes=max_bytes, counted=counted)
        free, moved = self.claims.are_all_free(), Moved(0, set())
        if free and (turns := self._turns(connection, until, limit)):
            moved = run(turns=turns)
            self._served(turns, moved.served)
        by_due_time = free and not moved.number and not moved.left
        if by_due_time:
            moved = run()
        moved = replace(moved, next_due=self.statements.next_due.one(connection))
        if by_due_time and self._groups is not None:
            some_left = moved.number > 0 and moved.next_due is not None and moved.next_due <= until
            self._groups.taken_in_order(all_found=not some_left)
        return moved

    def _turns(self, connection: Connection, until: object, limit: int) -> Sequence[Turn]:
        """Return the turns of the next batch; none where it is to be by due time alone."""
        if self._groups is None:
            return []
        if self._groups.must_look:
            self._groups.look(connection, until)
        return self._groups.turns(limit)

    def _served(self, turns: Sequence[Turn], served: Served | None) -> None:
        if self._groups is not None and served is not None:
            self._groups.served(turns, served)

    def _fetch_unclaimed(
        self, connection: Connection, *, until: object, limit: int, max_bytes: int, claimed: dict[str, int]
    ) -> Sequence[DelayedMessage]:
        """Fetch under the write lock, which suffices unless messages are claimed without a transaction."""
        if not self.claims.are_all_free():
            return self._claim_due(connection, until=until, limit=limit, max_bytes=max_bytes, claimed=claimed)
        turns = self._turns(connection, until, limit)
        rows_of = partial(self.numbers.due_of_turn.rows, connection) if turns else None
        if rows_of is not None:
            found = in_turns(turns, limit, lambda turn, number: rows_of(turn.group, turn.since, until, number))
            rows = [StoredRow._make(row) for _, row in found]
            fitting = _number_fitting(rows, max_bytes)
            self._served(turns, served_by([(turn, row[DUE]) for turn, row in found], fitting, limit))
            if fitting:
                return [self.statements.message_of(row) for row in rows[:fitting]]
        batch = self.statements.bounded(connection, until, limit=limit, max_bytes=max_bytes)
        self._by_due_time(connection, until, batch)
        return batch

    def _by_due_time(self, connection: Connection, until: Any, batch: Sequence[DelayedMessage]) -> None:  # noqa: ANN401
        """Note whether a batch by due time alone has all due messages."""
        if self._groups is not None:
            following = self.numbers.due_numbers.rows(connection, until, 1, len(batch))
            self._groups.taken_in_order(all_found=not following)

    def _claim_due(
        self, connection: Connection, *, until: object, limit: int, max_bytes: int, claimed: dict[str, int]
    ) -> Sequence[DelayedMessage]:
        """Claim due rows page by page until there are enough; read the rows that are still there and still due."""
        batch, numbers = FileBatch(connection, self, until, limit, max_bytes, claimed), self.numbers
        turns, groups = self._turns(connection, until, limit), dict[str, tuple[int, Any]]()
        for turn in turns:
            if batch.is_full:
                break
            before = len(batch.messages)
            most = min(limit, before + turn.most)
            batch.claim(partial(numbers.numbers_of_turn.rows, connection, turn.group, turn.since, until), most)
            if found := len(batch.messages) - before:
                groups[turn.group] = (found, turn.since)
        self._served(turns, Served(groups, cut=batch.is_full))
        if not batch.messages:
            batch.claim(partial(numbers.due_numbers.rows, connection, until), limit)
            if self._groups is not None:
                self._groups.taken_in_order(all_found=not batch.is_full)
        return batch.messages

    def _unclaim(self, messages: Iterable[DelayedMessage]) -> None:
        if self._claimed:
            numbers = [self._claimed.pop(message.id, None) for message in messages]
            self.claims.release(number for number in numbers if number is not None)

    def _if_unclaimed(
        self, message_id: str, work: Callable[[Connection], object], taken: list[int], connection: Connection
    ) -> Outcome:
        # A transaction of the user's may not have begun. From this statement on it has the file's write lock, under
        # which messages are claimed.
        self.numbers.touch.change(connection)
        number = self.numbers.number.one(connection, message_id)
        if number is None:
            return Outcome.NOT_PENDING
        taken += self.claims.take([number], 1)
        if not taken:
            return Outcome.DISPATCHING
        work(connection)
        return Outcome.DONE
