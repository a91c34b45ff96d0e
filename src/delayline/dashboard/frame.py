"""What all pages share: the frame around a page, the notices of what actions did, and the ways back to pages."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from delayline.dashboard.contents import BODY_FORMS, Form
from delayline.dashboard.rendering import PAGES, link_to, render
from delayline.dashboard.summary import LATE
from delayline.errors import DelaylineError, InvalidMessage
from delayline.message import MAXIMUM_ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.datastructures import ImmutableMultiDict
    from starlette.requests import Request

    from delayline.actions import ActionRecord
    from delayline.clock import Clock
    from delayline.dashboard.model import ActionOutcome
    from delayline.dashboard.service import EndpointService

PAGE_ROWS: Final = 50
"""Messages on a page."""
LONGEST_FIELD: Final = 500
"""Characters of a search field."""
MOST_NOTICES: Final = 200
OWN_FIELDS: Final = frozenset({"endpoint", "notice"})
"""Fields of a query that are not of a search."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What an action did, shown on the next page."""

    kind: str
    text: str
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Common:
    """What all pages of a dashboard have in common."""

    services: Mapping[str, EndpointService]
    """The endpoints by name."""
    clock: Clock
    notices: OrderedDict[str, Notice] = field(default_factory=OrderedDict)
    """What actions did, until it was shown."""


class Frame:
    """The parts of every page.

    Args:
        common: What the pages have in common.
    """

    def __init__(self, common: Common) -> None:
        self._common = common
        self._services = common.services
        self._clock = common.clock
        self._notices = common.notices

    def _page(
        self, request: Request, template: str, path: str, service: EndpointService | None, **context: object
    ) -> Response:
        notice = self._notices.pop(request.query_params.get("notice", ""), None)
        html = self._fragment(
            request,
            template,
            title=dict(PAGES)[path],
            page=path,
            pages=PAGES,
            endpoint=service.name if service else None,
            endpoints=list(self._services),
            notice=notice,
            **context,
        )
        return HTMLResponse(html)

    def _fragment(self, request: Request, template: str, **context: object) -> str:
        state = request.state
        now = self._clock.now()
        return render(request, template, actor=state.actor, may_act=state.may_act, now=now, late=now - LATE, **context)

    def _service(self, request: Request) -> EndpointService:
        name = request.state.form.get("endpoint") or request.query_params.get("endpoint")
        if not name:
            return next(iter(self._services.values()))
        if name not in self._services:
            raise HTTPException(404, "there is no such endpoint")
        return self._services[name]

    def _action(
        self, act: Callable[[Request], Awaitable[Response]], path: str | Callable[[Request], str]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the action, made to show on the page at `path`, with the search that was there, why it failed."""

        async def shown(request: Request) -> Response:
            try:
                return await act(request)
            except (DelaylineError, TimeoutError) as error:
                reason = str(error) or "the back end did not answer in time"
                query = {name: value for name, value in request.query_params.items() if name not in OWN_FIELDS}
                if (endpoint := request.state.form.get("endpoint")) is not None:
                    query["endpoint"] = endpoint
                back = path if isinstance(path, str) else path(request)
                return self._redirect(request, back, Notice("bad", f"Not done: {reason}"), **query)

        return shown

    def _outcome(
        self,
        request: Request,
        outcomes: Sequence[ActionOutcome],
        path: str,
        service: EndpointService,
        **query: str,
    ) -> Response:
        """Return the answer that leads to a page with what was done, and with the search that was there."""
        done = sum(outcome.done for outcome in outcomes)
        lines = [
            f"{outcome.id}: {outcome.text}".removeprefix(": ")
            for outcome in outcomes
            if not outcome.done or len(outcomes) == 1
        ]
        summary = f"{done:,} of {len(outcomes):,} done." if len(outcomes) != 1 else "Done." if done else "Not done."
        notice = Notice("good" if done == len(outcomes) else "bad", summary, lines[:20])
        return self._redirect(request, path, notice, endpoint=service.name, **query)

    def _started(self, request: Request, job: ActionRecord, service: EndpointService) -> Response:
        notice = Notice("good", f"Started: {job.action.value}, {job.what} ({job.name}).")
        return self._redirect(request, "/jobs", notice, endpoint=service.name)

    def _redirect(self, request: Request, path: str, notice: Notice, **query: object) -> Response:
        """Return the answer that leads to a page with the notice, which is shown once."""
        key = secrets.token_urlsafe(12)
        self._notices[key] = notice
        while len(self._notices) > MOST_NOTICES:
            self._notices.popitem(last=False)
        return RedirectResponse(link_to(request, path, notice=key, **query), status_code=303)


def form_asked(request: Request) -> Form | None:
    """Return the form in which a body is to be shown."""
    form = request.query_params.get("form")
    return form if form in BODY_FORMS else None


def offset_asked(request: Request) -> int:
    """Return how many rows to leave out."""
    offset = request.query_params.get("offset", "0")
    return int(offset) if offset.isascii() and offset.isdigit() and len(offset) < 10 else 0


def id_asked(values: Mapping[str, str]) -> str:
    """Return the id of a message."""
    return values.get("id", "").strip()[:MAXIMUM_ID_LENGTH]


def ids_ticked(form: ImmutableMultiDict[str, str]) -> list[str]:
    """Return the ids that are ticked. Raises InvalidMessage if none is."""
    ids = list(dict.fromkeys(message_id for message_id in form.getlist("id") if message_id))
    if not ids:
        raise InvalidMessage("no message is ticked")
    return ids
