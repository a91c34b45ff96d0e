"""A SQL store with its cold tier: near messages go to the store, far messages to files, by generations."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayline.backends import DUPLICATE_ID
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.bulk.known_ids import KnownIds
from delayline.bulk.shared_folder import without_secrets
from delayline.checks import time_span
from delayline.clock import LATEST_TIME, to_microseconds
from delayline.delayed.arrow import microseconds
from delayline.errors import BackendUnavailable
from delayline.migration.target import Delivered, Staged
from delayline.migration.targets.sql_store import SqlStore, StoreSession, without
from delayline.spark.cold_tier import ColdTier, check_job_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection, Table

    from delayline.bulk.batches import BatchName
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
        writer, folder = self.writer(endpoint), self.tier(endpoint).create()
        writer.create()
        now = writer.now()
        far_from = now + self.hot_horizon if self.hot_horizon < LATEST_TIME - now else LATEST_TIME
        return TiersSession(writer, self.queues(), self.options(endpoint), folder, to_microseconds(far_from))

    def tier(self, endpoint: str) -> ColdTier:
        """Return the cold tier of the endpoint's store."""
        return ColdTier(self.options(endpoint), self.folder.path)


class TiersSession(StoreSession):
    """Stages batches of an endpoint for both tiers of its store, in groups; the driver commits them."""

    confirms = False

    _known: KnownIds
    _waiting: list[pa.RecordBatch]
    _staged: list[Staged]

    def __init__(
        self,
        writer: BulkWriter,
        queues: frozenset[str] | None,
        options: Mapping[str, str],
        folder: ColdFolder,
        far_from: int,
    ) -> None:
        super().__init__(writer, queues)
        self._options = options
        self._folder = folder
        self._far_from = far_from
        self._began = time.monotonic()

    @property
    def tier(self) -> ColdTier:
        """The cold tier."""
        return ColdTier(self._options, self._folder.path)

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the store."""
        await super().open(stack)
        self._known = KnownIds(self._database, self.writer.table, self._folder)
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
        known = await self._known.among(messages.column("id"))
        return {**dict.fromkeys(known.nonzero()[0].tolist(), DUPLICATE_ID), **self.repeated(messages)}

    async def end(self) -> Sequence[Staged]:
        """Stage the rest."""
        self._stage()
        return self._staged

    def commit(self, staged: Sequence[Staged], attempts: Mapping[BatchName, int]) -> None:
        """Move staged messages into the store and register the files, in the transaction of the ledger."""
        files = [file for part in staged for file in part.files]
        self.writer.commit(
            [part.attempt for part in staged],
            on_conflict="raise",
            pre_commit=partial(self._register, files=files, attempts=attempts),
        )
        self.tier.keep_log()

    def discard(self) -> None:
        """Remove the staging area."""
        self.writer.discard()

    def _register(
        self, connection: Connection, staged: Table, *, files: Sequence[ColdFile], attempts: Mapping[BatchName, int]
    ) -> None:
        del staged
        check_job_duration(self._began)
        self.tier.register(connection, files)
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
        self._staged.append(Staged(attempt, files))
        self._waiting = []
