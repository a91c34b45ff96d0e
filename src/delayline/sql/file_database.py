"""A database in one file: reads side by side, writes one transaction at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.clock import SystemClock
from delayline.errors import BackendUnavailable, BackendUnusable, NotStarted
from delayline.sql.database import Database
from delayline.sql.dialects.sqlite import Sqlite
from delayline.sql.dialects.sqlite_commit_watch import CommitWatch
from delayline.sql.fair_semaphore import FairSemaphore
from delayline.sql.file_row_claims import FileRowClaims
from delayline.sql.group_commit import GroupCommit, Write
from delayline.sql.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import URL, Connection

    from delayline.sql.dialects.sqlite_claims import FileClaims
    from delayline.sql.dialects.sqlite_notifications import PipeNotifications
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements
    from delayline.sql.transactions import EnlistedTransaction

Result = TypeVar("Result")
READERS: Final = 2


class FileDatabase(Database):
    """An SQLite file: one writer at a time; writes that wait for the same turn share a commit."""

    locks_rows = False

    def __init__(self, url: URL) -> None:
        super().__init__()
        self.dialect: Sqlite = Sqlite(url)
        self.lane = FairSemaphore()
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

    def rows(self, statements: StoreStatements, tables: QueueTables) -> FileRowClaims:
        """Rows stood for by claims."""
        return FileRowClaims(self, statements, tables)

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
        """Wait for the lane."""
        asked_at = time.monotonic()
        await self.lane.enter()
        self.dialect.asked_at = asked_at
        return WriterCheckout(self)

    async def on_writer(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the writing connection; the caller must have the write turn."""
        if self._writer is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._writer.run(lambda: self._translated(lambda: work(self._writing_connection())))

    async def _write_alone(self, work: Callable[[Connection], Result], *, one_statement: bool) -> Result:
        """Commit the work with those of others that wait for the same turn; cancelled before it, it has no effect."""
        del one_statement
        write = Write(work)
        self._group.add(write)
        try:
            await self.lane.enter()
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
            self.lane.leave()
        return write.result()

    async def _until_committed(self) -> None:
        turn = asyncio.ensure_future(self.lane.enter())
        while not turn.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([turn])
        self.lane.leave()

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
        self.lane = FairSemaphore()
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
    """The writing connection, for as long as one is in the lane."""

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
        """Leave the lane."""
        self._database.lane.leave()

    def discard(self) -> None:
        """End the write turn; the next writer rolls back first."""
        self.leave()
