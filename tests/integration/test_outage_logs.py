"""What an outage of the server writes to the log of an idle endpoint: little, however long it lasts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE
from tests.servers.postgresql import PostgresqlServer

from delayline import Endpoint, Event
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline import Message, MessageContext


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    if not PostgresqlServer.installed():
        pytest.skip("PostgreSQL is not installed")
    server = PostgresqlServer()
    yield server
    server.close()


@pytest.mark.slow
async def test_an_outage_is_a_line_at_its_beginning_and_one_at_its_end(server: PostgresqlServer) -> None:
    """Given an endpoint that receives, dispatches and listens, when its server goes, then a line says so for all."""
    url = server.new_database()
    endpoint = Endpoint("sales", url=url)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    await endpoint.setup()
    with Signals() as signals:
        async with endpoint:
            await asyncio.to_thread(server.stop)
            for event in (Event.RECEIVE_FAILED, Event.FETCH_FAILED, Event.LISTENING_LOST):
                await signals.wait_for(event, 2, timeout=PATIENCE)
            await asyncio.to_thread(server.start)
            await signals.wait_for(Event.OUTAGE_ENDED, timeout=PATIENCE)
            await signals.wait_for(Event.LISTENING_RESUMED, timeout=PATIENCE)
    loud = [record for event in Event for record in signals.records(event) if record.levelno >= logging.INFO]
    seen = Counter(str(vars(record)["event"]) for record in loud)
    lasting = seen.pop(Event.OUTAGE_LASTS, 0)
    assert seen == {Event.ENDPOINT_STARTED: 1, Event.OUTAGE_BEGAN: 1, Event.OUTAGE_ENDED: 1, Event.ENDPOINT_STOPPED: 1}
    assert lasting <= 8, "after 1, 2, 4 ... 60 seconds"
    assert [record for record in loud if record.exc_info] == []
