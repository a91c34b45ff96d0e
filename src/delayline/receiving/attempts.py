"""Attempts of an endpoint's handlers to handle a message, as far as the limits of its type allow them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable
from delayline.failures import is_outage
from delayline.inbox import key_of
from delayline.message import Headers
from delayline.receiving.context import MessageContext
from delayline.receiving.handling import Stopping
from delayline.receiving.once import RecordedCompletion, Records
from delayline.receiving.transactions import TransactionLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence

    from delayline.delayed.store import SupportsManagement
    from delayline.outgoing import Composer, Effect
    from delayline.receiving.completion import Completion, RetryNotices
    from delayline.receiving.handlers import Call, Handlers
    from delayline.receiving.intake import MessageTasks
    from delayline.receiving.recoverability import Recoverability
    from delayline.receiving.transactions import HandlerTransactions
    from delayline.transport import HandlerSlots, ReceivedMessage

#: Until a message whose type is limited looks for a free slot again.
WAIT_FOR_SLOT: Final = timedelta(milliseconds=100)


@dataclass(frozen=True, slots=True)
class HandlerAttempts:
    """Has an endpoint's handlers attempt the messages of its queue."""

    queue: str
    handlers: Handlers
    composer: Composer
    transactions: HandlerTransactions
    recoverability: Recoverability
    completion: Completion | RecordedCompletion
    notices: RetryNotices
    limits: TypeLimits
    pending: SupportsManagement | None
    """Changes pending messages; None where handlers cannot change any."""

    def begin(self, received: ReceivedMessage, number: int) -> HandlerAttempt:
        """Return an attempt. Raises CorruptHeaders, UnknownMessageType or InvalidPayload."""
        message = received.message
        context = MessageContext(message, self.queue, number, self.composer, self.transactions, self.pending)
        calls = self.handlers.calls(context.message)
        if isinstance(self.completion, RecordedCompletion):
            return RecordedAttempt(self, received, calls, context, self.completion)
        if len(calls) == 1 and Headers.RETRY_ID not in message.headers:  # of several, the last may still fail
            context.acknowledge_early = self.completion.early(received)
        return HandlerAttempt(self, received, calls, context)


class HandlerAttempt:
    """An attempt of the handlers to handle a message."""

    __slots__ = ("_attempts", "_calls", "_context", "_received", "_running")

    def __init__(
        self, attempts: HandlerAttempts, received: ReceivedMessage, calls: Sequence[Call], context: MessageContext
    ) -> None:
        self._attempts = attempts
        self._received = received
        self._calls = calls
        self._context = context
        self._running: Call | None = None

    @property
    def recoverability(self) -> Recoverability:
        """The retries of the handler that has run last, else the endpoint's."""
        own = None if self._running is None else self._running.recoverability
        return own or self._attempts.recoverability

    @property
    def effects(self) -> Sequence[Effect]:
        """What the handlers have sent, and the pending messages that they have changed."""
        return self._context.effects

    def run(self) -> Coroutine[object, object, None]:
        """Run the handlers, once the limit of their type admits the message."""
        return self._run_within_limit() if self._attempts.limits else self._run()

    async def _run_within_limit(self) -> None:
        async with self._attempts.limits.admission(self._received, self._calls[0].type_name):
            await self._run()

    def complete(self) -> Coroutine[object, object, None]:
        """Complete the message with the sends, and with a notice to ServicePulse if it sent it to be retried."""
        context, attempts = self._context, self._attempts
        is_retry = Headers.RETRY_ID in self._received.message.headers
        complete = attempts.notices.complete if is_retry else attempts.completion.complete
        return complete(self._received, context.effects, context.own)

    def gave_way(self, error: Exception) -> bool:
        """Return whether the handlers' own transaction has ended in favour of another."""
        return self._context.own is not None and self._attempts.transactions.gave_way(error)

    async def _run(self) -> None:
        """Run the handlers, whose sends the context takes."""
        context = self._context
        try:
            for call in self._calls:
                self._running = call
                await call(context)
        except BaseException as error:
            context.end()
            outage = self._attempts.transactions.outage(context.own, error)
            if context.own is not None:
                await context.own.roll_back()
            if outage is not None:
                raise outage from error
            raise
        context.end()


class RecordedAttempt(HandlerAttempt):
    """An attempt to handle a message that an inbox keeps a record of."""

    __slots__ = ("_completion", "_is_recorded", "_records")

    def __init__(
        self,
        attempts: HandlerAttempts,
        received: ReceivedMessage,
        calls: Sequence[Call],
        context: MessageContext,
        completion: RecordedCompletion,
    ) -> None:
        super().__init__(attempts, received, calls, context)
        self._completion = completion
        self._records = context.records = Records(completion.once.inbox, key_of(context.message))
        self._is_recorded = False

    async def complete(self) -> None:
        """Record the message with the sends, unless it is recorded, and acknowledge it."""
        try:
            if self._is_recorded or self._records.is_known:
                own, ran = self._context.own, not self._is_recorded
                await self._completion.acknowledge(self._received, own, handled=ran)
            elif Headers.RETRY_ID in self._received.message.headers:
                await super().complete()
            else:
                context = self._context
                await self._completion.record(self._received, self._records.key, context.effects, context.own)
        finally:
            self._completion.release(self._records.key)

    async def _run(self) -> None:
        try:
            self._is_recorded = not await self._completion.admit(self._received, self._records.key)
        except Exception as error:
            if is_outage(error):  # of the inbox: no failure of the handlers, which have not run
                raise TransactionLost(str(error)) from error
            raise
        if self._is_recorded:
            return
        try:
            await super()._run()
        except BaseException:
            self._completion.release(self._records.key)
            raise


class TypeLimits:
    """Admits messages as the limits of their types allow; without such limits it is false.

    Args:
        slots: The slots of the types that are limited; the receiver updates them as limits change.
        tasks: The tasks of the messages; tasks that wait for a slot are outside of the concurrency limit.
    """

    def __init__(self, slots: Mapping[str, HandlerSlots], tasks: MessageTasks) -> None:
        self._slots = slots
        self._tasks = tasks
        self._turns: dict[str, asyncio.Lock] = {}
        """One message of a type at a time looks for a slot."""

    def __bool__(self) -> bool:
        return bool(self._slots)

    @contextlib.asynccontextmanager
    async def admission(self, received: ReceivedMessage, type_name: str) -> AsyncIterator[None]:
        """Wait until the limit of its type admits the message, and hold its slot meanwhile.

        Raises Stopping if the endpoint stops first.
        """
        slot = None
        if (slots := self._slots.get(type_name)) is not None:
            with self._tasks.outside_limit(received):
                async with self._turns.setdefault(type_name, asyncio.Lock()):
                    while (slots := self._slots.get(type_name)) is not None or self._tasks.free < 0:
                        # the limit may be removed meanwhile
                        if (slot := await self._free_slot(slots)) is not None:
                            break
                        await self._tasks.wait(WAIT_FOR_SLOT)
        try:
            yield
        finally:
            if slots is not None and slot is not None:
                with contextlib.suppress(BackendUnavailable):  # the slot is free once the connection has ended
                    await slots.give_back(slot)

    async def _free_slot(self, slots: HandlerSlots | None) -> int | None:
        """Return a free slot; None while there is none, or no room for a message that has waited."""
        if self._tasks.stopping.is_set():
            raise Stopping
        if slots is None or self._tasks.free < 0:
            return None
        try:
            return await slots.take()
        except BackendUnavailable:  # the receiver reports it
            return None
