"""What a job of Spark costs, beside processes that do nothing but fill the same table."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import struct
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, scaled
from benchmarks.processes import cpu_of
from benchmarks.servers import cpu_with, postgresql_server
from delayline import SqlDelayedMessageStore
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName, PieceParameters
from delayline.bulk.pieces import ROWS_AT_ONCE, PieceRows, PieceWriter
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
#: Rows of a piece of a job with as many rows, which has 16 384 pieces.
ROWS_OF_PIECE = 61
TABLE_NAME = f"{NAME}.timeouts"
TABLE = f'"{TABLE_NAME}"'
COPY = f"COPY {TABLE} (retry_count, {COLUMNS}) FROM STDIN (FORMAT binary)"


@dataclass(frozen=True)
class Cost:
    """What it takes to store some rows."""

    seconds: float
    cpu: float
    """CPU seconds of every process: ours, Spark's and the server's."""
    server: float
    """Those of the server alone."""
    megabytes: float
    """That the server has written ahead of its data."""


async def spark_schedule(folder: Path) -> Figures:
    """1 000 000 from Parquet into PostgreSQL with its indexes, against two processes doing nothing but binary COPY."""
    return await asyncio.to_thread(_schedule, folder)


def _schedule(folder: Path) -> Figures:
    from delayline.spark import spark_session
    from delayline.spark.schedule import JobTarget, schedule

    rows = scaled(ROWS)
    write_rows(folder / "few.parquet", 10, files=1)
    write_rows(folder / "tenth.parquet", rows // 10)
    write_rows(folder / "rows.parquet", rows)
    costs: dict[str, list[Cost]] = {}
    spark = spark_session("local[2]")
    with postgresql_server() as server, ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as copiers:
        url = server.new_database()
        asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
        target = JobTarget(url, endpoint=NAME)

        def scheduled(source: str, on_conflict: OnConflict = "keep") -> Callable[[], object]:
            return lambda: schedule(folder / source, target, on_conflict=on_conflict, spark=spark)

        def copied(source: str) -> Callable[[], object]:
            return lambda: copy_by_two(copiers, url, folder / source)

        def in_pieces(source: str) -> Callable[[], object]:
            files = sorted((folder / source).glob("*.parquet"))

            def store() -> object:
                opened = PieceWriter(url, TABLE_NAME).open(JobName(uuid.uuid4().hex), PieceParameters(0, rows, "keep"))
                halves = [files[0::2], files[1::2]]
                return list(copiers.map(store_files, [url] * 2, [opened.number] * 2, halves, [0, rows]))

            return store

        ways: dict[str, tuple[Callable[[], object] | None, Callable[[], object]]] = {
            "copy": (None, copied("rows.parquet")),
            "pieces alone": (None, in_pieces("rows.parquet")),
            "new": (None, scheduled("rows.parquet")),
            "a tenth there": (copied("tenth.parquet"), scheduled("rows.parquet")),
            "replace": (copied("rows.parquet"), scheduled("rows.parquet", "replace")),
            "few": (copied("rows.parquet"), scheduled("few.parquet")),
        }
        copied("few.parquet")()
        scheduled("few.parquet")()
        for _ in range(ROUNDS):
            for name, (before, work) in ways.items():
                costs.setdefault(name, []).append(cost_of(server, url, before, work))
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
        "COPY, the server's us": median("copy", "server") / rows * 1e6,
        "delayline, CPU us": median("new", "cpu") / rows * 1e6,
        "delayline, the server's us": median("new", "server") / rows * 1e6,
        "ten rows beside as many, CPU s": median("few", "cpu"),
        "WAL, times COPY's": median("new", "megabytes") / median("copy", "megabytes"),
    }
    for way in ("pieces alone", "new", "a tenth there", "replace"):
        figures[f"{way}, ratio of CPU"] = ratio(way, "cpu")
        figures[f"{way}, ratio of time"] = ratio(way, "seconds")
    return figures


def write_rows(path: Path, rows: int, files: int = FILES) -> None:
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


def copy_by_two(copiers: ProcessPoolExecutor, url: str, folder: Path) -> None:
    """Copy the files of the folder to the store, half of them in each of two processes."""
    files = sorted(folder.glob("*.parquet"))
    list(copiers.map(copy_files, [url] * 2, [files[0::2], files[1::2]]))


def copy_files(url: str, paths: Sequence[Path]) -> None:
    """Copy the rows of the files to the store as they are, encoded by Arrow, in one transaction."""
    with psycopg.connect(url) as connection, connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.write(COPY_HEADER)
        for path in paths:
            for batch in pq.ParquetFile(path).iter_batches(10_000):
                copy.write(copy_rows(struct.pack(">hii", FIELDS, 4, 0), completed(batch)))
        copy.write(COPY_END)


def store_files(url: str, job: int, paths: Sequence[Path], first_piece: int) -> None:
    """Store the rows of the files as they are, as the tasks of a job do, in pieces from that one on."""
    writer, piece = PieceWriter(url, TABLE_NAME), first_piece
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches(ROWS_AT_ONCE):
            pieces = piece + np.arange(batch.num_rows) // ROWS_OF_PIECE
            numbers, counts = np.unique(pieces, return_counts=True)
            inputs = {int(number): Fingerprint(int(rows)) for number, rows in zip(numbers, counts, strict=True)}
            none = pieces[:0]
            writer.store(job, PieceRows(batch.sort_by("id"), pieces, none, none, inputs), "keep")
            piece = int(numbers[-1]) + 1


def cost_of(
    server: PostgresqlServer, url: str, before: Callable[[], object] | None, work: Callable[[], object]
) -> Cost:
    """Return what the work takes; the table is empty, or holds what `before` has put there."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {TABLE}")
        if before is not None:
            before()
        connection.execute("CHECKPOINT")

        def written() -> int:
            [place] = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone() or (0,)
            return int(place)

        start, cpu, of_server, began = written(), cpu_with(server), cpu_of(server.pid), time.perf_counter()
        work()
        elapsed = time.perf_counter() - began
        return Cost(elapsed, cpu_with(server) - cpu, cpu_of(server.pid) - of_server, (written() - start) / 1e6)
