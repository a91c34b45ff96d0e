"""What a job of Spark costs, beside processes that do nothing but fill the same table."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import struct
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, scaled
from benchmarks.processes import cpu_of
from benchmarks.servers import postgresql_server
from delayline import SqlDelayedMessageStore
from delayline.delayed.arrow import completed
from delayline.sql.postgresql.staging import COPY_END, COPY_HEADER, FIELDS, copy_rows
from delayline.sql.staging import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.servers.postgresql import PostgresqlServer

    from delayline.delayed.store import OnConflict

ROWS = 1_000_000
FILES = 8
TABLE = f'"{NAME}.timeouts"'
COPY = f"COPY {TABLE} (retry_count, {COLUMNS}) FROM STDIN (FORMAT binary)"


@dataclass(frozen=True)
class Cost:
    """What it takes to store some rows."""

    seconds: float
    cpu: float
    """CPU seconds of every process: ours, Spark's and the server's."""
    megabytes: float
    """That the server has written ahead of its data."""


async def spark_schedule(folder: Path) -> Figures:
    """1 000 000 from Parquet into PostgreSQL with its indexes, against two processes doing nothing but binary COPY."""
    return await asyncio.to_thread(_schedule, folder)


def _schedule(folder: Path) -> Figures:
    from delayline.spark import spark_session
    from delayline.spark.schedule import JobTarget, schedule

    rows = scaled(ROWS)
    _write(folder / "few.parquet", 10, files=1)
    _write(folder / "tenth.parquet", rows // 10)
    _write(folder / "rows.parquet", rows)
    costs: dict[str, list[Cost]] = {}
    spark = spark_session("local[2]")
    with postgresql_server() as server, ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as copiers:
        url = server.new_database()
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        target = JobTarget(url, endpoint=NAME)

        def scheduled(source: str, on_conflict: OnConflict = "keep") -> Callable[[], object]:
            return lambda: schedule(folder / source, target, on_conflict=on_conflict, spark=spark)

        def copied(source: str) -> Callable[[], object]:
            files = sorted((folder / source).glob("*.parquet"))
            return lambda: list(copiers.map(copy_files, [url] * 2, [files[0::2], files[1::2]]))

        ways: dict[str, tuple[Callable[[], object] | None, Callable[[], object]]] = {
            "copy": (None, copied("rows.parquet")),
            "new": (None, scheduled("rows.parquet")),
            "a tenth there": (copied("tenth.parquet"), scheduled("rows.parquet")),
            "replace": (copied("rows.parquet"), scheduled("rows.parquet", "replace")),
            "few": (copied("rows.parquet"), scheduled("few.parquet")),
        }
        copied("few.parquet")()
        scheduled("few.parquet")()
        for _ in range(ROUNDS):
            for name, (before, work) in ways.items():
                costs.setdefault(name, []).append(_cost(server, url, before, work))
    spark.stop()
    return _ratios(costs, rows)


def _ratios(costs: dict[str, list[Cost]], rows: int) -> Figures:
    def median(way: str, part: str) -> float:
        return float(statistics.median(getattr(cost, part) for cost in costs[way]))

    def ratio(way: str, part: str) -> float:
        pairs = zip(costs["copy"], costs[way], strict=True)
        return float(statistics.median(getattr(limit, part) / getattr(cost, part) for limit, cost in pairs))

    figures = {
        "COPY by two processes /s": rows / median("copy", "seconds"),
        "COPY, CPU us": median("copy", "cpu") / rows * 1e6,
        "delayline /s": rows / median("new", "seconds"),
        "delayline, CPU us": median("new", "cpu") / rows * 1e6,
        "ten rows beside as many, CPU s": median("few", "cpu"),
        "WAL, times COPY's": median("new", "megabytes") / median("copy", "megabytes"),
    }
    for way in ("new", "a tenth there", "replace"):
        figures[f"{way}, ratio of CPU"] = ratio(way, "cpu")
        figures[f"{way}, ratio of time"] = ratio(way, "seconds")
    return figures


def _write(path: Path, rows: int, files: int = FILES) -> None:
    """Write the files; due over a month, in no order of due times or ids."""
    path.mkdir()
    first = datetime.now(UTC) + timedelta(days=1)
    share = rows // files
    for file in range(files):
        numbers = range(file * share, (file + 1) * share)
        columns = {
            "id": [f"{number * 7_919 % ROWS:032x}"[::-1] for number in numbers],
            "destination": [DESTINATION] * share,
            "due": pa.array(
                [first + timedelta(seconds=number * 104_729 % 2_592_000) for number in numbers],
                pa.timestamp("us", "UTC"),
            ),
            "headers": [HEADERS.decode()] * share,
            "body": [BODY] * share,
        }
        pq.write_table(pa.table(columns), path / f"{file}.parquet")


def copy_files(url: str, paths: Sequence[Path]) -> None:
    """Copy the rows of the files to the store as they are, encoded by Arrow, in one transaction."""
    with psycopg.connect(url) as connection, connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.write(COPY_HEADER)
        for path in paths:
            for batch in pq.ParquetFile(path).iter_batches(10_000):
                copy.write(copy_rows(struct.pack(">hii", FIELDS, 4, 0), completed(batch)))
        copy.write(COPY_END)


def _cost(server: PostgresqlServer, url: str, before: Callable[[], object] | None, work: Callable[[], object]) -> Cost:
    """Return what the work takes; the table is empty, or holds what `before` has put there."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {TABLE}")
        if before is not None:
            before()
        connection.execute("CHECKPOINT")

        def written() -> int:
            [place] = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone() or (0,)
            return int(place)

        start, cpu, began = written(), cpu_of(os.getpid()), time.perf_counter()
        work()
        elapsed = time.perf_counter() - began
        return Cost(elapsed, cpu_of(os.getpid()) - cpu, (written() - start) / 1e6)
