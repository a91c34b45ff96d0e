"""Lists with the keyboard, texts in contrast, values as they are."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest
from tests.dashboard.browser import serving

from delayline import Headers, Message, MessageFilter, SqlDelayedMessageStore
from delayline.actions import OperatorAction, SetPreview, SetRequest
from delayline.composition import endpoint_from
from delayline.opening import open_pending
from delayline.settings import Settings
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.dashboard.browser import Browser

TAB, DOWN, SPACE, ENTER = "\ue004", "\ue015", " ", "\ue007"
#: The contrast of each placeholder with its field, by the formula of WCAG 2.
CONTRASTS: Final = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[0-9.]+/g).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
return [...document.querySelectorAll("[placeholder]")].map((field) => {
  const text = getComputedStyle(field, "::placeholder");
  const [low, high] = [luminance(text.color), luminance(getComputedStyle(field).backgroundColor)].sort((a, b) => a - b);
  return [field.name, Number(text.opacity) * (high + 0.05) / (low + 0.05)];
});
"""


@pytest.fixture
def browser(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The browser at an endpoint with a page of waiting messages and one failed message."""
    settings = Settings(endpoint="sales", url=f"sqlite:///{tmp_path / 'shop.db'}")
    asyncio.run(fill(settings))
    with serving([settings]) as url:
        chromium.url = url
        chromium.complaints()
        yield chromium
        assert chromium.complaints() == []


async def fill(settings: Settings) -> None:
    endpoint = endpoint_from(settings, polling=False)
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing", "error"])
        for number in range(50):
            await endpoint.send("billing", b"{}", delay=timedelta(hours=1), message_id=f"m-{number:02}")
        headers = {
            "Aligned": "a   b\n  c",
            Headers.EXCEPTION_TYPE: "shop.Refused",
            Headers.EXCEPTION_MESSAGE: "at   column  9",
            Headers.FAILED_QUEUE: "billing",
        }
        await endpoint.transport.dispatch([TransportOperation(Message("failed", headers, b"{}"), "error")])


def test_fifty_waiting_messages_are_a_few_stops_of_the_tab_key(browser: Browser) -> None:
    # Given a full page
    browser.open("/waiting")
    boxes = browser.all("tbody input")
    assert len(boxes) == 50
    # When one goes to the second row, ticks it, and on with the tab key
    browser.driver.execute_script("arguments[0].focus()", boxes[0])
    browser.driver.switch_to.active_element.send_keys(DOWN, SPACE)
    assert boxes[1].is_selected()
    for _ in range(2):
        browser.driver.switch_to.active_element.send_keys(TAB)
    # Then the first button is two stops away
    assert browser.driver.switch_to.active_element.text == "Send now"
    # And the rows can be skipped
    browser.driver.execute_script("document.querySelector('.rows-hint .skip').focus()")
    browser.driver.switch_to.active_element.send_keys(ENTER, TAB)
    assert browser.driver.switch_to.active_element.text == "Send now"


async def interrupted(settings: Settings, number: int) -> None:
    """Begin jobs whose processes have ended."""
    async with open_pending(settings) as store:
        assert isinstance(store, SqlDelayedMessageStore)
        log = store.action_log("sales")
        for each in range(number):
            request = SetRequest(OperatorAction.CANCEL, MessageFilter(destination=f"queue-{each}"))
            await log.begin(request, SetPreview(1, datetime.now(UTC), 1), actor="ana")


def test_jobs_are_one_stop_of_the_tab_key_and_stay_so_while_the_page_lives(browser: Browser, tmp_path: Path) -> None:
    # Given twenty jobs that can be resumed or stopped
    asyncio.run(interrupted(Settings(endpoint="sales", url=f"sqlite:///{tmp_path / 'shop.db'}"), 20))
    browser.open("/jobs")
    assert browser.shows("queue-19")
    buttons = browser.all("table[data-rows] button")
    assert len(buttons) == 40
    # When one goes to the third row
    browser.driver.execute_script("arguments[0].focus()", buttons[0])
    browser.driver.switch_to.active_element.send_keys(DOWN)
    browser.driver.switch_to.active_element.send_keys(DOWN)
    focused = "return [...document.querySelectorAll('table[data-rows] button')].indexOf(document.activeElement)"
    assert browser.driver.execute_script(focused) == 4
    # Then it is the stop, also after updates of the page
    stops = "return [...document.querySelectorAll('table[data-rows] button')].map((each) => each.tabIndex).join('')"
    expected = "".join("00" if row == 2 else "-1-1" for row in range(20))
    assert browser.driver.execute_script(stops) == expected
    browser.driver.execute_script(
        "window.updates = 0; document.addEventListener('htmx:sse:after:message', () => { window.updates += 1; })"
    )
    browser.until(lambda: browser.driver.execute_script("return window.updates") >= 2)
    assert browser.driver.execute_script(stops) == expected
    assert browser.driver.execute_script(focused) == 4


def test_placeholders_are_read_in_light_and_dark(browser: Browser) -> None:
    try:
        for theme in ("light", "dark"):
            browser.emulate(theme)
            for path in ("/waiting", "/waiting/message?id=m-00", "/errors", "/errors/group", "/queues?queue=billing"):
                browser.open(path)
                contrasts = browser.driver.execute_script(CONTRASTS)
                assert contrasts, path
                assert all(contrast >= 4.5 for _, contrast in contrasts), (theme, path, contrasts)
    finally:
        browser.emulate("light")


def test_values_of_headers_keep_their_spaces(browser: Browser) -> None:
    try:
        for width in (1280, 360):
            browser.emulate("light", width)
            browser.open("/errors/message?id=failed")
            assert browser.shows("a   b\n  c")
            assert browser.text.count("at   column  9") == 2  # above, and among the headers
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_two_people_act_on_a_group_at_once(browser: Browser) -> None:
    """Given two pages of the same group, when both retry it, then each message is sent once, by the one job."""
    browser.open("/errors/group?where=exception%3DRefused")
    browser.driver.execute_script("window.open(location.href)")
    first, second = browser.driver.window_handles
    try:
        browser.press("Retry all 1")
        assert browser.shows("Started: ")
        browser.driver.switch_to.window(second)
        browser.press("Retry all 1")
        assert browser.shows("Started: ")
        browser.until(lambda: "running" not in browser.loaded("/jobs"))
        browser.driver.close()
    finally:
        browser.driver.switch_to.window(first)
    assert "No message has failed" in browser.loaded("/errors")
    browser.open("/queues")
    assert "billing 1" in browser.find("tbody").text
