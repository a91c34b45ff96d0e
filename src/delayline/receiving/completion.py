"""Completion: the sends of a handled message are dispatched and it is removed, in the way of the transaction mode.

Messages whose handlers end at about the same time are completed together: their removal from the queue and, where the
mode has both in the same transaction, their sends. Each message waits for the commit before its own at most.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from delayline.delayed.delivery import management_of
from delayline.delayed.store import Outcome, SupportsManagement
from delayline.errors import ConfigurationError, DelaylineError, DispatchFailed, InvalidMessage, QueueNotFound
from delayline.grouping import Grouping
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, control_message, to_wire_time
from delayline.outgoing import Outgoing, PendingChange, check_name, hand_over
from delayline.receiving.intake import MOST_OUTSIDE
from delayline.receiving.journaling import HandledEntries
from delayline.receiving.transactions import SupportsEarlyEnd
from delayline.transaction import TransactionMode, again_after_conflicts
from delayline.transport import (
    SupportsFlush,
    SupportsPrefetch,
    SupportsQueueLookup,
    SupportsTransportTransactions,
    TransportOperation,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.external import ExternalTransaction
    from delayline.message import DelayedMessage, Message
    from delayline.observer import SupportsTraces
    from delayline.outgoing import Destinations, Effect
    from delayline.receiving.intake import Intake
    from delayline.receiving.once import RecordedCompletion
    from delayline.receiving.transactions import HandlerTransaction, HandlerTransactions, TransactionLost
    from delayline.transaction import Transaction
    from delayline.transport import ReceivedMessage

UNTRACED: Final = contextlib.nullcontext()
#: Messages that are completed together.
MAXIMUM_COMPLETED: Final = 500


class AlreadyHandled(Exception):
    """The message left its queue while it was being handled here: another receiver has handled it."""


class PendingMessageLocked(DelaylineError):
    """A pending message that a handler has changed is locked by another transaction: the handler is tried again."""


class _Completion(NamedTuple):
    """A handled message, with what is done in the transaction of its removal."""

    received: ReceivedMessage
    effects: Sequence[Effect] = ()
    work: Callable[[Transaction | None], Awaitable[None]] | None = None
    """The work of a satellite."""
    handled: bool = False
    """Whether its handlers have run, and not the work of a satellite."""

    @property
    def needs_transaction(self) -> bool:
        """Whether there is more to do than to remove the message."""
        return bool(self.effects or self.work)


class Completion:
    """Completes the messages of a queue.

    Args:
        intake: The queue.
        delivery: Takes the delayed sends of handlers, and has the pending messages that they change; None for no such
            delivery, or no handlers.
        destinations: Where destinations of delayed sends are looked for; None for nowhere.
        transactions: The handlers' own transactions; None for no handlers.
        together: Whether messages are completed in groups, if the receiver supports that.
        traces: Makes spans; None for none.
    """

    def __init__(
        self,
        intake: Intake,
        *,
        delivery: DelayedDelivery | None = None,
        destinations: Destinations | None = None,
        transactions: HandlerTransactions | None = None,
        together: bool = True,
        traces: SupportsTraces | None = None,
    ) -> None:
        self._mode = intake.host.mode
        self._transport = intake.host.transport
        self._queue = intake.queue
        self._receiver = intake.receiver
        self._delivery = delivery
        management = None if delivery is None else management_of(delivery)
        self.pending: SupportsManagement | None = management if isinstance(management, SupportsManagement) else None
        """Changes pending messages; None where they cannot be changed."""
        self._entries = HandledEntries.of(delivery, intake.host.transport, intake.queue)
        self._destinations = destinations
        self._transactions = transactions
        self._traces = traces
        self._ending = intake.receiver if isinstance(intake.receiver, SupportsEarlyEnd) else None
        self._prefetching = intake.receiver if isinstance(intake.receiver, SupportsPrefetch) else None
        together = together and self._prefetching is not None
        self._completions: Grouping[_Completion, bool] = Grouping(
            self._complete_group,
            maximum=MAXIMUM_COMPLETED if together else 1,
            at_once=1 if together else intake.tasks.limit + MOST_OUTSIDE,
        )

    def early(self, received: ReceivedMessage) -> Callable[[ExternalTransaction], Transaction] | None:
        """Return what ends a handler's transaction with the message, on the handler's thread; None if nothing does."""
        return None if self._ending is None else partial(self._ending.acknowledge_early, received)

    async def remove(self, received: ReceivedMessage) -> bool:
        """Remove a message before it is handled; return False if it has left its queue before."""
        if not await self._completions.run_to_end(_Completion(received)):
            return False
        if isinstance(self._receiver, SupportsFlush):
            await self._receiver.flush(received)
        return True

    async def complete(
        self,
        received: ReceivedMessage,
        effects: Sequence[Effect],
        own: HandlerTransaction | None = None,
        *,
        handled: bool = True,
    ) -> None:
        """Let the handler's effects happen and remove the message from its queue, in the order of the transaction mode.

        Args:
            received: The message.
            effects: The handler's sends and changes of pending messages, in its order.
            own: The handler's own transaction, in which all is done.
            handled: Whether its handlers have succeeded, now and not before.

        Raises:
            AlreadyHandled: It has left its queue meanwhile.
            DelaylineError: A send failed; the message is where it was.
        """
        with UNTRACED if self._traces is None else self._traces.settling(self._queue):
            has_own = own is not None and (own.connection is not None or own.ended is not None)
            if own is not None and has_own:
                await self._complete_in(own, received, effects)
            else:
                await self._complete(received, effects, handled=handled)
            if handled and self._entries is not None:
                alone = has_own or self._mode is TransactionMode.NONE
                await self._entries.write_after(received.message, removed_alone=alone)

    async def _complete(self, received: ReceivedMessage, effects: Sequence[Effect], *, handled: bool) -> None:
        if effects:
            await self.check(effects)
        completion = _Completion(received, handled=handled)
        match self._mode:
            case TransactionMode.NONE:
                await self._take_effect(effects, None)
                return
            case TransactionMode.RECEIVE_ONLY:
                await self._take_effect(effects, None)
            case TransactionMode.SENDS_ATOMIC_WITH_RECEIVE:
                await self._take_effect([effect for effect in effects if _is_in_store(effect)], None)
                sends = [effect for effect in effects if not _is_in_store(effect)]
                completion = completion._replace(effects=sends)
            case TransactionMode.TRANSACTION_SCOPE:
                completion = completion._replace(effects=effects)
        if not await self._completions.run_to_end(completion):
            raise self._already_handled(received)

    async def complete_work(
        self, received: ReceivedMessage, work: Callable[[Transaction | None], Awaitable[None]]
    ) -> None:
        """Run a satellite's work and remove the message; in a transaction where the mode has a common one."""
        mode = self._mode
        if mode is not TransactionMode.TRANSACTION_SCOPE:
            await work(None)
        if mode is not TransactionMode.NONE:
            shared = work if mode is TransactionMode.TRANSACTION_SCOPE else None
            if not await self._completions.run_to_end(_Completion(received, work=shared)):
                raise self._already_handled(received)

    def outage(self, own: HandlerTransaction | None, error: BaseException) -> TransactionLost | None:
        """Return the outage that has ended a handler's transaction, if that is what the error says."""
        return None if self._transactions is None else self._transactions.outage(own, error)

    async def _complete_in(self, own: HandlerTransaction, received: ReceivedMessage, effects: Sequence[Effect]) -> None:
        """Remove the message, with all effects, in the handler's own transaction, and commit it."""

        async def remove(transaction: Transaction) -> bool:
            assert self._transactions is not None  # noqa: S101 - which has opened it
            together = effects
            stored = [effect for effect in effects if _is_in_store(effect)]
            if stored and not self._transactions.reaches(self._delivery, transaction):
                await self._take_effect(stored, None)
                together = [effect for effect in effects if not _is_in_store(effect)]
            was_there = await self._receiver.acknowledge(received, transaction)
            if was_there:
                await self._take_effect(together, transaction)
            return was_there

        if not await self.commit_own(own, effects, remove, at_once=not effects):
            raise self._already_handled(received)

    async def commit_own(
        self,
        own: HandlerTransaction,
        effects: Sequence[Effect],
        work: Callable[[Transaction], Awaitable[bool]],
        *,
        at_once: bool = False,
    ) -> bool:
        """Run `work` in the handler's own transaction and commit it; roll it back, and return False, if that does.

        Args:
            own: The transaction.
            effects: What the handler has asked for; the destinations of its sends are looked for first.
            work: Writes what commits with the user's rows.
            at_once: Whether the commit may follow the first statements of `work` that find what they look for.
        """
        assert self._transactions is not None  # noqa: S101 - which has opened it
        try:
            await self.check(effects)
            transaction = await self._transactions.enlist(own, at_once=at_once)
            done = await work(transaction)
        except BaseException as error:
            outage = self.outage(own, error)
            await own.roll_back()
            if outage is not None:
                raise outage from error
            raise
        if not done:
            await own.roll_back()
            return False
        try:
            await own.commit()
        except Exception as error:  # it has closed its connection
            if (outage := self.outage(own, error)) is not None:
                raise outage from error
            raise
        transaction.committed()
        return True

    async def check(self, effects: Sequence[Effect]) -> None:
        """Raise QueueNotFound if a delayed message has a destination that does not exist."""
        if self._destinations is None:
            return
        for effect in effects:
            if isinstance(effect, Outgoing) and effect.due is not None and effect.check:
                await self._destinations.check(effect.operation.destination)

    def _already_handled(self, received: ReceivedMessage) -> AlreadyHandled:
        return AlreadyHandled(
            f"message {received.message.id!r} left queue {self._queue!r} while it was handled: a possible duplicate"
        )

    async def _complete_group(self, group: Sequence[_Completion]) -> Sequence[bool]:
        """Remove the messages from the queue, with the effects of those that were there, together."""
        if not any(completion.needs_transaction for completion in group) and not self._entries_of(group):
            return await self._acknowledge(group, None)
        return await again_after_conflicts(partial(self._complete_in_transaction, group))

    async def _complete_in_transaction(self, group: Sequence[_Completion]) -> Sequence[bool]:
        transport = self._transport
        if not isinstance(transport, SupportsTransportTransactions):
            raise ConfigurationError(f"{type(transport).__name__} has no transactions")
        async with transport.transaction() as transaction:
            removed = await self._acknowledge(group, transaction)
            completed = [completion for completion, was_there in zip(group, removed, strict=True) if was_there]
            await self._take_effect([effect for completion in completed for effect in completion.effects], transaction)
            for completion in completed:
                if completion.work is not None:
                    await completion.work(transaction)
            if self._entries is not None and (entries := self._entries_of(completed)):
                await self._entries.write(entries, transaction)
        return removed

    def _entries_of(self, group: Sequence[_Completion]) -> Sequence[DelayedMessage]:
        """Return the journal's entries that are to be written in the transaction of the removal."""
        if self._entries is None:
            return ()
        return self._entries.of_removal(completion.received.message for completion in group if completion.handled)

    async def _acknowledge(self, group: Sequence[_Completion], transaction: Transaction | None) -> Sequence[bool]:
        if len(group) > 1 and self._prefetching is not None:
            return await self._prefetching.acknowledge_many([each.received for each in group], transaction)
        return [await self._receiver.acknowledge(each.received, transaction) for each in group]

    async def _take_effect(self, effects: Sequence[Effect], transaction: Transaction | None) -> None:
        """Dispatch the sends and change pending messages, in their order."""

        async def send(sends: Sequence[Outgoing]) -> None:
            await hand_over(self._transport, self._delivery, sends, transaction)

        await self.take_effect(effects, transaction, send)

    async def take_effect(
        self,
        effects: Sequence[Effect],
        transaction: Transaction | None,
        send: Callable[[Sequence[Outgoing]], Awaitable[None]],
    ) -> None:
        """Send, and change pending messages, in their order; `send` takes sends that follow each other together."""
        for kind, run in groupby(effects, type):
            if kind is Outgoing:
                await send(cast("list[Outgoing]", list(run)))
            else:
                for change in run:
                    await self._change(cast("PendingChange", change), transaction)

    async def _change(self, change: PendingChange, transaction: Transaction | None) -> None:
        """Change a pending message. Raises PendingMessageLocked."""
        assert self.pending is not None  # noqa: S101 - else the context has refused the change
        given = () if transaction is None else (transaction,)
        if change.due is None:
            outcome = await self.pending.cancel(change.message_id, *given)
        else:
            outcome = await self.pending.reschedule(change.message_id, change.due, *given)
        if outcome is Outcome.DISPATCHING and transaction is not None:
            # Another transaction may be changing it too, and be rolled back.
            raise PendingMessageLocked(
                f"pending message {change.message_id!r} is being dispatched, or changed by another transaction"
            )


def _is_in_store(effect: Effect) -> bool:
    """Return whether an effect is in the delayed message store, and not in a queue."""
    return not isinstance(effect, Outgoing) or effect.due is not None


@dataclass(frozen=True, slots=True)
class RetryNotices:
    """Completes messages that ServicePulse has sent to be retried, each with a notice to it.

    See https://docs.particular.net/servicepulse/intro-failed-message-retries.
    """

    intake: Intake
    completion: Completion | RecordedCompletion

    async def complete(
        self, received: ReceivedMessage, effects: Sequence[Effect], own: HandlerTransaction | None
    ) -> None:
        """Complete the message; without the notice if that cannot be sent. See `Completion.complete`."""
        notice = await self._notice(received.message)
        if notice is None:
            await self.completion.complete(received, effects, own)
            return
        try:
            await self.completion.complete(received, [notice, *effects], own)
        except DispatchFailed as failed:
            if set(failed.failures) != {0} or own is not None:
                raise
            self.intake.reports.unacknowledged(received.message, failed.failures[0])
            if self.intake.host.mode in (TransactionMode.NONE, TransactionMode.RECEIVE_ONLY):
                # All immediate sends but the notice are out, up to the first change of a pending message.
                first = list(takewhile(lambda effect: isinstance(effect, Outgoing), effects))
                effects = [*filter(_is_in_store, first), *effects[len(first) :]]
            await self.completion.complete(received, effects)

    async def _notice(self, message: Message) -> Outgoing | None:
        """Return the notice; None if the message names no queue for it, or a queue that cannot be sent to."""
        retry, queue = (message.headers.get(name) for name in (Headers.RETRY_ID, Headers.RETRY_ACKNOWLEDGEMENT_QUEUE))
        if retry is None or queue is None:
            return None
        transport, now = self.intake.host.transport, self.intake.host.clock.now()
        try:
            check_name(Headers.RETRY_ACKNOWLEDGEMENT_QUEUE, queue, MAXIMUM_DESTINATION_LENGTH)
            if queue == self.intake.queue:
                raise InvalidMessage("it is the queue that the message came from")
            if isinstance(transport, SupportsQueueLookup) and not await transport.has_queue(queue):
                raise QueueNotFound(queue)
        except DelaylineError as error:
            self.intake.reports.unacknowledged(message, error)
            return None
        notice = control_message(now, {Headers.RETRY_SUCCESSFUL: to_wire_time(now), Headers.RETRY_ID: retry})
        return Outgoing(TransportOperation(notice, queue), None)
