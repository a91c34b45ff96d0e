"""Ten million pending on PostgreSQL; `make bench-large`."""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks.bare import BODY, HEADERS
from benchmarks.common import DESTINATION, ROUNDS, Figures, endpoint_on, scaled
from benchmarks.on_server import BURST, connected, drain_rate, messages, store_rate, timeouts
from benchmarks.servers import postgresql

if TYPE_CHECKING:
    from pathlib import Path

STAGES = (0, scaled(1_000_000), scaled(10_000_000))
AT_ONCE = 500_000
BYTES_EACH = 2500  # a row, its index entries, and the log of both, with room to spare
PATIENCE = 1800.0  # seconds, after which no more is stored
NEAR, SOON = timedelta(hours=2), timedelta(days=1)
MONTH = timedelta(days=30)
#: Those from `first` to `last` of so many, due evenly over the month, whichever of them they are.
FILL = """
INSERT INTO {table} (id, destination, due, headers, body, retry_count)
SELECT 'pending-' || lpad(n::text, 28, '0'), %(destination)s,
  %(start)s::timestamptz + %(month)s::interval * ((n * 7919 %% %(all)s)::float8 / %(all)s), %(headers)s, %(body)s, 0
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""


async def pg_large(folder: Path) -> Figures:
    """From none to 1 000 000 to 10 000 000 pending: dispatch, and scheduling near and over a month."""
    free, needed = shutil.disk_usage(folder).free, STAGES[-1] * BYTES_EACH + 5_000_000_000
    if free < needed:
        raise SystemExit(f"{free / 1e9:.0f} GB are free in {folder}, and {needed / 1e9:.0f} GB are needed")
    figures: Figures = {}
    began = time.monotonic()
    with postgresql() as (url,):
        await drain_rate(url, BURST, lambda: endpoint_on(url))  # sets up
        for before, pending in zip((0, *STAGES), STAGES, strict=False):
            figures[f"filling to {pending}, s"] = _fill(url, before, pending, began + PATIENCE)
            await drain_rate(url, BURST, lambda: endpoint_on(url))  # after a checkpoint pages are logged whole
            found = await _looks(url)
            print(f"behind {pending}: {found}", file=sys.stderr)
            figures |= {f"{name} behind {pending} /s": rate for name, rate in found.items()}
        for name in found:
            rates = [figures[f"{name} behind {pending} /s"] for pending in STAGES]
            figures[f"{name}, times slower"] = rates[0] / min(rates)
    return figures


def _fill(url: str, before: int, pending: int, deadline: float) -> float:
    """Store what is missing; return the seconds that took."""
    started = time.monotonic()
    with connected(url) as connection:
        fill, start = FILL.format(table=timeouts(connection)), datetime.now(UTC) + SOON
        constant = {"destination": DESTINATION, "start": start, "month": MONTH, "headers": HEADERS, "body": BODY}
        for first in range(before, pending, AT_ONCE):
            if time.monotonic() > deadline:
                raise SystemExit(f"{first} messages were stored when the time was up")
            last = min(first + AT_ONCE, pending) - 1
            connection.exec_driver_sql(fill, {**constant, "all": STAGES[-1], "first": first, "last": last})
        connection.exec_driver_sql(f"VACUUM ANALYZE {timeouts(connection)}")
        connection.exec_driver_sql("CHECKPOINT")
    return time.monotonic() - started


async def _looks(url: str) -> Figures:
    """Return the rates behind what is pending, and leave it as it was."""
    chance, rates = random.Random(0), dict[str, list[float]]()  # noqa: S311 - repeatable

    soon = datetime.now(UTC) + NEAR
    for turn in range(ROUNDS):
        near = messages(f"near{turn}", scaled(100_000), lambda n: soon + timedelta(milliseconds=n))
        far = messages(f"far{turn}", scaled(100_000), lambda _: soon + MONTH * chance.random())
        rates.setdefault("dispatch", []).append(await drain_rate(url, BURST, lambda: endpoint_on(url)))
        rates.setdefault("scheduling near", []).append(await store_rate(url, near))
        rates.setdefault("scheduling over a month", []).append(await store_rate(url, far))
    with connected(url) as connection:
        connection.exec_driver_sql(f"DELETE FROM {timeouts(connection)} WHERE id NOT LIKE 'pending-%%'")  # noqa: S608
    return {name: statistics.median(found) for name, found in rates.items()}
