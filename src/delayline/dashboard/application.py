"""The ASGI application: which requests lead to which pages and actions."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Final

from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles

from delayline.clock import SystemClock
from delayline.dashboard.pages import Pages
from delayline.dashboard.rendering import STATIC
from delayline.dashboard.security import LOOPBACK, Guard
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.responses import Response
    from starlette.types import ASGIApp, Scope

    from delayline.clock import Clock
    from delayline.dashboard.security import Authorize
    from delayline.endpoint import Endpoint
    from delayline.settings import Settings
    from delayline.sync import SyncEndpoint

SHORTEST_SECRET: Final = 16


def app(
    endpoints: Sequence[Endpoint | SyncEndpoint | Settings],
    *,
    read_only: bool = True,
    authorize: Authorize | None = None,
    allowed_hosts: Sequence[str] = LOOPBACK,
    secret: bytes | None = None,
    mounted_at: str = "",
    clock: Clock | None = None,
) -> ASGIApp:
    """Return the dashboard as an ASGI application, to be served or mounted in another.

    It opens separate connections at the first request, and closes them when its lifespan ends.

    Args:
        endpoints: The endpoints to show: Endpoint objects, which need not be started, or settings.
        read_only: Whether every action is refused.
        authorize: Called with each request (a `starlette.requests.Request`); returns the Actor, None to refuse, or a
            response such as a redirect to a sign-in page. Without it anyone with access to the port can read it.
        allowed_hosts: Host names that browsers reach it by, without ports; `"*"` for any. Others are refused, so that a
            page elsewhere cannot reach it through another name.
        secret: Signs CSRF tokens, 16 bytes or more; the same in all processes of a dashboard. Random if left out.
        mounted_at: The path below which it is mounted, `/delayline`, where the framework does not pass it on as
            `root_path`, as Litestar.
        clock: Clock for ages; the machine's if left out.

    Raises:
        ConfigurationError: No endpoint is given, two share a name, or actions are allowed without `authorize`.

    Example:
        ```python
        dashboard = delayline.dashboard.app([endpoint], authorize=staff_only, allowed_hosts=["ops.example.com"])
        fastapi_app.mount("/delayline", dashboard)
        ```
    """
    if not read_only and authorize is None:
        raise ConfigurationError(
            "read_only=False without authorize= would let anyone with access to the port change messages: "
            "give a function that returns an Actor with may_act=True for users who may"
        )
    if secret is not None and len(secret) < SHORTEST_SECRET:
        raise ConfigurationError(f"the secret has {len(secret)} bytes: use {SHORTEST_SECRET} or more")
    pages = Pages(endpoints, clock or SystemClock())

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await pages.close()

    routes = [
        *(Route(path, page) for path, page in pages.shown.items()),
        *(Route(path, action, methods=["POST"]) for path, action in pages.actions.items()),
        Mount(STATIC.rstrip("/"), _Static(packages=[("delayline.dashboard", "static")])),
    ]
    return Guard(
        Router(routes=routes, lifespan=lifespan),
        allowed_hosts=allowed_hosts,
        authorize=authorize,
        read_only=read_only,
        secret=secret or secrets.token_bytes(32),
        mounted_at=mounted_at,
    )


class _Static(StaticFiles):
    """Files whose URLs carry their version: browsers keep them."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=86400" if scope["query_string"] else "no-cache"
        return response
