"""The transport on SQL: queues are rows of one table beside a registry of their names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import inspect, select

from delayline.checks import time_span
from delayline.errors import BackendUnavailable, ConfigurationError, DispatchFailed, QueueNotFound
from delayline.events import Event, emit
from delayline.external import UNSET
from delayline.grouping import Grouping
from delayline.message import Message
from delayline.sql.backend import SqlBackend
from delayline.sql.database import Database
from delayline.sql.databases import engine_at
from delayline.sql.deadlines import long_work
from delayline.sql.queue_limits import LIMITS_CHANGED, LimitStatements, QueueAdmission, checked_changes, limits_of
from delayline.sql.schema import DECISIONS, EVERY_RIGHT, QUEUES, TO_PUT, TO_READ, TO_TAKE
from delayline.sql.setup import RequiredTables
from delayline.sql.statements import QueueStatements, check_size, queue_channel
from delayline.transaction import TransactionMode
from delayline.transport import ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine, Executable, Table
    from sqlalchemy.ext.asyncio import AsyncEngine

    from delayline.external import ExternalTransaction, Unset
    from delayline.sql.database import Database
    from delayline.sql.dialect import Claims
    from delayline.sql.statements import QueueStatements
    from delayline.sql.transactions import EnlistedTransaction
    from delayline.sql.two_phase import TwoPhaseCommit
    from delayline.transaction import Transaction
    from delayline.transport import QueueLimits, TransportOperation


logger = logging.getLogger(__name__)

ONE_SECOND: Final = timedelta(seconds=1)
#: Seconds at most until messages before those received last are found, while others come in.
FULL_LOOK_EVERY: Final = 0.5
#: Concurrent sends that share a transaction.
MAXIMUM_GROUP: Final = 500
PURGED_AT_ONCE: Final = 500  # a server has room for so many claims only


class SqlTransport(SqlBackend):
    """Transport with queues in a SQL database; `sqlite:///file.db` needs no server.

    Args:
        url: The database, as `postgresql://user@host/name` or `sqlite:///file.db`; or an Engine of SQLAlchemy for a
            server, which makes the connections. They are delayline's own and do not return to the Engine's pool.
        poll_interval: How often idle receivers look for messages without a notification.
        schema: Schema of the tables; by default the connection's, on SQL Server `dbo`.
        two_phase: Coordinates transactions with a store in another database; this database keeps the decisions.
        server_timeout: Seconds to wait for an answer of the server, above 0 and up to 3600; by default 15. Also a
            parameter of the URL, as in `?server_timeout=5`. Set-up and bulk work may take ten times as long.
        pool_size: How many connections a server gets for statements and transactions, 2 to 1000; by default 6. Also a
            parameter of the URL. Notifications, claims and single inserts need one more each. The transports and
            stores of one database share them; if several sizes are given, the largest applies.
        connect: Returns a new connection of the driver (psycopg, PyMySQL or pymssql), as for passwords that expire.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
        MissingExtra: The database's driver is not installed.
    """

    def __init__(
        self,
        url: str | Engine,
        *,
        poll_interval: timedelta = ONE_SECOND,
        schema: str | None = None,
        two_phase: TwoPhaseCommit | None = None,
        server_timeout: float | None = None,
        pool_size: int | None = None,
        connect: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(url, schema, two_phase, server_timeout, pool_size, connect)
        self._url = url if isinstance(url, str) and connect is None else None
        interval = time_span("poll_interval", poll_interval).total_seconds()
        self._statements = QueueStatements(self._tables, self._database.dialect)
        self._limits = LimitStatements(self._tables, self._database.dialect)
        self._idle = IdleQueues(self._database, self._statements, interval)
        self._checked = False
        self._sends = Grouping(self._dispatch_groups, maximum=MAXIMUM_GROUP)
        if two_phase is not None:
            two_phase.decide_in(self._database, self._schema)

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """Every mode works."""
        return TransactionMode.TRANSACTION_SCOPE

    def keeps_queues_in(self, database: Database, schema: str | None) -> bool:
        """Tell whether the queues are in that schema of that database."""
        return self._database is database and self._schema == schema

    def new_engine(self, size: int, *, asynchronous: bool) -> Engine | AsyncEngine:
        """Return an Engine of SQLAlchemy on the database. Raises ConfigurationError for connections of the user's."""
        if self._url is None:
            raise ConfigurationError(
                "the connections of this transport are made by connect= or by an Engine: pass an Engine, as in "
                "context.transaction(engine)"
            )
        return engine_at(self._url, size, asynchronous=asynchronous)

    async def enlist(self, external: ExternalTransaction) -> EnlistedTransaction:
        """Return the external transaction as one that sending can take part in."""
        await self._check_tables()
        return await self._database.enlist(external, self._tables.queued)

    @long_work
    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the tables and register the queues."""
        await self._open_database()
        try:
            await self._database.write(partial(self._set_up, names=queues))
        finally:
            await self._close_database()

    async def planned_infrastructure(self, queues: Sequence[str]) -> Sequence[str]:
        """Return the SQL that `setup_infrastructure` would run; without running it. Raises the same errors."""
        dialect = self._database.dialect

        def whole() -> list[Executable]:
            known = [dialect.insert_new(self._tables.queues, "name").values(name=name) for name in queues]
            return self._required.script() + known

        return await self._database.plan(partial(self._planned, names=queues), whole)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        del endpoint_name
        tables = self._tables
        needed: dict[Table, Sequence[str]] = {tables.queues: TO_READ, tables.queued: TO_TAKE if takes else TO_PUT}
        if self._two_phase is not None:
            needed[tables.decisions] = EVERY_RIGHT
        return await self._missing_rights(needed)

    async def start(self) -> None:
        """Open the database."""
        await self._open_database()

    async def stop(self) -> None:
        """Undo one `start`."""
        await self._sends.stop()
        await self._close_database()

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Insert every message whose queue exists, in one transaction."""
        for operation in operations:
            check_size(operation.message, self._database.dialect)
        await self._check_tables()
        if transaction is None:
            missing = await self._sends.run(operations)
        else:
            missing = await self._dispatch(operations, transaction)
        if missing:
            raise DispatchFailed(
                {
                    position: QueueNotFound(operation.destination)
                    for position, operation in enumerate(operations)
                    if operation.destination in missing
                }
            )

    async def _dispatch_groups(self, groups: Sequence[Sequence[TransportOperation]]) -> Sequence[set[str]]:
        """Insert the operations of concurrent sends in one transaction; return the missing queues for each send."""
        missing = await self._dispatch([operation for operations in groups for operation in operations], None)
        return [missing & {operation.destination for operation in operations} for operations in groups]

    async def _dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None) -> set[str]:
        """Insert the messages whose queues exist, notify receivers, and return the queues that do not exist."""
        one = len(operations) == 1 and operations[0].message.time_to_be_received is None
        put = partial(self._put_one, operations[0]) if one else partial(self._put, operations=operations)
        missing = await self._database.write(put, transaction, one_statement=one)
        reached = {operation.destination for operation in operations} - missing
        await self._database.notify_on_commit({queue_channel(name): 0 for name in reached}, transaction)
        return missing

    async def receiver(self, queue: str) -> SqlReceiver:
        """Return a receiver on the queue. Raises BackendUnusable for tables of an older delayline."""
        await self._check_tables()
        await self._database.read(partial(self._statements.must_exist, queue=queue))
        slots = f"{self._tables.queued.fullname} handled of {queue}"
        admission = QueueAdmission(self._database, self._limits, queue, slots)
        return SqlReceiver(self._database, self._statements, self._claims, queue, self._idle, admission)

    async def has_queue(self, queue: str) -> bool:
        """Return whether the queue is registered."""
        return not await self._database.read(lambda connection: self._statements.missing(connection, [queue]))

    async def queues(self) -> Sequence[str]:
        """Return the names of all queues, in order."""
        query = select(self._tables.queues.c.name).order_by(self._tables.queues.c.name)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def limits(self, queue: str | None = None) -> Sequence[QueueLimits]:
        """Return the limits of the queue, or those of every queue, by name. Raises QueueNotFound."""
        await self._check_tables()
        if queue is not None:
            return [await self._database.read(partial(self._limits.limits, queue=queue))]
        return [limits_of(row) for row in await self._database.read(self._limits.all.rows)]

    async def set_limits(
        self,
        queue: str,
        *,
        paused: bool | Unset = UNSET,
        concurrency: int | Unset | None = UNSET,
        rate: float | Unset | None = UNSET,
    ) -> QueueLimits:
        """Change the limits that are given; see `SupportsQueueLimits`."""
        changes = checked_changes(paused, concurrency, rate)
        await self._check_tables()

        def change(connection: Connection) -> QueueLimits:
            self._limits.limits(connection, queue)
            for name, value in changes.items():
                self._limits.change[name].change(connection, value, queue)
            return self._limits.limits(connection, queue)

        limits = await self._database.write(change)
        await self._database.notify_on_commit({queue_channel(queue): LIMITS_CHANGED})
        return limits

    @long_work
    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, hidden ones included."""

        def counted(connection: Connection) -> int:
            self._statements.must_exist(connection, queue)
            return int(self._statements.count.one(connection, queue))

        return await self._database.read(counted)

    @long_work
    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, oldest first, hidden ones included."""

        def page(connection: Connection) -> list[Message]:
            self._statements.must_exist(connection, queue)
            rows = self._statements.page.rows(connection, queue, limit, offset)
            return [Message.from_encoded(*row[1:]) for row in rows]

        return await self._database.read(page)

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest copy of the message that is not being handled."""
        free: list[int] = []

        def taken(connection: Connection) -> bool:
            copies = self._statements.copies.rows(connection, queue, message_id)
            free.extend(self._claims.take((number for (number,) in copies), 1))
            return self._statements.delete.change_each(connection, keys=free) == 1

        release = partial(self._claims.release, free)
        if transaction is not None:
            transaction.after_end(release)
            return await self._database.write(taken, transaction)
        try:
            return await self._database.write(taken)
        finally:
            release()

    @long_work
    async def purge(self, queue: str) -> int:
        """Remove every message that is not being handled, in batches."""
        await self._database.read(partial(self._statements.must_exist, queue=queue))
        number, after = 0, 0
        while True:
            free: list[int] = []
            try:
                page, deleted = await self._database.write(partial(self._purge, queue=queue, after=after, free=free))
            finally:
                self._claims.release(free)  # after the commit: before it a receiver would still see the rows
            number += deleted
            if len(page) < PURGED_AT_ONCE:
                return number
            after = page[-1]

    def _purge(self, connection: Connection, queue: str, after: int, free: list[int]) -> tuple[list[int], int]:
        rows = self._statements.numbers.rows(connection, queue, after, PURGED_AT_ONCE)
        page = [number for (number,) in rows]
        free.extend(self._claims.take(page, len(page)))
        return page, self._statements.delete.change_each(connection, keys=free)

    @property
    def _claims(self) -> Claims:
        return self._database.claims(self._tables.queued.fullname)

    @property
    def _required(self) -> RequiredTables:
        groups = [QUEUES] if self._two_phase is None else [QUEUES, DECISIONS]
        return RequiredTables(self._database.dialect, self._schema, *groups)

    def _planned(self, connection: Connection, names: Sequence[str]) -> list[Executable]:
        dialect, registry = self._database.dialect, self._tables.queues
        steps = self._required.plan(connection)
        known: set[str] = set()
        if inspect(connection).has_table(registry.name, schema=registry.schema):
            known = set(connection.execute(select(registry.c.name)).scalars())
        return steps + [dialect.insert_new(registry, "name").values(name=name) for name in names if name not in known]

    async def _check_tables(self) -> None:
        """Check the tables before their first use, not at `start`, which `setup` calls before they exist.

        Uses a separate connection: an external transaction's connection cannot be inspected.
        """
        if not self._checked:
            await self._database.read(self._required.check_upgraded)
            self._checked = True

    def _set_up(self, connection: Connection, names: Sequence[str]) -> None:
        self._required.set_up(connection)
        if self._two_phase is not None:
            self._two_phase.identify(connection)
        self._statements.register.change_many(connection, [(name,) for name in names])

    def _put_one(self, operation: TransportOperation, connection: Connection) -> set[str]:
        message, queue = operation.message, operation.destination
        put = self._statements.put_existing.change(connection, queue, message.id, message.encoded_headers, message.body)
        return set() if put else {queue}

    def _put(self, connection: Connection, operations: Sequence[TransportOperation]) -> set[str]:
        """Insert the messages whose queues exist and return the names of those that do not."""
        missing = self._statements.missing(connection, (operation.destination for operation in operations))
        rows = [
            (operation.destination, operation.message.id, operation.message.encoded_headers, operation.message.body)
            for operation in operations
            if operation.destination not in missing
        ]
        if not rows:
            return missing
        spans = [one.message.time_to_be_received for one in operations if one.destination not in missing]
        insert_rows, statements = self._database.dialect.insert_rows, self._statements
        if any(span is not None for span in spans):
            expiry = self._expiry(connection, spans)
            insert_rows(connection, statements.put_expiring, [(*row, at) for row, at in zip(rows, expiry, strict=True)])
        else:
            insert_rows(connection, statements.put, rows)
        return missing

    def _expiry(self, connection: Connection, spans: Sequence[timedelta | None]) -> list[object]:
        """Return when messages that may wait for so long expire, by the database's clock; None for never."""
        dialect = self._database.dialect
        now = dialect.from_due(self._statements.now.one(connection))
        latest = datetime.max.replace(tzinfo=UTC) - now
        return [None if span is None or span > latest else dialect.to_due(now + span) for span in spans]


class SqlReceiver:
    """Takes messages from one queue; the claims of a process that ends are free again at once."""

    def __init__(
        self,
        database: Database,
        statements: QueueStatements,
        claims: Claims,
        queue: str,
        idle: IdleQueues,
        admission: QueueAdmission,
    ) -> None:
        self._database = database
        self._statements = statements
        self._queue = queue
        self._claims = claims
        self._idle = idle
        self._admission = admission
        self._news = asyncio.Event()
        self._stopped = False
        self._after = 0
        """The number of the last message claimed."""
        self._full_at = -math.inf
        """When messages were last looked for from the first one on."""
        self._unsubscribe = database.notifications.subscribe(queue_channel(queue), self._on_news)

    @property
    def server_timeout(self) -> float:
        """Seconds that an answer may take."""
        return self._database.dialect.server_timeout

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and claim up to `limit` of them."""
        while not self._stopped:
            self._news.clear()
            batch: list[ReceivedMessage] = []
            expired: list[ReceivedMessage] = []
            admitted = await self._admission.admit(limit)
            if not admitted:
                self._admission.received([])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._admission.wait):
                        await self._news.wait()
                continue
            try:
                await self._database.read(partial(self._claim, limit=admitted, batch=batch, expired=expired))
                await self._discard(expired)
                confirmed = not batch or await self._admission.confirm()
            except BaseException:
                self._claims.release(
                    _number(received) for received in batch + expired
                )  # the caller will never receive them
                self._admission.received([])
                raise
            if not confirmed:
                await self.release_many(batch)
                continue
            self._admission.received([_number(received) for received in batch])
            if batch:
                return batch
            if not expired:
                await self._idle.wait(self._queue, self._news)
        return []

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message, now or at the commit."""
        return (await self.acknowledge_many([received], transaction))[0]

    async def acknowledge_many(
        self, received: Sequence[ReceivedMessage], transaction: Transaction | None = None
    ) -> Sequence[bool]:
        """Delete the messages, now or at the commit."""
        numbers = [_number(one) for one in received]
        remove, forget = partial(self._statements.remove, numbers=numbers), partial(self._forget, numbers)
        one_statement = self._statements.removes_at_once(len(numbers))
        removed = await self._database.write(remove, transaction, one_statement=one_statement)
        forget() if transaction is None else transaction.after_commit(forget)
        return [number in removed for number in numbers]

    async def release(self, received: ReceivedMessage) -> None:
        """Give up the claim and wake receivers."""
        await self.release_many([received])

    async def release_many(self, received: Sequence[ReceivedMessage]) -> None:
        """Give up the claims and wake receivers."""
        numbers = [_number(one) for one in received]
        self._claims.release(numbers)
        self._admission.ended(numbers)
        with contextlib.suppress(BackendUnavailable):  # then the server ends the claims with their connection
            await self._database.read(lambda _: self._claims.flush())
        self._database.notifications.notify(queue_channel(self._queue))

    def _on_news(self, at: int) -> None:
        if at == LIMITS_CHANGED:
            self._admission.expire()
        self._news.set()

    def _forget(self, numbers: Sequence[int]) -> None:
        """Drop the claims on messages that were handled."""
        self._claims.forget(numbers)
        if self._admission.ended(numbers):
            self._database.notifications.notify(queue_channel(self._queue))  # others may wait for their slots

    def holds(self, received: ReceivedMessage) -> bool:
        """Return whether this process still claims the message, as of its last request."""
        return self._claims.holds(_number(received))

    async def stop(self) -> None:
        """End a waiting receive."""
        self._stopped = True
        self._unsubscribe()
        self._news.set()

    def _claim(
        self, connection: Connection, limit: int, batch: list[ReceivedMessage], expired: list[ReceivedMessage]
    ) -> None:
        """Claim rows from the last one claimed before on; at intervals, and if there are none, from the first one on.

        Rows before the last one are those of transactions that took longer, and those that other processes gave back.
        """
        if time.monotonic() - self._full_at < FULL_LOOK_EVERY:
            self._claim_after(self._after, connection, limit, batch, expired)
        if not batch and not expired:
            self._full_at = time.monotonic()
            self._claim_after(0, connection, limit, batch, expired)

    def _claim_after(
        self,
        after: int,
        connection: Connection,
        limit: int,
        batch: list[ReceivedMessage],
        expired: list[ReceivedMessage],
    ) -> None:
        """Claim rows page by page until there are enough; read those that are still there."""
        size = limit if after else limit + self._claims.number_held
        while len(batch) + len(expired) < limit:
            page = [number for (number,) in self._statements.numbers.rows(connection, self._queue, after, size)]
            wanted = limit - len(batch) - len(expired)
            taken = self._claims.take(page, wanted)
            for received, is_expired in self._read(connection, taken):
                (expired if is_expired else batch).append(received)
            if taken:
                self._after = max(self._after, taken[-1])
            if len(page) < size:
                return
            after = page[-1]

    def _read(self, connection: Connection, numbers: list[int]) -> list[tuple[ReceivedMessage, bool]]:
        if not numbers:
            return []
        try:
            rows = self._statements.claimed.rows(connection, numbers)
        except BaseException:
            self._claims.release(numbers)
            raise
        self._claims.forget(set(numbers) - {row[0] for row in rows})
        return [(ReceivedMessage(Message.from_encoded(*row[1:4]), row[0]), bool(row[4])) for row in rows]

    async def _discard(self, expired: list[ReceivedMessage]) -> None:
        """Delete expired messages."""
        if expired:
            numbers = [_number(received) for received in expired]
            await self._database.write(partial(self._statements.delete.change_each, keys=numbers), one_statement=True)
            self._claims.forget(numbers)
            for received in expired:
                text = "Deleted expired message %s"
                emit(logger, logging.DEBUG, Event.EXPIRED, text, received.message.id)


def _number(received: ReceivedMessage) -> int:
    if not isinstance(received.receipt, int):
        raise TypeError(f"receipt {received.receipt!r} was not given by this receiver")
    return received.receipt


class IdleQueues:
    """Wakes receivers of one transport whose queues are not empty. Belongs to one event loop.

    Args:
        interval: how often it looks, in seconds.
    """

    def __init__(self, database: Database, statements: QueueStatements, interval: float) -> None:
        self._database = database
        self._statements = statements
        self._interval = interval
        self._waiting: dict[asyncio.Event, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, queue: str, news: asyncio.Event) -> None:
        """Return when the event is set: by others, or because it is time to look into the queue."""
        self._waiting[news] = queue
        self._set_timer()
        try:
            await news.wait()
        finally:
            self._waiting.pop(news, None)
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and self._looking is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        if len(self._waiting) == 1:
            self._wake(set(self._waiting.values()))  # whose own look is the one
        else:
            self._looking = asyncio.create_task(self._look(), name="delayline idle queues")

    async def _look(self) -> None:
        names = set(self._waiting.values())
        try:
            rows = await self._database.read(partial(self._statements.filled.rows_each, keys=list(names)))
            names = {name for (name,) in rows}
        except Exception:  # noqa: S110 - each looks for itself, and reports what it sees
            pass
        finally:
            self._looking = None
        self._wake(names)
        self._set_timer()

    def _wake(self, names: set[str]) -> None:
        for news, queue in self._waiting.items():
            if queue in names:
                news.set()
