"""What a dispatcher of resident Spark tasks does beside plain processes, and how long an audit takes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg

from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, against, fill, scaled
from benchmarks.processes import cpu_of
from benchmarks.servers import postgresql
from benchmarks.servers_rabbitmq import rabbitmq
from delayline import SqlDelayedMessageStore, TransactionMode
from delayline.composition import endpoint_from
from delayline.rabbitmq import RabbitMQTransport
from delayline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

SHARDS = 2
STEADY = scaled(10_000)
BURST = scaled(20_000)
#: Entries of journals; each message has two.
JOURNALS = (1_000_000, 5_000_000)
A_SECOND = 500
START_UP = timedelta(seconds=5)
LATENESS = """
SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY late), percentile_disc(0.99) WITHIN GROUP (ORDER BY late), min(late)
FROM (SELECT extract(epoch FROM at - due) * 1000 AS late FROM delayline_journal WHERE event = 'dispatched') AS left_at
"""
DISPATCHED = "SELECT count(*) FROM delayline_journal WHERE event = 'dispatched'"
DUE = "timestamp_seconds(1780000000 + id % 86400)"
SAME = [
    "'bench.timeouts' AS store",
    "concat('m', id) AS id",
    "concat('queue-', id % 10) AS destination",
    "0 AS retries",
]
STORY = {
    "scheduled": ["id * 2 AS seq", "'scheduled' AS event", f"{DUE} AS due", f"{DUE} - INTERVAL 1 HOUR AS at"],
    "left": [
        "id * 2 + 1 AS seq",
        "'dispatched' AS event",
        f"{DUE} AS due",
        f"timestamp_micros(unix_micros({DUE}) + id % 50000) AS at",
    ],
}


async def spark_dispatch(folder: Path) -> Figures:
    """500 a second from PostgreSQL to RabbitMQ, 2 shards; 20 000 due at once, against 2 plain processes."""
    del folder
    return await asyncio.to_thread(_dispatch)


async def spark_audit(folder: Path) -> Figures:
    """Journals of 1 000 000 and 5 000 000 entries in Parquet, judged with the report: in a new session, and again."""
    return await asyncio.to_thread(_audit, folder)


def _dispatch() -> Figures:
    from delayline.spark import spark_session

    spark = spark_session("local[2]")
    with postgresql() as [database], rabbitmq() as broker:
        settings = Settings(endpoint=NAME, store_url=database, transport_url=broker, journal=True)
        asyncio.run(endpoint_from(settings).setup())
        asyncio.run(RabbitMQTransport(broker).setup_infrastructure([DESTINATION]))
        with _resident(spark, settings):
            figures = _steady(database)
        rates = []
        for number in range(ROUNDS):
            with _plain(settings):
                plain = _drained(database, f"plain-{number}")
            with _resident(spark, settings):
                rates.append((_drained(database, f"spark-{number}"), plain))
    spark.stop()
    return figures | against(f"{SHARDS} plain processes", rates)


@contextlib.contextmanager
def _resident(spark: SparkSession, settings: Settings) -> Iterator[None]:
    from delayline.spark import Dispatcher

    dispatcher = Dispatcher(settings, shards=SHARDS, spark=spark)
    thread = threading.Thread(target=dispatcher.run)
    thread.start()
    time.sleep(START_UP.total_seconds() * 2)
    yield
    dispatcher.stop()
    thread.join()


@contextlib.contextmanager
def _plain(settings: Settings) -> Iterator[None]:
    places = ["--store-url", settings.resolved_store_url, "--transport-url", settings.resolved_transport_url]
    command = [sys.executable, "-m", "delayline", "run", "--endpoint", NAME, *places]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(SHARDS)]
    time.sleep(START_UP.total_seconds())
    yield
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(60)


def _steady(database: str) -> Figures:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE delayline_journal")
        start = datetime.now(UTC) + START_UP
        _store(database, "steady", [start + timedelta(seconds=1 / A_SECOND) * number for number in range(STEADY)])
        _wait_until_dispatched(connection, STEADY)
        p50, p99, least = (float(value) for value in connection.execute(LATENESS).fetchone() or ())
    return {"lateness p50 ms": p50, "lateness p99 ms": p99, "early": float(least < 0)}


def _drained(database: str, prefix: str) -> float:
    """Return messages a second, from the moment at which all of them are due."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE delayline_journal")
        due = datetime.now(UTC) + timedelta(seconds=2 + BURST / 5000)
        _store(database, prefix, [due] * BURST)
        time.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds()))
        started = time.perf_counter()
        _wait_until_dispatched(connection, BURST)
        return BURST / (time.perf_counter() - started)


def _store(database: str, prefix: str, dues: list[datetime]) -> None:
    async def store() -> None:
        opened = SqlDelayedMessageStore(database)
        await opened.initialize(NAME, TransactionMode.RECEIVE_ONLY)
        await fill(opened, prefix, dues, DESTINATION)
        await opened.close()

    asyncio.run(store())


def _wait_until_dispatched(connection: psycopg.Connection, number: int) -> None:
    """Wait until the table is empty, and see that nothing went elsewhere."""
    deadline = time.monotonic() + 300
    while connection.execute(f'SELECT 1 FROM "{NAME}.timeouts" LIMIT 1').fetchone():  # noqa: S608 - ours
        assert time.monotonic() < deadline
        time.sleep(0.02)
    [dispatched] = connection.execute(DISPATCHED).fetchone() or (0,)
    assert dispatched == number, f"{dispatched} of {number} were dispatched"


def _audit(folder: Path) -> Figures:
    figures: Figures = {}
    for entries in JOURNALS:
        # Each in a process of its own, whose Java is new.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as new_process:
            new_process.submit(_write_journal, folder / str(entries), scaled(entries) // 2).result()
            first, *others = new_process.submit(_audited, folder / str(entries), scaled(entries) // 2).result()
        figures |= {
            f"{entries:,} entries, CPU us": first,
            f"{entries:,} entries again, CPU us": statistics.median(others),
        }
    return figures


def _write_journal(folder: Path, messages: int) -> None:
    from delayline.spark import spark_session
    from delayline.spark.journal import ENTRIES

    kinds = [f"CAST({field.name} AS {field.dataType.simpleString()})" for field in ENTRIES]
    for part, columns in STORY.items():
        rows = spark_session("local[2]").range(0, messages, 1, 4).selectExpr(*columns, *SAME)
        rows.selectExpr(*kinds).write.parquet(str(folder / part))


def _audited(folder: Path, messages: int) -> list[float]:
    """Audit the journal again and again; return the microseconds of CPU an entry of each time."""
    from delayline.spark import audit, spark_session, write_report
    from delayline.spark.journal import ENTRIES

    journal = spark_session("local[2]").read.schema(ENTRIES).parquet(*(str(folder / part) for part in STORY))
    costs = list[float]()
    for _ in range(1 + 2 * ROUNDS):
        before = cpu_of(os.getpid())
        with audit(journal) as found:
            totals = write_report(found, folder / "report.html")
        costs.append((cpu_of(os.getpid()) - before) / messages / 2 * 1e6)
        assert (totals.scheduled, totals.dispatched, totals.clean) == (messages, messages, True), totals
    return costs
