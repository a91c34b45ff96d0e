"""Servers that hang: their processes stand still, and their ports still take connections."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.eventually import eventually


class Frozen:
    """Stops a server's processes, and lets them go on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped: list[int] = []

    def stop(self) -> None:
        """Stop the server, then its child processes; return when every thread of the server has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        eventually(self._has_stopped)
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        self._stopped = [self._pid, *map(int, children)]
        for pid in self._stopped[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _has_stopped(self) -> bool:
        threads = Path(f"/proc/{self._pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)

    def go_on(self) -> None:
        """Let them go on. Idempotent."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []
