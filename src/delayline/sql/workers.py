"""Worker threads for SQL, awaited from any event loop, and a semaphore that serves tasks of several loops in order.

A ThreadPoolExecutor costs twice as much per call, and the call is the largest part of a short transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayline.errors import DelaylineError, NotStarted
from delayline.events import Event, emit
from delayline.sql.deadlines import FACTOR
from delayline.transaction import WAITING_TASK

if TYPE_CHECKING:
    from collections.abc import Callable


logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Workers:
    """Threads that run work in the order it was given; a single thread runs it strictly in turn."""

    def __init__(self, name: str, number: int) -> None:
        self._jobs: SimpleQueue[WorkItem[Any] | BackgroundTask | None] = SimpleQueue()
        self._stopped = False
        self._stopping = threading.Lock()
        self._under_way: set[WorkItem[Any]] = set()
        self._at_work = [threading.Lock() for _ in range(number)]
        self._threads = [
            threading.Thread(target=self._run, args=(at_work,), name=name, daemon=True) for at_work in self._at_work
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` to its end and return or raise its result. Raises NotStarted once stopped.

        Cancellation does not interrupt the work: CancelledError is raised when its effect is certain.
        """
        factor = FACTOR.get()
        if factor != 1:
            work = partial(copy_context().run, work)
        job: WorkItem[Result] = WorkItem(work, asyncio.get_running_loop().create_future())
        job.factor = factor
        with self._stopping:
            if self._stopped:
                raise NotStarted("the database was closed meanwhile: start the endpoint first")
            self._under_way.add(job)
            self._jobs.put(job)
        try:
            return await job.end()
        finally:
            self._under_way.discard(job)

    def spawn(self, work: Callable[[], object]) -> bool:
        """Schedule `work` without waiting; exceptions are logged. Returns False once stopped, and does nothing."""
        with self._stopping:
            if self._stopped:
                return False
            self._jobs.put(BackgroundTask(work))
            return True

    def abandon(self, is_overdue: Callable[[float], bool], error: Exception) -> None:
        """Fail the work that was given at an overdue time, begun or not; its threads end it when they can.

        Args:
            is_overdue: Whether work given at that time, by `time.monotonic`, is not waited for any more.
            error: The exception for its callers.
        """
        for job in self.under_way():
            if is_overdue(job.given):
                job.give_up(error)

    def under_way(self) -> list[WorkItem[Any]]:
        """Return the work that is awaited, begun or not; from any thread."""
        while True:
            with contextlib.suppress(RuntimeError):  # it changes meanwhile
                return list(self._under_way)

    def stop(self, patience: Callable[[], float] | None = None) -> None:
        """Finish scheduled work and end the threads; blocks.

        Args:
            patience: Returns the seconds left to wait for the threads, each of which ends later on its own; by
                default all are waited for.
        """
        with self._stopping:  # work scheduled after the threads' end would never be answered
            self._stopped = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(None if patience is None else patience())

    def pause(self) -> None:
        """Wait until no thread is at work, and let none begin before `resume`; blocks."""
        for at_work in self._at_work:
            at_work.acquire()

    def resume(self) -> None:
        """End a pause."""
        for at_work in self._at_work:
            at_work.release()

    def _run(self, at_work: threading.Lock) -> None:
        while (job := self._jobs.get()) is not None:
            with at_work:
                job.run()


class BackgroundTask:
    """A background work item without a result."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def run(self) -> None:
        """Do the work, on a worker thread."""
        try:
            self._work()
        except DelaylineError as error:  # a fault of the server, which its other users report
            emit(logger, logging.DEBUG, Event.BACKGROUND_TASK_FAILED, "Not done now: %s", error)
        except Exception as error:
            emit(
                logger,
                logging.ERROR,
                Event.BACKGROUND_TASK_FAILED,
                "Work in the background failed: %r",
                error,
                exception=error,
            )


class WorkResult(Generic[Result]):
    """The result of a work item whose effect is certain only once it is done."""

    __slots__ = ("afterwards", "finished", "outcome")

    def __init__(self, outcome: asyncio.Future[Result]) -> None:
        self.outcome: asyncio.Future[Result] = outcome
        self.finished: bool = False
        self.afterwards: asyncio.Future[None] | None = None

    async def end(self) -> Result:
        """Wait for the answer and return or raise it; cancelled, raise that when it has come."""
        try:
            return await self.outcome
        except asyncio.CancelledError:
            while not self.finished:
                self.afterwards = asyncio.get_running_loop().create_future()
                with contextlib.suppress(asyncio.CancelledError):  # cancelled again: the effect is still uncertain
                    await asyncio.wait([self.afterwards])
            raise

    def finish(self, result: Any, error: BaseException | None) -> None:  # noqa: ANN401
        """Set the result on the event loop of the waiting task; only the first counts."""
        if self.finished:
            return
        self.finished = True
        if not self.outcome.done():
            if error is None:
                self.outcome.set_result(result)
            else:
                self.outcome.set_exception(error)
        if self.afterwards is not None and not self.afterwards.done():
            self.afterwards.set_result(None)


class WorkItem(WorkResult[Result]):
    """A piece of work and the future that waits for it."""

    __slots__ = ("begun", "factor", "given", "reported", "task", "work")

    def __init__(self, work: Callable[[], Result], outcome: asyncio.Future[Result]) -> None:
        super().__init__(outcome)
        self.work: Callable[[], Result] = work
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.given: float = time.monotonic()
        self.begun: float | None = None
        self.factor: int = 1
        """By how much the limit of its waits is multiplied."""
        self.reported: bool = False

    def give_up(self, error: Exception) -> None:
        """Answer with the error instead of the work's outcome; from any thread."""
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nothing waits
            self.outcome.get_loop().call_soon_threadsafe(self.finish, None, error)

    def run(self) -> None:
        """Do the work, on a worker thread, unless it was given up."""
        if self.finished:
            return
        self.begun = time.monotonic()
        _at_work.item = self
        result: Result | None = None
        failure: BaseException | None = None
        try:
            result = self.work()
        except BaseException as error:
            failure = error  # the awaiting caller gets any exception
        finally:
            _at_work.item = None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.outcome.get_loop().call_soon_threadsafe(self.finish, result, failure)


_at_work = threading.local()


def is_given_up() -> bool:
    """Return whether nobody waits any more for the work that this thread runs."""
    item: WorkItem[Any] | None = getattr(_at_work, "item", None)
    return item is not None and item.finished


def start_thread(work: Callable[[], Result]) -> tuple[threading.Thread, asyncio.Future[Result]]:
    """Start `work` on a dedicated daemon thread; return its future result."""
    job: WorkItem[Result] = WorkItem(work, asyncio.get_running_loop().create_future())
    thread = threading.Thread(target=job.run, name="delayline caller", daemon=True)
    thread.start()
    return thread, job.outcome


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run `work` to its end on a dedicated thread, for work that may wait for other work of its kind."""
    job: WorkItem[Result] = WorkItem(work, asyncio.get_running_loop().create_future())
    thread = threading.Thread(target=job.run, name="delayline caller", daemon=True)
    thread.start()
    try:
        return await job.end()
    finally:
        if job.finished:
            thread.join()  # it has nothing left to do


class FairSemaphore:
    """Lets `width` callers in at a time, in order, from any event loop, without blocking a thread."""

    def __init__(self, width: int = 1) -> None:
        self._lock = threading.Lock()
        self._width = width
        self._free = width
        self._holder: asyncio.Task[object] | None = None  # known where there is no second
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for a permit; cancelling gives it up. Raises RuntimeError for a task that would wait for itself."""
        task = asyncio.current_task()
        with self._lock:
            if self._free:
                self._free -= 1
                self._holds(task)
                return
            if self._holder is not None and self._holder in {task, WAITING_TASK.get()}:
                raise RuntimeError("this task is in a transaction on the same database: pass it on, or end it first")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                    raise
            self.leave()
            raise
        self._holds(task)

    def leave(self) -> None:
        """Let the next in."""
        with self._lock:
            self._holder = None
            while self._waiting:
                waiter = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # that loop is closed
                    waiter.get_loop().call_soon_threadsafe(_grant, waiter)
                    return
            self._free += 1

    def _holds(self, task: asyncio.Task[object] | None) -> None:
        if self._width == 1:
            self._holder = task


def _grant(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
