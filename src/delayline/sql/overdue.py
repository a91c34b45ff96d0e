"""Work on a database that does not come back: it is reported, and after a while given up."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import BackendUnavailable
from delayline.events import Event, emit
from delayline.sql.deadlines import ABANDONED_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.sql.dialect import Connections
    from delayline.sql.workers import Workers, WorkItem

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds in which a connection is tried and replaced before the wait for an answer begins.
CONNECTING: Final = 15.0
REPORT: Final = (
    "%s has waited %.0f s for %s, longer than an answer may take: if the server is alive, report this with the text of "
    "`py-spy dump` (logged once for each wait)"
)


class OverdueWork:
    """Limits how long anything waits for work of a server's threads, beyond the limits of each answer.

    Args:
        connections: The connections to the server.
        pools: The threads.
    """

    def __init__(self, connections: Connections, pools: Sequence[Workers]) -> None:
        self._connections = connections
        self._pools = pools

    @property
    def limit(self) -> float:
        """Seconds that an answer may take."""
        return self._connections.server_timeout

    def end_overdue(self, now: float) -> None:
        """Report work that is overdue, and give it up when it is that for as long again."""
        if self._connections.stops.at is not None:
            return  # a stop has its own limits
        for pool in self._pools:
            under_way = pool.under_way()
            longest = max((self.limit * item.factor for item in under_way if item.begun is not None), default=0.0)
            for item in under_way:
                self._look(item, now, longest)

    def _look(self, item: WorkItem[Any], now: float, longest: float) -> None:
        """Look at a piece of work; `longest`: what the work of the threads may take, for which others wait."""
        since = item.given if item.begun is None else item.begun
        allowed = self.limit * item.factor + (longest if item.begun is None else 0.0)
        if now - since > allowed and not item.reported:
            item.reported = True
            name = "a task" if item.task is None else f"task {item.task.get_name()!r}"
            emit(logger, logging.WARNING, Event.WORK_OVERDUE, REPORT, name, now - since, self._connections)
        if now - since > 2 * allowed + CONNECTING:
            item.give_up(
                BackendUnavailable(
                    f"no answer from {self._connections} within {now - since:.0f} s. The statement may have taken "
                    "effect: check whether the data was written before repeating it"
                )
            )


class Stops:
    """Limits the waits for a server while endpoints stop, and fails work that cannot be cut short.

    Resolving a name and connecting are such waits, and drivers without a socket that can be reached.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._abandoning: threading.Thread | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()

    def begin(self, pools: Callable[[], Sequence[Workers]]) -> None:
        """Limit the waits from now on; needs an `end`.

        Args:
            pools: Returns the threads whose work is failed.
        """
        with self._lock:
            self._connections.stops.begin()
            if self._abandoning is None:
                self._over.clear()
                self._abandoning = threading.Thread(
                    target=self._abandon, args=[pools], name="delayline stop", daemon=True
                )
                self._abandoning.start()

    def end(self) -> None:
        """Go back to the usual limits, unless another stop is under way."""
        with self._lock:
            self._connections.stops.end()
            if self._connections.stops.at is None and self._abandoning is not None:
                self._over.set()
                self._abandoning.join()
                self._abandoning = None

    def _abandon(self, pools: Callable[[], Sequence[Workers]]) -> None:
        stops = self._connections.stops
        error = BackendUnavailable(
            f"{self._connections} has not answered before its endpoint stopped. The statement may have taken effect: "
            "check whether the data was written before repeating it"
        )

        def is_overdue(given: float) -> bool:
            return stops.end_of(math.inf, given) < time.monotonic() - ABANDONED_AFTER

        while not self._over.wait(ABANDONED_AFTER / 8):
            for workers in pools():
                workers.abandon(is_overdue, error)
