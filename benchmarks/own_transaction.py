"""A row for each message, 32 at once, in one of the ways of `WAYS`: prints messages a second and CPU for each.

A program: `python -m benchmarks.own_transaction WAY URL NUMBER SERVER_PID`. Both clocks begin when the first messages
are committed, which connect, and end when all rows are committed and the queue is empty.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.processes import cpu_of
from delayline import Endpoint, Send, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delayline import Message, MessageContext

AT_ONCE = 32
FIRST = 16 * AT_ONCE
INSERT = "INSERT INTO shop (order_number) VALUES (1)"
INSERT_TEXT = text(INSERT)
WAYS = ("by hand", "AsyncConnection by hand", "no transaction", "def", "coroutine", "coroutine, pool")


class Clocks(NamedTuple):
    """The time, and the CPU seconds of this process and of the server."""

    at: float
    own: float
    server: float

    @classmethod
    def now(cls, server: int) -> Clocks:
        """Read them."""
        return cls(time.perf_counter(), time.process_time(), cpu_of(server))

    def since(self, began: Clocks) -> Clocks:
        """Return what has passed."""
        return Clocks(self.at - began.at, self.own - began.own, self.server - began.server)


def by_hand(url: str, number: int, server: int) -> Clocks:
    """Insert and commit with psycopg's pool, on threads."""
    with ConnectionPool(url, min_size=AT_ONCE, max_size=AT_ONCE) as pool, ThreadPoolExecutor(AT_ONCE) as threads:
        pool.wait()

        def insert(_: int) -> None:
            with pool.connection() as connection:
                connection.execute(INSERT)

        exhaust(threads.map(insert, range(FIRST)))
        began = Clocks.now(server)
        exhaust(threads.map(insert, range(number)))
        return Clocks.now(server).since(began)


async def by_hand_on_loop(url: str, number: int, server: int) -> Clocks:
    """Insert and commit with SQLAlchemy's AsyncConnection, in tasks."""
    engine = create_async_engine(url.replace("postgresql:", "postgresql+psycopg:"), pool_size=AT_ONCE, max_overflow=0)

    async def insert(left: Iterator[int]) -> None:
        for _ in left:
            async with engine.connect() as connection:
                await connection.execute(INSERT_TEXT)
                await connection.commit()

    async def insert_all(rows: int) -> None:
        left = iter(range(rows))
        await asyncio.gather(*(insert(left) for _ in range(AT_ONCE)))

    await insert_all(FIRST)
    began = Clocks.now(server)
    await insert_all(number)
    took = Clocks.now(server).since(began)
    await engine.dispose()
    return took


def exhaust(results: Iterable[None]) -> None:
    """Wait for all results."""
    for _ in results:
        pass


async def handled(way: str, url: str, number: int, server: int) -> Clocks:
    """Handle messages of a queue that was filled before; the last ones when `number` is left."""
    transport = SqlTransport(url)
    endpoint = Endpoint("shop", transport=transport, concurrency=AT_ONCE)
    loop, ended, done = asyncio.get_running_loop(), itertools.count(1), asyncio.Event()
    began: list[Clocks] = []
    size = AT_ONCE if way == "coroutine, pool" else 0
    pool = AsyncConnectionPool(url, min_size=size, max_size=AT_ONCE, open=False)

    def count() -> None:
        at = next(ended)  # which threads do one after another
        if at == FIRST:
            began.append(Clocks.now(server))
        if at == FIRST + number:
            loop.call_soon_threadsafe(done.set)

    def insert(message: Message, context: MessageContext) -> None:
        context.transaction().execute(INSERT_TEXT)
        count()

    async def insert_too(message: Message, context: MessageContext) -> None:
        connection = await context.transaction()
        await connection.execute(INSERT_TEXT)
        count()

    async def insert_with_pool(message: Message, context: MessageContext) -> None:
        connection = await context.transaction(pool)
        await connection.execute(INSERT)
        count()

    async def nothing(message: Message, context: MessageContext) -> None:
        count()

    handlers = {"def": insert, "coroutine": insert_too, "coroutine, pool": insert_with_pool, "no transaction": nothing}
    endpoint.handler(handlers[way])
    await endpoint.setup()
    async with Endpoint("filler", transport=SqlTransport(url), send_only=True) as filler:
        await filler.send_many([Send("shop", b"order") for _ in range(FIRST + number)])
    async with pool, endpoint:
        await done.wait()
        while await transport.count("shop"):  # noqa: ASYNC110 - the end of the last commits
            await asyncio.sleep(0.005)
        return Clocks.now(server).since(began[0])


def measured(way: str, url: str, number: int, server: int) -> Clocks:
    """Return what so many rows take, or messages."""
    match way:
        case "by hand":
            return by_hand(url, number, server)
        case "AsyncConnection by hand":
            return asyncio.run(by_hand_on_loop(url, number, server))
        case _:
            return asyncio.run(handled(way, url, number, server))


def main() -> None:
    """Measure one way."""
    way, url, number, server = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE shop (order_number int)")
        gc.freeze()
        took = measured(way, url, number, server)
        [(rows,)] = connection.execute("SELECT count(*) FROM shop").fetchall()
    assert rows == (0 if way == "no transaction" else FIRST + number), f"{rows} rows were committed"
    print(json.dumps([number / took.at, took.own / number * 1e6, took.server / number * 1e6]))


if __name__ == "__main__":
    main()
