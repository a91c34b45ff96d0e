"""The store's statements, built once a table and run by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, func, literal_column, select, update

from delayline.clock import from_microseconds, to_microseconds
from delayline.message import DelayedMessage, Message
from delayline.sql.forwarding import Forwarding
from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Select, Table

    from delayline.sql.dialects.sqlite import Sqlite

Values = tuple[Any, ...]


class StoreStatements:
    """Every statement a delayed message store runs on its table."""

    def __init__(self, table: Table, dialect: Sqlite) -> None:
        self.table = table
        columns, sql = table.c, dialect.sql
        in_order, by_id = (columns.due, columns.seq), columns.id == bindparam("key")
        is_due = columns.due <= bindparam("until")
        self.waiting = select(
            columns.id, columns.destination, columns.due, columns.headers, columns.body, columns.retry_count
        )
        due = self.waiting.where(is_due).order_by(*in_order).limit(bindparam("number"))
        numbers = select(columns.seq).where(is_due).order_by(*in_order)
        numbers = numbers.limit(bindparam("number")).offset(bindparam("skip"))
        claimed = self.waiting.where(columns.seq == bindparam("sequence"), is_due)
        count_failure = update(table).where(by_id).values(retry_count=columns.retry_count + literal_column("1"))
        move = update(table).where(by_id).values(due=bindparam("at"))
        retry = count_failure.values(due=bindparam("at"))
        self.insert = Prepared(dialect.insert_new(table, "id"), sql, [*table.c.keys()[1:]])
        self.due = Prepared(due, sql, ["until", "number"])
        self.due_numbers = Prepared(numbers, sql, ["until", "number", "skip"])
        self.claimed = Prepared(claimed, sql, ["sequence", "until"])
        self.next_due = Prepared(select(func.min(columns.due)), sql, [])
        self.number = Prepared(select(columns.seq).where(by_id), sql, ["key"])
        self.delete = Prepared(delete(table).where(by_id), sql, ["key"])
        self.move = Prepared(move, sql, ["at", "key"])
        self.count_failure = Prepared(count_failure, sql, ["key"])
        self.forwarding = Forwarding(table, dialect)
        self.retry = Prepared(retry, sql, ["at", "key"])

    def by_due(self, width: int) -> Select[int, str, int]:
        """Return the count by bucket of `width` microseconds and destination."""
        columns = self.table.c
        # Twice the remainder: SQL's has the sign of its left side, and due times before 1970 are negative.
        start = (columns.due - (columns.due % width + width) % width).label("start")
        counts = select(start, columns.destination, func.count()).group_by(start, columns.destination)
        return counts.order_by(start, columns.destination)


def row_of(message: DelayedMessage) -> Values:
    """Return what the insert statement takes."""
    kept = message.message
    return (
        kept.id,
        message.destination,
        to_microseconds(message.due),
        kept.encoded_headers,
        kept.body,
        message.number_of_retries,
    )


def message_of(row: Sequence[Any]) -> DelayedMessage:
    """Return the message of a row of `waiting`."""
    message_id, destination, due, headers, body, retry_count = row
    kept = Message.from_encoded(message_id, headers, body)
    return DelayedMessage(kept, destination, from_microseconds(due), retry_count)


def bounded(
    connection: Connection, statement: Prepared, until: int, *, limit: int, max_bytes: int
) -> list[DelayedMessage]:
    """Read due messages one by one until their bytes are too many; at least one when one is due."""
    batch: list[DelayedMessage] = []
    size = 0
    cursor = statement.run(connection, until, limit)
    for row in iter(cursor.fetchone, None):
        size += len(row[3]) + len(row[4])
        if batch and size > max_bytes:
            break
        batch.append(message_of(row))
    cursor.close()
    return batch
