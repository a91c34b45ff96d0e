"""A broker that stops answering: every wait ends, the connection is replaced, and errors state the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE
from tests.integration.wire_between import wire_to

from delayline import BackendUnavailable, ConfigurationError, Endpoint, Event, Message, MessageContext
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.connection import BrokerConnection
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers.rabbitmq import RabbitmqServer

SHORT = 2.0
MARGIN = 8.0
"""Seconds, on a busy machine."""
AT_ONCE = 5.0
"""Seconds, on a busy machine; far from the default limit of 15."""


class RecordingEndpoint:
    """An endpoint that records its handled messages."""

    def __init__(self, url: str, server_timeout: float | None = None) -> None:
        self.handled: list[str] = []
        self.critical: list[str] = []
        self.endpoint = Endpoint(
            "shop",
            transport=RabbitMQTransport(url, server_timeout=server_timeout),
            delayed_delivery=DelayLevelDelivery(),
            on_critical_error=self._on_critical,
        )
        self.endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        self.handled.append(message.id)

    async def _on_critical(self, endpoint: Endpoint, text: str, error: Exception) -> None:
        self.critical.append(text)

    async def handles(self, message_id: str) -> None:
        """Send a message until that works, and return once it is handled."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(BackendUnavailable):
                    await self.endpoint.send("shop", b"", message_id=message_id)
                    break
                await asyncio.sleep(0.2)
            while message_id not in self.handled:  # noqa: ASYNC110 - the broker's time
                await asyncio.sleep(0.02)


@contextlib.contextmanager
def stopped(server: RabbitmqServer) -> Iterator[Callable[[], None]]:
    """Stop the broker's process as it is; it goes on at the end, or when what this provides is called."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(server.pid, signal.SIGCONT)
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.slow
async def test_a_proxy_that_swallows_is_noticed_and_replaced(rabbitmq_url: str) -> None:
    """Given a limit of 2 s, when nothing comes through, then sends say so in time, and all is well again afterwards."""
    async with wire_to(rabbitmq_url) as (wire, url):
        shop = RecordingEndpoint(url, SHORT)
        with Signals() as signals:
            async with shop.endpoint:
                await shop.handles("before")
                wire.hold()
                began = time.monotonic()
                with pytest.raises(BackendUnavailable, match="unknown outcome: it may have arrived"):
                    await shop.endpoint.send("shop", b"")
                assert time.monotonic() - began < SHORT + MARGIN
                with pytest.raises(BackendUnavailable):
                    await shop.endpoint.send("shop", b"", delay=timedelta(seconds=1))
                await signals.wait_for(Event.RECEIVE_FAILED, timeout=PATIENCE)
                wire.let_through()
                await shop.handles("after")
        assert shop.critical == []


async def test_a_delayed_send_is_limited_too(rabbitmq_url: str) -> None:
    """Given a connection that has been idle, when a delayed send finds it silent, then it fails in time."""
    async with wire_to(rabbitmq_url) as (wire, url):
        shop = RecordingEndpoint(f"{url}?server_timeout={SHORT}")
        async with shop.endpoint:
            wire.hold()
            began = time.monotonic()
            with pytest.raises(BackendUnavailable):
                await shop.endpoint.send("shop", b"", delay=timedelta(seconds=1))
            assert time.monotonic() - began < 2 * SHORT + MARGIN
            wire.let_through()


async def test_confirms_that_do_not_come_are_limited_without_heartbeats(rabbitmq_url: str) -> None:
    """Given a connection without heartbeats, when the broker confirms nothing, then the wait ends all the same."""
    async with wire_to(rabbitmq_url) as (wire, url):
        shop = RecordingEndpoint(f"{url}?heartbeat=0", SHORT)
        async with shop.endpoint:
            await shop.handles("before")
            wire.hold_answers()
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match="was silent for 2 s"):
                await shop.endpoint.send("shop", b"")
            assert time.monotonic() - began < SHORT + MARGIN
            wire.let_through()


async def test_a_cancelled_send_returns_at_once(rabbitmq_url: str) -> None:
    """Given a silent broker, when sends are cancelled, now and delayed, then they end then, not when it answers."""
    async with wire_to(rabbitmq_url) as (wire, url):
        shop = RecordingEndpoint(url)
        async with shop.endpoint:
            await shop.handles("before")
            wire.hold()
            for delay in (None, timedelta(seconds=5)):
                began = time.monotonic()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(shop.endpoint.send("shop", b"", delay=delay), 0.5)
                assert time.monotonic() - began < AT_ONCE
            wire.let_through()


@pytest.mark.slow
async def test_an_endpoint_stops_in_time_while_its_brokers_process_is_stopped(
    crashing_rabbitmq: RabbitmqServer,
) -> None:
    """Given the limit of 15 s that holds by itself, when the process stops, then sends and stops end in time."""
    url = crashing_rabbitmq.new_vhost()
    shop, other = RecordingEndpoint(url), RecordingEndpoint(url)
    await shop.endpoint.start()
    await other.endpoint.start()
    await shop.handles("before")
    with stopped(crashing_rabbitmq) as go_on:
        began = time.monotonic()

        async def ends() -> float:
            await other.endpoint.stop()
            return time.monotonic() - began

        stopping = asyncio.create_task(ends())
        with pytest.raises(BackendUnavailable, match="unknown outcome"):
            await shop.endpoint.send("shop", b"")
        assert time.monotonic() - began < 15 + AT_ONCE
        assert await asyncio.wait_for(stopping, PATIENCE) < 20
        go_on()
        await shop.handles("after")
        assert shop.critical == []
    began = time.monotonic()
    with stopped(crashing_rabbitmq):
        await shop.endpoint.stop()
        assert time.monotonic() - began < 20


@pytest.mark.slow
async def test_a_stop_ends_all_waits_for_a_silent_broker(crashing_rabbitmq: RabbitmqServer) -> None:
    """Given a limit of a minute and handlers that send, when the process stops, then a stop waits for none of it."""
    shop = RecordingEndpoint(f"{crashing_rabbitmq.new_vhost()}?heartbeat=10", 60)
    handling, may_end = asyncio.Event(), asyncio.Event()

    @shop.endpoint.handler
    async def send_on(message: Message, context: MessageContext) -> None:
        handling.set()
        await may_end.wait()
        await context.send("shop", b"")

    await shop.endpoint.start()
    await shop.endpoint.send("shop", b"")
    await asyncio.wait_for(handling.wait(), PATIENCE)
    with stopped(crashing_rabbitmq):
        may_end.set()
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await shop.endpoint.stop()
        assert time.monotonic() - began < 20


@pytest.mark.long
async def test_a_broker_that_stays_silent_is_a_critical_error(rabbitmq_url: str) -> None:
    """Given a broker that does not come back, when receiving has failed for 30 s, then the breaker triggers."""
    async with wire_to(rabbitmq_url) as (wire, url):
        shop = RecordingEndpoint(f"{url}?connection_timeout=2000", SHORT)
        async with shop.endpoint:
            wire.hold()
            async with asyncio.timeout(60):
                while not shop.critical:  # noqa: ASYNC110 - the breaker's time
                    await asyncio.sleep(0.2)
            assert shop.critical[0] == "Failed to receive from shop"
            wire.let_through()


def test_the_limit_is_an_option_of_the_url_and_an_argument() -> None:
    """Given both, when the transport is created, then the argument wins; values that are not seconds are refused."""
    assert BrokerAddress.parse("amqp://broker").server_timeout == 15
    assert BrokerAddress.parse("amqp://broker?server_timeout=2.5").short_heartbeat == 1
    assert BrokerAddress.parse("amqp://broker").short_heartbeat == 7
    assert BrokerAddress.parse("amqp://broker?heartbeat=0").short_heartbeat == 0
    assert RabbitMQTransport("amqp://broker?server_timeout=3", server_timeout=4).address.server_timeout == 4
    for wrong in ("0", "-1", "nan", "soon"):
        with pytest.raises(ConfigurationError, match="server_timeout must be a number of seconds above 0"):
            BrokerAddress.parse(f"amqp://broker?server_timeout={wrong}")


async def test_raised_errors_are_not_logged_as_well(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a connection that is refused, and one that the broker closes, then nothing of it is logged."""
    nowhere = BrokerConnection(BrokerAddress.parse("amqp://127.0.0.1:1"), "test")
    with pytest.raises(BackendUnavailable):
        await nowhere.open()
    connection = BrokerConnection(BrokerAddress.parse(rabbitmq_url), "test")
    opened = await connection.open()
    await asyncio.to_thread(rabbitmq.cut_connections, rabbitmq_url)
    async with asyncio.timeout(PATIENCE):
        while opened.lost is None:  # noqa: ASYNC110 - the broker's time
            await asyncio.sleep(0.05)
    await connection.close()
    assert [one.getMessage() for one in caplog.records if one.name.startswith("delayline")] == []
