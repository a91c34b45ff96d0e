"""Bulk writing: a store gets the attempts that the driver names, once, in one transaction."""

from __future__ import annotations

import asyncio
import pickle
import threading
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pytest
from sqlalchemy import text

from delayline import BackendUnavailable, ConfigurationError, DuplicateMessage, TransactionMode
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import Committed, JobName, JobState, PieceCounts, PieceParameters
from delayline.bulk.pieces import PieceWriter
from delayline.bulk.whole_jobs import WholeJob
from delayline.bulk.writer import STREAMS, BulkWriter
from delayline.dashboard.jobs import schedules
from delayline.delayed.store import OnConflict
from delayline.errors import BackendUnusable, DifferentInput
from delayline.sql import SqlDelayedMessageStore
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy import Connection, Table

    from delayline import DelayedMessage

DUE = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
TABLE = "sales.timeouts"


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide the URL of a database with a store's table."""
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path / 'delayline.db'}"
    else:
        address = request.getfixturevalue(f"{request.param}_url")
    asyncio.run(SqlDelayedMessageStore(address).setup_infrastructure("sales"))
    return address


@pytest.fixture
def make_job(url: str) -> Callable[..., BulkWriter]:
    def make(name: str | None = None) -> BulkWriter:
        staging = BulkWriter(url, TABLE, name=name)
        staging.create()
        return staging

    return make


def rows(
    *ids: str,
    body: bytes | None = b"hello",
    due: datetime = DUE,
    headers: str | None = None,
    destination: str = "billing",
) -> pa.RecordBatch:
    columns = {
        "id": pa.array(ids, pa.string()),
        "destination": pa.array([destination] * len(ids), pa.string()),
        "due": pa.array([due] * len(ids), pa.timestamp("us", "UTC")),
        "headers": pa.array([headers] * len(ids), pa.string()),
        "body": pa.array([body] * len(ids), pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)


def named(name: str, fingerprint: Fingerprint | None = None, on_conflict: OnConflict = "raise") -> WholeJob:
    """Return a job of that name."""
    return WholeJob(JobName(name), PieceParameters(0, 0, on_conflict, at_once=True), fingerprint)


def batch_of(stream: str, number: int) -> WholeJob:
    """Return a batch of a stream."""
    return WholeJob(JobName(stream, number), PieceParameters(0, 0, "raise", stream=True, at_once=True))


async def empty(url: str) -> None:
    store = SqlDelayedMessageStore(url)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    for message in await store.pending(limit=1000):
        await store.cancel(message.id)
    await store.close()


def waiting(url: str) -> list[DelayedMessage]:
    async def look() -> list[DelayedMessage]:
        store = SqlDelayedMessageStore(url)
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        try:
            return list(await store.pending(limit=1000))
        finally:
            await store.close()

    return asyncio.run(look())


def ids(url: str) -> list[str]:
    return sorted(message.id for message in waiting(url))


def test_committed_messages_are_stored_unchanged(url: str, make_job: Callable[..., BulkWriter]) -> None:
    # Given a task with text of every kind, an empty and a large body, and due times at the edges
    job = make_job()
    headers = '{"naïve":"日本 🚀"}'
    early, late = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, 23, 59, 59, 999999, tzinfo=UTC)
    large = bytes(range(256)) * 8192
    attempt = job.write(
        [
            rows("a", headers=headers),
            rows("naïve 日本 🚀", body=None),
            rows("large", body=large),
            rows("late", due=late, body=b""),
        ]
        + ([rows("early", due=early)] if not url.startswith("mariadb") else [])
    )
    # When it is committed
    committed = job.commit([attempt])
    # Then it waits, byte for byte
    found = {message.id: message for message in waiting(url)}
    assert committed == Committed(stored=len(found)) and attempt.rows == len(found)
    assert (found["a"].message.headers, found["a"].message.body) == ({"naïve": "日本 🚀"}, b"hello")
    assert (found["a"].due, found["a"].destination) == (DUE, "billing")
    assert (found["naïve 日本 🚀"].message.body, found["naïve 日本 🚀"].message.headers) == (b"", {})
    assert found["large"].message.body == large
    assert (found["late"].due, found["late"].message.body) == (late, b"")
    assert url.startswith("mariadb") or found["early"].due == early


def test_an_attempt_that_is_not_named_does_not_count(url: str, make_job: Callable[..., BulkWriter]) -> None:
    # Given a task that failed in the middle and one that repeated it
    job = make_job()
    job.write([rows("a")])
    whole = job.write([rows("a", "b")])
    # When the second is named
    assert job.commit([whole]).stored == 2
    # Then the first is nowhere
    assert ids(url) == ["a", "b"]


def test_a_task_after_the_end_of_its_job_is_refused(url: str, make_job: Callable[..., BulkWriter]) -> None:
    job = make_job()
    attempt = job.write([rows("a")])
    job.discard()
    with pytest.raises(BackendUnusable, match="job has ended"):
        job.write([rows("b")])
    with pytest.raises((BackendUnusable, BackendUnavailable)):
        job.commit([attempt])
    assert ids(url) == []


def test_a_job_without_rows_commits_nothing(url: str, make_job: Callable[..., BulkWriter]) -> None:
    job = make_job()
    assert job.commit([job.write([]), job.write([rows()])]) == Committed(0)
    assert make_job().commit([]) == Committed(0)
    assert ids(url) == []


def test_an_id_that_waits_already_fails_the_whole_job_and_is_named(
    url: str, make_job: Callable[..., BulkWriter]
) -> None:
    first, second = make_job(), make_job()
    first.commit([first.write([rows("a")])])
    with pytest.raises(DuplicateMessage, match=r"'a' waits already.*nothing was stored"):
        second.commit([second.write([rows("b", "a")])], job=named("second"))
    assert ids(url) == ["a"]
    # And the run is free to be run again
    third = make_job()
    assert third.commit([third.write([rows("b")])], job=named("second")) == Committed(1)


def test_an_id_that_comes_twice_fails_the_whole_job(url: str, make_job: Callable[..., BulkWriter]) -> None:
    job = make_job()
    with pytest.raises(DuplicateMessage, match="'b'"):
        job.commit([job.write([rows("a", "b")]), job.write([rows("b")])])
    assert ids(url) == []


def test_ignore_keeps_pending_messages_and_counts_the_rest(url: str, make_job: Callable[..., BulkWriter]) -> None:
    first, second = make_job(), make_job()
    first.commit([first.write([rows("a", body=b"first")])])
    attempts = [second.write([rows("a", "b", "b", body=b"second")]), second.write([rows("c", "b")])]
    assert second.commit(attempts, on_conflict="keep") == Committed(2, duplicates=3)
    assert {one.id: one.message.body for one in waiting(url)}["a"] == b"first"
    assert ids(url) == ["a", "b", "c"]


def test_replace_takes_the_new_content_and_due_time(url: str, make_job: Callable[..., BulkWriter]) -> None:
    first, second = make_job(), make_job()
    first.commit([first.write([rows("a", "other", body=b"first")])])
    later = DUE + timedelta(days=1)
    attempt = second.write([rows("a", "b", "b", body=b"second", due=later, headers='{"x":"y"}')])
    second.commit([attempt], on_conflict="replace")
    found = {one.id: one for one in waiting(url)}
    assert (found["a"].due, found["a"].message.body, found["a"].message.headers) == (later, b"second", {"x": "y"})
    assert (found["other"].due, found["other"].message.body) == (DUE, b"first")
    assert sorted(found) == ["a", "b", "other"]


def test_a_message_in_a_poller_is_not_replaced(url: str, make_job: Callable[..., BulkWriter]) -> None:
    # Given a message that a poller is dispatching and will remove by its id
    due = datetime(2020, 1, 1, tzinfo=UTC)
    first, second = make_job(), make_job()
    first.commit([first.write([rows("a", "b", body=b"first", due=due)])])

    async def replace_while_fetched() -> None:
        store = SqlDelayedMessageStore(url)
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        [message] = await store.fetch_due(datetime.now(UTC), 1, max_bytes=1000)
        # When a job replaces it
        attempt = second.write([rows("a", "b", body=b"second")])
        await asyncio.to_thread(second.commit, [attempt], on_conflict="replace")
        await store.remove(message)
        await store.close()

    asyncio.run(replace_while_fetched())
    # Then the other one is replaced, and nothing that the job has stored is removed
    assert [one.message.body for one in waiting(url)] == [b"second"]


@pytest.mark.parametrize("on_conflict", ["keep", "replace"])
def test_of_rows_with_one_id_the_one_due_first_is_kept(
    url: str, make_job: Callable[..., BulkWriter], on_conflict: OnConflict
) -> None:
    # Given ids that come several times, in different tasks: due at different times, or equal up to some column
    soon, long = DUE - timedelta(microseconds=1), b"x" * 3000
    first = [
        rows("time", body=b"kept", due=soon),
        rows("destination", body=b"z", destination="Billing"),
        rows("headers", body=b"z", headers='{"a":"1"}'),
        rows("body", body=long + b"a"),
        rows("alone"),
    ]
    others = [
        rows("time", body=b"a"),
        rows("destination", body=b"a"),
        rows("headers", body=b"a", headers='{"b":"1"}'),
        rows("body", body=long + b"b"),
    ]
    same = rows("same", "same", "same")
    kept = []
    for swapped in (False, True):
        batches = [*others, *first] if swapped else [*first, *others]
        job = make_job()
        attempts = [job.write([*batches[:3], same]), job.write([]), job.write([same, *batches[3:]])]
        # When they are stored
        committed = job.commit(attempts, on_conflict=on_conflict)
        # Then one of each is, whatever the order
        assert (committed.stored, committed.duplicates) == (6, 9)
        kept.append({one.id: one.message.body for one in waiting(url)})
        asyncio.run(empty(url))
    alike = {"time": b"kept", "destination": b"z", "headers": b"z", "alone": b"hello", "same": b"hello"}
    assert kept[0] == kept[1]
    assert {name: body for name, body in kept[0].items() if name != "body"} == alike


def test_a_run_that_is_run_again_does_nothing(url: str, make_job: Callable[..., BulkWriter]) -> None:
    first, second = make_job(), make_job()
    assert first.committed(JobName("nightly")) is None
    first.commit([first.write([rows("a")], rejected=lambda: 2)], job=named("nightly"))
    again = second.commit([second.write([rows("a", "b")])], job=named("nightly"))
    assert again == Committed(1, rejected=2, repeated=True)
    assert second.committed(JobName("nightly")) == Committed(1, rejected=2)
    assert ids(url) == ["a"]


def test_a_name_is_kept_with_its_input(url: str, make_job: Callable[..., BulkWriter]) -> None:
    # Given a run that has committed
    first, again, other = make_job(), make_job(), make_job()
    first.commit([first.write([rows("a")])], job=named("nightly", Fingerprint.of(rows("a"))))
    # Then the same rows are taken for a repetition, and others are refused with the name
    repeated = again.commit([again.write([rows("a")])], job=named("nightly", Fingerprint.of(rows("a"))))
    assert repeated.repeated
    with pytest.raises(DifferentInput, match=r"the run 'nightly' .* it had 1 rows, and this input has 2"):
        other.commit([other.write([rows("b", "c")])], job=named("nightly", Fingerprint.of(rows("b", "c"))))
    with pytest.raises(DifferentInput, match="the rows of this input have other ids"):
        other.commit([other.write([rows("b")])], job=named("nightly", Fingerprint.of(rows("b"))))
    changed = other.write([rows("a", body=b"changed")])
    seen = Fingerprint.of(rows("a", body=b"changed"))
    assert other.commit([changed], job=named("nightly", seen, "keep"), on_conflict="keep").repeated
    with pytest.raises(DifferentInput, match="the rows of this input have other contents"):
        other.commit([changed], job=named("nightly", seen, "replace"), on_conflict="replace")
    # And a stream with the name of a job is refused, and a job in pieces
    with pytest.raises(ConfigurationError, match="'nightly' has begun without the batches of a stream"):
        other.commit([changed], job=batch_of("nightly", 0))
    begun_in_pieces = PieceWriter(url, TABLE).open(JobName("weekly"), PieceParameters(0, 8, "keep")).name
    with pytest.raises(ConfigurationError, match="'weekly' has begun in pieces, and not with all rows at once"):
        other.committed(begun_in_pieces)
    with pytest.raises(ConfigurationError, match="'weekly' has begun in pieces, and not with all rows at once"):
        other.commit([changed], job=named("weekly"))
    assert ids(url) == ["a"]


def test_a_job_is_listed_with_those_in_pieces(url: str, make_job: Callable[..., BulkWriter]) -> None:
    # Given a job in pieces, and one with all rows at once, some of which have gone to a cold tier
    pieces = PieceWriter(url, TABLE)
    pieces.finish(pieces.open(JobName("weekly"), PieceParameters(0, 8, "keep")).number)
    job, cold = make_job(), PieceCounts(cold=5, duplicates=2)
    whole = named("nightly")
    whole = whole._replace(parameters=replace(whole.parameters, has_cold_tier=True))
    done = job.commit([job.write([rows("a")], rejected=lambda: 1)], job=whole, beside=cold)
    assert done == Committed(1, duplicates=2, rejected=1, cold=5) == make_job().committed(JobName("nightly"))
    # Then both are listed, as by the command and the dashboard
    listed = {job.name.name: job for job in pieces.jobs(10)}
    assert set(listed) == {"nightly", "weekly"}
    assert (listed["nightly"].state, listed["nightly"].committed) == (JobState.DONE, done)
    dialect = database_at(url).dialect
    table = dialect.catalog.store_table(TABLE, None)
    with dialect.connections.look() as connection:
        shown = {row.name: row for row in schedules(connection, dialect, table.schema, store=table)}
    assert set(shown) == set(listed)
    assert (shown["nightly"].state, shown["nightly"].total, shown["nightly"].done) == ("done", 9, 6)
    assert shown["nightly"].details == {"cold": "5", "duplicates": "2", "rejected": "1"}


def test_a_streams_batch_is_refused_after_a_later_one(url: str, make_job: Callable[..., BulkWriter]) -> None:
    """As from a checkpoint that was restored from a backup: its next batches have other rows."""
    first, second, old = (make_job(STREAMS) for _ in range(3))
    for batch, job in enumerate((first, second)):
        job.commit([job.write([rows(f"{batch}")])], job=batch_of("loader", batch))
    with pytest.raises(DifferentInput, match="batch 0 of 'loader' comes after batch 1 was stored"):
        old.commit([old.write([rows("other")])], job=batch_of("loader", 0))
    assert ids(url) == ["0", "1"]


def test_of_two_drivers_of_one_run_one_commits(url: str, make_job: Callable[..., BulkWriter]) -> None:
    jobs = [make_job() for _ in range(4)]
    attempts = [job.write([rows(f"{number}")]) for number, job in enumerate(jobs)]
    results: list[Committed] = []

    def commit(job: BulkWriter, number: int) -> None:
        results.append(job.commit([attempts[number]], job=named("shared")))

    threads = [threading.Thread(target=commit, args=(job, number)) for number, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.repeated for one in results) == [False, True, True, True]
    assert len(ids(url)) == 1


def test_a_streams_batch_is_committed_once_and_batches_go_on(url: str, make_job: Callable[..., BulkWriter]) -> None:
    first, again, second = (make_job(STREAMS) for _ in range(3))
    others = again.write([rows("c")])
    first.commit([first.write([rows("a")])], job=batch_of("loader", 0))
    # When the batch comes again, as after a crash between our commit and the stream's
    assert again.commit([again.write([rows("a")])], job=batch_of("loader", 0)).repeated
    # Then it is not stored again, and the next one is, and what another stream has staged is left to it
    assert not second.commit([second.write([rows("b")])], job=batch_of("loader", 1)).repeated
    assert ids(url) == ["a", "b"]
    assert again.commit([others], job=batch_of("another", 0)) == Committed(1)


def test_the_pre_commit_hook_shares_the_transaction(url: str, make_job: Callable[..., BulkWriter]) -> None:
    job, failing = make_job(), make_job()
    seen: list[int | None] = []

    def without_b(connection: Connection, staged: Table) -> None:
        connection.execute(staged.delete().where(staged.c.id == "b"))

    def refuse(connection: Connection, staged: Table) -> None:
        seen.append(connection.execute(text("SELECT 1")).scalar())
        raise LookupError("another one was faster")

    job.commit([job.write([rows("a", "b")])], pre_commit=without_b)
    with pytest.raises(LookupError, match="faster"):
        failing.commit([failing.write([rows("c")])], job=named("failing"), pre_commit=refuse)
    assert ids(url) == ["a"] and seen == [1]
    assert failing.committed(JobName("failing")) is None


def test_a_poller_that_sleeps_is_woken_by_the_commit(url: str, make_job: Callable[..., BulkWriter]) -> None:
    async def wait_for_it() -> datetime:
        store = SqlDelayedMessageStore(url, poll_interval=timedelta(milliseconds=50))
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        woken: asyncio.Queue[datetime] = asyncio.Queue()
        stop = store.on_stored(woken.put_nowait)
        soon = datetime.now(UTC) + timedelta(seconds=30)
        job = await asyncio.to_thread(make_job)
        attempts = [job.write([rows("later", due=DUE)]), job.write([rows("soon", due=soon)])]
        await asyncio.to_thread(job.commit, attempts)
        async with asyncio.timeout(10):
            while (due := await woken.get()) != soon:
                pass
        stop()
        await store.close()
        return due

    assert asyncio.run(wait_for_it()) > datetime.now(UTC)


def test_a_commit_inside_a_running_event_loop_works(url: str, make_job: Callable[..., BulkWriter]) -> None:
    async def in_a_notebook() -> Committed:
        job = make_job()
        return job.commit([job.write([rows("a")])])

    assert asyncio.run(in_a_notebook()) == Committed(1)


def test_jobs_are_pickled_without_their_connections(url: str, make_job: Callable[..., BulkWriter]) -> None:
    job = make_job()
    job.write([rows("b")])
    copy = pickle.loads(pickle.dumps(job))  # noqa: S301 - our own
    assert job.commit([copy.write([rows("a")])]).stored == 1


def test_only_staging_areas_of_old_jobs_are_swept(url: str, make_job: Callable[..., BulkWriter]) -> None:
    # Given a job that died long ago, one that is running, and a stream
    running, stream = make_job(), make_job(STREAMS)
    dead = BulkWriter(url, TABLE, name="delayline_stage_202001010000_0123456789ab")
    dead.create()
    # When another one begins
    make_job()
    # Then only the dead one's is gone
    assert running.write([rows("a")]).rows == stream.write([rows("b")]).rows == 1
    with pytest.raises(BackendUnusable, match="job has ended"):
        dead.write([rows("c")])


def test_a_store_that_is_not_set_up_is_refused_before_any_task(url: str) -> None:
    with pytest.raises(BackendUnusable, match="delayline setup"):
        BulkWriter(url, "nobody.timeouts").create()


@pytest.mark.parametrize("run", ["", "  ", "x" * 251, "a\nb"])
def test_names_of_runs_that_could_not_be_kept_are_refused(tmp_path: Path, run: str) -> None:
    with pytest.raises(ConfigurationError, match="printable characters"):
        BulkWriter(f"sqlite:///{tmp_path / 'x.db'}", TABLE).commit([], job=named(run))


def test_rows_that_the_server_has_lost_are_missed(
    postgresql_url: str, make_postgresql_job: Callable[..., BulkWriter]
) -> None:
    """An unlogged table is empty after a crash of the server."""
    job = make_postgresql_job()
    attempt = job.write([rows("a", "b")])
    with psycopg.connect(postgresql_url) as connection:
        connection.execute(f'TRUNCATE "{job.name}"')
    with pytest.raises(BackendUnavailable, match="0 of 2 staged rows: it has crashed"):
        job.commit([attempt], job=named("lost"))
    assert ids(postgresql_url) == []
    assert job.committed(JobName("lost")) is None


def test_a_zombie_that_still_writes_does_not_stop_the_end_of_its_job(
    postgresql_url: str, make_postgresql_job: Callable[..., BulkWriter]
) -> None:
    # Given a late task in the middle of its copy, and one that has finished
    job = make_postgresql_job()
    named = job.write([rows("a")])
    begun, ended = threading.Event(), threading.Event()

    def slowly() -> Iterator[pa.RecordBatch]:
        yield rows("zombie")
        yield rows("zombie")
        begun.set()
        ended.wait(60)

    zombie = threading.Thread(target=lambda: job.write(slowly()))
    zombie.start()
    begun.wait(60)
    # When the job commits
    assert job.commit([named]).stored == 1
    ended.set()
    zombie.join()
    # Then only the named attempts are stored
    assert ids(postgresql_url) == ["a"]


@pytest.fixture
def make_postgresql_job(postgresql_url: str) -> Callable[..., BulkWriter]:
    asyncio.run(SqlDelayedMessageStore(postgresql_url).setup_infrastructure("sales"))

    def make() -> BulkWriter:
        staging = BulkWriter(postgresql_url, TABLE)
        staging.create()
        return staging

    return make


def test_a_server_that_is_not_there_is_an_error() -> None:
    job = BulkWriter(f"postgresql://nobody@127.0.0.1:1/{uuid.uuid4().hex}", TABLE)
    with pytest.raises(BackendUnavailable, match="cannot reach PostgreSQL"):
        job.create()
    with pytest.raises(BackendUnavailable, match="cannot reach PostgreSQL"):
        job.write([rows("a")])
