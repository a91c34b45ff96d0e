"""The browser of all tests of the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import not_installed
from tests.dashboard.browser import DRIVER, Browser

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests: it takes seconds to start."""
    if not DRIVER.exists():
        not_installed("chromium", "apt-get install chromium chromium-driver")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
