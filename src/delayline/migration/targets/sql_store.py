"""delayline's SQL stores: tasks stage, the driver commits a wave in one transaction, once."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from sqlalchemy import inspect, select

from delayline.errors import BackendUnusable, ConfigurationError
from delayline.migration.rows import WAITING
from delayline.migration.target import Staged
from delayline.spark.cold_tier import ColdTier, waiting_in
from delayline.spark.session import in_this_thread, parallelism
from delayline.sql import setup
from delayline.sql.database import Database
from delayline.sql.prepared import Prepared
from delayline.sql.schema import queue_tables
from delayline.sql.staging import OnConflict, Staging, blocking
from delayline.sql.store import MICROSECOND
from delayline.sql.timeout_tables import table_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection

    from delayline.migration.target import Wave

SUFFIX: Final = ".timeouts"
#: What a task keeps in memory before it is written.
STAGED_AT_ONCE: Final = 16 * 1024 * 1024
TAKEN: Final = "a message with this id waits in the target's store already: cancel one of the two"
UNKNOWN: Final = "there is no queue {!r} at the target: start its endpoint once, or run delayline setup --queue NAME"


class SqlStore:
    """The stores of one database, a table an endpoint: `delayline setup` has made them."""

    kind: ClassVar[str] = "sql-store"
    exactly_once: ClassVar[bool] = True
    longest: ClassVar[timedelta | None] = None
    grain: ClassVar[timedelta] = MICROSECOND

    def __init__(self, url: str, *, schema: str | None = None) -> None:
        self.url = url
        self.schema = schema
        self._database = Database.at(url)

    @property
    def largest_message(self) -> int:
        """How many bytes the database takes."""
        return self._database.dialect.largest_message

    def __str__(self) -> str:
        return str(self._database.dialect)

    def endpoint_named(self, name: str) -> str:
        """Return whose store there is, also where the name comes with `_` for `.`. Raises BackendUnusable for none."""
        return blocking(self._database.look(lambda connection: self._named(connection, name)))

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that have no queue, where the store's database has the queues too."""
        known = self.queues()
        return {one: UNKNOWN.format(one) for one in destinations if known is not None and one not in known}

    def queues(self) -> frozenset[str] | None:
        """Return the names of all queues, None where they are somewhere else."""
        names = select(queue_tables(self._database.dialect.schema_of(self.schema)).queues.c.name)
        found = blocking(self._database.look(lambda connection: list(connection.execute(names).scalars())))
        return frozenset(found) if found else None

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame:
        """Return what waits in the endpoint's store."""
        options = {**self.options(endpoint), "numPartitions": str(parallelism(spark))}
        return waiting_in(in_this_thread(spark), options, self.tier(endpoint), columns=WAITING)

    def options(self, endpoint: str) -> Mapping[str, str]:
        """Return the options of the data source for the endpoint's store."""
        options = {"url": self.url, "table": f"{endpoint}{SUFFIX}"}
        return options if self.schema is None else {**options, "schema": self.schema}

    def tier(self, endpoint: str) -> ColdTier | None:
        """Return the cold tier of the endpoint's store: it has none."""
        del endpoint
        return None

    def begin(self, endpoint: str) -> Wave:
        """Return a new wave, with a staging area of its own."""
        staging = self._staging(endpoint)
        staging.create()
        return StoreWave(staging, self.queues())

    def committed(self, endpoint: str, name: str) -> bool:
        """Tell whether the ledger has that wave."""
        return self._staging(endpoint).committed(name) is not None

    def _staging(self, endpoint: str) -> Staging:
        return Staging(self.url, f"{endpoint}{SUFFIX}", schema=self.schema)

    def _named(self, connection: Connection, name: str) -> str:
        dialect = self._database.dialect
        schema = dialect.schema_of(self.schema)
        tables = inspect(connection).get_table_names(schema=schema)
        prefix = table_prefix(name).casefold()
        stores = [one.removesuffix(SUFFIX) for one in tables if one.endswith(SUFFIX)]
        found = [name] if name in stores else [one for one in stores if table_prefix(one).casefold() == prefix]
        if not found:
            raise BackendUnusable(
                f"{dialect} has no store for endpoint {name!r}. Make it with: delayline setup --endpoint {name}"
            )
        if len(found) > 1:
            raise ConfigurationError(
                f"{name!r} may be any of {', '.join(sorted(found))} at {dialect}: name one with --endpoint"
            )
        table = dialect.timeouts_table(dialect.kept_name(f"{found[0]}{SUFFIX}"), schema)
        setup.check(connection, queue_tables(schema), table)
        return found[0]


class StoreWave:
    """Batches of one endpoint on their way into its store."""

    confirms = False

    def __init__(self, staging: Staging, queues: frozenset[str] | None) -> None:
        self.staging = staging
        self.queues = queues
        self.largest_message = staging.largest_message

    def stage(self, batches: Sequence[pa.RecordBatch]) -> Staged:
        """Stage messages, in a task."""
        return Staged(self.staging.write(batches))

    async def session(self, stack: AsyncExitStack) -> StoreSession:
        """Connect."""
        return StoreSession(self, await self.connected(stack))

    async def connected(self, stack: AsyncExitStack) -> Database:
        """Return the open database, which closes with the stack."""
        database = Database.at(self.staging.url)
        await database.open()
        stack.push_async_callback(database.close)
        return database

    def commit(self, name: str, staged: Sequence[Staged]) -> None:
        """Move what the tasks have staged into the store, in one transaction with its ledger."""
        self.staging.commit([one.attempt for one in staged], on_conflict=OnConflict.FAIL, run=name)

    def discard(self) -> None:
        """Remove the staging area."""
        self.staging.discard()


class StoreSession:
    """Collects a task's messages, and stages them some at a time."""

    def __init__(self, wave: StoreWave, database: Database) -> None:
        self._wave = wave
        self._database = database
        staging, dialect = wave.staging, database.dialect
        table = dialect.timeouts_table(dialect.kept_name(staging.table_name), dialect.schema_of(staging.schema))
        there = select(table.c.id).where(dialect.one_of(table.c.id, "keys"))
        self._there = Prepared(there, dialect.sql, ["keys"])
        self._waiting: list[pa.RecordBatch] = []
        self._staged: list[Staged] = []

    async def deliver(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        """Stage the messages whose destinations have a queue, and whose ids do not wait there already."""
        refused = await self.refused(messages)
        kept = messages if not refused else messages.filter([n not in refused for n in range(messages.num_rows)])
        if kept.num_rows:
            self._waiting.append(kept)
        if sum(batch.nbytes for batch in self._waiting) > STAGED_AT_ONCE:
            self._stage()
        return refused

    async def end(self) -> Sequence[Staged]:
        """Stage the rest."""
        self._stage()
        return self._staged

    async def refused(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        """Return why some of the messages cannot go into the store, by position."""
        ids, known = messages.column("id").to_pylist(), self._wave.queues
        waiting = {row[0] for row in await self._database.read(partial(self._there.rows_each, keys=ids))}
        refused = {at: TAKEN for at, one in enumerate(ids) if one in waiting}
        if known is not None:
            destinations = messages.column("destination").to_pylist()
            refused |= {at: UNKNOWN.format(one) for at, one in enumerate(destinations) if one not in known}
        return refused

    def _stage(self) -> None:
        if self._waiting:
            self._staged.append(self._wave.stage(self._waiting))
            self._waiting = []
