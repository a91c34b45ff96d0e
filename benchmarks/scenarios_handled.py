"""Messages that a worker process handles, from the due instant, or from a full queue, to the last handler's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import own_transaction, peer_installs
from benchmarks.common import ROUNDS, SCALE, Figures, scaled
from benchmarks.handled import percentile
from benchmarks.handling import (
    NUMBER,
    Contender,
    Server,
    compare,
    lateness,
    ratio,
    recorded,
    until,
)
from benchmarks.on_server import connected
from benchmarks.processes import command, cpu_of, node_path, running
from benchmarks.servers import FLUSH_MICROSECONDS, mariadb_server, postgresql_server, redis_server
from benchmarks.servers_rabbitmq import rabbitmq_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

AT_LEAST_ONCE = {"transaction_mode": "RECEIVE_ONLY"}
EXACTLY_ONCE = {"transaction_mode": "TRANSACTION_SCOPE"}
BEST = {"concurrency": 500}
#: Slow peers get so many messages: their rate is flat.
FEW = max(1000, NUMBER // 10)


async def sqlite_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers, due at one instant, to a handler that writes 20 bytes, on one file."""
    return await _beside_bullmq(folder, due=True)


async def sqlite_handled_queued(folder: Path) -> Figures:
    """The same from an immediate send: they are in the queue when the worker starts."""
    return await _beside_bullmq(folder, due=False)


async def _beside_bullmq(folder: Path, *, due: bool) -> Figures:
    files = Server(lambda: f"sqlite:///{folder}/{time.time_ns()}.db", None)
    ours, program = _ours(due=due), peer_installs.redis_server()
    if program is None or not peer_installs.node_modules():
        return (await compare(files, ours))[0]
    with redis_server(program) as (port, pid):
        redis = Server(lambda: _flushed(port), pid)
        peer = Contender("BullMQ, 50", "bullmq", {"concurrency": 50}, due, server=redis)
        figures, runs = await compare(files, [*ours, peer])
    start = "due" if due else "queued"
    return figures | {"times BullMQ": ratio(runs, f"{start}, at least once, best", peer.name)}


def _flushed(port: int) -> str:
    subprocess.run(["redis-cli", "-p", str(port), "FLUSHALL"], check=True, stdout=subprocess.DEVNULL)  # noqa: S607
    return f"redis://127.0.0.1:{port}"


async def pg_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers, due at one instant, to a handler that writes 20 bytes, beside the fastest."""
    del folder
    return await _beside_the_fastest(BARE, due=True)


async def pg_own_transaction(folder: Path) -> Figures:
    """A row for each message, 32 at once, in its handler's transaction, beside psycopg's pool and AsyncConnection."""
    del folder
    runs: dict[str, list[tuple[float, float, float]]] = {way: [] for way in own_transaction.WAYS}
    with on_postgresql() as server:
        for turn in range(ROUNDS):
            for way, some in runs.items():
                program = [sys.executable, "-m", "benchmarks.own_transaction", way, server.fresh()]
                ran = await asyncio.to_thread(
                    subprocess.run, [*program, str(scaled(5000)), str(server.pid)],
                    check=True, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                some.append(tuple(json.loads(ran.stdout)))
                print(f"round {turn + 1}, {way}: {some[-1]}", file=sys.stderr, flush=True)
    figures: Figures = {}
    for way, some in runs.items():
        for figure, values in zip(("/s", "own us", "server us"), zip(*some, strict=True), strict=True):
            figures[f"{way} {figure}"] = statistics.median(values)
    for figure, way, other in (
        ("def, ratio", "def", "by hand"),
        ("coroutine, ratio", "coroutine", "by hand"),
        ("coroutine, pool, ratio", "coroutine, pool", "by hand"),
        ("coroutine, ratio to AsyncConnection", "coroutine", "AsyncConnection by hand"),
    ):
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(runs[way], runs[other], strict=True)]
        figures[figure] = statistics.median(ratios)
    return figures


async def pg_handled_peers(folder: Path) -> Figures:
    """`pg_handled` beside awa, pg-boss, Procrastinate and oban-py."""
    del folder
    ours = Contender("due, at least once, best", "delayline", _with(AT_LEAST_ONCE | BEST), due=True)
    with on_postgresql() as server:
        figures, _ = await compare(server, [ours, *_others()])
    return figures


async def pg_handled_queued(folder: Path) -> Figures:
    """The same from an immediate send: they are in the queue when the worker starts."""
    del folder
    return await _beside_the_fastest(Contender("bare claim, 500", "bare"), due=False)


async def _beside_the_fastest(bare: Contender, *, due: bool) -> Figures:
    with on_postgresql() as server:
        figures, runs = await compare(server, [bare, *_ours(due=due), *_fastest(due=due)])
    start = "due" if due else "queued"
    ours = f"{start}, at least once, best"
    return figures | {
        "times PgQueuer": ratio(runs, ours, "PgQueuer, 100"),
        "ratio to the bare loop": ratio(runs, ours, bare.name),
        "exactly once, ratio to at least once": ratio(runs, f"{start}, exactly once, best", ours),
    }


async def pg_handled_flush(folder: Path) -> Figures:
    """`pg_handled` with a flush of 1 ms, as disks have: the bare loop, PgQueuer and graphile-worker beside it."""
    del folder
    with on_postgresql(flush=1000) as server:
        figures, runs = await compare(server, [BARE, *_ours(due=True), *_fastest(due=True)])
    return figures | {"ratio to the bare loop": ratio(runs, "due, at least once, best", BARE.name)}


async def pg_steady(folder: Path) -> Figures:
    """500 a second for 20 s that another process sends with a delay of 2 s: CPU and lateness, beside PgQueuer."""
    with on_postgresql() as server:
        return {
            **await _steady(folder, server, Contender("at least once", "delayline", _with(AT_LEAST_ONCE)), 500, 2.0),
            **await _steady(folder, server, Contender("exactly once", "delayline", _with(EXACTLY_ONCE)), 500, 2.0),
            **await _steady(folder, server, Contender("PgQueuer", "PgQueuer", {"batch": 100}), 500, 2.0),
            **await _steady_dispatch(folder, server, 500, 2.0),
        }


async def pg_steady_queued(folder: Path) -> Figures:
    """1 000 a second for 20 s that another process sends without a delay: from the call of `send` to the handler."""
    with on_postgresql() as server:
        return {
            **await _steady(folder, server, Contender("at least once", "delayline", _with(AT_LEAST_ONCE)), 1000, 0),
            **await _steady(folder, server, Contender("exactly once", "delayline", _with(EXACTLY_ONCE)), 1000, 0),
            **await _steady(folder, server, Contender("PgQueuer", "PgQueuer", {"batch": 100}), 1000, 0),
        }


async def pg_pressure(folder: Path) -> Figures:
    """800 a second for 15 minutes beside three overlapping transactions of 120 s, and 1 000 beside one of an hour."""
    contenders = [
        Contender("at least once", "delayline", _with(AT_LEAST_ONCE)),
        Contender("PgQueuer", "PgQueuer", {"batch": 100}),
    ]
    if peer_installs.node_modules():
        contenders.append(Contender("graphile-worker", "graphile-worker", {"concurrentJobs": 24, "localQueue": 500}))
    with on_postgresql() as server:
        return await _under_pressure(folder, server, contenders)


async def maria_pressure(folder: Path) -> Figures:
    """The same on MariaDB, where an open transaction keeps the undo history."""
    with mariadb_server() as server:
        contender = Contender("at least once", "delayline", _with(AT_LEAST_ONCE))
        return await _under_pressure(folder, Server(server.new_database, server.pid), [contender])


async def _under_pressure(folder: Path, server: Server, contenders: Sequence[Contender]) -> Figures:
    figures: Figures = {}
    three, single = partial(snapshots, number=3, seconds=120 * SCALE), partial(snapshots, number=1)
    for contender in contenders:
        for name, rate, minutes, beside in (
            ("none", 1000, 5, None),
            ("three", 800, 15, three),
            ("one", 1000, 60, single),
        ):
            steady = await _steady(folder, server, contender, rate, 2.0, seconds=minutes * 60, beside=beside)
            figures |= {f"{name}, {figure}": value for figure, value in steady.items() if "ms" in figure}
    return figures


@contextlib.contextmanager
def snapshots(url: str, number: int, seconds: float = math.inf) -> Iterator[None]:
    """Keep so many transactions open that only read, each for so long, begun one after another."""
    ended = threading.Event()
    begin = (
        "BEGIN ISOLATION LEVEL REPEATABLE READ"
        if url.startswith("postgresql")
        else "START TRANSACTION WITH CONSISTENT SNAPSHOT"
    )

    def hold() -> None:
        with contextlib.ExitStack() as all_of_them:
            transactions: deque[contextlib.ExitStack] = deque()
            while True:
                transaction = all_of_them.enter_context(contextlib.ExitStack())
                connection = transaction.enter_context(connected(url))
                connection.exec_driver_sql(begin)
                connection.exec_driver_sql("SELECT count(*) FROM information_schema.tables")  # which takes the snapshot
                transactions.append(transaction)
                if ended.wait(min(seconds / number, threading.TIMEOUT_MAX)):
                    return
                if len(transactions) == number:
                    transactions.popleft().close()

    thread = threading.Thread(target=hold, name="snapshots")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def maria_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers, due at one instant, to a handler that writes 20 bytes, and the bare loop."""
    del folder
    with mariadb_server() as server:
        bare = replace(BARE, stored=5000)
        figures, runs = await compare(Server(server.new_database, server.pid), [bare, *_ours(due=True, stored=5000)])
    return figures | {"ratio to the bare loop": ratio(runs, "due, at least once, best", bare.name)}


async def maria_handled_queued(folder: Path) -> Figures:
    """The same from an immediate send: they are in the queue when the worker starts."""
    del folder
    with mariadb_server() as server:
        figures, _ = await compare(Server(server.new_database, server.pid), _ours(due=False))
    return figures


async def rmq_handled(folder: Path) -> Figures:
    """50 000 of 256 B and eight headers in a queue, to a handler that writes 20 bytes, beside its peers."""
    del folder
    with rabbitmq_server() as server:
        ours = [
            Contender("defaults", "delayline"),
            Contender("16", "delayline", _with({"concurrency": 16})),
            Contender("best", "delayline", _with(BEST)),
        ]
        peers = [
            Contender("aio-pika, 500", "aio-pika", {"prefetch": 500}),
            Contender("FastStream, 500", "faststream", {"prefetch": 500}, filler="aio-pika"),
            *(
                Contender(f"{name}", "tasks", {"library": library}, number=FEW)
                for name, library in (("Celery", "celery-native"), ("Dramatiq", "dramatiq"), ("taskiq", "taskiq"))
            ),
        ]
        figures, runs = await compare(Server(server.new_vhost, server.pid), [*ours, *peers])
    return figures | {"times aio-pika": ratio(runs, "defaults", "aio-pika, 500")}


async def rmq_handled_due(folder: Path) -> Figures:
    """Due at one instant, from a store in PostgreSQL over RabbitMQ to a handler; peers delay in RabbitMQ."""
    del folder
    with postgresql_server() as database, rabbitmq_server() as server:

        def fresh() -> str:
            return f"{server.new_vhost()} {database.new_database()}"

        ours = [
            Contender(name, "delayline", _with(some), due=True) for name, some in (("defaults", {}), ("best", BEST))
        ]
        peers = [
            Contender(name, "tasks", {"library": library}, due=True, number=FEW, stored=stored)
            for name, library, stored in (
                ("Celery, eta", "celery-eta", 400),
                ("Celery, native", "celery-native", 200),
                ("Dramatiq", "dramatiq", 400),
                ("taskiq", "taskiq", 400),
            )
        ]
        figures, runs = await compare(Server(fresh, server.pid), [*ours, *peers])
    best = max(peers, key=lambda peer: figures[f"{peer.name} /s"])
    return figures | {"times the best peer": ratio(runs, "defaults", best.name)}


async def rmq_inbox(folder: Path) -> Figures:
    """A queue on RabbitMQ to a handler that writes 20 bytes, with an inbox in PostgreSQL and without."""
    del folder
    with postgresql_server() as database, rabbitmq_server() as server:
        return await _with_and_without_inbox(lambda: f"{server.new_vhost()} {database.new_database()}")


async def pg_inbox(folder: Path) -> Figures:
    """The same with queue and inbox in two databases of PostgreSQL."""
    del folder
    with postgresql_server() as server:
        return await _with_and_without_inbox(lambda: f"{server.new_database()} {server.new_database()}")


async def maria_inbox(folder: Path) -> Figures:
    """The same with queue and inbox in two databases of MariaDB."""
    del folder
    with mariadb_server() as server:
        return await _with_and_without_inbox(lambda: f"{server.new_database()} {server.new_database()}")


async def _with_and_without_inbox(fresh: Callable[[], str]) -> Figures:
    contenders = [
        Contender(f"{speed}, {which} inbox", "delayline", _with(AT_LEAST_ONCE | some) | {"inbox": has})
        for speed, some in (("defaults", {}), ("best", BEST))
        for which, has in (("without", False), ("with", True))
    ]
    figures, runs = await compare(Server(fresh, None), contenders)
    return figures | {
        f"{speed}, ratio": ratio(runs, f"{speed}, with inbox", f"{speed}, without inbox")
        for speed in ("defaults", "best")
    }


BARE = Contender("bare loop, 500", "bare", due=True, stored=20_000)


def _with(some: dict[str, Any]) -> dict[str, Any]:
    return {"settings": some}


def _ours(*, due: bool, stored: float = 20_000) -> list[Contender]:
    start = "due" if due else "queued"
    return [
        Contender(f"{start}, {mode}, {speed}", "delayline", _with(guarantee | settings), due, stored=stored)
        for mode, guarantee in (("at least once", AT_LEAST_ONCE), ("exactly once", EXACTLY_ONCE))
        for speed, settings in (("defaults", {}), ("best", BEST))
    ]


def _fastest(*, due: bool) -> list[Contender]:
    peers = [Contender("PgQueuer, 100", "PgQueuer", {"batch": 100}, due)]
    if peer_installs.node_modules():
        settings = {"concurrentJobs": 24, "localQueue": 500}
        peers.append(Contender("graphile-worker, 24", "graphile-worker", settings, due))
    return peers


def _others() -> list[Contender]:
    peers = [
        Contender("awa, 256", "awa", {"workers": 256}, due=True, stored=5000),
        Contender("Procrastinate, 10", "Procrastinate", {"concurrency": 10}, due=True, number=FEW, stored=1000),
    ]
    if peer_installs.node_modules():
        peers.append(Contender("pg-boss, 2000 x 4", "pg-boss", {"batch": 2000, "workers": 4}, due=True))
    if peer_installs.oban_python():
        peers.append(Contender("oban-py, 50", "oban", {"limit": 50}, due=True, number=FEW, stored=1000))
    return peers


@contextlib.contextmanager
def on_postgresql(flush: int = FLUSH_MICROSECONDS) -> Iterator[Server]:
    """Start a private PostgreSQL."""
    with postgresql_server(flush=flush) as server:
        pid = int((server.data / "postmaster.pid").read_text().splitlines()[0])
        yield Server(server.new_database, pid, _transactions, _analyze)


def _transactions(url: str) -> int:
    count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    with connected(url) as connection:
        return int(connection.exec_driver_sql(count).scalar_one())


def _analyze(url: str) -> None:
    with connected(url) as connection:
        connection.exec_driver_sql("ANALYZE")


async def _steady_dispatch(folder: Path, server: Server, rate: int, delay: float) -> Figures:
    """Return how late the poller dispatches, in a run of its own, as an observer costs time."""
    dispatched = folder / "dispatched"
    settings = _with(AT_LEAST_ONCE) | {"telemetry": "dispatch"}
    environment = {"BENCHMARK_DISPATCHED": str(dispatched)}
    await _steady(folder, server, Contender("observed", "delayline", settings), rate, delay, environment)
    late = sorted(map(float, dispatched.read_text().split()))
    assert late[0] >= 0, f"dispatched early by {-late[0]} ms"
    return {"dispatch, p50 ms": percentile(late, 0.5), "dispatch, p99 ms": percentile(late, 0.99)}


async def _steady(
    folder: Path,
    server: Server,
    one: Contender,
    rate: int,
    delay: float,
    variables: Mapping[str, str] | None = None,
    *,
    seconds: int = 20,
    beside: Callable[[str], AbstractContextManager[None]] | None = None,
) -> Figures:
    """Return the CPU for each message of worker, server and sender, and how late messages were handled."""
    number, url = scaled(rate * seconds), server.fresh()
    handled, sent = folder / f"handled-{time.time_ns()}", folder / f"sent-{time.time_ns()}"
    files = {"BENCHMARK_HANDLED": str(handled), "BENCHMARK_SENT": str(sent)}
    environment = os.environ | files | dict(variables or {})
    settings = one.settings | {"number": 0, "due": None, "rate": rate, "delay": delay}
    handled.touch()
    await asyncio.to_thread(
        subprocess.run,
        command("fill", one.peer, url, settings),
        env=environment | node_path(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    settings["number"] = number
    with (
        running(command("work", one.peer, url, settings), environment) as worker,
        running(command("send", one.peer, url, settings), environment) as sender,
    ):
        assert sender.stdin is not None
        assert sender.stdout is not None
        await asyncio.sleep(delay + 1.0)  # until the first has been handled, which connected the sender
        cpu, server_cpu, sender_cpu = cpu_of(worker.pid), cpu_of(server.pid), cpu_of(sender.pid)
        sender.stdin.write("\n")
        sender.stdin.flush()
        with contextlib.nullcontext() if beside is None else beside(url):
            await until(handled, number + 1, worker)
        cpu, server_cpu, sender_cpu = (
            cpu_of(worker.pid) - cpu,
            cpu_of(server.pid) - server_cpu,
            cpu_of(sender.pid) - sender_cpu,
        )
    found, due = recorded(handled), recorded(sent).times
    assert not found.doubled, f"{one.name} handled {found.doubled} twice"
    return {
        f"{one.name}, worker us": cpu / number * 1e6,
        f"{one.name}, server us": server_cpu / number * 1e6,
        f"{one.name}, worker and server us": (cpu + server_cpu) / number * 1e6,
        f"{one.name}, sender us": sender_cpu / number * 1e6,
        **lateness(found.times, due, f"{one.name}, "),
    }
