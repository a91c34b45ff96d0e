"""The timeout persister on SQL: the table of NServiceBus' SQL persistence, and the leases of its timeouts."""

from __future__ import annotations

import json
import logging
import re
import uuid
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    inspect,
    literal_column,
    or_,
    select,
    type_coerce,
    update,
)
from sqlalchemy.schema import CreateIndex

from delayline.checks import time_span, whole_number
from delayline.clock import EPOCH, from_microseconds, to_microseconds
from delayline.delayed.store import DueCount, Forwarded, Outcome
from delayline.errors import ConfigurationError, CorruptHeaders, NotStarted
from delayline.events import Event, emit
from delayline.message import DelayedMessage, Message, in_utc, to_wire_time
from delayline.sql.deadlines import long_work
from delayline.sql.on_database import StoreOnDatabase
from delayline.sql.prepared import Prepared
from delayline.sql.schema import EVERY_RIGHT, QUEUES
from delayline.sql.setup import RequiredTables
from delayline.sql.statements import WAITING, check_size, queue_channel, store_channel
from delayline.sql.transport import SqlTransport
from delayline.timeouts.nservicebus import PERSISTENCE_VERSION, TimeoutTimes, table_prefix, timeout_table
from delayline.timeouts.persister import (
    NO_SAGA,
    TO_GIVE_A_TIME,
    DueTimeout,
    LockedTimeouts,
    Timeout,
    TimeoutCount,
    TimeoutsChunk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Engine, Table

    from delayline.sql.databases import SqlDatabase
    from delayline.sql.dialect import Dialect
    from delayline.sql.moves import Moved
    from delayline.sql.schema import QueueTables
    from delayline.sql.two_phase import TwoPhaseCommit
    from delayline.transaction import Transaction


#: The most timeouts requested from the dispatcher at a time: the poller reads past leased rows at each look.
MAXIMUM_REQUESTED: Final = 1000
#: A lease that ends later than this belongs to a failed request and does not count towards MAXIMUM_REQUESTED.
ACTIVE_LEASE: Final = timedelta(minutes=2)
#: Id of the lease row that a poller locks, so that a single poller at a time leases timeouts.
POLLER_LOCK: Final = ""
#: The most timeouts without a time that a line of the log names.
MOST_NAMED: Final = 10
TIMEOUT_COLUMNS: Final = ["Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion"]


class TimeoutStatements:
    """The statements of a SqlTimeoutPersister."""

    def __init__(self, table: Table, tables: QueueTables, dialect: Dialect) -> None:
        columns, leases, sql = table.c, tables.leases, dialect.sql
        self.table = table
        self._dialect = dialect
        self.times: TimeoutTimes = TimeoutTimes(dialect)
        self._name = str(table.name)
        ours, of_id = leases.c.store == bindparam("store"), columns.Id == bindparam("key")
        of_ids = delete(leases).where(ours, dialect.words.one_of(leases.c.id, "keys"))
        content = select(columns.Id, columns.Destination, columns.SagaId, columns.State, columns.Time, columns.Headers)
        content = content.add_columns(columns.PersistenceVersion)
        look, of_keys = content.where(of_id), dialect.words.one_of(columns.Id, "keys")
        self._asks_first = not dialect.timeouts.inserts_new
        new = insert(table) if self._asks_first else dialect.words.insert_new(table, "Id")
        self._insert = Prepared(new, sql, TIMEOUT_COLUMNS)
        self._exists = Prepared(select(columns.Id).where(of_id).with_hint(table, *WAITING), sql, ["key"])
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
        forwarding = dialect.timeouts.forwarding
        self._forwarding = None if forwarding is None else forwarding(table, tables)
        self._first = Prepared(in_order.limit(bindparam("number")), sql, ["number"])
        times = (func.count(columns.Time), func.min(columns.Time), func.max(columns.Time))
        self._count = Prepared(select(*times, func.count()), sql, [])
        of_null = content.where(columns.Time.is_(None)).order_by(columns.Id)
        self._without_time = Prepared(of_null.limit(bindparam("number")), sql, ["number"])
        lock_row = select(leases.c.until).where(ours, leases.c.id == bindparam("lock"))
        self._lock_row = Prepared(lock_row.with_for_update(), sql, ["store", "lock"])
        self._has_lock_row = Prepared(lock_row, sql, ["store", "lock"])
        self._add_lock_row = Prepared(dialect.words.insert_new(leases, "id"), sql, ["store", "id", "until"])
        leased = select(leases.c.id, leases.c.until).where(ours, leases.c.id != bindparam("lock"))
        self._leased = Prepared(leased, sql, ["store", "lock"])
        self._lease = Prepared(insert(leases), sql, ["store", "id", "until"])
        self._free = Prepared(of_ids, sql, ["store", "keys"])
        prolong = update(leases).where(ours, dialect.words.one_of(leases.c.id, "keys")).values(until=bindparam("later"))
        self._prolong = Prepared(prolong, sql, ["later", "store", "keys"])

    def lacks_lock_row(self, connection: Connection) -> bool:
        """Return whether the row that pollers lock is missing."""
        return not self._has_lock_row.rows(connection, self._name, POLLER_LOCK)

    def set_up(self, connection: Connection) -> None:
        """Insert the row that pollers lock. Idempotent, also in several processes at once."""
        if self.lacks_lock_row(connection):
            self._dialect.bulk.insert_rows(
                connection, self._add_lock_row, [(self._name, POLLER_LOCK, self._dialect.values.to_due(EPOCH))]
            )

    def add(self, connection: Connection, timeout: Timeout) -> None:
        """Insert the timeout unless it exists."""
        if self._asks_first and self._exists.rows(connection, timeout.id):
            return
        headers = json.dumps(dict(timeout.message.headers), indent=2)  # ASCII: safe in every character set
        time, version = self.times.kept(timeout.due), PERSISTENCE_VERSION
        saga = str(timeout.saga_id)
        row = (timeout.id, timeout.destination, saga, timeout.message.body, time, headers, version)
        self._dialect.bulk.insert_rows(connection, self._insert, [row])

    def peek(self, connection: Connection, timeout_id: str, *, locking: bool) -> Timeout | None:
        """Return the timeout, locked if `locking`; None for an id that a column of GUIDs could not be compared with."""
        if not _is_guid(timeout_id):
            return None
        rows = (self._lock if locking else self._peek).rows(connection, timeout_id)
        return self._timeout(rows[0]) if rows else None

    def read(self, connection: Connection, ids: Sequence[str]) -> list[Timeout]:
        """Return the existing timeouts among `ids`, in their order."""
        rows = self._read.rows_each(connection, keys=ids) if ids else []
        timeouts = {timeout.id: timeout for timeout in map(self._timeout, rows)}
        return [timeouts[key] for key in ids if key in timeouts]

    def take_one(self, connection: Connection, timeout_id: str) -> Timeout | None:
        """Delete the timeout and return it."""
        timeout = self.peek(connection, timeout_id, locking=True)
        if timeout is not None:
            self.remove(connection, timeout_id)
        return timeout

    def remove(self, connection: Connection, timeout_id: str) -> bool:
        """Delete the timeout and its lease."""
        if not _is_guid(timeout_id):
            return False
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
        free = [DueTimeout(key, self._due(at, *times)) for raw, *times in rows if (key := _text(raw)) not in leases]
        due = [timeout for timeout in free if timeout.due <= at][:number]
        times = [*leases.values(), *(timeout.due for timeout in free if timeout not in due)]
        return TimeoutsChunk(due, min(times, default=None)), ended

    def _due(self, at: datetime, time: Any, headers: str | None = None, version: str | None = None) -> datetime:  # noqa: ANN401
        """Return the exact due time of a row whose time has come; that of the column for others.

        A row behind it may have an earlier exact time, and the same time in the column.
        """
        kept = self.times.read(time)
        return kept if kept > at else self.times.exact(time, headers, version)

    def take(self, connection: Connection, at: datetime, limit: int, lease_until: datetime) -> TimeoutsChunk:
        """Lease due timeouts; a single poller at a time."""
        if not self._lock_row.rows(connection, self._name, POLLER_LOCK):
            return TimeoutsChunk([], at)  # SQLite does not wait here: another poller has the lock
        chunk, ended = self.look(connection, at, limit)
        self._free.change_each(connection, self._name, keys=ended)
        if chunk.due:
            kept = self._dialect.values.to_due(lease_until)
            self._lease.change_many(connection, [(self._name, timeout.id, kept) for timeout in chunk.due])
        return chunk

    def lock_due(self, connection: Connection, at: datetime, limit: int, max_bytes: int) -> LockedTimeouts:
        """Lock due timeouts without a lease."""
        leases, ended = self._leases(connection, at)
        self._free.change_each(connection, self._name, keys=ended)
        rows = self._lock_due.rows(connection, self.times.until(at), limit + len(leases))
        chosen = _fitting(
            [(key, size) for id_, _, size in rows if (key := _text(id_)) not in leases][:limit], max_bytes
        )
        timeouts = self.read(connection, chosen)
        seen = leases.keys() | {timeout.id for timeout in timeouts}
        ahead = self._first.rows(connection, len(seen) + 1)
        others = (self._due(at, *times) for id_, *times in ahead if _text(id_) not in seen)
        early = [timeout.due for timeout in timeouts if timeout.due > at]
        times = [*leases.values(), *early, *others]
        return LockedTimeouts([timeout for timeout in timeouts if timeout.due <= at], min(times, default=None))

    @property
    def forwards(self) -> bool:
        """Whether expired timeouts can move inside the server."""
        return self._forwarding is not None

    def forward(self, connection: Connection, at: datetime, limit: int, max_bytes: int) -> Moved:
        """Move expired timeouts to their queues."""
        assert self._forwarding is not None  # noqa: S101 - `forwards` was True
        kept, until = self._dialect.values.to_due(at), self.times.until(at)
        return self._forwarding.run(connection, kept, until, to_wire_time(at), limit=limit, max_bytes=max_bytes)

    def remove_many(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete timeouts that the transaction has locked."""
        if self._dialect.words.deletes_by_list:
            return self._delete_many.change_each(connection, keys=ids)
        return sum(self._delete.change(connection, timeout_id) for timeout_id in ids)

    def lease_locked(self, connection: Connection, ids: Sequence[str], until: datetime) -> None:
        """Lease timeouts until `until`."""
        self._free.change_each(connection, self._name, keys=ids)
        kept = self._dialect.values.to_due(until)
        self._lease.change_many(connection, [(self._name, timeout_id, kept) for timeout_id in ids])

    def lease(self, connection: Connection, ids: Sequence[str], until: datetime) -> None:
        """Change the end of existing leases."""
        self._prolong.change_each(connection, self._dialect.values.to_due(until), self._name, keys=ids)

    def count(self, connection: Connection) -> TimeoutCount:
        """Return the number of timeouts, and the due times of the first and the last."""
        [(number, first, last, rows)] = self._count.rows(connection)
        first, last = (None if value is None else self.times.read(value) for value in (first, last))
        return TimeoutCount(number, first, last, without_time=rows - number)

    def without_time(self, connection: Connection, limit: int) -> list[Timeout]:
        """Return timeouts whose column Time is NULL."""
        return [self._timeout(row) for row in self._without_time.rows(connection, limit)]

    def _leases(self, connection: Connection, at: datetime) -> tuple[dict[str, datetime], list[str]]:
        """Return the current leases with their ends, and the ids of expired leases."""
        leases = {
            key: self._dialect.values.from_due(until)
            for key, until in self._leased.rows(connection, self._name, POLLER_LOCK)
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


logger: logging.Logger = logging.getLogger(__name__)


class SqlTimeoutPersister(StoreOnDatabase):
    """Timeout persister in the table of NServiceBus' SQL persistence, which a .NET endpoint may have left or share.

    Args:
        database: A URL, as `postgresql://user@host/name` or `sqlite:///file.db`; or a `SqlDatabase`, or an Engine of
            SQLAlchemy for a server, which say how connections are made.
        table_prefix: Prefix of the table's name; by default the endpoint's name with `_` for `.`, and a `_` at the end.
        schema: Schema of the tables; by default the connection's, on SQL Server `dbo`.
        two_phase: Coordinates transactions with a transport in another database; this database prepares them.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
    """

    def __init__(
        self,
        database: str | Engine | SqlDatabase,
        *,
        table_prefix: str | None = None,
        schema: str | None = None,
        two_phase: TwoPhaseCommit | None = None,
    ) -> None:
        super().__init__(database, schema, two_phase)
        if table_prefix is not None and not table_prefix:
            raise ConfigurationError("table_prefix='' would be shared by all endpoints: leave it out, or give a prefix")
        self._prefix = table_prefix
        self._open: TimeoutStatements | None = None
        self._take_part()

    def table_of(self, endpoint_name: str) -> str:
        """Return the name of the endpoint's table. Raises ConfigurationError if it is too long."""
        return str(self._table(endpoint_name).name)

    async def has_table(self, endpoint_name: str) -> bool:
        """Return whether the endpoint's table exists. Works before `open`, and changes nothing."""
        table = self._table(endpoint_name)
        return await self._database.look(
            lambda connection: inspect(connection).has_table(str(table.name), schema=table.schema)
        )

    @long_work
    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create missing tables; a table made by .NET stays as it is. Raises as a store's `setup_infrastructure`."""
        table = self._table(endpoint_name)
        await self._open_database()
        try:
            required = self._required(table)
            await self._database.set_up(required.plan, required.set_up)
        finally:
            await self._close_database()

    async def planned_infrastructure(self, endpoint_name: str) -> Sequence[str]:
        """Return the SQL that `setup_infrastructure` would run, without running it. Raises the same errors."""
        required = self._required(self._table(endpoint_name))
        return await self._database.plan(required.plan, required.script)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        if not takes:
            return ()  # an endpoint that only sends to the timeouts queue uses no table
        needed = dict.fromkeys([self._table(endpoint_name), self._tables.leases], EVERY_RIGHT)
        return await self._missing_rights(needed, takes=takes)

    async def open(self, endpoint_name: str) -> None:
        """Open the database, check the endpoint's table, and insert the row that pollers lock."""
        if self._open is not None:
            return
        table = self._table(endpoint_name)
        await self._open_database()
        try:
            await self._database.read(self._required(table).check)
            if self._database.dialect.words.forces_indexes:
                await self._database.read(partial(_forget_missing_indexes, table=table))
            statements = TimeoutStatements(table, self._tables, self._database.dialect)
            await self._database.set_up(statements.lacks_lock_row, statements.set_up)
            await self._database.read(partial(_name_those_without_time, statements=statements))
            if self._two_phase is not None:
                await self._two_phase.start()
        except BaseException:
            await self._close_database()
            raise
        self._open = statements

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._open is not None:
            self._open = None
            if self._two_phase is not None:
                await self._two_phase.stop()
            await self._close_database()

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        """Keep the timeout."""
        check_size(timeout.message, self._database.dialect)
        await self._database.write(partial(self._statements.add, timeout=timeout), transaction, one_statement=True)

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        """Return the timeout, locked until the end of the transaction."""
        peek = partial(self._statements.peek, timeout_id=timeout_id, locking=transaction is not None)
        if transaction is None:
            return await self._database.read(peek)
        return await self._database.write(peek, transaction)

    async def take(self, timeout_id: str, transaction: Transaction) -> Timeout | None:
        """Delete the timeout and return it."""
        return await self._database.write(partial(self._statements.take_one, timeout_id=timeout_id), transaction)

    async def remove(self, timeout_id: str, transaction: Transaction | None = None) -> bool:
        """Delete the timeout and its lease."""
        return await self._database.write(partial(self._statements.remove, timeout_id=timeout_id), transaction)

    async def remove_by_saga(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> int:
        """Delete the saga's timeouts."""
        clear = partial(self._statements.remove_by_saga, saga_id=saga_id)
        return await self._database.write(clear, transaction, one_statement=True)

    async def next_chunk(
        self, at: datetime, limit: int, *, lease_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        """Lease due timeouts."""
        statements = self._statements
        if limit == 0:
            return await self._database.read(lambda connection: statements.look(connection, at, 0)[0])
        take = partial(statements.take, at=at, limit=limit, lease_until=lease_until)
        return await self._database.write(take, transaction)

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        """Lock due timeouts without a lease."""
        lock = partial(self._statements.lock_due, at=at, limit=limit, max_bytes=max_bytes)
        return await self._database.write(lock, transaction)

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        """Delete timeouts that are locked."""
        return await self._database.write(partial(self._statements.remove_many, ids=ids), transaction)

    async def lease_locked(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        """Lease locked timeouts."""
        await self._database.write(partial(self._statements.lease_locked, ids=ids, until=until), transaction)

    def forwards_to(self, transport: object) -> bool:
        """Return whether expired timeouts can move to the transport's queues inside the database."""
        here = isinstance(transport, SqlTransport) and transport.keeps_queues_in(self._database, self._schema)
        return here and self._statements.forwards

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Move expired timeouts to their queues inside the database."""
        forward = partial(self._statements.forward, at=at, limit=limit, max_bytes=max_bytes)
        moved = await self._database.write(forward, one_statement=True)
        self._database.notify({queue_channel(name): 0 for name in moved.queues})
        next_due = None if moved.next_due is None else self._database.dialect.values.from_due(moved.next_due)
        return Forwarded(moved.number, next_due, moved.left)

    async def lease(self, ids: Sequence[str], until: datetime) -> None:
        """Change the end of existing leases."""
        lease = partial(self._statements.lease, ids=ids, until=until)
        await self._database.write(lease, one_statement=len(ids) == 1)

    @long_work
    async def count(self) -> TimeoutCount:
        """Return how many timeouts wait."""
        return await self._database.read(self._statements.count)

    async def without_time(self, limit: int = 100) -> Sequence[DelayedMessage]:
        """Return messages of the table whose column Time is NULL, which .NET may have left: they are never due.

        `cancel` deletes a timeout, `reschedule` gives it a time.

        Args:
            limit: The most messages to return; 1 or more.
        """
        limit = whole_number("limit", limit, at_least=1)
        timeouts = await self._database.read(partial(self._statements.without_time, limit=limit))
        return [_delayed(timeout) for timeout in timeouts]

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` with the new due time whenever a process reschedules a timeout."""
        return self._database.notifications.subscribe(self._channel, lambda due: callback(from_microseconds(due)))

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete the timeouts with this id or message id; a pending request for it then finds nothing."""
        return await self._database.write(partial(self._management.cancel, message_id=message_id), transaction)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Change the due time of the timeouts with this id or message id, unless they were requested for dispatch."""
        due = in_utc(due)
        move = partial(self._management.reschedule, message_id=message_id, due=due)
        outcome = await self._database.write(move, transaction)
        if outcome is Outcome.DONE:
            await self._database.notify_on_commit({self._channel: to_microseconds(due)}, transaction)
        return outcome

    @long_work
    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return a page of the table's messages, earliest due first; excludes messages still in the timeouts queue."""
        page = partial(self._management.pending, destination=destination, limit=limit, offset=offset)
        return await self._database.read(page)

    @long_work
    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count pending messages by bucket and destination."""
        return await self._database.read(partial(self._management.count_by_due, bucket=time_span("bucket", bucket)))

    @property
    def _management(self) -> TimeoutManagement:
        return TimeoutManagement(self._statements, self._database.dialect)

    @property
    def _channel(self) -> str:
        return store_channel(self._statements.table)

    @property
    def _statements(self) -> TimeoutStatements:
        if self._open is None:
            raise NotStarted("the timeout persister is not open: start its endpoint first")
        return self._open

    def _table(self, endpoint_name: str) -> Table:
        prefix = self._prefix or table_prefix(endpoint_name)
        return timeout_table(prefix, self._schema, self._database.dialect)

    def _required(self, table: Table) -> RequiredTables:
        return RequiredTables(self._database.dialect, self._schema, QUEUES, others=[table, self._tables.leases])


def _forget_missing_indexes(connection: Connection, table: Table) -> None:
    """Remove missing indexes from `table`, so that statements force only existing indexes.

    A table made by .NET may lack an index, or have it under another name.
    """
    indexes = {index["name"] for index in inspect(connection).get_indexes(str(table.name), schema=table.schema)}
    missing = {index for index in table.indexes if index.name not in indexes}
    table.indexes -= missing
    for index in missing:
        log_text = "Table %s has no index %s: polling it reads all of its rows. Create it: %s"
        statement = str(CreateIndex(index).compile(connection)).strip()
        emit(logger, logging.WARNING, Event.INDEX_MISSING, log_text, table.name, index.name, statement)


def _name_those_without_time(connection: Connection, statements: TimeoutStatements) -> None:
    """Log a warning that names the rows whose time is NULL."""
    timeouts = statements.without_time(connection, MOST_NAMED)
    if timeouts:
        log_text = "Table %s has timeouts whose Time is NULL, which are never due: %s%s. %s"
        ids = ", ".join(_logical(timeout.message).id for timeout in timeouts)
        more = " and perhaps more" if len(timeouts) == MOST_NAMED else ""
        messages = tuple(map(_delayed, timeouts))
        table = statements.table.name
        emit(logger, logging.WARNING, Event.WITHOUT_TIME, log_text, table, ids, more, TO_GIVE_A_TIME, messages=messages)


#: What means something in a pattern of LIKE; `[` on SQL Server only.
LIKE_SIGNS: Final = re.compile(r"[%_/\[]")


class TimeoutManagement:
    """Lists, counts, cancels and reschedules timeouts of a table."""

    def __init__(self, statements: TimeoutStatements, dialect: Dialect) -> None:
        self._statements = statements
        self._exact = dialect.words.exact
        self._table = statements.table
        columns, sql = self._table.c, dialect.sql
        headers: ColumnElement[Any] = columns.Headers
        self._headers = cast(headers, Text) if dialect.timeouts.json_headers else type_coerce(headers, Text)
        of_id = columns.Id == bindparam("key")
        free = select(columns.Id).where(of_id).with_for_update(skip_locked=True)
        exists = select(columns.Id).where(of_id).with_hint(self._table, *WAITING)
        self._free = Prepared(free, sql, ["key"])
        self._exists = Prepared(exists, sql, ["key"])
        moved = {"Time": bindparam("at"), "PersistenceVersion": PERSISTENCE_VERSION}  # no longer the header's time
        self._move = Prepared(update(self._table).where(of_id).values(moved), sql, ["at", "key"])

    def pending(self, connection: Connection, destination: str | None, limit: int, offset: int) -> list[DelayedMessage]:
        """Return a page of the pending messages, earliest due first."""
        columns = self._table.c
        query = select(columns.Id).where(columns.Time.is_not(None)).order_by(columns.Time, columns.Id)
        if destination is not None:
            query = query.where(self._exact(columns.Destination) == destination)
        ids = [str(key).lower() for key in connection.execute(query.limit(limit).offset(offset)).scalars()]
        return [_delayed(timeout) for timeout in self._statements.read(connection, ids)]

    def count_by_due(self, connection: Connection, bucket: timedelta) -> list[DueCount]:
        """Count pending messages by bucket and destination."""
        columns, times = self._table.c, self._statements.times
        named = self._exact(columns.Destination)
        query = select(columns.Time, named, func.count()).where(columns.Time.is_not(None))
        counts: dict[tuple[datetime, str], int] = {}
        for time, destination, number in connection.execute(query.group_by(columns.Time, named)):
            due = times.read(time)
            key = (due - (due - EPOCH) % bucket, destination or "")
            counts[key] = counts.get(key, 0) + number
        return [DueCount(start, destination, number) for (start, destination), number in sorted(counts.items())]

    def cancel(self, connection: Connection, message_id: str) -> Outcome:
        """Delete the timeouts of the message."""
        return self._if_free(connection, message_id, self._statements.remove)

    def reschedule(self, connection: Connection, message_id: str, due: datetime) -> Outcome:
        """Change the due time of the message's timeouts, unless the dispatcher was requested to send any."""
        kept, leased = self._statements.times.kept(due), self._statements.leased(connection)

        def move(connection: Connection, key: str) -> object:
            return self._move.change(connection, kept, key)

        return self._if_free(connection, message_id, move, leased)

    def _if_free(
        self,
        connection: Connection,
        message_id: str,
        work: Callable[[Connection, str], object],
        leased: Sequence[str] = (),
    ) -> Outcome:
        keys = self._keys_of(connection, message_id)
        done = [key for key in keys if key not in leased and self._free.rows(connection, key)]
        for key in done:
            work(connection, key)
        if done:
            return Outcome.DONE
        exists = any(self._exists.rows(connection, key) for key in keys)
        return Outcome.DISPATCHING if exists else Outcome.NOT_PENDING

    def _keys_of(self, connection: Connection, message_id: str) -> list[str]:
        """Return the ids of timeouts whose own id or message id is `message_id`."""
        words = {json.dumps(message_id), json.dumps(message_id, ensure_ascii=False)}
        patterns = [f"%{escaped}%" for escaped in (LIKE_SIGNS.sub(r"/\g<0>", word) for word in words)]
        query = select(self._table.c.Id).where(or_(*(self._headers.like(pattern, escape="/") for pattern in patterns)))
        keys = {str(key).lower() for key in connection.execute(query).scalars()}
        keys |= {str(uuid.UUID(message_id))} if _is_guid(message_id) else set()
        timeouts = self._statements.read(connection, sorted(keys))
        return [timeout.id for timeout in timeouts if message_id in (timeout.id, _logical(timeout.message).id)]


def _delayed(timeout: Timeout) -> DelayedMessage:
    return DelayedMessage(_logical(timeout.message), timeout.destination or "", timeout.due)


def _logical(message: Message) -> Message:
    """Return the message with its original id; with the timeout's id if its headers are unreadable."""
    try:
        return message.logical
    except CorruptHeaders:
        return message


def _is_guid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
