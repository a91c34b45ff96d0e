"""Connections of the user's own making: pool_size, connect= and Engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import make_url
from tests.eventually import PATIENCE, eventually_async

from delayline import BackendUnavailable, ConfigurationError, Endpoint, SqlDatabase, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at
from delayline.sql.server_database import ServerDatabase
from delayline.sql.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline import Message, MessageContext
    from delayline.sql.sessions import Session

COUNT = {
    "postgresql": "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()",
    "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
}
#: Connections of an idle endpoint: claims and statements, on PostgreSQL notifications too.
IDLE = {"postgresql": 3, "mariadb": 2}


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def connect_to(url: str) -> Any:  # noqa: ANN401 - each driver has its own
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        return psycopg.connect(url)
    return pymysql.connect(
        host=parsed.host,
        port=parsed.port or 3306,
        user=parsed.username,
        password=parsed.password or "",
        database=parsed.database,
    )


def engine_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://").replace("mariadb://", "mariadb+pymysql://")


async def round_trip(endpoint: Endpoint, number: int = 3) -> None:
    """Send delayed messages with hard contents and handle each once."""
    handled: dict[str, bytes] = {}

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] = message.body
        await context.send("done", message.body)

    await endpoint.transport.setup_infrastructure(["done"])
    async with endpoint:
        sends = [
            endpoint.send("sales", b"\0\xff", message_id=f"Ключ {n} 🙂", delay=timedelta(milliseconds=50))
            for n in range(number)
        ]
        await asyncio.gather(*sends)
        await eventually_async(lambda: len(handled) == number)
    assert set(handled.values()) == {b"\0\xff"}


async def test_connections_come_from_the_users_function(url: str) -> None:
    made: list[object] = []

    def connect() -> object:
        made.append(connect_to(url))
        return made[-1]

    # Given a URL whose password has expired, and a function that has the current one
    parsed = make_url(url).set(username="nobody", password="old")  # noqa: S106 - no secret
    expired = parsed.render_as_string(hide_password=False)
    endpoint = Endpoint(
        "sales",
        transport=SqlTransport(SqlDatabase(expired, connect=connect)),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(SqlDatabase(expired, connect=connect))),
    )
    await round_trip(endpoint)
    assert made


async def test_connections_come_from_an_engine_and_do_not_return_to_its_pool(url: str) -> None:
    # Given an Engine with a pool of one, that counts its connections
    engine = create_engine(engine_url(url), pool_size=1, max_overflow=0, pool_timeout=1)
    connected: list[object] = []
    event.listen(engine, "connect", lambda *_: connected.append(_))
    endpoint = Endpoint(
        "sales",
        transport=SqlTransport(engine),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(engine)),
    )
    await round_trip(endpoint)
    # Then the user's own connections have none of delayline's settings
    assert len(connected) > 1
    with engine.connect() as connection:
        setting = "SHOW enable_seqscan" if engine.dialect.name == "postgresql" else "SELECT @@tx_isolation"
        assert connection.execute(text(setting)).scalar_one() in {"on", "REPEATABLE-READ"}
    engine.dispose()


async def test_a_function_that_fails_makes_the_back_end_unavailable(url: str) -> None:
    def connect() -> object:
        raise RuntimeError("no token")

    other = make_url(url).update_query_dict({"server_timeout": "2"}).set(username="another").render_as_string(False)
    with pytest.raises(BackendUnavailable, match="connect= has failed: RuntimeError\\('no token'\\)"):
        await SqlDelayedMessageStore(SqlDatabase(other, connect=connect)).setup_infrastructure("sales")


async def test_another_drivers_connections_are_refused(url: str) -> None:
    other = make_url(url).set(username="third").render_as_string(hide_password=False)
    with pytest.raises(ConfigurationError, match=r"makes builtins\.dict objects: they have to be (psycopg|pymysql)"):
        await SqlDelayedMessageStore(SqlDatabase(other, connect=dict)).setup_infrastructure("sales")


@pytest.mark.parametrize("size", [2, 5, None])
async def test_the_size_of_the_pool_bounds_the_connections(url: str, size: int | None) -> None:
    endpoint = Endpoint(
        "sales",
        transport=SqlTransport(SqlDatabase(url, pool_size=size)),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await context.send("done", b"")

    await endpoint.transport.setup_infrastructure(["done"])
    most = 0
    count = COUNT["postgresql" if url.startswith("postgresql") else "mariadb"]
    watch = connect_to(url)
    async with endpoint:
        for _ in range(20):
            await asyncio.gather(*(endpoint.send("sales", b"") for _ in range(20)))
            with watch.cursor() as cursor:
                cursor.execute(count)
                most = max(most, cursor.fetchone()[0])
            watch.commit()
    watch.close()
    assert most <= (size or 4) + 3  # notifications, claims, single inserts


async def test_an_idle_endpoint_has_few_connections(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given connections that are at rest sooner than usual
    monkeypatch.setattr("delayline.sql.sessions.PING_AFTER", 0.2)
    monkeypatch.setattr("delayline.sql.sessions.CLOSE_AFTER", 0.5)
    product = "postgresql" if url.startswith("postgresql") else "mariadb"
    handled: list[str] = []
    endpoint = Endpoint(
        "sales",
        transport=SqlTransport(url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)
        await context.send("done", b"")

    await endpoint.transport.setup_infrastructure(["done"])
    with contextlib.closing(connect_to(url)) as watch:
        watch.autocommit = True if product == "postgresql" else watch.autocommit(True)

        def connections() -> int:
            with watch.cursor() as cursor:
                cursor.execute(COUNT[product])
                return int(cursor.fetchone()[0])

        async with endpoint:
            # When it has been busy, sending one by one and many together, with and without a delay
            for number in range(2):
                await endpoint.send("done", b"")
                await endpoint.send("sales", b"", delay=timedelta(milliseconds=10))
                await asyncio.gather(*(endpoint.send("sales", b"") for _ in range(50)))
                await eventually_async(lambda: len(handled) == 51 * (number + 1))  # noqa: B023
                # Then at rest it has those for claims, notifications and statements
                await eventually_async(lambda: connections() <= IDLE[product])
            await endpoint.send("done", b"")


async def test_a_connection_that_is_given_up_during_a_stop_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a connection in use, when it is given up after the threads take no more work, then it is closed."""
    begun, stopped = asyncio.Event(), threading.Event()
    loop, stop, stopping = asyncio.get_running_loop(), Workers.stop, set[Workers]()

    def stop_and_say_so(workers: Workers, patience: Callable[[], float] | None = None) -> None:
        stop(workers, lambda: 0.0)
        stopping.add(workers)
        if len(stopping) == 2:  # those for transactions, and the others
            stopped.set()
        stop(workers, patience)

    monkeypatch.setattr(Workers, "stop", stop_and_say_so)
    database = database_at(url)
    assert isinstance(database, ServerDatabase)
    await database.open()

    def give_up() -> Session:
        session = database.session()
        session.run(lambda connection: connection.execute(text("SELECT 1")))
        loop.call_soon_threadsafe(begun.set)
        assert stopped.wait(PATIENCE)
        database.sessions.discard(session)
        return session

    giving_up = asyncio.create_task(database.run(give_up))
    await begun.wait()
    await database.close()
    assert (await giving_up).driver is None


async def test_a_connection_that_is_made_after_a_stop_is_closed_when_it_is_given_back(url: str) -> None:
    """Given a database that is closed, when work that was too slow for the stop connects, then it disconnects."""
    database = database_at(url)
    assert isinstance(database, ServerDatabase)
    await database.open()
    sessions = database.sessions
    await database.close()

    def work_late() -> Session:
        with sessions.idle_session() as session:
            session.run(lambda connection: connection.execute(text("SELECT 1")))
            return session

    assert (await asyncio.to_thread(work_late)).driver is None


@pytest.mark.parametrize("size", [1, 0, -1, 1001, "many", 2.5, True])
def test_a_size_that_cannot_be_is_refused(size: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match="pool_size must be a whole number from 2 to 1000"):
        SqlTransport(SqlDatabase("postgresql://user@host/sizes", pool_size=size))


def test_the_size_of_the_pool_is_also_a_parameter_of_the_url() -> None:
    with pytest.raises(ConfigurationError, match="not '1'"):
        SqlTransport("postgresql://user@host/sizes?pool_size=1")
    assert database_at("postgresql://user@host/sizes?pool_size=9").transactions == 6  # type: ignore[attr-defined]


def test_sqlite_takes_none_of_them() -> None:
    with pytest.raises(ConfigurationError, match="pool_size= is for servers"):
        SqlTransport(SqlDatabase("sqlite:///x.db", pool_size=4))
    with pytest.raises(ConfigurationError, match="are for servers: name SQLite file"):
        SqlTransport(create_engine("sqlite:///x.db"))
    with pytest.raises(ConfigurationError, match="are for servers"):
        SqlTransport(SqlDatabase("sqlite:///x.db", connect=dict))


def test_a_url_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not int; for an AsyncEngine pass its sync_engine"):
        SqlTransport(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="both make connections"):
        SqlTransport(SqlDatabase(create_engine("postgresql+psycopg://user@host/x"), connect=dict))
