"""The dashboard's pages through Starlette's test client."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from starlette.testclient import TestClient

from delayline.dashboard import app

if TYPE_CHECKING:
    from delayline import Endpoint
    from delayline.settings import Settings


def client_of(*endpoints: Endpoint | Settings, **settings: Any) -> TestClient:  # noqa: ANN401 - those of app
    """Return a client that a browser on this machine would be."""
    return TestClient(app(endpoints, **settings), base_url="http://localhost")


def csrf_of(client: TestClient, path: str = "/jobs") -> str:
    """Return the CSRF token of a page."""
    found = re.search(r'name="csrf" value="(\w+)"', client.get(path).text)
    return found[1] if found else ""
