"""Actions in the dashboard whose database goes away in the middle, and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.conftest import not_installed
from tests.eventually import eventually_async
from tests.servers.postgresql import PostgresqlServer

from delayline import Headers, Message, MessageFilter
from delayline.actions import ActionRecord, JobState
from delayline.dashboard.model import ErrorGroups, Unavailable
from delayline.dashboard.service import EndpointService
from delayline.settings import Settings
from delayline.spi import TransportOperation
from delayline.sql import SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBER = 2_000
KIND = {Headers.FAILED_QUEUE: "billing", Headers.EXCEPTION_TYPE: "shop.Mine"}


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    """A server of this test's own, which it stops."""
    if not PostgresqlServer.installed():
        not_installed("PostgreSQL", PostgresqlServer.install)
    server = PostgresqlServer()
    yield server
    server.close()


@pytest.mark.slow
async def test_a_retry_goes_on_after_an_outage_and_each_message_is_sent_once(server: PostgresqlServer) -> None:
    # Given a group that is being retried
    url = server.new_database()
    transport = SqlTransport(url)
    await transport.start()
    await transport.setup_infrastructure(["billing", "error"])
    for first in range(0, NUMBER, 500):
        some = [Message(f"m-{number}", KIND, b"body") for number in range(first, first + 500)]
        await transport.dispatch([TransportOperation(each, "error") for each in some])
    async with EndpointService(Settings(endpoint="billing", url=f"{url}?server_timeout=2")) as service:
        job = await service.errors.retry_all(MessageFilter(exception="Mine"), actor="ann", rate=400)

        async def seen() -> ActionRecord | None:
            records = await service.actions.recorded()
            return None if isinstance(records, Unavailable) else next(one for one in records if one.name == job.name)

        async def begun() -> bool:
            record = await seen()
            return record is not None and record.done > 0

        await eventually_async(begun)
        # When its server crashes
        await asyncio.to_thread(server.stop, "immediate")
        # Then the page says so, and does not wait for it
        shown = await service.errors.groups()
        assert isinstance(shown, Unavailable)
        assert shown.temporary
        # And when the server is back, the job ends, and its number is that of the messages
        await asyncio.to_thread(server.start)

        async def over() -> ActionRecord | None:
            record = await seen()
            return record if record is not None and record.over else None

        await eventually_async(over)
        done = await seen()
        assert done is not None
        assert (done.state, done.done, done.failed) == (JobState.DONE, NUMBER, 0)

        async def emptied() -> bool:
            groups = await service.errors.groups()
            return isinstance(groups, ErrorGroups) and groups.known.total == 0

        await eventually_async(emptied)
    sent = Counter(message.id for message in await transport.browse("billing", 2 * NUMBER))
    await transport.stop()
    assert (len(sent), set(sent.values())) == (NUMBER, {1})
