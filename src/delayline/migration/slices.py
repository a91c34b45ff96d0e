"""A large part is taken aside slice by slice: its table is locked for a moment each, and moving begins at once."""

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
#: How often a slice has the rows of the one before, at most.
GROWTH: Final = 4
#: Rows of a slice that has grown, at least, about.
SLICE_ROWS: Final = 250_000
#: The most slices of that size in a partition: each has its own holding table.
MOST: Final = 50


class Slice(NamedTuple):
    """The rows of a partition that are due in a span; rows without a due time are in the first slice."""

    part: SourcePartition
    since: Any = None
    """The due column's value for the first instant; None for no bound."""
    until: Any = None
    """The same of the first instant after it."""

    def of(self, source: TableSource, cutoff: datetime | None) -> ColumnElement[bool]:
        """Return which rows of the table are to move with it."""
        due = source.table(self.part.table).c[source.due]
        bounds = [source.movable(self.part, cutoff)]
        if self.since is not None:
            bounds.append(due >= self.since)
        if self.until is not None:
            bounds.append(due < self.until if self.since is not None else or_(due < self.until, due.is_(None)))
        return and_(*bounds)


def slices_of(
    connection: Connection, source: TableSource, part: SourcePartition, cutoff: datetime | None
) -> tuple[list[Slice], int]:
    """Return the slices of the part, the earliest due first, and how many rows there are."""
    table, movable = source.table(part.table), source.movable(part, cutoff)
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
    return [Slice(part, *edges[place : place + 2]) for place in range(len(edges) - 1)] if rows else [], rows


def _places(rows: int) -> Iterator[int]:
    """Yield behind how many of the rows a slice ends."""
    largest = max(SLICE_ROWS, -(-rows // MOST))
    size = place = min(FIRST_ROWS, largest)
    while place < rows:
        yield place
        size = min(GROWTH * size, largest)
        place += size
