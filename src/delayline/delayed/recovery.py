"""A due message could not be forwarded: count it and back off, or move it to the error queue. It is never lost."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from delayline.delayed.scope import savepoint, spoilt
from delayline.delayed.store import SupportsJournal
from delayline.errors import BackendUnavailable, DispatchFailed, InvalidMessage, QueueNotFound
from delayline.events import Event, emit
from delayline.recoverability import back_off, brief, error_operations, may_fit_smaller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from delayline.circuit_breaker import FailureRate
    from delayline.delayed.batch import Batch
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.scope import Scope
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation

logger = logging.getLogger(__name__)

Failures = list[tuple["DelayedMessage", Exception]]


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
                last = message.number_of_retries >= self._number_of_retries
                self._tell_failed(message, error, last=last)
                if last:
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
        """Move messages to the error queue, together, or each by itself and in the form that fits where that fails."""
        sending = self._scope.of_dispatch(transaction)
        forms = [self._forms(message, error) for message, error in failures]
        unsent = await self._send([next(form) for form in forms], sending)
        apart = [position for position in unsent if len(failures) > 1 and may_fit_smaller(unsent[position])]
        for position in apart:
            await self._give_up(batch, [failures[position]], transaction)
        if len(failures) == 1:
            while unsent and may_fit_smaller(unsent[0]) and (smaller := next(forms[0], None)) is not None:
                unsent = await self._send([smaller], sending)
        for position, (message, error) in enumerate(failures):
            if position in apart:
                continue
            if position in unsent:
                await self.keep(batch, message, unsent[position], transaction)
            else:
                batch.sent.append(message)
                if isinstance(self._store, SupportsJournal):
                    self._store.gave_up([message])
                _when_certain(sending, partial(self._tell_moved, message, error))

    async def _send(
        self, operations: Sequence[TransportOperation], transaction: Transaction | None
    ) -> Mapping[int, Exception]:
        """Send, and return why which of them were not sent; raises only what spoils the transaction."""
        try:
            async with savepoint(transaction):
                try:
                    await self._host.transport.dispatch(operations, transaction)
                except DispatchFailed as failed:
                    return failed.failures
        except Exception as trouble:
            if spoilt(transaction, trouble):
                raise
            return dict.fromkeys(range(len(operations)), trouble)
        return {}

    def _forms(self, message: DelayedMessage, error: Exception) -> Iterator[TransportOperation]:
        host = self._host
        return error_operations(
            message.message,
            error,
            failed_queue=message.destination,
            error_queue=host.error_queue,
            endpoint_name=host.endpoint_name,
            now=host.clock.now(),
        )

    def _tell_failed(self, message: DelayedMessage, error: Exception, *, last: bool) -> None:
        emit(
            logger,
            logging.ERROR,
            Event.DISPATCH_FAILED,
            "Attempt %d to forward delayed message %s to %r failed: %s",
            message.number_of_retries + 1,
            message.id,
            message.destination,
            brief(error),
            exception=error if last or logger.isEnabledFor(logging.DEBUG) else None,
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
            brief(error),
            message=message,
        )

    def _tell_trouble(self, text: str, *values: object, message: DelayedMessage, trouble: Exception) -> None:
        emit(logger, logging.ERROR, Event.ERROR_MOVE_FAILED, text, *values, exception=trouble, message=message)
        if not isinstance(trouble, InvalidMessage):  # a fault of this message alone stops no endpoint
            self._failure_rate.failure(trouble)


def _when_certain(transaction: Transaction | None, tell: Callable[[], None]) -> None:
    tell() if transaction is None else transaction.after_commit(tell)
