"""A headless Chromium, driven by selenium, and the dashboard's server in a thread of the test."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from selenium import webdriver
from selenium.common.exceptions import (
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
    WebDriverException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from delayline.dashboard import Actor, app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from selenium.webdriver.remote.webelement import WebElement

    from delayline.settings import Settings

DRIVER: Final = Path("/usr/bin/chromedriver")
SCREENSHOTS: Final = Path(__file__).parents[2] / "screenshots"
PATIENCE: Final = 60.0
ARGUMENTS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=1280,900",
)


class Browser:
    """One browser that all tests share; it collects what pages write to the console."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        self.driver.set_page_load_timeout(PATIENCE)
        self.url = ""

    def close(self) -> None:
        self.driver.quit()

    def open(self, path: str) -> None:
        self.driver.get(self.url + path)

    def loaded(self, path: str) -> str:
        """Open the page and return its text."""
        self.open(path)
        return self.text

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def choose(self, selector: str, text: str) -> None:
        Select(self.find(selector)).select_by_visible_text(text)

    def press(self, text: str) -> None:
        """Press the button that begins with this text."""
        self.until(lambda: self._click("main button", lambda found: found.startswith(text)))

    def press_summary(self, text: str) -> None:
        """Open or close the details whose summary has this text."""
        self.until(lambda: self._click("summary", lambda found: " ".join(found.split()) == text))

    def follow(self, text: str) -> None:
        """Follow the link with this text."""
        self.until(lambda: self._click("a", lambda found: " ".join(found.split()) == text))

    def _click(self, selector: str, matching: Callable[[str], bool]) -> bool:
        """Click the first element with a text that matches; the page before may still be there."""
        for element in self.all(selector):
            if matching(element.text):
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
                element.click()
                return True
        return False

    def shows(self, text: str) -> bool:
        """Wait until the page shows the text; a form leads to it by way of an answer and a redirect."""
        try:
            self.until(lambda: text in self.text)
        except TimeoutException:
            raise AssertionError(f"{text!r} is not on {self.driver.current_url}:\n{self.text}") from None
        return True

    @property
    def text(self) -> str:
        try:
            return self.find("main").text
        except WebDriverException as error:
            # How chromedriver reports an element whose page is replaced while it is read.
            if "does not belong to the document" in str(error.msg):
                raise StaleElementReferenceException(error.msg) from error
            raise

    def until(self, condition: Callable[[], Any]) -> None:
        ignored = [StaleElementReferenceException, NoSuchElementException]
        WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05, ignored_exceptions=ignored).until(
            lambda _: condition()
        )

    def at_chart(self, share: float) -> dict[str, str]:
        """Point at a place of the chart, 0 on the left and 1 on the right, and return what its legend says."""
        self.until(lambda: self.all(".u-over"))
        self.driver.execute_script(
            "const over = document.querySelector('.u-over'), box = over.getBoundingClientRect();"
            "for (const name of ['mouseenter', 'mousemove']) over.dispatchEvent(new MouseEvent(name,"
            " {bubbles: true, clientX: box.left + box.width * arguments[0], clientY: box.top + 5}));",
            share,
        )
        labels, values = self.all(".u-legend .u-label"), self.all(".u-legend .u-value")
        return {label.text: value.text for label, value in zip(labels, values, strict=True)}

    def tables_beyond_their_panels(self) -> list[str]:
        """Return the texts of tables that reach beyond their panel, and do not scroll within it."""
        found = self.driver.execute_script(
            "const right = (element) => element.getBoundingClientRect().right;"
            "return [...document.querySelectorAll('.panel table')].filter((table) => !table.closest('.scroll')"
            " && right(table) > right(table.closest('.panel'))).map((table) => table.innerText)"
        )
        return [str(text) for text in found]

    def complaints(self) -> list[str]:
        """Return what the console has: violations of the policy, errors of scripts, missing files.

        A page that was open before has lost its server, and may say so late: that is left out.
        """
        messages = [str(entry["message"]) for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]
        return [each for each in messages if not each.startswith("http://127.0.0.1:") or each.startswith(self.url)]

    def picture(self, name: str) -> None:
        """Keep the page as it is, wide and narrow, light and dark, where DELAYLINE_SCREENSHOTS asks for all four."""
        SCREENSHOTS.mkdir(exist_ok=True)
        widths = {"wide": (1280, 900), "narrow": (360, 780)}
        every = os.environ.get("DELAYLINE_SCREENSHOTS") == "all"
        for width, theme in [(w, t) for w in widths for t in ("light", "dark")] if every else [("wide", "light")]:
            self.emulate(theme, *widths[width])
            self.driver.save_screenshot(str(SCREENSHOTS / f"{name}-{width}-{theme}.png"))
        if every:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            self.emulate("light")

    def emulate(self, theme: str, width: int | None = None, height: int = 900) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        if width is not None:
            whole = max(height, int(self.driver.execute_script("return document.documentElement.scrollHeight")))
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            whole = min(3000, int(self.driver.execute_script("return document.documentElement.scrollHeight")))
            metrics["height"] = max(height, whole)
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@contextlib.contextmanager
def serving(settings: Sequence[Settings], **options: Any) -> Iterator[str]:  # noqa: ANN401 - those of app
    """Serve the dashboard on a free port, with actions allowed, and yield its URL."""
    chosen = {"read_only": False, "authorize": lambda _: Actor("ana", may_act=True), **options}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            app(settings, **chosen), log_level=logging.CRITICAL, timeout_graceful_shutdown=1, access_log=False
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
