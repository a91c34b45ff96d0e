"""The peers on PostgreSQL, doing the same work in the way that they recommend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import asyncpg
import procrastinate
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver

from benchmarks.bare import BODY

if TYPE_CHECKING:
    from pgqueuer.models import Job


async def pgqueuer(url: str, number: int) -> tuple[float, float]:
    """Return PgQueuer's enqueued (1000 a call) and handled (batches of 100) messages a second."""
    connection = await asyncpg.connect(url)
    driver = AsyncpgDriver(connection)
    queries = Queries(driver)
    await queries.install()
    started = time.perf_counter()
    for _ in range(0, number, 1000):
        await queries.enqueue(["work"] * 1000, [BODY] * 1000, [0] * 1000)
    enqueued = number / (time.perf_counter() - started)
    queuer, handled = PgQueuer(driver), 0

    @queuer.entrypoint("work")
    async def work(job: Job) -> None:
        nonlocal handled
        del job
        handled += 1
        if handled == number:
            queuer.shutdown.set()

    started = time.perf_counter()
    await queuer.run(batch_size=100)
    drained = number / (time.perf_counter() - started)
    await connection.close()
    return enqueued, drained


async def procrastinate_drain(url: str, number: int) -> float:
    """Return messages a second that one Procrastinate worker of concurrency 10 handles."""
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(queue="work")
    async def work(body: str) -> None:
        del body

    jobs: list[dict[str, Any]] = [{"body": BODY.decode()}] * 1000
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for _ in range(0, number, 1000):
            await work.batch_defer_async(*jobs)
        started = time.perf_counter()
        await app.run_worker_async(concurrency=10, wait=False, install_signal_handlers=False, listen_notify=False)
        return number / (time.perf_counter() - started)
