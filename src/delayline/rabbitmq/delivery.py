"""Delayed delivery inside the broker: no process of ours has to run for a message to come due.

See https://docs.particular.net/transports/rabbitmq/delayed-delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.checks import time_span
from delayline.errors import BackendUnusable, ConfigurationError, DispatchFailed, NotStarted, QueueNotFound
from delayline.events import Event, emit
from delayline.message import Headers
from delayline.rabbitmq.amqp.methods import ExchangeDeclare
from delayline.rabbitmq.binding_overlap import OverlappingNames
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.front import PARKED, can_be_parked, managed_as_sent, parked, released
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import MAXIMUM_DELAY, check_destination, checked_until, seconds_until
from delayline.rabbitmq.refusals import NotFound, Unroutable
from delayline.rabbitmq.transport import RabbitMQTransport
from delayline.topics import is_topic
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from delayline.backends import DueWithin
    from delayline.clock import Clock
    from delayline.delayed.delivery import StoredDelivery
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.store import DelayedMessageStore
    from delayline.external import ExternalTransaction
    from delayline.rabbitmq.receiver import RabbitMQReceiver
    from delayline.transaction import Transaction, TransactionMode

    Deferred = tuple[TransportOperation, datetime]


logger: logging.Logger = logging.getLogger(__name__)

LONGEST_DELAY: Final = timedelta(seconds=MAXIMUM_DELAY)
BOUND_FOR: Final = 10.0
"""Seconds after which a destination is bound again: it may have been deleted, and its messages would get stuck."""
#: How long before the levels could take a message it may stay in the store: for clocks that differ, or step back.
LEVELS_MARGIN: Final = timedelta(minutes=1)
#: A due time that is rounded up by less needs no store: levels are about as late themselves.
ROUNDED_UP_BY: Final = timedelta(milliseconds=50)
OLDEST_BROKER: Final = (3, 10)


class DelayLevelDelivery:
    """Messages wait in the 28 delay levels of RabbitMQTransport's broker, for whole seconds, up to 3106 days.

    A due time that is not whole seconds away is rounded up. With a store in front, the fraction of a second waits
    there, and the message enters the levels when whole seconds are left.

    Args:
        stored: A store in front of the levels, for fractions of seconds, longer delays and external transactions.
        stored_below: Delays shorter than this wait in the store as well, with microseconds; by default none.

    Raises:
        ConfigurationError: `stored_below` without a store.
    """

    finds_destinations = True

    def __init__(self, *, stored: StoredDelivery | None = None, stored_below: timedelta | None = None) -> None:
        if stored_below is not None:
            time_span("stored_below", stored_below)
            if stored is None:
                raise ConfigurationError("stored_below= needs a store: pass stored=StoredDelivery(...)")
        self.stored = stored
        self.stored_below = stored_below
        self._host: DeliveryHost | None = None
        self._transport: RabbitMQTransport | None = None
        self._levels = DelayInfrastructure()
        self._bound: dict[str, float] = {}
        self._bound_over = 0
        self._binding = asyncio.Lock()
        self._started = False
        self._looking: asyncio.Task[None] | None = None
        self._overlaps: OverlappingNames | None = None

    @property
    def transaction_domain(self) -> None:
        """Nothing shares a transaction with a broker."""
        return

    @property
    def clock(self) -> Clock | None:
        """The clock of the store in front; None without a store: then this machine's is used."""
        return None if self.stored is None else self.stored.clock

    @property
    def store(self) -> DelayedMessageStore | None:
        """The store in front; None without a store: messages in delay levels can be counted, not listed."""
        return None if self.stored is None else self.stored.store

    @property
    def management(self) -> object:
        """The management of the store in front, with messages as they were sent; without a store itself, with none."""
        return self if self.store is None else managed_as_sent(self.store)

    @property
    def levels(self) -> DelayInfrastructure:
        """The exchanges and queues that messages wait in."""
        return self._levels

    async def count_pending(self) -> Sequence[DueWithin]:
        """Return how many messages are in each level."""
        from delayline.rabbitmq.admin.operations import due_within, pending

        _, transport = self._parts()
        return due_within(await pending(transport.address, self._levels))

    def bind(self, host: DeliveryHost) -> None:
        """Belong to that endpoint. Raises ConfigurationError when its transport is not RabbitMQTransport."""
        transport = host.transport
        if not isinstance(transport, RabbitMQTransport):
            raise ConfigurationError(
                f"DelayLevelDelivery needs a RabbitMQTransport, not {type(transport).__name__}: use StoredDelivery"
            )
        if self._host is not None and self._host.endpoint_name != host.endpoint_name:
            raise ConfigurationError(
                f"this DelayLevelDelivery belongs to endpoint {self._host.endpoint_name!r}; "
                f"create another for endpoint {host.endpoint_name!r}"
            )
        self._host, self._transport = host, transport
        self._levels = DelayInfrastructure.named(transport.address.delays)
        if self.stored is not None:
            behind = OverflowTransport(transport, host.error_queue, self._defer_all)
            self.stored.bind(replace(host, transport=behind))

    async def setup_infrastructure(self) -> None:
        """Declare the levels, and bind the endpoint's queue to the delivery exchange."""
        host, transport = self._parts()
        await self._check_version(transport)
        await transport.connection.run(self._levels.declare)
        with contextlib.suppress(QueueNotFound):  # an endpoint that only sends has none
            await transport.bind_delivery(host.endpoint_name, self._levels.delivery)
        await self._catch_undeliverable(transport)
        await self._lift_limits(transport)
        if self.stored is not None:
            await self.stored.setup_infrastructure()

    async def _catch_undeliverable(self, transport: RabbitMQTransport) -> None:
        from delayline.rabbitmq.admin.operations import catch_undeliverable, refusing_queues

        _, good, finding = await catch_undeliverable(transport.address, self._levels)
        level = logging.WARNING if good is False else logging.INFO
        emit(logger, level, Event.UNDELIVERABLE_CAUGHT, "Delay levels %s.*: %s", self._levels.prefix, finding)
        if good is not None:
            for refusal in await refusing_queues(transport.address, self._levels, [self._parts()[0].endpoint_name]):
                emit(logger, logging.WARNING, Event.QUEUE_DIFFERS, "%s", refusal)

    async def _lift_limits(self, transport: RabbitMQTransport) -> None:
        from delayline.rabbitmq.admin.operations import lift_limits

        _, good, finding = await lift_limits(transport.address, self._levels)
        if not good:
            emit(logger, logging.WARNING, Event.DELIVERY_LIMITED, "Delay levels %s.*: %s", self._levels.prefix, finding)

    async def start(self) -> None:
        """Look whether the levels are there, else raise BackendUnusable; start the store in front."""
        host, transport = self._parts()
        await self._check_version(transport)
        try:
            await transport.connection.run(
                lambda channel: channel.call(ExchangeDeclare(exchange=self._levels.delivery, passive=True))
            )
        except NotFound as error:
            raise self._not_set_up() from error
        if self.stored is not None:
            await self.stored.start()
        self._started = True
        self._overlaps = OverlappingNames(transport, self._levels)
        self._looking = asyncio.create_task(self._overlaps.check_broker(host.endpoint_name))

    async def stop(self) -> None:
        """Stop the overflow store; messages in the levels are delivered without it."""
        self._started = False
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._looking = None
        if self.stored is not None:
            await self.stored.stop()

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction if the overflow store takes part in it. Raises ConfigurationError."""
        if self.stored is None:
            raise ConfigurationError(
                "RabbitMQ takes part in no transaction: send without transaction=, or put a store in front with "
                "DelayLevelDelivery(stored=StoredDelivery(...))"
            )
        return await self.stored.enlist(external)

    def goes_on_when_cancelled(self, operation: TransportOperation) -> bool:
        """Return whether it is published at once, to a destination that is bound; see `SupportsCancelledDefer`."""
        _, transport = self._parts()
        at_once = self.stored is None and transport.goes_on_when_cancelled
        key = operation.destination
        if is_topic(key):
            key = transport.event_routes.delayed_key(operation)
        return at_once and self._is_bound(transport, key)

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Have the broker keep the operation for the seconds until `due`, rounded up; overdue goes straight on.

        Raises InvalidDueTime for more than 268435455 seconds without a store in front, InvalidMessage for a
        destination that the levels cannot carry or a message that expires, QueueNotFound for a missing destination.
        """
        host, transport = self._parts()
        if not self._started:
            raise NotStarted("delayed delivery is not started: use `async with endpoint:` or `await endpoint.start()`")
        now = host.clock.now()
        if self.stored is not None and (transaction is not None or self._is_for_store(operation, due, now)):
            await self._hold(self.stored, operation, due, now, transaction)
        elif transaction is not None:
            raise ConfigurationError("RabbitMQ takes part in no transaction: put a store in front with stored=")
        elif due <= now:
            await transport.dispatch([operation])
        else:
            for error in (await self._defer_all([(operation, due)], now)).values():
                raise error

    def _is_for_store(self, operation: TransportOperation, due: datetime, now: datetime) -> bool:
        seconds, below = seconds_until(due, now), self.stored_below
        if due <= now:
            return False
        if seconds > MAXIMUM_DELAY or (below is not None and due < now + below):
            return True
        return timedelta(seconds=seconds) - (due - now) > ROUNDED_UP_BY and can_be_parked(operation)

    async def _hold(
        self,
        stored: StoredDelivery,
        operation: TransportOperation,
        due: datetime,
        now: datetime,
        transaction: Transaction | None,
    ) -> None:
        """Keep it in the store: until it is due, or until the levels can take the rest."""
        seconds, below = seconds_until(due, now), self.stored_below
        if seconds > MAXIMUM_DELAY:
            check_destination(operation.destination)
            await stored.defer(parked(operation, due), due - LONGEST_DELAY + LEVELS_MARGIN, transaction)
        elif transaction is not None or seconds <= 1 or (below is not None and due < now + below):
            await stored.defer(operation, due, transaction)
        else:
            check_destination(operation.destination)
            await stored.defer(parked(operation, due), due - timedelta(seconds=seconds - 1))

    async def _defer_all(self, deferred: Sequence[Deferred], now: datetime | None = None) -> Mapping[int, Exception]:
        """Publish operations to the levels; return the errors of operations that are not there, by position."""
        host, transport = self._parts()
        failures: dict[int, Exception] = {}
        positions: list[int] = []
        publications: list[Publication] = []
        for position, (operation, due) in enumerate(deferred):
            try:
                key = operation.destination
                if is_topic(key):
                    await transport.event_routes.publishing(operation)
                    key = transport.event_routes.delayed_key(operation)
                if not self._is_bound(transport, key):
                    await self._bind_destination(transport, key, operation)
                    now = None  # a while ago
                delay = checked_until(due, now or host.clock.now())
            except (QueueNotFound, ValueError) as error:
                failures[position] = error
                continue
            exchange, key = self._levels.route(delay, key)
            positions.append(position)
            publications.append(Publication(operation.message, exchange, key, delay))
        for index, refused in (await transport.publisher.publish(publications)).items():
            failures[positions[index]] = self._not_set_up() if isinstance(refused, Unroutable) else refused
        return failures

    async def _bind_destination(
        self, transport: RabbitMQTransport, destination: str, operation: TransportOperation
    ) -> None:
        """Bind the destination to the delivery exchange. Raises QueueNotFound or InvalidMessage."""
        check_destination(destination)
        async with self._binding:
            if self._is_bound(transport, destination):
                return
            try:
                if is_topic(operation.destination):
                    await transport.event_routes.bind_delivery(operation, self._levels.delivery)
                else:
                    await transport.bind_delivery(destination, self._levels.delivery)
            except QueueNotFound:
                self._bound.pop(destination, None)
                raise
            if self._bound_over != transport.connection.generation:
                self._bound.clear()
                self._bound_over = transport.connection.generation
            if destination not in self._bound and self._overlaps is not None:
                self._overlaps.among(destination, [*self._bound, self._parts()[0].endpoint_name])
            self._bound[destination] = asyncio.get_running_loop().time()

    def _is_bound(self, transport: RabbitMQTransport, destination: str) -> bool:
        since = self._bound.get(destination)
        if since is None or self._bound_over != transport.connection.generation:
            return False
        return asyncio.get_running_loop().time() < since + BOUND_FOR

    async def _check_version(self, transport: RabbitMQTransport) -> None:
        version = await transport.connection.version()
        if self._levels.quorum and version < OLDEST_BROKER:
            raise BackendUnusable(
                f"RabbitMQ at {transport.address} has version {'.'.join(map(str, version))}: delay levels on quorum "
                "queues need 3.10 or later. Upgrade it, or use delays=v1"
            )

    def _not_set_up(self) -> BackendUnusable:
        return BackendUnusable(
            f"the delay levels {self._levels.delivery!r} are not on the broker. Run: delayline rabbitmq create"
        )

    def _parts(self) -> tuple[DeliveryHost, RabbitMQTransport]:
        if self._host is None or self._transport is None:
            raise NotStarted(
                "this DelayLevelDelivery belongs to no endpoint yet: pass it to Endpoint(delayed_delivery=...)"
            )
        return self._host, self._transport


class OverflowTransport:
    """The overflow store's transport: stored messages go to the levels, others straight to the real transport."""

    def __init__(
        self,
        transport: RabbitMQTransport,
        error_queue: str,
        defer_all: Callable[[Sequence[Deferred]], Awaitable[Mapping[int, Exception]]],
    ) -> None:
        self._transport = transport
        self._error_queue = error_queue
        self._defer_all = defer_all

    @property
    def transaction_domain(self) -> None:
        """Nothing shares a transaction with a broker."""
        return

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """As the transport's."""
        return self._transport.highest_transaction_mode

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the queues."""
        await self._transport.setup_infrastructure(queues)

    async def start(self) -> None:
        """Start the transport."""
        await self._transport.start()

    async def stop(self) -> None:
        """Stop the transport."""
        await self._transport.stop()

    async def receiver(self, queue: str) -> RabbitMQReceiver:
        """Return a receiver on the queue."""
        return await self._transport.receiver(queue)

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Send due operations, and have the levels keep what is for them."""
        straight: dict[int, TransportOperation] = {}
        later: dict[int, Deferred] = {}
        for position, operation in enumerate(operations):
            deferred = released(operation)
            if deferred is None:
                straight[position] = self._named(operation)
            else:
                later[position] = deferred
        failures = {list(later)[index]: error for index, error in (await self._defer_all(list(later.values()))).items()}
        try:
            await self._transport.dispatch(list(straight.values()), transaction)
        except DispatchFailed as failed:
            failures |= {list(straight)[index]: error for index, error in failed.failures.items()}
        if failures:
            raise DispatchFailed(dict(sorted(failures.items())))

    def _named(self, operation: TransportOperation) -> TransportOperation:
        """Have a message on its way to the error queue name the destination that it was meant for."""
        if operation.destination != self._error_queue:
            return operation
        deferred = PARKED.fullmatch(operation.message.headers.get(Headers.FAILED_QUEUE, ""))
        if deferred is None:
            return operation
        return TransportOperation(
            operation.message.with_headers({Headers.FAILED_QUEUE: deferred[2]}), operation.destination
        )
