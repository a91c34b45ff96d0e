"""Due messages go from store to queue in SQL Server in three statements: no body leaves the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, case, cast, collate, func, literal_column
from sqlalchemy.dialects import mssql

from delayline.message import Headers
from delayline.sql.forwarding import LockedForwarding
from delayline.sql.schema import BINARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.sql.dialects.sqlserver import SqlServer
    from delayline.sql.forwarding import Columns
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import StoreStatements

#: Headers with one of these in them need more than moving, in JSON and in XML.
MARKERS: Final = (Headers.DISPATCH_PROPERTIES, Headers.TIME_TO_BE_RECEIVED)


class SqlServerForwarding(LockedForwarding):
    """Moves the earliest due messages of one store's table, skipping locked ones.

    Headers are moved unchanged: a reader distinguishes XML from JSON. A server that ignores lock hints may return the
    same messages to two movers. Only one can delete them; the other rolls back and leaves them to the poller, which
    counts deleted rows.
    """

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: SqlServer) -> None:
        self._dialect = dialect
        super().__init__(statements, tables, dialect)

    def movable(self, columns: Columns, known: ColumnElement[bool]) -> ColumnElement[Any]:
        """Return a CASE of 1 or 0: in T-SQL a condition is not a value."""
        return case(
            (and_(known, *map(_without(columns.headers), MARKERS)), literal_column("1")), else_=literal_column("0")
        )

    def body(self, columns: Columns) -> ColumnElement[bytes]:
        """Return a missing body as an empty one."""
        return func.coalesce(columns.body, literal_column("0x"))

    def move(self, connection: Connection, ids: Sequence[str]) -> bool:
        """Move messages, unless another process has removed one of them."""
        self._dialect.set_savepoint(connection)
        moved = self._move.change_each(connection, keys=ids)
        alone = moved == self._remove.change_each(connection, keys=ids) == len(ids)
        if not alone:
            self._dialect.roll_back_to_savepoint(connection)
        self._dialect.release_savepoint(connection)
        return alone


def _without(headers: ColumnElement[bytes]) -> Any:  # noqa: ANN401 - from a name to a condition
    text = collate(cast(headers, mssql.VARCHAR("max")), BINARY)  # type: ignore[arg-type]
    return lambda name: func.charindex(literal_column(f"'{name}'"), text) == literal_column("0")
