"""Read an endpoint's delayed messages table in Azure Storage: it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from delayline.azure.message_scan import DelayedTableScan
from delayline.delayed.columns import StoredRow
from delayline.errors import ConfigurationError
from delayline.message import in_utc
from delayline.spark.options import instant_option, whole_option
from delayline.spark.reader import arrow_batch, checked_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from delayline.message import DelayedMessage


@dataclass
class DuePartition(InputPartition):
    """The messages that are due from `start` on and before `end`."""

    start: datetime | None
    end: datetime | None


class TableReader(DataSourceReader):
    """Reads the selected columns. Azure does not know how due times are spread: partitions are of the same length.

    A page of a table is asked for with a marker from the page before, so a range of due times is the work of one task.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        if "endpoint" not in options and "table" not in options:
            raise ConfigurationError('a table needs its endpoint: .option("endpoint", "sales"), or the "table"')
        self._scan = DelayedTableScan(options["url"], options.get("endpoint"), options.get("table"))
        self._schema = checked_schema(schema)
        self._names = [name.lower() for name in schema.names]
        self._due_from, self._due_to = instant_option(options, "dueFrom"), instant_option(options, "dueTo")
        self._destination = options.get("destination")
        self._partitions = whole_option(options, "numPartitions", 1)

    def partitions(self) -> Sequence[DuePartition]:
        """Divide the time between dueFrom and dueTo; without one of them there is one partition."""
        start, end, number = self._due_from, self._due_to, self._partitions
        if start is None or end is None or end <= start:
            return [DuePartition(start, end)]
        cuts = [start + (end - start) * part / number for part in range(number)]
        return [DuePartition(*bounds) for bounds in zip(cuts, [*cuts[1:], end], strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a range."""
        if not isinstance(partition, DuePartition):
            raise TypeError(f"{partition!r} is not a partition of this reader")
        for page in self._scan.messages(partition.start, partition.end):
            chosen = [message for message in page if self._destination in (None, message.destination)]
            yield arrow_batch([self._values(message) for message in chosen], self._schema)

    def _values(self, message: DelayedMessage) -> list[Any]:
        row = StoredRow.of(message, in_utc, lambda content: content.encoded_headers)
        row = row._replace(headers=row.headers.decode("utf-8", "replace"))  # type: ignore[arg-type]
        return [getattr(row, name) for name in self._names]
