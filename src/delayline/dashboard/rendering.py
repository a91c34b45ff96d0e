"""Renders pages as HTML: templates that escape every value, links, and values in readable form."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from delayline.clock import to_microseconds
from delayline.dashboard.charts import compact, seconds
from delayline.dashboard.model import Unavailable
from delayline.dashboard.tables import full_columns
from delayline.readable import duration, relative, size

if TYPE_CHECKING:
    from starlette.requests import Request

    from delayline.dashboard.model import Rates
    from delayline.delayed.store import DueBucket

STATIC: Final = "/static/"
PAGES: Final = (
    ("/", "Now"),
    ("/forecast", "Forecast"),
    ("/lateness", "Lateness"),
    ("/find", "Find messages"),
    ("/waiting", "Waiting messages"),
    ("/schedules", "Schedules"),
    ("/errors", "Errors"),
    ("/queues", "Queues"),
    ("/life", "A message's life"),
    ("/jobs", "Jobs"),
    ("/doctor", "Doctor"),
)


#: Characters that hide or reorder others: a name or body that holds them must not look like another.
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


def visible(text: str) -> str:
    r"""Return the text with control characters and characters that change its direction written as \u202e."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def route_path(request: Request) -> str:
    """Return the path within the dashboard, wherever it is mounted."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope["root_path"])


def link_to(request: Request, path: str, **query: object) -> str:
    """Return the path of a page with its query; fields that are None or empty are left out."""
    given = {name: value for name, value in query.items() if value not in {None, ""}}
    return f"{request.scope['root_path']}{path}{'?' + urlencode(given) if given else ''}"


@functools.cache
def _version(name: str) -> str:
    return hashlib.sha256((files("delayline.dashboard") / "static" / name).read_bytes()).hexdigest()[:12]


def render(request: Request, name: str, **context: object) -> str:
    """Return the template as text, with what every page has: links, static files and the CSRF token."""

    def link(path: str, **query: object) -> str:
        return link_to(request, path, **query)

    def static(name: str) -> str:
        return link_to(request, STATIC + name, v=_version(name))

    def csrf() -> Markup:
        return Markup('<input type="hidden" name="csrf" value="{}">').format(request.state.csrf_token)

    token = getattr(request.state, "csrf_token", None)
    template = _environment().get_template(name)
    return template.render(link=link, static=static, csrf=csrf, csrf_token=token, **context)


def plain_page(request: Request, title: str, text: str | None, *, status: int, sign_in: bool = False) -> HTMLResponse:
    """Return a page without navigation: an error, or the page that asks for the token."""
    return HTMLResponse(render(request, "plain.html", title=title, text=text, sign_in=sign_in), status)


def number(value: int | None, *, about: bool = False, at_least: bool = False) -> str:
    """Return a count: 12,345; about 1.2 M; 10,000 or more; - where it is not known."""
    if value is None:
        return "-"
    if at_least:
        return f"{value:,} or more"
    return f"about {compact(value)}" if about else f"{value:,}"


def rate(value: float | None) -> str:
    """Return messages a second: 0, 0.25, 1,200."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def instant(value: datetime | None) -> str | Markup:
    """Return an instant in UTC, for people and for machines."""
    if value is None:
        return "-"
    at = value.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S} UTC")


def bucket(value: DueBucket) -> str:
    """Return the count of a bucket, with how exact it is."""
    return number(value.count, about=not value.exact, at_least=value.at_least)


def ago(value: datetime, now: datetime) -> str:
    """Return how long ago something was: 3 s ago."""
    return f"{duration(max(now - value, timedelta(0)))} ago"


def points(value: Rates) -> str:
    """Return rates as the script reads them: the first minute since 1970, and a list a line of the chart."""
    minute = int(value.start.timestamp()) // 60
    return json.dumps([minute, value.dispatched, value.handled, value.failed], separators=(",", ":"))


def lateness(value: timedelta | float | None) -> str:
    """Return a lateness: 3 ms, 1.2 s, 4 min 3 s."""
    if value is None:
        return "-"
    span = value if isinstance(value, timedelta) else timedelta(seconds=value)
    return seconds(span.total_seconds()) if span < timedelta(seconds=10) else duration(span)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("delayline.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Any] = {
        "number": number,
        "rate": rate,
        "instant": instant,
        "lateness": lateness,
        "duration": duration,
        "relative": relative,
        "size": size,
        "compact": compact,
        "bucket": bucket,
        "exact": lambda value: Markup(escape(value)),  # noqa: S704 - for values that come back in a form
        "ago": ago,
        "microseconds": to_microseconds,
        "points": points,
        "full_columns": full_columns,
    }
    environment.filters.update(filters)
    environment.tests["unavailable"] = lambda value: isinstance(value, Unavailable)
    return environment
