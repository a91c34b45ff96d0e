"""Staging areas, where tasks of a bulk job write rows before a transaction moves them to the store."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

from sqlalchemy import BigInteger, Column, MetaData, Table, func, select

from delayline.delayed.columns import BULK_NAMES
from delayline.errors import MissingExtra
from delayline.sql.schema import message_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa
    from sqlalchemy import Connection

    from delayline.delayed.store import OnConflict


COLUMNS: Final = ", ".join(BULK_NAMES)
#: What a row with an id that is stored may replace.
REPLACEABLE: Final = tuple(name for name in BULK_NAMES if name != "id")
#: What replaces a stored message of the same id, where the new row is called `excluded`.
REPLACED: Final = ", ".join(f"{name} = excluded.{name}" for name in REPLACEABLE)
#: Of rows with the same id the first in this order is kept: the earliest due, whatever task has staged it.
KEPT_FIRST: Final = f"PARTITION BY id ORDER BY {', '.join(sorted(REPLACEABLE, key=lambda name: name != 'due'))}"
STAGE_PREFIX: Final = "delayline_stage_"


class Stage(Protocol):
    """A staging area in a database. `write` is called in tasks, the others on the driver."""

    table: Table
    """Where the rows are when `move` is called."""

    def create(self, connection: Connection) -> None:
        """Make it, unless it is there."""
        ...

    def write(self, attempt: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Stage the rows on a separate connection; raises if the staging area is gone."""
        ...

    def gather(self, connection: Connection, attempts: Sequence[int]) -> int:
        """Make the attempts' rows ready to be moved and return how many there are."""
        ...

    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> int:
        """Put the gathered rows into the store and return how many it took; raises the driver's IntegrityError."""
        ...

    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Put rows into the store that were not staged, as they are; raises the driver's IntegrityError."""
        ...

    def merge(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Put rows with distinct ids into the store that were not staged, and return how many it took.

        Args:
            connection: In a transaction.
            batch: The rows.
            on_conflict: `keep` or `replace`, for ids that are there.
        """
        ...

    def clear(self, connection: Connection, attempts: Sequence[int], before: int) -> None:
        """Delete the rows of the attempts, and of attempts with a number below `before`."""
        ...

    def drop(self, connection: Connection) -> None:
        """Remove it."""
        ...

    def found(self, connection: Connection) -> Sequence[str]:
        """Return the names of all staging areas beside this one."""
        ...

    def named(self, name: str) -> Stage:
        """Return another staging area."""
        ...


def stage_table(name: str, schema: str | None, *prefixes: str, numbered: bool = False) -> Table:
    """Return the table that tasks write to; numbered: an attempt's rows are side by side, in their order."""
    return Table(
        name,
        MetaData(schema=schema),
        Column("attempt", BigInteger, primary_key=numbered, autoincrement=False, nullable=False),
        *([Column("number", BigInteger, primary_key=True, autoincrement=False)] if numbered else []),
        *message_columns(),
        prefixes=list(prefixes),
    )


def doubled_id(connection: Connection, staged: Table, stored: Table) -> str:
    """Return an id that is staged twice, or both staged and stored."""
    both = select(staged.c.id).join(stored, stored.c.id == staged.c.id).limit(1)
    twice = select(staged.c.id).group_by(staged.c.id).having(func.count() > 1).limit(1)
    return connection.execute(both).scalar() or connection.execute(twice).scalar() or "?"


def need_arrow() -> None:
    """Raise MissingExtra where pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise MissingExtra("spark", "writing in bulk")
