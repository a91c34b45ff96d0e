"""A database in one file: reads side by side, writes one transaction at a time.

Concurrent writes share one commit, the most expensive part of a short transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from delayline.clock import SystemClock
from delayline.errors import BackendUnavailable, BackendUnusable, NotStarted
from delayline.sql.database import Database
from delayline.sql.dialects.sqlite import CommitWatch, Sqlite
from delayline.sql.workers import FairSemaphore, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import URL, Connection

    from delayline.sql.dialects.sqlite import FileClaims, PipeNotifications, Sqlite
    from delayline.sql.transactions import EnlistedTransaction


Result = TypeVar("Result")
READERS: Final = 2


class FileDatabase(Database):
    """An SQLite file: one writer at a time; concurrent writes share a commit."""

    locks_rows = False

    def __init__(self, url: URL) -> None:
        super().__init__()
        self.dialect: Sqlite = Sqlite(url)
        self.semaphore = FairSemaphore()
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

    async def tell_at_commit(self, news: Mapping[str, int], transaction: EnlistedTransaction) -> None:
        """Watch the file for the commit: SQLite sends no notifications."""
        del transaction
        await self.read(lambda _: self._commits.expect(news))

    def claims(self, table: str) -> FileClaims:
        """Byte-range locks beside the file."""
        return self.dialect.claims(table)

    def begin_stop(self) -> None:
        """Limit the waits for other processes' transactions."""
        self.dialect.stops.begin()

    def end_stop(self) -> None:
        """Wait as long as usual again."""
        self.dialect.stops.end()

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on a reading connection."""
        if self._readers is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._readers.run(lambda: self._translated(lambda: work(self._read_connection())))

    async def hold(self) -> WriterCheckout:
        """Wait for other writers."""
        asked_at = time.monotonic()
        await self.semaphore.enter()
        self.dialect.asked_at = asked_at
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
                self.dialect.asked_at = max((one.asked_at for one in group), default=write.asked_at)
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
        connection = self._translated(lambda: self.dialect.connect(writing=True))
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
        """Let the threads come to rest and disconnect: SQLite's connections must not be inherited.

        In the middle of a transaction they are, and the child has to do without this database.
        """
        self._opening.acquire()
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.pause()
        self._commits.pause()
        writing = self._write_connection
        if writing is not None and not self.dialect.in_transaction(writing):
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
        return CommitWatch(lambda: self.dialect.connect(writing=False), self.notify)

    def _close_connections(self) -> None:
        if self._write_connection is not None:
            self._read_connections.append(self._write_connection)
        for connection in self._read_connections:
            connection.close()
        self._read_connections, self._write_connection = [], None
        self._thread = threading.local()

    def _writing_connection(self) -> Connection:
        if self._write_connection is None:  # since a fork
            self._write_connection = self.dialect.connect(writing=True)
        return self._write_connection

    def _read_connection(self) -> Connection:
        connection: Connection | None = getattr(self._thread, "connection", None)
        if connection is None:
            connection = self._thread.connection = self.dialect.connect(writing=False)
            self._read_connections.append(connection)
        return connection


class WriterCheckout:
    """The writing connection, for the one that has entered the semaphore."""

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
            if self._begun and not self._database.dialect.in_transaction(connection):
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


MAXIMUM_GROUP: Final = 200


class Write(Generic[Result]):
    """One caller's work and its result."""

    def __init__(self, work: Callable[[Connection], Result]) -> None:
        self.work = work
        self.asked_at = time.monotonic()
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
        self._dialect = dialect
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
        with contextlib.suppress(IndexError):  # not by the length: another loop's thread may withdraw one meanwhile
            while len(group) < MAXIMUM_GROUP:
                group.append(self._waiting.popleft())
        return group

    def run(self, group: list[Write[Any]], connection: Connection) -> None:
        """Run the group in one transaction: those that fail alone are undone alone, the others committed."""
        dialect = self._dialect
        try:
            dialect.begin(connection)
            try:
                for write in group:
                    if len(group) == 1:
                        write.run(connection)
                    else:
                        self._run_apart(write, connection)
                dialect.commit(connection)
            except BaseException:
                dialect.rollback(connection)
                raise
        except BaseException as error:
            failure = dialect.translated(error) if isinstance(error, dialect.errors) else error
            for write in group:
                write.fail(failure)
        for write in group:
            write.finished = True

    def _run_apart(self, write: Write[Any], connection: Connection) -> None:
        dialect = self._dialect
        dialect.set_savepoint(connection)
        try:
            write.run(connection)
        except Exception as error:
            if not dialect.in_transaction(connection):
                raise  # SQLite has undone everything: a full disk, an I/O error
            dialect.roll_back_to_savepoint(connection)
            write.fail(dialect.translated(error) if isinstance(error, dialect.errors) else error)
        dialect.release_savepoint(connection)
