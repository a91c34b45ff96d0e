"""Other libraries on the same broker: messages delayed until one instant, handled by worker processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.bare import BODY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TASKS = "benchmarks.peer_tasks_rabbitmq"
PATIENCE = 90.0
CELERY_OPTIONS = ["worker", "--loglevel=error", "--concurrency=2", "--without-gossip", "--without-mingle"]
WORKERS = {
    "celery eta": ["celery", "-A", f"{TASKS}:celery_eta", *CELERY_OPTIONS],
    "celery native": ["celery", "-A", f"{TASKS}:celery_native", *CELERY_OPTIONS],
    "dramatiq": ["dramatiq", TASKS, "--processes=1", "--threads=8"],
    "taskiq": ["taskiq", "worker", f"{TASKS}:taskiq_broker", "--workers=1", "--log-level=ERROR"],
}


class Rates(NamedTuple):
    """Messages a second: scheduled one after the other, and handled from the instant they are due."""

    scheduled: float
    handled: float


class Pipe:
    """Counts what workers write to a named pipe."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.handled = 0

    async def until(self, number: int) -> None:
        """Return when so many were handled in all, or raise TimeoutError."""
        async with asyncio.timeout(PATIENCE):
            while self.handled < number:
                with contextlib.suppress(BlockingIOError):
                    self.handled += len(os.read(self._descriptor, 1 << 16))
                    continue
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def worker(peer: str, url: str) -> AsyncIterator[Pipe]:
    """Run the peer's worker, and let this process send to it."""
    with tempfile.TemporaryDirectory(prefix="delayline-bench-") as folder:
        pipe = Pipe(Path(folder) / "pipe")
        os.environ |= {"BENCHMARK_RABBITMQ": url, "BENCHMARK_PIPE": str(Path(folder) / "pipe")}
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", *WORKERS[peer]], stdout=log, stderr=log)  # noqa: ASYNC220
        try:
            yield pipe
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 10)
            process.kill()


async def rates(peer: str, url: str, number: int, ahead: float) -> Rates:
    """Return how fast a peer schedules messages for one instant, and how fast they are handled from then on.

    ahead: seconds for the scheduling; it has to be over by then.
    """
    async with worker(peer, url) as pipe:
        await _schedule(peer, 1, lambda: 0.0)
        await pipe.until(1)  # the worker is there, and its queues
        started = time.perf_counter()
        due = started + ahead
        await _schedule(peer, number, lambda: max(1.0, due - time.perf_counter()))
        scheduling = time.perf_counter() - started
        assert scheduling < ahead, (
            f"{peer} needed {scheduling:.0f} s for {number} messages: give it more than {ahead} s"
        )
        await pipe.until(1 + number)
        handling = time.perf_counter() - due
    return Rates(number / scheduling, number / handling)


async def _schedule(peer: str, number: int, delay: Callable[[], float]) -> None:
    """Send so many messages, one after the other; a delay of 0 s is none."""
    from benchmarks import peer_tasks_rabbitmq as tasks

    body = BODY.decode()
    if peer == "taskiq":
        await tasks.taskiq_broker.startup()
        for _ in range(number):
            seconds = delay()
            task = tasks.work_taskiq.kicker()
            await (task.with_labels(delay=seconds) if seconds else task).kiq(body)
        await tasks.taskiq_broker.shutdown()
        return

    def send() -> None:
        for _ in range(number):
            seconds = delay()
            if peer == "dramatiq":
                tasks.work_dramatiq.send_with_options(args=(body,), delay=int(seconds * 1000) or None)
            else:
                task = tasks.work_eta if peer == "celery eta" else tasks.work_native
                task.apply_async((body,), countdown=seconds or None)

    await asyncio.to_thread(send)
