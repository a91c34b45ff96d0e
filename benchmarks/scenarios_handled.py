"""Messages that a worker process handles, from the due instant, or from a full queue, to the last handler's end."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import bare_rabbitmq, peers_postgresql
from benchmarks.bare import BODY
from benchmarks.house import NAME, ROUNDS, Figures, scaled, store_on
from benchmarks.servers import mariadb, postgresql
from benchmarks.servers_rabbitmq import rabbitmq
from delayline import DelayedMessage, Message
from delayline.message import encode_headers
from delayline.rabbitmq import RabbitMQTransport
from delayline.sql import SqlTransport
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

NUMBER = scaled(50_000)
HEADERS = encode_headers({f"Header.Number.{number}": f"value of header number {number}" for number in range(8)})
#: Seconds until the messages are due: a worker starts meanwhile.
UNTIL_DUE = 4.0
TICKS = os.sysconf("SC_CLK_TCK")

AT_LEAST_ONCE = {"transaction_mode": "RECEIVE_ONLY"}
EXACTLY_ONCE = {"transaction_mode": "TRANSACTION_SCOPE"}
BEST = {"concurrency": 64}


class Run(NamedTuple):
    """The figures of one worker."""

    rate: float
    worker_us: float
    server_us: float


class Contender(NamedTuple):
    """A worker, the messages that wait for it, and the instant from which its time counts."""

    name: str
    peer: str
    settings: dict[str, Any]
    fill: Callable[[str, int], Awaitable[float | None]]
    """Stores the messages; returns the instant at which all are due, or None if they are in a queue."""
    share: int = 1
    """It gets one part in so many of the messages: its rate is flat."""


async def sqlite_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers, to a handler that writes 16 bytes, on one file."""
    url = f"sqlite:///{folder}/handled.db"
    return await _compare(url, lambda: 0.0, _ours())


async def pg_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers, to a handler that writes 16 bytes, beside PgQueuer and Procrastinate."""
    del folder
    with postgresql() as (url,):
        peers = [
            Contender("PgQueuer, 100", "PgQueuer", {"batch": 100}, _enqueue),
            Contender("Procrastinate, 10", "Procrastinate", {"concurrency": 10}, _defer, share=10),
        ]
        figures = await _compare(url, lambda: cpu_of("postgres"), [*_ours(), *peers])
    return figures | {"times PgQueuer": figures["due, at least once, 64 /s"] / figures["PgQueuer, 100 /s"]}


async def maria_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers, to a handler that writes 16 bytes, on MariaDB."""
    del folder
    with mariadb() as (url,):
        return await _compare(url, lambda: cpu_of("mariadbd"), _ours())


async def rmq_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers in a quorum queue, to a handler that writes 16 bytes, beside aio-pika."""
    del folder
    with rabbitmq() as url:
        ours = [
            Contender("queued, defaults", "delayline", {}, _publish),
            Contender("queued, 16", "delayline", {"concurrency": 16}, _publish),
            Contender("queued, 64", "delayline", BEST, _publish),
        ]
        peers = [Contender("aio-pika, 500", "aio-pika", {"prefetch": 500}, _publish_bare)]
        figures = await _compare(url, lambda: cpu_of("beam.smp"), [*ours, *peers])
    return figures | {"times aio-pika": figures["queued, defaults /s"] / figures["aio-pika, 500 /s"]}


def _ours() -> list[Contender]:
    return [
        Contender("due, exactly once, defaults", "delayline", EXACTLY_ONCE, _store),
        Contender("due, exactly once, 64", "delayline", EXACTLY_ONCE | BEST, _store),
        Contender("due, at least once, 64", "delayline", AT_LEAST_ONCE | BEST, _store),
        Contender("queued, exactly once, 64", "delayline", EXACTLY_ONCE | BEST, _send),
        Contender("queued, at least once, 64", "delayline", AT_LEAST_ONCE | BEST, _send),
    ]


async def _compare(url: str, server_cpu: Callable[[], float], contenders: Sequence[Contender]) -> Figures:
    runs: dict[str, list[Run]] = {one.name: [] for one in contenders}
    for turn in range(ROUNDS):
        for one in contenders if turn % 2 == 0 else reversed(contenders):
            runs[one.name].append(await _run(url, server_cpu, one))
    figures: Figures = {}
    for name, some in runs.items():
        figures[f"{name} /s"] = statistics.median(run.rate for run in some)
        figures[f"{name}, worker us"] = statistics.median(run.worker_us for run in some)
        figures[f"{name}, server us"] = statistics.median(run.server_us for run in some)
    return figures


async def _run(url: str, server_cpu: Callable[[], float], one: Contender) -> Run:
    number = max(1000, NUMBER // one.share)
    due = await one.fill(url, number)
    command = [sys.executable, "-m", "benchmarks.handled_worker", one.peer, url, str(number), json.dumps(one.settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:  # noqa: ASYNC220
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert (await asyncio.to_thread(worker.stdout.readline)).strip() == "ready"
        before = server_cpu()
        worker.stdin.write("\n")
        worker.stdin.flush()
        found = json.loads(await asyncio.to_thread(worker.stdout.readline))
        server = server_cpu() - before
    assert found["handled"] == number, found
    assert not found["doubled"], found
    if due is not None:
        assert found["first"] >= due, "a message was handled early"
        assert found["began"] < due, "the worker was late: raise UNTIL_DUE"
    elapsed = found["last"] - (found["began"] if due is None else due)
    return Run(number / elapsed, found["cpu"] / number * 1e6, server / number * 1e6)


async def _store(url: str, number: int) -> float:
    """Store messages that are all due at one instant."""
    async with store_on(url) as store:
        due = datetime.now(UTC) + timedelta(seconds=UNTIL_DUE + number / 20_000)
        for first in range(0, number, 1000):
            await store.store_many([DelayedMessage(one, NAME, due) for one in _messages(first)])
    return due.timestamp()


async def _send(url: str, number: int) -> None:
    """Send messages to the queue, due now."""
    async with store_on(url):
        transport = SqlTransport(url)
        await transport.start()
        for first in range(0, number, 1000):
            await transport.dispatch([TransportOperation(one, NAME) for one in _messages(first)])
        await transport.stop()


def _messages(first: int) -> list[Message]:
    return [Message.from_encoded(f"{time.time_ns()}-{first + number}", HEADERS, BODY) for number in range(1000)]


async def _publish(url: str, number: int) -> None:
    """Send messages to the endpoint's queue, due now."""
    transport = RabbitMQTransport(url)
    await transport.setup_infrastructure([NAME])
    await transport.start()
    for first in range(0, number, 1000):
        await transport.dispatch([TransportOperation(one, NAME) for one in _messages(first)])
    await transport.stop()


async def _publish_bare(url: str, number: int) -> None:
    """Send messages to the queue that aio-pika consumes, due now."""
    await bare_rabbitmq.declare(url, "aio-pika")
    transport = RabbitMQTransport(url, topology="direct")
    await transport.start()
    for first in range(0, number, 1000):
        await transport.dispatch([TransportOperation(one, "aio-pika") for one in _messages(first)])
    await transport.stop()


async def _enqueue(url: str, number: int) -> None:
    await peers_postgresql.pgqueuer_fill(url, number)


async def _defer(url: str, number: int) -> None:
    await peers_postgresql.procrastinate_fill(url, number)


def cpu_of(program: str) -> float:
    """Return the CPU seconds of all processes of the program on this machine, and of their ended children."""
    ticks = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (place / "stat").read_text().partition("(")[2].rpartition(")")
            if name == program:
                ticks += sum(map(int, rest.split()[11:15]))  # with its children that have ended
        except OSError:
            continue
    return ticks / TICKS
