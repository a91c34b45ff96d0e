"""The dashboard: an ASGI application that shows endpoints and acts on their messages."""

from importlib.util import find_spec

from delayline.errors import MissingExtra

if any(find_spec(name) is None for name in ("starlette", "jinja2", "markupsafe")):
    raise MissingExtra("dashboard", "the dashboard")

from delayline.dashboard.application import app
from delayline.dashboard.security import Actor, Authorize

__all__ = ["Actor", "Authorize", "app"]
