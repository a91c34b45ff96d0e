"""Notifications between processes on an SQLite file: each that listens has a named pipe.

After a commit the writer puts a small record into every pipe. A pipe without a reader belongs to a process that has
ended, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import struct
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.sql.notifications import Listeners

if TYPE_CHECKING:
    from collections.abc import Callable


RECORD: Final = struct.Struct("=8sq")  # channel, microseconds since 1970
READ_SIZE: Final = RECORD.size * 256  # no more than the smallest pipe holds, a page: a full pipe is seen as full
QUIT: Final = b"\0" * RECORD.size
CLOCK_TICK: Final = 100_000_000  # nanoseconds


class PipeNotifications:
    """Notifies listeners, in this process and in others, of commits. Thread-safe."""

    reach_others = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine = ""
        self._lock = threading.Lock()
        self._listeners = Listeners()
        self._channels: dict[bytes, str] = {}
        """The channels with listeners, by their key in a record."""
        self._pipes: dict[str, int] = {}
        self._listed: int = -1
        self._pipe: int | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Look for the pipes of other processes at the next notification."""
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
            self._channels.clear()
        self._listeners.clear()

    def forked(self) -> None:
        """Close the pipes that a fork has inherited: its parent's must end with its parent."""
        for pipe in (*self._pipes.values(), *([] if self._pipe is None else [self._pipe])):
            os.close(pipe)
        self._pipes, self._pipe = {}, None

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running loop after each commit that notifies `channel`; return how to stop."""
        unsubscribe = self._listeners.add(channel, callback)
        with self._lock:
            self._channels[_key(channel)] = channel
            if self._thread is None:
                self._listen()
        return unsubscribe

    def notify(self, channel: str, at: int = 0) -> None:
        """Notify every listener of `channel` of a message due at `at`. Never blocks."""
        self._listeners.notify(channel, at)
        record = RECORD.pack(_key(channel), at)
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
        """Open the pipes of processes that came since the last look; the folder's time shows whether any did."""
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
                self._listeners.notify_all()  # the pipe may have been full, and records dropped
            earliest: dict[bytes, int] = {}
            for key, at in RECORD.iter_unpack(records[: len(records) // RECORD.size * RECORD.size]):
                earliest[key] = min(at, earliest.get(key, at))
            quitting = earliest.pop(QUIT[:8], None) is not None
            for key, at in earliest.items():
                if (channel := self._channels.get(key)) is not None:
                    self._listeners.notify(channel, at)
        (self._directory / self._mine).unlink(missing_ok=True)
        os.close(pipe)
        self._pipe = None


def _sweep(path: Path) -> None:
    with contextlib.suppress(OSError):  # belongs to another user, or was removed by another process
        path.unlink()


@functools.lru_cache(maxsize=1024)
def _key(channel: str) -> bytes:
    return hashlib.blake2b(channel.encode("utf-8", "surrogatepass"), digest_size=8).digest()
