"""Scheduling in bulk: files, tables and streams become delayed messages, all of them or none."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext

from delayline.bulk.runs import check_run
from delayline.checks import full_scheme, time_span
from delayline.errors import ConfigurationError
from delayline.spark.columns import Columns, content_type, prepared, rejected
from delayline.spark.errors import translated_errors
from delayline.spark.headers import SendHeaders
from delayline.spark.job import Job
from delayline.spark.options import FORMAT, StoreOptions
from delayline.spark.session import activated, spark_session
from delayline.spark.sources import HIDDEN, JDBC, read_path, read_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

ONE_DAY: Final = timedelta(days=1)
BROKERS: Final = ("amqp", "amqps")
#: Options that are not the data source's.
BESIDE: Final = ("cold_tier", "delay_levels")
IN_THE_STORE: Final = ("postgresql", "mariadb", "mysql", "sqlite")


@dataclass(frozen=True)
class Scheduled:
    """What became of a job's rows."""

    run: str
    stored: int
    held: int
    """Those of the cold tier."""
    sent: int
    """Those of a broker's delay levels."""
    duplicates: int
    rejected: int
    repeated: bool
    rejected_rows: DataFrame
    """id, reason, file, line, and the row as JSON; read again from the source when it is looked at."""


@dataclass(frozen=True)
class JobTarget:
    """Whose messages they become, and where.

    store_url: the store; or a broker, amqp://, whose delay levels get everything.
    """

    store_url: str = field(repr=False)
    endpoint: str | None = None
    table: str | None = None
    schema: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    cold_tier: str | None = None
    """The folder, or the URI, of the Parquet files in which far messages wait."""
    delay_levels: str | None = field(default=None, repr=False)
    """The URL of a broker whose delay levels get what is near, in place of the store."""

    @property
    def broker(self) -> str | None:
        """The URL of the broker for near messages. Raises ConfigurationError for two, or none for a cold tier."""
        if not self._is_broker:
            return self.delay_levels
        if self.delay_levels is not None:
            raise ConfigurationError("store_url and delay_levels are two brokers: give one, or a database to store_url")
        if self.cold_tier is not None:
            raise ConfigurationError(
                "a cold tier needs a database for its catalog: JobTarget('postgresql://...', delay_levels='amqp://...')"
            )
        return self.store_url

    @property
    def store(self) -> StoreOptions | None:
        """The store; None where a broker gets everything."""
        return None if self._is_broker else StoreOptions.of(self.options)

    @property
    def options(self) -> Mapping[str, str]:
        """The options of the data source. Raises ConfigurationError for a store that is written to in another way."""
        product = self._product
        if product not in IN_THE_STORE:
            raise ConfigurationError(f"{product}: is not a store for bulk jobs; use one of: {', '.join(IN_THE_STORE)}")
        names = {"store_url": "url", "password_env": "passwordEnv", "password_file": "passwordFile"}
        given = {
            names.get(one.name, one.name): getattr(self, one.name) for one in fields(self) if one.name not in BESIDE
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def sender(self) -> str:
        """The endpoint, for the headers."""
        name = self.endpoint or (self.table or "").removesuffix(".timeouts")
        if not name:
            raise ConfigurationError('whose messages are they? JobTarget(..., endpoint="sales")')
        return name

    @property
    def _product(self) -> str:
        return full_scheme(self.store_url).partition(":")[0].partition("+")[0].lower()

    @property
    def _is_broker(self) -> bool:
        return self._product in BROKERS


def schedule(
    source: DataFrame | str | Path,
    target: JobTarget,
    *,
    columns: Columns | None = None,
    on_conflict: str = "ignore",
    run: str | None = None,
    form: str | None = None,
    options: Mapping[str, str] | None = None,
    hot_horizon: timedelta = ONE_DAY,
    spark: SparkSession | None = None,
) -> Scheduled:
    """Store every valid row as a delayed message, in one transaction, and report the rejected rows.

    Blocks.

    Args:
        source: A DataFrame, or the path of Parquet, CSV or JSON Lines; with form="jdbc" the name of a table, and
            the options of Spark's JDBC source, where passwordEnv names a variable in place of a password.
        target: The store, its cold tier and broker.
        columns: Names of the columns, where they differ from the default.
        on_conflict: For an id that exists: "ignore", "replace" or "fail".
        form: Format of a path: "parquet", "csv", "jsonl" or "jdbc"; by default from its name.
        options: Options of Spark's reader for a path.
        spark: The session; by default the active one.
        run: Name that makes the job repeatable: committed rows are not committed again.
        hot_horizon: Messages due later wait in the cold tier, if there is one, and are not sent to a broker.

    Raises:
        DelaylineError: The job failed and nothing was stored; a broker keeps its confirmed messages, and the same run
        continues after them.
    """
    columns = columns or Columns()
    time_span("hot_horizon", hot_horizon)
    with translated_errors():
        rows = partial(_rows, source, form, options or {}, columns, spark)
        job = Job(target, columns, on_conflict, hot_horizon)
        read = rows(numbered=False)
        activated(read.sparkSession)
        done = job.run(read, run if run is None else check_run(run))
        bad = rejected(rows(numbered=True), columns, done.now, done.validator)
        counts = (done.stored, done.held, done.sent, done.duplicates, done.rejected)
        return Scheduled(done.run, *counts, done.repeated, bad)


def schedule_stream(
    source: DataFrame,
    target: JobTarget,
    *,
    checkpoint: str | Path,
    columns: Columns | None = None,
    on_conflict: str = "ignore",
    hot_horizon: timedelta = ONE_DAY,
    trigger: Mapping[str, str | bool] | None = None,
) -> StreamingQuery:
    """Start a query that stores every sound row of a streaming DataFrame, each batch in one transaction, once.

    trigger: as of `DataStreamWriter.trigger`, every second if left out; with a cold tier give it a minute or more, as
    each batch is compared with the ids in it. A delay counts from the start of the query, with a cold tier or a broker
    from that of the batch; give streams instants. Rows that cannot be messages are counted in the ledger and left out.
    A broker may get a batch twice that is interrupted, as far as it was confirmed and not marked.
    """
    if not source.isStreaming:
        raise ConfigurationError("the DataFrame is not a stream: use schedule()")
    columns = columns or Columns()
    given: Mapping[str, str | bool] = trigger or {"processingTime": "1 second"}
    with translated_errors():
        activated(source.sparkSession)
        if target.cold_tier is not None or target.broker is not None:
            writer = _by_jobs(source, Job(target, columns, on_conflict, time_span("hot_horizon", hot_horizon)))
        else:
            messages = prepared(source, columns, StoreOptions.of(target.options).staging().now())
            sender = SendHeaders(target.sender, content_type(source, columns), None)
            options = {**target.options, "onConflict": on_conflict, "invalid": "skip", **sender.options}
            writer = messages.drop(*HIDDEN).writeStream.format(FORMAT).options(**options)
        return writer.option("checkpointLocation", str(checkpoint)).trigger(**given).start()  # type: ignore[arg-type]


def _by_jobs(source: DataFrame, job: Job) -> DataStreamWriter:
    """Return a writer that runs the job on every batch, under the query's name and the batch's number."""
    job.check()

    def run(batch: DataFrame, number: int) -> None:
        kept = batch.persist()  # a job reads it more than once
        try:
            job.run(kept, f"stream {_query_of(batch.sparkSession)}", batch=number)
        finally:
            kept.unpersist()

    return source.writeStream.foreachBatch(run)


def _query_of(spark: SparkSession) -> str:
    """Return the id of the query that runs now, which outlasts restarts: its tasks know it, the driver does not."""
    [query] = spark.range(0, 1, 1, 1).mapInArrow(_query_in_task, "query STRING").toArrow().column(0).to_pylist()
    if query is None:
        raise ConfigurationError(
            "Spark Connect tells no batch whose it is: start a stream to a cold tier or a broker without it"
        )
    return str(query)


def _query_in_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pa.array([query] * batch.num_rows, pa.string())], names=["query"])


def _rows(
    source: DataFrame | str | Path,
    form: str | None,
    options: Mapping[str, str],
    columns: Columns,
    spark: SparkSession | None,
    *,
    numbered: bool,
) -> DataFrame:
    if isinstance(source, str | Path) and form == JDBC:
        return read_table(spark or spark_session(), str(source), options)
    if isinstance(source, str | Path):
        return read_path(spark or spark_session(), str(source), form, columns.names, numbered=numbered)
    if source.isStreaming:
        raise ConfigurationError("the DataFrame is a stream: use schedule_stream()")
    return source
