"""Worker processes, and the CPU that they and servers take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import peer_installs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TICKS = os.sysconf("SC_CLK_TCK")


def command(action: str, peer: str, url: str, settings: dict[str, Any]) -> list[str]:
    """Return what runs a contender's program."""
    program = [sys.executable, "-m", "benchmarks.handled_worker"]
    if peer in {"pg-boss", "graphile-worker", "bullmq"}:
        program = ["node", str(Path(__file__).with_name("peers_node.cjs"))]
    elif peer == "oban":
        program = [str(peer_installs.oban_python()), str(Path(__file__).with_name("peer_oban.py"))]
    return [*program, action, peer, url, json.dumps(settings)]


def node_path() -> dict[str, str]:
    """Return the variable with which Node.js finds its peers, if they are there."""
    return {"NODE_PATH": str(peer_installs.CACHE / "node" / "node_modules")}


@contextlib.contextmanager
def running(program: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a worker until it is ready, and end it and its children after."""
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=environment | node_path(),
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline().strip() == "ready", f"it did not start: {program}"
            yield worker
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(5)


@contextlib.contextmanager
def sending_meanwhile(url: str) -> Iterator[None]:
    """Let another process send 100 messages a second to the same store, delayed by ten days."""
    settings = {"rate": 100, "number": 999_999, "delay": 864_000}
    environment = os.environ | {"BENCHMARK_SENT": os.devnull}
    with running(command("send", "delayline", url, settings), environment) as sender:
        assert sender.stdin is not None
        sender.stdin.write("\n")
        sender.stdin.flush()
        yield
        assert sender.poll() is None, "the sender has ended"


def cpu_of(root: int | None) -> float:
    """Return the CPU seconds of a process, of those that it has started, and of their ended children."""
    return sum(cpu_by_program(root).values())


def cpu_by_program(root: int | None) -> dict[str, float]:
    """Return the same by program; that of ended children as `ended`."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    ticks: dict[int, tuple[int, int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (place / "stat").read_text().partition("(")[2].rpartition(")")
            values, pid = rest.split(), int(place.name)
            parents[pid], names[pid] = int(values[1]), name
            ticks[pid] = (sum(map(int, values[11:13])), sum(map(int, values[13:15])))
    taken: Counter[str] = Counter()
    for pid in ticks:
        if root in set(_ancestors(pid, parents)):
            own, ended = ticks[pid]
            taken[names[pid]] += own
            taken["ended"] += ended
    return {name: number / TICKS for name, number in taken.items()}


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        yield pid
        pid = parents[pid]
