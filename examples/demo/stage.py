"""Where the demo takes place: a folder with the database, what was sent and what has arrived."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.clock import to_microseconds
from delayline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY: Final = Path(__file__).parents[2]
SENDER: Final = "sender"
DISPATCHER: Final = "dispatcher"
RECEIVER: Final = "receiver"

REMINDERS: Final = "reminders"  # the endpoint that sends and dispatches


@dataclass(frozen=True, slots=True)
class Stage:
    """The files of one demo run."""

    directory: Path

    @property
    def reminders(self) -> Path:
        """What is to be sent."""
        return self.directory / "reminders.csv"

    @property
    def plot(self) -> Path:
        """The lateness histogram."""
        return self.directory / "lateness.png"

    @property
    def report(self) -> Path:
        """The audit, where there is one."""
        return self.directory / "report.html"

    @property
    def cold_tier(self) -> Path:
        """The files of what is furthest away, where Spark schedules."""
        return self.directory / "cold"

    def settings(self, endpoint: str) -> Settings:
        """Return the settings of one of the endpoints, all on one SQLite file."""
        return Settings(endpoint=endpoint, url=f"sqlite:///{self.directory / 'demo.db'}", number_of_retries=5)

    def log(self, party: str) -> Path:
        """Return what a process printed: empty unless something went wrong."""
        return self.directory / f"{party}.log"

    def journal(self, party: str) -> Path:
        """Return where a process writes what it did, a line each: appended, never rewritten."""
        return self.directory / f"{party}.journal"


class Journal:
    """Appends lines that are in the file at once, even when the process is killed after."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, rows: Sequence[tuple[object, ...]]) -> None:
        """Append a line for each row, in one write."""
        os.write(self._file, "".join("\t".join(map(str, row)) + "\n" for row in rows).encode())

    def write_now(self, word: str, now: datetime) -> None:
        """Append a word and when it was written."""
        self.write([(word, to_microseconds(now))])


@dataclass(slots=True)
class JournalReader:
    """Reads what was appended since the last look."""

    path: Path
    _read: int = 0
    _rest: bytes = field(default=b"")

    def new_rows(self) -> list[list[str]]:
        """Return the rows that are complete and were not returned yet."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            fresh = file.read()
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        return [line.decode().split("\t") for line in lines]
