"""Claims on rows of SQLite: byte n of a file beside the database stands for row n.

SQLite has no row locks. The operating system gives a lock to a single process, and takes it back the moment that
process ends, however it ends. A claim costs a system call and no write.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class FileClaims:
    """This process's claims on the rows of a table. Safe to call from any thread.

    There must be a single instance per file and process: closing any descriptor drops all of a process's locks.
    """

    def __init__(self, directory: Path, table: str, *, mode: int = 0o600) -> None:
        name = hashlib.sha256(table.encode()).hexdigest()[:16]
        self._file = os.open(directory / f"{name}.claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        self._claimed: set[int] = set()
        self._lock = threading.Lock()

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        claimed: list[int] = []
        with self._lock:
            for row in rows:
                if len(claimed) == limit:
                    break
                if row not in self._claimed and self._lock_byte(row):
                    self._claimed.add(row)
                    claimed.append(row)
        return claimed

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims. Idempotent."""
        with self._lock:
            for row in rows:
                if row in self._claimed:
                    self._claimed.discard(row)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, row)

    def forget(self, rows: Iterable[int]) -> None:
        """Give up claims on rows that are gone."""
        self.release(rows)

    def flush(self) -> None:
        """No-op: released rows are available at once."""

    def are_all_free(self) -> bool:
        """Return whether no process claims any row; only for callers that exclude new claims."""
        with self._lock:
            if self._claimed or not self._lock_byte(0, length=0):
                return False
            fcntl.lockf(self._file, fcntl.LOCK_UN)
            return True

    def number_claimed_after(self, row: int) -> int:
        """Return how many rows this process holds whose numbers are higher."""
        with self._lock:
            return sum(claimed > row for claimed in self._claimed)

    def holds(self, row: int) -> bool:
        """Return whether this process holds the row, as of its last request."""
        return row in self._claimed

    def close(self) -> None:
        """Give up every claim; from now on none is given."""
        with self._lock:
            os.close(self._file)
            self._file = -1
            self._claimed.clear()

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
