"""The peers on PostgreSQL, doing the same work in the way that they recommend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import asyncpg
import procrastinate
from pgqueuer import Queries
from pgqueuer.db import AsyncpgDriver

from benchmarks.bare import BODY

if TYPE_CHECKING:
    pass


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
