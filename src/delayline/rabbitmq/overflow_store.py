"""A store in front of the delay levels, for delays that are too long for them, and for fractions of a second."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from delayline.errors import DispatchFailed, InvalidMessage
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, from_wire_time, to_wire_time
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from delayline.rabbitmq.receiver import RabbitMQReceiver
    from delayline.rabbitmq.transport import RabbitMQTransport
    from delayline.transaction import Transaction, TransactionMode

    Deferred = tuple[TransportOperation, datetime]

#: The destination of a stored message that goes to the levels later. No queue has such a name: a poller that does
#: not understand it moves the message to the error queue instead of delivering it years early.
PARKED: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d:\d{6} Z)\|(.+)", re.DOTALL)


#: Characters in front of the destination in the name that `parked` gives.
PARKED_PREFIX: Final = len("2026-11-24 08:00:00:000000 Z|")


def can_be_parked(operation: TransportOperation) -> bool:
    """Return whether the name of the destination is short enough for `parked`."""
    return len(operation.destination) + PARKED_PREFIX <= MAXIMUM_DESTINATION_LENGTH


def parked(operation: TransportOperation, due: datetime) -> TransportOperation:
    """Return the delayed message to store for an operation. Raises InvalidMessage for a name that is too long."""
    name = f"{to_wire_time(due)}|{operation.destination}"
    if len(name) > MAXIMUM_DESTINATION_LENGTH:
        longest = MAXIMUM_DESTINATION_LENGTH - len(name) + len(operation.destination)
        raise InvalidMessage(
            f"destination {operation.destination[:40]!r}... has {len(operation.destination)} characters: a message "
            f"that waits in a store until the delay levels can take it goes to names of {longest} at most"
        )
    return TransportOperation(operation.message, name)


def released(operation: TransportOperation) -> Deferred | None:
    """Return the operation as it was before `parked`, and when it is due; None for another one.

    A destination in that form without a valid time is an ordinary one: an unknown sender may ask for replies there.
    """
    found = PARKED.fullmatch(operation.destination)
    if found is None:
        return None
    try:
        due = from_wire_time(found[1])
    except ValueError:
        return None
    return TransportOperation(operation.message, found[2]), due


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
        """Send those that are due, and have the levels keep those that are for them."""
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
