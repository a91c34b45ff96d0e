"""The delay levels of a RabbitMQ broker as a sink of jobs.

The client of RabbitMQ is imported on use: jobs without a broker do not need the extra `rabbitmq`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from delayline.bulk.writer import blocking
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from delayline.rabbitmq.connection import BrokerConnection
    from delayline.spark.broker_writer import BrokerWriter

Result = TypeVar("Result")
#: The broker itself refuses messages that are too large.
ANY_SIZE: Final = 1 << 40


class BrokerSink:
    """The delay levels of one virtual host; pickled to tasks.

    Args:
        url: `?delays=` selects the levels, v2 by default.
        name: the connection name that the broker shows.

    Raises:
        MissingExtra: The extra `rabbitmq` is not installed.
    """

    def __init__(self, url: str, name: str) -> None:
        from delayline.rabbitmq.address import BrokerAddress
        from delayline.rabbitmq.infrastructure import DelayInfrastructure

        self.address = BrokerAddress.parse(url)
        self.levels = DelayInfrastructure.named(self.address.delays)
        self.name = name

    def __str__(self) -> str:
        return f"{self.levels.prefix}.* at {self.address}"

    def must_exist(self) -> None:
        """Raise BackendUnusable if a delay level is missing. Blocks."""
        from delayline.rabbitmq.amqp.errors import NotFound
        from delayline.rabbitmq.amqp.methods import ExchangeDeclare

        async def look(connection: BrokerConnection) -> None:
            try:
                for exchange in self.levels.exchanges:
                    await connection.run(
                        lambda channel, name=exchange: channel.call(ExchangeDeclare(exchange=name, passive=True))  # type: ignore[misc]
                    )
            except NotFound as error:
                raise BackendUnusable(
                    f"there are no complete delay levels {self}. Create them with: delayline rabbitmq create"
                ) from error

        self._connected(look)

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that cannot be reached, with the reason. Creates no binding. Blocks."""
        from delayline.rabbitmq.topology import Routability
        from delayline.spark.broker_writer import refusal

        async def look(connection: BrokerConnection) -> Mapping[str, str]:
            reach = Routability(connection, self.levels.delivery, only_look=True)
            found = {one: await refusal(reach, one) for one in destinations}
            return {one: reason for one, reason in found.items() if reason is not None}

        return self._connected(look)

    async def writer(self, stack: AsyncExitStack) -> BrokerWriter:
        """Return a connected writer, which closes with the stack."""
        from delayline.rabbitmq.amqp.publisher import Publisher
        from delayline.rabbitmq.connection import BrokerConnection
        from delayline.rabbitmq.topology import Routability
        from delayline.spark.broker_writer import BrokerWriter

        publisher = Publisher(self.address, connection_name=self.name)
        connection = BrokerConnection(self.address, self.name)
        stack.push_async_callback(connection.close)
        stack.push_async_callback(publisher.close)
        await publisher.open()
        return BrokerWriter(publisher, Routability(connection, self.levels.delivery, only_look=False), self.levels)

    def _connected(self, work: Callable[[BrokerConnection], Awaitable[Result]]) -> Result:
        from delayline.rabbitmq.connection import BrokerConnection

        async def run() -> Result:
            connection = BrokerConnection(self.address, self.name)
            try:
                return await work(connection)
            finally:
                await connection.close()

        return blocking(run())
