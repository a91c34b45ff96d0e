"""Queries over a store's pending messages, a statement per range of due times, on a separate connection; blocks."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import func, select

from delayline.delayed.columns import BULK_COLUMNS, ColumnKind
from delayline.sql.databases import database_at
from delayline.sql.schema import in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Select

    from delayline.delayed.columns import StoredColumn
    from delayline.sql.dialect import Dialect

OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda column, values: column.in_(values),
}


class Condition(NamedTuple):
    """A comparison of a column: id, destination or due."""

    column: str
    sign: str
    value: Any


class Span(NamedTuple):
    """From a due time on and up to another, without it; None is without end."""

    start: datetime | None
    end: datetime | None


class PendingScan:
    """The pending messages of a store's table that meet all conditions."""

    def __init__(self, url: str, table_name: str, schema: str | None, conditions: Sequence[Condition]) -> None:
        self._dialect = database_at(url).dialect
        self._table = self._dialect.catalog.store_table(table_name, schema)
        self._conditions = [self._compared(*condition) for condition in conditions]

    def range(self) -> tuple[datetime | None, datetime | None]:
        """Return the first and the last due time, None where nothing waits."""
        due = self._table.c.due
        query = select(func.min(due), func.max(due)).where(*self._conditions)
        [[first, last]] = next(self._run(query, 1))
        return (
            (None, None)
            if first is None
            else (self._dialect.values.from_due(first), self._dialect.values.from_due(last))
        )

    def rows(self, columns: Sequence[str], span: Span, at_once: int) -> Iterator[list[list[Any]]]:
        """Yield the columns of some rows at a time, due times in UTC, headers as text; earliest due first."""
        reads = readings(columns, self._dialect)
        for rows in self._run(self.query(columns, span), at_once):
            yield [[read(value) for read, value in zip(reads, row, strict=True)] for row in rows]

    def query(self, columns: Sequence[str], span: Span) -> Select[Any]:
        """Return the query for the columns."""
        chosen = [self._table.c[name] for name in columns]
        query = select(*chosen).where(*self._conditions).order_by(*in_order(self._table))
        if span.start is not None:
            query = query.where(self._compared("due", ">=", span.start))
        if span.end is not None:
            query = query.where(self._compared("due", "<", span.end))
        return query

    def _run(self, query: Select[Any], at_once: int) -> Iterator[Sequence[Sequence[Any]]]:
        self._dialect.connections.must_exist()
        try:
            with self._dialect.connections.look() as connection:
                yield from self._dialect_rows(connection, query, at_once)
        except self._dialect.errors.kinds as error:
            raise self._dialect.errors.translated(error) from error

    def _dialect_rows(
        self, connection: Connection, query: Select[Any], at_once: int
    ) -> Iterator[Sequence[Sequence[Any]]]:
        self._dialect.bulk.begin_scan(connection)
        with connection.execution_options(stream_results=True, yield_per=at_once).execute(query) as result:
            yield from result.partitions(at_once)

    def _compared(self, column: str, sign: str, value: Any) -> ColumnElement[bool]:  # noqa: ANN401 - what it holds
        if column == "due":
            convert = self._dialect.values.to_due
            value = [convert(due) for due in value] if sign == "in" else convert(value)
        compared: ColumnElement[bool] = OPERATORS[sign](self._table.c[column], value)
        return compared


def readings(names: Sequence[str], dialect: Dialect) -> list[Callable[[Any], Any]]:
    """Return the conversion of each column: due times to UTC, headers to text, bodies to bytes."""
    reads: Mapping[ColumnKind, Callable[[Any], Any]] = {
        ColumnKind.NAME: str,
        ColumnKind.INSTANT: dialect.values.from_due,
        ColumnKind.HEADERS: lambda kept: bytes(kept).decode("utf-8", "replace"),
        ColumnKind.BYTES: lambda kept: bytes(kept or b""),
        ColumnKind.COUNT: int,
    }

    def of(column: StoredColumn) -> Callable[[Any], Any]:
        read = reads[column.kind]
        return (lambda kept: None if kept is None else read(kept)) if column.nullable else read

    by_name = {column.name: of(column) for column in BULK_COLUMNS}
    return [by_name[name] for name in names]
