"""Transactions over two databases without crashes, and refused combinations."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.conftest import running
from tests.servers.postgresql import PostgresqlServer

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    Guarantee,
    Message,
    StoredDelivery,
    TransactionMode,
)
from delayline.errors import BackendUnusable, UnsupportedTransactionMode
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.sql.postgresql.two_phase import PostgresqlTwoPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from sqlalchemy import Connection

DUE = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def second_url(postgresql: PostgresqlServer) -> Iterator[str]:
    url = postgresql.new_database()
    yield url
    postgresql.drop_database(url)


def delayed(number: int) -> DelayedMessage:
    return DelayedMessage(Message(f"{number}", {}, b""), "shop", DUE)


def sent(number: int) -> TransportOperation:
    return TransportOperation(Message(f"{number}", {}, b""), "shop")


def driven(url: str) -> str:
    """Return the URL with the driver that we have."""
    return url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+pymysql:")


class TwoDatabases:
    """Queues in one database, a store in another, and a count of prepared transactions."""

    def __init__(self, queues: str, waiting: str) -> None:
        self.queues = queues
        self.both = TwoPhaseCommit()
        self.transport = SqlTransport(queues, two_phase=self.both)
        self.store = SqlDelayedMessageStore(waiting, two_phase=self.both)
        delivery = StoredDelivery(self.store, polling=False)
        self.endpoint = Endpoint("shop", transport=self.transport, delayed_delivery=delivery)
        self.prepared: list[str] = []

    async def exist(self) -> tuple[list[str], list[str]]:
        queued = [message.id for message in await self.transport.browse("shop", 10)]
        return queued, [message.id for message in await self.store.pending()]


@pytest.fixture(params=["postgresql_url", "mariadb_url"])
async def pair(
    request: pytest.FixtureRequest, second_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TwoDatabases]:
    """Queues in either product, the store in PostgreSQL."""
    pair = TwoDatabases(request.getfixturevalue(request.param), second_url)
    prepare = PostgresqlTwoPhase.prepare

    def noting(self: PostgresqlTwoPhase, connection: Connection, name: str) -> None:
        prepare(self, connection, name)
        pair.prepared.append(name)

    monkeypatch.setattr(PostgresqlTwoPhase, "prepare", noting)
    async with pair.endpoint:
        yield pair


async def test_both_or_neither(pair: TwoDatabases) -> None:
    """Given work in both databases, when the transaction ends, then both have it or neither has."""
    assert pair.endpoint.guarantee is Guarantee.EXACTLY_ONCE
    assert pair.endpoint.transaction_mode is TransactionMode.TRANSACTION_SCOPE
    async with pair.transport.transaction() as transaction:
        await pair.transport.dispatch([sent(1)], transaction)
        await pair.store.store(delayed(1), transaction)
        assert await pair.exist() == ([], [])
    assert await pair.exist() == (["1"], ["1"])
    with pytest.raises(KeyError):
        async with pair.store.transaction() as transaction:
            await pair.store.store(delayed(2), transaction)
            await pair.transport.dispatch([sent(2)], transaction)
            raise KeyError
    assert await pair.exist() == (["1"], ["1"])
    assert len(pair.prepared) == 1


async def test_work_in_one_database_is_an_ordinary_commit(pair: TwoDatabases) -> None:
    """Given a transaction that touches one database only, when it commits, then nothing is prepared."""
    async with pair.transport.transaction() as transaction:
        await pair.store.store(delayed(1), transaction)
    async with pair.transport.transaction() as transaction:
        await pair.transport.dispatch([sent(1)], transaction)
    async with pair.transport.transaction():
        pass
    assert await pair.exist() == (["1"], ["1"])
    assert pair.prepared == []


async def test_a_savepoint_spans_both(pair: TwoDatabases) -> None:
    """Given a part of a transaction that fails, when it is undone, then it is in both databases."""
    async with pair.transport.transaction() as transaction:
        await pair.store.store(delayed(1), transaction)
        with pytest.raises(KeyError):
            async with transaction.savepoint():
                await pair.store.store(delayed(2), transaction)
                await pair.transport.dispatch([sent(2)], transaction)
                raise KeyError
        await pair.transport.dispatch([sent(3)], transaction)
    assert await pair.exist() == (["3"], ["1"])


async def test_a_cancelled_commit_is_finished_first(pair: TwoDatabases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a commit in progress, when its task is cancelled, then both have committed, and waiting callers get the
    result.
    """
    called: list[str] = []
    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    original = PostgresqlTwoPhase.prepare

    def cancelling(self: PostgresqlTwoPhase, connection: Connection, name: str) -> None:
        loop.call_soon_threadsafe(tasks[0].cancel)
        original(self, connection, name)

    monkeypatch.setattr(PostgresqlTwoPhase, "prepare", cancelling)

    async def work() -> None:
        async with pair.transport.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await pair.transport.dispatch([sent(1)], transaction)
            await pair.store.store(delayed(1), transaction)

    tasks.append(asyncio.create_task(work()))
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await pair.exist() == (["1"], ["1"])
    assert called == ["committed"]


async def test_a_failed_transaction_is_not_prepared(pair: TwoDatabases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a branch that PostgreSQL rolls back without an error, when it is prepared, then nothing is committed."""
    original = PostgresqlTwoPhase.prepare

    def after_a_mistake(self: PostgresqlTwoPhase, connection: Connection, name: str) -> None:
        with pytest.raises(psycopg.Error):
            connection.connection.cursor().execute("SELECT nonsense")
        original(self, connection, name)

    monkeypatch.setattr(PostgresqlTwoPhase, "prepare", after_a_mistake)
    with pytest.raises(BackendUnavailable, match="rolled the transaction back instead of preparing it"):
        async with pair.transport.transaction() as transaction:
            await pair.transport.dispatch([sent(1)], transaction)
            await pair.store.store(delayed(1), transaction)
    assert await pair.exist() == ([], [])


async def test_decisions_are_forgotten(pair: TwoDatabases) -> None:
    """Given transactions that are finished, when the endpoint stops, then no decision is left."""
    for number in range(3):
        async with pair.transport.transaction() as transaction:
            await pair.transport.dispatch([sent(number)], transaction)
            await pair.store.store(delayed(number), transaction)
    await pair.endpoint.stop()
    with create_engine(driven(pair.queues), poolclass=NullPool).connect() as connection:
        assert connection.execute(text("SELECT id FROM delayline_decisions")).all() == [("log",)]


async def test_other_pairs_are_left_alone(pair: TwoDatabases, postgresql: PostgresqlServer, second_url: str) -> None:
    """Given something prepared by a pair with the same store and other queues, when we recover, then it stays."""
    other_queues = postgresql.new_database()
    with psycopg.connect(second_url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT 1")
        connection.execute("PREPARE TRANSACTION 'delayline-0123456789abcdef-x-1'")
        await pair.both.recover()
        prepared = connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall()
        assert prepared == [("delayline-0123456789abcdef-x-1",)]
        connection.execute("ROLLBACK PREPARED 'delayline-0123456789abcdef-x-1'")
    postgresql.drop_database(other_queues)


@pytest.mark.server
async def test_a_server_that_prepares_nothing_is_refused(postgresql_url: str) -> None:
    """Given a server as it is installed, when an endpoint starts that needs prepared transactions, then it says so."""
    with running(PostgresqlServer, "fsync=off", "max_prepared_transactions=0") as server:
        pair = TwoDatabases(postgresql_url, server.new_database())
        with pytest.raises(BackendUnusable, match=r"set max_prepared_transactions in postgresql\.conf .* restart"):
            await pair.endpoint.start()
        other = TwoDatabases(server.new_database(), postgresql_url)  # the queues' database prepares nothing
        async with other.endpoint:
            pass


def test_databases_that_cannot_prepare_are_refused(tmp_path: Path) -> None:
    """Given SQLite, when it is to take part, then that is refused at once, with what to do instead."""
    remedy = re.escape("keep queues and store in one database, or leave out two_phase and use")
    with pytest.raises(UnsupportedTransactionMode, match=remedy):
        SqlTransport(f"sqlite:///{tmp_path}/one.db", two_phase=TwoPhaseCommit())
    with pytest.raises(UnsupportedTransactionMode, match=remedy):
        SqlDelayedMessageStore(f"sqlite:///{tmp_path}/two.db", two_phase=TwoPhaseCommit())


async def test_a_pair_is_a_pair(postgresql_url: str, second_url: str, pair: TwoDatabases) -> None:
    """Given a TwoPhaseCommit, when it is used with two transports, or with none, then the error says so."""
    with pytest.raises(ConfigurationError, match="one transport's database"):
        SqlTransport(second_url, two_phase=pair.both)
    alone = SqlDelayedMessageStore(second_url, two_phase=TwoPhaseCommit())
    await alone.setup_infrastructure("alone")
    with pytest.raises(ConfigurationError, match=r"has no transport: pass it to SqlTransport\(two_phase=...\) too"):
        await alone.initialize("alone", TransactionMode.NONE)
    stranger = SqlDelayedMessageStore(postgresql_url)
    await stranger.setup_infrastructure("stranger")
    await stranger.initialize("stranger", TransactionMode.NONE)
    async with TwoPhaseCommit().transaction() as transaction:
        with pytest.raises(TypeError, match="cannot span"):
            await stranger.store(delayed(1), transaction)
        await asyncio.sleep(0)
    await stranger.close()
