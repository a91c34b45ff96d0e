"""A worker process of the `*_handled` scenarios: handles a number of messages and prints when, and at which cost.

`python -m benchmarks.handled_worker PEER URL NUMBER [SETTINGS]` prints "ready", waits for a line on standard input,
and prints the figures as JSON when the last message has been handled.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: What a handler does with each message.
WORK = b"sixteen bytes..\n"
#: How long a worker waits for its last message, in seconds.
PATIENCE = 300.0


class Count:
    """Counts handled messages by id, and remembers when the last one ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = asyncio.Event()
        self._ids: set[str] = set()
        self._doubled = 0
        self._file = os.open(os.devnull, os.O_WRONLY)
        self._cpu = time.process_time()
        self._began = time.time()
        self._first = self._last = 0.0

    def begin(self) -> None:
        """Start to measure."""
        self._cpu, self._began = time.process_time(), time.time()

    def handled(self, message_id: str) -> None:
        """Do a handler's work and count it."""
        os.write(self._file, WORK)
        if message_id in self._ids:
            self._doubled += 1
            return
        self._ids.add(message_id)
        if len(self._ids) == 1:
            self._first = time.time()
        if len(self._ids) == self.number:
            self._last = time.time()
            self.done.set()

    async def wait(self) -> None:
        """Wait for the last message, and a moment longer for doubles and acknowledgements."""
        async with asyncio.timeout(PATIENCE):
            await self.done.wait()
        await asyncio.sleep(0.2)

    def figures(self) -> dict[str, float]:
        """Return the figures."""
        return {
            "began": self._began,
            "first": self._first,
            "last": self._last,
            "handled": len(self._ids),
            "doubled": self._doubled,
            "cpu": time.process_time() - self._cpu,
        }


def ready() -> None:
    """Print that the worker can start, and wait until it shall."""
    print("ready", flush=True)
    sys.stdin.readline()


async def delayline(url: str, number: int, settings: dict[str, Any]) -> Count:
    """Handle with an endpoint."""
    from benchmarks.house import NAME
    from delayline import Message, MessageContext
    from delayline.config import Settings, endpoint_from

    endpoint = endpoint_from(Settings(endpoint=NAME, **({"url": url} | settings)))
    count = Count(number)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        del context
        count.handled(message.id)

    await asyncio.to_thread(ready)
    count.begin()
    async with endpoint:
        await count.wait()
    return count


async def pgqueuer(url: str, number: int, settings: dict[str, Any]) -> Count:
    """Handle with PgQueuer, in batches of 100."""
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver

    connection = await asyncpg.connect(url)
    queuer, count = PgQueuer(AsyncpgDriver(connection)), Count(number)

    @queuer.entrypoint("work")
    async def work(job: Any) -> None:  # noqa: ANN401 - PgQueuer's Job
        count.handled(str(job.id))

    await asyncio.to_thread(ready)
    count.begin()
    running = asyncio.create_task(queuer.run(batch_size=settings.get("batch", 100)))
    await count.wait()
    queuer.shutdown.set()
    await running
    await connection.close()
    return count


async def procrastinate(url: str, number: int, settings: dict[str, Any]) -> Count:
    """Handle with one Procrastinate worker."""
    import procrastinate as peer

    app = peer.App(connector=peer.PsycopgConnector(conninfo=url))
    count = Count(number)

    @app.task(queue="work", name="work", pass_context=True)
    async def work(context: Any, body: str) -> None:  # noqa: ANN401 - Procrastinate's JobContext
        del body
        count.handled(str(context.job.id))

    async with app.open_async():
        await asyncio.to_thread(ready)
        count.begin()
        running = asyncio.create_task(
            app.run_worker_async(concurrency=settings.get("concurrency", 10), install_signal_handlers=False)
        )
        await count.wait()
        running.cancel()
        await asyncio.wait([running])
    return count


async def aio_pika(url: str, number: int, settings: dict[str, Any]) -> Count:
    """Handle with aio-pika's consumer, each message acknowledged by its handler."""
    import aio_pika as peer

    count = Count(number)

    async def handle(message: peer.abc.AbstractIncomingMessage) -> None:
        count.handled(message.message_id or "")
        await message.ack()

    connection = await peer.connect(url)
    channel = await connection.channel()
    await channel.set_qos(settings["prefetch"])
    queue = await channel.get_queue("aio-pika")
    await asyncio.to_thread(ready)
    count.begin()
    await queue.consume(handle)
    await count.wait()
    await connection.close()
    return count


PEERS: dict[str, Callable[..., Any]] = {
    "delayline": delayline,
    "PgQueuer": pgqueuer,
    "Procrastinate": procrastinate,
    "aio-pika": aio_pika,
}


def main() -> None:
    """Run the worker that the arguments name."""
    peer, url, number, *rest = sys.argv[1:]
    count = asyncio.run(PEERS[peer](url, int(number), json.loads(rest[0]) if rest else {}))
    print(json.dumps(count.figures()), flush=True)


if __name__ == "__main__":
    main()
