"""The journal is exported in batches, each entry once; files of killed or superseded exports are ignored."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from tests.eventually import eventually
from tests.spark.stores import ENDPOINT, PAST, StoreAt, frame, many
from tests.spark.tiers import FIRST, spread

from delayline import BackendUnavailable, SqlDelayedMessageStore, SqlTransport
from delayline.bulk.journal_export import JournalExport
from delayline.delayed.store import Outcome
from delayline.errors import BackendUnusable
from delayline.spark import JobTarget, audit, export, read_journal, schedule, waiting_ids
from delayline.spark.journal import _export
from delayline.spark.options import StoreOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.spark.tiers import Tiers

    from delayline.spark import Totals


def journaled(store: StoreAt) -> JobTarget:
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing"]))
    return JobTarget(store.url, endpoint=ENDPOINT)


def rows(target: JobTarget, path: Path, spark: SparkSession) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_journal(target, path, spark=spark).orderBy("seq").toArrow().to_pylist()
    return found


@pytest.mark.slow
def test_events_are_exported_in_batches(spark: SparkSession, any_store: StoreAt, tmp_path: Path) -> None:
    # Given a job that has scheduled messages, which were exported
    target = journaled(any_store)
    schedule(many(spark, 500), target, spark=spark)
    assert export(target, tmp_path, entries_at_once=200, spark=spark).entries == 500
    # When one is cancelled and one has left, and that is exported
    any_store.put("due", due=PAST)
    assert any_store.run(lambda store: store.cancel("m7")) is Outcome.DONE
    any_store.run(lambda store: store.forward_due(PAST, 10, max_bytes=1000))
    second = export(target, tmp_path, spark=spark)
    # Then each entry was exported once, in order
    found = rows(target, tmp_path, spark)
    assert (second.entries, second.batches, len(found)) == (3, 1, 503)
    assert sorted(row["id"] for row in found[:500]) == sorted(f"m{number}" for number in range(500))
    assert [(row["event"], row["id"]) for row in found[500:]] == [
        ("scheduled", "due"),
        ("cancelled", "m7"),
        ("dispatched", "due"),
    ]
    assert {row["store"] for row in found} == {"sales.timeouts"}
    assert found[-1]["due"] == PAST and found[-1]["at"] > PAST
    assert export(target, tmp_path, spark=spark).entries == 0


@pytest.mark.slow
def test_messages_in_files_are_journaled_and_audited(spark: SparkSession, any_tiers: Tiers, tmp_path: Path) -> None:
    tiers = any_tiers
    journaled(tiers.hot)
    target, far = tiers.target, spread(spark, 40, hours=3)

    def events() -> Counter[str]:
        export(target, tmp_path, spark=spark)
        return Counter(row["event"] for row in rows(target, tmp_path, spark))

    def totals(until: datetime) -> Totals:
        entries = read_journal(target, tmp_path, spark=spark)
        waiting = waiting_ids(target, spark)
        with audit(entries, store="sales.timeouts", waiting=waiting, until=until) as found:
            return found.totals()

    # Given messages in both tiers, long due
    soon = datetime.now(UTC) + timedelta(minutes=5)
    assert tiers.schedule(far.union(frame(spark, "soon", due=[soon]))).cold == 40
    assert events() == {"scheduled": 41}
    late = totals(FIRST + timedelta(days=1))
    assert (late.scheduled, late.overdue, late.lost) == (41, 41, 0)
    # When some are cancelled and rescheduled in the files, and the rest is promoted
    assert tiers.cancel("m1") is Outcome.DONE
    assert tiers.run(lambda store: store.reschedule("m2", FIRST)) is Outcome.DONE
    assert tiers.promote(FIRST + timedelta(hours=4)).stored == 38
    # Then the journal says what happened to each, and nothing is counted twice
    assert events() == {"scheduled": 41, "cancelled": 1, "rescheduled": 1, "promoted": 38}
    after = totals(datetime.now(UTC))
    assert (after.scheduled, after.waiting, after.cancelled, after.lost, after.duplicated) == (41, 40, 1, 0, 0)


def test_what_nobody_dispatches_is_overdue_and_what_was_taken_away_lost(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given a message that falls due, and a journal without any later entry
    target = journaled(store)
    store.put("late", due=datetime.now(UTC) + timedelta(milliseconds=200))
    eventually(lambda: store.due() == ["late"])
    # When it is audited
    waiting = waiting_ids(target, spark).cache()
    assert waiting.count() == 1
    export(target, tmp_path, spark=spark)
    # Then it is overdue at the time when the pending messages were read
    store.put("sent since then", due=PAST)
    export(target, tmp_path, spark=spark)
    journal = read_journal(target, tmp_path, spark=spark)
    with audit(journal, store="sales.timeouts", waiting=waiting, patience=timedelta(0)) as found:
        totals = found.totals()
    assert (totals.entries, totals.overdue, totals.waiting, totals.lost, totals.clean) == (2, 1, 1, 0, False)
    # And when the store is emptied from outside, both are lost, though no pending message carries the time
    with psycopg.connect(store.url, autocommit=True) as connection:
        connection.execute('TRUNCATE "sales.timeouts"')
    with audit(journal, waiting=waiting_ids(target, spark), patience=timedelta(0)) as found:
        assert found.totals().lost == 2


def test_every_way_to_write_a_path_names_the_same_export(
    spark: SparkSession, store: StoreAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an export to a relative path, and one that an older delayline has recorded as it was given
    target = journaled(store)
    monkeypatch.chdir(tmp_path)
    store.put("a")
    export(target, "journal", spark=spark)
    store.put("b")
    export(target, "journal", spark=spark)
    with psycopg.connect(store.url, autocommit=True) as connection:
        connection.execute(
            "UPDATE delayline_journal_exports SET path = 'journal' WHERE directory = "
            "(SELECT directory FROM delayline_journal_exports ORDER BY finished LIMIT 1)"
        )
    # Then both are found by that path
    assert [row["id"] for row in rows(target, Path("journal"), spark)] == ["a", "b"]
    # And the one that has its place by any path, from anywhere
    monkeypatch.chdir("/")
    for path in (f"{tmp_path}/journal/", f"file://{tmp_path}/journal", f"{tmp_path}/x/../journal"):
        assert [row["id"] for row in read_journal(target, path, spark=spark).toArrow().to_pylist()] == ["b"]
    # And one of another folder by none: the older entry names no place of its own
    assert read_journal(target, "journal", spark=spark).count() == 0


def test_of_two_exports_of_the_same_entries_one_counts(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given two exporters that have seen the same entries
    target = journaled(store)
    store.put("a", "b")
    options = StoreOptions.of(target.options)
    journal = JournalExport(options.address)
    runs = journal.runs(100)
    # When both export them
    _export(options, journal, str(tmp_path), runs, 2, spark)
    with pytest.raises(BackendUnavailable, match="another process"):
        _export(options, journal, str(tmp_path), runs, 2, spark)
    # Then they are there once
    assert [row["id"] for row in rows(target, tmp_path, spark)] == ["a", "b"]


def test_files_of_a_killed_export_are_ignored(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    # Given an export that has written its files and died before it could say so
    target = journaled(store)
    store.put("a", "b")
    spark.createDataFrame([], read_journal(target, tmp_path, spark=spark).schema).write.parquet(
        str(tmp_path / "export-dead")
    )
    # When it is run again
    export(target, tmp_path, spark=spark)
    # Then only what counts is read
    assert [row["id"] for row in rows(target, tmp_path, spark)] == ["a", "b"]


def test_an_export_without_a_journal_raises_an_error_with_the_remedy(
    spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    with pytest.raises(BackendUnusable, match="--journal true"):
        export(JobTarget(store.url, endpoint=ENDPOINT), tmp_path, spark=spark)
