"""Jobs over a map of shards: an audit sees all of them, and a shard that does not answer is named."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from tests.conftest import running
from tests.eventually import eventually
from tests.integration.delta_reader import ids_in_table
from tests.servers.postgresql import PostgresqlServer
from tests.spark.driver_process import run_until_killed
from tests.spark.killed_drivers import PIECES, scheduling_pieces
from tests.spark.sharded import NAMES, Shards, divided
from tests.spark.stores import ENDPOINT, PAST, StoreAt, frame, many

from delayline import BackendUnavailable, ConfigurationError, TransactionMode
from delayline.bulk import ShardedTwoTierStore
from delayline.errors import BackendUnusable, DifferentInput
from delayline.shards import ShardMapOutdated
from delayline.spark import (
    Promoted,
    audit,
    export,
    promote,
    read_journal,
    schedule,
    schedule_stream,
    waiting_ids,
    write_report,
)
from delayline.spark.errors import translated_errors
from delayline.spark.placement import PlacementJob
from delayline.spi import Outcome
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from click.testing import Result
    from pyspark.sql import SparkSession

NUMBER: Final = 200


@pytest.fixture
def unsafe_server() -> Iterator[PostgresqlServer]:
    """Provide a server that the test may stop."""
    with running(PostgresqlServer, "fsync=off") as server:
        yield server


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def forward(store: StoreAt) -> None:
    store.run(lambda opened: opened.forward_due(datetime.now(UTC), 100, max_bytes=1000))


def before_any_pieces(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have this done once, when a job comes to the pieces of its first shard and before it stores those of any."""
    place, lock, done = PlacementJob.place_pieces, Lock(), Event()

    def place_after_it(*arguments: Any) -> Any:  # noqa: ANN401 - as the original
        with lock:  # shards are worked on side by side
            if not done.is_set():
                act()
                done.set()
        return place(*arguments)

    monkeypatch.setattr(PlacementJob, "place_pieces", place_after_it)


def test_an_audit_is_over_the_journals_of_all_shards(spark: SparkSession, shards: Shards, tmp_path: Path) -> None:
    # Given messages in every shard, of which one has left two of them under the same id
    for name, store in shards.stores.items():
        store.put("same", f"of {name}", due=PAST)
        if name != "three":
            forward(store)
    # When the journal is exported and audited
    waiting = waiting_ids(shards.target, spark).cache()
    assert waiting.count() == 2
    assert export(shards.target, tmp_path / "journal", spark=spark).entries == 10
    journal = read_journal(shards.target, tmp_path / "journal", spark=spark)
    with audit(journal, store="sales.timeouts", waiting=waiting) as found:
        totals = write_report(found, tmp_path / "report.html")
        by_shard = found.by_shard
        assert by_shard is not None
        left = {row["shard"]: row["messages"] for row in by_shard.toArrow().to_pylist()}
    # Then each shard's messages count for themselves, also those of one id
    assert (totals.scheduled, totals.dispatched, totals.overdue) == (6, 4, 2)
    assert (totals.lost, totals.duplicated) == (0, 0)
    assert left == {"one": 2, "two": 2, "three": 0}
    assert "By shard" in (tmp_path / "report.html").read_text()
    # And a message that is nowhere is lost, though one of its id waits in another shard
    shards.stores["two"].put("lost", due=PAST)
    shards.stores["one"].put("lost", due=PAST)
    shards.stores["two"].run(lambda store: store.cancel("lost"))
    export(shards.target, tmp_path / "journal", spark=spark)
    journal = read_journal(shards.target, tmp_path / "journal", spark=spark).where("event <> 'cancelled'")
    with audit(journal, store="sales.timeouts", waiting=waiting_ids(shards.target, spark)) as found:
        assert [(row["id"], row["shard"]) for row in found.lost.toArrow().to_pylist()] == [("lost", "two")]
    # And pending messages of no known shard are refused, as they could hide it
    with pytest.raises(ConfigurationError, match="no column shard"):
        audit(journal, store="sales.timeouts", waiting=waiting.drop("shard"))
    # And of arrivals nobody knows the shard: those of an id count together
    arrived = journal.where("id = 'same'").groupBy("shard", "id").agg({"due": "max"}).selectExpr("id", "`max(due)` at")
    with audit(journal.where("id = 'same'"), store="sales.timeouts", delivered=arrived) as found:
        totals = found.totals()
        assert (totals.scheduled, totals.dispatched, totals.duplicated, totals.lost) == (3, 1, 0, 0)


def test_an_audit_of_a_shard_that_is_down_fails_and_names_it(
    spark: SparkSession, unsafe_server: PostgresqlServer, tmp_path: Path
) -> None:
    del spark
    # Given shards with a message each, and a server that stops
    shards = Shards(tmp_path, {"one": f"sqlite:///{tmp_path / 'one.db'}", "two": unsafe_server.new_database()})
    for store in shards.stores.values():
        store.put("m")
    unsafe_server.kill()
    # When they are audited
    result = shards.command("spark", "audit", str(tmp_path / "journal"), "--json")
    # Then the error names the shard, for its messages are unknown
    assert result.exit_code == 1 and "shard two (" in document(result)["error"]["text"], result.output
    with pytest.raises(BackendUnavailable, match=r"^shard two \("):
        export(shards.target, tmp_path / "journal")
    # And once it is back, all of them are audited, those that were exported too
    unsafe_server.start()
    result = shards.command("spark", "audit", str(tmp_path / "journal"), "--json")
    assert (document(result)["scheduled"], document(result)["waiting"]) == (2, 2), result.output


def test_rows_are_scheduled_where_first_sends_go_each_once(spark: SparkSession, shards: Shards, tmp_path: Path) -> None:
    # Given a file with a message that waits already, and rows that cannot be messages
    ids = [f"m{number}" for number in range(NUMBER)]
    shards.stores[shards.map.shard_of("m7")].put("m7")
    file = tmp_path / "rows.csv"
    lines = [f"{key},billing,2090-01-01T00:00:00Z" for key in ids]
    file.write_text("\n".join(["id,destination,due", *lines, "bad,billing,soon", ",billing,2090-01-01T00:00:00Z", ""]))
    # When it is scheduled over the shards
    words = ("spark", "schedule", str(file), "--run", "nightly", "--json")
    done = document(shards.command(*words))
    # Then each shard has what an endpoint would have sent there, and the counts are those of all
    assert (done["stored"], done["duplicates"], done["rejected"], done["repeated"]) == (NUMBER - 1, 1, 2, False)
    assert sorted((row["line"], row["id"]) for row in done["rejected_rows"]) == [
        (NUMBER + 2, "bad"),
        (NUMBER + 3, None),
    ]
    assert shards.ids() == divided(ids, shards.map) and all(shards.ids().values())
    # And each shard has the job, which is done
    jobs = document(shards.command("spark", "jobs", "--json"))["jobs"]
    assert sorted((job["shard"], job["job"], job["state"]) for job in jobs) == sorted(
        (name, "nightly", "done") for name in NAMES
    )
    assert {job["shard"]: job["stored"] + job["duplicates"] for job in jobs} == {
        name: len(belongs) for name, belongs in divided(ids, shards.map).items()
    }
    assert sum(job["stored"] for job in jobs) == NUMBER - 1
    assert "shard" in shards.command("spark", "jobs").stdout
    # And again it stores nothing, also what has left meanwhile
    left = shards.stores["one"].ids()[0]
    shards.stores["one"].run(lambda store: store.cancel(left))
    again = document(shards.command(*words))
    assert (again["stored"], again["repeated"]) == (NUMBER - 1, True)
    assert sum(map(len, shards.ids().values())) == NUMBER - 1
    # And other rows under its name are refused
    with pytest.raises(DifferentInput, match=r"^shard \w+ \("):
        schedule(many(spark, NUMBER), shards.target, run="nightly", spark=spark)


def test_a_shard_that_is_held_up_holds_up_no_other(spark: SparkSession, shards: Shards) -> None:
    # Given a shard in which nothing can be stored for now
    rows, ids = many(spark, NUMBER), [f"m{number}" for number in range(NUMBER)]
    belongs = divided(ids, shards.map)
    target = replace(shards.target, max_connections=1)
    with ThreadPoolExecutor(1) as thread, psycopg.connect(shards.urls["one"]) as connection:
        connection.execute(f'LOCK TABLE "{ENDPOINT}.timeouts" IN EXCLUSIVE MODE')
        # When a job begins
        job = thread.submit(schedule, rows, target, spark=spark)
        # Then the others have their rows, and it has its own once it can
        eventually(lambda: job.done() or shards.ids() == {**belongs, "one": []}, "the other shards have their rows")
        assert not job.done()
        connection.rollback()
        assert job.result().stored == NUMBER
    assert shards.ids() == belongs


def test_what_belongs_to_a_shard_that_stops_is_stored_when_the_job_goes_on(
    spark: SparkSession, unsafe_server: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given shards, of which one stops after the job has begun in it
    shards = Shards(tmp_path, {"one": unsafe_server.new_database(), "two": f"sqlite:///{tmp_path / 'two.db'}"})
    rows, ids = many(spark, NUMBER), [f"m{number}" for number in range(NUMBER)]
    belongs = divided(ids, shards.map)
    before_any_pieces(monkeypatch, unsafe_server.kill)
    # When the job runs
    with pytest.raises(BackendUnavailable, match=r"^shard one \(.*on two is done: run the job 'nightly' again"):
        schedule(rows, shards.target, run="nightly", spark=spark)
    # Then the other shard has its rows
    assert shards.stores["two"].ids() == belongs["two"]
    # And while it is down, the job names it and begins nothing
    with pytest.raises(BackendUnavailable, match=r"^shard one \("):
        schedule(rows, shards.target, run="other", spark=spark)
    assert shards.stores["two"].ids() == belongs["two"]
    # And once it is back the job goes on as it began, though there is one more shard
    unsafe_server.start()
    shards.urls["three"] = f"sqlite:///{tmp_path / 'three.db'}"
    shards.write(2, dict.fromkeys(shards.urls, "active"))
    shards.set_up()
    shards.stores["three"] = StoreAt(shards.urls["three"])
    done = schedule(rows, shards.target, run="nightly", spark=spark)
    assert (done.stored, done.duplicates) == (NUMBER, 0)
    assert shards.ids() == {**belongs, "three": []}
    # And a job with the map before is refused, as what it stores could be looked for in vain
    shards.write(1, {"one": "active", "two": "active"})
    with pytest.raises(ShardMapOutdated, match="version 2 is in use"):
        schedule(rows, shards.target, run="third", spark=spark)


@pytest.mark.slow
def test_a_driver_that_is_killed_at_any_step_stores_each_row_once(
    spark: SparkSession, shards: Shards, tmp_path: Path
) -> None:
    # Given a job whose drivers are killed, each when the first of its shards comes to a later step
    source = str(tmp_path / "source.parquet")
    many(spark, NUMBER).write.parquet(source)
    belongs = divided([f"m{number}" for number in range(NUMBER)], shards.map)
    for step in PIECES:
        run_until_killed(spark, scheduling_pieces, step, shards.target, source)
        stored = shards.ids()
        assert all(set(stored[name]) <= set(belongs[name]) for name in NAMES), (step, stored)
        if step == "begun":
            assert not any(stored.values()), stored
        else:
            assert any(stored[name] == belongs[name] for name in NAMES), (step, stored)
    # When it is run again
    done = schedule(source, shards.target, run="campaign", spark=spark)
    # Then every row is stored, once
    assert (done.stored, done.duplicates, done.repeated) == (NUMBER, 0, False)
    assert shards.ids() == belongs


class ColdShards:
    """Shards with a cold tier, to which a job has been scheduled with far messages only."""

    def __init__(self, shards: Shards, spark: SparkSession) -> None:
        self.shards = shards
        self.folder = shards.folder / "cold"
        self.target = replace(shards.target, cold_tier=str(self.folder))
        self.rows = many(spark, NUMBER)
        self.spark = spark
        self.scheduled = schedule(self.rows, self.target, run="nightly", spark=spark)

    def run(self, work: Callable[[ShardedTwoTierStore], Awaitable[Any]]) -> Any:  # noqa: ANN401 - what it returns
        """Run something on the open store."""

        async def opened() -> Any:  # noqa: ANN401
            store = ShardedTwoTierStore(self.shards.map, cold_tier=str(self.folder))
            await store.initialize(ENDPOINT, TransactionMode.RECEIVE_ONLY)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(opened())

    def command(self, *words: str) -> Result:
        """Run a command on them."""
        return self.shards.command(*words, "--cold-tier", str(self.folder))

    def promote(self) -> Promoted:
        """Promote all messages."""
        return promote(self.target, horizon=datetime(2090, 1, 1, tzinfo=UTC) - datetime.now(UTC), spark=self.spark)


def test_far_messages_wait_in_the_cold_tier_of_their_shard(spark: SparkSession, shards: Shards) -> None:
    # Given a job whose messages are all far
    cold = ColdShards(shards, spark)
    ids = [f"m{number}" for number in range(NUMBER)]
    belongs = divided(ids, shards.map)
    # Then they wait in files, and are seen, counted and found over all shards
    assert (cold.scheduled.stored, cold.scheduled.cold) == (0, NUMBER) and not any(shards.ids().values())
    assert sorted(message.id for message in cold.run(lambda store: store.pending(limit=NUMBER))) == sorted(ids)
    edges = [datetime(2020, 1, 1, tzinfo=UTC)]
    assert [bucket.count for bucket in cold.run(lambda store: store.cold_forecast(edges)).buckets] == [0, NUMBER]
    waiting = waiting_ids(cold.target, spark).groupBy("shard").count().toArrow().to_pylist()
    assert {row["shard"]: row["count"] for row in waiting} == {name: len(belongs[name]) for name in NAMES}
    # And they are cancelled and moved wherever they are
    assert cold.command("cancel", "m7").exit_code == 0
    assert cold.run(lambda store: store.reschedule("m8", PAST)) is Outcome.DONE
    assert shards.stores[shards.map.shard_of("m8")].ids() == ["m8"]
    # And with a newer map, by which half of the ids belong elsewhere, none is stored twice
    shards.urls["four"] = f"sqlite:///{shards.folder / 'four.db'}"
    shards.write(2, dict.fromkeys(shards.urls, "active"))
    shards.set_up()
    shards.stores["four"] = StoreAt(shards.urls["four"])
    more = schedule(cold.rows.where("id <> 'm7'"), cold.target, run="again", spark=spark)
    assert (more.stored, more.cold, more.duplicates) == (0, 0, NUMBER - 1)
    # And they are promoted each to the store of its shard, once
    done = cold.promote()
    assert (done.stored, done.cancelled, done.duplicates) == (NUMBER - 2, 2, 0)
    assert {name: sorted({*ids}) for name, ids in shards.ids().items()} == {
        **{name: [key for key in of_shard if key != "m7"] for name, of_shard in belongs.items()},
        "four": [],
    }
    assert cold.promote().files == 0


def test_the_cold_tiers_of_shards_are_compacted_and_kept_as_one_table(spark: SparkSession, shards: Shards) -> None:
    # Given two jobs with messages of the same hours, and a Delta log
    cold = ColdShards(shards, spark)
    more = cold.rows.selectExpr("'x' || id AS id", "destination", "due", "headers", "body")
    schedule(more, cold.target, run="more", spark=spark)
    assert cold.command("spark", "delta", "--json").exit_code == 0
    # When it is compacted
    done = document(cold.command("spark", "compact", "--json"))
    # Then the files of each shard have been merged, and the table has the messages of all
    assert (done["before"], done["after"]) == (6, 3)
    assert len(ids_in_table(cold.folder)) == 2 * NUMBER
    # And the command promotes them all
    horizon = ("--horizon", f"{(datetime(2090, 1, 1, tzinfo=UTC) - datetime.now(UTC)).days}d")
    assert document(cold.command("spark", "promote", *horizon, "--json"))["stored"] == 2 * NUMBER
    assert sum(map(len, shards.ids().values())) == 2 * NUMBER


def test_a_shard_that_is_down_is_promoted_once_it_is_back(
    spark: SparkSession, unsafe_server: PostgresqlServer, tmp_path: Path
) -> None:
    # Given shards with far messages, one of which stops
    shards = Shards(tmp_path, {"one": unsafe_server.new_database(), "two": f"sqlite:///{tmp_path / 'two.db'}"})
    belongs = divided([f"m{number}" for number in range(NUMBER)], shards.map)
    cold = ColdShards(shards, spark)
    unsafe_server.kill()
    # When they are promoted
    with pytest.raises(BackendUnavailable, match=r"^shard one \(.*The work on two is done"):
        cold.promote()
    # Then the other has its messages, and the shard once it is back
    assert shards.stores["two"].ids() == belongs["two"]
    unsafe_server.start()
    assert cold.promote().stored == len(belongs["one"])
    assert shards.ids() == belongs
    # And a shard whose messages are in files only is not removed
    schedule(cold.rows.selectExpr("'x' || id AS id", "destination", "due"), cold.target, run="x", spark=spark)
    for name in shards.ids()["one"]:
        shards.stores["one"].run(partial(SqlDelayedMessageStore.cancel, message_id=name))
    shards.write(2, {"one": "draining", "two": "active"})
    shards.set_up()
    shards.write(3, {"one": "removed", "two": "active"})
    with pytest.raises(ConfigurationError, match=r"still has \d+ messages"):
        shards.set_up()


def test_a_job_ends_when_a_newer_map_is_in_use_and_goes_on_with_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job during which a shard is added
    shards = Shards(tmp_path, {name: f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")})
    rows, belongs = many(spark, NUMBER), divided([f"m{number}" for number in range(NUMBER)], shards.map)

    def add_three() -> None:
        shards.urls["three"] = f"sqlite:///{tmp_path / 'three.db'}"
        shards.write(2, dict.fromkeys(shards.urls, "active"))
        shards.set_up()

    before_any_pieces(monkeypatch, add_three)
    # When its tasks are to store rows, then they do not, for nobody may look in these shards any more
    with pytest.raises(BackendUnusable, match=r"^shard one \(.*version 2 is in use"):
        schedule(rows, shards.target, run="nightly", spark=spark)
    assert shards.ids() == {"one": [], "two": []}
    # And with the newer map it goes on, and divides its rows as before
    assert schedule(rows, shards.target, run="nightly", spark=spark).stored == NUMBER
    assert shards.ids() == belongs


def test_ids_that_wait_by_an_earlier_map_are_kept(spark: SparkSession, tmp_path: Path) -> None:
    # Given messages in a shard that is drained, and another that new ids belong to
    urls = {name: f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")}
    shards = Shards(tmp_path, {"one": urls["one"]})
    shards.stores["one"].put("a", "b")
    shards.urls = urls
    shards.write(2, {"one": "draining", "two": "active"})
    shards.set_up()
    shards.stores["two"] = StoreAt(urls["two"])
    # When they are scheduled again with a new one
    done = schedule(frame(spark, "a", "b", "c"), shards.target, spark=spark)
    # Then they are noticed where they wait, as an endpoint does
    assert (done.stored, done.duplicates) == (1, 2)
    assert shards.ids() == {"one": ["a", "b"], "two": ["c"]}
    # And they are not replaced, as that is another transaction
    with pytest.raises(ConfigurationError, match=r"^shard two \(.*'a' waits in another shard"):
        schedule(frame(spark, "a"), shards.target, on_conflict="replace", spark=spark)
    done = schedule(frame(spark, "c"), shards.target, on_conflict="replace", spark=spark)
    assert (done.stored, shards.ids()["two"]) == (1, ["c"])


def test_batches_of_a_stream_are_divided_among_shards(spark: SparkSession, shards: Shards, tmp_path: Path) -> None:
    # Given rows in files
    rows = many(spark, NUMBER)
    rows.write.parquet(str(tmp_path / "rows"))
    # When they are streamed, and once more from another checkpoint
    for checkpoint in ("first", "second"):
        stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows"))
        place = tmp_path / checkpoint
        query = schedule_stream(stream, shards.target, checkpoint=place, trigger={"availableNow": True})
        assert query.awaitTermination(120)
    # Then each shard has its rows, once
    assert shards.ids() == divided([f"m{number}" for number in range(NUMBER)], shards.map)


def test_a_read_is_over_all_shards(spark: SparkSession, shards: Shards, tmp_path: Path) -> None:
    # Given a message in each shard
    for name, store in shards.stores.items():
        store.put(f"of {name}", destination="billing" if name == "two" else "other")
    options = {"url": shards.url, "endpoint": ENDPOINT}
    reading = spark.read.format("delayed_messages").options(**options)
    # When they are read, all or some
    for pushes in ("false", "true"):
        read = reading.option("filterPushdown", pushes).load()
        # Then they are there
        assert sorted(read.toArrow().column("id").to_pylist()) == ["of one", "of three", "of two"]
        assert read.where("destination = 'billing'").select("id").toArrow().to_pylist() == [{"id": "of two"}]
    assert reading.option("dueTo", "2020-01-01T00:00:00Z").load().count() == 0
    # And what takes a single store says so
    write = frame(spark, "a").write.format("delayed_messages").mode("append").options(**options)
    with pytest.raises(ConfigurationError, match="names a map of shards"), translated_errors():
        write.save()
    stream = spark.readStream.format("delayed_messages").options(**options, app="a").load()
    with pytest.raises(ConfigurationError, match="names a map of shards"), translated_errors():
        stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination(60)


@pytest.mark.parametrize(
    ("job", "more", "said"),
    [
        ({"on_conflict": "raise"}, {}, "all or nothing"),
        ({"atomic": "job"}, {}, "all or nothing"),
        ({}, {"delay_levels": "amqp://me@broker/orders"}, "delay_levels"),
        ({}, {"job_folder": "/jobs"}, "job_folder"),
        ({}, {"schema": "sales"}, "give each shard of the map its own schema"),
    ],
)
def test_what_is_not_to_be_had_over_shards_is_refused(
    spark: SparkSession, tmp_path: Path, job: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    shards = Shards(tmp_path, {"one": f"sqlite:///{tmp_path / 'one.db'}"})
    with pytest.raises(ConfigurationError, match=said):
        schedule(frame(spark, "a"), replace(shards.target, **more), spark=spark, **job)
    assert shards.ids() == {"one": []}


def test_dispatching_by_spark_says_that_it_takes_a_single_store(spark: SparkSession, tmp_path: Path) -> None:
    del spark
    shards = Shards(tmp_path, {"one": f"sqlite:///{tmp_path / 'one.db'}"})
    result = shards.command("spark", "dispatch", "--shards", "1")
    assert result.exit_code == 2 and "map of shards" in result.stderr, result.output
