"""What an outage of the server writes to the log of an idle endpoint: little, however long it lasts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE, eventually_async
from tests.servers.postgresql import PostgresqlServer

from delayline import Endpoint, Event, SqlDelayedMessageStore, SqlTransport, StoredDelivery
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTAGE = 8.0  # seconds


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    if not PostgresqlServer.installed():
        pytest.skip("PostgreSQL is not installed")
    server = PostgresqlServer()
    yield server
    server.close()


@pytest.mark.slow
async def test_an_outage_writes_one_traceback_for_each_breaker_and_few_lines(server: PostgresqlServer) -> None:
    """Given an idle endpoint, when its server is down for some seconds, then the log says so without repeating it."""
    url = server.new_database()
    endpoint = Endpoint(
        "sales", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
    )
    await endpoint.setup()
    with Signals() as signals:
        async with endpoint:
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(OUTAGE)
            await asyncio.to_thread(server.start)
            armed = signals.count(Event.BREAKER_ARMED)
            await signals.wait_for(Event.BREAKER_DISARMED, armed, timeout=PATIENCE)
    loud = [record for event in Event for record in signals.records(event) if record.levelno >= logging.WARNING]
    seen = Counter((record.name, record.levelname, str(vars(record)["event"])) for record in loud)
    tracebacks = [record for record in loud if record.exc_info]
    assert armed > 0
    assert len(loud) < 30, seen
    assert len(tracebacks) == armed, seen


@pytest.mark.slow
async def test_an_outage_has_no_traceback_at_info(server: PostgresqlServer, caplog: pytest.LogCaptureFixture) -> None:
    """Given a log at INFO, when the server is down for some seconds, then warnings tell it, and a line its end."""
    url = server.new_database()
    caplog.set_level(logging.INFO, "delayline")
    endpoint = Endpoint(
        "sales", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
    )
    await endpoint.setup()

    def events() -> list[Event]:
        return [vars(record)["event"] for record in caplog.records]

    async with endpoint:
        await asyncio.to_thread(server.stop)
        await eventually_async(lambda: Event.BREAKER_ARMED in events(), "the outage is noticed")
        await asyncio.to_thread(server.start)
        armed = events().count(Event.BREAKER_ARMED)
        await eventually_async(lambda: events().count(Event.BREAKER_DISARMED) >= armed, "the outage is over")
    assert [record for record in caplog.records if record.exc_info] == []
    assert {record.levelname for record in caplog.records if record.levelno > logging.INFO} == {"WARNING"}
