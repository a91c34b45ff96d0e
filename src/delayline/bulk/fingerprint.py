"""Fingerprints of a job's input: equal for the same rows, in whatever order and however they are divided into tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from delayline.delayed.columns import BULK_COLUMNS, ColumnKind

if TYPE_CHECKING:
    import pyarrow as pa

MODULUS: Final = 1 << 64
#: In place of the hash of a null.
HASH_OF_NULL: Final = 0x9E3779B97F4A7C15
HASH_FACTOR: Final = 0x100000001B3


class Fingerprint(NamedTuple):
    """The number of rows, the sum of the hashes of their ids, and that of all columns; as text `rows-ids-contents`."""

    rows: int = 0
    ids: int = 0
    contents: int = 0

    @classmethod
    def of(cls, batch: pa.RecordBatch, *, since: int = 0) -> Self:
        """Return the fingerprint of some rows, from all columns of messages.

        Args:
            batch: Rows with these columns, valid or not.
            since: Microseconds since 1970 that due times are counted from: for delays, the time that they began.
        """
        import pyarrow.compute as pc
        from pandas.util import hash_array  # type: ignore[import-untyped]

        from delayline.delayed.arrow import microseconds

        rows: Any = None
        ids = 0
        for column in BULK_COLUMNS:
            if column.nullable and column.name not in batch.schema.names:
                continue
            given = batch.column(column.name)
            values: Any
            if column.kind is ColumnKind.INSTANT:
                values = pc.fill_null(microseconds(given), since).to_numpy(zero_copy_only=False) - since
            else:
                empty = {ColumnKind.BYTES: b"", ColumnKind.COUNT: 0}.get(column.kind, "")
                values = pc.fill_null(given, empty).to_numpy(zero_copy_only=False)
            hashes, nulls = hash_array(values, categorize=False), given.is_null().to_numpy(zero_copy_only=False)
            hashes[nulls] = HASH_OF_NULL
            before, rows = rows, hashes if rows is None else rows * HASH_FACTOR ^ hashes
            if column.nullable:  # rows of before there was such a column have the fingerprint that they had
                rows[nulls] = before[nulls]
            if column.name == "id":
                ids = int(hashes.sum(dtype="uint64"))
        return cls(batch.num_rows, ids, int(hash_array(rows).sum(dtype="uint64")))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the fingerprint with this text."""
        rows, ids, contents = text.split("-")
        return cls(int(rows), int(ids, 16), int(contents, 16))

    def plus(self, other: Fingerprint) -> Self:
        """Return the fingerprint of both inputs together."""
        sums = ((mine + theirs) % MODULUS for mine, theirs in zip(self[1:], other[1:], strict=True))
        return type(self)(self.rows + other.rows, *sums)

    def __str__(self) -> str:
        return f"{self.rows}-{self.ids:016x}-{self.contents:016x}"
