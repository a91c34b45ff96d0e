"""Run scenarios, each in a process of its own: `python -m benchmarks [NAME ...]`; no name runs all."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import scenarios, scenarios_postgresql
from benchmarks.house import Figures

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
    "pg_store_many": [("ratio", ">=", 0.60), ("times PgQueuer", ">=", 1.5)],
    "pg_burst": [("ratio", ">=", 0.70), ("times PgQueuer", ">=", 2.5), ("times Procrastinate", ">=", 40)],
    "pg_fetch": [("ratio", ">=", 0.40)],
    "pg_pollers": [("ratio", ">=", 0.80)],
    "pg_spread": [("lateness p50 ms", "<", 4), ("lateness p99 ms", "<", 15), ("early", "<=", 0)],
    "pg_backlog": [("times slower", "<=", 1.2), ("later by ms", "<", 10)],
    "pg_old_transaction": [("times slower", "<=", 1.5)],
}
SCENARIOS = {name: getattr(scenarios_postgresql if name.startswith("pg_") else scenarios, name) for name in GOALS}
RESULTS = Path(__file__).parent / "results"


def main(names: list[str]) -> int:
    """Run, print and keep the figures; 1 when a goal is missed."""
    if names[:1] == ["--inside"]:
        return inside(names[1])
    unknown = [name for name in names if name not in GOALS]
    if unknown:
        print(f"unknown scenario {unknown[0]!r}; there are: {', '.join(GOALS)}", file=sys.stderr)
        return 2
    missed = 0
    results: dict[str, Figures] = {}
    for name in names or GOALS:
        ran = subprocess.run([sys.executable, "-m", "benchmarks", "--inside", name], stdout=subprocess.PIPE, check=True)
        results[name] = json.loads(ran.stdout)
        missed += report(name, results[name])
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / f"{datetime.now(UTC):%Y-%m-%d-%H%M}.json"
    kept.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    print(f"kept in {kept}")
    return 1 if missed else 0


def inside(name: str) -> int:
    """Run one scenario in this process and print its figures as JSON."""
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
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": platform.platform(),
        "load before": os.getloadavg(),
        "flush takes longer by, microseconds": int(os.environ.get("BENCHMARK_FSYNC_MICROSECONDS", "0")),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
