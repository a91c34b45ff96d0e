"""What people do on the pages of failed messages, in a real browser."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.dashboard.browser import serving
from tests.dashboard.world import HOSTILE, HOSTILE_ID, failed

from delayline.composition import endpoint_from
from delayline.settings import Settings
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.dashboard.browser import Browser

    from delayline import Message

NOW = datetime.now(UTC)


async def fail(settings: Settings, messages: Sequence[Message]) -> None:
    """Put messages into the error queue."""
    endpoint = endpoint_from(settings, polling=False)
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing", "email", "error"])
        await endpoint.transport.dispatch([TransportOperation(each, "error") for each in messages])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An endpoint with 60 failed messages of a kind, 3 of another, and a hostile one."""
    settings = Settings(endpoint="sales", url=f"sqlite:///{tmp_path / 'shop.db'}")
    often = [
        failed(f"often-{n:02}", "shop.Refused", "no", NOW - timedelta(hours=2), queue="billing") for n in range(60)
    ]
    rare = [failed(f"rare-{n}", "shop.Silent", "late", NOW - timedelta(hours=1), queue="email") for n in range(3)]
    hostile = failed(HOSTILE_ID, HOSTILE, HOSTILE, NOW - timedelta(hours=1), queue=HOSTILE, trace=HOSTILE)
    asyncio.run(fail(settings, [*often, *rare, hostile]))
    return settings


@pytest.fixture
def browser(chromium: Browser, settings: Settings) -> Iterator[Browser]:
    """The browser at the dashboard of the endpoint."""
    with serving([settings]) as url:
        chromium.url = url
        chromium.complaints()
        yield chromium
        assert chromium.complaints() == []
        assert "owned" not in chromium.driver.title


def first_column(browser: Browser) -> list[str]:
    return [cell.text.split("\n")[0] for cell in browser.all("tbody th")]


def test_groups_are_filtered_and_sorted_and_new_ones_are_marked(browser: Browser, settings: Settings) -> None:
    # Given the groups, the newest first
    browser.open("/errors")
    assert first_column(browser)[1:] == ["shop.Silent", "shop.Refused"]
    browser.choose("select[name=order]", "largest first")
    browser.press("Show")
    browser.until(lambda: first_column(browser)[0] == "shop.Refused")
    # When all are marked as seen, and others fail
    browser.follow("Mark all as seen")
    browser.until(lambda: "0 new since" in browser.text)
    assert first_column(browser)[0] == "shop.Refused"
    asyncio.run(fail(settings, [failed("late", "shop.Silent", "late", NOW + timedelta(minutes=1), queue="billing")]))
    # Then these are marked in groups and lists
    browser.open("/errors")
    assert browser.shows("1 new since")
    assert browser.find("tbody tr").text.startswith("shop.Silent\n!\n1 new")
    browser.picture("errors-new")
    browser.follow("shop.Silent")
    assert browser.shows("4 messages, newest first")
    assert [cell.text.split("\n")[-1] for cell in browser.all("tbody th")] == ["new", "rare-2", "rare-1", "rare-0"]
    # And a filter shows what it means
    browser.open("/errors")
    browser.fill("input[name=where]", "destination=email")
    browser.press("Show")
    assert browser.shows("3 of 65 in error")
    assert first_column(browser) == ["shop.Silent"]


def test_the_search_stays_after_an_action_and_means_what_is_retried(browser: Browser) -> None:
    # Given a list with a filter
    browser.open("/errors/group?where=id%3Doften-5*")
    assert [cell.text for cell in browser.all("tbody th")] == [f"often-{number}" for number in range(59, 49, -1)]
    # When one of it is ticked and retried
    browser.find("tbody input").click()
    browser.press("Retry those ticked")
    assert browser.shows("Done")
    # Then the search is as it was
    assert browser.find("input[name=where]").get_attribute("value") == "id=often-5*"
    assert browser.all("tbody th")[0].text == "often-58"
    # And a refusal keeps it too
    browser.press("Purge those ticked")
    assert browser.shows("Not done: type the word purge to confirm")
    assert browser.find("input[name=where]").get_attribute("value") == "id=often-5*"
    # When all that match are retried
    browser.press("Retry all that match")
    assert browser.shows("Started: ")
    browser.until(lambda: "✓\ndone" in browser.loaded("/jobs"))
    # Then these have left, and no others
    assert "No failed message matches" in browser.loaded("/errors/group?where=id%3Doften-5*")
    assert "50 messages" in browser.loaded("/errors/group?where=exception%3DRefused")


def test_a_purge_drops_what_its_filter_means(browser: Browser) -> None:
    browser.open("/errors?where=exception%3DSilent")
    browser.fill("form[action*=purge] input[name=confirm]", "purge")
    browser.press("Purge all 3")
    assert browser.shows("Started: ")
    browser.until(lambda: "✓\ndone" in browser.loaded("/jobs"))
    assert "61 in error" in browser.loaded("/errors")


def test_a_filter_that_cannot_be_read_shows_how_it_is_written(browser: Browser) -> None:
    for path in ("/errors", "/errors/group"):
        assert "is nothing that a filter can ask for" in browser.loaded(f"{path}?where=colour%3Dred")
        assert "failed messages have no due time" in browser.loaded(f"{path}?where=due%3D%3Cnow")
    browser.open("/errors?where=id%3Doften-01")
    browser.follow("List the messages with this filter")
    assert browser.shows("often-01")


def test_fifty_rows_are_a_few_stops_of_the_tab_key(browser: Browser) -> None:
    # Given a full page of rows
    browser.open("/errors/group?where=exception%3DRefused")
    rows = browser.all("tbody input")
    assert len(rows) == 50
    # When the focus is in the rows, and goes down with the arrow and on with the tab key
    browser.driver.execute_script("arguments[0].focus()", rows[0])
    browser.driver.switch_to.active_element.send_keys("\ue015", " ")
    assert rows[1].is_selected()
    pressed = 0
    while browser.driver.switch_to.active_element.text != "Retry those ticked":
        browser.driver.switch_to.active_element.send_keys("\ue004")
        pressed += 1
        assert pressed < 6
    # Then the button is two stops away, and End goes to the last row
    assert pressed == 2
    browser.driver.execute_script("arguments[0].focus()", rows[1])
    browser.driver.switch_to.active_element.send_keys("\ue010")
    assert browser.driver.switch_to.active_element.get_attribute("value") == "often-10"
    # And the rows can be skipped
    browser.driver.execute_script("document.querySelector('.rows-hint .skip').focus()")
    browser.driver.switch_to.active_element.send_keys("\ue007")
    assert browser.driver.execute_script("return location.hash") == "#after-rows"


def test_pages_of_a_list_go_on_where_the_last_one_ended(browser: Browser) -> None:
    browser.open("/errors/group?where=exception%3DRefused")
    browser.follow("Next page")
    browser.until(lambda: first_column(browser) == [f"often-0{number}" for number in range(9, -1, -1)])
    browser.follow("First page")
    browser.until(lambda: first_column(browser)[0] == "often-59")


def test_scripts_in_filters_and_groups_do_not_run(browser: Browser) -> None:
    browser.open("/errors")
    browser.follow(HOSTILE)
    assert browser.shows("1 message, newest first")
    for field in ("where", "group", "order", "after", "before", "until"):
        for path in ("/errors", "/errors/group", "/errors/seen"):
            browser.open(f"{path}?{field}=%22%3E%3Cscript%3Edocument.title=%27owned%27%3C/script%3E")
            assert "owned" not in browser.driver.title
