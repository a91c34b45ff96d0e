"""A Celery app as teams have it, on a broker whose URL is in DELAYLINE_TEST_CELERY_BROKER, or given."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from kombu import Exchange, Queue

BROKER = "DELAYLINE_TEST_CELERY_BROKER"


def queue(name: str, *, quorum: bool) -> Any:  # noqa: ANN401 - kombu has no types
    """Return a task queue; those of quorum type are what makes Celery use native delays."""
    kind = "topic" if quorum else "direct"
    arguments = {"x-queue-type": "quorum"} if quorum else None
    return Queue(name, Exchange(name, type=kind), routing_key=name, queue_arguments=arguments)


def app_at(url: str, *, quorum: bool) -> Any:  # noqa: ANN401 - it has no types
    """Return an app with the queues `sales`, `billing` and `gone`."""
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[queue(name, quorum=quorum) for name in ("sales", "billing", "gone")],
        task_default_queue="sales",
        task_default_exchange="sales",
        task_default_exchange_type="topic" if quorum else "direct",
        task_default_routing_key="sales",
        broker_transport_options={"confirm_publish": True},
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=100,
        worker_hijack_root_logger=False,
    )
    app.task(name="shop.remind")(remind)
    return app


def remind(*args: object, **named: object) -> None:
    """Do nothing: these tasks wait."""


app = app_at(os.environ.get(BROKER, "amqp://"), quorum=False)
