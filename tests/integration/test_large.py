"""Large messages: batches are bounded by their bytes, and so is the memory they take."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from delayline.events import Event
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from delayline import Endpoint

MEGABYTE = 1 << 20

SCRIPT = """
import asyncio, datetime, json, resource, sys
from delayline import Endpoint, StoredDelivery
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Signals

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

async def main(path, number, size):
    url = "sqlite:///" + path
    sizes = []
    delivery = StoredDelivery(SqlDelayedMessageStore(url), batch_bytes=16 << 20)
    endpoint = Endpoint("orders", transport=SqlTransport(url), delayed_delivery=delivery, concurrency=1)
    @endpoint.handler
    async def handle(message, context):
        sizes.append(len(message.body))
    async with endpoint:
        before = peak()
        due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
        for _ in range(number):
            await endpoint.send("orders", bytes(size), deliver_at=due)
        while len(sizes) < number:
            await asyncio.sleep(0.05)
    print(json.dumps({"before": before, "after": peak(), "sizes": sizes}))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


async def test_batches_are_bounded_by_their_bytes(make_endpoint: Callable[..., Endpoint]) -> None:
    # Given batches of at most 12 MB, and twenty messages of 5 MB that fall due together
    endpoint = make_endpoint(batch_bytes=12 * MEGABYTE)
    with Signals() as signals:
        async with endpoint:
            for _ in range(20):
                await endpoint.send("orders", bytes(5 * MEGABYTE), delay=timedelta(seconds=0.5))
            # When they are dispatched
            async with asyncio.timeout(30):
                while await endpoint.delayed.pending(limit=1):  # noqa: ASYNC110 - no notification when all are gone
                    await asyncio.sleep(0.05)
        batches = [vars(record)["facts"]["count"] for record in signals.records(Event.DISPATCHED)]
    # Then no more than two went at once
    assert sum(batches) == 20
    assert max(batches) <= 2


def test_memory_stays_bounded(file: Path) -> None:
    # When another process sends, dispatches and handles 150 MB in messages of 5 MB, in batches of 16 MB
    command = [sys.executable, "-c", SCRIPT, str(file), "30", str(5 * MEGABYTE)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    seen = json.loads(ran.stdout)
    # Then all arrive whole, and it took the memory of some batches, not of all messages
    assert seen["sizes"] == [5 * MEGABYTE] * 30
    assert seen["after"] - seen["before"] < 100, seen
