"""What the cold tier costs: promoting against scheduling, an hour of a large tier, the store beside a large tier."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, endpoint_on, lateness, scaled
from benchmarks.on_server import BURST, drain_rate
from benchmarks.scenarios_spark import Cost, copy_by_two, cost_of
from benchmarks.servers import cpu_with, postgresql, postgresql_server
from delayline import SqlDelayedMessageStore

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.servers.postgresql import PostgresqlServer

ROWS = 1_000_000
AN_HOUR = 20_000
FILES = 8
TABLE = f'"{NAME}.timeouts"'
HOUR = timedelta(hours=1)
#: On the hour, so that every hour has the same number of messages.
FIRST = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(days=30)


async def spark_promote(folder: Path) -> Figures:
    """1 000 000 due in a day, from files into PostgreSQL, against two processes of COPY; an hour of 1 and 10 tiers."""
    return await asyncio.to_thread(_promote, folder)


async def spark_cold_backlog(folder: Path) -> Figures:
    """Dispatch and lateness on PostgreSQL with 1 000 000 in files, against none."""
    from delayline.spark import JobTarget, schedule, spark_session

    with postgresql() as [url]:
        await drain_rate(url, BURST, lambda: endpoint_on(url))  # sets up
        empty = await _looks(url, "empty")
        source = folder / "far.parquet"
        _write(source, scaled(ROWS), hours=24 * 30)
        spark = spark_session("local[2]")
        target = JobTarget(url, endpoint=NAME, cold_tier=str(folder / "cold"))
        held = await asyncio.to_thread(lambda: schedule(source, target, spark=spark).cold)
        spark.stop()
        assert held == scaled(ROWS), held
        full = await _looks(url, "full")
    return {
        **{f"{name}, nothing in files": figure for name, figure in empty.items()},
        **full,
        "times slower": empty["dispatch /s"] / full["dispatch /s"],
        "later by ms": full["lateness p50 ms"] - empty["lateness p50 ms"],
    }


async def spark_cold_ids(folder: Path) -> Figures:
    """Ten rows of a job with a cold tier beside 1 000 000 in files and in PostgreSQL, against beside nothing."""
    return await asyncio.to_thread(_few_ids, folder)


def _few_ids(folder: Path) -> Figures:
    from delayline.spark import JobTarget, schedule, spark_session

    spark, rows = spark_session("local[2]"), scaled(ROWS)
    _write(folder / "far.parquet", rows, hours=24 * 30)
    _write(folder / "hot.parquet", rows, hours=24 * 30, begin=1)
    with postgresql_server() as server:
        url = server.new_database()
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        target, turn = JobTarget(url, endpoint=NAME, cold_tier=str(folder / "cold")), 0

        def few() -> float:
            nonlocal turn
            turn += 1
            ids = [f"few {turn} {number}" for number in range(10)]
            data = {"id": ids, "destination": [DESTINATION] * 10, "due": [FIRST] * 10}
            began = cpu_with(server)
            assert schedule(spark.createDataFrame(pa.table(data)), target, spark=spark).cold == 10
            return cpu_with(server) - began

        few()  # warms up
        alone = statistics.median(few() for _ in range(ROUNDS))
        assert schedule(folder / "far.parquet", target, spark=spark).cold == rows
        hot = JobTarget(url, endpoint=NAME)
        assert schedule(folder / "hot.parquet", hot, spark=spark).stored == rows
        beside = statistics.median(few() for _ in range(ROUNDS))
    spark.stop()
    return {"ten rows, CPU s": beside, "beside nothing, CPU s": alone, "times the CPU": beside / alone}


async def _looks(url: str, prefix: str) -> Figures:
    rates, late = [], []
    for turn in range(ROUNDS):
        rates.append(await drain_rate(url, BURST, lambda: endpoint_on(url)))
        spread = await lateness(url, number=scaled(2000), gap=timedelta(milliseconds=2), prefix=f"{prefix}{turn}")
        late.append(spread["lateness p50 ms"])
    return {"dispatch /s": statistics.median(rates), "lateness p50 ms": statistics.median(late)}


def _promote(folder: Path) -> Figures:
    from delayline.spark import spark_session

    spark = spark_session("local[2]")
    with postgresql_server() as server:
        url = server.new_database()
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        figures = _rates(folder, server, url, spark) | _hours(folder, url, spark)
    spark.stop()
    return figures


def _rates(folder: Path, server: PostgresqlServer, url: str, spark: SparkSession) -> Figures:
    """Return what it costs to promote messages, beside copying them."""
    from delayline.spark import JobTarget, promote, schedule

    rows, costs = scaled(ROWS), list[tuple[Cost, Cost]]()
    source = folder / "day.parquet"
    _write(source, rows, hours=24)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as copiers:

        def copied() -> None:
            copy_by_two(copiers, url, source)

        copied()  # starts the processes
        for turn in range(1 + ROUNDS):
            cold = JobTarget(url, endpoint=NAME, cold_tier=str(folder / f"cold{turn}"))
            _emptied(url)
            assert schedule(source, cold, spark=spark).cold == rows

            def promoted(cold: JobTarget = cold) -> None:
                assert promote(cold, horizon=_until(24), spark=spark).stored == rows

            costs.append((cost_of(server, url, None, copied), cost_of(server, url, None, promoted)))
    measured = costs[1:]  # the first warms Java up
    return {
        "promote /s": rows / statistics.median(cost.seconds for _, cost in measured),
        "promote, CPU us": statistics.median(cost.cpu for _, cost in measured) / rows * 1e6,
        "COPY by two processes /s": rows / statistics.median(cost.seconds for cost, _ in measured),
        "COPY, CPU us": statistics.median(cost.cpu for cost, _ in measured) / rows * 1e6,
        "ratio of time": statistics.median(copy.seconds / cost.seconds for copy, cost in measured),
        "ratio of CPU": statistics.median(copy.cpu / cost.cpu for copy, cost in measured),
    }


def _hours(folder: Path, url: str, spark: SparkSession) -> Figures:
    """Return what an hour takes beside a tier, and beside ten times the tier."""
    from delayline.spark import JobTarget, promote, schedule

    _emptied(url)
    number, taken = scaled(AN_HOUR), list[float]()
    target = JobTarget(url, endpoint=NAME, cold_tier=str(folder / "hours"))
    turns = ROUNDS + 1  # the first of each is not counted
    for hours in (10, 100):
        first = 0 if not taken else 10
        source = folder / f"{hours}.parquet"
        _write(source, (hours - first) * number, hours=hours - first, begin=first)
        assert schedule(source, target, spark=spark).cold == (hours - first) * number
        times = []
        for turn in range(turns):
            until = _until(first + turn + 1) if first else _until(turn + 1)
            if first and turn == 0:
                promote(target, horizon=_until(first), spark=spark)
            times.append(_timed(url, lambda until=until: promote(target, horizon=until, spark=spark).stored, number))
        taken.append(statistics.median(times[1:]))
    return {
        "an hour, s": taken[0],
        "an hour of ten times the tier, s": taken[1],
        "an hour of ten times the tier, times slower": taken[1] / taken[0],
    }


def _until(hours: int) -> timedelta:
    """Return a horizon that ends in the last of so many hours from the first one on: the rest of it moves, too."""
    return FIRST + hours * HOUR - timedelta(minutes=1) - datetime.now(UTC)


def _write(path: Path, rows: int, *, hours: int, begin: int = 0) -> None:
    """Write the files; due evenly over the hours, in no order."""
    path.mkdir()
    share, seconds = rows // FILES, hours * 3600
    for file in range(FILES):
        numbers = range(file * share, (file + 1) * share)
        columns = {
            "id": [f"{begin}-{number * 7_919 % rows:032d}" for number in numbers],
            "destination": [DESTINATION] * share,
            "due": pa.array(
                [FIRST + begin * HOUR + timedelta(seconds=number * seconds // rows) for number in numbers],
                pa.timestamp("us", "UTC"),
            ),
            "headers": [HEADERS.decode()] * share,
            "body": [BODY] * share,
        }
        pq.write_table(pa.table(columns), path / f"{file}.parquet")


def _emptied(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {TABLE}")
        connection.execute("CHECKPOINT")


def _timed(url: str, work: object, number: int) -> float:
    """Return the seconds it takes to fill the table that is emptied before."""
    assert callable(work)
    _emptied(url)
    started = time.perf_counter()
    stored = work()
    elapsed = time.perf_counter() - started
    assert stored == number, stored
    return elapsed
