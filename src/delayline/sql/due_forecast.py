"""Counts of pending messages by due time, without reading all of them.

A bucket with few messages is counted by the index of due times. For a larger bucket the dialect is asked for an
estimate, and its division by destination comes from the first messages of the bucket.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Integer, and_, bindparam, func, literal_column, select, union_all

from delayline.delayed.store import DueBucket, DueForecast, spans_of
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    import sqlalchemy
    from sqlalchemy import ColumnElement, CompoundSelect, Connection, Select, Table

    from delayline.sql.statements import StoreStatements

#: Entries of the index that all buckets of a forecast may read together.
COUNTED: Final = 60_000
#: The most that a bucket may read.
COUNTED_EACH: Final = 20_000
#: Rows that all buckets may read together to be divided by destination.
SAMPLED_ROWS: Final = 2_000


def forecast(
    connection: Connection, statements: StoreStatements, edges: Sequence[datetime], *, by_destination: bool
) -> DueForecast:
    """Return the forecast; 1 to 4 statements, each with a bounded number of rows."""
    table, dialect = statements.table, statements.dialect
    values = [dialect.values.to_due(edge) for edge in edges]
    number = len(values) + 1
    most = min(COUNTED_EACH, COUNTED // number)
    first = _counted(connection, statements, values, most + 1)
    counts = [first[position].get((), 0) for position in range(number)]
    exact = [count <= most for count in counts]
    if not all(exact):
        estimates = dialect.bulk.estimate_due(connection, table, values)
        counts = [
            count if known else max(count, round(about))
            for count, known, about in zip(counts, exact, estimates, strict=True)
        ]
    shares: list[Mapping[str, int]] = [{} for _ in counts]
    if by_destination:
        most = level(counts, SAMPLED_ROWS)
        sampled = _counted(connection, statements, values, most, by_destination=True)
        exact = [known and count <= most for known, count in zip(exact, counts, strict=True)]
        shares = [divided(count, sampled[position]) for position, count in enumerate(counts)]
    earliest = statements.next_due.one(connection)
    return DueForecast(
        [
            DueBucket(*span, count, known, destinations=shared)
            for span, count, known, shared in zip(spans_of(edges), counts, exact, shares, strict=True)
        ],
        None if earliest is None else dialect.values.from_due(earliest),
    )


def divided(count: int, sample: Mapping[tuple[str], int]) -> Mapping[str, int]:
    """Return `count` divided in the proportions of the sample, the largest part first; the parts are `count` in sum."""
    total = sum(sample.values())
    if not total:
        return {}
    parts = {name or "": count * number // total for (name,), number in Counter(sample).most_common()}
    largest = next(iter(parts))
    parts[largest] += count - sum(parts.values())
    return {name: number for name, number in parts.items() if number}


def level(counts: Sequence[int], budget: int) -> int:
    """Return the greatest limit for which the counts, each up to the limit, are at most `budget` in sum; 1 or more."""
    left = budget
    for position, count in enumerate(sorted(counts)):
        share = left // (len(counts) - position)
        if count > share:
            return max(1, share)
        left -= count
    return max(1, budget)


def in_buckets(due: ColumnElement[Any], edges: Sequence[ColumnElement[Any]]) -> list[ColumnElement[bool]]:
    """Return the condition of each bucket between the edges."""
    between = [and_(due >= start, due < end) for start, end in pairwise(edges)]
    return [due < edges[0], *between, due >= edges[-1]]


def edge_parameters(table: Table, number: int) -> list[Any]:
    """Return so many parameters `edge0`, `edge1` ... of the type of due times."""
    return [bindparam(f"edge{position}", type_=table.c.due.type) for position in range(number)]


@lru_cache(maxsize=64)
def explanation(table: Table, dialect: sqlalchemy.Dialect, edges: int, words: str) -> Prepared:
    """Return the query for the plan of reading every bucket, given the edges; `words` begin it, as in `EXPLAIN `."""
    parameters = edge_parameters(table, edges)
    conditions = in_buckets(table.c.due, parameters)
    query: CompoundSelect[Any] = union_all(
        *(select(literal_column("1")).select_from(table).where(condition) for condition in conditions)
    )
    return Prepared(query, dialect, [edge.key for edge in parameters], prefix=words)


def _counted(
    connection: Connection,
    statements: StoreStatements,
    values: Sequence[Any],
    most: int,
    *,
    by_destination: bool = False,
) -> dict[int, dict[tuple[Any, ...], int]]:
    """Return for each bucket how many messages it has among its first `most`, by destination where asked for."""
    query = _count(statements, len(values), by_destination=by_destination)
    numbers: dict[int, dict[tuple[Any, ...], int]] = defaultdict(dict)
    for position, number, *destination in query.rows(connection, *values, most):
        numbers[int(position)][tuple(destination)] = int(number)
    return numbers


@lru_cache(maxsize=64)
def _count(statements: StoreStatements, edges: int, *, by_destination: bool) -> Prepared:
    """Return the query for the first messages of each bucket; to compile it takes longer than to run it."""
    table, dialect = statements.table, statements.dialect
    columns = [dialect.words.exact(table.c.destination).label("destination")] if by_destination else []
    parameters = edge_parameters(table, edges)

    def first(position: int, condition: ColumnElement[bool]) -> Select[Any]:
        query = select(table.c.due, *columns).where(condition).order_by(*in_order(table))
        rows = query.limit(bindparam("most", type_=Integer())).subquery()
        grouped = list(rows.c)[1:]
        return select(literal_column(str(position)), func.count(), *grouped).select_from(rows).group_by(*grouped)

    query = union_all(
        *(first(position, condition) for position, condition in enumerate(in_buckets(table.c.due, parameters)))
    )
    return Prepared(query, dialect.sql, [*(edge.key for edge in parameters), "most"])
