"""Searches whose database goes away in the middle: what was not searched is said, and is searched later."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.conftest import running
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import DelayedMessage, Message, MessageFilter, TransactionMode
from delayline.places import PlaceKind
from delayline.searching import Search, open_places
from delayline.settings import Settings
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture(params=[PostgresqlServer, MariadbServer])
def stopping(request: pytest.FixtureRequest) -> Iterator[PostgresqlServer | MariadbServer]:
    """A server of the test's own."""
    with running(request.param) as server:
        yield server


async def test_a_database_that_goes_away_is_not_searched_and_gone_on_with(
    stopping: PostgresqlServer | MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given pending messages of several pages
    monkeypatch.setattr("delayline.sql.searched_tables.FIRST_PAGE", 3)
    monkeypatch.setattr("delayline.sql.searched_tables.LARGEST_PAGE", 3)
    url = stopping.new_database()
    store, transport = SqlDelayedMessageStore(url), SqlTransport(url)
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await store.store_many([DelayedMessage(Message(f"p{each}", {}, b"word"), "mail", SOON) for each in range(9)])
    await store.close()
    await transport.setup_infrastructure(["mail", "error"])
    settings, wanted = Settings(url=f"{url}?server_timeout=5"), MessageFilter(body="word")
    # When the server stops after the first page
    found: list[str] = []
    async with open_places(settings) as places:
        search = Search(places, wanted, outage_limit=0.1)
        async with contextlib.aclosing(search.pages()) as pages:
            async for page in pages:
                found += [match.id for match in page.matches]
                if len(found) == 3:
                    stopping.kill()
    # Then no place counts as searched that was not
    assert len(found) == 3
    assert {note.place.kind for note in search.unsearched} == set(PlaceKind) - {PlaceKind.JOURNAL}
    assert search.searched == []
    # And a search goes on where it was, once the server is there again
    stopping.start()
    async with open_places(settings) as places:
        again = Search(places, position=search.position)
        found += [match.id async for page in again.pages() for match in page.matches]
    assert sorted(found) == [f"p{each}" for each in range(9)]
    assert again.unsearched == []
