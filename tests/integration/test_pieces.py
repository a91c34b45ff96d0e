"""Jobs in pieces: each piece is stored once, whichever attempts store it, and the ledger knows what was done."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import psycopg
import pytest
from sqlalchemy.engine import make_url
from tests.eventually import eventually
from tests.integration.test_staging import DUE, TABLE, empty, ids, rows, url, waiting

from delayline import ConfigurationError, SqlDelayedMessageStore, TransactionMode
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName, JobPieces, JobState, PieceCounts, PieceParameters
from delayline.bulk.pieces import PieceRows, PieceWriter
from delayline.errors import BackendUnusable, DifferentInput
from delayline.sql.databases import database_at
from delayline.sql.postgresql.staging import PostgresqlStage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa
    from sqlalchemy import Connection
    from tests.servers.postgresql import PostgresqlServer

    from delayline.bulk.jobs import Job
    from delayline.delayed.store import OnConflict

__all__ = ["url"]
ROWS: Final = {"a": 1, "b": 1, "c": 2, "d": 4}


@pytest.fixture
def writer(url: str) -> PieceWriter:
    return PieceWriter(url, TABLE)


def begun(writer: PieceWriter, name: str = "nightly", on_conflict: OnConflict = "keep") -> Job:
    return writer.open(JobName(name), PieceParameters(0, 8, on_conflict))


def piece_rows(pieces: dict[str, int], *, rejected: tuple[int, ...] = (), body: bytes = b"hello") -> PieceRows:
    """Return messages with their pieces, and rejected rows."""
    of_rows = [*pieces.values(), *rejected]
    inputs = {piece: Fingerprint(of_rows.count(piece), piece, 0) for piece in of_rows}
    each = np.array(list(pieces.values()), dtype=np.int32)
    return PieceRows(rows(*pieces, body=body), each, np.array(rejected), np.array([], dtype=np.int32), inputs)


def test_pieces_are_stored_and_the_job_keeps_their_sums(url: str, writer: PieceWriter) -> None:
    # Given a job, of which a message waits already
    other = begun(writer, "other")
    writer.store(other.number, piece_rows({"b": 0}), "keep")
    job = begun(writer)
    # When its pieces are stored, in two transactions
    first = writer.store(job.number, piece_rows(ROWS, rejected=(1, 4)), "keep")
    second = writer.store(job.number, piece_rows({"e": 5}), "keep")
    # Then each transaction counts its own
    assert (first.stored, first.duplicates, first.rejected) == (3, 1, 2)
    assert (second.stored, second.duplicates, second.rejected) == (1, 0, 0)
    assert ids(url) == ["a", "b", "c", "d", "e"]
    # And while the job is open it shows how far it is
    open_job = begun(writer)
    assert (open_job.number, open_job.state, open_job.pieces) == (job.number, JobState.OPEN, 4)
    assert (open_job.committed.stored, open_job.committed.duplicates, open_job.committed.rejected) == (4, 1, 2)
    assert set(writer.inputs(job.number)) == {1, 2, 4, 5}
    # And its end keeps the sums, and forgets the pieces
    for _ in range(2):
        done = writer.finish(job.number)
        assert (done.state, done.pieces, writer.inputs(job.number)) == (JobState.DONE, 0, {})
        assert (done.committed.stored, done.committed.duplicates, done.committed.rejected) == (4, 1, 2)
        assert Fingerprint.parse(done.committed.fingerprint or "") == Fingerprint(7, 1 + 2 + 4 + 5, 0)


def test_a_piece_that_another_attempt_has_stored_is_left_out(url: str, writer: PieceWriter) -> None:
    job = begun(writer)
    writer.store(job.number, piece_rows({"a": 1, "b": 1, "c": 2}), "keep")
    # Given that its messages have been dispatched meanwhile
    asyncio.run(empty(url))
    # When an attempt comes with these pieces and another one
    again = writer.store(job.number, piece_rows(ROWS, rejected=(2,)), "keep")
    # Then the other one alone is stored
    assert (again.stored, again.duplicates, again.rejected, ids(url)) == (1, 0, 0, ["d"])
    # And an attempt without a new piece stores nothing
    assert writer.store(job.number, piece_rows(ROWS), "keep").stored == 0
    assert ids(url) == ["d"]


def test_a_task_that_comes_after_the_end_of_its_job_stores_nothing(url: str, writer: PieceWriter) -> None:
    # Given a job that has ended, and whose messages have been dispatched since
    job = begun(writer).number
    writer.store(job, piece_rows(ROWS), "keep")
    writer.finish(job)
    asyncio.run(empty(url))
    # When a task that was thought to be dead comes with its pieces
    assert writer.store(job, piece_rows(ROWS), "keep") == PieceCounts()
    # Then no message is stored a second time
    assert (ids(url), begun(writer).committed.stored) == ([], len(ROWS))


def test_of_two_attempts_at_once_one_stores_each_piece(url: str, writer: PieceWriter) -> None:
    job = begun(writer).number

    def attempt(number: int) -> int:
        return (
            PieceWriter(url, TABLE)
            .store(job, piece_rows({f"{number}-{piece}": piece for piece in range(8)}), "keep")
            .stored
        )

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(attempt, range(3))) == 8
    assert writer.finish(job).committed.stored == len(ids(url)) == 8


def test_the_far_messages_of_a_job_are_registered_once(url: str, writer: PieceWriter) -> None:
    # Given a job whose near messages are stored, and a driver that failed while it registered the far ones
    job, counts, registered = begun(writer).number, PieceCounts(cold=3, duplicates=1), list[int]()
    writer.store(job, piece_rows(ROWS), "keep")
    database = database_at(url)
    ledger = JobPieces(database.dialect, database.dialect.catalog.store_table(TABLE, None))

    def fail() -> None:
        raise LookupError("fails on purpose")

    async def record(register: Callable[[], object]) -> bool:
        database = database_at(url)
        await database.open()
        try:
            return await database.write(partial(ledger.record_far, job=job, counts=counts, register=register))
        finally:
            await database.close()

    with pytest.raises(LookupError, match="fails on purpose"):
        asyncio.run(record(fail))
    assert not writer.has_far(job)
    # When several drivers register them at once
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda number: asyncio.run(record(partial(registered.append, number))), range(3)))
    # Then one has, which all know, and the counts are those of the job
    assert (sorted(done), len(registered), writer.has_far(job)) == ([False, False, True], 1, True)
    assert set(writer.inputs(job)) == set(ROWS.values())
    for seen in (begun(writer), writer.finish(job), begun(writer)):
        assert (seen.committed.stored, seen.committed.cold, seen.committed.duplicates) == (len(ROWS), 3, 1)
    # And no driver that comes after the end of the job registers anything
    assert not asyncio.run(record(partial(registered.append, 3)))
    assert (len(registered), writer.has_far(job), writer.has_far(begun(writer, "another").number)) == (1, True, False)


def test_a_message_that_waits_is_replaced_where_the_job_says_so(url: str, writer: PieceWriter) -> None:
    writer.store(begun(writer, "old").number, piece_rows({"a": 1, "b": 2}, body=b"old"), "keep")
    job = begun(writer, on_conflict="replace")
    assert writer.store(job.number, piece_rows({"b": 2, "c": 3}, body=b"new"), "replace").stored == 2
    found = {message.id: message for message in waiting(url)}
    assert {name: message.message.body for name, message in found.items()} == {"a": b"old", "b": b"new", "c": b"new"}
    assert {message.due for message in found.values()} == {DUE}


def test_a_replaced_message_has_its_entries_in_the_journal(postgresql_url: str) -> None:
    # Given a store with a journal, and a message
    asyncio.run(SqlDelayedMessageStore(postgresql_url, journal=True).setup_infrastructure("sales"))
    writer = PieceWriter(postgresql_url, TABLE)
    writer.store(begun(writer, "old").number, piece_rows({"a": 1}, body=b"old"), "keep")
    # When it is replaced
    job = begun(writer, on_conflict="replace").number
    assert writer.store(job, piece_rows({"a": 1}, body=b"new"), "replace").stored == 1
    # Then it counts as scheduled once, and never as dispatched
    with psycopg.connect(postgresql_url) as connection:
        entries = connection.execute("SELECT event FROM delayline_journal ORDER BY seq").fetchall()
    assert ("scheduled",) in entries and ("dispatched",) not in entries
    assert [message.message.body for message in waiting(postgresql_url)] == [b"new"]


@pytest.mark.parametrize("on_conflict", ["keep", "replace"])
def test_a_message_that_comes_while_a_piece_is_copied_is_no_error(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, on_conflict: OnConflict
) -> None:
    # Given a piece of which a message waits already, and another that is stored elsewhere before the copy
    asyncio.run(SqlDelayedMessageStore(postgresql_url).setup_infrastructure("sales"))
    writer, other = PieceWriter(postgresql_url, TABLE), PieceWriter(postgresql_url, TABLE)
    writer.store(begun(writer, "old").number, piece_rows({"a": 1}, body=b"old"), "keep")
    append, copies = PostgresqlStage.append, list[int]()

    def interrupted(stage: PostgresqlStage, connection: Connection, batch: pa.RecordBatch) -> None:
        copies.append(batch.num_rows)
        if len(copies) == (2 if on_conflict == "keep" else 1):
            other.store(begun(other, "other").number, piece_rows({"b": 1}, body=b"other"), "keep")
        append(stage, connection, batch)

    monkeypatch.setattr(PostgresqlStage, "append", interrupted)
    # When the piece is stored
    counts = writer.store(begun(writer, on_conflict=on_conflict).number, piece_rows(ROWS, body=b"new"), on_conflict)
    # Then each id is there once, by the job's rule
    found = {message.id: message.message.body for message in waiting(postgresql_url)}
    if on_conflict == "keep":
        assert (counts.stored, counts.duplicates) == (2, 2)
        assert found == {"a": b"old", "b": b"other", "c": b"new", "d": b"new"}
    else:
        assert counts.stored == 4 and set(found.values()) == {b"new"} and len(found) == 4


def test_a_job_may_replace_where_its_user_may_not_delete(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    # Given a user who may insert and update
    asyncio.run(SqlDelayedMessageStore(postgresql_url).setup_infrastructure("sales"))
    writer = PieceWriter(postgresql_url, TABLE)
    writer.store(begun(writer, "old").number, piece_rows({"a": 1}, body=b"old"), "keep")
    job = begun(writer, on_conflict="replace").number
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("DROP ROLE IF EXISTS replacing")
        admin.execute("CREATE ROLE replacing LOGIN")
        admin.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO replacing")
        admin.execute(f'REVOKE DELETE ON "{TABLE}" FROM replacing')
        admin.execute("GRANT TEMPORARY, CONNECT ON DATABASE " + postgresql_url.rpartition("/")[2] + " TO replacing")
    # When that user's job replaces a message
    limited = make_url(postgresql_url).set(username="replacing").render_as_string(hide_password=False)
    assert PieceWriter(limited, TABLE).store(job, piece_rows({"a": 1}, body=b"new"), "replace").stored == 1
    # Then it is replaced
    assert [message.message.body for message in waiting(postgresql_url)] == [b"new"]
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("DROP OWNED BY replacing")
        admin.execute("DROP ROLE replacing")


def test_a_message_that_a_poller_holds_is_not_replaced(url: str, writer: PieceWriter) -> None:
    writer.store(begun(writer, "old").number, piece_rows({"a": 1, "b": 2}, body=b"old"), "keep")
    job = begun(writer, on_conflict="replace").number

    async def held() -> int:
        store = SqlDelayedMessageStore(url)
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        try:
            [message] = await store.fetch_due(DUE, 1, max_bytes=1 << 20)
            new = piece_rows({"a": 1, "b": 2}, body=b"new")
            counts = await asyncio.to_thread(writer.store, job, new, "replace")
            await store.release_many([message])
            return counts.stored
        finally:
            await store.close()

    assert asyncio.run(held()) == 1
    assert sorted(message.message.body for message in waiting(url)) == [b"new", b"old"]


def test_a_job_goes_on_as_it_began(writer: PieceWriter) -> None:
    job = begun(writer)
    later = writer.open(JobName("nightly"), PieceParameters(12345, 16, "keep"))
    assert (later.number, later.parameters) == (job.number, PieceParameters(0, 8, "keep"))
    assert writer.open(JobName("nightly", 2), PieceParameters(12345, 16, "keep")).number != job.number
    with pytest.raises(ConfigurationError, match="the job 'nightly' has begun with on_conflict='keep'"):
        begun(writer, on_conflict="replace")


def test_names_that_only_look_alike_are_jobs_of_their_own(writer: PieceWriter) -> None:
    names = ["nightly", "Nightly", "nightly ", "näightly", "'; DROP TABLE delayline_jobs; --", "%", "日本 🚀"]
    assert len({begun(writer, name).number for name in names}) == len(names)


def test_a_store_that_is_not_there_is_refused(url: str, tmp_path: Path) -> None:
    for place, table in ((url, "nobody.timeouts"), (f"sqlite:///{tmp_path / 'none.db'}", TABLE)):
        with pytest.raises(BackendUnusable):
            begun(PieceWriter(place, table))
    assert not (tmp_path / "none.db").exists()


def test_a_server_that_restarts_is_waited_for(postgresql_url: str) -> None:
    # Given a transaction that stores a piece, and is held up
    asyncio.run(SqlDelayedMessageStore(postgresql_url).setup_infrastructure("sales"))
    writer = PieceWriter(postgresql_url, TABLE)
    job = begun(writer).number
    with psycopg.connect(postgresql_url, autocommit=True) as admin, ThreadPoolExecutor(1) as pool:
        admin.execute("BEGIN")
        admin.execute("LOCK delayline_job_pieces IN EXCLUSIVE MODE")
        storing = pool.submit(writer.store, job, piece_rows(ROWS), "keep")
        waiters = "SELECT pid FROM pg_locks WHERE NOT granted"
        eventually(lambda: admin.execute(waiters).fetchall() != [])
        [[waiter]] = admin.execute(waiters).fetchall()
        # When the server ends its connection, and the lock goes
        admin.execute("SELECT pg_terminate_backend(%s)", [waiter])
        admin.execute("ROLLBACK")
        # Then the piece is stored by another try, once
        assert storing.result(60).stored == len(ROWS)
    assert ids(postgresql_url) == sorted(ROWS)
    assert writer.finish(job).committed.stored == len(ROWS)


def test_a_job_without_a_name_is_forgotten_in_time(postgresql_url: str) -> None:
    asyncio.run(SqlDelayedMessageStore(postgresql_url).setup_infrastructure("sales"))
    writer = PieceWriter(postgresql_url, TABLE)
    unnamed = writer.open(JobName(uuid.uuid4().hex), PieceParameters(0, 8, "keep", named=False))
    named = begun(writer)
    for job in (unnamed, named):
        writer.store(job.number, piece_rows({f"{job.number}": 1}), "keep")
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("UPDATE delayline_jobs SET started = started - INTERVAL '30 days'")
    begun(writer, "another")
    assert (writer.inputs(unnamed.number), len(writer.inputs(named.number))) == ({}, 1)


def test_batches_of_a_stream_come_one_after_another(writer: PieceWriter) -> None:
    # Given a stream whose second batch is stored
    def opened(version: int) -> Job:
        return writer.open(JobName("stream", version), PieceParameters(0, 8, "keep", stream=True))

    writer.finish(opened(0).number)
    second = opened(1)
    writer.finish(second.number)
    # Then the ledger keeps that one, which is not stored again, and an older one is refused
    assert [job.name.version for job in writer.jobs(10)] == [1]
    assert (opened(1).number, opened(1).state) == (second.number, JobState.DONE)
    with pytest.raises(DifferentInput, match="batch 0 of 'stream' comes after batch 1 was stored"):
        opened(0)


def test_it_is_decided_once_what_a_job_stores(url: str, writer: PieceWriter) -> None:
    # Given a job of which two drivers have written all pieces
    job = writer.open(JobName("nightly"), PieceParameters(0, 8, "keep", is_decided=True))
    # When both decide
    first, second = (writer.decide(job.number, files) for files in (["a", "b"], ["c"]))
    # Then it is decided for the files of one, and any process knows
    assert first == second == writer.open(JobName("nightly"), job.parameters)
    assert (first.state, first.parameters.files, first.is_open) == (JobState.DECIDED, ["a", "b"], True)
    # And its pieces are stored, each once
    assert [writer.store(job.number, piece_rows(ROWS), "keep").stored for _ in range(2)] == [len(ROWS), 0]
    [listed] = writer.jobs(10)
    assert (listed.state, listed.pieces, listed.committed.stored) == (JobState.DECIDED, 3, len(ROWS))
    # And after the end nothing is decided any more
    writer.finish(job.number)
    assert writer.decide(job.number, ["c"]).state is JobState.DONE
    assert writer.store(job.number, piece_rows({"x": 6}), "keep") == PieceCounts()
    assert ids(url) == sorted(ROWS)
    with pytest.raises(ConfigurationError, match="the job 'nightly' has begun with files, to be all or nothing"):
        begun(writer)
