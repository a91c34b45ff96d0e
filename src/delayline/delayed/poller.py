"""The poller: sleep until the next due time, then fetch the due messages, dispatch them and remove them.

::

      start
        |
        v          a message is due                        dispatched and removed
    +--------+ ----------------------> +-----------------+ -----------------------> back to LOOK
    |  LOOK  |                         | MOVE            |
    | ask for| <---------------------- | a batch: in the |
    | the    |   all due messages are  | database, or    | -- several failed --> MOVE SINGLY, as many
    | next   |   locked elsewhere:     | fetch, dispatch,|                       as the batch had
    | due    |   again in 50 ms        | remove          | -- sent, not removed -> REMOVE, before
    | time   |                         +-----------------+                         any other move
    +--------+                            |
      ^    | nothing is due              | back end away: the breaker counts, no message does
      |    v                             v
      |  SLEEP until the next          PAUSE, longer with each failure, then back to LOOK
      |  due time, 60 s at most
      +---- woken by the time, by a notification of an earlier message, or by stop()

One bad message delays no other: a batch that fails as a whole is moved again message by message, and the message that
fails then is counted and backs off alone (`recovery`).
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import first_of
from delayline.delayed.batch import Batch
from delayline.errors import BackendUnavailable, StorageFull
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from datetime import datetime

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.delayed.batch import Mover
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.store import Forwarded, SupportsForwarding
    from delayline.message import DelayedMessage

logger = logging.getLogger(__name__)

#: Notifications may get lost: a message stored by another process is found after this time at the latest.
MAXIMUM_SLEEP: Final = timedelta(seconds=60)
#: Pause while all due messages are locked by other processes; without one the poller would query in a tight loop.
LOCKED_ELSEWHERE: Final = timedelta(milliseconds=50)


class Poller:
    """Moves due messages from a store to their destinations, in the order of their due times.

    Belongs to one event loop.

    Args:
        mover: Fetches, dispatches and removes messages.
        forwarding: The store, where it can move messages to their queues inside the database; `mover` moves the rest.
        maximum_sleep: The longest time without a look at the store.
    """

    def __init__(
        self,
        store: PolledStore,
        host: DeliveryHost,
        *,
        mover: Mover,
        forwarding: SupportsForwarding | None,
        fetch_breaker: RepeatedFailuresOverTime,
        dispatch_breaker: RepeatedFailuresOverTime,
        batch_size: int,
        batch_bytes: int,
        maximum_sleep: timedelta = MAXIMUM_SLEEP,
    ) -> None:
        self._store = store
        self._host = host
        self._clock = host.clock
        self._mover = mover
        self._forwarding = forwarding
        self._fetch_breaker = fetch_breaker
        self._dispatch_breaker = dispatch_breaker
        self._batch_size = batch_size
        self._batch_bytes = batch_bytes
        self._maximum_sleep = maximum_sleep
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._wakes_at: datetime | None = None
        self._task: asyncio.Task[None] | None = None
        #: How many messages of a failed batch are still to be moved one at a time.
        self._singles_left = 0
        #: Whether the next batch is fetched although the store can move messages: one of them needs the poller.
        self._bypass_forwarding = False
        #: The last move in the database, whose `next_due` saves a query.
        self._forwarded: Forwarded | None = None

    def start(self) -> None:
        """Start polling on the running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"delayline poller {self._host.endpoint_name}")

    async def stop(self) -> None:
        """Finish the batch in flight, then return. Idempotent."""
        self._stopping.set()
        self._woken.set()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None

    def signal(self, due: datetime) -> None:
        """Wake the poller if `due` is earlier than the end of its sleep. Never blocks; signals coalesce."""
        if self._wakes_at is None or due < self._wakes_at:
            self._woken.set()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.is_set():
                self._forwarded = None
            self._woken.clear()
            self._wakes_at = None
            try:
                await self._poll()
            except Exception as error:
                await self._fetch_failed(error)
        await self._return_prefetched()
        await self._remove_sent()

    async def _poll(self) -> None:
        if not await self._remove_sent():
            return
        if self._mover.has_prefetched and await self._dispatch_due(self._clock.now()):
            return
        forwarded, self._forwarded = self._forwarded, None
        due = await self._store.next_due() if forwarded is None else forwarded.next_due
        now = self._clock.now()
        if due is not None and due <= now:
            if await self._dispatch_due(now) == 0:
                await self._sleep_until(now + LOCKED_ELSEWHERE)
        else:
            self._singles_left = 0
            self._fetch_breaker.success()
            latest = now + self._maximum_sleep
            await self._sleep_until(latest if due is None else min(due, latest))

    async def _dispatch_due(self, now: datetime) -> int:
        """Move one batch and return its size; failures of the batch are handled here."""
        if not (self._singles_left or self._bypass_forwarding) and (moved := await self._forward_in_database(now)):
            return moved
        self._bypass_forwarding = False
        batch = Batch()
        try:
            await self._mover.move(batch, now, 1 if self._singles_left else self._batch_size)
            self._singles_left = max(0, self._singles_left - len(batch.messages))
        except Exception as error:
            if not batch.messages:
                raise
            batch = Batch(batch.messages, kept=batch.kept)
            await self._batch_failed(batch, error)
        self._fetch_breaker.success()
        if batch.sent:
            self._dispatch_breaker.success()
        if batch.kept or batch.backend_error is not None or self._singles_left:
            await self._return_prefetched()
        await self._release(batch.kept)
        if batch.backend_error is not None:
            await self._pause(self._dispatch_breaker.failure(batch.backend_error))
        return len(batch.messages)

    async def _forward_in_database(self, now: datetime) -> int:
        """Move a batch inside the database and return its size; after an error other than an outage move singly."""
        if self._forwarding is None:
            return 0
        try:
            forwarded = await self._forwarding.forward_due(now, self._batch_size, max_bytes=self._batch_bytes)
        except BackendUnavailable as error:
            self._outage(error, self._batch_size)
            await self._pause(self._dispatch_breaker.failure(error))
            return 1
        except Exception as error:
            self._singles_left = self._batch_size
            text = "Failed to move due messages inside the store: %s"
            emit(logger, logging.ERROR, Event.DISPATCH_FAILED, text, error, exception=error)
            return 0
        if forwarded.number:
            self._forwarded = forwarded
            self._bypass_forwarding = forwarded.left > 0
            self._fetch_breaker.success()
            self._dispatch_breaker.success()
            if logger.isEnabledFor(logging.DEBUG):
                text = "moved %d messages inside the store"
                emit(logger, logging.DEBUG, Event.DISPATCHED, text, forwarded.number, count=forwarded.number)
        return forwarded.number

    async def _batch_failed(self, batch: Batch, error: Exception) -> None:
        """Blame the back end, the only message, or, for a batch of several, find the message by moving them singly."""
        if self._mover.unremoved:
            self._singles_left = max(0, self._singles_left - len(batch.messages))
            self._remove_failed(error)
            batch.backend_error = error
        elif isinstance(error, BackendUnavailable):
            self._outage(error, len(batch.messages))
            batch.kept, batch.backend_error = list(batch.messages), error
        elif len(batch.messages) > 1:
            batch.kept = list(batch.messages)
            self._singles_left = len(batch.messages)
        else:
            self._singles_left = max(0, self._singles_left - 1)
            await self._mover.recover(batch, error)

    async def _remove_sent(self) -> bool:
        """Remove the messages sent before, and return whether that worked.

        Until it does nothing else is sent: an unremoved message is still due, and would be sent again in each round.
        """
        if not self._mover.unremoved:
            return True
        try:
            await self._mover.remove_sent()
        except Exception as error:
            self._remove_failed(error)
            await self._pause(self._dispatch_breaker.failure(error))
            return False
        self._dispatch_breaker.success()
        return True

    def _remove_failed(self, error: Exception) -> None:
        sent = tuple(self._mover.unremoved)
        text = "Failed to remove %d dispatched messages: %s"
        self._dispatch_breaker.log_failure(
            logger, logging.ERROR, Event.REMOVE_FAILED, text, len(sent), error, exception=error, messages=sent
        )

    def _outage(self, error: BackendUnavailable, size: int) -> None:
        """Log an outage; no message's attempt is counted. On a full disk the messages are then moved one at a time."""
        text = "Failure during polling: %s"
        self._dispatch_breaker.log_failure(logger, logging.ERROR, Event.DISPATCH_FAILED, text, error, exception=error)
        if isinstance(error, StorageFull):
            self._singles_left = size

    async def _return_prefetched(self) -> None:
        """Return a prefetched batch: the next one may be another."""
        try:
            await self._mover.return_prefetched()
            await self._mover.release(())
        except Exception as error:
            await self._fetch_failed(error)

    async def _release(self, messages: Sequence[DelayedMessage]) -> None:
        try:
            await self._mover.release(messages)
        except Exception as error:
            await self._fetch_failed(error)

    async def _fetch_failed(self, error: Exception) -> None:
        self._fetch_breaker.log_failure(
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
            if logger.isEnabledFor(logging.DEBUG):
                emit(logger, logging.DEBUG, Event.SLEEPS, "sleeps until %s", wake_at, until=wake_at)
            await first_of(self._woken.wait(), self._clock.sleep(seconds))
            if logger.isEnabledFor(logging.DEBUG):
                emit(logger, logging.DEBUG, Event.WOKE, "woke")

    async def _pause(self, wait: Coroutine[None, None, None]) -> None:
        await first_of(self._stopping.wait(), wait)
