"""Sends inside the caller's own transaction: the message exists if and only if that commits, and is not late then."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from delayline import Endpoint, Message, MessageContext, QueueNotFound, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

SOON = timedelta(milliseconds=1)
LATER = timedelta(days=1)
#: Far below the receiver's and the poller's own next look.
PROMPT = 0.5
SELDOM = timedelta(seconds=30)


class CallerTransaction:
    """A transaction of the caller's, on a connection or session of one kind."""

    def __init__(self, given: Any, execute: Callable[[str], Any]) -> None:  # noqa: ANN401 - of every kind
        self.given = given
        self._execute = execute

    async def do(self, sql: str) -> None:
        done = self._execute(sql)
        if asyncio.iscoroutine(done):
            await done


def synchronous(enter: Callable[[str], Any], text_of: Callable[[str], Any] = text) -> Callable[[str], Any]:
    @contextlib.asynccontextmanager
    async def work(url: str) -> AsyncIterator[CallerTransaction]:
        with enter(url) as connection:
            yield CallerTransaction(connection, lambda sql: connection.execute(text_of(sql)) and None)

    return work


@contextlib.contextmanager
def sqlalchemy_connection(url: str) -> Any:  # noqa: ANN401
    with create_engine(url, poolclass=NullPool).begin() as connection:
        yield connection


@contextlib.contextmanager
def sqlalchemy_session(url: str) -> Any:  # noqa: ANN401
    with Session(create_engine(url, poolclass=NullPool)) as session, session.begin():
        yield session


@contextlib.contextmanager
def sqlalchemy_scoped_session(url: str) -> Any:  # noqa: ANN401
    session = scoped_session(sessionmaker(create_engine(url, poolclass=NullPool)))
    with session.begin():
        yield session
    session.remove()


@contextlib.contextmanager
def sqlite3_connection(url: str) -> Any:  # noqa: ANN401
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        connection.row_factory = lambda cursor, row: {"first": row[0]}
        connection.text_factory = bytes
        yield connection


@contextlib.contextmanager
def psycopg_connection(url: str) -> Any:  # noqa: ANN401
    with psycopg.connect(url, row_factory=dict_row) as connection:
        yield connection


@contextlib.contextmanager
def psycopg_block(url: str) -> Any:  # noqa: ANN401
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        yield connection


@contextlib.asynccontextmanager
async def async_connection(url: str) -> AsyncIterator[CallerTransaction]:
    async with create_async_engine(asynchronous(url), poolclass=NullPool).begin() as connection:
        yield CallerTransaction(connection, lambda sql: connection.execute(text(sql)))


@contextlib.asynccontextmanager
async def async_session(url: str) -> AsyncIterator[CallerTransaction]:
    async with AsyncSession(create_async_engine(asynchronous(url), poolclass=NullPool)) as session, session.begin():
        yield CallerTransaction(session, lambda sql: session.execute(text(sql)))


@contextlib.asynccontextmanager
async def asyncpg_session(url: str) -> AsyncIterator[CallerTransaction]:
    async with async_session(url.replace("psycopg", "asyncpg")) as work:
        yield work


@contextlib.asynccontextmanager
async def psycopg_async_connection(url: str) -> AsyncIterator[CallerTransaction]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as connection:
        yield CallerTransaction(connection, lambda sql: connection.execute(sql.encode()))


def asynchronous(url: str) -> str:
    return url.replace("sqlite:", "sqlite+aiosqlite:").replace("mariadb:", "mariadb+asyncmy:")


def same(sql: str) -> str:
    return sql


SQLITE: dict[str, Any] = {
    "sqlite3": synchronous(sqlite3_connection, same),
    "Connection": synchronous(sqlalchemy_connection),
    "Session": synchronous(sqlalchemy_session),
    "scoped_session": synchronous(sqlalchemy_scoped_session),
    "AsyncConnection": async_connection,
    "AsyncSession": async_session,
}
POSTGRESQL: dict[str, Any] = {
    "psycopg": synchronous(psycopg_connection, str.encode),
    "psycopg in a block": synchronous(psycopg_block, str.encode),
    "Connection": synchronous(sqlalchemy_connection),
    "Session": synchronous(sqlalchemy_session),
    "AsyncConnection": async_connection,
    "AsyncSession": async_session,
    "AsyncSession on asyncpg": asyncpg_session,
    "psycopg async": psycopg_async_connection,
}
KINDS = [("sqlite", kind) for kind in SQLITE] + [("postgresql", kind) for kind in POSTGRESQL]


class RecordingEndpoint:
    """An endpoint that records its handled messages and their times."""

    def __init__(self, url: str, callers_url: str, begin: Any) -> None:  # noqa: ANN401
        self.url = url
        self.transport = SqlTransport(url, poll_interval=SELDOM)
        delivery = StoredDelivery(SqlDelayedMessageStore(url))
        self.endpoint = Endpoint("shop", transport=self.transport, delayed_delivery=delivery)
        self.handled: dict[str, float] = {}
        self._news = asyncio.Condition()
        self._begin = begin
        self._callers_url = callers_url

        @self.endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            async with self._news:
                self.handled[message.text] = time.monotonic()
                self._news.notify_all()

    def begin(self) -> AbstractAsyncContextManager[CallerTransaction]:
        began: AbstractAsyncContextManager[CallerTransaction] = self._begin(self._callers_url)
        return began

    async def handles(self, *texts: str) -> None:
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(lambda: set(texts) <= set(self.handled))

    async def exist(self) -> list[str]:
        """Return the pending and the queued messages; none of them is being handled."""
        waiting = [message.message.text for message in await self.endpoint.delayed.pending()]
        return waiting + [message.text for message in await self.transport.browse("shop", 10)]


class RolledBack(Exception):
    """The error with which a caller rolls back."""


def urls(product: str, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the URL of a database for delayline, and for callers who go to SQLAlchemy or the driver themselves."""
    if product == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/shop.db"
    url: str = request.getfixturevalue("postgresql_url")
    return url, url


@pytest.fixture(params=KINDS, ids=lambda kind: " ".join(kind))
async def endpoint_(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RecordingEndpoint]:
    product, kind = request.param
    url, callers_url = urls(product, tmp_path, request)
    if product == "postgresql" and not kind.startswith("psycopg"):
        callers_url = url.replace("postgresql:", "postgresql+psycopg:")
    endpoint_ = RecordingEndpoint(url, callers_url, (SQLITE if product == "sqlite" else POSTGRESQL)[kind])
    async with endpoint_.endpoint:
        async with endpoint_.begin() as work:
            await work.do("CREATE TABLE orders (number integer)")
        yield endpoint_


async def test_a_commit_stores_the_message_and_wakes_receivers(endpoint_: RecordingEndpoint) -> None:
    """Given a transaction with an order, when it commits, then the messages sent in it are handled at once."""
    async with endpoint_.begin() as work:
        await work.do("INSERT INTO orders VALUES (17)")
        await endpoint_.endpoint.send("shop", "now", transaction=work.given)
        await endpoint_.endpoint.send("shop", "soon", delay=SOON, transaction=work.given)
        await endpoint_.endpoint.send("shop", "later", delay=LATER, transaction=work.given)
        assert await endpoint_.exist() == []
        assert endpoint_.handled == {}
    committed = time.monotonic()
    await endpoint_.handles("now", "soon")
    assert max(endpoint_.handled.values()) - committed < PROMPT
    assert "later" in await endpoint_.exist()


async def test_the_first_statement_of_a_transaction_may_be_a_send(endpoint_: RecordingEndpoint) -> None:
    """Given a transaction that has not begun, when a message is sent in it, then it is the caller's all the same."""
    with contextlib.suppress(RolledBack):
        async with endpoint_.begin() as work:
            await endpoint_.endpoint.send("shop", "later", delay=LATER, transaction=work.given)
            assert await endpoint_.exist() == []
            raise RolledBack
    assert await endpoint_.exist() == []


async def test_a_rollback_leaves_nothing(endpoint_: RecordingEndpoint) -> None:
    """Given messages sent in a transaction, when it rolls back, then they never were."""
    with contextlib.suppress(RolledBack):
        async with endpoint_.begin() as work:
            await work.do("INSERT INTO orders VALUES (17)")
            await endpoint_.endpoint.send("shop", "now", transaction=work.given)
            await endpoint_.endpoint.send("shop", "later", delay=LATER, transaction=work.given)
            raise RolledBack
    async with endpoint_.begin() as work:
        await endpoint_.endpoint.send("shop", "next", transaction=work.given)
    await endpoint_.handles("next")
    assert list(endpoint_.handled) == ["next"]
    assert "later" not in await endpoint_.exist()


async def test_a_savepoint_rolled_back_takes_its_messages_with_it(endpoint_: RecordingEndpoint) -> None:
    """Given a savepoint in a transaction, when only that is rolled back, then only its messages never were."""
    async with endpoint_.begin() as work:
        await work.do("INSERT INTO orders VALUES (17)")
        await endpoint_.endpoint.send("shop", "kept", transaction=work.given)
        await work.do("SAVEPOINT part")
        await endpoint_.endpoint.send("shop", "undone now", transaction=work.given)
        await endpoint_.endpoint.send("shop", "undone later", delay=LATER, transaction=work.given)
        await work.do("ROLLBACK TO SAVEPOINT part")
        await endpoint_.endpoint.send("shop", "last", transaction=work.given)
    await endpoint_.handles("kept", "last")
    assert set(endpoint_.handled) == {"kept", "last"}
    assert "undone later" not in await endpoint_.exist()


async def test_a_queue_that_is_not_there_spoils_nothing(endpoint_: RecordingEndpoint) -> None:
    """Given a transaction, when a send in it fails for want of a queue, then the transaction goes on."""
    async with endpoint_.begin() as work:
        with pytest.raises(QueueNotFound):
            await endpoint_.endpoint.send("nowhere", "", transaction=work.given)
        await endpoint_.endpoint.send("shop", "now", transaction=work.given)
    await endpoint_.handles("now")


async def test_an_overdue_message_is_sent_in_the_transaction_as_the_first_use_of_an_endpoint(tmp_path: Path) -> None:
    """Given an endpoint's first send, when it is due already, then it is part of the transaction that it was given."""
    url = f"sqlite:///{tmp_path}/shop.db"
    transport = SqlTransport(url)

    def endpoint_(**settings: Any) -> Endpoint:  # noqa: ANN401 - of every kind
        delivery = StoredDelivery(SqlDelayedMessageStore(url))
        return Endpoint("shop", transport=transport, delayed_delivery=delivery, **settings)

    await endpoint_().setup()
    transport = SqlTransport(url)
    async with endpoint_(send_only=True, setup_infrastructure=False) as sender:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            await sender.send("shop", "x", deliver_at=datetime(2020, 1, 1, tzinfo=UTC), transaction=connection)
            assert await transport.count("shop") == 0, "not committed yet"
            connection.execute("COMMIT")
        assert await transport.count("shop") == 1
