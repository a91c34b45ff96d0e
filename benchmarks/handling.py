"""Measures worker processes: the same messages for every contender, one after another in each round."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import ROUNDS, Figures, scaled
from benchmarks.handled import percentile
from benchmarks.handled_worker import DIGITS, NUMBER_DIGITS
from benchmarks.processes import command, cpu_of, node_path, running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUMBER = scaled(50_000)
RECORD = NUMBER_DIGITS + DIGITS
WRAP = 10**DIGITS / 1e6
#: Seconds without another message after which a contender has failed.
PATIENCE = 90.0
#: Seconds that acknowledgements, and messages handled twice, have after the last message.
SETTLING = 0.5


class Server(NamedTuple):
    """A server, and what it counts."""

    fresh: Callable[[], str]
    """Returns the URL of an empty database; those of queues and store, with a space between."""
    pid: int | None
    transactions: Callable[[str], int] | None = None
    tidy: Callable[[str], None] = lambda _: None
    """Brings statistics up to date after messages were stored."""


@dataclass(frozen=True)
class Contender:
    """A worker and the messages that it handles."""

    name: str
    peer: str
    settings: dict[str, Any] = field(default_factory=dict)
    due: bool = False
    """All are due at one instant, which the time counts from; otherwise they are queued before the worker starts, and
    the time counts from its first message."""
    number: int = NUMBER
    stored: float = 10_000
    """Messages a second that are stored at the least."""
    filler: str | None = None
    """Whose messages it handles, if another library's sender fills its queue."""
    server: Server | None = None
    """Its own, if that is not the others'."""


class Run(NamedTuple):
    """The figures of one worker."""

    rate: float
    worker_us: float
    server_us: float
    transactions: float


class Recorded(NamedTuple):
    """The messages that were handled, each with the second at which it was."""

    times: dict[int, float]
    doubled: int


async def compare(server: Server, contenders: Sequence[Contender]) -> tuple[Figures, dict[str, list[Run]]]:
    """Return the medians of rounds in which the contenders take turns, and each round's figures."""
    runs: dict[str, list[Run]] = {one.name: [] for one in contenders}
    for turn in range(ROUNDS):
        for one in contenders:
            runs[one.name].append(await _run(server, one))
            print(f"round {turn + 1}, {one.name}: {runs[one.name][-1]}", file=sys.stderr, flush=True)
    figures: Figures = {}
    for name, some in runs.items():
        figures[f"{name} /s"] = statistics.median(run.rate for run in some)
        figures[f"{name}, worker us"] = statistics.median(run.worker_us for run in some)
        if any(run.server_us for run in some):
            figures[f"{name}, server us"] = statistics.median(run.server_us for run in some)
        if server.transactions is not None:
            figures[f"{name}, transactions"] = statistics.median(run.transactions for run in some)
    return figures, runs


def ratio(runs: dict[str, list[Run]], ours: str, other: str) -> float:
    """Return how many times the other's rate ours is: the median of the rounds' ratios."""
    return statistics.median(one.rate / two.rate for one, two in zip(runs[ours], runs[other], strict=True))


class TooLateError(Exception):
    """The messages were due before the worker had started; so many seconds would have been enough."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name} needs {seconds:.0f} s to store its messages and start")
        self.seconds = seconds


async def _run(server: Server, one: Contender) -> Run:
    """Measure one worker; again with a later due instant if storing and starting took longer than expected."""
    server, ahead = one.server or server, one.number / one.stored + 6
    for _ in range(3):
        try:
            return await _measured(server, one, ahead)
        except TooLateError as late:
            ahead = late.seconds * 1.5 + 2
    return await _measured(server, one, ahead)


async def _measured(server: Server, one: Contender, ahead: float) -> Run:
    began = time.time()
    url = server.fresh()
    due = began + ahead if one.due else None
    settings = one.settings | {"number": one.number, "due": due}
    with tempfile.TemporaryDirectory(prefix="delayline-bench-") as folder:
        handled = Path(folder) / "handled"
        handled.touch()
        environment = os.environ | {"BENCHMARK_HANDLED": str(handled)}
        filling = await asyncio.to_thread(
            subprocess.run, command("fill", one.filler or one.peer, url, settings),
            env=environment | node_path(), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert filling.returncode == 0
        server.tidy(url)
        before = server.transactions(url) if server.transactions else 0
        with running(command("work", one.peer, url, settings), environment) as worker:
            if due is None:
                await until(handled, 1, worker)
            else:
                if time.time() > due - 0.1:
                    raise TooLateError(one.name, time.time() - began)
                await asyncio.sleep(due - 0.05 - time.time())
                assert handled.stat().st_size == 0, "messages were handled early"
            missed = handled.stat().st_size // RECORD  # handled before the clocks were read
            cpu, server_cpu = cpu_of(worker.pid), cpu_of(server.pid)
            await until(handled, one.number, worker)
            await asyncio.sleep(SETTLING)
            cpu, server_cpu = cpu_of(worker.pid) - cpu, cpu_of(server.pid) - server_cpu
        found = recorded(handled, after=due)
        assert not found.doubled, f"{one.name} handled {found.doubled} twice"
        assert len(found.times) == one.number, f"{one.name} handled {len(found.times)} of {one.number}"
        first, last = min(found.times.values()), max(found.times.values())
        if due is not None:
            assert first >= due - 0.001, f"{one.name} was early by {due - first:.6f} s"
        await asyncio.sleep(0.2)  # PostgreSQL counts a connection's transactions when it ends
        transactions = (server.transactions(url) if server.transactions else 0) - before
    counted = one.number - missed
    rate = (one.number - 1) / (last - first) if due is None else one.number / (last - due)
    return Run(rate, cpu / counted * 1e6, server_cpu / counted * 1e6, transactions / one.number)


async def until(path: Path, number: int, worker: subprocess.Popen[str]) -> None:
    """Return when so many messages are recorded; TimeoutError when there come no more."""
    size, since = 0, time.monotonic()
    while (now := path.stat().st_size) < number * RECORD:  # noqa: ASYNC240 - a file in memory
        if now > size:
            size, since = now, time.monotonic()
        if worker.poll() is not None or time.monotonic() - since > PATIENCE:
            raise TimeoutError(f"{size // RECORD} of {number} messages were handled by {worker.args!r}")
        await asyncio.sleep(0.005)


def recorded(path: Path, *, after: float | None = None) -> Recorded:
    """Return the messages in a file of records."""
    data, now = path.read_bytes(), time.time() if after is None else after
    times: dict[int, float] = {}
    doubled = 0
    for at in range(0, len(data), RECORD):
        split = at + NUMBER_DIGITS
        number, clock = int(data[at:split]), int(data[split : at + RECORD]) / 1e6
        doubled += number in times
        times[number] = now + (clock - now + WRAP / 2) % WRAP - WRAP / 2  # the whole time next to now
    return Recorded(times, doubled)


def lateness(handled: dict[int, float], due: dict[int, float], prefix: str = "") -> Figures:
    """Return when messages were handled less when they were due, in milliseconds."""
    late = sorted((handled[number] - due[number]) * 1000 for number in due)
    return {f"{prefix}p50 ms": percentile(late, 0.5), f"{prefix}p99 ms": percentile(late, 0.99)}
