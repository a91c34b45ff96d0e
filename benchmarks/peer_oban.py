"""oban-py, in an environment of its own, with a newer Python: `peer_oban.py fill|work oban URL SETTINGS`.

It does what benchmarks/handled_worker.py describes, whose records and bodies it shares.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from pathlib import Path
from typing import Any

import oban
from oban import Oban
from oban.schema import install

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.handled_worker import HEADERS, Records, bodies, due_of, forever, ready

records = functools.cache(Records)


@oban.worker(queue="work")
class Work:
    """Records each job."""

    async def process(self, job: oban.Job) -> None:
        """Handle."""
        records().write(job.args["body"].encode())


async def fill(url: str, settings: dict[str, Any]) -> None:
    """Insert jobs, a thousand at a time."""
    pool = await Oban.create_pool(url)
    await install(pool)
    client, due = Oban(pool=pool), due_of(settings)
    for batch in bodies(settings["number"]):
        when = {"scheduled_at": due} if due else {}
        jobs = [
            Work.new(  # type: ignore[attr-defined] # oban.worker adds it
                {"body": body.decode()}, meta=HEADERS, **when
            )
            for body in batch
        ]
        await client.enqueue_many(*jobs)
    await pool.close()


async def work(url: str, settings: dict[str, Any]) -> None:
    """Handle with Oban's runtime; it stages due jobs ten times a second."""
    pool = await Oban.create_pool(url)
    async with Oban(pool=pool, queues={"work": settings["limit"]}, stager={"interval": 0.1}):
        ready()
        await forever()


if __name__ == "__main__":
    asyncio.run({"fill": fill, "work": work}[sys.argv[1]](sys.argv[3], json.loads(sys.argv[4])))
