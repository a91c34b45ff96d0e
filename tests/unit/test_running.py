"""`run_until_stopped`: endpoints of a program, until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    MemoryTransport,
    SyncEndpoint,
    run_until_stopped,
)


class Absent(MemoryTransport):
    async def start(self) -> None:
        raise BackendUnavailable("away")


def endpoints() -> list[Endpoint]:
    return [Endpoint(name, transport=MemoryTransport()) for name in ("shop", "billing")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_all(number: signal.Signals) -> None:
    shop, billing = endpoints()
    stopping: list[bool] = []
    stopped_by = await run_until_stopped(
        shop,
        SyncEndpoint(billing),
        started=lambda: os.kill(os.getpid(), number),
        stopping=lambda: stopping.append(shop.started and billing.started),
    )
    assert stopped_by == number.name
    assert stopping == [True]
    assert not (shop.started or billing.started)


async def test_one_that_stops_by_itself_stops_the_others() -> None:
    shop, billing = endpoints()
    stops: list[asyncio.Task[None]] = []
    stopped_by = await run_until_stopped(
        shop, billing, started=lambda: stops.append(asyncio.create_task(billing.stop()))
    )
    assert stopped_by is None
    assert not (shop.started or billing.started)


async def test_one_that_cannot_start_stops_those_that_have() -> None:
    shop, _ = endpoints()
    with pytest.raises(BackendUnavailable, match="away"):
        await run_until_stopped(shop, Endpoint("billing", transport=Absent()))
    assert not shop.started


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "there is no endpoint to run"),
        ([endpoints()], "a list is no Endpoint: pass endpoints, one by one"),
        ([*endpoints(), *endpoints()], "two endpoints are named 'shop'"),
    ],
)
async def test_what_cannot_be_run_is_refused(given: list[Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        await run_until_stopped(*given)


async def test_it_belongs_in_the_main_thread() -> None:
    shop, _ = endpoints()
    with pytest.raises(ConfigurationError, match="signals reach only the main thread"):
        await asyncio.to_thread(lambda: asyncio.run(run_until_stopped(shop)))
