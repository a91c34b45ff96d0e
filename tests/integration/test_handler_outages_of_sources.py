"""Sessions that end while handlers have transactions of their own: on every product, driver and kind of source."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url
from tests.eventually import eventually_async
from tests.integration import test_handler_transactions
from tests.integration.test_handler_transactions import Shop, engine_at, insert, orders
from tests.integration.wire_between import wire_to

from delayline import BackendUnavailable, Endpoint, Recoverability, SqlDatabase, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline import Message, MessageContext

NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)


class StruckShop(Shop):
    """A shop whose first handler loses the session of its transaction."""

    def __init__(self, url: str, *, goes_on: bool) -> None:
        super().__init__(url, recoverability=NO_RETRIES)
        self.goes_on = goes_on

    def strike(self) -> None:
        """End the sessions with rows that are not committed."""
        end_open_transactions(self.url)

    async def is_empty(self) -> bool:
        """Return whether its queue is empty; a session that asks may be among those that are ended."""
        try:
            return await super().is_empty()
        except BackendUnavailable:
            return False

    def uses_session_again(self) -> bool:
        """Strike at the first call; return whether the handler goes on with its connection then."""
        self.attempts += 1
        if self.attempts > 1:
            return False
        self.strike()
        return self.goes_on


class SilentShop(StruckShop):
    """A shop whose first handler waits until its connection hears nothing any more."""

    def __init__(self, url: str, *, goes_on: bool) -> None:
        super().__init__(url, goes_on=goes_on)
        self.transport = SqlTransport(SqlDatabase(url, server_timeout=2))
        self.endpoint = Endpoint("shop", transport=self.transport, recoverability=NO_RETRIES, concurrency=1)
        self.reached, self.silent = threading.Event(), threading.Event()

    def strike(self) -> None:
        self.reached.set()
        self.silent.wait()


def end_open_transactions(url: str) -> None:
    parts = make_url(url)
    if url.startswith("postgresql"):
        with psycopg.connect(url, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
                "AND backend_xid IS NOT NULL AND pid <> pg_backend_pid()"
            ).fetchall()
        assert ended
        return
    settings: dict[str, Any] = {"host": parts.host, "port": parts.port, "user": parts.username}
    with closing(pymysql.connect(**settings, password=parts.password or "", database=parts.database)) as session:
        cursor = session.cursor()
        cursor.execute(
            "SELECT p.id FROM information_schema.processlist AS p JOIN information_schema.innodb_trx AS t "
            "ON t.trx_mysql_thread_id = p.id WHERE p.db = DATABASE() AND t.trx_rows_modified > 0"
        )
        sessions = cursor.fetchall()
        assert sessions
        for (session_id,) in sessions:
            cursor.execute("KILL %s", [session_id])


def in_a_coroutine(shop: StruckShop, source: object = None) -> None:
    @shop.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        connection = await context.transaction(source)  # type: ignore[call-overload]
        await insert(connection, message.id)
        context.send("out", b"now")
        if await asyncio.to_thread(shop.uses_session_again):
            await insert(connection, "again")


def in_a_function(shop: StruckShop, source: object = None) -> None:
    @shop.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        connection = context.transaction(source)  # type: ignore[call-overload]
        insert(connection, message.id)
        context.send("out", b"now")
        if shop.uses_session_again():
            insert(connection, "again")


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    """Provide the URL of a database with a table of the user's."""
    address = str(request.getfixturevalue(f"{request.param}_url"))
    engine = engine_at(address)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id VARCHAR(50) PRIMARY KEY)")
    engine.dispose()
    return address


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sources of the other tests be used by these handlers."""
    monkeypatch.setattr(test_handler_transactions, "in_a_coroutine", in_a_coroutine)
    monkeypatch.setattr(test_handler_transactions, "in_a_function", in_a_function)


OWN = [test_handler_transactions.of_the_endpoint, in_a_function]
EVERY = [
    in_a_function if register is test_handler_transactions.in_a_function else register
    for register in test_handler_transactions.EVERY
]


@pytest.mark.sample(4)
@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("when", ["in the handler", "at its end"])
@pytest.mark.parametrize("register", EVERY)
async def test_a_session_that_ends_is_no_failure_of_a_message(
    url: str, register: Callable[[Shop], None], when: str
) -> None:
    # Given a handler with a transaction of its own, whose session ends, and no retries
    shop = StruckShop(url, goes_on=when == "in the handler")
    register(shop)
    # When its message is handled, then it is handled again, its rows and its sends are there once
    async with asyncio.timeout(120):
        await shop.handled()
    assert (orders(url), shop.attempts, shop.sent, shop.failed) == (["m0"], 2, 1, 0)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("when", ["in the handler", "at its end"])
@pytest.mark.parametrize("register", OWN)
async def test_a_server_that_falls_silent_stops_no_endpoint(
    url: str, register: Callable[[Shop], None], when: str
) -> None:
    seen = SqlTransport(url)
    await seen.setup_infrastructure(["out", "shop", "error"])
    async with asyncio.timeout(120), wire_to(url) as (wire, through):
        shop = SilentShop(through, goes_on=when == "in the handler")
        register(shop)
        async with shop.endpoint:
            await shop.endpoint.send("shop", b"", message_id="m0")
            await eventually_async(shop.reached.is_set, "the handler runs")
            # When no answer comes any more on the connections that are open, and new ones work
            assert wire.hold_answers_to(b"") > 0
            shop.silent.set()
            # Then the message is handled again, and is not in the error queue
            await eventually_async(lambda: shop.attempts >= 2, "it is handled again")
            await seen.start()

            async def is_empty() -> bool:
                return await seen.count("shop") == 0

            await eventually_async(is_empty, "it is gone")
            assert (await seen.count("error"), await seen.count("out")) == (0, 1)
            await seen.stop()
    assert orders(url) == ["m0"]
