"""Bulk writing and reading by other processes than the poller's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import BackendUnavailable, DelayedMessage, Message, TransactionMode
from delayline.bulk.stream_claims import StreamClaims
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from pathlib import Path

TABLE = "sales.timeouts"
PAST = datetime(2020, 1, 1, tzinfo=UTC)
COMMIT = """
import sys
from datetime import UTC, datetime, timedelta
import pyarrow as pa
from delayline.bulk.writer import BulkWriter
due = datetime.now(UTC) + timedelta(seconds=30)
job = BulkWriter(sys.argv[1], "sales.timeouts")
job.create()
kinds = {"id": pa.string(), "destination": pa.string(), "due": pa.timestamp("us", "UTC"), "headers": pa.string(),
         "body": pa.binary()}
rows = [{"id": "a", "destination": "billing", "due": due, "headers": None, "body": b""}]
job.commit([job.write([pa.RecordBatch.from_pylist(rows, schema=pa.schema(kinds))])])
"""


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide the URL of a database with a store's table."""
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path / 'delayline.db'}"
    else:
        address = request.getfixturevalue(f"{request.param}_url")
    asyncio.run(SqlDelayedMessageStore(address).setup_infrastructure("sales"))
    return address


async def opened(url: str) -> SqlDelayedMessageStore:
    store = SqlDelayedMessageStore(url, poll_interval=timedelta(milliseconds=100))
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    return store


async def put(store: SqlDelayedMessageStore, *ids: str) -> None:
    await store.store_many([DelayedMessage(Message(one, {"n": one}, one.encode()), "billing", PAST) for one in ids])


async def test_a_poller_that_sleeps_is_woken_by_the_commit_of_another_process(url: str) -> None:
    # Given a poller that has nothing to wait for
    store = await opened(url)
    woken: asyncio.Queue[datetime] = asyncio.Queue()
    stop = store.on_stored(woken.put_nowait)
    assert await store.next_due() is None
    # When a driver elsewhere commits something that is due soon
    command = [sys.executable, "-c", COMMIT, url]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    # Then the poller is notified
    async with asyncio.timeout(20):
        while (await woken.get()).year < 2000:
            pass
    stop()
    assert await store.next_due() is not None
    await store.close()


async def test_a_stream_reads_due_messages_again_until_the_batch_is_done(url: str) -> None:
    # Given due messages, one of which a poller has
    store = await opened(url)
    await put(store, "held")
    [held] = await store.fetch_due(datetime.now(UTC), 1, max_bytes=1000)
    await put(store, "a", "b", "c")
    first = StreamClaims(url, TABLE, None, "invoices")
    await first.open()
    assert await first.first() == 0
    # When a stream takes two, and then the rest
    assert await first.take(0, 2) == 2
    assert await first.take(0, None) == 3
    # Then the poller's is left to it
    assert await store.remove(held)
    rows = [row for page in first.rows(["id", "body"], 0, 3, 2) for row in page]
    assert sorted(rows) == [["a", b"a"], ["b", b"b"], ["c", b"c"]]
    assert await store.next_due() is None
    # And the next stream of that name finds unfinished messages, and the first one stops
    second = StreamClaims(url, TABLE, None, "invoices")
    await second.open()
    assert await second.first() == 0
    with pytest.raises(BackendUnavailable, match="another stream has begun to read as 'invoices'"):
        await first.take(3, None)
    assert await second.take(2, None) == 3
    assert await second.first() == 2
    assert await second.take(3, None) == 3
    assert await second.first() == 3
    for one in (first, second, store):
        await one.close()


async def test_streams_of_different_names_share_due_messages(url: str) -> None:
    store = await opened(url)
    await put(store, *(f"m{number}" for number in range(10)))
    left, right = StreamClaims(url, TABLE, None, "left"), StreamClaims(url, TABLE, None, "right")
    for one in (left, right):
        await one.open()
    assert (await left.take(0, 4), await right.take(0, None)) == (4, 6)
    found = [row for one in (left, right) for page in one.rows(["id"], 0, 10, 100) for [row] in page]
    assert sorted(found) == [f"m{number}" for number in range(10)]
    for part in (left, right, store):
        await part.close()


async def test_nothing_is_taken_before_it_is_due(url: str) -> None:
    store = await opened(url)
    soon = datetime.now(UTC) + timedelta(hours=1)
    await store.store(DelayedMessage(Message("soon", {}, b""), "billing", soon))
    await put(store, "past")
    taking = StreamClaims(url, TABLE, None, "invoices")
    await taking.open()
    assert await taking.take(0, None, PAST - timedelta(days=1)) == 0
    assert await taking.behind() == 1
    assert await taking.take(0, None) == 1
    assert await taking.behind() == 1
    assert await store.next_due() == soon
    for one in (taking, store):
        await one.close()
