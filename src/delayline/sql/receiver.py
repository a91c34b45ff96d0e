"""Receivers of the queues.

::

    receive(limit)
      |
      v            the last look found fewer than wanted: until a notification, the time of the next full look, or the
    RESTED? -----> end of the pause; then a moment more, up to 3 ms between looks, so that messages that
      |    |       come at nearly the same time are received together
      |    `---- a move has claimed messages meanwhile (`moved`) ---------------------------------------> RETURNED
      v
    ADMITTED? ---> the queue is paused, or at a limit (`queue_limits`): until that changes; back to RESTED
      |
      v
    LOOK and claim, page by page, behind the numbers that were claimed last (`RecentNumbers`, `GoneNumbers`): a FULL
      |  look, from the first message on, where there are none, and after 0.5 s, as late commits have lower numbers; in
      |  between, a backlog of several groups is claimed in turn (`QueuedGroups`), where the transport is fair
      |
      +--- messages, and still admitted ---------------------------------------------------------------> RETURNED
      v
    WAIT, while moves may claim messages (`wanted`): until a notification, or one that a move has claimed; where
      |  processes cannot notify each other for a pause of 10 ms, doubled with each look that finds none; from
      |  `poll_interval` on one look is for all queues of the transport that wait (`IdleQueues`)
      v
    back to RESTED

`stop()` ends every wait, and `receive` returns nothing. Whatever was claimed when it fails or is cancelled is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import BackendUnavailable, DelaylineError, NotStarted
from delayline.events import Event, emit
from delayline.message import Message
from delayline.sql.claims_in_statements import ClaimsInStatements, Page, WaitingReceiver
from delayline.sql.gone_numbers import GoneNumbers
from delayline.sql.queue_limits import LIMITS_CHANGED
from delayline.sql.statements import queue_channel
from delayline.sql.transactions import EnlistedTransaction
from delayline.transport import ReceivedMessage

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from delayline.external import ExternalTransaction
    from delayline.sql.claims import Claims
    from delayline.sql.crashes import CrashCounts
    from delayline.sql.database import Database
    from delayline.sql.fair_groups import QueuedGroups
    from delayline.sql.queue_limits import QueueAdmission, SqlHandlerSlots
    from delayline.sql.statements import QueueStatements
    from delayline.transaction import Transaction

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds at most until messages before the messages received last are found, while others come in ...
QUEUE_LOOK_EVERY: Final = 0.5
#: ... and once an external transaction has committed, whose messages got their numbers when it inserted them.
FULL_LOOK_AFTER_COMMIT: Final = 0.02
#: Seconds for which a look repeats earlier ones: messages get their numbers before they are committed, so messages of
#: concurrent senders appear out of order.
OVERLAP: Final = 0.02
#: Seconds until a receiver looks again after it has received messages, where other processes cannot notify it; doubled
#: with each look that finds none, up to the transport's `poll_interval`.
FIRST_IDLE_PAUSE: Final = 0.01
#: After a look that has found all messages a receiver rests so many times as long as the look took, so that messages
#: that come at nearly the same time are received together ...
RESTS: Final = 3
#: ... but no longer than so many seconds from the beginning of a look to the next.
LOOKS_WITHIN: Final = 0.003
#: Behind messages that other processes have claimed, each page is so many times as long as the page before, up to a
#: limit: a process with few handlers would never get past messages of processes that have claimed thousands.
LONGER: Final = 4
LONGEST_PAGE: Final = 4_000
#: A look for queues with messages is repeated after so many times as long as it took, if that is longer.
IDLE_LOOK_SHARE: Final = 5
OUT_OF_ORDER: Final = -2  # the time in a notification of messages that may have lower numbers than the last


class SqlReceiver(WaitingReceiver):
    """Takes messages from a queue; the claims of a process that ends are free again at once.

    While it waits, a move may claim messages for it, see `WaitingReceiver`.
    """

    def __init__(
        self,
        database: Database,
        statements: QueueStatements,
        claims: Claims,
        queue: str,
        idle: IdleQueues,
        admission: QueueAdmission,
        crashes: CrashCounts,
        groups: QueuedGroups | None = None,
    ) -> None:
        super().__init__(queue)
        self._database = database
        self._statements = statements
        self._claims = claims
        self._idle = idle
        self._admission = admission
        self._crashes = crashes
        self._groups = groups
        """The groups of the queue that are served in turn; None where messages are received as they came."""
        self._claimed_in_turn = False
        """Whether the last messages were claimed in turn: a full look, however often it is due, comes after a turn."""
        self._event = asyncio.Event()
        self._stopped = False
        self._looked_at = -math.inf
        """When a look at the queue last ended."""
        self._recent = RecentNumbers(OVERLAP if database.locks_rows else 0.0)  # a file has a single writer
        self._full_at = -math.inf
        """When messages were last looked for from the first one on."""
        self._full_look_every = QUEUE_LOOK_EVERY
        self._first_pause = math.inf if database.notifications.reach_others else FIRST_IDLE_PAUSE
        self._pause = math.inf
        """Seconds until the next look without a notification, if that is less than the transport's interval."""
        self._exhausted = False
        """Whether the last look has found fewer messages than it asked for."""
        self._rests_until = -math.inf
        """When the next look is worth it."""
        self._is_notified = False
        """Whether messages may have come since the last look began."""
        self._receiving = False
        self._removals: set[asyncio.Future[None]] = set()
        self._moved: list[ReceivedMessage] = []
        """Messages that moves have claimed for the `receive` in progress."""
        self._in_statements = claims if isinstance(claims, ClaimsInStatements) else None
        self._unregister = _nothing if self._in_statements is None else self._in_statements.receivers.add(self)
        self._gone = GoneNumbers(database, self._in_statements, statements, queue, partial(self._notified, 0))
        self._unsubscribe = database.notifications.subscribe(queue_channel(queue), self._notified)

    @property
    def answered_at(self) -> float:
        """When the server has last answered a look at the queue or at its limits, by `time.monotonic`."""
        return max(self._looked_at, self._admission.read_at)

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and claim up to `limit` of them."""
        self._receiving = True
        try:
            await self._crashes.open(limit)
            return await self._receive(limit)
        finally:
            self._receiving, self.wanted = False, 0
            left, self._moved = self._moved, []
            self._give_back(left)

    def moved(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Receive messages that a move has claimed; see `WaitingReceiver`."""
        messages = [ReceivedMessage(Message.from_encoded(*row[1:]), row[0]) for row in rows]
        for row in rows:
            self._gone.reach(row[0])
        if not self._receiving:
            self._give_back(messages)
            return
        self.wanted = 0
        self._moved += messages
        self._event.set()

    async def _receive(self, limit: int) -> Sequence[ReceivedMessage]:
        while await self._rested(limit):
            if self._moved:
                if moved := await self._take_moved(limit):
                    return moved
                continue
            self._event.clear()
            self._is_notified = False
            batch: list[ReceivedMessage] = []
            expired: list[ReceivedMessage] = []
            admitted = await self._admission.admit(limit)
            if not admitted:
                self._admission.received([])
                await self._notified_within(self._admission.wait)
                continue
            began = time.monotonic()
            try:
                await self._claim(admitted, batch, expired)
                await self._discard(expired)
                await self._count_crashes(batch)
                confirmed = not batch or await self._admission.confirm()
            except BaseException:
                self._claims.release(
                    _number(received) for received in batch + expired
                )  # the caller will never receive them
                self._admission.received([])
                raise
            if not confirmed:
                await self.release_many(batch)
                continue
            self._admission.received([_number(received) for received in batch])
            ended = self._looked_at = time.monotonic()
            if self._exhausted:
                self._rests_until = min(ended + RESTS * (ended - began), began + LOOKS_WITHIN)
            if batch:
                self._pause = self._first_pause
                return batch
            if not expired and not self._moved:
                self._wait_for_moves(limit)
                await self._wait_for_messages()
                self._is_notified |= not self._moved
        return []

    async def _count_crashes(self, batch: list[ReceivedMessage]) -> None:
        """Tell messages apart whose deliveries have ended without an outcome before."""
        if batch and (counts := await self._crashes.of(map(_number, batch))):
            batch[:] = [replace(received, earlier_deliveries=counts.get(_number(received), 0)) for received in batch]

    async def begin(self, received: ReceivedMessage) -> None:
        """Note that the handling of a message begins that may end the process, durably on return."""
        await self._crashes.begin(_number(received))

    async def _wait_for_messages(self) -> None:
        """Wait until the next look at an empty queue."""
        if self._pause >= self._idle.interval:
            await self._idle.wait(self.queue, self._event)
            return
        await self._notified_within(self._pause)
        self._pause *= 2

    async def _notified_within(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()

    def _wait_for_moves(self, limit: int) -> None:
        """Let moves claim messages, unless the queue's limits decide how many may be received."""
        self.wanted = 0 if self._admission.is_limited else limit

    async def _take_moved(self, limit: int) -> Sequence[ReceivedMessage]:
        """Return messages that moves have claimed; none if the queue is limited by now."""
        self._event.clear()
        confirmed = await self._admission.confirm()  # if it fails, `receive` gives the messages back
        batch, self._moved = self._moved[:limit], self._moved[limit:]
        if not confirmed:
            await self.release_many(batch)
            return []
        self._admission.received([_number(received) for received in batch])
        return batch

    async def _rested(self, limit: int) -> bool:
        """Wait until another look is worth it, or a move has claimed messages; return False once stopped.

        After a look that has found fewer messages than it asked for, that is at the next notification, or when a look
        from the first message on is due.
        """
        if self._moved:
            return not self._stopped
        if self._exhausted:
            self._wait_for_moves(limit)
            if not self._is_notified:
                full_look_in = self._full_at + self._full_look_every - time.monotonic()
                await self._notified_within(min(full_look_in, self._pause))
        if not self._moved and not self._stopped and (rest := self._rests_until - time.monotonic()) > 0:
            await asyncio.sleep(rest)
        self.wanted: int = 0
        return not self._stopped

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message, now or at the commit."""
        return (await self.acknowledge_many([received], transaction))[0]

    def acknowledge_early(self, received: ReceivedMessage, external: ExternalTransaction) -> EnlistedTransaction:
        """Delete the message in a handler's transaction; see `SupportsEarlyEnd`."""
        transaction = self._database.enlisting.enlist_early(external, self._statements.queued)
        transaction.run_early(partial(self._statements.remove_one, queue=self.queue, number=_number(received)))
        return transaction

    async def acknowledge_many(
        self, received: Sequence[ReceivedMessage], transaction: Transaction | None = None
    ) -> Sequence[bool]:
        """Delete the messages, now or at the commit."""
        numbers = list(map(_number, received))
        returning = self._statements.delete_returning
        one_statement = self._statements.removes_at_once(len(numbers))
        if transaction is None and returning is not None and one_statement:
            deleted = await self._database.run_statement(returning, self.queue, numbers)
            removed = {number for (number,) in deleted.rows}
        elif len(numbers) == 1 and isinstance(transaction, EnlistedTransaction) and transaction.of_handler:
            remove_one = partial(self._statements.remove_one, queue=self.queue, number=numbers[0])
            removed = set(numbers) if await transaction.run_there(remove_one) else set()
        else:
            remove = partial(self._statements.remove, queue=self.queue, numbers=numbers)
            removed = await self._database.write(remove, transaction, one_statement=one_statement)
        forget = partial(self._forget, numbers)
        forget() if transaction is None else transaction.after_commit(forget)
        return [number in removed for number in numbers]

    async def release(self, received: ReceivedMessage) -> None:
        """Give up the claim and wake receivers."""
        await self.release_many([received])

    async def release_many(self, received: Sequence[ReceivedMessage]) -> None:
        """Give up the claims and wake receivers."""
        numbers = list(map(_number, received))
        with contextlib.suppress(DelaylineError):  # then they are counted once more
            await self._crashes.released(numbers)
        self._claims.release(numbers)
        self._admission.ended(numbers)
        with contextlib.suppress(BackendUnavailable):  # then the server ends the claims with their connection
            await self._database.read(lambda _: self._claims.flush())
        self._database.notifications.notify(queue_channel(self.queue))

    def _notified(self, at: int) -> None:
        if at == LIMITS_CHANGED:
            self._admission.expire()
            self._crashes.expire()
        elif at == OUT_OF_ORDER:
            self._full_look_every = FULL_LOOK_AFTER_COMMIT
        self._is_notified = True
        self._event.set()

    def _give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Give up the claims on messages that the caller will not receive."""
        if messages:
            numbers = [_number(received) for received in messages]
            self._claims.release(numbers)
            self._recent.lower(min(numbers) - 1)
            with contextlib.suppress(NotStarted):  # closed meanwhile, which ends the claims
                self._database.notifications.notify(queue_channel(self.queue))

    def _forget(self, numbers: Sequence[int]) -> None:
        """Drop the claims on messages that were handled."""
        self._claims.forget(numbers)
        if handled := self._crashes.handled(numbers):
            removal = asyncio.ensure_future(self._crashes.remove(handled))
            self._removals.add(removal)
            removal.add_done_callback(self._removed)
        if self._admission.ended(numbers):
            self._database.notifications.notify(queue_channel(self.queue))  # others may wait for their slots

    def _removed(self, removal: asyncio.Future[None]) -> None:
        """Let go of the removal; rows that it left are removed after the next crash."""
        self._removals.discard(removal)
        if not removal.cancelled():
            removal.exception()

    def holds(self, received: ReceivedMessage) -> bool:
        """Return whether this process still claims the message, as of its last request."""
        return self._claims.holds(_number(received))

    def handler_slots(self, numbers: Mapping[str, int]) -> Mapping[str, SqlHandlerSlots]:
        """Return the slots of each limited type; see `SupportsHandlerSlots`."""
        return self._admission.handler_slots(numbers)

    async def stop(self) -> None:
        """End a waiting receive."""
        self._stopped = True
        self._unregister()
        self._unsubscribe()
        self._gone.stop()
        self._event.set()
        await self._crashes.close()

    async def _claim(self, limit: int, batch: list[ReceivedMessage], expired: list[ReceivedMessage]) -> None:
        """Claim messages behind earlier claims; at intervals, and if there are none, from the first on.

        Earlier messages are of transactions that took longer, or were given back by other processes. A backlog of
        several groups is claimed in turn.
        """
        recent = time.monotonic() - self._full_at < self._full_look_every
        if self._groups is not None and self._groups.is_wanted and (recent or not self._claimed_in_turn):
            after = max(self._recent.before(), self._gone.last)
            claim = partial(self._claim_in_turn, self._groups, after=after, limit=limit, batch=batch, expired=expired)
            await self._database.read(claim)
            if batch or expired:
                self._exhausted, self._claimed_in_turn = False, True
                return
        self._claimed_in_turn = False
        if recent:
            await self._claim_after(max(self._recent.before(), self._gone.last), limit, batch, expired)
        if not batch and not expired:
            self._full_at, self._full_look_every = time.monotonic(), QUEUE_LOOK_EVERY
            self._gone.move_on()
            await self._claim_after(self._gone.last, limit, batch, expired)
        if self._groups is not None:
            self._groups.taken_in_order(all_found=self._exhausted)

    async def _claim_after(
        self, after: int, limit: int, batch: list[ReceivedMessage], expired: list[ReceivedMessage]
    ) -> None:
        """Claim messages page by page until there are enough; behind messages with other claims in longer pages."""
        self._exhausted = False
        more, among = True, 0
        while more and (wanted := limit - len(batch) - len(expired)) > 0:
            among = max(wanted, min(among * LONGER, LONGEST_PAGE))
            if self._in_statements is not None:
                queued = self._statements.queued
                page = await self._in_statements.take_next(queued, self.queue, after, wanted, among)
                await self._read_claimed(page.claimed, batch, expired)
            else:
                page = await self._database.read(
                    partial(self._claim_page, after=after, limit=wanted, among=among, batch=batch, expired=expired)
                )
            if page.claimed:
                self._recent.reach(page.claimed[-1])
            after, more = page.last, page.more
        self._exhausted = not more and len(batch) + len(expired) < limit

    def _claim_in_turn(
        self,
        groups: QueuedGroups,
        connection: Connection,
        after: int,
        limit: int,
        batch: list[ReceivedMessage],
        expired: list[ReceivedMessage],
    ) -> None:
        """Claim messages of several groups; the numbers reached in the queue's order stay as they are."""
        claimed = groups.claim(connection, self._claims, after, limit)
        if claimed:
            self._read_page(connection, claimed, batch, expired)

    def _read_page(
        self,
        connection: Connection,
        claimed: list[int],
        batch: list[ReceivedMessage],
        expired: list[ReceivedMessage],
    ) -> None:
        try:
            rows = self._statements.claimed.rows(connection, self.queue, claimed)
        except BaseException:
            self._claims.release(claimed)
            raise
        self._add(claimed, rows, batch, expired)

    def _claim_page(
        self,
        connection: Connection,
        after: int,
        limit: int,
        among: int,
        batch: list[ReceivedMessage],
        expired: list[ReceivedMessage],
    ) -> Page:
        size = among + self._claims.number_claimed_after(after)
        numbers = [number for (number,) in self._statements.numbers.rows(connection, self.queue, after, size)]
        claimed = self._claims.take(numbers, limit)
        if claimed:
            self._read_page(connection, claimed, batch, expired)
        if len(claimed) == limit:  # the rest was not looked at
            return Page(claimed, claimed[-1], more=True)
        return Page(claimed, numbers[-1] if numbers else after, len(numbers) == size)

    async def _read_claimed(
        self, claimed: list[int], batch: list[ReceivedMessage], expired: list[ReceivedMessage]
    ) -> None:
        if claimed:
            try:
                rows = (await self._database.run_statement(self._statements.claimed, self.queue, claimed)).rows
            except BaseException:
                self._claims.release(claimed)
                raise
            self._add(claimed, rows, batch, expired)

    def _add(
        self,
        claimed: list[int],
        rows: Sequence[tuple[Any, ...]],
        batch: list[ReceivedMessage],
        expired: list[ReceivedMessage],
    ) -> None:
        """Add messages that are still there; the others were handled before they were claimed."""
        self._claims.forget(set(claimed) - {row[0] for row in rows})
        for number, message_id, headers, body, is_expired in sorted(rows, key=itemgetter(0)):
            received = ReceivedMessage(Message.from_encoded(message_id, headers, body), number)
            self._gone.reach(number)
            (expired if is_expired else batch).append(received)

    async def _discard(self, expired: list[ReceivedMessage]) -> None:
        """Delete expired messages."""
        if expired:
            numbers = [_number(received) for received in expired]
            delete = self._statements.delete.change_each
            await self._database.write(
                lambda connection: delete(connection, self.queue, keys=numbers), one_statement=True
            )
            self._claims.forget(numbers)
            for received in expired:
                template = "Deleted expired message %s"
                emit(logger, logging.DEBUG, Event.EXPIRED, template, received.message.id)


class RecentNumbers:
    """The numbers of the messages that were claimed last.

    Args:
        overlap: Seconds for which a number is recent.
    """

    def __init__(self, overlap: float) -> None:
        self._overlap = overlap
        self._before = 0
        """Claimed at least `overlap` ago."""
        self._last = 0
        """The last one claimed until `_noted_at`."""
        self._noted_at = -math.inf
        self._reached = 0

    def reach(self, number: int) -> None:
        """Note that a message was claimed."""
        self._reached = max(self._reached, number)

    def lower(self, number: int) -> None:
        """Note that messages behind `number` are not claimed any more."""
        self._before, self._last = min(self._before, number), min(self._last, number)
        self._reached = min(self._reached, number)

    def before(self) -> int:
        """Return a number before all recent ones."""
        now = time.monotonic()
        if not self._overlap:
            return self._reached
        if now - self._noted_at >= self._overlap:
            self._before, self._last, self._noted_at = self._last, self._reached, now
        return self._before


def _nothing() -> None:
    """Unregister nothing."""


def _number(received: ReceivedMessage) -> int:
    if not isinstance(received.receipt, int):
        raise TypeError(f"receipt {received.receipt!r} was not given by this receiver")
    return received.receipt


class IdleQueues:
    """Wakes receivers of a transport whose queues are not empty. Belongs to an event loop.

    Args:
        interval: how often it looks, in seconds.
    """

    def __init__(self, database: Database, statements: QueueStatements, interval: float) -> None:
        self._database = database
        self._statements = statements
        self.interval = interval
        self._waiting: dict[asyncio.Event, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._costs = 0.0
        """Seconds that the last look has taken."""
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, queue: str, event: asyncio.Event) -> None:
        """Return when the event is set: by others, or because it is time to look into the queue."""
        self._waiting[event] = queue
        self._set_timer()
        try:
            await event.wait()
        finally:
            self._waiting.pop(event, None)
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and self._looking is None and self._waiting:
            pause = max(self.interval, IDLE_LOOK_SHARE * self._costs)
            self._timer = asyncio.get_running_loop().call_later(pause, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        if len(self._waiting) == 1:
            self._wake(set(self._waiting.values()))  # whose own look it is
        else:
            self._looking = asyncio.create_task(self._look(), name="delayline idle queues")

    async def _look(self) -> None:
        names, began = set(self._waiting.values()), time.monotonic()
        try:
            rows = await self._database.read(partial(self._statements.filled.rows_each, keys=list(names)))
            names = {name for (name,) in rows}
        except Exception:  # noqa: S110 - each looks for itself, and reports what it sees
            pass
        finally:
            self._looking = None
            self._costs = time.monotonic() - began
        self._wake(names)
        self._set_timer()

    def _wake(self, names: set[str]) -> None:
        for event, queue in self._waiting.items():
            if queue in names:
                event.set()
