"""Promote a file of a cold tier: its messages leave it for the store, or for a broker, each once.

For the store it is one transaction: the file is locked in the catalog, its messages are stored, and it is retired.
A broker has no such transaction. It gets some messages at a time, and once it has confirmed them the catalog records
how many of the file it has; whoever goes on with the file sends at most those again that were under way.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from delayline.backends import DUPLICATE_ID
from delayline.bulk.cold_catalog import ColdFiles, FileState, Progress
from delayline.bulk.level_pieces import SENT_AT_ONCE
from delayline.bulk.pieces import BYTES_AT_ONCE, ROWS_AT_ONCE, StoreWriter
from delayline.sql.journal import Journal, JournalEvent
from delayline.sql.prepared import LONGEST_LIST
from delayline.sql.statements import store_channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection

    from delayline.backends import MessageSink
    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.cold_folder import ColdFolder


class FilePromoter(StoreWriter):
    """Promotes files of a store's cold tier. Every method blocks.

    Args:
        url: The store's database.
        table_name: The store's table.
        schema: The table's schema; by default the connection's.
        folder: The files.
        job: The number of the promotion, under which the catalog counts what it has done.
    """

    def __init__(self, url: str, table_name: str, *, schema: str | None, folder: ColdFolder, job: int) -> None:
        super().__init__(url, table_name, schema=schema)
        self._folder = folder
        self._job = job
        self._catalog = ColdFiles(self._database.dialect, self._table)

    def store(self, file: ColdFile) -> None:
        """Move the messages of a file to the store in one transaction, unless another process has done it.

        Waits up to two minutes for a database that is restarting, full, or locked by another attempt.
        """
        self._patiently(self._store, file)

    def send(self, file: ColdFile, broker: MessageSink) -> None:
        """Send the messages of a file to a broker, and those that it refuses to the store."""
        self._patiently(self._send, file, broker)

    async def _store(self, file: ColdFile) -> None:
        if await self._database.write(partial(self._store_in, file=file)):
            await self._notify(file)

    async def _notify(self, file: ColdFile) -> None:
        self._register()
        await self._database.notify_on_commit({store_channel(self._table): file.min_due})

    def _store_in(self, connection: Connection, file: ColdFile) -> int:
        """Store what is left of the file, and retire it; return how many messages were stored."""
        start = self._catalog.begin_promotion(connection, file.name)
        if start is None:
            return 0
        dead = self._dead(connection, file)
        stored = duplicates = cancelled = 0
        for _, rows in self._parts(file, start, ROWS_AT_ONCE):
            living = self._living(rows, dead)
            new = self._promoted(connection, living)
            stored, duplicates = stored + new, duplicates + living.num_rows - new
            cancelled += rows.num_rows - living.num_rows
        self._end(connection, file, Progress(file.messages, stored, 0, duplicates, cancelled))
        return stored

    async def _send(self, file: ColdFile, broker: MessageSink) -> None:
        start = await self._database.write(partial(self._catalog.begin_promotion, name=file.name))
        if start is None:
            return
        async with AsyncExitStack() as stack:
            writer = await broker.writer(stack)
            for end, rows in self._parts(file, start, SENT_AT_ONCE):
                first = end - rows.num_rows
                begin = partial(self._catalog.begin_sending, name=file.name, job=self._job, start=first, end=end)
                if not await self._database.write(begin):
                    return  # another process goes on with it
                # The file is locked meanwhile: nobody else sends them too.
                async with self._database.transaction() as ours:
                    at = await self._database.write(partial(self._catalog.begin_promotion, name=file.name), ours)
                    if at != first:
                        return
                    living = self._living(rows, await self._database.write(partial(self._dead, file=file), ours))
                    refused = await writer.deliver(living) if living.num_rows else {}
                    elsewhere = pa.array([at for at in sorted(refused) if refused[at] != DUPLICATE_ID], pa.int64())
                    new = await self._database.write(partial(self._promoted, rows=living.take(elsewhere)), ours)
                    published, cancelled = living.num_rows - len(refused), rows.num_rows - living.num_rows
                    progress = Progress(end, new, published, len(refused) - new, cancelled)
                    await self._database.write(partial(self._end, file=file, progress=progress), ours)
                if new:
                    await self._notify(file)

    def _dead(self, connection: Connection, file: ColdFile) -> Sequence[str]:
        return list(self._catalog.buried(connection, [file.name]).get(file.name, ()))

    @staticmethod
    def _living(rows: pa.RecordBatch, dead: Sequence[str]) -> pa.RecordBatch:
        if not dead:
            return rows
        return rows.filter(pc.invert(pc.is_in(rows.column("id"), value_set=pa.array(dead, pa.string()))))

    def _end(self, connection: Connection, file: ColdFile, progress: Progress) -> None:
        """Record what has left the locked file, and retire it when that is all."""
        self._catalog.record_promotion(connection, file.name, self._job, progress)
        if progress.sent == file.messages:
            self._catalog.retire(connection, [file.name], FileState.PROMOTED)

    def _promoted(self, connection: Connection, rows: pa.RecordBatch) -> int:
        """Store the messages and say so in the journal, where one is kept; return how many are new."""
        if not rows.num_rows:
            return 0
        journal = Journal(self._table, self._database.dialect)
        journal.look(connection)
        since = journal.last(connection) if journal.kept else 0
        stored = self._put(connection, rows.sort_by("id"), "keep")  # neighbours in the index of ids, the largest
        if journal.kept:
            ids = rows.column("id").to_pylist()
            for first in range(0, len(ids), LONGEST_LIST):
                journal.rename(connection, since, ids[first : first + LONGEST_LIST], JournalEvent.PROMOTED)
        return stored

    def _parts(self, file: ColdFile, start: int, most: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows from a position on, with the position after them."""
        parts, rows, size, end = list[pa.RecordBatch](), 0, 0, 0
        for batch in self._folder.batches(file):
            begin, end = end, end + batch.num_rows
            left = batch.slice(max(start - begin, 0))
            while left.num_rows:
                part = left.slice(0, most - rows)
                left = left.slice(part.num_rows)
                parts, rows, size = [*parts, part], rows + part.num_rows, size + part.nbytes
                if rows == most or size >= BYTES_AT_ONCE:
                    yield end - left.num_rows, pa.concat_batches(parts)
                    parts, rows, size = [], 0, 0
        if parts:
            yield end, pa.concat_batches(parts)
