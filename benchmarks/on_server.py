"""The scenarios that every server runs, and what they are made of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import (
    DESTINATION,
    NAME,
    ROUNDS,
    Figures,
    against,
    endpoint_on,
    fill_far,
    lateness,
    scaled,
    single_rate,
    store_on,
    together_rate,
)
from benchmarks.handled import Handled
from delayline import (
    DelayedMessage,
    Endpoint,
    MemoryTransport,
    Message,
    SqlDelayedMessageStore,
    StoredDelivery,
    TransactionMode,
)
from delayline.events import Event
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection

    from delayline import MessageContext

BURST = scaled(50_000)
PATIENCE = 600.0  # seconds for a drain


class Bare(Protocol):
    """The raw loops on a server."""

    def single_rate(self, url: str, number: int) -> float:
        """Return inserts a second, one to a commit."""
        ...

    def hundreds_rate(self, url: str, number: int) -> float:
        """Return inserts a second, a hundred to a commit."""
        ...

    def many_rate(self, url: str, number: int) -> float:
        """Return inserts a second in the driver's fastest way, a thousand to a commit."""
        ...

    def move_rate(self, url: str, number: int, per_commit: int) -> float:
        """Return messages a second that go from table to table."""
        ...

    def claim_rate(self, url: str, number: int, per_commit: int) -> float:
        """Return messages a second that are read and deleted."""
        ...


@dataclass(frozen=True)
class Product:
    """One kind of server."""

    start: Callable[[], AbstractContextManager[list[str]]]
    bare: Bare
    tidy: str
    """What brings statistics up to date after many rows were stored."""
    old: Sequence[str]
    """What begins a transaction that keeps the server from cleaning up."""
    asked: str
    """Counts what the server was asked so far."""

    async def single_sends(self) -> Figures:
        """One awaited send after another, against the driver's INSERT, one to a commit."""
        rates = []
        with self.start() as (url,):
            for _ in range(ROUNDS):
                raw = self.bare.single_rate(url, scaled(3000))
                rates.append((await single_rate(url, scaled(3000)), raw))
        return against("bare insert, 1 a commit", rates)

    async def concurrent_sends(self) -> Figures:
        """A thousand sends awaited together, against 100 inserts a commit, and 1 000 in the driver's fastest way."""
        hundreds, thousands = [], []
        with self.start() as (url,):
            for _ in range(ROUNDS):
                raw, fastest = self.bare.hundreds_rate(url, scaled(20_000)), self.bare.many_rate(url, scaled(20_000))
                ours = await together_rate(url, scaled(10_000))
                hundreds.append((ours, raw))
                thousands.append((ours, fastest))
        beside = against("bare bulk insert, 1 000 a commit", thousands)
        beside["ratio to the bulk insert"] = beside.pop("ratio")
        return against("bare insert, 100 a commit", hundreds) | beside

    async def immediate_sends(self) -> Figures:
        """Sends without a delay, against sends with one: one after another, and a thousand awaited together."""
        single, together = [], []
        with self.start() as (url,):
            for _ in range(ROUNDS):
                delayed = await single_rate(url, scaled(3000))
                single.append((await single_rate(url, scaled(3000), None), delayed))
                delayed = await together_rate(url, scaled(10_000))
                together.append((await together_rate(url, scaled(10_000), None), delayed))
        alone, many = against("delayed, one after another", single), against("delayed, together", together)
        return {
            "immediate, one after another /s": alone.pop("delayline /s"),
            "ratio, one after another": alone.pop("ratio"),
            **alone,
            "immediate, together /s": many.pop("delayline /s"),
            "ratio, together": many.pop("ratio"),
            **many,
        }

    async def burst(self, url: str) -> Figures:
        """All due at one instant, exactly once from store to queue, against the bare move."""
        rates = []
        for _ in range(ROUNDS):
            raw = self.bare.move_rate(url, BURST, 500)
            rates.append((await drain_rate(url, BURST, lambda: endpoint_on(url)), raw))
        return against("bare move, 500 a commit", rates)

    async def fetch(self) -> Figures:
        """The same through Python to the memory transport, at least once, against bare claim and delete."""
        rates = []
        with self.start() as (url,):
            for _ in range(ROUNDS):
                raw = self.bare.claim_rate(url, BURST, 100)
                rates.append((await drain_rate(url, BURST, lambda: _to_memory(url)), raw))
        return against("bare claim and delete, 100 a commit", rates)

    async def pollers(self) -> Figures:
        """Four poller processes on one table, against one."""
        rates = []
        with self.start() as (url,):
            for _ in range(ROUNDS):
                one = await _drain_by_processes(url, 1)
                rates.append((await _drain_by_processes(url, 4), one))
        return against("one poller", rates)

    async def spread(self) -> Figures:
        """Due times 1 ms apart, received by a handler of the same process."""
        with self.start() as (url,):
            return await lateness(url, number=scaled(20_000), gap=timedelta(milliseconds=1))

    async def latest(self, lock: str) -> Figures:
        """Short delays from two other processes, and one look held up by a lock: the latest message of all."""
        number, senders = scaled(60_000), 2
        with self.start() as (url,):
            endpoint = endpoint_on(url)
            handled = Handled(endpoint, number)
            async with endpoint:
                command = [sys.executable, "-c", SEND_SHORT, url, str(number // senders)]
                sending = [subprocess.Popen(command) for _ in range(senders)]  # noqa: ASYNC220
                await asyncio.sleep(10)
                await asyncio.to_thread(_hold, url, lock)
                unlocked = datetime.now(UTC) + timedelta(seconds=1)
                await handled.wait(PATIENCE)
                assert [process.wait() for process in sending] == [0, 0]
        after = handled.lateness(due_after=unlocked)
        return handled.lateness() | {
            "latest after the lock ms": after["lateness max ms"],
            "p99 after the lock ms": after["lateness p99 ms"],
        }

    async def backlog(self) -> Figures:
        """Behind very many pending: the drain rate, and how much later a short delay is."""
        pending = scaled(1_000_000)
        with self.start() as (url,):
            empty = await _looks(url, "empty")
            async with store_on(url) as store:
                await fill_far(store, pending)
            with connected(url) as connection:
                connection.exec_driver_sql(self.tidy.format(table=timeouts(connection)))
            full = await _looks(url, "full")
        return {
            "drain from an empty store /s": empty[0],
            f"drain behind {pending} /s": full[0],
            "times slower": empty[0] / full[0],
            "short delay, empty p50 ms": empty[1],
            "short delay, behind them p50 ms": full[1],
            "later by ms": full[1] - empty[1],
        }

    async def old_transaction(self) -> Figures:
        """The drain rate while an old transaction is open elsewhere, so that nothing can be cleaned up."""
        rates = []
        with self.start() as (url,):
            for _ in range(ROUNDS):
                free = await drain_rate(url, BURST, lambda: endpoint_on(url))
                with connected(url) as old:
                    for statement in self.old:
                        old.exec_driver_sql(statement)
                    rates.append((await drain_rate(url, BURST, lambda: endpoint_on(url)), free))
        figures = against("without one", rates)
        return figures | {"times slower": 1 / figures["ratio"]}

    async def rest(self) -> Figures:
        """A poller and a receiver with nothing due for a year: what they ask the server in two minutes."""
        seconds = 120 * scaled(1_000_000) / 1_000_000
        with self.start() as (url,), connected(url) as watch:
            async with store_on(url) as store:
                await fill_far(store, 1000)
            endpoint = endpoint_on(url)
            endpoint.handler(_ignore)
            async with endpoint:
                await asyncio.sleep(5)
                before = _number(watch, self.asked)
                own = _number(watch, self.asked) - before
                before += own
                await asyncio.sleep(seconds)
                asked = _number(watch, self.asked) - before - own
        return {"statements a minute": asked / seconds * 60}


@contextlib.contextmanager
def connected(url: str) -> Iterator[Connection]:
    """Provide a connection of its own, in autocommit."""
    with database_at(url).dialect.connections.look() as connection:
        yield connection


def timeouts(connection: Connection) -> str:
    """Return the name of the store's table, quoted."""
    return connection.dialect.identifier_preparer.quote(f"{NAME}.timeouts")


def messages(prefix: str, number: int, dues: Callable[[int], datetime]) -> list[DelayedMessage]:
    """Return so many messages, due when their number says."""
    kept = (Message.from_encoded(f"{prefix}-{position:030d}", HEADERS, BODY) for position in range(number))
    return [DelayedMessage(message, DESTINATION, dues(position)) for position, message in enumerate(kept)]


async def store_rate(url: str, waiting: Sequence[DelayedMessage]) -> float:
    """Return messages a second of `store_many`, a thousand at once."""
    async with store_on(url) as store:
        started = time.perf_counter()
        for first in range(0, len(waiting), 1000):
            await store.store_many(waiting[first : first + 1000])
        return len(waiting) / (time.perf_counter() - started)


class Dispatched(logging.Handler):
    """Notifies when this process has dispatched so many messages."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number
        self._loop = asyncio.get_running_loop()
        self.done = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Count."""
        if getattr(record, "event", None) is Event.DISPATCHED:
            self._left -= vars(record)["facts"]["count"]
            if self._left <= 0:
                self._loop.call_soon_threadsafe(self.done.set)


async def drain_rate(url: str, number: int, endpoint_to: Callable[[], Endpoint], *, queues: str | None = None) -> float:
    """Return messages a second from the instant all are due until the last has left the store."""
    due = datetime.now(UTC) + timedelta(seconds=5 + number / 10_000)
    await store_rate(url, messages(f"{due:%H%M%S%f}", number, lambda _: due))
    endpoint = endpoint_to()
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([DESTINATION])
    rate = await dispatch_rate(endpoint, due, number)
    empty_queues(queues or url)
    return rate


async def dispatch_rate(endpoint: Endpoint, due: datetime, number: int) -> float:
    """Return messages a second from the instant all are due until the endpoint has dispatched so many."""
    with dispatching(number) as dispatched:
        async with endpoint:
            assert datetime.now(UTC) < due, "the endpoint started after the messages were due"
            await asyncio.sleep((due - datetime.now(UTC)).total_seconds())
            started = time.perf_counter()
            await asyncio.wait_for(dispatched.done.wait(), PATIENCE)
            elapsed = time.perf_counter() - started
    return number / elapsed


@contextlib.contextmanager
def dispatching(number: int) -> Iterator[Dispatched]:
    """Provide what notifies when this process has dispatched so many messages."""
    dispatched, logger = Dispatched(number), logging.getLogger("delayline.delayed")
    logger.addHandler(dispatched)
    logger.setLevel(logging.DEBUG)
    try:
        yield dispatched
    finally:
        logger.removeHandler(dispatched)
        logger.setLevel(logging.NOTSET)


def _hold(url: str, lock: str) -> None:
    """Lock the store's table for two seconds."""
    with connected(url) as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql(lock.format(table=timeouts(connection)))
        time.sleep(2)
        connection.exec_driver_sql("COMMIT")


def empty_queues(url: str) -> None:
    """Remove every message that is in a queue."""
    with connected(url) as connection:
        connection.exec_driver_sql("TRUNCATE TABLE delayline_messages")


def _to_memory(url: str) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    mode = TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    return Endpoint(
        NAME, transport=MemoryTransport(), delayed_delivery=delivery, transaction_mode=mode, send_only=False
    )


SEND_SHORT = """
import asyncio, random, sys
from datetime import timedelta
from benchmarks.common import NAME, endpoint_on

async def main(url, number):
    endpoint = endpoint_on(url, polling=False)
    async def lane(number):
        for _ in range(number):
            await endpoint.send(NAME, b"", delay=timedelta(seconds=random.uniform(0.0005, 0.03)))
            await asyncio.sleep(0.03)
    async with endpoint:
        await asyncio.gather(*(lane(number // 10) for _ in range(10)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""
POLL = """
import asyncio, sys
from benchmarks.common import endpoint_on
async def main():
    async with endpoint_on(sys.argv[1]):
        print("polling", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


async def _drain_by_processes(url: str, number: int) -> float:
    due = datetime.now(UTC) + timedelta(seconds=15)
    await store_rate(url, messages(f"{due:%H%M%S%f}", BURST, lambda _: due))
    command = [sys.executable, "-c", POLL, url]
    pollers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(number)]  # noqa: ASYNC220
    for poller in pollers:
        assert poller.stdout is not None
        assert poller.stdout.readline() == b"polling\n"
    wait = (due - datetime.now(UTC)).total_seconds()
    assert wait > 0, "the pollers came too late"
    await asyncio.sleep(wait)
    started = time.perf_counter()
    await _drained(url)
    elapsed = time.perf_counter() - started
    for poller in pollers:
        poller.communicate()
    empty_queues(url)
    return BURST / elapsed


async def _drained(url: str) -> None:
    """Return when nothing is left; for the pollers of other processes."""
    with connected(url) as watch:
        left = f"SELECT EXISTS (SELECT 1 FROM {timeouts(watch)})"  # noqa: S608 - our own name
        while _number(watch, left):  # noqa: ASYNC110 - there is no notification
            await asyncio.sleep(0.02)


async def _looks(url: str, prefix: str) -> tuple[float, float]:
    rate = statistics.median([await drain_rate(url, BURST, lambda: endpoint_on(url)) for _ in range(ROUNDS)])
    late = await lateness(url, number=200, gap=timedelta(milliseconds=20), prefix=prefix)
    return rate, late["lateness p50 ms"]


def _number(connection: Connection, sql: str) -> int:
    return int(connection.exec_driver_sql(sql).scalar_one())


async def _ignore(message: Message, context: MessageContext) -> None:
    del message, context
