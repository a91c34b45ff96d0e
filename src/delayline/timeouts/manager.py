"""Delayed delivery through a timeout manager, as in NServiceBus versions before native delays.

A delayed message is sent to `{endpoint}.Timeouts`, where a satellite stores it as a timeout. When it expires, the
poller sends a request to `{endpoint}.TimeoutsDispatcher`, where another satellite sends the message to its
destination. Where queues and storage share transactions, the poller sends expired messages itself.
See https://docs.particular.net/nservicebus/messaging/timeout-manager.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.checks import whole_number
from delayline.circuit_breaker import FailureRate, RepeatedFailuresOverTime, back_end_of, first_of
from delayline.delayed.blame import Blame
from delayline.delayed.host import Satellite, satellite_queues
from delayline.delayed.mover import Mover, scope_between
from delayline.delayed.poller import MAXIMUM_SLEEP, Poller
from delayline.delayed.recovery import Recovery
from delayline.delayed.set_aside import SetAside
from delayline.delayed.store import (
    SupportsClock,
    SupportsNotifications,
    SupportsRightsCheck,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.errors import BackendUnavailable, ConfigurationError, DispatchFailed, InvalidMessage, NotStarted
from delayline.events import Event
from delayline.external import SupportsExternalTransactions
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, TimeoutHeaders, control_message, to_wire_time
from delayline.timeouts.persister import SupportsOpen, SupportsTimeoutLocks
from delayline.timeouts.poll import DirectTimeoutStore, TimeoutRequestStore
from delayline.timeouts.satellites import DispatchingSatellite, StoringSatellite
from delayline.transaction import strongest_mode
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.host import DeliveryHost, RunningSatellite
    from delayline.external import ExternalTransaction
    from delayline.message import Message
    from delayline.timeouts.persister import TimeoutPersister
    from delayline.transaction import Transaction
    from delayline.transport import Transport


logger: logging.Logger = logging.getLogger(__name__)

TWO_MINUTES: Final = timedelta(minutes=2)
SEND_ATTEMPTS: Final = 5
BATCH_BYTES: Final = 16 * 1024 * 1024
#: The poller looks at the storage at least this often during `time_to_wait_before_triggering_critical_error`, and at
#: least every ten seconds, so that an outage is detected in time.
LOOKS_BEFORE_CRITICAL_ERROR: Final = 12
MAXIMUM_TIME_BETWEEN_LOOKS: Final = timedelta(seconds=10)
FETCHING_FAILED: Final = "Repeated failures when fetching timeouts from storage, endpoint will be terminated."


class TimeoutManagerDelivery:
    """Delayed delivery through a timeout manager, over any transport.

    Args:
        persister: Storage for timeouts: a SqlTimeoutPersister, a MemoryTimeoutPersister, or your own.
        time_to_wait_before_triggering_critical_error: How long the storage may be unreachable; zero or longer.
        concurrency: Messages that each satellite handles at once; 1 or more.
        batch_size: Expired timeouts sent or requested at once; 1 or more.
        polling: False only sends to the timeouts queue, and leaves storing and dispatching to other processes of the
            same endpoint.

    Raises:
        ConfigurationError: An argument is out of range.

    Example:
        ```python
        persister = SqlTimeoutPersister("postgresql://localhost/shop")
        endpoint = Endpoint("sales", transport=transport, delayed_delivery=TimeoutManagerDelivery(persister))
        ```
    """

    def __init__(
        self,
        persister: TimeoutPersister,
        *,
        time_to_wait_before_triggering_critical_error: timedelta = TWO_MINUTES,
        concurrency: int = 16,
        batch_size: int = 500,
        polling: bool = True,
    ) -> None:
        wait = time_to_wait_before_triggering_critical_error
        if not isinstance(wait, timedelta) or wait < timedelta(0):
            raise ConfigurationError(
                f"time_to_wait_before_triggering_critical_error must be a timedelta of zero or longer, not {wait!r}"
            )
        self.persister = persister
        self.time_to_wait_before_triggering_critical_error = wait
        self.concurrency: int = whole_number("concurrency", concurrency, at_least=1)
        self.batch_size: int = whole_number("batch_size", batch_size, at_least=1)
        self.polling = polling
        self._host: DeliveryHost | None = None
        self._started = False
        self._set_up_later = False
        self._stopping = asyncio.Event()
        self._beginning: asyncio.Task[None] | None = None
        self._poller: Poller | None = None
        self._satellites: list[RunningSatellite] = []
        self._closers: list[Callable[[], None]] = []

    @property
    def transaction_domain(self) -> Hashable | None:
        """The persister's domain: a message is sent exactly once when the transport's is the same."""
        return self.persister.transaction_domain if isinstance(self.persister, SupportsTransactions) else None

    @property
    def clock(self) -> Clock | None:
        """The persister's clock; None if it uses the machine's."""
        return self.persister.clock() if isinstance(self.persister, SupportsClock) else None

    @property
    def store(self) -> TimeoutPersister:
        """The persister; `endpoint.delayed` uses it if it implements SupportsManagement."""
        return self.persister

    @property
    def host(self) -> DeliveryHost:
        """The endpoint this delivery belongs to. Raises NotStarted before `bind`."""
        if self._host is None:
            raise NotStarted(
                "this TimeoutManagerDelivery belongs to no endpoint yet: pass it to Endpoint(delayed_delivery=...)"
            )
        return self._host

    @property
    def satellite_queues(self) -> Sequence[str]:
        """The queues for timeouts, and for requests to dispatch them."""
        return satellite_queues(self.host.transport, self.host.endpoint_name)

    @property
    def timeouts_queue(self) -> str:
        """The queue that delayed messages go to."""
        return satellite_queues(self.host.transport, self.host.endpoint_name)[0]

    @property
    def dispatcher_queue(self) -> str:
        """The queue for requests to dispatch an expired timeout."""
        return satellite_queues(self.host.transport, self.host.endpoint_name)[1]

    def bind(self, host: DeliveryHost) -> None:
        """Attach to an endpoint. Raises ConfigurationError if attached to another, or if its name is too long."""
        if self._host is not None and self._host.endpoint_name != host.endpoint_name:
            raise ConfigurationError(
                f"this TimeoutManagerDelivery belongs to endpoint {self._host.endpoint_name!r}; "
                f"create another for endpoint {host.endpoint_name!r}"
            )
        self._host = host
        if len(self.dispatcher_queue) > MAXIMUM_DESTINATION_LENGTH:
            raise ConfigurationError(
                f"the queue name {self.dispatcher_queue!r} is longer than {MAXIMUM_DESTINATION_LENGTH} characters: "
                "give the endpoint a shorter name"
            )

    async def setup_infrastructure(self) -> None:
        """Create the two queues, and the storage if the persister supports it."""
        await self.host.transport.setup_infrastructure([self.timeouts_queue, self.dispatcher_queue])
        if isinstance(self.persister, SupportsSetup):
            await self.persister.setup_infrastructure(self.host.endpoint_name)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements that the persister's user needs; see `SupportsRightsCheck`."""
        if not isinstance(self.persister, SupportsRightsCheck):
            return ()
        return await self.persister.missing_rights(endpoint_name, takes=takes and self.polling)

    def set_up_later(self) -> None:
        """Set up as soon as the storage is reachable; the endpoint starts before."""
        self._set_up_later = True

    async def start(self) -> None:
        """Open the storage and start polling; if the storage is unreachable, retry in the background."""
        self._stopping = asyncio.Event()
        self._started = True
        if not self.polling:
            return
        fetching = self._breaker("TimeoutStorageConnectivity", FETCHING_FAILED)
        try:
            await self._begin(fetching)
        except BackendUnavailable as error:
            self._beginning = asyncio.create_task(
                self._begin_later(error, fetching), name=f"delayline timeouts {self.host.endpoint_name}"
            )

    async def stop(self) -> None:
        """Finish messages in flight, then close the storage."""
        self._stopping.set()
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
            self._beginning = None
        if self._poller is not None:
            await self._poller.stop()
            self._poller = None
        await asyncio.gather(*(satellite.stop() for satellite in self._satellites))
        self._satellites.clear()
        for close in reversed(self._closers):
            close()
        self._closers.clear()
        if self._started and self.polling and isinstance(self.persister, SupportsOpen):
            await self.persister.close()
        self._started = False

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction if `defer` can take part in it."""
        return await enlisted(self.host.transport, external)

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Send the operation to the timeouts queue, or straight to its destination if it is due.

        Raises InvalidMessage for a message with a time to be received, which could expire unnoticed.
        """
        if not self._started:
            raise NotStarted("delayed delivery is not started: use `async with endpoint:` or `await endpoint.start()`")
        if due > self.host.clock.now():
            operation = to_timeouts_queue(operation.message, operation.destination, due, self.timeouts_queue)
        await send(self.host.transport, operation, transaction)

    async def clear_timeouts(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> None:
        """Delete every timeout whose `NServiceBus.SagaId` header is `saga_id`."""
        await send(self.host.transport, to_clear(saga_id, self.host.clock.now(), self.timeouts_queue), transaction)

    async def _begin_later(self, error: Exception, fetching: RepeatedFailuresOverTime) -> None:
        """Retry each second, as a poller does whose storage is unreachable."""
        try:
            while True:
                log_text = "Failed to fetch timeouts from the timeout storage: %s"
                fetching.log_failure(logger, logging.WARNING, Event.FETCH_FAILED, log_text, error, exception=error)
                await first_of(self._stopping.wait(), fetching.failure(error))
                try:
                    await self._begin(fetching)
                except BackendUnavailable as again:
                    error = again
                else:
                    return
        except Exception as unusable:
            self.host.critical_error("Failed to open the timeout storage", unusable)

    async def _begin(self, fetching: RepeatedFailuresOverTime) -> None:
        host = self.host
        if self._set_up_later:
            await self.setup_infrastructure()
            self._set_up_later = False
        if isinstance(self.persister, SupportsOpen):
            await self.persister.open(host.endpoint_name)
        expired = self._expired()
        poller = self._new_poller(expired, fetching)

        def stored(due: datetime) -> None:
            expired.stored(due)
            poller.signal(due)

        if isinstance(self.persister, SupportsNotifications):
            self._closers.append(self.persister.on_stored(stored))
        satellites: list[RunningSatellite] = []
        try:
            for satellite in self._new_satellites(stored):
                satellites.append(await host.satellite(host, satellite))  # noqa: PERF401 - a failure stops the started
        except BaseException:
            await asyncio.gather(*(satellite.stop() for satellite in satellites))
            raise
        self._satellites, self._poller = satellites, poller
        poller.start()
        for running in self._satellites:
            running.start()

    def _new_satellites(self, stored: Callable[[datetime], None]) -> list[Satellite]:
        host, mode = self.host, strongest_mode(self.host.transport, self)
        storing = StoringSatellite(
            host,
            self.persister,
            breaker=self._breaker("TimeoutStorage", "Failed to store timeouts"),
            stored=stored,
            stopping=self._stopping,
            waits=self.concurrency // 2,
        )
        dispatching = DispatchingSatellite(host, self.persister, scope_between(self.persister, host.transport))
        return [
            Satellite(self.timeouts_queue, storing, mode, self.concurrency),
            Satellite(self.dispatcher_queue, dispatching, mode, self.concurrency),
        ]

    def _expired(self) -> DirectTimeoutStore | TimeoutRequestStore:
        """Return the store to poll: direct if a transaction can cover queues and timeouts."""
        persister, queue, clock = self.persister, self.dispatcher_queue, self.host.clock
        if scope_between(persister, self.host.transport).shared and isinstance(persister, SupportsTimeoutLocks):
            return DirectTimeoutStore(persister, queue, clock)
        return TimeoutRequestStore(persister, queue, clock)

    def _new_poller(
        self, expired: DirectTimeoutStore | TimeoutRequestStore, fetching: RepeatedFailuresOverTime
    ) -> Poller:
        host = self.host
        scope = scope_between(self.persister, host.transport)
        rate = FailureRate(
            "TimeoutFailureHandling",
            maximum_per_second=1,
            trigger=lambda error: host.critical_error("Failed to execute error handling for timeouts", error),
            clock=host.clock,
            observer=host.observers.all,
        )
        self._closers.append(rate.close)
        aside = SetAside()
        recovery = Recovery(
            expired, host, number_of_retries=SEND_ATTEMPTS - 1, scope=scope, failure_rate=rate, aside=aside
        )
        between_looks = self.time_to_wait_before_triggering_critical_error / LOOKS_BEFORE_CRITICAL_ERROR
        return Poller(
            expired,
            host,
            mover=Mover(
                expired,
                host.transport,
                scope=scope,
                recovery=recovery,
                batch_bytes=BATCH_BYTES,
                blame=Blame(aside, host.clock),
                aside=aside,
            ),
            forwarding=expired
            if isinstance(expired, DirectTimeoutStore) and expired.forwards_to(host.transport)
            else None,
            fetch_breaker=fetching,
            dispatch_breaker=self._breaker("TimeoutDispatch", "Failed to dispatch expired timeouts"),
            batch_size=self.batch_size,
            batch_bytes=BATCH_BYTES,
            maximum_sleep=min(MAXIMUM_SLEEP, max(timedelta(seconds=1), min(between_looks, MAXIMUM_TIME_BETWEEN_LOOKS))),
        )

    def _breaker(self, name: str, text: str) -> RepeatedFailuresOverTime:
        host = self.host
        breaker = RepeatedFailuresOverTime(
            name,
            time_to_trigger=self.time_to_wait_before_triggering_critical_error,
            trigger=lambda error: host.critical_error(text, error),
            clock=host.clock,
            observer=host.observers.all,
            back_end=back_end_of(host.transport if name == "TimeoutDispatch" else self.persister),
        )
        self._closers.append(breaker.close)
        return breaker


def to_timeouts_queue(message: Message, destination: str, due: datetime, queue: str) -> TransportOperation:
    """Return the operation that sends the message to a timeout manager's queue.

    Raises InvalidMessage for a message with a time to be received, which could expire unnoticed.
    """
    if Headers.TIME_TO_BE_RECEIVED in message.headers:
        raise InvalidMessage(
            "Postponed delivery of messages with TimeToBeReceived set is not supported. Remove the header "
            f"{Headers.TIME_TO_BE_RECEIVED} to postpone message {message.id!r}."
        )
    routed = {TimeoutHeaders.DESTINATION: destination, TimeoutHeaders.EXPIRE: to_wire_time(due)}
    return TransportOperation(message.with_headers(routed), queue)


def to_clear(saga_id: uuid.UUID, now: datetime, queue: str) -> TransportOperation:
    """Return the operation that requests deletion of a saga's timeouts."""
    headers = {Headers.SAGA_ID: str(saga_id), TimeoutHeaders.CLEAR: TimeoutHeaders.TRUE}
    return TransportOperation(control_message(now, headers), queue)


async def send(transport: Transport, operation: TransportOperation, transaction: Transaction | None) -> None:
    """Send a message. Raises its own error instead of DispatchFailed."""
    try:
        await transport.dispatch([operation], transaction)
    except DispatchFailed as failed:
        raise failed.failures[0] from failed


async def enlisted(transport: Transport, external: ExternalTransaction) -> Transaction:
    """Return the external transaction if sends on `transport` can take part in it."""
    if isinstance(transport, SupportsExternalTransactions):
        return await transport.enlist(external)
    raise ConfigurationError(
        f"{type(transport).__name__} cannot take part in an external transaction: send without transaction="
    )


class ExternalTimeoutManager:
    """Delayed delivery by the timeout manager of another endpoint, as `UseExternalTimeoutManager` of NServiceBus.

    Args:
        address: The other timeout manager's input queue, such as `billing.Timeouts`; 1 to 200 characters.

    Raises:
        ConfigurationError: The address is empty or too long.
    """

    def __init__(self, address: str) -> None:
        if not isinstance(address, str) or not 0 < len(address) <= MAXIMUM_DESTINATION_LENGTH:
            raise ConfigurationError(
                f"address must be a queue name of 1 to {MAXIMUM_DESTINATION_LENGTH} characters, not {address!r}"
            )
        self.address = address
        self._host: DeliveryHost | None = None
        self._started = False

    @property
    def transaction_domain(self) -> None:
        """None: the other endpoint stores and dispatches the messages."""

    @property
    def clock(self) -> None:
        """None: due times are measured on this machine's clock."""

    @property
    def store(self) -> None:
        """None: the other endpoint keeps the messages."""

    def bind(self, host: DeliveryHost) -> None:
        """Attach to an endpoint. Raises ConfigurationError if attached to another endpoint."""
        if self._host is not None and self._host.endpoint_name != host.endpoint_name:
            raise ConfigurationError(
                f"this ExternalTimeoutManager belongs to endpoint {self._host.endpoint_name!r}; "
                f"create another for endpoint {host.endpoint_name!r}"
            )
        self._host = host

    async def setup_infrastructure(self) -> None:
        """No-op: the queue belongs to the other endpoint."""

    async def start(self) -> None:
        """Accept messages."""
        self._started = True

    async def stop(self) -> None:
        """Accept no more messages."""
        self._started = False

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction if `defer` can take part in it."""
        return await enlisted(self._bound.transport, external)

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Send the operation to the timeout manager, or straight to its destination if it is due.

        Raises QueueNotFound if its queue does not exist, and InvalidMessage for a message with a time to be received.
        """
        if not self._started:
            raise NotStarted("delayed delivery is not started: use `async with endpoint:` or `await endpoint.start()`")
        if due > self._bound.clock.now():
            operation = to_timeouts_queue(operation.message, operation.destination, due, self.address)
        await send(self._bound.transport, operation, transaction)

    async def clear_timeouts(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> None:
        """Delete every timeout whose `NServiceBus.SagaId` header is `saga_id`."""
        await send(self._bound.transport, to_clear(saga_id, self._bound.clock.now(), self.address), transaction)

    @property
    def _bound(self) -> DeliveryHost:
        if self._host is None:
            raise NotStarted(
                "this ExternalTimeoutManager belongs to no endpoint yet: pass it to Endpoint(delayed_delivery=...)"
            )
        return self._host
