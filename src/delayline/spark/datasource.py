"""The data source `delayed_messages`: read and write a delayed message store as a batch or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from delayline.errors import ConfigurationError
from delayline.spark.options import COLUMNS, FORMAT, check_columns, choice

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from delayline.spark.reader import BatchReader, StreamReader
    from delayline.spark.writer import BatchWriter, StreamWriter


class DelayedMessages(DataSource):
    """Spark finds it by itself through the module `pyspark_delayline`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return a message's columns."""
        return COLUMNS

    def reader(self, schema: StructType) -> BatchReader:
        """Return a reader of the columns that the user has asked for."""
        from delayline.spark.reader import BatchReader, PushingReader

        pushes = choice(self.options, "filterPushdown", ("false", "true")) == "true"
        return (PushingReader if pushes else BatchReader)(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return a job's writer; what cannot be written is refused here, before any task."""
        from delayline.spark.writer import BatchWriter

        _must_append(overwrite)
        check_columns(schema)
        return BatchWriter(self.options)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's
        """Return a reader that takes due messages out of the store."""
        from delayline.spark.reader import StreamReader

        return StreamReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's
        """Return a batch's writer."""
        from delayline.spark.writer import StreamWriter

        _must_append(overwrite)
        check_columns(schema)
        return StreamWriter(self.options)


def _must_append(overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError(
            f'{FORMAT} only adds messages: write .mode("append"), and .option("onConflict", "replace") for new content'
        )
