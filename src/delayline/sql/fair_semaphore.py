"""A lane lets so many in at a time, in the order they came: one writer of a file, some transactions of a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

from delayline.transaction import WAITING_TASK


class FairSemaphore:
    """Lets `width` callers in at a time, in order, from any event loop, without blocking a thread."""

    def __init__(self, width: int = 1) -> None:
        self._lock = threading.Lock()
        self._width = width
        self._free = width
        self._holder: asyncio.Task[object] | None = None  # known where there is only one
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for the turn. Cancelling gives it up. Raises RuntimeError for a task that would wait for itself."""
        task = asyncio.current_task()
        with self._lock:
            if self._free:
                self._free -= 1
                self._holds(task)
                return
            if self._holder is not None and self._holder in {task, WAITING_TASK.get()}:
                raise RuntimeError("this task is in a transaction on the same database: pass it on, or end it first")
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.leave()
            raise
        self._holds(task)

    def leave(self) -> None:
        """Let the next one in."""
        with self._lock:
            self._holder = None
            while self._waiting:
                turn = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # that loop is closed
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                    return
            self._free += 1

    def _holds(self, task: asyncio.Task[object] | None) -> None:
        if self._width == 1:
            self._holder = task


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
