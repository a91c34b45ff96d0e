"""A caller's transaction that messages cannot be part of is refused; one that reaches only the store is enough."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import aiosqlite
import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import pymysql
import pymysql.cursors
import pytest
from sqlalchemy import create_engine, event, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    QueueNotFound,
    Send,
    StoredDelivery,
    SyncEndpoint,
)
from delayline.sql import SqlDelayedMessageStore, SqlTransport, external

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.servers.mariadb import MariadbServer
    from tests.servers.postgresql import PostgresqlServer

LATER = timedelta(days=1)
SELDOM = timedelta(seconds=30)


def shop_in(url: str, queues: str | None = None) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    return Endpoint("shop", transport=SqlTransport(queues or url, poll_interval=SELDOM), delayed_delivery=delivery)


def noting(endpoint: Endpoint) -> Callable[[], bool]:
    """Let the endpoint handle; return how to wait, on any thread, until it has."""
    handled = threading.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.set()

    return partial(handled.wait, 10)


async def test_another_sqlite_file_is_refused(tmp_path: Path) -> None:
    """Given the messages in one file, when a transaction is on another, or in memory, then it is refused, and named."""
    async with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop:
        for file, named in ((tmp_path / "other.db", "SQLite file .*other.db"), (":memory:", "SQLite in memory")):
            with contextlib.closing(sqlite3.connect(file)) as connection:
                with pytest.raises(ConfigurationError, match=f"is on the {named}, .* SQLite file .*shop.db: begin it"):
                    await shop.send("shop", "", delay=LATER, transaction=connection)
                with pytest.raises(ConfigurationError, match="begin it on a connection to that database"):
                    await shop.send("shop", "", transaction=connection)


async def test_one_file_under_two_names_is_one_database(tmp_path: Path) -> None:
    """Given a symbolic link to the file, when a transaction is on the link's name, then it is the same database."""
    (tmp_path / "link.db").symlink_to(tmp_path / "shop.db")
    async with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop:
        with contextlib.closing(sqlite3.connect(tmp_path / "link.db")) as connection, connection:
            await shop.send("shop", "", delay=LATER, transaction=connection)
        assert len(await shop.delayed.pending()) == 1


async def test_another_product_is_refused_unasked(tmp_path: Path, postgresql_url: str) -> None:
    """Given the messages in SQLite, when a transaction is on PostgreSQL, then it is refused, and can go on."""
    async with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop:
        with psycopg.connect(postgresql_url) as connection:
            connection.execute("SELECT 1")
            with pytest.raises(ConfigurationError, match=r"a connection to postgresql, .* in the SQLite file"):
                await shop.send("shop", "", transaction=connection)
            connection.execute("SELECT 1")


async def test_another_database_of_the_server_is_refused(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    """Given the messages in one database, when a transaction is on the one beside it, then it is refused."""
    other = postgresql.new_database()
    async with shop_in(other), shop_in(postgresql_url) as shop:
        with psycopg.connect(other) as connection:
            with pytest.raises(ConfigurationError, match=r"is on the PostgreSQL database test_\w+, .*: begin it"):
                await shop.send("shop", "", delay=LATER, transaction=connection)
            connection.execute("SELECT 1")
    postgresql.drop_database(other)


async def test_mariadb_through_sqlalchemy(mariadb: MariadbServer, mariadb_url: str) -> None:
    """Given the messages in MariaDB, when a session there sends, then they are its own; another database is refused."""
    other, driver = mariadb.new_database(), "mariadb+pymysql:"
    async with shop_in(mariadb_url) as shop:
        engine = create_engine(mariadb_url.replace("mariadb:", driver), poolclass=NullPool)
        with Session(engine) as session:
            await shop.send("shop", "undone", delay=LATER, transaction=session)
            session.rollback()
            await shop.send("shop", "kept", delay=LATER, transaction=session)
            assert await shop.delayed.pending() == []
            session.commit()
        assert [message.message.text for message in await shop.delayed.pending()] == ["kept"]
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with autocommit.connect() as connection, pytest.raises(ConfigurationError, match="in autocommit"):
            await shop.send("shop", "", transaction=connection)
        elsewhere = create_engine(other.replace("mariadb:", driver), poolclass=NullPool)
        with (
            Session(elsewhere) as session,
            pytest.raises(ConfigurationError, match=r"is on the MariaDB database test_\w+"),
        ):
            await shop.send("shop", "", transaction=session)
    mariadb.drop_database(other)


async def test_another_schema_is_refused(postgresql_url: str) -> None:
    """Given a connection whose search path leads elsewhere, when it sends, then that is refused."""
    async with shop_in(postgresql_url) as shop:
        with psycopg.connect(postgresql_url, options="-c search_path=pg_catalog") as connection:
            with pytest.raises(
                ConfigurationError, match=r"'shop.timeouts' does not mean delayline's table.*search_path"
            ):
                await shop.send("shop", "", delay=LATER, transaction=connection)
            connection.execute("SELECT 1")


async def test_plain_users_may_send(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    """Given a user with rights on the tables only, on the server's socket, when it sends, then it may."""
    async with shop_in(postgresql_url) as shop:
        with postgresql.administrator(postgresql_url.rsplit("/", 1)[1]) as administrator:
            administrator.execute("DROP ROLE IF EXISTS plain")
            administrator.execute("CREATE ROLE plain LOGIN")
            administrator.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO plain")
        options: dict[str, Any] = {"host": str(postgresql.folder), "port": postgresql.port, "user": "plain"}
        with psycopg.connect(dbname=postgresql_url.rsplit("/", 1)[1], **options) as connection:
            await shop.send("shop", "", delay=LATER, transaction=connection)
        assert len(await shop.delayed.pending()) == 1
        with postgresql.administrator(postgresql_url.rsplit("/", 1)[1]) as administrator:
            administrator.execute("DROP OWNED BY plain")
            administrator.execute("DROP ROLE plain")


async def test_autocommit_is_refused_on_sqlite(tmp_path: Path) -> None:
    """Given connections in autocommit, when they send, then each is refused with the remedy, which works."""
    url, file = f"sqlite:///{tmp_path}/shop.db", tmp_path / "shop.db"
    async with shop_in(url) as shop:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
            with pytest.raises(ConfigurationError, match=r"in autocommit.* or execute BEGIN first"):
                await shop.send("shop", "", delay=LATER, transaction=connection)
            connection.execute("BEGIN")
            await shop.send("shop", "", delay=LATER, transaction=connection)
            connection.execute("COMMIT")
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as autocommit:
            with pytest.raises(ConfigurationError, match='without isolation_level="AUTOCOMMIT"'):
                await shop.send("shop", "", delay=LATER, transaction=autocommit)
            assert not autocommit.in_transaction()
        asynchronous = create_async_engine(f"sqlite+aiosqlite:///{file}", isolation_level="AUTOCOMMIT")
        async with asynchronous.connect() as autocommitting:
            with pytest.raises(ConfigurationError, match="in autocommit"):
                await shop.send("shop", "", delay=LATER, transaction=autocommitting)
        await asynchronous.dispose()
        assert len(await shop.delayed.pending()) == 1


async def test_sqlalchemys_recipe_for_real_transactions_is_no_autocommit(tmp_path: Path) -> None:
    """Given an engine that begins by statement, as SQLAlchemy advises for SQLite, when it sends, then that works."""
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db", poolclass=NullPool)
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    async with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop:
        with engine.begin() as connection, connection.begin_nested() as part:
            await shop.send("shop", "", delay=LATER, transaction=connection)
            part.rollback()
        assert await shop.delayed.pending() == []


async def test_autocommit_is_refused_on_postgresql(postgresql_url: str) -> None:
    """Given connections in autocommit, when they send, then each is refused with the remedy."""
    url = postgresql_url.replace("postgresql:", "postgresql+psycopg:")
    async with shop_in(postgresql_url) as shop:
        remedy = pytest.raises(ConfigurationError, match="set autocommit = False, or send inside")
        with psycopg.connect(postgresql_url, autocommit=True) as connection, remedy:
            await shop.send("shop", "", transaction=connection)
        async with await psycopg.AsyncConnection.connect(postgresql_url, autocommit=True) as asynchronous:
            with pytest.raises(ConfigurationError, match="set autocommit = False, or send inside"):
                await shop.send("shop", "", transaction=asynchronous)
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as autocommit, pytest.raises(ConfigurationError, match="in autocommit"):
            await shop.send("shop", "", transaction=autocommit)
        with Session(engine) as session, pytest.raises(ConfigurationError, match="in autocommit"):
            await shop.send("shop", "", transaction=session)
        for driver in ("psycopg", "asyncpg"):
            name = url.replace("psycopg", driver)
            async with create_async_engine(name, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as other:
                with pytest.raises(ConfigurationError, match="in autocommit"):
                    await shop.send("shop", "", transaction=other)


async def test_a_transaction_of_two_phases_is_refused(postgresql_url: str) -> None:
    """Given a session with two-phase transactions, when it sends, then it is refused: PostgreSQL would, at the end."""
    engine = create_engine(postgresql_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
    async with shop_in(postgresql_url) as shop:
        with Session(engine, twophase=True) as session, pytest.raises(ConfigurationError, match="two-phase"):
            await shop.send("shop", "", delay=LATER, transaction=session)


async def test_objects_that_are_not_connections_are_refused(tmp_path: Path) -> None:
    """Given anything else, when it is passed as a transaction, then the error says what may be."""
    wrong: Any = create_engine(f"sqlite:///{tmp_path}/shop.db")
    async with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop:
        with pytest.raises(ConfigurationError, match=r"takes a SQLAlchemy Connection, .* not a Engine"):
            await shop.send("shop", "", transaction=wrong)


@pytest.mark.parametrize("kind", ["endpoint", "sync"])
async def test_none_as_a_transaction_is_refused(tmp_path: Path, kind: str) -> None:
    """Given a variable that is None, when it is passed as the transaction, then nothing is sent outside of one."""
    shop, nothing = shop_in(f"sqlite:///{tmp_path}/shop.db"), cast("Any", None)
    if kind == "endpoint":
        async with shop:
            with pytest.raises(ConfigurationError, match=r"transaction=None .* outside yours.*connection itself"):
                await shop.send("shop", "", delay=LATER, transaction=nothing)
            assert list(await shop.delayed.pending()) == []
    else:
        with SyncEndpoint(shop) as sync:
            with pytest.raises(ConfigurationError, match="transaction=None"):
                sync.send("shop", "", delay=LATER, transaction=nothing)
            assert list(sync.run(shop.delayed.pending())) == []


async def test_a_mysql_url_of_an_application_is_the_same_server_as_a_mariadb_url(
    mariadb: MariadbServer, mariadb_url: str
) -> None:
    """Given an engine on mysql+pymysql://, when it sends, then the server decides whether it is the store's."""
    other = mariadb.new_database()
    engines = [
        create_engine(url.replace("mariadb:", "mysql+pymysql:"), poolclass=NullPool) for url in (mariadb_url, other)
    ]
    try:
        async with shop_in(mariadb_url) as shop:
            with engines[0].begin() as connection:
                await shop.send("shop", "kept", delay=LATER, message_id="kept", transaction=connection)
                assert list(await shop.delayed.pending()) == []
            assert [message.id for message in await shop.delayed.pending()] == ["kept"]
            with Session(engines[0]) as session:
                await shop.send("shop", "undone", delay=LATER, transaction=session)
                session.rollback()
            assert [message.id for message in await shop.delayed.pending()] == ["kept"]
            with engines[1].begin() as elsewhere, pytest.raises(ConfigurationError, match="begin it on a connection"):
                await shop.send("shop", "", delay=LATER, transaction=elsewhere)
    finally:
        mariadb.drop_database(other)


@pytest.mark.parametrize("driver", ["psycopg2", "pymysql"])
async def test_a_raw_connection_of_another_driver_is_taken(driver: str, request: pytest.FixtureRequest) -> None:
    """Given the driver's own connection, when it sends and rolls back or commits, then the message does so too."""
    server = "postgresql" if driver == "psycopg2" else "mariadb"
    url = str(request.getfixturevalue(f"{server}_url"))
    async with shop_in(url) as shop:
        with contextlib.closing(raw_connection(driver, url)) as connection:
            await shop.send("shop", "undone", delay=LATER, transaction=connection)
            connection.rollback()
            await shop.send("shop", "kept", delay=LATER, message_id="größe", transaction=connection)
            await shop.send("shop", b"\x00\xff", message_id="now", transaction=connection)
            assert list(await shop.delayed.pending()) == []
            connection.commit()
            assert [message.id for message in await shop.delayed.pending()] == ["größe"]
            with pytest.raises(QueueNotFound):
                await shop.send("nowhere", "", transaction=connection)
            connection.rollback()
        with (
            contextlib.closing(raw_connection(driver, url, autocommit=True)) as connection,
            pytest.raises(ConfigurationError, match="in autocommit"),
        ):
            await shop.send("shop", "", transaction=connection)


@pytest.mark.parametrize("greenlets", [True, False])
async def test_psycopgs_own_connection_is_taken_with_and_without_greenlets(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, greenlets: bool
) -> None:
    """Given psycopg's AsyncConnection, when messages are sent in it, then its commit decides, with greenlet or not."""
    monkeypatch.setattr(external, "_has_greenlets", lambda: greenlets)
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["shop"])
    async with Endpoint("sender", transport=transport, send_only=True) as sender:
        async with await psycopg.AsyncConnection.connect(postgresql_url) as connection:
            await sender.send_many([Send("shop", b"one"), Send("shop", b"two")], transaction=connection)
            await connection.rollback()
            assert await transport.count("shop") == 0
            await sender.send("shop", b"three", transaction=connection)
        assert [message.body for message in await transport.browse("shop", 10)] == [b"three"]


async def test_an_error_on_a_connection_of_psycopg2_is_one_of_delaylines(postgresql_url: str) -> None:
    """Given a session that the server has ended, when it is sent in, then that is an error of the back end."""
    async with shop_in(postgresql_url) as shop:
        with contextlib.closing(raw_connection("psycopg2", postgresql_url)) as connection:
            pid = connection.info.backend_pid
            with psycopg.connect(postgresql_url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            with pytest.raises(BackendUnavailable):
                await shop.send("shop", "", delay=LATER, transaction=connection)


def raw_connection(driver: str, url: str, *, autocommit: bool = False) -> Any:  # noqa: ANN401 - of either driver
    if driver == "psycopg2":
        connection = psycopg2.connect(url, cursor_factory=psycopg2.extras.RealDictCursor)
        connection.autocommit = autocommit
        return connection
    at = make_url(url)
    socket = at.query.get("unix_socket")
    return pymysql.connect(
        host=at.host or "localhost",
        port=at.port or 3306,
        user=at.username,
        password=at.password or "",
        database=at.database,
        unix_socket=str(socket) if socket else None,
        autocommit=autocommit,
        cursorclass=pymysql.cursors.DictCursor,
    )


async def test_connections_of_asynchronous_drivers_are_refused_with_the_supported_ones(
    tmp_path: Path, postgresql_url: str
) -> None:
    """Given a raw connection of asyncpg or aiosqlite, when it is passed, then the error names the supported ones."""
    async with shop_in(f"sqlite:///{tmp_path}/shop.db") as shop, aiosqlite.connect(tmp_path / "shop.db") as ours:
        with pytest.raises(ConfigurationError, match=r"aiosqlite's Connection.*AsyncConnection on sqlite\+aiosqlite"):
            await shop.send("shop", "", transaction=cast("Any", ours))
    async with shop_in(postgresql_url) as shop:
        theirs = await asyncpg.connect(postgresql_url)
        try:
            with pytest.raises(ConfigurationError, match=r"asyncpg's Connection.*postgresql\+asyncpg"):
                await shop.send("shop", "", transaction=theirs)
        finally:
            await theirs.close()


async def test_parts_without_a_database_are_reported(tmp_path: Path) -> None:
    """Given queues and store in memory, when a message is sent in a transaction, then the error names the stores to
    use.
    """
    delivery = StoredDelivery(MemoryDelayedMessageStore())
    async with Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery) as shop:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            with pytest.raises(ConfigurationError, match=r"MemoryTransport cannot take part .* use a SqlTransport"):
                await shop.send("shop", "", transaction=connection)
            with pytest.raises(ConfigurationError, match="MemoryDelayedMessageStore cannot take part"):
                await shop.send("shop", "", delay=LATER, transaction=connection)


async def test_delaylines_own_transactions_work_as_well(tmp_path: Path) -> None:
    """Given a transaction of the transport's, when messages are sent in it, then they exist at its commit."""
    shop = shop_in(f"sqlite:///{tmp_path}/shop.db")
    async with shop:
        transport = shop.transport
        assert isinstance(transport, SqlTransport)
        async with transport.transaction() as transaction:
            await shop.send("shop", "now", transaction=transaction)
            await shop.send("shop", "later", delay=LATER, transaction=transaction)
            assert await transport.count("shop") == 0
        assert await transport.count("shop") == 1
        assert len(await shop.delayed.pending()) == 1


async def test_a_message_for_a_queue_elsewhere_waits_in_the_store(tmp_path: Path) -> None:
    """Given queues in memory and a store in the caller's database, when it sends at once, then the store takes it."""
    delivery = StoredDelivery(SqlDelayedMessageStore(f"sqlite:///{tmp_path}/shop.db"))
    shop = Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery)
    handled = noting(shop)
    async with shop:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            await shop.send("shop", "", transaction=connection)
            assert await shop.delayed.pending() == []
        assert await asyncio.to_thread(handled)


@pytest.mark.parametrize("kind", ["sqlite3", "Connection", "Session", "scoped_session"])
def test_threads_send_in_their_own_transactions(kind: str, tmp_path: Path) -> None:
    """Given an SQLite connection that belongs to this thread, when it sends synchronously, then it is used here."""
    url, shop = f"sqlite:///{tmp_path}/shop.db", shop_in(f"sqlite:///{tmp_path}/shop.db")
    handled, engine = noting(shop), create_engine(url, poolclass=NullPool)
    kinds: dict[str, Callable[[], Any]] = {
        "sqlite3": lambda: contextlib.closing(sqlite3.connect(tmp_path / "shop.db")),
        "Connection": engine.connect,
        "Session": lambda: Session(engine),
        "scoped_session": lambda: contextlib.nullcontext(scoped_session(sessionmaker(engine))),
    }
    with SyncEndpoint(shop) as sync, kinds[kind]() as connection:
        sync.send("shop", "undone", transaction=connection)
        connection.rollback()
        sync.send("shop", "kept", transaction=connection)
        connection.commit()
        assert handled()
        if kind == "scoped_session":
            connection.remove()
        assert sync.run(shop.delayed.pending()) == []


async def test_a_connection_of_another_event_loop_is_refused(tmp_path: Path) -> None:
    """Given an AsyncConnection, when it is passed to a SyncEndpoint, then that says where it belongs."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db", poolclass=NullPool)
    with SyncEndpoint(shop_in(f"sqlite:///{tmp_path}/shop.db")) as sync:
        async with engine.connect() as connection:
            with pytest.raises(ConfigurationError, match="an AsyncConnection, which belongs to its event loop"):
                sync.send("shop", "", transaction=connection)


def test_a_process_forks_while_a_caller_has_a_transaction(tmp_path: Path) -> None:
    """Given a send in an open transaction, when the process forks before the commit, then the notification comes."""
    shop = shop_in(f"sqlite:///{tmp_path}/shop.db")
    handled = noting(shop)
    with SyncEndpoint(shop) as sync, contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        sync.send("shop", "", transaction=connection)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        connection.commit()
        assert handled()
