"""Set-up and start beside transactions of others, and of the caller: what is there already needs no lock."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url

from delayline import Endpoint, Message, MessageContext, StoredDelivery, SyncEndpoint
from delayline.errors import BackendUnavailable
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.deadlines import STOPPING
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def sending(url: str) -> Endpoint:
    """Return an endpoint as a web process has it."""
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
    return Endpoint("shop", transport=SqlTransport(url), delayed_delivery=delivery, send_only=True)


@pytest.fixture
def orders(file: Path) -> Iterator[sqlite3.Connection]:
    """Provide the caller's own connection, in the journal mode that files have by default."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE orders (number)")
        connection.commit()
        yield connection


def test_a_lazy_start_in_the_callers_transaction_writes_nothing(file: Path, orders: sqlite3.Connection) -> None:
    # Given a file where everything is set up, and a transaction of the caller that holds its write lock
    url = f"sqlite:///{file}"
    asyncio.run(sending(url).setup())
    asyncio.run(SqlTransport(url).setup_infrastructure(["billing"]))
    orders.execute("INSERT INTO orders VALUES (1)")
    # When the endpoint starts in that transaction, and sends in it
    with SyncEndpoint(sending(url)) as shop:
        shop.send("billing", "x", transaction=orders)
        orders.commit()
        # Then both are there
        assert shop.run(SqlTransport.count(shop.endpoint.transport, "billing")) == 1  # type: ignore[arg-type]


def test_a_start_that_has_to_write_names_the_process_that_holds_the_lock(
    file: Path, orders: sqlite3.Connection
) -> None:
    # Given a file without tables, and a transaction of the caller
    orders.execute("INSERT INTO orders VALUES (1)")
    # When the endpoint starts in it, with a minute's patience for locks of others
    shop = SyncEndpoint(sending(f"sqlite:///{file}?timeout=60"))
    # Then the caller is told soon that it waits for itself, and its transaction goes on
    with pytest.raises(BackendUnavailable, match=r"this process itself holds the write lock of .*delayline setup"):
        shop.start()
    orders.commit()


@pytest.mark.parametrize(
    "statements", [["BEGIN IMMEDIATE"], ["BEGIN", "SELECT * FROM orders"]], ids=["writer", "reader"]
)
async def test_a_start_waits_for_a_transaction_that_ends(
    file: Path, orders: sqlite3.Connection, statements: list[str]
) -> None:
    # Given a file without tables, in journal mode `delete`, and a transaction
    for statement in statements:
        orders.execute(statement).fetchall()
    # When an endpoint starts meanwhile, with more patience than that
    endpoint = sending(f"sqlite:///{file}?timeout=60")
    starting = asyncio.create_task(endpoint.start())
    await asyncio.wait([starting], timeout=1.5)  # longer than SQLite itself tries
    assert not starting.done()
    # Then it starts once the lock is free
    orders.commit()
    await starting
    await endpoint.stop()


def test_the_switch_to_a_wal_ends_with_the_timeout(file: Path, orders: sqlite3.Connection) -> None:
    # Given a reader that does not end
    orders.execute("BEGIN")
    orders.execute("SELECT * FROM orders").fetchall()
    # When an endpoint starts that waits half a second, then it says so after that time
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"holds the write lock"):
        asyncio.run(sending(f"sqlite:///{file}?timeout=0.5").start())
    assert time.monotonic() - began >= 0.5


def managed(url: str) -> Endpoint:
    """Return an endpoint with every table that one can need."""
    draining = TimeoutManagerDelivery(SqlTimeoutPersister(url))
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    return Endpoint("shop", transport=SqlTransport(url), delayed_delivery=delivery, draining=draining)


@contextlib.contextmanager
def building_indexes(url: str) -> Iterator[None]:
    """Hold the lock on every table that building an index takes: others may read, and write nothing."""
    parts = make_url(url)
    if parts.drivername.startswith("postgresql"):
        with psycopg.connect(host=parts.host, port=parts.port, user=parts.username, dbname=parts.database) as building:
            tables = building.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            for (table,) in tables:
                building.execute(psycopg.sql.SQL("LOCK TABLE {} IN SHARE MODE").format(psycopg.sql.Identifier(table)))
            yield
            building.rollback()
        return
    settings: dict[str, Any] = {
        "host": parts.host,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password or "",
    }
    with pymysql.connect(database=parts.database, **settings) as session, session.cursor() as cursor:
        cursor.execute("SHOW TABLES")
        locks = ", ".join(f"`{table}` READ" for (table,) in cursor.fetchall())
        cursor.execute(f"LOCK TABLES {locks}")
        yield
        cursor.execute("UNLOCK TABLES")


@pytest.fixture(params=["postgresql", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


async def test_a_start_needs_no_lock_that_an_index_build_refuses(server_url: str) -> None:
    # Given an endpoint that is set up, and a session that builds indexes on all of its tables
    await managed(server_url).setup()
    async with managed(server_url):
        pass
    endpoint = managed(server_url)
    with building_indexes(server_url):
        # When it starts, then it does not wait for that session
        async with asyncio.timeout(40):  # waits for the lock take minutes
            await endpoint.start()
    await endpoint.stop()


@pytest.mark.parametrize("locked", ["before its start", "before its stop"])
async def test_a_stop_waits_for_no_lock_that_an_index_build_holds(server_url: str, locked: str) -> None:
    """What it would write only helps: its note that it stops, and that its poller does not sleep."""
    endpoint = managed(server_url)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        """Nothing comes."""

    # Given an endpoint with a poller and a receiver, and a session that builds indexes on its tables
    await managed(server_url).setup()
    async with managed(server_url):
        pass
    with contextlib.ExitStack() as stack:
        if locked == "before its start":
            stack.enter_context(building_indexes(server_url))
        await endpoint.start()
        await asyncio.sleep(1.5)  # its poller and its receiver wait, for that lock or for messages
        if locked == "before its stop":
            stack.enter_context(building_indexes(server_url))
        # When it stops, then that does not take until answers are given up
        began = time.monotonic()
        await endpoint.stop()
        assert time.monotonic() - began < STOPPING - 1
