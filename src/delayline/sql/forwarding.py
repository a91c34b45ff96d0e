"""Due messages go from store to queue inside the database: their headers and bodies do not pass through Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, delete, func, insert, select

from delayline.message import Headers
from delayline.sql.prepared import Prepared
from delayline.sql.schema import queued, queues

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Select, Table

    from delayline.sql.dialects.sqlite import Sqlite

MARKER: Final = Headers.DISPATCH_PROPERTIES.encode()


class Forwarding:
    """The statements that move the earliest due messages of one store's table to their queues."""

    def __init__(self, table: Table, dialect: Sqlite) -> None:
        columns, sql = table.c, dialect.sql

        def first(*selected: ColumnElement[Any]) -> Select[*tuple[Any, ...]]:
            due = select(*selected).where(columns.due <= bindparam("until"))
            return due.order_by(columns.due, columns.seq).limit(bindparam("number"))

        size = func.length(columns.headers) + func.length(columns.body)
        marked = func.instr(columns.headers, bindparam("marker"))
        moved = first(columns.destination, columns.id, columns.headers, columns.body)
        move = insert(queued).from_select(["queue", "id", "headers", "body"], moved)
        remove = delete(table).where(columns.seq.in_(first(columns.seq)))
        self._heads = Prepared(first(columns.destination, size, marked), sql, ["marker", "until", "number"])
        self._known = Prepared(select(queues.c.name).where(queues.c.name == bindparam("name")), sql, ["name"])
        self._move = Prepared(move, sql, ["until", "number"])
        self._remove = Prepared(remove, sql, ["until", "number"])

    def run(self, connection: Connection, until: int, *, limit: int, max_bytes: int) -> tuple[int, set[str]]:
        """Move messages and return how many, and to which queues.

        Stops before the first that needs more than moving: its queue does not exist, or its headers hold properties
        that are meant for the dispatch only.
        """
        known: dict[str, bool] = {}
        number, size = 0, 0
        heads = self._heads.run(connection, MARKER, until, limit)
        for destination, length, marked in iter(heads.fetchone, None):
            size += length
            if destination not in known:
                known[destination] = self._known.one(connection, destination) is not None
            if marked or not known[destination] or (number and size > max_bytes):
                break
            number += 1
        heads.close()
        if number == 0:
            return 0, set()
        moved = self._move.change(connection, until, number)
        removed = self._remove.change(connection, until, number)
        if not moved == removed == number:
            raise RuntimeError(f"{number} messages were due, {moved} were moved and {removed} removed")
        return number, {name for name, exists in known.items() if exists}
