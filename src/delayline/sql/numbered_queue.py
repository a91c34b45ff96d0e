"""The messages of a queue by the numbers of their rows: read by key, however many there are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Integer, cast, func, literal_column, select

from delayline.message import Message
from delayline.sql.deadlines import long_work
from delayline.sql.prepared import LONGEST_LIST
from delayline.transport import QueueLook, Stretch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnClause, Connection, Select

    from delayline.sql.database import Database
    from delayline.sql.statements import QueueStatements


class SqlNumberedQueue:
    """The messages of a queue; see `NumberedQueue`.

    Args:
        database: The transport's database.
        statements: The statements on its queues.
        queue: The queue.
    """

    def __init__(self, database: Database, statements: QueueStatements, queue: str) -> None:
        self._database = database
        self._statements = statements
        self._queue = queue
        self._columns = statements.queued.c

    @long_work
    async def look(self, width: int) -> QueueLook:
        """Count the messages in stretches of numbers, by the index alone."""
        each: ColumnClause[int] = literal_column(str(width), Integer())
        sequence = self._columns.seq
        of_queue = select((sequence // each).label("stretch"), cast(sequence % each, Integer).label("place")).where(
            self._columns.queue == self._queue
        )
        places = of_queue.subquery()
        query = select(places.c.stretch, func.count(), func.sum(places.c.place)).group_by(places.c.stretch)

        def counted(connection: Connection) -> dict[int, Stretch]:
            self._statements.must_exist(connection, self._queue)
            rows = connection.execute(query)
            return {int(stretch): Stretch(int(messages), int(mark)) for stretch, messages, mark in rows}

        stretches = await self._database.read(counted)
        return QueueLook(sum(stretch.messages for stretch in stretches.values()), stretches)

    @long_work
    async def numbers(self, first: int, last: int) -> Sequence[int]:
        """Return the numbers from `first` to `last` that messages have, in order."""
        query = self._between(select(self._columns.seq), first, last)
        query = query.order_by(self._columns.queue, self._columns.seq)
        return await self._database.read(lambda connection: list(map(int, connection.execute(query).scalars())))

    @long_work
    async def read(
        self, first: int, last: int | None, limit: int, *, newest_first: bool = False, bodies: bool = False
    ) -> Sequence[tuple[int, Message]]:
        """Return messages with their numbers, in the order of these; see `NumberedQueue`."""
        columns = self._columns
        order = [columns.queue, columns.seq]
        query = self._between(self._kept(bodies=bodies), first, last)
        query = query.order_by(*(column.desc() for column in order) if newest_first else order).limit(limit)

        def rows(connection: Connection) -> list[tuple[int, Message]]:
            self._statements.must_exist(connection, self._queue)
            return [_numbered(*row) for row in connection.execute(query)]

        return await self._database.read(rows)

    @long_work
    async def messages(self, numbers: Sequence[int], *, bodies: bool = False) -> Mapping[int, Message]:
        """Return the messages with the numbers that are still there, with bodies if asked for."""
        found: dict[int, Message] = {}
        for start in range(0, len(numbers), LONGEST_LIST):
            some = numbers[start : start + LONGEST_LIST]
            query = self._kept(bodies=bodies).where(self._columns.queue == self._queue, self._columns.seq.in_(some))
            found |= await self._database.read(partial(_by_number, query=query))
        return found

    def _kept(self, *, bodies: bool) -> Select[Any]:
        shown = [self._columns.seq, self._columns.id, self._columns.headers]
        return select(*shown, *([self._columns.body] if bodies else []))

    def _between(self, query: Select[Any], first: int, last: int | None) -> Select[Any]:
        query = query.where(self._columns.queue == self._queue, self._columns.seq >= first)
        return query if last is None else query.where(self._columns.seq <= last)


def _by_number(connection: Connection, query: Select[Any]) -> dict[int, Message]:
    return dict(_numbered(*row) for row in connection.execute(query))


def _numbered(number: int, message_id: str, headers: bytes, body: bytes = b"") -> tuple[int, Message]:
    return int(number), Message.from_encoded(message_id, bytes(headers), bytes(body))
