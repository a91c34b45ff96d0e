"""The poller: wake when something is due, fetch it, dispatch it, remove it, sleep until the next due time."""

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

MAXIMUM_SLEEP: Final = timedelta(seconds=60)  # reference 1.8
#: How long to leave messages alone that are due but locked by somebody else (reference H5).
LOCKED_ELSEWHERE: Final = timedelta(milliseconds=50)


class Poller:
    """Moves due messages from the store to their destinations, strictly in the order of their due times.

    With `forwarding` the store moves what it can by itself; `mover` moves the rest. Belongs to one event loop.
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
        self._isolating = 0
        self._by_hand = False
        self._looked_ahead: Forwarded | None = None

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
        await self._give_back_ahead()
        await self._remove_sent()

    async def _poll(self) -> None:
        if not await self._remove_sent():
            return
        if self._mover.is_ahead and await self._dispatch_due(self._clock.now()):
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
            latest = now + self._maximum_sleep
            await self._sleep_until(latest if due is None else min(due, latest))

    async def _dispatch_due(self, now: datetime) -> int:
        """Move one batch and return its size; whatever goes wrong with it is dealt with here."""
        if not (self._isolating or self._by_hand) and (moved := await self._forward_inside(now)):
            return moved
        self._by_hand = False
        batch = Batch()
        try:
            await self._mover.move(batch, now, 1 if self._isolating else self._batch_size)
            self._isolating = max(0, self._isolating - len(batch.messages))
        except Exception as error:
            if not batch.messages:
                raise
            batch = Batch(batch.messages, kept=batch.kept)
            await self._batch_failed(batch, error)
        self._fetch_breaker.success()
        if batch.sent:
            self._dispatch_breaker.success()
        if batch.kept or batch.trouble is not None or self._isolating:
            await self._give_back_ahead()
        await self._release(batch.kept)
        if batch.trouble is not None:
            await self._pause(self._dispatch_breaker.failure(batch.trouble))
        return len(batch.messages)

    async def _forward_inside(self, now: datetime) -> int:
        """Let the store move a batch by itself; where that fails the ordinary way finds out whose fault it is."""
        if self._forwarding is None:
            return 0
        try:
            forwarded = await self._forwarding.forward_due(now, self._batch_size, max_bytes=self._batch_bytes)
        except BackendUnavailable as error:
            self._outage(error, self._batch_size)
            await self._pause(self._dispatch_breaker.failure(error))
            return 1
        except Exception as error:
            self._isolating = self._batch_size
            text = "Failed to move due messages inside the store: %s"
            emit(logger, logging.ERROR, Event.DISPATCH_FAILED, text, error, exception=error)
            return 0
        if forwarded.number:
            self._looked_ahead = forwarded
            self._by_hand = forwarded.left > 0
            self._fetch_breaker.success()
            self._dispatch_breaker.success()
            text = "moved %d messages inside the store"
            emit(logger, logging.DEBUG, Event.DISPATCHED, text, forwarded.number, count=forwarded.number)
        return forwarded.number

    async def _batch_failed(self, batch: Batch, error: Exception) -> None:
        """Decide whose fault it was: the back end's, one message's, or, not known yet, of one among several."""
        if self._mover.unremoved:
            self._isolating = max(0, self._isolating - len(batch.messages))
            self._remove_failed(error)
            batch.trouble = error
        elif isinstance(error, BackendUnavailable):
            self._outage(error, len(batch.messages))
            batch.kept, batch.trouble = list(batch.messages), error
        elif len(batch.messages) > 1:
            batch.kept = list(batch.messages)
            self._isolating = len(batch.messages)
        else:
            self._isolating = max(0, self._isolating - 1)
            await self._mover.recover(batch, error)

    async def _remove_sent(self) -> bool:
        """Remove what was sent before; until that works nothing else is sent (reference H7)."""
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
        """Count nobody; where space is short go on in small steps, as far as it reaches."""
        text = "Failure during polling: %s"
        self._dispatch_breaker.log_failure(logger, logging.ERROR, Event.DISPATCH_FAILED, text, error, exception=error)
        if isinstance(error, StorageFull):
            self._isolating = size

    async def _give_back_ahead(self) -> None:
        """Hold nothing that is not to be sent next."""
        try:
            await self._mover.give_back_ahead()
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
            emit(logger, logging.DEBUG, Event.SLEEPS, "sleeps until %s", wake_at, until=wake_at)
            await first_of(self._woken.wait(), self._clock.sleep(seconds))
            emit(logger, logging.DEBUG, Event.WOKE, "woke")

    async def _pause(self, wait: Coroutine[None, None, None]) -> None:
        await first_of(self._stopping.wait(), wait)
