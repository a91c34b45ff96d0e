"""Run scenarios, each in a process of its own: `python -m benchmarks [NAME ...]`; without names all but the large."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import (
    scenarios,
    scenarios_azure,
    scenarios_cold_tier,
    scenarios_fair,
    scenarios_handled,
    scenarios_large,
    scenarios_mariadb,
    scenarios_migration,
    scenarios_postgresql,
    scenarios_rabbitmq,
    scenarios_shards,
    scenarios_spark,
    scenarios_spark_cluster,
    scenarios_spark_dispatch,
    scenarios_telemetry,
    scenarios_timeouts,
    scenarios_two_databases,
)
from benchmarks.common import SCALE, Figures
from benchmarks.servers import FLUSH_MICROSECONDS

#: scenario: (figure, comparison, goal) of the issue that set it
GOALS: dict[str, list[tuple[str, str, float]]] = {
    "single_send": [("ratio", ">=", 0.30)],
    "concurrent_sends": [("ratio", ">=", 0.20)],
    "burst": [("ratio", ">=", 0.60)],
    "spread": [("lateness p50 ms", "<", 3), ("lateness p99 ms", "<", 15), ("early", "<=", 0)],
    "backlog": [("ratio", ">=", 0.90), ("later by ms", "<", 10)],
    "rest": [("share of one core %", "<", 0.5), ("statements a second", "<=", 2)],
    "memory": [("most resident MB", "<", 150)],
    "pg_single_send": [("ratio", ">=", 0.60)],
    "pg_concurrent_sends": [("ratio", ">=", 0.25)],
    "pg_store_many": [
        ("ratio", ">=", 0.60),
        ("times PgQueuer", ">=", 1.5),
        ("send_many, times PgQueuer", ">=", 0.7),
        ("awaited sends, times PgQueuer", ">=", 0.7),
    ],
    "pg_burst": [("ratio", ">=", 0.70)],
    "pg_immediate_sends": [("ratio, one after another", ">=", 0.8), ("ratio, together", ">=", 0.8)],
    "maria_immediate_sends": [("ratio, one after another", ">=", 0.8), ("ratio, together", ">=", 0.8)],
    "sqlite_handled": [("times BullMQ", ">=", 1)],
    "sqlite_handled_queued": [("times BullMQ", ">=", 1)],
    "pg_handled": [
        ("times PgQueuer", ">=", 1),
        ("ratio to the bare loop", ">=", 0.7),
        ("due, at least once, best, worker us", "<=", 60),
        ("due, at least once, best, server us", "<=", 60),
        ("due, at least once, best, transactions", "<=", 0.02),
        ("exactly once, ratio to at least once", ">=", 0.6),
    ],
    "pg_own_transaction": [("def, ratio", ">=", 0.5), ("coroutine, ratio", ">=", 0.5)],
    "pg_handled_peers": [],
    "pg_handled_queued": [("times PgQueuer", ">=", 1), ("exactly once, ratio to at least once", ">=", 0.6)],
    "pg_handled_flush": [("ratio to the bare loop", ">=", 0.6)],
    "pg_steady": [("at least once, worker and server us", "<=", 700), ("dispatch, p99 ms", "<=", 14)],
    "pg_steady_queued": [("at least once, p99 ms", "<", 10)],
    "pg_pressure": [("three, at least once, p99 ms", "<", 100), ("one, at least once, p99 ms", "<", 100)],
    "maria_pressure": [("three, at least once, p99 ms", "<", 100), ("one, at least once, p99 ms", "<", 100)],
    "maria_handled": [],
    "maria_handled_queued": [],
    "rmq_handled": [("times aio-pika", ">=", 1.8), ("defaults, worker us", "<=", 90)],
    "rmq_handled_due": [("times the best peer", ">=", 2.5)],
    "rmq_inbox": [("defaults, ratio", ">=", 0.6)],
    "pg_inbox": [("defaults, ratio", ">=", 0.6)],
    "maria_inbox": [("defaults, ratio", ">=", 0.4)],
    "pg_telemetry": [
        ("handled at least once, prometheus, worker us more %", "<=", 3),
        ("handled exactly once, prometheus, worker us more %", "<=", 3),
        ("burst, prometheus, worker and server us more %", "<=", 3),
    ],
    "pg_fetch": [("ratio", ">=", 0.40)],
    "pg_pollers": [("ratio", ">=", 0.80)],
    "pg_latest": [("latest after the lock ms", "<", 5000), ("early", "<=", 0)],
    "pg_spread": [("lateness p50 ms", "<", 4), ("lateness p99 ms", "<", 15), ("early", "<=", 0)],
    "pg_backlog": [("times slower", "<=", 1.2), ("later by ms", "<", 10)],
    "pg_old_transaction": [("times slower", "<=", 1.5)],
    "pg_timeouts": [("lateness p99 ms", "<", 50), ("early", "<=", 0)],
    "pg_timeouts_whole": [("early", "<=", 0)],
    "pg_timeouts_rest": [("share of one core %", "<", 0.5), ("times a store's", "<=", 1.5)],
    "pg_fair": [("fair, other p99 ms", "<", 1000), ("ratio", ">=", 0.9)],
    "pg_fair_queued": [("fair, other p99 ms", "<", 1000), ("ratio", ">=", 0.9)],
    "maria_fair": [("fair, other p99 ms", "<", 1000), ("ratio", ">=", 0.9)],
    "pg_rest": [("statements a minute", "<=", 120)],
    "maria_single_send": [("ratio", ">=", 0.40)],
    "maria_concurrent_sends": [("ratio", ">=", 0.40)],
    "maria_store_many": [("ratio", ">=", 0.40)],
    "maria_burst": [("ratio", ">=", 0.40)],
    "maria_fetch": [("ratio", ">=", 0.40)],
    "maria_pollers": [],
    "maria_spread": [("early", "<=", 0)],
    "maria_backlog": [("times slower", "<=", 1.2), ("later by ms", "<", 10)],
    "maria_old_transaction": [("times slower", "<=", 1.5)],
    "maria_rest": [("statements a minute", "<=", 180)],
    "two_pg": [("ratio", ">=", 0.25)],
    "two_pg_maria": [("ratio", ">=", 0.25)],
    "two_maria_pg": [("ratio", ">=", 0.25)],
    "rmq_publish": [("times aio-pika", ">=", 2.5)],
    "rmq_levels": [
        ("ratio", ">=", 0.70),
        ("1 to 15 s, lateness p50 ms", "<", 15),
        ("1 to 15 s, lateness p99 ms", "<", 80),
        ("1 to 15 s, early", "<=", 0),
        ("fractions, early", "<=", 0),
        ("fractions, store in front, lateness p99 ms", "<", 100),
        ("fractions, store in front, early", "<=", 0),
    ],
    "rmq_burst": [("ratio", ">=", 0.50), ("times one at a time", ">=", 12)],
    "rmq_spread": [
        ("lateness p50 ms", "<", 4),
        ("lateness p99 ms", "<", 15),
        ("early", "<=", 0),
        ("later by ms", "<", 10),
    ],
    "shards": [("times later", "<=", 1.2)],
    "spark_schedule": [
        ("pieces alone, ratio of CPU", ">=", 0.90),
        ("new, ratio of CPU", ">=", 0.65),
        ("new, ratio of time", ">=", 0.60),
        ("a tenth there, ratio of CPU", ">=", 0.50),
        ("replace, ratio of CPU", ">=", 0.50),
        ("WAL, times COPY's", "<=", 1.05),
    ],
    "spark_cluster": [
        ("driver's Java, peak at ten times the rows, times", "<=", 1.2),
        ("driver's Python, peak at ten times the rows, times", "<=", 1.2),
    ],
    "migrate_million": [
        ("preview seconds", "<", 10),
        ("to a store seconds", "<", 90),
        ("to a store ratio", ">=", 0.70),
        ("to levels seconds", "<", 360),
        ("to levels ratio", ">=", 0.70),
    ],
    "spark_dispatch": [
        ("lateness p50 ms", "<", 20),
        ("lateness p99 ms", "<", 60),
        ("early", "<=", 0),
        ("ratio", ">=", 0.80),
    ],
    "spark_audit": [
        ("1,000,000 entries again, CPU us", "<=", 12),
        ("5,000,000 entries again, CPU us", "<=", 6),
    ],
    "spark_promote": [
        ("ratio of time", ">=", 0.60),
        ("an hour of ten times the tier, times slower", "<=", 1.2),
    ],
    "spark_cold_ids": [("times the CPU", "<=", 1.3)],
    "spark_cold_backlog": [("times slower", "<=", 1.05), ("later by ms", "<", 1)],
    "azure_spread": [("lateness p99 ms", "<", 1500), ("early", "<=", 0)],
    "azure_burst": [("ratio", ">=", 3)],
    "azure_failover": [("seconds", "<", 20)],
    "pg_large": [
        ("dispatch, times slower", "<=", 1.2),
        ("scheduling near, times slower", "<=", 1.2),
        ("scheduling over a month, times slower", "<=", 3),
    ],
}
#: Takes too long, and too much disk, to run unasked.
LARGE = {"pg_large", "pg_fair", "spark_cluster"}
MODULES = (
    scenarios,
    scenarios_postgresql,
    scenarios_mariadb,
    scenarios_fair,
    scenarios_two_databases,
    scenarios_large,
    scenarios_rabbitmq,
    scenarios_shards,
    scenarios_spark,
    scenarios_spark_cluster,
    scenarios_migration,
    scenarios_spark_dispatch,
    scenarios_cold_tier,
    scenarios_timeouts,
    scenarios_azure,
    scenarios_handled,
    scenarios_telemetry,
)
SCENARIOS = {name: getattr(module, name) for name in GOALS for module in MODULES if hasattr(module, name)}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run, print and keep the figures; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run scenarios, each in a process of its own, and keep their figures in benchmarks/results.",
        epilog="BENCHMARK_SCALE=0.1 runs them with a tenth of the messages, or of the time. Scenarios: "
        + ", ".join(GOALS),
    )
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="all but the large ones if left out")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names: list[str] = arguments.names
    unknown = [name for name in names if name not in GOALS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r}; there are: {', '.join(GOALS)}")
    if arguments.inside:
        return inside(names[0])
    missed = 0
    results: dict[str, Figures] = {}
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    described = machine()
    for name in names or [name for name in GOALS if name not in LARGE]:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks", "--inside", name], stdout=subprocess.PIPE, check=False
        )
        if ran.returncode:
            print(f"\n{name}: FAILED with exit code {ran.returncode}")
            missed += 1
            continue
        results[name] = json.loads(ran.stdout)
        missed += report(name, results[name])
        kept.write_text(json.dumps({"machine": described, "results": results}, indent=2) + "\n")
    print(f"\n{len(results)} kept in {kept}" if results else "\nnothing to keep")
    return 1 if missed else 0


def inside(name: str) -> int:
    """Run one scenario in this process and print its figures as JSON."""
    gc.collect()
    gc.freeze()  # as `delayline run` does: full collections would traverse the modules of every peer
    with tempfile.TemporaryDirectory(prefix="delayline-bench-") as folder:
        figures = asyncio.run(SCENARIOS[name](Path(folder)))
    print(json.dumps(figures))
    return 0


def report(name: str, figures: Figures) -> int:
    """Print one scenario's figures beside its goals and return how many were missed."""
    goals = {figure: (comparison, goal) for figure, comparison, goal in GOALS[name]}
    missed = 0
    print(f"\n{name}: {(SCENARIOS[name].__doc__ or '').strip()}")
    for figure, value in figures.items():
        verdict = ""
        if figure in goals:
            comparison, goal = goals[figure]
            reached = {">=": value >= goal, "<": value < goal, "<=": value <= goal}[comparison]
            missed += not reached
            verdict = f"{'reached' if reached else 'MISSED'}, goal {comparison} {goal:g}"
        print(f"  {figure:38} {value:12,.2f}  {verdict}")
    return missed


def machine() -> dict[str, object]:
    """Describe what the figures were measured on."""
    described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(described, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": platform.platform(),
        "commit": commit.stdout.strip(),
        "load before": os.getloadavg(),
        "flush takes longer by, microseconds": FLUSH_MICROSECONDS,
        "share of the full numbers": SCALE,
    }


if __name__ == "__main__":
    sys.exit(main())
