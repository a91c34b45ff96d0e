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
    """Moves the earliest due messages of one store's table that nobody has locked.

    Headers stay in the form they are in: a message tells XML from JSON when it is read. A server that ignores the lock
    hints may give the same messages to two who move them. Only one can remove them: the other undoes its work and
    leaves them to the poller, which counts what it removes.
    """

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: SqlServer) -> None:
        self._dialect = dialect
        super().__init__(statements, tables, dialect)

    def movable(self, columns: Columns, known: ColumnElement[bool]) -> ColumnElement[Any]:
        """Return 1 or 0: a condition is no value here."""
        return case(
            (and_(known, *map(_without(columns.headers), MARKERS)), literal_column("1")), else_=literal_column("0")
        )

    def body(self, columns: Columns) -> ColumnElement[bytes]:
        """Return a missing body as an empty one."""
        return func.coalesce(columns.body, literal_column("0x"))

    def move(self, connection: Connection, ids: Sequence[str]) -> bool:
        """Move messages, unless somebody else has removed one."""
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
