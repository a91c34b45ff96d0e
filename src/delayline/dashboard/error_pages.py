"""The pages and actions of the error queue."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response, StreamingResponse

from delayline.clock import from_microseconds, to_microseconds
from delayline.dashboard import charts
from delayline.dashboard.back_ends import unavailable
from delayline.dashboard.forms import body_of, headers_of, whole
from delayline.dashboard.frame import LONGEST_FIELD, PAGE_ROWS, Common, Frame, form_asked, id_asked, ids_ticked
from delayline.dashboard.model import ErrorGroups, MessageDetails, Unavailable
from delayline.dashboard.rendering import link_to
from delayline.dashboard.security import check_origin, set_cookie
from delayline.errors import DelaylineError, InvalidMessage
from delayline.failure_index import GroupOrder
from delayline.filters import MessageFilter
from delayline.message import Headers
from delayline.set_jobs import HIGHEST_RATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from datetime import datetime

    from starlette.requests import Request

    from delayline.dashboard.service import EndpointService

ORDER_TITLES: Final = {
    GroupOrder.NEWEST: "newest first",
    GroupOrder.NEW: "most new first",
    GroupOrder.LARGEST: "largest first",
    GroupOrder.NAME: "by name",
}
SEEN_COOKIE: Final = "delayline_seen_"
SEEN_SECONDS: Final = 366 * 24 * 3600
SEARCH: Final = ("group", "where", "order", "before")
"""Fields that stay after an action."""


class ErrorPages(Frame):
    """The pages and actions of the error queue, by path."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self.shown: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/errors": self.groups,
            "/errors/group": self.group,
            "/errors/message": self.error_message,
            "/errors/edit": self.edit_form,
            "/errors/export": self.export,
            "/errors/seen": self.seen,
        }
        self.actions: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/errors/retry": self._action(self.retry, _back),
            "/errors/edit": self._action(self.edit, "/errors"),
            "/errors/purge": self._action(self.purge, _back),
        }

    async def groups(self, request: Request) -> Response:
        """Show the error queue in groups."""
        service, fields = self._service(request), _search_of(request.query_params)
        asked = fields["order"]
        order = next((each for each in GroupOrder if each.value == asked), GroupOrder.NEWEST)
        since = _seen_until(request, service)
        grouped: ErrorGroups | Unavailable
        try:
            wanted = self._wanted(fields)
            after = request.query_params.get("after", "")[:LONGEST_FIELD] or None
            grouped = await service.errors.groups(wanted, order=order, since=since, after=after, limit=PAGE_ROWS)
        except DelaylineError as error:
            grouped = unavailable(error)
        return self._page(
            request,
            "errors.html",
            "/errors",
            service,
            grouped=grouped,
            sparks=_sparks(grouped),
            fields=fields,
            order=order,
            orders=ORDER_TITLES,
            since=since,
            longest=LONGEST_FIELD,
        )

    async def group(self, request: Request) -> Response:
        """Show failed messages: of a group, those that a filter means, or all."""
        service, fields = self._service(request), _search_of(request.query_params)
        before = fields["before"]
        try:
            wanted = self._wanted(fields)
            number = int(before) if before.isascii() and before.isdigit() else None
            results = await service.errors.page(wanted, limit=PAGE_ROWS, before=number)
        except DelaylineError as error:
            results = unavailable(error)
        return self._page(
            request,
            "error_group.html",
            "/errors",
            service,
            results=results,
            fields=fields,
            since=_seen_until(request, service),
            longest=LONGEST_FIELD,
        )

    async def seen(self, request: Request) -> Response:
        """Note in a cookie that the failures so far were seen, and show the groups again."""
        check_origin(request)
        service, until = self._service(request), request.query_params.get("until", "")
        back = link_to(request, "/errors", endpoint=service.name, **_search_of(request.query_params))
        response = RedirectResponse(back, status_code=303)
        if until.isascii() and until.isdigit() and len(until) < 20:
            newest = min(int(until), to_microseconds(self._clock.now()))
            cookie = set_cookie(request, _seen_cookie(service), str(newest), SEEN_SECONDS)
            response.headers.append("Set-Cookie", cookie)
        return response

    async def error_message(self, request: Request) -> Response:
        """Show a failed message with headers, body, and a form to edit a copy."""
        service, message_id = self._service(request), id_asked(request.query_params)
        message = await service.errors.message(message_id, form=form_asked(request))
        return self._page(
            request, "error_message.html", "/errors", service, message=message, id=message_id, **_failure(message)
        )

    async def edit_form(self, request: Request) -> Response:
        """Show a failed message as a form."""
        service, message_id = self._service(request), id_asked(request.query_params)
        message = await service.errors.message(message_id, form="text")
        return self._page(request, "error_edit.html", "/errors", service, message=message, id=message_id)

    async def export(self, request: Request) -> Response:
        """Send failed messages as a file of JSON lines."""
        service, wanted = self._service(request), self._wanted(_search_of(request.query_params))

        async def lines() -> AsyncIterator[str]:
            async for document in service.errors.export(wanted):
                yield json.dumps(document) + "\n"

        return StreamingResponse(
            lines(),
            media_type="application/x-ndjson",
            headers={"Content-Disposition": 'attachment; filename="errors.jsonl"'},
        )

    # Actions

    async def retry(self, request: Request) -> Response:
        """Retry the failed messages that are ticked, or all that a filter means in the background."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        to = form.get("to", "").strip() or None
        if form.get("all"):
            rate = whole(form.get("rate", ""), "the rate", HIGHEST_RATE)
            wanted = self._wanted(_search_of(request.query_params))
            job = await service.errors.retry_all(wanted, to=to, rate=rate, actor=actor)
            return self._started(request, job, service)
        outcomes = await service.errors.retry(ids_ticked(form), to=to, actor=actor)
        return self._outcome(request, outcomes, _back(request), service, **_search_of(request.query_params))

    async def purge(self, request: Request) -> Response:
        """Drop failed messages for good: the ticked messages, or all that a filter means."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        if form.get("confirm", "").strip() != "purge":
            raise InvalidMessage("type the word purge to confirm")
        search = _search_of(request.query_params)
        if not form.get("chosen"):
            wanted = self._wanted(search)
            return self._started(request, await service.errors.purge_all(wanted, actor=actor), service)
        outcomes = await service.errors.purge(ids_ticked(form), actor=actor)
        return self._outcome(request, outcomes, _back(request), service, **search)

    async def edit(self, request: Request) -> Response:
        """Send an edited copy of a failed message, and remove the message."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        headers, body = headers_of(form.get("headers", "")), body_of(form.get("body", ""), form.get("marks", ""))
        to = form.get("to", "").strip() or None
        outcome = await service.errors.edit(form.get("id", ""), headers=headers, body=body, to=to, actor=actor)
        return self._outcome(request, [outcome], "/errors", service)

    def _wanted(self, fields: Mapping[str, str]) -> MessageFilter:
        """Return the filter of a search. Raises ConfigurationError where it cannot be read."""
        wanted = MessageFilter.parse([fields["where"]], self._clock.now())
        return replace(wanted, group=fields["group"]) if fields["group"] else wanted


def _search_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a search."""
    return {name: given.get(name, "").strip()[:LONGEST_FIELD] for name in SEARCH}


def _back(request: Request) -> str:
    """Return the page that an action came from."""
    return "/errors/group" if "list" in request.query_params else "/errors"


def _seen_cookie(service: EndpointService) -> str:
    return SEEN_COOKIE + hashlib.sha256(service.name.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _seen_until(request: Request, service: EndpointService) -> datetime | None:
    """Return the time up to which this browser's user has seen the failures; None if it was never noted."""
    kept = request.cookies.get(_seen_cookie(service), "")
    return from_microseconds(int(kept)) if kept.isascii() and kept.isdigit() and len(kept) < 17 else None


def _failure(message: MessageDetails | Unavailable | None) -> dict[str, Any]:
    """Return the facts about the failure in a failed message's headers."""
    headers = {header.name: header.value for header in message.headers} if isinstance(message, MessageDetails) else {}
    names = (
        ("Failed in", Headers.FAILED_QUEUE),
        ("When", Headers.TIME_OF_FAILURE),
        ("Exception", Headers.EXCEPTION_TYPE),
        ("Why", Headers.EXCEPTION_MESSAGE),
        ("Message type", Headers.ENCLOSED_MESSAGE_TYPES),
    )
    failure = [(label, headers.get(name, "")) for label, name in names]
    return {"failure": failure, "trace": headers.get(Headers.EXCEPTION_STACK_TRACE)}


def _sparks(grouped: ErrorGroups | Unavailable) -> dict[str, Markup]:
    """Return the trend of each group, by its key."""
    if isinstance(grouped, Unavailable):
        return {}
    drawn = {}
    for group in grouped.groups:
        values = [group.by_day.get(day, 0) for day in grouped.days]
        title = ", ".join(f"{day}: {value}" for day, value in zip(grouped.days, values, strict=True) if value)
        drawn[group.key] = Markup(charts.sparkline(values, title or "no failure in these days"))  # noqa: S704
    return drawn
