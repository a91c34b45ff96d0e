"""Names of which one ends in the other: the first one receives the second's delayed messages too."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from delayline.errors import DelaylineError
from delayline.events import Event, emit
from delayline.rabbitmq.levels import crossings, endings
from delayline.rabbitmq.routability import Routability

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayline.rabbitmq.connection import BrokerConnection
    from delayline.rabbitmq.infrastructure import DelayInfrastructure
    from delayline.rabbitmq.transport import RabbitMQTransport

logger = logging.getLogger(__name__)

IS_BOUND = (
    "%r also receives the delayed messages for %r, whose name ends in it: delayline drops them there, other receivers "
    "handle them. Rename one of the endpoints"
)
IS_THERE = (
    "%r is on the broker as well: where delayed messages come to it, it also receives those for %r, whose name ends "
    "in it. Rename one of the endpoints"
)


async def receivers(connection: BrokerConnection, levels: DelayInfrastructure, name: str) -> Sequence[str]:
    """Return the names on the broker that this one ends in; whether they are bound no client is told.

    The other way round, names that end in this one, only the management API can tell.
    """
    reach = Routability(connection, levels.delivery, only_look=True)
    return [ending for ending in endings(name) if await reach.includes(ending)]


class OverlappingNames:
    """Warns of names that cross one of this process', each pair once."""

    def __init__(self, transport: RabbitMQTransport, levels: DelayInfrastructure) -> None:
        self._transport = transport
        self._levels = levels
        self._told: set[tuple[str, str]] = set()

    def among(self, name: str, others: Iterable[str]) -> None:
        """Warn where `name` crosses one of the others, all of which delayed messages come to."""
        for receiver, meant in crossings([*others, name]):
            if name in (receiver, meant):
                self._tell(IS_BOUND, receiver, meant)

    async def look(self, name: str) -> None:
        """Warn where names on the broker cross this one; says nothing where the broker does not let us look."""
        if self._transport.address.management is not None:
            with contextlib.suppress(DelaylineError):
                await self._look_at_all(name)
                return
        with contextlib.suppress(DelaylineError):
            for receiver in await receivers(self._transport.connection, self._levels, name):
                self._tell(IS_THERE, receiver, name)

    async def _look_at_all(self, name: str) -> None:
        from delayline.rabbitmq.admin.management_api import ManagementApi
        from delayline.rabbitmq.admin.verification import destinations

        async with ManagementApi(self._transport.address) as api:
            self.among(name, destinations(self._levels, await api.bindings()))

    def _tell(self, text: str, receiver: str, meant: str) -> None:
        if (receiver, meant) not in self._told:
            self._told.add((receiver, meant))
            emit(logger, logging.WARNING, Event.BINDINGS_OVERLAP, text, receiver, meant)
