"""Scenarios with a backlog for one destination beside a few messages for another, fair and by due time alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.common import DESTINATION, ROUNDS, Figures, fill, scaled
from benchmarks.handled import Handled, percentile
from benchmarks.on_server import PATIENCE, connected, dispatching, empty_queues
from benchmarks.scenarios_mariadb import MARIADB
from benchmarks.scenarios_postgresql import POSTGRESQL
from delayline import Endpoint, Message, SqlDelayedMessageStore, SqlTransport, StoredDelivery, TransactionMode
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.on_server import Product
    from delayline import MessageContext

BACKLOG = scaled(1_000_000)
#: How long a message of the small destination is delayed, in seconds.
DELAY = 0.3


class Drain(NamedTuple):
    """What a backlog has done."""

    rate: float
    """Messages of the backlog a second."""
    late: list[float]
    """Milliseconds by which the small destination's messages, due meanwhile, were late at their handler; sorted."""


async def pg_fair(folder: Path) -> Figures:
    """1 000 000 due at one instant beside 10 a second for another queue: fair by destination, and by due time alone."""
    return await _fair(POSTGRESQL)


async def maria_fair(folder: Path) -> Figures:
    """The same on MariaDB, with a tenth of the messages."""
    return await _fair(MARIADB, share=0.1)


async def _fair(product: Product, share: float = 1.0) -> Figures:
    number = max(1000, int(BACKLOG * share))
    fair, plain = [], []
    with product.start() as (url,):
        for _ in range(ROUNDS):
            plain.append(await _drain(product, url, number, None))
            fair.append(await _drain(product, url, number, "destination"))
    return _compared(fair, plain, "by due time alone")


def _compared(fair: Sequence[Drain], plain: Sequence[Drain], otherwise: str) -> Figures:
    """Return the rates of the backlog, their ratio round by round, and how late the others were."""
    ratios = sorted(turn.rate / other.rate for turn, other in zip(fair, plain, strict=True))
    late, late_without = (sorted(value for drain in drains for value in drain.late) for drains in (fair, plain))
    return {
        "fair /s": percentile(sorted(drain.rate for drain in fair), 0.5),
        f"{otherwise} /s": percentile(sorted(drain.rate for drain in plain), 0.5),
        "ratio": percentile(ratios, 0.5),
        "fair, other p50 ms": percentile(late, 0.5),
        "fair, other p99 ms": percentile(late, 0.99),
        "fair, other max ms": late[-1],
        f"{otherwise}, other p50 ms": percentile(late_without, 0.5),
        f"{otherwise}, other p99 ms": percentile(late_without, 0.99),
    }


async def _drain(product: Product, url: str, number: int, fair_by: str | None) -> Drain:
    """Store the backlog, then start its poller while another process sends to the endpoint's own queue."""
    name = "plain" if fair_by is None else "fair"
    store, transport = SqlDelayedMessageStore(url), SqlTransport(url)
    endpoint = Endpoint(name, transport=transport, delayed_delivery=StoredDelivery(store, fair_by=fair_by))
    handled = Handled(endpoint, sys.maxsize)
    await endpoint.setup()
    await transport.setup_infrastructure([DESTINATION])
    await store.initialize(name, TransactionMode.TRANSACTION_SCOPE)
    due = datetime.now(UTC)
    await fill(store, f"{due:%H%M%S%f}", repeat(due, number), DESTINATION)
    await store.close()
    with connected(url) as connection:
        table = connection.dialect.identifier_preparer.quote(f"{name}.timeouts")
        connection.exec_driver_sql(product.tidy.format(table=table))
    command = [sys.executable, "-c", SEND, url, name, str(DELAY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:  # noqa: ASYNC220
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sending\n"
        with dispatching(number) as dispatched:
            async with endpoint:
                began, started = datetime.now(UTC), time.perf_counter()
                await asyncio.wait_for(dispatched.done.wait(), PATIENCE)
                elapsed = time.perf_counter() - started
                sender.communicate()
                await asyncio.sleep(DELAY + 2)  # until what was sent last is handled
    empty_queues(url)
    late = handled.late_between(began + timedelta(seconds=DELAY), began + timedelta(seconds=elapsed))
    return Drain(number / elapsed, late)


async def pg_fair_queued(folder: Path) -> Figures:
    """200 000 of one tenant in a queue beside 10 a second of another: received in turn, and as they came."""
    number = max(1000, BACKLOG // 5)
    fair, plain = [], []
    with POSTGRESQL.start() as (url,):
        for turn in range(ROUNDS):
            plain.append(await _receive(url, f"plain{turn}", number, None))
            fair.append(await _receive(url, f"fair{turn}", number, "header:Tenant"))
    return _compared(fair, plain, "as they came")


async def _receive(url: str, queue: str, number: int, fair_by: str | None) -> Drain:
    """Fill a queue, then start its endpoint while another process sends to it."""
    transport = SqlTransport(url, fair_by=fair_by)
    endpoint = Endpoint(queue, transport=transport)
    late: list[tuple[float, float]] = []
    left, done = number, asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        nonlocal left
        if message.body:
            late.append((float(message.body), (time.time() - float(message.body)) * 1000))
            return
        left -= 1
        if not left:
            done.set()

    await endpoint.setup()
    await transport.start()
    for first in range(0, number, 500):
        numbers = range(first, min(first + 500, number))
        busy = (Message(f"{queue}-{each}", {"Tenant": "busy"}, b"") for each in numbers)
        await transport.dispatch([TransportOperation(message, queue) for message in busy])
    await transport.stop()
    command = [sys.executable, "-c", SEND_NOW, url, queue, fair_by or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:  # noqa: ASYNC220
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sending\n"
        async with endpoint:
            began, started = time.time(), time.perf_counter()
            await asyncio.wait_for(done.wait(), PATIENCE)
            elapsed = time.perf_counter() - started
            sender.communicate()
            await asyncio.sleep(2)  # until what was sent last is handled
    empty_queues(url)
    return Drain(number / elapsed, sorted(value for sent, value in late if began <= sent <= began + elapsed))


#: Sends ten messages a second without a delay, until its input ends.
SEND_NOW = """
import asyncio, sys, threading, time
from delayline import Endpoint, SqlTransport

async def main(url, queue, fair_by):
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    async with Endpoint("sender", transport=SqlTransport(url, fair_by=fair_by or None), send_only=True) as endpoint:
        print("sending", flush=True)
        while not ended.is_set():
            await endpoint.send(queue, str(time.time()), headers={"Tenant": "small"})
            await asyncio.sleep(0.1)

asyncio.run(main(*sys.argv[1:]))
"""
#: Sends ten messages a second, until its input ends.
SEND = """
import asyncio, sys, threading
from datetime import timedelta
from delayline import Endpoint, SqlDelayedMessageStore, SqlTransport, StoredDelivery

async def main(url, name, delay):
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    async with Endpoint(name, transport=SqlTransport(url), delayed_delivery=delivery, send_only=True) as endpoint:
        await endpoint.send(name, b"", delay=timedelta(seconds=delay))
        print("sending", flush=True)
        while not ended.is_set():
            await endpoint.send(name, b"", delay=timedelta(seconds=delay))
            await asyncio.sleep(0.1)

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""
