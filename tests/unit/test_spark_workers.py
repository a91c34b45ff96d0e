"""Garbage collections of Spark's Python workers."""

from __future__ import annotations

import subprocess
import sys

TWO_TASKS = """
import gc
import weakref
from delayline.spark.workers import keep_imports

class Ring:
    pass

for _ in range(2):
    kept, ring = gc.get_freeze_count(), Ring()
    ring.itself, seen = ring, weakref.ref(ring)
    del ring
    keep_imports()
    gc.collect()  # as Spark does
    print(gc.get_freeze_count() > kept, seen())
"""


def test_a_worker_keeps_its_imports_once_and_still_collects_what_tasks_leave() -> None:
    """Given a worker, when it has run two tasks, then imports are kept after the first; garbage goes after each."""
    ran = subprocess.run([sys.executable, "-c", TWO_TASKS], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["True None", "False None"]
