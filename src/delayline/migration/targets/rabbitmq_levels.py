"""RabbitmqLevels: each batch is published with its confirms outstanding, and counts when all have come."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from delayline.bulk.writer import blocking
from delayline.migration.target import Delivered, DeliverySession, WithoutLedger
from delayline.rabbitmq.backend import RabbitMQBackend
from delayline.rabbitmq.message_sink import DelayLevelSink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from delayline.migration.target import Attempted
    from delayline.rabbitmq.message_sink import DelayLevelWriter


class RabbitmqLevelsTarget(WithoutLedger):
    """The delay levels of a virtual host: v2, unless the URL has ?delays=."""

    kind: ClassVar[str] = "rabbitmq-levels"
    exactly_once: ClassVar[bool] = False
    longest: ClassVar[timedelta | None] = RabbitMQBackend.longest_delay
    grain: ClassVar[timedelta] = RabbitMQBackend.grain

    largest_message: ClassVar[int] = RabbitMQBackend.largest_message

    def __init__(self, url: str) -> None:
        self.sink: DelayLevelSink = DelayLevelSink(url, "delayline migrate")

    def __str__(self) -> str:
        return str(self.sink)

    def endpoint_named(self, name: str) -> str:
        """Return the name unchanged: all endpoints share the levels. Raises BackendUnusable if they do not exist."""
        blocking(self.sink.must_exist())
        return name

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that cannot be reached."""
        return blocking(self.sink.refusals(destinations))

    def waiting(self, endpoint: str, spark: SparkSession) -> None:
        """Return None: messages in levels can be counted, not listed."""
        del endpoint, spark

    def begin(self, endpoint: str) -> LevelsSession:
        """Return a session; nothing is staged."""
        del endpoint
        return LevelsSession(self.sink)


class LevelsSession(DeliverySession):
    """Publishes batches to the levels."""

    largest_message: int = RabbitMQBackend.largest_message

    _writer: DelayLevelWriter

    def __init__(self, levels: DelayLevelSink) -> None:
        self._levels = levels

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the broker."""
        self._writer = await self._levels.writer(stack)

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Publish the messages; returns once the broker has confirmed them."""
        return Delivered(attempt.number, await self._writer.deliver(messages))
