"""Jobs in pieces: each piece is stored once, whichever attempts store it, and the ledger knows what was done."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
import psycopg
import pytest
from tests.eventually import eventually
from tests.integration.test_staging import DUE, TABLE, empty, ids, rows, url, waiting

from delayline import ConfigurationError, SqlDelayedMessageStore, TransactionMode
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName, JobState, PieceParameters
from delayline.bulk.pieces import PieceRows, PieceWriter
from delayline.errors import BackendUnusable, DifferentInput

if TYPE_CHECKING:
    from pathlib import Path

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
    assert writer.store(job, piece_rows(ROWS), "keep") == (0, 0, 0, 0)
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


def test_a_message_that_waits_is_replaced_where_the_job_says_so(url: str, writer: PieceWriter) -> None:
    writer.store(begun(writer, "old").number, piece_rows({"a": 1, "b": 2}, body=b"old"), "keep")
    job = begun(writer, on_conflict="replace")
    assert writer.store(job.number, piece_rows({"b": 2, "c": 3}, body=b"new"), "replace").stored == 2
    found = {message.id: message for message in waiting(url)}
    assert {name: message.message.body for name, message in found.items()} == {"a": b"old", "b": b"new", "c": b"new"}
    assert {message.due for message in found.values()} == {DUE}


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
