"""Bulk writing batch by batch: whoever brings a batch, and however often, the store has it once or not at all."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.integration.test_staging import TABLE, ids, rows, url, waiting

from delayline import BackendUnusable
from delayline.bulk.batch_writer import IdTaken, LedgerBatchWriter
from delayline.bulk.ledger import CLOSED

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

__all__ = ["url"]


@pytest.fixture
def batches(url: str) -> LedgerBatchWriter:
    made = LedgerBatchWriter(url, TABLE)
    made.create()
    return made


def bring(batches: LedgerBatchWriter, name: str, attempt: int, batch: pa.RecordBatch) -> int:
    """Return whose attempt counts, after this one, of a task of its own."""
    own: LedgerBatchWriter = pickle.loads(pickle.dumps(batches))  # noqa: S301 - our own

    async def run() -> int:
        async with AsyncExitStack() as stack:
            await own.opened(stack)
            return await own.store(name, attempt, batch)

    return asyncio.run(run())


def test_a_batch_is_stored_as_it_is(url: str, batches: LedgerBatchWriter) -> None:
    headers, large = '{"naïve":"日本 🚀"}', bytes(range(256)) * 8192
    late = datetime(9999, 12, 30, 23, 59, 59, 999999, tzinfo=UTC)
    assert bring(batches, "a", 1, rows("x", headers=headers, body=large, due=late)) == 1
    assert bring(batches, "b", 1, rows("y", body=None)) == 1
    first, second = sorted(waiting(url), key=lambda one: one.id)
    assert (first.destination, first.due, first.message.body) == ("billing", late, large)
    assert first.message.headers["naïve"] == "日本 🚀"
    assert (second.number_of_retries, second.message.body) == (0, b"")


def test_an_attempt_at_a_batch_that_is_there_learns_whose_it_is(url: str, batches: LedgerBatchWriter) -> None:
    assert bring(batches, "a", 2, rows("x", "y")) == 2
    assert bring(batches, "a", 1, rows("x")) == 2
    assert bring(batches, "a", 3, rows("z")) == 2
    assert (ids(url), batches.committed(["a", "b"])) == (["x", "y"], {"a": 2})


def test_one_of_two_at_once_is_stored(url: str, batches: LedgerBatchWriter) -> None:
    # Given two tasks in one process, at the same batch; they share its connections
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(partial(bring, batches, "a", batch=rows("x", "y")), [1, 2]))
    assert counts[0] == counts[1] == batches.committed(["a"])["a"]
    assert ids(url) == ["x", "y"]


@pytest.mark.parametrize("again", [("old",), ("x", "x")])
def test_a_batch_with_an_id_that_is_taken_is_not_stored_and_may_come_without_it(
    url: str, batches: LedgerBatchWriter, again: tuple[str, ...]
) -> None:
    assert bring(batches, "a", 1, rows("old")) == 1
    with pytest.raises(IdTaken):
        bring(batches, "b", 1, rows("new", *again))
    assert (ids(url), batches.committed(["b"])) == (["old"], {})
    assert bring(batches, "b", 1, rows("new")) == 1
    assert ids(url) == ["new", "old"]


def test_an_empty_batch_is_a_batch(url: str, batches: LedgerBatchWriter) -> None:
    assert bring(batches, "a", 1, rows()) == 1
    assert bring(batches, "a", 2, rows("x")) == 1
    assert ids(url) == []


def test_a_batch_that_is_closed_stays_out_and_one_that_is_there_stays(url: str, batches: LedgerBatchWriter) -> None:
    assert bring(batches, "a", 1, rows("x")) == 1
    batches.close(["a", "b"])
    assert bring(batches, "b", 1, rows("y")) == CLOSED
    assert bring(batches, "a", 2, rows("x")) == 1
    assert (ids(url), batches.committed(["a", "b"])) == (["x"], {"a": 1})


def test_more_names_than_a_statement_takes_are_closed_and_asked_for(batches: LedgerBatchWriter) -> None:
    names = [f"batch {number}" for number in range(2500)]
    batches.close(names[1:])
    assert bring(batches, names[0], 7, rows("x")) == 7
    assert batches.committed(names) == {names[0]: 7}


def test_a_store_that_is_not_there_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(BackendUnusable):
        LedgerBatchWriter(url, "nobody.timeouts").create()
    with pytest.raises(BackendUnusable):
        LedgerBatchWriter(f"sqlite:///{tmp_path / 'none.db'}", TABLE).create()
    assert not (tmp_path / "none.db").exists()
