"""Claims of messages in the statement that moves them for a receiver which waits, or that looks into the queue."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.eventually import PATIENCE, eventually_async

from delayline import BackendUnavailable, SqlDelayedMessageStore, SqlTransport, TransactionMode
from delayline.sql.crashes import FIRST_NUMBER
from delayline.sql.databases import database_at
from delayline.sql.postgresql.claims import AdvisoryLockClaims
from delayline.sql.receiver import SqlReceiver
from delayline.sql.server_database import ServerDatabase
from delayline.sql.statements import queue_channel
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import AT, delayed, operation
from delayline.testing.conformance.transport_fixtures import ids, received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayline.sql.claims_in_statements import Page
    from delayline.transport import ReceivedMessage

HOUR = 3600.0
MOST_BYTES = 1 << 20
FUNCTION = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'full' USING ERRCODE = '53100'; END $$
"""
LOCK = 4711
WAIT = f"""
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NEW; END $$;
CREATE TRIGGER wait BEFORE INSERT ON delayline_messages FOR EACH ROW EXECUTE FUNCTION wait()
"""
TRIGGER = "CREATE TRIGGER refuse AFTER INSERT ON delayline_messages FOR EACH ROW EXECUTE FUNCTION refuse()"


class Sales:
    """Store, transport and a receiver of the queue `sales`."""

    def __init__(self, url: str) -> None:
        self.store = SqlDelayedMessageStore(url)
        self.transport = SqlTransport(url)
        self.receiver: SqlReceiver
        self.looks = 0
        self._last: Sequence[ReceivedMessage] = []

    async def waits(self, limit: int) -> asyncio.Task[list[str]]:
        """Return a task that receives and that waits for messages."""
        task = asyncio.create_task(self._receive(limit))
        async with asyncio.timeout(PATIENCE):
            while not self.receiver.wanted:  # noqa: ASYNC110 - a state without an event
                await asyncio.sleep(0.005)
        return task

    async def _receive(self, limit: int) -> list[str]:
        self._last = await self.receiver.receive(limit)
        return ids(list(self._last))

    async def move_and_handle(self, number: int) -> None:
        """Move messages to the waiting receiver and acknowledge them, one after another."""
        for one in range(number):
            waits = await self.waits(1)
            await self.store.store(delayed(f"earlier{one}", destination="sales"))
            await self.move()
            await asyncio.wait_for(waits, PATIENCE)
            await self.receiver.acknowledge_many(self._last)

    async def store_due(self, number: int) -> None:
        await self.store.store_many([delayed(f"m{n}", destination="sales") for n in range(number)])

    async def move(self) -> int:
        return (await self.store.forward_due(AT, 100, max_bytes=MOST_BYTES)).number


@pytest.fixture
async def sales(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sales]:
    sales, claim = Sales(postgresql_url), SqlReceiver._claim
    await sales.store.setup_infrastructure("sales")
    await sales.transport.setup_infrastructure(["sales"])
    await sales.store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await sales.transport.start()

    async def counted(receiver: SqlReceiver, *args: object) -> None:
        sales.looks += 1
        await claim(receiver, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SqlReceiver, "_claim", counted)
    listening = asyncio.Event()  # before that messages may come without a notification, and receivers look once more
    stop = database_at(postgresql_url).notifications.subscribe(queue_channel("sales"), lambda _: listening.set())
    await asyncio.wait_for(listening.wait(), PATIENCE)
    stop()
    sales.receiver = await sales.transport.receiver("sales")
    yield sales
    await sales.receiver.stop()
    await sales.transport.stop()
    await sales.store.close()


async def test_a_waiting_receiver_gets_moved_messages_without_a_look(
    sales: Sales, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that has found its queue empty, and that does not look at intervals
    monkeypatch.setattr("delayline.sql.receiver.QUEUE_LOOK_EVERY", PATIENCE)
    monkeypatch.setattr(sales.receiver._idle, "interval", PATIENCE)
    waits = await sales.waits(2)
    looks = sales.looks
    # When three messages are moved
    await sales.store_due(3)
    assert await sales.move() == 3
    # Then it receives as many as it waits for, claimed, and the third with a look
    assert await asyncio.wait_for(waits, PATIENCE) == ["m0", "m1"]
    assert sales.looks == looks
    another = await sales.transport.receiver("sales")
    assert ids(await received(another, 1)) == ["m2"]
    await another.stop()


async def test_a_moved_message_does_not_hide_an_earlier_one(
    sales: Sales, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that gets a moved message while one with a lower number is in the queue, not yet notified of
    monkeypatch.setattr("delayline.sql.receiver.QUEUE_LOOK_EVERY", HOUR)
    sales.receiver._full_look_every = HOUR
    waits = await sales.waits(1)
    with psycopg.connect(postgresql_url) as connection:
        insert = "INSERT INTO delayline_messages (queue, id, headers, body) VALUES ('sales', 'earlier', '{}', '')"
        connection.execute(insert.encode())
    await sales.store_due(1)
    await sales.move()
    assert await asyncio.wait_for(waits, PATIENCE) == ["m0"]
    # When another message comes, then it receives both
    await sales.transport.dispatch([operation("sales", "later")])
    assert ids(await received(sales.receiver, 2)) == ["earlier", "later"]


async def test_another_process_does_not_receive_claimed_messages(sales: Sales, postgresql_url: str) -> None:
    # Given moved messages that a receiver has
    waits = await sales.waits(5)
    await sales.store_due(2)
    await sales.move()
    assert await asyncio.wait_for(waits, PATIENCE) == ["m0", "m1"]
    with psycopg.connect(postgresql_url) as connection:
        assert locks(connection) == 2
    # When a transport that shares no connection with it receives, then it gets another message only
    other = SqlTransport(f"{postgresql_url}?keepalives=1")
    await other.start()
    receiver = await other.receiver("sales")
    await other.dispatch([operation("sales", "free")])
    assert ids(await received(receiver, 1)) == ["free"]
    await receiver.stop()
    await other.stop()


async def test_messages_of_a_cancelled_receive_are_received_by_the_next(
    sales: Sales, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receive that is cancelled when it has moved messages, before it returns them
    waits, moved = await sales.waits(5), sales.receiver.moved

    def then_cancel(rows: Sequence[tuple[object, ...]]) -> None:
        moved(rows)
        waits.cancel()

    monkeypatch.setattr(sales.receiver, "moved", then_cancel)
    await sales.store_due(2)
    await sales.move()
    await asyncio.wait([waits])
    assert waits.cancelled()
    # Then the next one receives them
    assert sorted(ids(await received(sales.receiver, 2))) == ["m0", "m1"]


@pytest.mark.parametrize("earlier", [0, 2])
async def test_messages_of_a_cancelled_move_are_received(sales: Sales, postgresql_url: str, earlier: int) -> None:
    # Given a move that is cancelled while it waits for the server, as the first on its connection or later
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        await sales.move_and_handle(earlier)
        connection.execute(WAIT)
        connection.execute(f"SELECT pg_advisory_lock({LOCK})")
        waits = await sales.waits(5)
        await sales.store_due(2)
        moving = asyncio.create_task(sales.move())
        await eventually_async(lambda: _waits(connection))
        moving.cancel()
        connection.execute(f"SELECT pg_advisory_unlock({LOCK})")
        with pytest.raises(asyncio.CancelledError):
            await moving
    # Then its messages are not claimed for ever
    assert sorted(await asyncio.wait_for(waits, PATIENCE)) == ["m0", "m1"]


async def _waits(connection: psycopg.Connection, kind: str = "advisory") -> bool:
    query = "SELECT FROM pg_locks WHERE locktype = %s AND NOT granted"
    return bool(connection.execute(query, [kind]).fetchall())


async def test_a_move_whose_event_loop_is_closed_does_not_keep_the_claims(sales: Sales, postgresql_url: str) -> None:
    # Given a move that waits in the server, of an event loop that is closed meanwhile
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        await sales.move_and_handle(2)
        connection.execute(WAIT)
        connection.execute(f"SELECT pg_advisory_lock({LOCK})")
        waits = await sales.waits(5)
        await sales.store_due(2)
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # the task ends unfinished, on purpose
        moving = loop.create_task(sales.move())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        await eventually_async(lambda: _waits(connection))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()
        del moving
        connection.execute(f"SELECT pg_advisory_unlock({LOCK})")
        # Then the messages are received, on another connection of the claims
        assert sorted(await asyncio.wait_for(waits, PATIENCE)) == ["m0", "m1"]


async def test_a_stopped_receiver_gives_moved_messages_back(sales: Sales) -> None:
    waits = await sales.waits(5)
    await sales.store_due(2)
    await asyncio.gather(sales.move(), sales.receiver.stop())
    await asyncio.wait([waits])
    another = await sales.transport.receiver("sales")
    found = [] if waits.result() else await received(another, 2)
    assert sorted([*waits.result(), *ids(found)]) == ["m0", "m1"]
    await another.stop()


async def test_a_limited_queue_has_a_look_of_its_own(sales: Sales) -> None:
    # Given a queue with a limit of concurrency that its receiver has read
    await sales.transport.set_limits("sales", concurrency=1)
    await sales.store_due(2)
    await sales.move()
    assert len(await received(sales.receiver, 1)) == 1
    receives = asyncio.create_task(sales.receiver.receive(5))
    await sales.store_due(2)
    # When messages are moved, then none is claimed beyond the limit
    assert await sales.move() == 2
    assert not (await asyncio.wait([receives], timeout=0.3))[0]
    receives.cancel()


async def test_a_move_that_fails_leaves_no_locks(sales: Sales, postgresql_url: str) -> None:
    # Given a table that refuses rows at the end of the statement
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(FUNCTION)
        connection.execute(TRIGGER)
        waits = await sales.waits(5)
        await sales.store_due(2)
        # When they are moved, then no lock is left, and they move once it takes them
        with pytest.raises(BackendUnavailable):
            await sales.move()
        assert locks(connection) == 0
        connection.execute("DROP TRIGGER refuse ON delayline_messages")
        assert await sales.move() == 2
        assert await asyncio.wait_for(waits, PATIENCE) == ["m0", "m1"]
        assert locks(connection) == 2


@pytest.mark.parametrize("earlier", [0, 2])
async def test_an_answer_that_cannot_be_read_keeps_no_claims(sales: Sales, postgresql_url: str, earlier: int) -> None:
    # Given a due time that Python has no value for, which a move would return as the next one
    await sales.move_and_handle(earlier)
    waits = await sales.waits(5)
    await sales.store_due(2)
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("""UPDATE "sales.timeouts" SET due = 'infinity' WHERE id = 'm1'""")
        # When a message is moved, then the move fails, as the first on its connection or later, and claims nothing
        with pytest.raises(Exception, match="timestamp too large"):
            await asyncio.wait_for(sales.move(), PATIENCE)
        await eventually_async(lambda: waits.done() or not locks(connection))
    # Then the moved message is received
    assert await asyncio.wait_for(waits, PATIENCE) == ["m0"]


async def test_looks_at_the_same_time_claim_each_message_once(sales: Sales, postgresql_url: str) -> None:
    # Given a queue with ten messages, and two receivers that have looked before
    other = await sales.transport.receiver("sales")
    for receiver in (sales.receiver, other):
        await sales.transport.dispatch([operation("sales", "first")])
        await receiver.acknowledge_many(await received(receiver, 1))
    await sales.transport.dispatch([operation("sales", f"m{n}") for n in range(10)])
    # When both look at once
    found = [*await asyncio.gather(sales.receiver.receive(5), other.receive(5))]
    # Then each message is claimed by one of them, and locked once: given back, it is free for other processes
    assert sorted(ids([one for batch in found for one in batch])) == [f"m{n}" for n in range(10)]
    for batch in found:
        await sales.receiver.release_many(batch)
    with psycopg.connect(postgresql_url) as connection:
        await eventually_async(lambda: not locks(connection))
    await other.stop()


@pytest.mark.parametrize("earlier", [0, 2])
async def test_messages_of_a_cancelled_look_are_free(sales: Sales, postgresql_url: str, earlier: int) -> None:
    # Given a look that is cancelled while it waits for the server, as the first on its connection or later
    for _ in range(earlier):
        await sales.transport.dispatch([operation("sales", "earlier")])
        await sales.receiver.acknowledge_many(await received(sales.receiver, 1))
    await sales.transport.dispatch([operation("sales", f"m{n}") for n in range(3)])
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("LOCK TABLE delayline_messages")
        receiving = asyncio.create_task(sales.receiver.receive(5))
        await eventually_async(lambda: _waits(connection, "relation"))
        receiving.cancel()
        connection.commit()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        # Then its messages are free
        await eventually_async(lambda: not locks(connection))
    assert sorted(ids(await received(sales.receiver, 3))) == ["m0", "m1", "m2"]


async def test_a_message_that_was_handled_before_it_was_locked_is_not_received(
    sales: Sales, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a message that another process deletes after the look has found it, and before it is read
    await sales.transport.dispatch([operation("sales", f"m{n}") for n in range(2)])
    claims = sales.receiver._claims
    assert isinstance(claims, AdvisoryLockClaims)
    take_next = claims.take_next

    async def then_delete(*args: object) -> Page:
        page = await take_next(*args)  # type: ignore[arg-type]
        async with await psycopg.AsyncConnection.connect(postgresql_url) as connection:
            await connection.execute("DELETE FROM delayline_messages WHERE id = 'm0'")
        return page

    monkeypatch.setattr(claims, "take_next", then_delete)
    # When it is received, then only the other one is, and only that is claimed
    assert ids(list(await sales.receiver.receive(5))) == ["m1"]
    assert claims.number_claimed_after(0) - claims.number_claimed_after(FIRST_NUMBER - 1) == 1


def locks(connection: psycopg.Connection) -> int:
    """Return how many messages are locked in the database; the numbers of receivers are above theirs."""
    query = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE locktype = 'advisory'"
    key = "((classid::bigint << 32) | objid::bigint) & ((1::bigint << 40) - 1)"
    [(number,)] = connection.execute(f"{query} AND datname = current_database() AND {key} < {FIRST_NUMBER}".encode())
    return int(number)


async def test_a_lost_session_is_replaced_while_every_worker_waits_for_it(sales: Sales) -> None:
    # Given workers that are busy, and behind their work what waits for the session of the claims
    database, claims = sales.transport._database, sales.receiver._claims
    assert isinstance(database, ServerDatabase)
    await sales.move_and_handle(1)
    await sales.transport.dispatch([operation("sales", "m")])
    busy = threading.Event()
    blocking = [asyncio.create_task(database.run(partial(busy.wait, PATIENCE))) for _ in range(database.workers)]
    waiting = [asyncio.create_task(database.run(claims.flush)) for _ in range(database.workers)]
    await settle()
    # When a look on the event loop finds the session lost, and has to connect on a worker
    database.sessions.lost(database.sessions.generation)
    looking = asyncio.create_task(received(sales.receiver, 1))
    await settle()
    busy.set()
    # Then neither waits for the other for ever
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*blocking, *waiting)
        assert ids(await looking) == ["m"]
