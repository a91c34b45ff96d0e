"""Queues in RabbitMQ: published with confirms over a connection, declared and consumed over another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakSet

from delayline.checks import positive_seconds
from delayline.errors import BackendUnusable, ConfigurationError, DispatchFailed, InvalidMessage, QueueNotFound
from delayline.events import Event, emit
from delayline.failures import FAILURE_HEADERS
from delayline.message import Message
from delayline.rabbitmq import browsing
from delayline.rabbitmq.address import QUEUE_TYPES, BrokerAddress
from delayline.rabbitmq.address import TOPOLOGIES as TOPOLOGY_NAMES
from delayline.rabbitmq.amqp.methods import QueueDelete
from delayline.rabbitmq.amqp.wire import LONGEST_SHORT_STRING
from delayline.rabbitmq.browsing import QueuePass
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.decoding import crashes_of
from delayline.rabbitmq.delivery_limits import NACK_IS_NOT_COUNTED, DeliveryLimits
from delayline.rabbitmq.encoding import CRASHES_HEADER, Publication
from delayline.rabbitmq.event_routes import EventRoutes
from delayline.rabbitmq.forwarding import sent_on
from delayline.rabbitmq.overlapping_copies import DeliveryBindings
from delayline.rabbitmq.publisher import Publisher
from delayline.rabbitmq.receiver import STOP_PATIENCE, RabbitMQReceiver
from delayline.rabbitmq.refusals import NotFound, PreconditionFailed, Unroutable
from delayline.rabbitmq.topology import EXPIRES, TOPOLOGY_TYPES, can_be_compared, queue_declaration
from delayline.topics import any_topic, is_topic, log_unheard
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

    from delayline.rabbitmq.amqp.properties import Delivery
    from delayline.rabbitmq.topology import Topology
    from delayline.transaction import Transaction
    from delayline.transport import QueueState, TransportOperation

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")

BROKER_STOP_SECONDS: Final = 8.0
"""Seconds from the begin of a stop after which a silent broker is not waited for any more."""
POISON_ID: Final = ""


class RabbitMQTransport:
    """Transport with queues in a virtual host of RabbitMQ; at least once, as AMQP has no suitable transactions.

    Args:
        url: The broker, as `amqp://user@host/vhost`, with options, which arguments override; or a connection string
            of NServiceBus.
        queue_type: Type of new queues: `quorum`, which is replicated, or `classic`; by default the URL's, or quorum.
        topology: `conventional`, a fanout exchange before each queue, or `direct`; by default the URL's, or
            conventional.
        delays: The delay levels: `v2`, `v1` or a custom prefix; by default the URL's, or v2.
        error_queue: Queue for messages that cannot be read, such as without an id: byte for byte.
        name: Prefix of its connections' names in the broker's management UI.
        server_timeout: Seconds to wait for an answer of the broker; by default the URL's, or 15.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
        MissingExtra: The extra `rabbitmq` is not installed.
    """

    messaging_system = "rabbitmq"

    def __init__(
        self,
        url: str,
        *,
        queue_type: str | None = None,
        topology: str | None = None,
        delays: str | None = None,
        error_queue: str = "error",
        name: str = "delayline",
        server_timeout: float | None = None,
    ) -> None:
        address = BrokerAddress.parse(url)
        self.address: BrokerAddress = replace(
            address,
            queue_type=_one_of("queue_type", queue_type or address.queue_type, QUEUE_TYPES),
            topology=_one_of("topology", topology or address.topology, TOPOLOGY_NAMES),
            delays=delays or address.delays,
            server_timeout=address.server_timeout
            if server_timeout is None
            else positive_seconds("server_timeout", server_timeout),
        )
        self.topology: Topology = TOPOLOGY_TYPES[self.address.topology]
        self.connection: BrokerConnection = BrokerConnection(self.address, name)
        self.event_routes: EventRoutes = EventRoutes(self.connection, self.topology)
        self.limits: DeliveryLimits = DeliveryLimits(self.address, self.connection)
        self.publisher: Publisher = Publisher(self.address, connection_name=f"{name} Publish")
        self._bindings = DeliveryBindings(self.address)
        self._error_queue = error_queue
        self._starts = 0
        self._watch_timer: asyncio.TimerHandle | None = None
        self._declared: dict[str, set[str]] = {}
        self._subscribed: dict[str, set[str]] = {}
        self._classic: set[str] = set()
        self._receivers: WeakSet[RabbitMQReceiver] = WeakSet()

    @property
    def server_address(self) -> tuple[str, int | None]:
        """Host and port of the broker."""
        return self.address.host, self.address.port

    @property
    def transaction_domain(self) -> None:
        """Nothing shares a transaction with a broker."""
        return

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """A message leaves its queue after its handler's sends have been confirmed."""
        return TransactionMode.RECEIVE_ONLY

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the queues, exchanges and bindings. Raises BackendUnusable if any exists with other arguments."""
        await self.start()
        try:
            for queue in queues:
                _check_length(queue)
            await self.limits.lift(queues)
            for queue in queues:
                await self._declare(queue)
                self._declared.setdefault(queue, set())
            self.limits.warn(queues)
        finally:
            await self.stop()

    async def start(self) -> None:
        """Open both connections."""
        if self._starts == 0:
            await self.publisher.open()
            try:
                await self.connection.open()
            except BaseException:
                await self.publisher.close()
                raise
        self._starts += 1

    def stop_soon(self) -> None:
        """Disconnect from a broker that stays silent during the stop, so that the stop ends within 20 seconds.

        Silence is detected by missing heartbeats; without heartbeats each wait has its usual limit.
        """
        if self._starts and self.address.heartbeat and self._watch_timer is None:
            self._watch_timer = asyncio.get_running_loop().call_later(BROKER_STOP_SECONDS, self._watch_stop)

    def _watch_stop(self) -> None:
        """Check in a later turn of the loop, after received data was read."""
        self._watch_timer = asyncio.get_running_loop().call_later(0.1, self._hang_up_if_silent)

    def _hang_up_if_silent(self) -> None:
        silence = min(BROKER_STOP_SECONDS, self.address.short_heartbeat)  # heartbeats come twice as often
        self.publisher.hang_up_if_silent(silence)
        self.connection.hang_up_if_silent(silence)
        self._watch_timer = asyncio.get_running_loop().call_later(1.0, self._watch_stop)

    async def stop(self) -> None:
        """Undo a `start`; the last waits for confirms, then disconnects."""
        self._starts = max(0, self._starts - 1)
        try:
            if self._starts == 0:
                await self._disconnect()
        finally:
            if self._watch_timer is not None:
                self._watch_timer.cancel()
                self._watch_timer = None

    async def _disconnect(self) -> None:
        try:
            await self.limits.stop()
            await self.publisher.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_PATIENCE):
                    await asyncio.gather(*(receiver.flushed() for receiver in self._receivers))
        finally:
            await self._bindings.close()
            await self.connection.close()

    @property
    def goes_on_when_cancelled(self) -> bool:
        """True while the broker takes messages: they are written at once, and confirmed without the sender."""
        return self.publisher.writes_at_once

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Publish every message whose destination exists, and wait until the broker has confirmed them all."""
        if transaction is not None:
            raise ConfigurationError("RabbitMQ takes part in no transaction: send without transaction=")
        if any_topic(operations):
            failures = await self._publish(operations)
        else:
            address_of = self.topology.address_of
            failures = await self.publisher.publish(
                [Publication(operation.message, *address_of(operation.destination)) for operation in operations]
            )
        if failures:
            raise DispatchFailed(
                {
                    position: QueueNotFound(operations[position].destination)
                    if isinstance(error, Unroutable)
                    else error
                    for position, error in sorted(failures.items())
                }
            )

    async def _publish(self, operations: Sequence[TransportOperation]) -> Mapping[int, Exception]:
        """Publish messages and events, in their order; an event without subscribers is no failure."""
        failures: dict[int, Exception] = {}
        published: dict[int, Publication] = {}
        for position, operation in enumerate(operations):
            try:
                if is_topic(operation.destination):
                    address = await self.event_routes.publishing(operation)
                else:
                    address = self.topology.address_of(operation.destination)
            except (InvalidMessage, BackendUnusable) as error:
                failures[position] = error
            else:
                published[position] = Publication(operation.message, *address)
        positions = list(published)
        for index, refused in (await self.publisher.publish(list(published.values()))).items():
            operation = operations[positions[index]]
            if isinstance(refused, Unroutable) and is_topic(operation.destination):
                self.event_routes.forget(operation)
                log_unheard(operation)
            else:
                failures[positions[index]] = refused
        return failures

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have events from now on, from .NET too. Raises QueueNotFound."""
        _check_length(queue)
        await self.event_routes.subscribe(queue, topics)
        self._subscribed.setdefault(queue, set()).update(topics)

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more events."""
        _check_length(queue)
        await self.event_routes.unsubscribe(queue, topics)
        self._subscribed.get(queue, set()).difference_update(topics)

    async def bind_delivery(self, destination: str, exchange: str) -> None:
        """Have that exchange pass delayed messages on to the destination. Idempotent. Raises QueueNotFound."""
        _check_length(destination)
        try:
            await self.connection.run(
                partial(self.topology.bind_delivery, destination=destination, delivery_exchange=exchange)
            )
        except NotFound as error:
            raise QueueNotFound(destination) from error
        if destination in self._declared:
            self._declared[destination].add(exchange)

    async def receiver(self, queue: str) -> RabbitMQReceiver:
        """Return a receiver on the queue."""
        await self._look(queue, browsing.must_exist)
        self.limits.look_later(queue, self._error_queue)
        receiver = RabbitMQReceiver(
            self.connection,
            queue,
            restore=self._restore,
            move_aside=self._move_aside,
            bindings=self._bindings,
            copy=partial(self._copy, queue),
            is_dropped_next=partial(self.limits.is_reached, queue),
            counted=queue not in self._classic,
        )
        self._receivers.add(receiver)
        return receiver

    async def has_queue(self, queue: str) -> bool:
        """Return whether the exchange for the queue exists, or the queue itself."""
        exchange, _ = self.topology.address_of(queue)
        try:
            if exchange:
                await self.connection.run(partial(self.topology.check, destination=exchange))
            else:
                await self._look(queue, browsing.must_exist)
        except (NotFound, QueueNotFound):
            return False
        return True

    async def queues(self) -> Sequence[str]:
        """Return the names of the queues that were set up here: AMQP has no way to list others."""
        return sorted(self._declared)

    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, without messages that a receiver holds."""
        return await self._look(queue, browsing.count)

    async def queue_states(self, queues: Sequence[str] | None) -> Sequence[QueueState]:
        """Return the states of the queues, of those that were set up here where None; see `SupportsQueueStates`."""
        states: list[QueueState] = []
        tries = browsing.STATE_TRIES
        for queue in sorted(self._declared) if queues is None else queues:
            with contextlib.suppress(QueueNotFound):
                state = await self._look(queue, partial(browsing.state, tries=tries))
                states.append(state)
                tries = 1 if state.messages is None else tries  # a node is away, with the leaders of many queues
        return states

    @contextlib.asynccontextmanager
    async def passing(self, queue: str) -> AsyncIterator[QueuePass]:
        """Look through the queue once: each message is taken, and given back at the end unless it was removed.

        Raises QueueNotFound, BackendUnavailable; BackendUnusable where the queue would soon drop what it gets back.
        """
        _check_length(queue)
        channel = await self.connection.channel()
        messages = QueuePass(channel, queue, limit_of=self.limits.of, copy=self._copy)
        try:
            try:
                yield messages
            finally:
                if channel.closed is None:
                    counts_nacks = await self.connection.version() < NACK_IS_NOT_COUNTED
                    await (messages.let_go() if counts_nacks else messages.give_back())
        except NotFound as error:
            raise QueueNotFound(queue) from error
        finally:
            await self.connection.release(channel)

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages that no receiver holds, oldest first: each is taken and given back."""
        browsed: list[Message] = []
        async with self.passing(queue) as messages:
            for number in range(offset + limit):
                message = await anext(messages, None)
                if message is None:
                    break
                if number >= offset:
                    browsed.append(message)
        return browsed

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest copy of the message that no receiver holds; messages before it are taken and given back."""
        if transaction is not None:
            raise ConfigurationError("RabbitMQ takes part in no transaction: take without transaction=")
        async with self.passing(queue) as messages:
            async for message in messages:
                if message.id == message_id:
                    return await messages.remove()
        return False

    async def purge(self, queue: str) -> int:
        """Remove every message that no receiver holds."""
        return await self._look(queue, browsing.purge)

    async def _look(self, queue: str, work: Callable[..., Awaitable[Result]]) -> Result:
        _check_length(queue)
        try:
            return await self.connection.run(partial(work, queue=queue))
        except NotFound as error:
            raise QueueNotFound(queue) from error

    async def _declare(self, queue: str) -> None:
        declare = partial(self.topology.declare, queue=queue, arguments=self.limits.argument_of(queue))
        try:
            await self.connection.run(partial(declare, queue_type=self.address.queue_type))
            self.limits.created(queue)
            if self.address.queue_type == "classic":
                self._classic.add(queue)
        except PreconditionFailed as different:
            try:
                await self.connection.run(partial(declare, queue_type=None))
            except (PreconditionFailed, NotFound) as error:
                raise BackendUnusable(
                    f"queue {queue!r} and its exchange are there already, but not as this topology has them: {error}. "
                    "Give RabbitMQTransport the topology= they have, or delete them"
                ) from error
            if self.limits.differs(queue, different):
                return
            template = "Queue %r exists and is no %s queue as this endpoint would create it: using it as it is (%s)"
            emit(logger, logging.WARNING, Event.QUEUE_DIFFERS, template, queue, self.address.queue_type, different)

    async def create_expiring(self, queue: str, unused_for: timedelta) -> None:
        """Create a classic queue that the broker removes when it was not received from for so long."""
        _check_length(queue)
        arguments = {EXPIRES: round(unused_for / timedelta(milliseconds=1))}
        await self.connection.run(
            partial(self.topology.declare, queue=queue, queue_type="classic", arguments=arguments)
        )
        self._classic.add(queue)

    async def remove_queue(self, queue: str) -> None:
        """Remove the queue with its messages."""
        await self.connection.run(lambda channel: channel.call(QueueDelete(queue=queue)))

    async def difference(self, queue: str) -> str:
        """Return in which way a queue is not as this transport would create it; empty if it is."""
        try:
            await self._look(queue, browsing.must_exist)
            if not can_be_compared(queue, self.address.vhost):
                return ""
            await self.connection.run(lambda channel: channel.call(queue_declaration(queue, self.address.queue_type)))
        except PreconditionFailed as error:
            if self.limits.differs(queue, error):
                return ""
            return f"no {self.address.queue_type} queue as this endpoint would create it, and used as it is ({error})"
        return ""

    async def _restore(self, queue: str) -> bool:
        """Declare a queue of this process again, with its bindings; False for other queues."""
        if queue not in self._declared:
            return False
        await self._declare(queue)
        for exchange in self._declared[queue]:
            await self.bind_delivery(queue, exchange)
        await self.event_routes.subscribe(queue, sorted(self._subscribed.get(queue, ())))
        return True

    async def _move_aside(self, delivered: Delivery, marks: Mapping[str, str]) -> None:
        """Send a message to the error queue as it is, with the headers in place of an earlier failure's.

        Raises QueueNotFound, BackendUnavailable, InvalidMessage.
        """
        properties = sent_on(delivered.encoded_properties, marks, without=FAILURE_HEADERS if marks else ())
        await self._send_on(delivered, self._error_queue, *self.topology.address_of(self._error_queue), properties)

    async def _copy(self, queue: str, delivered: Delivery, crashes: int | None = None) -> None:
        """Send a message to its queue again, which counts its returns anew.

        Args:
            queue: The queue.
            delivered: The message.
            crashes: How many deliveries of it have ended with a crash; None for as many as it says.

        Raises:
            QueueNotFound: The queue does not exist.
            BackendUnavailable: The broker does not answer.
            InvalidMessage: The properties cannot be sent on.
        """
        if crashes is None:  # if the queue counts crashes, each return was a crash
            crashes = crashes_of(delivered) and crashes_of(delivered) + delivered.returns
        properties = sent_on(delivered.encoded_properties, {CRASHES_HEADER: crashes} if crashes else {}, expires=True)
        await self._send_on(delivered, queue, "", queue, properties)

    async def _send_on(self, delivered: Delivery, queue: str, exchange: str, key: str, properties: bytes) -> None:
        message = Message(POISON_ID, {}, delivered.body)
        failures = await self.publisher.publish([Publication(message, exchange, key, properties=properties)])
        for error in failures.values():
            raise QueueNotFound(queue) if isinstance(error, Unroutable) else error


def _check_length(name: str) -> None:
    if len(name.encode()) > LONGEST_SHORT_STRING:
        raise InvalidMessage(
            f"queue {name[:40]!r}... has {len(name.encode())} bytes in UTF-8, RabbitMQ takes {LONGEST_SHORT_STRING} "
            "at most: use a shorter name"
        )


def _one_of(setting: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise ConfigurationError(f"{setting}={value!r} must be one of {', '.join(known)}")
    return value
