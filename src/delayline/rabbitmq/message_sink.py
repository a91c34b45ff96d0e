"""The delay levels of a broker as jobs write to them: a batch is published before its confirms are awaited."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from delayline.clock import SystemClock
from delayline.errors import BackendUnusable, InvalidMessage
from delayline.message import Headers, Message, to_wire_time
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.amqp.methods import ExchangeDeclare
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import check_destination, checked_until
from delayline.rabbitmq.publisher import Publisher
from delayline.rabbitmq.refusals import NotFound
from delayline.rabbitmq.topology import Routability

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AsyncExitStack

    import pyarrow as pa

    from delayline.delayed.columns import StoredRow

NOT_ON_BROKER: Final = (
    "queue {!r} does not exist on the broker: start its endpoint once, or run delayline setup --queue NAME"
)


class DelayLevelSink:
    """The delay levels of a virtual host; pickled to tasks.

    Args:
        url: `?delays=` selects the levels, v2 by default.
        name: The connection name that the broker shows.
    """

    def __init__(self, url: str, name: str) -> None:
        self.address: BrokerAddress = BrokerAddress.parse(url)
        self.levels: DelayInfrastructure = DelayInfrastructure.named(self.address.delays)
        self.name = name

    def __str__(self) -> str:
        return f"{self.levels.prefix}.* at {self.address}"

    async def must_exist(self) -> None:
        """Raise BackendUnusable if a delay level is missing."""
        async with self._connected() as connection:
            try:
                for exchange in self.levels.exchanges:
                    await connection.run(
                        lambda channel, name=exchange: channel.call(ExchangeDeclare(exchange=name, passive=True))  # type: ignore[misc]
                    )
            except NotFound as error:
                raise BackendUnusable(
                    f"there are no complete delay levels {self}. Create them with: delayline rabbitmq create"
                ) from error

    async def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that cannot be reached, with the reason. Creates no binding."""
        async with self._connected() as connection:
            reach = Routability(connection, self.levels.delivery, only_look=True)
            reasons = {name: await refusal(reach, name) for name in destinations}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    async def writer(self, stack: AsyncExitStack) -> DelayLevelWriter:
        """Return a connected writer, which closes with the stack."""
        publisher = Publisher(self.address, connection_name=self.name)
        connection = await stack.enter_async_context(self._connected())
        stack.push_async_callback(publisher.close)
        await publisher.open()
        return DelayLevelWriter(publisher, Routability(connection, self.levels.delivery, only_look=False), self.levels)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[BrokerConnection]:
        connection = BrokerConnection(self.address, self.name)
        try:
            yield connection
        finally:
            await connection.close()


class DelayLevelWriter:
    """The connection of a task."""

    def __init__(self, publisher: Publisher, reach: Routability, levels: DelayInfrastructure) -> None:
        self._publisher = publisher
        self._reach = reach
        self._levels = levels
        self._clock = SystemClock()

    async def deliver(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        """Publish each message with its remaining delay; return refused positions with the reason.

        Returns once the broker has confirmed all others.
        """
        from delayline.delayed.arrow import rows_in

        refused: dict[int, str] = {}
        positions: list[int] = []
        publications: list[Publication] = []
        destinations = messages.column("destination").unique().to_pylist()
        nowhere = {name: await refusal(self._reach, name) for name in destinations}
        for position, row in enumerate(rows_in(messages)):
            reason = nowhere[row.destination]
            if reason is not None:
                refused[position] = reason
                continue
            try:
                publications.append(self._publication(row))
            except InvalidMessage as error:
                refused[position] = str(error)
                continue
            positions.append(position)
        for index, failure in (await self._publisher.publish(publications)).items():
            if not isinstance(failure, InvalidMessage):
                raise failure
            refused[positions[index]] = str(failure)
        return refused

    def _publication(self, row: StoredRow) -> Publication:
        named = json.loads(row.headers) if row.headers else {}
        if Headers.RETRIES not in named:  # a retry has its own times
            named[Headers.DELIVER_AT] = to_wire_time(row.due)
        delay = checked_until(row.due, self._clock.now())
        exchange, key = self._levels.route(delay, row.destination)
        message = Message(named.get(Headers.MESSAGE_ID) or row.id, named, row.body or b"")
        return Publication(message, exchange, key, delay)


async def refusal(reach: Routability, destination: str) -> str | None:
    """Return why the destination cannot be reached; None if it can."""
    try:
        check_destination(destination)
    except InvalidMessage as error:
        return str(error)
    return None if await reach.includes(destination) else NOT_ON_BROKER.format(destination)
