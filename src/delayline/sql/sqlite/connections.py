"""Connections to an SQLite file, and its transactions: a single writer at a time, which others wait for."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from delayline.errors import BackendUnusable, ConfigurationError
from delayline.sql.deadlines import SERVER_TIMEOUT, StopLimit
from delayline.sql.dialect import Connections, TransactionControl
from delayline.sql.sqlite.errors import busy, file_identity, held_by_this_process, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL, Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection

BUSY_TIMEOUT: Final = 5.0  # seconds, sqlite3's own default; `?timeout=` in the URL changes it
FIRST_WAIT: Final = 0.000_2  # seconds between attempts to begin, doubling
LONGEST_LOCK_WAIT: Final = 0.005
SAME_LOCK: Final = 1.0  # seconds in which a lock that was not given is taken for the same lock
#: Seconds that a start waits for a transaction of its own process if a thread waits for the start: the transaction may
#: be that thread's, and would never end.
OWN_TRANSACTION_PATIENCE: Final = 1.0


class SqliteConnections(Connections):
    """The connections to an SQLite file."""

    def __init__(self, url: URL) -> None:
        if not url.database or url.database == ":memory:":
            raise ConfigurationError(
                "an SQLite URL names a file, as in sqlite:///file.db; for memory use MemoryTransport"
            )
        self.path: Path = _path(url.database)
        self.identity: str = f"sqlite:{self.path}"
        self._timeout = _seconds(url)
        self._server_timeout: float | None = None
        self.stops: StopLimit = StopLimit()
        self.thread_waits = False
        """Whether a thread waits until the file is open, as `THREAD_WAITS` says."""
        self.engine: Engine = create_engine(
            "sqlite://", creator=self._connect, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )
        self._opened_file: tuple[int, int] | None = None

    @property
    def server_timeout(self) -> float:
        """Seconds to wait for other processes' transactions, if set; there is no server."""
        return SERVER_TIMEOUT if self._server_timeout is None else self._server_timeout

    @server_timeout.setter
    def server_timeout(self, seconds: float) -> None:
        self._server_timeout = seconds

    @property
    def busy_timeout(self) -> float:
        """Seconds to wait for other processes' transactions."""
        return self._timeout if self._server_timeout is None else min(self._timeout, self._server_timeout)

    def connect(self, *, writing: bool) -> Connection:
        """Open a connection in autocommit; transactions are begun by `begin`."""
        self._check_path()
        if not writing:
            self.check_in_place()  # a file that is gone must not come back empty
        connection = self.engine.connect()
        if writing:
            connection.exec_driver_sql("PRAGMA busy_timeout = 0")  # `begin` waits with finer steps than SQLite
            self._opened_file = file_identity(self.path)
        return connection

    def must_exist(self) -> None:
        """Raise BackendUnusable unless the file is there."""
        if not self.path.exists():
            raise BackendUnusable(
                f"there is no file {self.path.name} in {self.path.parent}. "
                "Check --url, or create it with: delayline setup"
            )

    @contextlib.contextmanager
    def look(self) -> Iterator[Connection]:
        """Read the file as it is; where there is none, a database in memory stands for it."""
        exists = self.path.exists()

        def open_it() -> DBAPIConnection:
            uri = f"{self.path.as_uri()}?mode=ro" if exists else ":memory:"
            return sqlite3.connect(uri, uri=exists, timeout=self._timeout)  # type: ignore[return-value]  # as below

        self._check_path()
        engine = create_engine("sqlite://", creator=open_it, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            yield connection

    def permissions(self) -> int:
        """Return the permissions of the database file, which the files beside it get as well."""
        return stat.S_IMODE(self.path.stat().st_mode) & 0o666

    def _connect(self) -> DBAPIConnection:
        # SQLite would create the file with the umask's mode, readable for others. An existing file is not opened here:
        # closing a descriptor of it would drop this process's locks.
        with contextlib.suppress(OSError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, timeout=0, check_same_thread=False, isolation_level=None)
        try:
            self._switch_to_wal(connection)
            connection.execute(f"PRAGMA busy_timeout = {round(self._timeout * 1000)}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA cache_size = -16384")
        except sqlite3.Error:
            connection.close()
            raise
        return connection  # type: ignore[return-value]  # typeshed: cursor() takes a factory

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        """Switch the file to a WAL if it has none; waits for others' transactions, which SQLite does not do here."""
        began, wait = time.monotonic(), FIRST_WAIT
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                if not name_of(error).startswith("SQLITE_BUSY") or now > self.stops.end_of(
                    began + self._timeout, began
                ):
                    raise
                if self.thread_waits and now > began + OWN_TRANSACTION_PATIENCE and held_by_this_process(self.path):
                    raise
                time.sleep(wait)
                wait = min(wait * 2, LONGEST_LOCK_WAIT)
            else:
                return

    def check_in_place(self) -> None:
        if file_identity(self.path) != self._opened_file:
            raise BackendUnusable(
                f"{self.path} was deleted or replaced while in use: stop what uses it, put it back together with its "
                "-wal file, and start again"
            )

    def _check_path(self) -> None:
        if self.path.is_dir():
            raise BackendUnusable(f"{self.path} is a directory, not a database file: name a file in it")
        if not self.path.parent.is_dir():
            raise BackendUnusable(f"the folder of {self.path} does not exist: create {self.path.parent}")

    def __str__(self) -> str:
        return f"SQLite file {self.path}"


class SqliteTransactions(TransactionControl):
    """Write transactions: each excludes all other writers."""

    def __init__(self, connections: SqliteConnections) -> None:
        self._connections = connections
        self.asked_at: float = 0.0
        """When the transaction that begins next was asked for, by `time.monotonic`: it may have waited for its turn."""
        self._locked_since: float | None = None
        self._refused_at = 0.0

    def begin(self, connection: Connection) -> None:
        """Begin a write transaction; waits for other processes up to the busy timeout.

        Writes queued behind this write do not wait for the same lock as long again. Raises BackendUnavailable if the
        lock is not granted, and BackendUnusable if the file is gone: SQLite would go on writing to the deleted file.
        """
        self._connections.check_in_place()
        self.rollback(connection)  # an earlier rollback may have failed
        began = time.monotonic()
        since = began
        if self._locked_since is not None and began - self._refused_at < SAME_LOCK:
            since = (
                self._locked_since if self._connections.stops.at is not None else max(self._locked_since, self.asked_at)
            )
        wait = FIRST_WAIT
        while True:
            try:
                driver_of(connection).execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                if not name_of(error).startswith("SQLITE_BUSY"):
                    raise
                if now > self._connections.stops.end_of(since + self._connections.busy_timeout, since):
                    self._locked_since, self._refused_at = since, now
                    raise
                time.sleep(wait)
                wait = min(wait * 2, LONGEST_LOCK_WAIT)
            else:
                self._locked_since = None
                return

    def wait_for_own_process(self) -> None:
        """Wait while another connection of this process holds the write lock, but not as long as for other processes.

        Raises:
            BackendUnavailable: It still does: it may be the caller's own transaction, which would wait for itself.
        """
        until = time.monotonic() + min(OWN_TRANSACTION_PATIENCE, self._connections.busy_timeout)
        while held_by_this_process(self._connections.path):
            if time.monotonic() > until:
                raise busy(self._connections.path, sqlite3.OperationalError("database is locked"))
            time.sleep(LONGEST_LOCK_WAIT)

    def commit(self, connection: Connection) -> None:
        """Commit; durable on return (synchronous = FULL)."""
        driver_of(connection).execute("COMMIT")

    def rollback(self, connection: Connection) -> None:
        """Roll back, unless SQLite has done so by itself (a full disk, an I/O error)."""
        driver = driver_of(connection)
        if driver.in_transaction:
            driver.execute("ROLLBACK")

    def in_transaction(self, connection: Connection) -> bool:
        """Return whether a transaction is open: SQLite rolls it back itself after some errors."""
        return driver_of(connection).in_transaction

    def set_savepoint(self, connection: Connection) -> None:
        """Mark where `roll_back_to_savepoint` goes back to."""
        driver_of(connection).execute("SAVEPOINT delayline")

    def roll_back_to_savepoint(self, connection: Connection) -> None:
        """Roll back to the savepoint, which stays set."""
        driver_of(connection).execute("ROLLBACK TO delayline")

    def release_savepoint(self, connection: Connection) -> None:
        """Release the savepoint and keep the work since."""
        driver_of(connection).execute("RELEASE delayline")


def _path(database: str) -> Path:
    try:
        path = Path(database).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        raise ConfigurationError(f"{database!r} in the SQLite URL cannot be a file: {error}") from error
    if not path.name:
        raise ConfigurationError(f"{database!r} in the SQLite URL is a folder: give the path of a file")
    return path


def _seconds(url: URL) -> float:
    unknown = set(url.query) - {"timeout"}
    if unknown:
        raise ConfigurationError(f"unknown option {min(unknown)!r} in the SQLite URL; known: timeout (seconds)")
    given = url.query.get("timeout", str(BUSY_TIMEOUT))
    try:
        seconds = float(str(given))
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise ConfigurationError(f"timeout={given!r} in the SQLite URL must be seconds, 0 or more")
    return seconds


def driver_of(connection: Connection) -> sqlite3.Connection:
    """Return sqlite3's connection."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError(f"{driver!r} is not an SQLite connection")
    return driver
