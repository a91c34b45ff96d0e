"""Handling once: a record in the inbox commits with what a handler has done, and a copy of its message finds it.

::

    received
       |
       v
    CLAIMED? (an inbox that claims first) -- held by another --> looked at again, outside of the concurrency limit
       |
       v
    RECORDED? -- yes --> acknowledged, not handled
       | no
       v
    handlers run
       |
       v
    one transaction: the record -- was there --> rolled back, acknowledged
                     the user's rows, in `context.transaction()`
                     the sends, in the outbox or the delayed message store beside it
       | committed
       v
    acknowledged; the outbox forwards the sends, with the same ids however often it tries

A crash between any two steps leaves nothing, or a record that the next delivery finds.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delayline.external import ExternalTransaction, WaitingThread, enlisted
from delayline.grouping import Grouping
from delayline.inbox import RecordKey, key_of
from delayline.outgoing import place
from delayline.receiving.completion import MAXIMUM_COMPLETED, AlreadyHandled
from delayline.receiving.handling import Stopping
from delayline.transaction import again_after_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.outbox import OutboxDelivery
    from delayline.external import ExternalConnection
    from delayline.inbox import Inbox
    from delayline.outgoing import Effect, Outgoing
    from delayline.receiving.completion import Completion
    from delayline.receiving.intake import Intake
    from delayline.receiving.transactions import HandlerTransaction
    from delayline.transaction import Transaction
    from delayline.transport import ReceivedMessage

#: Until a message that another holder has claimed is looked at again.
WAIT_FOR_CLAIM: Final = timedelta(milliseconds=200)


class _Handled(NamedTuple):
    """A message that was handled, and is to be recorded."""

    key: RecordKey
    effects: Sequence[Effect]


@dataclass(frozen=True, slots=True)
class Once:
    """Records the handled messages of an endpoint in its inbox."""

    inbox: Inbox
    outbox: OutboxDelivery
    delivery: DelayedDelivery | None
    """Takes delayed sends, where it is in the database of the inbox; the outbox takes all others."""

    @property
    def reaches_delivery(self) -> bool:
        """Whether the delayed delivery takes part in the transactions of the inbox."""
        return self.delivery is not None and self.delivery.transaction_domain == self.inbox.external_domain

    async def write(
        self, transaction: Transaction, handled: Sequence[_Handled], completion: Completion
    ) -> Sequence[bool]:
        """Record the messages and let the effects of those happen that had no record; return which had none."""
        new = set(await self.inbox.record([each.key for each in handled], transaction))
        outcomes: list[bool] = []
        for each in handled:
            outcomes.append(each.key in new)
            new.discard(each.key)  # of two copies in a group the first counts
        effects = [effect for each, is_new in zip(handled, outcomes, strict=True) if is_new for effect in each.effects]
        await completion.take_effect(effects, transaction, partial(self._send, transaction))
        return outcomes

    async def _send(self, transaction: Transaction, sends: Sequence[Outgoing]) -> None:
        in_store = self.reaches_delivery
        for is_stored, run in groupby(sends, lambda send: send.conflict or (in_store and send.due is not None)):
            if not is_stored:
                await self.outbox.put([(send.operation, send.due) for send in run], transaction)
                continue
            assert self.delivery is not None  # noqa: S101 - which was looked at
            for send in run:
                if send.conflict is not None:
                    await place(self.delivery, send, transaction)
                elif send.due is not None:
                    await self.delivery.defer(send.operation, send.due, transaction)


class Records:
    """Records a message in a transaction that the user commits, for `context.once`."""

    __slots__ = ("_inbox", "_loop", "is_known", "key")

    def __init__(self, inbox: Inbox, key: RecordKey) -> None:
        self._inbox = inbox
        self.key: RecordKey = key
        self._loop = asyncio.get_running_loop()
        self.is_known: bool = False
        """Whether the message has a record, in the user's transaction or from before."""

    def write(self, connection: ExternalConnection) -> Any:  # noqa: ANN401 - a bool, for a coroutine an awaitable of it
        """Return whether the message had no record before; on an event loop an awaitable of that."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return self._write(ExternalTransaction(connection))
        thread = WaitingThread()
        work = self._write(ExternalTransaction(connection, thread))
        return thread.wait_for(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _write(self, external: ExternalTransaction) -> bool:
        refusal = "the inbox takes part in no external transaction: leave context.once() out"
        new = await self._inbox.record([self.key], await enlisted(external, self._inbox, refusal))
        self.is_known = True
        return bool(new)


class RecordedCompletion:
    """Completes messages of a queue whose handling is recorded in an inbox.

    Args:
        once: The inbox, and where the sends go.
        intake: The queue.
        completion: Completes messages without a record.
    """

    def __init__(self, once: Once, intake: Intake, completion: Completion) -> None:
        self.once = once
        self._intake = intake
        self._completion = completion
        self._looks: Grouping[RecordKey, bool] = Grouping(self._look, maximum=MAXIMUM_COMPLETED, at_once=2)
        self._records: Grouping[_Handled, bool] = Grouping(self._record, maximum=MAXIMUM_COMPLETED, at_once=2)

    async def admit(self, received: ReceivedMessage, key: RecordKey) -> bool:
        """Return whether to handle the message: it has no record. Where messages are claimed first, claim it.

        Raises Stopping if the endpoint stops before the message could be claimed.
        """
        inbox = self.once.inbox
        if inbox.claims_first and not await inbox.claim(key):
            with self._intake.tasks.outside_limit(received):
                while True:
                    await self._intake.tasks.wait(WAIT_FOR_CLAIM)
                    if self._intake.tasks.stopping.is_set():
                        raise Stopping
                    if self._intake.tasks.free >= 0 and await inbox.claim(key):
                        break
        try:
            is_recorded = await self._looks.run(key)
        except BaseException:
            self.release(key)
            raise
        if is_recorded:
            self._intake.reports.duplicate(received.message)
        return not is_recorded

    def release(self, key: RecordKey) -> None:
        """Give up the claim on a message, if messages are claimed."""
        if self.once.inbox.claims_first:
            self.once.inbox.release(key)

    async def complete(
        self, received: ReceivedMessage, effects: Sequence[Effect], own: HandlerTransaction | None = None
    ) -> None:
        """Record the message with the handler's effects, and acknowledge it; see `Completion.complete`."""
        await self.record(received, key_of(received.message.logical), effects, own)

    async def record(
        self, received: ReceivedMessage, key: RecordKey, effects: Sequence[Effect], own: HandlerTransaction | None
    ) -> None:
        """Record the message under its key with the handler's effects, and acknowledge it.

        Others are handled in its place meanwhile, so that many are recorded together.
        """
        handled = _Handled(key, effects)
        with self._intake.tasks.outside_limit(received):
            if own is not None and own.connection is not None:
                is_new = await self._commit(own, handled)
            else:
                await self._completion.check(effects)
                is_new = await self._records.run_to_end(handled)
            if not is_new:
                self._intake.reports.duplicate(received.message)
            await self.acknowledge(received, handled=is_new)

    async def _commit(self, own: HandlerTransaction, handled: _Handled) -> bool:
        """Record the message in the handler's own transaction and commit that; return False if it has a record."""

        async def write(transaction: Transaction) -> bool:
            return all(await self.once.write(transaction, [handled], self._completion))

        return await self._completion.commit_own(own, handled.effects, write)

    async def acknowledge(
        self, received: ReceivedMessage, own: HandlerTransaction | None = None, *, handled: bool = False
    ) -> None:
        """Remove a message that has a record, after the commit of the handler's own transaction, if there is any.

        Args:
            received: The message.
            own: The handler's own transaction.
            handled: Whether it was handled now, and not before.
        """
        if own is not None and own.connection is not None:
            await self._completion.commit_own(own, (), _nothing)
        try:
            await self._completion.complete(received, (), handled=handled)
        except AlreadyHandled:  # the receiver that has it now finds the record
            await self._intake.receiver.release(received)

    async def _look(self, keys: Sequence[RecordKey]) -> Sequence[bool]:
        recorded = await self.once.inbox.recorded(keys)
        return [key in recorded for key in keys]

    async def _record(self, group: Sequence[_Handled]) -> Sequence[bool]:
        """Record a group of messages with their effects, together; each alone if any has a record."""
        return await again_after_conflicts(partial(self._record_once, group))

    async def _record_once(self, group: Sequence[_Handled]) -> Sequence[bool]:
        if not any(handled.effects for handled in group):  # a statement that commits by itself will do
            new = set(await self.once.inbox.record([handled.key for handled in group]))
            return [handled.key in new for handled in group]
        async with self.once.inbox.transaction() as transaction:
            return await self.once.write(transaction, group, self._completion)


async def _nothing(transaction: Transaction) -> bool:
    del transaction
    return True
