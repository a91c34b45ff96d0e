"""The page that finds messages, and the life of a message, in a real browser."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from tests.dashboard.browser import Browser, serving
from tests.dashboard.world import HOSTILE, HOSTILE_ID, fill

from delayline import Message, MessageFilter
from delayline.cli.connection import table_groups
from delayline.composition import endpoint_from, set_up_features
from delayline.dashboard.finding import MessageFinder
from delayline.dashboard.model import FoundPage, MessageLife, UnsearchedPlace
from delayline.dashboard.service import EndpointService
from delayline.places import PlaceKind
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline.settings import Settings


async def queue(settings: Settings) -> None:
    """Put a message into a queue, with a hostile one."""
    endpoint = endpoint_from(settings, polling=False)
    async with endpoint:
        messages = [Message("in-a-queue", {}, b"the word"), Message(HOSTILE_ID, {HOSTILE: HOSTILE}, HOSTILE.encode())]
        await endpoint.transport.dispatch([TransportOperation(message, "billing") for message in messages])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """An endpoint on SQLite with messages in all places."""
    settings = asyncio.run(fill(f"sqlite:///{tmp_path_factory.mktemp('shop') / 'shop.db'}"))
    asyncio.run(queue(settings))
    return settings


@pytest.fixture
def browser(chromium: Browser, shop: Settings) -> Iterator[Browser]:
    """The browser at the dashboard; whatever a test does, no page runs a stranger's script."""
    with serving([shop]) as url:
        chromium.url = url
        chromium.complaints()
        yield chromium
        assert chromium.complaints() == []
        assert "owned" not in chromium.driver.title


def test_a_message_is_found_wherever_it_is(browser: Browser) -> None:
    # When messages are looked for by what is in them, and by their ids
    browser.open("/")
    browser.follow("Find messages")
    browser.fill("input[name=where]", "body=word")
    browser.press("Find")
    assert browser.shows("1 found")
    assert browser.shows("queue billing")
    assert browser.shows("journal left out")
    browser.picture("find")
    browser.fill("input[name=where]", "destination=*illing,exception=PaymentRefused")
    browser.press("Find")
    assert browser.shows("16 found")
    browser.fill("input[name=where]", "")
    browser.fill("input[name=id]", "nowhere")
    browser.press("Find")
    # Then what was searched is said, where there is nothing
    assert browser.shows("No message matches")
    assert browser.shows("pending messages of sales, queues, error queue error, journal")


async def wait_beside(shop: Settings) -> None:
    """Let a message wait in another endpoint of the database, with a journal."""
    beside = replace(shop, endpoint="beside")
    await set_up_features(beside, list(table_groups().values()))
    async with endpoint_from(beside, polling=False) as endpoint:
        await endpoint.send("billing", b"the neighbour's", delay=timedelta(hours=1), message_id="of-a-neighbour")


def test_a_message_of_another_endpoint_in_the_database_is_found(browser: Browser, shop: Settings) -> None:
    # Given a message that waits in another endpoint of the same database
    asyncio.run(wait_beside(shop))
    # When it is looked for by a word of its body
    browser.open("/find?where=body%3Dneighbour&in=pending")
    # Then it is found, and where it waits is said
    assert browser.shows("1 found")
    assert browser.shows("pending messages of beside")
    browser.picture("find-beside")
    # And its life has its events, of that endpoint
    browser.follow("of-a-neighbour")
    assert browser.shows("in pending messages of beside")
    assert browser.shows("of endpoint beside")
    browser.picture("life-beside")


async def test_an_endpoint_in_this_process_finds_messages_of_others_too(shop: Settings) -> None:
    # Given an application that mounts the dashboard of its own endpoint
    await wait_beside(shop)
    wanted = MessageFilter(message_id="of-a-neighbour")
    async with endpoint_from(shop, polling=False) as endpoint, EndpointService(endpoint) as service:
        # When a message of another endpoint is looked for
        page = await service.find.page(wanted, tuple(PlaceKind), None, 10)
        life = await service.life.of("of-a-neighbour")
    # Then it is found, and its life too
    assert isinstance(page, FoundPage)
    assert [match.endpoint for match in page.matches if match.place.kind is PlaceKind.PENDING] == ["beside"]
    assert isinstance(life, MessageLife)
    assert [str(match.place) for match in life.elsewhere] == ["pending messages of beside"]
    assert {event.endpoint for event in life.events} == {"beside"}


def test_a_wrong_filter_is_said(browser: Browser) -> None:
    browser.open("/find?where=colour%3Dred")
    assert browser.shows("nothing that a filter can ask for")
    browser.open("/find?from=abc")
    assert browser.shows("is no position of a search")


def test_a_long_search_goes_on_by_itself_and_after_a_full_page(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given pages of five rows, each as long as a page of the dashboard waits
    monkeypatch.setattr("delayline.dashboard.finding.SEARCH_SECONDS", 0.0)
    monkeypatch.setattr("delayline.sql.searched_tables.FIRST_PAGE", 5)
    monkeypatch.setattr("delayline.sql.searched_tables.LARGEST_PAGE", 5)
    # When it is searched for a message that is behind many
    browser.open("/find?where=body%3Dthe+word")
    # Then the search goes on until it is through
    assert browser.shows("Searched:")
    assert browser.shows("1 found")
    assert browser.shows("in-a-queue")
    # And a search with many matches stops at a page, and goes on with the next
    browser.open("/find?where=id-prefix%3Dorder-&in=pending")
    assert browser.shows("50 found")
    assert "order-055-reminder" not in browser.text
    browser.follow("Search on")
    assert browser.shows("order-055-reminder")
    assert browser.shows("10 found")
    assert "order-049-reminder" not in browser.text


def test_scripts_in_what_is_found_and_asked_for_do_not_run(browser: Browser) -> None:
    for where in (f"header=:*{HOSTILE[:20]}*", "id-prefix=evil", "body=<script>"):
        browser.open(f"/find?where={quote(where.replace(',', chr(92) + ','))}")
        assert browser.shows("evil")
    for field in ("id", "where", "in", "from", "offset"):
        browser.open(f"/find?{field}={quote(HOSTILE)}")
        assert "owned" not in browser.driver.title
    with urlopen(f"{browser.url}/find/more?where=id-prefix%3Devil&endpoint=sales") as answer:  # noqa: S310 - http
        fragment = answer.read().decode()
    assert "4 found" in fragment
    assert "<script>" not in fragment
    browser.open(f"/life?id={quote(HOSTILE_ID)}")
    assert browser.shows("in queue billing")
    assert browser.shows("in the error queue")


def test_a_life_says_all_that_is_known(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a message in a queue, and a failed one, of which no event is recorded
    for message_id, said in (("in-a-queue", "in queue billing"), ("failed-001", "in the error queue")):
        browser.open(f"/life?id={message_id}")
        assert browser.shows(said)
        assert browser.shows("No events of it are recorded")
        assert "Nothing is known" not in browser.text
    browser.open("/life?id=nowhere")
    assert browser.shows("Nothing is known of this id")

    # And where a place could not be looked into, nothing is not what is said
    async def unsearched(finder: MessageFinder, message_id: str) -> object:
        return [], [UnsearchedPlace("queues", "gone")]

    monkeypatch.setattr(MessageFinder, "elsewhere", unsearched)
    browser.open("/life?id=nowhere")
    assert browser.shows("queues: gone")
    assert "Nothing is known" not in browser.text
