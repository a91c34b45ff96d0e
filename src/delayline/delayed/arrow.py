"""Stored messages as columns of Arrow. Imports pyarrow, so it is imported only where Arrow is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayline.delayed.columns import BULK_COLUMNS, BULK_NAMES, ColumnKind, StoredRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delayline.delayed.columns import StoredColumn

INSTANT: Final = pa.timestamp("us", "UTC")
ARROW_TYPES: Final = {
    ColumnKind.NAME: pa.string(),
    ColumnKind.INSTANT: INSTANT,
    ColumnKind.HEADERS: pa.string(),
    ColumnKind.BYTES: pa.binary(),
    ColumnKind.COUNT: pa.int32(),
}
MESSAGE_SCHEMA: Final = pa.schema([(column.name, ARROW_TYPES[column.kind]) for column in BULK_COLUMNS])


def microseconds(instants: pa.Array) -> pa.Array:
    """Return times as microseconds since 1970."""
    return instants.cast(INSTANT, safe=False).cast(pa.int64())


def completed(batch: pa.RecordBatch, names: Sequence[str] = BULK_NAMES) -> pa.RecordBatch:
    """Return these columns of messages in their order; those that the batch lacks are null."""
    columns = [
        batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, MESSAGE_SCHEMA.field(name).type)
        for name in names
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def content_bytes(column: StoredColumn, values: pa.Array) -> pa.Array:
    """Return the values of a column of texts or bytes as bytes, empty for a null that the column may not have."""
    values = values.cast(pa.binary())
    return values if column.nullable else pc.fill_null(values, b"")


def kept_columns(batch: pa.RecordBatch, kept_instants: Callable[[pa.Array], Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the columns of messages as they are kept in rows. kept_instants: returns the values that keep times."""
    kept: dict[str, Sequence[Any]] = {}
    for column in BULK_COLUMNS:
        values = batch.column(column.name)
        if column.kind is ColumnKind.INSTANT:
            kept[column.name] = kept_instants(values)
        else:
            kept[column.name] = (content_bytes(column, values) if column.is_content else values).to_pylist()
    return kept


def rows_in(batch: pa.RecordBatch) -> Iterator[StoredRow]:
    """Return the messages, their times in UTC."""
    return StoredRow.each(kept_columns(batch, lambda instants: instants.cast(INSTANT, safe=False).to_pylist()))
