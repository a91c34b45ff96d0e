"""Audit of messages: lost, duplicated, early, late, retried and still pending messages."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import TimestampType

from delayline.checks import whole_number
from delayline.clock import ONE_MINUTE
from delayline.errors import ConfigurationError
from delayline.message import in_utc
from delayline.spark.errors import translated_errors
from delayline.sql.journal import JournalEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from pyspark.sql import Column, DataFrame, SparkSession

DELIVERED: Final = "delivered"
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
#: Key in the metadata of the column with the ids of pending messages.
READ_AT: Final = "delayline.read_at"
#: Column of a journal, and of pending messages, of several shards.
SHARD: Final = "shard"
#: Of percentiles: within 0.2 % of the exact percentiles.
ACCURACY: Final = 10_000
#: Seconds that a message may be due before it is stored, or before the first leaves, without being behind.
START_TAKES: Final = 1
#: Upper bounds of the histogram's bars, in seconds.
BARS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)
#: Events whose number an audit needs, beside those by which a message leaves.
COUNTED: Final = (JournalEvent.SCHEDULED, JournalEvent.RETRIED, JournalEvent.FAILED, JournalEvent.CANCELLED)
#: More than the number of any entry: subtracted from one, it puts the entry before all others.
BEFORE_ALL: Final = 1 << 62
#: Spark's setting for the compression of cached DataFrames, true or false.
COMPRESSED: Final = "spark.sql.inMemoryColumnarStorage.compressed"


@dataclass(frozen=True)
class Totals:
    """The numbers of an audit, in messages.

    Attributes:
        until: The time of the audit; None if it was not given and the journal is empty.
        entries: Entries of the journal; an audit without any is not clean.
        scheduled: Messages that were scheduled, counted as often as they were.
        dispatched: Messages that were dispatched or, with `delivered`, received.
        failed: Messages that went to the error queue.
        cancelled: Messages that were cancelled.
        waiting: Messages that are not due, or not long enough for a verdict.
        overdue: Due messages that are still in the store, if the audit was given its ids.
        lost: Due messages that neither left nor are in the store.
        duplicated: Surplus departures.
        early: Messages that left before they were due.
        retries: Dispatches that were tried again.
        lateness: Percentiles (p50, p90, p99, p999) and `longest`, in seconds; None if nothing was dispatched.
        maximum_overdue: How many messages may be overdue in a clean audit.
    """

    until: datetime | None
    entries: int
    scheduled: int
    dispatched: int
    failed: int
    cancelled: int
    waiting: int
    overdue: int
    lost: int
    duplicated: int
    early: int
    retries: int
    lateness: dict[str, float | None]
    maximum_overdue: int = 0

    @property
    def clean(self) -> bool:
        """Whether the audit has found no fault."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """What is wrong, a sentence each: lost, duplicated, early or too many overdue messages, or an empty journal."""
        counts = {"lost": self.lost, "duplicated": self.duplicated, "early": self.early}
        faults = [f"{number:,} {name}" for name, number in counts.items() if number]
        if self.overdue > self.maximum_overdue:
            allowed = f", and at most {self.maximum_overdue:,} may be" if self.maximum_overdue else ""
            faults.append(f"{self.overdue:,} overdue in the store{allowed}: is a process dispatching?")
        if not self.entries:
            faults.append(
                "the journal has no entries, so nothing was audited: check the path of the export and the name of the "
                "store, and that it keeps a journal (delayline setup --journal true)"
            )
        return faults


class Audit:
    """The audit of a journal. Its properties are DataFrames; close it to free the memory that Spark caches it in.

    Example:
        ```python
        with audit(read_journal(target, "journal"), store="sales.timeouts") as found:
            assert found.totals().clean
        ```
    """

    def __init__(
        self,
        messages: DataFrame,
        cached: DataFrame,
        entries: DataFrame,
        until: datetime | None,
        number: int,
        maximum_overdue: int,
    ) -> None:
        self._messages = messages
        self._cached = cached
        self._entries = entries
        self._until = until
        self._number = number
        self._maximum_overdue = maximum_overdue

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the cache. Idempotent."""
        self._cached.unpersist()

    @property
    def messages(self) -> DataFrame:
        """A row per message: its due time, its outcome, and its lateness in seconds.

        `behind` marks messages that were due more than a second before they were stored, or before the first message of
        the journal left: their lateness says nothing of the dispatching. Of several shards there is a column `shard`,
        unless receivers' arrivals were given: an id in two shards is two messages.
        """
        return self._messages

    @property
    def lost(self) -> DataFrame:
        """Due messages that neither left nor are in the store."""
        return self._messages.where("verdict = 'lost'")

    @property
    def duplicated(self) -> DataFrame:
        """Messages that left more often than they were scheduled."""
        return self._messages.where("extra > 0")

    @property
    def early(self) -> DataFrame:
        """Messages that left before they were due."""
        return self._messages.where("early > 0")

    @property
    def lateness(self) -> DataFrame:
        """Percentiles and maximum of the lateness in seconds, by destination and due hour."""
        hour = F.date_trunc("hour", "due").alias("hour")
        return self._messages.where("late IS NOT NULL").groupBy("destination", hour).agg(*_lateness()).orderBy("hour")

    @property
    def by_destination(self) -> DataFrame:
        """The same by destination, with the counts of retries, failed and cancelled messages."""
        return self._by("destination").orderBy(F.desc("messages"), "destination")

    @property
    def by_shard(self) -> DataFrame | None:
        """The lateness and the counts of retries, failed and cancelled messages by shard; None for a single store."""
        return self._by(SHARD).orderBy(SHARD) if SHARD in self._messages.columns else None

    def _by(self, column: str) -> DataFrame:
        sums = [F.sum(name).alias(name) for name in ("retries", "failed", "cancelled")]
        return self._messages.groupBy(column).agg(*_lateness(), *sums)

    @property
    def histogram(self) -> DataFrame:
        """Number of messages by lateness: `up_to` seconds, null for more."""
        return self._messages.where("late IS NOT NULL").groupBy(bar_of().alias("up_to")).count().orderBy("up_to")

    @property
    def errors(self) -> DataFrame:
        """Retries and messages moved to the error queue, by destination and hour."""
        hour = F.date_trunc("hour", "at").alias("hour")
        troubles = self._entries.where(F.col("event").isin(JournalEvent.RETRIED.value, JournalEvent.FAILED.value))
        return troubles.groupBy("destination", hour, "event").count().orderBy("hour", "destination")

    @property
    def forecast(self) -> DataFrame:
        """Pending messages, by due hour and destination."""
        hour = F.date_trunc("hour", "due").alias("hour")
        waits = self._messages.where("verdict IN ('waiting', 'overdue')")
        return waits.groupBy(hour, "destination").count().orderBy("hour", "destination")

    def totals(self) -> Totals:
        """Count all messages. Runs a Spark job."""
        return self.totals_with()[0]

    def totals_with(self, *figures: Column) -> tuple[Totals, dict[str, Any]]:
        """Count all messages, and take other figures of them in the same Spark job.

        Args:
            figures: Aggregates of the columns of `messages`, with names of their own.

        Returns:
            The totals, and the other figures by name.
        """
        verdicts = {
            name: F.count_if(F.col("verdict") == name)
            for name in ("dispatched", "failed", "cancelled", "waiting", "overdue", "lost")
        }
        sums = {name: F.coalesce(F.sum(column), F.lit(0)) for name, column in SUMS.items()}
        counted = [column.alias(name) for name, column in {**verdicts, **sums}.items()]
        with translated_errors():
            [row] = self._messages.agg(*figures, *counted, *_lateness()).toArrow().to_pylist()
        late = {name: row.pop(name) for name in (*PERCENTILES, "longest")}
        row.pop("messages")
        counts = {name: int(row.pop(name)) for name in (*verdicts, *sums)}
        return Totals(self._until, self._number, lateness=late, maximum_overdue=self._maximum_overdue, **counts), row


SUMS: Final = {"scheduled": "scheduled", "duplicated": "extra", "early": "early", "retries": "retries"}


def bar_of() -> Column:
    """Return the bar of the histogram that a message's lateness is in: its upper bound, null for the last."""
    return reduce(
        lambda rest, end: F.when(F.col("late") <= end, F.lit(float(end))).otherwise(rest),
        reversed(BARS),
        F.lit(None).cast("double"),
    )


def audit(
    journal: DataFrame,
    *,
    store: str | None = None,
    delivered: DataFrame | None = None,
    waiting: DataFrame | None = None,
    until: datetime | None = None,
    patience: timedelta = ONE_MINUTE,
    maximum_overdue: int = 0,
) -> Audit:
    """Reconcile scheduled messages with dispatched messages.

    Args:
        journal: Entries as `read_journal` returns them.
        store: The table whose messages are audited.
        delivered: Arrivals recorded by receivers, columns id and at; replaces the dispatches in the journal. Of several
            shards, messages of one id count as one then that was scheduled several times.
        waiting: Messages in the store, column id; a due message that is neither there nor delivered is lost. Read them
            before the journal is exported.
        until: The moment of the audit; by default the database's time at which `waiting_ids` was called for `waiting`,
            or without it the last entry's.
        patience: A message that fell due within this time before `until` is neither lost nor overdue yet.
        maximum_overdue: How many overdue messages a clean audit may have.

    Returns:
        The audit; close it after use.

    Raises:
        ConfigurationError: `delivered` lacks a column, or is given without `store`; `maximum_overdue` is negative.
    """
    whole_number("maximum_overdue", maximum_overdue, at_least=0)
    if delivered is not None and store is None:
        raise ConfigurationError("delivered does not name a store: give the table, store='sales.timeouts'")
    with translated_errors():
        entries = journal.where(F.col("event") != JournalEvent.HANDLED.value)  # of what receivers do, not the store
        entries = entries if store is None else entries.where(F.col("store") == store)
        # Ids are unique in a shard: what it has sent twice is not made up for by another. Receivers do not say which.
        shard = [SHARD] if SHARD in journal.columns and delivered is None else []
        entries = entries.select("seq", "store", "event", "id", "destination", "due", "at", *shard)
        if waiting is not None and shard and SHARD not in waiting.columns:
            raise ConfigurationError(
                "the journal is that of several shards, and waiting has no column shard: read it with waiting_ids"
            )
        if delivered is not None and store is not None:
            entries = entries.unionByName(_arrivals(delivered, store))
        messages = _messages(entries, DELIVERED if delivered is not None else JournalEvent.DISPATCHED.value, shard)
        if waiting is not None:
            present = waiting.select("id", *shard).distinct().withColumn("there", F.lit(True))
            messages = messages.join(present, ["id", *shard], "left")
        else:
            messages = messages.withColumn("there", F.lit(False))
        summary = F.sum("entries").alias("number"), F.max("last").alias("last"), F.min("began").alias("began")
        with _uncompressed(journal.sparkSession):
            cached = messages.cache()
            try:
                [row] = cached.agg(*summary).toArrow().to_pylist()
            except BaseException:
                cached.unpersist()
                raise
        until = until or (None if waiting is None else read_at(waiting)) or row["last"]
        until = None if until is None else in_utc(until)
        judged = _judged(cached, until, patience, row["began"], shard)
        return Audit(judged, cached, entries, until, row["number"] or 0, maximum_overdue)


@contextmanager
def _uncompressed(spark: SparkSession) -> Iterator[None]:
    """Cache columns as they are: the search for a compression would take a fifth of an audit's processor time."""
    if spark.conf.get(COMPRESSED) != "true":  # the user's choice, or that of another audit, which restores it
        yield
        return
    spark.conf.set(COMPRESSED, "false")
    try:
        yield
    finally:
        spark.conf.set(COMPRESSED, "true")


def marked_as_read(ids: DataFrame, at: datetime) -> DataFrame:
    """Return the ids of pending messages with the database's time at which they were read, for `read_at`."""
    return ids.withMetadata("id", {READ_AT: at.isoformat()})


def read_at(ids: DataFrame) -> datetime | None:
    """Return the database's time at which pending messages were read; None where that is not known."""
    read_at = next((field.metadata.get(READ_AT) for field in ids.schema if field.name == "id"), None)
    return None if read_at is None else datetime.fromisoformat(read_at)


def _arrivals(delivered: DataFrame, store: str) -> DataFrame:
    kinds = {field.name: field.dataType for field in delivered.schema}
    if "id" not in kinds or not isinstance(kinds.get("at"), TimestampType):
        raise ConfigurationError(
            f"delivered has the columns {delivered.schema.simpleString()}: it needs id STRING and at TIMESTAMP"
        )
    nothing = {"seq": "bigint", "destination": "string", "due": "timestamp"}
    return delivered.select(
        F.col("id").cast("string"),
        "at",
        F.lit(store).alias("store"),
        F.lit(DELIVERED).alias("event"),
        *(F.lit(None).cast(kind).alias(name) for name, kind in nothing.items()),
    )


def _messages(entries: DataFrame, leaving: str, shard: Sequence[str]) -> DataFrame:
    """Return a row per message, in each shard: counts of its events, its last due time and when it left."""

    def happened(*events: str) -> Column:
        return F.col("event").isin(*events)

    planned = happened(JournalEvent.SCHEDULED.value, JournalEvent.RESCHEDULED.value)
    gone, hashed, key = happened(leaving), F.xxhash64("destination"), ("store", "id", *shard)
    place = F.when(F.col("destination").isNotNull(), hashed).alias("place")
    # The entries of a message are far apart in the journal, so that aggregating before the shuffle would gain nothing.
    gathered = entries.select("seq", "event", place, "due", "at", *key).repartition(*key)
    # The last plan counts, and only without any the last of the other entries.
    rank = F.when(planned, F.col("seq")).otherwise(F.col("seq") - BEFORE_ALL)
    grouped = gathered.groupBy(*key).agg(
        F.max_by("place", F.when(F.col("place").isNotNull(), F.col("seq"))).alias("place"),
        F.max_by("due", F.when(F.col("due").isNotNull(), rank)).alias("due"),
        F.max(F.when(planned, F.col("at"))).alias("planned"),
        F.max(F.when(gone, F.col("at"))).alias("left"),
        F.count_if(gone).alias("gone"),
        F.count_if(gone & (F.col("at") < F.col("due"))).alias("early_in_journal"),
        F.count_if(~happened(DELIVERED)).alias("entries"),
        F.max(F.when(~happened(DELIVERED), F.col("at"))).alias("last"),
        F.min(F.when(happened(JournalEvent.DISPATCHED.value), F.col("at"))).alias("began"),
        *(F.count_if(happened(event.value)).alias(event.value) for event in COUNTED),
    )
    # Aggregates of texts make Spark sort all entries; hashes of the destinations avoid that.
    places = entries.select("destination").where("destination IS NOT NULL").distinct()
    first = F.array_min(F.collect_list("destination")).alias("destination")
    named = grouped.join(F.broadcast(places.groupBy(hashed.alias("place")).agg(first)), "place", "left").drop("place")
    renamed = named.withColumnsRenamed({JournalEvent.RETRIED.value: "retries"})
    return renamed.withColumn("by_receivers", F.lit(leaving == DELIVERED))


def _judged(
    messages: DataFrame, until: datetime | None, patience: timedelta, began: datetime | None, shard: Sequence[str]
) -> DataFrame:
    out = F.col("gone") + F.col("failed") + F.col("cancelled")
    expected = F.greatest(
        F.col("scheduled"), F.lit(1)
    )  # messages older than the journal have no entry of their scheduling
    is_out = out >= expected
    too_early = is_out & F.col("by_receivers") & (F.col("left") < F.col("due"))
    is_due = F.lit(False) if until is None else F.col("due") < F.lit(until - patience)
    came_later = F.coalesce(F.col("planned") > F.lit(until), F.lit(False))  # than the pending messages were read
    not_out = F.when(~is_due, "waiting").when(F.col("there"), "overdue").when(came_later, "waiting").otherwise("lost")
    verdict = (
        F.when(~is_out, not_out)
        .when(F.col("gone") > 0, "dispatched")
        .when(F.col("failed") > 0, "failed")
        .otherwise("cancelled")
    )
    late = F.when(is_out, F.col("left").cast("double") - F.col("due").cast("double")).alias("late")
    on_time = F.col("due").cast("double") + START_TAKES
    behind = on_time < F.greatest(*(time.cast("double") for time in (F.col("planned"), F.lit(began).cast("timestamp"))))
    return messages.withColumn("there", F.coalesce("there", F.lit(False))).select(
        "store",
        "id",
        "destination",
        "due",
        "left",
        verdict.alias("verdict"),
        late,
        F.coalesce(behind, F.lit(False)).alias("behind"),
        "scheduled",
        F.greatest(out - expected, F.lit(0)).alias("extra"),
        F.greatest(F.coalesce(too_early.cast("int"), F.lit(0)), F.col("early_in_journal")).alias("early"),
        "retries",
        "failed",
        "cancelled",
        *shard,
    )


def _lateness() -> Sequence[Column]:
    points: Any = F.array(*(F.lit(point) for point in PERCENTILES.values()))
    together = F.percentile_approx("late", points, ACCURACY)
    each = [together[position].alias(name) for position, name in enumerate(PERCENTILES)]
    return [F.count("late").alias("messages"), *each, F.max("late").alias("longest")]
