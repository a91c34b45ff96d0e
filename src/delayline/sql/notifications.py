"""Notifications that a message was stored: to listeners in this process, and to other processes where the database can.

A channel is a store's table or a queue. A notification carries the time from which on there is a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

from delayline.checks import running_loop
from delayline.errors import DelaylineError, NotStarted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    DueTimesQuery = Callable[[], Awaitable[Sequence[datetime | None]]]


class Notifications(Protocol):
    """Notifications of a database. Thread-safe, except for `subscribe`."""

    reach_others: bool
    """Whether listeners in other processes are notified; otherwise those have to poll."""

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running event loop for each notification; return a function to unsubscribe."""
        ...

    def notify(self, channel: str, at: int = 0) -> None:
        """Notify every listener of `channel` that there is a message from `at` on. Never blocks."""
        ...


class ServerNotifications(Notifications, Protocol):
    """Notifications of a database server."""

    def register_store(self, channel: str, schema: str | None) -> None:
        """Register the schema of the tables that `channel` belongs to."""
        ...

    def must_register_sleep(self, channel: str, until: datetime | None) -> bool:
        """Return whether `register_sleep` has something to publish."""
        ...

    def register_sleep(self, connection: Connection, channel: str, until: datetime | None) -> bool:
        """Publish how long the poller that listens to `channel` here is going to sleep.

        Returns True if this is new to other processes; the caller then has to look once more, because a message may
        have been stored without a notification before.
        """
        ...

    def notify_in(self, connection: Connection, channel: str, at: int) -> None:
        """Notify other processes of the end of the transaction on `connection`, should it commit."""
        ...

    def renew(self) -> None:
        """Listen on another connection: the server behind the present connection is not the primary any more."""
        ...

    def close(self) -> None:
        """Finish the work in progress and accept no more; blocks."""
        ...


class Listener:
    """A callback, called on the event loop that was running when it was added, until it is removed."""

    __slots__ = ("_callback", "_loop")

    def __init__(self, callback: Callable[[int], None]) -> None:
        self._callback: Callable[[int], None] | None = callback
        self._loop = asyncio.get_running_loop()

    def notify(self, at: int) -> None:
        """Call it now on its own loop, soon from other threads."""
        if running_loop() is self._loop:
            self._call(at)
            return
        with contextlib.suppress(RuntimeError):  # that loop is closed
            self._loop.call_soon_threadsafe(self._call, at)

    def remove(self) -> None:
        """Drop the callback, calls that are scheduled included."""
        self._callback = None

    def _call(self, at: int) -> None:
        if self._callback is not None:
            self._callback(at)


class Listeners:
    """The listeners of each channel. Thread-safe, except for `add`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_channel: dict[str, list[Listener]] = {}

    def add(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running event loop for each notification; return a function to remove it."""
        listener = Listener(callback)
        with self._lock:
            self._by_channel.setdefault(channel, []).append(listener)

        def remove() -> None:
            listener.remove()
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._by_channel[channel].remove(listener)

        return remove

    @property
    def channels(self) -> set[str]:
        """Every channel that has had a listener."""
        with self._lock:
            return set(self._by_channel)

    def listens(self, channel: str) -> bool:
        """Return whether the channel has a listener."""
        return bool(self._by_channel.get(channel))

    def notify(self, channel: str, at: int) -> None:
        """Call every listener of the channel."""
        for listener in list(self._by_channel.get(channel, ())):
            listener.notify(at)

    def notify_all(self) -> None:
        """Call every listener: a notification may have been missed."""
        for channel in self.channels:
            self.notify(channel, 0)

    def clear(self) -> None:
        """Forget every listener."""
        with self._lock:
            self._by_channel.clear()


class LocalNotifications:
    """Notifications inside a process, for servers that cannot notify others: other processes poll. Thread-safe."""

    reach_others = False

    def __init__(self) -> None:
        self._listeners = Listeners()

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        return self._listeners.add(channel, callback)

    def notify(self, channel: str, at: int = 0) -> None:
        self._listeners.notify(channel, at)

    def register_store(self, channel: str, schema: str | None) -> None:
        """No-op: no tables are used."""

    def must_register_sleep(self, channel: str, until: datetime | None) -> bool:
        """Return False: sleeping pollers are not registered."""
        del channel, until
        return False

    def register_sleep(self, connection: Connection, channel: str, until: datetime | None) -> bool:
        """No-op: sleeping pollers are not registered."""
        del connection, channel, until
        return False

    def notify_in(self, connection: Connection, channel: str, at: int) -> None:
        """No-op: other processes poll."""

    def renew(self) -> None:
        """No-op: there is no connection."""

    def close(self) -> None:
        """No-op: there is no thread to end."""


class ChangePoller:
    """Queries the earliest due times at an interval, and reports each that has changed, where nothing notifies."""

    def __init__(self, query: DueTimesQuery, report: Callable[[datetime], None], interval: float) -> None:
        self._query = query
        self._report = report
        self._interval = interval
        self._seen: Sequence[datetime | None] = ()
        self._task = asyncio.create_task(self._run(), name="delayline change poller")

    def stop(self) -> None:
        """Stop polling. Idempotent."""
        self._task.cancel()

    async def _run(self) -> None:
        with contextlib.suppress(NotStarted):  # closed meanwhile
            while True:
                await asyncio.sleep(self._interval)
                await self._query_once()

    async def _query_once(self) -> None:
        try:
            answer = await self._query()
        except NotStarted:
            raise
        except DelaylineError:
            return  # the user of the database reports the error
        for due in answer:
            if due is not None and due not in self._seen:
                self._report(due)
        self._seen = answer
