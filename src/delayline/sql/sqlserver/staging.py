"""Pieces of jobs in SQL Server, stored as an endpoint stores messages; there are no staging areas."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from sqlalchemy import delete, insert

from delayline.delayed.arrow import rows_in
from delayline.delayed.columns import StoredRow, message_of
from delayline.errors import ConfigurationError
from delayline.message import in_utc
from delayline.sql.prepared import Prepared
from delayline.sql.schema import queue_tables
from delayline.sql.sqlserver.dialect import LeaseTable, SqlServer
from delayline.sql.sqlserver.errors import DUPLICATE_KEY, number_of
from delayline.sql.staging import stage_table
from delayline.sql.statements import StoreStatements

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa
    from sqlalchemy import Connection, Table

    from delayline.delayed.store import OnConflict


class SqlServerStage:
    """The way of pieces into a store's table: rows of the document, with headers as NServiceBus reads them."""

    def __init__(self, dialect: SqlServer, store: Table, name: str) -> None:
        self.dialect = dialect
        self.store = store
        self.table: Table = stage_table(name, store.schema)
        self._statements = StoreStatements(store, dialect)
        self._insert = Prepared(insert(store), dialect.sql, StoredRow._fields)

    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Insert the rows; raises the driver's IntegrityError for ids that are there."""
        self._insert.change_many(connection, self._rows(batch))

    def merge(self, connection: Connection, batch: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Insert the rows that are new; those to be replaced are deleted before, unless a poller has them."""
        rows = self._rows(batch)
        if on_conflict == "replace":
            self._free().change_each(connection, keys=[row.id for row in rows])
        transactions, insert_new = self.dialect.transactions, self._statements.insert_counted
        transactions.set_savepoint(connection)
        try:
            stored = insert_new.change_many(connection, rows)
        except self.dialect.errors.kinds as error:
            if number_of(error) not in DUPLICATE_KEY:
                raise
            transactions.roll_back_to_savepoint(connection)  # another transaction has stored one of them meanwhile
            stored = sum(insert_new.change(connection, *row) for row in rows)
        transactions.release_savepoint(connection)
        return stored

    def _rows(self, batch: pa.RecordBatch) -> list[StoredRow]:
        return [self._statements.row_of(message_of(row, in_utc)) for row in rows_in(batch)]

    def _free(self) -> Prepared:
        """Return the statement that deletes those of some messages that no poller has leased."""
        leases = LeaseTable(self.store, queue_tables(self.store.schema), self.dialect)
        named = self.dialect.words.one_of(self.store.c.id, "keys")
        return Prepared(
            delete(self.store).where(named, leases.free), self.dialect.sql, ["keys"], may_lack=["this_store"]
        )

    def create(self, connection: Connection) -> NoReturn:
        """Raise ConfigurationError."""
        del connection
        self._refuse()

    def write(self, attempt: int, batches: Iterable[pa.RecordBatch]) -> NoReturn:
        """Raise ConfigurationError."""
        del attempt, batches
        self._refuse()

    def gather(self, connection: Connection, attempts: Sequence[int]) -> NoReturn:
        """Raise ConfigurationError."""
        del connection, attempts
        self._refuse()

    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> NoReturn:
        """Raise ConfigurationError."""
        del connection, attempts, on_conflict
        self._refuse()

    def clear(self, connection: Connection, attempts: Sequence[int], before: int) -> None:
        """Do nothing: there are no staged rows."""

    def drop(self, connection: Connection) -> None:
        """Do nothing: there is no staging area."""

    def found(self, connection: Connection) -> Sequence[str]:
        """Return no names."""
        del connection
        return ()

    def named(self, name: str) -> SqlServerStage:
        """Return another staging area, which is not there either."""
        return SqlServerStage(self.dialect, self.store, name)

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"{self.dialect} takes the messages of a job in pieces, and not all at once: leave out atomic='job' and "
            "on_conflict='raise', or give a job_folder, and use schedule() in place of df.write; or use PostgreSQL, "
            "MariaDB or SQLite"
        )
