"""SQL statements on an endpoint's timeout table and on the leases of its timeouts."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, delete, func, insert, literal_column, select, update

from delayline.clock import EPOCH
from delayline.message import Message, to_wire_time
from delayline.sql.prepared import Prepared
from delayline.timeouts.nservicebus import PERSISTENCE_VERSION, TimeoutTimes
from delayline.timeouts.persister import (
    NO_SAGA,
    DueTimeout,
    LockedTimeouts,
    Timeout,
    TimeoutCount,
    TimeoutsChunk,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Table

    from delayline.sql.dialect import Dialect, Moved
    from delayline.sql.schema import QueueTables

#: The most timeouts requested from the dispatcher at a time: the poller reads past leased rows at each look.
MAXIMUM_REQUESTED: Final = 1000
#: A lease that ends later than this belongs to a failed request and does not count towards MAXIMUM_REQUESTED.
ACTIVE_LEASE: Final = timedelta(minutes=2)
#: Id of the lease row that a poller locks, so that one poller at a time leases timeouts.
POLLER_LOCK: Final = ""
COLUMNS: Final = ["Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion"]


class TimeoutStatements:
    """The statements of a SqlTimeoutPersister."""

    def __init__(self, table: Table, tables: QueueTables, dialect: Dialect) -> None:
        columns, leases, sql = table.c, tables.leases, dialect.sql
        self.table = table
        self._dialect = dialect
        self.times = TimeoutTimes(dialect)
        self._name = str(table.name)
        ours, of_id = leases.c.store == bindparam("store"), columns.Id == bindparam("key")
        of_ids = delete(leases).where(ours, dialect.one_of(leases.c.id, "keys"))
        content = select(columns.Id, columns.Destination, columns.SagaId, columns.State, columns.Time, columns.Headers)
        content = content.add_columns(columns.PersistenceVersion)
        look, of_keys = content.where(of_id), dialect.one_of(columns.Id, "keys")
        self._asks_first = not dialect.timeout_shape.inserts_new
        new = insert(table) if self._asks_first else dialect.insert_new(table, "Id")
        self._insert = Prepared(new, sql, COLUMNS)
        self._exists = Prepared(select(columns.Id).where(of_id), sql, ["key"])
        self._peek = Prepared(look, sql, ["key"])
        self._lock = Prepared(look.with_for_update(), sql, ["key"])
        self._delete = Prepared(delete(table).where(of_id), sql, ["key"])
        self._of_saga = Prepared(delete(table).where(columns.SagaId == bindparam("saga")), sql, ["saga"])
        in_order = select(columns.Id, columns.Time).where(columns.Time.is_not(None)).order_by(columns.Time)
        if not self.times.is_exact:
            in_order = in_order.add_columns(columns.Headers, columns.PersistenceVersion)
        size = func.coalesce(func.length(columns.State), literal_column("0")) + func.length(columns.Headers)
        due = select(columns.Id, columns.Time, size).where(columns.Time <= bindparam("until")).order_by(columns.Time)
        due = due.limit(bindparam("number")).with_for_update(skip_locked=True)
        self._lock_due = Prepared(due, sql, ["until", "number"])
        self._read = Prepared(content.where(of_keys), sql, ["keys"])
        self._delete_many = Prepared(delete(table).where(of_keys), sql, ["keys"])
        self._forwarding = dialect.timeout_forwarding(table, tables)
        self._first = Prepared(in_order.limit(bindparam("number")), sql, ["number"])
        self._count = Prepared(select(func.count(), func.min(columns.Time), func.max(columns.Time)), sql, [])
        lock_row = select(leases.c.until).where(ours, leases.c.id == bindparam("lock"))
        self._lock_row = Prepared(lock_row.with_for_update(), sql, ["store", "lock"])
        waiting = lock_row.with_hint(
            leases, "WITH (READCOMMITTEDLOCK)", "mssql"
        )  # otherwise SQL Server skips a locked row
        self._has_lock_row = Prepared(waiting, sql, ["store", "lock"])
        self._add_lock_row = Prepared(dialect.insert_new(leases, "id"), sql, ["store", "id", "until"])
        leased = select(leases.c.id, leases.c.until).where(ours, leases.c.id != bindparam("lock"))
        self._leased = Prepared(leased, sql, ["store", "lock"])
        self._lease = Prepared(insert(leases), sql, ["store", "id", "until"])
        self._free = Prepared(of_ids, sql, ["store", "keys"])
        prolong = update(leases).where(ours, dialect.one_of(leases.c.id, "keys")).values(until=bindparam("later"))
        self._prolong = Prepared(prolong, sql, ["later", "store", "keys"])

    def set_up(self, connection: Connection) -> None:
        """Insert the row that pollers lock. Idempotent, also in several processes at once."""
        if not self._has_lock_row.rows(connection, self._name, POLLER_LOCK):
            self._dialect.insert_rows(
                connection, self._add_lock_row, [(self._name, POLLER_LOCK, self._dialect.to_due(EPOCH))]
            )

    def add(self, connection: Connection, timeout: Timeout) -> None:
        """Insert the timeout unless it exists."""
        if self._asks_first and self._exists.rows(connection, timeout.id):
            return
        headers = json.dumps(dict(timeout.message.headers), indent=2)  # ASCII: safe in every character set
        time, version = self.times.kept(timeout.due), PERSISTENCE_VERSION
        saga = str(timeout.saga_id)
        row = (timeout.id, timeout.destination, saga, timeout.message.body, time, headers, version)
        self._dialect.insert_rows(connection, self._insert, [row])

    def peek(self, connection: Connection, timeout_id: str, *, locking: bool) -> Timeout | None:
        """Return the timeout, locked if `locking`."""
        rows = (self._lock if locking else self._peek).rows(connection, timeout_id)
        return self._timeout(rows[0]) if rows else None

    def read(self, connection: Connection, ids: Sequence[str]) -> list[Timeout]:
        """Return the existing timeouts among `ids`, in their order."""
        rows = self._read.rows_each(connection, keys=ids) if ids else []
        found = {timeout.id: timeout for timeout in map(self._timeout, rows)}
        return [found[key] for key in ids if key in found]

    def take_one(self, connection: Connection, timeout_id: str) -> Timeout | None:
        """Delete the timeout and return it."""
        timeout = self.peek(connection, timeout_id, locking=True)
        if timeout is not None:
            self.remove(connection, timeout_id)
        return timeout

    def remove(self, connection: Connection, timeout_id: str) -> bool:
        """Delete the timeout and its lease."""
        deleted = self._delete.change(connection, timeout_id)
        self._free.change_each(connection, self._name, keys=[timeout_id])
        return deleted == 1

    def leased(self, connection: Connection) -> list[str]:
        """Return the ids of leased timeouts: requested from the dispatcher or waiting for a retry."""
        return [key for key, _ in self._leased.rows(connection, self._name, POLLER_LOCK)]

    def remove_by_saga(self, connection: Connection, saga_id: uuid.UUID) -> int:
        """Delete the saga's timeouts; their leases expire."""
        return self._of_saga.change(connection, str(saga_id))

    def look(self, connection: Connection, at: datetime, limit: int) -> tuple[TimeoutsChunk, list[str]]:
        """Return the due timeouts without a lease, and the ids of expired leases."""
        leases, ended = self._leases(connection, at)
        requested = sum(until <= at + ACTIVE_LEASE for until in leases.values())
        number = max(0, min(limit, MAXIMUM_REQUESTED - requested))
        rows = self._first.rows(connection, number + len(leases) + 1)
        free = [DueTimeout(one, self._due(at, *times)) for key, *times in rows if (one := _text(key)) not in leases]
        due = [one for one in free if one.due <= at][:number]
        times = [*leases.values(), *(one.due for one in free if one not in due)]
        return TimeoutsChunk(due, min(times, default=None)), ended

    def _due(self, at: datetime, time: Any, headers: str | None = None, version: str | None = None) -> datetime:  # noqa: ANN401
        """Return the exact due time of a row whose time has come; that of the column for others.

        A row behind it may have an earlier exact time, and the same one in the column.
        """
        kept = self.times.read(time)
        return kept if kept > at else self.times.exact(time, headers, version)

    def take(self, connection: Connection, at: datetime, limit: int, lease_until: datetime) -> TimeoutsChunk:
        """Lease due timeouts; one poller at a time."""
        if not self._lock_row.rows(connection, self._name, POLLER_LOCK):
            return TimeoutsChunk([], at)  # SQLite does not wait here: another poller has the lock
        chunk, ended = self.look(connection, at, limit)
        self._free.change_each(connection, self._name, keys=ended)
        if chunk.due:
            kept = self._dialect.to_due(lease_until)
            self._lease.change_many(connection, [(self._name, one.id, kept) for one in chunk.due])
        return chunk

    def lock_due(self, connection: Connection, at: datetime, limit: int, max_bytes: int) -> LockedTimeouts:
        """Lock due timeouts without a lease."""
        leases, ended = self._leases(connection, at)
        self._free.change_each(connection, self._name, keys=ended)
        rows = self._lock_due.rows(connection, self.times.until(at), limit + len(leases))
        chosen = _fitting(
            [(key, size) for id_, _, size in rows if (key := _text(id_)) not in leases][:limit], max_bytes
        )
        found = self.read(connection, chosen)
        seen = leases.keys() | {timeout.id for timeout in found}
        ahead = self._first.rows(connection, len(seen) + 1)
        others = (self._due(at, *times) for id_, *times in ahead if _text(id_) not in seen)
        early = [timeout.due for timeout in found if timeout.due > at]
        times = [*leases.values(), *early, *others]
        return LockedTimeouts([timeout for timeout in found if timeout.due <= at], min(times, default=None))

    @property
    def forwards(self) -> bool:
        """Whether expired timeouts can move inside the server."""
        return self._forwarding is not None

    def forward(self, connection: Connection, at: datetime, limit: int, max_bytes: int) -> Moved:
        """Move expired timeouts to their queues."""
        assert self._forwarding is not None  # noqa: S101 - `forwards` was True
        kept, until = self._dialect.to_due(at), self.times.until(at)
        return self._forwarding.run(connection, kept, until, to_wire_time(at), limit=limit, max_bytes=max_bytes)

    def remove_many(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete timeouts that the transaction has locked."""
        if self._dialect.deletes_by_list:
            return self._delete_many.change_each(connection, keys=ids)
        return sum(self._delete.change(connection, timeout_id) for timeout_id in ids)

    def lease_locked(self, connection: Connection, ids: Sequence[str], until: datetime) -> None:
        """Lease timeouts until `until`."""
        self._free.change_each(connection, self._name, keys=ids)
        kept = self._dialect.to_due(until)
        self._lease.change_many(connection, [(self._name, one, kept) for one in ids])

    def lease(self, connection: Connection, ids: Sequence[str], until: datetime) -> None:
        """Change the end of existing leases."""
        self._prolong.change_each(connection, self._dialect.to_due(until), self._name, keys=ids)

    def count(self, connection: Connection) -> TimeoutCount:
        """Return the number of timeouts, and the due times of the first and the last."""
        [(number, first, last)] = self._count.rows(connection)
        if not number:
            return TimeoutCount(0, None, None)
        return TimeoutCount(number, *(None if one is None else self.times.read(one) for one in (first, last)))

    def _leases(self, connection: Connection, at: datetime) -> tuple[dict[str, datetime], list[str]]:
        """Return the current leases with their ends, and the ids of expired leases."""
        leases = {
            key: self._dialect.from_due(until) for key, until in self._leased.rows(connection, self._name, POLLER_LOCK)
        }
        ended = [key for key, until in leases.items() if until <= at]
        for key in ended:
            del leases[key]
        return leases, ended

    def _timeout(self, row: Sequence[Any]) -> Timeout:
        key, destination, saga, state, time, headers, version = row
        timeout_id, encoded = _text(key), (headers or "").encode("utf-8", "surrogatepass")
        message = Message.from_encoded(timeout_id, encoded, bytes(state or b""))
        saga_id = NO_SAGA if saga is None else uuid.UUID(str(saga))
        return Timeout(timeout_id, message, destination, self.times.exact(time, headers, version), saga_id)


def _fitting(sized: Sequence[tuple[str, int | None]], max_bytes: int) -> list[str]:
    """Return the keys that fit into `max_bytes`, at least the first."""
    fitting: list[str] = []
    for key, size in sized:
        max_bytes -= size or 0
        if fitting and max_bytes < 0:
            break
        fitting.append(key)
    return fitting


def _text(key: Any) -> str:  # noqa: ANN401 - str or UUID
    return str(key).lower()
