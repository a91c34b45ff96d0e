"""The cost of telemetry on PostgreSQL: CPU of worker and server for each message with it, against without."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks.common import DESTINATION, ROUNDS, Figures, endpoint_on, scaled
from benchmarks.handling import Contender, Server, compare
from benchmarks.on_server import PATIENCE, Dispatched, empty_queues, messages, store_rate
from benchmarks.processes import cpu_of
from benchmarks.scenarios_handled import AT_LEAST_ONCE, BEST, EXACTLY_ONCE, on_postgresql
from benchmarks.telemetry_kinds import watched

if TYPE_CHECKING:
    from pathlib import Path

NUMBER = scaled(20_000)
BURST = scaled(50_000)
#: Nothing; Prometheus' endpoint; the metrics of OpenTelemetry's SDK.
KINDS = ("off", "prometheus", "opentelemetry")


async def pg_telemetry(folder: Path) -> Figures:
    """20 000 due at one instant to a handler, and 50 000 from store to queue, with and without telemetry."""
    del folder
    contenders = [
        Contender(
            f"handled {mode}, {kind}", "delayline", {"settings": some | BEST, "telemetry": kind}, True, number=NUMBER
        )
        for mode, some in (("at least once", AT_LEAST_ONCE), ("exactly once", EXACTLY_ONCE))
        for kind in KINDS
    ]
    with on_postgresql() as server:
        figures, _ = await compare(server, contenders)
        figures |= await _bursts(server)
    costs: Figures = {}
    for name, off in figures.items():
        if ", off, " in name and name.endswith(" us"):
            for kind in KINDS[1:]:
                costs[f"{name.replace(', off,', f', {kind},')} more %"] = (
                    figures[name.replace(", off,", f", {kind},")] / off - 1
                ) * 100
    return figures | costs


async def _bursts(server: Server) -> Figures:
    runs: dict[str, list[float]] = {}
    url = server.fresh()
    for turn in range(ROUNDS):
        for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
            worker, postgresql = await _burst(url, server.pid, kind)
            runs.setdefault(f"burst, {kind}, worker us", []).append(worker)
            runs.setdefault(f"burst, {kind}, worker and server us", []).append(worker + postgresql)
    return {name: statistics.median(some) for name, some in runs.items()}


async def _burst(url: str, pid: int | None, kind: str) -> tuple[float, float]:
    """Return the CPU microseconds a message of this process and of the server, from the due instant on."""
    due = datetime.now(UTC) + timedelta(seconds=5 + BURST / 10_000)
    await store_rate(url, messages(f"{due:%H%M%S%f}", BURST, lambda _: due))
    endpoint = endpoint_on(url)
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([DESTINATION])
    dispatched, logger = Dispatched(BURST), logging.getLogger("delayline.delayed")
    logger.addHandler(dispatched)
    logger.setLevel(logging.DEBUG)
    with watched(endpoint, kind):
        async with endpoint:
            await asyncio.sleep((due - datetime.now(UTC)).total_seconds() - 0.1)
            worker, server = time.process_time(), cpu_of(pid)
            await asyncio.wait_for(dispatched.done.wait(), PATIENCE)
            worker, server = time.process_time() - worker, cpu_of(pid) - server
    logger.removeHandler(dispatched)
    logger.setLevel(logging.NOTSET)
    empty_queues(url)
    return worker / BURST * 1e6, server / BURST * 1e6
