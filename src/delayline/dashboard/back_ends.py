"""An endpoint's back ends, as the dashboard opens and asks them.

Each part of a page has a separate time limit, and is `Unavailable` with its reason where a back end lacks it,
refuses, or does not answer. Work that outlives its limit goes on in the background; the same question joins it instead
of asking again, so that a slow back end is asked once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from delayline import error_queue
from delayline.backends import backend_of
from delayline.dashboard.model import Unavailable
from delayline.delayed.delivery import management_of
from delayline.delayed.store import SupportsClock, SupportsManagement
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.events import Event, emit
from delayline.masking import masked
from delayline.opening import open_pending, open_transport
from delayline.settings import Settings

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.delayed.delivery import DelayedDelivery
    from delayline.endpoint import Endpoint
    from delayline.sql.store import SqlDelayedMessageStore
    from delayline.transport import SupportsQueueManagement, Transport

logger: logging.Logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Parameters = ParamSpec("Parameters")
PageType = TypeVar("PageType", bound="PageQueries")

#: Questions that may be unanswered at a time, past their limit or not.
MOST_UNANSWERED: Final = 24


class BackEnds:
    """The transport and the store of an endpoint, opened when first asked for. Used by a single event loop.

    Args:
        source: The endpoint's settings, of which transport and store are opened; or an endpoint of this process, whose
            transport and store are used while it is started.
        time_limit: Seconds that each question may take.
        clock: Clock where the store has none.
    """

    def __init__(self, source: Settings | Endpoint, time_limit: float, clock: Clock) -> None:
        self.settings: Settings | None = source if isinstance(source, Settings) else None
        self._endpoint = None if isinstance(source, Settings) else source
        self.name: str = source.named_endpoint if isinstance(source, Settings) else source.name
        self.error_queue: str = source.error_queue
        self.inbox_window: timedelta | None = _inbox_window(source)
        """How long the endpoint's inbox keeps records; None without an inbox."""
        self.clock = clock
        self._time_limit = time_limit
        self._transport: Transport | None = None
        self._store: object = None
        self._closing = contextlib.AsyncExitStack()
        self._opening_store, self._opening_transport = asyncio.Lock(), asyncio.Lock()
        self._unanswered: dict[object, asyncio.Task[Any]] = {}

    async def close(self, jobs: Sequence[asyncio.Task[None]]) -> None:
        """Stop the jobs, give up what is unanswered, and disconnect."""
        tasks = [*jobs, *self._unanswered.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._time_limit)
        self._store = self._transport = None
        await self._closing.aclose()

    @property
    def delivery(self) -> DelayedDelivery | None:
        """The delayed delivery of an endpoint of this process; None for settings, and without any."""
        return None if self._endpoint is None else self._endpoint.delayed_delivery

    @property
    def delayed_at(self) -> str:
        """Where delayed messages are: a URL without passwords, or the class of the store."""
        if self.settings is not None:
            return masked(self.settings.resolved_store_url)
        store = None if self._endpoint is None else self._endpoint.store
        return "nowhere" if store is None else type(store).__name__

    async def ask(self, key: object, work: Callable[[], Awaitable[Value]]) -> Value | Unavailable:
        """Return the result of the work, or why there is none within the time limit."""
        task = self._unanswered.get(key)
        if task is None:
            if len(self._unanswered) >= MOST_UNANSWERED:
                return Unavailable("the back end leaves too many questions unanswered: try again", temporary=True)
            task = self._unanswered[key] = asyncio.ensure_future(work())
            task.add_done_callback(partial(self._answered, key))
        done, _ = await asyncio.wait([task], timeout=self._time_limit)
        if not done:
            return Unavailable(f"no answer within {self._time_limit:g} s", temporary=True)
        if task.cancelled():
            return Unavailable("the dashboard stops", temporary=True)
        error = task.exception()
        return cast("Value", task.result()) if error is None else unavailable(error)

    def _answered(self, key: object, task: asyncio.Task[Any]) -> None:
        self._unanswered.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, DelaylineError):
            template = "A part of the dashboard of endpoint %s failed"
            emit(logger, logging.ERROR, Event.DASHBOARD_FAILED, template, self.name, exception=error)

    async def store(self) -> object:
        """Return the open store or persister; raises ConfigurationError with the reason if there is none."""
        if self.settings is None:
            delivery = None if self._endpoint is None else self._endpoint.delayed_delivery
            if delivery is None:
                raise ConfigurationError("the endpoint has no delayed delivery, and so no pending messages")
            self._started()
            return management_of(delivery)
        async with self._opening_store:
            if self._store is None:
                refuse_memory(self.settings.resolved_store_url)
                self._store = await self._closing.enter_async_context(open_pending(self.settings))
            return self._store

    async def managed_store(self) -> SupportsManagement:
        """Return the open store if its messages can be listed and changed."""
        store = await self.store()
        if not isinstance(store, SupportsManagement):
            raise ConfigurationError(f"{type(store).__name__} cannot list, cancel or reschedule messages")
        return store

    async def transport(self) -> Transport:
        """Return the open transport."""
        if self.settings is None:
            return self._started().transport
        async with self._opening_transport:
            if self._transport is None:
                refuse_memory(self.settings.resolved_transport_url)
                self._transport = await self._closing.enter_async_context(open_transport(self.settings))
            return self._transport

    async def queues(self) -> SupportsQueueManagement:
        """Return the open transport if its queues can be counted and browsed."""
        return error_queue.managed_queues(await self.transport())

    async def store_clock(self) -> Clock:
        """Return the store's clock, the machines' clocks may differ."""
        store = await self.store()
        return store.clock() if isinstance(store, SupportsClock) else self.clock

    async def time(self) -> datetime:
        """Return the present time on the store's clock."""
        return (await self.store_clock()).now()

    def sql_store(self, kept: str) -> SqlDelayedMessageStore:
        """Return the store if it has tables, open or not; raises ConfigurationError if it has none.

        Args:
            kept: What would be in the tables, for the error: `journals are`.
        """
        if self.settings is None:
            store = None if self._endpoint is None else self._endpoint.store
            from delayline.sql.store import SqlDelayedMessageStore

            if isinstance(store, SqlDelayedMessageStore):
                return store
        elif (backend := backend_of(self.settings.resolved_store_url)).has_tables:
            from delayline.sql.store import SqlDelayedMessageStore

            backend.must_exist(self.settings.resolved_store_url)
            return SqlDelayedMessageStore(
                self.settings.resolved_store_url, table_name=self.settings.table_name, schema=self.settings.schema
            )
        where = self.delayed_at if self.settings is None else f"{backend_of(self.settings.resolved_store_url).scheme}:"
        raise ConfigurationError(f"{kept} kept in SQL databases only, not in {where}")

    def _started(self) -> Endpoint:
        assert self._endpoint is not None  # noqa: S101 - endpoint or settings
        if not self._endpoint.started:
            raise BackendUnavailable(f"endpoint {self.name!r} is not started in this process")
        return self._endpoint


class PageQueries:
    """What a page asks of the back ends."""

    def __init__(self, back_ends: BackEnds) -> None:
        self.back_ends = back_ends


def within_limit(
    method: Callable[Concatenate[PageType, Parameters], Awaitable[Value]],
) -> Callable[Concatenate[PageType, Parameters], Coroutine[Any, Any, Value | Unavailable]]:
    """Have a question answered within the time limit, or `Unavailable`; the same question joins an open one."""

    @wraps(method)
    async def asked(self: PageType, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Value | Unavailable:
        key = (method, args, tuple(sorted(kwargs.items())))
        return await self.back_ends.ask(key, partial(method, self, *args, **kwargs))

    return asked


def unavailable(error: BaseException) -> Unavailable:
    """Return the reason why a part cannot be shown."""
    if isinstance(error, DelaylineError):
        return Unavailable(str(error), temporary=isinstance(error, BackendUnavailable))
    return Unavailable(f"it failed unexpectedly ({type(error).__name__}): see the log")


def refuse_memory(url: str) -> None:
    """Raise ConfigurationError for messages in the memory of another process."""
    if backend_of(url).in_process:
        raise ConfigurationError(
            f"{masked(url)!r} is the memory of the endpoint's own process: mount the dashboard there, or use a file"
        )


def _inbox_window(source: Settings | Endpoint) -> timedelta | None:
    if isinstance(source, Settings):
        return source.inbox_window
    return None if source.inbox is None else source.inbox.window
