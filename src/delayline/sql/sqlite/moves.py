"""Due messages go from store to queue under SQLite's write lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from delayline.sql.moves import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.statements import EXPIRY_MARKER, MARKER, QueueStatements

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Select, Table

    from delayline.sql.schema import QueueTables
    from delayline.sql.sqlite.dialect import Sqlite


class FileForwarding:
    """Moves the earliest due messages under SQLite's write lock, which excludes other pollers."""

    def __init__(self, table: Table, tables: QueueTables, dialect: Sqlite) -> None:
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
        heads = first(columns.destination, columns.due, size, marked)
        self._heads = Prepared(heads, sql, ["marker", "expiry", "until", "number"])
        self._move = Prepared(move, sql, ["until", "number"])
        self._remove = Prepared(remove, sql, ["until", "number"])

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
    ) -> Moved:
        """Move messages and return the result, with `counts` if `counted`.

        Stops before the first that needs more than moving: its queue does not exist, or its headers hold properties
        that are meant for the dispatch only, or a time to be received.
        """
        known: dict[str, bool] = {}
        number, size = 0, 0
        counts: Counter[tuple[str, Any]] | None = Counter() if counted else None
        for destination, due, length, marked in self._heads.stream(connection, MARKER, EXPIRY_MARKER, until, limit):
            size += length
            if destination not in known:
                known[destination] = not self._queues.missing(connection, [destination])
            if marked or not known[destination] or (number and size > max_bytes):
                break
            number += 1
            if counts is not None:
                counts[destination, due] += 1
        if number == 0:
            return Moved(0, set())
        moved = self._move.change(connection, until, number)
        removed = self._remove.change(connection, until, number)
        if not moved == removed == number:
            raise RuntimeError(f"{number} messages were due, {moved} were moved and {removed} removed")
        return Moved(number, {name for name, exists in known.items() if exists}, counts=counts)
