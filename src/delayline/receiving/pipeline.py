"""Receiving: take messages, run the handlers, commit their sends together with the receive, or recover.

A receiver that supports it is asked for messages ahead of the handlers, as many as they handle in a tenth of a second;
and messages whose handlers end at about the same time are completed together: their removal from the queue and, where
the transaction mode has both in one transaction, their sends. Each message waits for the commit before its own at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from delayline.circuit_breaker import DELAY_WHEN_ARMED, BreakerState, RepeatedFailuresOverTime, first_of, is_cancelled
from delayline.delayed.delivery import SupportsDeferMany
from delayline.errors import (
    BackendUnavailable,
    ConfigurationError,
    CorruptHeaders,
    DelaylineError,
    DispatchFailed,
    HandlerCancelled,
    InvalidMessage,
    InvalidPayload,
    QueueNotFound,
    TooManyCrashes,
    UnknownMessageType,
)
from delayline.events import Event, emit
from delayline.failures import back_off, brief, error_operations, is_outage, may_fit_smaller
from delayline.grouping import Grouping
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers, Message, control_message, to_wire_time
from delayline.observer import Action
from delayline.outgoing import Composer, Outgoing, check_name, report_sent
from delayline.receiving.handlers import Handlers, MessageContext
from delayline.receiving.recoverability import (
    DELAYED_DELIVERIES,
    Decision,
    Discard,
    GiveBack,
    MoveToErrors,
    Recoverability,
    RetryLater,
    RetryNow,
)
from delayline.receiving.suspects import Suspects
from delayline.receiving.transactions import TransactionLost
from delayline.transaction import TransactionMode, again_after_conflicts
from delayline.transport import (
    SupportsFlush,
    SupportsPrefetch,
    SupportsQueueLookup,
    SupportsServerTimeout,
    SupportsTransportTransactions,
    TransportOperation,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from datetime import datetime

    from delayline.delayed.host import DeliveryHost, Satellite, SatelliteWork
    from delayline.observer import Observer, SupportsTraces
    from delayline.outgoing import Destinations
    from delayline.receiving.handlers import Call
    from delayline.receiving.transactions import HandlerTransaction, HandlerTransactions
    from delayline.transaction import Transaction
    from delayline.transport import HandlerSlots, ReceivedMessage, Receiver

logger = logging.getLogger(__name__)

Result_co = TypeVar("Result_co", covariant=True)

TIME_TO_TRIGGER_RECEIVE: Final = timedelta(seconds=30)  # the time of NServiceBus's receive circuit breaker
RECOVERED_AFTER: Final = timedelta(seconds=5)
#: How many messages that cannot be moved wait beside those that are handled, and how large they are together.
MOST_APART: Final = 500
MOST_BYTES_APART: Final = 64 << 20
MOST_COUNTED: Final = 10_000
#: Messages that are received ahead of their handlers: as many as were handled in this time ...
PREFETCH_TIME: Final = 0.1
#: ... measured over at least this time ...
PREFETCH_MEASURED: Final = 0.02
#: ... but no more than these, in number and in bytes of their bodies.
MOST_PREFETCHED: Final = 1000
MOST_BYTES_PREFETCHED: Final = 16 << 20
#: Prefetched messages go back to the queue when no handler has ended for so long.
PREFETCH_KEPT: Final = 1.0
#: Until a message whose type is limited looks for a free slot again.
WAIT_FOR_SLOT: Final = timedelta(milliseconds=100)
#: Seconds until a cancelled handler that does not end is left behind.
CANCELLED_WITHIN: Final = 5.0
#: Messages that are completed together.
MAXIMUM_COMPLETED: Final = 500
#: So often a handler is repeated, within one attempt, whose own transaction has ended in favour of another ...
CONFLICTS: Final = 20
#: ... after a pause in seconds that doubles from a millisecond up to this, so that each of many gets its turn.
LONGEST_CONFLICT_PAUSE: Final = 0.25
#: A satellite attempts a message 5 times at once, as NServiceBus does.
SATELLITE_RETRIES: Final = 4
#: Seconds that a message that must be handled alone waits for the handlers of others to end.
OTHERS_END_WITHIN: Final = 60.0


class Defers(Protocol):
    """The destination of a handler's delayed sends."""

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Keep the operation until `due`, durably on return or at the commit of `transaction`."""
        ...


class _Completion(NamedTuple):
    """A handled message, with the sends that are dispatched in the transaction of its removal."""

    received: ReceivedMessage
    now: Sequence[TransportOperation] = ()
    later: Sequence[Outgoing] = ()


class Prefetch:
    """Messages that were received ahead of their handlers, and how many are worth it."""

    def __init__(self) -> None:
        self._messages: deque[ReceivedMessage] = deque()
        self._bytes = 0
        self._mean_bytes = 1.0
        self._target = 0
        self._handled = 0
        self._since = 0.0
        self.ended = 0
        """How many handlers have ended."""
        self._last_end = 0.0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def wanted(self, free: int, *, allowed: bool) -> int:
        """Return how many messages to ask for, given how many handlers are free; 0 or less for none."""
        if not allowed:
            return free
        elapsed = time.monotonic() - self._since
        if elapsed >= PREFETCH_MEASURED:
            self._target = min(MOST_PREFETCHED, int(self._handled * PREFETCH_TIME / elapsed))
            self._handled, self._since = 0, time.monotonic()
        if self._messages and not self.is_low:
            return 0
        affordable = int((MOST_BYTES_PREFETCHED - self._bytes) / self._mean_bytes)
        return free + min(self._target - len(self._messages), affordable)

    @property
    def is_low(self) -> bool:
        """Whether it is time for more messages."""
        return len(self._messages) <= self._target // 2

    def add(self, batch: Sequence[ReceivedMessage], *, waited: float) -> None:
        """Append messages for which the receiver has waited for so many seconds."""
        if waited >= PREFETCH_TIME:  # the queue was empty: start to measure anew
            self._target, self._handled, self._since = 0, 0, time.monotonic()
        size = sum(len(received.message.body) for received in batch)
        self._messages.extend(batch)
        self._bytes += size
        self._mean_bytes = max(1.0, size / max(1, len(batch)))

    def pop(self) -> ReceivedMessage:
        """Return the next message."""
        received = self._messages.popleft()
        self._bytes -= len(received.message.body)
        return received

    def clear(self) -> list[ReceivedMessage]:
        """Return all messages, which are not prefetched any more."""
        messages = list(self._messages)
        self._messages.clear()
        self._bytes = self._target = 0
        return messages

    def handled(self) -> None:
        """Count a message whose handler has ended."""
        self._handled += 1
        self.ended += 1


class _Stopping(Exception):
    """The endpoint stops before the handler of a message may run."""


class _AlreadyHandled(Exception):
    """The message left its queue while it was being handled here: another receiver has handled it."""


@dataclass(slots=True)
class Pipeline:
    """Receives one queue's messages and runs handlers over them. Belongs to one event loop."""

    host: DeliveryHost
    queue: str
    receiver: Receiver
    handlers: Handlers
    delivery: Defers | None
    composer: Composer
    recoverability: Recoverability
    concurrency: int
    destinations: Destinations | None = None
    """Where destinations of delayed sends are looked for; None for nowhere."""
    completes_together: bool = True
    """Whether messages are completed in groups, if the receiver supports that."""
    transactions: HandlerTransactions | None = None
    """Opens the transactions of handlers that ask for one."""
    slots: Mapping[str, HandlerSlots] = field(default_factory=dict)
    """The slots of the types that are limited over all processes; the receiver updates them as limits change."""
    acknowledges_retries: bool = True
    """Whether ServicePulse is notified of messages that it has sent to be retried, once they were handled."""
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    """One message of a type at a time looks for a slot."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _apart: dict[asyncio.Task[object], int] = field(default_factory=dict)
    """The tasks, with their messages' sizes, that wait to give back a message that could not be moved."""
    _unmoved: dict[str, int] = field(default_factory=dict)
    """How often messages could not be moved to the error queue, by id."""
    _loop: asyncio.Task[None] | None = None
    _returning: asyncio.Task[None] | None = None
    _ahead: asyncio.Future[Sequence[ReceivedMessage]] | None = None
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _breaker: RepeatedFailuresOverTime = field(init=False)
    _gives_up: bool = False
    """Whether the handlers that still run at a stop are cancelled."""
    _is_alone: bool = False
    """Whether a message is handled, or is about to be, beside no others."""
    _suspects: Suspects = field(init=False)
    _prefetch: Prefetch = field(default_factory=lambda: Prefetch())
    _prefetches: SupportsPrefetch | None = field(init=False)
    _observer: Observer | None = field(init=False)
    _take: Callable[[ReceivedMessage], Coroutine[object, object, None]] = field(init=False)
    _settle: Callable[..., Coroutine[object, object, None]] = field(init=False)
    _completions: Grouping[_Completion, bool] = field(init=False)

    def __post_init__(self) -> None:
        self._observer = self.host.observers.all
        traces = None if self.transactions is None else self.host.observers.traces  # a satellite has none
        self._settle = self._complete if traces is None else partial(self._complete_traced, traces)
        self._take = self._process if traces is None else partial(self._process_traced, traces)
        self._suspects = Suspects(self.receiver, self.recoverability)
        self._prefetches = self.receiver if isinstance(self.receiver, SupportsPrefetch) else None
        together = self.completes_together and self._prefetches is not None
        self._completions = Grouping(
            self._complete_group,
            maximum=MAXIMUM_COMPLETED if together else 1,
            at_once=1 if together else self.concurrency + MOST_APART,
        )
        self._breaker = RepeatedFailuresOverTime(
            "Receive",
            time_to_trigger=TIME_TO_TRIGGER_RECEIVE,
            trigger=lambda error: self.host.critical_error(f"Failed to receive from {self.queue}", error),
            clock=self.host.clock,
            observer=self._observer,
        )

    def start(self) -> None:
        """Begin to receive."""
        self._loop = asyncio.create_task(self._receive(), name=f"delayline receiver {self.queue}")
        self._loop.add_done_callback(self._receiving_ended)

    def runs(self, task: asyncio.Task[object] | None) -> bool:
        """Return whether the task runs one of the handlers."""
        return task in self._tasks

    async def stop(self, grace: timedelta | None = None) -> None:
        """Take no more messages and let the handlers that run finish. Idempotent.

        Args:
            grace: How long they may take; then they are cancelled, and their messages go back to the queue. None for no
                limit.
        """
        self._stopping.set()
        self._room.set()
        await self.receiver.stop()
        if self._loop is not None:
            await asyncio.wait([self._loop])
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait([self._returning])
        await self._release(self._prefetch.clear())
        if self._tasks and grace is not None:
            await first_of(asyncio.wait(self._tasks), self.host.clock.sleep(grace.total_seconds()))
            await self._cancel_handlers(grace)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.handlers.close()
        self._breaker.close()

    async def _cancel_handlers(self, grace: timedelta) -> None:
        """Cancel the handlers that run, and abandon those that do not end then."""
        if not self._tasks:
            return
        text = "%d handlers of %s have not ended within %s: cancelled, their messages are handled again"
        emit(logger, logging.WARNING, Event.HANDLERS_CANCELLED, text, len(self._tasks), self.queue, grace)
        self._gives_up = True
        for task in self._tasks:
            task.cancel()
        await first_of(asyncio.wait(self._tasks), self.host.clock.sleep(CANCELLED_WITHIN))
        if self._tasks:
            text = "%d handlers of %s ignore their cancellation and are left behind"
            emit(logger, logging.ERROR, Event.HANDLERS_CANCELLED, text, len(self._tasks), self.queue)
            self._tasks.clear()

    def _receiving_ended(self, loop: asyncio.Task[None]) -> None:
        if loop.cancelled():
            text = "The task that receives from %s was cancelled: start the endpoint anew to go on, or stop it"
            emit(logger, logging.ERROR, Event.RECEIVE_TASK_FAILED, text, self.queue)

    def _survives(self, cancelled: asyncio.CancelledError) -> HandlerCancelled | None:
        """Return the failure of a message whose task others have cancelled; None where the endpoint or its loop ends.

        The event loop cancels every task at its end, also the one that receives.
        """
        task, loop = asyncio.current_task(), self._loop
        if self._gives_up or task is None or loop is None or loop.cancelled() or loop.cancelling():
            return None
        while task.cancelling():
            task.uncancel()
        failure = HandlerCancelled(
            f"the task of a message in {self.queue!r} was cancelled, and not by its endpoint: let the handler end "
            "only tasks of its own"
        )
        failure.__cause__ = cancelled
        return failure

    async def _receive(self) -> None:
        while not self._stopping.is_set():
            self._room.clear()
            self._start_handlers()
            wanted = self._prefetch.wanted(self._free, allowed=self._prefetches is not None)
            if wanted <= 0 or self._is_alone:
                await self._room.wait()
                continue
            asked = time.monotonic()
            try:
                batch = await (self._next_batch(wanted) if self._free > 0 else self._next_batch_ahead(wanted))
            except (Exception, asyncio.CancelledError) as caught:
                if is_cancelled():
                    raise
                error = caught if isinstance(caught, Exception) else RuntimeError(f"the receiver has raised {caught!r}")
                if self._observer is not None:
                    self._observer.received(self.queue, 0, error)
                text = "Failed to receive from %s: %s"
                self._breaker.log_failure(
                    logger, logging.ERROR, Event.RECEIVE_FAILED, text, self.queue, error, exception=error
                )
                await self._pause(error)
                continue
            self._breaker.success()
            if self._observer is not None:
                self._observer.received(self.queue, len(batch), None)
            self._prefetch.add(batch, waited=time.monotonic() - asked)
            self._start_handlers()
            if self._prefetch and (self._returning is None or self._returning.done()):
                self._returning = asyncio.create_task(self._return_unhandled(), name="delayline prefetch")

    @property
    def running(self) -> int:
        """How many messages are being handled."""
        return len(self._tasks) - len(self._apart)

    @property
    def _free(self) -> int:
        """How many further messages may be handled."""
        return self.concurrency - len(self._tasks) + len(self._apart)

    async def _return_unhandled(self) -> None:
        """Give prefetched messages back to the queue once no handler has ended for a while."""
        while self._prefetch:
            ended = self._prefetch.ended
            await self.host.clock.sleep(PREFETCH_KEPT)
            if self._prefetch.ended == ended:
                if self._ahead is not None:
                    self._ahead.cancel()
                await self._release(self._prefetch.clear())
        if self._free > 0:  # handlers that wait outside of the limit left their places
            self._room.set()

    def _start_handlers(self) -> None:
        """Start a task for each prefetched message, up to the concurrency limit."""
        free = 0 if self._stopping.is_set() else self._free
        while free > 0 and self._prefetch and not self._is_alone:
            received = self._prefetch.pop()
            if self._prefetches is not None and not self._prefetches.holds(received):
                continue  # another receiver may have it since a connection was lost
            if received.earlier_deliveries and self._counts_crashes and self._suspects.must_be_alone(received):
                self._is_alone = True
                task = asyncio.create_task(self._take_alone(received))
            else:
                task = asyncio.create_task(self._take(received))
            self._tasks.add(task)
            task.add_done_callback(self._done)
            free -= 1

    @property
    def _counts_crashes(self) -> bool:
        """Whether a crash gives a message back: in mode NONE it has left its queue before it is handled."""
        return self.host.mode is not TransactionMode.NONE

    async def _take_alone(self, received: ReceivedMessage) -> None:
        """Handle a message that may end the process, when the handlers of others have ended."""
        try:
            if await self._suspects.count_surely(received):
                return
            others = self._tasks - self._apart.keys() - {asyncio.current_task()}
            if others:
                ended = asyncio.wait(others)
                await first_of(ended, self._stopping.wait(), self.host.clock.sleep(OTHERS_END_WITHIN))
            if self._ahead is not None:
                self._ahead.cancel()
            await self._make_way()
            async with self._suspects.alone(received, self.host.clock.sleep):
                await self._make_way()  # for what came meanwhile
                if self._stopping.is_set():
                    await self.receiver.release(received)
                    return
                text = "Message %s is handled alone: %d deliveries of it have ended without an outcome"
                number = received.earlier_deliveries
                emit(logger, logging.WARNING, Event.HANDLED_ALONE, text, received.message.id, number, queue=self.queue)
                await self._take(received)
        except Exception as error:  # of the receiver, before it was handled
            await self._give_back(received, error)
        except BaseException:
            await self.receiver.release(received)
            raise
        finally:
            self._is_alone = False

    async def _make_way(self) -> None:
        """Give those back that must not wait here while a suspect is handled."""
        waiting = self._prefetch.clear()
        kept = [other for other in waiting if self._suspects.may_wait(other)]
        self._prefetch.add(kept, waited=0.0)
        await self._release([other for other in waiting if other not in kept])

    async def _release(self, received: Sequence[ReceivedMessage]) -> None:
        if received and self._prefetches is not None:
            await self._prefetches.release_many(received)
            return
        for one in received:
            await self.receiver.release(one)

    async def _next_batch_ahead(self, limit: int) -> Sequence[ReceivedMessage]:
        """Return messages for later; none if prefetched ones go back to the queue meanwhile."""
        self._ahead = asyncio.ensure_future(self._next_batch(limit))
        try:
            await asyncio.wait([self._ahead])
            return [] if self._ahead.cancelled() else self._ahead.result()
        finally:
            self._ahead.cancel()
            self._ahead = None

    async def _next_batch(self, limit: int) -> Sequence[ReceivedMessage]:
        if self._breaker.state is BreakerState.DISARMED:
            return await self.receiver.receive(limit)
        # After a fault an empty queue looks like a hanging one: a wait that does not fail for a while is a recovery.
        receiving = asyncio.ensure_future(self.receiver.receive(limit))
        try:
            # A wait shorter than the server timeout proves nothing.
            unanswered = self.receiver.server_timeout if isinstance(self.receiver, SupportsServerTimeout) else 0.0
            quiet = RECOVERED_AFTER.total_seconds() + unanswered
            await first_of(asyncio.wait([receiving]), self.host.clock.sleep(quiet))
            if not receiving.done():
                self._breaker.success()
                if self._observer is not None:
                    self._observer.received(self.queue, 0, None)
            return await receiving
        finally:
            receiving.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._prefetch.handled()
        self._start_handlers()
        if self._prefetch.is_low:
            self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            emit(logger, logging.ERROR, Event.RECEIVE_TASK_FAILED, "a receive task failed", exception=error)

    async def _process_traced(self, traces: SupportsTraces, received: ReceivedMessage) -> None:
        with traces.processing(self.queue, received.message):
            await self._process(received)

    async def _process(self, received: ReceivedMessage) -> None:
        try:
            if self.host.mode is TransactionMode.NONE:
                if not await self._completions.run_to_end(_Completion(received)):
                    return
                if isinstance(self.receiver, SupportsFlush):
                    await self.receiver.flush(received)
            elif received.earlier_deliveries and not await self._may_handle(received):
                return
            await self._handle(received)
        except _AlreadyHandled as error:
            emit(logger, logging.WARNING, Event.RECEIVE_LOST, "%s", error, message=received.message, queue=self.queue)
            await self.receiver.release(received)
        except Exception as error:
            await self._give_back(received, error)
        except asyncio.CancelledError as cancelled:
            failure = self._survives(cancelled)
            if failure is None:
                await self.receiver.release(received)
                raise
            await self._give_back(received, failure)
        except BaseException:
            await self.receiver.release(received)
            raise

    def _failure(self, caught: Exception | asyncio.CancelledError) -> Exception:
        """Return what has failed; raises a cancellation that ends the endpoint."""
        if not isinstance(caught, asyncio.CancelledError):
            return caught
        failure = self._survives(caught)
        if failure is None:
            raise caught
        return failure

    async def _may_handle(self, received: ReceivedMessage) -> bool:
        """Return whether to handle a message that was delivered before; it is elsewhere if not."""
        try:
            await self._suspects.begin(received)
        except TooManyCrashes as error:
            await self._move_to_error(received, error)
            return False
        return True

    async def _handle(self, received: ReceivedMessage) -> None:
        """Run attempts until one succeeds or the message has gone elsewhere."""
        message = received.message
        attempt, conflicts = 1, 0
        while True:
            handled = False
            try:
                calls = self.handlers.calls(message.logical)
            except (CorruptHeaders, UnknownMessageType, InvalidPayload) as error:
                text = "Message %r is classified as a poison message: %s"
                emit(
                    logger,
                    logging.ERROR,
                    Event.POISON_MESSAGE,
                    text,
                    message.id,
                    brief(error),
                    message=message,
                    queue=self.queue,
                )
                await self._move_to_error(received, error)
                return
            running: list[Call] = []
            began = ended = time.perf_counter()
            try:
                context = MessageContext(message, self.queue, attempt, self.composer, self.transactions)
                run = partial(self._run_within_limit, received) if self.slots else self._run_handlers
                await run(context, calls, running)
                ended = time.perf_counter()
                handled = True
                await self._complete_handled(received, context)
            except _AlreadyHandled:
                raise
            except _Stopping:
                await self.receiver.release(received)
                return
            except (Exception, asyncio.CancelledError) as caught:
                failure = self._failure(caught)
                if conflicts < CONFLICTS and self._gave_way(context, failure):
                    await self._wait(_pause_after_conflict(conflicts))
                    conflicts += 1
                    continue
                own = running[-1].recoverability if running else None
                handled = handled or isinstance(failure, TransactionLost)
                if self._observer is not None:
                    ended = ended if handled else time.perf_counter()
                    self._observer.handled(self.queue, message, ended - began, failure)
                if not await self._recover(received, failure, attempt, own or self.recoverability, handled=handled):
                    return
                attempt, conflicts = attempt + 1, 0
            else:
                self._succeeded(message, context.outgoing, began, ended)
                return

    def _succeeded(self, message: Message, outgoing: Sequence[Outgoing], began: float, ended: float) -> None:
        self._unmoved.pop(message.id, None)
        if self._observer is not None:
            self._observer.handled(self.queue, message, ended - began, None)
            if outgoing and self.transactions is not None:  # a satellite's is only moved
                report_sent(self._observer, outgoing, time.perf_counter() - ended, None)
        if logger.isEnabledFor(logging.DEBUG):
            seen = message.logical
            emit(logger, logging.DEBUG, Event.HANDLED, "handled %s", seen.id, message=seen, queue=self.queue)

    async def _complete_handled(self, received: ReceivedMessage, context: MessageContext) -> None:
        """Complete a message that was handled; one that ServicePulse has sent to be retried with a notice to it."""
        is_retry = self.acknowledges_retries and Headers.RETRY_ID in received.message.headers
        notice = await self._retry_notice(received.message) if is_retry else None
        if notice is None:
            await self._settle(received, context.outgoing, context.own)
            return
        try:
            await self._settle(received, [notice, *context.outgoing], context.own)
        except DispatchFailed as failed:
            if set(failed.failures) != {0} or context.own is not None:
                raise
            self._log_unacknowledged(received.message, failed.failures[0])
            sent = self.host.mode in (TransactionMode.NONE, TransactionMode.RECEIVE_ONLY)  # all but the notice
            await self._settle(received, [one for one in context.outgoing if one.due is not None or not sent])

    async def _retry_notice(self, message: Message) -> Outgoing | None:
        """Return the notice that a retry was handled; None for other messages, or if its queue cannot be sent to.

        See https://docs.particular.net/servicepulse/intro-failed-message-retries.
        """
        retry, queue = (message.headers.get(name) for name in (Headers.RETRY_ID, Headers.RETRY_ACKNOWLEDGEMENT_QUEUE))
        if retry is None or queue is None:
            return None
        transport, now = self.host.transport, self.host.clock.now()
        try:
            check_name(Headers.RETRY_ACKNOWLEDGEMENT_QUEUE, queue, MAXIMUM_DESTINATION_LENGTH)
            if queue == self.queue:
                raise InvalidMessage("it is the queue that the message came from")
            if isinstance(transport, SupportsQueueLookup) and not await transport.has_queue(queue):
                raise QueueNotFound(queue)
        except DelaylineError as error:
            self._log_unacknowledged(message, error)
            return None
        notice = control_message(now, {Headers.RETRY_SUCCESSFUL: to_wire_time(now), Headers.RETRY_ID: retry})
        return Outgoing(TransportOperation(notice, queue), None)

    def _log_unacknowledged(self, message: Message, error: Exception) -> None:
        text = "The retry of message %s is not acknowledged to queue %r: %s"
        named = message.headers[Headers.RETRY_ACKNOWLEDGEMENT_QUEUE][:MAXIMUM_DESTINATION_LENGTH]
        emit(
            logger,
            logging.WARNING,
            Event.RETRY_UNACKNOWLEDGED,
            text,
            message.id,
            named,
            brief(error),
            message=message,
            queue=self.queue,
        )

    async def _run_within_limit(
        self, received: ReceivedMessage, context: MessageContext, calls: Sequence[Call], running: list[Call]
    ) -> None:
        """Run the handlers once the limit of their type admits the message, which waits beside those that are handled.

        Raises _Stopping if the endpoint stops first.
        """
        name, slot = calls[0].type_name, None
        if (slots := self.slots.get(name)) is None:
            await self._run_handlers(context, calls, running)
            return
        with self._outside_limit(received):
            async with self._turns.setdefault(name, asyncio.Lock()):
                while (slots := self.slots.get(name)) is not None or self._free < 0:  # the limit may be removed
                    if (slot := await self._free_slot(slots)) is not None:
                        break
                    await self._wait(WAIT_FOR_SLOT)
        try:
            await self._run_handlers(context, calls, running)
        finally:
            if slots is not None and slot is not None:
                with contextlib.suppress(BackendUnavailable):  # the slot is free once the connection has ended
                    await slots.give_back(slot)

    async def _free_slot(self, slots: HandlerSlots | None) -> int | None:
        """Return a free slot; None while there is none, or no room for a message that has waited."""
        if self._stopping.is_set():
            raise _Stopping
        if slots is None or self._free < 0:
            return None
        try:
            return await slots.take()
        except BackendUnavailable:  # the receiver reports it
            return None

    async def _run_handlers(self, context: MessageContext, calls: Sequence[Call], running: list[Call]) -> None:
        """Run the handlers, whose sends the context takes; append each that has begun to `running`."""
        try:
            for call in calls:
                running.append(call)
                await call(context)
        except BaseException as error:
            context.end()
            outage = self._outage(context.own, error)
            if context.own is not None:
                await context.own.roll_back()
            if outage is not None:
                raise outage from error
            raise
        context.end()

    def _gave_way(self, context: MessageContext, error: BaseException) -> bool:
        """Return whether the handlers run again at once, as their own transaction has ended in favour of another."""
        if context.own is None or self.transactions is None or self._stopping.is_set():
            return False
        if not self.transactions.gave_way(error):
            return False
        message, text = context.message, "Message %s is handled again, as its transaction gave way to another: %s"
        emit(
            logger,
            logging.DEBUG,
            Event.HANDLER_REPEATED,
            text,
            message.id,
            brief(error),
            message=message,
            queue=self.queue,
        )
        return True

    async def _recover(
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
            received: the failed delivery.
            error: the exception of the last attempt.
            attempt: the number of attempts so far in this round.
            recoverability: the retries of the handler that failed, or of the endpoint.
            handled: whether the handlers had succeeded: then an outage counts as no retry round and never moves the
                message to the error queue.
        """
        message = received.message.logical  # the id that handlers see
        decision = recoverability.decide(error, attempt, message.headers, self.host.clock.now())
        if isinstance(decision, RetryLater) and self.delivery is None:
            error.add_note(f"a retry after a delay needs delayed delivery: {DELAYED_DELIVERIES}")
            decision = MoveToErrors()
        outage = handled and is_outage(error) and not isinstance(error, recoverability.unrecoverable)
        # In mode NONE the message has left its queue: there is nothing to give back to.
        if outage and not isinstance(decision, RetryNow) and self.host.mode is not TransactionMode.NONE:
            decision = GiveBack()
        if isinstance(decision, GiveBack):
            text = "Message %s stays in %s for now: %s"
            emit(
                logger,
                logging.WARNING,
                Event.RECEIVE_FAILED,
                text,
                message.id,
                self.queue,
                error,
                message=message,
                queue=self.queue,
            )
            self._report(Action.RETURNED, message, error)
            await self._wait()
            await self.receiver.release(received)
            return False
        text = "Attempt %d to handle message %s failed: %s"
        emit(
            logger,
            logging.WARNING,
            Event.HANDLER_FAILED,
            text,
            attempt,
            message.id,
            brief(error),
            exception=error if logger.isEnabledFor(logging.DEBUG) else None,  # the last one's is with the move
            message=message,
            queue=self.queue,
        )
        match decision:
            case RetryNow():
                if pause := recoverability.pause_after(attempt):
                    await self._wait(pause)
                if self._stopping.is_set():
                    await self.receiver.release(received)
                    return False
                self._report(Action.RETRIED, message, error)
                return True
            case RetryLater(delay, headers):
                await self._retry_later(received, error, delay, headers)
            case MoveToErrors():
                await self._move_to_error(received, error)
            case Discard():
                await self._settle(received, [])
                text = "Discarded message %s: %s"
                emit(
                    logger,
                    logging.WARNING,
                    Event.DISCARDED,
                    text,
                    message.id,
                    brief(error),
                    message=message,
                    queue=self.queue,
                )
                self._report(Action.DISCARDED, message, error)
        return False

    def _report(self, action: Action, message: Message, error: Exception) -> None:
        if self._observer is not None:
            self._observer.recovered(action, self.queue, message, error)

    async def _retry_later(
        self, received: ReceivedMessage, error: Exception, delay: timedelta, headers: Mapping[str, str]
    ) -> None:
        message = received.message
        later = self.composer.again(message, self.queue, delay=delay, headers=headers)
        try:
            await self._settle(received, [later])
        except InvalidMessage as refused:  # it can be handled, and not wait
            refused.__context__ = error
            await self._move_to_error(received, refused)
            return
        text, seen = "Message %s is handled again in %s", message.logical
        emit(logger, logging.WARNING, Event.RETRIED_LATER, text, seen.id, delay, message=seen, queue=self.queue)
        self._report(Action.DELAYED, seen, error)

    async def _move_to_error(self, received: ReceivedMessage, error: Exception) -> None:
        message, host = received.message, self.host
        forms = error_operations(
            message,
            error,
            failed_queue=self.queue,
            error_queue=host.error_queue,
            endpoint_name=host.endpoint_name,
            now=host.clock.now(),
        )
        refused: Exception | None = None
        for operation in forms:
            try:
                await self._settle(received, [Outgoing(operation, None)])
                break
            except _AlreadyHandled:
                raise
            except Exception as trouble:
                if not may_fit_smaller(trouble):
                    raise
                refused = trouble
        else:
            if refused is not None:
                raise refused
        emit(
            logger,
            logging.ERROR,
            Event.MOVED_TO_ERROR,
            "Moved message %s to error queue %r: %s",
            message.id,
            host.error_queue,
            brief(error),
            exception=error,
            message=message,
            queue=self.queue,
        )
        self._report(Action.MOVED, message, error)

    async def _complete_traced(
        self,
        traces: SupportsTraces,
        received: ReceivedMessage,
        outgoing: list[Outgoing],
        own: HandlerTransaction | None = None,
    ) -> None:
        with traces.settling(self.queue):
            await self._complete(received, outgoing, own)

    async def _complete(
        self,
        received: ReceivedMessage,
        outgoing: list[Outgoing],
        own: HandlerTransaction | None = None,
    ) -> None:
        """Dispatch the recorded sends and remove the message from its queue, in the order of the transaction mode."""
        if own is not None and own.connection is not None:
            await self._complete_in(own, received, outgoing)
            return
        now, later = await self._checked(outgoing) if outgoing else ([], [])
        match self.host.mode:
            case TransactionMode.NONE:
                await self._send(now, later, None)
                return
            case TransactionMode.RECEIVE_ONLY:
                await self._send(now, later, None)
                completion = _Completion(received)
            case TransactionMode.SENDS_ATOMIC_WITH_RECEIVE:
                await self._send([], later, None)
                completion = _Completion(received, now)
            case TransactionMode.TRANSACTION_SCOPE:
                completion = _Completion(received, now, later)
        if not await self._completions.run_to_end(completion):
            raise self._already_handled(received)

    async def _complete_in(self, own: HandlerTransaction, received: ReceivedMessage, outgoing: list[Outgoing]) -> None:
        """Remove the message and dispatch the sends in the handler's own transaction, and commit it."""
        assert self.transactions is not None  # noqa: S101 - which has opened it
        try:
            now, later = await self._checked(outgoing)
            transaction = await self.transactions.enlist(own)
            if later and not self.transactions.reaches(self.delivery, transaction):
                await self._send([], later, None)
                later = []
            was_there = await self.receiver.acknowledge(received, transaction)
            if was_there:
                await self._send(now, later, transaction)
        except BaseException as error:
            outage = self._outage(own, error)
            await own.roll_back()
            if outage is not None:
                raise outage from error
            raise
        if not was_there:
            await own.roll_back()
            raise self._already_handled(received)
        try:
            await own.commit()
        except Exception as error:  # it has closed its connection
            if (outage := self._outage(own, error)) is not None:
                raise outage from error
            raise
        await self.receiver.release(received)  # its row is gone, the claim is not

    def _outage(self, own: HandlerTransaction | None, error: BaseException) -> TransactionLost | None:
        return None if self.transactions is None else self.transactions.outage(own, error)

    def _already_handled(self, received: ReceivedMessage) -> _AlreadyHandled:
        return _AlreadyHandled(
            f"message {received.message.id!r} left queue {self.queue!r} while it was handled: a possible duplicate"
        )

    async def _checked(self, outgoing: list[Outgoing]) -> tuple[list[TransportOperation], list[Outgoing]]:
        """Return the sends for now and for later. Raises QueueNotFound for destinations of delayed messages."""
        now = [entry.operation for entry in outgoing if entry.due is None]
        later = [entry for entry in outgoing if entry.due is not None]
        for entry in later:
            if entry.check and self.destinations is not None:
                await self.destinations.check(entry.operation.destination)
        return now, later

    async def _complete_group(self, group: Sequence[_Completion]) -> Sequence[bool]:
        """Remove the messages from the queue and dispatch the sends of those that were there, together."""
        if not any(one.now or one.later for one in group):
            return await self._acknowledge(group, None)
        return await again_after_conflicts(partial(self._complete_in_transaction, group))

    async def _complete_in_transaction(self, group: Sequence[_Completion]) -> Sequence[bool]:
        async with self._transaction() as transaction:
            removed = await self._acknowledge(group, transaction)
            sends = [one for one, was_there in zip(group, removed, strict=True) if was_there]
            await self._send(
                [operation for one in sends for operation in one.now],
                [outgoing for one in sends for outgoing in one.later],
                transaction,
            )
        return removed

    async def _acknowledge(self, group: Sequence[_Completion], transaction: Transaction | None) -> Sequence[bool]:
        if len(group) > 1 and self._prefetches is not None:
            return await self._prefetches.acknowledge_many([one.received for one in group], transaction)
        return [await self.receiver.acknowledge(one.received, transaction) for one in group]

    async def _send(
        self, now: list[TransportOperation], later: list[Outgoing], transaction: Transaction | None
    ) -> None:
        if now:
            await self.host.transport.dispatch(now, transaction)
        if not later:
            return
        if self.delivery is None:
            raise ConfigurationError(f"a delay needs delayed delivery: {DELAYED_DELIVERIES}")
        operations = [(entry.operation, entry.due) for entry in later if entry.due is not None]
        if len(operations) > 1 and isinstance(self.delivery, SupportsDeferMany):
            await self.delivery.defer_many(operations, transaction)
            return
        for operation, due in operations:
            await self.delivery.defer(operation, due, transaction)

    def _transaction(self) -> Transaction:
        transport = self.host.transport
        if not isinstance(transport, SupportsTransportTransactions):
            raise ConfigurationError(f"{type(transport).__name__} has no transactions")
        return transport.transaction()

    async def _give_back(self, received: ReceivedMessage, error: Exception) -> None:
        try:
            await self._recovery_failed(received, error)
        finally:
            await self.receiver.release(received)

    async def _recovery_failed(self, received: ReceivedMessage, error: Exception) -> None:
        """Hold the message for a while: neither its handlers nor its move to the error queue could be completed.

        A fault of a back end counts towards the circuit breaker; any other one is the message's, which waits longer
        each time, beside the messages that are handled meanwhile.
        """
        message_id = received.message.id
        text = f"Failed to execute recoverability policy for message with native ID: `{message_id}`"
        if isinstance(error, BackendUnavailable):
            emit(
                logger,
                logging.ERROR,
                Event.ERROR_MOVE_FAILED,
                "%s: %s",
                text,
                error,
                message=received.message,
                queue=self.queue,
            )
            await self._pause(error)
        else:
            times = self._unmoved.pop(message_id, 0) + 1
            self._unmoved[message_id] = times
            if len(self._unmoved) > MOST_COUNTED:
                del self._unmoved[next(iter(self._unmoved))]
            pause = back_off(times)
            emit(
                logger,
                logging.ERROR,
                Event.ERROR_MOVE_FAILED,
                "%s, %d times: %s. It stays in %s and is tried again in %s",
                text,
                times,
                brief(error),
                self.queue,
                pause,
                exception=error if times == 1 else None,
                message=received.message,
                queue=self.queue,
                count=times,
            )
            await self._back_off(received, pause)

    async def _back_off(self, received: ReceivedMessage, pause: timedelta) -> None:
        """Hold the message for this long outside of the concurrency limit, if there is room for that."""
        with self._outside_limit(received) as outside:
            await self._wait(pause if outside else min(pause, DELAY_WHEN_ARMED))

    @contextlib.contextmanager
    def _outside_limit(self, received: ReceivedMessage) -> Iterator[bool]:
        """Let others be handled in this message's place, if there is room for that; return whether there is."""
        task, size = asyncio.current_task(), len(received.message.body)
        if task is None or len(self._apart) >= MOST_APART or sum(self._apart.values()) + size > MOST_BYTES_APART:
            yield False
            return
        self._apart[task] = size
        self._start_handlers()
        self._room.set()
        try:
            yield True
        finally:
            del self._apart[task]

    async def _wait(self, pause: timedelta = DELAY_WHEN_ARMED) -> None:
        await first_of(self._stopping.wait(), self.host.clock.sleep(pause.total_seconds()))

    async def _pause(self, error: Exception) -> None:
        await first_of(self._stopping.wait(), self._breaker.failure(error))


def _pause_after_conflict(number: int) -> timedelta:
    """Return how long to wait before the handler runs again, after so many conflicts before this one."""
    return timedelta(seconds=min(0.001 * 2**number, LONGEST_CONFLICT_PAUSE) * random.random())  # noqa: S311 - spreads load


async def open_satellite(host: DeliveryHost, satellite: Satellite) -> Pipeline:
    """Return a pipeline on the satellite's queue, not started yet. Raises QueueNotFound."""
    work, handlers = _SatelliteHandler(satellite.work, satellite.queue, host), Handlers()
    handlers.add(work.handle)
    return Pipeline(
        host=replace(host, mode=satellite.mode),
        queue=satellite.queue,
        receiver=await host.transport.receiver(satellite.queue),
        handlers=handlers,
        delivery=work,
        composer=Composer(host.endpoint_name, host.clock, reply_to=None),
        recoverability=SatelliteRecoverability(
            immediate_retries=SATELLITE_RETRIES, immediate_pause=timedelta(0), delayed_retries=0
        ),
        concurrency=satellite.concurrency,
        completes_together=False,  # each waits for the timeout storage by itself
        acknowledges_retries=False,  # a satellite only moves messages
    )


class SatelliteRecoverability(Recoverability):
    """Five attempts at once, then the error queue; while a back end is out of reach messages stay where they are."""

    __slots__ = ()

    def decide(self, error: Exception, attempt: int, headers: Mapping[str, str], now: datetime) -> Decision:
        """Return the action after the `attempt`-th failure."""
        del headers, now
        if isinstance(error, BackendUnavailable):
            return GiveBack()
        return RetryNow() if attempt <= self.immediate_retries else MoveToErrors()


@dataclass(frozen=True, slots=True)
class _SatelliteHandler:
    """Dispatches a satellite's operations in the transaction of the receive."""

    of_satellite: SatelliteWork
    queue: str
    host: DeliveryHost

    async def handle(self, message: Message, context: MessageContext) -> None:
        await self.of_satellite.prepare(message, context.attempt)
        context.outgoing.append(Outgoing(TransportOperation(message, self.queue), self.host.clock.now()))

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        del due
        await self.of_satellite.work(operation.message, transaction)
