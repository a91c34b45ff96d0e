"""Recovery of a message that was not handled: again at once, again later, to the error queue, or back to its queue.

A message that cannot even be moved to the error queue is held for a while: a back end's fault counts towards the
circuit breaker of receiving, any other fault is the message's, which waits longer each time, beside those that are
handled meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import DELAY_WHEN_ARMED
from delayline.errors import BackendUnavailable, InvalidMessage, UnknownMessageType
from delayline.failures import back_off, error_operations, is_outage, may_fit_smaller
from delayline.message import Headers
from delayline.outgoing import DELAYED_DELIVERIES, Outgoing
from delayline.receiving.completion import AlreadyHandled
from delayline.receiving.recoverability import (
    LONGEST_WAIT_FOR_TYPE,
    Discard,
    GiveBack,
    MoveToErrors,
    RetryLater,
    RetryNow,
)
from delayline.serialization import names_in_header
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.message import Message
    from delayline.outgoing import Composer
    from delayline.receiving.completion import Completion
    from delayline.receiving.intake import Intake
    from delayline.receiving.recoverability import Recoverability
    from delayline.transport import ReceivedMessage

MOST_COUNTED: Final = 10_000
#: How long a process leaves most of what comes to others after it has met a message whose type it does not know.
LEAVES_TO_OTHERS_FOR: Final = 2 * LONGEST_WAIT_FOR_TYPE


@dataclass(slots=True)
class Recovery:
    """Recovers the messages of a queue."""

    intake: Intake
    completion: Completion
    composer: Composer | None
    """Composes the messages of delayed retries; None where they cannot be delayed."""
    breaker: RepeatedFailuresOverTime
    recoverability: Recoverability
    """The endpoint's own retries: how long messages wait whose type no handler takes."""
    _leaves_to_others_until: datetime | None = None
    _unmoved: dict[str, int] = field(default_factory=dict)
    """How often messages could not be moved to the error queue, by id."""

    async def recover(
        self,
        received: ReceivedMessage,
        error: Exception,
        attempt: int,
        recoverability: Recoverability,
        *,
        handled: bool,
    ) -> bool:
        """Decide between another attempt, a delayed retry and the error queue; True for another attempt at once.

        Args:
            received: The failed delivery.
            error: The exception of the last attempt.
            attempt: The number of attempts so far in this round.
            recoverability: The retries of the handler that failed, or of the endpoint.
            handled: Whether the handlers had succeeded: then an outage counts as no retry round and never moves the
                message to the error queue.
        """
        message = received.message.logical  # the id that handlers see
        decision = recoverability.decide(error, attempt, message.headers, self.intake.host.clock.now())
        if isinstance(decision, RetryLater) and self.composer is None:
            error.add_note(f"a retry after a delay needs delayed delivery: {DELAYED_DELIVERIES}")
            decision = MoveToErrors()
        outage = handled and is_outage(error) and not isinstance(error, recoverability.unrecoverable)
        # In mode NONE the message has left its queue: there is nothing to give back to.
        if outage and not isinstance(decision, RetryNow) and self.intake.host.mode is not TransactionMode.NONE:
            decision = GiveBack()
        if isinstance(decision, GiveBack):
            self.intake.reports.returned(message, error)
            await self.intake.tasks.wait(DELAY_WHEN_ARMED)
            await self.intake.receiver.release(received)
            return False
        self.intake.reports.failed(message, attempt, error)
        match decision:
            case RetryNow():
                if pause := recoverability.pause_after(attempt):
                    await self.intake.tasks.wait(pause)
                if self.intake.tasks.stopping.is_set():
                    await self.intake.receiver.release(received)
                    return False
                self.intake.reports.retried(message, error)
                return True
            case RetryLater():
                await self._retry_later(received, error, decision)
            case MoveToErrors():
                await self.move_to_errors(received, error)
            case Discard():
                await self.completion.complete(received, [], handled=False)
                self.intake.reports.discarded(message, error)
        return False

    async def not_taken(self, received: ReceivedMessage, error: Exception) -> None:
        """Move a message that no handler can take to the error queue.

        One of a type that no handler of this process takes waits before, as a newer process may have a handler.
        """
        decision = self._wait_for_handler(received.message) if isinstance(error, UnknownMessageType) else MoveToErrors()
        if isinstance(decision, RetryLater):
            await self._retry_later(received, error, decision)
            return
        self.intake.reports.poison(received.message, error)
        await self.move_to_errors(received, error)

    async def move_to_errors(self, received: ReceivedMessage, error: Exception) -> None:
        """Move the message to the error queue, in the largest of its forms that can be sent."""
        message, host = received.message, self.intake.host
        forms = error_operations(
            message,
            error,
            failed_queue=self.intake.queue,
            error_queue=host.error_queue,
            endpoint_name=host.endpoint_name,
            now=host.clock.now(),
        )
        refused: Exception | None = None
        for operation in forms:
            try:
                await self.completion.complete(received, [Outgoing(operation, None)], handled=False)
                break
            except AlreadyHandled:
                raise
            except Exception as trouble:
                if not may_fit_smaller(trouble):
                    raise
                refused = trouble
        else:
            if refused is not None:
                raise refused
        self.intake.reports.moved(message, host.error_queue, error)

    async def give_back(self, received: ReceivedMessage, error: Exception) -> None:
        """Hold a message that could be neither completed nor moved for a while, and give it back to its queue."""
        try:
            if isinstance(error, BackendUnavailable):
                self.intake.reports.not_moved(received.message, error)
                await self.intake.tasks.until_stopping(self.breaker.failure(error))
            else:
                await self._back_off(received, error)
        finally:
            await self.intake.receiver.release(received)

    def completed(self, message_id: str) -> None:
        """Forget that the message could not be moved."""
        self._unmoved.pop(message_id, None)

    @property
    def leaves_to_others(self) -> bool:
        """Whether other processes should receive first: messages wait whose types are not known here.

        A process hears first of what its own poller dispatches, so that it would receive them all again each time.
        """
        until = self._leaves_to_others_until
        if until is None:
            return False
        if self.intake.host.clock.now() < until:
            return True
        self._leaves_to_others_until = None
        return False

    def _wait_for_handler(self, message: Message) -> RetryLater | MoveToErrors:
        headers = message.logical.headers
        if self.composer is None or not names_in_header(headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")):
            return MoveToErrors()
        now = self.intake.host.clock.now()
        self._leaves_to_others_until = now + LEAVES_TO_OTHERS_FOR
        return self.recoverability.await_type(headers, now)

    async def _retry_later(self, received: ReceivedMessage, error: Exception, decision: RetryLater) -> None:
        assert self.composer is not None  # noqa: S101 - `recover` has looked
        message, delay = received.message, decision.delay
        later = self.composer.again(message, self.intake.queue, delay=delay, headers=decision.headers)
        try:
            await self.completion.complete(received, [later], handled=False)
        except InvalidMessage as refused:  # it can be handled, and not wait
            refused.__context__ = error
            await self.move_to_errors(received, refused)
            return
        self.intake.reports.delayed(message.logical, delay, error)

    async def _back_off(self, received: ReceivedMessage, error: Exception) -> None:
        """Hold the message outside of the concurrency limit, longer each time, if there is room for that."""
        message = received.message
        times = self._unmoved.pop(message.id, 0) + 1
        self._unmoved[message.id] = times
        if len(self._unmoved) > MOST_COUNTED:
            del self._unmoved[next(iter(self._unmoved))]
        pause = back_off(times)
        self.intake.reports.not_movable(message, times, pause, error)
        with self.intake.tasks.outside_limit(received) as is_outside:
            await self.intake.tasks.wait(pause if is_outside else min(pause, DELAY_WHEN_ARMED))
