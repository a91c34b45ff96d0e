"""The subscriptions of an endpoint: which events its queue gets copies of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.errors import ConfigurationError
from delayline.serialization import names_taken
from delayline.topics import MAXIMUM_TOPIC_LENGTH
from delayline.transport import SupportsPublishing, SupportsSubscriptionRights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.transport import Transport


class Subscriptions:
    """What an endpoint subscribes to when it starts.

    Args:
        transport: Keeps the subscriptions of queues.
        queue: The endpoint's queue.
    """

    def __init__(self, transport: Transport, queue: str) -> None:
        self._transport = transport
        self._queue = queue
        self._topics: dict[str, None] = {}

    def add(self, kind: object) -> None:
        """Subscribe to events of the type at the next start. Raises ConfigurationError."""
        self._publisher()
        self._topics |= dict.fromkeys(_topics(kind))

    async def missing_rights(self) -> Sequence[str]:
        """Return the statements that grant the missing rights to subscribe to what was added."""
        if self._topics and isinstance(self._transport, SupportsSubscriptionRights):
            return await self._transport.missing_subscription_rights()
        return ()

    async def begin(self) -> None:
        """Subscribe to what was added."""
        if self._topics:
            await self._publisher().subscribe(self._queue, list(self._topics))

    async def end(self, kind: object) -> None:
        """End the subscription to events of the type, durably, and forget it for later starts."""
        topics = _topics(kind)
        await self._publisher().unsubscribe(self._queue, topics)
        for topic in topics:
            self._topics.pop(topic, None)

    def _publisher(self) -> SupportsPublishing:
        if not isinstance(self._transport, SupportsPublishing):
            raise ConfigurationError(
                f"{type(self._transport).__name__} has no subscriptions: events need queues in a SQL database, on "
                "RabbitMQ, on Azure Storage or in memory"
            )
        return self._transport


def _topics(kind: object) -> list[str]:
    topics = names_taken(kind)
    for topic in topics:
        if not topic or len(topic) > MAXIMUM_TOPIC_LENGTH:
            raise ConfigurationError(
                f"the type of an event has a name of 1 to {MAXIMUM_TOPIC_LENGTH} characters, not {len(topic)}: name it "
                "with @message_type"
            )
    return topics
