"""What the peers' worker processes load: tasks that do nothing but write one byte to a pipe."""

from __future__ import annotations

import os

import dramatiq
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from taskiq_aio_pika import AioPikaBroker, Queue

URL = os.environ["BENCHMARK_RABBITMQ"]
_pipe = os.open(os.environ["BENCHMARK_PIPE"], os.O_WRONLY)


def handled() -> None:
    """Tell the scenario."""
    os.write(_pipe, b".")


celery_eta = Celery("eta", broker=URL)
celery_eta.conf.update(task_ignore_result=True, worker_prefetch_multiplier=4, broker_connection_retry_on_startup=True)
celery_native = Celery("native", broker=URL)
celery_native.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    task_default_queue="native",
    task_default_queue_type="quorum",
    task_default_exchange_type="topic",
    broker_native_delayed_delivery_queue_type="quorum",
    worker_detect_quorum_queues=True,
    broker_transport_options={"confirm_publish": True},
)


def _work(body: str) -> None:
    del body
    handled()


work_eta = celery_eta.task(name="work_eta")(_work)
work_native = celery_native.task(name="work_native")(_work)
dramatiq_broker = RabbitmqBroker(url=URL, confirm_delivery=True)
dramatiq.set_broker(dramatiq_broker)


@dramatiq.actor
def work_dramatiq(body: str) -> None:
    del body
    handled()


taskiq_broker = AioPikaBroker(URL, delay_queue=Queue(name="taskiq.delay"))


@taskiq_broker.task
async def work_taskiq(body: str) -> None:
    del body
    handled()
