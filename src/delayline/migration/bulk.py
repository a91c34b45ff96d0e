"""Statements on whole tables, for which delayline's connections are not set up, and on many rows by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from delayline.sql.dialects.server import run as run_sql

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection

    from delayline.migration.source import TableSource

#: Rows that are named in one statement.
AT_ONCE: Final = 1000
#: The settings of delayline's connections to PostgreSQL are for small batches, found by their index.
FOR_BULK: Final = (
    "SET LOCAL enable_seqscan = on",
    "SET LOCAL enable_bitmapscan = on",
    "SET LOCAL plan_cache_mode = auto",
    "SET LOCAL jit = off",
    "SET LOCAL work_mem = '64MB'",  # a million rows are sorted in one pass then
)


def for_bulk(connection: Connection, source: TableSource) -> None:
    """Have statements on whole tables planned as such, in this transaction."""
    if source.dialect.sql.name == "postgresql":
        for setting in FOR_BULK:
            run_sql(connection, setting)


def pieces(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the names, as many at a time as one statement takes."""
    for first in range(0, len(names), AT_ONCE):
        yield names[first : first + AT_ONCE]
