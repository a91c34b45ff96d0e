"""A server that runs as a process of the test's own, and keeps its log in its folder."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PATIENCE: Final = 150.0


class OwnProcess:
    """Starts it and waits until it answers; ends it gently or not."""

    product: ClassVar[str]
    install: ClassVar[str]
    folder: Path
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id, for signals; it is running."""
        if self._process is None:
            raise RuntimeError(f"{self.product} is not running")
        return self._process.pid

    def answers(self) -> bool:
        """Return whether it takes connections."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop in order, and wait until it has."""
        self._end(subprocess.Popen.terminate)

    def kill(self) -> None:
        """End it the hard way."""
        self._end(subprocess.Popen.kill)

    def _begin(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / "output.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment)
        deadline = time.monotonic() + PATIENCE
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                logs = [self.folder / "output.log", *(self.folder / "log").glob("*.log")]
                said = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)
                self.kill()
                raise RuntimeError(f"{self.product} did not start: {said}")
            time.sleep(0.02)

    def _end(self, how: Callable[[subprocess.Popen[bytes]], None]) -> None:
        if self._process is not None:
            how(self._process)
            self._process.wait(PATIENCE)
            self._process = None
