"""Each scenario returns its figures; what they have to reach stands beside them in `__main__`."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import event

from benchmarks import bare
from benchmarks.common import (
    DESTINATION,
    NAME,
    ROUNDS,
    Figures,
    against,
    endpoint_on,
    fill,
    fill_far,
    lateness,
    scaled,
    single_rate,
    store_on,
    together_rate,
)
from delayline.sql.databases import database_at
from delayline.sql.file_database import FileDatabase

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from delayline import Message, MessageContext

BATCH = 500


async def single_send(folder: Path) -> Figures:
    """One awaited `send(delay=)` after another, against one insert a commit."""
    rates: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        raw = bare.insert_rate(folder / f"bare-{number}.db", scaled(3000), 1)
        rates.append((await single_rate(folder / f"send-{number}.db", scaled(3000)), raw))
    return against("bare insert, 1 a commit", rates)


async def concurrent_sends(folder: Path) -> Figures:
    """1 000 `send(delay=)` awaited together, ten times, against 100 inserts a commit."""
    rates: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        raw = bare.insert_rate(folder / f"bare-{number}.db", scaled(50_000), 100)
        rates.append((await together_rate(folder / f"sends-{number}.db", scaled(10_000)), raw))
    return against("bare insert, 100 a commit", rates)


async def burst(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from store to queue, no handler, against a bare INSERT..SELECT."""
    rates: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        raw = bare.move_rate(folder / f"bare-{number}.db", scaled(50_000), BATCH)
        rates.append((await _drain_rate(folder / f"burst-{number}.db", scaled(50_000), pending=0), raw))
    return against("bare move, 500 a commit", rates)


async def spread(folder: Path) -> Figures:
    """Due times 1 ms apart for 20 s, received by a handler of the same process."""
    return await lateness(folder / "spread.db", number=scaled(20_000), gap=timedelta(milliseconds=1))


async def backlog(folder: Path) -> Figures:
    """A million messages pending: the drain rate and a short delay's lateness, against an empty store."""
    many = scaled(1_000_000)
    rates = {0: list[float](), many: list[float]()}
    late = {0: list[float](), many: list[float]()}
    filled = folder / "million.db"
    async with store_on(filled) as store:
        await fill_far(store, many)
    for number in range(ROUNDS):
        for pending, path in ((0, folder / f"empty-{number}.db"), (many, filled)):
            rates[pending].append(await _drain_rate(path, scaled(50_000), pending=pending, prefix=f"burst{number}"))
            gap = timedelta(milliseconds=20)
            figures = await lateness(path, number=200, gap=gap, prefix=f"late{number}")
            late[pending].append(figures["lateness p50 ms"])
    empty, full = statistics.median(rates[0]), statistics.median(rates[many])
    return {
        "drain from an empty store /s": empty,
        f"drain behind {many} /s": full,
        "ratio": full / empty,
        "short delay, empty p50 ms": statistics.median(late[0]),
        "short delay, behind them p50 ms": statistics.median(late[many]),
        "later by ms": statistics.median(late[many]) - statistics.median(late[0]),
    }


async def rest(folder: Path) -> Figures:
    """An endpoint with a poller and a receiver, nothing due for a year, watched for 20 s."""
    path, statements = folder / "rest.db", list[str]()
    async with store_on(path) as store:
        await fill_far(store, 1000)
    database = database_at(f"sqlite:///{path}")
    assert isinstance(database, FileDatabase)

    def trace(connection: sqlite3.Connection, _: object) -> None:
        connection.set_trace_callback(statements.append)

    event.listen(database.dialect.connections.engine, "connect", trace)
    endpoint = endpoint_on(path)
    endpoint.handler(_ignore)
    async with endpoint:
        await asyncio.sleep(2)
        statements.clear()
        cpu, started = time.process_time(), time.perf_counter()
        await asyncio.sleep(20)
        seconds = time.perf_counter() - started
        return {
            "share of one core %": (time.process_time() - cpu) / seconds * 100,
            "statements a second": len(statements) / seconds,
        }


async def memory(folder: Path) -> Figures:
    """The most a process holds while a million messages are pending and 50 000 fall due and are handled."""
    path = folder / "memory.db"
    async with store_on(path) as store:
        await fill_far(store, scaled(1_000_000))
    await _drain_rate(path, scaled(50_000), pending=scaled(1_000_000))
    await lateness(path, number=scaled(50_000), gap=timedelta(0), prefix="handled")
    return {"most resident MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


async def _ignore(message: Message, context: MessageContext) -> None:
    del message, context


async def _drain_rate(path: Path, number: int, *, pending: int, prefix: str = "burst") -> float:
    """Return messages a second from the instant all are due until the last has left the store."""
    async with store_on(path) as store:
        due = datetime.now(UTC) + timedelta(seconds=3)
        await fill(store, prefix, [due] * number, DESTINATION)
    watch = bare.connect(path)
    left = f'SELECT count(*) FROM (SELECT 1 FROM "{NAME}.timeouts" LIMIT {pending + 1})'  # noqa: S608 - our own name
    if pending:
        left = f'SELECT EXISTS (SELECT 1 FROM "{NAME}.timeouts" WHERE due < {bare.FAR // 2})'  # noqa: S608
        left = left.replace(str(bare.FAR // 2), str(int((time.time() + 86_400) * 1e6)))
    async with endpoint_on(path):
        await asyncio.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds()))
        started = time.perf_counter()
        while watch.execute(left).fetchone()[0]:  # noqa: ASYNC110 - the poller works for another file handle
            await asyncio.sleep(0.005)
        elapsed = time.perf_counter() - started
    watch.execute("DELETE FROM delayline_messages")
    watch.close()
    return number / elapsed
