"""Statements compiled once by SQLAlchemy and run on the driver's own cursor.

SQLAlchemy writes each server's SQL; its execution layer costs more per statement than the server's own work.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Insert

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import sqlalchemy
    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import DBAPICursor
    from sqlalchemy.sql import ClauseElement


LONGEST_LIST: Final = 500
#: A word that changes rows, at the beginning of a statement or of a part of it; not that of a lock, as in FOR UPDATE.
WRITES: Final = re.compile(r"(?:^|\(|\))\s*(?:INSERT|UPDATE|DELETE|MERGE)\b", re.IGNORECASE)


class StatementResult(NamedTuple):
    """What a statement did."""

    affected: int
    """How many rows it has inserted, changed, deleted or returned."""
    rows: Sequence[tuple[Any, ...]]
    """The rows that it has returned, if it returns any."""


class Prepared:
    """A statement, given its parameters in the order of `names`, whatever the order in its SQL.

    A parameter that SQLAlchemy expands (`column.in_(bindparam(..., expanding=True))`) takes a list that is not empty.
    `prefix` is put before the statement, as in `EXPLAIN `. The value of a name in `may_lack` is dropped where the SQL
    has no such parameter.
    """

    def __init__(
        self,
        statement: ClauseElement,
        dialect: sqlalchemy.Dialect,
        names: Sequence[str],
        *,
        prefix: str = "",
        may_lack: Sequence[str] = (),
    ) -> None:
        if isinstance(statement, Insert):
            statement = statement.inline()  # no caller needs the new row's number
        values = isinstance(statement, Insert) and statement.select is None
        compiled = statement.compile(dialect=dialect, column_keys=names if values else None)
        self.sql: str = f"{prefix}{compiled}"
        order = list(getattr(compiled, "positiontup", None) or [])
        constants = [name for name in order if name not in names]
        self._constants = tuple(compiled.params[name] for name in constants)
        if not {*names} - {*may_lack} <= {*order} or None in self._constants:
            raise ValueError(f"the statement takes {order}, not {list(names)}: {self.sql}")
        #: The position of each parameter in the caller's values and the constants behind them; None if they are in
        #: order.
        places = [(*names, *constants).index(name) for name in order]
        self._places = None if places == list(range(len(order))) else places
        self._lists = [(order.index(name), f"__[POSTCOMPILE_{name}]") for name in order if f"E_{name}]" in self.sql]
        self._mark = "?" if dialect.paramstyle == "qmark" else "%s"

    @classmethod
    def of_text(cls, sql: str) -> Prepared:
        """Return a statement written in the driver's words, whose parameters are in their order."""
        statement = cls.__new__(cls)
        statement.sql = sql
        statement._constants, statement._places, statement._lists, statement._mark = (), None, [], "%s"
        return statement

    @cached_property
    def writes(self) -> bool:
        """Whether it changes rows, so that outside of a transaction a lost answer leaves its outcome unknown."""
        return WRITES.search(self.sql) is not None

    def run(self, connection: Connection, *values: Any) -> DBAPICursor:  # noqa: ANN401 - what the columns take
        """Execute once; the caller reads the cursor to its end, or closes it."""
        cursor = connection.connection.cursor()
        values = self.in_order(values)
        sql = self.text([len(values[position]) for position, _ in self._lists]) if self._lists else self.sql
        cursor.execute(sql, self._flat(values))
        return cursor

    def text(self, lengths: Sequence[int]) -> str:
        """Return the SQL for lists of the given lengths."""
        sql = self.sql
        for (_, marker), length in zip(self._lists, lengths, strict=True):
            sql = sql.replace(marker, _marks(self._mark, length))
        return sql

    @property
    def lists(self) -> int:
        """How many parameters are lists."""
        return len(self._lists)

    def in_order(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values and constants in the order that they have in the SQL."""
        values = values + self._constants
        return values if self._places is None else tuple(values[position] for position in self._places)

    def _flat(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for position, _ in reversed(self._lists):
            values = (*values[:position], *values[position], *values[position + 1 :])
        return values

    def rows(self, connection: Connection, *values: Any) -> Sequence[Any]:  # noqa: ANN401
        """Execute once and return every row."""
        cursor = self.run(connection, *values)
        rows: Sequence[Any] = cursor.fetchall()
        cursor.close()
        return rows

    def stream(self, connection: Connection, *values: Any) -> Iterator[Any]:  # noqa: ANN401
        """Execute once and yield row after row; rows that the caller does not consume are not read."""
        cursor = self.run(connection, *values)
        yield from iter(cursor.fetchone, None)
        cursor.close()

    def one(self, connection: Connection, *values: Any) -> Any:  # noqa: ANN401 - what the column holds
        """Execute once and return the first column of the first row, or None."""
        cursor = self.run(connection, *values)
        row = cursor.fetchone()
        cursor.close()
        return None if row is None else row[0]

    def result(self, connection: Connection, *values: Any) -> StatementResult:  # noqa: ANN401
        """Execute once and return how many rows were affected, and every row that the statement returns."""
        cursor = self.run(connection, *values)
        result = StatementResult(cursor.rowcount, cursor.fetchall() if cursor.description else [])
        cursor.close()
        return result

    def change(self, connection: Connection, *values: Any) -> int:  # noqa: ANN401
        """Execute once and return how many rows were affected."""
        cursor = self.run(connection, *values)
        affected: int = cursor.rowcount
        cursor.close()
        return affected

    def change_each(self, connection: Connection, *values: Any, keys: Sequence[Any]) -> int:  # noqa: ANN401
        """Execute for all keys of the last parameter, a list, some at a time; return how many rows were affected."""
        return sum(self.change(connection, *values, some) for some in self._in_parts(keys))

    def rows_each(self, connection: Connection, *values: Any, keys: Sequence[Any]) -> list[Any]:  # noqa: ANN401
        """Execute for all keys of the last parameter, a list, some at a time; return every row."""
        return [row for some in self._in_parts(keys) for row in self.rows(connection, *values, some)]

    def _in_parts(self, keys: Sequence[Any]) -> list[list[Any]]:
        """Return the keys as lists for a statement each; an array, a single parameter, is as long as it likes."""
        length = LONGEST_LIST if self._lists else len(keys)
        return [list(keys[first : first + length]) for first in range(0, len(keys), length or 1)]

    def change_many(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Execute for each row and return how many rows were affected in all."""
        if self._constants or self._places:
            rows = [self.in_order(row) for row in rows]
        cursor = connection.connection.cursor()
        cursor.executemany(self.sql, rows)
        affected: int = cursor.rowcount
        cursor.close()
        return affected


@lru_cache(maxsize=1024)
def _marks(mark: str, number: int) -> str:
    return ", ".join([mark] * number)
