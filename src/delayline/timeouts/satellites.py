"""The two satellites of the timeout manager: the first stores timeouts, the second dispatches expired timeouts."""

from __future__ import annotations

import contextlib
import logging
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import first_of
from delayline.errors import BackendUnavailable, CorruptHeaders, DispatchFailed, InvalidMessage, QueueNotFound
from delayline.events import Event, emit
from delayline.failures import as_shown, error_operations
from delayline.message import DelayedMessage, Headers, TimeoutHeaders, from_wire_time, id_from, to_wire_time
from delayline.observer import Action
from delayline.timeouts.persister import NO_SAGA, SupportsTake, Timeout
from delayline.timeouts.poll import outgoing_message, requested_timeout
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.mover import BatchScope
    from delayline.message import Message
    from delayline.timeouts.persister import TimeoutPersister
    from delayline.transaction import Transaction

logger: logging.Logger = logging.getLogger(__name__)

#: A timeout due within this time is not stored: its message waits in memory and is sent when due, as in NServiceBus
#: (https://docs.particular.net/nservicebus/messaging/timeout-manager).
WITHOUT_STORAGE: Final = timedelta(seconds=1)
#: How long the poller skips a timeout whose dispatch failed: its request is retried, and ends in the error queue.
FAILED_LEASE: Final = timedelta(days=1)
TIMEOUT_ID_NAMESPACE: Final = uuid.UUID("0d4cf1c0-6f0e-4a57-9c5b-3d3f4b3f7b5c")


class Forwarder:
    """Sends messages to their destinations; a message that cannot be sent goes to the error queue at once."""

    def __init__(self, host: DeliveryHost) -> None:
        self._host = host

    async def forward(self, message: Message, destination: str | None, transaction: Transaction | None) -> None:
        """Send the message, in the transaction if there is any. Raises BackendUnavailable or the transport's error."""
        if not destination:
            no_destination = InvalidMessage(
                f"message {message.id!r} names no destination: set the header {TimeoutHeaders.DESTINATION}"
            )
            await self.move_to_errors(message, destination, no_destination, transaction)
            return
        try:
            await self._send(TransportOperation(message, destination), transaction)
        except (QueueNotFound, InvalidMessage) as error:
            await self.move_to_errors(message, destination, error, transaction)

    async def move_to_errors(
        self, message: Message, destination: str | None, error: Exception, transaction: Transaction | None
    ) -> None:
        """Send the message to the error queue; retried from there it goes to its destination."""
        host = self._host
        forms = error_operations(
            message,
            error,
            failed_queue=destination or host.endpoint_name,
            error_queue=host.error_queue,
            endpoint_name=host.endpoint_name,
            now=host.clock.now(),
        )
        operation = next(forms)
        while True:
            try:
                await self._send(operation, transaction)
                break
            except InvalidMessage:
                smaller = next(forms, None)
                if smaller is None:
                    raise
                operation = smaller
        log_text, shown = "Moved delayed message %s to error queue %r: %s", as_shown(message)
        emit(
            logger,
            logging.WARNING,
            Event.MOVED_TO_ERROR,
            log_text,
            shown.id,
            host.error_queue,
            error,
            message=DelayedMessage(shown, destination or "", host.clock.now()),
        )
        if (observer := host.observers.all) is not None:
            observer.recovered(Action.MOVED, destination or host.endpoint_name, message, error)

    async def _send(self, operation: TransportOperation, transaction: Transaction | None) -> None:
        try:
            await self._host.transport.dispatch([operation], transaction)
        except DispatchFailed as failed:
            raise failed.failures[0] from failed


class StoringSatellite:
    """Stores the messages of `{endpoint}.Timeouts`; forwards them when they are due or nearly so."""

    def __init__(
        self,
        host: DeliveryHost,
        persister: TimeoutPersister,
        *,
        breaker: RepeatedFailuresOverTime,
        stored: Callable[[datetime], None],
        stopping: asyncio.Event,
        waits: int,
    ) -> None:
        self._host = host
        self._persister = persister
        self._forwarder = Forwarder(host)
        self._breaker = breaker
        self._stored = stored
        self._stopping = stopping
        self._free_waits = waits

    async def prepare(self, message: Message, attempt: int) -> None:
        """Wait until a message due within a second is due, if a slot for waiting is free."""
        del attempt
        if TimeoutHeaders.CLEAR in message.headers or not self._free_waits:
            return
        due, clock = due_of(message), self._host.clock
        self._free_waits -= 1
        try:
            while not self._stopping.is_set() and timedelta(0) < (left := due - clock.now()) <= WITHOUT_STORAGE:
                await first_of(self._stopping.wait(), clock.sleep(left.total_seconds()))
        finally:
            self._free_waits += 1

    async def work(self, message: Message, transaction: Transaction | None) -> None:
        """Store the message, forward it if it is due, or clear a saga's timeouts."""
        saga_id = _saga_of(message)
        if TimeoutHeaders.CLEAR in message.headers:
            await self._clear(saga_id, transaction)
            return
        due, headers = due_of(message), message.headers
        destination = headers.get(TimeoutHeaders.DESTINATION) or headers.get(Headers.REPLY_TO)
        if due <= self._host.clock.now():
            await self._forwarder.forward(message, destination, transaction)
            return
        kept = message.with_headers({Headers.MESSAGE_ID: message.id})
        timeout = Timeout(_id_of(message, destination, due), kept, destination, due, saga_id)
        with self._counting_outages():
            await self._persister.add(timeout, transaction)
        self._breaker.success()
        if transaction is None:
            self._log_stored(timeout)
        else:
            transaction.after_commit(lambda: self._log_stored(timeout))

    async def _clear(self, saga_id: uuid.UUID, transaction: Transaction | None) -> None:
        if saga_id == NO_SAGA:
            raise InvalidMessage("Invalid saga id specified, clear timeouts is only supported for saga instances")
        with self._counting_outages():
            await self._persister.remove_by_saga(saga_id, transaction)

    def _log_stored(self, timeout: Timeout) -> None:
        delayed = DelayedMessage(timeout.message, timeout.destination or "", timeout.due)
        emit(logger, logging.DEBUG, Event.STORED, "stored %s due %s", timeout.id, timeout.due, messages=(delayed,))
        self._stored(timeout.due)

    @contextlib.contextmanager
    def _counting_outages(self) -> Iterator[None]:
        """Count an outage towards the critical error; the message stays in its queue meanwhile."""
        try:
            yield
        except BackendUnavailable as error:
            self._breaker.note(error)
            raise


class DispatchingSatellite:
    """Sends the timeouts that the messages of `{endpoint}.TimeoutsDispatcher` request."""

    def __init__(self, host: DeliveryHost, persister: TimeoutPersister, scope: BatchScope) -> None:
        self._host = host
        self._persister = persister
        self._scope = scope
        self._forwarder = Forwarder(host)

    async def prepare(self, message: Message, attempt: int) -> None:
        """Prolong the lease of a timeout whose dispatch failed, so that the poller does not request it again."""
        if attempt > 1 and (timeout_id := requested_timeout(message)) is not None:
            await self._persister.lease([timeout_id], self._host.clock.now() + FAILED_LEASE)

    async def work(self, message: Message, transaction: Transaction | None) -> None:
        """Forward the timeout, then remove it, in a transaction where possible. No-op if it is gone."""
        timeout_id = requested_timeout(message)
        if timeout_id is None:
            raise InvalidMessage(
                f"message {message.id!r} has no header {TimeoutHeaders.TIMEOUT_ID}: it requests no timeout"
            )
        async with self._locking(transaction) as locking:
            if locking is not None and isinstance(self._persister, SupportsTake):
                timeout = await self._persister.take(timeout_id, locking)
                if timeout is not None:
                    await self._forward(timeout, self._scope.of_dispatch(locking))
            else:
                timeout = await self._peek_and_remove(timeout_id, locking)
        if timeout is None:
            return
        delayed = DelayedMessage(timeout.message, timeout.destination or "", timeout.due)
        log_text = "dispatched timeout %s, %s after it was due"
        now = self._host.clock.now()
        late = now - timeout.due
        if (observer := self._host.observers.all) is not None:
            observer.dispatched({(delayed.destination, delayed.due): 1}, now)
        emit(logger, logging.DEBUG, Event.DISPATCHED, log_text, timeout_id, late, messages=(delayed,), count=1)

    async def _peek_and_remove(self, timeout_id: str, locking: Transaction | None) -> Timeout | None:
        timeout = await self._persister.peek(timeout_id, locking)
        if timeout is not None:
            await self._forward(timeout, self._scope.of_dispatch(locking))
            if not await self._persister.remove(timeout_id, locking):
                raise RuntimeError(f"timeout {timeout_id!r} was concurrently processed.")
        return timeout

    def _locking(self, transaction: Transaction | None) -> AbstractAsyncContextManager[Transaction | None]:
        return self._scope.open() if transaction is None else contextlib.nullcontext(transaction)

    async def _forward(self, timeout: Timeout, transaction: Transaction | None) -> None:
        try:
            message = outgoing_message(timeout, self._host.clock.now())
        except CorruptHeaders as error:
            await self._forwarder.move_to_errors(timeout.message, timeout.destination, error, transaction)
            return
        await self._forwarder.forward(message, timeout.destination, transaction)


def due_of(message: Message) -> datetime:
    """Return when the message is due. Raises InvalidMessage."""
    wire = message.headers.get(TimeoutHeaders.EXPIRE)
    if wire is None:
        raise InvalidMessage(f"Non timeout message arrived at the timeout manager, id:{message.id}")
    try:
        return from_wire_time(wire)
    except ValueError as error:
        raise InvalidMessage(f"message {message.id!r} has the header {TimeoutHeaders.EXPIRE}: {error}") from error


def _saga_of(message: Message) -> uuid.UUID:
    saga_id = message.headers.get(Headers.SAGA_ID)
    if not saga_id:
        return NO_SAGA
    try:
        return uuid.UUID(saga_id)
    except ValueError as error:
        raise InvalidMessage(
            f"message {message.id!r} has the header {Headers.SAGA_ID} = {saga_id!r}, not a GUID"
        ) from error


def _id_of(message: Message, destination: str | None, due: datetime) -> str:
    """Return an id that is the same for a redelivered message, so that storing it again changes nothing."""
    return id_from(TIMEOUT_ID_NAMESPACE, f"{message.id}\n{destination}\n{to_wire_time(due)}")
