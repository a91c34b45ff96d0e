"""Scheduling in bulk: files, tables and streams become delayed messages, all of them or none."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.checks import time_span
from delayline.errors import ConfigurationError
from delayline.spark.cold_tier import ColdTier, schedule_in_tiers
from delayline.spark.columns import Columns, content_type, prepared, rejected
from delayline.spark.failures import in_plain_words
from delayline.spark.lines import HIDDEN, read_path
from delayline.spark.options import FORMAT, StoreOptions
from delayline.spark.sent import ROOM, Sender
from delayline.spark.session import in_this_thread, spark_session
from delayline.sql.runs import Committed, check_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ONE_DAY: Final = timedelta(days=1)
IN_THE_STORE: Final = ("postgresql", "mariadb", "mysql", "sqlite")


@dataclass(frozen=True)
class Scheduled:
    """What became of a job's rows."""

    run: str
    stored: int
    held: int
    """Those of the cold tier."""
    duplicates: int
    rejected: int
    repeated: bool
    rejected_rows: DataFrame
    """id, reason, file, line, and the row as JSON; read again from the source when it is looked at."""


@dataclass(frozen=True)
class Target:
    """Whose messages they become, and where: the options of the data source."""

    store_url: str = field(repr=False)
    endpoint: str | None = None
    table: str | None = None
    schema: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    cold_tier: str | None = None
    """The folder, or the URI, of the Parquet files in which far messages wait."""

    @property
    def options(self) -> Mapping[str, str]:
        """As Spark takes them. Raises ConfigurationError for a store that is written to in another way."""
        product = self.store_url.partition(":")[0].partition("+")[0]
        if product not in IN_THE_STORE:
            raise ConfigurationError(f"{product}: is no store that bulk jobs write to: {', '.join(IN_THE_STORE)}")
        names = {"store_url": "url", "password_env": "passwordEnv", "password_file": "passwordFile"}
        given = {
            names.get(one.name, one.name): getattr(self, one.name) for one in fields(self) if one.name != "cold_tier"
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def sender(self) -> str:
        """The endpoint, for the headers."""
        return self.endpoint or (self.table or "").removesuffix(".timeouts")


def schedule(
    source: DataFrame | str | Path,
    target: Target,
    *,
    columns: Columns | None = None,
    on_conflict: str = "ignore",
    run: str | None = None,
    form: str | None = None,
    hot_horizon: timedelta = ONE_DAY,
    spark: SparkSession | None = None,
) -> Scheduled:
    """Store every sound row as a delayed message, in one transaction, and tell what became of the others.

    source: a DataFrame, or the path of Parquet, CSV or JSON Lines. columns: which is which, where names differ.
    run: makes the job repeatable: what has committed is not committed again. hot_horizon: with a cold tier, what is
    due later waits there. Blocks. Raises DelaylineError, without anything stored, where the job fails.
    """
    columns, run = columns or Columns(), check_run(run or uuid.uuid4().hex)
    time_span("hot_horizon", hot_horizon)
    staging = StoreOptions.of(target.options).staging()
    with in_plain_words():
        rows = partial(_rows, source, form, columns, spark)
        now = staging.now()
        read = rows(numbered=False)
        messages = prepared(read, columns, now).drop(*HIDDEN)
        sender = Sender(target.sender, content_type(read, columns), now)
        in_this_thread(messages.sparkSession)
        before, held = staging.committed(run), 0
        if target.cold_tier is not None:
            tier = ColdTier(target.options, target.cold_tier)
            far_from = now + hot_horizon
            stored, held = schedule_in_tiers(
                messages, tier, sender, run=run, on_conflict=on_conflict, far_from=far_from
            )
        else:
            if before is None:
                options = {
                    **target.options,
                    "onConflict": on_conflict,
                    "invalid": "skip",
                    "runId": run,
                    **sender.options,
                }
                messages.write.format(FORMAT).mode("append").options(**options).save()
            stored = before or staging.committed(run) or Committed(0)
        bad = rejected(rows(numbered=True), columns, now, staging.largest_message - ROOM)
        return Scheduled(run, stored.stored, held, stored.duplicates, stored.rejected, before is not None, bad)


def schedule_stream(
    source: DataFrame,
    target: Target,
    *,
    checkpoint: str | Path,
    columns: Columns | None = None,
    on_conflict: str = "ignore",
    trigger: Mapping[str, str | bool] | None = None,
) -> StreamingQuery:
    """Start a query that stores every sound row of a streaming DataFrame, each batch in one transaction, once.

    trigger: as of `DataStreamWriter.trigger`, every second if left out. A delay counts from the start of the query;
    give streams instants. Rows that cannot be messages are counted in the ledger and left out.
    """
    if not source.isStreaming:
        raise ConfigurationError("the DataFrame is no stream: use schedule()")
    if target.cold_tier is not None:
        raise ConfigurationError("a stream is stored in the database only: leave out cold_tier")
    staging = StoreOptions.of(target.options).staging()
    with in_plain_words():
        columns = columns or Columns()
        messages = prepared(source, columns, staging.now())
        in_this_thread(messages.sparkSession)
        sender = Sender(target.sender, content_type(source, columns), None)
        options = {**target.options, "onConflict": on_conflict, "invalid": "skip", **sender.options}
        writer = messages.drop(*HIDDEN).writeStream.format(FORMAT).options(**options)
        given: Mapping[str, str | bool] = trigger or {"processingTime": "1 second"}
        return writer.option("checkpointLocation", str(checkpoint)).trigger(**given).start()  # type: ignore[arg-type]


def _rows(
    source: DataFrame | str | Path, form: str | None, columns: Columns, spark: SparkSession | None, *, numbered: bool
) -> DataFrame:
    if isinstance(source, str | Path):
        return read_path(spark or spark_session(), str(source), form, columns.names, numbered=numbered)
    if source.isStreaming:
        raise ConfigurationError("the DataFrame is a stream: use schedule_stream()")
    return source
