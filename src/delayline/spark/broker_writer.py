"""The connection of one task to a broker's delay levels: publishes a batch before its confirms are awaited."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.clock import SystemClock
from delayline.errors import InvalidMessage
from delayline.message import Headers, Message, to_wire_time
from delayline.rabbitmq.amqp.publisher import Publication, Publisher
from delayline.rabbitmq.levels import MAXIMUM_DELAY, check_destination, checked_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    import pyarrow as pa

    from delayline.rabbitmq.infrastructure import DelayInfrastructure
    from delayline.rabbitmq.topology import Routability

LONGEST: Final = timedelta(seconds=MAXIMUM_DELAY)
UNKNOWN: Final = "queue {!r} does not exist on the broker: start its endpoint once, or run delayline setup --queue NAME"


class BrokerWriter:
    """The connection of one task."""

    def __init__(self, publisher: Publisher, reach: Routability, levels: DelayInfrastructure) -> None:
        self._publisher = publisher
        self._reach = reach
        self._levels = levels
        self._clock = SystemClock()

    async def deliver(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        """Publish each message with its remaining delay; return refused positions with the reason.

        Returns once the broker has confirmed all others.
        """
        refused: dict[int, str] = {}
        positions: list[int] = []
        publications: list[Publication] = []
        nowhere = {one: await refusal(self._reach, one) for one in messages.column("destination").unique().to_pylist()}
        for position, row in enumerate(zip(*(column.to_pylist() for column in messages.columns), strict=True)):
            reason = nowhere[row[1]]
            if reason is not None:
                refused[position] = reason
                continue
            try:
                publications.append(self._publication(*row))
            except InvalidMessage as error:
                refused[position] = str(error)
                continue
            positions.append(position)
        for index, failure in (await self._publisher.publish(publications)).items():
            if not isinstance(failure, InvalidMessage):
                raise failure
            refused[positions[index]] = str(failure)
        return refused

    def _publication(
        self, message_id: str, destination: str, due: datetime, headers: str | None, body: bytes | None
    ) -> Publication:
        named = json.loads(headers) if headers else {}
        if Headers.RETRIES not in named:  # a retry has its own times
            named[Headers.DELIVER_AT] = to_wire_time(due)
        delay = checked_until(due, self._clock.now())
        exchange, key = self._levels.route(delay, destination)
        message = Message(named.get(Headers.MESSAGE_ID) or message_id, named, body or b"")
        return Publication(message, exchange, key, delay)


async def refusal(reach: Routability, destination: str) -> str | None:
    """Return why the destination cannot be reached; None if it can."""
    try:
        check_destination(destination)
    except InvalidMessage as error:
        return str(error)
    return None if await reach.includes(destination) else UNKNOWN.format(destination)
