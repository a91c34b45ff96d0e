"""When an endpoint is ready and when it is not, beside real servers that hang, are down, and come back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Final

import pytest
from tests.eventually import PATIENCE, eventually, eventually_async
from tests.servers.frozen import Frozen
from tests.servers.postgresql import PostgresqlServer
from tests.servers.rabbitmq import RabbitmqServer

from delayline import (
    BackendUnavailable,
    Endpoint,
    Event,
    Message,
    MessageContext,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
)
from delayline.azure import AzureAccount, AzureStorageQueueTransport, DelayedTableDelivery
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.telemetry import Measurements, Probes, Verdict, probes
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.servers.azurite import AzuriteServer
    from tests.servers.mariadb import MariadbServer

SHORT: Final = 2.0
"""The server_timeout of these tests, in seconds."""
FAILURES: Final = 3
"""So many failures to receive are seen while the server hangs."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "FAILURE_LIMIT", 3.0)


async def goes_on(endpoint: Endpoint, text: str, error: Exception) -> None:
    """Keep the endpoint running after a critical error."""


def on_rabbitmq(url: str) -> Endpoint:
    return Endpoint(
        "shop",
        transport=RabbitMQTransport(url, server_timeout=SHORT),
        delayed_delivery=DelayLevelDelivery(),
        on_critical_error=goes_on,
    )


def on_database(url: str) -> Endpoint:
    url = f"{url}{'&' if '?' in url else '?'}server_timeout={SHORT:g}"
    return Endpoint(
        "shop",
        transport=SqlTransport(url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
        on_critical_error=goes_on,
    )


def on_azure(url: str) -> Endpoint:
    account = AzureAccount(url, server_timeout=SHORT)
    return Endpoint(
        "shop",
        transport=AzureStorageQueueTransport(account),
        delayed_delivery=DelayedTableDelivery(account),
        on_critical_error=goes_on,
    )


class Watched:
    """An endpoint that goes on after critical errors, and its probes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.handled: list[str] = []
        self.probes = Probes(Measurements.of(endpoint))
        endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        self.handled.append(message.id)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Probes]:
        await self.endpoint.setup()
        async with self.probes, self.endpoint:
            self.probes.started()
            yield self.probes

    async def is_not_ready(self) -> None:
        await eventually_async(lambda: not self.probes.ready().ok, "the endpoint is not ready")

    async def is_ready(self) -> None:
        await eventually_async(lambda: self.probes.ready().ok, "the endpoint is ready")


@contextlib.contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop the server's processes as they are; they go on at the end."""
    frozen = Frozen(pid)
    frozen.stop()
    try:
        yield
    finally:
        frozen.go_on()


async def hangs(endpoint: Endpoint, pid: int) -> None:
    """When the server hangs, then the endpoint is not ready until the server answers, though no message comes."""
    watched = Watched(endpoint)
    with Signals() as signals:
        async with watched.running() as ready:
            await watched.is_ready()
            with standing_still(pid):
                await watched.is_not_ready()
                assert ready.live().ok
                await signals.wait_for(Event.RECEIVE_FAILED, FAILURES, timeout=PATIENCE)
                assert not ready.ready().ok
                assert signals.count(Event.BREAKER_DISARMED) == 0
            await watched.is_ready()


async def test_a_rabbitmq_that_hangs_is_not_ready_until_it_answers(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given an endpoint that never had a message."""
    await hangs(on_rabbitmq(rabbitmq_url), rabbitmq.pid)


async def test_a_postgresql_that_hangs_is_not_ready_until_it_answers(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    """Given an endpoint that never had a message."""
    await hangs(on_database(postgresql_url), postgresql.pid)


async def test_a_mariadb_that_hangs_is_not_ready_until_it_answers(mariadb: MariadbServer, mariadb_url: str) -> None:
    """Given an endpoint that never had a message."""
    await hangs(on_database(mariadb_url), mariadb.pid)


async def test_an_azure_that_hangs_is_not_ready_until_it_answers(azurite: AzuriteServer, azure_url: str) -> None:
    """Given an endpoint that never had a message."""
    await hangs(on_azure(azure_url), azurite.pid)


async def test_a_paused_queue_is_ready_and_its_hung_server_is_not(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    """Given a queue that is paused."""
    await on_database(postgresql_url).setup()
    transport = SqlTransport(postgresql_url)
    await transport.start()
    await transport.set_limits("shop", paused=True)
    await transport.stop()
    await hangs(on_database(postgresql_url), postgresql.pid)


@pytest.mark.parametrize("product", [RabbitmqServer, PostgresqlServer])
async def test_a_server_that_is_down_is_not_ready_until_it_is_back(
    product: type[RabbitmqServer | PostgresqlServer],
) -> None:
    """Given an endpoint that never had a message, when its server is killed and comes back."""
    if not product.installed():
        pytest.skip(f"{product.product} is not installed")
    with contextlib.closing(product()) as server:
        if isinstance(server, RabbitmqServer):
            watched = Watched(on_rabbitmq(server.new_vhost()))
        else:
            watched = Watched(on_database(server.new_database()))
        async with watched.running():
            await watched.is_ready()
            if isinstance(server, RabbitmqServer):
                await asyncio.to_thread(server.settle)
            await asyncio.to_thread(server.kill)
            await watched.is_not_ready()
            await asyncio.to_thread(server.start)
            await watched.is_ready()


async def test_an_endpoint_that_cannot_start_is_alive_and_not_ready(
    rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    """When an endpoint starts beside a broker that hangs, then it is alive and not ready until the start fails."""
    watched = Watched(on_rabbitmq(rabbitmq_url))
    await watched.endpoint.setup()
    async with watched.probes as ready:
        with standing_still(rabbitmq.pid):
            with pytest.raises(BackendUnavailable):
                await watched.endpoint.start()
            assert ready.ready().reasons == ("the endpoint is starting",)
            assert ready.live().ok


async def test_a_blocked_event_loop_is_neither_alive_nor_ready_until_it_turns(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a handler blocks the event loop, then /live and /ready say so meanwhile, and not any more afterwards."""
    monkeypatch.setattr(probes, "LOOP_LIMIT", 3.0)
    endpoint = on_rabbitmq(rabbitmq_url)
    goes_on = threading.Event()

    @endpoint.handler
    async def block(message: Message, context: MessageContext) -> None:
        goes_on.wait(PATIENCE)

    watched = Watched(endpoint)
    answers: list[Verdict] = []

    def ask() -> None:
        eventually(lambda: not watched.probes.live().ok, "it is not alive")
        answers.extend([watched.probes.live(), watched.probes.ready()])
        goes_on.set()

    async with watched.running() as ready:
        asking = asyncio.get_running_loop().run_in_executor(None, ask)
        await endpoint.send_local(b"")
        await asking
        assert [answer.ok for answer in answers] == [False, False]
        assert "the event loop has not turned for" in answers[1].reasons[0]
        await eventually_async(lambda: ready.live().ok and ready.ready().ok, "it is alive and ready")
