"""What people do on each page, in a real browser: on SQLite all of it, elsewhere what may differ."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.dashboard.browser import Browser, serving
from tests.dashboard.world import HOSTILE, HOSTILE_ID, fill, minute_row, remember
from tests.integration.cold_rows import hold

from delayline import cron, interval
from delayline.bulk import TwoTierStore
from delayline.composition import endpoint_from
from delayline.dashboard import app
from delayline.opening import open_pending
from delayline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

    from delayline.delayed.recurrence import Recurrence

PAGES = (
    *("/", "/forecast", "/lateness", "/find?where=id-prefix%3Dorder", "/waiting", "/schedules"),
    *("/errors", "/queues", "/life", "/jobs", "/doctor"),
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """An endpoint on SQLite; each test changes messages of its own."""
    settings = asyncio.run(fill(f"sqlite:///{tmp_path_factory.mktemp('shop') / 'shop.db'}"))
    asyncio.run(declare(settings))
    return settings


async def declare(settings: Settings) -> None:
    """Let a process of the endpoint declare schedules."""
    nine, six_hours = cron("0 9 * * MON-FRI", tz="Europe/Berlin"), interval(hours=6)
    recurrences: dict[str, Recurrence] = {"nightly-report": nine, "cleaning": six_hours, HOSTILE_ID: six_hours}
    endpoint = endpoint_from(settings, polling=False)
    for name, recurrence in recurrences.items():
        endpoint.every(name, recurrence, "billing", HOSTILE)
    async with endpoint:
        pass


@pytest.fixture(scope="module")
def served(shop: Settings) -> Iterator[str]:
    with serving([shop]) as url:
        yield url


@pytest.fixture
def elsewhere(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """The browser at the dashboard of an endpoint on a server: the test's parameter is the fixture of its URL."""
    settings = asyncio.run(fill(request.getfixturevalue(request.param)))
    with serving([settings]) as url:
        chromium.url = url
        chromium.complaints()
        yield chromium
        assert chromium.complaints() == []


@pytest.fixture
def browser(chromium: Browser, served: str) -> Iterator[Browser]:
    """The browser at the dashboard; whatever a test does, no page runs a stranger's script."""
    chromium.url = served
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []
    assert "owned" not in chromium.driver.title


def test_now_shows_due_messages_and_is_updated_without_a_reload(browser: Browser) -> None:
    browser.open("/")
    assert browser.shows("sales")
    assert browser.shows("due in the next minute")
    before = browser.find("[hx-sse\\:connect]").get_attribute("innerHTML")
    browser.until(lambda: browser.find("[hx-sse\\:connect]").get_attribute("innerHTML") != before)
    browser.press("Pause")
    assert browser.find("#live-state").text == "paused"
    browser.picture("now")


def test_the_chart_has_the_day_at_once_and_each_minute_that_is_written(browser: Browser, shop: Settings) -> None:
    # Given an endpoint that has dispatched 600 messages in each minute of the last day
    browser.open("/")
    # When the page has just been opened
    first = browser.at_chart(0.02)
    # Then the chart reaches back over the day
    assert "10" in first["dispatched/s"]
    hours = 24 + int(browser.at_chart(0.99)["UTC"][:2]) - int(first["UTC"][:2])
    assert hours % 24 in (0, 1, 23)
    # And when the row of the present minute is written, and of the two after it, the last one is drawn without a reload
    asyncio.run(remember(shop.resolved_store_url, [minute_row(-ahead, dispatched=6000) for ahead in range(3)]))
    browser.until(lambda: browser.at_chart(0.999)["dispatched/s"] == "100")


def test_details_of_several_endpoints_are_closed_and_stay_as_they_were_left(
    chromium: Browser, shop: Settings, tmp_path: Path
) -> None:
    # Given two endpoints
    quiet = Settings(endpoint="quiet", url=f"sqlite:///{tmp_path / 'quiet.db'}")
    asyncio.run(set_up(quiet))
    with serving([shop, quiet]) as url:
        chromium.url = url
        chromium.complaints()
        # When their page is opened
        chromium.open("/")
        # Then only their lines are there
        assert "in the next hour" not in chromium.text
        # And the line of one leads to its details, with its chart
        chromium.follow("sales")
        assert chromium.shows("in the next hour")
        assert chromium.at_chart(0.5)["dispatched/s"] == "10"
        # And these are open after an update, and when the page is loaded again
        at = chromium.find("[hx-sse\\:connect] time").get_attribute("datetime")
        chromium.until(lambda: chromium.find("[hx-sse\\:connect] time").get_attribute("datetime") != at)
        assert "in the next hour" in chromium.text
        assert "in the next hour" in chromium.loaded("/")
        assert not chromium.find("#endpoint-2").is_displayed()
        assert chromium.complaints() == []


def test_now_is_updated_where_nothing_happens(chromium: Browser, tmp_path: Path) -> None:
    # Given an endpoint of which no process has ever written a minute row, and nothing waits
    settings = Settings(endpoint="quiet", url=f"sqlite:///{tmp_path / 'quiet.db'}")
    asyncio.run(set_up(settings))
    with serving([settings]) as url:
        chromium.url = url
        # When its page is open
        chromium.open("/")
        shown = chromium.find("#panel-1").text
        assert "no process of this endpoint has written minute rows" in shown
        at = chromium.find("[hx-sse\\:connect] time").get_attribute("datetime")
        # Then the time of its figures goes on, and the figures are the same
        chromium.until(lambda: chromium.find("[hx-sse\\:connect] time").get_attribute("datetime") != at)
        assert chromium.find("#panel-1").text == shown
        assert chromium.complaints() == []


def test_pages_live_where_a_script_comes_late(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that sends the script of live updates a second after the others
    def slow(settings: Sequence[Settings], **options: Any) -> ASGIApp:  # noqa: ANN401 - those of app
        dashboard = app(settings, **options)

        async def delayed(scope: Scope, receive: Receive, send: Send) -> None:
            if "hx-sse" in scope.get("path", ""):
                await asyncio.sleep(1)
            await dashboard(scope, receive, send)

        return delayed

    monkeypatch.setattr("tests.dashboard.browser.app", slow)
    settings = Settings(endpoint="quiet", url=f"sqlite:///{tmp_path / 'quiet.db'}")
    asyncio.run(set_up(settings))
    with serving([settings]) as url:
        chromium.url = url
        for path in ("/", "/jobs"):
            # When a page is open
            chromium.open(path)
            count = "document.addEventListener('htmx:sse:after:message', () => { window.updates += 1; })"
            chromium.driver.execute_script(f"window.updates = 0; {count}")
            # Then it is updated
            chromium.until(lambda: chromium.driver.execute_script("return window.updates") > 0)


async def set_up(settings: Settings) -> None:
    async with endpoint_from(settings, polling=False):
        pass


def test_the_forecast_shows_when_messages_are_due_and_zooms(browser: Browser) -> None:
    browser.open("/forecast")
    assert len(browser.all(".only-wide .column")) > 10
    assert browser.shows("billing")
    browser.picture("forecast")
    browser.follow("next hour")
    assert "span=hour" in browser.driver.current_url
    browser.until(lambda: browser.all(".only-wide .s0"))


def test_the_heat_map_shows_how_late_messages_were_and_zooms(browser: Browser, shop: Settings) -> None:
    # The rows of this hour's minutes may be none yet
    asyncio.run(remember(shop.resolved_store_url, [replace(minute_row(120), minutes=60)]))
    browser.open("/lateness")
    browser.picture("lateness")
    browser.choose("select[name=span]", "last week")
    browser.until(lambda: "span=week" in browser.driver.current_url)
    browser.until(lambda: browser.all(".only-wide .h8"))


@pytest.mark.slow
def test_a_waiting_message_is_found_read_and_postponed(browser: Browser) -> None:
    browser.open("/waiting")
    browser.picture("waiting")
    browser.fill("input[name=id]", "order-007-reminder")
    browser.press("Search")
    browser.follow("order-007-reminder")
    assert browser.shows('"order": 7')
    assert browser.shows("NServiceBus.EnclosedMessageTypes")
    browser.picture("waiting-message")
    browser.follow("Hexadecimal")
    assert browser.shows("00000000  7b 22")
    browser.fill("input[name=due]", "10d12h30m")
    browser.press("Reschedule to")
    assert browser.shows("Done")
    browser.open("/waiting/message?id=order-007-reminder")
    assert browser.shows("in 10 d 12 h")


def test_all_that_match_are_cancelled_after_their_number_is_typed(browser: Browser) -> None:
    browser.open("/waiting?destination=email")
    browser.follow("Act on all that match…")
    number = browser.find("form strong").text
    browser.fill("input[name=confirm]", "1")
    browser.press("Start")
    assert browser.shows("another number was typed")
    browser.fill("input[name=confirm]", number)
    browser.press("Start")
    assert browser.shows("Started: ")
    browser.until(lambda: "✓\ndone" in browser.loaded("/jobs"))
    browser.open("/waiting?destination=email")
    assert browser.shows("No waiting message matches")


@pytest.mark.slow
def test_failed_messages_are_edited_and_retried_one_and_as_a_group(browser: Browser) -> None:
    browser.open("/errors")
    browser.picture("errors")
    browser.follow("shop.PaymentRefused")
    browser.follow("failed-001")
    assert browser.shows("card expired")
    edits_and_retries(browser)
    browser.open("/jobs")
    browser.picture("jobs")


def test_a_schedule_is_paused_resumed_and_triggered(browser: Browser) -> None:
    browser.open("/schedules")
    assert browser.shows("nightly-report")
    assert browser.shows("0 9 * * MON-FRI Europe/Berlin")
    assert browser.shows("3 schedules")
    browser.picture("schedules")
    browser.press("Pause")
    assert browser.shows("Done")
    assert browser.shows("paused")
    browser.press("Resume")
    assert browser.shows("Done")
    browser.press("Trigger now")
    assert browser.shows("sent now as")


def test_dispatching_is_paused_and_resumed(browser: Browser) -> None:
    browser.open("/waiting")
    browser.driver.execute_script("document.querySelector('details.panel').open = true")
    browser.fill("details.panel input[name=destination]", "<b>billing</b>")
    # Without the tick nothing is paused
    browser.press("Pause dispatching")
    assert browser.shows("tick the box to confirm")
    browser.open("/waiting")
    browser.driver.execute_script("document.querySelector('details.panel').open = true")
    browser.fill("details.panel input[name=destination]", "<b>billing</b>")
    browser.driver.execute_script("document.querySelector('input[name=confirm]').click()")
    browser.press("Pause dispatching")
    assert browser.shows("dispatching to <b>billing</b> is paused")
    browser.picture("paused")
    browser.fill("input[name=rate]", "50")
    browser.press("Resume dispatching")
    assert browser.shows("Done")
    assert not browser.driver.find_elements("css selector", ".notice.warn")


def test_the_life_of_a_message_is_in_the_journal(browser: Browser) -> None:
    browser.open("/life")
    browser.fill("input[name=id]", "order-009-reminder")
    browser.press("Show")
    assert browser.shows("scheduled")
    browser.picture("life")


def test_jobs_and_doctor_show_their_state(browser: Browser) -> None:
    browser.open("/jobs")
    assert browser.shows("Dispatchers")
    browser.open("/doctor")
    assert browser.shows("connection")
    assert browser.shows("guarantee")
    browser.picture("doctor")


def test_days_of_the_cold_tier_are_folded_and_have_their_hours(chromium: Browser, tmp_path: Path) -> None:
    # Given messages in files of two days, one of them in two hours
    settings = Settings(endpoint="far", url=f"sqlite:///{tmp_path / 'far.db'}", cold_tier=str(tmp_path / "cold"))
    asyncio.run(set_up(settings))
    noon = datetime(2030, 5, 1, 12, tzinfo=UTC)
    dues = [noon, noon + timedelta(minutes=1), noon + timedelta(hours=3), noon + timedelta(days=1)]
    asyncio.run(hold_far(settings, [(f"far-{number}", due) for number, due in enumerate(dues)]))
    with serving([settings]) as url:
        chromium.url = url
        chromium.complaints()
        # When the page of the jobs is open
        chromium.open("/jobs")
        # Then the tier is a line
        assert chromium.shows("of 2 days, 2030-05-01 to 2030-05-02")
        assert "2 hours" not in chromium.text
        # And it has its days, and a day its hours, when they are asked for
        chromium.press_summary("The cold tier's days")
        chromium.press_summary("2 hours")
        assert chromium.shows("15:00")
        assert chromium.complaints() == []


async def hold_far(settings: Settings, messages: list[tuple[str, datetime]]) -> None:
    async with open_pending(settings) as store:
        assert isinstance(store, TwoTierStore)
        await hold(store, *messages)


@pytest.mark.slow
def test_scripts_in_every_field_of_a_message_do_not_run(browser: Browser) -> None:
    browser.open("/waiting")
    browser.follow(HOSTILE_ID)
    assert browser.shows("<script>")
    browser.follow("Text")
    browser.follow("Its life")
    browser.open("/errors")
    browser.follow(HOSTILE)
    browser.follow(HOSTILE_ID)
    assert browser.shows("<script>")
    for field in ("id", "destination", "header", "value", "type", "from", "before"):
        browser.open(f"/waiting?{field}=%22%3E%3Cscript%3Edocument.title=%27owned%27%3C/script%3E")
        assert "owned" not in browser.driver.title


def test_pages_are_used_with_the_keyboard_on_a_narrow_screen_without_scrolling_sideways(browser: Browser) -> None:
    browser.emulate("dark", 360, 780)
    try:
        for path in PAGES:
            browser.open(path)
            width = browser.driver.execute_script("return document.documentElement.scrollWidth")
            assert width <= 360, path
            assert not browser.tables_beyond_their_panels(), path
        browser.driver.switch_to.active_element.send_keys("\ue004\ue007")
        assert browser.driver.execute_script("return location.hash") == "#content"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.emulate("light")


@pytest.mark.parametrize("width", [600, 900, 1100])
def test_tables_stay_within_their_panels(browser: Browser, width: int) -> None:
    browser.emulate("light", width)
    try:
        for path in PAGES:
            browser.open(path)
            assert not browser.tables_beyond_their_panels(), path
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def edits_and_retries(browser: Browser) -> None:
    """Edit a copy of a failed message, retry another one and a group."""
    browser.open("/errors/edit?id=failed-001")
    browser.picture("edit")
    browser.fill("textarea[name=body]", '{"order": 18}')
    browser.press("Send the copy and remove the failed message")
    assert browser.shows("Done")
    assert "No failed message has the id" in browser.loaded("/errors/message?id=failed-001")
    browser.open("/errors")
    browser.follow("builtins.TimeoutError")
    browser.follow("failed-003")
    browser.press("Retry")
    assert browser.shows("Done")
    browser.follow("builtins.TimeoutError")
    browser.press("Retry all")
    assert browser.shows("Started: ")
    browser.until(lambda: "✓\ndone" in browser.loaded("/jobs"))
    assert "builtins.TimeoutError" not in browser.loaded("/errors")


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["postgresql_url", "azure_url"], indirect=True)
def test_a_store_on_a_server_is_searched_and_changed(elsewhere: Browser) -> None:
    browser = elsewhere
    assert "in the next hour" in browser.loaded("/")
    browser.open("/forecast")
    browser.until(lambda: browser.all(".only-wide .s0"))
    browser.open("/waiting?destination=email")
    browser.follow("order-003-reminder")
    browser.fill("input[name=due]", "10d12h30m")
    browser.press("Reschedule to")
    assert browser.shows("Done")
    assert "in 10 d 12 h" in browser.loaded("/waiting/message?id=order-003-reminder")
    browser.press("Cancel")
    assert browser.shows("Done")
    assert "No waiting message has the id" in browser.loaded("/waiting/message?id=order-003-reminder")
    edits_and_retries(browser)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["rabbitmq_url"], indirect=True)
def test_delay_levels_are_counted_and_unsupported_pages_show_a_reason(elsewhere: Browser) -> None:
    browser = elsewhere
    assert "in delay levels" in browser.loaded("/")
    browser.picture("now-levels")
    assert "delay levels" in browser.loaded("/waiting")
    # What is due by when is a picture, and a table of bounds, without a reason why there is none
    browser.open("/forecast")
    assert browser.shows("61 in delay levels")
    assert browser.all(".only-wide .column .s0")
    assert "can be counted" not in browser.text
    browser.picture("forecast-levels")
    browser.follow("next hour")
    assert browser.shows("59 min")
    edits_and_retries(browser)


def test_a_server_that_is_away_shows_in_its_parts_of_the_pages(chromium: Browser) -> None:
    away = Settings(endpoint="sales", url="postgresql://127.0.0.1:1/nothing?server_timeout=1")
    with serving([away]) as url:
        chromium.url = url
        for path in PAGES:
            text = chromium.loaded(path)
            assert chromium.all(".nav a"), path
            assert path == "/life" or "127.0.0.1" in text or "answer" in text, text
