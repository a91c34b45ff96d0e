"""Moves fetched messages to their queues: batches, their transactions, and messages that fail in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Self

from delayline.delayed.blame import FOLLOWS_WITHIN, says_no_fault
from delayline.delayed.one_at_a_time import OneAtATime
from delayline.delayed.schedules import due_occurrence
from delayline.delayed.set_aside import Reason, SetAside
from delayline.delayed.store import SupportsTransactions
from delayline.errors import BackendUnavailable, BackendUnusable, CorruptHeaders, DispatchFailed
from delayline.events import Event, emit
from delayline.message import Headers
from delayline.transaction import is_unusable, savepoint, share_transactions
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from delayline.delayed.blame import Blame
    from delayline.delayed.one_at_a_time import PolledStore
    from delayline.delayed.recovery import Failures, Recovery
    from delayline.delayed.schedules import DueOccurrence, Schedules
    from delayline.delayed.set_aside import AsideMessage
    from delayline.delayed.store import SupportsLookup
    from delayline.message import DelayedMessage, Message
    from delayline.transaction import Transaction
    from delayline.transport import Transport


logger: logging.Logger = logging.getLogger(__name__)

#: Errors by which a back end says that the fault is not a message's.
OF_BACK_END: Final = (BackendUnavailable, BackendUnusable)
#: How long a prefetched batch may be used: a store's lock may be a lease, and a transport may block for minutes.
BATCH_USABLE_FOR: Final = timedelta(seconds=5)
#: Failed messages that are recovered before the next batch is fetched, where their claims outlast a batch; fewer if
#: that takes more than so many seconds ...
RECOVERED_AT_ONCE: Final = 32
RECOVERED_WITHIN: Final = 0.25
#: ... while there are not more than this, as a claim may end after a minute.
MOST_FAILURES: Final = 1000
#: The most transactions kept open to lock messages that are set aside ...
MOST_LOCKED: Final = 48
#: ... and how long each stays open at most, once there are so many.
LOCKED_FOR: Final = timedelta(seconds=1)
#: Where a message has failed alone, so many are looked at for others to its destination.
SEARCHED_MESSAGES: Final = 100


@dataclass(frozen=True, slots=True)
class BatchScope:
    """The transaction of a batch: shared with the transport, the store's own, or none."""

    begin: Callable[[], Transaction] | None
    """Returns a new transaction; None where the store locks messages without one."""
    shared: bool
    """Whether the messages are dispatched in the same transaction."""

    def open(self) -> AbstractAsyncContextManager[Transaction | None]:
        """Return the transaction for a batch, to be entered."""
        return contextlib.nullcontext() if self.begin is None else self.begin()

    def blames_back_end(self, error: Exception) -> bool:
        """Return whether the fault is the back end's and counts against no message.

        In a single database an error that names the database is no message's either: every message meets it.
        """
        return isinstance(error, OF_BACK_END if self.shared else BackendUnavailable)

    def of_dispatch(self, transaction: Transaction | None) -> Transaction | None:
        """Return the transaction to dispatch the messages of a batch in `transaction` with."""
        return transaction if self.shared else None


def scope_between(storage: object, transport: Transport) -> BatchScope:
    """Return the strongest scope that the storage's transactions, where it has some, make possible."""
    if isinstance(storage, SupportsTransactions):
        if share_transactions(storage, transport):
            return BatchScope(storage.transaction, shared=True)
        if storage.locks_rows:
            return BatchScope(storage.transaction, shared=False)
    return BatchScope(None, shared=False)


@dataclass(slots=True)
class Batch:
    """Fetched messages, and the outcome of each."""

    messages: Sequence[DelayedMessage] = ()
    sent: list[DelayedMessage] = field(default_factory=list)
    """Messages dispatched to their destination or to the error queue; they leave the store."""
    dispatched: int = 0
    """How many of `sent`, the first ones, were dispatched to their destination."""
    kept: list[DelayedMessage] = field(default_factory=list)
    """Messages that stay in the store unchanged."""
    backend_error: Exception | None = None
    """The back end's fault because of which messages were kept; the poller pauses after it."""
    unremoved: bool = False
    """Whether messages were sent outside a transaction, and not removed."""


class FetchedBatch:
    """Due messages, and the transaction that locks them, if any, until this context is left."""

    def __init__(
        self,
        messages: Sequence[DelayedMessage],
        at: datetime,
        transaction: Transaction | None,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self.messages = messages
        self.at = at
        self.transaction = transaction
        self._stack = stack

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def undo(self) -> None:
        """Roll the transaction back."""
        with contextlib.suppress(_Undo):
            async with self:
                raise _Undo


class _Undo(Exception):
    """Rolls back a transaction in which nothing was changed."""


class Mover:
    """Moves batches from a store to their destinations.

    Messages that were sent, but may not have been removed, are set aside: a store that answers again would return them
    as due, and each round would send them once more.

    Args:
        aside: What is set aside; the store and the recovery may know it too.
        blame: Tells failures of messages from the back end's.
        lookup: The store, if it can be asked for messages without locking them.
        prefetches: Fetch the next batch while a full batch is sent and removed. Used only where the two share no
            transaction: a batch is then confirmed before it is removed, and before the next batch is sent.
        schedules: The schedules that messages may be occurrences of; None for a store that keeps none.
    """

    def __init__(  # noqa: PLR0913 - its parts, all keyword-only but two
        self,
        store: PolledStore,
        transport: Transport,
        *,
        scope: BatchScope,
        recovery: Recovery,
        batch_bytes: int,
        blame: Blame,
        lookup: SupportsLookup | None = None,
        aside: SetAside | None = None,
        prefetches: bool = False,
        schedules: Schedules | None = None,
    ) -> None:
        self.blame = blame
        self._schedules = schedules
        #: Which of the messages that are being moved are occurrences of schedules, by id.
        self._occurrences: dict[str, DueOccurrence] = {}
        self._lookup = lookup
        self._store = store
        self._transport = transport
        self._scope = scope
        self._recovery = recovery
        self._batch_bytes = batch_bytes
        self._prefetches = prefetches and not scope.shared
        self._aside = SetAside() if aside is None else aside
        self._prefetch: asyncio.Task[FetchedBatch] | None = None
        #: What has failed and is recovered between later batches, which are thus not held up.
        self._failures: Failures = []
        self._at_once = RECOVERED_AT_ONCE
        #: What a batch has sent outside a transaction, until it is removed.
        self._sent: list[DelayedMessage] = []
        self._unreleased: list[DelayedMessage] = []

    @property
    def in_doubt(self) -> Sequence[AsideMessage]:
        """Messages that were sent and could not be removed, and no others could be since."""
        return self._aside.of(Reason.IN_DOUBT)

    @property
    def set_aside_until(self) -> datetime | None:
        """When the first message that is set aside is tried again; None for never."""
        return self._aside.first_end

    def blames_back_end(self, error: Exception) -> bool:
        """Return whether the fault is the back end's and counts against no message."""
        return self._scope.blames_back_end(error)

    @property
    def has_failures(self) -> bool:
        """Whether messages that have failed are still to be recovered."""
        return bool(self._failures)

    async def recover_some(self, batch: Batch, now: datetime) -> None:
        """Recover a few of the messages that have failed. Raises the error of removing them from the store."""
        failures, self._failures = self._failures[: self._at_once], self._failures[self._at_once :]
        began = time.monotonic()
        async with self._removing(batch, now):
            await self._finish(batch, failures, None)
        quick = time.monotonic() - began < RECOVERED_WITHIN
        self._at_once = min(2 * self._at_once, RECOVERED_AT_ONCE) if quick else max(1, self._at_once // 2)

    @property
    def has_prefetched(self) -> bool:
        """Whether the next batch has been fetched, or is being fetched."""
        return self._prefetch is not None

    async def move(self, batch: Batch, now: datetime, limit: int, *, others_left: bool = False) -> None:
        """Fetch up to `limit` messages and move them; messages that fail alone are recovered.

        `others_left` says that others are still to be moved of a batch that has failed as a whole.

        An error that leaves `batch` empty comes from the fetch. After any other nothing has taken effect, or, if
        `batch.unremoved`, sending alone: the messages are then `in_doubt`.
        """
        async with self._removing(batch, now), await self._next(now, limit) as fetched:
            batch.messages = fetched.messages
            if batch.messages:
                if self._prefetches and limit > 1 and len(batch.messages) == limit:
                    self._prefetch = asyncio.create_task(self._fetch(now, limit), name="delayline prefetch")
                await self._forward(batch, fetched.transaction, others_left=others_left)

    async def return_prefetched(self) -> None:
        """Return a prefetched batch to the store, or, if it has no transaction, leave that to the next `release`."""
        fetched = await self._take_prefetched()
        if fetched is not None:
            await self._undo(fetched)

    async def recover(self, batch: Batch, error: Exception, *, others_left: bool) -> None:
        """Recover a batch of a single message, whose failure has rolled its transaction back, unless it is in doubt."""
        (message,) = batch.messages
        if not await self._own(batch, [(message, error)], others_left=others_left):
            return
        try:
            async with self._removing(batch, self._recovery.now), self._scope.open() as transaction:
                await self._finish(batch, [(message, error)], transaction)
        except Exception as failure:
            if batch.unremoved:
                batch.backend_error = failure
            else:
                batch.sent.clear()
                await self._recovery.keep(batch, message, failure, None)

    async def remove_sent(self, now: datetime) -> None:
        """Remove the messages `in_doubt`, if not together then each alone. Raises the error if none can be removed."""
        in_doubt = self.in_doubt
        for aside in in_doubt:
            await aside.end_lock()
        sent = [aside.message for aside in in_doubt]
        failures = await self._remove_each(sent)
        failed = {message.id for message, _ in failures}
        for message in sent:
            if message.id in failed:
                self._aside.add_failed(message, Reason.IN_DOUBT, now)
        self._removed([message for message in sent if message.id not in failed], now)
        if failures and self.in_doubt:
            raise failures[0][1]

    async def end_set_aside(self, now: datetime) -> None:
        """Send the messages whose time has come like any others, and remove those that were sent."""
        self._aside.try_now(self.blame.to_try(now, idle=False))
        for aside in self._aside.of(Reason.BACKS_OFF, Reason.UNREMOVABLE):
            if aside.ended or aside.until > now:
                continue
            await aside.end_lock()
            if aside.sent and self._scope.begin is None:
                await self._remove_unremovable(aside, now)
                continue
            aside.ended = True  # for a sent message too: unlocked, its id may be another message's until it is fetched
            if self._scope.begin is None:
                self._unreleased.append(aside.message)
        if self._unreleased:
            await self.release(())

    def try_unsent(self, now: datetime) -> bool:
        """Try the messages in doubt again, as there are no others to be sent; return whether there are any."""
        return self._aside.try_now(self.blame.to_try(now, idle=True)) > 0

    async def release(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock messages that stay unchanged, also messages for which that failed before."""
        if self._scope.begin is None:
            self._unreleased += messages
        if self._unreleased:
            await self._store.release_many(self._unreleased)
            self._unreleased = []

    async def close(self, now: datetime) -> None:
        """Remove the messages that were sent, once more, and unlock the messages that are set aside."""
        for aside in self._aside.locked():
            await aside.end_lock()
        if self.in_doubt:
            await self.remove_sent(now)
        for aside in self._aside.of(Reason.UNREMOVABLE) if self._scope.begin is None else ():
            await self._remove_unremovable(aside, now)
        if isinstance(self._store, OneAtATime):
            await self._store.end_back_offs()

    @contextlib.asynccontextmanager
    async def _removing(self, batch: Batch, now: datetime) -> AsyncIterator[None]:
        """Set the messages of the batch aside that were sent inside, and not removed."""
        self._sent = []
        try:
            yield
        except Exception:
            batch.unremoved = bool(self._sent)
            for message in self._sent:
                self._aside.add_failed(message, Reason.IN_DOUBT, now)
            raise
        self._removed(batch.sent, now)

    def _removed(self, messages: Sequence[DelayedMessage], now: datetime) -> None:
        if self._occurrences:
            for message in messages:
                self._occurrences.pop(message.id, None)
        for aside in self._aside.removed(messages, now):
            log_text = "Delayed message %s was sent and cannot be removed, though others can: it is left alone until %s"
            message, until = aside.message, aside.until
            emit(logger, logging.ERROR, Event.REMOVE_FAILED, log_text, message.id, until, messages=(message,))

    async def _remove_each(self, sent: Sequence[DelayedMessage]) -> list[tuple[DelayedMessage, Exception]]:
        """Remove messages together, or else each alone, and return the failures; an outage ends it."""
        try:
            await self._remove(sent, None)
        except Exception as error:
            if len(sent) == 1:
                return [(sent[0], error)]
        else:
            return []
        failures: list[tuple[DelayedMessage, Exception]] = []
        for position, message in enumerate(sent):
            try:
                await self._remove([message], None)
            except Exception as error:
                failures.append((message, error))
                if position == 1 and len(failures) > 1 and isinstance(error, OF_BACK_END):
                    return [(each, error) for each in sent]
        return failures

    async def _remove_unremovable(self, aside: AsideMessage, now: datetime) -> None:
        message = aside.message
        try:
            await self._remove([message], None)
        except Exception as error:
            until = self._aside.add_failed(message, Reason.UNREMOVABLE, now).until
            log_text = "Delayed message %s was sent and cannot be removed, it is left alone until %s: %s"
            emit(logger, logging.ERROR, Event.REMOVE_FAILED, log_text, message.id, until, error, messages=(message,))
        else:
            self._removed([message], now)

    async def _take_prefetched(self) -> FetchedBatch | None:
        """Wait for the prefetch and return its batch; raises its error. A cancellation leaves it for the next call."""
        prefetch = self._prefetch
        if prefetch is None:
            return None
        await asyncio.wait([prefetch])
        self._prefetch = None
        return prefetch.result()

    async def _next(self, now: datetime, limit: int) -> FetchedBatch:
        fetched = await self._take_prefetched()
        if fetched is None:
            return await self._fetch(now, limit)
        if fetched.messages and now - fetched.at <= BATCH_USABLE_FOR:
            return fetched
        await self._undo(fetched)
        await self.release(())
        return await self._fetch(now, limit)

    async def _undo(self, fetched: FetchedBatch) -> None:
        await fetched.undo()
        self._unreleased += fetched.messages if self._scope.begin is None else ()

    async def _fetch(self, now: datetime, limit: int) -> FetchedBatch:
        """Fetch messages that are not set aside; messages set aside that come along stay locked where they can."""
        if isinstance(self._store, OneAtATime):
            await self._store.end_back_offs()
        seen: set[str] = set()
        ready: Sequence[DelayedMessage]
        while True:
            async with contextlib.AsyncExitStack() as stack:
                transaction = await stack.enter_async_context(self._scope.open())
                due = await self._fetch_due(now, limit, transaction)
                waiting = [aside for message in due if (aside := self._aside.find(message)) and not aside.ended]
                left = {aside.message.id for aside in waiting}
                ready = [message for message in due if message.id not in left][:limit]
                if ready or not left - seen or (transaction is not None and not self._may_lock(waiting, now)):
                    if ready:
                        emit(
                            logger, logging.DEBUG, Event.FETCHED, "fetched %d due messages", len(ready), messages=ready
                        )
                    return FetchedBatch(ready, now, transaction, stack.pop_all())
                seen |= left
                if transaction is not None:
                    waiting[0].unlock = FetchedBatch(due, now, transaction, stack.pop_all()).undo
                    waiting[0].locked_at = now

    async def _fetch_due(self, now: datetime, limit: int, transaction: Transaction | None) -> Sequence[DelayedMessage]:
        most_bytes = self._batch_bytes
        if transaction is not None:  # what is set aside is not locked
            aside = [aside.message.message for aside in self._aside.waiting]
            limit += len(aside)
            most_bytes += sum(len(message.encoded_headers) + len(message.body) for message in aside)
        return await self._store.fetch_due(now, limit, max_bytes=most_bytes, transaction=transaction)

    def _may_lock(self, waiting: Sequence[AsideMessage], now: datetime) -> bool:
        """Return whether a transaction may be kept open to lock a message that is set aside, alone.

        A store that returns a message at a time returns no other before that. If too many are locked so already,
        their times come soon.
        """
        if not isinstance(self._store, OneAtATime):
            return False
        locked = self._aside.locked()
        if len(locked) < MOST_LOCKED:
            return True
        for aside in locked:
            aside.until = min(aside.until, (aside.locked_at or now) + LOCKED_FOR)
        return False

    async def _forward(self, batch: Batch, transaction: Transaction | None, *, others_left: bool) -> None:
        before = [message for message in batch.messages if (aside := self._aside.find(message)) and aside.sent]
        sent_before = {message.id for message in before}
        fresh = [message for message in batch.messages if message.id not in sent_before]
        operations = [TransportOperation(self._as_sent(message.message), message.destination) for message in fresh]
        missed: list[DelayedMessage] = []
        if self._occurrences and (missed := self._missed(fresh)):
            kept = [position for position, message in enumerate(fresh) if message not in missed]
            fresh, operations = [fresh[position] for position in kept], [operations[position] for position in kept]
        sending = self._scope.of_dispatch(transaction)
        unsent = await self._dispatch(operations, sending) if operations else {}
        if unsent:
            unsent = await self._dispatch_again(operations, unsent, sending)
        failures = [(fresh[position], error) for position, error in unsent.items()]
        batch.sent += [message for position, message in enumerate(fresh) if position not in unsent]
        batch.dispatched = len(batch.sent)
        if sent := tuple(batch.sent):
            log_text = "dispatched %d messages"
            emit(logger, logging.DEBUG, Event.DISPATCHED, log_text, len(sent), messages=sent, count=len(sent))
        self.blame.sent(batch.sent)
        failures = await self._own(batch, failures, others_left=others_left)
        batch.sent += before + missed
        if self._scope.begin is None and len(failures) + len(self._failures) <= MOST_FAILURES:
            self._failures += failures[self._at_once :]
            failures = failures[: self._at_once]
        await self._finish(batch, failures, transaction)

    async def _own(self, batch: Batch, failures: Failures, *, others_left: bool) -> Failures:
        """Return the failures to be counted; set the other messages aside, whose fault may be the back end's."""
        blamed = [(message, error) for message, error in failures if self._scope.blames_back_end(error)]
        if len(blamed) == len(failures):
            return failures
        known = {message.id for message, _ in blamed}
        judged = [(message, error) for message, error in failures if message.id not in known]
        own = await self.blame.own(judged, others_left=others_left, others_follow=self._others_follow)
        counted = {message.id for message, _ in own}
        in_doubt = [message for message, _ in judged if message.id not in counted]
        batch.kept += [message for message in in_doubt if not self.blame.set_aside(message)]
        return blamed + own

    async def _others_follow(self, message: DelayedMessage) -> bool:
        """Return whether other messages go to the same destination now or within a moment, as far as can be seen."""
        due: Sequence[DelayedMessage] = ()
        try:
            if self._lookup is not None:
                until = self._recovery.now + FOLLOWS_WITHIN
                listed = await self._lookup.due_between(None, until, limit=SEARCHED_MESSAGES)
                due = [each.message for each in listed]
            elif isinstance(self._store, OneAtATime) and self._scope.begin is None:
                due = await self._store.fetch_due(self._recovery.now, 1, max_bytes=self._batch_bytes)
                await self._store.release_many(due)
        except Exception as error:
            emit(logger, logging.DEBUG, Event.FETCH_FAILED, "Failed to look for other messages: %s", error)
            return False
        return any(
            candidate.destination == message.destination
            and candidate.id != message.id
            and not self.blame.has_failed(candidate.id)
            for candidate in due
        )

    async def _finish(self, batch: Batch, failures: Failures, transaction: Transaction | None) -> None:
        if not self._scope.shared:
            self._sent = batch.sent
        await self._recovery.recover(batch, failures, transaction)
        await self._remove(batch.sent, transaction)

    async def _dispatch(
        self, operations: Sequence[TransportOperation], transaction: Transaction | None
    ) -> Mapping[int, Exception]:
        """Dispatch, and return the failures by position; raise an error that cannot be blamed on a single message."""
        alone = transaction if len(operations) == 1 else None
        try:
            async with savepoint(alone):
                await self._transport.dispatch(operations, transaction)
        except DispatchFailed as failed:
            return failed.failures
        except Exception as error:
            if len(operations) > 1 or self._scope.blames_back_end(error) or is_unusable(transaction, error):
                raise
            return {0: error}
        return {}

    async def _dispatch_again(
        self, operations: Sequence[TransportOperation], unsent: Mapping[int, Exception], transaction: Transaction | None
    ) -> Mapping[int, Exception]:
        """Dispatch refused operations again if their destination took others; return the errors of those still unsent.

        The fault may be the back end's and have just ended, as when a permission is given back.
        """
        reached = {operation.destination for position, operation in enumerate(operations) if position not in unsent}
        again = [
            position
            for position, error in unsent.items()
            if operations[position].destination in reached and says_no_fault(error)
        ]
        if not again:
            return unsent
        refused: Mapping[int, Exception]
        try:
            async with savepoint(transaction):
                refused = await self._dispatch([operations[position] for position in again], transaction)
        except Exception as error:
            if is_unusable(transaction, error):
                raise
            refused = dict.fromkeys(range(len(again)), error)
        dispatched_again = set(again)
        others = {position: error for position, error in unsent.items() if position not in dispatched_again}
        return others | {again[position]: error for position, error in refused.items()}

    async def _remove(self, sent: Sequence[DelayedMessage], transaction: Transaction | None) -> None:
        if not sent:
            return
        if self._occurrences and self._schedules is not None:
            occurrences = [self._occurrences[message.id] for message in sent if message.id in self._occurrences]
            await self._schedules.advance(occurrences, transaction)
        removed = await self._store.remove_many(sent, transaction)
        gone = len(sent) - removed
        if gone and self._scope.of_dispatch(transaction) is not None:
            raise RuntimeError(f"{gone} of {len(sent)} messages were removed by another process: nothing was sent")
        if gone:
            log_text = "Potential more-than-once dispatch as delayed message already removed from storage. (%d of %d)"
            emit(logger, logging.WARNING, Event.ALREADY_REMOVED, log_text, gone, len(sent), messages=tuple(sent))
        emit(logger, logging.DEBUG, Event.REMOVED, "removed %d messages", removed, messages=tuple(sent))

    def _as_sent(self, message: Message) -> Message:
        if Headers.DISPATCH_PROPERTIES.encode() not in message.encoded_headers:
            return message  # nearly always: the headers need not be decoded
        try:
            if self._schedules is not None and (occurrence := due_occurrence(message.headers)) is not None:
                self._occurrences[message.id] = occurrence
            return message.with_headers({}, without=(Headers.DISPATCH_PROPERTIES,))
        except CorruptHeaders:
            return message

    def _missed(self, messages: Sequence[DelayedMessage]) -> list[DelayedMessage]:
        """Return the occurrences that are too late to be dispatched."""
        now, missed = self._recovery.now, []
        for message in messages:
            occurrence = self._occurrences.get(message.id)
            if occurrence is not None and occurrence.is_missed(message.due, now):
                log_text = "The occurrence of schedule %s at %s was missed, and does not leave"
                emit(logger, logging.WARNING, Event.SCHEDULE_MISSED, log_text, occurrence.name, occurrence.at)
                missed.append(message)
        return missed
