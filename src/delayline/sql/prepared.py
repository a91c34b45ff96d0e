"""Statements compiled once by SQLAlchemy and run on the driver's own cursor.

SQLAlchemy knows each server's SQL and quoting; its execution layer costs more per statement than SQLite's own work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Insert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Dialect
    from sqlalchemy.engine.interfaces import DBAPICursor
    from sqlalchemy.sql import ClauseElement


class Prepared:
    """One statement, with its parameters in the order `names` gives."""

    def __init__(self, statement: ClauseElement, dialect: Dialect, names: Sequence[str]) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=names if isinstance(statement, Insert) else None)
        self.sql = str(compiled)
        order = list(getattr(compiled, "positiontup", None) or [])
        constants = order[len(names) :]
        self._constants = tuple(compiled.params[name] for name in constants)
        if order[: len(names)] != list(names) or None in self._constants:
            raise ValueError(f"the statement takes {order}, not {list(names)}: {self.sql}")

    def run(self, connection: Connection, *values: object) -> DBAPICursor:
        """Execute once; the caller reads the cursor to its end, or closes it."""
        cursor = connection.connection.cursor()
        cursor.execute(self.sql, values + self._constants)
        return cursor

    def one(self, connection: Connection, *values: object) -> Any:  # noqa: ANN401 - what the column holds
        """Execute once and return the first column of the first row, or None."""
        cursor = self.run(connection, *values)
        row = cursor.fetchone()
        cursor.close()
        return None if row is None else row[0]

    def change(self, connection: Connection, *values: object) -> int:
        """Execute once and return how many rows were affected."""
        cursor = self.run(connection, *values)
        affected: int = cursor.rowcount
        cursor.close()
        return affected

    def change_many(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Execute for each row and return how many rows were affected in all."""
        if self._constants:
            rows = [row + self._constants for row in rows]
        cursor = connection.connection.cursor()
        cursor.executemany(self.sql, rows)
        affected: int = cursor.rowcount
        cursor.close()
        return affected
