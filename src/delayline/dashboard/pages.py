"""The pages and actions: from a request to the service of an endpoint, and from its results to HTML."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from delayline.actions import OperatorAction
from delayline.dashboard import charts
from delayline.dashboard.back_ends import unavailable
from delayline.dashboard.error_pages import ErrorPages
from delayline.dashboard.find_pages import FindPages
from delayline.dashboard.forms import change_of, filter_of, whole
from delayline.dashboard.frame import (
    LONGEST_FIELD,
    PAGE_ROWS,
    Common,
    Frame,
    Notice,
    form_asked,
    id_asked,
    ids_ticked,
    offset_asked,
)
from delayline.dashboard.live import EVERY, MOST_STREAMS, Shared, updates
from delayline.dashboard.model import (
    Forecast,
    ForecastBar,
    Lateness,
    LevelForecast,
    Unavailable,
)
from delayline.dashboard.overview import LATENESS_SPANS, SPANS, Overview
from delayline.dashboard.queue_pages import QueuePages
from delayline.dashboard.rendering import number
from delayline.dashboard.service import EndpointService
from delayline.dashboard.summary import lines
from delayline.delayed.pauses import HIGHEST_RESUMED_RATE
from delayline.errors import ConfigurationError, DelaylineError, InvalidMessage
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.readable import parse_instant
from delayline.set_jobs import HIGHEST_RATE
from delayline.sync import SyncEndpoint

if TYPE_CHECKING:
    from starlette.requests import Request

    from delayline.clock import Clock
    from delayline.endpoint import Endpoint
    from delayline.filters import MessageFilter
    from delayline.settings import Settings

T = TypeVar("T")

WIDE_WIDTH: Final = 1040
NARROW_WIDTH: Final = 330
SPAN_TITLES: Final = {span: "a minute to years" if span == "all" else f"next {span}" for span in SPANS}
PAST_TITLES: Final = {span: f"last {'30 days' if span == 'month' else span}" for span in LATENESS_SPANS}
FILTERS: Final = ("id", "destination", "type", "header", "value", "from", "before")
"""Fields of a search."""
SCHEDULE_ACTIONS: Final = {
    action.value: action for action in (OperatorAction.PAUSE, OperatorAction.RESUME, OperatorAction.TRIGGER)
}
FRESH: Final = 1.0
"""Seconds for which the data of a page is shown again, to all browsers."""


class Pages(Frame):
    """The pages and actions of the endpoints, by path."""

    def __init__(self, endpoints: Sequence[Endpoint | SyncEndpoint | Settings], clock: Clock) -> None:
        sources = [source.endpoint if isinstance(source, SyncEndpoint) else source for source in endpoints]
        services = [EndpointService(source, clock=clock) for source in sources]
        by_name = {service.name: service for service in services}
        if not services:
            raise ConfigurationError("the dashboard needs an endpoint to show: give one or more")
        if len(by_name) < len(services):
            raise ConfigurationError(
                f"two of the endpoints have the same name: {', '.join(sorted(service.name for service in services))}"
            )
        super().__init__(Common(by_name, clock))
        self._streams = 0
        self._colours = charts.Colours()
        self._now = Shared(partial(self._of_all, Overview.now), FRESH, clock)
        self._days = Shared(partial(self._of_all, Overview.rates), FRESH, clock)
        self._forecasts = {
            (service.name, span): Shared(partial(service.overview.forecast, span), FRESH, clock)
            for service in services
            for span in SPANS
        }
        errors, queues = ErrorPages(self._common), QueuePages(self._common)
        self._findings = Shared(partial(self._of_all, Overview.doctor), FRESH, clock)
        self.shown: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self.now,
            "/live/now": self.live_now,
            "/forecast": self.forecast,
            "/lateness": self.lateness,
            "/waiting": self.waiting,
            "/waiting/message": self.waiting_message,
            "/waiting/all": self.waiting_all,
            "/schedules": self.schedules,
            **FindPages(self._common).shown,
            "/life": self.life,
            "/jobs": self.jobs,
            "/live/jobs": self.live_jobs,
            "/doctor": self.doctor,
            **errors.shown,
            **queues.shown,
        }
        self.actions: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/waiting": self._action(self.change, "/waiting"),
            "/waiting/all": self._action(self.change_all, "/waiting"),
            "/waiting/dispatching": self._action(self.change_dispatching, "/waiting"),
            "/schedules": self._action(self.change_schedule, "/schedules"),
            "/jobs/stop": self._action(self.stop_job, "/jobs"),
            "/jobs/resume": self._action(self.resume_job, "/jobs"),
            **errors.actions,
            **queues.actions,
        }

    async def close(self) -> None:
        """Close the connections of the services."""
        for service in self._services.values():
            await service.close()

    # Pages

    async def now(self, request: Request) -> Response:
        """Show what each endpoint does at this moment."""
        overviews, days = await asyncio.gather(self._overviews(), self._days())
        return self._page(request, "now.html", "/", None, **overviews, days=days, every=f"{EVERY:g}")

    async def live_now(self, request: Request) -> Response:
        """Send the same again and again."""

        async def fragment() -> str:
            return self._fragment(request, "now_list.html", **await self._overviews())

        return self._stream(fragment)

    async def _overviews(self) -> dict[str, Any]:
        """Return what `Now` shows: a line for each endpoint, the worst first, and its details in their usual order."""
        states = await self._now()
        return {
            "at": self._clock.now(),  # so that people see that the page lives where nothing else changes
            "states": states,
            "summary": lines([(service.name, now) for service, now in states]),
            "places": {service.name: place for place, (service, _) in enumerate(states, 1)},
        }

    async def _of_all(self, ask: Callable[[Overview], Awaitable[T]]) -> Sequence[tuple[EndpointService, T]]:
        """Return the answers of all endpoints, asked at the same time."""
        services = list(self._services.values())
        answers = await asyncio.gather(*(ask(service.overview) for service in services))
        return list(zip(services, answers, strict=True))

    async def forecast(self, request: Request) -> Response:
        """Show when messages are due, and what of it the drain rate cannot dispatch."""
        service = self._service(request)
        span = request.query_params.get("span", "all")
        span = span if span in SPANS else "all"
        due_forecast, levels = await asyncio.gather(
            self._forecasts[service.name, span](), service.levels.forecast(*SPANS[span])
        )
        context: dict[str, Any] = {"spans": SPAN_TITLES, "span": span, "due_forecast": due_forecast, "drawing": None}
        if isinstance(due_forecast, Forecast):
            context["drawing"] = _drawn_forecast(due_forecast, self._colours)
        context.update(levels=levels, alone=service.levels.alone and levels is not None, drawn_levels=None)
        if isinstance(levels, LevelForecast):
            context["drawn_levels"] = _drawn_levels(levels)
        return self._page(request, "forecast.html", "/forecast", service, **context)

    async def lateness(self, request: Request) -> Response:
        """Show how late messages were dispatched, over time."""
        service = self._service(request)
        asked = request.query_params.get("span", "day")
        span = asked if asked in PAST_TITLES else "day"
        destination = request.query_params.get("destination", "")[:LONGEST_FIELD] or None
        measured = await service.overview.lateness(span, destination=destination)
        context: dict[str, Any] = {"spans": PAST_TITLES, "span": span, "destination": destination, "measured": measured}
        context["drawing"] = _drawn_lateness(measured) if isinstance(measured, Lateness) else None
        return self._page(request, "lateness.html", "/lateness", service, **context)

    async def waiting(self, request: Request) -> Response:
        """Search waiting messages."""
        service = self._service(request)
        fields = _filters(request.query_params)
        after, offset = request.query_params.get("after", "")[:100], offset_asked(request)
        results = await self._searched(
            fields,
            lambda wanted: service.search.page(
                wanted, limit=PAGE_ROWS, after=parse_instant(after) if after else None, offset=offset
            ),
        )
        return self._page(
            request,
            "waiting.html",
            "/waiting",
            service,
            results=results,
            pauses=await service.pauses.all(),
            fields=fields,
            after=after,
            longest=LONGEST_FIELD,
        )

    async def _searched(
        self, fields: Mapping[str, str], search: Callable[[MessageFilter], Awaitable[T]]
    ) -> T | Unavailable:
        try:
            return await search(filter_of(fields, self._clock.now()))
        except DelaylineError as error:
            return unavailable(error)

    async def waiting_message(self, request: Request) -> Response:
        """Show a waiting message with headers and body."""
        service, message_id = self._service(request), id_asked(request.query_params)
        message = await service.pending.message(message_id, form=form_asked(request))
        return self._page(request, "waiting_message.html", "/waiting", service, message=message, id=message_id)

    async def waiting_all(self, request: Request) -> Response:
        """Show how many messages match before an action on all of them."""
        service = self._service(request)
        fields = _filters(request.query_params)
        preview = await self._searched(fields, service.search.preview)
        return self._page(request, "waiting_all.html", "/waiting", service, preview=preview, fields=fields)

    async def schedules(self, request: Request) -> Response:
        """List the recurring messages."""
        service = self._service(request)
        schedules = await service.schedules.all()
        return self._page(request, "schedules.html", "/schedules", service, schedules=schedules)

    async def life(self, request: Request) -> Response:
        """Show the recorded events of a message."""
        service, message_id = self._service(request), id_asked(request.query_params)
        message_life = await service.life.of(message_id) if message_id else None
        return self._page(
            request, "life.html", "/life", service, message_life=message_life, id=message_id, longest=MAXIMUM_ID_LENGTH
        )

    async def jobs(self, request: Request) -> Response:
        """Show jobs and actions on many messages, with their progress."""
        service = self._service(request)
        return self._page(request, "jobs.html", "/jobs", service, all_jobs=await service.jobs.all())

    async def live_jobs(self, request: Request) -> Response:
        """Send the same again and again."""
        service = self._service(request)

        async def fragment() -> str:
            all_jobs = await service.jobs.all()
            return self._fragment(request, "jobs_list.html", all_jobs=all_jobs, endpoint=service.name)

        return self._stream(fragment)

    async def doctor(self, request: Request) -> Response:
        """Show what `delayline doctor` checks, of every endpoint."""
        return self._page(request, "doctor.html", "/doctor", None, checked=await self._findings())

    # Actions

    async def change(self, request: Request) -> Response:
        """Cancel, reschedule or send now the waiting messages that are ticked."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        ids = ids_ticked(form)
        action, to, by = change_of(form, self._clock.now())
        outcomes = await service.pending.change(action, ids, to=to, by=by, actor=actor)
        return self._outcome(request, outcomes, "/waiting", service, **_filters(request.query_params))

    async def change_all(self, request: Request) -> Response:
        """Do the same with all that match, in the background."""
        service, form = self._service(request), request.state.form
        fields = _filters(form)
        now = self._clock.now()
        wanted, (action, to, by) = filter_of(fields, now), change_of(form, now)
        rate = whole(form.get("rate", ""), "the rate", HIGHEST_RATE)
        preview = await service.search.preview(wanted)
        if isinstance(preview, Unavailable):
            raise InvalidMessage(preview.reason)
        # An estimate is another number each time: the endpoint's name is typed instead.
        if form.get("confirm", "").strip() != (str(preview.number) if preview.exact else service.name):
            count = number(preview.number, about=not preview.exact, at_least=preview.at_least)
            typed = "another number" if preview.exact else "not the endpoint's name"
            refusal = f"Not started: {count} match now, and {typed} was typed."
            return self._redirect(request, "/waiting/all", Notice("bad", refusal), endpoint=service.name, **fields)
        actor = request.state.actor.name
        expected = preview.number if preview.exact else None
        job = await service.pending.change_all(action, wanted, actor=actor, rate=rate, to=to, by=by, expected=expected)
        return self._started(request, job, service)

    async def change_dispatching(self, request: Request) -> Response:
        """Hold back what is due for a destination, or all of the endpoint, or let it leave, at a given rate."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        destination, rate = form.get("destination", "").strip() or None, form.get("rate", "").strip()
        if form.get("action") == OperatorAction.RESUME.value:
            most = whole(rate, "the rate", HIGHEST_RESUMED_RATE) if rate else None
            outcomes = await service.pauses.resume(destination, rate=most, actor=actor)
        elif form.get("confirm"):
            outcomes = await service.pauses.pause(destination, actor=actor)
        else:
            raise InvalidMessage("tick the box to confirm that nothing of it leaves until it is resumed")
        return self._outcome(request, outcomes, "/waiting", service)

    async def change_schedule(self, request: Request) -> Response:
        """Pause, resume or trigger a schedule."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        action = SCHEDULE_ACTIONS.get(form.get("action", ""))
        if action is None:
            raise InvalidMessage("no action was chosen")
        outcomes = await service.schedules.act(action, form.get("name", ""), actor=actor)
        return self._outcome(request, outcomes, "/schedules", service)

    async def stop_job(self, request: Request) -> Response:
        """Stop an action on many messages; the messages that it has changed stay changed."""
        service = self._service(request)
        stopped = await service.actions.stop(request.state.form.get("job", ""), actor=request.state.actor.name)
        notice = Notice("good", "Stopped.") if stopped else Notice("bad", "It does not run any more.")
        return self._redirect(request, "/jobs", notice, endpoint=service.name)

    async def resume_job(self, request: Request) -> Response:
        """Go on with an action on many messages whose process has ended."""
        service = self._service(request)
        resumed = await service.actions.resume(request.state.form.get("job", ""), actor=request.state.actor.name)
        notice = Notice("good", "Resumed.") if resumed else Notice("bad", "It is over, or runs elsewhere.")
        return self._redirect(request, "/jobs", notice, endpoint=service.name)

    # Shared by all pages

    def _stream(self, fragment: Callable[[], Awaitable[str]]) -> Response:
        if self._streams >= MOST_STREAMS:
            raise HTTPException(503, "too many browsers are updated at once")

        async def counted() -> AsyncIterator[str]:
            self._streams += 1
            try:
                async for event in updates(fragment, self._clock):
                    yield event
            finally:
                self._streams -= 1

        return StreamingResponse(counted(), media_type="text/event-stream")


def _filters(given: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a search."""
    return {name: given.get(name, "").strip()[:LONGEST_FIELD] for name in FILTERS}


def _drawn_forecast(due_forecast: Forecast, colours_of: charts.Colours) -> dict[str, Any]:
    """Return the drawings of a forecast, with its columns as a table."""
    named = list(due_forecast.destinations[: charts.MOST_SERIES])
    series, colours = [*named, "others"], [*colours_of.of(named), charts.MOST_SERIES]
    columns = [_column(bucket, named, due_forecast.at) for bucket in due_forecast.bars]
    if not any(column.counts[-1] for column in columns):
        series.pop()
        columns = [replace(column, counts=column.counts[:-1]) for column in columns]
    total = sum(bucket.total for bucket in columns)
    exact, more = all(bucket.exact for bucket in columns), any(bucket.at_least for bucket in columns)
    return {
        "wide": Markup(charts.forecast(columns, series, colours, width=WIDE_WIDTH, name="wide")),  # noqa: S704 - escaped there
        "narrow": Markup(charts.forecast(columns, series, colours, width=NARROW_WIDTH, height=260, name="narrow")),  # noqa: S704
        "columns": columns,
        "series": series,
        "colours": colours,
        "cold": any(bucket.cold for bucket in columns),
        "total": number(total, about=not exact, at_least=more),
        "above": sum(bucket.exceeds for bucket in columns),
    }


def _drawn_levels(levels: LevelForecast) -> dict[str, Any]:
    """Return the drawings of what is due in delay levels."""
    bounds = [charts.Bounds(charts.short(due.span), due.at_least, due.estimate, due.at_most) for due in levels.due]
    return {
        "wide": Markup(charts.bounds(bounds, width=WIDE_WIDTH, name="levels-wide")),  # noqa: S704 - escaped there
        "narrow": Markup(charts.bounds(bounds, width=NARROW_WIDTH, height=240, name="levels-narrow")),  # noqa: S704
        "rows": bounds,
    }


def _column(bar: ForecastBar, named: Sequence[str], now: datetime) -> charts.Column:
    label = "overdue" if bar.start is None else "later" if bar.end is None else charts.short(bar.end - now)
    if bar.start is None:
        title = "overdue"
    elif bar.end is None:
        title = f"later than {charts.short(bar.start - now)}"
    else:
        title = f"in {charts.short(bar.start - now)} to {charts.short(bar.end - now)}"
    counts = [bar.destinations.get(name, 0) for name in named]
    known = sum(counts)
    if known > bar.hot and known:  # numbers of samples
        counts = [round(count * bar.hot / known) for count in counts]
        known = sum(counts)
    return charts.Column(
        label,
        title,
        [*counts, max(0, bar.hot - known)],
        cold=bar.cold,
        capacity=bar.capacity,
        exact=bar.exact,
        at_least=bar.at_least,
    )


def _drawn_lateness(measured: Lateness) -> dict[str, Any]:
    """Return the drawings of a heat map, with the sums of its rows as a table."""
    form = "%H:%M" if measured.step * len(measured.counts) <= timedelta(days=1) else "%d %b %H:%M"
    times = [f"{measured.start + measured.step * position:{form}}" for position in range(len(measured.counts))]
    data = charts.HeatMap(times, measured.bounds, measured.counts, measured.p50, measured.p99)
    sums = [sum(column[position] for column in measured.counts) for position in range(len(measured.bounds) + 1)]
    return {
        "wide": Markup(charts.heat_map(data, width=WIDE_WIDTH)),  # noqa: S704 - escaped there
        "narrow": Markup(charts.heat_map(data, width=NARROW_WIDTH, height=280)),  # noqa: S704
        "rows": [(label, count) for label, count in zip(data.labels, sums, strict=True) if count],
        "total": sum(sums),
    }
