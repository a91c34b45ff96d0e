"""Staging in MariaDB and MySQL: a table, written by inserts of many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import insert

from delayline.clock import from_microseconds
from delayline.delayed.arrow import kept_columns, microseconds
from delayline.delayed.columns import BULK_COLUMNS
from delayline.delayed.store import OnConflict
from delayline.sql.prepared import Prepared
from delayline.sql.server import run
from delayline.sql.staged_table import StagedTable
from delayline.sql.staging import COLUMNS, KEPT_FIRST, REPLACEABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa
    from sqlalchemy import Connection, Table

DROP_WAIT_SECONDS: Final = 2  # seconds
MOVE: Final = (
    "INSERT INTO {store} ({columns}, retry_count) SELECT {columns}, 0 FROM {stage} WHERE attempt = %s{conflict}"
)
#: The server sorts by the first kilobyte of a BLOB; what is the same so far is sorted by its hash.
KEEP_ONE_EACH: Final = (
    "DELETE staged FROM {stage} AS staged JOIN (SELECT attempt, number, "
    "row_number() OVER ({kept_first}, {hashes}) AS nth "
    "FROM {stage} WHERE attempt IN ({attempts}) AND id IN "
    "(SELECT id FROM {stage} WHERE attempt IN ({attempts}) GROUP BY id HAVING count(*) > 1)) AS ranked "
    "ON ranked.attempt = staged.attempt AND ranked.number = staged.number WHERE ranked.nth > 1"
)
HASHES: Final = ", ".join(f"SHA2({column.name}, 256)" for column in BULK_COLUMNS if column.is_content)
#: The statement counts inserted and updated rows itself: the server's count does not distinguish them.
COUNT: Final = "@delayline_left := @delayline_left + 1"
IGNORE: Final = f" ON DUPLICATE KEY UPDATE {{store}}.id = IF({COUNT}, {{store}}.id, {{store}}.id)"
FREE: Final = "({store}.leased_until IS NULL OR {store}.leased_until < UTC_TIMESTAMP(6))"
REPLACE: Final = (
    f" ON DUPLICATE KEY UPDATE {{store}}.id = IF({FREE}, {{store}}.id, IF({COUNT}, {{store}}.id, {{store}}.id)), "
    + ", ".join(f"{{store}}.{name} = IF({FREE}, VALUES({name}), {{store}}.{name})" for name in REPLACEABLE)
    + f", {{store}}.retry_count = IF({FREE}, 0, {{store}}.retry_count)"
)
CONFLICTS: Final = {"raise": "", "keep": IGNORE, "replace": REPLACE}


class MariadbStage(StagedTable):
    """A table for the rows of a job, or of a stream, which is read attempt by attempt."""

    numbered: ClassVar[bool] = True

    def write(self, attempt: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Write the rows, in packets no larger than the server accepts."""
        try:
            self.dialect.connections.check()
        except self.dialect.errors.kinds as error:
            raise self.dialect.errors.translated(error) from error
        self._written = 0
        super().write(attempt, batches)

    def write_batch(self, connection: Connection, attempt: int, batch: pa.RecordBatch) -> None:
        """Insert some rows."""
        numbers = range(self._written, self._written + batch.num_rows)
        self._insert(connection, self.table, {"attempt": [attempt] * batch.num_rows, "number": numbers}, batch)
        self._written += batch.num_rows

    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Insert rows into the store; raises the driver's IntegrityError for ids that are there."""
        self._insert(connection, self.store, {"retry_count": [0] * batch.num_rows}, batch)

    def merge(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Insert the rows; the statement itself counts those that it leaves out."""
        run(connection, "SET @delayline_left = 0")
        conflict = CONFLICTS[on_conflict].format(store=self.quoted(self.store))
        self._insert(connection, self.store, {"retry_count": [0] * batch.num_rows}, batch, conflict)
        left: int = run(connection, "SELECT @delayline_left")[0][0]
        return int(batch.num_rows) - left

    def _insert(
        self,
        connection: Connection,
        table: Table,
        first: Mapping[str, Sequence[int]],
        batch: pa.RecordBatch,
        conflict: str = "",
    ) -> None:
        columns = {**first, **kept_columns(batch, self._kept_instants)}
        names = [column.name for column in table.columns if column.name in columns]
        rows = list(zip(*(columns[name] for name in names), strict=True))
        statement = Prepared.of_text(Prepared(insert(table), self.dialect.sql, names).sql + conflict)
        self.dialect.bulk.insert_rows(connection, statement, rows)

    def _kept_instants(self, instants: pa.Array) -> list[Any]:
        to_due = self.dialect.values.to_due
        numbers = microseconds(instants).to_pylist()
        return [None if number is None else to_due(from_microseconds(number)) for number in numbers]

    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> int:
        """Insert the staged rows, a statement per attempt: the driver limits the time of a statement."""
        names = {"store": self.quoted(self.store), "stage": self.quoted(self.table), "columns": COLUMNS}
        conflict = CONFLICTS[on_conflict]
        if attempts and on_conflict != "raise":
            run(
                connection,
                KEEP_ONE_EACH.format(
                    kept_first=KEPT_FIRST, hashes=HASHES, attempts=", ".join(map(str, attempts)), **names
                ),
            )
        run(connection, "SET @delayline_left = 0")
        rows = self.gather(connection, attempts)
        for attempt in attempts:
            run(connection, MOVE.format(conflict=conflict.format(**names), **names), attempt)
        left: int = run(connection, "SELECT @delayline_left")[0][0]
        return rows - left

    def drop(self, connection: Connection) -> None:
        """Drop the table unless a task writes to it for longer than two seconds."""
        run(connection, f"SET SESSION lock_wait_timeout = {DROP_WAIT_SECONDS}")
        try:
            super().drop(connection)
        finally:
            if not self.dialect.errors.is_broken(connection):
                run(connection, "SET SESSION lock_wait_timeout = 60")
