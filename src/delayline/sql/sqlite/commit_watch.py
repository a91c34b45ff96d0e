"""Notices that an external transaction on an SQLite file has ended.

SQLite reports no commits. `PRAGMA data_version` changes when another connection has committed. While an external
transaction holds the file's only write lock, no other transaction can commit; so a change since then means that it has
ended.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from delayline.errors import DelaylineError
from delayline.sql.server import run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import Connection


#: A look takes some 10 microseconds. The longer a transaction lasts the rarer they are: it is noticed 1 % late.
SHORTEST_LOOK_PAUSE: Final = 0.001
SHARE: Final = 0.01
LONGEST_LOOK_PAUSE: Final = 0.02
SELDOM_AFTER: Final = 60.0
SELDOM: Final = 1.0
#: A transaction that was rolled back is never noticed; a transaction that lasts longer is found by polling.
GIVE_UP_AFTER: Final = 600.0


class CommitWatch:
    """Sends notifications once an external transaction has ended. Runs a thread while any are expected; thread-safe."""

    def __init__(self, connect: Callable[[], Connection], notify: Callable[[Mapping[str, int]], None]) -> None:
        self._connect = connect
        self._notify = notify
        self._changed = threading.Condition()
        self._expected: dict[str, int] = {}
        self._since = 0.0
        self._version: int | None = None
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None

    def expect(self, notifications: Mapping[str, int]) -> None:
        """Send the notifications after the next commit; called while the external transaction has the write lock."""
        with self._changed:
            self._look()
            for channel, at in notifications.items():
                self._expected[channel] = min(at, self._expected.get(channel, at))
            self._since = time.monotonic()
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="delayline commits", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop watching; blocks until it has."""
        with self._changed:
            thread = self._thread
            self._expected.clear()
            self._changed.notify()
        if thread is not None:
            thread.join()
        self._disconnect()

    def pause(self) -> None:
        """Disconnect; no polling before `resume`."""
        self._changed.acquire()
        self._disconnect()

    def resume(self) -> None:
        """End a pause."""
        self._changed.release()

    def _run(self) -> None:
        with self._changed:
            while self._expected:
                lasted = time.monotonic() - self._since
                if lasted > GIVE_UP_AFTER:
                    self._expected.clear()
                    break
                usual = min(max(lasted * SHARE, SHORTEST_LOOK_PAUSE), LONGEST_LOOK_PAUSE)
                self._changed.wait(usual if lasted < SELDOM_AFTER else SELDOM)
                if self._expected:
                    self._look()
            self._thread = None

    def _look(self) -> None:
        """Send the notifications if a commit happened, or may have happened, since the last look."""
        before = self._version
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._version = run(self._connection, "PRAGMA data_version")[0][0]
        except (DBAPIError, DelaylineError, sqlite3.Error):
            self._disconnect()
        if self._version != before and self._expected:
            self._notify(self._expected)
            if before is not None:  # else the connection is new, after a fork: the commit may be still to come
                self._expected = {}

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._version = None
