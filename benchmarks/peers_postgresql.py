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


async def pgqueuer_enqueue(url: str, number: int) -> float:
    """Return the messages a second that PgQueuer enqueues, 1000 a call, and leave nothing behind."""
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    started = time.perf_counter()
    await _enqueue(queries, number)
    enqueued = number / (time.perf_counter() - started)
    await queries.uninstall()
    await connection.close()
    return enqueued


async def pgqueuer_drain(url: str, number: int) -> float:
    """Return the messages a second that PgQueuer handles, in batches of 100."""
    connection = await asyncpg.connect(url)
    driver = AsyncpgDriver(connection)
    queries = Queries(driver)
    await queries.install()
    await _enqueue(queries, number)
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
    return drained


async def pgqueuer_fill(url: str, number: int) -> None:
    """Enqueue jobs for `work`."""
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    if not await queries.has_table(queries.qbe.settings.queue_table):
        await queries.install()
    await _enqueue(queries, number)
    await connection.close()


async def procrastinate_fill(url: str, number: int) -> None:
    """Defer jobs for the task `work`."""
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(queue="work", name="work")
    async def work(body: str) -> None:
        del body

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        jobs: list[dict[str, Any]] = [{"body": BODY.decode()}] * 1000
        for _ in range(0, number, 1000):
            await work.batch_defer_async(*jobs)


async def _enqueue(queries: Queries, number: int) -> None:
    for _ in range(0, number, 1000):
        await queries.enqueue(["work"] * 1000, [BODY] * 1000, [0] * 1000)


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
