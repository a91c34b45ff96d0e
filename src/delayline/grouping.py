"""Groups: work on many items at once, such as a single commit for many messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.transaction import WAITING_TASK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

#: The log text for an item whose send was cancelled, and that failed afterwards.
ABANDONED: Final = "The cancelled send of message %s has failed: %s"

Item = TypeVar("Item")
Result = TypeVar("Result")


class Uncancelled(asyncio.Future[Any]):
    """A future that goes on when the task that waits for it is cancelled; the task is cancelled at its end."""

    grouping: Grouping[Any, Any]

    def cancel(self, msg: object = None) -> bool:
        """Return False: the task keeps the cancellation until the future has ended."""
        del msg
        self.grouping.watch()
        return False


class Grouping(Generic[Item, Result]):
    """Runs work on groups of items: items that arrive while a group is at work form the next group.

    Nothing is delayed to make a group larger. If a group fails, each of its items is tried alone, so that a bad item
    does not fail the others; if the back end is unavailable or unusable, the group fails as a whole. Belongs to an
    event loop.

    Args:
        work: Runs on a group and returns a result for each item, in order, or an exception for an item that failed by
            itself. All or none of its effects happen.
        maximum: The most items in a group; 1 or more.
        at_once: How many groups may be at work at the same time; 1 or more.
        abandoned: Called with the error of an item whose caller was cancelled.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]],
        *,
        maximum: int,
        at_once: int = 1,
        abandoned: Callable[[Item, Exception], None] | None = None,
    ) -> None:
        self._work = work
        self._maximum = maximum
        self._at_once = at_once
        self._abandoned = abandoned
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, item: Item) -> asyncio.Future[Result]:
        """Return the item's result, or raise its error, when awaited.

        If cancelled, that returns at once; the item is worked on all the same.
        """
        return self._add(item, asyncio.get_running_loop().create_future())

    def run_to_end(self, item: Item) -> asyncio.Future[Result]:
        """Like `run`; if cancelled, it raises CancelledError once the work on the item has ended."""
        done = Uncancelled()
        done.grouping = self
        return self._add(item, done)

    def watch(self) -> None:
        """End the waiting for tasks that are cancelled before their first step, as at the end of an event loop."""
        for task in self._tasks:
            task.add_done_callback(self._forget)

    def _add(self, item: Item, done: asyncio.Future[Result]) -> asyncio.Future[Result]:
        self._waiting.append((item, done))
        if len(self._tasks) < self._at_once:
            loop = done.get_loop()
            task = loop.create_task(self._run(asyncio.current_task(loop)), name="delayline group")
            self._tasks.add(task)
        return done

    async def stop(self) -> None:
        """Wait until the work on every item has ended."""
        while self._tasks:
            ended, _ = await asyncio.wait(self._tasks)
            for task in ended:
                self._forget(task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Cancel what waits for a task that has ended without having begun: one that has begun does so itself."""
        if task in self._tasks:
            self._tasks.discard(task)
            if not self._tasks:
                waiting, self._waiting = self._waiting, []
                for _, done in waiting:
                    asyncio.Future.cancel(done)

    async def _run(self, caller: asyncio.Task[Any] | None) -> None:
        WAITING_TASK.set(caller)
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                if len(group) > self._maximum:
                    group, self._waiting = group[: self._maximum], group[self._maximum :]
                await self._run_group(group)
        except BaseException:
            for _, done in self._waiting:
                asyncio.Future.cancel(done)
            self._waiting = []
            raise
        finally:
            self._tasks.discard(asyncio.current_task())

    async def _run_group(self, group: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._work([item for item, _ in group])
        except Exception as error:
            if len(group) == 1 or isinstance(error, BackendUnavailable | BackendUnusable):
                for item, done in group:
                    self._fail(item, done, error)
                return
            for member in group:
                await self._run_group([member])
        except BaseException:
            for _, done in group:
                asyncio.Future.cancel(done)
            raise
        else:
            for (item, done), result in zip(group, results, strict=True):
                self._answer(item, done, result)

    def _answer(self, item: Item, done: asyncio.Future[Result], result: Result | Exception) -> None:
        if isinstance(result, Exception):
            self._fail(item, done, result)
        elif not done.done():
            done.set_result(result)

    def _fail(self, item: Item, done: asyncio.Future[Result], error: Exception) -> None:
        if not done.done():
            done.set_exception(error)
        elif self._abandoned is not None:
            self._abandoned(item, error)
