"""Servers and databases whose settings are not the usual ones."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy.engine import make_url
from tests.conftest import not_installed, running
from tests.eventually import PATIENCE, eventually_async
from tests.servers import pgbouncer
from tests.servers.mariadb import MariadbServer

from delayline import Endpoint, InvalidMessage, Message, MessageContext, Send, StoredDelivery
from delayline.delayed.store import Outcome
from delayline.errors import BackendUnusable
from delayline.events import Event
from delayline.observer import Observer
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.servers.postgresql import PostgresqlServer

A_MOMENT = timedelta(milliseconds=100)
FAR = datetime(2091, 3, 30, tzinfo=UTC)
MANY = 150


def endpoint_at(url: str, number_of_retries: int = 0) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url), number_of_retries=number_of_retries)
    return Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery)


async def goes_round(url: str, name: str = "m", *, number: int = MANY) -> None:
    """Send, wait for, list and cancel messages."""
    endpoint, handled = endpoint_at(url), set[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.add(message.id)

    async with asyncio.timeout(PATIENCE), endpoint:
        await endpoint.send("sales", b"\xf0\x9f\x98\x80", message_id=name, headers={"h": "\U0001f600"})
        await endpoint.send("sales", b"", message_id="far", deliver_at=FAR)
        sends = [Send("sales", b"", delay=A_MOMENT, message_id=f"{name}{n}") for n in range(number)]
        await endpoint.send_many(sends)
        await eventually_async(lambda: len(handled) == number + 1, "messages arrive")
        assert await endpoint.delayed.cancel("far") is Outcome.DONE
    transport = SqlTransport(url)
    await transport.start()
    assert await transport.count("error") == 0
    await transport.stop()


@pytest.fixture(params=["SQL_ASCII", "LATIN1", "WIN1252"])
def encoded_url(request: pytest.FixtureRequest, postgresql: PostgresqlServer) -> Iterator[str]:
    """Provide a database in an encoding that has no letters for everything, or none of its own."""
    name = f"encoded_{request.param.lower()}"
    with postgresql.administrator() as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING '{request.param}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'".encode()
        )
    yield f"postgresql://delayline@127.0.0.1:{postgresql.port}/{name}"
    with postgresql.administrator() as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def test_databases_in_other_encodings(encoded_url: str) -> None:
    await goes_round(encoded_url)


async def test_an_id_that_an_encoding_has_no_letters_for_is_refused(encoded_url: str) -> None:
    if encoded_url.endswith("sql_ascii"):
        await goes_round(encoded_url, "x\U0001f600")
        return
    endpoint = endpoint_at(encoded_url)
    async with asyncio.timeout(PATIENCE), endpoint:
        for delay in (None, A_MOMENT):
            with pytest.raises(InvalidMessage, match=r"cannot keep this text: .* has to be UTF8"):
                await endpoint.send("sales", b"", message_id="x\U0001f600", delay=delay)
            with pytest.raises(InvalidMessage, match="cannot keep this text"):
                await endpoint.send_many(
                    [Send("sales", b"", message_id=f"x\U0001f600{n}", delay=delay) for n in range(5)]
                )


@pytest.mark.parametrize(
    "setting",
    [
        "quote_all_identifiers = on",
        "datestyle = 'German, DMY'",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
        "idle_session_timeout = '300ms'",
        "default_transaction_isolation = 'repeatable read'",
        "intervalstyle = 'sql_standard'",
        "extra_float_digits = -10",
        "enable_indexscan = off",
        "timezone = 'Pacific/Auckland'",
    ],
)
async def test_settings_of_a_postgresql_database(postgresql_url: str, setting: str) -> None:
    name = make_url(postgresql_url).database
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET {setting}".encode())
    try:
        for start in ("first", "second"):
            await goes_round(postgresql_url, start, number=5)
    finally:
        with psycopg.connect(postgresql_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} RESET ALL".encode())


@pytest.fixture
def session_mode(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Settings of PgBouncer in session mode, without and with the line that lets options through."""
    settings = pgbouncer.SETTINGS.replace("default_pool_size = 3", "default_pool_size = 20")
    plain = settings.replace("pool_mode = transaction", "pool_mode = session")
    return {"plain": plain, "ignoring": f"{plain}ignore_startup_parameters = options\n"}


@pytest.mark.parametrize("kind", ["plain", "ignoring"])
async def test_pgbouncer_in_session_mode(
    postgresql: PostgresqlServer,
    postgresql_url: str,
    session_mode: Mapping[str, str],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not pgbouncer.PgbouncerServer.installed():
        not_installed(pgbouncer.PgbouncerServer.product, pgbouncer.PgbouncerServer.install)
    monkeypatch.setattr(pgbouncer, "SETTINGS", session_mode[kind])
    pooler = pgbouncer.PgbouncerServer(str(postgresql.port))
    try:
        if kind == "ignoring":
            await goes_round(pooler.url(postgresql_url))
            return
        with pytest.raises(BackendUnusable, match="session mode, set ignore_startup_parameters = options"):
            await goes_round(pooler.url(postgresql_url))
    finally:
        pooler.close()


@pytest.fixture
def limited_mariadb_url(mariadb: MariadbServer, mariadb_url: str) -> Iterator[str]:
    """Provide a database on a server that guards its users against large and careless statements."""
    settings = {"sql_safe_updates": "1", "max_join_size": "100", "sql_select_limit": "5"}
    with mariadb.administrator() as cursor:
        for name, value in settings.items():
            cursor.execute(f"SET GLOBAL {name} = {value}")
    yield mariadb_url
    with mariadb.administrator() as cursor:
        for name in settings:
            cursor.execute(f"SET GLOBAL {name} = DEFAULT")


async def test_a_mariadb_that_limits_its_users(limited_mariadb_url: str) -> None:
    await goes_round(limited_mariadb_url)


@pytest.mark.slow
async def test_a_mariadb_that_logs_statements_is_refused() -> None:
    with running(MariadbServer, "log-bin=binlog", "server-id=1", "binlog-format=STATEMENT") as server:
        with pytest.raises(BackendUnusable, match="Set binlog_format to MIXED or ROW"):
            await goes_round(server.new_database())
        with server.administrator() as cursor:
            cursor.execute("SET GLOBAL binlog_format = MIXED")
        await goes_round(server.new_database())


@pytest.fixture
def store_url(postgresql: PostgresqlServer) -> Iterator[str]:
    """Provide a second database."""
    url = postgresql.new_database()
    yield url
    postgresql.drop_database(url)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("table", "column"), [("delayline_messages", "id"), ("delayline_messages", "queue"), ("delayline_queues", "name")]
)
async def test_a_change_of_tables_under_prepared_statements_fails_no_message(
    postgresql_url: str, store_url: str, beside: bool, table: str, column: str
) -> None:
    # Given an endpoint whose statements are prepared, and whose messages are dispatched once only
    store = SqlDelayedMessageStore(postgresql_url if beside else store_url)
    delivery = StoredDelivery(store, number_of_retries=0)
    endpoint, handled = Endpoint("sales", transport=SqlTransport(postgresql_url), delayed_delivery=delivery), set[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.add(message.id)

    async with asyncio.timeout(PATIENCE), endpoint:
        for number in range(12):
            await endpoint.send("sales", b"", message_id=f"before{number}", delay=A_MOMENT / 10)
            await eventually_async(partial(handled.__contains__, f"before{number}"), "messages arrive")
        # When tables change that they read
        with psycopg.connect(postgresql_url, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE {table} ALTER COLUMN {column} TYPE varchar(4000)".encode())
        sends = [Send("sales", b"", message_id=f"after{number}", delay=A_MOMENT) for number in range(40)]
        await endpoint.send_many(sends)
        # Then every message arrives
        await eventually_async(lambda: handled >= {f"after{number}" for number in range(40)}, "messages arrive")


class Polls(Observer):
    """Counts the looks of a poller that have failed, or have moved nothing for a message's failure."""

    def __init__(self) -> None:
        self.failed = 0

    def polled(self, due: int, error: Exception | None) -> None:
        self.failed += error is not None or due > 0


@pytest.mark.parametrize("right", ["INSERT ON delayline_messages", 'DELETE ON "sales.timeouts"'])
async def test_a_right_that_is_revoked_counts_against_no_message(postgresql_url: str, right: str) -> None:
    """Given a poller that loses a right, when it gets it back, then no attempt was counted, and all is dispatched."""
    url = postgresql_url.replace("delayline@", "sender@")
    polls, due = Polls(), timedelta(seconds=1)  # type: ignore[abstract]  # other calls do nothing
    delivery = StoredDelivery(SqlDelayedMessageStore(url), number_of_retries=0)
    endpoint = Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery, observers=[polls])
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS sender")
        connection.execute("CREATE ROLE sender LOGIN")
        await endpoint_at(postgresql_url).setup()
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO sender")
        try:
            with Signals() as signals:
                async with asyncio.timeout(2 * PATIENCE), endpoint:
                    for number in range(5):
                        await endpoint.send("sales", b"", message_id=f"m{number}", delay=due)
                    connection.execute(f"REVOKE {right} FROM sender".encode())
                    await eventually_async(lambda: polls.failed >= 3, "moves fail")
                    connection.execute(f"GRANT {right} TO sender".encode())
                    assert signals.count(Event.BACKED_OFF) == signals.count(Event.ERROR_MOVE_FAILED) == 0
                    transport = SqlTransport(postgresql_url)
                    await transport.start()

                    async def all_came() -> bool:
                        return await transport.count("sales") == 5

                    await eventually_async(all_came, "messages are dispatched")
                    assert await transport.count("error") == 0
                    await transport.stop()
        finally:
            connection.execute("DROP OWNED BY sender")
            connection.execute("DROP ROLE sender")
