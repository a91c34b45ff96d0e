"""The statements on an endpoint's table of timeouts, and on who holds which of them."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, delete, func, insert, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from delayline.clock import EPOCH
from delayline.message import Message, to_wire_time
from delayline.sql.prepared import Prepared
from delayline.timeouts.nservicebus import TimeoutTimes
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

    from sqlalchemy import Connection, Insert, Table

    from delayline.sql.dialect import Dialect
    from delayline.sql.forwarding import Moved
    from delayline.sql.schema import QueueTables

#: What .NET writes into this column is the version of its persistence.
PERSISTENCE_VERSION: Final = "delayline"
#: So many requests are in the dispatcher's hands at most; the poller steps over what is held at every look.
HELD_AT_MOST: Final = 1000
#: What is held for longer is nobody's work now: a request that has failed.
AT_WORK: Final = timedelta(minutes=2)
#: The row that pollers lock, so that one of them looks at a time.
TURN: Final = ""
COLUMNS: Final = ["Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion"]


class TimeoutStatements:
    """Every statement a SqlTimeoutPersister runs."""

    def __init__(self, table: Table, tables: QueueTables, dialect: Dialect) -> None:
        columns, holds, sql = table.c, tables.leases, dialect.sql
        self.table = table
        self._dialect = dialect
        self.times = TimeoutTimes(dialect)
        self._name = str(table.name)
        ours, of_id = holds.c.store == bindparam("store"), columns.Id == bindparam("key")
        of_ids = delete(holds).where(ours, dialect.one_of(holds.c.id, "keys"))
        content = select(columns.Id, columns.Destination, columns.SagaId, columns.State, columns.Time, columns.Headers)
        look, of_keys = content.where(of_id), dialect.one_of(columns.Id, "keys")
        self._asks_first = sql.name == "mssql"  # which has no insert for keys of that type that may be there
        new = insert(table) if self._asks_first else dialect.insert_new(table, "Id")
        self._insert = Prepared(new, sql, COLUMNS)
        self._exists = Prepared(select(columns.Id).where(of_id), sql, ["key"])
        self._peek = Prepared(look, sql, ["key"])
        self._lock = Prepared(look.with_for_update(), sql, ["key"])
        self._delete = Prepared(delete(table).where(of_id), sql, ["key"])
        self._of_saga = Prepared(delete(table).where(columns.SagaId == bindparam("saga")), sql, ["saga"])
        in_order = select(columns.Id, columns.Time).where(columns.Time.is_not(None)).order_by(columns.Time)
        size = func.coalesce(func.length(columns.State), literal_column("0")) + func.length(columns.Headers)
        due = select(columns.Id, columns.Time, size).where(columns.Time <= bindparam("until")).order_by(columns.Time)
        due = due.limit(bindparam("number")).with_for_update(skip_locked=True)
        self._lock_due = Prepared(due, sql, ["until", "number"])
        self._read = Prepared(content.where(of_keys), sql, ["keys"])
        #: Others may scan the table for a list, and wait for rows on the way that they do not delete.
        self._by_list = sql.name in ("postgresql", "sqlite")
        self._delete_many = Prepared(delete(table).where(of_keys), sql, ["keys"])
        self._forwarding = dialect.timeout_forwarding(table, tables)
        self._first = Prepared(in_order.limit(bindparam("number")), sql, ["number"])
        self._count = Prepared(select(func.count(), func.min(columns.Time), func.max(columns.Time)), sql, [])
        turn = select(holds.c.until).where(ours, holds.c.id == bindparam("turn"))
        self._turn = Prepared(turn.with_for_update(), sql, ["store", "turn"])
        waiting = turn.with_hint(holds, "WITH (READCOMMITTEDLOCK)", "mssql")  # else a locked row is passed over there
        self._has_turn = Prepared(waiting, sql, ["store", "turn"])
        self._add_turn = Prepared(_new_row(holds, dialect), sql, ["store", "id", "until"])
        held = select(holds.c.id, holds.c.until).where(ours, holds.c.id != bindparam("turn"))
        self._held = Prepared(held, sql, ["store", "turn"])
        self._hold = Prepared(insert(holds), sql, ["store", "id", "until"])
        self._free = Prepared(of_ids, sql, ["store", "keys"])
        prolong = update(holds).where(ours, dialect.one_of(holds.c.id, "keys")).values(until=bindparam("later"))
        self._prolong = Prepared(prolong, sql, ["later", "store", "keys"])

    def set_up(self, connection: Connection) -> None:
        """Add what pollers take turns with. Idempotent, also in several processes at once."""
        if not self._has_turn.rows(connection, self._name, TURN):
            self._dialect.insert_rows(connection, self._add_turn, [(self._name, TURN, self._dialect.to_due(EPOCH))])

    def add(self, connection: Connection, timeout: Timeout) -> None:
        """Insert the timeout unless it is there."""
        if self._asks_first and self._exists.rows(connection, timeout.id):
            return
        headers = json.dumps(dict(timeout.message.headers), indent=2)  # in ASCII: every character set keeps it
        time, version = self.times.kept(timeout.due), PERSISTENCE_VERSION
        saga = str(timeout.saga_id)
        row = (timeout.id, timeout.destination, saga, timeout.message.body, time, headers, version)
        self._dialect.insert_rows(connection, self._insert, [row])

    def peek(self, connection: Connection, timeout_id: str, *, locking: bool) -> Timeout | None:
        """Return the timeout, locked if wanted."""
        rows = (self._lock if locking else self._peek).rows(connection, timeout_id)
        return self._timeout(rows[0]) if rows else None

    def read(self, connection: Connection, ids: Sequence[str]) -> list[Timeout]:
        """Return those of the timeouts that are there, in that order."""
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
        """Delete the timeout and its hold."""
        deleted = self._delete.change(connection, timeout_id)
        self._free.change_each(connection, self._name, keys=[timeout_id])
        return deleted == 1

    def held(self, connection: Connection) -> list[str]:
        """Return the ids of timeouts that somebody has been asked for, or that are tried again later."""
        return [held for held, _ in self._held.rows(connection, self._name, TURN)]

    def remove_by_saga(self, connection: Connection, saga_id: uuid.UUID) -> int:
        """Delete the saga's timeouts; their holds end by themselves."""
        return self._of_saga.change(connection, str(saga_id))

    def look(self, connection: Connection, at: datetime, limit: int) -> tuple[TimeoutsChunk, list[str]]:
        """Return what is due and free, and whose holds have ended."""
        holds, ended = self._holds(connection, at)
        at_work = sum(until <= at + AT_WORK for until in holds.values())
        room = max(0, min(limit, HELD_AT_MOST - at_work))
        rows = self._first.rows(connection, room + len(holds) + 1)
        free = [DueTimeout(one, self.times.read(time)) for key, time in rows if (one := _text(key)) not in holds]
        due = [one for one in free[:room] if one.due <= at]
        times = [*holds.values(), *(one.due for one in free[len(due) : len(due) + 1])]
        return TimeoutsChunk(due, min(times, default=None)), ended

    def take(self, connection: Connection, at: datetime, limit: int, hold_until: datetime) -> TimeoutsChunk:
        """Hold what is due and free; one poller at a time."""
        if not self._turn.rows(connection, self._name, TURN):
            return TimeoutsChunk([], at)  # somebody's turn, where nobody waits for locks
        chunk, ended = self.look(connection, at, limit)
        self._free.change_each(connection, self._name, keys=ended)
        if chunk.due:
            kept = self._dialect.to_due(hold_until)
            self._hold.change_many(connection, [(self._name, one.id, kept) for one in chunk.due])
        return chunk

    def lock_due(self, connection: Connection, at: datetime, limit: int, max_bytes: int) -> LockedTimeouts:
        """Lock what is due and free."""
        holds, ended = self._holds(connection, at)
        self._free.change_each(connection, self._name, keys=ended)
        rows = self._lock_due.rows(connection, self.times.until(at), limit + len(holds))
        chosen = _fitting([(key, size) for id_, _, size in rows if (key := _text(id_)) not in holds][:limit], max_bytes)
        found = self.read(connection, chosen)
        taken = holds.keys() | {timeout.id for timeout in found}
        ahead = self._first.rows(connection, len(taken) + 1)
        times = [*holds.values(), *(self.times.read(time) for id_, time in ahead if _text(id_) not in taken)]
        return LockedTimeouts(found, min(times, default=None))

    @property
    def forwards(self) -> bool:
        """Whether expired timeouts can move inside the server."""
        return self._forwarding is not None

    def forward(self, connection: Connection, at: datetime, limit: int, max_bytes: int) -> Moved:
        """Move what has expired to its queues."""
        assert self._forwarding is not None  # noqa: S101 - asked before
        kept, until = self._dialect.to_due(at), self.times.until(at)
        return self._forwarding.run(connection, kept, until, to_wire_time(at), limit=limit, max_bytes=max_bytes)

    def remove_many(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete timeouts that nobody holds."""
        if self._by_list:
            return self._delete_many.change_each(connection, keys=ids)
        return sum(self._delete.change(connection, timeout_id) for timeout_id in ids)

    def set_aside(self, connection: Connection, ids: Sequence[str], until: datetime) -> None:
        """Hold timeouts until then."""
        self._free.change_each(connection, self._name, keys=ids)
        kept = self._dialect.to_due(until)
        self._hold.change_many(connection, [(self._name, one, kept) for one in ids])

    def hold(self, connection: Connection, ids: Sequence[str], until: datetime) -> None:
        """Hold until then what is held."""
        self._prolong.change_each(connection, self._dialect.to_due(until), self._name, keys=ids)

    def count(self, connection: Connection) -> TimeoutCount:
        """Return how many there are, and when the first and the last are due."""
        [(number, first, last)] = self._count.rows(connection)
        if not number:
            return TimeoutCount(0, None, None)
        return TimeoutCount(number, *(None if one is None else self.times.read(one) for one in (first, last)))

    def _holds(self, connection: Connection, at: datetime) -> tuple[dict[str, datetime], list[str]]:
        """Return what is held until when, and whose holds have ended."""
        holds = {held: self._dialect.from_due(until) for held, until in self._held.rows(connection, self._name, TURN)}
        ended = [held for held, until in holds.items() if until <= at]
        for held in ended:
            del holds[held]
        return holds, ended

    def _timeout(self, row: Sequence[Any]) -> Timeout:
        key, destination, saga, state, time, headers = row
        timeout_id, encoded = _text(key), (headers or "").encode("utf-8", "surrogatepass")
        message = Message.from_encoded(timeout_id, encoded, bytes(state or b""))
        saga_id = NO_SAGA if saga is None else uuid.UUID(str(saga))
        return Timeout(timeout_id, message, destination, self.times.read(time), saga_id)


def _fitting(sized: Sequence[tuple[str, int | None]], max_bytes: int) -> list[str]:
    """Return as many as fit, at least one when there is one."""
    fitting: list[str] = []
    for key, size in sized:
        max_bytes -= size or 0
        if fitting and max_bytes < 0:
            break
        fitting.append(key)
    return fitting


def _new_row(holds: Table, dialect: Dialect) -> Insert:
    """Return an insert that leaves a row with the same primary key, which is of two columns, as it is."""
    match dialect.sql.name:
        case "postgresql":
            return postgresql.insert(holds).on_conflict_do_nothing()
        case "sqlite":
            return sqlite.insert(holds).on_conflict_do_nothing()
        case _:
            return dialect.insert_new(holds, "id")


def _text(key: Any) -> str:  # noqa: ANN401 - a text or a UUID
    return str(key).lower()
