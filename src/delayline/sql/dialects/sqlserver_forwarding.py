"""Due messages go from store to queue in SQL Server in three statements: no body leaves the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, bindparam, case, cast, collate, delete, exists, func, insert, literal_column, select
from sqlalchemy.dialects import mssql

from delayline.message import Headers
from delayline.sql.forwarding import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.schema import BINARY, in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.sql.dialects.sqlserver import SqlServer
    from delayline.sql.leases import Leases
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements

#: Headers with one of these in them need more than moving, in JSON and in XML.
MARKERS: Final = (Headers.DISPATCH_PROPERTIES, Headers.TIME_TO_BE_RECEIVED)
ASCII: Final = "Latin1_General_BIN"


class SqlServerForwarding:
    """Moves the earliest due messages of one store's table that nobody has locked.

    Headers stay in the form they are in: a message tells XML from JSON when it is read.
    """

    one_statement = False

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: SqlServer, leases: Leases) -> None:
        table, sql, self._dialect = statements.table, dialect.sql, dialect
        columns, chosen = table.c, dialect.one_of(table.c.id, "keys")
        size = func.length(columns.headers) + func.length(columns.body)
        known = exists().where(tables.queues.c.name == collate(columns.destination, BINARY))
        movable = case(
            (and_(known, *map(_without(columns.headers), MARKERS)), literal_column("1")), else_=literal_column("0")
        )
        heads = select(columns.id, columns.destination, size, movable, columns.due)
        heads = heads.where(columns.due <= bindparam("until"), leases.free).order_by(*in_order(table))
        heads = heads.limit(bindparam("number")).with_for_update(skip_locked=True)
        body = func.coalesce(columns.body, literal_column("0x"))
        moved = select(columns.destination, columns.id, columns.headers, body).where(chosen).order_by(*in_order(table))
        move = insert(tables.queued).from_select(["queue", "id", "headers", "body"], moved)
        self._heads = Prepared(heads, sql, ["until", "number"])
        self._heads_since = Prepared(heads.where(columns.due >= bindparam("since")), sql, ["until", "since", "number"])
        self._move = Prepared(move, sql, ["keys"])
        self._remove = Prepared(delete(table).where(chosen), sql, ["keys"])

    def run(
        self, connection: Connection, until: object, *, limit: int, max_bytes: int, since: object | None = None
    ) -> Moved:
        """Move messages due from `since` on, where given, and say what became of them.

        A server that ignores the lock hints may give the same messages to two who move them. Only one can remove them:
        the other undoes its work and leaves them to the poller, which counts what it removes.
        """
        if since is None:
            heads = self._heads.rows(connection, until, limit)
        else:
            heads = self._heads_since.rows(connection, until, since, limit)
        movable = [row for row in heads if row[3]]
        chosen = _fitting(movable, max_bytes)
        if not chosen:
            return Moved(0, set(), len(heads) - len(movable), until if heads else None)
        ids = [row[0] for row in chosen]
        self._dialect.set_savepoint(connection)
        moved = self._move.change_each(connection, keys=ids)
        if not moved == self._remove.change_each(connection, keys=ids) == len(ids):
            self._dialect.roll_back_to_savepoint(connection)
            self._dialect.release_savepoint(connection)
            return Moved(0, set(), len(heads), until)
        self._dialect.release_savepoint(connection)
        left, more = len(heads) - len(movable), len(heads) == limit or len(chosen) < len(movable)
        return Moved(
            len(ids), {row[1] for row in chosen}, left, until if more else None, None if left else chosen[-1][4]
        )


def _fitting(rows: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Return as many rows as fit, at least one when there is one."""
    for number, row in enumerate(rows):
        max_bytes -= row[2]
        if number and max_bytes < 0:
            return rows[:number]
    return rows


def _without(headers: ColumnElement[bytes]) -> Any:  # noqa: ANN401 - from a name to a condition
    text = collate(cast(headers, mssql.VARCHAR("max")), ASCII)  # type: ignore[arg-type]
    return lambda name: func.charindex(literal_column(f"'{name}'"), text) == literal_column("0")
