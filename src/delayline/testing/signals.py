"""Wait for what happens instead of sleeping: follows the events on delayline's log records."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Self

from delayline.events import LOGGER_NAME, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    Condition = Callable[[logging.LogRecord], bool]


class Signals:
    """Collects delayline's events while entered with `with`; without cost in production.

    Records may come from any thread; `wait_for` belongs to an event loop. The subjects of a record are in its `facts`,
    a dict: `signals.records(Event.FETCHED)[0].facts["messages"]`.
    """

    def __init__(self) -> None:
        self._records: list[logging.LogRecord] = []
        self._watchers: list[Condition] = []
        self._lock = threading.Lock()
        self._collector = _Collector(self._collect)
        self._level = logging.NOTSET

    def __enter__(self) -> Self:
        logger = logging.getLogger(LOGGER_NAME)
        self._level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self._collector)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger = logging.getLogger(LOGGER_NAME)
        logger.removeHandler(self._collector)
        logger.setLevel(self._level)

    def records(self, event: Event, where: Condition | None = None) -> Sequence[logging.LogRecord]:
        """Return the log records of an event so far, oldest first.

        Args:
            event: The event.
            where: A condition on a log record; by default all are returned.
        """
        with self._lock:
            return [record for record in self._records if _matches(record, event, where)]

    def count(self, event: Event, where: Condition | None = None) -> int:
        """Return how often an event has happened so far.

        Args:
            event: The event.
            where: A condition on its log record; by default all count.
        """
        return len(self.records(event, where))

    async def wait_for(
        self, event: Event, count: int = 1, *, timeout: float = 10, where: Condition | None = None
    ) -> Sequence[logging.LogRecord]:
        """Return the records of `event` once it has happened `count` times since `with`.

        Args:
            event: The event to wait for.
            count: How often it has to happen.
            timeout: Real seconds, for a test that would hang otherwise.
            where: Counts only records for which it returns True.

        Raises:
            TimeoutError: It did not happen often enough in time.
        """
        loop, enough = asyncio.get_running_loop(), asyncio.Event()
        seen = 0

        def watch(record: logging.LogRecord) -> bool:
            nonlocal seen
            seen += _matches(record, event, where)
            if seen >= count:
                loop.call_soon_threadsafe(enough.set)
            return seen >= count

        with self._lock:
            if not any(watch(record) for record in self._records):
                self._watchers.append(watch)
        try:
            async with asyncio.timeout(timeout):
                await enough.wait()
        except TimeoutError as error:
            raise TimeoutError(f"{event} happened {seen} times, not {count}, within {timeout} s") from error
        finally:
            with self._lock:
                self._watchers = [watcher for watcher in self._watchers if watcher is not watch]
        return self.records(event, where)

    def _collect(self, record: logging.LogRecord) -> None:
        with self._lock:
            self._records.append(record)
            self._watchers = [watcher for watcher in self._watchers if not watcher(record)]


class _Collector(logging.Handler):
    def __init__(self, collect: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.DEBUG)
        self._collect = collect

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "event"):
            self._collect(record)


def _matches(record: logging.LogRecord, event: Event, where: Condition | None) -> bool:
    return getattr(record, "event", None) == event and (where is None or where(record))
