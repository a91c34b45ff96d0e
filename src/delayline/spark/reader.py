"""Read the messages of a store: as a batch, which changes nothing, or as a stream, which takes due messages out.

The stream numbers the messages that it takes. They can be read again until Spark has finished their batch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from delayline.bulk.scan import Condition, Order, PendingScan, Span
from delayline.bulk.stream_claims import StreamClaims
from delayline.clock import SystemClock
from delayline.errors import ConfigurationError
from delayline.shards import named_errors
from delayline.spark.options import (
    FORMAT,
    REQUIRED,
    SOURCE_COLUMNS,
    StoreOptions,
    choice,
    column_of,
    instant_option,
    whole_option,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from pyspark.sql.datasource import Filter

    from delayline.shards import Shard, ShardMap

DEFAULT_PARTITIONS: Final = 2
ROWS_AT_ONCE: Final = 10_000
#: A read has no more partitions than messages fill, unless it is told how many.
ROWS_A_PARTITION: Final = 50_000
PARTITIONED_BY: Final[tuple[Order, ...]] = ("due", "id")
#: The filters of Spark that the store's table can evaluate exactly, with their operators.
COMPARISONS: Final[Mapping[type[Filter], str]] = {
    datasource.EqualTo: "=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.In: "in",
}


@dataclass
class SpanPartition(InputPartition):
    """The messages in a range of due times, or of ids."""

    span: Span


class BatchReader(DataSourceReader):
    """Reads the selected columns, each partition in a single statement. Partitions share no snapshot."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._store = StoreOptions.of(options)
        self._schema = checked_schema(schema)
        self._names = [name.lower() for name in schema.names]
        self._partitions = whole_option(options, "numPartitions", 1) if "numPartitions" in options else None
        self._order = choice(options, "partitionBy", PARTITIONED_BY)
        self._at_once = whole_option(options, "fetchSize", ROWS_AT_ONCE)
        self._conditions: list[Condition] = []
        due_from, due_to = instant_option(options, "dueFrom"), instant_option(options, "dueTo")
        if due_from is not None:
            self._conditions.append(Condition("due", ">=", due_from))
        if due_to is not None:
            self._conditions.append(Condition("due", "<", due_to))
        if "destination" in options:
            self._conditions.append(Condition("destination", "=", options["destination"]))

    def partitions(self) -> Sequence[SpanPartition]:
        """Divide the messages evenly, with no more partitions than the job may have connections."""
        most = self._store.connections
        if self._partitions is None:
            spans = self._waiting.spans(most, ROWS_A_PARTITION)
        else:
            spans = self._waiting.spans(min(self._partitions, most))
        return [SpanPartition(span) for span in spans]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a range."""
        if not isinstance(partition, SpanPartition):
            raise TypeError(f"{partition!r} is not a partition of this reader")
        for rows in self._waiting.rows(self._names, partition.span, self._at_once):
            yield arrow_batch(rows, self._schema)

    @property
    def _waiting(self) -> PendingScan:
        store = self._store
        return PendingScan(store.address, store.table, store.schema, self._conditions, order=self._order)


class PushingReader(BatchReader):
    """Pushes filters down to the database. Spark refuses such a reader if its own setting forbids pushdown."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Keep the filters that the table can evaluate exactly; return the others to Spark."""
        for condition in filters:
            sign = COMPARISONS.get(type(condition))
            column: Sequence[str] = [name.lower() for name in getattr(condition, "attribute", ())]
            value: Any = getattr(condition, "value", None)
            if isinstance(condition, datasource.IsNotNull) and column[0] in REQUIRED:
                continue  # both columns are never null
            if sign is None or len(column) != 1 or column[0] not in REQUIRED or value is None:
                yield condition
            else:
                self._conditions.append(Condition(column[0], sign, value))


@dataclass
class ShardPartition(InputPartition):
    """A partition of a shard."""

    shard: str
    partition: InputPartition


class ShardedReader(DataSourceReader):
    """Reads the selected columns of all shards, each as a store."""

    reads: ClassVar[type[BatchReader]] = BatchReader

    def __init__(self, options: Mapping[str, str], schema: StructType, shards: ShardMap) -> None:
        self._shards = {shard.name: shard for shard in shards.used}
        self._readers = {name: self.reads(_options_of(shard, options), schema) for name, shard in self._shards.items()}

    def partitions(self) -> Sequence[ShardPartition]:
        """Divide the messages of each shard. Raises an error that names a shard that does not answer."""
        found: list[ShardPartition] = []
        for name, reader in self._readers.items():
            with named_errors(self._shards[name]):
                found += [ShardPartition(name, partition) for partition in reader.partitions()]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a range of a shard."""
        if not isinstance(partition, ShardPartition):
            raise TypeError(f"{partition!r} is not a partition of this reader")
        with named_errors(self._shards[partition.shard]):
            yield from self._readers[partition.shard].read(partition.partition)


class PushingShardedReader(ShardedReader):
    """Pushes filters down to the database of each shard."""

    reads: ClassVar[type[BatchReader]] = PushingReader

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Keep the filters that the tables can evaluate exactly; return the others to Spark."""
        left: list[Filter] = []
        for reader in self._readers.values():  # the same of each
            left = list(cast("PushingReader", reader).pushFilters(filters))
        return left


def _options_of(shard: Shard, options: Mapping[str, str]) -> Mapping[str, str]:
    own = {"url": shard.url, **({} if shard.schema is None else {"schema": shard.schema})}
    return CaseInsensitiveDict({**options, **own})


def checked_schema(schema: StructType) -> StructType:
    """Return the schema, in which names may be in any case.

    Raises ConfigurationError for a column that messages do not have, or that is there twice.
    """
    names = set[str]()
    for field in schema:
        if column_of(field.name).dataType != field.dataType or field.name.lower() in names:
            raise ConfigurationError(
                f"there is no column {field.name!r} of type {field.dataType.simpleString()} to read"
                f"{' twice' if field.name.lower() in names else ''}; choose from {SOURCE_COLUMNS.simpleString()}"
            )
        names.add(field.name.lower())
    return schema


def arrow_batch(rows: Sequence[Sequence[Any]], schema: StructType) -> pa.RecordBatch:
    """Return rows as an Arrow batch in Spark's types, times in UTC."""
    kinds = to_arrow_schema(schema, timezone="UTC")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, kind.type) for column, kind in zip(columns, kinds, strict=True)], schema=kinds
    )


Result = TypeVar("Result")
ROWS_PER_TRIGGER: Final = 10_000
OFFSET_KEY: Final = "claim"


@dataclass
class ClaimPartition(InputPartition):
    """The messages with numbers above `start` up to `end`."""

    start: int
    end: int


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes due messages out of the store, so that no poller dispatches them.

    The offset is a message's number, not its due time, so that a message that is stored late is not skipped.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._store = StoreOptions.of(options)
        self._schema = checked_schema(schema)
        self._names = [name.lower() for name in schema.names]
        self._partitions = whole_option(options, "numPartitions", DEFAULT_PARTITIONS)
        self._limit = whole_option(options, "maxMessagesPerTrigger", ROWS_PER_TRIGGER)
        self._app = options.get("app", "")
        if not self._app.strip():
            raise ConfigurationError(
                f'a stream of {FORMAT} needs a permanent name: .option("app", "invoices"). After a restart it finds '
                "its unfinished messages by this name"
            )
        self._until: datetime | None = None
        self._open: _OpenStore | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        """Return the number before the first unfinished message, also if the checkpoint was lost."""
        return self._offset(self._opened.run(self._opened.taking.first()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        """Return the most messages of a batch."""
        return ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        """Take only messages that are due by now."""
        self._until = SystemClock().now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's
        """Take due messages, and delete finished messages: Spark calls this once all messages up to `start` are done.

        It does not call `commit` after the last batch of a query with the trigger availableNow, whose messages would be
        read again if the checkpoint was lost.

        Raises ConfigurationError if the checkpoint belongs to another stream.
        """
        done = self._number(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        driver = self._opened
        last = driver.run(driver.taking.take(done, most, self._until))
        return self._offset(max(done, last))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        """Return the offset that the stream would reach if it took all that is due: its progress shows the backlog."""
        return self._offset(self._opened.run(self._opened.taking.behind()))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[ClaimPartition]:
        """Divide the numbers evenly."""
        first, last = self._number(start), self._number(end)
        step = -(-(last - first) // min(self._partitions, self._most))
        return [ClaimPartition(at, min(at + step, last)) for at in range(first, last, max(step, 1))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages with the numbers. Can be repeated until their batch is finished."""
        if not isinstance(partition, ClaimPartition):
            raise TypeError(f"{partition!r} is not a partition of this reader")
        for rows in self._taking().rows(self._names, partition.start, partition.end, ROWS_AT_ONCE):
            yield arrow_batch(rows, self._schema)

    def stop(self) -> None:
        """Disconnect."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": None}

    @cached_property
    def _most(self) -> int:
        return self._store.connections

    @property
    def _opened(self) -> _OpenStore:
        if self._open is None:
            self._open = _OpenStore(self._taking())
        return self._open

    def _offset(self, number: int) -> dict[str, Any]:
        return {OFFSET_KEY: number, **self._identity}

    def _number(self, offset: dict[str, Any]) -> int:
        """Return the number in an offset. Rejects another stream's checkpoint, which would delete unread messages."""
        number = offset.get(OFFSET_KEY)
        if not isinstance(number, int) or self._identity != {
            name: value for name, value in offset.items() if name != OFFSET_KEY
        }:
            raise ConfigurationError(
                f"the checkpoint belongs to another stream: its offset is {offset}, this reads {self._identity}. "
                "Give each stream its own checkpointLocation"
            )
        return number

    @property
    def _identity(self) -> dict[str, str]:
        return {"app": self._app, "table": self._store.table}

    def _taking(self) -> StreamClaims:
        return StreamClaims(self._store.address, self._store.table, self._store.schema, self._app)


class _OpenStore:
    """The open store on the driver, where Spark asks for offsets."""

    def __init__(self, taking: StreamClaims) -> None:
        self.taking = taking
        self._runner = asyncio.Runner()
        self.run(taking.open())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self.taking.close())
        self._runner.close()
