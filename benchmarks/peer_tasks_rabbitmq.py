"""What the workers of Celery, Dramatiq and taskiq load: tasks that record each message, in acknowledging settings."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import dramatiq
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from kombu.transport.native_delayed_delivery import declare_native_delayed_delivery_exchanges_and_queues
from taskiq_aio_pika import AioPikaBroker, Queue

from benchmarks.handled_worker import HEADERS, Records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

URL = os.environ["BENCHMARK_RABBITMQ"]
records = Records()
#: The least delay: shorter ones round to nothing, which is an error where a slow machine has let the due instant pass.
MOMENT = timedelta(seconds=2)

#: Celery acknowledges before the task by default, and a crash loses it: acks_late is what the others do.
ACKNOWLEDGED = {"task_ignore_result": True, "task_acks_late": True, "broker_connection_retry_on_startup": True}
celery_eta = Celery("eta", broker=URL)
celery_eta.conf.update(**ACKNOWLEDGED, worker_prefetch_multiplier=64)
celery_native = Celery("native", broker=URL)
celery_native.conf.update(
    **ACKNOWLEDGED,
    worker_prefetch_multiplier=64,
    task_default_queue="native",
    task_default_queue_type="quorum",
    task_default_exchange_type="topic",
    broker_native_delayed_delivery_queue_type="quorum",
    worker_detect_quorum_queues=True,
    broker_transport_options={"confirm_publish": True},
)


def _work(body: str) -> None:
    records.write(body.encode())


work_eta = celery_eta.task(name="work_eta")(_work)
work_native = celery_native.task(name="work_native")(_work)
dramatiq_broker = RabbitmqBroker(url=URL, confirm_delivery=True)
dramatiq.set_broker(dramatiq_broker)


@dramatiq.actor
def work_dramatiq(body: str) -> None:
    """Record, in Dramatiq's worker."""
    _work(body)


taskiq_broker = AioPikaBroker(URL, qos=200, delay_queue=Queue(name="taskiq.delay"))


@taskiq_broker.task
async def work_taskiq(body: str) -> None:
    """Record, in taskiq's worker."""
    _work(body)


async def fill(peer: str, bodies: Sequence[bytes], due: float | None) -> None:
    """Send a task for each body, delayed until all are due."""
    if peer == "taskiq":
        await taskiq_broker.startup()
        for first in range(0, len(bodies), 100):
            labels = HEADERS if due is None else {**HEADERS, "delay": max(0.001, due - time.time())}
            kicker = work_taskiq.kicker().with_labels(**labels)
            await asyncio.gather(*(kicker.kiq(body.decode()) for body in bodies[first : first + 100]))
        await taskiq_broker.shutdown()
    else:
        await asyncio.to_thread(_send_all, peer, bodies, due)


def _send_all(peer: str, bodies: Sequence[bytes], due: float | None) -> None:
    for _ in sends(peer, bodies, due):
        pass


def sends(peer: str, bodies: Sequence[bytes], due: float | None) -> Iterator[None]:
    """Send one task after another, a step each."""
    eta = None if due is None else datetime.fromtimestamp(due, UTC)
    if peer == "celery-native":  # as the worker does when it starts
        with celery_native.connection_for_write() as connection:
            declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
    for body in bodies:
        if peer == "dramatiq":
            delay = None if due is None else max(1, int((due - time.time()) * 1000) + 1)
            work_dramatiq.send_with_options(args=(body.decode(),), delay=delay)
        else:
            task = work_eta if peer == "celery-eta" else work_native
            task.apply_async(
                (body.decode(),), eta=max(eta, datetime.now(UTC) + MOMENT) if eta else None, headers=HEADERS
            )
        yield
