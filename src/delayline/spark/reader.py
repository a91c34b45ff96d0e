"""Reading pending messages, in partitions by due time; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from delayline.bulk.scan import Condition, Span, Waiting
from delayline.errors import ConfigurationError
from delayline.spark.options import COLUMNS, StoreOptions, instant, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql.datasource import Filter

PARTITIONS: Final = 2
ROWS_AT_ONCE: Final = 10_000
#: Spark's comparisons of one column with a value, as the store's table can answer them exactly.
COMPARISONS: Final = {
    datasource.EqualTo: "=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.In: "in",
}
ANSWERED: Final = ("id", "destination", "due")


@dataclass
class DuePartition(InputPartition):
    """The messages of a span of due time."""

    span: Span


class BatchReader(DataSourceReader):
    """Reads the columns asked for, each partition in one statement; partitions share no snapshot."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._store = StoreOptions.of(options)
        self._schema = known(schema)
        self._partitions = whole(options, "numPartitions", PARTITIONS)
        self._at_once = whole(options, "fetchSize", ROWS_AT_ONCE)
        self._conditions: list[Condition] = []
        due_from, due_to = instant(options, "dueFrom"), instant(options, "dueTo")
        if due_from is not None:
            self._conditions.append(Condition("due", ">=", due_from))
        if due_to is not None:
            self._conditions.append(Condition("due", "<", due_to))
        if "destination" in options:
            self._conditions.append(Condition("destination", "=", options["destination"]))

    def partitions(self) -> Sequence[DuePartition]:
        """Cut the range of due times evenly."""
        first, last = self._waiting.range()
        if first is None or last is None:
            return [DuePartition(Span(None, None))]
        step = (last - first) / self._partitions
        cuts = [first + step * number for number in range(1, self._partitions)] if step > timedelta(0) else []
        return [DuePartition(Span(start, end)) for start, end in zip([None, *cuts], [*cuts, None], strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one span."""
        if not isinstance(partition, DuePartition):
            raise TypeError(f"{partition!r} is not a partition of this reader")
        for rows in self._waiting.rows(self._schema.names, partition.span, self._at_once):
            yield arrow_batch(rows, self._schema)

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self._store.address, self._store.table, self._store.schema, self._conditions)


class PushingReader(BatchReader):
    """Lets the database filter; Spark refuses such a reader where its own setting forbids that."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Accept the filters that the table evaluates exactly; Spark evaluates the others."""
        for one in filters:
            sign = COMPARISONS.get(type(one))
            column: Sequence[str] = getattr(one, "attribute", ())
            value: Any = getattr(one, "value", None)
            if isinstance(one, datasource.IsNotNull) and one.attribute[0] in ANSWERED:
                continue  # no row has null there
            if sign is None or len(column) != 1 or column[0] not in ANSWERED or value is None:
                yield one
            else:
                self._conditions.append(Condition(column[0], sign, value))


def known(schema: StructType) -> StructType:
    """Return the schema; raises ConfigurationError for columns that no message has."""
    kinds = {field.name: field.dataType for field in COLUMNS}
    for field in schema:
        if kinds.get(field.name) != field.dataType:
            raise ConfigurationError(
                f"there is no column {field.name!r} of type {field.dataType.simpleString()} to read; "
                f"choose from {COLUMNS.simpleString()}"
            )
    return schema


def arrow_batch(rows: Sequence[Sequence[Any]], schema: StructType) -> pa.RecordBatch:
    """Return rows in Spark's own Arrow types, times in UTC."""
    kinds = to_arrow_schema(schema, timezone="UTC")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, kind.type) for column, kind in zip(columns, kinds, strict=True)], schema=kinds
    )
