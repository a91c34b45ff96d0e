"""Single messages are inserted by the event loop itself, with the same promises under all faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.eventually import PATIENCE

from delayline import (
    BackendUnavailable,
    DelayedMessage,
    Endpoint,
    InvalidMessage,
    Message,
    QueueNotFound,
    SqlDelayedMessageStore,
    SqlTransport,
    TransactionMode,
)
from delayline.sql.databases import database_at
from delayline.sql.postgresql import binary
from delayline.sql.postgresql.binary import LARGEST
from delayline.sql.postgresql.dialect import PART
from delayline.sql.server_database import POOL_SIZE, ServerDatabase, workers_of
from delayline.testing.conformance.messages import delayed, same

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

WORKERS = workers_of(POOL_SIZE)
LATER = datetime(2100, 1, 1, tzinfo=UTC)  # no notification on another connection is needed
#: The first insert connects, on a worker thread; from then on the loop goes by itself.
FIRST = ("first", "second")
HELD = "state = 'active' AND wait_event_type = 'Lock' AND query LIKE 'INSERT%'"


class Blocker:
    """Another session with an uncommitted row of the same id, for whose end an insert has to wait."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url)
        self._watch = psycopg.connect(url, autocommit=True)

    def hold(self, message_id: str) -> None:
        self._connection.execute(
            'INSERT INTO "sales.timeouts" (id, destination, due, headers, body, retry_count) '
            "VALUES (%s, 'billing', now(), '', '', 0)",
            (message_id,),
        )

    async def until_blocked(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.ours(HELD):  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.01)

    def ours(self, where: str) -> list[int]:
        ours = f"datname = current_database() AND application_name = 'delayline' AND {where}"
        rows = self._watch.execute(f"SELECT pid FROM pg_stat_activity WHERE {ours}".encode())  # noqa: S608 - our own
        return [pid for (pid,) in rows]

    def terminate(self, where: str) -> None:
        ended = [self._watch.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,)) for pid in self.ours(where)]
        assert ended

    def release(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()
        self._watch.close()


@pytest.fixture
async def store(postgresql_url: str) -> AsyncIterator[SqlDelayedMessageStore]:
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    for name in FIRST:
        await store.store(delayed(name))
    yield store
    await store.close()


@pytest.fixture
def blocker(postgresql_url: str) -> Iterator[Blocker]:
    with contextlib.closing(Blocker(postgresql_url)) as blocker:
        yield blocker


async def waiting(store: SqlDelayedMessageStore) -> set[str]:
    return {message.id for message in await store.pending()} - {*FIRST}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_thread_takes_part(store: SqlDelayedMessageStore, postgresql_url: str) -> None:
    # Given worker threads that are all busy
    database = database_at(postgresql_url)
    assert isinstance(database, ServerDatabase)
    end, busy = threading.Event(), threading.Barrier(WORKERS + 1)

    def work() -> None:
        busy.wait(PATIENCE)
        end.wait(PATIENCE)

    for _ in range(WORKERS):
        database.spawn(work)
    await asyncio.to_thread(busy.wait, PATIENCE)
    # When a message is stored, then it does not wait for them
    try:
        async with asyncio.timeout(PATIENCE / 2):
            await store.store(delayed("m"))
    finally:
        end.set()
    assert await waiting(store) == {"m"}


async def test_cancelled_it_ends_when_its_effect_is_certain(store: SqlDelayedMessageStore, blocker: Blocker) -> None:
    # Given an insert that waits in the server
    blocker.hold("m")
    storing = asyncio.create_task(store.store(delayed("m")))
    await blocker.until_blocked()
    # When it is cancelled, twice
    for _ in range(2):
        storing.cancel()
        await asyncio.sleep(0.05)
        assert not storing.done()
    # Then it ends with its statement, whose effect is there
    blocker.release()
    with pytest.raises(asyncio.CancelledError):
        await storing
    assert await waiting(store) == {"m"}


async def test_others_do_not_wait_for_one_that_waits(store: SqlDelayedMessageStore, blocker: Blocker) -> None:
    blocker.hold("m")
    storing = asyncio.create_task(store.store(delayed("m")))
    await blocker.until_blocked()
    async with asyncio.timeout(PATIENCE):
        await store.store(delayed("other"))
    assert not storing.done()
    blocker.release()
    await storing
    assert await waiting(store) == {"m", "other"}


async def test_a_connection_lost_under_way(store: SqlDelayedMessageStore, blocker: Blocker) -> None:
    # Given an insert that waits in the server
    blocker.hold("m")
    storing = asyncio.create_task(store.store(delayed("m")))
    await blocker.until_blocked()
    # When its connection ends, then its caller gets an error, and the next one is stored
    await asyncio.to_thread(blocker.terminate, HELD)
    with pytest.raises(BackendUnavailable, match="terminating connection"):
        await storing
    blocker.release()
    await store.store(delayed("next"))
    await store.store(delayed("and the one after"))
    assert await waiting(store) == {"next", "and the one after"}


async def test_a_connection_lost_at_rest_fails_no_caller(store: SqlDelayedMessageStore, blocker: Blocker) -> None:
    await asyncio.to_thread(blocker.terminate, "query LIKE 'INSERT%'")
    await asyncio.sleep(0.1)
    for name in ("a", "b"):
        await store.store(delayed(name))
    assert await waiting(store) == {"a", "b"}


async def test_closing_waits_for_work_in_progress(postgresql_url: str, store: SqlDelayedMessageStore) -> None:
    del store  # its database is another one than that of a URL with an option
    closing_store = SqlDelayedMessageStore(f"{postgresql_url}?application_name=delayline")
    await closing_store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    with contextlib.closing(Blocker(postgresql_url)) as blocker:
        for name in ("x", "y"):
            await closing_store.store(delayed(name))
        blocker.hold("m")
        storing = asyncio.create_task(closing_store.store(delayed("m")))
        await blocker.until_blocked()
        closing = asyncio.create_task(closing_store.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        blocker.release()
        await closing
        with contextlib.suppress(Exception):  # stored; notifying is no longer possible
            await storing


async def test_refused_inserts_are_not_reported_as_stored(store: SqlDelayedMessageStore) -> None:
    # The refusal and the end of the statement come in one packet or in two, as it happens: hence so often
    for number in range(300):
        with pytest.raises(InvalidMessage, match="length"):
            await store.store(delayed(f"m{number}", destination="d" * 201))
    await store.store(delayed("good"))
    assert await waiting(store) == {"good"}


@pytest.mark.parametrize("size", [0, 1, LARGEST - 1000, LARGEST + 1, 20 * LARGEST])
async def test_bodies_of_every_size(store: SqlDelayedMessageStore, size: int) -> None:
    message = delayed("m", body=os.urandom(size))
    await store.store(message)
    [found] = [one for one in await store.pending() if one.id == "m"]
    same(found, message)


async def test_a_server_that_reads_slowly(
    store: SqlDelayedMessageStore, blocker: Blocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a message that no socket takes at once, and a server process that reads nothing for a while
    monkeypatch.setattr(binary, "LARGEST", 1 << 30)
    [pid] = blocker.ours("query LIKE 'INSERT%'")
    os.kill(pid, signal.SIGSTOP)
    message = delayed("m", body=os.urandom(32_000_000))
    try:
        storing = asyncio.create_task(store.store(message))
        await asyncio.sleep(0.1)
        assert not storing.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    # When it goes on, then nothing is missing
    await storing
    [found] = [one for one in await store.pending() if one.id == "m"]
    same(found, message)


async def test_an_event_loop_that_cannot_watch_sockets(
    store: SqlDelayedMessageStore, blocker: Blocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a connection that is new, on an event loop like that of Windows
    await asyncio.to_thread(blocker.terminate, "query LIKE 'INSERT%'")
    await asyncio.sleep(0.1)
    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", _not_on_this_system)
    before = descriptors()
    # When messages are stored, then worker threads do it
    for number in range(20):
        await store.store(delayed(str(number), LATER))
    assert len(await waiting(store)) == 20
    assert descriptors() <= before + 2 * WORKERS + 1  # connections and their watches, and no failed attempts


def _not_on_this_system(*args: object) -> None:
    raise NotImplementedError


async def test_a_connection_with_another_encoding(store: SqlDelayedMessageStore, postgresql_url: str) -> None:
    other = SqlDelayedMessageStore(f"{postgresql_url}?client_encoding=latin1")
    await other.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    for name in ("a", "é", "ü"):
        await other.store(delayed(name))
    await other.close()
    assert await waiting(store) == {"a", "é", "ü"}


def test_one_event_loop_after_the_other(postgresql_url: str) -> None:
    # Given a store that stays open from one event loop to the next
    store = SqlDelayedMessageStore(postgresql_url)

    async def begin() -> None:
        await store.setup_infrastructure("sales")
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        await use("begin")

    async def use(prefix: str) -> None:
        for number in range(3):
            await store.store(delayed(f"{prefix}{number}", LATER))

    async def end() -> list[str]:
        found = [message.id for message in await store.pending()]
        await store.close()
        return found

    asyncio.run(begin())
    before = descriptors()
    for _ in range(3):
        asyncio.run(use("again"))
    # Then each has stored, and has left no descriptor behind
    assert descriptors() == before
    assert len(asyncio.run(end())) == 6


async def test_two_event_loops_at_once(store: SqlDelayedMessageStore) -> None:
    async def use(prefix: str) -> None:
        for number in range(50):
            await store.store(delayed(f"{prefix}{number}"))

    await asyncio.gather(asyncio.to_thread(asyncio.run, use("there")), use("here"))
    assert len(await store.pending(limit=200)) == 100 + len(FIRST)


async def test_closing_leaves_no_descriptor(postgresql_url: str) -> None:
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    before = descriptors()
    for _ in range(3):
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        for name in ("a", "b", "c"):
            await store.store(delayed(name, LATER))
        await store.close()
    assert descriptors() == before


async def test_a_fork_while_one_is_under_way(
    store: SqlDelayedMessageStore, blocker: Blocker, postgresql_url: str
) -> None:
    # Given an insert under way
    blocker.hold("m")
    storing = asyncio.create_task(store.store(delayed("m")))
    await blocker.until_blocked()
    # When the process forks, and the child stores by itself
    child = os.fork()
    if child == 0:
        os._exit(_in_child(postgresql_url))
    async with asyncio.timeout(PATIENCE):
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    # Then the parent's goes on as if nothing had been
    blocker.release()
    await storing
    await store.store(delayed("after"))
    assert await waiting(store) == {"m", "child0", "child1", "child2", "after"}


def _in_child(url: str) -> int:
    signal.alarm(15)

    async def use() -> None:
        store = SqlDelayedMessageStore(url)
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        for number in range(3):
            await store.store(delayed(f"child{number}"))
        await store.close()

    try:
        asyncio.events._set_running_loop(None)
        asyncio.run(use())
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        return 1
    return 0


async def test_many_messages_go_in_parts_and_are_stored_as_a_whole_or_not_at_all(store: SqlDelayedMessageStore) -> None:
    """Given more messages than one part takes, when the last one is refused, then none is there, and the next go in."""
    many = [delayed(f"many-{number}", LATER) for number in range(2 * PART + 1)]
    refused = DelayedMessage(Message("refused", {}, b""), "x" * 201, LATER)

    with pytest.raises(InvalidMessage, match="too long"):
        await store.store_many([*many, refused])
    assert await waiting(store) == set()

    await store.store_many([*many, many[0]])
    assert len(await store.pending(limit=1000)) == len(FIRST) + len(many)


async def test_an_immediate_send_needs_no_worker_thread(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an endpoint that has sent before
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["billing"])
    async with Endpoint("sales", transport=transport, send_only=True) as endpoint:
        for body in FIRST:
            await endpoint.send("billing", body)
        # When it sends again
        worked: list[object] = []
        with monkeypatch.context() as patched:
            patched.setattr(ServerDatabase, "run", worked.append)
            await endpoint.send("billing", "third")
        # And to a queue that does not exist, for which a thread looks for similar names afterwards
        with pytest.raises(QueueNotFound, match="nowhere"):
            await endpoint.send("nowhere", "third")
        # Then the loop has inserted the one message, and no other
        assert not worked
        assert [message.text for message in await transport.browse("billing", 10)] == [*FIRST, "third"]
