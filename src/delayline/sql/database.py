"""One database, shared by every store and transport of this process that names it, so that they share transactions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from delayline.errors import BackendUnusable, ConfigurationError, NotStarted
from delayline.sql.dialects.sqlite import Sqlite
from delayline.sql.group_commit import GroupCommit, Write
from delayline.sql.workers import Workers
from delayline.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sqlalchemy import Connection

Result = TypeVar("Result")
READERS: Final = 2


class Database:
    """Runs SQL in worker threads: reads side by side, writes one transaction at a time.

    Get one with `Database.at`; every `open` needs a `close`. May be used from several event loops.
    """

    _shared: ClassVar[WeakValueDictionary[str, Database]] = WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, dialect: Sqlite) -> None:
        self.dialect = dialect
        self.lane = WriteLane()
        self._group = GroupCommit(dialect)
        self._users = 0
        self._opening = threading.Lock()
        self._writer: Workers | None = None
        self._readers: Workers | None = None
        self._write_connection: Connection | None = None
        self._read_connections: list[Connection] = []
        self._thread = threading.local()
        self._lost: list[Connection] | None = None

    @classmethod
    def at(cls, url: str) -> Database:
        """Return this process's database for the URL. Raises ConfigurationError; opens nothing."""
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:
            raise ConfigurationError("the database URL cannot be read; write it like sqlite:///file.db") from error
        if parsed.get_backend_name() != "sqlite":
            raise ConfigurationError(
                f"no SQL dialect for {parsed.get_backend_name()!r} URLs; supported: sqlite:///file.db"
            )
        dialect = Sqlite(parsed)
        with cls._sharing:
            return cls._shared.setdefault(dialect.identity, cls(dialect))

    @property
    def domain(self) -> Hashable:
        """Equal for parts that can share a transaction."""
        return self.dialect.identity

    async def open(self) -> None:
        """Connect, unless somebody has. Raises BackendUnusable or BackendUnavailable."""
        await asyncio.to_thread(self._open)

    async def close(self) -> None:
        """Undo one `open`; the last one disconnects."""
        if threading.main_thread().is_alive():
            await asyncio.to_thread(self._close)
        else:  # the interpreter ends, as in atexit: no thread can be started any more
            self._close()

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on a reading connection; it sees what is committed. Not cut short by cancellation."""
        if self._readers is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._readers.run(lambda: self._translated(work, self._read_connection()))

    async def write(self, work: Callable[[Connection], Result], transaction: Transaction | None = None) -> Result:
        """Run `work` in `transaction`, or, without one, commit it with the works of others that wait for the same turn.

        Without one it fails or succeeds alone; cancelled before its turn it has no effect, and afterwards the
        cancellation is raised when its effect is certain. Raises TypeError for another database's transaction.
        """
        if transaction is not None:
            return await self._joined(transaction).run(work)
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
                await self.on_writer(lambda connection: self._group.run(group, connection))
        finally:
            self.lane.leave()
        return write.result()

    async def on_writer(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the writing connection; only for whoever is in the lane."""
        if self._writer is None:
            raise NotStarted(f"{self.dialect} is not open: start the endpoint first")
        return await self._writer.run(lambda: self._translated(lambda _: work(self._writing_connection()), None))

    def transaction(self) -> SqlTransaction:
        """Return a new transaction."""
        return SqlTransaction(self)

    def _open(self) -> None:
        with self._opening:
            if self._lost is not None:
                raise BackendUnusable(
                    f"this process was forked in the middle of a transaction on {self.dialect}: "
                    "start endpoints after the fork, or use multiprocessing's spawn method"
                )
            if self._users == 0:
                connection = self._translated(lambda _: self.dialect.connect(writing=True), None)
                try:
                    self.dialect.opened()
                except BaseException:
                    connection.close()
                    raise
                self._write_connection = connection
                self._writer = Workers("delayline writer", 1)
                self._readers = Workers("delayline reader", READERS)
            self._users += 1

    def _close(self) -> None:
        with self._opening:
            self._users -= 1
            if self._users > 0:
                return
            for workers in (self._writer, self._readers):
                if workers is not None:
                    workers.stop()
            self._writer = self._readers = None
            self.dialect.closed()
            if self._write_connection is not None:
                self._read_connections.append(self._write_connection)
            for connection in self._read_connections:
                connection.close()
            self._read_connections, self._write_connection = [], None
            self._thread = threading.local()

    def before_fork(self) -> None:
        """Let the threads come to rest and disconnect: SQLite's connections must not be inherited.

        In the middle of a transaction they are, and the child has to do without this database.
        """
        self._opening.acquire()
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.pause()
        writing = self._write_connection
        if writing is not None and not self.dialect.in_transaction(writing):
            for connection in (writing, *self._read_connections):
                connection.close()
            self._read_connections, self._write_connection = [], None
            self._thread = threading.local()

    def after_fork(self) -> None:
        """Go on, in the parent: connections come back when they are needed."""
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.resume()
        self._opening.release()

    def after_fork_in_child(self) -> None:
        """Be as new: the threads, claims and pipes are the parent's."""
        if self._write_connection is not None:
            self._lost = [self._write_connection, *self._read_connections]  # for ever: closing them is not safe
        self.dialect.forked()
        self.lane = WriteLane()
        self._group = GroupCommit(self.dialect)
        self._users = 0
        self._writer = self._readers = self._write_connection = None
        self._read_connections = []
        self._thread = threading.local()
        self._opening = threading.Lock()

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

    def _joined(self, transaction: Transaction) -> SqlTransaction:
        if isinstance(transaction, SqlTransaction) and transaction.domain == self.domain:
            return transaction
        raise TypeError(f"a transaction on {transaction.domain} cannot span {self.dialect}")

    async def _until_committed(self) -> None:
        turn = asyncio.ensure_future(self.lane.enter())
        while not turn.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([turn])
        self.lane.leave()

    def _translated(self, work: Callable[[Any], Result], connection: Connection | None) -> Result:
        try:
            return work(connection)
        except self.dialect.errors as error:
            raise self.dialect.translated(error) from error


class SqlTransaction(Transaction):
    """A transaction on one database; it begins with its first statement."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.domain)
        self._database = database
        self._begun = False
        self._committed = False

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in this transaction."""
        database = self._database
        if self._begun:
            return await database.on_writer(work)
        await database.lane.enter()
        try:
            return await database.on_writer(lambda connection: self._begin(work, connection))
        finally:
            if not self._begun:
                database.lane.leave()

    def _begin(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        self._database.dialect.begin(connection)
        self._begun = True
        return work(connection)

    async def _commit(self) -> None:
        if not self._begun:
            return
        try:
            await self._end(self._commit_or_roll_back)
        except asyncio.CancelledError:
            if self._committed:  # cancelled too late: the effect is there, and who waits for it is told
                for callback in self._after_commit:
                    callback()
            raise

    async def _rollback(self) -> None:
        if self._begun:
            await self._end(self._database.dialect.rollback)

    def _commit_or_roll_back(self, connection: Connection) -> None:
        try:
            self._database.dialect.commit(connection)
        except BaseException:
            self._database.dialect.rollback(connection)
            raise
        self._committed = True

    async def _end(self, how: Callable[[Connection], None]) -> None:
        try:
            await self._database.on_writer(how)
        finally:
            self._begun = False
            self._database.lane.leave()


class WriteLane:
    """Lets one writer in at a time, in the order they came, from any event loop, without blocking a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._holder: asyncio.Task[object] | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for the turn. Cancelling gives it up. Raises RuntimeError for a task that would wait for itself."""
        task = asyncio.current_task()
        with self._lock:
            if not self._taken:
                self._taken, self._holder = True, task
                return
            if task is not None and self._holder is task:
                raise RuntimeError("this task is in a transaction on the same database: pass it on, or end it first")
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.leave()
            raise
        self._holder = task

    def leave(self) -> None:
        """Let the next one in."""
        with self._lock:
            self._holder = None
            while self._waiting:
                turn = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # that loop is closed
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                    return
            self._taken = False


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class _Fork:
    """What happens to the databases when the process forks."""

    databases: ClassVar[list[Database]] = []

    @classmethod
    def before(cls) -> None:
        Database._sharing.acquire()  # a child must not inherit it from another thread's hands
        cls.databases = list(Database._shared.values())
        for database in cls.databases:
            database.before_fork()

    @classmethod
    def in_parent(cls) -> None:
        for database in cls.databases:
            database.after_fork()
        cls._end()

    @classmethod
    def in_child(cls) -> None:
        for database in cls.databases:
            database.after_fork_in_child()
        cls._end()

    @classmethod
    def _end(cls) -> None:
        cls.databases = []
        Database._sharing.release()


os.register_at_fork(before=_Fork.before, after_in_parent=_Fork.in_parent, after_in_child=_Fork.in_child)
