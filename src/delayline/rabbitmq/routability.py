"""Checks whether messages from the delay levels reach a destination, in each topology."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.rabbitmq.browsing import count
from delayline.rabbitmq.connection import NotFound
from delayline.rabbitmq.topology import ConventionalTopology, DirectTopology

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiormq.channel import Channel

    from delayline.rabbitmq.connection import BrokerConnection

CONVENTIONAL: Final = ConventionalTopology()
DIRECT: Final = DirectTopology()


class Routability:
    """The destinations of one broker; each is asked for once.

    Args:
        only_look: bind nothing, for a dry run.
    """

    def __init__(self, connection: BrokerConnection, delivery_exchange: str, *, only_look: bool) -> None:
        self._connection = connection
        self._delivery = delivery_exchange
        self._only_look = only_look
        self._known: dict[str, bool] = {}

    async def includes(self, destination: str) -> bool:
        """Bind the destination's exchange, or its queue where it has none; False where there is neither."""
        if destination not in self._known:
            self._known[destination] = await self._any_of(*self._ways(destination))
        return self._known[destination]

    def _ways(self, destination: str) -> tuple[Callable[[Channel], Awaitable[object]], ...]:
        if self._only_look:
            return (
                lambda channel: CONVENTIONAL.check(channel, destination),
                lambda channel: count(channel, destination),
            )
        return (
            lambda channel: CONVENTIONAL.bind_delivery(channel, destination, self._delivery),
            lambda channel: DIRECT.bind_delivery(channel, destination, self._delivery),
        )

    async def _any_of(self, *ways: Callable[[Channel], Awaitable[object]]) -> bool:
        for way in ways:
            try:
                await self._connection.run(way)
            except NotFound:
                continue
            return True
        return False
