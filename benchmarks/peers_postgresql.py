"""The peers on PostgreSQL, doing the same work in the way that they recommend, and the raw loops of both servers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from benchmarks import bare_mariadb, bare_postgresql
from benchmarks.bare import BODY
from benchmarks.handled_worker import HEADERS, Records, bodies, due_of, forever, ready, steadily

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import ModuleType

    from benchmarks.handled_worker import Settings


async def pgqueuer_enqueue(url: str, number: int) -> float:
    """Return the messages a second that PgQueuer enqueues, 1000 a call, and leave nothing behind."""
    async with _pgqueuer(url) as queries:
        await queries.install()
        started = time.perf_counter()
        for _ in range(0, number, 1000):
            await queries.enqueue(["work"] * 1000, [BODY] * 1000, [0] * 1000)
        enqueued = number / (time.perf_counter() - started)
        await queries.uninstall()
    return enqueued


async def bare_fill(url: str, settings: Settings) -> None:
    """Put rows into the table of the raw loop, or into its queue."""
    await asyncio.to_thread(
        _bare_at(url).fill, url, [one for some in bodies(settings["number"]) for one in some], due_of(settings)
    )


async def bare_work(url: str, settings: Settings) -> None:
    """Move 500 from table to table, then claim 500, and so on."""
    await asyncio.to_thread(_bare_at(url).handle, url, Records().write, due_of(settings), ready)


def _bare_at(url: str) -> ModuleType:
    return bare_mariadb if url.startswith("mariadb") else bare_postgresql


async def pgqueuer_fill(url: str, settings: Settings) -> None:
    """Enqueue jobs for `work`, after `pgq install` and `pgq autovac`."""
    async with _pgqueuer(url) as queries:
        await queries.install()
        await queries.optimize_autovacuum()
        due = due_of(settings)
        for batch in bodies(settings["number"]):
            after = [due - datetime.now(UTC)] * len(batch) if due else None
            some, priorities = ["work"] * len(batch), [0] * len(batch)
            await queries.enqueue(some, list(batch), priorities, after, None, [HEADERS] * len(batch))


async def pgqueuer_work(url: str, settings: Settings) -> None:
    """Handle with PgQueuer, in batches of 100; it looks for due jobs ten times a second.

    Without `force_custom_plan` its statement keeps a plan for one row, which is made while it looks and nothing is due.
    That plan sorts all due jobs for each batch, until the server analyzes the table: 180 us a message instead of 48.
    """
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver

    connection = await asyncpg.connect(url, server_settings={"plan_cache_mode": "force_custom_plan"})
    queuer, records = PgQueuer(AsyncpgDriver(connection)), Records()

    @queuer.entrypoint("work")
    async def work(job: Any) -> None:  # noqa: ANN401 - PgQueuer's Job
        records.write(job.payload)

    ready()
    await queuer.run(dequeue_timeout=timedelta(seconds=0.1), batch_size=settings["batch"])


async def pgqueuer_send(url: str, settings: Settings) -> None:
    """Enqueue at a steady rate."""
    async with _pgqueuer(url) as queries:
        after = timedelta(seconds=settings["delay"]) if settings["delay"] else None

        async def send(body: bytes) -> None:
            await queries.enqueue("work", body, 0, after, None, HEADERS)

        await steadily(settings, send)


@contextlib.asynccontextmanager
async def _pgqueuer(url: str) -> AsyncIterator[Any]:
    import asyncpg
    from pgqueuer import Queries
    from pgqueuer.db import AsyncpgDriver

    connection = await asyncpg.connect(url)
    yield Queries(AsyncpgDriver(connection))
    await connection.close()


async def procrastinate_fill(url: str, settings: Settings) -> None:
    """Defer jobs for the task `work`."""
    app, work = _procrastinate(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for batch in bodies(settings["number"]):
            task = work.configure(schedule_at=due_of(settings)) if settings["due"] else work
            await task.batch_defer_async(*({"body": body.decode()} for body in batch))


async def procrastinate_work(url: str, settings: Settings) -> None:
    """Handle with one Procrastinate worker, which looks for due jobs ten times a second."""
    app, _ = _procrastinate(url, Records().write)
    async with app.open_async():
        ready()
        await app.run_worker_async(concurrency=settings["concurrency"], fetch_job_polling_interval=0.1)


def _procrastinate(url: str, write: Callable[[bytes], None] | None = None) -> tuple[Any, Any]:
    import procrastinate as peer

    app = peer.App(connector=peer.PsycopgConnector(conninfo=url))

    @app.task(queue="work", name="work")
    async def work(body: str) -> None:
        assert write is not None
        write(body.encode())

    return app, work


async def awa_fill(url: str, settings: Settings) -> None:
    """Copy jobs into awa's queue storage."""
    import awa

    client, due = awa.AsyncClient(url), due_of(settings)
    await client.migrate()
    await client.install_queue_storage()
    for batch in bodies(settings["number"]):
        jobs = [AwaWork(body.decode()) for body in batch]
        await client.enqueue_many_copy(jobs, queue="work", run_at=due, metadata=HEADERS)


async def awa_work(url: str, settings: Settings) -> None:
    """Handle with awa's runtime."""
    import awa

    client, records = awa.AsyncClient(url), Records()

    @client.task(AwaWork, queue="work")
    async def work(job: Any) -> None:  # noqa: ANN401 - awa's Job
        records.write(job.args.body.encode())

    await client.start([("work", settings["workers"])], **settings.get("start", {}))
    ready()
    await forever()


@dataclasses.dataclass
class AwaWork:
    """What awa's jobs carry."""

    body: str
