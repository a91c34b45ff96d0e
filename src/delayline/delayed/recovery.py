"""A due message could not be forwarded: count it and back off, or move it to the error queue. It is never lost."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.delayed.scope import savepoint, spoilt
from delayline.delayed.store import JournaledStore
from delayline.errors import BackendUnavailable, DispatchFailed, QueueNotFound
from delayline.events import Event, emit
from delayline.recoverability import error_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from delayline.circuit_breaker import FailureRate
    from delayline.delayed.batch import Batch
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.scope import Scope
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction

logger = logging.getLogger(__name__)

Failures = list[tuple["DelayedMessage", Exception]]

FIRST_BACK_OFF: Final = timedelta(seconds=1)
LONGEST_BACK_OFF: Final = timedelta(seconds=60)


def back_off(attempts: int) -> timedelta:
    """Return how long a message waits after that many failed attempts: 1 s, doubling, 60 s at most."""
    return min(FIRST_BACK_OFF * (1 << min(attempts - 1, 6)), LONGEST_BACK_OFF)


class Recovery:
    """Decides what becomes of messages that failed, in their batch's transaction; other messages go on meanwhile."""

    def __init__(
        self,
        store: PolledStore,
        host: DeliveryHost,
        *,
        number_of_retries: int,
        scope: Scope,
        failure_rate: FailureRate,
    ) -> None:
        self._store = store
        self._host = host
        self._number_of_retries = number_of_retries
        self._scope = scope
        self._failure_rate = failure_rate

    async def recover(self, batch: Batch, failures: Failures, transaction: Transaction | None) -> None:
        """Count each failed attempt, or move its message to the error queue and add it to `batch.sent`.

        An outage counts against no message. An error in dealing with one is logged and counted, and its message stays
        stored; raises only what spoils `transaction`.
        """
        given_up: Failures = []
        for message, error in failures:
            if isinstance(error, BackendUnavailable):
                batch.kept.append(message)
                batch.trouble = error
            elif isinstance(error, QueueNotFound):
                given_up.append((message, error))
            else:
                self._tell_failed(message, error)
                if message.number_of_retries >= self._number_of_retries:
                    given_up.append((message, error))
                else:
                    await self._back_off(batch, message, transaction)
        if given_up:
            await self._give_up(batch, given_up, transaction)

    async def keep(
        self, batch: Batch, message: DelayedMessage, trouble: Exception, transaction: Transaction | None
    ) -> None:
        """Let a message back off that could not be moved to the error queue."""
        self._tell_trouble(
            "Failed to move delayed message %s to the error queue %r after %d failed attempts at dispatching it to "
            "the destination; it stays stored",
            message.id,
            self._host.error_queue,
            message.number_of_retries + 1,
            message=message,
            trouble=trouble,
        )
        await self._back_off(batch, message, transaction)

    async def _back_off(self, batch: Batch, message: DelayedMessage, transaction: Transaction | None) -> None:
        until = self._host.clock.now() + back_off(message.number_of_retries + 1)
        try:
            async with savepoint(transaction):
                await self._store.retry_many([message], until, transaction)
        except Exception as trouble:
            if spoilt(transaction, trouble):
                raise
            text = "Failed to count a failed attempt to forward delayed message %s: %s"
            self._tell_trouble(text, message.id, trouble, message=message, trouble=trouble)
            batch.kept.append(message)
            batch.trouble = trouble
            return
        _when_certain(transaction, partial(self._tell_backed_off, message, until))

    async def _give_up(self, batch: Batch, failures: Failures, transaction: Transaction | None) -> None:
        """Move messages to the error queue, together, or each by itself where that fails."""
        sending = self._scope.of_dispatch(transaction)
        try:
            async with savepoint(sending):
                unsent = await self._send_to_error_queue(failures, sending)
        except Exception as trouble:
            if spoilt(sending, trouble):
                raise
            if len(failures) > 1:
                for failure in failures:
                    await self._give_up(batch, [failure], transaction)
                return
            unsent = {0: trouble}
        for position, (message, error) in enumerate(failures):
            if position in unsent:
                await self.keep(batch, message, unsent[position], transaction)
            else:
                batch.sent.append(message)
                if isinstance(self._store, JournaledStore):
                    self._store.gave_up([message])
                _when_certain(sending, partial(self._tell_moved, message, error))

    async def _send_to_error_queue(
        self, failures: Failures, transaction: Transaction | None
    ) -> Mapping[int, Exception]:
        host = self._host
        operations = [
            error_operation(
                message.message,
                error,
                failed_queue=message.destination,
                error_queue=host.error_queue,
                endpoint_name=host.endpoint_name,
                now=host.clock.now(),
            )
            for message, error in failures
        ]
        try:
            await host.transport.dispatch(operations, transaction)
        except DispatchFailed as failed:
            return failed.failures
        return {}

    def _tell_failed(self, message: DelayedMessage, error: Exception) -> None:
        emit(
            logger,
            logging.ERROR,
            Event.DISPATCH_FAILED,
            "Attempt %d to forward delayed message %s to %r failed: %s",
            message.number_of_retries + 1,
            message.id,
            message.destination,
            error,
            exception=error,
            message=message,
        )

    def _tell_backed_off(self, message: DelayedMessage, until: datetime) -> None:
        text = "Delayed message %s is tried again at %s"
        emit(logger, logging.INFO, Event.BACKED_OFF, text, message.id, until, message=message, until=until)

    def _tell_moved(self, message: DelayedMessage, error: Exception) -> None:
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

    def _tell_trouble(self, text: str, *values: object, message: DelayedMessage, trouble: Exception) -> None:
        emit(logger, logging.ERROR, Event.ERROR_MOVE_FAILED, text, *values, exception=trouble, message=message)
        self._failure_rate.failure(trouble)


def _when_certain(transaction: Transaction | None, tell: Callable[[], None]) -> None:
    tell() if transaction is None else transaction.after_commit(tell)
