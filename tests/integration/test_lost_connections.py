"""Connections that end in the middle of something: nothing happens outside its transaction, and life goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.eventually import PATIENCE
from tests.integration.conftest import waiting

from delayline import (
    BackendUnavailable,
    Endpoint,
    Event,
    Message,
    MessageContext,
    NotStarted,
    SqlDelayedMessageStore,
    SqlTransport,
    TransactionMode,
)
from delayline.message import in_utc
from delayline.sql.server_database import POOL_SIZE, ServerDatabase, workers_of
from delayline.testing import Signals
from delayline.testing.conformance.messages import AT, delayed, operation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delayline.transport import Receiver

TRANSACTIONS = POOL_SIZE - workers_of(POOL_SIZE)


class Server:
    """What another session does to ours."""

    def __init__(self, url: str) -> None:
        self.url = url

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def terminate(self, where: str = "true") -> int:
        """End connections and wait until they are gone."""
        ours = f"datname = current_database() AND application_name = 'delayline' AND {where}"
        ended = self.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {ours}")  # noqa: S608
        return len(ended)


@pytest.fixture
def server(postgresql_url: str) -> Server:
    return Server(postgresql_url)


@pytest.fixture
async def transport(postgresql_url: str) -> AsyncIterator[SqlTransport]:
    transport = SqlTransport(postgresql_url, poll_interval=timedelta(seconds=30))
    await transport.start()
    await transport.setup_infrastructure(["billing"])
    yield transport
    await transport.stop()


async def failures(number: int, call: Callable[[int], object]) -> int:
    """How many of so many calls, one after the other, find the server gone."""
    failed = 0
    for one in range(number):
        try:
            await call(one)  # type: ignore[misc]
        except BackendUnavailable:
            failed += 1
    return failed


IN_TRANSACTION = "state LIKE 'idle in transaction%'"


async def test_a_transaction_does_not_go_on_after_its_connection(store: SqlDelayedMessageStore, server: Server) -> None:
    # Given a transaction with something in it
    with pytest.raises(BackendUnavailable, match="middle of a transaction"):
        async with store.transaction() as transaction:
            await store.store(delayed("before"), transaction)
            # When its connection is lost while its user ignores errors
            assert server.terminate(IN_TRANSACTION) == 1
            with pytest.raises(BackendUnavailable, match=r"lost|ended") as raised:
                await store.store(delayed("at"), transaction)
            assert "outcome is unknown" not in str(raised.value)
            with pytest.raises(BackendUnavailable, match="middle of a transaction"):
                await store.store(delayed("after"), transaction)
    # Then nothing of it is there, and the commit has said so
    assert await waiting(store) == []
    await store.store(delayed("next"))
    assert await waiting(store) == ["next"]


async def test_a_commit_on_a_lost_connection_fails(store: SqlDelayedMessageStore, server: Server) -> None:
    called: list[str] = []
    with pytest.raises(BackendUnavailable, match="outcome is unknown: check"):
        async with store.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            transaction.after_end(lambda: called.append("ended"))
            await store.store(delayed(), transaction)
            server.terminate(IN_TRANSACTION)
    assert called == ["ended"]
    assert await waiting(store) == []


async def test_a_rollback_on_a_lost_connection_is_one(store: SqlDelayedMessageStore, server: Server) -> None:
    with pytest.raises(KeyError):
        async with store.transaction() as transaction:
            await store.store(delayed(), transaction)
            server.terminate(IN_TRANSACTION)
            raise KeyError
    assert await waiting(store) == []


async def test_one_call_fails_however_many_connections_are_lost(
    store: SqlDelayedMessageStore, transport: SqlTransport, server: Server
) -> None:
    # Given many connections, which statements and transactions share
    async with contextlib.AsyncExitStack() as stack:
        for number in range(TRANSACTIONS):
            transaction = await stack.enter_async_context(store.transaction())
            await store.store(delayed(f"t{number}"), transaction)
    await asyncio.gather(*(store.store(delayed(f"s{number}")) for number in range(40)))
    # When all of them are lost, and calls come one after the other
    assert server.terminate() >= TRANSACTIONS
    failed = await failures(20, lambda number: store.store(delayed(f"m{number}")))

    async def in_transaction(number: int) -> None:
        async with store.transaction() as transaction:
            await store.store(delayed(f"x{number}"), transaction)

    failed += await failures(20, in_transaction)
    failed += await failures(5, lambda number: transport.dispatch([operation("billing", str(number))]))
    # Then one of them finds out for all
    assert failed <= 1


async def receive(receiver: Receiver, number: int = 1) -> list[str]:
    """Receive messages, although receiving fails now and then."""
    found: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < number:
            with contextlib.suppress(BackendUnavailable):
                found += [one.message.id for one in await receiver.receive(number - len(found))]
    return found


async def test_claims_outlive_their_connection(transport: SqlTransport, server: Server) -> None:
    # Given a receiver with a message in hand
    await transport.dispatch([operation("billing", "held"), operation("billing", "free")])
    receiver, another = await transport.receiver("billing"), await transport.receiver("billing")
    [held] = await receiver.receive(1)
    # When every connection is lost
    server.terminate()
    # Then no other receiver of this process gets it, and its receiver can still acknowledge it, once
    assert await receive(another) == ["free"]
    acknowledged: list[bool] = []
    while not acknowledged:
        with contextlib.suppress(BackendUnavailable):  # once, where no receive has noticed
            acknowledged.append(await receiver.acknowledge(held))
    assert acknowledged == [True]
    assert await receiver.acknowledge(held) is False


@pytest.mark.parametrize("first_to_end", [0, 1])
async def test_a_second_handling_after_a_lost_claim_is_logged_and_has_no_effect(
    postgresql_url: str, server: Server, first_to_end: int
) -> None:
    # Given a message in the handler of one endpoint, and another endpoint on the queue that shares nothing with it
    begun, may_end = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]

    def endpoint(number: int, transport: SqlTransport) -> Endpoint:
        made = Endpoint("sales", transport=transport, concurrency=1)

        @made.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send("out", str(number))
            begun[number].set()
            await may_end[number].wait()

        return made

    transport, other = SqlTransport(postgresql_url), SqlTransport(f"{postgresql_url}?keepalives=1")
    await transport.setup_infrastructure(["sales", "error", "out"])
    async with asyncio.timeout(PATIENCE), endpoint(0, transport) as one:
        await one.send("sales", b"", message_id="m")
        await begun[0].wait()
        # When the session that claims it is ended, and the other endpoint gets the message too
        assert server.terminate("pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')") == 1
        async with endpoint(1, other):
            await begun[1].wait()
            with Signals() as signals:
                may_end[first_to_end].set()
                await signals.wait_for(Event.HANDLED, timeout=PATIENCE)
                may_end[1 - first_to_end].set()
                # Then the handling that ends last is logged, and only the first one's sends have left
                [lost] = await signals.wait_for(Event.RECEIVE_LOST, timeout=PATIENCE)
        assert "a possible duplicate" in lost.getMessage()
        sent = await transport.browse("out", 10)
    assert [message.body for message in sent] == [str(first_to_end).encode()]


@pytest.mark.parametrize("victim", ["query LIKE 'LISTEN%'", "query LIKE '%pg_notify%'", "true"])
async def test_receivers_are_woken_after_lost_connections(
    transport: SqlTransport, postgresql_url: str, server: Server, victim: str
) -> None:
    # Given a receiver that looks by itself every half minute only, and a sender that shares nothing with it
    sender = SqlTransport(f"{postgresql_url}?application_name=delayline&keepalives=1")
    await sender.start()
    try:
        receiver = await transport.receiver("billing")
        receiving = asyncio.create_task(receive(receiver, 3))
        await sender.dispatch([operation("billing", "first")])
        await asyncio.sleep(0.3)
        # When connections are lost, the listening one or the one that notifies
        assert server.terminate(victim) > 0
        await asyncio.sleep(0.1)
        for name in ("second", "third"):
            with contextlib.suppress(BackendUnavailable):  # from the first one that finds its connection gone
                await sender.dispatch([operation("billing", name)])
                continue
            await sender.dispatch([operation("billing", name)])
        # Then it is woken all the same
        async with asyncio.timeout(5):
            assert len(await receiving) == 3
    finally:
        await sender.stop()


async def test_cancelled_transactions_leave_the_lane(store: SqlDelayedMessageStore, database: ServerDatabase) -> None:
    async def work(number: int) -> None:
        async with store.transaction() as transaction:
            await store.store(delayed(f"m{number}"), transaction)
            async with transaction.savepoint():
                await store.fetch_due(AT, 1, max_bytes=10, transaction=transaction)

    # When transactions are cancelled wherever they are: waiting for the lane, beginning, working, ending
    for round_ in range(30):
        tasks = [asyncio.create_task(work(number)) for number in range(TRANSACTIONS * 2)]
        await asyncio.sleep(round_ * 0.0007)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # Then all permits of the semaphore are free, and no transaction is left open
    assert database.semaphore._free == TRANSACTIONS
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(work(number) for number in range(TRANSACTIONS * 2)))


async def test_closing_in_the_middle_of_a_transaction(
    transport: SqlTransport, database: ServerDatabase, server: Server
) -> None:
    # Given an open transaction while all users close the database and one opens it again
    transaction = transport.transaction()
    await transport.dispatch([operation("billing", "lost")], transaction)
    await transport.stop()
    await transport.start()
    # When it is used and ended
    with pytest.raises(NotStarted, match="middle of a transaction"):
        await transport.dispatch([operation("billing", "lost too")], transaction)
    await transaction._rollback()
    # Then it has had no effect, neither on the database nor on the semaphore
    assert await transport.count("billing") == 0
    assert database.semaphore._free == TRANSACTIONS
    assert server.execute(f"SELECT FROM pg_stat_activity WHERE {IN_TRANSACTION}") == []


async def test_a_fork_in_the_middle_of_use(
    store: SqlDelayedMessageStore, transport: SqlTransport, postgresql_url: str
) -> None:
    # Given a process with everything in use
    await transport.dispatch([operation("billing", "held")])
    receiver = await transport.receiver("billing")
    [held] = await receiver.receive(1)
    async with store.transaction() as transaction:
        await store.store(delayed("parent"), transaction)
        # When it forks, and the child uses the database by itself and ends
        child = os.fork()
        if child == 0:
            os._exit(_in_child(postgresql_url))
        async with asyncio.timeout(PATIENCE):
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    # Then the parent goes on as if nothing had been
    assert sorted(await waiting(store)) == ["child", "parent"]
    assert await receiver.acknowledge(held) is True


def _in_child(url: str) -> int:
    signal.alarm(15)

    async def use() -> None:
        store = SqlDelayedMessageStore(url)
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        async with store.transaction() as transaction:
            await store.store(delayed("child", in_utc(AT)), transaction)
        await store.close()

    try:
        asyncio.events._set_running_loop(None)
        asyncio.run(use())
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        return 1
    return 0
