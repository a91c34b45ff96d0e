"""The dashboard within FastAPI, Django and Litestar: pages, links and files below its path."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import django
import pytest
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from fastapi import FastAPI
from litestar import Litestar, asgi
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from delayline import Endpoint, MemoryTransport
from delayline.dashboard import app

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def in_fastapi(dashboard: ASGIApp) -> ASGIApp:
    outer = FastAPI()
    outer.mount("/ops/delayline", dashboard)
    return outer


def in_django(dashboard: ASGIApp) -> ASGIApp:
    if not settings.configured:
        settings.configure(SECRET_KEY="test", ROOT_URLCONF=(), ALLOWED_HOSTS=["localhost"])  # noqa: S106
        django.setup()
    return Starlette(routes=[Mount("/ops/delayline", dashboard), Mount("/", ASGIHandler())])


def in_litestar(dashboard: ASGIApp) -> ASGIApp:
    return Litestar([asgi("/ops/delayline", is_mount=True, copy_scope=True)(dashboard)])  # type: ignore[return-value]


@pytest.mark.parametrize("mounted", [in_fastapi, in_django, in_litestar])
def test_it_is_mounted_with_pages_links_and_files_below_its_path(mounted: object) -> None:
    assert callable(mounted)
    place = "/ops/delayline" if mounted is in_litestar else ""
    dashboard = app([Endpoint("sales", transport=MemoryTransport())], mounted_at=place)
    with TestClient(mounted(dashboard), base_url="http://localhost") as client:
        page = client.get("/ops/delayline/jobs")
        assert page.status_code == 200
        assert "sales" in page.text
        links = re.findall(r'(?:href|src|action)="([^"#]+)"', page.text)
        assert links
        assert all(link.startswith("/ops/delayline/") for link in links), links
        for link in links:
            assert client.get(link.replace("&amp;", "&")).status_code == 200, link
