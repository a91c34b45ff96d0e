"""Management of a table of timeouts: list, count, cancel and reschedule by message id."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Text, bindparam, cast, func, or_, select, type_coerce, update

from delayline.clock import EPOCH
from delayline.delayed.store import DueCount, Outcome
from delayline.errors import CorruptHeaders
from delayline.message import DelayedMessage
from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

    from delayline.message import Message
    from delayline.sql.dialect import Dialect
    from delayline.timeouts.persister import Timeout
    from delayline.timeouts.statements import TimeoutStatements

MICROSECOND: Final = timedelta(microseconds=1)


class TimeoutManagement:
    """Lists, counts, cancels and reschedules timeouts of one table."""

    def __init__(self, statements: TimeoutStatements, dialect: Dialect) -> None:
        self._statements = statements
        self._exact = dialect.exact
        self._table = statements.table
        columns, sql = self._table.c, dialect.sql
        headers: ColumnElement[Any] = columns.Headers
        self._headers = cast(headers, Text) if dialect.timeout_shape.json_headers else type_coerce(headers, Text)
        of_id = columns.Id == bindparam("key")
        free = select(columns.Id).where(of_id).with_for_update(skip_locked=True)
        exists = select(columns.Id).where(of_id).with_hint(self._table, "WITH (READCOMMITTEDLOCK)", "mssql")
        self._free = Prepared(free, sql, ["key"])
        self._exists = Prepared(exists, sql, ["key"])
        self._move = Prepared(update(self._table).where(of_id).values(Time=bindparam("at")), sql, ["at", "key"])

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
        """Change the due time of the message's timeouts, unless the dispatcher was requested to send one."""
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
        there = any(self._exists.rows(connection, key) for key in keys)
        return Outcome.DISPATCHING if there else Outcome.NOT_PENDING

    def _keys_of(self, connection: Connection, message_id: str) -> list[str]:
        """Return the ids of timeouts whose own id or message id is `message_id`."""
        words = {json.dumps(message_id), json.dumps(message_id, ensure_ascii=False)}
        query = select(self._table.c.Id).where(or_(*(self._headers.contains(word, autoescape=True) for word in words)))
        keys = {str(key).lower() for key in connection.execute(query).scalars()}
        keys |= {str(uuid.UUID(message_id))} if _is_guid(message_id) else set()
        found = self._statements.read(connection, sorted(keys))
        return [one.id for one in found if message_id in (one.id, _logical(one.message).id)]


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
