"""Staging in a table of a server, which tasks write to on connections of their own."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from sqlalchemy import delete, func, inspect, or_, select
from sqlalchemy.schema import CreateTable, DropTable

from delayline.errors import BackendUnusable
from delayline.sql.staging import STAGE_PREFIX, stage_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from sqlalchemy import Connection, Table

    from delayline.delayed.store import OnConflict
    from delayline.sql.server import Server


class StagedTable(ABC):
    """A table for the rows of a job, or of a stream."""

    prefixes: ClassVar[Sequence[str]] = ()
    numbered: ClassVar[bool] = False

    def __init__(self, dialect: Server, store: Table, name: str) -> None:
        self.dialect = dialect
        self.store = store
        self.name = name
        self.table: Table = stage_table(name, store.schema, *self.prefixes, numbered=self.numbered)

    def named(self, name: str) -> Self:
        """Return another staging area."""
        return type(self)(self.dialect, self.store, name)

    def create(self, connection: Connection) -> None:
        """Create the table, unless it is there."""
        if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
            self.dialect.catalog.make(connection, CreateTable(self.table))

    def write(self, attempt: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Write the rows on a separate connection, all or none."""
        with self._connected() as connection:
            self.dialect.transactions.begin(connection)
            for batch in batches:
                self.write_batch(connection, attempt, batch)
            self.dialect.transactions.commit(connection)

    @abstractmethod
    def write_batch(self, connection: Connection, attempt: int, batch: pa.RecordBatch) -> None:
        """Write some rows."""

    @abstractmethod
    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Put rows into the store that were not staged."""

    @abstractmethod
    def merge(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Put rows into the store that were not staged and have distinct ids; return how many it took."""

    @abstractmethod
    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> int:
        """Put the rows into the store and return how many it took."""

    def gather(self, connection: Connection, attempts: Sequence[int]) -> int:
        """Count: the rows are where they are needed."""
        rows = select(func.count()).select_from(self.table).where(self.table.c.attempt.in_(attempts))
        return connection.execute(rows).scalar_one() if attempts else 0

    def clear(self, connection: Connection, attempts: Sequence[int], before: int) -> None:
        """Delete the rows of the attempts, and of old attempts."""
        number = self.table.c.attempt
        connection.execute(delete(self.table).where(or_(number.in_(attempts), number < before)))

    def drop(self, connection: Connection) -> None:
        """Drop the table; raises BackendUnavailable soon when a task still writes to it."""
        connection.execute(DropTable(self.table, if_exists=True))

    def found(self, connection: Connection) -> Sequence[str]:
        """Return the names of all staging tables."""
        names = inspect(connection).get_table_names(schema=self.table.schema)
        return [name for name in names if name.startswith(STAGE_PREFIX)]

    def quoted(self, table: Table) -> str:
        """Return the table's name, for a statement with parameters: SQLAlchemy doubles each %."""
        return self.dialect.sql.identifier_preparer.format_table(table)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            with self.dialect.connections.connect() as connection:
                try:
                    yield connection
                except self.dialect.errors.kinds as error:
                    self.dialect.transactions.rollback(connection)
                    if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
                        raise BackendUnusable(
                            f"the staging table {self.name} is gone: its job has ended, or was swept after a day. "
                            "Nothing of this task counts; run the job again"
                        ) from error
                    raise
        except self.dialect.errors.kinds as error:
            raise self.dialect.errors.translated(error) from error
