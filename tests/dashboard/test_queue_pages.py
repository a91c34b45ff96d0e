"""The page of queues and their limits, in a real browser."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.dashboard.browser import serving
from tests.dashboard.world import HOSTILE

from delayline import SqlTransport
from delayline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.dashboard.browser import Browser

    from delayline.transport import QueueLimits

HOSTILE_QUEUE = HOSTILE[:90]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with queues, one of them with a hostile name and limits of a hostile type."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    asyncio.run(changed(url, "billing", HOSTILE_QUEUE, handlers={HOSTILE: 3}))
    return url


@pytest.fixture
def browser(chromium: Browser, url: str) -> Iterator[Browser]:
    """The browser at the dashboard of an endpoint."""
    with serving([Settings(endpoint="billing", url=url)]) as served:
        chromium.url = served
        chromium.complaints()
        yield chromium
        assert chromium.complaints() == []
        assert "owned" not in chromium.driver.title


async def changed(url: str, *queues: str, **changes: object) -> QueueLimits:
    """Register the queues, change the limits of the last one, and return those of the first."""
    transport = SqlTransport(url)
    await transport.start()
    try:
        await transport.setup_infrastructure(queues)
        await transport.set_limits(queues[-1], **changes)  # type: ignore[arg-type]
        return (await transport.limits(queues[0]))[0]
    finally:
        await transport.stop()


def test_limits_are_changed_and_recorded(browser: Browser, url: str) -> None:
    # Given the page of the queues
    browser.open("/queues")
    browser.follow("billing")
    assert browser.shows("received, any number at once, any number a second")
    # When limits are set
    browser.fill("input[name=concurrency]", "5")
    browser.fill("input[name=rate]", "2.5")
    browser.fill("input[name=type]", "shop.Bill")
    browser.fill("input[name=type_concurrency]", "2")
    browser.press("Change the limits")
    # Then they hold, are shown, and recorded with who did it
    assert browser.shows("received, 5 at once, 2.5 a second; types at once: shop.Bill 2")
    browser.picture("queues")
    limits = asyncio.run(changed(url, "billing"))
    assert (limits.concurrency, limits.rate, limits.handlers) == (5, 2.5, {"shop.Bill": 2})
    assert "limit queue billing received, 5 at once" in browser.loaded("/jobs")
    # When the queue is paused while another person changes its rate
    browser.open("/queues?queue=billing")
    asyncio.run(changed(url, "billing", rate=8))
    browser.choose("select[name=paused]", "paused")
    browser.press("Change the limits")
    # Then both changes hold
    assert browser.shows("paused, 5 at once, 8 a second")
    assert "pause queue billing paused, 5 at once" in browser.loaded("/jobs")
    # And an empty field is no limit
    browser.open("/queues?queue=billing")
    browser.find("input[name=concurrency]").clear()
    browser.press("Change the limits")
    assert browser.shows("paused, any number at once, 8 a second")


def test_a_limit_that_cannot_be_is_refused_and_the_form_stays(browser: Browser) -> None:
    browser.open("/queues?queue=billing")
    browser.press("Change the limits")
    assert browser.shows("Not done: nothing was changed in the form")
    for written, reason in (("many", "a rate is a number"), ("-1", "rate must be messages a second"), ("nan", "rate")):
        browser.fill("input[name=rate]", written)
        browser.press("Change the limits")
        assert browser.shows(reason)
        assert browser.find("h2").text == "billing"
    assert "There is no queue nowhere" in browser.loaded("/queues?queue=nowhere")


def test_scripts_in_names_of_queues_and_types_do_not_run(browser: Browser) -> None:
    browser.open("/queues")
    browser.follow(HOSTILE_QUEUE)
    assert browser.shows(f"types at once: {HOSTILE} 3")
    browser.open("/queues?queue=%22%3E%3Cscript%3Edocument.title=%27owned%27%3C/script%3E")
    assert "owned" not in browser.driver.title
    browser.open("/jobs")
