"""`context.transaction()`: the user's rows, the handler's sends and the end of its message are one transaction."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg_pool
import pymysql
import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tests.eventually import PATIENCE, eventually_async
from tests.integration.test_django import django_at

from delayline import (
    ConfigurationError,
    Endpoint,
    HandlerRows,
    Recoverability,
    StoredDelivery,
    TransactionMode,
    TwoPhaseCommit,
    handler_rows,
)
from delayline.errors import MissingExtra
from delayline.memory import MemoryTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from delayline import Message, MessageContext

ROW = "INSERT INTO orders VALUES (:id)"
DAY = timedelta(days=1)
#: Fixed: a pool that is closed while it grows leaves the new connection open.
POOL_SIZE = 2


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide the URL of a database with a table of the user's."""
    kind = request.param
    found = f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else str(request.getfixturevalue(f"{kind}_url"))
    engine = engine_at(found)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id VARCHAR(50) PRIMARY KEY)"))
    engine.dispose()
    return found


def engine_at(url: str) -> Any:  # noqa: ANN401 - an Engine
    return create_engine(url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+pymysql:"))


def orders(url: str) -> list[str]:
    engine = engine_at(url)
    with engine.connect() as connection:
        found = sorted(connection.execute(text("SELECT id FROM orders")).scalars())
    engine.dispose()
    return found


class OwnSession(Session):
    """A user's class, which SQLModel's is too."""


class Shop:
    """An endpoint whose handler writes a row, sends two messages, and fails as often as asked."""

    def __init__(self, url: str, failures: int = 0, **settings: Any) -> None:  # noqa: ANN401
        self.url = url
        self.transport = SqlTransport(url)
        self.failures = failures
        self.attempts = 0
        self.engines: list[Any] = []
        self.pools: list[Any] = []
        settings = {"recoverability": Recoverability(immediate_retries=2, delayed_retries=0), **settings}
        self.endpoint = Endpoint(
            "shop", transport=self.transport, delayed_delivery=SqlDelayedMessageStore(url), **settings
        )

    def send_and_fail(self, context: MessageContext) -> None:
        self.attempts += 1
        context.send("out", b"now")
        context.send("out", b"later", delay=DAY)
        if self.attempts <= self.failures:
            raise ValueError(self.attempts)

    async def handled(self, number: int = 1) -> None:
        """Send messages to the endpoint, and wait until its queue is empty."""
        await self.transport.setup_infrastructure(["out"])
        for pool in self.pools:
            if isinstance(pool, psycopg_pool.AsyncConnectionPool):
                await pool.open()
        async with self.endpoint:
            for n in range(number):
                await self.endpoint.send("shop", b"", message_id=f"m{n}")
            await eventually_async(self.is_empty)
            self.sent = await self.transport.count("out")
            self.waiting = len(await self.endpoint.delayed.pending())
            self.failed = await self.transport.count("error")
        for engine in self.engines:
            ended = engine.dispose()
            if ended is not None:
                await ended
        for pool in self.pools:
            if (filled := pool.wait(PATIENCE)) is not None:
                await filled
            assert pool.get_stats()["pool_available"] == POOL_SIZE  # all were given back
            ended = pool.close()
            if ended is not None:
                await ended

    async def is_empty(self) -> bool:
        return await self.transport.count("shop") == 0


def in_a_coroutine(shop: Shop, source: object = None) -> None:
    @shop.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        connection = await context.transaction(source)  # type: ignore[call-overload]
        await insert(connection, message.id)
        shop.send_and_fail(context)


def in_a_function(shop: Shop, source: object = None) -> None:
    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        connection = context.transaction(source)  # type: ignore[call-overload]
        insert(connection, message.id)
        shop.send_and_fail(context)


def of_sessions(shop: Shop) -> None:
    shop.engines = [engine_at(shop.url)]
    in_a_function(shop, sessionmaker(shop.engines[0]))


def of_async_sessions(shop: Shop) -> None:
    url = shop.url.replace("postgresql:", "postgresql+psycopg:").replace("sqlite:", "sqlite+aiosqlite:")
    url = url.replace("mariadb:", "mariadb+asyncmy:")
    shop.engines = [create_async_engine(url)]
    in_a_coroutine(shop, async_sessionmaker(shop.engines[0]))


def of_the_endpoint(shop: Shop) -> None:
    in_a_coroutine(shop)


def of_the_class(shop: Shop) -> None:
    in_a_function(shop, Connection)


def of_the_class_of_sessions(shop: Shop) -> None:
    in_a_function(shop, OwnSession)


def of_the_async_class(shop: Shop) -> None:
    in_a_coroutine(shop, AsyncConnection)


def of_the_class_of_async_sessions(shop: Shop) -> None:
    in_a_coroutine(shop, AsyncSession)


def of_drivers(shop: Shop) -> None:
    """Let a function that is no Engine connect."""
    if shop.url.startswith("postgresql"):
        in_a_function(shop, partial(psycopg.connect, shop.url))
    else:
        engine = engine_at(shop.url)
        shop.engines = [engine]

        def connect() -> Any:  # noqa: ANN401
            pooled = engine.raw_connection()
            driver = pooled.driver_connection
            pooled.detach()
            return driver

        in_a_function(shop, connect)


def of_pools(shop: Shop) -> None:
    needs_postgresql(shop.url)
    pool = psycopg_pool.ConnectionPool(shop.url, min_size=POOL_SIZE, max_size=POOL_SIZE, open=True)
    shop.pools = [pool]
    in_a_function(shop, pool)


def of_async_psycopg(shop: Shop) -> None:
    needs_postgresql(shop.url)
    in_a_coroutine(shop, partial(psycopg.AsyncConnection.connect, shop.url))


def of_async_pools(shop: Shop) -> None:
    needs_postgresql(shop.url)
    pool = psycopg_pool.AsyncConnectionPool(shop.url, min_size=POOL_SIZE, max_size=POOL_SIZE, open=False)
    shop.pools = [pool]
    in_a_coroutine(shop, pool)


def needs_postgresql(url: str) -> None:
    if not url.startswith("postgresql"):
        pytest.skip("a pool of psycopg's")


def insert(connection: Any, id: str) -> Any:  # noqa: ANN401 - a connection of any kind, the outcome or an awaitable
    """Insert a row with a connection of SQLAlchemy's, psycopg's, PyMySQL's or sqlite3's."""
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        return connection.execute("INSERT INTO orders VALUES (%s)", [id])
    if isinstance(connection, sqlite3.Connection):
        return connection.execute("INSERT INTO orders VALUES (?)", [id])
    if isinstance(connection, pymysql.Connection):
        return connection.cursor().execute("INSERT INTO orders VALUES (%s)", [id])
    return connection.execute(text(ROW), {"id": id})


EVERY = [
    of_the_endpoint,
    in_a_function,
    of_sessions,
    of_the_class,
    of_the_class_of_sessions,
    of_the_async_class,
    of_the_class_of_async_sessions,
    of_async_sessions,
    of_drivers,
    of_pools,
    of_async_psycopg,
    of_async_pools,
]


@pytest.mark.parametrize("register", EVERY)
async def test_rows_sends_and_the_messages_end_commit_together(url: str, register: Callable[[Shop], None]) -> None:
    """Given a handler that fails at first, when it has succeeded, then its row and its sends are there once."""
    shop = Shop(url, failures=2)
    register(shop)
    await shop.handled()
    assert (orders(url), shop.attempts, shop.sent, shop.waiting, shop.failed) == (["m0"], 3, 1, 1, 0)


@pytest.mark.parametrize(
    "register", [of_the_endpoint, in_a_function, of_drivers, of_pools, of_async_psycopg, of_async_pools]
)
async def test_a_handler_that_fails_for_good_leaves_no_rows(url: str, register: Callable[[Shop], None]) -> None:
    """Given a handler that always fails, when its message is in the error queue, then its rows are rolled back."""
    shop = Shop(url, failures=99)
    register(shop)
    await shop.handled()
    assert (orders(url), shop.attempts, shop.sent, shop.waiting, shop.failed) == ([], 3, 0, 0, 1)


@pytest.mark.parametrize("register", [of_the_endpoint, in_a_function])
async def test_many_messages_are_handled_in_transactions(url: str, register: Callable[[Shop], None]) -> None:
    """Given more messages than handlers, when all are handled, then each has its row."""
    shop = Shop(url, concurrency=4)
    register(shop)
    await shop.handled(30)
    assert (len(orders(url)), shop.sent, shop.waiting, shop.failed) == (30, 30, 30, 0)


async def test_the_weaker_mode_has_transactions_too(url: str) -> None:
    """Given SENDS_ATOMIC_WITH_RECEIVE, when a handler commits its rows, then its sends are there once."""
    shop = Shop(url, failures=1, transaction_mode=TransactionMode.SENDS_ATOMIC_WITH_RECEIVE)
    in_a_function(shop)
    await shop.handled()
    assert (orders(url), shop.sent, shop.waiting, shop.failed) == (["m0"], 1, 1, 0)


async def test_a_message_that_has_left_its_queue_leaves_no_rows(url: str) -> None:
    """Given a message that is removed while it is handled, when the handler succeeds, then its rows are undone."""
    shop = Shop(url)
    removed = threading.Event()

    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        engine = engine_at(url)
        with engine.begin() as other:
            other.execute(text("DELETE FROM delayline_messages"))
        engine.dispose()
        context.transaction().execute(text(ROW), {"id": message.id})
        shop.send_and_fail(context)
        removed.set()

    await shop.handled()
    assert removed.is_set()
    assert (orders(url), shop.attempts, shop.sent, shop.waiting) == ([], 1, 0, 0)


async def test_others_do_not_wait_for_transactions_of_handlers(postgresql_url: str) -> None:
    """Given 64 handlers that hold a transaction each, then other messages are received, handled and sent on time."""
    release, held, quick = asyncio.Event(), 0, []
    shop = Shop(postgresql_url, concurrency=64)
    transport = SqlTransport(postgresql_url)
    other = Endpoint("other", transport=transport, delayed_delivery=SqlDelayedMessageStore(postgresql_url))

    @shop.endpoint.handler
    async def hold(message: Message, context: MessageContext) -> None:
        nonlocal held
        connection = await context.transaction()
        await connection.execute(text("SELECT 1"))
        held += 1
        await release.wait()

    @other.handler
    async def handle(message: Message, context: MessageContext) -> None:
        quick.append(message.id)

    async with shop.endpoint, other:
        await asyncio.gather(*(shop.endpoint.send("shop", b"") for _ in range(64)))
        await eventually_async(lambda: held == 64)
        await other.send("other", b"", message_id="now")
        await other.send("other", b"", message_id="soon", delay=timedelta(milliseconds=20))
        await eventually_async(lambda: sorted(quick) == ["now", "soon"])
        while await transport.count("other"):  # noqa: ASYNC110 - as its deletion is seen
            await asyncio.sleep(0.01)
        assert await shop.transport.count("shop") == 64
        release.set()
        await eventually_async(shop.is_empty)


async def test_handlers_wait_for_a_connection_of_their_pool(postgresql_url: str) -> None:
    """Given a pool of two connections and eight handlers at once, then two hold one each, and the others follow."""
    shop = Shop(postgresql_url, concurrency=8, transaction_connections=2)
    holding = most = handled = 0

    @shop.endpoint.handler
    async def hold(message: Message, context: MessageContext) -> None:
        nonlocal holding, most, handled
        await context.transaction()
        holding += 1
        most = max(most, holding)
        await asyncio.sleep(0.05)
        holding -= 1
        handled += 1

    async with shop.endpoint:
        await asyncio.gather(*(shop.endpoint.send("shop", b"") for _ in range(8)))
        await eventually_async(shop.is_empty)
    assert (most, handled) == (2, 8)
    with pytest.raises(ConfigurationError, match="transaction_connections must be"):
        Endpoint("shop", transport=SqlTransport(postgresql_url), transaction_connections=0)


def test_whose_rows_take_part_is_reported() -> None:
    """Given parts and modes, then it is reported whether rows of handlers commit with the message and its sends."""
    here, there = SqlTransport("postgresql://server/one"), SqlDelayedMessageStore("postgresql://server/two")
    near, scope = SqlDelayedMessageStore("postgresql://server/one"), TransactionMode.TRANSACTION_SCOPE
    atomic = TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    assert handler_rows(here, StoredDelivery(near), scope) is HandlerRows.YES
    assert handler_rows(here, None, atomic) is HandlerRows.YES
    assert handler_rows(here, StoredDelivery(there), atomic) is HandlerRows.WITHOUT_DELAYED_SENDS
    assert handler_rows(here, StoredDelivery(near), TransactionMode.RECEIVE_ONLY) is HandlerRows.NO
    assert handler_rows(MemoryTransport(), None, scope) is HandlerRows.NO
    assert Endpoint("shop", transport=here, delayed_delivery=near).handler_rows is HandlerRows.YES
    both = TwoPhaseCommit()
    joined = SqlTransport("postgresql://server/one", two_phase=both)
    across = StoredDelivery(SqlDelayedMessageStore("postgresql://server/two", two_phase=both))
    assert handler_rows(joined, across, scope) is HandlerRows.WITHOUT_DELAYED_SENDS


async def test_a_function_that_takes_too_long_is_rolled_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a function that outlives its timeout in a transaction, when it returns, then its rows are undone."""
    shop, returned, began = Shop(url), threading.Event(), threading.Event()
    engines: list[Any] = []
    new_engine = SqlTransport.new_engine

    def kept(transport: SqlTransport, size: int, *, asynchronous: bool) -> Any:  # noqa: ANN401
        engines.append(new_engine(transport, size, asynchronous=asynchronous))
        return engines[-1]

    monkeypatch.setattr(SqlTransport, "new_engine", kept)

    @shop.endpoint.handler(timeout=timedelta(milliseconds=200))
    def handle(message: Message, context: MessageContext) -> None:
        shop.attempts += 1
        if shop.attempts > 1:
            return
        context.transaction().execute(text(ROW), {"id": message.id})
        began.set()
        returned.wait(30)

    async with shop.endpoint:
        await shop.endpoint.send("shop", b"")
        await eventually_async(lambda: shop.attempts == 2)
        returned.set()
        await eventually_async(shop.is_empty)
        await eventually_async(lambda: [engine.pool.checkedout() for engine in engines] == [0])
    assert began.is_set()
    assert orders(url) == []


@pytest.mark.parametrize("mode", [TransactionMode.NONE, TransactionMode.RECEIVE_ONLY])
async def test_modes_without_transactions_are_refused(tmp_path: Path, mode: TransactionMode) -> None:
    """Given a mode in which a message ends outside of transactions, when a handler asks for one, then it fails."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop, errors = Shop(url, transaction_mode=mode), []

    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        try:
            context.transaction()
        except Exception as error:
            errors.append(str(error))

    async with shop.endpoint:
        await shop.endpoint.send("shop", b"")
        await eventually_async(lambda: errors)
    assert "needs transaction_mode=TransactionMode.TRANSACTION_SCOPE" in errors[0]


async def without_source(message: Message, context: MessageContext) -> None:
    await context.transaction()


async def with_another_name(message: Message, received: MessageContext) -> None:
    connection = await received.transaction()
    await connection.execute(text(ROW), {"id": message.id})


async def with_class(message: Message, context: MessageContext) -> None:
    await context.transaction(AsyncSession)


async def with_source(message: Message, context: MessageContext) -> None:
    await context.transaction(create_async_engine("sqlite+aiosqlite://"))


def blocking(message: Message, context: MessageContext) -> None:
    context.transaction()


async def of_another_object(message: Message, context: MessageContext) -> None:
    message.transaction()  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["aiosqlite", "sqlalchemy.ext.asyncio"])
@pytest.mark.parametrize("handle", [without_source, with_another_name, with_class])
async def test_a_missing_driver_is_an_error_of_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handle: Any,  # noqa: ANN401
    module: str,
) -> None:
    """Given a handler that opens transactions by itself, and no driver for it, then the start says what to install."""
    endpoint = Endpoint("shop", transport=SqlTransport(f"sqlite:///{tmp_path}/shop.db"))
    endpoint.handler(handle)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'delayline\[sqlite\]'"):
        await endpoint.start()
    assert not endpoint.started


@pytest.mark.parametrize("handle", [with_source, blocking, of_another_object])
async def test_a_driver_that_no_handler_needs_may_be_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handle: Any,  # noqa: ANN401
) -> None:
    """Given handlers that bring a source, are functions, or open no transaction, then the endpoint starts."""
    endpoint = Endpoint("shop", transport=SqlTransport(f"sqlite:///{tmp_path}/shop.db"))
    endpoint.handler(handle)
    monkeypatch.setitem(sys.modules, "aiosqlite", None)
    async with endpoint:
        assert endpoint.started


async def test_parameters_of_every_type_reach_mariadb_from_a_coroutine(mariadb_url: str) -> None:
    """Given a handler that passes numbers, text and bytes, then the driver passes them on."""
    shop = Shop(mariadb_url)
    values = {"number": 17, "text": "it's \\", "bytes": b"\0'\xff", "none": None, "half": 0.5}
    found: list[Any] = []

    @shop.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        connection = await context.transaction()
        result = await connection.execute(text("SELECT :number, :text, :bytes, :none, :half"), values)
        found.extend(result.one())

    await shop.handled()
    assert found == list(values.values())


async def test_sources_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Given queues elsewhere, or a source of the other kind, when a handler asks, then the error says what to do."""
    errors: list[str] = []
    blocking, asynchronous = create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")

    def attempt(context: MessageContext, *source: Any) -> None:  # noqa: ANN401
        try:
            context.transaction(*source)
        except Exception as error:
            errors.append(str(error))

    for expected in (3, 6):
        elsewhere = MemoryTransport() if expected == 3 else SqlTransport(f"sqlite:///{tmp_path}/shop.db")
        endpoint = Endpoint("shop", transport=elsewhere)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            attempt(context, blocking)

        @endpoint.handler
        def handle_too(message: Message, context: MessageContext) -> None:
            attempt(context, asynchronous)
            attempt(context, "default")

        async with endpoint:
            await endpoint.send("shop", b"")
            await eventually_async(partial(is_at, errors, expected))
    assert all("queues in your database, and this endpoint's are in MemoryTransport" in one for one in errors[:3])
    assert "takes an AsyncEngine, an async_sessionmaker, an AsyncConnectionPool or a coroutine function" in errors[3]
    assert "not a Engine, which would block the event loop" in errors[3]
    assert "a function that connects, or an alias of Django's, not a AsyncEngine" in errors[4]


def is_at(errors: list[str], number: int) -> bool:
    return len(errors) == number


IN_DJANGO = """
    import asyncio, json, sys
    import pymysql
    pymysql.install_as_MySQLdb()
    import django
    from django.conf import settings
    database, url = json.loads(sys.argv[1])
    settings.configure(DATABASES={"default": database}, USE_TZ=True)
    django.setup()
    from django.db import connection
    from delayline import Endpoint
    from delayline.sql import SqlTransport
    endpoint, attempts = Endpoint("shop", transport=SqlTransport(url)), []

    @endpoint.handler
    def handle(message, context):
        own = context.transaction("default")
        assert own.in_atomic_block
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s)", [message.id])
        attempts.append(1)
        context.send("out", b"")
        if len(attempts) == 1:
            raise ValueError

    async def main():
        await endpoint.transport.setup_infrastructure(["out"])
        async with endpoint:
            await endpoint.send("shop", b"", message_id="m0")
            while await endpoint.transport.count("shop"):
                await asyncio.sleep(0.02)
            print(len(attempts), await endpoint.transport.count("out"))

    asyncio.run(main())
"""


def test_rows_of_django_commit_with_the_message(url: str) -> None:
    """Given a function that writes through Django's connection, when it fails once, then its row is there once."""
    command = [sys.executable, "-c", textwrap.dedent(IN_DJANGO), json.dumps([django_at(url), url])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("2 1", 0), ran.stderr
    assert orders(url) == ["m0"]


REFUSED_ALIAS = """
    import asyncio, sys
    {settings}
    from delayline import ConfigurationError, Endpoint
    from delayline.sql import SqlTransport
    endpoint, errors = Endpoint("shop", transport=SqlTransport(sys.argv[1])), []

    @endpoint.handler
    def handle(message, context):
        try:
            context.transaction("orders")
        except ConfigurationError as error:
            errors.append(str(error))

    async def main():
        await endpoint.setup()
        async with endpoint:
            await endpoint.send("shop", b"")
            while not errors:
                await asyncio.sleep(0.02)
        print(*errors)

    asyncio.run(main())
"""
CONFIGURE = "import django.db; from django.conf import settings; settings.configure({})"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("", "and Django is not used here"),
        ("import django.db", "and Django has no such settings here"),
        (CONFIGURE.format(""), "and Django has no such settings here"),
        (CONFIGURE.format("DATABASES={'default': {'ENGINE': 'django.db.backends.sqlite3'}}"), "it has default"),
    ],
    ids=["no Django", "no settings", "no databases", "another alias"],
)
def test_an_alias_that_django_does_not_have_is_refused(tmp_path: Path, settings: str, reason: str) -> None:
    program = textwrap.dedent(REFUSED_ALIAS.format(settings=settings))
    command = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/shop.db"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.startswith("the source of context.transaction is the text 'orders'"), ran.stderr
    assert ran.stdout.strip().endswith(reason)


ONE_WITHOUT_A_DRIVER = """
    import django.db
    from django.conf import settings
    engines = {"default": "django.db.backends.oracle", "orders": "django.db.backends.sqlite3"}
    settings.configure(DATABASES={alias: {"ENGINE": engine} for alias, engine in engines.items()})
    from delayline.external import django_connection
    print(django_connection("orders", "transaction=").alias)
"""


def test_an_alias_is_found_beside_one_whose_driver_is_not_installed() -> None:
    """Given an alias whose driver is missing, when another one is asked for, then its connection is returned."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ONE_WITHOUT_A_DRIVER)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.stdout.strip() == "orders", ran.stderr
