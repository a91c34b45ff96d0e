"""The journal records the events of each message of a store, in the transaction that caused them.

Triggers on the store's table write it: any process that stores, moves or removes messages is covered, without a round
trip, and stores without a journal pay nothing. A message that is removed for another reason than its due time is marked
in the same transaction before. No trigger knows what happens in queues: endpoints write which messages they handled.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Unicode,
    bindparam,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement

from delayline.delayed.columns import JOURNALED_COLUMNS, JOURNALED_NAMES, ColumnKind, StoredRow
from delayline.errors import ConfigurationError
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql import schema
from delayline.sql.prepared import Prepared
from delayline.sql.schema import STORE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Executable
    from sqlalchemy.sql.compiler import DDLCompiler

    from delayline.clock import Clock
    from delayline.message import DelayedMessage
    from delayline.sql.dialect import Dialect
    from delayline.transaction import Transaction

LONGEST_PATH: Final = 500
#: The columns of an entry but its number.
ENTRY_NAMES: Final = ("store", "event", *JOURNALED_NAMES, "at", "retries")
#: In place of the number of retries of a row that is about to be removed.
CANCELLED: Final = -1
FAILED: Final = -2


class JournalEvent(StrEnum):
    """An event in the life of a message."""

    SCHEDULED = "scheduled"
    RESCHEDULED = "rescheduled"
    RETRIED = "retried"
    """An attempt to dispatch it has failed; it is due again later."""
    DISPATCHED = "dispatched"
    FAILED = "failed"
    """It was moved to the error queue."""
    CANCELLED = "cancelled"
    PROMOTED = "promoted"
    """It has left the cold tier for the store."""
    HANDLED = "handled"
    """An endpoint with a journal has handled it; the entry has the queue as destination, and the endpoint's store."""


class JournalTables:
    """The entries, and which of them were exported to where."""

    def __init__(self, name: str | None) -> None:
        metadata = MetaData(schema=name)
        self.entries: Table = Table(
            "delayline_journal",
            metadata,
            Column("seq", schema.SEQUENCE, Identity(), primary_key=True, autoincrement=True),
            Column("store", schema.text(schema.MAXIMUM_TABLE_NAME_LENGTH), nullable=False),
            Column("event", schema.text(max(map(len, JournalEvent))), nullable=False),
            *schema.message_columns(JOURNALED_COLUMNS),
            Column("at", schema.DUE, nullable=False),
            Column("retries", Integer, nullable=False),
            # Since revision 2.
            Index("delayline_journal_ids", "id", "seq", info={schema.ADDED_LATER: "the life of a message"}),
            sqlite_autoincrement=True,  # a number that was exported once is never given to another entry
        )
        self.exports: Table = Table(
            "delayline_journal_exports",
            metadata,
            Column("directory", schema.text(MAXIMUM_ID_LENGTH), primary_key=True),
            Column("path", schema.text(LONGEST_PATH), nullable=False),
            Column("entries", BigInteger, nullable=False),
            Column("finished", schema.DUE, nullable=False),
        )


@lru_cache(maxsize=64)
def journal_tables(name: str | None = None) -> JournalTables:
    """Return the journal's tables in that schema, the connection's own where None."""
    return JournalTables(name)


def _tables_of(_: object, schema_name: str | None) -> list[Table]:
    tables = journal_tables(schema_name)
    return [tables.entries, tables.exports]


JOURNAL: Final = schema.register(schema.TableGroup("journal", _tables_of, revision=2))


class Trigger(ExecutableDDLElement):
    """A statement about triggers, in the words of a product."""

    def __init__(self, template: str, name: str, store: Table, journal: Table) -> None:
        self.template = template
        self.name = name
        self.store = store
        self.journal = journal


@compiles(Trigger)
def _trigger(element: Trigger, compiler: DDLCompiler, **_: object) -> str:
    quote, beside = compiler.preparer.format_table, MetaData(schema=element.store.schema)
    return element.template.format(
        name=element.name,
        qualified=quote(Table(element.name, beside)),
        function=quote(Table("delayline_journal_entry", beside)),
        table=quote(element.store),
        journal=quote(element.journal),
        store=compiler.sql_compiler.render_literal_value(element.store.name, Unicode()),
    )


class Journal:
    """The journal of a store's table."""

    def __init__(self, store: Table, dialect: Dialect) -> None:
        self._store = store
        self._dialect = dialect
        self._tables = journal_tables(store.schema)
        by_ids = dialect.words.one_of(store.c.id, "keys")
        marking = update(store).where(by_ids).values(retry_count=bindparam("mark"))
        self._mark = Prepared(marking, dialect.sql, ["mark", "keys"])
        self._add = Prepared(insert(self._tables.entries), dialect.sql, ENTRY_NAMES)
        self._given_up: set[str] = set()
        self._kept = False

    def plan(self, connection: Connection, *, kept: bool) -> list[Executable]:
        """Return the statements that create the journal's triggers, or drop them: its entries stay. Idempotent.

        Raises ConfigurationError for a product that cannot keep a journal.
        """
        triggers = self._dialect.catalog.journal
        if triggers is None:
            raise ConfigurationError(f"no journal is kept on {self._dialect} yet: leave journal out")
        there = self._found(connection)
        if not kept:
            return [Trigger(triggers.drop, name, self._store, self._tables.entries) for name in sorted(there)]
        missing = {word: name for word, name in self._names.items() if name not in there}
        if missing and "function" in triggers.create:
            missing = {"function": "", **missing}
        return [
            Trigger(triggers.create[word], name, self._store, self._tables.entries) for word, name in missing.items()
        ]

    def look(self, connection: Connection) -> None:
        """Look up whether a journal is kept."""
        self._kept = bool(self._found(connection))

    @property
    def kept(self) -> bool:
        """Whether a journal was kept when it was looked at."""
        return self._kept

    @property
    def entries(self) -> Table:
        """The table that the triggers write to."""
        return self._tables.entries

    def gave_up(self, messages: Iterable[DelayedMessage]) -> None:
        """Note that messages are about to be removed because they go to the error queue."""
        if self._kept:
            self._given_up.update(message.id for message in messages)

    def fetched(self, messages: Sequence[DelayedMessage]) -> None:
        """Delete the marks of the messages."""
        if self._given_up:
            self._given_up.difference_update(message.id for message in messages)

    def failed(self, messages: Sequence[DelayedMessage]) -> list[str]:
        """Return the ids of messages that go to the error queue."""
        return [message.id for message in messages if message.id in self._given_up] if self._given_up else []

    def last(self, connection: Connection) -> int:
        """Return the number of the last entry that this transaction sees."""
        return connection.execute(select(func.max(self._tables.entries.c.seq))).scalar() or 0

    def rename(self, connection: Connection, since: int, ids: Sequence[str], event: JournalEvent) -> None:
        """Set the event of entries after `since`, in the transaction that has stored the messages."""
        entries = self._tables.entries.c
        stored = (entries.seq > since, entries.store == self._store.name, entries.event == JournalEvent.SCHEDULED.value)
        change = update(self._tables.entries).where(*stored, entries.id.in_(ids))
        connection.execute(change.values(event=event.value))

    def note_each(self, connection: Connection, event: JournalEvent, messages: Iterable[tuple[Any, ...]]) -> None:
        """Record an event of messages that are not in the store, each the values of its journaled columns."""
        values = self._dialect.values
        kept = [values.to_due if column.kind is ColumnKind.INSTANT else None for column in JOURNALED_COLUMNS]
        now = connection.execute(select(values.in_seconds(0))).scalar_one()
        entries = [
            (
                self._store.name,
                event.value,
                *(value if keep is None else keep(value) for keep, value in zip(kept, message, strict=True)),
                now,
                0,
            )
            for message in messages
        ]
        if entries:
            self._dialect.bulk.insert_rows(connection, self._add, entries)

    def note_one(self, connection: Connection, event: JournalEvent, message: DelayedMessage) -> None:
        """Record an event of a message that is not in the store."""
        values = self._dialect.values
        row = StoredRow.of(message, values.to_due, values.headers_of)
        entry = {name: getattr(row, name) for name in JOURNALED_NAMES}
        entry |= {"store": self._store.name, "event": event.value, "at": values.in_seconds(0), "retries": 0}
        connection.execute(insert(self._tables.entries).values(entry))

    def note_handled(self, connection: Connection, messages: Sequence[DelayedMessage], at: datetime) -> None:
        """Record that messages were handled, each in the queue that is its destination."""
        values, store, event = self._dialect.values, self._store.name, JournalEvent.HANDLED.value
        entries = [
            (store, event, message.id, message.destination, values.to_due(message.due), values.to_due(at), 0)
            for message in messages
        ]
        self._dialect.bulk.insert_rows(connection, self._add, entries)

    def mark_failed(self, connection: Connection, ids: Sequence[str]) -> None:
        """Mark rows as failed, in the transaction that removes them next."""
        self._mark.change_each(connection, FAILED, keys=ids)

    def mark_cancelled(self, connection: Connection, ids: Sequence[str]) -> None:
        """Mark rows as cancelled, in the transaction that removes them next."""
        if self._kept:
            self._mark.change_each(connection, CANCELLED, keys=ids)

    @property
    def _names(self) -> dict[str, str]:
        own = hashlib.sha256(self._store.name.encode()).hexdigest()[:16]
        return {word: f"delayline_journal_{word}_{own}" for word in ("stored", "changed", "gone")}

    def _found(self, connection: Connection) -> set[str]:
        if self._dialect.catalog.journal is None:
            return set()
        names = self._names.values()
        found = connection.execute(
            text(self._dialect.catalog.journal.found), {"table": self._store.name, "schema": self._store.schema}
        ).scalars()
        return {name for name in found if name in names}


class StoreJournal:
    """The journal of a store's messages, as the poller and the receivers of its endpoint write in it.

    Args:
        write: Writes in the store's database, in a transaction or by itself.
        clock: Returns the database's clock.
    """

    def __init__(self, write: Callable[..., Awaitable[object]], clock: Callable[[], Clock]) -> None:
        self._write = write
        self._clock = clock
        self.opened: Journal | None = None
        """The journal of the store's table; None until the store is open."""

    @property
    def is_kept(self) -> bool:
        """Whether a journal was kept when the store was opened."""
        return self.opened is not None and self.opened.kept

    def gave_up(self, messages: Sequence[DelayedMessage]) -> None:
        """Note that the messages go to the error queue: their removal, which follows, is not a dispatch."""
        if self.opened is not None:
            self.opened.gave_up(messages)

    async def handled(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Record that messages were handled, each in the queue that is its destination."""
        if self.opened is not None:
            note = partial(self.opened.note_handled, messages=messages, at=self._clock().now())
            await self._write(note, transaction, one_statement=len(messages) == 1)


#: Entries of a message that are returned at most.
MOST_EVENTS: Final = 500


class MessageEvent(NamedTuple):
    """An entry of a message."""

    at: datetime
    event: str
    destination: str
    due: datetime
    retries: int
    endpoint: str


def events_of(
    connection: Connection, dialect: Dialect, schema: str | None, ids: Sequence[str]
) -> list[MessageEvent] | None:
    """Return the entries of a message in all endpoints of the schema, under each of its ids, earliest first.

    None if no store of the schema has ever kept a journal. Without an index by id, all entries are read.
    """
    entries = journal_tables(schema).entries
    if not inspect(connection).has_table(entries.name, schema=entries.schema):
        return None
    columns = entries.c
    query = select(columns.at, columns.event, columns.destination, columns.due, columns.retries, columns.store)
    query = query.where(columns.id.in_(ids)).order_by(columns.seq).limit(MOST_EVENTS)
    time = dialect.values.from_due
    rows = connection.execute(query)
    return [
        MessageEvent(time(at), event, queue, time(due), max(0, int(retries)), store.removesuffix(STORE_SUFFIX))
        for at, event, queue, due, retries, store in rows
    ]
