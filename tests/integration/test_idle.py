"""An endpoint with nothing to do asks the database next to nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from delayline.events import Event
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from delayline import Endpoint, Message, MessageContext

SECONDS = 3.0
MOST = 2  # statements a second


def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what every SQLite connection opened from now on executes."""
    executed: list[str] = []
    connect = sqlite3.connect

    def connecting(*arguments: Any, **settings: Any) -> sqlite3.Connection:  # noqa: ANN401
        connection: sqlite3.Connection = connect(*arguments, **settings)
        connection.set_trace_callback(executed.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connecting)
    return executed


async def test_an_idle_endpoint_is_quiet(
    monkeypatch: pytest.MonkeyPatch, make_endpoint: Callable[..., Endpoint]
) -> None:
    # Given an endpoint that has worked, with its poller asleep and its receiver waiting
    executed = traced(monkeypatch)
    endpoint = make_endpoint()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    with Signals() as signals:
        async with endpoint:
            await endpoint.send("orders", b"", delay=timedelta(seconds=0.1))
            await endpoint.send("orders", b"", delay=timedelta(hours=1))
            await signals.wait_for(Event.HANDLED)
            await asyncio.sleep(0.3)
            assert executed, "nothing was traced"
            executed.clear()
            # When nothing happens
            await asyncio.sleep(SECONDS)
            quiet = list(executed)
    # Then it executes next to nothing
    assert len(quiet) <= MOST * SECONDS, quiet
