"""An audit reports lost, doubled and early messages, the lateness of the others, and the forecast."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from delayline import ConfigurationError
from delayline.spark import audit, write_report
from delayline.spark.audit import COMPRESSED
from delayline.spark.journal import ENTRIES

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

DUE = datetime(2026, 5, 1, 9, 30, tzinfo=UTC)
STORE = "sales.timeouts"


def second(number: float) -> datetime:
    return DUE + timedelta(seconds=number)


#: Event, message, and time in seconds relative to the due time; None for messages due much later.
STORY: list[tuple[str, str, float, float]] = [
    ("scheduled", "on time", -60, 0),
    ("dispatched", "on time", 0.010, 0),
    ("scheduled", "late", -60, 0),
    ("retried", "late", 0.5, 2),
    ("dispatched", "late", 3, 2),
    ("scheduled", "early", -60, 0),
    ("dispatched", "early", -1, 0),
    ("scheduled", "twice", -60, 0),
    ("dispatched", "twice", 0.1, 0),
    ("dispatched", "twice", 0.2, 0),
    ("scheduled", "lost", -60, 0),
    ("scheduled", "overdue", -60, 0),
    ("scheduled", "bad", -60, 0),
    ("failed", "bad", 1, 0),
    ("scheduled", "called off", -60, 0),
    ("cancelled", "called off", -30, 0),
    ("scheduled", "moved", -60, 0),
    ("rescheduled", "moved", -30, 7200),
    ("dispatched", "from before", 0.02, 0),
    ("scheduled", "again", -600, -500),
    ("dispatched", "again", -499, -500),
    ("scheduled", "again", -400, 90_000),
]


@pytest.fixture
def journal(spark: SparkSession) -> DataFrame:
    entries = [
        {
            "seq": place,
            "store": STORE,
            "event": event,
            "id": identity,
            "destination": "billing",
            "due": second(due),
            "at": second(at),
            "retries": 0,
        }
        for place, (event, identity, at, due) in enumerate(STORY)
    ]
    other = {**entries[0], "seq": 1000, "store": "purchases.timeouts"}
    kinds = [("seq", pa.int64()), ("store", pa.string()), ("event", pa.string()), ("id", pa.string())]
    kinds += [("destination", pa.string()), ("due", pa.timestamp("us", "UTC")), ("at", pa.timestamp("us", "UTC"))]
    table = pa.Table.from_pylist([*entries, other], pa.schema([*kinds, ("retries", pa.int32())]))
    frame = spark.createDataFrame(table)
    assert frame.schema == ENTRIES
    return frame


def ids(spark: SparkSession, *names: str) -> DataFrame:
    return spark.createDataFrame(pa.table({"id": pa.array(names, pa.string())}))


def names(frame: DataFrame) -> list[str]:
    return sorted(row["id"] for row in frame.toArrow().to_pylist())


@pytest.mark.slow
def test_every_message_gets_its_verdict(spark: SparkSession, journal: DataFrame) -> None:
    waiting = ids(spark, "overdue", "moved", "again")
    with audit(journal, store=STORE, waiting=waiting, until=second(600)) as found:
        verdicts = {row["id"]: row["verdict"] for row in found.messages.toArrow().to_pylist()}
        assert verdicts == {
            "on time": "dispatched",
            "late": "dispatched",
            "early": "dispatched",
            "twice": "dispatched",
            "lost": "lost",
            "overdue": "overdue",
            "bad": "failed",
            "called off": "cancelled",
            "moved": "waiting",
            "from before": "dispatched",
            "again": "waiting",
        }
        assert (names(found.lost), names(found.duplicated), names(found.early)) == (["lost"], ["twice"], ["early"])
        totals = found.totals()
        assert (totals.scheduled, totals.dispatched, totals.waiting, totals.overdue) == (11, 5, 2, 1)
        assert (totals.lost, totals.duplicated, totals.early, totals.retries) == (1, 1, 1, 1)
        assert not totals.clean
        # Lateness counts from when it was to leave, not from the end of a pause between attempts
        assert totals.lateness["longest"] == pytest.approx(3)
        [by_destination] = found.by_destination.toArrow().to_pylist()
        assert (by_destination["messages"], by_destination["failed"], by_destination["retries"]) == (5, 1, 1)
        forecast = [(row["hour"], row["count"]) for row in found.forecast.toArrow().to_pylist()]
        hours = [DUE.replace(minute=0), DUE.replace(hour=11, minute=0), DUE.replace(day=2, hour=10, minute=0)]
        assert forecast == [(hour, 1) for hour in hours]
        assert {row["event"] for row in found.errors.toArrow().to_pylist()} == {"retried", "failed"}


def test_messages_that_came_due_just_now_are_not_lost(journal: DataFrame) -> None:
    with audit(journal, store=STORE, until=second(30), patience=timedelta(minutes=1)) as found:
        assert names(found.lost) == []


def test_what_spark_caches_for_others_is_compressed_as_before(spark: SparkSession, journal: DataFrame) -> None:
    """Given a session that compresses what it caches, or does not, when a journal is audited, then it stays so."""
    for compressed in ("true", "false"):
        spark.conf.set(COMPRESSED, compressed)
        try:
            with audit(journal, store=STORE):
                assert spark.conf.get(COMPRESSED) == compressed
        finally:
            spark.conf.unset(COMPRESSED)


def test_an_entry_without_a_due_time_hides_none(spark: SparkSession, journal: DataFrame) -> None:
    """Given a damaged entry without a due time after others, when audited, then the due time before it counts."""
    damaged = journal.where("id = 'lost'").selectExpr(
        "seq + 500 AS seq", "store", "'rescheduled' AS event", "id", "destination", "CAST(NULL AS TIMESTAMP) AS due",
        "at", "retries",
    )  # fmt: skip
    with audit(journal.unionByName(damaged), store=STORE, until=second(600)) as found:
        assert "lost" in names(found.lost)


def test_recorded_arrivals_are_audited(spark: SparkSession, journal: DataFrame) -> None:
    # Given a receiver that got one message twice, one before its time, and one never
    arrivals = [("late", 4.0), ("late", 5.0), ("early", -2.0), ("on time", 0.5)]
    table = pa.table(
        {
            "id": pa.array([identity for identity, _ in arrivals]),
            "at": pa.array([second(at) for _, at in arrivals], pa.timestamp("us", "UTC")),
        }
    )
    # When the audit is given the recorded arrivals
    with audit(journal, store=STORE, delivered=spark.createDataFrame(table), until=second(600)) as found:
        # Then that counts, and not what left the store
        assert names(found.duplicated) == ["late"]
        assert names(found.early) == ["early"]
        assert "twice" in names(found.lost)
    with pytest.raises(ConfigurationError, match="store="):
        audit(journal, delivered=spark.createDataFrame(table))
    with pytest.raises(ConfigurationError, match="at TIMESTAMP"):
        audit(journal, store=STORE, delivered=ids(spark, "late"))


@pytest.mark.slow
def test_a_report_is_one_page_without_any_other(spark: SparkSession, journal: DataFrame, tmp_path: Path) -> None:
    # Given a message whose id would be markup
    hostile = journal.limit(1).selectExpr(
        "seq + 500 AS seq", "store", "event", "'<script>alert(1)</script>' AS id", "destination", "due", "at", "retries"
    )
    page = tmp_path / "report.html"
    # When the report is written
    with audit(journal.unionByName(hostile), store=STORE, until=second(600)) as found:
        totals = write_report(found, page, title="Sales & more")
    # Then it is whole, safe and self-contained
    text = page.read_text()
    assert totals.lost == 3 and "Sales &amp; more" in text and "&lt;script&gt;" in text
    assert "<script" not in text and "http" not in text and "src=" not in text
    for part in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")  # noqa: S314 - ours
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_an_empty_journal_is_not_clean(spark: SparkSession, journal: DataFrame, tmp_path: Path) -> None:
    with audit(spark.createDataFrame([], ENTRIES)) as found:
        totals: Any = write_report(found, tmp_path / "report.html")
    assert (totals.entries, totals.scheduled, totals.until, totals.lateness["p50"]) == (0, 0, None, None)
    assert not totals.clean and totals.faults[0].startswith("the journal has no entries, so nothing was audited")
    assert "the journal has no entries" in (tmp_path / "report.html").read_text()
    # Nor is one that has entries of other stores only
    with audit(journal, store="sale.timeouts") as found:
        assert not found.totals().clean


def test_overdue_messages_are_a_fault_above_a_limit(spark: SparkSession, journal: DataFrame) -> None:
    story, waiting = journal.where("id = 'overdue'"), ids(spark, "overdue")
    for most, clean in ((0, False), (1, True)):
        with audit(story, store=STORE, waiting=waiting, until=second(600), maximum_overdue=most) as found:
            totals = found.totals()
        assert (totals.entries, totals.overdue, totals.clean) == (1, 1, clean)
    assert totals.faults == []
    with pytest.raises(ConfigurationError, match="maximum_overdue must be a whole number of 0 or more, not -1"):
        audit(story, maximum_overdue=-1)
