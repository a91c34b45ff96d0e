"""Recovery of messages that could not be dispatched: count and back off, or move to the error queue."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from delayline.delayed.set_aside import Reason, SetAside
from delayline.delayed.store import SupportsJournal
from delayline.errors import BackendUnavailable, DispatchFailed, InvalidMessage, QueueNotFound
from delayline.events import Event, emit
from delayline.failures import as_shown, back_off, brief, error_operations, may_fit_smaller
from delayline.observer import Action
from delayline.transaction import is_unusable, savepoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from delayline.circuit_breaker import FailureRate
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.mover import Batch, BatchScope
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation

logger: logging.Logger = logging.getLogger(__name__)

Failures = list[tuple["DelayedMessage", Exception]]


class Recovery:
    """Recovers failed messages in the transaction of their batch; the other messages of the batch are not delayed."""

    def __init__(
        self,
        store: PolledStore,
        host: DeliveryHost,
        *,
        number_of_retries: int,
        scope: BatchScope,
        failure_rate: FailureRate,
        aside: SetAside | None = None,
    ) -> None:
        self._store = store
        self._host = host
        self._number_of_retries = number_of_retries
        self._scope = scope
        self._failure_rate = failure_rate
        self._aside = SetAside() if aside is None else aside
        self._observer = host.observers.all

    @property
    def now(self) -> datetime:
        """The present time of the endpoint's clock."""
        return self._host.clock.now()

    async def recover(self, batch: Batch, failures: Failures, transaction: Transaction | None) -> None:
        """Count each failed attempt, or move its message to the error queue and add it to `batch.sent`.

        An outage is not counted as an attempt. A message whose recovery fails stays in the store, and the failure is
        logged and counted. Raises only errors after which `transaction` is unusable.
        """
        given_up: Failures = []
        for message, error in failures:
            if self._scope.blames_back_end(error):
                batch.kept.append(message)
                batch.backend_error = error
            elif isinstance(error, QueueNotFound):
                given_up.append((message, error))
            else:
                last = message.number_of_retries >= self._number_of_retries
                self._log_failed(message, error, last=last)
                if last:
                    given_up.append((message, error))
                else:
                    await self._back_off(batch, message, error, transaction)
        if given_up:
            await self._give_up(batch, given_up, transaction)

    async def keep(
        self, batch: Batch, message: DelayedMessage, failure: Exception, transaction: Transaction | None
    ) -> None:
        """Back off a message that could not be moved to the error queue."""
        self._log_recovery_failure(
            "Failed to move delayed message %s to the error queue %r after %d failed attempts at dispatching it to "
            "the destination; it stays stored",
            message.id,
            self._host.error_queue,
            message.number_of_retries + 1,
            message=message,
            failure=failure,
        )
        await self._back_off(batch, message, failure, transaction)

    async def _back_off(
        self, batch: Batch, message: DelayedMessage, error: Exception, transaction: Transaction | None
    ) -> None:
        until = self._host.clock.now() + back_off(message.number_of_retries + 1)
        try:
            async with savepoint(transaction):
                await self._store.retry_many([message], until, transaction)
        except Exception as failure:
            if is_unusable(transaction, failure):
                raise
            log_text = "Failed to count a failed attempt to forward delayed message %s: %s"
            self._log_recovery_failure(log_text, message.id, failure, message=message, failure=failure)
            if isinstance(failure, BackendUnavailable):
                batch.kept.append(message)
                batch.backend_error = failure
            else:
                self._aside.add_failed(message, Reason.BACKS_OFF, self.now)
            return
        _after_commit(transaction, partial(self._log_backed_off, message, until))
        self._report(Action.BACKED_OFF, message, error, transaction)

    async def _give_up(self, batch: Batch, failures: Failures, transaction: Transaction | None) -> None:
        """Move messages to the error queue in a single dispatch; too large messages alone, in ever smaller forms."""
        sending = self._scope.of_dispatch(transaction)
        forms = [self._forms(message, error) for message, error in failures]
        unsent = await self._send([next(form) for form in forms], sending)
        alone = [position for position in unsent if len(failures) > 1 and may_fit_smaller(unsent[position])]
        for position in alone:
            await self._give_up(batch, [failures[position]], transaction)
        if len(failures) == 1:
            while unsent and may_fit_smaller(unsent[0]) and (smaller := next(forms[0], None)) is not None:
                unsent = await self._send([smaller], sending)
        for position, (message, error) in enumerate(failures):
            if position in alone:
                continue
            if position in unsent:
                await self.keep(batch, message, unsent[position], transaction)
            else:
                batch.sent.append(message)
                if isinstance(self._store, SupportsJournal):
                    self._store.journal.gave_up([message])
                _after_commit(sending, partial(self._log_moved, message, error))
                self._report(Action.MOVED, message, error, sending)

    async def _send(
        self, operations: Sequence[TransportOperation], transaction: Transaction | None
    ) -> Mapping[int, Exception]:
        """Dispatch, and return the failures by position; raises only errors after which `transaction` is unusable."""
        try:
            async with savepoint(transaction):
                try:
                    await self._host.transport.dispatch(operations, transaction)
                except DispatchFailed as failed:
                    return failed.failures
        except Exception as failure:
            if is_unusable(transaction, failure):
                raise
            return dict.fromkeys(range(len(operations)), failure)
        return {}

    def _report(
        self, action: Action, message: DelayedMessage, error: Exception, transaction: Transaction | None
    ) -> None:
        if self._observer is not None:
            recovered = partial(self._observer.recovered, action, message.destination, message.message, error)
            _after_commit(transaction, recovered)

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

    def _log_failed(self, message: DelayedMessage, error: Exception, *, last: bool) -> None:
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

    def _log_backed_off(self, message: DelayedMessage, until: datetime) -> None:
        log_text = "Delayed message %s is tried again at %s"
        emit(logger, logging.INFO, Event.BACKED_OFF, log_text, message.id, until, message=message, until=until)

    def _log_moved(self, message: DelayedMessage, error: Exception) -> None:
        message = replace(message, message=as_shown(message.message))
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

    def _log_recovery_failure(self, text: str, *values: object, message: DelayedMessage, failure: Exception) -> None:
        emit(logger, logging.ERROR, Event.ERROR_MOVE_FAILED, text, *values, exception=failure, message=message)
        if not isinstance(failure, InvalidMessage):  # the fault of this message alone must not stop the endpoint
            self._failure_rate.failure(failure)


def _after_commit(transaction: Transaction | None, callback: Callable[[], None]) -> None:
    callback() if transaction is None else transaction.after_commit(callback)
