"""Scenarios on PostgreSQL, each on a private server with its default settings: fsync on, synchronous_commit on."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg

from benchmarks import bare_postgresql as bare
from benchmarks import peers_postgresql as peers
from benchmarks.bare import BODY, HEADERS
from benchmarks.house import DESTINATION, NAME, Figures, against, endpoint_on, fill_far, lateness, store_on
from benchmarks.servers import postgresql
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 3
BURST = 50_000
PEER_SHARE = int(os.environ.get("BENCHMARK_PEER_SHARE", "1"))  # Procrastinate drains a part only: its rate is flat


async def pg_single_send(folder: Path) -> Figures:
    """One awaited `send(delay=)` after another, against the driver's INSERT, one to a commit."""
    rates = []
    with postgresql() as url:
        for _ in range(ROUNDS):
            raw = bare.single_rate(url, 3000)
            async with endpoint_on(url, polling=False) as endpoint:
                started = time.perf_counter()
                for _ in range(3000):
                    await endpoint.send(DESTINATION, BODY, delay=timedelta(days=365))
                rates.append((3000 / (time.perf_counter() - started), raw))
    return against("bare insert, 1 a commit", rates)


async def pg_concurrent_sends(folder: Path) -> Figures:
    """1 000 `send(delay=)` awaited together, ten times, against 100 inserts a commit."""
    rates = []
    with postgresql() as url:
        for _ in range(ROUNDS):
            raw = bare.hundreds_rate(url, 20_000)
            async with endpoint_on(url, polling=False) as endpoint:
                started = time.perf_counter()
                for _ in range(10):
                    sends = (endpoint.send(DESTINATION, BODY, delay=timedelta(days=365)) for _ in range(1000))
                    await asyncio.gather(*sends)
                rates.append((10_000 / (time.perf_counter() - started), raw))
    return against("bare insert, 100 a commit", rates)


async def pg_store_many(folder: Path) -> Figures:
    """`store_many` of 1 000, against binary COPY, 1 000 a commit, and PgQueuer's enqueue of 1 000."""
    rates, theirs = [], []
    with postgresql() as url:
        for number in range(ROUNDS):
            raw = bare.copy_rate(url, 20_000)
            async with store_on(url) as store:
                messages = _messages(f"many{number}", 20_000, datetime.now(UTC) + timedelta(days=365))
                started = time.perf_counter()
                for first in range(0, 20_000, 1000):
                    await store.store_many(messages[first : first + 1000])
                rates.append((20_000 / (time.perf_counter() - started), raw))
        theirs.append((await peers.pgqueuer(url, 20_000))[0])
    figures = against("binary COPY", rates)
    return figures | {"times PgQueuer": figures["delayline /s"] / statistics.median(theirs)}


async def pg_burst(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from store to queue, against the bare move and the peers."""
    rates = []
    with postgresql() as url:
        for _ in range(ROUNDS):
            raw = bare.drain_rate(url, BURST, bare.MOVE, 500)
            rates.append((await _drain_rate(url, BURST, lambda: endpoint_on(url)), raw))
        pgqueuer = (await peers.pgqueuer(url, BURST))[1]
        procrastinate = await peers.procrastinate_drain(url, BURST // PEER_SHARE)
    figures = against("bare move, 500 a commit", rates)
    ours = figures["delayline /s"]
    return figures | {"times PgQueuer": ours / pgqueuer, "times Procrastinate": ours / procrastinate}


async def pg_fetch(folder: Path) -> Figures:
    """50 000 through Python to the memory transport, at least once, against bare claim-and-delete of 100."""
    rates = []
    with postgresql() as url:
        for _ in range(ROUNDS):
            raw = bare.drain_rate(url, BURST, bare.CLAIM, 100)
            rates.append((await _drain_rate(url, BURST, lambda: _to_memory(url)), raw))
    return against("bare claim and delete, 100 a commit", rates)


async def pg_pollers(folder: Path) -> Figures:
    """Four poller processes on one table, against one."""
    rates = []
    with postgresql() as url:
        for _ in range(ROUNDS):
            one = await _drain_by_processes(url, 1)
            rates.append((await _drain_by_processes(url, 4), one))
    return against("one poller", rates)


async def pg_spread(folder: Path) -> Figures:
    """Due times 1 ms apart for 20 s, received by a handler of the same process."""
    with postgresql() as url:
        return await lateness(url, number=20_000, gap=timedelta(milliseconds=1))


async def pg_backlog(folder: Path) -> Figures:
    """Behind 1 000 000 pending: the drain rate, and how much later a short delay is."""
    pending = int(os.environ.get("BENCHMARK_PENDING", "1000000"))
    with postgresql() as url:
        empty = await _looks(url, "empty")
        async with store_on(url) as store:
            await fill_far(store, pending)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f'VACUUM ANALYZE "{NAME}.timeouts"')
        full = await _looks(url, "full")
    return {
        "drain from an empty store /s": empty[0],
        f"drain behind {pending} /s": full[0],
        "times slower": empty[0] / full[0],
        "short delay, empty p50 ms": empty[1],
        "short delay, behind them p50 ms": full[1],
        "later by ms": full[1] - empty[1],
    }


async def pg_old_transaction(folder: Path) -> Figures:
    """The drain rate while an old transaction is open elsewhere, so that nothing can be cleaned up."""
    rates = []
    with postgresql() as url:
        for _ in range(ROUNDS):
            free = await _drain_rate(url, BURST, lambda: endpoint_on(url))
            with psycopg.connect(url) as old:
                old.execute("SELECT txid_current()")
                rates.append((await _drain_rate(url, BURST, lambda: endpoint_on(url)), free))
    figures = against("without one", rates)
    return figures | {"times slower": 1 / figures["ratio"]}


def _messages(prefix: str, number: int, due: datetime) -> list[DelayedMessage]:
    kept = (Message.from_encoded(f"{prefix}-{position:030d}", HEADERS, BODY) for position in range(number))
    return [DelayedMessage(message, DESTINATION, due) for message in kept]


def _to_memory(url: str) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    mode = TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    return Endpoint(
        NAME, transport=MemoryTransport(), delayed_delivery=delivery, transaction_mode=mode, send_only=False
    )


async def _fill(url: str, number: int, due: datetime) -> None:
    async with store_on(url) as store:
        messages = _messages(f"{due:%H%M%S%f}", number, due)
        for first in range(0, number, 1000):
            await store.store_many(messages[first : first + 1000])


async def _drained(url: str, due: datetime) -> None:
    """Return when nothing that is due then is left; for the pollers of other processes."""
    left = f'SELECT EXISTS (SELECT FROM "{NAME}.timeouts" WHERE due = %s)'  # noqa: S608 - our name
    with psycopg.connect(url, autocommit=True) as watch:
        while watch.execute(left, (due,)).fetchone() != (False,):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


class Dispatched(logging.Handler):
    """Tells when this process has dispatched so many messages."""

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


async def _drain_rate(url: str, number: int, endpoint_to: Callable[[], Endpoint]) -> float:
    """Return messages a second from the instant all are due until the last has left the store."""
    due = datetime.now(UTC) + timedelta(seconds=3 + number / 20_000)
    await _fill(url, number, due)
    endpoint = endpoint_to()
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([DESTINATION])
    dispatched, logger = Dispatched(number), logging.getLogger("delayline.delayed")
    logger.addHandler(dispatched)
    logger.setLevel(logging.DEBUG)
    async with endpoint:
        await asyncio.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds()))
        started = time.perf_counter()
        await asyncio.wait_for(dispatched.done.wait(), 300)
        elapsed = time.perf_counter() - started
    logger.removeHandler(dispatched)
    logger.setLevel(logging.NOTSET)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE delayline_messages")
    return number / elapsed


POLL = """
import asyncio, sys
from benchmarks.house import endpoint_on
async def main():
    async with endpoint_on(sys.argv[1]):
        print("polling", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


async def _drain_by_processes(url: str, number: int) -> float:
    due = datetime.now(UTC) + timedelta(seconds=8)
    await _fill(url, BURST, due)
    command = [sys.executable, "-c", POLL, url]
    pollers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(number)]  # noqa: ASYNC220
    for poller in pollers:
        assert poller.stdout is not None
        poller.stdout.readline()
    await asyncio.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds()))
    started = time.perf_counter()
    await _drained(url, due)
    elapsed = time.perf_counter() - started
    for poller in pollers:
        poller.communicate()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE delayline_messages")
    return BURST / elapsed


async def _looks(url: str, prefix: str) -> tuple[float, float]:
    rate = statistics.median([await _drain_rate(url, BURST, lambda: endpoint_on(url)) for _ in range(ROUNDS)])
    late = await lateness(url, number=200, gap=timedelta(milliseconds=20), prefix=prefix)
    return rate, late["lateness p50 ms"]
