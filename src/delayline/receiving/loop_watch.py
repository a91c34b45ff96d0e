"""Watches from a thread that event loops turn, and says what blocks a loop while it is blocked.

::

    IDLE --- a loop is watched --> WATCHING: each second a loop that has answered is asked to answer again
      ^                               |  ^
      |                               |  `---- it answers: if that was logged, so is this ----.
      `--- no loop is watched <-------+--- it has not answered for two seconds --> BLOCKED ---+
                                                      logged with its stack after 2, 4, 8 ... 60 seconds

A loop is asked by a callback, which costs microseconds a second. What blocks it in C code without releasing the
interpreter's lock blocks this thread as well, and is logged afterwards only (`execution.Watched`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import CorruptHeaders
from delayline.events import Event, emit
from delayline.message import Headers
from delayline.receiving.execution import Watched, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds between looks at the loops.
LOOKED_AT_EVERY: Final = 1.0
#: Looks without an answer until a loop counts as blocked: a look alone may fall in a moment of many other threads.
LOOKS_UNTIL_BLOCKED: Final = 2
#: The most looks between two lines about a loop that stays blocked.
MOST_LOOKS_BETWEEN_LINES: Final = 60
#: Frames that are logged, the innermost; a handler's frames say what it does.
MOST_FRAMES: Final = 12


@dataclass(slots=True)
class _WatchedLoop:
    """A loop that is watched, and what it was asked last."""

    thread: int
    """The identifier of the thread that it runs on."""
    users: int = 1
    asked: float = 0.0
    is_answered: bool = True
    unanswered: int = 0
    """Looks since it was asked."""
    line_after: int = LOOKS_UNTIL_BLOCKED
    """Looks until the next line."""
    is_logged: bool = False
    answered: float = field(default=0.0)

    def answer(self) -> None:
        """Note that the loop turns: called by the loop."""
        self.thread, self.answered, self.is_answered = threading.get_ident(), time.monotonic(), True

    def ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask the loop to answer."""
        self.asked, self.is_answered, self.is_logged = time.monotonic(), False, False
        self.unanswered, self.line_after = 0, LOOKS_UNTIL_BLOCKED
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.answer)


class LoopWatch:
    """The loops of a process that are watched, by a thread that lives as long as there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loops: dict[asyncio.AbstractEventLoop, _WatchedLoop] = {}
        self._thread: threading.Thread | None = None

    def begin(self) -> Callable[[], None]:
        """Watch the running loop; return what ends that, to be called on the loop."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if (watched := self._loops.get(loop)) is None:
                self._loops[loop] = _WatchedLoop(threading.get_ident())
            else:
                watched.users += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="delayline loop watch", daemon=True)
                self._thread.start()
        return lambda: self._end(loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            watched = self._loops.get(loop)
            if watched is None:  # a closed loop is forgotten
                return
            watched.users -= 1
            if watched.users:
                return
            del self._loops[loop]
            if self._loops:
                return
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(LOOKED_AT_EVERY)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._thread is not threading.current_thread():
                    return
                self._changed.wait(LOOKED_AT_EVERY)
                if self._thread is not threading.current_thread():
                    return
                self._loops = {loop: each for loop, each in self._loops.items() if not loop.is_closed()}
                loops = list(self._loops.items())
            for loop, watched in loops:
                _look(loop, watched)


def _look(loop: asyncio.AbstractEventLoop, watched: _WatchedLoop) -> None:
    """Ask the loop to answer; of a loop that does not, say what blocks it."""
    if watched.is_answered:
        if watched.is_logged:
            seconds = watched.answered - watched.asked
            emit(logger, logging.INFO, Event.LOOP_TURNS, "The event loop turns again, after %.0f s.", seconds)
        watched.ask(loop)
        return
    if not loop.is_running():  # as between two calls of run_until_complete
        return
    watched.unanswered += 1
    frame = sys._current_frames().get(watched.thread)
    if watched.unanswered >= watched.line_after and frame is not None:
        watched.line_after += min(watched.line_after, MOST_LOOKS_BETWEEN_LINES)
        watched.is_logged = True
        _log_blocked(frame, time.monotonic() - watched.asked)


def _log_blocked(frame: FrameType, seconds: float) -> None:
    """Say for how long a loop has been blocked, and what its thread does."""
    inner, handling = _within_handler(_frames_from(frame))
    stack = "".join(traceback.format_list(traceback.StackSummary.extract((each, each.f_lineno) for each in inner)))
    by, facts = _blocker(handling)
    text = "The event loop has been blocked for %.0f s%s. Nothing else runs meanwhile. Its thread is at:\n%s"
    emit(logger, logging.WARNING, Event.LOOP_STUCK, text, seconds, by, stack.rstrip("\n"), **facts)


def _frames_from(frame: FrameType | None) -> Sequence[FrameType]:
    """Return the frames of a thread, the outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _within_handler(frames: Sequence[FrameType]) -> tuple[Sequence[FrameType], Watched | None]:
    """Return the innermost frames, of a handler's step those from the handler on; and that step."""
    code = Watched.__await__.__code__
    for number in range(len(frames) - 1, -1, -1):
        if frames[number].f_code is code:
            handling = frames[number].f_locals.get("self")
            inner = frames[number + 1 :] or frames[number:]
            return inner[-MOST_FRAMES:], handling if isinstance(handling, Watched) else None
    return frames[-MOST_FRAMES:], None


def _blocker(handling: Watched | None) -> tuple[str, dict[str, Any]]:
    """Return which handler blocks the loop, as words and as facts."""
    if handling is None:
        return "", {}
    message, name, kind = handling.message, name_of(handling.function), ""
    with contextlib.suppress(CorruptHeaders):
        kind = message.headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")
    words = f" by handler {name} with message {message.id}" + (f" of type {kind}" if kind else "")
    return words, {"message": message, "handler": name}


_watch = LoopWatch()


def watch_running_loop() -> Callable[[], None]:
    """Watch the running loop until the returned function is called, on that loop."""
    return _watch.begin()


def _begin_anew() -> None:
    """In a child process the thread and the loops are the parent's."""
    global _watch
    _watch = LoopWatch()


os.register_at_fork(after_in_child=_begin_anew)
