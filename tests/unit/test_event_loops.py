"""An endpoint belongs to the event loop that started it: calls from another one are told so, and harm nobody."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import ConfigurationError, Endpoint, MemoryDelayedMessageStore, MemoryTransport, Send, SyncEndpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def an_endpoint() -> Endpoint:
    return Endpoint("shop", transport=MemoryTransport(), delayed_delivery=MemoryDelayedMessageStore())


CALLS: dict[str, Callable[[Endpoint], Awaitable[Any]]] = {
    "send": lambda endpoint: endpoint.send("shop", "x"),
    "delayed send": lambda endpoint: endpoint.send("shop", "x", delay=timedelta(hours=1)),
    "send_many": lambda endpoint: endpoint.send_many([Send("shop", "x")]),
    "start": lambda endpoint: endpoint.start(),
    "stop": lambda endpoint: endpoint.stop(),
    "wait_stopped": lambda endpoint: endpoint.wait_stopped(),
}


def in_another_loop(endpoint: Endpoint, call: Callable[[Endpoint], Awaitable[Any]]) -> None:
    async def called() -> None:
        await call(endpoint)

    asyncio.run(called())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_call_from_another_loop_is_refused(call: Callable[[Endpoint], Awaitable[Any]]) -> None:
    # Given an endpoint that runs on this loop
    async with an_endpoint() as endpoint:
        # When another loop's task calls it, then it is told what to use
        with pytest.raises(
            ConfigurationError, match=r"endpoint 'shop' was started on another event loop.*SyncEndpoint"
        ):
            await asyncio.to_thread(in_another_loop, endpoint, call)
        # And calls of this loop go on
        assert endpoint.started
        await endpoint.send("shop", "x")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_after_the_loop_has_ended_is_refused(call: Callable[[Endpoint], Awaitable[Any]]) -> None:
    # Given an endpoint that was started in one asyncio.run and not stopped there
    endpoint = an_endpoint()
    asyncio.run(endpoint.start())
    # Then it does not claim to run
    assert not endpoint.started
    # And the next asyncio.run is told
    with pytest.raises(ConfigurationError, match=r"event loop that has ended.*SyncEndpoint"):
        in_another_loop(endpoint, call)


async def test_management_is_reached_from_beside_a_loop() -> None:
    # Given a synchronous endpoint, used where another loop runs, as in a notebook
    with SyncEndpoint(an_endpoint()) as shop:
        shop.send("shop", "x", message_id="reminder", delay=timedelta(hours=1))
        # Then its pending messages can be managed
        assert shop.run(shop.endpoint.delayed.cancel("reminder"))
