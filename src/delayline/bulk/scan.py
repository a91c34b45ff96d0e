"""Queries over a store's pending messages, a statement per range of rows, on a separate connection; blocks.

The ranges have about the same number of rows, however their due times are distributed. Rows due at the same time are in
order of their numbers in the table, so that a range may begin among them. The bounds are quantiles of a random sample
by the table's primary key, or of all rows where the table is small or has few of its numbers left.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sqlalchemy import func, select

from delayline.delayed.columns import BULK_COLUMNS, ColumnKind
from delayline.sql.databases import database_at
from delayline.sql.prepared import LONGEST_LIST
from delayline.sql.schema import in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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


#: The values of the columns that rows are ordered by, as the database keeps them.
Key = tuple[Any, ...]
Order = Literal["due", "id"]
#: Rows of a sample for each range: the largest range then has at most 1.3 times the mean, by five deviations.
SAMPLED_EACH: Final = 400
#: The most numbers that are tried for a row of the sample. A table with fewer rows than that is read whole.
TRIED_EACH: Final = 10
#: The sample is the same for the same table.
SEED: Final = 5


class Span(NamedTuple):
    """From a row on and up to another, without it; None is without end."""

    start: Key | None = None
    end: Key | None = None


class PendingScan:
    """The pending messages of a store's table that meet all conditions, in the order of their due times or ids."""

    def __init__(
        self,
        url: str,
        table_name: str,
        schema: str | None,
        conditions: Sequence[Condition],
        *,
        order: Order = "due",
    ) -> None:
        self._dialect = database_at(url).dialect
        self._table = self._dialect.catalog.store_table(table_name, schema)
        self._order = in_order(self._table) if order == "due" else (self._table.c.id,)
        self._conditions = [self._compared(*condition) for condition in conditions]

    def spans(self, most: int, rows_each: int = 1) -> list[Span]:
        """Return ranges of about the same number of rows each, which together have all rows.

        Args:
            most: How many ranges there may be.
            rows_each: How many rows a range has at least, about.
        """
        self._dialect.connections.must_exist()
        with self._connected() as connection:
            cuts = self._cuts_of_sample(connection, most, rows_each)
            if cuts is None:
                cuts = self._cuts_of_all(connection, most, rows_each)
        return [Span(start, end) for start, end in pairwise([None, *cuts, None])]

    def _cuts_of_sample(self, connection: Connection, most: int, rows_each: int) -> list[Key] | None:
        """Return the first row of each range but the first; None where all rows have to be looked at."""
        if "seq" not in self._table.c:
            return None
        number = self._table.c.seq
        first, last = connection.execute(select(func.min(number), func.max(number))).one()
        wanted = SAMPLED_EACH * most
        if first is None or last - first < wanted * TRIED_EACH:
            return None
        numbers, tried, found = random.Random(SEED), 0, set[Key]()  # noqa: S311 - a sample
        while len(found) < wanted:
            some = {numbers.randint(first, last) for _ in range(LONGEST_LIST)}
            tried += len(some)
            sample = select(*self._order).where(number.in_(sorted(some)), *self._conditions)
            found.update(tuple(row) for row in connection.execute(sample))
            if tried >= wanted and len(found) * TRIED_EACH < tried:
                return None
        keys = sorted(found)
        parts = min(most, _parts((last - first + 1) * len(keys) / tried, rows_each))
        return [keys[position * len(keys) // parts] for position in range(1, parts)]

    def _cuts_of_all(self, connection: Connection, most: int, rows_each: int) -> list[Key]:
        """Return the first row of each range but the first."""
        counted = select(func.count()).select_from(self._table).where(*self._conditions)
        rows = connection.execute(counted).scalar_one()
        parts = min(most, _parts(rows, rows_each), max(rows, 1))
        if parts == 1:
            return []
        place = func.row_number().over(order_by=self._order).label("place")
        placed = select(*self._order, place).where(*self._conditions).subquery().c
        firsts = [part * rows // parts + 1 for part in range(1, parts)]
        query = select(*(placed[column.name] for column in self._order))
        found = connection.execute(query.where(placed.place.in_(firsts)).order_by(placed.place))
        return [tuple(row) for row in found]

    def rows(self, columns: Sequence[str], span: Span, at_once: int) -> Iterator[list[list[Any]]]:
        """Yield the columns of some rows at a time, due times in UTC, headers as text, in order."""
        reads = readings(columns, self._dialect)
        for rows in self._run(self.query(columns, span), at_once):
            yield [[read(value) for read, value in zip(reads, row, strict=True)] for row in rows]

    def query(self, columns: Sequence[str], span: Span) -> Select[Any]:
        """Return the query for the columns."""
        chosen = [self._table.c[name] for name in columns]
        query = select(*chosen).where(*self._conditions).order_by(*self._order)
        bulk = self._dialect.bulk
        if span.start is not None:
            query = query.where(bulk.from_key(self._order, span.start))
        if span.end is not None:
            query = query.where(bulk.before_key(self._order, span.end))
        return query

    def _run(self, query: Select[Any], at_once: int) -> Iterator[Sequence[Sequence[Any]]]:
        self._dialect.connections.must_exist()
        with self._connected() as connection:
            yield from self._dialect_rows(connection, query, at_once)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            with self._dialect.connections.look() as connection:
                yield connection
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


def _parts(rows: float, rows_each: int) -> int:
    """Return how many ranges of that many rows there are."""
    return max(1, math.ceil(rows / rows_each))


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
