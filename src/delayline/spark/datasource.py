"""The data source `delayed_messages`: read and write a delayed message store as a batch or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from delayline.errors import ConfigurationError
from delayline.spark.options import FORMAT, SOURCE_COLUMNS, check_columns, choice

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from delayline.spark.reader import BatchReader, StreamReader
    from delayline.spark.writer import BatchWriter, StreamWriter


class DelayedMessages(DataSource):
    """The data source. Spark finds it through the module `pyspark_delayline`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of a message."""
        return SOURCE_COLUMNS

    def reader(self, schema: StructType) -> BatchReader:
        """Return a reader of the selected columns."""
        from delayline.spark.reader import BatchReader, PushingReader

        pushes = choice(self.options, "filterPushdown", ("false", "true")) == "true"
        return (PushingReader if pushes else BatchReader)(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return the writer of a job. Raises ConfigurationError for a wrong schema before any task starts."""
        from delayline.spark.writer import BatchWriter

        _must_append(overwrite)
        check_columns(schema)
        return BatchWriter(self.options)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's
        """Return a reader that takes due messages out of the store."""
        from delayline.spark.reader import StreamReader

        return StreamReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's
        """Return the writer of a batch of a stream."""
        from delayline.spark.writer import StreamWriter

        _must_append(overwrite)
        check_columns(schema)
        return StreamWriter(self.options)


def _must_append(overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError(
            f'{FORMAT} can only append: use .mode("append"), and .option("onConflict", "replace") to overwrite messages'
        )
