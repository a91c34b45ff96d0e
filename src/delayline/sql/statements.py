"""The store's statements, built once a table and run by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, func, select

from delayline.clock import from_microseconds, to_microseconds
from delayline.message import DelayedMessage, Message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Insert, Select, Table

    from delayline.sql.dialects.sqlite import Sqlite


class StoreStatements:
    """Every statement a delayed message store runs on its table."""

    def __init__(self, table: Table, dialect: Sqlite) -> None:
        self.table = table
        columns = table.c
        is_due = columns.due <= bindparam("until")
        in_order = (columns.due, columns.seq)
        self.waiting = select(
            columns.id, columns.destination, columns.due, columns.headers, columns.body, columns.retry_count
        )
        self.insert: Insert = dialect.insert_new(table, "id")
        self.due = self.waiting.where(is_due).order_by(*in_order).limit(bindparam("number"))
        self.due_numbers = (
            select(columns.seq, (func.length(columns.headers) + func.length(columns.body)).label("size"))
            .where(is_due)
            .order_by(*in_order)
            .limit(bindparam("number"))
            .offset(bindparam("skip"))
        )
        self.claimed = (
            self.waiting.add_columns(columns.seq)
            .where(columns.seq.in_(bindparam("numbers", expanding=True)), is_due)
            .order_by(*in_order)
        )
        self.next_due = select(func.min(columns.due))
        self.number = select(columns.seq).where(columns.id == bindparam("key"))
        by_id = columns.id == bindparam("key")
        self.delete = delete(table).where(by_id)
        self.move = table.update().where(by_id).values(due=bindparam("at"))
        self.count_failure = table.update().where(by_id).values(retry_count=columns.retry_count + 1)
        self.retry = self.count_failure.values(due=bindparam("at"))

    def by_due(self, width: int) -> Select[int, str, int]:
        """Return the count by bucket of `width` microseconds and destination."""
        columns = self.table.c
        start = (columns.due - columns.due % width).label("start")
        counts = select(start, columns.destination, func.count()).group_by(start, columns.destination)
        return counts.order_by(start, columns.destination)


def row_of(message: DelayedMessage) -> dict[str, Any]:
    """Return what the insert statement takes."""
    return {
        "id": message.id,
        "destination": message.destination,
        "due": to_microseconds(message.due),
        "headers": message.message.encoded_headers,
        "body": message.message.body,
        "retry_count": message.number_of_retries,
    }


def message_of(row: Sequence[Any]) -> DelayedMessage:
    """Return the message of a row of `waiting`."""
    message_id, destination, due, headers, body, retry_count = row[:6]
    return DelayedMessage(
        Message.from_encoded(message_id, headers, body), destination, from_microseconds(due), retry_count
    )


def bounded(
    connection: Connection, due: Select[Any], values: Mapping[str, int], max_bytes: int
) -> list[DelayedMessage]:
    """Read messages one by one until their bytes are too many; at least one is returned when one is due."""
    batch: list[DelayedMessage] = []
    size = 0
    with connection.execute(due, values) as rows:
        for row in rows:
            size += len(row[3]) + len(row[4])
            if batch and size > max_bytes:
                break
            batch.append(message_of(row))
    return batch
