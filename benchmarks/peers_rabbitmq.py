"""The peers on RabbitMQ, doing the same work in the way that they recommend."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from benchmarks import bare_rabbitmq as bare
from benchmarks.bare import BODY
from benchmarks.handled_worker import Records, bodies, forever, message_of, ready

if TYPE_CHECKING:
    from benchmarks.handled_worker import Settings

TASKS = "benchmarks.peer_tasks_rabbitmq"
CELERY_OPTIONS = ["worker", "--loglevel=error", "--concurrency=2", "--without-gossip", "--without-mingle"]
#: Two processes of Celery and of Dramatiq, one for each core, as they come; one event loop of taskiq.
WORKERS = {
    "celery-eta": ["celery", "-A", f"{TASKS}:celery_eta", *CELERY_OPTIONS],
    "celery-native": ["celery", "-A", f"{TASKS}:celery_native", *CELERY_OPTIONS],
    "dramatiq": ["dramatiq", TASKS, "--processes=2", "--threads=8"],
    "taskiq": ["taskiq", "worker", f"{TASKS}:taskiq_broker", "--workers=1", "--log-level=ERROR"],
}


async def aio_pika_fill(url: str, settings: Settings) -> None:
    """Publish to a quorum queue, in the way that takes the least time."""
    from delayline.rabbitmq import RabbitMQTransport
    from delayline.transport import TransportOperation

    await bare.declare(url, "work")
    transport = RabbitMQTransport(url, topology="direct")
    await transport.start()
    for batch in bodies(settings["number"]):
        await transport.dispatch([TransportOperation(message_of(body), "work") for body in batch])
    await transport.stop()


async def aio_pika_work(url: str, settings: Settings) -> None:
    """Handle with aio-pika's consumer, each message acknowledged by its handler."""
    import aio_pika as peer

    records = Records()

    async def handle(message: peer.abc.AbstractIncomingMessage) -> None:
        records.write(message.body)
        await message.ack()

    channel = await (await peer.connect(url)).channel()
    await channel.set_qos(settings["prefetch"])
    await (await channel.get_queue("work")).consume(handle)
    ready()
    await forever()


async def faststream_work(url: str, settings: Settings) -> None:
    """Handle with FastStream, acknowledged after the handler; it reads the queue that aio-pika fills."""
    from faststream import AckPolicy, FastStream
    from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

    broker = RabbitBroker(url, default_channel=Channel(prefetch_count=settings["prefetch"]), logger=None)
    records = Records()

    @broker.subscriber(
        RabbitQueue("work", queue_type=QueueType.QUORUM, durable=True), ack_policy=AckPolicy.REJECT_ON_ERROR
    )
    async def handle(body: bytes) -> None:
        records.write(body)

    ready()
    await FastStream(broker, logger=None).run()


async def tasks_fill(url: str, settings: Settings) -> None:
    """Send tasks to a library's queue."""
    os.environ["BENCHMARK_RABBITMQ"] = url
    from benchmarks import peer_tasks_rabbitmq as tasks

    await tasks.fill(
        settings["library"], [one for batch in bodies(settings["number"]) for one in batch], settings["due"]
    )


async def tasks_work(url: str, settings: Settings) -> None:
    """Become the library's own worker."""
    os.environ["BENCHMARK_RABBITMQ"] = url
    ready()
    os.execv(sys.executable, [sys.executable, "-m", *WORKERS[settings["library"]]])  # noqa: S606 - our own


async def celery_native_rate(url: str, number: int) -> float:
    """Return messages a second that one sender delays natively, one after another, each confirmed."""
    os.environ |= {"BENCHMARK_RABBITMQ": url, "BENCHMARK_HANDLED": os.devnull}
    from benchmarks import peer_tasks_rabbitmq as tasks

    def measure() -> float:
        sending = tasks.sends("celery-native", [BODY] * (number + 1), time.time() + 3600)
        next(sending)  # connects and declares
        started = time.perf_counter()
        for _ in sending:
            pass
        return number / (time.perf_counter() - started)

    return await asyncio.to_thread(measure)
