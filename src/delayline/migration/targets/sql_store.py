"""delayline's SQL stores: a task commits each batch in a transaction with its name, so that it counts once."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from sqlalchemy import inspect, select

from delayline.backends import DUPLICATE_ID, UNKNOWN_QUEUE
from delayline.bulk.batches import CLOSED
from delayline.bulk.writer import BulkWriter, IdTaken, blocking
from delayline.clock import ONE_MICROSECOND
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.migration.rows import WAITING_COLUMNS
from delayline.migration.sources.delayline_store import TIMEOUTS_SUFFIX
from delayline.migration.target import Delivered, DeliverySession
from delayline.spark.cold_tier import ColdTier, waiting_messages
from delayline.spark.session import activated, parallelism
from delayline.sql.database import Database
from delayline.sql.databases import database_at
from delayline.sql.prepared import Prepared
from delayline.sql.schema import QUEUES, queue_tables
from delayline.sql.setup import RequiredTables
from delayline.timeouts.nservicebus import table_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from sqlalchemy import Connection

    from delayline.bulk.batches import BatchName
    from delayline.migration.target import Attempted

#: How often ids are looked for that others store meanwhile.
ROUNDS: Final = 5


class SqlStore:
    """The stores of a database, a table an endpoint: `delayline setup` has made them."""

    kind: ClassVar[str] = "sql-store"
    exactly_once: ClassVar[bool] = True
    longest: ClassVar[timedelta | None] = None
    grain: ClassVar[timedelta] = ONE_MICROSECOND

    def __init__(self, url: str, *, schema: str | None = None) -> None:
        self.url = url
        self.schema = schema
        self._database = database_at(url)

    @property
    def largest_message(self) -> int:
        """The largest message in bytes that the database can store."""
        return self._database.dialect.values.largest_message

    def __str__(self) -> str:
        return str(self._database.dialect)

    def endpoint_named(self, name: str) -> str:
        """Return the endpoint that has a store, also for a name with `_` for `.`. Raises BackendUnusable for none."""
        return blocking(self._database.look(lambda connection: self._named(connection, name)))

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that have no queue, where the store's database has the queues too."""
        known = self.queues()
        return {
            queue: UNKNOWN_QUEUE.format(queue) for queue in destinations if known is not None and queue not in known
        }

    def queues(self) -> frozenset[str] | None:
        """Return the names of all queues, None where they are somewhere else."""
        names = select(queue_tables(self._database.dialect.catalog.schema_of(self.schema)).queues.c.name)
        queues = blocking(self._database.look(lambda connection: list(connection.execute(names).scalars())))
        return frozenset(queues) if queues else None

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame:
        """Return the pending messages of the endpoint's store."""
        options = {**self.options(endpoint), "numPartitions": str(parallelism(spark))}
        return waiting_messages(activated(spark), options, self.tier(endpoint), columns=WAITING_COLUMNS)

    def options(self, endpoint: str) -> Mapping[str, str]:
        """Return the options of the data source for the endpoint's store."""
        options = {"url": self.url, "table": f"{endpoint}{TIMEOUTS_SUFFIX}"}
        return options if self.schema is None else {**options, "schema": self.schema}

    def tier(self, endpoint: str) -> ColdTier | None:
        """Return the cold tier of the endpoint's store: it has none."""
        del endpoint
        return None

    def begin(self, endpoint: str) -> DeliverySession:
        """Return a new session; nothing is staged."""
        writer = self.writer(endpoint)
        writer.create_ledger()
        return StoreSession(writer, self.queues())

    def committed(self, endpoint: str, names: Sequence[BatchName]) -> Mapping[BatchName, int]:
        """Return which attempts the store's ledger has."""
        return self.writer(endpoint).committed_batches(names)

    def close(self, endpoint: str, names: Sequence[BatchName]) -> None:
        """Close the batches in the store's ledger."""
        self.writer(endpoint).close_batches(names)

    def writer(self, endpoint: str) -> BulkWriter:
        """Return a bulk writer of the endpoint's store."""
        return BulkWriter(self.url, f"{endpoint}{TIMEOUTS_SUFFIX}", schema=self.schema)

    def _named(self, connection: Connection, name: str) -> str:
        dialect = self._database.dialect
        schema = dialect.catalog.schema_of(self.schema)
        tables = inspect(connection).get_table_names(schema=schema)
        prefix = table_prefix(name).casefold()
        stores = [table.removesuffix(TIMEOUTS_SUFFIX) for table in tables if table.endswith(TIMEOUTS_SUFFIX)]
        matching = [name] if name in stores else [store for store in stores if table_prefix(store).casefold() == prefix]
        if not matching:
            make = f"Make it with: delayline setup --endpoint {name}"
            if "_" in name:  # as a table of .NET's is called, which has it for a dot
                make += f", or --endpoint {name.replace('_', '.')} if that is the endpoint's own name"
            raise BackendUnusable(f"{dialect} has no store for endpoint {name!r}. {make}")
        if len(matching) > 1:
            raise ConfigurationError(
                f"{name!r} may be any of {', '.join(sorted(matching))} at {dialect}: name one with --endpoint"
            )
        table = dialect.catalog.store_table(f"{matching[0]}{TIMEOUTS_SUFFIX}", schema)
        RequiredTables(dialect, schema, QUEUES, others=[table]).check(connection)
        return matching[0]


class StoreSession(DeliverySession):
    """Stores batches of an endpoint, each in a single transaction with its entry in the ledger."""

    _database: Database
    _pending: Prepared

    def __init__(self, writer: BulkWriter, queues: frozenset[str] | None) -> None:
        self.writer = writer
        self.queues = queues
        self.largest_message: int = writer.largest_message

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the store."""
        self._database = await self.writer.open(stack)
        ids, dialect = self.writer.table.c.id, self._database.dialect
        self._pending = Prepared(select(ids).where(dialect.words.one_of(ids, "keys")), dialect.sql, ["keys"])

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Store the messages; if an id exists already, find out which."""
        refused = self.nowhere(messages)
        for _ in range(ROUNDS):
            if refused:
                await attempt.record_refusals(refused)
            try:
                counts = await self.writer.store_batch(attempt.name, attempt.number, without(messages, refused))
            except IdTaken:
                refused = {**await self.duplicates(messages), **refused}
                continue
            if counts == CLOSED:
                raise BackendUnavailable("an abort of this migration has begun: run delayline migrate abort again")
            return Delivered(counts)
        raise BackendUnavailable(
            f"another process keeps inserting the same message ids into {self._database.dialect}: stop it, then run "
            "delayline migrate resume"
        )

    def nowhere(self, messages: pa.RecordBatch) -> dict[int, str]:
        """Return the reasons of messages for a queue that does not exist, by position."""
        known = self.queues
        if known is None:
            return {}
        destinations = messages.column("destination").to_pylist()
        return {at: UNKNOWN_QUEUE.format(queue) for at, queue in enumerate(destinations) if queue not in known}

    async def duplicates(self, messages: pa.RecordBatch) -> dict[int, str]:
        """Return the reasons of messages whose id is pending in the store or repeated in the batch, by position."""
        ids = messages.column("id").to_pylist()
        waiting = {row[0] for row in await self._database.read(partial(self._pending.rows_each, keys=ids))}
        return {**{at: DUPLICATE_ID for at, key in enumerate(ids) if key in waiting}, **self.repeated(messages)}

    @staticmethod
    def repeated(messages: pa.RecordBatch) -> dict[int, str]:
        """Return the reasons of messages whose id an earlier one of the batch has, by position."""
        ids = messages.column("id").to_pylist()
        first = {key: at for at, key in reversed(list(enumerate(ids)))}
        return {at: DUPLICATE_ID for at, key in enumerate(ids) if first[key] < at}


def without(messages: pa.RecordBatch, refused: Mapping[int, str]) -> pa.RecordBatch:
    """Return the messages at other positions."""
    return messages if not refused else messages.filter([at not in refused for at in range(messages.num_rows)])
