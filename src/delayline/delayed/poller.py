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

A bad message delays no other: a batch that fails as a whole is moved again message by message, and the message that
fails then, while others go, is counted and backs off alone (`blame`, `recovery`). A message that was sent and cannot be
removed is set aside once another could be (`set_aside`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import first_of, is_cancelled
from delayline.clock import EPOCH, LATEST_TIME
from delayline.delayed.mover import OF_BACK_END, Batch
from delayline.delayed.one_at_a_time import OneAtATime
from delayline.delayed.pauses import SLEEP_WHILE_PAUSED, SupportsDispatchPauses
from delayline.delayed.store import Forwarded
from delayline.errors import StorageFull, TransactionConflict
from delayline.events import Event, emit
from delayline.failures import brief
from delayline.observer import UNKNOWN_DESTINATION
from delayline.transaction import CONFLICTS_IN_A_ROW, again_after_conflicts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.mover import Mover
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.pauses import DispatchPauses
    from delayline.delayed.store import SupportsForwarding
    from delayline.message import DelayedMessage


logger: logging.Logger = logging.getLogger(__name__)

#: Notifications may get lost: a message stored by another process is found after this time at the latest.
MAXIMUM_SLEEP: Final = timedelta(seconds=60)
#: A message stored meanwhile, and due so soon, shortens the sleep without a look at the store. A look registers the new
#: sleep: for longer ones that spares other processes more notifications than it costs.
SHORTENED_WITHIN: Final = timedelta(seconds=2)
#: After a move inside the database the poller rests so many times as long as the move took, so that messages due at
#: nearly the same time move together ...
RESTS_AFTER_MOVE: Final = 4
#: ... but no longer than this from the beginning of a move to the next.
MOVES_WITHIN: Final = timedelta(milliseconds=6)
#: Pause while all due messages are locked by other processes; without it the poller would query in a tight loop.
LOCKED_ELSEWHERE: Final = timedelta(milliseconds=50)
#: The pauses grow to this while messages are set aside: the store does not tell when the next other message is due.
LOCKED_HERE: Final = timedelta(milliseconds=400)
#: How long removing may fail with the back end's own errors until a message is sent to see whether others can be.
DOUBT: Final = timedelta(seconds=10)


class Poller:
    """Moves due messages from a store to their destinations, in the order of their due times.

    Belongs to an event loop.

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
        self._observer = host.observers.all
        self._mover = mover
        self._forwarding = forwarding
        self._pauses = store.dispatch_pauses if isinstance(store, SupportsDispatchPauses) else None
        self._fetch_breaker = fetch_breaker
        self._dispatch_breaker = dispatch_breaker
        self._batch_size = batch_size
        self._batch_bytes = batch_bytes
        self._maximum_sleep = maximum_sleep
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._wakes_at: datetime | None = None
        #: The earliest due time, before the end of the sleep, of a message stored during it.
        self._earlier: datetime | None = None
        self._task: asyncio.Task[None] | None = None
        #: How many messages of a failed batch are still to be moved singly.
        self._singles_left = 0
        self._conflicts = 0
        #: Whether the next batch is fetched although the store can move messages: some message needs the poller.
        self._bypass_forwarding = False
        #: The next due time where a query for it is not needed: after a move in the database, and after a sleep.
        self._known: Forwarded | None = None
        #: The end of the rest after the last move in the database.
        self._rests_until = EPOCH
        #: How long it pauses while all due messages are set aside.
        self._looks_after = LOCKED_ELSEWHERE
        #: Since when messages that were sent cannot be removed, and no others could be.
        self._in_doubt_since: datetime | None = None

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
            self._earlier = due if self._earlier is None else min(due, self._earlier)
            self._woken.set()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.is_set():
                self._known = None
            self._woken.clear()
            self._wakes_at = None
            try:
                await self._poll()
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                await self._fetch_failed(RuntimeError(f"the store or the transport has raised {error!r}"))
            except Exception as error:
                await self._fetch_failed(error)
        await self._return_prefetched()
        try:
            await self._mover.close(self._clock.now())
        except Exception as error:
            self._remove_failed(error)

    async def _poll(self) -> None:
        if not await self._finish_earlier():
            return
        if self._pauses is not None and await self._are_all_paused(self._pauses):
            return
        if self._mover.has_prefetched and await self._dispatch_due(self._clock.now()):
            return
        known, self._known = self._known, None
        await self._rest(None if known is None else known.next_due)
        due = await self._store.next_due() if known is None else known.next_due
        now = self._clock.now()
        if due is not None and due <= now:
            if await self._dispatch_due(now):
                self._looks_after = LOCKED_ELSEWHERE
            elif not self._mover.has_failures and (known is None or self._mover.set_aside_until is not None):
                await self._sleep_while_locked(now)
            return
        self._singles_left = 0
        self._fetch_breaker.success()
        if self._observer is not None:
            self._observer.polled(0, None)
        if self._mover.has_failures or self._mover.try_unsent(now):
            return
        maximum = SLEEP_WHILE_PAUSED if self._pauses is not None and self._pauses.is_any else self._maximum_sleep
        latest = min(now + maximum, self._mover.set_aside_until or LATEST_TIME)
        slept_until = await self._sleep_until(latest if due is None else min(due, latest))
        if slept_until is not None and slept_until != latest:
            self._known = Forwarded(0, slept_until)

    async def _are_all_paused(self, pauses: DispatchPauses) -> bool:
        """Follow what is paused now; sleep, and return True, while all messages are."""
        if await pauses.look():
            self._known = None
            await self._return_prefetched()
        if pauses.is_whole:
            if self._observer is not None:
                self._observer.polled(0, None)
            await self._sleep_until(self._clock.now() + SLEEP_WHILE_PAUSED)
        return pauses.is_whole

    async def _finish_earlier(self) -> bool:
        """Finish what is left of earlier batches, some of it, and return whether another may be moved."""
        await self._mover.end_set_aside(self._clock.now())
        if not await self._remove_sent():
            return False
        if self._mover.has_failures:
            await self._recover_some()
        return True

    async def _dispatch_due(self, now: datetime) -> int:
        """Move a batch and return its size; failures of the batch are handled here."""
        bypass = self._singles_left or self._bypass_forwarding or self._mover.blame.is_open
        if not bypass and (moved := await self._forward_in_database(now)):
            return moved
        self._bypass_forwarding = False
        batch, begins = Batch(), not self._singles_left
        try:
            await self._mover.move(
                batch, now, 1 if self._singles_left else self._batch_size, others_left=self._singles_left > 1
            )
            self._singles_left = max(0, self._singles_left - len(batch.messages)) if batch.messages else 0
        except Exception as error:
            if not batch.messages:
                raise
            if isinstance(error, TransactionConflict) and not batch.unremoved and self._conflicts < CONFLICTS_IN_A_ROW:
                self._conflicts += 1  # undone as a whole, in favour of another: nobody's fault
                await self._release(batch.messages)
                return len(batch.messages)
            if batch.unremoved:
                self._report_dispatched(batch)
            batch = Batch(batch.messages, kept=batch.kept, unremoved=batch.unremoved)
            await self._batch_failed(batch, error)
        self._conflicts = 0
        self._fetch_breaker.success()
        self._find_alike(batch, begins=begins)
        if batch.sent:
            self._dispatch_breaker.success()
            self._report_dispatched(batch)
        if self._observer is not None:
            self._observer.polled(len(batch.messages), batch.backend_error)
        if batch.kept or batch.backend_error is not None or self._singles_left:
            await self._return_prefetched()
        await self._release(batch.kept)
        if batch.backend_error is not None:
            await self._back_end_failed(batch.backend_error)
        return len(batch.messages)

    async def _forward_in_database(self, now: datetime) -> int:
        """Move a batch inside the database and return its size; 0 after an error other than an outage."""
        if self._forwarding is None:
            return 0
        try:
            forwarded = await again_after_conflicts(
                partial(self._forwarding.forward_due, now, self._batch_size, max_bytes=self._batch_bytes)
            )
        except OF_BACK_END as error:
            if self._observer is not None:
                self._observer.polled(0, error)
            self._outage(error, self._batch_size)
            await self._pause(self._dispatch_breaker.failure(error))
            return 1
        except Exception as error:
            log_text = "Failed to move due messages inside the store: %s"
            emit(logger, logging.ERROR, Event.DISPATCH_FAILED, log_text, error, exception=error)
            return 0
        if forwarded.number:
            self._known = forwarded
            if forwarded.next_due is None or forwarded.next_due > now:
                ended = self._clock.now()
                self._rests_until = min(ended + RESTS_AFTER_MOVE * (ended - now), now + MOVES_WITHIN)
            self._bypass_forwarding = forwarded.left > 0
            self._fetch_breaker.success()
            self._dispatch_breaker.success()
            if self._observer is not None:
                numbers = forwarded.moved or {(UNKNOWN_DESTINATION, None): forwarded.number}
                self._observer.dispatched(numbers, self._clock.now())
                self._observer.polled(forwarded.number, None)
            if logger.isEnabledFor(logging.DEBUG):
                log_text = "moved %d messages inside the store"
                emit(logger, logging.DEBUG, Event.DISPATCHED, log_text, forwarded.number, count=forwarded.number)
        return forwarded.number

    def _report_dispatched(self, batch: Batch) -> None:
        if self._observer is not None and batch.dispatched:
            numbers: Counter[tuple[str, datetime | None]]
            numbers = Counter((message.destination, message.due) for message in batch.sent[: batch.dispatched])
            self._observer.dispatched(numbers, self._clock.now())

    async def _batch_failed(self, batch: Batch, error: Exception) -> None:
        """Blame the back end, the only message, or, for a batch of several, find the message by moving them singly."""
        if batch.unremoved:
            self._singles_left = max(0, self._singles_left - len(batch.messages))
            self._remove_failed(error)
            batch.backend_error = error
            if not isinstance(error, OF_BACK_END):
                batch.backend_error = await self._find_unremovable()
        elif self._mover.blames_back_end(error):
            self._outage(error, len(batch.messages))
            batch.kept, batch.backend_error = list(batch.messages), error
        elif len(batch.messages) > 1:
            batch.kept = list(batch.messages)
            self._singles_left = len(batch.messages)
        else:
            await self._mover.recover(batch, error, others_left=self._singles_left > 1)
            self._singles_left = max(0, self._singles_left - 1)

    def _find_alike(self, batch: Batch, *, begins: bool) -> None:
        """Blame the back end if messages failed alike while none was sent, once the messages due together were tried.

        `begins` says that none of them was tried before this batch. A store of single messages does not tell that.
        """
        if begins and isinstance(self._store, OneAtATime) and self._mover.blame.is_undecided:
            self._singles_left = self._batch_size - 1
        if self._singles_left or batch.backend_error is not None:
            return
        error = batch.backend_error = self._mover.blame.verdict()
        if error is not None:
            log_text = "No due message can be sent, and all fail alike, so no attempt is counted: %s"
            self._dispatch_breaker.log_failure(
                logger, logging.ERROR, Event.DISPATCH_FAILED, log_text, brief(error), exception=error
            )

    async def _recover_some(self) -> None:
        """Recover some of the messages that failed in an earlier batch."""
        batch = Batch()
        try:
            await self._mover.recover_some(batch, self._clock.now())
        except Exception as error:
            self._remove_failed(error)
            batch.backend_error = error
        await self._release(batch.kept)
        if batch.backend_error is not None:
            await self._back_end_failed(batch.backend_error)

    async def _find_unremovable(self) -> Exception | None:
        """Remove the messages that were sent, each alone, and return the error if none could be."""
        try:
            await self._mover.remove_sent(self._clock.now())
        except Exception as error:
            return error
        self._dispatch_breaker.success()
        self._dispatch_breaker.over()
        return None

    async def _remove_sent(self) -> bool:
        """Remove the messages sent before, and return whether others may be sent.

        An unremoved message is still due: while the back end cannot remove, each message sent would be sent again, in
        the end. So after errors that may be the message's, another is sent; it shows whose fault it is.
        """
        in_doubt, now = self._mover.in_doubt, self._clock.now()
        if not in_doubt:
            self._in_doubt_since = None
            return True
        since = self._in_doubt_since = self._in_doubt_since or now
        if all(aside.until <= now for aside in in_doubt) and (error := await self._find_unremovable()) is not None:
            self._remove_failed(error)
            await self._back_end_failed(error)
            self._singles_left = max(1, self._singles_left)
            return not isinstance(error, OF_BACK_END) or now - since >= DOUBT
        if self._mover.in_doubt:
            self._singles_left = max(1, self._singles_left)
        return True

    async def _back_end_failed(self, error: Exception) -> None:
        """Count a failure that may be the back end's, and pause, unless it may be that of the message alone."""
        if len(self._mover.in_doubt) == 1 and not isinstance(error, OF_BACK_END):
            self._dispatch_breaker.note(error)
        else:
            await self._pause(self._dispatch_breaker.failure(error))

    def _remove_failed(self, error: Exception) -> None:
        sent = tuple(aside.message for aside in self._mover.in_doubt)
        log_text = "Failed to remove %d dispatched messages: %s"
        self._dispatch_breaker.log_failure(
            logger, logging.ERROR, Event.REMOVE_FAILED, log_text, len(sent), error, exception=error, messages=sent
        )

    def _outage(self, error: Exception, size: int) -> None:
        """Log an outage; no message's attempt is counted. On a full disk the messages are then moved singly."""
        log_text = "Failure during polling: %s"
        self._dispatch_breaker.log_failure(
            logger, logging.ERROR, Event.DISPATCH_FAILED, log_text, error, exception=error
        )
        if isinstance(error, StorageFull):
            self._singles_left = size

    async def _return_prefetched(self) -> None:
        """Return a prefetched batch: the next may be another."""
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
        if self._observer is not None:
            self._observer.polled(0, error)
        self._fetch_breaker.log_failure(
            logger,
            logging.ERROR,
            Event.FETCH_FAILED,
            "Failed to poll and dispatch due timeouts from storage: %s",
            error,
            exception=error,
        )
        await self._pause(self._fetch_breaker.failure(error))

    async def _rest(self, due: datetime | None) -> None:
        """Wait for the end of the rest if the next message is due before it, or may be."""
        rest = min(self._rests_until - self._clock.now(), MOVES_WITHIN)  # the clock may have been set back
        if rest > timedelta(0) and (due is None or due < self._rests_until):
            self._rests_until = EPOCH
            await self._clock.sleep(rest.total_seconds())

    async def _sleep_while_locked(self, now: datetime) -> None:
        """Sleep although messages are due: they are locked elsewhere, or set aside."""
        if self._mover.try_unsent(now):
            self._looks_after = LOCKED_ELSEWHERE
            return
        until = self._mover.set_aside_until
        if until is None:
            await self._sleep_until(now + LOCKED_ELSEWHERE)
            return
        look_again = min(until, now + self._looks_after)
        slept_until = await self._sleep_until(look_again)
        if slept_until == look_again:
            self._known, self._looks_after = Forwarded(0, look_again), min(2 * self._looks_after, LOCKED_HERE)
        else:
            self._looks_after = LOCKED_ELSEWHERE

    async def _sleep_until(self, wake_at: datetime) -> datetime | None:
        """Sleep until then, or until an earlier message stored meanwhile is due, and return which of the two it was.

        Returns None if the store has to be asked: a message is due already, was stored before the sleep began, or is
        not due soon.
        """
        while await self._is_woken_before(wake_at):
            earlier, now = self._earlier, self._clock.now()
            if self._stopping.is_set() or earlier is None or not now < earlier <= now + SHORTENED_WITHIN:
                return None
            self._woken.clear()
            wake_at = earlier
        return wake_at

    async def _is_woken_before(self, wake_at: datetime) -> bool:
        self._wakes_at, self._earlier = wake_at, None
        seconds = (wake_at - self._clock.now()).total_seconds()
        if seconds > 0 and not self._woken.is_set():
            if logger.isEnabledFor(logging.DEBUG):
                emit(logger, logging.DEBUG, Event.SLEEPS, "sleeps until %s", wake_at, until=wake_at)
            asleep = time.monotonic()
            await first_of(self._woken.wait(), self._clock.sleep(seconds))
            if self._observer is not None:
                self._observer.slept(time.monotonic() - asleep, notified=self._woken.is_set())
            if logger.isEnabledFor(logging.DEBUG):
                emit(logger, logging.DEBUG, Event.WOKE, "woke")
        return self._woken.is_set()

    async def _pause(self, wait: Coroutine[None, None, None]) -> None:
        await first_of(self._stopping.wait(), wait)
