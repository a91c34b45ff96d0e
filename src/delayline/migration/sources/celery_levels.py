"""Celery's ETA tasks in the delay queues that kombu declares on RabbitMQ.

See https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/rabbitmq.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from delayline.clock import ONE_SECOND
from delayline.errors import ConfigurationError
from delayline.migration.sources.celery_tasks import NoMessage, queue_in, task_of
from delayline.migration.sources.rabbitmq_levels import Found, RabbitmqLevelsSource
from delayline.rabbitmq.admin.drain import SKEW
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import parse, remaining

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.rabbitmq.amqp.properties import Delivery


@dataclass(frozen=True, slots=True)
class KombuDelays(DelayInfrastructure):
    """The names that kombu gives to exchanges and queues; Celery's workers make them."""

    prefix: str = "celery_delayed"

    @property
    def delivery(self) -> str:
        """The exchange that hands due tasks to the exchanges of their queues."""
        return f"{self.prefix}_delivery"

    def level(self, level: int) -> str:
        """Return the name of a level's exchange and queue."""
        return f"{self.prefix}_{level}"


class CeleryLevels(RabbitmqLevelsSource):
    """Celery's delayed tasks of a virtual host. The routing key of a task is the destination of its message.

    The named endpoint owns the store that receives the messages.
    """

    kind: ClassVar[str] = "celery-levels"
    advice: ClassVar[str] = "Celery's workers make them once one of their queues is a quorum queue"

    def __init__(self, place: str, journal: str, *, schema: str | None = None) -> None:
        super().__init__(place, journal, schema=schema)
        if self.address.delays != "v2":
            raise ConfigurationError("?delays= names other levels than Celery's: leave it out")
        self.levels: KombuDelays = KombuDelays()

    def found(self, delivered: Delivery, level: int, now: datetime) -> Found:
        """Return the task; a task that stays is due when it leaves its level at the latest."""
        routing_key, properties = delivered.routing_key, delivered.properties
        parsed, fields = parse(routing_key), properties.headers
        left = 1 << level if parsed is None else remaining(parsed[0], level)
        name = str(fields.get("id") or properties.message_id or "") or None
        last = now + timedelta(seconds=left)
        destination = None
        try:
            destination = queue_in(routing_key)
            task = task_of(fields, properties.content_type, delivered.body)
            _must_fit(task.due, last, level)
        except NoMessage as error:
            return Found(name, destination, last, None, str(error))
        return Found(task.id, destination, task.due, task.headers, None)


def _must_fit(due: datetime, last: datetime, level: int) -> None:
    """Raise NoMessage where a level has the task at another time than its eta; its delay was cut to seconds."""
    if not last - timedelta(seconds=1 << level) - SKEW <= due <= last + ONE_SECOND + SKEW:
        raise NoMessage(f"its eta {due.isoformat()} does not fit the level that it waits in: let Celery run it")
