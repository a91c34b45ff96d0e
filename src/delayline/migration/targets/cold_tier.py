"""A SQL store with its cold tier: near messages go to the store, far messages to files, by generations."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayline.bulk.cold_folder import ColdFolder, HourWriter, without_secrets
from delayline.checks import time_span
from delayline.clock import LATEST_TIME, to_microseconds
from delayline.delayed.arrow import microseconds
from delayline.errors import BackendUnavailable
from delayline.migration.target import Delivered, Staged
from delayline.migration.targets.sql_store import DUPLICATE_ID, SqlStore, StoreSession, without
from delayline.spark.cold_tier import ColdTier, check_job_duration, stage_journal_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection, Table

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.writer import BulkWriter
    from delayline.migration.target import Attempted

#: Messages that a task keeps in memory before it writes them.
STAGED_AT_ONCE: Final = 16 * 1024 * 1024


class ColdTierStore(SqlStore):
    """The stores of a database, each with its cold tier in that folder; `delayline setup` has created the stores.

    Args:
        hot_horizon: messages due later wait in files until they are promoted.
    """

    kind: ClassVar[str] = "cold-tier"

    def __init__(self, url: str, cold_tier: str, *, hot_horizon: timedelta, schema: str | None = None) -> None:
        super().__init__(url, schema=schema)
        self.folder: ColdFolder = ColdFolder(cold_tier)
        self.hot_horizon: timedelta = time_span("hot_horizon", hot_horizon)
        self._ours: set[str] = set()

    def __str__(self) -> str:
        return f"{super().__str__()} with the cold tier {without_secrets(self.folder.path)}"

    def endpoint_named(self, name: str) -> str:
        """Return the endpoint that has a store. Raises BackendUnusable for none, and for an unreadable folder."""
        named = super().endpoint_named(name)
        next(iter(self.folder.lying()), None)
        return named

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame:
        """Return the pending messages of both tiers of the endpoint's store."""
        return super().waiting(endpoint, spark).dropDuplicates(["id"])

    def begin(self, endpoint: str) -> TiersSession:
        """Return a new session with its own staging area."""
        tier, writer = self.tier(endpoint), self.writer(endpoint)
        folder = tier.create()
        writer.create()
        now = writer.now()
        far_from = now + self.hot_horizon if self.hot_horizon < LATEST_TIME - now else LATEST_TIME
        return TiersSession(
            writer, self.queues(), self.options(endpoint), folder, to_microseconds(far_from),
            self._ours, journaled=tier.journaled,
        )  # fmt: skip

    def tier(self, endpoint: str) -> ColdTier:
        """Return the cold tier of the endpoint's store."""
        return ColdTier(self.options(endpoint), self.folder.path)


class TiersSession(StoreSession):
    """Stages batches of an endpoint for both tiers of its store, in groups; the driver commits them.

    Args:
        ours: Names of the files of earlier sessions, whose ids the source does not have again.
    """

    confirms = False

    _cold_ids: FileIds
    _waiting: list[pa.RecordBatch]
    _staged: list[Staged]

    def __init__(
        self,
        writer: BulkWriter,
        queues: frozenset[str] | None,
        options: Mapping[str, str],
        folder: ColdFolder,
        far_from: int,
        ours: set[str],
        *,
        journaled: bool,
    ) -> None:
        super().__init__(writer, queues)
        self._options = options
        self._folder = folder
        self._far_from = far_from
        self._ours = ours
        self._journaled = journaled
        self._began = time.monotonic()

    @property
    def tier(self) -> ColdTier:
        """The cold tier."""
        return ColdTier(self._options, self._folder.path)

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the store and read the ids in the files."""
        await super().open(stack)
        files, cancelled = self.tier.files()
        self._cold_ids = FileIds(self._folder, [file for file in files if file.name not in self._ours], cancelled)
        self._waiting = []
        self._staged = []

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Stage the accepted messages; they count once the driver has committed them."""
        refused = {**await self.duplicates(messages), **self.nowhere(messages)}
        kept = without(messages, refused)
        if kept.num_rows:
            self._waiting.append(kept)
        if sum(batch.nbytes for batch in self._waiting) > STAGED_AT_ONCE:
            self._stage()
        return Delivered(attempt.number, refused)

    async def duplicates(self, messages: pa.RecordBatch) -> dict[int, str]:
        """Return the reasons of messages whose id is pending in a tier or repeated in the batch, by position."""
        ids = messages.column("id")
        known = self._cold_ids.among(ids)
        cold = {at: DUPLICATE_ID for at, key in enumerate(ids.to_pylist()) if key in known} if known else {}
        return {**cold, **await super().duplicates(messages)}

    async def end(self) -> Sequence[Staged]:
        """Stage the rest."""
        self._stage()
        return self._staged

    def commit(self, staged: Sequence[Staged], attempts: Mapping[str, int]) -> None:
        """Move staged messages into the store and register the files, in the transaction of the ledger."""
        files = [file for part in staged for file in part.files]
        self.writer.commit(
            [part.attempt for part in staged],
            on_conflict="raise",
            pre_commit=partial(self._register, files=files, attempts=attempts),
            journal_only=[noted for part in staged for noted in part.noted],
        )
        self._ours.update(file.name for file in files)

    def discard(self) -> None:
        """Remove the staging area."""
        self.writer.discard()

    def _register(
        self, connection: Connection, staged: Table, *, files: Sequence[ColdFile], attempts: Mapping[str, int]
    ) -> None:
        del staged
        check_job_duration(self._began)
        self.tier.catalog.register(connection, files)
        if not self.writer.record_batches(connection, attempts):
            raise BackendUnavailable(
                "an abort of this migration has begun, or another process goes on with it: resume it"
            )

    def _stage(self) -> None:
        """Stage near messages and write far messages to files; `commit` registers the files."""
        if not self._waiting:
            return
        rows = pa.Table.from_batches(self._waiting).sort_by("due")
        far = pc.greater_equal(microseconds(rows.column("due")), self._far_from)
        writer = HourWriter(self._folder)
        for batch in rows.filter(far).to_batches():
            writer.write(batch)
        files = writer.close()
        attempt = self.writer.write(rows.filter(pc.invert(far)).to_batches())
        noted = [stage_journal_rows(self.writer, self._folder, files)] if self._journaled and files else []
        self._staged.append(Staged(attempt, files, noted))
        self._waiting = []


class FileIds:
    """The ids in a tier's files, as 64-bit hashes in memory; a file is read again only for equal hashes."""

    def __init__(self, folder: ColdFolder, files: Sequence[ColdFile], dead: Mapping[str, Sequence[str]]) -> None:
        self._folder = folder
        self._files = files
        self._dead = dead
        hashed = [(number, _hashed(ids)) for number, file in enumerate(files) for ids in self._ids(file)]
        self._known = pa.table(
            {
                "hash": pa.chunked_array([some for _, some in hashed], pa.int64()),
                "file": pa.chunked_array([pa.repeat(number, len(some)) for number, some in hashed], pa.int64()),
            }
        )

    def among(self, ids: pa.Array) -> set[str]:
        """Return which of them are in the files."""
        alike = pc.is_in(self._known.column("hash"), value_set=_hashed(ids))
        return {
            message_id
            for number in self._known.column("file").filter(alike).unique().to_pylist()
            for some in self._ids(self._files[number])
            for message_id in some.filter(pc.is_in(some, value_set=ids.cast(some.type))).to_pylist()
        }

    def _ids(self, file: ColdFile) -> list[pa.Array]:
        batches = self._folder.batches(file, self._dead.get(file.name, ()), columns=("id",))
        return [batch.column("id") for batch in batches]


def _hashed(ids: pa.Array) -> pa.Array:
    return pa.array(map(hash, ids.to_pylist()), pa.int64(), size=len(ids))
