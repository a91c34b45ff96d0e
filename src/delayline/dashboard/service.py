"""The dashboard's view of an endpoint: a part for each page, over the same back ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.clock import SystemClock
from delayline.dashboard.actions import Actions
from delayline.dashboard.back_ends import BackEnds
from delayline.dashboard.errors import FailedMessages
from delayline.dashboard.finding import MessageFinder
from delayline.dashboard.jobs import PipelineJobs
from delayline.dashboard.levels import DelayLevels
from delayline.dashboard.life import MessageLives
from delayline.dashboard.overview import Overview
from delayline.dashboard.pauses import PausedDispatching
from delayline.dashboard.pending import PendingMessages
from delayline.dashboard.queues import LimitedQueues
from delayline.dashboard.schedules import RecurringMessages
from delayline.dashboard.search import PendingSearch

if TYPE_CHECKING:
    from delayline.clock import Clock
    from delayline.endpoint import Endpoint
    from delayline.settings import Settings

#: Seconds that a part of a page may take.
TIME_LIMIT: Final = 5.0
#: Seconds that a search or a preview may look through message by message.
SEARCH_TIME: Final = 0.1


class EndpointService:
    """An endpoint, as the dashboard shows it and acts on it. Used by a single event loop.

    Args:
        source: The endpoint's settings, of which the service opens its own transport and store; or an endpoint of this
            process, whose transport and store are used while it is started.
        time_limit: Seconds that each part of a page may take.
        search_time: Seconds that a search or a preview may look through message by message.
        clock: Clock for overdue messages where the store has none.

    Example:
        ```python
        async with EndpointService(load_settings()) as service:
            print((await service.overview.now()).due)
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
        back_ends = BackEnds(source, time_limit, clock or SystemClock())
        self.back_ends: BackEnds = back_ends
        self.name: str = back_ends.name
        self.actions: Actions = Actions(back_ends)
        self.levels: DelayLevels = DelayLevels(back_ends)
        self.overview: Overview = Overview(back_ends, self.levels)
        self.search: PendingSearch = PendingSearch(back_ends, search_time)
        self.pending: PendingMessages = PendingMessages(self.search, self.actions)
        self.errors: FailedMessages = FailedMessages(back_ends, self.actions, search_time)
        self.find: MessageFinder = MessageFinder(back_ends)
        self.life: MessageLives = MessageLives(self.search, self.errors, self.find)
        self.schedules: RecurringMessages = RecurringMessages(back_ends, self.actions)
        self.pauses: PausedDispatching = PausedDispatching(back_ends, self.actions)
        self.queues: LimitedQueues = LimitedQueues(back_ends, self.actions)
        self.jobs: PipelineJobs = PipelineJobs(back_ends, self.actions)

    async def __aenter__(self) -> EndpointService:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the jobs, and disconnect."""
        await self.back_ends.close([*self.actions.tasks(), *self.errors.tasks()])
