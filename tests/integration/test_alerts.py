"""Each outage rings within two minutes with the shipped rules, and its alerts resolve.

An endpoint is `delayline run`, started again two seconds after its end as the shipped unit does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import pytest
from tests.conftest import not_installed, running
from tests.eventually import eventually_async
from tests.servers.frozen import Frozen
from tests.servers.ports import free_port
from tests.servers.postgresql import PostgresqlServer
from tests.servers.prometheus import PrometheusServer
from tests.servers.rabbitmq import RabbitmqServer

from delayline import Endpoint, Send

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

APP: Final = """
from delayline import Endpoint, Recoverability

endpoint = Endpoint.from_settings(recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

@endpoint.handler
async def handle(message, context):
    if message.text == "fail":
        raise ValueError(message.text)
    if message.text == "forward":
        await context.send("ledger", "forwarded")
"""
RING_WITHIN: Final = 120.0  # seconds
#: As long as the rules look back, and a few scrapes.
RESOLVED_WITHIN: Final = 420.0
RESTART_AFTER: Final = 2.0  # RestartSec of deploy/systemd
#: A slow start may ring first, for as long as a rule looks back.
WORKS_WITHIN: Final = 400.0


class Supervised:
    """An endpoint in a process that is started again whenever it ends, until `stop`."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        variables = {f"DELAYLINE_{variable}": value for variable, value in settings.items()}
        self._environment = os.environ | {"DELAYLINE_ENDPOINT": name} | variables
        self._runs: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it; it need not succeed."""
        self._runs = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the process for good."""
        if self._runs is not None:
            self._runs.cancel()
            await asyncio.gather(self._runs, return_exceptions=True)
            self._runs = None

    async def command(self, *words: str) -> None:
        """Run a command of delayline with the endpoint's settings."""
        process = await self._begin(*words)
        assert await process.wait() == 0, self.log

    @property
    def log(self) -> str:
        """The end of what its processes have said."""
        return (self._folder / f"{self.name}.log").read_text(errors="replace")[-3000:]

    async def _run(self) -> None:
        while True:
            process = await self._begin("run", "app:endpoint", "--metrics", self.address)
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await asyncio.sleep(RESTART_AFTER)

    async def _begin(self, *words: str) -> asyncio.subprocess.Process:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "delayline", *words,
                cwd=self._folder, env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip


@dataclass(frozen=True)
class Outage:
    """An outage of an endpoint, and what it has to ring.

    alerts: patterns of names; each of them must ring.
    works_before: whether the endpoint has started before it.
    """

    endpoint: Supervised
    alerts: tuple[str, ...]
    begin: Callable[[], Awaitable[object]]
    mend: Callable[[], Awaitable[object]]
    works_before: bool = True


@dataclass(frozen=True)
class Rung:
    """When, in seconds after the outage's beginning and after its end, alerts rang and had resolved; None: never."""

    rang: Mapping[str, float]
    resolved: float | None


class Outages:
    """The eight outages, with servers of their own where they stop or hang."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        (folder / "app.py").write_text(APP)
        self._folder = folder
        self._hung, self._stopped, self._store, self._healthy = (
            stack.enter_context(running(PostgresqlServer, "fsync=off")) for _ in range(4)
        )
        self._broker = stack.enter_context(running(RabbitmqServer))
        self._frozen = [Frozen(server.pid) for server in (self._hung, self._broker)]
        for frozen in self._frozen:
            stack.callback(frozen.go_on)

    @classmethod
    @contextlib.contextmanager
    def prepared(cls, folder: Path) -> Iterator[Self]:
        """Start the servers."""
        with contextlib.ExitStack() as stack:
            yield cls(folder, stack)

    def all(self) -> list[Outage]:
        """Return them, not begun."""
        return [*self._of_servers(), *self._of_processes(), *self._of_queues()]

    def _of_servers(self) -> Iterator[Outage]:
        for name, frozen, url, alerts in (
            ("database-hung", self._frozen[0], self._hung.new_database(), ("DelaylineNotReady",)),
            ("broker-hung", self._frozen[1], self._broker.new_vhost(), ("DelaylineNotReady|DelaylineReceiverFailing",)),
        ):
            yield Outage(self._endpoint(name, URL=url), alerts, _in_thread(frozen.stop), _in_thread(frozen.go_on))
        stopped = self._endpoint("database-stopped", URL=self._stopped.new_database())
        yield Outage(
            stopped, ("DelaylineNotReady",), _in_thread(self._stopped.stop, "fast"), _in_thread(self._stopped.start)
        )
        alone = self._endpoint(
            "poller-alone", TRANSPORT_URL=self._healthy.new_database(), STORE_URL=self._store.new_database()
        )
        yield Outage(
            alone, ("DelaylinePollerFailing",), _in_thread(self._store.stop, "fast"), _in_thread(self._store.start)
        )

    def _of_processes(self) -> Iterator[Outage]:
        stopped = self._endpoint("process-stopped", URL=self._healthy.new_database())
        yield Outage(stopped, ("DelaylineDown",), stopped.stop, stopped.start)
        missing = f"postgresql://delayline@127.0.0.1:{self._healthy.port}/missing"
        failing = self._endpoint("cannot-start", URL=missing)
        yield Outage(
            failing,
            ("DelaylineNotReady|DelaylineDown",),
            failing.start,
            _in_thread(self._create_missing),
            works_before=False,
        )

    def _of_queues(self) -> Iterator[Outage]:
        url = self._healthy.new_database()
        errors = self._endpoint("error-queue", URL=url)
        yield Outage(
            errors,
            ("DelaylineErrorQueue", "DelaylineErrorsQueued"),
            lambda: _send(url, "error-queue", "fail"),
            lambda: errors.command("errors", "purge", "--all", "--yes"),
        )
        sent = self._healthy.new_database()
        sender, ledger = self._endpoint("no-receiver", URL=sent), self._endpoint("ledger", URL=sent)

        async def forward() -> None:
            await sender.command("setup", "--queue", "ledger")
            await _send(sent, "no-receiver", "forward")

        self.ledger = ledger
        yield Outage(sender, ("DelaylineQueueUnreceived",), forward, ledger.start)

    def _endpoint(self, name: str, **settings: str) -> Supervised:
        return Supervised(name, self._folder, settings)

    def _create_missing(self) -> None:
        with self._healthy.administrator() as connection:
            connection.execute("CREATE DATABASE missing")


def _in_thread(function: Callable[..., object], *arguments: str) -> Callable[[], Awaitable[object]]:
    return lambda: asyncio.to_thread(function, *arguments)


async def _send(url: str, queue: str, text: str) -> None:
    async with Endpoint("sender", url=url, send_only=True) as sender:
        await sender.send_many([Send(queue, text)] * 5)


async def _ringing(prometheus: PrometheusServer, endpoint: Supervised) -> set[str]:
    """Return the names of the firing alerts of an endpoint, or of its process."""
    alerts = (await asyncio.to_thread(prometheus.ask, "alerts"))["alerts"]
    return {
        alert["labels"]["alertname"]
        for alert in alerts
        if alert["state"] == "firing"
        and (
            alert["labels"].get("delayline_endpoint") == endpoint.name
            or alert["labels"].get("instance") == endpoint.address
        )
    }


async def _works(prometheus: PrometheusServer, endpoint: Supervised) -> bool:
    query = f'min_over_time(delayline_ready{{delayline_endpoint="{endpoint.name}"}}[20s]) == 1'
    found = (await asyncio.to_thread(prometheus.ask, "query", query=query))["result"]
    return bool(found) and not await _ringing(prometheus, endpoint)


async def _observe(prometheus: PrometheusServer, outage: Outage) -> Rung:
    """Begin the outage, wait for its alerts, mend it, and wait until they have resolved."""
    endpoint, rang = outage.endpoint, dict[str, float]()
    if outage.works_before:
        await endpoint.start()
        await eventually_async(lambda: _works(prometheus, endpoint), f"{endpoint.name} works", WORKS_WITHIN)
    began = time.monotonic()
    await outage.begin()
    while time.monotonic() - began < RING_WITHIN and not _all_rang(outage, rang):
        await asyncio.sleep(1)
        for alert in await _ringing(prometheus, endpoint):
            rang.setdefault(alert, round(time.monotonic() - began, 1))
    await outage.mend()
    mended = time.monotonic()
    while time.monotonic() - mended < RESOLVED_WITHIN:
        await asyncio.sleep(1)
        ringing = await _ringing(prometheus, endpoint)
        if not any(re.fullmatch("|".join(outage.alerts), alert) for alert in ringing):
            return Rung(rang, round(time.monotonic() - mended, 1))
    return Rung(rang, None)


def _all_rang(outage: Outage, rang: Mapping[str, float]) -> bool:
    return all(any(re.fullmatch(pattern, alert) for alert in rang) for pattern in outage.alerts)


@pytest.mark.long
@pytest.mark.server
@pytest.mark.timeout(1200)
async def test_each_outage_rings_within_two_minutes_and_resolves(tmp_path: Path) -> None:
    """Given endpoints that work, when each has an outage, then its alerts ring, and resolve after the outage's end."""
    if not PrometheusServer.installed():
        not_installed(PrometheusServer.product, PrometheusServer.install)
    with Outages.prepared(tmp_path) as outages:
        # Given
        every = outages.all()
        addresses = [outage.endpoint.address for outage in every]
        prometheus = await asyncio.to_thread(lambda: PrometheusServer(*addresses, every="15s"))
        try:
            # When
            results = await asyncio.gather(*(_observe(prometheus, outage) for outage in every))
        finally:
            await asyncio.gather(*(outage.endpoint.stop() for outage in every), outages.ledger.stop())
            await asyncio.to_thread(prometheus.stop)
    # Then
    table = {outage.endpoint.name: result for outage, result in zip(every, results, strict=True)}
    for name, result in table.items():
        print(name, result)  # noqa: T201 - what one wants to know of a rule's change
    assert [outage.endpoint.name for outage in every if not _all_rang(outage, table[outage.endpoint.name].rang)] == []
    assert [name for name, result in table.items() if result.resolved is None] == []
