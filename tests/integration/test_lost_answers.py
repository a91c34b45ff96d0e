"""Answers of a server that are lost on the way: callers get an error that says the outcome is unknown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE
from tests.integration.wire_between import wire_to

from delayline import BackendUnavailable, Message, SqlDelayedMessageStore, SqlTransport, TransactionMode
from delayline.sql.databases import database_at
from delayline.sql.server_database import POOL_SIZE, ServerDatabase, workers_of
from delayline.testing.conformance.messages import delayed
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sqlalchemy import Connection
    from tests.integration.wire_between import Wire

    from delayline.transport import Receiver

WORKERS = workers_of(POOL_SIZE)
LATER = datetime(2100, 1, 1, tzinfo=UTC)
UNKNOWN = "The commit's outcome is unknown: check whether the data was written before repeating it"


class RemoteStore:
    """A store behind a proxy, and the same store connected directly."""

    def __init__(self, wire: Wire, url: str, near_url: str) -> None:
        self.wire, self.far_url = wire, url
        self.store, self.near = SqlDelayedMessageStore(url), SqlDelayedMessageStore(near_url)
        database = database_at(url)
        assert isinstance(database, ServerDatabase)
        self.database = database

    async def waiting(self) -> list[str]:
        return [message.id for message in await self.near.pending()]

    async def connect(self) -> None:
        """Have a connection for every worker thread, so that none has to be made when answers do not come."""
        together = threading.Barrier(WORKERS, timeout=PATIENCE)

        def work(connection: Connection) -> None:
            self.database.dialect.connections.ping(connection)
            together.wait()

        await asyncio.gather(*(self.database.read(work) for _ in range(WORKERS)))

    async def unanswered(self, work: Awaitable[object], done: Callable[[list[str]], bool] = lambda _: True) -> str:
        """Lose the answer to `work` after the server has executed it; return the error's text."""
        await self.connect()
        self.wire.hold_answers()
        working = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(PATIENCE):
                while not (self.wire.withheld and done(await self.waiting())):  # noqa: ASYNC110 - there is no notification
                    await asyncio.sleep(0.01)
        finally:
            self.wire.cut()
            self.wire.let_through()
        with pytest.raises(BackendUnavailable) as raised:
            await working
        return str(raised.value)


@contextlib.asynccontextmanager
async def distant(url: str) -> AsyncIterator[RemoteStore]:
    """Provide both, started and used."""
    async with wire_to(url) as (wire, far_url):
        both = RemoteStore(wire, far_url, url)
        await both.near.setup_infrastructure("sales")
        for store in (both.near, both.store):
            await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        try:
            for name in ("first", "second"):  # from the second one on some servers have a shorter way
                await both.store.store(delayed(name))
            yield both
        finally:
            await both.store.close()
            await both.near.close()


@contextlib.asynccontextmanager
async def queue_at(url: str) -> AsyncIterator[Receiver]:
    """Provide the receiver of a queue that has messages."""
    transport = SqlTransport(url)
    await transport.start()
    try:
        await transport.setup_infrastructure(["orders"])
        await transport.dispatch([TransportOperation(Message(name, {}, b""), "orders") for name in "abcdef"])
        receiver = await transport.receiver("orders")
        assert len(await receiver.receive(1)) == 1
        yield receiver
        await receiver.stop()
    finally:
        await transport.stop()


async def answers_are_lost(url: str) -> None:
    """Whatever is asked for whose effect is lasting, it says that its outcome is not known."""
    async with distant(url) as both:
        store = both.store
        assert UNKNOWN in await both.unanswered(store.store(delayed("third")), lambda ids: "third" in ids)
        assert UNKNOWN in await both.unanswered(store.remove(delayed("third")), lambda ids: "third" not in ids)
        # But what only reads, or is undone with its transaction, is not said to have an outcome
        assert UNKNOWN not in await both.unanswered(store.pending())
        transaction = store.transaction()
        await store.store(delayed("of a transaction"), transaction)
        lost = both.unanswered(store.store(delayed("undone"), transaction))
        assert UNKNOWN not in await lost
        await transaction._rollback()
        await store.store(delayed("next"))
        assert {"first", "second", "next"} <= {*await both.waiting()}
        assert not {"undone", "of a transaction"} & {*await both.waiting()}


async def answers_to_reads_are_lost(url: str) -> None:
    """What only reads has no outcome; what a receiver claims goes back to the queue with its connection."""
    async with distant(url) as both, queue_at(both.far_url) as receiver:
        for reading in (both.store.next_due, lambda: both.store.due_forecast([LATER]), lambda: receiver.receive(1)):
            assert UNKNOWN not in await both.unanswered(reading())


async def test_on_postgresql(postgresql_url: str) -> None:
    await answers_are_lost(postgresql_url)
    await answers_to_reads_are_lost(postgresql_url)


async def test_on_mariadb(mariadb_url: str) -> None:
    await answers_are_lost(mariadb_url)
    await answers_to_reads_are_lost(mariadb_url)
