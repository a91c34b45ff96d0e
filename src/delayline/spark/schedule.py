"""Schedule the rows of files, tables and streams as delayed messages, each once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame

from delayline.backends import BulkRoute, backend_of, schemes_with
from delayline.bulk.connections import CONNECT_TIMEOUT
from delayline.bulk.jobs import JobName, PieceCounts, check_run
from delayline.checks import time_span, whole_number
from delayline.clock import ONE_DAY, SystemClock
from delayline.errors import ConfigurationError
from delayline.spark.errors import translated_errors
from delayline.spark.options import StoreOptions, must_be_single
from delayline.spark.pieces import COUNTS, observed
from delayline.spark.placement import Atomic, Placed, Placement
from delayline.spark.session import activated, described, session_for, started
from delayline.spark.shards import ShardedPlacement, of_shard
from delayline.spark.sources import JDBC, Columns, prepared, read_path, read_table, rejected
from delayline.sql.shards.backend import map_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Observation, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from delayline.delayed.store import OnConflict

#: Fields of JobTarget that are not options of the data source.
NO_OPTIONS: Final = ("cold_tier", "delay_levels", "job_folder")
#: The routes to stores of jobs.
ROWS: Final = (BulkRoute.STAGED_ROWS, BulkRoute.STORED_ROWS)
#: The options whose fields have another name.
OPTION_NAMES: Final = {
    "store_url": "url",
    "password_env": "passwordEnv",
    "password_file": "passwordFile",
    "max_connections": "maxConnections",
    "connect_timeout": "connectTimeout",
}


@dataclass(frozen=True)
class Scheduled:
    """The result of a job, in rows.

    Attributes:
        run: Name of the run: as given to `schedule`, or a new name.
        stored: Rows stored in the delayed message store.
        cold: Rows written to the cold tier.
        sent: Rows published to the delay levels of a broker.
        duplicates: Rows left out because their id is in the store or cold tier, or in an earlier row.
        rejected: Rows that cannot be messages.
        repeated: Whether an earlier run of this name had committed, so that this run did nothing.
        rejected_rows: The rejected rows with the columns id, reason, file, line and row (as JSON). Each action on this
            DataFrame reads the source again.
    """

    run: str
    stored: int
    cold: int
    sent: int
    duplicates: int
    rejected: int
    repeated: bool
    rejected_rows: DataFrame


@dataclass(frozen=True)
class JobTarget:
    """The place that jobs write messages to, and read them from: a store, its cold tier, and a broker.

    Args:
        store_url: URL of the store: `postgresql`, `mariadb`, `mysql`, `sqlite`, or `mssql`, which takes jobs in pieces
            only; `shards`, whose map of shards `schedule`, `schedule_stream`, `export` and audits take. The URL of a
            broker (`amqp`, `amqps`) publishes all messages to its delay levels.
        endpoint: The endpoint that owns the messages. Its store's table is `{endpoint}.timeouts`.
        table: Name of the store's table, if it is another.
        schema: Schema of the table; the default schema of the database user if None.
        password_env: Environment variable that holds the password, on the driver and on every executor.
        password_file: File that holds the password, on the driver and on every executor.
        cold_tier: Folder or URI of the Parquet files for messages that are due later than the hot horizon.
        delay_levels: URL of a broker whose delay levels get the messages that are due earlier, or of an Azure storage
            account with the endpoint's delayed messages table. `promote` sends the messages of the cold tier there.
        max_connections: The most connections of a job's tasks at a time, 1 or more, and so the most tasks that write:
            to the store, of which a quarter of what its server has left is the default, at most 32; without a store to
            the broker, by default one for each slot of Spark.
        connect_timeout: Seconds that a connection of a job waits while the server of the store has none left.
        job_folder: Folder or URI, reached by all machines, for the files of jobs that are all or nothing: a job with
            `atomic="job"` or `on_conflict="raise"` is written there first, however large it is.

    Example:
        ```python
        target = JobTarget("postgresql://app@db/orders", endpoint="sales", password_env="DB_PASSWORD")
        ```
    """

    store_url: str = field(repr=False)
    endpoint: str | None = None
    table: str | None = None
    schema: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    cold_tier: str | None = None
    delay_levels: str | None = field(default=None, repr=False)
    max_connections: int | None = None
    connect_timeout: int = CONNECT_TIMEOUT
    job_folder: str | None = None

    def __post_init__(self) -> None:
        if self.max_connections is not None:
            whole_number("max_connections", self.max_connections, at_least=1)
        whole_number("connect_timeout", self.connect_timeout, at_least=1)

    @property
    def broker(self) -> str | None:
        """The URL of the broker, None without a broker. Raises ConfigurationError for a contradiction."""
        if not self._has_levels:
            return self.delay_levels
        if self.delay_levels is not None:
            raise ConfigurationError("store_url and delay_levels are two brokers: give one, or a database as store_url")
        if self.cold_tier is not None:
            raise ConfigurationError(
                "a cold tier needs a database for its catalog: JobTarget('postgresql://...', delay_levels='amqp://...')"
            )
        return self.store_url

    @property
    def store(self) -> StoreOptions | None:
        """The store; None if `store_url` is a broker."""
        return None if self._has_levels else StoreOptions.of(self.options)

    @property
    def options(self) -> Mapping[str, str]:
        """The options of the data source. Raises ConfigurationError for a product that jobs cannot write to."""
        backend = backend_of(self.store_url, kind="store that jobs can write to")
        must_be_single(self.store_url)
        if backend.bulk_route not in ROWS:
            able = schemes_with(lambda backend: backend.bulk_route in ROWS)
            raise ConfigurationError(
                f"{backend.scheme}: is not a store that jobs can write to. Use one of {', '.join(able)}"
            )
        given = {
            OPTION_NAMES.get(option.name, option.name): getattr(self, option.name)
            for option in fields(self)
            if option.name not in NO_OPTIONS
        }
        return {name: str(value) for name, value in given.items() if value is not None}

    @property
    def sender(self) -> str:
        """The endpoint name for the headers of a send."""
        name = self.endpoint or (self.table or "").removesuffix(".timeouts")
        if not name:
            raise ConfigurationError('the endpoint is missing: JobTarget(..., endpoint="sales")')
        return name

    @property
    def is_sharded(self) -> bool:
        """Whether the store is a map of shards."""
        return map_named(self.store_url, schema=self.schema) is not None

    @property
    def _has_levels(self) -> bool:
        kind = "store that jobs can write to"
        return backend_of(self.store_url, kind=kind).native_delays is not None


def schedule(  # noqa: PLR0913 - the options of a job
    source: DataFrame | str | Path,
    target: JobTarget,
    *,
    columns: Columns | None = None,
    on_conflict: OnConflict = "keep",
    run: str | None = None,
    version: int = 0,
    form: str | None = None,
    options: Mapping[str, str] | None = None,
    hot_horizon: timedelta = ONE_DAY,
    atomic: Atomic = "piece",
    observation: Observation | None = None,
    spark: SparkSession | None = None,
) -> Scheduled:
    """Schedule every valid row as a delayed message, each once. Blocks.

    A store or a broker takes the rows in pieces: tasks commit them, each with its entry in the table
    `delayline_job_pieces`, and their messages are pending from then on. A job that failed or was killed goes on with
    the missing pieces when it is run again under its name, from any machine; it is refused if a piece that it has
    stored had other rows. A broker gets up to 5 000 messages again that were under way when a task was killed. With a
    cold tier these are the near rows; then the source is read once more, and one transaction registers the files of the
    far rows, or none of them. Jobs with `on_conflict="raise"` or `atomic="job"` store all rows or none: in one
    transaction, or, with the target's `job_folder` and without a cold tier, in pieces that are written to files before
    it is decided to store them.

    With a run's name the ledger keeps a fingerprint of the input: the number of its rows, and a sum of hashes of their
    ids; with `on_conflict="replace"` also of destination, due time or delay, headers and body. It covers rejected rows
    and duplicates too, and depends neither on the order of the rows nor on the files and tasks that they are in. So a
    job that is run again needs the same ids, also if its due times are relative to its own start. The tasks take the
    fingerprint while they write; to repeat a run that has begun, the input is read once more.

    Args:
        source: A DataFrame; the path of Parquet, CSV or JSON Lines files; or, with `form="jdbc"`, the name of a table.
        target: Where the messages go.
        columns: Names of the source's columns, if they differ from the columns of a message.
        on_conflict: For an id that is already stored: `keep` leaves the row out, `raise` raises DuplicateMessage,
            `replace` overwrites the message (store only). Of rows with the same id the earliest due counts; of
            rows due at the same time the row whose destination, then headers, then body come first in the
            order of their bytes. The others are duplicates, and with `fail` an error.
        run: Name of the job, which makes it idempotent: a run that has committed is not committed again, and its name
            is refused for other rows. Give each input a name of its own, such as `nightly 2026-05-01`,
            or a version.
        version: Number of the run, 0 or more, as `txnVersion` of a write to a Delta table whose `txnAppId` is the name:
            each version of a name is a run of its own.
        form: `parquet`, `csv`, `jsonl` or `jdbc`; taken from the path's ending if None.
        options: Options of Spark's JDBC source; `passwordEnv` names an environment variable for the password.
        hot_horizon: Messages due later go to the cold tier, if there is any, and never to a broker.
        atomic: `piece`, or, without a broker, `job` for all rows at one instant: for some million rows, as one
            transaction on one connection stores them all, and at most an hour long. With the target's `job_folder`, and
            without a cold tier, all rows or none, however many, but not at one instant.
        observation: Gets the metrics rows, stored, cold, sent, duplicates, rejected and bytes: of a job in pieces as
            its query's own, which listeners of Spark see too, named `delayline` without an observation. Of other jobs,
            and of one that is repeated, they are those of the result, without bytes.
        spark: The session for a path; `spark_session()` if None.

    Returns:
        The counts of the job, and its rejected rows.

    Raises:
        ConfigurationError: A column is missing or has a wrong type, an option is wrong, or the Spark job failed.
        DuplicateMessage: With `on_conflict="raise"`, an id is already stored.
        DifferentInput: A run of this name had other rows, and nothing was stored; or rows for the cold tier are due at
            another time when they are read once more, and the near rows are stored.
        DelaylineError: The job failed. The pieces that were committed are stored, and a broker keeps the messages that
            it has confirmed: a job with the same `run` continues after them. Otherwise nothing was stored.

    Example:
        ```python
        target = JobTarget("sqlite:///delayline.db", endpoint="sales")
        done = schedule("2026-05-01.parquet", target, run="nightly 2026-05-01")
        print(done.stored, done.rejected)
        ```
    """
    columns = columns or Columns()
    time_span("hot_horizon", hot_horizon)
    with translated_errors():
        rows = partial(_rows, source, form, options or {}, columns, spark)
        job = Placement(target, columns, on_conflict, hot_horizon, atomic)
        read = rows(numbered=False)
        session = activated(read.sparkSession)
        name = None if run is None else JobName(check_run(run), whole_number("version", version, at_least=0))
        with described(session, f"schedule{'' if name is None else f' {name}'}: delayed messages of {target.sender}"):
            if target.is_sharded:
                return _schedule_on_shards(job, rows, name, read, observation)
            done = job.run(read, name, observation=observation)
            if observation is not None and (done.repeated or not job.in_pieces):
                _observe(session, done, observation)
        bad = rejected(rows(numbered=True), columns, done.now, done.validator)
        counts = (done.stored, done.cold, done.sent, done.duplicates, done.rejected)
        return Scheduled(done.run, *counts, done.repeated, bad)


def _schedule_on_shards(
    placement: Placement,
    rows: Callable[..., DataFrame],
    name: JobName | None,
    read: DataFrame,
    observation: Observation | None,
) -> Scheduled:
    """Schedule the rows of each shard in it; the counts are the sums."""
    job, columns = ShardedPlacement(placement, name), placement.columns
    placed = job.place(read)
    done = reduce(Placed.plus, placed.values())
    if observation is not None:
        _observe(read.sparkSession, done, observation)
    bad = [
        rejected(of_shard(rows(numbered=True), columns, job.among, shard), columns, each.now, each.validator)
        for shard, each in placed.items()
    ]
    counts = (done.stored, done.cold, done.sent, done.duplicates, done.rejected)
    return Scheduled(done.run, *counts, done.repeated, reduce(DataFrame.unionByName, bad))


def _observe(spark: SparkSession, done: Placed, observation: Observation) -> None:
    counts = PieceCounts(done.stored, done.duplicates, done.rejected, sent=done.sent, cold=done.cold)._asdict()
    result = spark.createDataFrame([tuple({**counts, "bytes": None}.values())], COUNTS)
    observed(result, observation).toArrow()


def schedule_stream(
    source: DataFrame,
    target: JobTarget,
    *,
    checkpoint: str | Path,
    columns: Columns | None = None,
    on_conflict: OnConflict = "keep",
    hot_horizon: timedelta = ONE_DAY,
    atomic: Atomic = "piece",
    trigger: Mapping[str, str | bool] | None = None,
) -> StreamingQuery:
    """Start a query that schedules every valid row of a stream, once.

    Each batch is a job like those of `schedule`, named by the query, whose version is the number of the batch. A store
    or a broker takes its rows in pieces, and after a failure the missing ones. Rows that cannot be messages are left
    out and counted in the tables of jobs. A broker gets messages of an interrupted batch again that it had confirmed
    and this was not recorded yet. On Spark Connect the server's Python does the work of the driver: it needs delayline
    too, and the passwords.

    Args:
        source: A streaming DataFrame.
        target: Where the messages go.
        checkpoint: Folder of the query's checkpoint, of its own for each query.
        columns: Names of the source's columns, if they differ from the columns of a message. A delay counts from the
            start of the batch. Prefer instants.
        on_conflict: As for `schedule`.
        hot_horizon: As for `schedule`.
        atomic: `piece`, or, without a broker, `job` for all rows of a batch in a single transaction: also where a batch
            that Spark repeats has other ids, as those of `uuid()`.
        trigger: Arguments of `DataStreamWriter.trigger`; a second if None. With a cold tier use a minute or more,
            because each batch is compared with the ids in the files.

    Returns:
        The running query.

    Raises:
        ConfigurationError: The DataFrame is not a stream, or the target cannot take it.
    """
    if not source.isStreaming:
        raise ConfigurationError("the DataFrame is not a stream: use schedule()")
    given: Mapping[str, str | bool] = trigger or {"processingTime": "1 second"}
    placement = Placement(target, columns or Columns(), on_conflict, time_span("hot_horizon", hot_horizon), atomic)
    place = str(checkpoint)

    def store(batch: DataFrame, number: int) -> None:
        session = activated(batch.sparkSession)
        query = _query_of(session, place)
        # The data source, which stored batches at first, has named them by its txnAppId and the query.
        alone = placement.in_pieces and target.broker is None
        name = JobName(f"stream  {query}" if alone else f"stream {query}")
        if not placement.in_pieces:
            batch.persist()  # it is read more than once
        try:
            with described(session, f"batch {number}: delayed messages of {target.sender}"):
                if target.is_sharded:
                    ShardedPlacement(placement, name, number).place(batch)
                else:
                    placement.run(batch, name, batch=number)
        finally:
            batch.unpersist()

    with translated_errors():
        activated(source.sparkSession)
        placement.check()
        prepared(source, placement.columns, SystemClock().now())  # its columns
        writer = source.writeStream.option("checkpointLocation", place)
        return started(writer.trigger(**given), store)  # type: ignore[arg-type]


def _query_of(spark: SparkSession, checkpoint: str) -> str:
    """Return the id of the running query, which is the same after a restart: Spark keeps it with the checkpoint."""
    [kept] = spark.read.text(f"{checkpoint}/metadata").toArrow().column(0).to_pylist()
    return str(json.loads(kept)["id"])


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
        return read_table(session_for(spark), str(source), options)
    if isinstance(source, str | Path):
        return read_path(session_for(spark), str(source), form, columns.names, numbered=numbered)
    if source.isStreaming:
        raise ConfigurationError("the DataFrame is a stream: use schedule_stream()")
    return source
