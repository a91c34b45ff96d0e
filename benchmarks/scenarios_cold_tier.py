"""What the cold tier costs: promoting against scheduling, an hour of a large tier, the store beside a large tier."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, endpoint_on, lateness, scaled
from benchmarks.on_server import BURST, drain_rate
from benchmarks.processes import cpu_of
from benchmarks.servers import postgresql
from delayline import SqlDelayedMessageStore

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ROWS = 1_000_000
AN_HOUR = 20_000
FILES = 8
TABLE = f'"{NAME}.timeouts"'
HOUR = timedelta(hours=1)
#: On the hour, so that every hour has the same number of messages.
FIRST = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(days=30)


async def spark_promote(folder: Path) -> Figures:
    """1 000 000 due in a day, from files into PostgreSQL, against scheduling them there; an hour of 1 and 10 tiers."""
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
    with postgresql() as [url]:
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        target, turn = JobTarget(url, endpoint=NAME, cold_tier=str(folder / "cold")), 0

        def few() -> float:
            nonlocal turn
            turn += 1
            ids = [f"few {turn} {number}" for number in range(10)]
            data = {"id": ids, "destination": [DESTINATION] * 10, "due": [FIRST] * 10}
            began = cpu_of(os.getpid())
            assert schedule(spark.createDataFrame(pa.table(data)), target, spark=spark).cold == 10
            return cpu_of(os.getpid()) - began

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
    with postgresql() as [url]:
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        figures = _rates(folder, url, spark) | _hours(folder, url, spark)
    spark.stop()
    return figures


def _rates(folder: Path, url: str, spark: SparkSession) -> Figures:
    """Return how fast the same messages are scheduled, and promoted."""
    from delayline.spark import JobTarget, promote, schedule

    rows, rates = scaled(ROWS), []
    source, hot = folder / "day.parquet", JobTarget(url, endpoint=NAME)
    _write(folder / "warm-up.parquet", 1000, hours=1)
    _write(source, rows, hours=24)
    schedule(folder / "warm-up.parquet", hot, spark=spark)
    for turn in range(ROUNDS):
        cold = JobTarget(url, endpoint=NAME, cold_tier=str(folder / f"cold{turn}"))
        scheduled = _timed(url, lambda: schedule(source, hot, on_conflict="raise", spark=spark).stored, rows)
        _emptied(url)
        assert schedule(source, cold, spark=spark).cold == rows
        promoted = _timed(url, lambda cold=cold: promote(cold, horizon=_until(24), spark=spark).stored, rows)
        rates.append((rows / promoted, rows / scheduled))
    return {
        "promote /s": statistics.median(promoted for promoted, _ in rates),
        "schedule /s": statistics.median(scheduled for _, scheduled in rates),
        "ratio": statistics.median(promoted / scheduled for promoted, scheduled in rates),
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
