"""Limits on waits for a server's answer: a connection whose answer is overdue is shut down, so that its driver raises.

Drivers block in system calls that no other thread can interrupt, and their own options (TCP settings, statement
timeouts) have no effect when the server's process is stopped. A thread per process watches all waits and shuts down
the sockets of overdue waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

CoroutineFunction = TypeVar("CoroutineFunction", bound="Callable[..., Coroutine[Any, Any, Any]]")

SERVER_TIMEOUT: Final = 15.0  # seconds
LONGEST_TIMEOUT: Final = 3600.0  # seconds
LOCK_TIMEOUT: Final = 10.0  # seconds a statement waits for a lock: less than `SERVER_TIMEOUT`, to distinguish the two
LONG_WORK: Final = 10  # times as long may set-up, and reads and writes of many rows take
JOB_WORK: Final = 240  # times as long may a statement take that moves all rows of a job at once
LONGEST_TICK: Final = 1.0  # seconds between looks for overdue answers
STOPPING: Final = 8.0  # seconds from the begin of a stop in which answers are still awaited
ABANDONED_AFTER: Final = 2.0  # seconds that work may take to end after its connection was cut
STOPPING_EACH: Final = 3.0  # seconds for each answer that is awaited later, as of a handler that runs for long
WATCH: Final = "delayline watch"  # the key in SQLAlchemy's `Connection.info`

#: By how much the limit is multiplied in the work at hand.
FACTOR: ContextVar[int] = ContextVar("delayline_limit_factor", default=1)


def checked_timeout(value: object) -> float:
    """Return the limit in seconds. Raises ConfigurationError if it is not above 0 and at most an hour."""
    try:
        seconds = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (OverflowError, ValueError):
        seconds = None
    if seconds is None or not 0 < seconds <= LONGEST_TIMEOUT:
        raise ConfigurationError(
            f"server_timeout={str(value)[:40]!r} is not a number of seconds above 0 and up to {LONGEST_TIMEOUT:g}"
        )
    return seconds


def long_work(work: CoroutineFunction) -> CoroutineFunction:
    """Give each wait inside the coroutine function ten times as long: for set-up and bulk work."""
    return _longer(work, LONG_WORK)


def job_work(work: CoroutineFunction) -> CoroutineFunction:
    """Give each wait inside the coroutine function an hour where the limit is 15 seconds: for jobs of any size."""
    return _longer(work, JOB_WORK)


def _longer(work: CoroutineFunction, factor: int) -> CoroutineFunction:
    @functools.wraps(work)
    async def longer(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the function takes and returns
        token = FACTOR.set(factor)
        try:
            return await work(*args, **kwargs)
        finally:
            FACTOR.reset(token)

    return cast("CoroutineFunction", longer)


class StopLimit:
    """How long answers of a database are awaited while an endpoint that uses it stops.

    It holds for everything on the database: waits of a user keep others' from their connections. Waits that began
    before the stop, and waits of its first seconds, end together; each later wait has a few seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops = 0
        self.at: float | None = None
        """The time, by `time.monotonic`, at which the waits of a stop end; None while nothing stops."""

    def begin(self) -> None:
        """Begin a stop. Every stop needs an `end`."""
        with self._lock:
            if self._stops == 0:
                self.at = time.monotonic() + STOPPING
            self._stops += 1

    def end(self) -> None:
        """End a stop; after the last the usual limits hold again."""
        with self._lock:
            self._stops = max(0, self._stops - 1)
            if self._stops == 0:
                self.at = None

    def end_of(self, deadline: float, since: float) -> float:
        """Return when a wait ends that began at `since` and has that deadline."""
        at = self.at
        return deadline if at is None else min(deadline, max(at, since + STOPPING_EACH))

    def left(self, seconds: float) -> float:
        """Return how many of the seconds a wait has that begins now."""
        now = time.monotonic()
        return self.end_of(now + seconds, now) - now


class LimitedWaits(Protocol):
    """Waits that the watchdog ends."""

    @property
    def limit(self) -> float:
        """Seconds that a wait may take."""
        ...

    def end_overdue(self, now: float) -> None:
        """End waits that are overdue; on the watchdog's thread, without blocking it."""
        ...


class AnswerDeadline:
    """The wait of a connection, if it waits. Begun and ended by the thread that uses the connection."""

    __slots__ = ("__weakref__", "_closing", "_socket", "_stops", "deadline", "limit", "missed", "since")

    def __init__(self, descriptor: int | None, limit: float, stops: StopLimit) -> None:
        self.limit: float = limit
        self._stops = stops
        self.since: float = 0.0
        self.deadline: float | None = None
        self.missed: bool = False
        """Whether the connection was cut."""
        self._closing = threading.Lock()
        # A duplicate, so that the number cannot mean another connection when the driver has closed its own.
        self._socket = None if descriptor is None else socket.socket(fileno=os.dup(descriptor))
        if self._socket is not None:
            _watchdog.add(self)

    def begin(self, seconds: float) -> None:
        """Expect an answer within so many seconds."""
        self.since = time.monotonic()
        self.deadline = self.since + seconds

    def end(self) -> None:
        """Expect nothing."""
        self.deadline = None

    def is_overdue(self, now: float) -> bool:
        """Return whether the answer should have come by now."""
        deadline = self.deadline
        return deadline is not None and self._stops.end_of(deadline, self.since) < now

    def end_overdue(self, now: float) -> None:
        """Cut the connection if its answer is overdue."""
        if self.is_overdue(now):
            self.end()
            self.cut()

    def cut(self) -> None:
        """Shut the connection down: the driver reads its end instead of an answer."""
        with self._closing:
            if self._socket is not None:
                self.missed = True
                with contextlib.suppress(OSError):  # the other side was quicker
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Forget the connection. Idempotent."""
        _watchdog.remove(self)
        with self._closing:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


class Watchdog:
    """The thread that looks at every wait of this process; it ends when there are none to look at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: set[LimitedWaits] = set()
        self._changed = threading.Event()
        self._tick = LONGEST_TICK
        self._thread: threading.Thread | None = None

    def add(self, watch: LimitedWaits) -> None:
        """Look at more waits too."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="delayline watchdog", daemon=True)
                self._thread.start()
            elif watch.limit / 10 >= self._tick:
                return  # it looks often enough
        self._changed.set()

    def remove(self, watch: LimitedWaits) -> None:
        """Look at them no more."""
        with self._lock:
            self._watches.discard(watch)
            if not self._watches:
                self._changed.set()  # the thread ends

    def _run(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                watches = list(self._watches)
                if not watches:
                    self._thread = None
                    return
                tick = self._tick = min(LONGEST_TICK, min(watch.limit for watch in watches) / 10)
            asleep = time.monotonic()
            self._changed.wait(tick)
            now = time.monotonic()
            if now - asleep > 2 * tick + 1:  # this process was stopped itself: answers may be there, unread
                time.sleep(tick)
                continue
            with self._lock:
                watches = list(self._watches)  # those that were added meanwhile too
            for watch in watches:
                watch.end_overdue(now)


_watchdog: Watchdog = Watchdog()


def watch_over(waits: LimitedWaits) -> Callable[[], None]:
    """Let the watchdog end overdue waits; return how to stop that."""
    _watchdog.add(waits)
    return lambda: _watchdog.remove(waits)


def _begin_anew() -> None:
    """In a child process the thread and the connections are the parent's."""
    global _watchdog
    _watchdog = Watchdog()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def limited_answers(connection: Any, ours: Any) -> Iterator[None]:  # noqa: ANN401 - of any library, and a server's
    """Cut the connection if statements that go past SQLAlchemy get no answer within the server's time.

    Args:
        connection: Has cursors, and notes about the driver's connection.
        ours: Connections of delayline's, which have the limits.
    """
    lasting = connection.info.get(WATCH)
    watch = lasting
    if watch is None:
        cursor = connection.cursor()
        driver = getattr(getattr(cursor, "_cursor", cursor), "connection", None)
        cursor.close()
        watch = AnswerDeadline(descriptor_of(driver), ours.server_timeout, ours.stops)
    watch.begin(ours.server_timeout)
    try:
        yield
    finally:
        watch.end()
        if lasting is None:
            watch.close()


def descriptor_of(driver: Any) -> int | None:  # noqa: ANN401 - each driver has its own
    """Return the socket of a driver's connection, or of that inside SQLAlchemy's adapter; None if it has none."""
    inner = getattr(driver, "driver_connection", driver)
    try:
        if hasattr(inner, "fileno"):
            return int(inner.fileno())
        if (made := getattr(inner, "_sock", None)) is not None:
            return int(made.fileno())
        writer = getattr(inner, "_writer", None)
        return None if writer is None else int(writer.get_extra_info("socket").fileno())
    except Exception:  # of a driver that keeps it elsewhere
        return None
