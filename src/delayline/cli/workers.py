"""`delayline run --processes N --reload`: worker processes, kept running, with one port for probes and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.cli.options import WRONG_USAGE
from delayline.events import Event, emit
from delayline.telemetry.http_server import Response
from delayline.telemetry.probes import Probes, Verdict

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds between two questions to a worker, and to wait for an answer.
QUESTION_EVERY: Final = 1.0
PATIENCE: Final = 4.0
#: Seconds without an answer after which a worker is not alive: its interpreter hangs, or it is stopped.
SILENCE_LIMIT: Final = 15.0
#: Questions that are sent to a worker which answers none: its pipe never fills.
MOST_UNANSWERED: Final = 100
#: Seconds before a worker that died is started again: at first, at most, and how long it has to run to begin anew.
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
STEADY: Final = 60.0
#: Seconds beyond the grace period after which a worker that has not ended is killed: a server may not answer for 20.
BEYOND_GRACE: Final = 25.0
#: Seconds between two looks at the source files.
LOOK_EVERY: Final = 0.5
#: Folders in which no source of the user's is.
OTHER_FOLDERS: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
#: Files that make workers start again.
SOURCES: Final = (".py", ".toml")


def answer_supervisor(descriptor: int, routes: Mapping[str, Callable[[str], Response]]) -> None:
    """Answer the supervisor's questions from a thread of this worker; its end stops the worker.

    Args:
        descriptor: The worker's end of the pipe.
        routes: The responses by path, as those of an `HttpServer`.
    """

    def answer() -> None:
        with contextlib.suppress(EOFError, OSError), Connection(descriptor) as pipe:
            while True:
                number, path, accept = pipe.recv()
                route = routes.get(path)
                pipe.send((number, None if route is None else tuple(route(accept))))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=answer, name="delayline supervisor", daemon=True).start()


class Worker:
    """A worker process, started again when it has died.

    Args:
        number: Its number, from 1.
        command: The command line, to which the pipe's descriptor is added.
        quiet: Whether it prints nothing on standard output.
    """

    def __init__(self, number: int, command: Sequence[str], *, quiet: bool) -> None:
        self.number = number
        self.ready: Verdict = Verdict(ok=False, reasons=("starts",))
        self.live: Verdict = Verdict(ok=True)
        self.was_ready: asyncio.Event = asyncio.Event()
        self._command = command
        self._output = asyncio.subprocess.DEVNULL if quiet else None
        self._process: Process | None = None
        self._pipe: Connection | None = None
        self._asking = threading.Lock()
        self._asked = self._unanswered = 0
        self._answered = time.monotonic()

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def run(self) -> int:
        """Start the process, and return its exit code when it has ended."""
        ours, theirs = Pipe()
        with theirs:
            # In a session of its own: Ctrl+C reaches the supervisor alone, which asks the workers to stop.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                f"--worker={theirs.fileno()}",
                pass_fds=[theirs.fileno()],
                stdout=self._output,
                stdin=asyncio.subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name not in OF_THE_SUPERVISOR},
                start_new_session=True,
            )
        self._pipe, self._unanswered, self._answered = ours, 0, time.monotonic()
        self.ready = Verdict(ok=False, reasons=("starts",))
        asking = asyncio.create_task(self._keep_asking())
        try:
            return await self._process.wait()
        finally:
            asking.cancel()
            self.ready, self.live = Verdict(ok=False, reasons=("has ended",)), Verdict(ok=True)
            await asyncio.wait([asking])
            with self._asking:
                self._pipe = None
                ours.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, if it runs."""
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def ask(self, path: str, accept: str = "") -> Response | None:
        """Return what the worker answers; None if it does not answer in time. For any thread."""
        if not self._asking.acquire(timeout=PATIENCE):
            return None
        try:
            return self._ask(path, accept)
        except (EOFError, OSError):
            return None
        finally:
            self._asking.release()

    def _ask(self, path: str, accept: str) -> Response | None:
        pipe = self._pipe
        if pipe is None:
            return None
        if self._unanswered < MOST_UNANSWERED:
            self._asked += 1
            self._unanswered += 1
            pipe.send((self._asked, path, accept))
        end = time.monotonic() + PATIENCE
        while pipe.poll(max(0.0, end - time.monotonic())):
            number, response = pipe.recv()
            self._unanswered -= 1
            self._answered = time.monotonic()
            if number == self._asked:
                return None if response is None else Response(*response)
        return None

    async def _keep_asking(self) -> None:
        while True:
            for path in ("/live", "/ready"):
                verdict = _verdict(await asyncio.to_thread(self.ask, path))
                silent = time.monotonic() - self._answered
                if verdict is None and silent >= SILENCE_LIMIT:
                    verdict = Verdict(ok=False, reasons=(f"has not answered for {silent:.0f} s",))
                if verdict is not None:
                    setattr(self, path[1:], verdict)
            if self.ready.ok:
                self.was_ready.set()
            await asyncio.sleep(QUESTION_EVERY)


#: Variables of the service manager that watches the supervisor.
OF_THE_SUPERVISOR: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


def _verdict(response: Response | None) -> Verdict | None:
    if response is None:
        return None
    return Verdict(ok=response.status == HTTPStatus.OK, reasons=tuple(json.loads(response.body)["reasons"]))


class WorkersProbes(Probes):
    """The probes of all workers together.

    Args:
        workers: The workers.
        heartbeat: As in `Probes`.
    """

    def __init__(self, workers: Sequence[Worker], *, heartbeat: Path | None) -> None:
        super().__init__(heartbeat=heartbeat)
        self._workers = workers

    def live(self) -> Verdict:
        """Return whether the supervisor and each worker that runs are alive."""
        reasons = (*super().live().reasons, *_reasons(self._workers, "live"))
        return Verdict(ok=not reasons, reasons=reasons)

    def ready(self) -> Verdict:
        """Return whether every worker is ready."""
        reasons = (*super().ready().reasons, *_reasons(self._workers, "ready"))
        return Verdict(ok=not reasons, reasons=tuple(dict.fromkeys(reasons)))


def _reasons(workers: Sequence[Worker], probe: str) -> Iterator[str]:
    for worker in workers:
        verdict: Verdict = getattr(worker, probe)
        for reason in verdict.reasons:
            yield f"process {worker.number}: {reason}"


def workers_metrics(workers: Sequence[Worker]) -> Callable[[str], Response]:
    """Return the response with the metrics of all workers, each with its number as a label."""
    from delayline.telemetry.prometheus import Merger  # an extra

    merger = Merger()
    pool = ThreadPoolExecutor(len(workers), "delayline metrics")

    def respond(accept: str) -> Response:
        answers = pool.map(lambda worker: worker.ask("/metrics"), workers)
        texts = {str(worker.number): answer and answer.body for worker, answer in zip(workers, answers, strict=True)}
        body, content_type = merger.merged(texts, accept)
        return Response(body, content_type=content_type)

    return respond


class Supervisor:
    """Keeps workers running until a signal, and starts them again when a source file has changed.

    Args:
        workers: The workers.
        grace: How long their handlers may take at a stop.
        sources: The folder whose source files are watched; None for none.
    """

    def __init__(self, workers: Sequence[Worker], *, grace: timedelta, sources: Path | None) -> None:
        self._workers = workers
        self._seconds_to_stop = grace.total_seconds() + BEYOND_GRACE
        self._sources = sources
        self._stopping = asyncio.Event()
        self._next_change = asyncio.Event()
        self._restarted = asyncio.Event()
        self._restarted.set()
        self.stopped_by: str | None = None
        self.exit_code: int = 0

    async def run(self, probes: WorkersProbes, started: Callable[[], None]) -> None:
        """Run the workers until a signal has stopped them, or none of them can be started.

        Args:
            probes: Their probes, entered.
            started: Called when all are ready for the first time.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        others = [asyncio.create_task(self._wait_ready(started))]
        if self._sources is not None:
            others.append(asyncio.create_task(self._watch(self._sources)))
        others.append(asyncio.create_task(self._end_in_time(probes)))
        try:
            await asyncio.gather(*map(self._keep, self._workers))
        finally:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self.stopped_by is None:
            self.stopped_by = number.name
            self._stopping.set()
            return
        text = "%s, the second signal: ended at once. Messages in flight are handled again"
        emit(logger, logging.WARNING, Event.ENDED_AT_ONCE, text, number.name)
        self._signal(signal.SIGKILL)
        asyncio.get_running_loop().remove_signal_handler(number)
        os.kill(os.getpid(), number)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send_signal(number)

    async def _end_in_time(self, probes: WorkersProbes) -> None:
        await self._stopping.wait()
        probes.stopping()
        self._signal(signal.SIGTERM)
        await asyncio.sleep(self._seconds_to_stop)
        self._signal(signal.SIGKILL)

    async def _keep(self, worker: Worker) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            begun, change = time.monotonic(), self._next_change
            code = await worker.run()
            if self._stopping.is_set() or change.is_set():
                await self._restarted.wait()
                continue
            if code == WRONG_USAGE and self._sources is None:
                self.exit_code = WRONG_USAGE  # it would be wrong again
                self._stopping.set()
                return
            if time.monotonic() - begun >= STEADY:
                pause = FIRST_PAUSE
            then = "when a source file changes" if self._sources else f"in {pause:.0f} s"
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            text = "process %d ended %s; it is started again %s"
            emit(logger, logging.WARNING, Event.WORKER_ENDED, text, worker.number, how, then, exit_code=code)
            await self._wait(change, None if self._sources else pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _wait(self, change: asyncio.Event, seconds: float | None) -> None:
        """Return after the seconds, at a stop, or at a change of a source file."""
        events = [asyncio.create_task(event.wait()) for event in (self._stopping, change)]
        await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()
        await self._restarted.wait()

    async def _watch(self, folder: Path) -> None:
        seen = await asyncio.to_thread(snapshot, folder)
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = await asyncio.to_thread(snapshot, folder)
            if now == seen:
                continue
            while (later := await asyncio.to_thread(snapshot, folder)) != now:  # a checkout writes many
                now = later
                await asyncio.sleep(LOOK_EVERY)
            changed = sorted(str(path) for path, _ in now ^ seen)
            seen = now
            text = "%s changed: the processes finish what they handle and are started again"
            emit(logger, logging.INFO, Event.SOURCE_CHANGED, text, changed[0])
            self._restarted.clear()
            change, self._next_change = self._next_change, asyncio.Event()
            change.set()
            await self._restart()
            self._restarted.set()

    async def _restart(self) -> None:
        self._signal(signal.SIGTERM)
        end = time.monotonic() + self._seconds_to_stop
        while any(worker.running for worker in self._workers):
            if time.monotonic() > end:
                self._signal(signal.SIGKILL)
            await asyncio.sleep(0.05)

    async def _wait_ready(self, started: Callable[[], None]) -> None:
        for worker in self._workers:
            await worker.was_ready.wait()
        started()


def snapshot(folder: Path) -> frozenset[tuple[str, int]]:
    """Return the source files below a folder, each with the time of its last change."""
    found = set()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in OTHER_FOLDERS and not name.startswith(".")]
        for name in files:
            if name.endswith(SOURCES):
                path = str(Path(place, name))
                with contextlib.suppress(OSError):  # it may be gone again
                    found.add((path, Path(path).stat().st_mtime_ns))
    return frozenset(found)


def delayline_command() -> list[str]:
    """Return the words that start this interpreter's `delayline`."""
    return [sys.executable, "-m", "delayline"]
