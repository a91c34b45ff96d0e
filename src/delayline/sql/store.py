"""The delayed message store on SQL: a table per endpoint, every capability."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select

from delayline.checks import time_span
from delayline.clock import EPOCH, ONE_MICROSECOND, ONE_SECOND, from_microseconds, to_microseconds
from delayline.delayed.store import (
    DueCount,
    Forwarded,
    FoundMessage,
    Outcome,
    SingleMessageVerbs,
    StoreResult,
    checked_edges,
    postponed,
)
from delayline.errors import BackendUnavailable, ConfigurationError, InvalidMessage, NotStarted
from delayline.message import in_utc
from delayline.sql.deadlines import long_work
from delayline.sql.dispatch_pauses import PAUSES, SqlDispatchPauses
from delayline.sql.due_forecast import forecast
from delayline.sql.fair_groups import fair_table
from delayline.sql.journal import JOURNAL, Journal, StoreJournal
from delayline.sql.notifications import ChangePoller
from delayline.sql.on_database import StoreOnDatabase
from delayline.sql.pending_set import SqlPendingSet
from delayline.sql.prepared import Prepared
from delayline.sql.row_claims import row_claims
from delayline.sql.schedules import SCHEDULES, SqlScheduleRows
from delayline.sql.schema import EVERY_RIGHT, OWN_PREFIX, QUEUES, STORE_SUFFIX, TO_WRITE, in_order
from delayline.sql.searched_tables import SearchedJournal, SearchedStore, neighbours_of
from delayline.sql.setup import RequiredTables
from delayline.sql.statements import check_size, queue_channel, store_channel, store_statements
from delayline.sql.transport import SqlTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine, Executable, Table

    from delayline.delayed.fairness import FairBy
    from delayline.delayed.store import DueForecast
    from delayline.external import ExternalTransaction
    from delayline.message import DelayedMessage
    from delayline.places import SearchablePlace
    from delayline.sql.databases import SqlDatabase
    from delayline.sql.dialect import Dialect
    from delayline.sql.row_claims import RowClaims
    from delayline.sql.statements import StoreStatements
    from delayline.sql.transactions import EnlistedTransaction
    from delayline.sql.two_phase import TwoPhaseCommit
    from delayline.transaction import Transaction, TransactionMode

BY_DUE: Final = attrgetter("due")
REPLACE_ATTEMPTS: Final = 10  # to replace a message that others store and remove meanwhile


class StoreSetup:
    """Set-up and check of the tables that a store needs.

    Args:
        dialect: The database.
        schema: Schema of the tables; None for the connection's own.
        table: The store's table.
        keeps_journal: Whether a journal is kept from now on; None to leave that as it is.
        keeps_schedules: Whether the table of schedules is needed.
    """

    def __init__(
        self,
        dialect: Dialect,
        schema: str | None,
        table: Table,
        *,
        keeps_journal: bool | None,
        keeps_schedules: bool = False,
    ) -> None:
        self._catalog = dialect.catalog
        self._keeps_journal = keeps_journal
        groups = [QUEUES, PAUSES, SCHEDULES] if keeps_schedules else [QUEUES, PAUSES]
        self._checked = RequiredTables(dialect, schema, *groups, others=[table])
        self.required: RequiredTables = (
            RequiredTables(dialect, schema, *groups, JOURNAL, others=[table]) if keeps_journal else self._checked
        )
        self.journal: Journal = Journal(table, dialect)

    def plan(self, connection: Connection) -> list[Executable]:
        """Return the statements of what is missing."""
        return self.required.plan(connection) + self._journal_plan(connection)

    def set_up(self, connection: Connection) -> None:
        """Create and upgrade the tables, begin or end the journal."""
        self.required.set_up(connection)
        with self._catalog.setting_up(connection):
            for step in self._journal_plan(connection):
                self._catalog.make(connection, step)

    def check(self, connection: Connection) -> None:
        """Raise BackendUnusable unless the tables are there; note whether a journal is kept."""
        self._checked.check(connection)
        self.journal.look(connection)

    def _journal_plan(self, connection: Connection) -> list[Executable]:
        return [] if self._keeps_journal is None else self.journal.plan(connection, kept=self._keeps_journal)


class SqlDelayedMessageStore(StoreOnDatabase, SingleMessageVerbs):
    """Delayed message store in a table of a SQL database; `sqlite:///file.db` needs no server.

    A store belongs to a single endpoint at a time.

    Args:
        database: A URL, as `postgresql://user@host/name` or `sqlite:///file.db`; or a `SqlDatabase`, or an Engine of
            SQLAlchemy for a server, which say how connections are made.
        table_name: Name of the table; by default `{endpoint}.timeouts`.
        schema: Schema of the tables; by default the connection's, on SQL Server `dbo`.
        poll_interval: How often to look for messages of other processes, where the database has no notifications.
        journal: True records the events of each message from the next set-up on; False ends that.
        two_phase: Coordinates transactions with a transport in another database; this database prepares them.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
        MissingExtra: The database's driver is not installed.
    """

    def __init__(
        self,
        database: str | Engine | SqlDatabase,
        *,
        table_name: str | None = None,
        schema: str | None = None,
        poll_interval: timedelta = ONE_SECOND,
        two_phase: TwoPhaseCommit | None = None,
        journal: bool | None = None,
    ) -> None:
        super().__init__(database, schema, two_phase)
        self._poll_interval = time_span("poll_interval", poll_interval)
        if table_name is not None and (not table_name or table_name.casefold().startswith(OWN_PREFIX)):
            raise ConfigurationError(
                f"table_name={table_name!r} is empty or begins with {OWN_PREFIX!r}, which is reserved for delayline's "
                "own tables: choose another name"
            )
        self._table_name = table_name
        self.schedules: SqlScheduleRows = SqlScheduleRows(
            self._database, self._schema, lambda: self._statements.table.name
        )
        """The schedules, in a table that all stores of the schema share."""
        self.message_set: Callable[[str], SqlPendingSet | None] = lambda endpoint: SqlPendingSet.of(
            self._database, self._statements, self._locking, self._kept_journal, self.action_log(endpoint), self._notify
        )
        """Returns an endpoint's messages as sets that actions change; None for a table without numbers."""
        self.searched_places: Callable[[str], Sequence[SearchablePlace]] = lambda endpoint: [
            SearchedStore(self._database, endpoint, lambda: self._statements.table),
            SearchedJournal(self._database, self._schema),
        ]
        """Returns an endpoint's messages, and the journal, to be looked through."""
        self.neighbour_places: Callable[[], Awaitable[Sequence[SearchablePlace]]] = lambda: neighbours_of(
            self._database, self._schema, self._statements.table
        )
        """Returns the messages of the other endpoints in the schema, to be looked through."""
        self.dispatch_pauses: SqlDispatchPauses = SqlDispatchPauses(
            self._database,
            self._schema,
            statements=lambda: self._statements,
            rows=lambda: self._locking,
            resumed=lambda: self._notify(EPOCH),
        )
        """What is not dispatched, in a table that all stores of the schema share."""
        self._open: StoreStatements | None = None
        self._channel = ""
        self._rows: RowClaims | None = None
        self.journal: StoreJournal = StoreJournal(self._database.write, self.clock)
        """What becomes of the messages, where a journal is kept."""
        self._keeps_journal = journal
        self._counts_forwarded = False
        self._fair_by: FairBy | None = None
        self._take_part()

    async def enlist(self, external: ExternalTransaction) -> EnlistedTransaction:
        """Return the external transaction if storing can take part in it."""
        return await self._database.enlist(external, self._statements.table)

    def be_fair(self, fair_by: FairBy) -> None:
        """Serve groups of due messages in turn, by an index that set-up makes; by a header also by a column."""
        if self._open is not None and fair_by != self._fair_by:
            raise ConfigurationError(f"the store is open already: pass fair_by={str(fair_by)!r} before it is started")
        self._fair_by = fair_by

    @long_work
    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create the endpoint's table. Raises NewerSchema, BackendUnusable or BackendUnavailable."""
        setup = self._setup_of(self.table_of(endpoint_name))
        await self._open_database()
        try:
            await self._database.set_up(setup.plan, setup.set_up)
        finally:
            await self._close_database()

    async def planned_infrastructure(self, endpoint_name: str) -> Sequence[str]:
        """Return the SQL that `setup_infrastructure` would run; without running it. Raises the same errors."""
        setup = self._setup_of(self.table_of(endpoint_name))
        return await self._database.plan(setup.plan, setup.required.script)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        table, dialect = self.table_of(endpoint_name), self._database.dialect
        needed: dict[Table, Sequence[str]] = {table: EVERY_RIGHT if takes else dialect.catalog.rights_to_store}
        if takes:
            needed[self.dispatch_pauses.table] = EVERY_RIGHT
        if self.schedules.required:
            needed[self.schedules.table] = EVERY_RIGHT
        journal = Journal(table, dialect)
        await self._database.look(journal.look)
        if journal.kept:  # triggers may write as their owner, but not which messages were handled
            needed[journal.entries] = TO_WRITE
        return await self._missing_rights(needed, takes=takes)

    @long_work
    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the database and check that the endpoint's table is there."""
        del mode
        if self._open is not None:
            return
        table = self.table_of(endpoint_name)
        await self._open_database()
        try:
            setup = self._setup_of(table)
            await self._database.read(setup.check)
            if self._two_phase is not None:
                await self._two_phase.start()
        except BaseException:
            await self._close_database()
            raise
        self._open = store_statements(table, self._database.dialect)
        self._channel = store_channel(table)
        self.journal.opened = setup.journal
        self._rows = row_claims(self._database, self._open, self._tables)

    async def close(self) -> None:
        """Release claimed messages and disconnect. Idempotent."""
        if self._rows is not None:
            rows, self._rows, self._open = self._rows, None, None
            await rows.close()
            if self._two_phase is not None:
                await self._two_phase.stop()
            await self._close_database()

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message until it is due."""
        await self.store_many([message], transaction)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Keep the messages, all in a single transaction."""
        if not messages:
            return
        for message in messages:
            check_size(message.message, self._database.dialect)
        statements = self._statements
        rows = [statements.row_of(message) for message in messages]
        await self._database.insert(statements.insert, rows, transaction)
        await self._notify(min(messages, key=BY_DUE).due, transaction)

    async def store_or_replace(
        self,
        message: DelayedMessage,
        *,
        replace: bool,
        at_most: timedelta | None = None,
        transaction: Transaction | None = None,
    ) -> StoreResult:
        """Store the message unless a message with its id is pending, which it may replace."""
        check_size(message.message, self._database.dialect)
        statements, row = self._statements, self._statements.row_of(message)
        stored_due = message.due

        def of_pending(connection: Connection) -> None:
            nonlocal stored_due
            if not replace:
                return
            new = row
            if at_most is not None:
                pending = statements.find(connection, message.id, body_limit=0)
                if pending is not None:
                    changed = postponed(message, pending.message, at_most)
                    stored_due, new = changed.due, statements.row_of(changed)
            statements.replace.change(connection, *new[1:], [new.id])

        for _ in range(REPLACE_ATTEMPTS):
            outcome = await self._locking.manage(message.id, of_pending, transaction)
            if outcome is Outcome.DONE and not replace:
                return StoreResult.KEPT
            if outcome is Outcome.DISPATCHING:
                return StoreResult.DISPATCHING if replace else StoreResult.KEPT
            stored = outcome is Outcome.NOT_PENDING and await self._database.write(
                partial(self._inserted, row), transaction, one_statement=True
            )
            if stored or outcome is Outcome.DONE:
                await self._notify(stored_due, transaction)
                return StoreResult.STORED if stored else StoreResult.REPLACED
            await self._refuse_collating_alike(message.id)
        raise BackendUnavailable(
            f"message {message.id!r} was stored and removed by others {REPLACE_ATTEMPTS} times while it was sent: "
            "send it again"
        )

    async def _refuse_collating_alike(self, message_id: str) -> None:
        """Raise InvalidMessage if another pending message has an id that the column's collation takes for this id."""
        columns = self._statements.table.c
        query = select(columns.id).where(columns.id == message_id)
        for (known_id,) in await self._database.read(lambda connection: connection.execute(query).all()):
            if known_id != message_id:
                raise InvalidMessage(
                    f"message {message_id!r} cannot wait beside {known_id!r}, whose id the collation of "
                    f"{self._database.dialect} takes for the same: give it another id"
                )

    def _inserted(self, row: tuple[Any, ...], connection: Connection) -> bool:
        """Insert the row; return False if its id has been inserted meanwhile."""
        try:
            return self._statements.insert_counted.change(connection, *row) > 0
        except self._database.dialect.errors.kinds as error:
            errors = self._database.dialect.errors
            # Else the row's number is taken, not its id.
            if errors.is_duplicate(error) and not isinstance(errors.translated(error), BackendUnavailable):
                return False
            raise

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return the earliest due messages."""
        until = self._database.dialect.values.to_until(at)
        messages = await self._locking.fetch(until, limit, max_bytes=max_bytes, transaction=transaction)
        self._kept_journal.fetched(messages)
        return messages

    def forwards_to(self, transport: object) -> bool:
        """Return whether the transport keeps its queues in this store's database."""
        return isinstance(transport, SqlTransport) and transport.keeps_queues_in(self._database, self._schema)

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Move due messages to their queues inside the database."""
        until, counted = self._database.dialect.values.to_until(at), self._counts_forwarded
        moved = await self._locking.forward(until, limit, max_bytes=max_bytes, counted=counted)
        self._database.notify({queue_channel(name): 0 for name in moved.queues})
        counts = None
        if moved.counts is not None:
            counts = {(destination, self._due(due)): number for (destination, due), number in moved.counts.items()}
        return Forwarded(moved.number, self._due(moved.next_due), moved.left, counts)

    def measures(self) -> dict[str, float]:
        """Return how many transactions of two databases are in doubt."""
        return {} if self._two_phase is None else {"two_phase.in_doubt": self._two_phase.in_doubt}

    def count_forwarded(self) -> None:
        """Count forwarded messages by destination and due time from now on."""
        self._counts_forwarded = True

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message."""
        return self._due(await self._locking.next_due())

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages."""
        if not messages:
            return 0
        delete = partial(self._statements.delete.change_each, keys=[message.id for message in messages])
        failed, journal = self._kept_journal.failed(messages), self._kept_journal
        if not failed:
            return await self._locking.change(delete, messages, transaction)

        def mark_and_delete(connection: Connection) -> int:
            journal.mark_failed(connection, failed)
            return delete(connection)

        return await self._locking.change(mark_and_delete, messages, transaction, one_statement=False)

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Count a failure and unlock."""
        count = partial(self._statements.count_failure.change_each, keys=[message.id])
        return await self._locking.change(count, [message]) == 1

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count failures, move the due times, unlock."""
        if not messages:
            return 0
        due = self._database.dialect.values.to_due(at)
        ids, retry = [message.id for message in messages], self._statements.retry
        counted = await self._locking.change(
            lambda connection: retry.change_each(connection, due, keys=ids), messages, transaction
        )
        await self._notify(at, transaction)
        return counted

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Give up the claims."""
        await self._locking.release(messages)

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` with the earliest due time after each commit, by whichever process."""
        rows, notifications = self._locking, self._database.notifications

        def stored(due: datetime) -> None:
            rows.stored(due)
            callback(due)

        stops = [
            notifications.subscribe(self._channel, lambda due: stored(from_microseconds(due))),
            rows.look_fully(callback),
        ]
        if not notifications.reach_others:
            interval = self._poll_interval.total_seconds()
            earliest = self._statements.earliest(int(2 * interval) + 1)
            stops.append(ChangePoller(partial(self._due_times, earliest), stored, interval).stop)

        def stop() -> None:
            for each in stops:
                each()

        return stop

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a waiting message."""
        deletion, journal = self._statements.delete, self._kept_journal

        def remove(connection: Connection) -> None:
            journal.mark_cancelled(connection, [message_id])
            deletion.change(connection, [message_id])

        return await self._locking.manage(message_id, remove, transaction)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Move a waiting message to another due time."""
        due = in_utc(due)
        at, move = self._database.dialect.values.to_due(due), self._statements.move
        outcome = await self._locking.manage(
            message_id, lambda connection: move.change(connection, at, [message_id]), transaction
        )
        if outcome is Outcome.DONE:
            await self._notify(due, transaction)
        return outcome

    @long_work
    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first."""
        statements = self._statements
        columns = statements.table.c
        query = statements.waiting.order_by(*in_order(statements.table)).limit(limit).offset(offset)
        if destination is not None:
            query = query.where(self._database.dialect.words.exact(columns.destination) == destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [statements.message_of(row) for row in rows]

    @long_work
    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count pending messages by bucket and destination."""
        query = self._statements.by_due(time_span("bucket", bucket) // ONE_MICROSECOND)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [DueCount(from_microseconds(int(start)), destination, number) for start, destination, number in rows]

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None."""
        statements = self._statements
        return await self._database.read(lambda connection: statements.find(connection, message_id, body_limit))

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return pending messages without their bodies, earliest due first."""
        statements, to_due = self._statements, self._database.dialect.values.to_due
        due = statements.table.c.due
        query = statements.found(0).order_by(*in_order(statements.table)).limit(limit).offset(offset)
        if start is not None:
            query = query.where(due >= to_due(in_utc(start)))
        if end is not None:
            query = query.where(due < to_due(in_utc(end)))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [statements.found_of(row) for row in rows]

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Count pending messages between the edges in bounded time; see `SupportsDueForecast`."""
        checked, statements = checked_edges(edges), self._statements
        return await self._database.read(
            lambda connection: forecast(connection, statements, checked, by_destination=by_destination)
        )

    async def _due_times(self, earliest: Prepared) -> list[datetime | None]:
        [due_times] = await self._database.read(earliest.rows)
        return [self._due(kept) for kept in due_times]

    @property
    def _statements(self) -> StoreStatements:
        if self._open is None:
            raise NotStarted(
                "the delayed message store is not open: start its endpoint, or await initialize(...) first"
            )
        return self._open

    @property
    def _locking(self) -> RowClaims:
        _ = self._statements
        assert self._rows is not None  # noqa: S101 - opened together
        return self._rows

    @property
    def _kept_journal(self) -> Journal:
        _ = self._statements
        assert self.journal.opened is not None  # noqa: S101 - opened together
        return self.journal.opened

    def _setup_of(self, table: Table) -> StoreSetup:
        return StoreSetup(
            self._database.dialect,
            self._schema,
            table,
            keeps_journal=self._keeps_journal,
            keeps_schedules=self.schedules.required,
        )

    def table_of(self, endpoint_name: str) -> Table:
        """Return the table of the endpoint."""
        name = self._table_name or f"{endpoint_name}{STORE_SUFFIX}"
        table = self._database.dialect.catalog.store_table(name, self._schema)
        return table if self._fair_by is None else fair_table(table, self._fair_by)

    def _due(self, kept: object) -> datetime | None:
        return None if kept is None else self._database.dialect.values.from_due(kept)

    async def _notify(self, due: datetime, transaction: Transaction | None = None) -> None:
        if transaction is None:
            self._locking.stored(due)
        else:
            transaction.after_commit(partial(self._locking.stored, due))
        await self._database.notify_on_commit({self._channel: to_microseconds(due)}, transaction)
