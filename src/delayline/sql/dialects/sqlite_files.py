"""Files beside an SQLite database: claims on rows, notifications, and the watch for other processes' commits.

SQLite has no row locks. Byte n of the claims file stands for row n: the operating system gives a lock to one process
only, and takes it back the moment that process ends, however it ends. A claim costs a system call and no write.

Each listening process has a named pipe, to which other processes write their notifications. External transactions are
notified by a watch on the file, as SQLite reports no commits to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import sqlite3
import struct
import threading
import time
import uuid
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from delayline.errors import DelaylineError
from delayline.sql.dialects.server import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from sqlalchemy import Connection


class FileClaims:
    """This process's claims on the rows of one table. Safe to call from any thread.

    There must be one instance a file and process: closing any descriptor of a file drops all of a process's locks.
    """

    def __init__(self, directory: Path, table: str, *, mode: int = 0o600) -> None:
        name = hashlib.sha256(table.encode()).hexdigest()[:16]
        self._file = os.open(directory / f"{name}.claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        self._held: set[int] = set()
        self._lock = threading.Lock()

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        taken: list[int] = []
        with self._lock:
            for row in rows:
                if len(taken) == limit:
                    break
                if row not in self._held and self._lock_byte(row):
                    self._held.add(row)
                    taken.append(row)
        return taken

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims. Idempotent."""
        with self._lock:
            for row in rows:
                if row in self._held:
                    self._held.discard(row)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, row)

    def forget(self, rows: Iterable[int]) -> None:
        """Give up claims on rows that are gone."""
        self.release(rows)

    def flush(self) -> None:
        """No-op: released rows are available at once."""

    def nobody_holds_any(self) -> bool:
        """Return whether no process claims any row; only for callers that exclude new claims."""
        with self._lock:
            if self._held or not self._lock_byte(0, length=0):
                return False
            fcntl.lockf(self._file, fcntl.LOCK_UN)
            return True

    @property
    def number_held(self) -> int:
        """How many rows this process holds."""
        return len(self._held)

    def close(self) -> None:
        """Give up every claim; from now on none is given."""
        with self._lock:
            os.close(self._file)
            self._file = -1
            self._held.clear()

    def forked(self) -> None:
        """Close the descriptor that a fork has inherited: that gives up nothing of its parent's."""
        os.close(self._file)
        self._file = -1

    def _lock_byte(self, row: int, *, length: int = 1) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, row)
        except (OSError, ValueError):  # claimed by another process, or closed
            return False
        return True


RECORD: Final = struct.Struct("=8sq")  # channel, microseconds since 1970
READ_SIZE: Final = RECORD.size * 256  # no more than the smallest pipe holds, a page: a full pipe is seen as full
QUIT: Final = b"\0" * RECORD.size
CLOCK_TICK: Final = 100_000_000  # nanoseconds


class PipeNotifications:
    """Tells listeners, in this process and in others, that something was committed. Safe to call from any thread."""

    reach_others = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine = ""
        self._lock = threading.Lock()
        self._listeners: dict[bytes, list[tuple[asyncio.AbstractEventLoop, Callable[[int], None]]]] = {}
        self._pipes: dict[str, int] = {}
        self._listed: int = -1
        self._pipe: int | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to know other processes."""
        self._listed = -1

    def close(self) -> None:
        """Stop listening and forget other processes."""
        with self._lock:
            if self._pipe is not None:
                os.write(self._pipe, QUIT)
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        with self._lock:
            for pipe in self._pipes.values():
                os.close(pipe)
            self._pipes.clear()
            self._listeners.clear()

    def forked(self) -> None:
        """Close the pipes that a fork has inherited: its parent's must end with its parent."""
        for pipe in (*self._pipes.values(), *([] if self._pipe is None else [self._pipe])):
            os.close(pipe)
        self._pipes, self._pipe = {}, None

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running event loop after each commit told on `channel`; return how to stop."""
        key = _key(channel)
        entry = (asyncio.get_running_loop(), callback)
        with self._lock:
            self._listeners.setdefault(key, []).append(entry)
            if self._thread is None:
                self._listen()

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._listeners[key].remove(entry)

        return unsubscribe

    def notify(self, channel: str, at: int = 0) -> None:
        """Tell every listener of `channel`; `at` says from when on there is something. Never blocks."""
        key = _key(channel)
        self._tell(key, at)
        record = RECORD.pack(key, at)
        with self._lock:
            self._find_pipes()
            for name, pipe in list(self._pipes.items()):
                try:
                    os.write(pipe, record)
                except BlockingIOError:
                    pass  # a full pipe wakes its reader without our record
                except OSError:
                    os.close(self._pipes.pop(name))
                    _sweep(self._directory / name)

    def _find_pipes(self) -> None:
        """Open the pipes of processes that came since the last look; the folder's time tells whether any did."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed == self._listed:
            return
        # Within the file system's clock tick a later change may leave the same time: look again next time.
        self._listed = changed if time.time_ns() - changed > CLOCK_TICK else -1
        for path in self._directory.glob("*.wake"):
            if path.name == self._mine or path.name in self._pipes:
                continue
            try:
                self._pipes[path.name] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no reader; other errors do not show whether the owner lives
                    _sweep(path)

    def _listen(self) -> None:
        self._mine = f"{os.getpid()}-{uuid.uuid4().hex[:8]}.wake"  # now: the process may be a fork of another
        hidden = self._directory / f"{self._mine}.new"
        os.mkfifo(hidden)
        # Read and write: a pipe that we hold open for writing never reports an end of file.
        self._pipe = os.open(hidden, os.O_RDWR | os.O_CLOEXEC)
        hidden.rename(self._directory / self._mine)  # only now others may see it: a pipe without reader is swept
        self._thread = threading.Thread(
            target=self._read, args=(self._pipe,), name="delayline notifications", daemon=True
        )
        self._thread.start()

    def _read(self, pipe: int) -> None:
        quitting = False
        while not quitting:
            records = os.read(pipe, READ_SIZE)
            if len(records) == READ_SIZE:
                self._notify_all()  # the pipe may have been full, and records dropped
            earliest: dict[bytes, int] = {}
            for key, at in RECORD.iter_unpack(records[: len(records) // RECORD.size * RECORD.size]):
                earliest[key] = min(at, earliest.get(key, at))
            quitting = earliest.pop(QUIT[:8], None) is not None
            for key, at in earliest.items():
                self._tell(key, at)
        (self._directory / self._mine).unlink(missing_ok=True)
        os.close(pipe)
        self._pipe = None

    def _tell(self, key: bytes, at: int) -> None:
        for loop, callback in list(self._listeners.get(key, ())):
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(callback, at)

    def _notify_all(self) -> None:
        for key in list(self._listeners):
            self._tell(key, 0)


def _sweep(path: Path) -> None:
    with contextlib.suppress(OSError):  # belongs to another user, or was removed by another process
        path.unlink()


@functools.lru_cache(maxsize=1024)
def _key(channel: str) -> bytes:
    return hashlib.blake2b(channel.encode("utf-8", "surrogatepass"), digest_size=8).digest()


#: A look takes some 10 microseconds. The longer a transaction lasts the rarer they are: it is noticed 1 % late.
SHORTEST: Final = 0.001
SHARE: Final = 0.01
LONGEST: Final = 0.02
SELDOM_AFTER: Final = 60.0
SELDOM: Final = 1.0
#: A transaction that was rolled back is never noticed; one that lasts longer is found by polling.
GIVE_UP_AFTER: Final = 600.0


class CommitWatch:
    """Passes news on once the transaction that made them is over. Runs a thread while there are any; thread-safe."""

    def __init__(self, connect: Callable[[], Connection], tell: Callable[[Mapping[str, int]], None]) -> None:
        self._connect = connect
        self._tell = tell
        self._changed = threading.Condition()
        self._expected: dict[str, int] = {}
        self._since = 0.0
        self._version: int | None = None
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None

    def expect(self, news: Mapping[str, int]) -> None:
        """Send the notifications after the next commit; called while the external transaction has the write lock."""
        with self._changed:
            self._look()
            for channel, at in news.items():
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
                usual = min(max(lasted * SHARE, SHORTEST), LONGEST)
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
            self._tell(self._expected)
            if before is not None:  # else the connection is new, after a fork: the commit may be still to come
                self._expected = {}

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._version = None
