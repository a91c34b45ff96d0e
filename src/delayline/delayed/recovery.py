"""A due message could not be forwarded: count it and back off, or move it to the error queue. It is never lost."""

from __future__ import annotations

import logging
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from delayline.errors import CorruptHeaders, QueueNotFound
from delayline.events import Event, emit
from delayline.recoverability import failure_headers
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.circuit_breaker import FailureRate
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction

logger = logging.getLogger(__name__)

FIRST_BACK_OFF: Final = timedelta(seconds=1)
LONGEST_BACK_OFF: Final = timedelta(seconds=60)


def back_off(attempts: int) -> timedelta:
    """Return how long a message waits after that many failed attempts: 1 s, doubling, 60 s at most."""
    return min(FIRST_BACK_OFF * (1 << min(attempts - 1, 6)), LONGEST_BACK_OFF)


class Aftermath(Enum):
    """What became of a message that failed."""

    MOVED = auto()
    """It is in the error queue."""
    BACKED_OFF = auto()
    """It waits in the store for its next attempt."""
    STUCK = auto()
    """It stays in the store as it was: not even its failure could be counted."""


class Recovery:
    """Decides what becomes of one message that failed; other messages go on meanwhile."""

    def __init__(
        self,
        store: PolledStore,
        host: DeliveryHost,
        *,
        number_of_retries: int,
        transaction: Callable[[], Transaction] | None,
        failure_rate: FailureRate,
    ) -> None:
        self._store = store
        self._host = host
        self._number_of_retries = number_of_retries
        self._transaction = transaction
        self._failure_rate = failure_rate

    async def failed(self, message: DelayedMessage, error: Exception) -> Aftermath:
        """Handle the failed attempt; an error in doing so is logged and counted, and the message stays stored."""
        attempts = message.number_of_retries + 1
        emit(
            logger,
            logging.ERROR,
            Event.DISPATCH_FAILED,
            "Attempt %d to forward delayed message %s to %r failed: %s",
            attempts,
            message.id,
            message.destination,
            error,
            exception=error,
            message=message,
        )
        try:
            if attempts > self._number_of_retries or isinstance(error, QueueNotFound):
                await self._move_to_error(message, error)
                return Aftermath.MOVED
            await self._back_off(message, attempts)
        except Exception as trouble:
            return await self._keep(message, attempts, trouble)
        return Aftermath.BACKED_OFF

    def error_operation(self, message: DelayedMessage, error: Exception) -> TransportOperation:
        """Return the send that moves the message to the error queue, with headers that say why (reference 1.9).

        Its `NServiceBus.FailedQ` is the destination, so that a retry sends it on its way. Headers that cannot be
        read are sent as they are.
        """
        host = self._host
        try:
            moved = message.message.logical.with_headers(
                failure_headers(error, message.destination, host.endpoint_name, host.clock.now())
            )
        except CorruptHeaders:
            moved = message.message
        return TransportOperation(moved, host.error_queue)

    def moved(self, message: DelayedMessage, error: Exception) -> None:
        """Log that the message is in the error queue for good."""
        emit(
            logger,
            logging.WARNING,
            Event.MOVED_TO_ERROR,
            "Moved delayed message %s to error queue %r: %s",
            message.id,
            self._host.error_queue,
            error,
            message=message,
        )

    async def _move_to_error(self, message: DelayedMessage, error: Exception) -> None:
        operation = self.error_operation(message, error)
        if self._transaction is None:
            # Forward first, remove second: a crash between doubles the message, it does not lose it (reference H1).
            await self._host.transport.dispatch([operation])
            await self._store.remove_many([message])
        else:
            async with self._transaction() as transaction:
                if await self._store.remove_many([message], transaction) == 0:
                    return
                await self._host.transport.dispatch([operation], transaction)
        self.moved(message, error)

    async def _back_off(self, message: DelayedMessage, attempts: int) -> None:
        until = self._host.clock.now() + back_off(attempts)
        await self._store.retry_many([message], until)
        emit(
            logger,
            logging.INFO,
            Event.BACKED_OFF,
            "Delayed message %s is tried again at %s",
            message.id,
            until,
            message=message,
            until=until,
        )

    async def _keep(self, message: DelayedMessage, attempts: int, trouble: Exception) -> Aftermath:
        emit(
            logger,
            logging.ERROR,
            Event.ERROR_MOVE_FAILED,
            "Failed to move delayed message %s to the error queue %r after %d failed attempts at dispatching it to "
            "the destination; it stays stored",
            message.id,
            self._host.error_queue,
            attempts,
            exception=trouble,
            message=message,
        )
        self._failure_rate.failure(trouble)
        try:
            await self._back_off(message, attempts)
        except Exception as worse:
            self._failure_rate.failure(worse)
            return Aftermath.STUCK
        return Aftermath.BACKED_OFF
