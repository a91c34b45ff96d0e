"""Searches through the tables of stores, queues and the journal: page by page in the order of a key, without locks.

A page is a statement or two of some milliseconds, each its own transaction, so that a search of any length keeps
nobody waiting and holds up no cleaning of the table. The database checks what it can; what it lets through is read.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import and_, func, inspect, literal_column, or_, select

from delayline.delayed.columns import JOURNALED_NAMES
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.filters import body_pattern_of, pattern_of
from delayline.message import DelayedMessage, Message
from delayline.places import (
    MessageMatch,
    MessagePlace,
    PlaceKind,
    PlacePage,
    pending_match,
    queued_match,
)
from delayline.sql.journal import journal_tables
from delayline.sql.schema import STORE_SUFFIX, endpoint_names
from delayline.sql.set_pages import content_conditions, fitting, id_conditions, waiting_conditions
from delayline.sql.statements import DIRTY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Column, ColumnElement, Connection, Select, Table

    from delayline.filters import MessageFilter
    from delayline.places import Key
    from delayline.sql.database import Database

#: Rows that a page looks at: the first page, the fewest, the most; pages grow and shrink towards `PAGE_SECONDS`.
FIRST_PAGE: Final = 2_000
SMALLEST_PAGE: Final = 20
LARGEST_PAGE: Final = 100_000
PAGE_SECONDS: Final = 0.05
#: Likewise for an id alone: an index of the ids in queues would cost each message there more than a scan costs here.
ROWS_FOR_AN_ID: Final = 1_000_000
#: Rows that a page reads, of those that the database lets through; fewer where bodies are read.
READ_AT_ONCE: Final = 500
BODIES_AT_ONCE: Final = 50
NOTHING: Final[ColumnElement[Any]] = literal_column("NULL")


class Span(NamedTuple):
    """The first and the last key of a table when a search of it began, as the column has them; None for no rows."""

    first: Any
    last: Any


class SearchedTable(ABC):
    """A table with a message a row, looked through in the order of its key.

    Messages that come behind the last key after a search has begun are not looked at: it ends.

    Args:
        database: The database.
    """

    place: MessagePlace

    def __init__(self, database: Database) -> None:
        self._database = database
        self._span: Span | None = None
        self._at_once = FIRST_PAGE

    @property
    @abstractmethod
    def _table(self) -> Table: ...

    @property
    def _keys(self) -> Sequence[Column[Any]]:
        """The columns that order the rows."""
        return (self._table.c.seq,)

    def _within(self, wanted: MessageFilter) -> list[ColumnElement[bool]]:
        """Return conditions for rows that are looked at, by an index that has the keys behind its columns."""
        del wanted
        return []

    def _order(self, wanted: MessageFilter) -> Sequence[Column[Any]]:
        """Return the columns of the index that has the keys in their order."""
        del wanted
        return self._keys

    @abstractmethod
    def _conditions(self, wanted: MessageFilter) -> list[ColumnElement[bool]]:
        """Return conditions that all matching rows fulfil, and few others."""

    @abstractmethod
    def _columns(self, *, reads_bodies: bool) -> Sequence[ColumnElement[Any]]:
        """Return what is read of a row, besides its keys."""

    @abstractmethod
    def _matching(
        self, connection: Connection, wanted: MessageFilter, rows: Sequence[Any]
    ) -> list[tuple[tuple[Any, ...], MessageMatch]]:
        """Return the rows, keys first, that match, with their messages."""

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Look at the rows behind a key, as many as take a moment."""
        if after is None or self._span is None:
            self._span = await self._database.read(partial(self._read_span, wanted=wanted))
        if self._span.last is None:
            return PlacePage([], None, 0, 1.0)
        if after is None and _names_only_an_id(wanted):
            self._at_once = ROWS_FOR_AN_ID
        began = time.monotonic()
        look = partial(self._page, wanted=wanted, after=after, most=most, span=self._span)
        try:
            page = await self._database.read(look)
        except BackendUnavailable:  # it may have been too much at once
            self._at_once = max(1, self._at_once // 8)
            raise
        took = max(time.monotonic() - began, 1e-4)
        if self._at_once <= LARGEST_PAGE and (page.looked_at >= self._at_once or took > PAGE_SECONDS):
            fitting_one = int(self._at_once * min(4.0, max(0.25, PAGE_SECONDS / took)))
            self._at_once = min(LARGEST_PAGE, max(SMALLEST_PAGE, fitting_one))
        return page

    def _left(self, span: Span, after: Key | None) -> float:
        """Return how many rows there are behind a key at most."""
        [key, *more] = span.last
        return math.inf if more else int(key) - (after if isinstance(after, int) else int(span.first[0]) - 1)

    def _end_of_page(
        self, connection: Connection, behind: Sequence[ColumnElement[bool]], order: Sequence[Column[Any]], span: Span
    ) -> tuple[tuple[Any, ...], int]:
        """Return the last key of a page, and how many rows it has."""
        keys = self._keys
        query = self._look(select(*keys).where(*behind).order_by(*order))
        if len(keys) == 1:
            page = query.limit(self._at_once).subquery()
            last, number = connection.execute(select(func.max(page.c[keys[0].name]), func.count())).one()
            return (span.last if last is None else (last,)), int(number)
        row = connection.execute(query.offset(self._at_once - 1).limit(1)).first()
        return (span.last, 0) if row is None else (tuple(row), self._at_once)

    def _read_span(self, connection: Connection, wanted: MessageFilter) -> Span:
        within, keys = self._within(wanted), self._keys
        ends = []
        for backwards in (False, True):
            order = [column.desc() if backwards else column for column in self._order(wanted)]
            query = self._look(select(*keys).where(*within).order_by(*order).limit(1))
            ends.append(connection.execute(query).first())
        first, last = (None if row is None else tuple(row) for row in ends)
        return Span(first, last)

    def _page(
        self, connection: Connection, wanted: MessageFilter, after: Key | None, most: int, span: Span
    ) -> PlacePage:
        keys, order, within = self._keys, self._order(wanted), self._within(wanted)
        behind = [*within, self._compared(span.last, later=False)]
        if after is not None:
            behind.append(self._compared(self._decoded(after), later=True))
        if (exact := self._by_id(wanted)) is not None:
            last, looked_at, conditions = span.last, 1, [*behind, exact]
        elif _names_only_an_id(wanted) and (rows_left := self._left(span, after)) <= self._at_once:
            last, looked_at, conditions = span.last, int(rows_left), behind
        else:
            last, looked_at = self._end_of_page(connection, behind, order, span)
            conditions = [*behind, self._compared(last, later=False)]
        reads_bodies = self._reads_bodies(wanted)
        at_once = BODIES_AT_ONCE if reads_bodies else READ_AT_ONCE
        query = select(*keys, *self._columns(reads_bodies=reads_bodies)).where(*conditions, *self._conditions(wanted))
        rows = connection.execute(self._look(query.order_by(*order).limit(at_once))).all()
        if len(rows) == at_once:  # there may be more before the end of the page
            last, looked_at = tuple(rows[-1][: len(keys)]), at_once
        unchecked = wanted if reads_bodies else replace(wanted, body=None)
        matches = self._matching(connection, unchecked, rows)
        if len(matches) > most:
            matches = matches[:most]
            last = matches[-1][0]
        at_end = last == span.last
        end = None if at_end else self._encoded(last)
        return PlacePage([match for _, match in matches], end, looked_at, 1.0 if at_end else self._share(last))

    def _reads_bodies(self, wanted: MessageFilter) -> bool:
        """Return whether the database cannot tell which bodies match."""
        if wanted.body is None:
            return False
        body = self._table.c.body
        return body_pattern_of(wanted.body).has_order or self._database.dialect.values.containing(body, body) is None

    def _by_id(self, wanted: MessageFilter) -> ColumnElement[bool] | None:
        """Return the condition of a filter that names a message, where an index finds it among all; None elsewhere."""
        del wanted
        return None

    def _compared(self, key: tuple[Any, ...], *, later: bool) -> ColumnElement[bool]:
        """Return the condition that a row is behind a key, or that it is not."""
        first, *others = self._keys
        if not others:
            alone: ColumnElement[bool] = first > key[0] if later else first <= key[0]
            return alone
        [second] = others
        beside = second > key[1] if later else second <= key[1]
        return or_(first > key[0] if later else first < key[0], and_(first == key[0], beside))

    def _look(self, query: Select[Any]) -> Select[Any]:
        """Return the query such that it neither waits for locks nor passes over locked rows."""
        return query.with_hint(self._table, *DIRTY)

    def _encoded(self, key: tuple[Any, ...]) -> Key:
        if len(key) == 1:
            return int(key[0])
        return [self._database.dialect.values.from_due(key[0]).isoformat(), str(key[1])]

    def _decoded(self, key: Key) -> tuple[Any, ...]:
        if isinstance(key, int):
            return (key,)
        due, name = key
        return self._database.dialect.values.to_due(datetime.fromisoformat(due)), name

    def _share(self, key: tuple[Any, ...]) -> float:
        assert self._span is not None  # noqa: S101 - read before
        (first, *_), (last, *_), (at, *_) = self._span.first, self._span.last, key
        return float((at - first) / (last - first)) if last > first else 1.0


class SearchedStore(SearchedTable):
    """The pending messages of an endpoint.

    Args:
        database: The database.
        endpoint: The endpoint.
        table: Returns the store's table, which is known once it is open.
    """

    def __init__(self, database: Database, endpoint: str, table: Callable[[], Table]) -> None:
        super().__init__(database)
        self.place: MessagePlace = MessagePlace(PlaceKind.PENDING, endpoint)
        self._table_of = table

    @property
    def _table(self) -> Table:
        return self._table_of()

    @property
    def _keys(self) -> Sequence[Column[Any]]:
        columns = self._table.c
        return (columns.seq,) if "seq" in columns else (columns.due, columns.id)

    def _conditions(self, wanted: MessageFilter) -> list[ColumnElement[bool]]:
        return waiting_conditions(self._table, self._database.dialect, wanted)

    def _by_id(self, wanted: MessageFilter) -> ColumnElement[bool] | None:
        return self._table.c.id.in_(wanted.ids) if wanted.ids else None

    def _columns(self, *, reads_bodies: bool) -> Sequence[ColumnElement[Any]]:
        columns = self._table.c
        size = func.length(columns.body).label("size")
        contents = columns.headers, size, columns.body if reads_bodies else NOTHING
        return *(columns[name] for name in JOURNALED_NAMES), *contents

    def _matching(
        self, connection: Connection, wanted: MessageFilter, rows: Sequence[Any]
    ) -> list[tuple[tuple[Any, ...], MessageMatch]]:
        del connection
        matches: list[tuple[Any, MessageMatch]] = []
        keys, from_due = len(self._keys), self._database.dialect.values.from_due
        for row in rows:
            message_id, destination, kept, headers, size, body = row[keys:]
            due, message = from_due(kept), Message.from_encoded(message_id, bytes(headers), bytes(body or b""))
            if not wanted.matches(message, destination or "", due):
                continue
            match = pending_match(self.place, DelayedMessage(message, destination or "", due), int(size or 0))
            matches.append((tuple(row[:keys]), match))
        return matches


async def neighbours_of(database: Database, schema: str | None, own: Table) -> list[SearchedStore]:
    """Return the pending messages of the other endpoints in a schema, as far as their tables have their usual names.

    Args:
        database: The database.
        schema: The schema of the tables, as the user has given it.
        own: The table that is left out.
    """
    catalog = database.dialect.catalog
    names = await database.read(lambda connection: endpoint_names(connection, catalog.schema_of(schema)))
    tables = {name: catalog.store_table(f"{name}{STORE_SUFFIX}", schema) for name in names}
    return [
        SearchedStore(database, name, lambda table=table: table)  # type: ignore[misc]
        for name, table in tables.items()
        if table.name != own.name
    ]


class SearchedQueues(SearchedTable):
    """The messages of all queues, or of the error queue alone.

    Args:
        database: The database.
        table: The table of queued messages.
        error_queue: The error queue.
        kind: `QUEUES` for all but the error queue, `ERRORS` for that.
    """

    def __init__(self, database: Database, table: Table, error_queue: str, kind: PlaceKind) -> None:
        super().__init__(database)
        self._queued = table
        self._error_queue = error_queue
        self.place: MessagePlace = MessagePlace(kind, error_queue if kind is PlaceKind.ERRORS else "")

    @property
    def _table(self) -> Table:
        return self._queued

    def _within(self, wanted: MessageFilter) -> list[ColumnElement[bool]]:
        queue = self._queued.c.queue
        if self.place.kind is PlaceKind.ERRORS:
            return [queue == self._error_queue]
        exact = None if wanted.destination is None else pattern_of(wanted.destination).exact
        return [] if exact is None else [queue == exact]

    def _order(self, wanted: MessageFilter) -> Sequence[Column[Any]]:
        columns = self._queued.c
        return (columns.queue, columns.seq) if self._within(wanted) else (columns.seq,)

    def _conditions(self, wanted: MessageFilter) -> list[ColumnElement[bool]]:
        columns = self._queued.c
        conditions = content_conditions(self._queued, self._database.dialect, wanted)
        conditions += id_conditions(columns.id, wanted)
        if self.place.kind is PlaceKind.QUEUES:
            conditions.append(columns.queue != self._error_queue)
            if wanted.destination is not None:
                conditions += fitting(columns.queue, pattern_of(wanted.destination))
        return conditions

    def _columns(self, *, reads_bodies: bool) -> Sequence[ColumnElement[Any]]:
        columns = self._queued.c
        size = func.length(columns.body).label("size")
        return columns.queue, columns.id, columns.headers, size, columns.body if reads_bodies else NOTHING

    def _matching(
        self, connection: Connection, wanted: MessageFilter, rows: Sequence[Any]
    ) -> list[tuple[tuple[Any, ...], MessageMatch]]:
        del connection
        matches: list[tuple[Any, MessageMatch]] = []
        for number, queue, message_id, headers, size, body in rows:
            message = Message.from_encoded(message_id, bytes(headers), bytes(body or b""))
            match = queued_match(MessagePlace(self.place.kind, queue), queue, message, int(size or 0))
            if wanted.matches(message, match.destination):
                matches.append(((number,), match))
        return matches


class SearchedJournal(SearchedTable):
    """The last event of each message that the journal knows.

    Args:
        database: The database.
        schema: The schema of its tables.
    """

    place: MessagePlace = MessagePlace(PlaceKind.JOURNAL, "")

    def __init__(self, database: Database, schema: str | None) -> None:
        super().__init__(database)
        self._entries = journal_tables(schema).entries
        self._is_kept: bool | None = None

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Look at the entries behind a key; none where no journal was ever kept."""
        if self._is_kept is None:
            self._is_kept = await self._database.read(self._look_up)
        return await super().page(wanted, after, most) if self._is_kept else PlacePage([], None, 0, 1.0)

    def _look_up(self, connection: Connection) -> bool:
        """Return whether there is a journal. Raises BackendUnusable for a journal without its index."""
        table = self._entries
        if not inspect(connection).has_table(table.name, schema=table.schema):
            return False
        [index] = table.indexes
        if index.name not in self._database.dialect.groups.index_names(connection, table):
            raise BackendUnusable(f"the journal has no index {index.name} yet: run delayline setup, which adds it")
        return True

    @property
    def _table(self) -> Table:
        return self._entries

    def _by_id(self, wanted: MessageFilter) -> ColumnElement[bool] | None:
        return self._entries.c.id.in_(wanted.ids) if wanted.ids else None

    def _conditions(self, wanted: MessageFilter) -> list[ColumnElement[bool]]:
        return waiting_conditions(self._entries, self._database.dialect, wanted)

    def _columns(self, *, reads_bodies: bool) -> Sequence[ColumnElement[Any]]:
        del reads_bodies
        columns = self._entries.c
        return columns.store, columns.event, columns.at, *(columns[name] for name in JOURNALED_NAMES)

    def _matching(
        self, connection: Connection, wanted: MessageFilter, rows: Sequence[Any]
    ) -> list[tuple[tuple[Any, ...], MessageMatch]]:
        from_due, nothing = self._database.dialect.values.from_due, b""
        matching = []
        for row in rows:
            message = Message.from_encoded(row.id, nothing, nothing)
            if wanted.matches(message, row.destination, from_due(row.due)):
                matching.append(row)
        last = self._last(connection, {row.id for row in matching})
        return [
            (
                (row.seq,),
                MessageMatch(
                    place=self.place,
                    id=row.id,
                    state=row.event,
                    destination=row.destination,
                    endpoint=row.store.removesuffix(STORE_SUFFIX),
                    due=from_due(row.due),
                    at=from_due(row.at),
                ),
            )
            for row in matching
            if row.seq in last
        ]

    def _last(self, connection: Connection, ids: set[str]) -> set[int]:
        """Return the numbers of the last entries of messages."""
        columns = self._entries.c
        wanted, last = sorted(ids), set[int]()
        for first in range(0, len(wanted), 500):
            query = select(func.max(columns.seq)).where(columns.id.in_(wanted[first : first + 500]))
            last.update(connection.execute(query.group_by(columns.id, columns.store)).scalars())
        return last


def _names_only_an_id(wanted: MessageFilter) -> bool:
    """Return whether no headers and bodies are read: of those with the id only."""
    return bool(wanted.ids) and wanted.body is None and not wanted.checks_headers
