"""Pieces of a job's messages, each stored in one transaction with its entry in the ledger."""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from delayline.bulk.earlier_runs import EarlierRuns
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import NUMBER_BITS, Job, JobName, JobPieces, PieceCounts, PieceParameters
from delayline.bulk.known_ids import KnownIds
from delayline.bulk.writer import blocking, breaks_a_key, check_store, earliest_due, register_table
from delayline.delayed.arrow import completed
from delayline.errors import BackendUnavailable
from delayline.sql.database import Database
from delayline.sql.databases import database_at
from delayline.sql.deadlines import job_work
from delayline.sql.statements import store_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from numpy.typing import NDArray
    from sqlalchemy import Connection, Table

    from delayline.bulk.cold_folder import ColdFolder
    from delayline.delayed.store import OnConflict

Result = TypeVar("Result")
#: How long a database that is full, restarting or locked by another attempt is waited for, in seconds.
PATIENCE: Final = 120.0
#: Pieces of so many rows or bytes are committed together; a piece of more is committed alone.
ROWS_AT_ONCE: Final = 50_000
BYTES_AT_ONCE: Final = 32 * 1024 * 1024
LONGEST_PAUSE: Final = 5.0  # seconds between two tries


@dataclass(frozen=True)
class PieceRows:
    """Whole pieces of a job, checked and ready to be stored.

    Args:
        messages: The columns of the messages that can be stored, best in the order of their ids, which are distinct.
        pieces: The piece of each message.
        rejected: The piece of each row that cannot be a message.
        duplicates: The piece of each row whose id is in an earlier row.
        inputs: The fingerprint of each piece's rows.
    """

    messages: pa.RecordBatch
    pieces: NDArray[Any]
    rejected: NDArray[Any]
    duplicates: NDArray[Any]
    inputs: dict[int, Fingerprint]

    def only(self, pieces: list[int]) -> PieceRows:
        """Return the rows of these pieces."""
        if len(pieces) == len(self.inputs):
            return self
        mine = np.isin(self.pieces, pieces)
        return PieceRows(
            self.messages.filter(pa.array(mine)),
            self.pieces[mine],
            self.rejected[np.isin(self.rejected, pieces)],
            self.duplicates[np.isin(self.duplicates, pieces)],
            {piece: self.inputs[piece] for piece in pieces},
        )

    def without(self, waiting: NDArray[Any]) -> PieceRows:
        """Return the rows with these messages counted as duplicates, as their ids wait already."""
        if not waiting.any():
            return self
        return replace(
            self,
            messages=self.messages.filter(pa.array(~waiting)),
            pieces=self.pieces[~waiting],
            duplicates=np.concatenate((self.duplicates, self.pieces[waiting])),
        )


class StoreWriter:
    """Writes to a delayed message store from a task, and waits for its database. Every method blocks.

    Args:
        url: The store's database.
        table_name: The store's table.
        schema: The table's schema; by default the connection's.
    """

    def __init__(self, url: str, table_name: str, *, schema: str | None = None) -> None:
        self._database: Database = database_at(url)
        dialect = self._database.dialect
        self._table: Table = dialect.catalog.store_table(table_name, schema)
        self._stage = dialect.bulk.stage(self._table, "")

    def _patiently(self, work: Callable[..., Coroutine[Any, Any, Result]], *arguments: object) -> Result:
        until, pause = time.monotonic() + PATIENCE, 0.1
        while True:
            try:
                return self._run(work, *arguments)
            except BackendUnavailable:
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
                pause = min(2 * pause, LONGEST_PAUSE)

    def _run(self, work: Callable[..., Coroutine[Any, Any, Result]], *arguments: object) -> Result:
        return blocking(self._opened(work, *arguments))

    @job_work
    async def _opened(self, work: Callable[..., Coroutine[Any, Any, Result]], *arguments: object) -> Result:
        await self._database.open()
        try:
            return await work(*arguments)
        finally:
            await self._database.close()

    def _put(self, connection: Connection, messages: pa.RecordBatch, on_conflict: OnConflict) -> int:
        """Store the messages as if all were new; if they are not, leave out or replace those that are there."""
        dialect = self._database.dialect
        if on_conflict == "replace":
            return self._stage.merge(connection, messages, on_conflict)
        dialect.transactions.set_savepoint(connection)
        try:
            self._stage.append(connection, messages)
        except dialect.errors.kinds as error:
            if not breaks_a_key(error, dialect.errors):
                raise
            dialect.transactions.roll_back_to_savepoint(connection)
            stored = self._stage.merge(connection, messages, on_conflict)
        else:
            stored = messages.num_rows
        dialect.transactions.release_savepoint(connection)
        return stored

    def _register(self) -> None:
        """Let notifications of new messages reach the store's pollers."""
        register_table(self._database, self._table)


class PieceWriter(StoreWriter):
    """Writer of a job that commits in pieces to a delayed message store. Every method blocks.

    Args:
        url: The store's database.
        table_name: The store's table.
        schema: The table's schema; by default the connection's.
        folder: The files of the store's cold tier, in which ids may wait too.
    """

    def __init__(
        self, url: str, table_name: str, *, schema: str | None = None, folder: ColdFolder | None = None
    ) -> None:
        super().__init__(url, table_name, schema=schema)
        self._known = KnownIds(self._database, self._table, folder)
        self._ledger = JobPieces(self._database.dialect, self._table)
        self._earlier = EarlierRuns(self._database.dialect, self._table)

    def open(self, name: JobName, parameters: PieceParameters) -> Job:
        """Begin the job, or go on with it. Raises BackendUnusable if the store is not set up."""
        self._database.dialect.connections.must_exist()
        job: Job = self._run(self._open, name, parameters)
        return job

    def jobs(self, limit: int) -> list[Job]:
        """Return the jobs of the store that began last, the latest first."""
        self._database.dialect.connections.must_exist()
        found: list[Job] = self._run(self._database.read, partial(self._ledger.jobs, limit=limit))
        return found

    def begun(self, name: JobName, *, stream: bool = False) -> Job | None:
        """Return the job of that name, if there is one, of an older delayline too; creates or upgrades the ledger.

        Raises BackendUnusable if the store is not set up.
        """
        self._database.dialect.connections.must_exist()
        job: Job | None = self._run(self._begun, name, stream)
        return job

    def named(self, name: JobName) -> Job | None:
        """Return the job of that name, if there is one."""
        job: Job | None = self._run(self._database.read, partial(self._ledger.named, name=name))
        return job

    def inputs(self, job: int) -> dict[int, Fingerprint]:
        """Return the fingerprints of the pieces that are stored."""
        inputs: dict[int, Fingerprint] = self._run(self._database.read, partial(self._ledger.inputs, job=job))
        return inputs

    def has_far(self, job: int) -> bool:
        """Return whether the messages for the cold tier are in it, as of a job that has ended."""
        return bool(self._run(self._database.read, partial(self._ledger.has_far, job=job)))

    def decide(self, job: int, files: Sequence[str]) -> Job:
        """Decide that the pieces in these files will be stored, unless that is decided of others; return the job."""
        decided: Job = self._patiently(self._database.write, partial(self._ledger.decide, number=job, files=files))
        return decided

    def waiting(self, ids: pa.Array) -> NDArray[Any]:
        """Return which of the ids wait already. Waits for the database as `store`."""
        waiting: NDArray[Any] = self._patiently(self._known.among, ids)
        return waiting

    def finish(self, job: int) -> Job:
        """End the job, all of whose pieces are stored, and return it; waits for tasks that still store, as `store`."""
        ended: Job = self._patiently(self._database.write, partial(self._ledger.finish, number=job))
        return ended

    def store(self, job: int, rows: PieceRows, on_conflict: OnConflict) -> PieceCounts:
        """Store pieces in one transaction, but for those that another attempt has stored; return what was done.

        Waits up to two minutes for a database that is restarting, full, or locked by another attempt.

        Raises:
            BackendUnavailable: The database did not come back. Nothing was stored, or all of it: the ledger knows.
        """
        counts: PieceCounts = self._patiently(self._store, job, rows, on_conflict)
        return counts

    async def _open(self, name: JobName, parameters: PieceParameters) -> Job:
        await self._create()
        return await self._database.write(partial(self._ledger.open, name=name, parameters=parameters))

    async def _begun(self, name: JobName, stream: bool) -> Job | None:
        await self._create()
        await self._database.write(partial(self._earlier.take_over, name=name, stream=stream))
        return await self._database.read(partial(self._ledger.named, name=name))

    async def _create(self) -> None:
        await check_store(self._database, self._table)
        await self._database.write(self._ledger.create)

    async def _store(self, job: int, rows: PieceRows, on_conflict: OnConflict) -> PieceCounts:
        rows = rows.without(await self._known.in_files(rows.messages.column("id")))  # a key finds those in the store
        # A number for each try: after a lost connection nobody knows whether the last one was committed.
        attempt = secrets.randbits(NUMBER_BITS)
        work = partial(self._store_in, job=job, attempt=attempt, rows=rows, on_conflict=on_conflict)
        stored, counts = await self._database.write(work)
        if counts.stored:
            self._register()
            await self._database.notify_on_commit({store_channel(self._table): earliest_due(stored)})
        return counts

    def _store_in(
        self, connection: Connection, job: int, attempt: int, rows: PieceRows, on_conflict: OnConflict
    ) -> tuple[pa.RecordBatch, PieceCounts]:
        mine = list(self._ledger.claim(connection, job, attempt, rows.inputs))
        if not mine:
            return rows.messages, PieceCounts()
        rows = rows.only(mine)
        messages = completed(rows.messages)
        stored = self._put(connection, messages, on_conflict) if messages.num_rows else 0
        duplicates = len(rows.duplicates) + messages.num_rows - stored
        counts = PieceCounts(stored, duplicates, len(rows.rejected), messages.nbytes)
        self._ledger.record(connection, job, mine[0], counts)
        return messages, counts
