"""SQLite: one file, one writer at a time, no server; claims and notifications are files beside the database."""

from __future__ import annotations

import bisect
import contextlib
import os
import sqlite3
import stat
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, String, Text, create_engine, delete, literal_column, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from delayline.clock import from_microseconds, to_microseconds
from delayline.errors import (
    BackendUnusable,
    ConfigurationError,
)
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.deadlines import SERVER_TIMEOUT, StopLimit
from delayline.sql.dialect import BulkStatements, Catalog, ColumnValues, StatementWords, conflict_columns
from delayline.sql.server import run
from delayline.sql.sqlite.catalog import SqliteCatalog
from delayline.sql.sqlite.claims import FileClaims
from delayline.sql.sqlite.errors import TRANSLATIONS, busy, file_identity, held_by_this_process
from delayline.sql.sqlite.notifications import PipeNotifications
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import URL, ColumnElement, Connection, Dialect, Insert, Table
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from delayline.sql.dialect import Stage


BUSY_TIMEOUT: Final = 5.0  # seconds, sqlite3's own default; `?timeout=` in the URL changes it
FIRST_WAIT: Final = 0.000_2  # seconds between attempts to begin, doubling
LONGEST_WAIT: Final = 0.005
SAME_LOCK: Final = 1.0  # seconds in which a lock that was not given is taken for the same one
#: Seconds that a start waits for a transaction of its own process if a thread waits for the start: the transaction may
#: be that thread's, and would never end.
OWN_TRANSACTION_PATIENCE: Final = 1.0

#: How many windows of row numbers are sampled to estimate due times, and how many numbers each has.
WINDOWS: Final = 400
WINDOW: Final = 25
#: A window in each stretch of row numbers, at a place that looks random and is the same each time: windows at equal
#: distances could meet the same part of periodic data. CROSS JOIN keeps SQLite from reading the table first.
SAMPLED: Final = """
WITH RECURSIVE stretches (number, first) AS (
    SELECT 1, :first UNION ALL SELECT number + 1, first + :step FROM stretches WHERE first + :step <= :last
), windows (start) AS (
    SELECT first + (number * 2654435761 % 4294967296) * (:step - :window) / 4294967296 FROM stretches
)
SELECT due FROM windows CROSS JOIN {table} WHERE seq >= start AND seq < start + :window
"""


#: The columns of delayline's own timeout table: NServiceBus has none for SQLite.
TIMEOUTS: Final = TimeoutShape(
    String(36), String(MAXIMUM_DESTINATION_LENGTH), BigInteger(), Text(), nullable=True, named_by_table=True
)


class SqliteValues(ColumnValues):
    """Due times are microseconds since 1970 UTC, by this machine's clock."""

    clock_tick = timedelta(milliseconds=1)
    largest_message = 990_000_000  # its limit for a row is 1,000,000,000

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return this machine's time so many seconds from now, to the millisecond."""
        return literal_column(f"CAST((julianday('now') - 2440587.5) * 86400000 + {seconds * 1000} AS INTEGER) * 1000")

    def to_due(self, due: datetime) -> int:
        """Return microseconds since 1970 UTC."""
        return to_microseconds(due)

    def from_due(self, kept: int) -> datetime:
        """Return the due time."""
        return from_microseconds(kept)

    def microseconds(self, due: ColumnElement[int]) -> ColumnElement[int]:
        """Return the column as it is."""
        return due


class SqliteWords(StatementWords):
    """A write transaction excludes all others."""

    deletes_by_list = True
    returns_deleted = True

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is."""
        return insert(table).on_conflict_do_nothing(index_elements=conflict_columns(table, key))


class SqliteBulk(BulkStatements):
    """Files beside the database; estimates from samples, as there are no statistics."""

    locks_tables = True  # with the whole file

    def __init__(self, dialect: Sqlite) -> None:
        self._dialect = dialect

    def stage(self, store: Table, name: str) -> Stage:
        """Return a folder of Arrow files beside the database file."""
        need_arrow()
        from delayline.sql.sqlite.staging import SqliteStage

        return SqliteStage(self._dialect, store, name)

    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return estimates from windows of row numbers: SQLite keeps no usable statistics.

        Rows that left are missing from windows too, so the estimates take them into account.
        """
        name = self._dialect.sql.identifier_preparer.format_table(table)
        [(first, last)] = run(connection, f"SELECT (SELECT min(seq) FROM {name}), (SELECT max(seq) FROM {name})")  # noqa: S608
        counts = [0.0] * (len(edges) + 1)
        if first is None:
            return counts
        step = max(WINDOW, (last - first + WINDOWS) // WINDOWS)
        numbers = {"first": first, "last": last, "step": step, "window": WINDOW}
        for (due,) in _driver(connection).execute(SAMPLED.format(table=name), numbers):
            counts[bisect.bisect_right(edges, due)] += step / WINDOW
        return counts

    def delete_copied(self, connection: Connection, table: Table, copy: Table, key: str) -> int:
        """Delete the rows by a subquery, and return their number."""
        return connection.execute(delete(table).where(table.c[key].in_(select(copy.c[key])))).rowcount


class Sqlite:
    """SQLite as a dialect."""

    values: ColumnValues = SqliteValues()
    words: StatementWords = SqliteWords()
    catalog: Catalog = SqliteCatalog()
    timeouts = TIMEOUTS

    def __init__(self, url: URL) -> None:
        if not url.database or url.database == ":memory:":
            raise ConfigurationError(
                "an SQLite URL names a file, as in sqlite:///file.db; for memory use MemoryTransport"
            )
        self.path = _path(url.database)
        self.identity = f"sqlite:{self.path}"
        self._timeout = _seconds(url)
        self._server_timeout: float | None = None
        self.stops = StopLimit()
        self.bulk: BulkStatements = SqliteBulk(self)
        self.asked_at = 0.0
        """When the transaction that begins next was asked for, by `time.monotonic`: it may have waited for its turn."""
        self.thread_waits = False
        """Whether a thread waits until the file is open, as `THREAD_WAITS` says."""
        self._locked_since: float | None = None
        self._refused_at = 0.0
        self.engine = create_engine(
            "sqlite://", creator=self._connect, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )
        self._directory = self.path.with_name(f"{self.path.name}-run")
        self._claims: dict[str, FileClaims] = {}
        self._claiming = threading.Lock()
        self._opened_file: tuple[int, int] | None = None
        self.notifications = PipeNotifications(self._directory)

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

    @property
    def decides(self) -> None:
        """None: its one writer would wait for the other database."""
        return

    @property
    def two_phase(self) -> None:
        """None: SQLite cannot prepare a transaction."""
        return

    @property
    def sql(self) -> Dialect:
        """SQLAlchemy's dialect, which statements are compiled for."""
        return self.engine.dialect

    def __str__(self) -> str:
        return f"SQLite file {self.path}"

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """None: a file has no server."""
        return None

    def connect(self, *, writing: bool) -> Connection:
        """Open a connection in autocommit; transactions are begun by `begin`."""
        self._check_path()
        if not writing:
            self._check_in_place()  # a file that is gone must not come back empty
        connection = self.engine.connect()
        if writing:
            connection.exec_driver_sql("PRAGMA busy_timeout = 0")  # `begin` waits with finer steps than SQLite
            self._opened_file = file_identity(self.path)
        return connection

    def opened(self) -> None:
        """Make the place beside the file where processes meet: notifications and claims. Safe to delete when idle."""
        try:
            readers = self._rights() >> 2 & 0o111  # the folder has the permissions of the file
            self._directory.mkdir(mode=self._rights() | readers, exist_ok=True)
        except OSError as error:
            raise BackendUnusable(
                f"cannot create {self._directory}: {error.strerror}; make its folder writable"
            ) from error
        self.notifications.open()

    def closed(self) -> None:
        """End notifications and drop every claim."""
        self.notifications.close()
        for claims in self._claims.values():
            claims.close()
        self._claims.clear()

    def forked(self) -> None:
        """Leave claims and notifications to the parent process; its locks stay, as they are not inherited."""
        self._claiming = threading.Lock()
        for claims in self._claims.values():
            claims.forked()
        self._claims = {}
        self.notifications.forked()
        self.notifications = PipeNotifications(self._directory)

    def claims(self, table: str) -> FileClaims:
        """Return the claims on one table's rows."""
        with self._claiming:  # two instances would give one row to two callers
            if table not in self._claims:
                self._claims[table] = FileClaims(self._directory, table, mode=self._rights())
            return self._claims[table]

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, raw and wrapped by SQLAlchemy."""
        return (DBAPIError, sqlite3.Error)

    def plans_without(self, error: Exception) -> bool:
        """False: missing objects depend on existing ones."""
        del error
        return False

    def begin(self, connection: Connection) -> None:
        """Begin a write transaction; waits for other processes up to the busy timeout.

        Writes queued behind this one do not wait for the same lock as long again. Raises BackendUnavailable if the lock
        is not granted, and BackendUnusable if the file is gone: SQLite would go on writing to the deleted file.
        """
        self._check_in_place()
        self.rollback(connection)  # an earlier rollback may have failed
        began = time.monotonic()
        since = began
        if self._locked_since is not None and began - self._refused_at < SAME_LOCK:
            since = self._locked_since if self.stops.at is not None else max(self._locked_since, self.asked_at)
        wait = FIRST_WAIT
        while True:
            try:
                _driver(connection).execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                if not _name(error).startswith("SQLITE_BUSY"):
                    raise
                if now > self.stops.end_of(since + self.busy_timeout, since):
                    self._locked_since, self._refused_at = since, now
                    raise
                time.sleep(wait)
                wait = min(wait * 2, LONGEST_WAIT)
            else:
                self._locked_since = None
                return

    def wait_for_own_process(self) -> None:
        """Wait while another connection of this process holds the write lock, but not as long as for other processes.

        Raises:
            BackendUnavailable: It still does: it may be the caller's own transaction, which would wait for itself.
        """
        until = time.monotonic() + min(OWN_TRANSACTION_PATIENCE, self.busy_timeout)
        while held_by_this_process(self.path):
            if time.monotonic() > until:
                raise busy(self.path, sqlite3.OperationalError("database is locked"))
            time.sleep(LONGEST_WAIT)

    def commit(self, connection: Connection) -> None:
        """Commit; durable on return (synchronous = FULL)."""
        _driver(connection).execute("COMMIT")

    def rollback(self, connection: Connection) -> None:
        """Roll back, unless SQLite has done so by itself (a full disk, an I/O error)."""
        driver = _driver(connection)
        if driver.in_transaction:
            driver.execute("ROLLBACK")

    def in_transaction(self, connection: Connection) -> bool:
        """Return whether a transaction is open: SQLite rolls it back itself after some errors."""
        return _driver(connection).in_transaction

    def set_savepoint(self, connection: Connection) -> None:
        """Mark where `roll_back_to_savepoint` goes back to."""
        _driver(connection).execute("SAVEPOINT delayline")

    def roll_back_to_savepoint(self, connection: Connection) -> None:
        """Roll back to the savepoint, which stays set."""
        _driver(connection).execute("ROLLBACK TO delayline")

    def release_savepoint(self, connection: Connection) -> None:
        """Release the savepoint and keep the work since."""
        _driver(connection).execute("RELEASE delayline")

    def must_exist(self) -> None:
        """Raise BackendUnusable unless the file is there."""
        if not self.path.exists():
            raise BackendUnusable(
                f"there is no file {self.path.name} in {self.path.parent}. "
                "Check --url, or create it with: delayline setup"
            )

    @contextlib.contextmanager
    def look(self) -> Iterator[Connection]:
        """Read the file as it is; where there is none, one in memory stands for it."""
        exists = self.path.exists()

        def open_it() -> DBAPIConnection:
            place = f"{self.path.as_uri()}?mode=ro" if exists else ":memory:"
            return sqlite3.connect(place, uri=exists, timeout=self._timeout)  # type: ignore[return-value]  # as below

        self._check_path()
        engine = create_engine("sqlite://", creator=open_it, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            yield connection

    def takes_writes(self, connection: Connection) -> bool:
        """Return True: a file has no replicas."""
        del connection
        return True

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        name = _name(cause)
        for prefix, translate in TRANSLATIONS.items():
            if name.startswith(prefix):
                return translate(self.path, cause)
        if "no such table" in str(cause):
            return BackendUnusable(f"{self.path} is not set up for this endpoint: run `delayline setup` ({cause})")
        return error

    def _rights(self) -> int:
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
                if not _name(error).startswith("SQLITE_BUSY") or now > self.stops.end_of(began + self._timeout, began):
                    raise
                if self.thread_waits and now > began + OWN_TRANSACTION_PATIENCE and held_by_this_process(self.path):
                    raise
                time.sleep(wait)
                wait = min(wait * 2, LONGEST_WAIT)
            else:
                return

    def _check_in_place(self) -> None:
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


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError(f"{driver!r} is not an SQLite connection")
    return driver


def _name(error: BaseException) -> str:
    return str(getattr(error, "sqlite_errorname", "SQLITE_BUSY" if "database is locked" in str(error) else ""))
