"""Bulk writing batch by batch: each batch is stored once, whichever tasks write it, and how often.

The store's ledger makes that idempotent: a batch and its name are committed together, and a later attempt finds the
name.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from delayline.bulk.ledger import CLOSED, Committed, JobLedger
from delayline.bulk.staging import blocking, earliest_due, new_area
from delayline.sql.database import Database
from delayline.sql.databases import database_at
from delayline.sql.deadlines import job_work
from delayline.sql.dialects.staging import breaks_a_key
from delayline.sql.row_claims import row_claims
from delayline.sql.schema import QUEUES, queue_tables
from delayline.sql.setup import RequiredTables
from delayline.sql.statements import StoreStatements, store_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa
    from sqlalchemy import Connection, Table

    from delayline.sql.dialect import Stage

Result = TypeVar("Result")


class IdTaken(Exception):
    """An id of a batch waits in the store already, or comes twice: nothing of the batch was stored."""


class LedgerBatchWriter:
    """The way into one delayed message store; pickled to tasks."""

    def __init__(self, url: str, table_name: str, *, schema: str | None = None) -> None:
        self.url = url
        self.table_name = table_name
        self.schema = schema

    def create(self) -> None:
        """Make the ledger where there is none. Blocks. Raises BackendUnusable where the store is not set up."""
        self._database.dialect.must_exist()
        self._write(self._create)

    def committed(self, names: Sequence[str]) -> dict[str, int]:
        """Return which attempts have committed those of the batches that any has. Blocks."""
        return self._write(partial(self._runs.attempts, runs=names))

    def close(self, names: Sequence[str]) -> None:
        """Let no attempt at these batches commit from now on; those that have, have. Blocks."""
        self._write(partial(self._close, names=names))

    def add(self, connection: Connection, attempts: Mapping[str, int]) -> bool:
        """Record the attempts that an external transaction commits; False if one of them must not."""
        self._runs.add(connection, attempts)
        return self._runs.attempts(connection, list(attempts)) == attempts

    async def opened(self, stack: AsyncExitStack) -> Database:
        """Return the open database, which closes with the stack."""
        database = self._database
        await database.open()
        stack.push_async_callback(database.close)
        statements = StoreStatements(self.table, database.dialect)
        row_claims(database, statements, queue_tables(self.table.schema))  # with them its notifications know the table
        return database

    @job_work
    async def store(self, name: str, attempt: int, batch: pa.RecordBatch) -> int:
        """Store the batch in a transaction with its name, and return the attempt that has: this, or one before.

        Columns id, destination, due (in UTC), headers (JSON), body; nulls are empty. The database is open. CLOSED where
        none may. Raises IdTaken.
        """
        counts: int = await self._database.write(partial(self._store, name=name, attempt=attempt, batch=batch))
        if counts == attempt and batch.num_rows:
            await self._database.notify_on_commit({store_channel(self.table): earliest_due(batch)})
        return counts

    def _store(self, connection: Connection, name: str, attempt: int, batch: pa.RecordBatch) -> int:
        before = self._runs.begin_attempt(connection, name)
        if before is not None:
            return before
        if batch.num_rows:
            try:
                self._stage.append(connection, batch.sort_by("id"))  # neighbours in the index of ids, the largest
            except self._database.dialect.errors as error:
                if not breaks_a_key(error):
                    raise
                raise IdTaken from error
        self._runs.end(connection, name, attempt, Committed(batch.num_rows))
        return attempt

    def __getstate__(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in ("url", "table_name", "schema")}

    @cached_property
    def table(self) -> Table:
        """The store's table."""
        dialect = self._database.dialect
        return dialect.timeouts_table(dialect.kept_name(self.table_name), dialect.schema_of(self.schema))

    @cached_property
    def _database(self) -> Database:
        return database_at(self.url)

    @cached_property
    def _stage(self) -> Stage:
        return self._database.dialect.stage(self.table, new_area())

    @cached_property
    def _runs(self) -> JobLedger:
        return JobLedger(self._database.dialect, self.table.schema)

    def _create(self, connection: Connection) -> None:
        RequiredTables(self._database.dialect, self.table.schema, QUEUES, others=[self.table]).check(connection)
        self._runs.create(connection)

    def _close(self, connection: Connection, names: Sequence[str]) -> None:
        self._runs.create(connection)
        self._runs.add(connection, dict.fromkeys(names, CLOSED))

    def _write(self, work: Callable[[Connection], Result]) -> Result:
        async def run() -> Result:
            async with AsyncExitStack() as stack:
                return await (await self.opened(stack)).write(work)

        return blocking(run())
