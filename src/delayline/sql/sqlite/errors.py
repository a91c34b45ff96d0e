"""What SQLite reports, as the errors of this package."""

from __future__ import annotations

import math
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from delayline.errors import BackendUnavailable, BackendUnusable, InvalidMessage, StorageFull
from delayline.sql.dialect import DriverErrors

if TYPE_CHECKING:
    from collections.abc import Callable


#: Where SQLite locks bytes: that of the writer in the -shm file of a WAL, and from there on in the file itself.
WAL_WRITE_BYTE: Final = 120
FIRST_LOCK_BYTE: Final = 0x4000_0000


def file_identity(path: Path | str) -> tuple[int, int] | None:
    """Return the device and number of a file; None for none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - before every transaction: half the time of Path.stat
    except OSError:
        return None
    return status.st_dev, status.st_ino


def held_by_this_process(path: Path) -> bool:
    """Return whether a connection of this process has the write lock of the file; False where the system cannot tell.

    Linux lists locks by process and file. To ask with fcntl would need a descriptor, and closing it drops all locks
    that this process has on the file.
    """
    places = ((path, FIRST_LOCK_BYTE, math.inf), (path.with_name(f"{path.name}-shm"), WAL_WRITE_BYTE, WAL_WRITE_BYTE))
    bounds = {
        identity[1]: (first, last) for file, first, last in places if (identity := file_identity(file)) is not None
    }
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        match line.split():
            case [_, "POSIX", _, "WRITE", process, file, begin, _] if process == str(os.getpid()):
                first, last = bounds.get(int(file.rpartition(":")[2]), (1, 0))
                if first <= int(begin) <= last:
                    return True
    return False


def busy(path: Path, error: BaseException) -> Exception:
    """Return the error of a write lock that was not given, which names who has it."""
    if held_by_this_process(path):
        return BackendUnavailable(
            f"this process itself holds the write lock of {path} ({error}), and nothing was written: a transaction is "
            "open on another connection, perhaps the caller's own. End it first, or give it to send as transaction=; a "
            "start inside a transaction needs tables and queues that are there: run `delayline setup` before"
        )
    return BackendUnavailable(
        f"another process holds the write lock of {path} ({error}), and nothing was written: end its transaction, or "
        "the process where it is stopped or hangs (lsof and fuser name it), or allow longer with ?timeout=SECONDS"
    )


TRANSLATIONS: Final[dict[str, Callable[[Path, BaseException], Exception]]] = {
    "SQLITE_BUSY": busy,
    "SQLITE_LOCKED": busy,
    "SQLITE_FULL": lambda path, error: StorageFull(f"no space left to write {path} ({error}): free some"),
    "SQLITE_IOERR": lambda path, error: BackendUnavailable(f"cannot read or write {path} ({error}): check the disk"),
    "SQLITE_READONLY": lambda path, error: BackendUnusable(
        f"{path} is read-only ({error}): make the file and its folder writable for this user"
    ),
    "SQLITE_CANTOPEN": lambda path, error: BackendUnusable(
        f"cannot open {path} ({error}): check that its folder exists and is writable for this user"
    ),
    "SQLITE_PERM": lambda path, error: BackendUnusable(f"no permission to use {path} ({error})"),
    "SQLITE_NOTADB": lambda path, error: BackendUnusable(
        f"{path} is not an SQLite database ({error}): name another file"
    ),
    "SQLITE_CORRUPT": lambda path, error: BackendUnusable(f"{path} is damaged ({error}): restore it from a backup"),
    "SQLITE_TOOBIG": lambda path, error: InvalidMessage(f"the message is too large for {path} ({error})"),
}


def name_of(error: BaseException) -> str:
    """Return SQLite's name of an error; empty for none."""
    return str(getattr(error, "sqlite_errorname", "SQLITE_BUSY" if "database is locked" in str(error) else ""))


class SqliteErrors(DriverErrors):
    """The errors of sqlite3, by their names."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, raw and wrapped by SQLAlchemy."""
        return (DBAPIError, sqlite3.Error)

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        name = name_of(cause)
        for prefix, translate in TRANSLATIONS.items():
            if name.startswith(prefix):
                return translate(self._path, cause)
        if "no such table" in str(cause):
            return BackendUnusable(f"{self._path} is not set up for this endpoint: run `delayline setup` ({cause})")
        return error
