"""Names of transactions that a two-phase commit prepares: `delayline-LOG-DATABASE-NUMBER`.

LOG is the name of the table of decisions, DATABASE stands for the database that prepares the transaction. The first
twelve digits of NUMBER are the milliseconds since 1970 at which the transaction was named, in hexadecimal.
"""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.readable import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX: Final = "delayline-"
DIGITS_OF_TIME: Final = 12
#: Earlier and later times are none: a name may be of another make.
EARLIEST: Final = datetime(2026, 1, 1, tzinfo=UTC)
FASTEST_CLOCK: Final = timedelta(days=1)
#: Running endpoints finish one in less.
OLD: Final = timedelta(minutes=1)
FINDING: Final = "prepared transactions"
TO_FINISH: Final = (
    "An endpoint with the same queues and the same store finishes them, when it starts or while it runs, unless the "
    "process that has prepared them is alive and waits"
)


def new_name(log: str, database: str) -> str:
    """Return a new name; 72 characters with the 16 of a log and the 12 of a database."""
    number = f"{time.time_ns() // 1_000_000:0{DIGITS_OF_TIME}x}{uuid.uuid4().hex[DIGITS_OF_TIME:]}"
    return f"{PREFIX}{log}-{database}-{number}"


def named_at(name: str, now: datetime) -> datetime | None:
    """Return when the transaction was named, by the clock of its process; None if the name does not say."""
    try:
        at = datetime.fromtimestamp(int(name.rpartition("-")[2][:DIGITS_OF_TIME], 16) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return at if EARLIEST <= at <= now + FASTEST_CLOCK else None


def finding(names: Sequence[str], now: datetime) -> tuple[str, bool, str]:
    """Return the finding of `doctor` about prepared transactions of these names: its subject, verdict and text."""
    if not names:
        return FINDING, True, "none"
    times = [(at, name) for name in names if (at := named_at(name, now)) is not None]
    first = min(times, default=None)
    number = f"{len(names)} of delayline's"
    if first is not None:
        number += f", the oldest for {duration(max(now - first[0], timedelta(0)))}"
    if first is not None and len(times) == len(names) and now - first[0] < OLD:
        return FINDING, True, number
    oldest = names[0] if first is None else first[1]
    return FINDING, False, f"{number}: {oldest}. {TO_FINISH}"
