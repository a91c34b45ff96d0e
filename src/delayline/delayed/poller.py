"""The poller: wake when something is due, fetch it, dispatch it, remove it, sleep until the next due time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import first_of
from delayline.delayed.recovery import Aftermath
from delayline.delayed.store import ForwardingStore
from delayline.errors import BackendUnavailable, CorruptHeaders, DispatchFailed, QueueNotFound, StorageFull
from delayline.events import Event, emit
from delayline.message import Headers
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.recovery import Recovery
    from delayline.delayed.store import Forwarded
    from delayline.message import DelayedMessage, Message
    from delayline.transaction import Transaction

logger = logging.getLogger(__name__)

MAXIMUM_SLEEP: Final = timedelta(seconds=60)  # reference 1.8
#: How long to leave messages alone that are due but locked by somebody else (reference H5).
LOCKED_ELSEWHERE: Final = timedelta(milliseconds=50)

Failures = list[tuple["DelayedMessage", Exception]]


class Poller:
    """Moves due messages from the store to their destinations, strictly in the order of their due times.

    With `transaction` a batch is fetched, dispatched and removed in one; without it the store's locks hold the batch
    and each message is removed after it was sent. Belongs to one event loop.
    """

    def __init__(
        self,
        store: PolledStore,
        host: DeliveryHost,
        *,
        recovery: Recovery,
        transaction: Callable[[], Transaction] | None,
        fetch_breaker: RepeatedFailuresOverTime,
        dispatch_breaker: RepeatedFailuresOverTime,
        batch_size: int,
        batch_bytes: int,
    ) -> None:
        self._store = store
        self._host = host
        self._clock = host.clock
        self._recovery = recovery
        self._transaction = transaction
        self._fetch_breaker = fetch_breaker
        self._dispatch_breaker = dispatch_breaker
        self._batch_size = batch_size
        self._batch_bytes = batch_bytes
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._wakes_at: datetime | None = None
        self._task: asyncio.Task[None] | None = None
        self._isolating = 0
        inside = transaction is not None and isinstance(store, ForwardingStore) and store.forwards_to(host.transport)
        self._looked_ahead: Forwarded | None = None
        self._forwarding = store if inside and isinstance(store, ForwardingStore) else None
        self._sent: Sequence[DelayedMessage] = ()

    def start(self) -> None:
        """Begin polling on the running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"delayline poller {self._host.endpoint_name}")

    async def stop(self) -> None:
        """Finish the batch in flight, then return. Idempotent."""
        self._stopping.set()
        self._woken.set()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None

    def signal(self, due: datetime) -> None:
        """Wake up if `due` is earlier than what the poller sleeps for. Never blocks; signals coalesce."""
        if self._wakes_at is None or due < self._wakes_at:
            self._woken.set()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.is_set():
                self._looked_ahead = None
            self._woken.clear()
            self._wakes_at = None
            try:
                await self._poll()
            except Exception as error:
                await self._fetch_failed(error)
        await self._remove_sent()

    async def _poll(self) -> None:
        if not await self._remove_sent():
            return
        looked, self._looked_ahead = self._looked_ahead, None
        due = await self._store.next_due() if looked is None else looked.next_due
        now = self._clock.now()
        if due is not None and due <= now:
            if await self._dispatch_due(now) == 0:
                await self._sleep_until(now + LOCKED_ELSEWHERE)
        else:
            self._isolating = 0
            self._fetch_breaker.success()
            latest = now + MAXIMUM_SLEEP
            await self._sleep_until(latest if due is None else min(due, latest))

    async def _dispatch_due(self, now: datetime) -> int:
        """Move one batch and return its size; whatever goes wrong with it is dealt with here."""
        if self._forwarding is not None and not self._isolating and (moved := await self._forward_inside(now)):
            return moved
        limit = 1 if self._isolating else self._batch_size
        batch: Sequence[DelayedMessage] = ()
        failures: Failures = []
        try:
            async with self._scope() as transaction:
                batch = await self._fetch(now, limit, transaction)
                if batch:
                    failures = await self._forward(batch, transaction)
        except Exception as error:
            if not batch:
                raise
            await self._batch_failed(batch, error)
            return len(batch)
        self._isolating = max(0, self._isolating - len(batch))
        await self._messages_failed(failures)
        return len(batch)

    async def _forward_inside(self, now: datetime) -> int:
        """Let the store move a batch by itself; where that fails the ordinary way finds out whose fault it is."""
        if self._forwarding is None:
            return 0
        try:
            forwarded = await self._forwarding.forward_due(now, self._batch_size, max_bytes=self._batch_bytes)
        except BackendUnavailable as error:
            await self._outage(error, self._batch_size)
            return 1
        except Exception as error:
            self._isolating = self._batch_size
            text = "Failed to move due messages inside the store: %s"
            emit(logger, logging.ERROR, Event.DISPATCH_FAILED, text, error, exception=error)
            return 0
        if forwarded.number:
            self._looked_ahead = forwarded
            self._fetch_breaker.success()
            self._dispatch_breaker.success()
            text = "moved %d messages inside the store"
            emit(logger, logging.DEBUG, Event.DISPATCHED, text, forwarded.number, count=forwarded.number)
        return forwarded.number

    def _scope(self) -> AbstractAsyncContextManager[Transaction | None]:
        return contextlib.nullcontext() if self._transaction is None else self._transaction()

    async def _fetch(self, now: datetime, limit: int, transaction: Transaction | None) -> Sequence[DelayedMessage]:
        batch = await self._store.fetch_due(now, limit, max_bytes=self._batch_bytes, transaction=transaction)
        self._fetch_breaker.success()
        if batch:
            emit(logger, logging.DEBUG, Event.FETCHED, "fetched %d due messages", len(batch), messages=batch)
        return batch

    async def _forward(self, batch: Sequence[DelayedMessage], transaction: Transaction | None) -> Failures:
        """Dispatch and remove the batch; return the messages that could not be sent and are still stored."""
        failures = await self._send(batch, transaction)
        missing = [failure for failure in failures if isinstance(failure[1], QueueNotFound)]
        if missing:
            failures = [failure for failure in failures if not isinstance(failure[1], QueueNotFound)]
            failures += await self._send_to_error_queue(missing, transaction)
        kept = {id(message) for message, _ in failures}
        sent = [message for message in batch if id(message) not in kept]
        if sent:
            text = "dispatched %d messages"
            emit(logger, logging.DEBUG, Event.DISPATCHED, text, len(sent), messages=sent, count=len(sent))
            if transaction is None:
                self._dispatch_breaker.success()
                self._sent = sent
                await self._remove_sent()
            else:
                transaction.after_commit(self._dispatch_breaker.success)
                await self._remove(sent, transaction)
        return failures

    async def _send(self, batch: Sequence[DelayedMessage], transaction: Transaction | None) -> Failures:
        operations = [TransportOperation(_as_sent(message.message), message.destination) for message in batch]
        try:
            await self._host.transport.dispatch(operations, transaction)
        except DispatchFailed as failed:
            return [(batch[position], error) for position, error in failed.failures.items()]
        return []

    async def _send_to_error_queue(self, missing: Failures, transaction: Transaction | None) -> Failures:
        operations = [self._recovery.error_operation(message, error) for message, error in missing]
        try:
            await self._host.transport.dispatch(operations, transaction)
        except DispatchFailed as failed:
            return [missing[position] for position in failed.failures]
        except Exception:
            if transaction is None:
                return missing  # the others were sent already: recovery deals with these alone
            raise
        for message, error in missing:
            moved = functools.partial(self._recovery.moved, message, error)
            moved() if transaction is None else transaction.after_commit(moved)
        return []

    async def _remove(self, sent: Sequence[DelayedMessage], transaction: Transaction | None) -> None:
        removed = await self._store.remove_many(sent, transaction)
        if removed < len(sent):
            emit(
                logger,
                logging.WARNING,
                Event.ALREADY_REMOVED,
                "Potential more-than-once dispatch as delayed message already removed from storage. (%d of %d)",
                len(sent) - removed,
                len(sent),
                messages=sent,
            )
        emit(logger, logging.DEBUG, Event.REMOVED, "removed %d messages", removed, messages=sent)

    async def _remove_sent(self) -> bool:
        """Remove what was sent without a transaction; until that works nothing else is sent (reference H7)."""
        if not self._sent:
            return True
        try:
            await self._remove(self._sent, None)
        except Exception as error:
            text = "Failed to remove %d dispatched messages: %s"
            emit(
                logger,
                logging.ERROR,
                Event.REMOVE_FAILED,
                text,
                len(self._sent),
                error,
                exception=error,
                messages=self._sent,
            )
            await self._pause(self._dispatch_breaker.failure(error))
            return False
        self._sent = ()
        self._dispatch_breaker.success()
        return True

    async def _batch_failed(self, batch: Sequence[DelayedMessage], error: Exception) -> None:
        """Decide whose fault it was: the back end's, one message's, or, not known yet, of one among several."""
        if len(batch) > 1 or isinstance(error, BackendUnavailable):
            if self._transaction is None:
                await self._release(batch)
        else:
            self._isolating = max(0, self._isolating - 1)
            await self._messages_failed([(batch[0], error)])
            return
        if isinstance(error, BackendUnavailable):
            await self._outage(error, len(batch))
        else:
            self._isolating = len(batch)

    async def _outage(self, error: BackendUnavailable, size: int) -> None:
        """Wait on the breaker and count nobody; where space is short go on in small steps, as far as it reaches."""
        emit(logger, logging.ERROR, Event.DISPATCH_FAILED, "Failure during polling: %s", error, exception=error)
        if isinstance(error, StorageFull):
            self._isolating = size
        await self._pause(self._dispatch_breaker.failure(error))

    async def _release(self, batch: Sequence[DelayedMessage]) -> None:
        try:
            await self._store.release_many(batch)
        except Exception as error:
            await self._fetch_failed(error)

    async def _messages_failed(self, failures: Failures) -> None:
        """Recover each; an outage counts against none of them, and what cannot even be counted is not hammered."""
        pause: Exception | None = None
        unavailable = [message for message, error in failures if isinstance(error, BackendUnavailable)]
        for message, error in failures:
            if isinstance(error, BackendUnavailable):
                pause = error
                continue
            aftermath = await self._recovery.failed(message, error)
            if aftermath is Aftermath.MOVED:
                self._dispatch_breaker.success()
                continue
            if aftermath is Aftermath.STUCK:
                pause = error
        if unavailable and self._transaction is None:
            await self._release(unavailable)
        if pause is not None:
            await self._pause(self._dispatch_breaker.failure(pause))

    async def _fetch_failed(self, error: Exception) -> None:
        emit(
            logger,
            logging.ERROR,
            Event.FETCH_FAILED,
            "Failed to poll and dispatch due timeouts from storage: %s",
            error,
            exception=error,
        )
        await self._pause(self._fetch_breaker.failure(error))

    async def _sleep_until(self, wake_at: datetime) -> None:
        self._wakes_at = wake_at
        seconds = (wake_at - self._clock.now()).total_seconds()
        if seconds > 0 and not self._woken.is_set():
            emit(logger, logging.DEBUG, Event.SLEEPS, "sleeps until %s", wake_at, until=wake_at)
            await first_of(self._woken.wait(), self._clock.sleep(seconds))
            emit(logger, logging.DEBUG, Event.WOKE, "woke")

    async def _pause(self, wait: Coroutine[None, None, None]) -> None:
        await first_of(self._stopping.wait(), wait)


def _as_sent(message: Message) -> Message:
    if Headers.DISPATCH_PROPERTIES.encode() not in message.encoded_headers:
        return message  # as good as always, and nothing is parsed
    try:
        return message.with_headers({}, without=(Headers.DISPATCH_PROPERTIES,))
    except CorruptHeaders:
        return message
