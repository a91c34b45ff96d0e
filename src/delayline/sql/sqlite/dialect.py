"""SQLite: a file, a single writer at a time, no server; claims and notifications are files beside the database."""

from __future__ import annotations

import bisect
import threading
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BigInteger, String, Text, delete, func, literal_column, select
from sqlalchemy.dialects.sqlite import insert

from delayline.clock import from_microseconds, to_microseconds
from delayline.errors import BackendUnusable
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.dialect import (
    BulkStatements,
    ColumnValues,
    Dialect,
    RowValueGroups,
    StatementWords,
    conflict_columns,
)
from delayline.sql.server import run
from delayline.sql.sqlite.catalog import SqliteCatalog
from delayline.sql.sqlite.claims import FileClaims
from delayline.sql.sqlite.connections import SqliteConnections, SqliteTransactions, driver_of
from delayline.sql.sqlite.errors import SqliteErrors
from delayline.sql.sqlite.notifications import PipeNotifications
from delayline.sql.staging import need_arrow
from delayline.sql.timeouts import TimeoutShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy
    from sqlalchemy import URL, ColumnElement, Connection, Insert, Table

    from delayline.sql.staging import Stage


#: How many windows of row numbers are sampled to estimate due times, and how many numbers each has.
SAMPLED_WINDOWS: Final = 400
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

    clock_tick: ClassVar[timedelta] = timedelta(milliseconds=1)

    def containing(self, column: ColumnElement[bytes], part: ColumnElement[bytes]) -> ColumnElement[bool]:
        """Return the condition that a column of bytes has the part."""
        return func.instr(column, part) > 0

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
    sees_whole_commits = True

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
        step = max(WINDOW, (last - first + SAMPLED_WINDOWS) // SAMPLED_WINDOWS)
        numbers = {"first": first, "last": last, "step": step, "window": WINDOW}
        for (due,) in driver_of(connection).execute(SAMPLED.format(table=name), numbers):
            counts[bisect.bisect_right(edges, due)] += step / WINDOW
        return counts

    def delete_copied(self, connection: Connection, table: Table, copy: Table, key: str) -> int:
        """Delete the rows by a subquery, and return their number."""
        return connection.execute(delete(table).where(table.c[key].in_(select(copy.c[key])))).rowcount


class Sqlite(Dialect):
    """An SQLite file."""

    sql: sqlalchemy.Dialect
    values: SqliteValues = SqliteValues()
    words: SqliteWords = SqliteWords()
    groups: RowValueGroups = RowValueGroups()
    bulk: SqliteBulk
    catalog: SqliteCatalog = SqliteCatalog()
    timeouts = TIMEOUTS
    connections: SqliteConnections
    transactions: SqliteTransactions
    errors: SqliteErrors

    def __init__(self, url: URL) -> None:
        self.connections = connections = SqliteConnections(url)
        self.sql = connections.engine.dialect
        self.errors, self.transactions = SqliteErrors(connections.path), SqliteTransactions(connections)
        self.bulk = SqliteBulk(self)
        self._directory = connections.path.with_name(f"{connections.path.name}-run")
        self._claims: dict[str, FileClaims] = {}
        self._claiming = threading.Lock()
        self.notifications: PipeNotifications = PipeNotifications(self._directory)

    def opened(self) -> None:
        """Make the place beside the file where processes meet: notifications and claims. Safe to delete when idle."""
        try:
            readers = self.connections.permissions() >> 2 & 0o111  # the folder has the permissions of the file
            self._directory.mkdir(mode=self.connections.permissions() | readers, exist_ok=True)
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
        """Return the claims on a table's rows."""
        with self._claiming:  # two instances would give the same row to two callers
            if table not in self._claims:
                self._claims[table] = FileClaims(self._directory, table, mode=self.connections.permissions())
            return self._claims[table]
