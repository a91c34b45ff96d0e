"""The demo's part on Spark: the reminders are scheduled in bulk, and what became of them is audited."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from examples.demo.reminders import COLUMNS
from examples.demo.stage import REMINDERS, SENDER, Journal

from delayline.clock import to_microseconds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from examples.demo.stage import Stage
    from pyspark.sql import SparkSession

    from delayline.spark import JobTarget
    from delayline.spark.audit import Totals

#: A job becomes visible at its end: the first reminder is due well after it. Never less than this.
LEAD: Final = timedelta(seconds=5)
#: A machine that is busy starts Python slowly; the second setting is how long Spark waits for it.
AT_HOME: Final = {"spark.sql.shuffle.partitions": "2", "spark.python.authenticate.socketTimeout": "90s"}


class Pipeline:
    """The jobs of one run; every method blocks."""

    def __init__(self, stage: Stage, session: SparkSession, longest: timedelta) -> None:
        self._stage = stage
        self._session = session
        self._longest = longest
        self.lead = LEAD
        self.held = 0
        """Reminders that went to the cold tier, and left it again."""

    def schedule(self) -> None:
        """Schedule the file of reminders, the last third of the time into the cold tier, and promote these.

        Each is due a while later than it would be if it were sent now: as long as the first job of the session takes,
        which schedules none of them, as Spark starts slowly.
        """
        from pyspark.sql import functions as F  # noqa: N812 - the usual name

        from delayline.spark import promote, schedule

        session, schema = self._session, ", ".join(f"{name} STRING" for name in COLUMNS)
        session.createDataFrame([], schema)  # which makes the session that of this thread: writers look for it there
        rows = session.read.csv(str(self._stage.reminders), schema=schema, header=True, escape='"').cache()
        ids = rows.select("id").toArrow().column("id").to_pylist()
        began = time.monotonic()
        schedule(rows.limit(0).withColumn("due", F.current_timestamp()), self._target, spark=session)
        self.lead = LEAD + timedelta(seconds=time.monotonic() - began)
        start = to_microseconds(datetime.now(UTC) + self.lead)
        due = F.timestamp_micros(F.lit(start) + F.col("delay_ms").cast("bigint") * 1000)
        near = self.lead + self._longest * 2 / 3
        done = schedule(rows.withColumn("due", due), self._target, hot_horizon=near, spark=session)
        Journal(self._stage.journal(SENDER)).write([(one,) for one in ids])
        self.held = done.cold
        promote(self._target, spark=session)

    def audit(self, report: Path) -> Totals:
        """Export the journal, reconcile it with what the receiver has noted, and write the report."""
        from examples.demo.stage import RECEIVER
        from pyspark.sql import functions as F  # noqa: N812 - the usual name

        from delayline.spark import audit, export, read_journal, waiting_ids, write_report

        session, target, place = self._session, self._target, self._stage.directory / "journal"
        waiting = waiting_ids(target, session)
        export(target, place, spark=session)
        lines = session.read.csv(
            str(self._stage.journal(RECEIVER)), schema="id STRING, due BIGINT, at BIGINT", sep="\t"
        )
        delivered = lines.where("at IS NOT NULL").select("id", F.timestamp_micros("at").alias("at"))
        journal, store = read_journal(target, place, spark=session), f"{REMINDERS}.timeouts"
        with audit(journal, store=store, delivered=delivered, waiting=waiting) as found:
            return write_report(found, report, title="The demo's reminders")

    @property
    def _target(self) -> JobTarget:
        from delayline.spark import JobTarget

        return JobTarget(self._stage.settings(REMINDERS).url, endpoint=REMINDERS, cold_tier=str(self._stage.cold_tier))


@contextlib.contextmanager
def pipeline_on(stage: Stage, longest: timedelta, *, wanted: bool) -> Iterator[Pipeline | None]:
    """Give the jobs of a run, in a session on this machine; None where they are not wanted. Raises MissingExtra."""
    if not wanted:
        yield None
        return
    from delayline.spark import spark_session

    session = spark_session("local[2]", conf=AT_HOME)
    try:
        yield Pipeline(stage, session, longest)
    finally:
        session.stop()
