"""The data source `delayed_messages`: read and write a delayed message store as a batch or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from delayline.backends import BulkRoute, find_backend
from delayline.errors import ConfigurationError
from delayline.spark.options import (
    FORMAT,
    check_columns,
    check_names,
    choice,
    chosen_columns,
    options_of_table,
    with_table_options,
    without_lengths,
)
from delayline.sql.shards.backend import map_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.types import StructType

    from delayline.spark.reader import BatchReader, ShardedReader, StreamReader
    from delayline.spark.table_reader import TableReader
    from delayline.spark.writer import BatchWriter, StreamWriter


class DelayedMessages(DataSource):
    """The data source. Spark finds it through the module `pyspark_delayline`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of a message that the option `columns` names, by default all.

        In CREATE TABLE they keep the table's options: Spark hands these to a Python data source only here.
        """
        return with_table_options(chosen_columns(self.options), self.options)

    def reader(self, schema: StructType) -> BatchReader | ShardedReader | TableReader:
        """Return a reader of the selected columns."""
        from delayline.spark.reader import BatchReader, PushingReader, PushingShardedReader, ShardedReader

        options = self._options(schema)
        backend = find_backend(options.get("url", ""))
        if backend is not None and backend.bulk_route is BulkRoute.TABLE_ROWS:
            from delayline.spark.table_reader import TableReader

            return TableReader(options, without_lengths(schema))
        pushes = choice(options, "filterPushdown", ("false", "true")) == "true"
        shards = map_named(options.get("url", ""), schema=options.get("schema"))
        if shards is not None:
            return (PushingShardedReader if pushes else ShardedReader)(options, without_lengths(schema), shards)
        return (PushingReader if pushes else BatchReader)(options, without_lengths(schema))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return the writer of a job. Raises ConfigurationError for a wrong schema before any task starts."""
        from delayline.spark.writer import BatchWriter

        _must_append(overwrite)
        check_columns(without_lengths(schema))
        return BatchWriter(self._options(schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's
        """Return a reader that takes due messages out of the store."""
        from delayline.spark.reader import StreamReader

        return StreamReader(self._options(schema), without_lengths(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's
        """Return the writer of a batch of a stream."""
        from delayline.spark.writer import StreamWriter

        _must_append(overwrite)
        check_columns(without_lengths(schema))
        return StreamWriter(self._options(schema))

    def _options(self, schema: StructType) -> Mapping[str, str]:
        """Return the options, with a table's. Raises ConfigurationError for a name that is none."""
        options = options_of_table(schema, self.options)
        check_names(options)
        return options


def _must_append(overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError(
            f'{FORMAT} can only append: use .mode("append"), and .option("onConflict", "replace") to overwrite messages'
        )
