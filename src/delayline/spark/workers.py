"""The Python workers of Spark, each of which runs task after task."""

from __future__ import annotations

import gc
from functools import cache


@cache
def keep_imports() -> None:
    """Leave what this worker has imported out of its garbage collections, from the end of its first task on.

    Spark has a worker collect after each task, which would look through a hundred thousand objects of libraries.
    """
    gc.collect()
    gc.freeze()
