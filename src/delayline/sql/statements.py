"""The statements of a store and of the queues, built once a table and run by name."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self

from sqlalchemy import (
    BigInteger,
    LargeBinary,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)

from delayline.delayed.columns import StoredRow, message_of
from delayline.delayed.store import FoundMessage
from delayline.errors import InvalidMessage, QueueNotFound
from delayline.message import Headers
from delayline.sql.fair_groups import fair_by_of
from delayline.sql.prepared import LONGEST_LIST, Prepared
from delayline.sql.schema import FAIR_GROUP, in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection, Select, Table

    from delayline.message import DelayedMessage, Message
    from delayline.sql.dialect import Dialect, TableIdentity
    from delayline.sql.schema import QueueTables

#: Hints of a query on SQL Server, whose queries for messages pass over locked rows: wait for them ...
WAITING: Final = ("WITH (READCOMMITTEDLOCK)", "mssql")
#: ... or count them as they are: the next due time needs no certainty, and must not wait for a user's transaction.
DIRTY: Final = ("WITH (NOLOCK)", "mssql")

PUT: Final = ["queue", "id", "headers", "body"]
#: Headers with any of these words in them need more than a move from the store to their queue.
MARKER: Final = Headers.DISPATCH_PROPERTIES.encode()
EXPIRY_MARKER: Final = Headers.TIME_TO_BE_RECEIVED.encode()


class RowOfGroup(StoredRow):
    """A row whose group is behind its columns."""

    __slots__ = ()

    @classmethod
    def with_group(cls, row: StoredRow, group: str) -> Self:
        """Return the row with the group of its message."""
        return tuple.__new__(cls, (*row, group))


class StoreStatements:
    """Every statement a delayed message store runs on its table.

    Args:
        table: The table.
        dialect: The database.
        unpaused: The condition of messages that are fetched when they are due, where something is paused.
    """

    def __init__(self, table: Table, dialect: Dialect, unpaused: ColumnElement[bool] | None = None) -> None:
        self.table = table
        self.unpaused: Sequence[ColumnElement[bool]] = () if unpaused is None else (unpaused,)
        self._dialect = dialect
        columns, sql = table.c, dialect.sql
        by_ids, is_due = dialect.words.one_of(columns.id, "keys"), columns.due <= bindparam("until")
        self.waiting: Any = select(*(columns[name] for name in StoredRow._fields))
        unleased = {"leased_until": null()} if "leased_until" in columns else {}
        failed = update(table).where(by_ids).values(retry_count=columns.retry_count + literal_column("1"), **unleased)
        self._header = fair_by if (fair_by := fair_by_of(table)) and fair_by.header is not None else None
        names = StoredRow._fields if self._header is None else (*StoredRow._fields, FAIR_GROUP)
        self.insert: Prepared = Prepared(dialect.words.insert_new(table, "id"), sql, names)
        self.insert_counted: Prepared = Prepared(dialect.words.insert_counted(table, "id"), sql, names)
        replaced = {name: bindparam(f"new_{name}", type_=columns[name].type) for name in names[1:]}
        self.replace: Prepared = Prepared(
            update(table).where(by_ids).values(**replaced), sql, [*(f"new_{name}" for name in replaced), "keys"]
        )
        due = self.waiting.where(is_due, *self.unpaused).order_by(*in_order(table)).limit(bindparam("number"))
        self.due: Prepared = Prepared(due, sql, ["until", "number"])
        self.next_due: Prepared = Prepared(self.earliest_due(), sql, [])
        self.delete: Prepared = Prepared(delete(table).where(by_ids), sql, ["keys"])
        self.move: Prepared = Prepared(update(table).where(by_ids).values(due=bindparam("at")), sql, ["at", "keys"])
        self.count_failure: Prepared = Prepared(failed, sql, ["keys"])
        self.retry: Prepared = Prepared(failed.values(due=bindparam("at")), sql, ["at", "keys"])

    @property
    def dialect(self) -> Dialect:
        """The dialect they are written in."""
        return self._dialect

    def earliest_due(self, *where: ColumnElement[bool]) -> Select[Any]:
        """Return the query for the earliest due time; a condition besides takes a walk along the index instead."""
        table, due = self.table, self.table.c.due
        if not self.unpaused:
            return select(func.min(due)).where(*where).with_hint(table, *DIRTY)
        walk = select(due).where(*where, *self.unpaused).order_by(*in_order(table)).limit(literal_column("1"))
        return select(walk.with_hint(table, *DIRTY).scalar_subquery())

    def by_due(self, width: int) -> Select[int, str, int]:
        """Return the count by bucket of `width` microseconds and destination."""
        columns = self.table.c
        due = self._dialect.values.microseconds(columns.due)
        # Twice the remainder: SQL's has the sign of its left side, and due times before 1970 are negative.
        start = (due - (due % width + width) % width).label("start")
        buckets = select(start, self._dialect.words.exact(columns.destination).label("destination")).subquery().c
        counts = select(buckets.start, buckets.destination, func.count()).group_by(buckets.start, buckets.destination)
        return counts.order_by(buckets.start, buckets.destination)

    def found(self, body_limit: int) -> Select[Any]:
        """Return the query of `waiting` with the first bytes of the bodies, and the bodies' sizes."""
        columns = self.table.c
        body = func.substr(columns.body, literal_column("1"), literal_column(str(body_limit)), type_=LargeBinary())
        size = func.length(columns.body)
        kept = [body.label(name) if name == "body" else columns[name] for name in StoredRow._fields]
        return select(*kept, size.label("size"))

    def find(self, connection: Connection, message_id: str, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, with the first bytes of its body."""
        query = self.found(body_limit).where(self._dialect.words.one_of(self.table.c.id, "keys"))
        rows = Prepared(query, self._dialect.sql, ["keys"]).rows(connection, [message_id])
        alike = map(self.found_of, rows)  # for the column's collation
        return next((waiting for waiting in alike if waiting.message.id == message_id), None)

    def earliest(self, seconds: int) -> Prepared:
        """Return the query for the earliest due time of all, and for the earliest of the last `seconds`.

        The first may belong to a message that is claimed for long.
        """
        due = self.table.c.due
        of_all = select(func.min(due)).scalar_subquery()
        recent = select(func.min(due)).where(due >= self._dialect.values.in_seconds(-seconds)).scalar_subquery()
        return Prepared(select(of_all, recent), self._dialect.sql, [])

    def row_of(self, message: DelayedMessage) -> StoredRow:
        """Return the parameters of the insert statement."""
        values = self._dialect.values
        row = StoredRow.of(message, values.to_due, values.headers_of)
        return row if self._header is None else RowOfGroup.with_group(row, self._header.group_of(message))

    def message_of(self, row: Sequence[Any]) -> DelayedMessage:
        """Return the message of a row of `waiting`."""
        return message_of(row, self._dialect.values.from_due)

    def found_of(self, row: Sequence[Any]) -> FoundMessage:
        """Return the message of a row of `found`."""
        *kept, body_size = row
        message = self.message_of(kept)
        return FoundMessage(message, len(message.message.encoded_headers) + int(body_size or 0))

    def bounded(self, connection: Connection, until: object, *, limit: int, max_bytes: int) -> list[DelayedMessage]:
        """Read due messages row by row until their bytes are too many; at least one when any is due."""
        batch: list[DelayedMessage] = []
        size = 0
        for row in map(StoredRow._make, self.due.stream(connection, until, limit)):
            size += row.size
            if batch and size > max_bytes:
                break
            batch.append(self.message_of(row))
        return batch


@lru_cache(maxsize=64)
def store_statements(table: Table, dialect: Dialect) -> StoreStatements:
    """Return the statements of a table, compiled once for every store that is opened on it."""
    return StoreStatements(table, dialect)


class QueueStatements:
    """The statements on the way of every message to and from a queue."""

    def __init__(self, tables: QueueTables, dialect: Dialect) -> None:
        queued, queues = tables.queued, tables.queues
        self.queued: Table = queued
        columns, sql, of_queue = queued.c, dialect.sql, queued.c.queue == bindparam("name")
        in_order, all_of_queue = (columns.queue, columns.seq), dialect.words.queued_after(queued, literal_column("0"))
        after = bindparam("after", type_=columns.seq.type)
        numbers = select(columns.seq).where(dialect.words.queued_after(queued, after)).order_by(*in_order)
        copies = select(columns.seq).where(all_of_queue, columns.id == bindparam("key")).order_by(*in_order)
        by_numbers = dialect.words.by_key(columns.seq, "numbers", of_queue)
        kept = select(columns.seq, columns.id, columns.headers, columns.body)
        page = kept.where(all_of_queue).order_by(*in_order).limit(bindparam("number")).offset(bindparam("skip"))
        subscriptions = tables.subscriptions
        topics = select(subscriptions.c.topic, subscriptions.c.queue)
        self._subscribers: Prepared = Prepared(
            topics.where(dialect.words.one_of(subscriptions.c.topic, "topics")), sql, ["topics"]
        )
        self.subscribe: Prepared = Prepared(dialect.words.insert_new(subscriptions, "queue"), sql, ["topic", "queue"])
        of_both = subscriptions.c.topic == bindparam("of_topic"), subscriptions.c.queue == bindparam("of_queue")
        self.unsubscribe: Prepared = Prepared(delete(subscriptions).where(*of_both), sql, ["of_topic", "of_queue"])
        self.known: Prepared = Prepared(
            select(queues.c.name).where(dialect.words.one_of(queues.c.name, "names")), sql, ["names"]
        )
        filled = exists().where(columns.queue == queues.c.name)
        self.filled: Prepared = Prepared(
            select(queues.c.name).where(dialect.words.one_of(queues.c.name, "names"), filled), sql, ["names"]
        )
        self.register: Prepared = Prepared(dialect.words.insert_new(queues, "name"), sql, ["name"])
        expired = case(
            (columns.expires <= dialect.values.in_seconds(0), literal_column("1")), else_=literal_column("0")
        )
        put = PUT if FAIR_GROUP not in columns else [*PUT, FAIR_GROUP]
        self.put: Prepared = Prepared(insert(queued), sql, put)
        put_existing = insert(queued).from_select(
            put,
            select(
                queues.c.name,
                *(bindparam(f"new_{name}", type_=columns[name].type) for name in put[1:]),
            ).where(queues.c.name == bindparam("name")),
        )
        self.put_existing: Prepared = Prepared(put_existing, sql, ["name", *(f"new_{name}" for name in put[1:])])
        """Inserts a message if its queue exists."""
        self.put_expiring: Prepared = Prepared(insert(queued), sql, [*put, "expires"])
        self.now: Prepared = Prepared(select(dialect.values.in_seconds(0)), sql, [])
        self.numbers: Prepared = Prepared(numbers.limit(bindparam("number")), sql, ["name", "after", "number"])
        self.claimed: Prepared = Prepared(
            kept.add_columns(expired).where(by_numbers), sql, ["name", "numbers"], may_lack=["name"]
        )
        """In no order: it might bring a scan of an index in that order."""
        self.delete: Prepared = Prepared(delete(queued).where(by_numbers), sql, ["name", "numbers"], may_lack=["name"])
        self.delete_returning: Prepared | None = (
            Prepared(
                delete(queued).where(by_numbers).returning(columns.seq), sql, ["name", "numbers"], may_lack=["name"]
            )
            if dialect.words.returns_deleted
            else None
        )
        one = delete(queued).where(columns.seq == bindparam("number"), of_queue)
        self._delete_one: Prepared = Prepared(one, sql, ["name", "number"])
        self._delete_one_there = None
        if dialect.words.table_of_row is not None:
            there = literal_column(dialect.words.table_of_row) == bindparam("table", type_=BigInteger())
            self._delete_one_there = Prepared(one.where(there), sql, ["name", "number", "table"])
        self._lock: Prepared = Prepared(
            select(columns.seq).where(by_numbers).with_for_update(), sql, ["name", "numbers"], may_lack=["name"]
        )
        noted = [(table, table.c.queue) for table in (tables.suspects, tables.receivers, queued)]
        self._of_queue: list[Prepared] = [
            Prepared(delete(table).where(name == bindparam("name")), sql, ["name"])
            for table, name in [*noted, (queues, queues.c.name)]
        ]
        self.count: Prepared = Prepared(select(func.count()).where(of_queue), sql, ["name"])
        self.copies: Prepared = Prepared(copies, sql, ["name", "key"])
        self.page: Prepared = Prepared(page, sql, ["name", "number", "skip"])

    def remove_queue(self, connection: Connection, queue: str) -> None:
        """Delete the queue with its messages, and what is noted of its receivers."""
        for statement in self._of_queue:
            statement.change(connection, queue)

    def remove(self, connection: Connection, queue: str, numbers: Sequence[int]) -> set[int]:
        """Delete the queue's messages with the numbers and return the numbers that there were.

        A statement for up to 500 numbers; two, for several numbers, where a delete does not return rows.
        """
        if self.delete_returning is not None:
            return {number for (number,) in self.delete_returning.rows_each(connection, queue, keys=numbers)}
        if len(numbers) > 1:
            numbers = [number for (number,) in self._lock.rows_each(connection, queue, keys=numbers)]
        deleted = self.delete.change_each(connection, queue, keys=numbers)
        return set(numbers) if deleted else set()

    def remove_one(self, connection: Connection, place: TableIdentity | None, queue: str, number: int) -> bool:
        """Delete a message on a connection of the user's; return whether it was there.

        Not as in `remove`, which is for connections that plan a statement once: here it is planned each time.

        Args:
            connection: The connection.
            place: Where the table is, if the statement has to leave tables of the same name alone.
            queue: The message's queue.
            number: The message's number.
        """
        if place is None or self._delete_one_there is None:
            return self._delete_one.change(connection, queue, number) > 0
        return self._delete_one_there.change(connection, queue, number, place.table) > 0

    def removes_at_once(self, number: int) -> bool:
        """Return whether `remove` deletes so many messages with a single statement."""
        return number == 1 or (self.delete_returning is not None and number <= LONGEST_LIST)

    def missing(self, connection: Connection, names: Iterable[str]) -> set[str]:
        """Return the names that are not queues."""
        asked = set(names)
        return asked - {name for (name,) in self.known.rows(connection, list(asked))} if asked else asked

    def subscribers(self, connection: Connection, topics: Iterable[str]) -> dict[str, set[str]]:
        """Return the queues that subscribe to each of the topics."""
        queues: dict[str, set[str]] = {}
        for topic, queue in self._subscribers.rows(connection, list(topics)):
            queues.setdefault(topic, set()).add(queue)
        return queues

    def must_exist(self, connection: Connection, queue: str) -> None:
        """Raise QueueNotFound unless the queue is registered."""
        if self.missing(connection, [queue]):
            raise QueueNotFound(queue)


@lru_cache(maxsize=64)
def queue_statements(tables: QueueTables, dialect: Dialect) -> QueueStatements:
    """Return the statements of the tables, compiled once for every transport on them."""
    return QueueStatements(tables, dialect)


def store_channel(table: Table) -> str:
    """Return the name on which writers notify a store's poller of messages."""
    return f"timeouts {table.fullname}"


def queue_channel(queue: str) -> str:
    """Return the name on which writers notify a queue's receivers of messages."""
    return f"queue {queue}"


def check_size(message: Message, dialect: Dialect) -> None:
    """Refuse a message that the database could not take, or not give back. Raises InvalidMessage."""
    size = len(message.encoded_headers) + len(message.body)
    if size > dialect.values.largest_message:
        raise InvalidMessage(
            f"message {message.id!r} has {size:,} bytes; {dialect} can keep {dialect.values.largest_message:,}. "
            "Keep large content elsewhere and send where it is"
        )
