"""URLs with several hosts of PostgreSQL: a primary and its hot standby, which takes over."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sqlalchemy import text
from tests.eventually import PATIENCE, eventually, eventually_async
from tests.servers.postgresql import PostgresqlServer

from delayline import BackendUnavailable, Endpoint, Message, MessageContext, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

A_MOMENT = timedelta(milliseconds=100)
FORMS = {
    "libpq": "postgresql://delayline@{standby},{primary}/{database}?target_session_attrs=read-write",
    "SQLAlchemy": "postgresql://delayline@/{database}?host={standby}&host={primary}",
}


class Pair(NamedTuple):
    primary: PostgresqlServer
    standby: PostgresqlServer

    def url(self, form: str) -> str:
        database = self.primary.new_database().rpartition("/")[2]
        places = {name: f"127.0.0.1:{server.port}" for name, server in self._asdict().items()}
        return FORMS[form].format(database=database, **places)


@pytest.fixture
def pair() -> Iterator[Pair]:
    if not PostgresqlServer.installed():
        pytest.skip("PostgreSQL is not installed")
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(2):
            server = PostgresqlServer()
            stack.callback(server.close)
            servers.append(server)
        primary, standby = servers
        standby.follow(primary)

        def is_followed() -> bool:
            with primary.administrator() as connection:
                query = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
                return connection.execute(query).fetchone() == (1,)

        eventually(is_followed, "the standby confirms commits")
        yield Pair(primary, standby)


@pytest.mark.parametrize("form", FORMS)
async def test_sends_go_on_at_the_standby_that_takes_over(pair: Pair, form: str) -> None:
    # Given an endpoint whose URL has the standby in front of the primary
    url = pair.url(form)
    endpoint = Endpoint(
        "sales", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
    )
    handled = set[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        connection = await context.transaction()
        await connection.execute(text("SELECT 1"))
        handled.add(message.id)

    await endpoint.setup()
    async with asyncio.timeout(2 * PATIENCE), endpoint:
        # Then it works on the one that takes writes
        for number in range(4):
            await endpoint.send("sales", b"", message_id=f"before{number}", delay=A_MOMENT if number % 2 else None)
        await endpoint.send("sales", b"", message_id="later", delay=timedelta(seconds=4))
        await eventually_async(lambda: len(handled) == 4, "messages arrive at the primary")
        # When that is killed, then errors name both, and have no end in themselves
        await asyncio.to_thread(pair.primary.kill)
        both = f"127.0.0.1:{pair.standby.port},127.0.0.1:{pair.primary.port}/"
        with pytest.raises(BackendUnavailable, match=both):
            await endpoint.send("sales", b"", message_id="while none takes writes")
        # And when the other one takes over, sends go on there, and nothing that was sent is lost
        await asyncio.to_thread(pair.standby.promote)
        sent = set[str]()

        async def goes_on() -> bool:
            with contextlib.suppress(BackendUnavailable):
                for delay in (None, A_MOMENT):
                    await endpoint.send("sales", b"", message_id=(name := f"after{delay}"), delay=delay)
                    sent.add(name)
            return len(sent) == 2

        await eventually_async(goes_on, "sends go on")
        await eventually_async(lambda: handled >= {*sent, "later"}, "messages arrive after the failover")
        assert endpoint.started


async def test_a_host_that_swallows_connections_is_waited_for_once(postgresql_url: str) -> None:
    """Given a first host that takes connections and never answers, then only the first connections wait for it."""
    swallowed: list[asyncio.StreamWriter] = []

    async def swallow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        swallowed.append(writer)

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        url = postgresql_url.replace("@", f"@127.0.0.1:{port},") + "?connect_timeout=2"
        endpoint = Endpoint(
            "sales", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
        )
        handled = set[str]()

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.transaction()
            handled.add(message.id)

        await endpoint.setup()
        before = len(swallowed)
        async with asyncio.timeout(PATIENCE), endpoint:
            await endpoint.send("sales", b"", message_id="due", delay=A_MOMENT)
            await eventually_async(lambda: handled == {"due"}, "the message arrives")
        assert len(swallowed) == before > 0
        for writer in swallowed:
            writer.close()
