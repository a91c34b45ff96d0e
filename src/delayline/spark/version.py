"""The oldest supported PySpark.

Imports nothing of PySpark, so that an older PySpark gives this error and not a failed import.
"""

from __future__ import annotations

import re
from typing import Final

#: The first version whose Python data sources can limit the batches of a stream.
OLDEST_SPARK: Final = (4, 2)
TOO_OLD: Final = (
    "this is PySpark {}, but delayline.spark needs 4.2 or newer, here and on the cluster. "
    "Run: pip install --upgrade 'delayline[spark]'"
)


def is_too_old(version: str) -> bool:
    """Return whether the version is older than 4.2 or unreadable."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is None or (int(match[1]), int(match[2])) < OLDEST_SPARK
