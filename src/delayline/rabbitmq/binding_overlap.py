"""Overlapping bindings: an endpoint also receives the delayed messages for endpoints whose name ends in its own."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from delayline.errors import DelaylineError
from delayline.events import Event, emit
from delayline.rabbitmq.levels import crossings, endings
from delayline.rabbitmq.topology import Routability

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayline.rabbitmq.connection import BrokerConnection
    from delayline.rabbitmq.infrastructure import DelayInfrastructure
    from delayline.rabbitmq.transport import RabbitMQTransport

logger: logging.Logger = logging.getLogger(__name__)

IS_BOUND = (
    "%r also receives the delayed messages for %r, whose name ends in it: delayline drops them there, other receivers "
    "handle them. Rename one of the endpoints"
)
IS_THERE = (
    "%r is on the broker as well: where delayed messages come to it, it also receives those for %r, whose name ends "
    "in it. Rename one of the endpoints"
)


async def receivers(connection: BrokerConnection, levels: DelayInfrastructure, name: str) -> Sequence[str]:
    """Return the names on the broker that this name ends in. AMQP does not show whether they are bound.

    Names that end in this name can only be found through the management API.
    """
    reach = Routability(connection, levels.delivery, only_look=True)
    return [ending for ending in endings(name) if await reach.includes(ending)]


class OverlappingNames:
    """Logs a warning for each pair of overlapping names, once."""

    def __init__(self, transport: RabbitMQTransport, levels: DelayInfrastructure) -> None:
        self._transport = transport
        self._levels = levels
        self._logged: set[tuple[str, str]] = set()

    def among(self, name: str, others: Iterable[str]) -> None:
        """Log a warning if `name` overlaps with any of the others, all of which receive delayed messages."""
        for receiver, meant in crossings([*others, name]):
            if name in (receiver, meant):
                self._log(IS_BOUND, receiver, meant)

    async def check_broker(self, name: str) -> None:
        """Log a warning if names on the broker overlap with this name; none if the broker does not permit the check."""
        if self._transport.address.management is not None:
            with contextlib.suppress(DelaylineError):
                await self._check_bindings(name)
                return
        with contextlib.suppress(DelaylineError):
            for receiver in await receivers(self._transport.connection, self._levels, name):
                self._log(IS_THERE, receiver, name)

    async def _check_bindings(self, name: str) -> None:
        from delayline.rabbitmq.admin.management_api import ManagementApi
        from delayline.rabbitmq.admin.verification import destinations

        async with ManagementApi(self._transport.address) as api:
            self.among(name, destinations(self._levels, await api.bindings()))

    def _log(self, text: str, receiver: str, meant: str) -> None:
        if (receiver, meant) not in self._logged:
            self._logged.add((receiver, meant))
            emit(logger, logging.WARNING, Event.BINDINGS_OVERLAP, text, receiver, meant)
