"""Microsoft's driver, with declared types of parameters: text is nvarchar, bytes are varbinary, for any value.

By itself it declares a column of a batch by its longest value: where that is ASCII it is varchar, and the server makes
question marks of every other text in the batch. A single ASCII text is varchar too, which has half the bytes of the
same text in an nvarchar column.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import mssql_python
from mssql_python import ddbc_bindings
from mssql_python.cursor import Cursor

from delayline.sql.sqlserver.errors import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    #: An argument of `setinputsizes`: the ODBC type, its size and its digits.
    Declared = tuple[int, int, int]

#: ODBC's numbers of the types.
WVARCHAR, VARBINARY, BIT, BIGINT, DOUBLE, TIMESTAMP, DATETIMEOFFSET = -9, -3, -7, -5, 8, 93, -155
#: Few sizes mean few query plans: the server makes one for each. The first fits ids and destinations, the last of each
#: is the longest that the type has; beyond it the size is that of a stream, `max` on the server.
TEXT_SIZES: Final = (256, 4000)
BYTES_SIZES: Final = (8000,)
STREAM: Final = 0
#: Becomes NULL of every type but varbinary, and no binary column of delayline's is ever NULL.
NULL: Final = (WVARCHAR, 1, 0)
#: The driver sends all rows of a batch at once, and the server goes on behind a row whose error has ended the
#: transaction: there each statement would commit by itself.
WITHIN_TRANSACTION: Final = f"IF @@TRANCOUNT = 0 RAISERROR(N'{ENDED}', 16, 1) ELSE "
ERROR_NUMBER: Final = re.compile(r"\((-?[0-9]+)\)$")


def declared(values: Iterable[object]) -> Declared:
    """Return how to declare the parameter that takes these values, a value of each row.

    Raises TypeError for values of a type that no statement of delayline binds.
    """
    kept = [value for value in values if value is not None]
    if not kept:
        return NULL
    match kept[0]:
        case str():
            longest = max(len(value.encode("utf-16-le", "surrogatepass")) // 2 for value in kept)  # type: ignore[attr-defined]
            return WVARCHAR, _size(longest, TEXT_SIZES), 0
        case bytes() | bytearray() | memoryview():
            return VARBINARY, _size(max(map(len, kept)), BYTES_SIZES), 0  # type: ignore[arg-type]
        case bool():
            return BIT, 1, 0
        case int():
            return BIGINT, 19, 0
        case float():
            return DOUBLE, 15, 0
        case datetime() as instant:
            return (TIMESTAMP, 26, 6) if instant.tzinfo is None else (DATETIMEOFFSET, 34, 7)
        case other:
            raise TypeError(f"a parameter of the type {type(other).__name__} has no declaration for SQL Server")


def _size(longest: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= longest), STREAM)


class DeclaringCursor(Cursor):
    """Declares every parameter, and attaches the server's number to an error as `sqlserver_number`."""

    _diagnostics: Sequence[Any] = ()

    def execute(self, operation: str, *parameters: Any, **how: Any) -> Cursor:  # noqa: ANN401
        """Run the statement once."""
        given = _given(parameters)
        self.setinputsizes([*(declared([value]) for value in given)])
        try:
            return super().execute(operation, *((given,) if given else ()), **how)
        except mssql_python.Error as error:
            self._number(error)
            raise

    def executemany(self, operation: str, seq_of_parameters: Any) -> None:  # noqa: ANN401
        """Run the statement for each row, in an open transaction; `rowcount` is that of all of them."""
        rows = [tuple(row) for row in seq_of_parameters]
        declarations = [declared(column) for column in zip(*rows, strict=True)]
        # The driver sends streams row by row too, but counts the last row only; a single row may commit by itself.
        if len(rows) == 1 or any(map(_is_streamed, declarations)):
            total = 0
            for row in rows:
                self.execute(operation, row)
                total += self.rowcount
            self.rowcount = total
            return
        self.setinputsizes([*declarations])
        try:
            super().executemany(WITHIN_TRANSACTION + operation, rows)
        except mssql_python.Error as error:
            self._number(error)
            raise

    def _reset_cursor(self) -> None:
        """Keep the server's messages: after an error the driver frees the statement before it raises."""
        self._diagnostics = self._records()
        super()._reset_cursor()

    def _number(self, error: Exception) -> None:
        matches = (ERROR_NUMBER.search(str(record[0])) for record in (*self.messages, *self._diagnostics))
        error.sqlserver_number = next((int(number[1]) for number in matches if number and number[1] != "0"), 0)  # type: ignore[attr-defined]

    def _records(self) -> Sequence[Any]:
        records_of: Any = ddbc_bindings.DDBCSQLGetAllDiagRecords  # type: ignore[attr-defined]
        try:
            return records_of(self.hstmt) if self.hstmt else ()
        except Exception:  # the error's own text is enough
            return ()


class DeclaringConnection(mssql_python.Connection):
    """Gives cursors that declare every parameter."""

    limit: Callable[[], int] | None = None
    """Returns the seconds that a statement of the next cursor may take; None for no limit."""

    def cursor(self) -> Cursor:
        """Return a new cursor, made by the driver, which closes it with the connection."""
        if self.limit is not None:
            self.timeout = self.limit()
        cursor = super().cursor()
        cursor.__class__ = DeclaringCursor
        return cursor


def _is_streamed(declaration: Declared) -> bool:
    kind, size, _ = declaration
    return kind in {WVARCHAR, VARBINARY} and size == STREAM


def _given(parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a statement's parameters, which may be given singly or all in a sequence."""
    alone = len(parameters) == 1 and isinstance(parameters[0], tuple | list)
    return tuple(parameters[0]) if alone else parameters
