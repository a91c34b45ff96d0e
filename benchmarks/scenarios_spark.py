"""What Spark adds to, or takes from, what one plain process does with the same database."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, against, scaled
from benchmarks.servers import postgresql
from delayline import SqlDelayedMessageStore

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 1_000_000
FILES = 8
TABLE = f'"{NAME}.timeouts"'
COPY = f"COPY {TABLE} (id, destination, due, headers, body, retry_count) FROM STDIN (FORMAT binary)"
TYPES = ["text", "text", "timestamptz", "bytea", "bytea", "int4"]


async def spark_schedule(folder: Path) -> Figures:
    """1 000 000 from Parquet into PostgreSQL with its indexes, staged, against one process doing binary COPY."""
    return await asyncio.to_thread(_schedule, folder)


def _schedule(folder: Path) -> Figures:
    from delayline.spark import spark_session
    from delayline.spark.schedule import JobTarget, schedule

    rows = scaled(ROWS)
    _write(folder / "warm-up.parquet", 1000)
    _write(folder / "rows.parquet", rows)
    rates = []
    spark = spark_session("local[2]")
    with postgresql() as [url]:
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        target = JobTarget(url, endpoint=NAME)
        schedule(folder / "warm-up.parquet", target, spark=spark)
        for _ in range(ROUNDS):
            plain = rows / _timed(url, lambda: _copy(url, folder / "rows.parquet"))
            staged = _timed(url, lambda: schedule(folder / "rows.parquet", target, on_conflict="raise", spark=spark))
            rates.append((rows / staged, plain))
    spark.stop()
    return against("one process, binary COPY", rates)


def _write(path: Path, rows: int) -> None:
    """Write the files; due over a month, in no order."""
    path.mkdir()
    first = datetime.now(UTC) + timedelta(days=1)
    share = rows // FILES
    for file in range(FILES):
        numbers = range(file * share, (file + 1) * share)
        columns = {
            "id": [f"{number * 7_919 % rows:032d}" for number in numbers],
            "destination": [DESTINATION] * share,
            "due": pa.array(
                [first + timedelta(seconds=number * 104_729 % 2_592_000) for number in numbers],
                pa.timestamp("us", "UTC"),
            ),
            "headers": [HEADERS.decode()] * share,
            "body": [BODY] * share,
        }
        pq.write_table(pa.table(columns), path / f"{file}.parquet")


def _copy(url: str, path: Path) -> None:
    with psycopg.connect(url) as connection, connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.set_types(TYPES)
        for file in sorted(path.glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(10_000):
                columns: list[list[Any]] = [column.to_pylist() for column in batch.columns]
                columns[3] = [headers.encode() for headers in columns[3]]
                for row in zip(*columns, strict=True):
                    copy.write_row((*row, 0))


def _timed(url: str, work: Any) -> float:  # noqa: ANN401 - any of the ways
    """Return the seconds it takes to fill the table that is empty."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {TABLE}")
        connection.execute("CHECKPOINT")
        started = time.perf_counter()
        work()
        elapsed = time.perf_counter() - started
        [count] = connection.execute(f"SELECT count(*) FROM {TABLE}").fetchone() or (0,)  # noqa: S608 - ours
        assert count == scaled(ROWS), count
    return elapsed
