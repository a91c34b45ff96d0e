"""Reading as a stream: due messages leave the store for the query, numbered, and can be read again until it is done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from delayline.bulk.stream_claims import Taking
from delayline.clock import SystemClock
from delayline.errors import ConfigurationError
from delayline.spark.options import FORMAT, StoreOptions, whole
from delayline.spark.reader import ROWS_AT_ONCE, arrow_batch, known

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql.types import StructType

Result = TypeVar("Result")
PARTITIONS: Final = 2
ROWS_A_TRIGGER: Final = 10_000
OFFSET: Final = "claim"


@dataclass
class ClaimPartition(InputPartition):
    """The messages with numbers above `start` up to `end`."""

    start: int
    end: int


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes due messages out of the store, so that no poller dispatches them.

    The offset is the number of a message, not its due time: one that is stored late is not passed over.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._store = StoreOptions.of(options)
        self._schema = known(schema)
        self._partitions = whole(options, "numPartitions", PARTITIONS)
        self._limit = whole(options, "maxMessagesPerTrigger", ROWS_A_TRIGGER)
        self._app = options.get("app", "")
        if not self._app.strip():
            raise ConfigurationError(
                f'a stream of {FORMAT} needs a name that stays the same: .option("app", "invoices"). Messages that it '
                "has taken and not finished are found again by it"
            )
        self._until: datetime | None = None
        self._driver: _Driver | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        """Return the number before the first message that is not done with, also when the checkpoint was lost."""
        return self._offset(self._on_driver.run(self._on_driver.taking.first()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        """Return how many messages a trigger takes."""
        return ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        """Read only messages due by now."""
        self._until = SystemClock().now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's
        """Read due messages, and delete claims up to `start`: Spark calls this only when everything before it is done.

        Raises ConfigurationError for another stream's offset.
        """
        done = self._number(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        driver = self._on_driver
        last = driver.run(driver.taking.take(done, most, self._until))
        return self._offset(max(done, last))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[ClaimPartition]:
        """Cut the numbers evenly."""
        first, last = self._number(start), self._number(end)
        step = -(-(last - first) // self._partitions)
        return [ClaimPartition(one, min(one + step, last)) for one in range(first, last, max(step, 1))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages with these numbers, as often as Spark asks."""
        if not isinstance(partition, ClaimPartition):
            raise TypeError(f"{partition!r} is not a partition of this reader")
        for rows in self._taking().rows(self._schema.names, partition.start, partition.end, ROWS_AT_ONCE):
            yield arrow_batch(rows, self._schema)

    def stop(self) -> None:
        """Disconnect."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_driver": None}

    @property
    def _on_driver(self) -> _Driver:
        if self._driver is None:
            self._driver = _Driver(self._taking())
        return self._driver

    def _offset(self, number: int) -> dict[str, Any]:
        return {OFFSET: number, **self._whose}

    def _number(self, offset: dict[str, Any]) -> int:
        """Parse an offset. Rejects another stream's checkpoint, which would acknowledge unread messages."""
        number = offset.get(OFFSET)
        if not isinstance(number, int) or self._whose != {name: one for name, one in offset.items() if name != OFFSET}:
            raise ConfigurationError(
                f"the checkpoint is another job's: it says {offset}, and this one reads {self._whose}. "
                "Give each stream its own checkpointLocation"
            )
        return number

    @property
    def _whose(self) -> dict[str, str]:
        return {"app": self._app, "table": self._store.table}

    def _taking(self) -> Taking:
        return Taking(self._store.address, self._store.table, self._store.schema, self._app)


class _Driver:
    """The open store, in the process in which Spark asks for offsets."""

    def __init__(self, taking: Taking) -> None:
        self.taking = taking
        self._runner = asyncio.Runner()
        self.run(taking.open())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self.taking.close())
        self._runner.close()
