"""Slices of a large partition: each locks the table only briefly, and the first messages are delivered early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import and_, func, or_, select

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

    from delayline.migration.source import SourcePartition, TableSource

#: Approximate rows of the first slice; small, so that the earliest messages are held and delivered soon.
FIRST_ROWS: Final = 25_000
#: The most rows of a slice, as a multiple of the one before.
GROWTH: Final = 4
#: Approximate rows of the largest slices, unless there would be more than MOST of them.
SLICE_ROWS: Final = 250_000
#: The most slices of that size in a partition: each has its own holding table.
MOST: Final = 50


class Slice(NamedTuple):
    """The rows of a partition that are due in a span; rows without a due time are in the first slice."""

    partition: SourcePartition
    since: Any = None
    """The due column's value for the first instant; None for no bound."""
    until: Any = None
    """The same of the first instant after it."""

    def of(self, source: TableSource, cutoff: datetime | None) -> ColumnElement[bool]:
        """Return the condition on the table's rows that they are the slice's."""
        due = source.table(self.partition.table).c[source.due]
        bounds = [source.movable(self.partition, cutoff)]
        if self.since is not None:
            bounds.append(due >= self.since)
        if self.until is not None:
            bounds.append(due < self.until if self.since is not None else or_(due < self.until, due.is_(None)))
        return and_(*bounds)


def slices_of(
    connection: Connection, source: TableSource, partition: SourcePartition, cutoff: datetime | None
) -> tuple[list[Slice], int]:
    """Return the slices of the partition, the earliest due first, and the number of rows."""
    table, movable = source.table(partition.table), source.movable(partition, cutoff)
    due = table.c[source.due]
    source.dialect.plan_for_scans(connection)
    rows: int = connection.execute(select(func.count()).select_from(table).where(movable)).scalar_one()
    places = list(_places(rows))
    cuts: list[Any] = []
    if places:
        number = (func.row_number().over(order_by=due) - 1).label("number")
        numbered = select(due.label("due"), number).where(movable, due.is_not(None)).subquery().c
        found = select(numbered.due).where(numbered.number.in_([0, *places])).order_by(numbered.number)
        cuts = list(dict.fromkeys(connection.execute(found).scalars()))[1:]  # nothing is due before the first
    edges = [None, *cuts, None]
    return [Slice(partition, *edges[place : place + 2]) for place in range(len(edges) - 1)] if rows else [], rows


def _places(rows: int) -> Iterator[int]:
    """Yield the number of rows before the end of each slice but the last."""
    largest = max(SLICE_ROWS, -(-rows // MOST))
    size = place = min(FIRST_ROWS, largest)
    while place < rows:
        yield place
        size = min(GROWTH * size, largest)
        place += size
