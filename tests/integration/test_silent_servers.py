"""Servers that stop to answer, and middle boxes that swallow: every wait ends, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import psycopg
import pytest
from tests.eventually import PATIENCE
from tests.servers.frozen import Frozen

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    SqlDatabase,
    SqlDelayedMessageStore,
    SqlTransport,
)
from delayline.delayed.delivery import StoredDelivery
from delayline.endpoint import log_and_stop
from delayline.errors import DelaylineError
from delayline.sql.databases import database_at
from delayline.sql.sessions import PING_AFTER
from delayline.sync import SyncEndpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from tests.servers.mariadb import MariadbServer
    from tests.servers.postgresql import PostgresqlServer

    from delayline import Message, MessageContext
    from delayline.endpoint import CriticalErrorAction

LIMIT: Final = 1.5  # seconds, the server_timeout of these tests
MARGIN: Final = 8.0  # seconds, on a busy machine
AT_ONCE: Final = 5.0  # seconds, on a busy machine; far from the default limit of 15
STOP: Final = 20.0

STORING_AND_POLLING: Final = ("Failed to store", ("Failed to fetch", "Failed to dispatch"))

HOST = """
from datetime import timedelta
from delayline import Endpoint, SqlDatabase, StoredDelivery, SqlDelayedMessageStore, SqlTransport

transport = SqlTransport(SqlDatabase({url!r}, server_timeout={limit}))
endpoint = Endpoint("orders", transport=transport, delayed_delivery=StoredDelivery(SqlDelayedMessageStore({url!r})))

@endpoint.handler
async def handle(message, context):
    pass
"""


class Swallower:
    """A TCP proxy that can swallow data from either side."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self.swallows = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.url = url.replace(f":{parts.port}/", f":{self._listener.getsockname()[1]}/")
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                swallowed = threading.Event()
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(one, other, swallowed), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, swallowed: threading.Event) -> None:
        """Forward data; data after a swallowed part is swallowed too, because it cannot be understood."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.swallows:
                    swallowed.set()
                if not swallowed.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        source.close()


@pytest.fixture(params=["postgresql", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def frozen(server_url: str, request: pytest.FixtureRequest) -> Iterator[Frozen]:
    if server_url.startswith("postgresql"):
        postgresql: PostgresqlServer = request.getfixturevalue("postgresql")
        pid = postgresql.pid
    else:
        mariadb: MariadbServer = request.getfixturevalue("mariadb")
        assert mariadb._process is not None
        pid = mariadb._process.pid
    frozen = Frozen(pid)
    yield frozen
    frozen.go_on()


@pytest.fixture
def swallower(server_url: str) -> Iterator[Swallower]:
    proxy = Swallower(server_url)
    yield proxy
    proxy.close()


def endpoint_on(
    url: str, *, send_only: bool = False, on_critical_error: CriticalErrorAction = log_and_stop
) -> Endpoint:
    soon = timedelta(seconds=4)
    return Endpoint(
        "orders",
        transport=SqlTransport(SqlDatabase(url, server_timeout=LIMIT)),
        delayed_delivery=StoredDelivery(
            SqlDelayedMessageStore(url),
            number_of_retries=20,
            time_to_trigger_store_circuit_breaker=soon,
            time_to_trigger_fetch_circuit_breaker=soon,
            time_to_trigger_dispatch_circuit_breaker=soon,
        ),
        send_only=send_only,
        on_critical_error=on_critical_error,
    )


async def ignore(endpoint: Endpoint, text: str, error: Exception) -> None:
    """What to do about a critical error."""


async def seconds_of(work: Awaitable[object]) -> tuple[float, BaseException | None]:
    began = time.monotonic()
    try:
        await work
    except (DelaylineError, TimeoutError) as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)])
async def test_a_send_to_a_silent_server_fails_within_the_limit(
    server_url: str, frozen: Frozen, delay: timedelta | None
) -> None:
    endpoint = endpoint_on(server_url, send_only=True, on_critical_error=ignore)
    async with endpoint:
        for _ in range(3):
            await endpoint.send("error", b"before", delay=delay)
        frozen.stop()
        # When one message is sent, and several at once behind it, then each send fails in time and says what happened
        first = asyncio.create_task(seconds_of(endpoint.send("error", b"x", delay=delay)))
        await asyncio.sleep(0.1)
        sends = (seconds_of(endpoint.send("error", b"x", delay=delay)) for _ in range(5))
        outcomes = [*await asyncio.gather(*sends), await first]
        assert all(isinstance(error, BackendUnavailable) for _, error in outcomes), outcomes
        assert max(seconds for seconds, _ in outcomes) < LIMIT + MARGIN
        texts = [str(error) for _, error in outcomes]
        assert any(f"within {LIMIT:g} s" in text or "timeout" in text for text in texts), texts
        if delay is not None:  # a single statement; the transaction of the other did not come to its commit
            assert any("outcome is unknown" in text for text in texts), texts
        # When the server answers again, then so do sends
        frozen.go_on()
        deadline = time.monotonic() + PATIENCE
        while (await seconds_of(endpoint.send("error", b"after", delay=delay)))[1] is not None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_a_cancelled_send_returns_at_once(server_url: str, frozen: Frozen) -> None:
    """Given the default limit, which a send that is not cancelled waits for."""
    endpoint = Endpoint(
        "orders",
        transport=SqlTransport(server_url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(server_url)),
        send_only=True,
        on_critical_error=ignore,
    )
    async with endpoint:
        await endpoint.send("error", b"before")
        frozen.stop()
        for delay in (None, timedelta(hours=1)):
            seconds, error = await seconds_of(asyncio.wait_for(endpoint.send("error", b"x", delay=delay), 0.3))
            assert isinstance(error, TimeoutError)
            assert seconds < AT_ONCE
        frozen.go_on()


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)], ids=["immediate", "delayed"])
async def test_a_cancelled_send_is_usually_stored(server_url: str, delay: timedelta | None) -> None:
    endpoint = endpoint_on(server_url, send_only=True)
    async with endpoint:
        await endpoint.send("error", b"before", delay=delay)
        sending = asyncio.create_task(endpoint.send("error", b"x", delay=delay))
        for _ in range(3):
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        async with asyncio.timeout(30):
            while await stored(endpoint, delay) < 2:  # noqa: ASYNC110 - nothing else says so
                await asyncio.sleep(0.01)


async def stored(endpoint: Endpoint, delay: timedelta | None) -> int:
    if delay is not None:
        return len(await endpoint.delayed.pending())
    assert isinstance(endpoint.transport, SqlTransport)
    return await endpoint.transport.count("error")


@pytest.mark.slow
async def test_silence_becomes_a_critical_error(server_url: str, frozen: Frozen) -> None:
    raised: list[str] = []

    async def note(endpoint: Endpoint, text: str, error: Exception) -> None:
        assert isinstance(error, BackendUnavailable)
        raised.append(text)

    endpoint = endpoint_on(server_url, on_critical_error=note)
    async with endpoint:
        await endpoint.send("orders", b"", delay=timedelta(seconds=1))
        frozen.stop()
        async with asyncio.timeout(60):
            while not all(any(text.startswith(start) for text in raised) for start in STORING_AND_POLLING):
                with contextlib.suppress(BackendUnavailable):
                    await endpoint.send("orders", b"", delay=timedelta(seconds=1))
                await asyncio.sleep(0.2)
        frozen.go_on()


@pytest.mark.parametrize("how", ["frozen", "swallowed"])
@pytest.mark.sample(1)
async def test_nothing_is_lost_or_doubled_by_silence(
    server_url: str, frozen: Frozen, swallower: Swallower, how: str
) -> None:
    url = swallower.url if how == "swallowed" else server_url
    endpoint = endpoint_on(url, on_critical_error=ignore)
    accepted: list[str] = []
    unknown: list[str] = []
    done: Counter[str] = Counter()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await context.send("done", message.id)

    async def send(number: int) -> None:
        name = f"{number}"
        try:
            await endpoint.send("orders", b"", message_id=name, delay=timedelta(milliseconds=number % 7))
            accepted.append(name)
        except BackendUnavailable:
            unknown.append(name)

    await endpoint.transport.setup_infrastructure(["done"])
    async with endpoint:
        sending = 0
        for round_ in range(2):
            for _ in range(100):
                await send(sending)
                sending += 1
            frozen.stop() if how == "frozen" else setattr(swallower, "swallows", True)
            for _ in range(4):
                await asyncio.gather(*(send(sending + one) for one in range(5)))
                sending += 5
                await asyncio.sleep(0.3)
            frozen.go_on() if how == "frozen" else setattr(swallower, "swallows", False)
            deadline = time.monotonic() + PATIENCE
            while True:
                sending += 1
                await send(sending)
                if accepted[-1] == f"{sending}":
                    break
                assert time.monotonic() < deadline, round_
                await asyncio.sleep(0.1)
        transport: Any = endpoint.transport
        deadline = time.monotonic() + PATIENCE
        while not set(accepted) <= set(done):
            with contextlib.suppress(BackendUnavailable):  # a slow machine is silent once more, and asked again
                found = await transport.browse("done", 10_000)
                done = Counter(message.body.decode() for message in found)
            assert time.monotonic() < deadline, set(accepted) - set(done)
            await asyncio.sleep(0.2)
    assert unknown
    assert max(done.values()) == 1
    assert set(done) <= set(accepted) | set(unknown)


@pytest.mark.slow
async def test_a_stop_returns_in_time(server_url: str, frozen: Frozen) -> None:
    endpoint = endpoint_on(server_url, on_critical_error=ignore)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    await endpoint.start()
    await endpoint.send("orders", b"", delay=timedelta(hours=1))
    frozen.stop()
    seconds, error = await seconds_of(endpoint.stop())
    assert error is None
    assert seconds < LIMIT * 2 + MARGIN
    with pytest.raises(BackendUnavailable):
        await endpoint.start()
    frozen.go_on()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "at rest", "claiming", "handling", "reconnecting", "given up"])
@pytest.mark.sample(1)
async def test_a_stop_returns_in_time_with_the_default_limit(
    postgresql_url: str, postgresql: PostgresqlServer, moment: str
) -> None:
    """Given the limit of 15 s, when the server falls silent at any moment, then the waits of a stop add up to less."""
    frozen = Frozen(postgresql.pid)
    endpoint = Endpoint(
        "orders",
        transport=SqlTransport(postgresql_url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(postgresql_url)),
        on_critical_error=ignore,
    )
    handling, may_end = asyncio.Event(), asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handling.set()
        await may_end.wait()
        await context.send("orders", b"", delay=timedelta(hours=1))

    await endpoint.start()
    try:
        if moment == "handling":
            await endpoint.send("orders", b"")
            await asyncio.wait_for(handling.wait(), 15)
        if moment == "at rest":
            await asyncio.sleep(PING_AFTER + 1)
        if moment == "reconnecting":
            end_listener(postgresql_url)
        frozen.stop()
        # "claiming": the receiver looks again each second; "given up": its first answer was missed, others are awaited
        await asyncio.sleep({"idle": 0, "given up": 19}.get(moment, 2))
        may_end.set()
        seconds, error = await seconds_of(endpoint.stop())
    finally:
        frozen.go_on()
    assert error is None
    assert seconds < STOP
    await endpoint.start()  # leftovers do not interfere
    await endpoint.send("orders", b"", delay=timedelta(hours=1))
    await endpoint.stop()


def end_listener(url: str) -> None:
    """End the connection that waits for notifications, so that it is made anew."""
    with psycopg.connect(url) as connection:
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN %'"
        ).fetchall()
    assert ended


@pytest.mark.slow
async def test_a_start_that_finds_silence_is_stopped_in_time(postgresql_url: str, postgresql: PostgresqlServer) -> None:
    """Given set-up, whose limit is ten times as long, when the server is silent, then a stop ends it all the same."""
    frozen = Frozen(postgresql.pid)
    endpoint = Endpoint(
        "orders",
        transport=SqlTransport(postgresql_url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(postgresql_url)),
    )
    database = database_at(postgresql_url)
    await database.open()  # so that the start does not fail to connect
    frozen.stop()
    try:
        starting = asyncio.create_task(seconds_of(endpoint.start()))
        await asyncio.sleep(1)
        seconds, _ = await seconds_of(endpoint.stop())
        await starting
    finally:
        frozen.go_on()
        await database.close()
    assert seconds < STOP


def test_a_sync_endpoint_stops_in_time(server_url: str, frozen: Frozen) -> None:
    endpoint = SyncEndpoint(endpoint_on(server_url, send_only=True, on_critical_error=ignore))
    endpoint.start()
    endpoint.send("error", b"", delay=timedelta(hours=1))
    frozen.stop()
    began = time.monotonic()
    endpoint.stop()
    assert time.monotonic() - began < LIMIT * 2 + MARGIN
    frozen.go_on()


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_server_is_silent(server_url: str, frozen: Frozen, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(HOST.format(url=server_url, limit=LIMIT))
    process = subprocess.Popen(
        [sys.executable, "-m", "delayline", "run", "shop:endpoint"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "runs" in process.stdout.readline()
        frozen.stop()
        time.sleep(LIMIT / 2)
        process.terminate()
        assert process.wait(STOP) == 0
    finally:
        frozen.go_on()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
async def test_a_lock_that_is_waited_for_is_no_silence(server_url: str) -> None:
    store = SqlDelayedMessageStore(SqlDatabase(server_url, server_timeout=9))
    database = database_at(server_url)
    await store.setup_infrastructure("orders")
    await database.open()
    dialect = database.dialect
    lock = (
        'LOCK TABLE "delayline_queues" IN ACCESS EXCLUSIVE MODE'
        if server_url.startswith("postgresql")
        else "SELECT * FROM delayline_queues FOR UPDATE"
    )
    insert = "INSERT INTO delayline_queues (name) VALUES ('x')"
    update = insert if server_url.startswith("postgresql") else "UPDATE delayline_queues SET name = 'y'"
    try:
        await SqlTransport(server_url).setup_infrastructure(["one"])
        async with database.transaction() as transaction:
            await transaction.run(lambda connection: connection.exec_driver_sql(lock).close())
            seconds, error = await seconds_of(
                database.write(lambda connection: connection.exec_driver_sql(update).close())
            )
        assert isinstance(error, BackendUnavailable)
        assert "lock" in str(error)
        assert 5 < seconds < 9
        assert dialect.connections.server_timeout == 9
    finally:
        await database.close()


@pytest.mark.parametrize("value", ["0", "-1", "3601", "nan", "soon", "inf"])
def test_a_limit_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="server_timeout"):
        SqlTransport(f"postgresql://user@host/database?server_timeout={value}")
    given = float(value) if value != "soon" else True
    with pytest.raises(ConfigurationError, match="server_timeout"):
        SqlDelayedMessageStore(SqlDatabase("sqlite:///file.db", server_timeout=given))


def test_the_url_may_name_the_limit() -> None:
    long = SqlTransport("postgresql://user@host/limits?server_timeout=7.5")
    short = SqlDelayedMessageStore(SqlDatabase("postgresql://user@host/limits", server_timeout=2))
    assert (long.server_timeout, short.server_timeout) == (2, 2)
    assert long.transaction_domain == short.transaction_domain
