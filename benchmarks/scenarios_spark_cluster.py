"""What a row costs on a standalone cluster, by phase and process, and what memory the driver takes."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.spark.cluster import Cluster

from benchmarks.common import NAME, Figures, scaled
from benchmarks.scenarios_spark import ROWS, write_rows
from benchmarks.servers import postgresql_server
from delayline import SqlDelayedMessageStore

if TYPE_CHECKING:
    from tests.servers.postgresql import PostgresqlServer

ROOT = Path(__file__).parents[1]
#: Runs as driver: the parent of its Python is its Java.
PROGRAM = """
import json, os, sys, time
root, source, url, times, server, *workers = sys.argv[1:]
sys.path.append(root)
from benchmarks.processes import cpu_by_program, cpu_of
from delayline.spark import JobTarget, schedule, spark_session

def peak(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

def cpus():
    driver = cpu_by_program(os.getppid())
    executors = [cpu_by_program(int(worker)) for worker in workers]
    return {
        "driver": sum(driver.values()),
        "executors' Java": sum(each.get("java", 0.0) for each in executors),
        "executors' Python": sum(cpu for each in executors for name, cpu in each.items() if name != "java"),
        "PostgreSQL": cpu_of(int(server)),
    }

if __name__ == "__main__":
    spark = spark_session()
    target = JobTarget(url, endpoint="NAME")
    rows = spark.read.parquet(source)
    schedule(rows.limit(10), target, spark=spark)
    copies = rows.selectExpr("*", f"explode(sequence(1, {int(times)})) AS copy")
    copies = copies.selectExpr("concat(id, '-', copy) AS id", "destination", "due", "headers", "body")
    before, began = cpus(), time.perf_counter()
    spark.sparkContext.setJobGroup("measured", "measured")
    stored = schedule(copies, target, spark=spark).stored
    seconds, after = time.perf_counter() - began, cpus()
    cpu = {name: after[name] - before[name] for name in after}
    memory = {"Java": peak(os.getppid()), "Python": peak(os.getpid())}
    print(json.dumps({"rows": stored, "seconds": seconds, "cpu": cpu, "peak": memory}))
    spark.stop()
""".replace("NAME", NAME)


async def spark_cluster(folder: Path) -> Figures:
    """1 000 000 rows into PostgreSQL on one and on two workers of one core; the driver's peak at ten times that."""
    return await asyncio.to_thread(_on_clusters, folder)


def _on_clusters(folder: Path) -> Figures:
    figures: Figures = {}
    write_rows(folder / "rows.parquet", scaled(ROWS))
    peaks: dict[int, dict[str, float]] = {}
    with postgresql_server() as server:
        for workers, times in ((1, 1), (2, 1), (2, 10)):
            place = folder / f"{workers}-{times}"
            place.mkdir()
            done = _submitted(place, folder / "rows.parquet", server, workers, times)
            if times > 1:
                figures[f"{times} times the rows /s"] = done["rows"] / done["seconds"]
            else:
                name = f"{workers} worker{'s' if workers > 1 else ''}"
                figures[f"{name} /s"] = done["rows"] / done["seconds"]
                us = {part: cpu / done["rows"] * 1e6 for part, cpu in done["cpu"].items()}
                figures |= {f"{name}, {part}, CPU us": cost for part, cost in us.items()}
                figures |= {
                    f"{name}, Java, {phase}, CPU us": seconds / done["rows"] * 1e6
                    for phase, seconds in _phases(place).items()
                }
            peaks[times] = done["peak"]
    for program, peak in peaks[10].items():
        figures[f"driver's {program}, peak MB"] = peaks[1][program]
        figures[f"driver's {program}, peak at ten times the rows, times"] = peak / peaks[1][program]
    return figures


def _submitted(folder: Path, rows: Path, server: PostgresqlServer, workers: int, times: int) -> dict[str, Any]:
    url = server.new_database()
    asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure(NAME))
    events = folder / "events"
    events.mkdir()
    settings = [
        "spark.eventLog.enabled=true",
        f"spark.eventLog.dir={events.as_uri()}",
        "spark.eventLog.compress=false",
        "spark.eventLog.rolling.enabled=false",
    ]
    with Cluster(folder, workers) as cluster:
        pids = [str(pid) for pid in cluster.worker_pids]
        words = [str(ROOT), str(rows), url, str(times), str(server.pid), *pids]
        done = cluster.submit(PROGRAM, *words, conf=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    server.drop_database(url)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _phases(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of the tasks' Java: that read and sort, and that store."""
    [file] = (folder / "events").iterdir()
    phases: dict[str, float] = defaultdict(float)
    measured: set[int] = set()
    with file.open(encoding="utf-8") as lines:
        for event in map(json.loads, lines):
            if event["Event"] == "SparkListenerJobStart":
                if event.get("Properties", {}).get("spark.jobGroup.id") == "measured":
                    measured.update(event["Stage IDs"])
            elif event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in measured:
                metrics = event["Task Metrics"]
                read = metrics["Shuffle Read Metrics"]
                sorted_before = read["Local Bytes Read"] + read["Remote Bytes Read"] > 0
                phases["store" if sorted_before else "read and sort"] += metrics["Executor CPU Time"] / 1e9
    return dict(phases)
