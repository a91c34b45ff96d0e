"""A queue that messages are taken from, and the tasks that handle them, up to the concurrency limit and beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import first_of
from delayline.errors import HandlerCancelled
from delayline.events import Event, emit
from delayline.receiving.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from datetime import timedelta

    from delayline.clock import Clock
    from delayline.delayed.host import DeliveryHost
    from delayline.transport import ReceivedMessage, Receiver

logger: logging.Logger = logging.getLogger(__name__)

#: How many messages that cannot be moved wait beside the handled messages, and how large they are together.
MOST_OUTSIDE: Final = 500
MOST_BYTES_OUTSIDE: Final = 64 << 20
#: Seconds until a cancelled handler that does not end is left behind.
CANCELLED_WITHIN: Final = 5.0


class MessageTasks:
    """The tasks that handle the messages of a queue.

    Args:
        queue: The queue.
        limit: How many messages are handled at once.
        clock: Measures pauses.
    """

    def __init__(self, queue: str, limit: int, clock: Clock) -> None:
        self._queue = queue
        self.limit = limit
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], float] = {}
        """The tasks, with when each has begun."""
        self._outside: dict[asyncio.Task[object], int] = {}
        """The tasks that wait outside of the limit, with the sizes of their messages."""
        self._bytes_outside = 0
        self.stopping: asyncio.Event = asyncio.Event()
        """Set when no further message is handled."""
        self.receiving: asyncio.Task[None] | None = None
        """The task that receives the messages."""
        self.on_room: Callable[[], None] = _nothing
        """Called when a task begins to wait outside of the limit."""
        self.on_end: Callable[[], None] = _nothing
        """Called when a task has ended."""
        self._gives_up = False
        """Whether the handlers that still run at a stop are cancelled."""

    @property
    def running(self) -> int:
        """How many messages are being handled."""
        return len(self._tasks) - len(self._outside)

    @property
    def oldest(self) -> float:
        """For how many seconds the oldest message has been handled, 0 for none; from any thread."""
        outside = self._outside.copy()
        began = [at for task, at in self._tasks.copy().items() if task not in outside]
        return time.monotonic() - min(began) if began else 0.0

    @property
    def free(self) -> int:
        """How many further messages may be handled; below 0 when some have come back from outside of the limit."""
        return self.limit - len(self._tasks) + len(self._outside)

    def __contains__(self, task: object) -> bool:
        return task in self._tasks

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run the work of a message in a task of its own."""
        task = asyncio.create_task(work)
        self._tasks[task] = time.monotonic()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self.on_end()
        if not task.cancelled() and (error := task.exception()) is not None:
            emit(logger, logging.ERROR, Event.RECEIVE_TASK_FAILED, "a receive task failed", exception=error)

    async def others_end(self, seconds: float) -> None:
        """Wait until the tasks of other messages have ended, except tasks outside of the limit; at most so long."""
        others = self._tasks.keys() - self._outside.keys() - {asyncio.current_task()}
        if others:
            await first_of(asyncio.wait(others), self.stopping.wait(), self._clock.sleep(seconds))

    @contextlib.contextmanager
    def outside_limit(self, received: ReceivedMessage) -> Iterator[bool]:
        """Let others be handled in this message's place, if there is room for that; return whether there is."""
        task, size = asyncio.current_task(), len(received.message.body)
        is_full = len(self._outside) >= MOST_OUTSIDE or self._bytes_outside + size > MOST_BYTES_OUTSIDE
        if task is None or is_full:
            yield False
            return
        self._outside[task] = size
        self._bytes_outside += size
        self.on_room()
        try:
            yield True
        finally:
            self._bytes_outside -= self._outside.pop(task)

    async def wait(self, pause: timedelta) -> None:
        """Wait so long, or until the stop."""
        await self.until_stopping(self._clock.sleep(pause.total_seconds()))

    async def until_stopping(self, awaited: Coroutine[None, None, object]) -> None:
        """Await this, or the stop."""
        await first_of(self.stopping.wait(), awaited)

    def failure(self, caught: Exception | asyncio.CancelledError) -> Exception | None:
        """Return what has failed, also where others have cancelled a message's task; None where the endpoint ends.

        Or its event loop, which cancels every task at its end, also the task that receives.
        """
        if not isinstance(caught, asyncio.CancelledError):
            return caught
        task, receiving = asyncio.current_task(), self.receiving
        if self._gives_up or task is None or receiving is None or receiving.cancelled() or receiving.cancelling():
            return None
        while task.cancelling():
            task.uncancel()
        failure = HandlerCancelled(
            f"the task of a message in {self._queue!r} was cancelled, and not by its endpoint: let the handler end "
            "only tasks of its own"
        )
        failure.__cause__ = caught
        return failure

    async def finish(self, grace: timedelta | None) -> None:
        """Wait for the handlers that run; after the grace period they are cancelled. None is for no limit."""
        if self._tasks and grace is not None:
            await first_of(asyncio.wait(self._tasks), self._clock.sleep(grace.total_seconds()))
            await self._cancel(grace)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _cancel(self, grace: timedelta) -> None:
        """Cancel the handlers that run, and abandon handlers that do not end then."""
        if not self._tasks:
            return
        log_text = "%d handlers of %s have not ended within %s: cancelled, their messages are handled again"
        emit(logger, logging.WARNING, Event.HANDLERS_CANCELLED, log_text, len(self._tasks), self._queue, grace)
        self._gives_up = True
        for task in self._tasks:
            task.cancel()
        await first_of(asyncio.wait(self._tasks), self._clock.sleep(CANCELLED_WITHIN))
        if self._tasks:
            log_text = "%d handlers of %s ignore their cancellation and are left behind"
            emit(logger, logging.ERROR, Event.HANDLERS_CANCELLED, log_text, len(self._tasks), self._queue)
            self._tasks.clear()


@dataclass(frozen=True, slots=True)
class Intake:
    """A queue that messages are taken from, with what all share that handle them."""

    host: DeliveryHost
    """The endpoint, and the transaction mode."""
    queue: str
    receiver: Receiver
    tasks: MessageTasks
    reports: Reports


async def open_intake(host: DeliveryHost, queue: str, concurrency: int) -> Intake:
    """Return the intake of a queue, of which so many messages are handled at once. Raises QueueNotFound."""
    receiver, tasks = await host.transport.receiver(queue), MessageTasks(queue, concurrency, host.clock)
    return Intake(host, queue, receiver, tasks, Reports(queue, host.observers.all))


def _nothing() -> None:
    """Do nothing."""
