"""Probes: whether a process is alive and its endpoint works, for Kubernetes, systemd and container health checks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self

from delayline.errors import ConfigurationError
from delayline.events import Event, emit
from delayline.telemetry.http_server import Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from delayline.telemetry.measurements import Activity, Measurements

logger: logging.Logger = logging.getLogger(__name__)

#: An event loop that has not turned for so many seconds is blocked.
LOOP_LIMIT: Final = 10.0
#: A poller or receiver that fails for so many seconds is not ready: the time of the circuit breakers by default.
FAILURE_LIMIT: Final = 30.0
#: Seconds between turns of the event loop that are noted.
BEAT: Final = 1.0
#: Seconds between touches of the heartbeat file.
SECONDS_BETWEEN_BEATS: Final = 5.0
TRIGGERED: Final = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a probe."""

    ok: bool
    reasons: tuple[str, ...] = ()
    """Why not, a sentence each."""

    def response(self) -> Response:
        """Return it as an HTTP response with a JSON document: 200, or 503 with the reasons."""
        document = {"ok": self.ok, "reasons": self.reasons}
        status = HTTPStatus.OK if self.ok else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(f"{json.dumps(document)}\n", status, "application/json")


class Probes:
    """Watches endpoints' event loop and their measurements; use it as `async with probes:` around the endpoints.

    Args:
        measurements: Each endpoint's, from `Measurements.of(endpoint)` before its start.
        heartbeat: A file that is touched every 5 seconds while the event loop turns; removed at the end.

    Raises:
        ConfigurationError: At `async with`: the heartbeat file cannot be written.

    Example:
        ```python
        async with Probes(Measurements.of(endpoint)) as probes, endpoint:
            probes.started()
            with HttpServer("127.0.0.1:8081", probes.routes()):
                await endpoint.wait_stopped()
        ```
    """

    def __init__(self, *measurements: Measurements, heartbeat: Path | None = None) -> None:
        self._measurements = measurements
        for watched in measurements:
            watched.probes = self
        self._heartbeat = heartbeat
        self._systemd = Systemd.from_environment()
        self._state = "is starting"
        self._turned = time.monotonic()
        self._beats: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to watch the running event loop."""
        if self._heartbeat is not None:
            try:
                self._heartbeat.touch()
            except OSError as error:
                raise ConfigurationError(
                    f"cannot write the heartbeat file {str(self._heartbeat)!r}: {error.strerror}. Choose another"
                ) from error
        self._beats = asyncio.create_task(self._beat(), name="delayline heartbeat")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; without a process the heartbeat file would only grow old."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait([self._beats])
        if self._heartbeat is not None:
            with contextlib.suppress(OSError):
                self._heartbeat.unlink(missing_ok=True)

    def started(self, status: str = "") -> None:
        """Note that the endpoint has started, and notify systemd.

        Args:
            status: A line for `systemctl status`.
        """
        self._state = ""
        self._systemd.notify("READY=1", *([f"STATUS={status}"] if status else []))

    def stopping(self) -> None:
        """Note that the endpoint begins to stop, and notify systemd."""
        self._state = "is stopping"
        self._systemd.notify("STOPPING=1", "STATUS=finishes messages in flight")

    def live(self) -> Verdict:
        """Return whether the event loop has turned within 10 seconds; may be called from any thread."""
        blocked = time.monotonic() - self._turned
        if blocked < LOOP_LIMIT:
            return Verdict(ok=True)
        return Verdict(ok=False, reasons=(f"the event loop has not turned for {blocked:.0f} s",))

    def ready(self) -> Verdict:
        """Return whether the endpoint is started and its poller and receivers work; may be called from any thread.

        They work until they have failed for 30 seconds without a success, or a circuit breaker of theirs has triggered.
        """
        reasons = tuple(self._reasons())
        return Verdict(ok=not reasons, reasons=reasons)

    def routes(self) -> Mapping[str, Callable[[str], Response]]:
        """Return the paths `/live` and `/ready` for an `HttpServer`."""
        return {"/live": lambda _: self.live().response(), "/ready": lambda _: self.ready().response()}

    def ready_of(self, measurements: Measurements) -> Verdict:
        """Return whether one of the endpoints is ready, for metrics; may be called from any thread."""
        reasons = (*self._reasons_of_process(), *_reasons_of(measurements, ""))
        return Verdict(ok=not reasons, reasons=reasons)

    def _reasons(self) -> Iterator[str]:
        yield from self._reasons_of_process()
        for measurements in self._measurements:
            of = f" of {measurements.snapshot().endpoint}" if len(self._measurements) > 1 else ""
            yield from _reasons_of(measurements, of)

    def _reasons_of_process(self) -> Iterator[str]:
        if self._state:
            yield f"the endpoint {self._state}"
        yield from self.live().reasons

    async def _beat(self) -> None:
        touched = notified = 0.0
        while True:
            now = self._turned = time.monotonic()
            live = self.live().ok
            if live and self._heartbeat is not None and now - touched >= SECONDS_BETWEEN_BEATS:
                touched = now
                self._touch(self._heartbeat)
            if live and self._systemd.watchdog is not None and now - notified >= self._systemd.watchdog / 3:
                notified = now
                self._systemd.notify("WATCHDOG=1")
            await asyncio.sleep(BEAT if self._systemd.watchdog is None else min(BEAT, self._systemd.watchdog / 3))

    @staticmethod
    def _touch(heartbeat: Path) -> None:
        try:
            heartbeat.touch()
        except OSError as error:
            log_text = "Failed to touch the heartbeat file %s: %s"
            emit(logger, logging.WARNING, Event.HEARTBEAT_FAILED, log_text, heartbeat, error)


def ready_of(measurements: Measurements) -> Verdict:
    """Return whether an endpoint is ready: as its probes say or, without probes, without a look at the event loop."""
    if measurements.probes is not None:
        return measurements.probes.ready_of(measurements)
    started = measurements.endpoint is not None and measurements.endpoint.started
    reasons = tuple(_reasons_of(measurements, "")) if started else ("the endpoint is not started",)
    return Verdict(ok=not reasons, reasons=reasons)


def _reasons_of(measurements: Measurements, of: str) -> Iterator[str]:
    """Yield why an endpoint that is started is not ready."""
    snapshot = measurements.snapshot()
    yield from _failures(f"the poller{of}", snapshot.polling)
    for queue, activity in snapshot.receiving.items():
        yield from _failures(f"the receiver of {queue!r}", activity)
    for name, state in snapshot.breakers.items():
        if state == TRIGGERED:
            yield f"the circuit breaker {name!r}{of} has triggered"


def _failures(part: str, activity: Activity) -> Iterator[str]:
    if activity.failing_since is None:
        return
    failing = time.monotonic() - activity.failing_since
    if activity.last_success is None:
        yield f"{part} has failed for {failing:.0f} s, and never succeeded"
    elif failing >= FAILURE_LIMIT:
        yield f"{part} has failed for {failing:.0f} s"


class Systemd:
    """The service manager that started this process.

    See https://www.freedesktop.org/software/systemd/man/sd_notify.html

    Args:
        address: The path of its socket, `@name` for an abstract socket; None for no service manager.
        watchdog: Seconds within which it must be notified; None for no watchdog.
    """

    def __init__(self, address: str | None, watchdog: float | None = None) -> None:
        self._address = address
        self.watchdog: float | None = watchdog if address else None

    @classmethod
    def from_environment(cls) -> Self:
        """Return the service manager that the variables NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID describe."""
        meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval = os.environ.get("WATCHDOG_USEC", "")
        microseconds = int(interval) if meant and interval.isascii() and interval.isdigit() else 0
        return cls(os.environ.get("NOTIFY_SOCKET"), microseconds / 1e6 if microseconds else None)

    def notify(self, *assignments: str) -> None:
        """Send the assignments, such as `READY=1`; an error is logged, as the service works without it."""
        if not self._address:
            return
        target = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        lines = "\n".join(line.replace("\n", " ") for line in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as unix:
                unix.setblocking(False)
                unix.sendto(lines.encode(), target)
        except OSError as error:
            log_text = "Failed to notify systemd of %s: %s"
            emit(logger, logging.WARNING, Event.HEARTBEAT_FAILED, log_text, assignments[0], error)
