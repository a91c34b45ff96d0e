"""Staging beside an SQLite file: tasks write files, and the driver moves their rows into the database."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from sqlalchemy import insert, select
from sqlalchemy.schema import CreateTable, DropTable

from delayline.delayed.arrow import kept_columns, microseconds
from delayline.delayed.columns import BULK_NAMES
from delayline.delayed.store import OnConflict
from delayline.errors import BackendUnusable
from delayline.sql.prepared import Prepared
from delayline.sql.staging import COLUMNS, KEPT_FIRST, REPLACED, STAGE_PREFIX, stage_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, Table

    from delayline.sql.sqlite.dialect import Sqlite

GATHERED: Final = "delayline_stage"
MOVE: Final = "INSERT INTO {store} ({columns}, retry_count) SELECT {columns}, 0 FROM {stage} WHERE true{conflict}"
KEEP_ONE_EACH: Final = (
    "DELETE FROM {stage} WHERE rowid IN "
    "(SELECT place FROM (SELECT rowid AS place, row_number() OVER ({kept_first}) AS nth "
    "FROM {stage} WHERE id IN (SELECT id FROM {stage} GROUP BY id HAVING count(*) > 1)) WHERE nth > 1)"
)
REPLACE: Final = f" ON CONFLICT (id) DO UPDATE SET {REPLACED}, retry_count = 0"
CONFLICTS: Final = {
    "raise": "",
    "keep": " ON CONFLICT (id) DO NOTHING",
    "replace": REPLACE,
}


class SqliteStage:
    """A folder of Arrow files, a file per attempt, and a temporary table into which the driver reads named files."""

    def __init__(self, dialect: Sqlite, store: Table, name: str) -> None:
        self.dialect = dialect
        self.store = store
        self.name = name
        self.folder: Path = Path(f"{dialect.connections.path}-stage") / name
        self.table: Table = stage_table(GATHERED, "temp")

    def named(self, name: str) -> SqliteStage:
        """Return another staging area."""
        return SqliteStage(self.dialect, self.store, name)

    def create(self, connection: Connection) -> None:
        """Make the folder. Raises BackendUnusable."""
        del connection
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BackendUnusable(f"cannot create {self.folder}: {error.strerror}; make its folder writable") from error

    def write(self, attempt: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Write a file, which gets its name when it is complete."""
        part = self.folder / f"{attempt}.part"
        writer: pa.RecordBatchFileWriter | None = None
        try:
            with part.open("wb") as file:
                for batch in batches:
                    writer = writer or pa.ipc.new_file(file, batch.schema)
                    writer.write_batch(batch)
                if writer is not None:
                    writer.close()
            part.rename(self._file(attempt))
        except OSError as error:
            raise BackendUnusable(
                f"cannot write to {self.folder}: {error.strerror or error}. The job has ended, or this task runs on "
                "another machine than the SQLite file is on: use --master local[*], or PostgreSQL"
            ) from error

    def gather(self, connection: Connection, attempts: Sequence[int]) -> int:
        """Read the named files into a temporary table."""
        statement, rows = self._empty(connection), 0
        for attempt in attempts:
            file = self._file(attempt)
            if not file.exists() or not file.stat().st_size:
                continue
            with pa.memory_map(str(file)) as source:
                reader = pa.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    statement.change_many(connection, _rows(attempt, batch))
                    rows += batch.num_rows
        return rows

    def _empty(self, connection: Connection) -> Prepared:
        """Make the temporary table anew; return an insert into it."""
        connection.execute(DropTable(self.table, if_exists=True))
        connection.execute(CreateTable(self.table))
        return Prepared(insert(self.table), self.dialect.sql, [column.name for column in self.table.columns])

    def merge(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Insert the rows by way of the temporary table."""
        self._empty(connection).change_many(connection, _rows(0, batch))
        return self.move(connection, (), on_conflict)

    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Insert rows into the store; raises the driver's IntegrityError for ids that are there."""
        names = ["retry_count", *BULK_NAMES]
        Prepared(insert(self.store), self.dialect.sql, names).change_many(connection, _rows(0, batch))

    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> int:
        """Insert the gathered rows; does not replace a message that a poller has claimed."""
        del attempts
        if on_conflict == "replace":
            self._leave_claimed(connection)
        quote = self.dialect.sql.identifier_preparer.format_table
        names = {"store": quote(self.store), "stage": quote(self.table), "columns": COLUMNS}
        cursor = connection.connection.cursor()
        if on_conflict != "raise":
            cursor.execute(KEEP_ONE_EACH.format(kept_first=KEPT_FIRST, **names))
        cursor.execute(MOVE.format(conflict=CONFLICTS[on_conflict], **names))
        stored: int = cursor.rowcount
        cursor.close()
        return stored

    def clear(self, connection: Connection, attempts: Sequence[int], before: int) -> None:
        """Delete the files of the attempts, and old files."""
        connection.execute(DropTable(self.table, if_exists=True))
        for file in self.folder.glob("*"):
            if int(file.stem) in attempts or int(file.stem) < before:
                file.unlink(missing_ok=True)

    def drop(self, connection: Connection) -> None:
        """Remove the folder."""
        connection.execute(DropTable(self.table, if_exists=True))
        shutil.rmtree(self.folder, ignore_errors=True)

    def found(self, connection: Connection) -> Sequence[str]:
        """Return the names of all folders."""
        del connection
        return [folder.name for folder in self.folder.parent.glob(f"{STAGE_PREFIX}*")]

    def _file(self, attempt: int) -> Path:
        return self.folder / f"{attempt}.arrow"

    def _leave_claimed(self, connection: Connection) -> None:
        """Skip rows that a poller has claimed: it would delete their replacements by id."""
        claims = self.dialect.claims(self.store.name)
        if claims.are_all_free():
            return
        both = select(self.store.c.seq, self.store.c.id).join(self.table, self.table.c.id == self.store.c.id)
        waiting = {row.seq: row.id for row in connection.execute(both)}
        free = claims.take(waiting, len(waiting))
        claims.release(free)  # a claim needs the write lock, which this transaction has until its commit
        for number in waiting.keys() - set(free):
            connection.execute(self.table.delete().where(self.table.c.id == waiting[number]))


def _rows(first: int, batch: pa.RecordBatch) -> list[tuple[object, ...]]:
    columns = kept_columns(batch, lambda instants: microseconds(instants).to_pylist())
    return list(zip([first] * batch.num_rows, *(columns[name] for name in BULK_NAMES), strict=True))
