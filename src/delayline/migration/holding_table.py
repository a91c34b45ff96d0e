"""Holding tables: rows leave the source's tables, so that its endpoints ignore them, and return on an abort.

A large partition moves in slices: each locks the table only briefly, and the first messages are delivered early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import and_, delete, func, insert, inspect, literal_column, or_, select
from sqlalchemy.schema import DropTable

from delayline.errors import BackendUnavailable
from delayline.migration.journal import UNFINISHED, BatchState, HeldPartition
from delayline.migration.source import BATCH_COLUMN, NUMBER_COLUMN
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Insert, Table

    from delayline.migration.journal import MigrationJournal
    from delayline.migration.source import SourcePartition, TableSource


#: Bytes of bodies in a batch, about, at most: a task has a few of them in memory.
LARGEST_BATCH: Final = 16 * 1024 * 1024


def create_holding_table(connection: Connection, source: TableSource, name: str) -> None:
    """Create the holding table."""
    RequiredTables(source.dialect, source.schema, others=[source.held(name)]).set_up(connection)


def drop_holding_table(connection: Connection, source: TableSource, name: str) -> None:
    """Drop the table if it exists and is empty."""
    if not inspect(connection).has_table(name, schema=source.schema):
        return
    held = source.held(name)
    source.dialect.bulk.lock_table(connection, held, readers=True)  # another transaction may be filling it
    if connection.execute(select(held.c[NUMBER_COLUMN]).limit(1).with_for_update()).first() is None:
        connection.execute(DropTable(held))


def hold(
    connection: Connection, source: TableSource, some: Slice, name: str, *, cutoff: datetime | None, size: int
) -> Mapping[int, int]:
    """Move the rows of a slice that are due from the cutoff on into batches; return the number of rows of each.

    Args:
        connection: the source's connection, in a transaction that the caller commits.
        source: the old way's tables.
        some: the slice to move.
        name: the name of the holding table.
        cutoff: leave rows due earlier in the source; none if None.
        size: rows of a batch, at most.

    Raises:
        BackendUnavailable: The table changed meanwhile; the caller rolls back.
    """
    movable = some.of(source, cutoff)
    table, held = source.table(some.partition.table), source.held(name)
    source.dialect.bulk.plan_for_scans(connection)
    source.dialect.bulk.lock_table(connection, table)
    connection.execute(_into_batches(source, held, some, movable, size))
    batches = _rows_of_batches(connection, held)
    moved, left = sum(batches.values()), _delete_those_in(connection, source, table, held, movable)
    if left != moved:
        raise BackendUnavailable(
            f"table {table.name} changed during the move ({moved} rows, then {left}). None of them was moved: stop the "
            f"endpoint {some.partition.endpoint!r} and run the migration again, or resume it"
        )
    return batches


def _into_batches(source: TableSource, held: Table, some: Slice, movable: ColumnElement[bool], size: int) -> Insert:
    """Return the statement that numbers a slice's rows and writes them: the first slice's in the order of due times.

    Later slices are not sorted: all their rows are due later than earlier rows, and sorting takes as long as writing.
    """
    rows = source.table(some.partition.table)
    order = [rows.c[source.due], rows.c[source.key]] if some.since is None else None
    lengths = func.coalesce(source.size(rows), literal_column("0"))
    number = func.count().over(order_by=order, rows=(None, 0)) - 1
    so_far = func.sum(lengths).over(order_by=order, rows=(None, 0))
    columns = [column.name for column in source.columns()]
    batch = number // size + so_far // LARGEST_BATCH
    numbered = select(batch, number, *(rows.c[name] for name in columns)).where(movable)
    return insert(held).from_select([BATCH_COLUMN, NUMBER_COLUMN, *columns], numbered)


def _rows_of_batches(connection: Connection, held: Table) -> dict[int, int]:
    batch = held.c[BATCH_COLUMN]
    counted = connection.execute(select(batch, func.count()).group_by(batch).order_by(batch))
    return {int(number): int(rows) for number, rows in counted}


def give_back(
    connection: Connection, source: TableSource, journal: MigrationJournal, run: str, partition: HeldPartition
) -> int:
    """Move undelivered and rejected rows back to the source's table; return the number of rows.

    Rejected rows are deleted from the holding table, unless `verify` needs them to find rows that were delivered all
    the same.
    """
    held = source.held(partition.held)
    number, batch = held.c[NUMBER_COLUMN], held.c[BATCH_COLUMN]
    open_batches = select(journal.batches.c.batch).where(journal.batches_in(run, partition.number, UNFINISHED))
    marked = select(journal.batches.c.batch).where(journal.batches_in(run, partition.number, [BatchState.MARKED.value]))
    rejected = select(journal.rejected.c.number).where(journal.rejected_in(run, partition.number))
    conditions = (batch.in_(open_batches), and_(batch.in_(marked), number.in_(rejected)))
    source.dialect.bulk.plan_for_scans(connection)
    rows = sum(_put_back(connection, source, partition, held, condition) for condition in conditions)
    if not source.doubtful(connection, partition.held):
        once = select(journal.batches.c.batch).where(journal.attempted_once(run, partition.number))
        connection.execute(delete(held).where(batch.in_(once), number.in_(rejected)))
    return rows


def _put_back(
    connection: Connection, source: TableSource, partition: HeldPartition, held: Table, condition: ColumnElement[bool]
) -> int:
    columns = [column.name for column in source.columns()]
    rows: Any = select(*(held.c[name] for name in columns)).where(condition)
    count: int = connection.execute(select(func.count()).select_from(held).where(condition)).scalar_one()
    if count:
        connection.execute(insert(source.table(partition.source.table)).from_select(columns, rows))
    return count


def read_batch(connection: Connection, source: TableSource, name: str, batch: int) -> Sequence[Sequence[Any]]:
    """Return the rows of a batch: their numbers, and the columns that the source needs."""
    held = source.held(name)
    query = (
        select(held.c[NUMBER_COLUMN], *source.selected(held))
        .where(held.c[BATCH_COLUMN] == batch)
        .order_by(held.c[NUMBER_COLUMN])
    )
    return connection.execute(query).fetchall()


def _delete_those_in(
    connection: Connection, source: TableSource, table: Table, held: Table, movable: ColumnElement[bool]
) -> int:
    if source.dialect.bulk.locks_tables:
        return connection.execute(delete(table).where(movable)).rowcount
    return source.dialect.bulk.delete_copied(connection, table, held, source.key)


#: Approximate rows of the first slice; small, so that the earliest messages are held and delivered soon.
FIRST_ROWS: Final = 25_000
#: The most rows of a slice, as a multiple of the slice before.
GROWTH: Final = 4
#: Approximate rows of the largest slices, unless there would be more than MOST of them.
SLICE_ROWS: Final = 250_000
#: The most slices of that size in a partition: each has its own holding table.
MOST_SLICES: Final = 50


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
    source.dialect.bulk.plan_for_scans(connection)
    rows: int = connection.execute(select(func.count()).select_from(table).where(movable)).scalar_one()
    places = list(_places(rows))
    cuts: list[Any] = []
    if places:
        number = (func.row_number().over(order_by=due) - 1).label("number")
        numbered = select(due.label("due"), number).where(movable, due.is_not(None)).subquery().c
        bounds = select(numbered.due).where(numbered.number.in_([0, *places])).order_by(numbered.number)
        cuts = list(dict.fromkeys(connection.execute(bounds).scalars()))[1:]  # nothing is due before the first
    edges = [None, *cuts, None]
    return [Slice(partition, *edges[start : start + 2]) for start in range(len(edges) - 1)] if rows else [], rows


def _places(rows: int) -> Iterator[int]:
    """Yield the number of rows before the end of each slice but the last."""
    largest = max(SLICE_ROWS, -(-rows // MOST_SLICES))
    size = end = min(FIRST_ROWS, largest)
    while end < rows:
        yield end
        size = min(GROWTH * size, largest)
        end += size
