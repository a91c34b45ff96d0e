"""The transport on SQL: queues are rows of a table beside a registry of their names."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import inspect, select

from delayline.checks import time_span
from delayline.clock import ONE_SECOND
from delayline.delayed.fairness import fair_within_queues
from delayline.errors import DispatchFailed, QueueNotFound
from delayline.events import Event, emit
from delayline.external import UNSET
from delayline.grouping import ABANDONED, Grouping
from delayline.message import Message
from delayline.places import PlaceKind
from delayline.sql.crashes import CrashCounts, crash_statements
from delayline.sql.database import Database
from delayline.sql.databases import SqlDatabase
from delayline.sql.deadlines import long_work
from delayline.sql.failed_set import SqlFailedSet
from delayline.sql.fair_groups import QueuedGroups
from delayline.sql.numbered_queue import SqlNumberedQueue
from delayline.sql.on_database import OnDatabase
from delayline.sql.queue_limits import (
    LIMITS_CHANGED,
    QueueAdmission,
    checked_changes,
    checked_handlers,
    limit_statements,
    limits_of,
    merged,
)
from delayline.sql.queue_states import read_states
from delayline.sql.receiver import OUT_OF_ORDER, IdleQueues, SqlReceiver
from delayline.sql.schema import (
    CRASHES,
    DECISIONS,
    EVERY_RIGHT,
    QUEUES,
    SUBSCRIPTIONS,
    TO_PUT,
    TO_READ,
    TO_SUBSCRIBE,
    TO_TAKE,
    queue_tables,
)
from delayline.sql.searched_tables import SearchedQueues
from delayline.sql.setup import RequiredTables
from delayline.sql.statements import check_size, queue_channel, queue_statements
from delayline.sql.transactions import EnlistedTransaction
from delayline.topics import any_topic, copied, log_gone, topics_among
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import Connection, Engine, Executable, Table

    from delayline.external import ExternalTransaction, Unset
    from delayline.sql.claims import Claims
    from delayline.sql.dialect import Dialect
    from delayline.sql.searched_tables import SearchedTable
    from delayline.sql.two_phase import TwoPhaseCommit
    from delayline.transaction import Transaction
    from delayline.transport import QueueLimits, QueueState, TransportOperation


logger: logging.Logger = logging.getLogger(__name__)

#: Concurrent sends that share a transaction.
MOST_SENDS_A_COMMIT: Final = 500
PURGED_AT_ONCE: Final = 500  # a server has room for so many claims only


class SqlTransport(OnDatabase):
    """Transport with queues in a SQL database; `sqlite:///file.db` needs no server.

    Args:
        database: A URL, as `postgresql://user@host/name` or `sqlite:///file.db`; or a `SqlDatabase`, or an Engine of
            SQLAlchemy for a server, which say how connections are made.
        poll_interval: How often idle receivers look for messages without a notification.
        schema: Schema of the tables; by default the connection's, on SQL Server `dbo`.
        fair_by: `header:NAME`: messages with the same value of that header are a group, and a backlog of one in a queue
            delays the receiving of no other. Every process that sends to such a queue needs the same.
        two_phase: Coordinates transactions with a store in another database; this database keeps the decisions.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
        MissingExtra: The database's driver is not installed.
    """

    messaging_system = "delayline"

    def __init__(
        self,
        database: str | Engine | SqlDatabase,
        *,
        poll_interval: timedelta = ONE_SECOND,
        schema: str | None = None,
        fair_by: str | None = None,
        two_phase: TwoPhaseCommit | None = None,
    ) -> None:
        super().__init__(database, schema, two_phase)
        self._fair_by = None if fair_by is None else fair_within_queues(fair_by)
        if self._fair_by is not None:
            self._tables = queue_tables(self._schema, fair=True)
        interval = time_span("poll_interval", poll_interval).total_seconds()
        self._statements = queue_statements(self._tables, self._database.dialect)
        self._limits = limit_statements(self._tables, self._database.dialect)
        self._idle = IdleQueues(self._database, self._statements, interval)
        self.message_set: Callable[[str], SqlFailedSet] = lambda endpoint: SqlFailedSet(
            self._database, self._statements, lambda: self._claims, self.action_log(endpoint), self.dispatch
        )
        """Returns an endpoint's failed messages as sets that actions change."""
        self.numbered_queue: Callable[[str], SqlNumberedQueue] = partial(
            SqlNumberedQueue, self._database, self._statements
        )
        """Returns the messages of a queue by their numbers."""
        self.searched_places: Callable[[str], Sequence[SearchedTable]] = lambda error_queue: [
            SearchedQueues(self._database, self._tables.queued, error_queue, kind)
            for kind in (PlaceKind.QUEUES, PlaceKind.ERRORS)
        ]
        """Returns the queues' messages, to be looked through."""
        self._checked = False
        self._checks = Grouping(self._check_once, maximum=sys.maxsize)
        self._sends = Grouping(self._dispatch_groups, maximum=MOST_SENDS_A_COMMIT, abandoned=_log_abandoned)
        if two_phase is not None:
            two_phase.decide_in(self._database, self._schema)

    @property
    def goes_on_when_cancelled(self) -> bool:
        """True once the tables have been checked: from then on a group goes on without the sender."""
        return self._checked

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """Every mode works."""
        return TransactionMode.TRANSACTION_SCOPE

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port of the database's server; None for a file."""
        return self._database.dialect.connections.server_address

    def keeps_queues_in(self, database: Database, schema: str | None) -> bool:
        """Return whether the queues are in that schema of that database, and messages need nothing else there."""
        return self._database is database and self._schema == schema and self._fair_by is None

    async def enlist(self, external: ExternalTransaction) -> EnlistedTransaction:
        """Return the external transaction if sending can take part in it."""
        await self._check_tables()
        return await self._database.enlist(external, self._tables.queued)

    @long_work
    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the tables and register the queues."""
        await self._open_database()
        try:
            await self._database.set_up(partial(self._lacks, names=queues), partial(self._set_up, names=queues))
        finally:
            await self._close_database()

    async def planned_infrastructure(self, queues: Sequence[str]) -> Sequence[str]:
        """Return the SQL that `setup_infrastructure` would run; without running it. Raises the same errors."""
        dialect = self._database.dialect

        def whole() -> list[Executable]:
            known = [dialect.words.insert_new(self._tables.queues, "name").values(name=name) for name in queues]
            return self._required.script() + known

        return await self._database.plan(partial(self._planned, names=queues), whole)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        del endpoint_name
        tables = self._tables
        needed: dict[Table, Sequence[str]] = {tables.queues: TO_READ, tables.queued: TO_TAKE if takes else TO_PUT}
        needed[tables.subscriptions] = TO_READ
        if takes:
            needed |= {tables.receivers: EVERY_RIGHT, tables.suspects: EVERY_RIGHT}
        if self._two_phase is not None:
            needed[tables.decisions] = EVERY_RIGHT
        return await self._missing_rights(needed)

    async def missing_subscription_rights(self) -> Sequence[str]:
        """Return the GRANT statements for missing rights to subscribe; see `SupportsSubscriptionRights`."""
        return await self._missing_rights({self._tables.subscriptions: TO_SUBSCRIBE})

    async def start(self) -> None:
        """Open the database."""
        await self._open_database()

    async def stop(self) -> None:
        """Undo a `start`."""
        await self._checks.stop()
        await self._sends.stop()
        await self._close_database()

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Insert every message whose queue exists, in a single transaction."""
        for operation in operations:
            check_size(operation.message, self._database.dialect)
        await self._check_tables()
        if transaction is None:
            await self._sends.run(operations)
        elif missing := await self._dispatch(operations, transaction):
            raise _dispatch_failed(operations, missing)

    async def _dispatch_groups(self, groups: Sequence[Sequence[TransportOperation]]) -> Sequence[DispatchFailed | None]:
        """Insert the operations of concurrent sends in a single transaction; return the failure of each send."""
        missing = await self._dispatch([operation for operations in groups for operation in operations], None)
        if not missing:
            return [None] * len(groups)
        return [
            _dispatch_failed(operations, missing)
            if any(operation.destination in missing for operation in operations)
            else None
            for operations in groups
        ]

    async def _dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None) -> set[str]:
        """Insert the messages whose queues exist, notify receivers, and return the queues that do not exist."""
        if any_topic(operations):
            reached, missing = await self._publish(operations, transaction)
        else:
            if len(operations) == 1 and operations[0].message.time_to_be_received is None:
                missing = await self._put_one(operations[0], transaction)
            else:
                missing = await self._put(operations, transaction)
            reached = {operation.destination for operation in operations} - missing
        # A user's transaction may go on for long with its number; a handler's ends at once.
        late = isinstance(transaction, EnlistedTransaction) and not transaction.of_handler
        at = OUT_OF_ORDER if late else 0
        await self._database.notify_on_commit({queue_channel(name): at for name in reached}, transaction)
        return missing

    async def _publish(
        self, operations: Sequence[TransportOperation], transaction: Transaction | None
    ) -> tuple[set[str], set[str]]:
        """Insert the messages, with a copy for each subscriber; return the queues reached, and those that are missing.

        A subscriber without a queue is logged, and not among the missing.
        """
        topics = topics_among(operations)
        queues = await self._database.write(partial(self._statements.subscribers, topics=topics), transaction)
        copies = copied(operations, queues)
        if not copies.operations:
            return set(), set()
        missing = await self._put(copies.operations, transaction)
        log_gone(missing & {*copies.subscribers})
        reached = {operation.destination for operation in copies.operations} - missing
        return reached, missing - {*copies.subscribers}

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have copies of events from now on."""
        await self._check_tables()
        known = await self._database.read(partial(self._statements.subscribers, topics=topics))
        rows = [(topic, queue) for topic in sorted({*topics}) if queue not in known.get(topic, ())]
        if rows:  # at most starts there is nothing to write, and no lock to wait for
            await self._database.write(partial(self._statements.subscribe.change_many, rows=rows))

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more copies of events."""
        await self._check_tables()
        rows = [(topic, queue) for topic in sorted(topics)]
        await self._database.write(partial(self._statements.unsubscribe.change_many, rows=rows))

    async def receiver(self, queue: str) -> SqlReceiver:
        """Return a receiver on the queue. Raises BackendUnusable for tables of an older delayline."""
        await self._check_tables()
        await self._database.read(partial(self._statements.must_exist, queue=queue))
        slots = f"{self._tables.queued.fullname} handled of {queue}"
        admission = QueueAdmission(self._database, self._limits, queue, slots)
        statements = crash_statements(self._tables, self._database.dialect)
        crashes = CrashCounts(self._database, statements, self._statements, self._claims, queue)
        fair = self._fair_by is not None
        groups = QueuedGroups(self._tables.queued, self._database.dialect, queue) if fair else None
        return SqlReceiver(
            self._database, self._statements, self._claims, queue, self._idle, admission, crashes, groups
        )

    async def has_queue(self, queue: str) -> bool:
        """Return whether the queue is registered."""
        return not await self._database.read(lambda connection: self._statements.missing(connection, [queue]))

    async def queues(self) -> Sequence[str]:
        """Return the names of all queues, in order."""
        query = select(self._tables.queues.c.name).order_by(self._tables.queues.c.name)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def remove_queue(self, queue: str) -> None:
        """Remove the queue with its messages."""
        await self._database.write(partial(self._statements.remove_queue, queue=queue))

    async def limits(self, queue: str | None = None) -> Sequence[QueueLimits]:
        """Return the limits of the queue, or of every queue, by name. Raises QueueNotFound."""
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
        handlers: Mapping[str, int | None] | Unset = UNSET,
    ) -> QueueLimits:
        """Change the limits that are given; see `SupportsQueueLimits`."""
        changes = checked_changes(paused, concurrency, rate)
        of_types = checked_handlers(handlers)
        await self._check_tables()

        def change(connection: Connection) -> QueueLimits:
            if of_types:  # concurrent changes of other types must not be lost
                self._limits.lock.change(connection, queue)
            current = self._limits.limits(connection, queue)
            changed = changes | ({"handlers": merged(current.handlers, of_types)} if of_types else {})
            for name, value in changed.items():
                self._limits.change[name].change(connection, value, queue)
            return self._limits.limits(connection, queue)

        limits = await self._database.write(change)
        await self._database.notify_on_commit({queue_channel(queue): LIMITS_CHANGED})
        return limits

    @long_work
    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, hidden messages included."""

        def counted(connection: Connection) -> int:
            self._statements.must_exist(connection, queue)
            return int(self._statements.count.one(connection, queue))

        return await self._database.read(counted)

    @long_work
    async def queue_states(self, queues: Sequence[str] | None) -> Sequence[QueueState]:
        """Return the states of the queues, of all where None; see `SupportsQueueStates`."""
        return await read_states(self._database, self._tables, self._claims, queues)

    @long_work
    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, oldest first, hidden messages included."""

        def page(connection: Connection) -> list[Message]:
            self._statements.must_exist(connection, queue)
            rows = self._statements.page.rows(connection, queue, limit, offset)
            return [Message.from_encoded(*row[1:]) for row in rows]

        return await self._database.read(page)

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest copy of the message that is not being handled."""
        free: list[int] = []

        def delete(connection: Connection) -> bool:
            copies = self._statements.copies.rows(connection, queue, message_id)
            free.extend(self._claims.take((number for (number,) in copies), 1))
            return self._statements.delete.change_each(connection, queue, keys=free) == 1

        release = partial(self._claims.release, free)
        if transaction is not None:
            transaction.after_end(release)
            return await self._database.write(delete, transaction)
        try:
            return await self._database.write(delete)
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
        return page, self._statements.delete.change_each(connection, queue, keys=free)

    @property
    def _claims(self) -> Claims:
        return self._database.claims(self._tables.queued.fullname)

    @property
    def _required(self) -> RequiredTables:
        groups = [QUEUES, CRASHES, SUBSCRIPTIONS]
        if self._two_phase is not None:
            groups.append(DECISIONS)
        with_groups = [] if self._fair_by is None else [self._tables.queued]
        return RequiredTables(self._database.dialect, self._schema, *groups, others=with_groups)

    def _planned(self, connection: Connection, names: Sequence[str]) -> list[Executable]:
        dialect, registry = self._database.dialect, self._tables.queues
        steps = self._required.plan(connection)
        known: set[str] = set()
        if inspect(connection).has_table(registry.name, schema=registry.schema):
            known = set(connection.execute(select(registry.c.name)).scalars())
        register = dialect.words.insert_new(registry, "name")
        return steps + [register.values(name=name) for name in names if name not in known]

    async def _check_tables(self) -> None:
        """Check the tables before their first use, not at `start`, which `setup` calls before they exist.

        Uses a separate connection: an external transaction's connection cannot be inspected. All callers that wait
        share a check, also when it fails.
        """
        if not self._checked:
            await self._checks.run(None)

    async def _check_once(self, callers: Sequence[None]) -> Sequence[None]:
        if not self._checked:
            await self._database.read(self._required.check_upgraded)
            self._checked = True
        return callers

    def _lacks(self, connection: Connection, names: Sequence[str]) -> bool:
        """Return whether `_set_up` would write anything."""
        if self._required.plan(connection) or self._statements.missing(connection, names):
            return True
        return self._two_phase is not None and not self._two_phase.is_identified(connection)

    def _set_up(self, connection: Connection, names: Sequence[str]) -> None:
        self._required.set_up(connection)
        if self._two_phase is not None:
            self._two_phase.identify(connection)
        self._statements.register.change_many(connection, [(name,) for name in names])

    async def _put_one(self, operation: TransportOperation, transaction: Transaction | None) -> set[str]:
        """Insert the message if its queue exists; return the queue if not."""
        put = await self._database.insert_one(self._statements.put_existing, self._row_of(operation), transaction)
        return set() if put else {operation.destination}

    def _row_of(self, operation: TransportOperation) -> tuple[Any, ...]:
        """Return the parameters of the insert statement."""
        message = operation.message
        row = (operation.destination, message.id, message.encoded_headers, message.body)
        return row if self._fair_by is None else (*row, self._fair_by.group_in_queue(message))

    async def _put(self, operations: Sequence[TransportOperation], transaction: Transaction | None) -> set[str]:
        """Insert the messages whose queues exist and return the names of the queues that do not."""
        missing: set[str] = set()
        expire = any(operation.message.time_to_be_received is not None for operation in operations)

        def rows_of(connection: Connection) -> list[tuple[Any, ...]]:
            nonlocal missing
            missing = self._statements.missing(connection, (operation.destination for operation in operations))
            existing = [operation for operation in operations if operation.destination not in missing]
            rows = list(map(self._row_of, existing))
            if not expire:
                return rows
            dialect, spans = self._database.dialect, [operation.message.time_to_be_received for operation in existing]
            expiry = _expiry(dialect, dialect.values.from_due(self._statements.now.one(connection)), spans)
            return [(*row, at) for row, at in zip(rows, expiry, strict=True)]

        statement = self._statements.put_expiring if expire else self._statements.put
        await self._database.insert_from(statement, rows_of, transaction)
        return missing


def _expiry(dialect: Dialect, now: datetime, spans: Sequence[timedelta | None]) -> list[object]:
    """Return when messages that may wait for so long expire, by the database's clock; None for never."""
    latest = datetime.max.replace(tzinfo=UTC) - now
    return [None if span is None or span > latest else dialect.values.to_due(now + span) for span in spans]


def _dispatch_failed(operations: Sequence[TransportOperation], missing: set[str]) -> DispatchFailed:
    return DispatchFailed(
        {
            position: QueueNotFound(operation.destination)
            for position, operation in enumerate(operations)
            if operation.destination in missing
        }
    )


def _log_abandoned(operations: Sequence[TransportOperation], error: Exception) -> None:
    for operation in operations:
        emit(logger, logging.WARNING, Event.SEND_ABANDONED, ABANDONED, operation.message.id, error)
