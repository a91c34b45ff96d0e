"""RabbitmqLevels: each batch is published with its confirms outstanding, and counts when all have come."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from delayline.migration.target import Delivered, DeliverySession, WithoutLedger
from delayline.spark.broker_sink import ANY_SIZE, BrokerSink
from delayline.spark.broker_writer import LONGEST

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from delayline.migration.target import Attempted
    from delayline.spark.broker_writer import BrokerWriter


class RabbitmqLevelsTarget(WithoutLedger, BrokerSink):
    """The delay levels of one virtual host: v2, unless the URL has ?delays=."""

    kind: ClassVar[str] = "rabbitmq-levels"
    exactly_once: ClassVar[bool] = False
    longest: ClassVar[timedelta | None] = LONGEST
    grain: ClassVar[timedelta] = timedelta(seconds=1)

    largest_message: ClassVar[int] = ANY_SIZE

    def __init__(self, url: str) -> None:
        super().__init__(url, "delayline migrate")

    def endpoint_named(self, name: str) -> str:
        """Return the name unchanged: all endpoints share the levels. Raises BackendUnusable if they do not exist."""
        self.must_exist()
        return name

    def waiting(self, endpoint: str, spark: SparkSession) -> None:
        """Return None: messages in levels can be counted, not listed."""
        del endpoint, spark

    def begin(self, endpoint: str) -> LevelsSession:
        """Return a session; nothing is staged."""
        del endpoint
        return LevelsSession(self)


class LevelsSession(DeliverySession):
    """Publishes batches to the levels."""

    largest_message = ANY_SIZE

    _writer: BrokerWriter

    def __init__(self, levels: BrokerSink) -> None:
        self._levels = levels

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to the broker."""
        self._writer = await self._levels.writer(stack)

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Publish the messages; returns once the broker has confirmed them."""
        return Delivered(attempt.number, await self._writer.deliver(messages))
