"""Staging in PostgreSQL: an unlogged table, written by binary COPY whose bytes Arrow puts together."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
from psycopg.errors import UniqueViolation

from delayline.delayed.arrow import content_bytes, microseconds
from delayline.delayed.columns import BULK_COLUMNS, ColumnKind
from delayline.delayed.store import OnConflict
from delayline.sql.postgresql.binary import YEAR_2000
from delayline.sql.server import run
from delayline.sql.staged_table import StagedTable
from delayline.sql.staging import COLUMNS, KEPT_FIRST, REPLACED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.delayed.columns import StoredColumn

#: The fields of a row: those of a message, and one before them.
FIELDS: Final = len(BULK_COLUMNS) + 1
#: The bytes of numbers, in the words of NumPy; other fields are texts and bytes.
NUMBER_FORMS: Final = {ColumnKind.INSTANT: ">i8", ColumnKind.COUNT: ">i4"}
#: The header and trailer of binary COPY.
COPY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_END: Final = b"\xff\xff"
#: Offsets of Arrow's binary columns have 32 bits.
LARGEST_PIECE: Final = 256 * 1024 * 1024
#: How long a table's removal waits for a task that writes to it.
DROP_LOCK_TIMEOUT: Final = "2s"
#: A statement that reads a whole table once: the settings for batches of a poller are wrong for it.
FOR_BULK: Final = "SET LOCAL enable_seqscan = on; SET LOCAL jit = off; SET LOCAL plan_cache_mode = auto"
MOVE: Final = (
    "INSERT INTO {store} ({columns}, retry_count) SELECT {columns}, 0 FROM {stage} "
    "WHERE attempt = ANY (%s){order}{conflict}"
)
#: A temporary table: each connection has its own.
MERGED: Final = "delayline_merged"
CREATE_MERGED: Final = (
    "CREATE TEMPORARY TABLE {merged} ON COMMIT DROP AS SELECT 0 AS retry_count, {columns} FROM {store} LIMIT 0"
)
MERGE: Final = "INSERT INTO {store} ({columns}, retry_count) SELECT {columns}, 0 FROM {merged}{order}{conflict}"
KEEP_ONE_EACH: Final = (
    "DELETE FROM {stage} WHERE ctid IN "
    "(SELECT place FROM (SELECT ctid AS place, row_number() OVER ({kept_first}) AS nth "
    "FROM {stage} WHERE attempt = ANY (%s) AND id IN "
    "(SELECT id FROM {stage} WHERE attempt = ANY (%s) GROUP BY id HAVING count(*) > 1)) AS ranked WHERE nth > 1)"
)
REPLACE: Final = (
    f" ON CONFLICT (id) DO UPDATE SET {REPLACED}, retry_count = 0, leased_until = NULL "
    "WHERE {store}.leased_until IS NULL OR {store}.leased_until < statement_timestamp()"
)


#: Whether rows may be deleted and copied anew instead of updated: the user may delete, and no trigger, rule or policy
#: would notice.
MAY_DELETE: Final = (
    "SELECT NOT (relhastriggers OR relhasrules OR relrowsecurity) AND has_table_privilege(oid, 'DELETE') "
    "FROM pg_class WHERE oid = CAST(%s AS regclass)"
)
DELETE_FREE: Final = (
    "DELETE FROM {store} WHERE id = ANY (%s) AND (leased_until IS NULL OR leased_until < statement_timestamp())"
)
WAITING: Final = "SELECT id FROM {store} WHERE id = ANY (%s)"


class PostgresqlStage(StagedTable):
    """An unlogged table: empty after a crash of the server, which the count of its rows shows."""

    prefixes: ClassVar[Sequence[str]] = ("UNLOGGED",)

    def write_batch(self, connection: Connection, attempt: int, batch: pa.RecordBatch) -> None:
        """Copy some rows."""
        self._copy(connection, self.quoted(self.table), "attempt", struct.pack(">hiq", FIELDS, 8, attempt), batch)

    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Copy rows to the store; raises the driver's IntegrityError for ids that are there."""
        self._copy(connection, self.quoted(self.store), "retry_count", struct.pack(">hii", FIELDS, 4, 0), batch)

    def _copy(self, connection: Connection, table: str, first: str, start: bytes, batch: pa.RecordBatch) -> None:
        driver: Any = connection.connection.driver_connection
        statement = f"COPY {table.replace('%%', '%')} ({first}, {COLUMNS}) FROM STDIN (FORMAT binary)"
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            copy.write(COPY_HEADER)
            for piece in _pieces(batch):
                copy.write(copy_rows(start, piece))
            copy.write(COPY_END)

    def merge(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Copy the rows whose ids are free, or after a deletion of those that they replace.

        That costs less than an insert from a temporary table, which is for what others hold, see or store meanwhile.
        """
        cursor: Any = connection.connection.cursor()
        store = self.quoted(self.store)
        if on_conflict == "replace":
            cursor.execute(MAY_DELETE, (store.replace("%%", "%"),))
            if not cursor.fetchone()[0]:
                return self._insert(connection, batch, on_conflict)
        ids, free = batch.column("id").to_pylist(), batch
        run(connection, "SAVEPOINT delayline_merge")
        if on_conflict == "replace":
            cursor.execute(DELETE_FREE.format(store=store), (ids,))
        else:
            waiting = {row[0] for row in cursor.execute(WAITING.format(store=store), (ids,))}
            free = batch.filter(pa.array([key not in waiting for key in ids]))
        stored: int = free.num_rows
        try:
            self.append(connection, free)
        except UniqueViolation:
            run(connection, "ROLLBACK TO SAVEPOINT delayline_merge")
            stored = self._insert(connection, batch, on_conflict)
        run(connection, "RELEASE SAVEPOINT delayline_merge")
        return stored

    def _insert(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Copy the rows to a temporary table, and insert them from there."""
        names = {"store": self.quoted(self.store), "merged": MERGED, "columns": COLUMNS}
        order, conflict = self._conflict(on_conflict)
        run(connection, CREATE_MERGED.format(**names))
        self._copy(connection, MERGED, "retry_count", struct.pack(">hii", FIELDS, 4, 0), batch)
        cursor = connection.connection.cursor()
        cursor.execute(MERGE.format(order=order, conflict=conflict, **names), ())
        stored: int = cursor.rowcount
        cursor.close()
        run(connection, f"DROP TABLE {MERGED}")
        return stored

    def _conflict(self, on_conflict: OnConflict) -> tuple[str, str]:
        """Return the order of an insert from another table, and what it does about an id that is there."""
        if on_conflict == "replace":  # in order, so that two inserts do not deadlock
            return " ORDER BY id", REPLACE.format(store=self.quoted(self.store))
        return "", " ON CONFLICT (id) DO NOTHING" if on_conflict == "keep" else ""

    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> int:
        """Insert the staged rows in a single statement, each id once unless a repeated id is an error."""
        names = {"store": self.quoted(self.store), "stage": self.quoted(self.table), "columns": COLUMNS}
        order, conflict = self._conflict(on_conflict)
        for setting in FOR_BULK.split("; "):
            run(connection, setting)
        cursor = connection.connection.cursor()
        if on_conflict != "raise":
            cursor.execute(KEEP_ONE_EACH.format(kept_first=KEPT_FIRST, **names), (list(attempts), list(attempts)))
        cursor.execute(MOVE.format(conflict=conflict, order=order, **names), (list(attempts),))
        stored: int = cursor.rowcount
        cursor.close()
        return stored

    def drop(self, connection: Connection) -> None:
        """Drop the table unless a task writes to it for longer than two seconds."""
        run(connection, f"SET LOCAL lock_timeout = '{DROP_LOCK_TIMEOUT}'")
        super().drop(connection)


def copy_rows(start: bytes, batch: pa.RecordBatch) -> pa.Buffer:
    """Return the rows as binary COPY reads them, made without a loop over them.

    Each row is its number of fields and then, for each, its length and its bytes, all numbers big-endian. start: the
    number of fields, and the first field, which is the same in all rows.
    """
    rows = batch.num_rows
    parts = [pa.scalar(start, pa.binary())]
    for column in BULK_COLUMNS:
        parts += _field(column, batch.column(column.name))
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
    offsets = memoryview(joined.buffers()[1]).cast("i")
    return joined.buffers()[2][offsets[0] : offsets[rows]]


def _pieces(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    if batch.nbytes <= LARGEST_PIECE or batch.num_rows == 1:
        return [batch]
    half = batch.num_rows // 2
    return [*_pieces(batch.slice(0, half)), *_pieces(batch.slice(half))]


def _field(column: StoredColumn, values: pa.Array) -> list[pa.Array]:
    """Return the lengths and the bytes of a field; a null has the length -1, and no bytes."""
    form = NUMBER_FORMS.get(column.kind)
    if form is None:
        contents = content_bytes(column, values)
    else:
        numbers = values if column.kind is ColumnKind.COUNT else pc.subtract(microseconds(values), YEAR_2000)
        contents = _big_endian(pc.fill_null(numbers, 0), form)
        if not column.nullable:
            return [pa.scalar(struct.pack(">i", int(form[-1])), pa.binary()), contents]
        contents = pc.if_else(numbers.is_valid(), contents, None)
    lengths = pc.fill_null(pc.binary_length(contents), -1)
    return [_big_endian(lengths, ">i4"), pc.fill_null(contents, b"")]


def _big_endian(numbers: pa.Array, form: str) -> pa.Array:
    """Return the numbers as bytes of a fixed length each."""
    width, rows = int(form[-1]), len(numbers)
    data = pa.py_buffer(numbers.to_numpy(zero_copy_only=False).astype(form).tobytes())
    return pa.Array.from_buffers(pa.binary(), rows, [None, _offsets(width, rows), data])


@lru_cache(maxsize=8)
def _offsets(width: int, rows: int) -> pa.Buffer:
    return pa.array(range(0, width * rows + 1, width), pa.int32()).buffers()[1]
