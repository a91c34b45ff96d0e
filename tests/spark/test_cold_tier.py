"""Scheduling into two tiers and promoting: every message is in one place, and leaves it once."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from sqlalchemy import update
from tests.eventually import eventually
from tests.spark.stores import DUE, frame
from tests.spark.test_failures import in_java, in_python, once
from tests.spark.tiers import FIRST, HOUR, spread

from delayline import ConfigurationError, DelaylineError, DuplicateMessage
from delayline.bulk.cold_folder import ColdFolder
from delayline.errors import BackendUnusable
from delayline.spark import JobTarget, Promoted, promote, promote_every, promote_stream
from delayline.spi import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection
    from tests.spark.tiers import Tiers

NUMBER = 2000
#: The module, not the function of its name.
COMPACTING: Any = import_module("delayline.spark.compact")


def ids(number: int = NUMBER, prefix: str = "m") -> list[str]:
    return sorted(f"{prefix}{one}" for one in range(number))


def test_far_messages_are_stored_in_files_and_promoted_once(spark: SparkSession, any_tiers: Tiers) -> None:
    tiers = any_tiers
    # Given messages of which one is near
    soon = datetime.now(UTC) + timedelta(minutes=5)
    data = spread(spark, NUMBER, hours=5).union(frame(spark, "soon", due=[soon]))
    done = tiers.schedule(data)
    assert (done.stored, done.cold, done.duplicates, done.rejected) == (1, NUMBER, 0, 0)
    assert tiers.hot.ids() == ["soon"]
    assert tiers.ids() == sorted([*ids(), "soon"])
    # When near messages are promoted, hour by hour, and once more
    first = tiers.promote(FIRST + HOUR)
    again = tiers.promote(FIRST + HOUR)
    # Then whole hours have moved, and everything waits in one place
    assert 0 < first.stored < NUMBER and again == Promoted()
    hot = set(tiers.hot.ids())
    cold = [message for message in tiers.messages() if message.id not in hot]
    assert cold and min(message.due for message in cold) >= (FIRST + HOUR).replace(minute=0, second=0)
    assert tiers.ids() == sorted([*ids(), "soon"])
    rest = tiers.promote(datetime.max.replace(tzinfo=UTC))
    assert first.stored + rest.stored == NUMBER
    assert tiers.hot.ids() == sorted([*ids(), "soon"])
    # And is unchanged
    found = {message.id: message for message in tiers.hot.messages()}
    assert found["m7"].due == FIRST + timedelta(seconds=7 * 7919 % (5 * 3600))
    assert (found["m7"].message.body, found["m7"].destination) == (b"7", "shipping")


def test_a_run_that_is_run_again_changes_nothing_however_near_its_messages_have_come(
    spark: SparkSession, tiers: Tiers
) -> None:
    first = tiers.schedule(spread(spark, 100, hours=2), run="campaign")
    again = tiers.schedule(spread(spark, 100, hours=2), run="campaign", hot_horizon=timedelta(days=20_000))
    assert (first.cold, again.cold, again.stored, again.repeated) == (100, 100, 0, True)
    assert tiers.hot.ids() == []
    assert tiers.ids() == ids(100)


@pytest.mark.slow
def test_ids_that_wait_in_either_tier_are_left_as_they_are(spark: SparkSession, tiers: Tiers) -> None:
    # Given an id that waits in files, and one that waits in the store
    tiers.schedule(frame(spark, "cold"))
    tiers.hot.put("hot", due=DUE)
    # When they come again, with one that comes twice
    done = tiers.schedule(frame(spark, "cold", "hot", "new", "new"))
    # Then only the new one is held, once
    assert (done.stored, done.cold, done.duplicates) == (0, 1, 3)
    assert tiers.ids() == ["cold", "hot", "new"]
    with pytest.raises(DuplicateMessage, match="'cold' waits already"):
        tiers.schedule(frame(spark, "cold", "other"), on_conflict="raise")
    with pytest.raises(ConfigurationError, match="cannot replace messages in a cold tier"):
        tiers.schedule(frame(spark, "cold"), on_conflict="replace")
    assert tiers.ids() == ["cold", "hot", "new"]


def test_rows_that_cannot_be_messages_are_rejected_wherever_they_would_go(spark: SparkSession, tiers: Tiers) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    data = frame(spark, "a", "b", "", "d", due=[soon, DUE, DUE, None], headers=["{", "{}", "{}", "{}"])
    done = tiers.schedule(data)
    assert (done.stored, done.cold, done.rejected) == (0, 1, 3)
    assert sorted(row["reason"][:7] for row in done.rejected_rows.toArrow().to_pylist()) == [
        "due is ",
        "headers",
        "id must",
    ]


def test_nothing_to_schedule_and_nothing_to_promote(spark: SparkSession, any_tiers: Tiers) -> None:
    assert any_tiers.promote(FIRST) == Promoted()
    done = any_tiers.schedule(spread(spark, 0, hours=1))
    assert (done.stored, done.cold) == (0, 0)
    assert any_tiers.promote(FIRST) == Promoted()
    assert (any_tiers.compact().before, any_tiers.files()) == (0, [])


@pytest.mark.slow
def test_late_arrivals_for_an_hour_already_promoted_are_promoted(spark: SparkSession, tiers: Tiers) -> None:
    until = FIRST + 3 * HOUR
    tiers.schedule(spread(spark, 100, hours=2))
    assert tiers.promote(until).stored == 100
    tiers.schedule(spread(spark, 50, hours=2, prefix="late"))
    assert tiers.promote(until).stored == 50
    assert tiers.hot.ids() == sorted([*ids(100), *ids(50, "late")])


@pytest.mark.slow
def test_cancelled_messages_are_not_promoted(spark: SparkSession, any_tiers: Tiers) -> None:
    tiers = any_tiers
    tiers.schedule(spread(spark, 100, hours=2))
    assert tiers.cancel("m1") is Outcome.DONE
    assert tiers.cancel("m2") is Outcome.DONE
    moved = tiers.promote(FIRST + 3 * HOUR)
    assert (moved.stored, moved.duplicates, moved.cancelled) == (98, 0, 2)
    assert tiers.hot.ids() == sorted(set(ids(100)) - {"m1", "m2"})
    # And once promoted it is cancelled in the store
    assert tiers.cancel("m3") is Outcome.DONE
    assert len(tiers.hot.ids()) == 97


@pytest.mark.slow
def test_two_promoters_at_once_move_everything_once(spark: SparkSession, tiers: Tiers) -> None:
    tiers.schedule(spread(spark, NUMBER, hours=6))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: tiers.promote(FIRST + 7 * HOUR), range(2)))
    assert sum(one.stored for one in both) == NUMBER
    assert sum(one.duplicates for one in both) == 0
    assert tiers.hot.ids() == ids()


@pytest.mark.slow
def test_compaction_merges_the_files_of_an_hour_and_loses_nothing(
    spark: SparkSession, any_tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = any_tiers
    for prefix in ("a", "b", "c"):
        tiers.schedule(spread(spark, 60, hours=1, prefix=prefix))
    tiers.cancel("a1")
    before = tiers.tier.files()[0]
    # When a message is cancelled while files are merged
    merged = COMPACTING._merged

    def then_cancelled(*arguments: Any) -> Any:  # noqa: ANN401 - as it takes
        done = merged(*arguments)
        assert tiers.cancel("b2") is Outcome.DONE
        return done

    monkeypatch.setattr(COMPACTING, "_merged", then_cancelled)
    done = tiers.compact()
    # Then there is a file an hour, and neither message comes back
    files, dead = tiers.tier.files()
    assert len(files) == len({one.due_hour for one in before}) < len(before)
    assert (done.before, done.after) == (len(before), len(files))
    assert sum(one.messages for one in files) == 179 and list(dead.values()) == [["b2"]]
    expected = sorted({f"{prefix}{number}" for prefix in "abc" for number in range(60)} - {"a1", "b2"})
    assert tiers.ids() == expected
    assert tiers.compact().before == 0
    assert tiers.promote(FIRST + 3 * HOUR).stored == 178
    assert tiers.hot.ids() == expected


@pytest.mark.slow
def test_a_compaction_that_is_overtaken_by_a_promotion_changes_nothing(
    spark: SparkSession, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prefix in ("a", "b"):
        tiers.schedule(spread(spark, 60, hours=1, prefix=prefix))
    merged = COMPACTING._merged

    def then_promoted(*arguments: Any) -> Any:  # noqa: ANN401 - as it takes
        done = merged(*arguments)
        tiers.promote(FIRST + 3 * HOUR)
        return done

    monkeypatch.setattr(COMPACTING, "_merged", then_promoted)
    assert tiers.compact().before == 0
    assert tiers.hot.ids() == tiers.ids() == sorted([*ids(60, "a"), *ids(60, "b")])
    assert tiers.tier.files() == ([], {})


def test_only_unregistered_files_are_swept_after_a_day(spark: SparkSession, tiers: Tiers) -> None:
    tiers.schedule(spread(spark, 60, hours=2))
    [file, *others] = tiers.files()
    long_ago = datetime.now(UTC).timestamp() - 90_000
    tier = file.name.partition("-")[0]
    strays = [file.with_name(name) for name in (f"{tier}-old.parquet", f"{tier}-young.parquet", "theirs.parquet")]
    for stray in strays:
        stray.write_bytes(b"left by a task that was killed")
    for old in (file, strays[0], strays[2]):
        os.utime(old, (long_ago, long_ago))
    assert tiers.ids() == ids(60)
    assert tiers.compact().deleted == 1
    assert [stray.exists() for stray in strays] == [False, True, True]
    assert tiers.promote(FIRST + 3 * HOUR).stored == 60
    # And files that were promoted stay for a day
    assert file.exists() and all(other.exists() for other in others)
    catalog = tiers.tier.catalog
    ago = catalog._dialect.values.in_seconds(-90_000)
    tiers.tier.write(lambda connection: connection.execute(update(catalog.tables.files).values(changed=ago)))
    tiers.promote(FIRST + 3 * HOUR)
    assert not file.exists() and not any(other.exists() for other in others)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("upstream", ["python", "java"])
def test_a_job_that_fails_for_good_holds_nothing(spark: SparkSession, tiers: Tiers, upstream: str) -> None:
    data = spread(spark, NUMBER, hours=2)
    failing = in_python(data, lambda: True) if upstream == "python" else in_java(data)
    with pytest.raises(DelaylineError, match="fails on purpose"):
        tiers.schedule(failing, run="nightly")
    assert tiers.ids() == []
    assert tiers.schedule(spread(spark, 100, hours=2), run="nightly").cold == 100


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_a_task_that_fails_once_holds_its_messages_once(spark: SparkSession, tiers: Tiers, tmp_path: Path) -> None:
    data = in_python(spread(spark, NUMBER, hours=2), once(tmp_path / "failed"))
    assert tiers.schedule(data).cold == NUMBER
    assert (tmp_path / "failed").exists()
    assert tiers.promote(FIRST + 3 * HOUR).stored == NUMBER
    assert tiers.hot.ids() == ids()


def test_due_times_at_the_edges_whatever_the_sessions_time_zone(spark: SparkSession, tiers: Tiers) -> None:
    edges = {
        "begins": FIRST.replace(minute=0, second=0),
        "ends": FIRST.replace(minute=59, second=59, microsecond=999_999),
        "last": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    }
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        tiers.schedule(frame(spark, *edges, due=pa.array(edges.values(), pa.timestamp("us", "UTC"))))
        assert len(tiers.files()) == 2
        assert tiers.promote(edges["begins"] + timedelta(milliseconds=1)).stored == 2
        assert tiers.promote(datetime.max.replace(tzinfo=UTC)).stored == 1
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert {message.id: message.due for message in tiers.hot.messages()} == edges


@pytest.mark.slow
def test_promoting_again_and_again_until_stopped(spark: SparkSession, tiers: Tiers, tmp_path: Path) -> None:
    tiers.schedule(spread(spark, 50, hours=1))
    horizon = FIRST + 2 * HOUR - datetime.now(UTC)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            promote_every, tiers.target, timedelta(milliseconds=50), until=stop, horizon=horizon, spark=spark
        )
        while len(tiers.hot.ids()) < 50 and not running.done():
            stop.wait(0.1)
        stop.set()
        assert running.result(100).stored == 50
    # And as a query
    tiers.schedule(spread(spark, 50, hours=1, prefix="q"))
    query = promote_stream(
        tiers.target, timedelta(milliseconds=50), checkpoint=tmp_path / "checkpoint", horizon=horizon, spark=spark
    )
    try:
        waited = threading.Event()
        while len(tiers.hot.ids()) < 100 and query.isActive:
            waited.wait(0.1)
        assert query.exception() is None
    finally:
        query.stop()
    assert tiers.hot.ids() == sorted([*ids(50), *ids(50, "q")])


@pytest.mark.slow
def test_usage_errors_are_reported_in_one_line(spark: SparkSession, tiers: Tiers, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the cold tier is missing: "):
        promote(JobTarget(tiers.hot.url, endpoint="sales"), spark=spark)
    with pytest.raises(ConfigurationError, match="longer than half of horizon"):
        promote_every(tiers.target, timedelta(hours=13), until=threading.Event(), spark=spark)
    (tmp_path / "file").touch()
    blocked = JobTarget(tiers.hot.url, endpoint="sales", cold_tier=str(tmp_path / "file"))
    with pytest.raises(BackendUnusable, match="Check that the folder can be read and written"):
        type(tiers)(tiers.hot, tmp_path / "file", spark).schedule(frame(spark, "a"))
    assert promote(blocked, spark=spark) == Promoted()
    tiers.schedule(frame(spark, "a"))
    elsewhere = JobTarget(tiers.hot.url, endpoint="sales", cold_tier=str(tmp_path / "elsewhere"))
    with pytest.raises(BackendUnusable, match="name the folder of the cold tier"):
        promote(elsewhere, horizon=DUE + HOUR - datetime.now(UTC), spark=spark)
    assert tiers.promote(DUE + HOUR).stored == 1


def spoiled(files: list[Path]) -> dict[Path, bytes]:
    """Make files unreadable, and return what they had."""
    before = {file: file.read_bytes() for file in files}
    for file in files:
        file.write_bytes(b"not Parquet")
    return before


def test_the_ids_of_a_job_cost_what_it_writes(spark: SparkSession, tiers: Tiers) -> None:
    # Given messages in both tiers
    tiers.schedule(spread(spark, 10_000, hours=3))
    tiers.schedule(spread(spark, 5000, hours=3, prefix="hot"), hot_horizon=timedelta(days=100_000))
    with psycopg.connect(tiers.url, autocommit=True) as admin:
        admin.execute('VACUUM ANALYZE "sales.timeouts"')
        # When some more come, of which a few wait already, while no file can be read
        before = spoiled(tiers.files())
        read_before = rows_read(admin)
        done = tiers.schedule(
            frame(spark, *[f"new{number}" for number in range(10)], "m1", "m9999", "hot7", "m1"), run="more"
        )
        # Then it is known without the files, and few rows of the store were read
        assert (done.cold, done.duplicates) == (10, 4)
        eventually(lambda: rows_read(admin) - read_before >= 1)
        assert rows_read(admin) - read_before < 1000
    # And a message that is in one file is found while the others cannot be read
    [place] = [path for path, content in before.items() if has_id(content, "m17")]
    place.write_bytes(before[place])
    assert tiers.cancel("m17") is Outcome.DONE
    assert tiers.cancel("m17") is Outcome.NOT_PENDING
    assert tiers.cancel("nobody") is Outcome.NOT_PENDING


def rows_read(admin: psycopg.Connection[Any]) -> int:
    """Return how many rows of the store have been read in its whole life, from the table or from an index alone."""
    row = admin.execute(
        "SELECT coalesce((SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname = 'sales.timeouts'), 0)"
        " + coalesce((SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'sales.timeouts'), 0)"
    ).fetchone()
    return 0 if row is None else int(row[0])


def has_id(content: bytes, message_id: str) -> bool:
    return message_id in pq.read_table(pa.BufferReader(content), columns=["id"]).column(0).to_pylist()


def test_compaction_merges_the_indexes_of_ids(spark: SparkSession, tiers: Tiers) -> None:
    # Given the messages of two jobs, one cancelled, and files whose ids were never indexed, as an older delayline's are
    tiers.schedule(spread(spark, 100, hours=3))
    tiers.schedule(spread(spark, 100, hours=3, prefix="old"))
    tiers.cancel("m1")
    unindex(tiers, "old")
    assert tiers.cancel("old1") is Outcome.DONE
    tiers.promote(FIRST + HOUR)
    # When they are merged
    assert tiers.compact().before > 0
    # Then there is a single index, which has all ids
    snapshot = tiers.tier.read(tiers.tier.catalog.ids_snapshot)
    assert (len(snapshot.indexes), snapshot.others) == (1, [])
    assert snapshot.indexes[0].entries == len(set(tiers.ids()) - set(tiers.hot.ids()))
    again = spread(spark, 100, hours=3).union(spread(spark, 100, hours=3, prefix="old"))
    assert tiers.schedule(again).duplicates == 198
    # And each can be cancelled, wherever it is, but for those that are
    outcomes = {key: tiers.cancel(key) for key in ("m5", "old5", "m6", "old6")}
    assert set(outcomes.values()) == {Outcome.DONE}
    tiers.compact()
    assert {tiers.cancel(key) for key in outcomes} == {Outcome.NOT_PENDING}


def unindex(tiers: Tiers, prefix: str) -> None:
    """Take the ids of files out of the index."""
    tables, folder = tiers.tier.catalog.tables, ColdFolder(str(tiers.folder))
    files, _ = tiers.tier.files()
    names = [file.name for file in files if next(folder.batches(file)).column("id")[0].as_py().startswith(prefix)]

    def change(connection: Connection) -> None:
        connection.execute(update(tables.files).where(tables.files.c.name.in_(names)).values(indexed=None))
        indexes = tiers.tier.catalog.ids_snapshot(connection).indexes
        ours = [
            index.name
            for index in indexes
            if pc.all(
                pc.is_in(
                    folder.ids_of_buckets(index.name, 0, 255).column("file").cast(pa.string()),
                    value_set=pa.array(names),
                )
            ).as_py()
        ]
        tiers.tier.catalog.retire_ids(connection, ours)

    tiers.tier.write(change)
