"""Azure Storage falls silent: every wait has a limit, the outcome is said to be unknown, and a stop ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from tests.eventually import PATIENCE
from tests.integration.azure_parts import SECOND, HandledMessages, endpoint_at
from tests.integration.azure_proxy import Proxy, refusal

from delayline import BackendUnavailable, Endpoint, Event, TransactionMode
from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport, DelayedTableDelivery
from delayline.azure.requests import Requests
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.servers.azurite import AzuriteServer

LIMIT = 1.5
MARGIN = 8.0
"""Seconds, on a busy machine."""
AT_ONCE = 5.0
"""Seconds, on a busy machine; far from the default limit of 15."""


class Silence:
    """Stops the emulator's process, which keeps its connections and answers nothing."""

    def __init__(self, server: AzuriteServer) -> None:
        self._server = server

    def begin(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)

    def end(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)


@pytest.fixture
def silence(azurite: AzuriteServer) -> Iterator[Silence]:
    silence = Silence(azurite)
    yield silence
    silence.end()


@pytest_asyncio.fixture
async def proxy(azure_url: str) -> AsyncIterator[Proxy]:
    await endpoint_at(azure_url).setup()
    async with Proxy(azure_url) as proxy:
        yield proxy


def limited(url: str, noted: HandledMessages | None = None, seconds: float = LIMIT) -> Endpoint:
    return endpoint_at(f"{url}server_timeout={seconds}", noted=noted)


async def failing_send(endpoint: Endpoint, delay: timedelta | None) -> float:
    """Send, which fails because nothing answers; return how long that took."""
    asked = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"(?s)did not answer within.*server_timeout.*unknown"):
        await endpoint.send("sales", b"", delay=delay)
    return time.monotonic() - asked


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)])
async def test_silence_of_a_stopped_server_ends_a_send_within_the_limit(
    azure_url: str, silence: Silence, delay: timedelta | None
) -> None:
    await endpoint_at(azure_url).setup()
    noted = HandledMessages()
    async with limited(azure_url, noted) as endpoint:
        silence.begin()
        assert await failing_send(endpoint, delay) < LIMIT + MARGIN
        silence.end()
        # When it answers again, the same endpoint goes on
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await endpoint.send("sales", b"", message_id="after")
                    break
                except BackendUnavailable:
                    await asyncio.sleep(0.2)
        async with asyncio.timeout(PATIENCE):
            while "after" not in [message.id for message in noted]:
                await noted.until(len(noted) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 4.0])
async def test_silence_does_not_keep_an_endpoint_from_stopping(azure_url: str, silence: Silence, after: float) -> None:
    """With the limit of 15 seconds that it has by default."""
    await endpoint_at(azure_url).setup()
    endpoint = endpoint_at(azure_url, noted=HandledMessages())
    await endpoint.start()
    await endpoint.send("sales", b"", delay=SECOND)
    silence.begin()
    await asyncio.sleep(after)
    asked = time.monotonic()
    await endpoint.stop()
    assert time.monotonic() - asked < 20


@pytest.mark.slow
async def test_silence_arms_and_triggers_the_breakers(proxy: Proxy) -> None:
    account = AzureAccount(f"{proxy.url}server_timeout={LIMIT}")
    criticals: list[Exception] = []

    async def on_critical(endpoint: Endpoint, text: str, error: Exception) -> None:
        criticals.append(error)

    endpoint = Endpoint(
        "sales",
        transport=AzureStorageQueueTransport(account),
        delayed_delivery=DelayedTableDelivery(
            account, time_to_trigger_fetch_circuit_breaker=SECOND, time_to_trigger_store_circuit_breaker=SECOND
        ),
        on_critical_error=on_critical,
    )
    endpoint.handler(HandledMessages().handle)
    with Signals() as signals:
        async with endpoint:
            await endpoint.send("sales", b"", delay=2 * SECOND)
            proxy.swallow()
            async with asyncio.timeout(PATIENCE):
                while not criticals:  # noqa: ASYNC110 - the endpoint's
                    await asyncio.sleep(0.1)
            asked = time.monotonic()
        assert time.monotonic() - asked < 20
    assert signals.count(Event.BREAKER_ARMED) >= 1
    assert signals.count(Event.BREAKER_TRIGGERED) >= 1
    assert isinstance(criticals[0], BackendUnavailable)


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)])
async def test_cancellation_of_a_send_in_silence_returns_at_once(proxy: Proxy, delay: timedelta | None) -> None:
    async with limited(proxy.url) as endpoint:
        proxy.swallow()
        asked = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endpoint.send("sales", b"", delay=delay), 0.3)
        assert time.monotonic() - asked < AT_ONCE


async def test_many_sends_in_silence_all_fail_within_about_the_limit(proxy: Proxy) -> None:
    """More than have room at once: those behind them do not wait for the limit of each before."""
    async with limited(proxy.url) as endpoint:
        proxy.swallow()
        asked = time.monotonic()
        results = await asyncio.gather(*(endpoint.send("sales", b"") for _ in range(200)), return_exceptions=True)
        assert time.monotonic() - asked < 2 * LIMIT + MARGIN
        proxy.speak()
    assert all(isinstance(result, BackendUnavailable) for result in results)


@pytest.mark.slow
async def test_a_lease_whose_renewal_is_not_answered_is_given_up_before_it_ends(proxy: Proxy) -> None:
    store = AzureDelayedTable(proxy.url)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        lost = asyncio.Event()
        lease = store._parts("sales")[1]
        lease._lost = lost.set
        assert await lease.acquire()
        asked = time.monotonic()
        proxy.swallow("comp=lease")
        async with asyncio.timeout(PATIENCE):
            await lost.wait()
        assert 13 <= time.monotonic() - asked < 20
        assert not lease.held
    finally:
        store.stop_soon()
        await store.close()


async def test_a_retry_after_of_an_hour_ends_with_the_limit(proxy: Proxy) -> None:
    async with limited(proxy.url) as endpoint:
        proxy.instead("POST", r"/sales/messages", refusal(503, "ServerBusy", {"Retry-After": "3600"}))
        assert await failing_send(endpoint, None) < LIMIT + MARGIN


@pytest.mark.slow
async def test_a_stop_limits_requests_under_way_and_later_ones() -> None:
    requests = Requests(15.0)
    asking = asyncio.create_task(asked_in(requests))
    await asyncio.sleep(0)
    began = time.monotonic()
    requests.stop_soon()
    with pytest.raises(BackendUnavailable, match="unknown"):
        await asking
    assert 6 < time.monotonic() - began < 13
    with pytest.raises(BackendUnavailable):
        await asked_in(requests)
    assert time.monotonic() - began < 15


async def asked_in(requests: Requests) -> None:
    async with requests.ask("look"):
        await asyncio.Event().wait()
