"""One file, one process: several event loops, threads and forks, and whatever is cancelled or closed in between."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import threading
from collections import Counter, deque
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.servers.sqlite import database_of

from delayline import DelaylineError, Endpoint, NotStarted, StoredDelivery, SyncEndpoint
from delayline.message import DelayedMessage, Message
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.file_database import GroupCommit, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy import Connection

    from delayline import MessageContext

HOUR = timedelta(hours=1)
LATER = datetime(2100, 1, 1, tzinfo=UTC)


def sleeping(began: threading.Event, end: threading.Event) -> Callable[[Connection], None]:
    """Return work that takes until the test says so."""

    def work(connection: Connection) -> None:
        began.set()
        assert end.wait(10)

    return work


async def test_several_threads_with_separate_loops(make_endpoint: Callable[..., Endpoint]) -> None:
    # Given four synchronous endpoints and an asynchronous one, all on one file
    before = set(threading.enumerate())
    number, handled = 25, Counter[str]()
    enough = threading.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1
        if handled.total() >= 5 * number:
            enough.set()

    faces = [SyncEndpoint(make_endpoint()) for _ in range(4)]
    for face in faces:
        face.endpoint.handler(handle)

    def work(face: SyncEndpoint) -> None:
        with face:
            for _ in range(number):
                face.send("orders", b"", delay=timedelta(milliseconds=20))
            assert enough.wait(20)

    # When all send and handle at once
    async with make_endpoint() as endpoint:
        working = [asyncio.to_thread(work, face) for face in faces]
        sending = [endpoint.send("orders", b"", delay=timedelta(milliseconds=20)) for _ in range(number)]
        await asyncio.gather(*sending, *working)
    # Then everything is handled once, and no thread is left
    assert handled.total() == len(handled) == 5 * number
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("delayline")] == []


async def test_a_transaction_cancelled_twice_while_it_begins(file: Path) -> None:
    # Given a database whose writer is busy
    database = database_of(file)
    await database.open()
    began, end = threading.Event(), threading.Event()
    busy = asyncio.create_task(database.on_writer(sleeping(began, end)))
    await asyncio.to_thread(began.wait, 10)
    transaction = database.transaction()

    async def hold() -> None:
        async with transaction:
            await transaction.run(lambda connection: None)

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0.01)
    # When the task that waits for it is cancelled, and again
    for _ in range(3):
        holder.cancel()
        await asyncio.sleep(0.01)
    assert not holder.done(), "gave up while its effect was uncertain"
    end.set()
    await asyncio.gather(busy, holder, return_exceptions=True)
    # Then its transaction is over and others can begin theirs
    async with asyncio.timeout(5):
        await database.write(lambda connection: connection.exec_driver_sql("CREATE TABLE made (x)").close())
    await database.close()


async def test_a_transaction_cancelled_while_it_commits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a transaction whose commit takes its time
    database = database_of(file)
    await database.open()
    committing, go, called = threading.Event(), threading.Event(), list[str]()
    commit = database.dialect.transactions.commit

    def slowly(connection: Connection) -> None:
        committing.set()
        assert go.wait(10)
        commit(connection)

    async def hold() -> None:
        async with database.transaction() as transaction:
            await transaction.run(lambda connection: connection.exec_driver_sql("CREATE TABLE made (x)").close())
            transaction.after_commit(lambda: called.append("committed"))
            monkeypatch.setattr(database.dialect.transactions, "commit", slowly)

    # When it is cancelled meanwhile
    holder = asyncio.create_task(hold())
    await asyncio.to_thread(committing.wait, 10)
    holder.cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(holder, return_exceptions=True)
    # Then it was committed, once, and its callbacks were called
    assert holder.cancelled()
    assert called == ["committed"]
    await database.read(lambda connection: connection.exec_driver_sql("SELECT * FROM made").close())
    await database.close()


async def test_cancelled_waiters_leave_the_lane_free(file: Path) -> None:
    # Given a transaction under way and twenty that wait for their turn
    database = database_of(file)
    await database.open()
    async with database.transaction() as transaction:
        await transaction.run(lambda connection: None)
        done: list[int] = []
        waiting = [
            asyncio.create_task(database.write(lambda _, number=number: done.append(number)))  # type: ignore[misc]
            for number in range(20)
        ]
        await asyncio.sleep(0)
        # When every other one is cancelled
        for task in waiting[::2]:
            task.cancel()
        await asyncio.sleep(0)
    # Then the others have their turn, in their order
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert done == list(range(1, 20, 2))
    await database.close()


async def test_cancelled_writes_of_several_loops_harm_no_others(file: Path) -> None:
    # Given a table, and three event loops that write to it
    database = database_of(file)
    await database.open()
    await database.write(lambda connection: connection.exec_driver_sql("CREATE TABLE made (x)").close())

    async def write(value: int) -> int:
        def insert(connection: Connection) -> int:
            connection.exec_driver_sql(f"INSERT INTO made VALUES ({value})").close()  # noqa: S608 - a number
            return value

        return await database.write(insert)

    async def storm(loop: int) -> tuple[list[int], list[int]]:
        chance = random.Random(loop)  # noqa: S311 - repeatable
        values = range(loop * 1000, loop * 1000 + 500)
        tasks = [asyncio.create_task(write(value)) for value in values]
        for task in chance.sample(tasks, 150):
            task.cancel()
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, int | asyncio.CancelledError) for answer in answers), answers
        unsure = [value for value, answer in zip(values, answers, strict=True) if not isinstance(answer, int)]
        return [answer for answer in answers if isinstance(answer, int)], unsure

    # When each writes five hundred rows at once and cancels a hundred and fifty of them
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*(asyncio.to_thread(asyncio.run, storm(loop)) for loop in range(3)))
        rows = await database.read(lambda connection: connection.exec_driver_sql("SELECT x FROM made").scalars().all())
    # Then confirmed messages are stored once, and each cancelled one is stored or not
    sure = [value for answered, _ in outcomes for value in answered]
    assert len(sure) >= 3 * 350
    assert len(rows) == len(set(rows))
    assert set(sure) <= set(rows)
    assert set(rows) - set(sure) <= {value for _, unsure in outcomes for value in unsure}
    await database.close()


def test_a_write_withdrawn_while_a_group_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given waiting writes, the last of which is withdrawn from another loop's thread while they are counted
    group = GroupCommit(database_of(file).dialect)
    writes = [Write(lambda connection: None) for _ in range(3)]

    class Withdrawing(deque[Write[None]]):
        def __len__(self) -> int:
            counted = super().__len__()
            group.withdraw(writes[-1])
            return counted

    monkeypatch.setattr(group, "_waiting", Withdrawing(writes))
    # When the group is taken
    taken = group.take()
    # Then the others are in it
    assert taken[:2] == writes[:2]


async def test_closing_while_in_use_answers_all_callers(file: Path) -> None:
    # Given readers and writers under way
    database = database_of(file)
    for _ in range(20):
        await database.open()
        reads = [asyncio.create_task(database.read(lambda connection: 1)) for _ in range(20)]
        writes = [asyncio.create_task(database.write(lambda connection: 1)) for _ in range(20)]
        # When the database is closed
        closing = asyncio.create_task(database.close())
        # Then each call returns or says why not
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*reads, *writes, return_exceptions=True)
        await closing
        assert all(answer == 1 or isinstance(answer, NotStarted) for answer in answers), answers


async def test_a_failed_fetch_keeps_no_claims(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a store with a due message, and a commit that fails after the fetch has claimed it
    store = SqlDelayedMessageStore(f"sqlite:///{file}")
    await store.setup_infrastructure("orders")
    await store.initialize("orders", 1)  # type: ignore[arg-type]
    await store.store(DelayedMessage(Message("m", {}, b""), "orders", datetime(2000, 1, 1, tzinfo=UTC)))
    dialect = database_of(file).dialect
    with monkeypatch.context() as broken:
        broken.setattr(dialect.transactions, "commit", lambda connection: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await store.fetch_next_due(LATER)
    # Then the next fetch gets it
    assert await store.fetch_next_due(LATER) is not None
    await store.close()


def in_child(work: Callable[[], None]) -> Iterator[None]:
    """Fork; the child does the work and ends. Yield once for the parent, then wait for the child's success."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    handle = os.pidfd_open(child)
    try:
        yield
        ended = bool(select.select([handle], [], [], 20)[0])
        if not ended:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed" if ended else "it hung"
    finally:
        os.close(handle)


def forked_endpoint(file: Path) -> Endpoint:
    url = f"sqlite:///{file}"
    return Endpoint("orders", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)))


def test_a_fork_has_separate_endpoints(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    # Given a process with an endpoint at work on the file
    parent = SyncEndpoint(make_endpoint("parents"))
    parent.start()
    parent.send("parents", b"", delay=HOUR, message_id="before")
    made_before = forked_endpoint(file)

    def use() -> None:
        for endpoint in (forked_endpoint(file), made_before):
            handled = threading.Event()

            @endpoint.handler
            async def handle(message: Message, context: MessageContext, handled: threading.Event = handled) -> None:
                handled.set()

            with SyncEndpoint(endpoint) as child:
                child.send("orders", b"", delay=timedelta(milliseconds=50))
                assert handled.wait(10)
                child.send("parents", b"", delay=HOUR)

    # When it forks, and the child starts an endpoint that was created before the fork or after it
    waiting = in_child(use)
    next(waiting)
    # Then both work, side by side and afterwards
    parent.send("parents", b"", delay=HOUR, message_id="meanwhile")
    assert next(waiting, None) is None
    parent.send("parents", b"", delay=HOUR, message_id="after")
    pending = parent.run(parent.endpoint.delayed.pending())
    assert {message.id for message in pending} == {"before", "meanwhile", "after"}
    parent.stop()


def test_a_fork_survives_its_parent(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    # Given a parent that closes its database while its child uses it
    parent = SyncEndpoint(make_endpoint())
    parent.start()
    ready, go = os.pipe(), os.pipe()

    def use() -> None:
        with SyncEndpoint(forked_endpoint(file)) as child:
            child.send("orders", b"", delay=HOUR, message_id="first")
            os.write(ready[1], b"!")
            os.read(go[0], 1)
            child.send("orders", b"", delay=HOUR, message_id="second")

    waiting = in_child(use)
    next(waiting)
    assert select.select([ready[0]], [], [], 20)[0]
    os.read(ready[0], 1)
    # When the parent disconnects, the last one as far as its own locks show
    parent.stop()
    os.write(go[1], b"!")
    assert next(waiting, None) is None
    # Then the child's messages are stored: its file was not deleted
    with SyncEndpoint(make_endpoint()) as again:
        pending = again.run(again.endpoint.delayed.pending())
        assert {message.id for message in pending} == {"first", "second"}
    for end in (*ready, *go):
        os.close(end)


async def test_a_fork_in_the_middle_of_a_transaction(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    # Given a transaction that is open while the process forks
    async with make_endpoint() as endpoint:
        database = database_of(file)
        async with database.transaction() as transaction:
            await transaction.run(lambda connection: None)

            def use() -> None:
                with pytest.raises(DelaylineError, match="forked in the middle of a transaction"):
                    SyncEndpoint(forked_endpoint(file)).start()

            # Then the child gets an error, instead of damaging the file
            waiting = in_child(use)
            next(waiting)
            assert next(waiting, None) is None
        # And the parent goes on
        await endpoint.send("orders", b"", delay=HOUR)
