"""Transactions that a server gives up in favour of others: they are repeated, and count against no message."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url
from tests.eventually import PATIENCE, eventually_async

from delayline import Endpoint, Message, MessageContext, Recoverability, StoredDelivery
from delayline.errors import TransactionConflict
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at, examine
from delayline.sql.server import run
from delayline.testing.conformance.messages import delayed
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The first three changes fail; numbers of sequences are not undone with their transactions.
CONFLICTS_OF_POSTGRESQL = """
CREATE SEQUENCE conflicts;
CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF nextval('conflicts') <= {number} THEN
    RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '{state}';
  END IF;
  RETURN {row};
END $$;
CREATE TRIGGER conflict BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION conflict()
"""
CONFLICTS_OF_MARIADB = """
CREATE TRIGGER conflict BEFORE {event} ON {table} FOR EACH ROW
  IF NEXTVAL(conflicts) <= {number} THEN SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END IF
"""


def conflict(url: str, event: str, table: str, number: int, *, state: str = "40001") -> None:
    """Let the first changes of a table fail, as if others had been preferred."""
    if url.startswith("postgresql"):
        row = "OLD" if event == "DELETE" else "NEW"
        statements = CONFLICTS_OF_POSTGRESQL.format(event=event, table=table, number=number, row=row, state=state)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statements.encode())
        return
    where = make_url(url)
    with pymysql.connect(
        host=where.host, port=where.port or 0, user=where.username, database=where.database, autocommit=True
    ) as mariadb:
        cursor = mariadb.cursor()
        cursor.execute("CREATE SEQUENCE conflicts")
        cursor.execute(CONFLICTS_OF_MARIADB.format(event=event, table=table, number=number))


@pytest.fixture(params=["postgresql_url", "mariadb_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def endpoint_at(url: str, mode: TransactionMode = TransactionMode.TRANSACTION_SCOPE) -> Endpoint:
    return Endpoint(
        "sales",
        transport=SqlTransport(url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
        transaction_mode=mode,
        recoverability=Recoverability(immediate_retries=0, delayed_retries=0),
    )


async def set_up(endpoint: Endpoint, url: str) -> None:
    await endpoint.setup()
    await SqlTransport(url).setup_infrastructure(["out"])


@pytest.mark.parametrize("mode", [TransactionMode.TRANSACTION_SCOPE, TransactionMode.RECEIVE_ONLY])
@pytest.mark.parametrize("sends", [True, False])
async def test_a_handler_runs_once_however_often_its_completion_conflicts(
    server_url: str, mode: TransactionMode, sends: bool
) -> None:
    # Given a server that gives the first completions up
    endpoint, handled = endpoint_at(server_url, mode), list[str]()
    await set_up(endpoint, server_url)
    conflict(server_url, "DELETE", "delayline_messages", 3)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)
        if sends:
            await context.send("out", b"", message_id=f"sent for {message.id}")

    # When a message is handled
    async with asyncio.timeout(PATIENCE), endpoint:
        await endpoint.send("sales", b"", message_id="m")
        transport = SqlTransport(server_url)
        await transport.start()

        async def is_complete() -> bool:
            return await transport.count("sales") == 0

        await eventually_async(is_complete, "the message is removed")
        # Then it was handled once, and its completion was repeated
        assert handled == ["m"]
        assert [message.id for message in await transport.browse("out", 10)] == (["sent for m"] if sends else [])
        assert await transport.count("error") == 0
        await transport.stop()


async def test_a_conflict_that_does_not_end_counts_against_no_message(server_url: str) -> None:
    endpoint, handled = endpoint_at(server_url), list[str]()
    await set_up(endpoint, server_url)
    conflict(server_url, "DELETE", "delayline_messages", 20)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)
        await context.send("out", b"")

    async with asyncio.timeout(PATIENCE), endpoint:
        await endpoint.send("sales", b"", message_id="m")
        transport = SqlTransport(server_url)
        await transport.start()

        async def is_complete() -> bool:
            return await transport.count("sales") == 0

        await eventually_async(is_complete, "the message is removed")
        assert await transport.count("error") == 0
        assert await transport.count("out") == 1
        await transport.stop()


@pytest.mark.parametrize("state", ["40001", "40P01"])
async def test_a_lease_that_conflicts_is_taken_again(postgresql_url: str, state: str) -> None:
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    conflict(postgresql_url, "UPDATE", '"sales.timeouts"', 3, state=state)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        await store.store(delayed("m"))
        [found] = await store.fetch_due(delayed("m").due, 10, max_bytes=1 << 20)
        assert found.id == "m"
    finally:
        await store.close()


async def test_the_last_conflict_says_what_it_is(server_url: str) -> None:
    store = SqlDelayedMessageStore(server_url)
    await store.setup_infrastructure("sales")
    table = '"sales.timeouts"' if server_url.startswith("postgresql") else "`sales.timeouts`"
    conflict(server_url, "INSERT", table, 1000)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        with pytest.raises(TransactionConflict, match="in favour of another"):
            await store.store(delayed("m"))
    finally:
        await store.close()


@pytest.fixture
def serializable_url(postgresql_url: str) -> Iterator[str]:
    """A database of which an administrator has made all transactions serializable."""
    name = make_url(postgresql_url).database
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = serializable".encode())
    yield postgresql_url
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation".encode())


async def test_transactions_read_what_is_committed_whatever_the_default_is(serializable_url: str) -> None:
    store, database = SqlDelayedMessageStore(serializable_url), database_at(serializable_url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    try:
        level = await database.read(lambda connection: run(connection, "SHOW transaction_isolation"))
        async with store.transaction() as transaction:
            inside = await database.write(lambda connection: run(connection, "SHOW transaction_isolation"), transaction)
    finally:
        await store.close()
    assert level == inside == [("read committed",)]
    found = {what: text for what, _, text in await examine(serializable_url)}
    assert found["default_transaction_isolation"].startswith("serializable: delayline's own transactions are read")


async def test_an_urls_own_settings_win(serializable_url: str) -> None:
    url = f"{serializable_url}?options=-c%20default_transaction_isolation%3Dserializable%20--lock-timeout%3D2s"
    database = database_at(url)
    await database.open()
    try:
        for name, value in {"transaction_isolation": "serializable", "lock_timeout": "2s", "jit": "off"}.items():
            assert await database.read(partial(run, sql=f"SHOW {name}")) == [(value,)]
    finally:
        await database.close()
