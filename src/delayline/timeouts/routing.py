"""Routing to a timeout manager: this endpoint's or another's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.errors import ConfigurationError, DispatchFailed, InvalidMessage, NotStarted
from delayline.external import SupportsExternalTransactions
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, TimeoutHeaders, to_wire_time
from delayline.timeouts.poll import control_message
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    import uuid
    from datetime import datetime

    from delayline.delayed.host import DeliveryHost
    from delayline.external import ExternalTransaction
    from delayline.message import Message
    from delayline.transaction import Transaction
    from delayline.transport import Transport


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
    headers = {TimeoutHeaders.SAGA_ID: str(saga_id), TimeoutHeaders.CLEAR: TimeoutHeaders.TRUE}
    return TransportOperation(control_message(now, headers), queue)


async def send(transport: Transport, operation: TransportOperation, transaction: Transaction | None) -> None:
    """Send one message. Raises its own error instead of DispatchFailed."""
    try:
        await transport.dispatch([operation], transaction)
    except DispatchFailed as failed:
        raise failed.failures[0] from failed


async def enlisted(transport: Transport, external: ExternalTransaction) -> Transaction:
    """Return the external transaction as one that sends on `transport` can take part in."""
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

    def bind(self, host: DeliveryHost) -> None:
        """Attach to an endpoint. Raises ConfigurationError if attached to another one."""
        if self._host is not None and self._host.endpoint_name != host.endpoint_name:
            raise ConfigurationError(
                f"this ExternalTimeoutManager belongs to endpoint {self._host.endpoint_name!r}; "
                f"create another one for endpoint {host.endpoint_name!r}"
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
        """Return the external transaction as one that `defer` can take part in."""
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
