"""Receiving: messages are taken from a queue, and each is handled in a task of its own.

::

    start
      |                                           messages came
      v                                               |
    RECEIVE: ask for as many as handlers are free, ---+---> PREFETCHED -- no handler has ended for 1 s --> back to
      ^   |  and some ahead of them (`prefetch`)            |                                           the queue
      |   |                                                 | a handler is free
      |   +-- failed --> PAUSE, longer each time: the       v
      |                  breaker counts                   HANDLING, a task each (`handling`), `concurrency` at most;
      |   +-- all are busy, and enough are prefetched:      |  beside them OUTSIDE of the limit those that wait for a
      |   v                                                 |  slot of their type (`attempts`), or cannot be moved
      |  ROOM? wait for it                                  |  (`recovery`)
      |   |                                                 |
      +---+---- few are prefetched, or one is outside <-----+ ended

A message whose deliveries have ended without an outcome may end the process: it is handled ALONE (`suspects`), with
nothing received, prefetched or handled beside it. Handled messages are completed together (`completion`).

`stop()` leads out of every state: nothing more is received, what is prefetched goes back to the queue, and handlers end
within the grace period or are cancelled (`intake`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from delayline.circuit_breaker import BreakerState, RepeatedFailuresOverTime, back_end_of, first_of, is_cancelled
from delayline.events import Event, emit
from delayline.receiving.attempts import HandlerAttempts, TypeLimits
from delayline.receiving.completion import Completion, RetryNotices
from delayline.receiving.handling import Handling
from delayline.receiving.once import RecordedCompletion
from delayline.receiving.prefetch import Prefetch
from delayline.receiving.recovery import Recovery
from delayline.receiving.suspects import Suspects
from delayline.transaction import TransactionMode
from delayline.transport import SupportsAnswers, SupportsHandlerSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.observer import SupportsTraces
    from delayline.outgoing import Composer, Destinations
    from delayline.receiving.handlers import Handlers
    from delayline.receiving.handling import Attempt
    from delayline.receiving.intake import Intake
    from delayline.receiving.once import Once
    from delayline.receiving.recoverability import Recoverability
    from delayline.receiving.transactions import HandlerTransactions
    from delayline.transport import ReceivedMessage

logger: logging.Logger = logging.getLogger(__name__)

TIME_TO_TRIGGER_RECEIVE: Final = timedelta(seconds=30)  # the time of NServiceBus's receive circuit breaker
#: Seconds between looks whether the server has answered, after the start and after a fault.
ANSWER_LOOKED_FOR_EVERY: Final = 0.5
#: Prefetched messages go back to the queue when no handler has ended for so many seconds.
PREFETCH_KEPT: Final = 1.0
#: The name of the measure that has the age of the oldest message that is being handled.
OLDEST_HANDLER: Final = "handlers.oldest"
#: Seconds that a message that must be handled alone waits for the handlers of others to end.
OTHERS_END_WITHIN: Final = 60.0


class Pipeline:
    """Receives a queue's messages and has them handled. Belongs to one event loop.

    Args:
        intake: The queue.
        completion: Completes its messages.
        attempt: Begins an attempt to handle a message, with its number from 1.
        recoverability: How often a message may have ended its process.
        composer: Composes delayed retries; None where retries cannot be delayed.
        traces: Makes spans; None for none.
    """

    def __init__(
        self,
        intake: Intake,
        completion: Completion,
        attempt: Callable[[ReceivedMessage, int], Attempt],
        recoverability: Recoverability,
        *,
        composer: Composer | None = None,
        traces: SupportsTraces | None = None,
    ) -> None:
        host, receiver = intake.host, intake.receiver
        self.intake = intake
        self._breaker = RepeatedFailuresOverTime(
            "Receive",
            time_to_trigger=TIME_TO_TRIGGER_RECEIVE,
            trigger=lambda error: host.critical_error(f"Failed to receive from {intake.queue}", error),
            clock=host.clock,
            observer=intake.reports.observer,
            back_end=back_end_of(host.transport),
        )
        self._suspects = Suspects(receiver, recoverability)
        self._recovery = Recovery(intake, completion, composer, self._breaker, recoverability)
        self._handling = Handling(intake, attempt, completion, self._recovery, self._suspects, traces)
        self._counts_crashes = host.mode is not TransactionMode.NONE
        """Whether a crash gives a message back: in mode NONE it has left its queue before it is handled."""
        self._is_alone = False
        """Whether a message is handled, or is about to be, beside no others."""
        self._is_answered = False
        """Whether the server has answered since the start: an endpoint may wait for its first message for days."""
        self._prefetch = Prefetch(receiver)
        self._ahead: asyncio.Future[Sequence[ReceivedMessage]] | None = None
        self._returning: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        intake.tasks.on_room, intake.tasks.on_end = self._make_room, self._handled

    @property
    def running(self) -> int:
        """How many messages are being handled."""
        return self.intake.tasks.running

    def measures(self) -> dict[str, float]:
        """Return `handlers.oldest`: for how many seconds the oldest message has been handled, 0 for none."""
        return {OLDEST_HANDLER: self.intake.tasks.oldest}

    def start(self) -> None:
        """Begin to receive."""
        self.intake.tasks.receiving = asyncio.create_task(
            self._receive(), name=f"delayline receiver {self.intake.queue}"
        )
        self.intake.tasks.receiving.add_done_callback(self._receiving_ended)

    def runs(self, task: asyncio.Task[object] | None) -> bool:
        """Return whether the task runs a handler."""
        return task in self.intake.tasks

    async def stop(self, grace: timedelta | None = None) -> None:
        """Take no more messages and let the handlers that run finish. Idempotent.

        Args:
            grace: How long they may take; then they are cancelled, and their messages go back to the queue. None for no
                limit.
        """
        self.intake.tasks.stopping.set()
        self._room.set()
        await self.intake.receiver.stop()
        if self.intake.tasks.receiving is not None:
            await asyncio.wait([self.intake.tasks.receiving])
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait([self._returning])
        await self._prefetch.give_back()
        await self.intake.tasks.finish(grace)
        self._breaker.close()

    def _receiving_ended(self, receiving: asyncio.Task[None]) -> None:
        if receiving.cancelled():
            log_text = "The task that receives from %s was cancelled: start the endpoint anew to go on, or stop it"
            emit(logger, logging.ERROR, Event.RECEIVE_TASK_FAILED, log_text, self.intake.queue)

    async def _receive(self) -> None:
        while not self.intake.tasks.stopping.is_set():
            self._room.clear()
            self._start_handlers()
            free = self.intake.tasks.free
            wanted = self._prefetch.wanted(free)
            if wanted <= 0 or self._is_alone:
                await self._room.wait()
                continue
            if self._recovery.leaves_to_others:
                wanted = 1
            asked = time.monotonic()
            try:
                batch = await (self._next_batch(wanted) if free > 0 else self._next_batch_ahead(wanted))
            except (Exception, asyncio.CancelledError) as caught:
                if is_cancelled():
                    raise
                error = caught if isinstance(caught, Exception) else RuntimeError(f"the receiver has raised {caught!r}")
                self.intake.reports.received(0, error)
                log_text = "Failed to receive from %s: %s"
                self._breaker.log_failure(
                    logger, logging.ERROR, Event.RECEIVE_FAILED, log_text, self.intake.queue, error, exception=error
                )
                await self.intake.tasks.until_stopping(self._breaker.failure(error))
                continue
            if batch:  # none after `stop`, or when prefetched messages go back: nobody has answered
                self._is_answered = True
                self._breaker.success()
                self.intake.reports.received(len(batch))
            self._prefetch.add(batch, waited=time.monotonic() - asked)
            self._start_handlers()
            if self._prefetch and (self._returning is None or self._returning.done()):
                self._returning = asyncio.create_task(self._return_unhandled(), name="delayline prefetch")

    async def _next_batch_ahead(self, limit: int) -> Sequence[ReceivedMessage]:
        """Return messages for later; none if prefetched messages go back to the queue meanwhile."""
        self._ahead = asyncio.ensure_future(self._next_batch(limit))
        try:
            await asyncio.wait([self._ahead])
            return [] if self._ahead.cancelled() else self._ahead.result()
        finally:
            self._ahead.cancel()
            self._ahead = None

    async def _next_batch(self, limit: int) -> Sequence[ReceivedMessage]:
        receiver = self.intake.receiver
        is_known = self._is_answered and self._breaker.state is BreakerState.DISARMED
        if is_known or not isinstance(receiver, SupportsAnswers):
            return await receiver.receive(limit)
        receiving = asyncio.ensure_future(receiver.receive(limit))
        try:
            await self._answered(receiver, receiving)
            return await receiving
        finally:
            receiving.cancel()

    async def _answered(self, receiver: SupportsAnswers, receiving: asyncio.Future[Any]) -> None:
        """Note that receiving works once the server has answered, though the queue is empty; it may as well hang."""
        asked = time.monotonic()
        while not receiving.done():
            if receiver.answered_at >= asked:
                self._is_answered = True
                self._breaker.success()
                self.intake.reports.received(0)
                return
            await first_of(asyncio.wait([receiving]), self.intake.host.clock.sleep(ANSWER_LOOKED_FOR_EVERY))

    async def _return_unhandled(self) -> None:
        """Give prefetched messages back to the queue once no handler has ended for a while."""
        while self._prefetch:
            ended = self._prefetch.ended
            await self.intake.host.clock.sleep(PREFETCH_KEPT)
            if self._prefetch.ended == ended:
                self._receive_no_more_ahead()
                await self._prefetch.give_back()
        if self.intake.tasks.free > 0:  # handlers that wait outside of the limit left their places
            self._room.set()

    def _receive_no_more_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    def _make_room(self) -> None:
        """Have others handled in place of a message that waits outside of the limit."""
        self._start_handlers()
        self._room.set()

    def _start_handlers(self) -> None:
        """Start a task for each prefetched message, up to the concurrency limit."""
        free = 0 if self.intake.tasks.stopping.is_set() else self.intake.tasks.free
        while free > 0 and self._prefetch and not self._is_alone:
            received = self._prefetch.pop()
            if received is None:
                continue
            if received.earlier_deliveries and self._counts_crashes and self._suspects.must_be_alone(received):
                self._is_alone = True
                self.intake.tasks.start(self._handle_alone(received))
            else:
                self.intake.tasks.start(self._handling.handle(received))
            free -= 1

    def _handled(self) -> None:
        self._prefetch.handled()
        self._start_handlers()
        if self._prefetch.is_low:
            self._room.set()

    async def _handle_alone(self, received: ReceivedMessage) -> None:
        """Handle a message that may end the process, when the handlers of others have ended."""
        try:
            if await self._suspects.count_surely(received):
                return
            await self.intake.tasks.others_end(OTHERS_END_WITHIN)
            self._receive_no_more_ahead()
            # Messages that must not wait here while a suspect is handled go back.
            await self._prefetch.give_back(but=self._suspects.may_wait)
            async with self._suspects.alone(received, self.intake.host.clock.sleep):
                await self._prefetch.give_back(but=self._suspects.may_wait)  # for what came meanwhile
                if self.intake.tasks.stopping.is_set():
                    await self.intake.receiver.release(received)
                    return
                self.intake.reports.alone(received)
                await self._handling.handle(received)
        except Exception as error:  # of the receiver, before it was handled
            await self._recovery.give_back(received, error)
        except BaseException:
            await self.intake.receiver.release(received)
            raise
        finally:
            self._is_alone = False


def handler_pipeline(
    intake: Intake,
    handlers: Handlers,
    *,
    transactions: HandlerTransactions,
    composer: Composer,
    recoverability: Recoverability,
    delivery: DelayedDelivery | None,
    destinations: Destinations | None,
    once: Once | None = None,
) -> Pipeline:
    """Return the pipeline of an endpoint's handlers, not started yet; their sends are composed by `composer`.

    Delayed sends go to `delivery`, None for none, and their destinations are looked for in `destinations`. `once`
    records the messages that are handled.
    """
    receiver, traces = intake.receiver, intake.host.observers.traces
    completion = Completion(
        intake, delivery=delivery, destinations=destinations, transactions=transactions, traces=traces
    )
    pending = completion.pending if once is None or once.reaches_delivery else None
    handled = completion if once is None else RecordedCompletion(once, intake, completion)
    slots = receiver.handler_slots(handlers.limits) if isinstance(receiver, SupportsHandlerSlots) else {}
    attempts = HandlerAttempts(
        intake.queue,
        handlers,
        composer,
        transactions,
        recoverability,
        handled,
        RetryNotices(intake, handled),
        TypeLimits(slots, intake.tasks),
        pending,
    )
    delays = None if delivery is None else composer
    return Pipeline(intake, completion, attempts.begin, recoverability, composer=delays, traces=traces)
