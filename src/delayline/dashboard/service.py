"""The dashboard's queries to one endpoint's back ends, and its actions on messages.

Each part of a page has a separate time limit, and is `Unavailable` with its reason where a back end lacks it,
refuses, or does not answer. Work that outlives its limit goes on in the background; the same question joins it instead
of asking again, so that a slow back end is asked once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import logging
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from delayline import error_queue
from delayline.backends import backend_of
from delayline.checks import whole_number
from delayline.clock import EPOCH, SystemClock, latest_of
from delayline.composition import delays_url
from delayline.dashboard import pipeline
from delayline.dashboard.contents import (
    BODY_SHOWN,
    body_of,
    header_rows,
    headers_of,
    message_type,
    one_line,
    place_of,
    wire_time,
)
from delayline.dashboard.forms import editable
from delayline.dashboard.live import Shared
from delayline.dashboard.model import (
    ActionJob,
    ActionOutcome,
    AuditEntry,
    DueCounts,
    ErrorGroup,
    ErrorGroups,
    ErrorPage,
    ErrorRow,
    Forecast,
    ForecastBar,
    JobRow,
    Jobs,
    JobState,
    Lateness,
    Level,
    LifeEvent,
    MessageDetails,
    MessageLife,
    Now,
    OperatorAction,
    PendingPage,
    PendingQuery,
    PendingRow,
    Preview,
    ProcessState,
    QueueState,
    Throughput,
    Unavailable,
)
from delayline.delayed.delivery import management_of
from delayline.delayed.store import (
    DueBucket,
    FoundMessage,
    Outcome,
    SupportsClock,
    SupportsDueForecast,
    SupportsLookup,
    SupportsManagement,
    found_of,
)
from delayline.doctor import check_urls, examine_endpoint
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError, NotStarted
from delayline.events import Event, emit
from delayline.failures import FAILURE_HEADERS
from delayline.masking import masked
from delayline.message import Headers, Message, in_utc
from delayline.opening import open_pending, open_transport
from delayline.settings import Settings
from delayline.telemetry.measurements import LATENESS_BOUNDS, Histogram
from delayline.transport import (
    SupportsQueueLimits,
    SupportsQueueLookup,
    SupportsQueueManagement,
    SupportsQueuePass,
    SupportsTransportTransactions,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from sqlalchemy import Connection

    from delayline.clock import Clock
    from delayline.dashboard.contents import Form
    from delayline.delayed.store import DueForecast
    from delayline.doctor import Finding
    from delayline.endpoint import Endpoint
    from delayline.sql.database import Database
    from delayline.sql.dialect import Dialect
    from delayline.telemetry.history import MinuteRow
    from delayline.transport import Transport

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Result = TypeVar("Result")
Changed = TypeVar("Changed", str, error_queue.HeldMessage)

#: Seconds that a part of a page may take.
TIME_LIMIT: Final = 5.0
#: Questions that may be unanswered at a time, those that are past their limit included.
MOST_UNANSWERED: Final = 24
ONE_SECOND: Final = timedelta(seconds=1)
ONE_MINUTE: Final = timedelta(minutes=1)
HALF_AN_HOUR: Final = timedelta(minutes=30)
ONE_HOUR: Final = timedelta(hours=1)
ONE_DAY: Final = timedelta(days=1)
#: A process whose last row is older has ended, or cannot write.
ALIVE: Final = timedelta(minutes=3)
#: The minutes that rates are taken of.
RATES_OF: Final = timedelta(minutes=5)
#: Seconds for which a drain rate is shown again: it needs all rows of a day, of which there is a new one each minute.
RATE_KEPT: Final = 30.0
#: Seconds that a search or a preview may look through messages one by one.
SEARCH_TIME: Final = 0.1
#: Messages that are looked through for one id where a back end has no index of ids.
LOOKED_AT: Final = 20_000
#: Messages that are read in one statement.
READ_AT_ONCE: Final = 500
#: Ids that a preview shows.
EXAMPLES: Final = 5
#: Messages that an action on all that match changes at most.
MOST_CHANGED: Final = 100_000
#: How long a pass through the error queue may keep messages from others; brokers end it after half an hour.
PASS_SECONDS: Final = 600.0
#: Failed messages that are read to be grouped.
MOST_GROUPED: Final = 10_000
#: Failed messages that are read where each has to be taken from the broker and given back.
MOST_TAKEN: Final = 1_000
#: More than a queue has.
ALL: Final = 2**31
#: Days of the trend of failures.
TREND: Final = 14
#: Destinations that a forecast shows by name.
NAMED_DESTINATIONS: Final = 10
OTHERS: Final = "(other)"
#: Actions that are kept for the audit page, and jobs that are listed.
AUDITED: Final = 500
JOBS_LISTED: Final = 50
PROBLEMS_LISTED: Final = 20
HIGHEST_RATE: Final = 1_000
LONGEST_QUEUES: Final = 200
#: From a minute to ten years, each about twice the one before, in round hours.
GROWING: Final = (
    *(timedelta(minutes=one) for one in (1, 2, 5, 10, 20, 30)),
    *(timedelta(hours=one) for one in (1, 2, 4, 8, 12)),
    *(timedelta(days=one) for one in (1, 2, 4, 7, 14, 30, 60, 90, 180, 365, 730, 1825, 3650)),
)
#: Where the bars of a forecast end, from now, by the name of the zoom.
SPANS: Final[Mapping[str, Sequence[timedelta]]] = {
    "all": GROWING,
    "hour": [place * timedelta(minutes=1) for place in range(1, 61)],
    "day": [place * timedelta(minutes=30) for place in range(1, 49)],
    "week": [place * timedelta(hours=4) for place in range(1, 43)],
    "month": [place * timedelta(days=1) for place in range(1, 32)],
    "year": [place * timedelta(days=7) for place in range(1, 54)],
}
#: Time spans of the heat map, the width of a column, and whether hours' rows are enough.
LATENESS_SPANS: Final[Mapping[str, tuple[timedelta, timedelta]]] = {
    "hour": (timedelta(hours=1), timedelta(minutes=1)),
    "6 hours": (timedelta(hours=6), timedelta(minutes=6)),
    "day": (timedelta(days=1), timedelta(minutes=30)),
    "week": (timedelta(days=7), timedelta(hours=3)),
    "month": (timedelta(days=30), timedelta(hours=12)),
}
NO_HISTORY: Final = (
    "no process of this endpoint has written minute rows: set history = true, or add MinuteHistory to its observers"
)


@dataclass(slots=True)
class _Job:
    """An action on many messages while it runs."""

    shown: ActionJob
    task: asyncio.Task[None] | None = None
    problems: list[str] = field(default_factory=list)


class EndpointService:
    """One endpoint, as the dashboard shows it and acts on it. Used by one event loop.

    Args:
        source: The endpoint's settings, of which the service opens its own transport and store; or an endpoint of this
            process, whose transport and store are used while it is started.
        time_limit: Seconds that each part of a page may take.
        search_time: Seconds that a search or a preview may look through messages one by one.
        clock: Clock for overdue messages where the store has none.

    Example:
        ```python
        async with EndpointService(load_settings()) as service:
            print((await service.now()).due)
        ```
    """

    def __init__(
        self,
        source: Settings | Endpoint,
        *,
        time_limit: float = TIME_LIMIT,
        search_time: float = SEARCH_TIME,
        clock: Clock | None = None,
    ) -> None:
        self._settings = source if isinstance(source, Settings) else None
        self._endpoint = None if isinstance(source, Settings) else source
        self.name = source.named_endpoint if isinstance(source, Settings) else source.name
        self._time_limit = time_limit
        self._search_time = search_time
        self._clock = clock or SystemClock()
        self._rate = Shared(self._drain_rate, RATE_KEPT, self._clock)
        self._transport: Transport | None = None
        self._store: object = None
        self._closing = contextlib.AsyncExitStack()
        self._opening = {"store": asyncio.Lock(), "transport": asyncio.Lock()}
        self._unanswered: dict[object, asyncio.Task[Any]] = {}
        self._jobs: dict[str, _Job] = {}
        self._audit: deque[AuditEntry] = deque(maxlen=AUDITED)

    async def __aenter__(self) -> EndpointService:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the jobs, and disconnect."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        tasks += self._unanswered.values()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._time_limit)
        self._store = self._transport = None
        await self._closing.aclose()

    # Pages

    @property
    def delayed_at(self) -> str:
        """Where delayed messages are: a URL without passwords, or the class of the store."""
        if self._settings is not None:
            return masked(self._settings.resolved_store_url)
        store = None if self._endpoint is None else self._endpoint.store
        return "nowhere" if store is None else type(store).__name__

    async def now(self) -> Now:
        """Return the page `Now`."""
        due, recent, queues, errors, levels = await asyncio.gather(
            self._part("due", self._due_counts),
            self._part("recent", partial(self._recent, HALF_AN_HOUR)),
            self._part("queues", self._queues),
            self._part("errors", self._error_count),
            self._part("levels", self._levels),
        )
        if isinstance(recent, Unavailable):
            return Now(self._clock.now(), due, recent, recent, queues, errors, levels)
        return Now(self._clock.now(), due, _throughput(*recent), _processes(*recent), queues, errors, levels)

    async def forecast(self, span: str = "day", *, destination: str | None = None) -> Forecast | Unavailable:
        """Return the due times of pending messages.

        Args:
            span: The zoom: `hour`, `day`, `week`, `month`, `year` or `all`.
            destination: Only messages to this queue; in large buckets their number is taken from a sample.

        Raises:
            ConfigurationError: There is no such zoom.
        """
        _one_of("span", span, SPANS)
        rate, found = await asyncio.gather(
            self._part("rate", self._rate),
            self._part(("forecast", span), partial(self._forecast, span)),
        )
        if isinstance(found, Unavailable):
            return found
        at, both, cold = found
        bars = [
            _bar(one, other.count if other else 0, rate if isinstance(rate, float) else None, destination)
            for one, other in zip(both.buckets, cold.buckets if cold else [None] * len(both.buckets), strict=True)
        ]
        totals: Counter[str] = Counter()
        for bar in bars:
            totals.update(bar.destinations)
        return Forecast(at, span, bars, rate, [name for name, _ in totals.most_common()])

    async def lateness(self, span: str = "day", *, destination: str | None = None) -> Lateness | Unavailable:
        """Return the heat map of lateness.

        Args:
            span: How far back: `hour`, `6 hours`, `day`, `week` or `month`.
            destination: Only messages to this queue; all by default.
        """
        _one_of("span", span, LATENESS_SPANS)
        return await self._part(("lateness", span, destination), partial(self._lateness, span, destination))

    async def pending(
        self, query: PendingQuery | None = None, *, limit: int = 50, after: datetime | None = None, offset: int = 0
    ) -> PendingPage | Unavailable:
        """Return pending messages that match, earliest due first.

        An id and due times are searched by index. Other conditions are checked message by message until the page is
        full or the search time is used up; then the result is `cut`, and a search with `next_after` goes on from there.

        Args:
            query: What to find; everything by default.
            limit: How many to return at most, 1 to 500.
            after: The due time to go on from, `next_after` of the page before.
            offset: How many messages of that due time to skip, `next_offset` of the page before.
        """
        if not 1 <= limit <= READ_AT_ONCE:
            raise ConfigurationError(f"limit must be 1 to {READ_AT_ONCE}, not {limit}")
        query = query or PendingQuery()
        work = partial(self._pending, query, limit, after, offset)
        return await self._part(("pending", query, limit, after, offset), work)

    async def message(self, message_id: str, *, form: Form | None = None) -> MessageDetails | Unavailable | None:
        """Return a pending message with headers and body, or None.

        Args:
            message_id: The message.
            form: The form of the body: `json`, `text` or `hex`; by default the most readable one.
        """
        return await self._part(("message", message_id, form), partial(self._message, message_id, form))

    async def preview(self, query: PendingQuery) -> Preview | Unavailable:
        """Return how many pending messages match, for an action on all of them.

        The number is counted within the search time, or estimated: from the due forecast for due times and a
        destination, else from the share of matches among the messages that were looked through.
        """
        return await self._part(("preview", query), partial(self._preview, query))

    # Actions on pending messages

    async def cancel(self, ids: Sequence[str], *, actor: str) -> list[ActionOutcome]:
        """Cancel pending messages, one by one."""
        return await self._each(OperatorAction.CANCEL, ids, actor, self._cancel)

    async def reschedule(
        self, ids: Sequence[str], *, to: datetime | None = None, by: timedelta | None = None, actor: str
    ) -> list[ActionOutcome]:
        """Give pending messages another due time: a certain one, or one that is so much later or, negative, earlier."""
        move = _mover(to, by)
        return await self._each(OperatorAction.RESCHEDULE, ids, actor, partial(self._reschedule, move=move))

    async def send_now(self, ids: Sequence[str], *, actor: str) -> list[ActionOutcome]:
        """Make pending messages due now."""
        return await self._each(OperatorAction.SEND_NOW, ids, actor, self._send_now)

    async def change_all(
        self,
        action: OperatorAction,
        query: PendingQuery,
        *,
        actor: str,
        rate: float = 100.0,
        to: datetime | None = None,
        by: timedelta | None = None,
        expected: int | None = None,
    ) -> ActionJob | Unavailable:
        """Cancel, reschedule or send now all pending messages that match, as a job.

        The messages are those that match when the job starts, 100 000 at most.

        Args:
            action: `OperatorAction.CANCEL`, `RESCHEDULE` or `SEND_NOW`.
            query: Which messages.
            actor: Who does it, for the log.
            rate: Messages a second at most, above 0 and up to 1000.
            to: The new due time.
            by: How much later, or earlier.
            expected: The number of the preview, which is read again by default.
        """
        change: Callable[[str], Awaitable[ActionOutcome]]
        match action:
            case OperatorAction.CANCEL:
                change = self._cancel
            case OperatorAction.RESCHEDULE:
                change = partial(self._reschedule, move=_mover(to, by))
            case OperatorAction.SEND_NOW:
                change = self._send_now
            case _:
                raise ConfigurationError(f"{action.value!r} is not an action on pending messages")
        if expected is None:
            preview = await self.preview(query)
            if isinstance(preview, Unavailable):
                return preview
            expected = preview.number

        async def work(job: _Job) -> None:
            ids = [found.message.id async for found in self._matching(query, MOST_CHANGED)]
            job.shown = replace(job.shown, expected=len(ids))
            await self._paced(job, _each_of(ids), change)

        return self._start_job(action, actor, describe(query), min(expected, MOST_CHANGED), rate, work)

    # Errors

    async def error_groups(self) -> ErrorGroups | Unavailable:
        """Return the error queue, grouped by exception, place, queue and type, with the trend of the last days."""
        return await self._part("error groups", self._error_groups)

    async def errors(self, group: str | None = None, *, limit: int = 50, offset: int = 0) -> ErrorPage | Unavailable:
        """Return failed messages of a group, or all; oldest first."""
        return await self._part(("errors", group, limit, offset), partial(self._errors, group, limit, offset))

    async def error(self, message_id: str, *, form: Form | None = None) -> MessageDetails | Unavailable | None:
        """Return a failed message with headers and body, or None; the arguments are those of `message`."""
        return await self._part(("error", message_id, form), partial(self._error, message_id, form))

    async def retry(self, ids: Sequence[str], *, actor: str, to: str | None = None) -> list[ActionOutcome]:
        """Send failed messages to the queue they failed in, or to `to`."""
        return await self._each_failed(OperatorAction.RETRY, ids, actor, partial(self._retry, to=to))

    async def retry_all(
        self, group: str | None = None, *, actor: str, rate: float = 10.0, to: str | None = None
    ) -> ActionJob | Unavailable:
        """Send all failed messages of a group, or all, to the queues they failed in, as a job.

        Messages that fail again meanwhile are not retried again.
        """
        groups = await self.error_groups()
        if isinstance(groups, Unavailable):
            return groups
        expected = sum(one.count for one in groups.groups if group in (None, one.key))

        async def work(job: _Job) -> None:
            transport = await self._opened_transport()
            if isinstance(transport, SupportsQueuePass):
                async with contextlib.aclosing(self._held(transport, group, rate)) as held:
                    await self._paced(job, held, partial(self._retry, to=to))
                return
            ids = [message.id async for message in self._failed(group, MOST_CHANGED)]
            job.shown = replace(job.shown, expected=len(ids))
            await self._paced(job, _each_of(ids), partial(self._retry_by_id, to=to))

        what = "all failed messages" if group is None else f"the failed messages of group {group}"
        return self._start_job(OperatorAction.RETRY, actor, what, expected, rate, work)

    async def edit(
        self, message_id: str, *, headers: Mapping[str, str], body: bytes, to: str | None = None, actor: str
    ) -> ActionOutcome:
        """Send an edited copy of a failed message in its place, with the same id.

        One transaction where the transport has them: the old message leaves with the new one's arrival, or both stay
        as they are. On brokers the new one is sent first.

        Args:
            message_id: The failed message.
            headers: All headers of the copy; those that describe the failure are left out.
            body: The body of the copy.
            to: The queue to send it to; by default the one it failed in.
            actor: Who does it, for the log.
        """
        return (
            await self._each_failed(OperatorAction.EDIT, [message_id], actor, partial(self._edit, headers, body, to))
        )[0]

    async def purge(self, ids: Sequence[str] | None = None, *, actor: str) -> list[ActionOutcome] | Unavailable:
        """Delete failed messages for ever: those with these ids, or all that the error queue has."""
        if ids is not None:
            return await self._each_failed(OperatorAction.PURGE, ids, actor, self._drop)
        number = await self._part("purge", self._purge)
        if isinstance(number, Unavailable):
            return number
        self._note(OperatorAction.PURGE, actor, f"all of {self._error_queue}", f"{number} deleted")
        return [ActionOutcome("", done=True, text=f"{number} deleted")]

    async def export(
        self, group: str | None = None, *, limit: int | None = None
    ) -> AsyncGenerator[Mapping[str, object], None]:
        """Yield all failed messages as documents with id, headers and body (Base64 where it is not text)."""
        async for message in self._failed(group, limit):
            yield exported(message)

    # Other pages

    async def life(self, message_id: str) -> MessageLife | Unavailable:
        """Return a message's journal, and where it is now."""
        return await self._part(("life", message_id), partial(self._life, message_id))

    async def jobs(self) -> Jobs:
        """Return the jobs of the pipeline, from their tables."""
        schedules, dispatchers, migrations, cold_tier = await asyncio.gather(
            self._part("schedules", partial(self._look, pipeline.schedules)),
            self._part("dispatchers", partial(self._look, pipeline.dispatchers)),
            self._part("migrations", self._migrations),
            self._part("cold tier", self._cold_tier),
        )
        return Jobs(schedules, dispatchers, migrations, cold_tier, self.actions())

    async def doctor(self) -> list[Finding] | Unavailable:
        """Return what `delayline doctor` finds."""
        return await self._part("doctor", self._doctor)

    def actions(self) -> list[ActionJob]:
        """Return the jobs of this process, the last one first."""
        return [job.shown for job in reversed(self._jobs.values())]

    def stop_action(self, job_id: str, *, actor: str) -> bool:
        """Stop a job; the messages that it has changed stay changed. False if it does not run."""
        job = self._jobs.get(job_id)
        if job is None or job.task is None or job.task.done():
            return False
        job.task.cancel()
        self._note(job.shown.action, actor, job.shown.what, "stopped")
        return True

    def audit(self) -> list[AuditEntry]:
        """Return the actions that were taken, the last one first; all of them are in the log."""
        return list(reversed(self._audit))

    # The work behind the pages

    async def _part(self, key: object, work: Callable[[], Awaitable[Value]]) -> Value | Unavailable:
        """Return the result of the work, or why there is none within the time limit."""
        task = self._unanswered.get(key)
        if task is None:
            if len(self._unanswered) >= MOST_UNANSWERED:
                return Unavailable("the back end leaves too many questions unanswered: try again", temporary=True)
            task = self._unanswered[key] = asyncio.ensure_future(work())
            task.add_done_callback(lambda done: self._answered(key, done))
        done, _ = await asyncio.wait([task], timeout=self._time_limit)
        if not done:
            return Unavailable(f"no answer within {self._time_limit:g} s", temporary=True)
        if task.cancelled():
            return Unavailable("the dashboard stops", temporary=True)
        error = task.exception()
        if error is None:
            return cast("Value", task.result())
        return _unavailable(error)

    def _answered(self, key: object, task: asyncio.Task[Any]) -> None:
        self._unanswered.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, DelaylineError):
            text = "A part of the dashboard of endpoint %s failed"
            emit(logger, logging.ERROR, Event.DASHBOARD_FAILED, text, self.name, exception=error)

    async def _opened_store(self) -> object:
        """Return the open store or persister; raises ConfigurationError with the reason if there is none."""
        if self._endpoint is not None:
            delivery = self._endpoint.delayed_delivery
            if delivery is None:
                raise ConfigurationError("the endpoint has no delayed delivery, and so no pending messages")
            self._must_be_started()
            return management_of(delivery)
        settings = self._own_settings
        async with self._opening["store"]:
            if self._store is not None:
                return self._store
            self._refuse_memory(settings.resolved_store_url)
            self._store = await self._closing.enter_async_context(open_pending(settings))
            return self._store

    async def _opened_transport(self) -> Transport:
        if self._endpoint is not None:
            self._must_be_started()
            return self._endpoint.transport
        settings = self._own_settings
        async with self._opening["transport"]:
            if self._transport is None:
                self._refuse_memory(settings.resolved_transport_url)
                self._transport = await self._closing.enter_async_context(open_transport(settings))
            return self._transport

    async def _managed_queues(self) -> SupportsQueueManagement:
        return error_queue.managed_queues(await self._opened_transport())

    async def _managed(self) -> SupportsManagement:
        store = await self._opened_store()
        if not isinstance(store, SupportsManagement):
            raise ConfigurationError(f"{type(store).__name__} cannot list, cancel or reschedule messages")
        return store

    def _must_be_started(self) -> None:
        if self._endpoint is not None and not self._endpoint.started:
            raise BackendUnavailable(f"endpoint {self.name!r} is not started in this process")

    @property
    def _own_settings(self) -> Settings:
        assert self._settings is not None  # noqa: S101 - one of endpoint and settings
        return self._settings

    @property
    def _error_queue(self) -> str:
        return self._own_settings.error_queue if self._endpoint is None else self._endpoint.error_queue

    def _refuse_memory(self, url: str) -> None:
        if backend_of(url).in_process:
            raise ConfigurationError(
                f"{masked(url)!r} is the memory of the endpoint's own process: mount the dashboard there, or use a file"
            )

    def _database(self) -> tuple[Database, str | None, str]:
        """Return the database of the store, its schema and the store's table; raises ConfigurationError."""
        settings = self._settings
        if settings is None:
            store = None if self._endpoint is None else self._endpoint.store
            from delayline.sql.store import SqlDelayedMessageStore

            if not isinstance(store, SqlDelayedMessageStore):
                raise ConfigurationError("this needs a store in a SQL database: others have no tables for it")
            return store._database, store._schema, store._table_name or f"{self.name}.timeouts"
        backend = backend_of(settings.resolved_store_url)
        if not backend.has_tables:
            raise ConfigurationError("this needs a store in a SQL database: others have no tables for it")
        from delayline.sql.databases import database_at

        backend.must_exist(settings.resolved_store_url)
        database = database_at(settings.resolved_store_url)
        return (
            database,
            database.dialect.catalog.schema_of(settings.schema),
            settings.table_name or f"{self.name}.timeouts",
        )

    async def _look(self, work: Callable[[Connection, Dialect, str | None], Result]) -> Result:
        """Run a read-only work in the store's database, on an open connection if there is one."""
        database, schema, _ = self._database()

        def looked(connection: Connection) -> Result:
            return work(connection, database.dialect, schema)

        try:
            return await database.read(looked)
        except NotStarted:  # store and transport are not open
            return await database.look(looked)

    async def _time(self) -> datetime:
        """Return the present time on the store's clock, the machines' clocks may differ."""
        store = await self._opened_store()
        return store.clock().now() if isinstance(store, SupportsClock) else self._clock.now()

    async def _forecasting(self) -> SupportsDueForecast:
        store = await self._opened_store()
        if not isinstance(store, SupportsDueForecast):
            raise ConfigurationError(f"{type(store).__name__} cannot count its messages without reading all of them")
        return store

    async def _due_counts(self) -> DueCounts:
        store, now = await self._forecasting(), await self._time()
        found = await store.due_forecast([now, now + ONE_MINUTE, now + ONE_HOUR, now + ONE_DAY])
        overdue, minute, hour, day, later = found.buckets
        return DueCounts(overdue, minute, hour, day, later, found.earliest)

    async def _minutes(self, start: datetime, end: datetime, *, scale: int = 1) -> list[MinuteRow]:
        from delayline.telemetry.history import read_minutes

        rows = await self._look(
            lambda connection, _, schema: read_minutes(connection, schema, self.name, start, end, scale=scale)
        )
        if rows is None:
            raise ConfigurationError(NO_HISTORY)
        return rows

    async def _recent(self, span: timedelta) -> tuple[datetime, list[MinuteRow]]:
        now = await self._time()
        return now, await self._minutes(now - span, now + ONE_MINUTE)

    async def _drain_rate(self) -> float:
        """Return the most messages a second that all processes have dispatched in a minute of the last day."""
        _, rows = await self._recent(ONE_DAY)
        minutes: Counter[datetime] = Counter()
        for row in rows:
            minutes[row.start] += row.dispatched
        best = max(minutes.values(), default=0)
        if not best:
            raise ConfigurationError("nothing was dispatched in the last day" if rows else NO_HISTORY)
        return best / 60

    async def _queues(self) -> list[QueueState]:
        transport = await self._opened_transport()
        queues = error_queue.managed_queues(transport)
        names = [self.name, self._error_queue]
        limits = {}
        if isinstance(transport, SupportsQueueLimits):
            limits = {one.queue: one for one in await transport.limits()}
            names += limits
        elif isinstance(transport, SupportsQueueLookup):
            names += await transport.queues()
        found = []
        for name in list(dict.fromkeys(names))[:LONGEST_QUEUES]:
            try:
                number: int | Unavailable = await queues.count(name)
            except BackendUnavailable:
                raise
            except DelaylineError as error:
                number = _unavailable(error)
            one = limits.get(name)
            found.append(
                QueueState(name, number)
                if one is None
                else QueueState(name, number, one.paused, one.concurrency, one.rate, one.handlers)
            )
        return found

    async def _error_count(self) -> int:
        return await (await self._managed_queues()).count(self._error_queue)

    async def _levels(self) -> list[Level]:
        url = None if self._settings is None else delays_url(self._settings)
        counts = () if url is None else await backend_of(url).count_pending(url)
        if not counts:
            raise ConfigurationError("no messages wait in delay levels")
        return [Level(number, level.count, level.span) for number, level in enumerate(counts)]

    async def _forecast(self, span: str) -> tuple[datetime, DueForecast, DueForecast | None]:
        store, now = await self._forecasting(), await self._time()
        latest = datetime.max.replace(tzinfo=UTC) - ONE_DAY
        edges = [now, *(now + end for end in SPANS[span] if now + end < latest)]
        cold = None
        if hasattr(store, "cold_forecast"):
            cold = cast("DueForecast", await store.cold_forecast(edges))
        return now, await store.due_forecast(edges, by_destination=True), cold

    async def _lateness(self, span: str, destination: str | None) -> Lateness:
        length, step = LATENESS_SPANS[span]
        now = await self._time()
        end = EPOCH + -(-(now - EPOCH) // step) * step
        start = end - -(-length // step) * step
        hour = EPOCH + (now - EPOCH) // ONE_HOUR * ONE_HOUR
        rows = await self._minutes(max(start, hour) if step >= ONE_HOUR else start, end)
        if step >= ONE_HOUR:
            rows += await self._minutes(start, hour, scale=60)
        columns = (end - start) // step
        counts = [[0] * (len(LATENESS_BOUNDS) + 1) for _ in range(columns)]
        names: set[str] = set()
        uncounted = 0
        for row in rows:
            names.update(row.lateness)
            uncounted += row.uncounted
            column = counts[min((row.start - start) // step, columns - 1)]
            for name, buckets in row.lateness.items():
                if destination in (None, name):
                    for place, one in enumerate(buckets):
                        column[place] += one
        histograms = [Histogram(LATENESS_BOUNDS, column, 0.0) for column in counts]
        return Lateness(
            start=start,
            step=step,
            bounds=LATENESS_BOUNDS,
            counts=counts,
            destination=destination,
            destinations=sorted(names),
            p50=[one.quantile(0.5) for one in histograms],
            p99=[one.quantile(0.99) for one in histograms],
            uncounted=uncounted,
        )

    async def _pages(
        self, query: PendingQuery, after: datetime | None, offset: int, at_once: int
    ) -> AsyncGenerator[Sequence[FoundMessage], None]:
        """Yield pages of messages in order of due time, by the indexes that there are."""
        store = await self._opened_store()
        if query.message_id is not None:
            one = await self._find(store, query.message_id, 0)
            yield [one] if one is not None else []
            return
        if not isinstance(store, SupportsLookup):
            managed = await self._managed()
            while some := await managed.pending(destination=query.destination, limit=at_once, offset=offset):
                yield [found_of(message, 0) for message in some]
                offset += len(some)
            return
        start = after or query.due_from
        while page := await store.due_between(start, query.due_before, limit=at_once, offset=offset):
            yield page
            if len(page) < at_once:
                return
            last = page[-1].message.due
            same = sum(1 for one in page if one.message.due == last)
            offset = offset + same if last == start else same
            start = last

    async def _find(self, store: object, message_id: str, body_limit: int) -> FoundMessage | None:
        if isinstance(store, SupportsLookup):
            return await store.find(message_id, body_limit=body_limit)
        managed, offset = await self._managed(), 0
        while offset < LOOKED_AT and (page := await managed.pending(limit=READ_AT_ONCE, offset=offset)):
            for message in page:
                if message.id == message_id:
                    return found_of(message, body_limit)
            offset += len(page)
        return None

    async def _pending(self, query: PendingQuery, limit: int, after: datetime | None, offset: int) -> PendingPage:
        rows, looked_at, is_over = [], 0, await self._search_timer()
        at_once = READ_AT_ONCE if _checks_each(query) else limit
        start, skipped = after or query.due_from, offset
        async with contextlib.aclosing(self._pages(query, after, offset, at_once)) as pages:
            async for page in pages:
                for found in page:
                    looked_at += 1
                    due = found.message.due
                    start, skipped = due, skipped + 1 if due == start else 1
                    if matches(query, found):
                        rows.append(row_of(found))
                        if len(rows) == limit:
                            return PendingPage(rows, looked_at, False, skipped, start)
                if len(page) == at_once and is_over():
                    total = await self._expected(replace(query, due_from=after or query.due_from, destination=None))
                    if total is not None:  # without those at its beginning that were skipped
                        total = replace(total, count=max(total.count - offset, looked_at))
                    return PendingPage(rows, looked_at, False, skipped, start, cut=True, total=total)
        return PendingPage(rows, looked_at, True, None, None)

    async def _search_timer(self) -> Callable[[], bool]:
        """Return a function that returns whether the search time is used up; it begins when the store is open."""
        await self._opened_store()
        time = asyncio.get_running_loop().time
        end = time() + self._search_time
        return lambda: time() >= end

    async def _matching(self, query: PendingQuery, most: int) -> AsyncGenerator[FoundMessage, None]:
        number = 0
        async with contextlib.aclosing(self._pages(query, None, 0, READ_AT_ONCE)) as pages:
            async for page in pages:
                for found in page:
                    if matches(query, found):
                        yield found
                        number += 1
                        if number >= most:
                            return

    async def _preview(self, query: PendingQuery) -> Preview:
        number, looked_at, is_over = 0, 0, await self._search_timer()
        examples: list[str] = []
        by_due = not _checks_each(query) and query.message_id is None
        total = await self._expected(query) if by_due else None  # the index or statistics count these
        at_once = READ_AT_ONCE if total is None else EXAMPLES
        async with contextlib.aclosing(self._pages(query, None, 0, at_once)) as pages:
            async for page in pages:
                found = [one for one in page if matches(query, one)]
                examples += [one.message.id for one in found[: EXAMPLES - len(examples)]]
                if total is not None:
                    return Preview(total.count, total.exact, total.at_least, examples)
                number, looked_at = number + len(found), looked_at + len(page)
                if len(page) == at_once and is_over():
                    return await self._estimated(query, number, looked_at, examples)
        return Preview(number, exact=True, at_least=False, example=examples)

    async def _estimated(self, query: PendingQuery, number: int, looked_at: int, examples: Sequence[str]) -> Preview:
        """Return the preview of a query after `number` matches among the first `looked_at` messages."""
        by_share = _checks_headers(query)
        total = await self._expected(replace(query, destination=None) if by_share else query)
        if total is None:
            return Preview(number, exact=False, at_least=True, example=examples)
        about = round(total.count * number / looked_at) if by_share else total.count
        return Preview(max(about, number), exact=False, at_least=total.at_least, example=examples)

    async def _expected(self, query: PendingQuery) -> DueBucket | None:
        """Return how many messages have the due times and the destination of the query, by the due forecast.

        None where the store has no forecast. The query's other conditions are ignored.
        """
        store = await self._opened_store()
        if not isinstance(store, SupportsDueForecast):
            return None
        now, start, end, name = await self._time(), query.due_from, query.due_before, query.destination
        times = {one for one in (start, end) if one is not None}
        if name is not None:  # shares of destinations come from the first messages of each bucket: more buckets
            times.update(now + one for one in GROWING)
        edges = sorted(one for one in times or {now} if (start is None or one >= start) and (end is None or one <= end))
        if not edges:  # due_from is later than due_before
            return DueBucket(start, end, 0)
        forecast = await store.due_forecast(edges, by_destination=name is not None)
        buckets = forecast.buckets[0 if start is None else 1 : None if end is None else -1]
        return DueBucket(
            start,
            end,
            sum(one.count if name is None else one.destinations.get(name, 0) for one in buckets),
            exact=all(one.exact for one in buckets),
            at_least=any(one.at_least for one in buckets),
        )

    async def _message(self, message_id: str, form: Form | None) -> MessageDetails | None:
        found = await self._find(await self._opened_store(), message_id, BODY_SHOWN)
        if found is None:
            return None
        delayed, kept = found.message, found.message.message
        size = found.size - len(kept.encoded_headers)
        return details(kept, delayed.destination, delayed.due, delayed.number_of_retries, size, form)

    async def _cancel(self, message_id: str) -> ActionOutcome:
        return _outcome(message_id, await (await self._managed()).cancel(message_id))

    async def _reschedule(self, message_id: str, *, move: Callable[[datetime | None], datetime]) -> ActionOutcome:
        store = await self._managed()
        found = await self._find(store, message_id, 0)
        if found is None:
            return _outcome(message_id, Outcome.NOT_PENDING)
        return _outcome(message_id, await store.reschedule(message_id, move(found.message.due)))

    async def _send_now(self, message_id: str) -> ActionOutcome:
        store = await self._managed()
        clock = store.clock() if isinstance(store, SupportsClock) else self._clock
        return _outcome(message_id, await store.reschedule(message_id, latest_of(clock)()))

    async def _each(
        self, action: OperatorAction, ids: Sequence[str], actor: str, change: Callable[[str], Awaitable[ActionOutcome]]
    ) -> list[ActionOutcome]:
        outcomes = []
        for message_id in dict.fromkeys(ids):
            found = await self._part((action, message_id, actor), partial(change, message_id))
            outcome = (
                found
                if isinstance(found, ActionOutcome)
                else ActionOutcome(message_id, done=False, text=_again(found.reason))
            )
            outcomes.append(outcome)
            self._note(action, actor, message_id, outcome.text)
        return outcomes

    def _note(self, action: OperatorAction, actor: str, what: str, result: str) -> None:
        self._audit.append(AuditEntry(self._clock.now(), actor, self.name, action, what, result))
        text = "Dashboard: %s by %s on endpoint %s: %s: %s"
        emit(logger, logging.INFO, Event.DASHBOARD_ACTION, text, action.value, actor, self.name, what, result)

    def _start_job(
        self,
        action: OperatorAction,
        actor: str,
        what: str,
        expected: int,
        rate: float,
        work: Callable[[_Job], Awaitable[None]],
    ) -> ActionJob:
        if not isinstance(rate, int | float) or not 0 < rate <= HIGHEST_RATE:
            raise ConfigurationError(f"rate must be above 0 and up to {HIGHEST_RATE} messages a second, not {rate!r}")
        shown = ActionJob(
            id=uuid.uuid4().hex[:12],
            action=action,
            actor=actor,
            what=what,
            state=JobState.RUNNING,
            started=self._clock.now(),
            finished=None,
            expected=expected,
            done=0,
            failed=0,
            rate=float(rate),
        )
        job = self._jobs[shown.id] = _Job(shown)
        for old in [key for key, one in self._jobs.items() if one.task is not None and one.task.done()][:-JOBS_LISTED]:
            del self._jobs[old]
        self._note(action, actor, what, f"started: {expected} messages, {rate:g} a second")

        async def run() -> None:
            state = JobState.FAILED
            try:
                await work(job)
                state = JobState.DONE
            except asyncio.CancelledError:
                state = JobState.STOPPED
                raise
            except DelaylineError as error:
                job.problems.append(str(error))
            finally:
                job.shown = replace(
                    job.shown, state=state, finished=self._clock.now(), problems=job.problems[:PROBLEMS_LISTED]
                )
                result = f"{state.value}: {job.shown.done} done, {job.shown.failed} not"
                self._note(action, actor, what, result)

        job.task = asyncio.create_task(run(), name=f"delayline {action.value} {shown.id}")
        return shown

    async def _paced(
        self, job: _Job, messages: AsyncIterator[Changed], change: Callable[[Changed], Awaitable[ActionOutcome]]
    ) -> None:
        """Change the messages one by one, no faster than the job's rate."""
        began, number = self._clock.now(), 0
        async for message in messages:
            early = number / job.shown.rate - (self._clock.now() - began).total_seconds()
            number += 1
            if early > 0:
                await self._clock.sleep(early)
            message_id = message if isinstance(message, str) else message.message.id
            try:
                outcome = await change(message)
            except BackendUnavailable as error:
                outcome = ActionOutcome(message_id, done=False, text=str(error))
            if outcome.done:
                job.shown = replace(job.shown, done=job.shown.done + 1)
                continue
            if len(job.problems) < PROBLEMS_LISTED:
                job.problems.append(f"{message_id}: {outcome.text}")
            job.shown = replace(job.shown, failed=job.shown.failed + 1, problems=tuple(job.problems))

    async def _failed(self, group: str | None, most: int | None) -> AsyncGenerator[Message, None]:
        """Yield failed messages, oldest first.

        Args:
            group: The group's key; None for all.
            most: How many to look at; where the broker has to give them back, a thousand at most. None for all.
        """
        queues, number = await self._managed_queues(), 0
        transport = await self._opened_transport()
        shared = isinstance(transport, SupportsTransportTransactions)
        if not shared and (most is not None or not isinstance(transport, SupportsQueuePass)):
            for message in await queues.browse(self._error_queue, ALL if most is None else min(most, MOST_TAKEN)):
                if group in (None, group_key(message)):
                    yield message
            return
        async with contextlib.aclosing(error_queue.browse(queues, self._error_queue)) as messages:
            async for message in messages:
                if group in (None, group_key(message)):
                    yield message
                number += 1
                if number == most:
                    return

    async def _error_groups(self) -> ErrorGroups:
        queues = await self._managed_queues()
        total = await queues.count(self._error_queue)
        found: dict[str, ErrorGroup] = {}
        looked_at = 0
        async with contextlib.aclosing(self._failed(None, MOST_GROUPED)) as messages:
            async for message in messages:
                looked_at += 1
                _add_to_group(found, message)
        today = self._clock.now().date()
        days = [(today - timedelta(days=back)).isoformat() for back in reversed(range(TREND))]
        groups = heapq.nlargest(len(found), found.values(), key=lambda one: (one.count, one.key))
        return ErrorGroups(self._error_queue, total, looked_at, groups, days)

    async def _errors(self, group: str | None, limit: int, offset: int) -> ErrorPage:
        whole_number("limit", limit, at_least=1)
        whole_number("offset", offset, at_least=0)
        rows: list[ErrorRow] = []
        number = 0
        async with contextlib.aclosing(self._failed(group, MOST_GROUPED)) as messages:
            async for message in messages:
                if offset <= number < offset + limit:
                    rows.append(error_row(message))
                number += 1
        more = number > offset + limit
        return ErrorPage(rows, number, offset, offset + limit if more else None)

    async def _failed_message(self, message_id: str) -> Message | None:
        queues = await self._managed_queues()
        return (await error_queue.find(queues, self._error_queue, {message_id})).get(message_id)

    async def _error(self, message_id: str, form: Form | None) -> MessageDetails | None:
        message = await self._failed_message(message_id)
        if message is None:
            return None
        headers, _ = headers_of(message)
        found = details(message, headers.get(Headers.FAILED_QUEUE, ""), None, 0, len(message.body), form)
        return replace(found, editable=editable(message))

    async def _held(
        self, transport: Transport, group: str | None, rate: float
    ) -> AsyncGenerator[error_queue.HeldMessage, None]:
        """Yield the failed messages of a group, each once: those that fail again meanwhile are left out.

        A pass keeps the messages that it has seen from others, and brokers end one that keeps them for long.
        """
        tried: set[str] = set()

        def wanted(message: Message) -> bool:
            if message.id in tried or group not in (None, group_key(message)):
                return False
            tried.add(message.id)
            return True

        while len(tried) < MOST_CHANGED:
            before, most = len(tried), max(1, min(int(rate * PASS_SECONDS), MOST_CHANGED - len(tried)))
            passing = error_queue.holding(transport, self._error_queue, wanted, most=most)
            async with contextlib.aclosing(passing) as messages:
                async for held in messages:
                    yield held
            if len(tried) - before < most:
                return

    async def _each_failed(
        self,
        action: OperatorAction,
        ids: Sequence[str],
        actor: str,
        change: Callable[[error_queue.HeldMessage], Awaitable[ActionOutcome]],
    ) -> list[ActionOutcome]:
        """Change failed messages in one pass through the error queue."""
        wanted = list(dict.fromkeys(ids))
        outcomes: dict[str, ActionOutcome] = {}

        async def work() -> None:
            found = error_queue.holding_ids(await self._opened_transport(), self._error_queue, set(wanted))
            async with contextlib.aclosing(found) as messages:
                async for held in messages:
                    try:
                        outcomes[held.message.id] = await change(held)
                    except DelaylineError as error:
                        outcomes[held.message.id] = ActionOutcome(held.message.id, done=False, text=_again(error))

        ended = await self._part((action, tuple(wanted), actor), work)
        missing = f"not in {self._error_queue} any more"
        if isinstance(ended, Unavailable):
            missing = _again(ended.reason)
        elif action is OperatorAction.EDIT:
            missing += ": nothing was sent"
        found = [outcomes.get(one) or ActionOutcome(one, done=False, text=missing) for one in wanted]
        for outcome in found:
            self._note(action, actor, outcome.id, outcome.text)
        return found

    async def _retry_by_id(self, message_id: str, *, to: str | None) -> ActionOutcome:
        message = await self._failed_message(message_id)
        if message is None:
            return ActionOutcome(message_id, done=False, text=f"not in {self._error_queue} any more")
        return await self._retry(error_queue.HeldMessage(message, None), to=to)

    async def _retry(self, held: error_queue.HeldMessage, *, to: str | None) -> ActionOutcome:
        return _of_retry(await error_queue.retry(await self._opened_transport(), self._error_queue, held, to=to))

    async def _edit(
        self, headers: Mapping[str, str], body: bytes, to: str | None, held: error_queue.HeldMessage
    ) -> ActionOutcome:
        message = held.message
        destination = to or headers_of(message)[0].get(Headers.FAILED_QUEUE)
        if not destination:
            text = f"it has no {Headers.FAILED_QUEUE} header: name the queue to send it to"
            return ActionOutcome(message.id, done=False, text=text)
        kept = headers_of(message)[0]  # a header without a value stays one: a form cannot tell it from an empty text
        same = {name: kept[name] if kept.get(name) == value else value for name, value in headers.items()}
        copy = Message(message.id, same, body).with_headers({}, without=FAILURE_HEADERS)
        transport = await self._opened_transport()
        return _of_retry(await error_queue.replace(transport, self._error_queue, held, copy, destination))

    async def _drop(self, held: error_queue.HeldMessage) -> ActionOutcome:
        removed = await error_queue.remove(await self._opened_transport(), self._error_queue, held)
        text = "deleted" if removed else f"not in {self._error_queue} any more"
        return ActionOutcome(held.message.id, done=removed, text=text)

    async def _purge(self) -> int:
        return await (await self._managed_queues()).purge(self._error_queue)

    async def _migrations(self) -> list[JobRow]:
        work = await asyncio.to_thread(pipeline.migrations)  # its import takes seconds
        return await self._look(work)

    async def _cold_tier(self) -> list[JobRow]:
        _, _, table = self._database()
        return await self._look(partial(pipeline.cold_tier, store=table))

    async def _doctor(self) -> list[Finding]:
        if self._settings is None:
            raise ConfigurationError("the doctor needs settings: give the dashboard those of this endpoint")
        self._refuse_memory(self._settings.resolved_store_url)
        self._refuse_memory(self._settings.resolved_transport_url)
        check_urls(self._settings)
        return await examine_endpoint(self._settings)

    async def _life(self, message_id: str) -> MessageLife:
        events, journal = await self._journal(message_id)
        pending: PendingRow | None = None
        failed: ErrorRow | None = None
        with contextlib.suppress(ConfigurationError):
            found = await self._find(await self._opened_store(), message_id, 0)
            pending = None if found is None else row_of(found)
        with contextlib.suppress(ConfigurationError):
            message = await self._failed_message(message_id)
            failed = None if message is None else error_row(message)
        return MessageLife(message_id, events, pending, failed, journal)

    async def _journal(self, message_id: str) -> tuple[list[LifeEvent], str | None]:
        """Return the events of a message in the journal, and why there are none where no journal is kept."""
        try:
            _, _, table = self._database()
        except ConfigurationError as error:
            return [], f"no journal is kept: {error}"
        from delayline.sql.journal import events_of

        found = await self._look(
            lambda connection, dialect, schema: events_of(connection, dialect, schema, table, message_id)
        )
        if found is None:
            return [], "no journal is kept: set journal = true and run delayline setup"
        return [LifeEvent(*one) for one in found], None


def _unavailable(error: BaseException) -> Unavailable:
    if isinstance(error, DelaylineError):
        return Unavailable(str(error), temporary=isinstance(error, BackendUnavailable))
    return Unavailable(f"it failed unexpectedly ({type(error).__name__}): see the log")


def _throughput(now: datetime, rows: Sequence[MinuteRow]) -> Throughput | Unavailable:
    """Return the rates of the last minutes."""
    rows = [row for row in rows if row.start > now - RATES_OF - 2 * ONE_MINUTE]
    if not rows:
        return Unavailable(NO_HISTORY)
    since = min(row.start for row in rows)
    seconds = max(60.0, (max(row.start for row in rows) + ONE_MINUTE - since).total_seconds())
    buckets = [0] * (len(LATENESS_BOUNDS) + 1)
    for row in rows:
        for counts in row.lateness.values():
            buckets = [one + other for one, other in zip(buckets, counts, strict=True)]
    late = Histogram(LATENESS_BOUNDS, buckets, 0.0)
    return Throughput(
        since,
        sum(row.handled for row in rows) / seconds,
        sum(row.failed for row in rows) / seconds,
        sum(row.dispatched for row in rows) / seconds,
        late.quantile(0.5),
        late.quantile(0.99),
    )


def _processes(now: datetime, rows: Sequence[MinuteRow]) -> list[ProcessState] | Unavailable:
    """Return the processes by their last rows."""
    if not rows:
        return Unavailable(NO_HISTORY)
    last = {row.process: row for row in rows}
    return [
        ProcessState(
            process=row.process,
            last_minute=row.written,
            alive=now - row.written < ALIVE,
            poller=row.poller,
            receivers=row.receivers,
            running_handlers=row.running_handlers,
            breakers=row.breakers,
            measures=row.measures,
        )
        for row in sorted(last.values(), key=lambda row: row.process)
    ]


def _one_of(name: str, value: str, known: Mapping[str, object]) -> None:
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is unknown: use one of {', '.join(known)}")


def _bar(bucket: Any, cold: int, rate: float | None, destination: str | None) -> ForecastBar:  # noqa: ANN401 - a DueBucket
    shares = Counter(bucket.destinations)
    count = bucket.count
    if destination is not None:
        count = shares[destination]
        shares = Counter({destination: count}) if count else Counter()
        cold = min(cold, count)
    named = dict(shares.most_common(NAMED_DESTINATIONS))
    rest = shares.total() - sum(named.values())
    if rest:
        named[OTHERS] = rest
    capacity = None
    if rate is not None and bucket.start is not None and bucket.end is not None:
        capacity = rate * (bucket.end - bucket.start).total_seconds()
    return ForecastBar(
        start=bucket.start,
        end=bucket.end,
        hot=count - cold,
        cold=cold,
        exact=bucket.exact,
        at_least=bucket.at_least,
        destinations=named,
        capacity=capacity,
        exceeds=capacity is not None and count > capacity,
    )


def _mover(to: datetime | None, by: timedelta | None) -> Callable[[datetime | None], datetime]:
    if (to is None) == (by is None):
        raise ConfigurationError("give the new due time, to=, or how much later, by=")
    if to is not None:
        due = in_utc(to)
        return lambda _: due
    assert by is not None  # noqa: S101 - checked above

    def moved(due: datetime | None) -> datetime:
        try:
            return (due or datetime.now(UTC)) + by
        except OverflowError as error:
            raise ConfigurationError(f"by={by} leads beyond year 9999, or before year 1") from error

    return moved


def _checks_headers(query: PendingQuery) -> bool:
    """Return whether the headers of messages have to be looked at."""
    return any((query.message_type, query.header, query.header_value))


def _checks_each(query: PendingQuery) -> bool:
    """Return whether messages have to be looked at one by one."""
    return bool(query.destination) or _checks_headers(query)


def matches(query: PendingQuery, found: FoundMessage) -> bool:
    """Return whether a message fulfils all conditions of the query; one with damaged headers has no headers."""
    message = found.message
    if query.message_id is not None and message.id != query.message_id:
        return False
    if query.destination is not None and message.destination != query.destination:
        return False
    if query.due_from is not None and message.due < query.due_from:
        return False
    if query.due_before is not None and message.due >= query.due_before:
        return False
    if not _checks_headers(query):
        return True
    headers, _ = headers_of(message.message)
    if query.message_type and query.message_type not in headers.get(Headers.ENCLOSED_MESSAGE_TYPES, ""):
        return False
    if query.header:
        value = headers.get(query.header)
        return value is not None and (not query.header_value or query.header_value in value)
    return not query.header_value or any(query.header_value in value for value in headers.values())


def describe(query: PendingQuery) -> str:
    """Return the query as a sentence, for previews and the log."""
    parts = [
        f"{name.replace('_', ' ')} {getattr(query, name)}"
        for name in PendingQuery.__slots__
        if getattr(query, name) is not None
    ]
    return "pending messages with " + ", ".join(parts) if parts else "all pending messages"


def row_of(found: FoundMessage) -> PendingRow:
    """Return a pending message as it is listed."""
    message = found.message
    headers, _ = headers_of(message.message)
    kind = message_type(headers)
    return PendingRow(message.id, message.destination, message.due, message.number_of_retries, kind, found.size)


def details(
    message: Message, destination: str, due: datetime | None, retries: int, size: int, form: Form | None = None
) -> MessageDetails:
    """Return a message with headers and body, as far as they are shown."""
    rows, damaged = header_rows(message)
    kind = message_type(headers_of(message)[0])
    return MessageDetails(
        message.id, destination, due, retries, rows, damaged, body_of(message.body, size, form), message_type=kind
    )


def group_key(message: Message) -> str:
    """Return the key of a failed message's group."""
    headers, damaged = headers_of(message)
    parts = (
        headers.get(Headers.EXCEPTION_TYPE, ""),
        place_of(headers),
        headers.get(Headers.FAILED_QUEUE, ""),
        message_type(headers),
        "damaged" if damaged else "",
    )
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def error_row(message: Message) -> ErrorRow:
    """Return a failed message as it is listed."""
    headers, damaged = headers_of(message)
    return ErrorRow(
        id=message.id,
        failed_at=wire_time(headers, Headers.TIME_OF_FAILURE),
        queue=headers.get(Headers.FAILED_QUEUE, ""),
        exception_type=headers.get(Headers.EXCEPTION_TYPE, "")[:300],
        exception_text=one_line(damaged or headers.get(Headers.EXCEPTION_MESSAGE, "")),
        message_type=message_type(headers),
        size=len(message.encoded_headers) + len(message.body),
    )


def exported(message: Message) -> Mapping[str, object]:
    """Return a message as a document for JSON."""
    headers, damaged = headers_of(message)
    document: dict[str, object] = {"id": message.id, "headers": dict(headers)}
    if damaged is not None:
        document["damaged"] = message.encoded_headers.decode("utf-8", "backslashreplace")
    try:
        return document | {"body": message.body.decode()}
    except UnicodeDecodeError:
        import base64

        return document | {"body_base64": base64.b64encode(message.body).decode()}


def _add_to_group(groups: dict[str, ErrorGroup], message: Message) -> None:
    key, row = group_key(message), error_row(message)
    headers, damaged = headers_of(message)
    group = groups.get(key)
    if group is None:
        kind = row.exception_type or ("(headers that cannot be read)" if damaged else "(unknown)")
        group = ErrorGroup(key, kind, place_of(headers), row.queue, row.message_type, 0, None, None, "", {})
    by_day = dict(group.by_day)
    if row.failed_at is not None:
        day = row.failed_at.date().isoformat()
        by_day[day] = by_day.get(day, 0) + 1
    times = [one for one in (group.first, group.last, row.failed_at) if one is not None]
    groups[key] = replace(
        group,
        count=group.count + 1,
        first=min(times, default=None),
        last=max(times, default=None),
        example=row.exception_text,
        by_day=by_day,
    )


def _outcome(message_id: str, outcome: Outcome) -> ActionOutcome:
    return ActionOutcome(message_id, outcome is Outcome.DONE, outcome.meaning)


def _again(reason: object) -> str:
    return f"{reason}: look at it again"


async def _each_of(ids: Sequence[str]) -> AsyncGenerator[str, None]:
    for message_id in ids:
        yield message_id


def _of_retry(outcome: error_queue.RetryOutcome) -> ActionOutcome:
    text = f"sent to {outcome.queue}" if outcome.problem is None else outcome.problem
    return ActionOutcome(outcome.id, outcome.problem is None, text)
