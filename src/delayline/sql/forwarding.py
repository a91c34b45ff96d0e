"""Due messages go from store to queue inside the database: their headers and bodies do not pass through Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, bindparam, delete, exists, func, insert, literal_column, select

from delayline.message import Headers
from delayline.sql.dialect import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order
from delayline.sql.statements import QueueStatements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Column, ColumnElement, Connection, Select, Table
    from sqlalchemy.sql.base import ReadOnlyColumnCollection

    from delayline.sql.dialect import Dialect, Server
    from delayline.sql.schema import QueueTables

    Columns = ReadOnlyColumnCollection[str, Column[Any]]

#: Headers with one of these in them need more than moving.
MARKER: Final = Headers.DISPATCH_PROPERTIES.encode()
EXPIRY_MARKER: Final = Headers.TIME_TO_BE_RECEIVED.encode()


class FileForwarding:
    """Moves the earliest due messages under SQLite's write lock, which excludes other pollers."""

    def __init__(self, table: Table, tables: QueueTables, dialect: Dialect) -> None:
        columns, sql = table.c, dialect.sql

        def first(*selected: ColumnElement[Any]) -> Select[*tuple[Any, ...]]:
            due = select(*selected).where(columns.due <= bindparam("until"))
            return due.order_by(columns.due, columns.seq).limit(bindparam("number"))

        size = func.length(columns.headers) + func.length(columns.body)
        marked = func.instr(columns.headers, bindparam("marker")) + func.instr(columns.headers, bindparam("expiry"))
        moved = first(columns.destination, columns.id, columns.headers, columns.body)
        move = insert(tables.queued).from_select(["queue", "id", "headers", "body"], moved)
        remove = delete(table).where(columns.seq.in_(first(columns.seq)))
        self._queues = QueueStatements(tables, dialect)
        self._heads = Prepared(first(columns.destination, size, marked), sql, ["marker", "expiry", "until", "number"])
        self._move = Prepared(move, sql, ["until", "number"])
        self._remove = Prepared(remove, sql, ["until", "number"])

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
    ) -> Moved:
        """Move messages and return the result.

        Stops before the first that needs more than moving: its queue does not exist, or its headers hold properties
        that are meant for the dispatch only, or a time to be received.
        """
        known: dict[str, bool] = {}
        number, size = 0, 0
        for destination, length, marked in self._heads.stream(connection, MARKER, EXPIRY_MARKER, until, limit):
            size += length
            if destination not in known:
                known[destination] = not self._queues.missing(connection, [destination])
            if marked or not known[destination] or (number and size > max_bytes):
                break
            number += 1
        if number == 0:
            return Moved(0, set())
        moved = self._move.change(connection, until, number)
        removed = self._remove.change(connection, until, number)
        if not moved == removed == number:
            raise RuntimeError(f"{number} messages were due, {moved} were moved and {removed} removed")
        return Moved(number, {name for name, exists in known.items() if exists})


class LockedForwarding:
    """Moves the earliest due messages that are not locked, on servers that need one statement per step."""

    one_statement = False

    def __init__(self, table: Table, tables: QueueTables, dialect: Server) -> None:
        columns, sql = table.c, dialect.sql
        size = func.length(columns.headers) + func.length(columns.body)
        movable = self.movable(columns, exists().where(tables.queues.c.name == dialect.exact(columns.destination)))
        is_due = and_(columns.due <= bindparam("until"), dialect.leases(table, tables).free)
        heads = select(columns.id, columns.due, columns.destination, size, movable).where(is_due)
        heads = heads.order_by(*in_order(table)).limit(bindparam("number")).with_for_update(skip_locked=True)
        chosen = dialect.one_of(columns.id, "keys")
        moved = select(columns.destination, columns.id, columns.headers, self.body(columns)).where(chosen)
        move = insert(tables.queued).from_select(["queue", "id", "headers", "body"], moved.order_by(*in_order(table)))
        since = columns.due >= bindparam("since")
        self._heads = Prepared(heads, sql, ["until", "number"])
        self._heads_since = Prepared(heads.where(since), sql, ["until", "number", "since"])
        self._move = Prepared(move, sql, ["keys"])
        self._remove = Prepared(delete(table).where(chosen), sql, ["keys"])

    def movable(self, columns: Columns, known: ColumnElement[bool]) -> ColumnElement[Any]:
        """Return the condition for messages that only need moving; `known`: their queue exists."""
        markers: list[ColumnElement[bytes]] = [bindparam("marker", MARKER), bindparam("expiry", EXPIRY_MARKER)]
        return and_(*(func.instr(columns.headers, one) == literal_column("0") for one in markers), known)

    def body(self, columns: Columns) -> ColumnElement[bytes]:
        """Return the body, as the queue takes it."""
        return columns.body

    def run(
        self, connection: Connection, until: object, *, limit: int, max_bytes: int, since: object | None = None
    ) -> Moved:
        """Move messages, those due from `since` on if given, and return the result."""
        if since is None:
            heads = self._heads.rows(connection, until, limit)
        else:
            heads = self._heads_since.rows(connection, until, limit, since)
        movable = [head for head in heads if head[-1]]
        chosen, left = _fitting(movable, max_bytes), len(heads) - len(movable)
        if not chosen:
            return Moved(0, set(), left, until if heads else None)
        if not self.move(connection, [head[0] for head in chosen]):
            return Moved(0, set(), len(heads), until)
        more, reached = len(chosen) < len(movable) or len(heads) == limit, chosen[-1][1]
        return Moved(
            len(chosen), {head[2] for head in chosen}, left, until if more else None, None if left else reached
        )

    def move(self, connection: Connection, ids: Sequence[str]) -> bool:
        """Move messages that are locked; False where that is left to the poller's own hands, and nothing is done."""
        moved = self._move.change_each(connection, keys=ids)
        removed = self._remove.change_each(connection, keys=ids)
        if not moved == removed == len(ids):
            raise RuntimeError(f"{len(ids)} messages were locked, {moved} were moved and {removed} removed")
        return True


def _fitting(heads: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Return as many as fit, at least one when there is one."""
    for number, (_, _, _, size, _) in enumerate(heads):
        max_bytes -= size
        if number and max_bytes < 0:
            return heads[:number]
    return heads
