"""The back end of `amqp:` and `amqps:` URLs: a broker's queues and delay levels."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, NoReturn

from delayline.backends import Backend, BulkRoute
from delayline.errors import ConfigurationError
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.delivery import DelayLevelDelivery
from delayline.rabbitmq.front import managed_as_sent
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import MAXIMUM_DELAY
from delayline.rabbitmq.message_sink import DelayLevelSink
from delayline.rabbitmq.transport import RabbitMQTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.backends import BackendOptions, BackendUse, DueWithin, Findings
    from delayline.delayed.delivery import StoredDelivery
    from delayline.transport import Transport


class RabbitMQBackend(Backend):
    """A virtual host's queues, and delay levels in which delayed messages wait."""

    native_delays: ClassVar[str | None] = "delay levels"
    unlisted: ClassVar[str | None] = "in delay levels. See when they are due with: delayline rabbitmq pending"
    bulk_route = BulkRoute.DELAY_LEVELS
    longest_delay: ClassVar[timedelta | None] = timedelta(seconds=MAXIMUM_DELAY)
    grain: ClassVar[timedelta] = timedelta(seconds=1)

    def transport(self, url: str, options: BackendOptions) -> Transport:
        """Return a new transport on the virtual host."""
        return RabbitMQTransport(url, error_queue=options.error_queue, name=options.name)

    def store(self, url: str, options: BackendOptions) -> NoReturn:
        """Raise ConfigurationError: there is no store."""
        del url, options
        raise _not_listed()

    def delivery(
        self,
        url: str,
        options: BackendOptions,
        *,
        stored: StoredDelivery | None = None,
        stored_below: timedelta | None = None,
    ) -> DelayLevelDelivery:
        """Return a new delayed delivery in the levels, perhaps with a store in front."""
        del url, options
        return DelayLevelDelivery(stored=stored, stored_below=stored_below)

    def sink(self, url: str, name: str, *, endpoint: str = "") -> DelayLevelSink:
        """Return the virtual host's levels, which all endpoints share, to be published to."""
        del endpoint
        return DelayLevelSink(url, name)

    async def examine(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return findings about the broker, the queues and the levels."""
        from delayline.rabbitmq.admin.doctor import alarms, examine

        found = await examine(url, delay_levels=use.delays, endpoint=options.name, queues=use.queues or ())
        return [*found, await alarms(url)]

    async def set_up_queues(self, url: str, options: BackendOptions, queues: Sequence[str]) -> None:
        """Create the queues; the levels, where there are any, deliver to them as well."""
        from delayline.rabbitmq.admin.operations import bind

        await super().set_up_queues(url, options, queues)
        await bind(*_levels(url), queues)

    async def planned_setup(self, url: str, options: BackendOptions, use: BackendUse) -> NoReturn:
        """Raise ConfigurationError: there are no statements."""
        del url, options, use
        raise ConfigurationError("a dry run shows SQL, and RabbitMQ has none. See: delayline rabbitmq verify")

    async def after_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Examine the queues, have due messages without a destination caught, and limits on the levels lifted."""
        from delayline.rabbitmq.admin.doctor import examine
        from delayline.rabbitmq.admin.operations import catch_undeliverable, lift_limits

        del options
        steps: list[tuple[str, bool | None, str]] = []
        if use.queues is not None:
            steps += await examine(url, delay_levels=False, queues=use.queues)
        if use.delays:
            steps += [await catch_undeliverable(*_levels(url)), await lift_limits(*_levels(url))]
        return steps

    async def set_up_warnings(self, url: str, queues: Sequence[str]) -> Sequence[str]:
        """Return which of the queues will refuse due messages."""
        from delayline.rabbitmq.admin.operations import refusing_queues

        return await refusing_queues(*_levels(url), queues)

    def pending(self, url: str, options: BackendOptions) -> NoReturn:
        """Raise ConfigurationError: messages in levels are counted only."""
        del url, options
        raise _not_listed()

    async def count_pending(self, url: str) -> Sequence[DueWithin]:
        """Return how many messages are in each level."""
        from delayline.rabbitmq.admin.operations import due_within, pending

        return due_within(await pending(*_levels(url)))

    def as_sent(self, store: object) -> object:
        """Return the management of a store in front of the levels, where messages may wait for them."""
        return managed_as_sent(store)


def _levels(url: str) -> tuple[BrokerAddress, DelayInfrastructure]:
    address = BrokerAddress.parse(url)
    return address, DelayInfrastructure.named(address.delays)


def _not_listed() -> ConfigurationError:
    return ConfigurationError(
        "messages in RabbitMQ's delay levels can be counted, not listed, cancelled or rescheduled. Count them "
        "with: delayline rabbitmq pending. For the rest keep delayed messages in a database: store_url"
    )
