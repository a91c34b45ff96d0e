"""Bulk writing batch by batch: the store has each batch once or not at all, however often tasks write it."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.integration.earlier_ledger import make_earlier_ledger
from tests.integration.test_schema import change
from tests.integration.test_staging import TABLE, ids, rows, url, waiting

from delayline.bulk.batches import CLOSED, BatchName
from delayline.bulk.jobs import PieceParameters
from delayline.bulk.pieces import PieceWriter
from delayline.bulk.writer import BulkWriter, IdTaken
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

__all__ = ["url"]
A, B = (BatchName("r", 0, number) for number in range(2))


@pytest.fixture
def writer(url: str) -> BulkWriter:
    made = BulkWriter(url, TABLE)
    made.create_ledger()
    return made


def store_in_task(writer: BulkWriter, name: BatchName, attempt: int, batch: pa.RecordBatch) -> int:
    """Store the batch as another task would, and return the attempt that counts."""
    own: BulkWriter = pickle.loads(pickle.dumps(writer))  # noqa: S301 - our own

    async def run() -> int:
        async with AsyncExitStack() as stack:
            await own.open(stack)
            return await own.store_batch(name, attempt, batch)

    return asyncio.run(run())


def test_a_batch_is_stored_as_it_is(url: str, writer: BulkWriter) -> None:
    headers, large = '{"naïve":"日本 🚀"}', bytes(range(256)) * 8192
    late = datetime(9999, 12, 30, 23, 59, 59, 999999, tzinfo=UTC)
    assert store_in_task(writer, A, 1, rows("x", headers=headers, body=large, due=late)) == 1
    assert store_in_task(writer, B, 1, rows("y", body=None)) == 1
    first, second = sorted(waiting(url), key=lambda one: one.id)
    assert (first.destination, first.due, first.message.body) == ("billing", late, large)
    assert first.message.headers["naïve"] == "日本 🚀"
    assert (second.number_of_retries, second.message.body) == (0, b"")


def test_a_repeated_attempt_returns_the_committed_one(url: str, writer: BulkWriter) -> None:
    assert store_in_task(writer, A, 2, rows("x", "y")) == 2
    assert store_in_task(writer, A, 1, rows("x")) == 2
    assert store_in_task(writer, A, 3, rows("z")) == 2
    assert (ids(url), writer.committed_batches([A, B])) == (["x", "y"], {A: 2})


def test_one_of_two_at_once_is_stored(url: str, writer: BulkWriter) -> None:
    # Given two tasks in one process, at the same batch; they share its connections
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(partial(store_in_task, writer, A, batch=rows("x", "y")), [1, 2]))
    assert counts[0] == counts[1] == writer.committed_batches([A])[A]
    assert ids(url) == ["x", "y"]


@pytest.mark.parametrize("again", [("old",), ("x", "x")])
def test_a_batch_with_an_id_that_is_taken_is_not_stored_and_may_come_without_it(
    url: str, writer: BulkWriter, again: tuple[str, ...]
) -> None:
    assert store_in_task(writer, A, 1, rows("old")) == 1
    with pytest.raises(IdTaken):
        store_in_task(writer, B, 1, rows("new", *again))
    assert (ids(url), writer.committed_batches([B])) == (["old"], {})
    assert store_in_task(writer, B, 1, rows("new")) == 1
    assert ids(url) == ["new", "old"]


def test_an_empty_batch_is_a_batch(url: str, writer: BulkWriter) -> None:
    assert store_in_task(writer, A, 1, rows()) == 1
    assert store_in_task(writer, A, 2, rows("x")) == 1
    assert ids(url) == []


def test_a_batch_that_is_closed_stays_out_and_one_that_is_there_stays(url: str, writer: BulkWriter) -> None:
    assert store_in_task(writer, A, 1, rows("x")) == 1
    writer.close_batches([A, B])
    assert store_in_task(writer, B, 1, rows("y")) == CLOSED
    assert store_in_task(writer, A, 2, rows("x")) == 1
    assert (ids(url), writer.committed_batches([A, B])) == (["x"], {A: 1})


def test_more_names_than_a_statement_takes_are_closed_and_asked_for(writer: BulkWriter) -> None:
    names = [BatchName("r", number % 2, number) for number in range(2500)]
    writer.close_batches(names[1:])
    assert store_in_task(writer, names[0], 7, rows("x")) == 7
    assert writer.committed_batches(names) == {names[0]: 7}


def test_batches_of_an_older_delayline_are_known_and_its_tasks_commit_no_more(url: str, writer: BulkWriter) -> None:
    # Given the ledger of an older delayline, which has committed a batch
    make_earlier_ledger(url)
    into = "INSERT INTO delayline_spark_runs (run, kind, batch, stored, duplicates, rejected) VALUES"
    asyncio.run(change(url, f"{into} ('migration r 0 0', 'migration', 7, 1, 0, 0)"))
    # When its migration is resumed
    assert writer.committed_batches([A, B]) == {A: 7}
    # Then the other batch is closed there, and stored by this delayline
    with database_at(url).dialect.connections.look() as connection:
        kept = connection.exec_driver_sql("SELECT run, batch FROM delayline_spark_runs WHERE kind = 'migration'")
        found = dict(map(tuple, kept))
    assert found == {"migration r 0 0": 7, "migration r 0 1": CLOSED}
    assert store_in_task(writer, B, 8, rows("x")) == 8
    assert writer.committed_batches([A, B]) == {A: 7, B: 8}


def test_the_batches_of_a_migration_are_no_job_that_is_listed(url: str, writer: BulkWriter) -> None:
    store_in_task(writer, A, 1, rows("x"))
    pieces = PieceWriter(url, TABLE)
    assert pieces.jobs(10) == []
    # And a job of a user does not go on with one
    with pytest.raises(ConfigurationError, match="has begun with the batches of a migration"):
        pieces.open(A.job, PieceParameters(0, 8, "raise"))


def test_a_store_that_is_not_there_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(BackendUnusable):
        BulkWriter(url, "nobody.timeouts").create_ledger()
    with pytest.raises(BackendUnusable):
        BulkWriter(f"sqlite:///{tmp_path / 'none.db'}", TABLE).create_ledger()
    assert not (tmp_path / "none.db").exists()
