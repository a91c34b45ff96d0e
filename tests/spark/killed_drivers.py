"""The work of drivers that are killed: functions that `run_until_killed` finds by their module."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from tests.spark.driver_process import kill_at
from tests.spark.stores import StoreAt
from tests.spark.test_dispatch import settings
from tests.spark.tiers import FIRST, HOUR

from delayline.bulk.cold_catalog import ColdFiles
from delayline.bulk.dispatchers import DispatcherControl
from delayline.bulk.journal_export import JournalExport
from delayline.bulk.pieces import PieceWriter
from delayline.bulk.writer import BulkWriter
from delayline.spark import Dispatcher, export, promote, schedule
from delayline.spark.cold_tier import ColdTier

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayline.spark import JobTarget

UNTIL: Final = FIRST + 5 * HOUR
#: The method of each step of a job with all rows at once, and whether the driver is killed before it.
COMMIT: Final = {
    "staged": ("commit", True),
    "moved": ("_stored", False),
    "committed": ("commit", False),
}
#: The same of a job in pieces.
PIECES: Final = {
    "begun": ("open", False),
    "stored": ("finish", True),
    "ended": ("finish", False),
}
#: The same of a job in pieces with a cold tier, with its class, and whether the far messages are there then.
TIERS: Final = {
    "begun": (PieceWriter, "open", False, False),
    "written": (ColdTier, "register", True, False),
    "registering": (ColdTier, "register", False, False),
    "registered": (PieceWriter, "finish", True, True),
    "ended": (PieceWriter, "finish", False, True),
}
#: The same of a promotion.
PROMOTION: Final = {
    "begun": ("create", False),
    "promoted": ("promoted", True),
}
EXPORT: Final = {
    "written": ("finish", True),
    "removed": ("_finish", False),
    "finished": ("finish", False),
}


def scheduling(spark: SparkSession, step: str, target: JobTarget, source: str) -> None:
    name, before = COMMIT[step]
    kill_at(BulkWriter, name, before=before)
    schedule(source, target, hot_horizon=HOUR, run="campaign", atomic="job", spark=spark)


def scheduling_pieces(spark: SparkSession, step: str, target: JobTarget, source: str) -> None:
    name, before = PIECES[step]
    kill_at(PieceWriter, name, before=before)
    schedule(source, target, run="campaign", spark=spark)


def scheduling_tiers(spark: SparkSession, step: str, target: JobTarget, source: str) -> None:
    where, name, before, _ = TIERS[step]
    kill_at(where, name, before=before)
    schedule(source, target, hot_horizon=HOUR, run="campaign", spark=spark)


def promoting(spark: SparkSession, step: str, target: JobTarget) -> None:
    name, before = PROMOTION[step]
    kill_at(ColdFiles, name, before=before)
    promote(target, horizon=UNTIL - datetime.now(UTC), spark=spark)


def exporting(spark: SparkSession, step: str, target: JobTarget, path: str) -> None:
    name, before = EXPORT[step]
    kill_at(JournalExport, name, before=before)
    export(target, path, spark=spark)


def dispatching(spark: SparkSession, step: str, url: str) -> None:
    kill_at(DispatcherControl, step, before=False)
    Dispatcher(settings(StoreAt(url)), shards=1, spark=spark).run()
