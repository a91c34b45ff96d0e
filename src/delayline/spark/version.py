"""Which Spark it takes; imports nothing of it, so that an older one is told of before its parts are missed."""

from __future__ import annotations

import re
from typing import Final

#: The first whose streams in Python can limit a batch.
OLDEST: Final = (4, 2)
TOO_OLD: Final = (
    "this is PySpark {}, and the data pipeline needs 4.2 or newer, as the cluster does. "
    "Run: pip install --upgrade 'delayline[spark]'"
)


def is_too_old(version: str) -> bool:
    """Tell whether that is a PySpark before 4.2, or none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is None or (int(found[1]), int(found[2])) < OLDEST
