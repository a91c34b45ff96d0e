"""Polling for idle receivers: one query for all their queues finds messages without a notification.

An endpoint with a timeout manager has three receivers, and should cost no more when idle than one with a single
receiver.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayline.sql.database import Database
    from delayline.sql.statements import QueueStatements


class IdleQueues:
    """Wakes receivers of one transport whose queues are not empty. Belongs to one event loop.

    interval: how often it looks, in seconds.
    """

    def __init__(self, database: Database, statements: QueueStatements, interval: float) -> None:
        self._database = database
        self._statements = statements
        self._interval = interval
        self._waiting: dict[asyncio.Event, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, queue: str, news: asyncio.Event) -> None:
        """Return when the event is set: by others, or because it is time to look into the queue."""
        self._waiting[news] = queue
        self._set_timer()
        try:
            await news.wait()
        finally:
            self._waiting.pop(news, None)
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and self._looking is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        if len(self._waiting) == 1:
            self._wake(set(self._waiting.values()))  # whose own look is the one
        else:
            self._looking = asyncio.create_task(self._look(), name="delayline idle queues")

    async def _look(self) -> None:
        names = set(self._waiting.values())
        try:
            rows = await self._database.read(partial(self._statements.filled.rows_each, keys=list(names)))
            names = {name for (name,) in rows}
        except Exception:  # noqa: S110 - each looks for itself, and reports what it sees
            pass
        finally:
            self._looking = None
        self._wake(names)
        self._set_timer()

    def _wake(self, names: set[str]) -> None:
        for news, queue in self._waiting.items():
            if queue in names:
                news.set()
