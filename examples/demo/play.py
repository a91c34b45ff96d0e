"""Plays the demo: starts three processes, kills one half way, watches what arrives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import IO, TYPE_CHECKING, Final

from examples.demo.reminders import DESTINATION
from examples.demo.stage import DISPATCHER, RECEIVER, REMINDERS, REPOSITORY, SENDER, JournalReader, Stage

from delayline.clock import SystemClock, from_microseconds
from delayline.composition import endpoint_from
from delayline.delayed.store import managed
from delayline.error_queue import managed_queues
from delayline.errors import BackendUnusable
from delayline.opening import open_store, open_transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from examples.demo.pipeline import Pipeline

LOOK_EVERY: Final = 0.1  # seconds
START_UP: Final = timedelta(seconds=15)
PATIENCE: Final = timedelta(seconds=12)
"""How long after the last due time messages may still arrive before they count as lost."""
ON_TIME: Final = timedelta(milliseconds=100)
"""A message handled sooner than this after its due time did not wait behind others."""
AFTERMATH: Final = 0.5
"""Seconds in which a duplicate may still arrive after the last message."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One handled message."""

    id: str
    due: datetime
    arrived: datetime

    @property
    def lateness(self) -> timedelta:
        """How long after its due time it was handled; negative would be early."""
        return self.arrived - self.due


@dataclass(slots=True)
class Course:
    """What has happened so far."""

    total: int
    started: datetime
    sent: set[str] = field(default_factory=set)
    arrivals: list[Arrival] = field(default_factory=list)
    arrived: Counter[str] = field(default_factory=Counter)
    killed: datetime | None = None
    back: datetime | None = None
    finished: datetime | None = None
    still_stored: int = 0
    in_error_queue: int = 0

    @property
    def complete(self) -> bool:
        """Whether everything was sent and has arrived."""
        return len(self.sent) == self.total and self.arrived.keys() >= self.sent

    def backlog_gone(self) -> datetime | None:
        """Return when, after the outage, a message was first handled on time again; None if that never was."""
        back = self.back
        if back is None:
            return None
        return min(
            (one.arrived for one in self.arrivals if one.arrived > back and one.lateness < ON_TIME), default=None
        )

    def touched_by_outage(self) -> Callable[[Arrival], bool]:
        """Return a test for messages that waited for the dead dispatcher, or behind others that did."""
        killed, gone = self.killed, self.backlog_gone()
        return lambda one: killed is not None and one.arrived > killed and (gone is None or one.arrived < gone)


class Play:
    """One run of the demo on a stage that holds the reminders."""

    def __init__(
        self, stage: Stage, total: int, *, longest: timedelta, outage: timedelta, pipeline: Pipeline | None = None
    ) -> None:
        self._stage = stage
        self._pipeline = pipeline
        self._scheduling: asyncio.Future[None] | None = None
        self._clock = SystemClock()
        self._longest = longest
        self._outage = outage
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._readers = {party: JournalReader(stage.journal(party)) for party in (SENDER, DISPATCHER, RECEIVER)}
        self._sender_done: datetime | None = None
        self._starts = 0
        self.course = Course(total, self._clock.now())

    async def run(self, watch: Callable[[Course], None]) -> Course:
        """Play it to its end, calling `watch` with the course several times a second."""
        for name in (REMINDERS, DESTINATION):
            journal = True if self._pipeline is not None and name == REMINDERS else None
            await endpoint_from(replace(self._stage.settings(name), journal=journal)).setup()
        async with self._company():
            await self._start(RECEIVER)
            await self._start(DISPATCHER)
            await self._until(lambda: self._starts == 2, START_UP, watch)
            if self._pipeline is None:
                await self._start(SENDER)
            else:
                self._scheduling = asyncio.ensure_future(asyncio.to_thread(self._pipeline.schedule))
            await self._until(self._over, None, watch)
            await self._clock.sleep(AFTERMATH)
            self._look()
        await self._take_stock()
        self.course.finished = self._clock.now()
        watch(self.course)
        return self.course

    async def _until(
        self, reached: Callable[[], bool], limit: timedelta | None, watch: Callable[[Course], None]
    ) -> None:
        deadline = None if limit is None else self._clock.now() + limit
        while not reached():
            self._look()
            await self._kill_or_restart()
            self._check_processes()
            watch(self.course)
            if deadline is not None and self._clock.now() > deadline:
                raise BackendUnusable(f"the demo's processes did not start; see {self._stage.directory}/*.log")
            await self._clock.sleep(LOOK_EVERY)

    def _over(self) -> bool:
        if self._sender_done is None:
            return False
        return self.course.complete or self._clock.now() > self._sender_done + self._longest + PATIENCE

    def _look(self) -> None:
        course = self.course
        course.sent.update(row[0] for row in self._readers[SENDER].new_rows())
        for row in self._readers[RECEIVER].new_rows():
            if len(row) == 3:
                course.arrivals.append(Arrival(row[0], from_microseconds(int(row[1])), from_microseconds(int(row[2]))))
                course.arrived[row[0]] += 1
            else:
                self._starts += 1
        for row in self._readers[DISPATCHER].new_rows():
            self._starts += 1
            if course.killed is not None:
                course.back = from_microseconds(int(row[1]))

    async def _kill_or_restart(self) -> None:
        course, dispatcher = self.course, self._processes.get(DISPATCHER)
        if course.killed is None:
            if dispatcher is not None and len(course.arrived) * 2 >= course.total:
                dispatcher.send_signal(signal.SIGKILL)
                await dispatcher.wait()
                course.killed = self._clock.now()
                del self._processes[DISPATCHER]
        elif dispatcher is None and self._clock.now() >= course.killed + self._outage:
            await self._start(DISPATCHER)

    def _check_processes(self) -> None:
        if self._pipeline is not None and self._scheduling is not None and self._scheduling.done():
            self._scheduling.result()
            self._sender_done = self._sender_done or self._clock.now() + self._pipeline.lead
        for party, process in self._processes.items():
            if process.returncode is None:
                continue
            if party == SENDER and process.returncode == 0:
                self._sender_done = self._sender_done or self._clock.now()
                continue
            log = self._stage.log(party)
            last = next(iter(log.read_text(errors="replace").strip().splitlines()[-1:]), "it printed nothing")
            raise BackendUnusable(f"the {party} ended with exit code {process.returncode}: {last} (see {log})")

    async def _start(self, party: str) -> None:
        with self._stage.log(party).open("ab") as log:
            self._processes[party] = await _python(party, self._stage, log)

    @contextlib.asynccontextmanager
    async def _company(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    process.terminate()
            for process in self._processes.values():
                try:
                    await asyncio.wait_for(process.wait(), 5)
                except TimeoutError:
                    process.kill()
                    await process.wait()

    async def _take_stock(self) -> None:
        """Count what is left where nothing should be."""
        settings = self._stage.settings(REMINDERS)
        if self._pipeline is not None:
            settings = replace(settings, cold_tier=str(self._stage.cold_tier))
        async with open_store(settings) as store, open_transport(settings) as transport:
            counts = await managed(store).count_by_due(timedelta(days=1))
            self.course.still_stored = sum(one.count for one in counts)
            self.course.in_error_queue = await managed_queues(transport).count(settings.error_queue)


async def _python(party: str, stage: Stage, log: IO[bytes]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "examples.demo.parties",
        party,
        str(stage.directory),
        stdin=asyncio.subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
