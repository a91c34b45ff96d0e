"""Sending: a message goes to its queue, or to the delayed delivery until it is due.

Whether it is due is decided once, when it is composed. A send that is cancelled returns at once, and the message is
usually sent all the same: where the transport or the delivery does not go on by itself, a task of the sender's does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, Self

from delayline.delayed.delivery import StoredDelivery, SupportsCancelledDefer, SupportsDestinationCheck
from delayline.errors import BackendUnavailable, ConfigurationError, DispatchFailed, QueueNotFound
from delayline.events import Event, emit
from delayline.external import UNSET, checked_transaction, enlisted
from delayline.grouping import ABANDONED
from delayline.outgoing import Destinations, Send, hand_over, place, report_sent
from delayline.shards import SupportsShards
from delayline.transaction import WAITING_TASK, Transaction
from delayline.transport import SupportsCancelledDispatch, SupportsTransportTransactions

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from delayline.clock import Clock
    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.outbox import OutboxDelivery
    from delayline.delayed.store import StoreResult
    from delayline.external import ExternalConnection, ExternalTransaction, Unset
    from delayline.observer import Observer
    from delayline.outgoing import Composer, Outgoing
    from delayline.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

UNOBSERVED: Final = contextlib.nullcontext()


class Sent(str):
    """The id of a sent message."""

    __slots__ = ("result",)

    result: StoreResult | None
    """What became of it, if it was sent with `on_conflict`."""

    def __new__(cls, message_id: str, result: StoreResult | None = None) -> Self:
        """Return the id."""
        sent = super().__new__(cls, message_id)
        sent.result = result
        return sent


class Sender:
    """Sends the messages of an endpoint, from its start to its stop. Belongs to an event loop.

    Args:
        transport: Sends messages that are due.
        delivery: Keeps the others; None for none.
        composer: Composes them.
        clock: The endpoint's.
        observer: Is told what was sent; None for none.
        outbox: Keeps what is sent in an external transaction that reaches neither; None for none.
    """

    def __init__(
        self,
        transport: Transport,
        delivery: DelayedDelivery | None,
        composer: Composer,
        clock: Clock,
        observer: Observer | None,
        outbox: OutboxDelivery | None = None,
    ) -> None:
        self._transport = transport
        self._delivery = delivery
        self._outbox = outbox
        self._composer = composer
        self._clock = clock
        self._observer = observer
        self._dispatch_going_on: SupportsCancelledDispatch | None = (
            transport if isinstance(transport, SupportsCancelledDispatch) else None
        )
        self._defer_going_on: SupportsCancelledDefer | None = (
            delivery if isinstance(delivery, SupportsCancelledDefer) else None
        )
        looks = not isinstance(delivery, SupportsDestinationCheck)
        self._queues = Destinations(transport, clock)
        self.destinations: Destinations | None = self._queues if looks else None
        """Where destinations of delayed messages are looked for; None where the delivery does that."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(
        self,
        send: Send,
        transaction: ExternalConnection | ExternalTransaction | Transaction | Unset,
        *,
        check_destination: bool,
    ) -> Sent:
        """Send a message; see `Endpoint.send`."""
        with UNOBSERVED if self._composer.traces is None else self._traced([send]):
            external = None if transaction is UNSET else checked_transaction(transaction)
            outgoing = self._composer.compose(send)
            destinations = self.destinations if check_destination else None
            if outgoing.conflict is not None:
                if destinations is not None:
                    await destinations.check(outgoing.operation.destination)
                return await self._place(outgoing, external)
            queue = outgoing.operation.destination
            if outgoing.due is None or (destinations is not None and not destinations.needs_check(queue)):
                destinations = None
            if external is not None:
                if destinations is not None:
                    await self._check(destinations, queue)
                await self._deliver_in(external, outgoing)
            elif destinations is None and self._goes_on(outgoing):
                await self._deliver([outgoing])
            else:
                await self._shielded(self._check_and_deliver(outgoing, destinations), outgoing)
            return Sent(outgoing.operation.message.id)

    async def send_many(
        self,
        messages: Iterable[Send],
        transaction: ExternalConnection | ExternalTransaction | Transaction | Unset,
        *,
        check_destination: bool,
    ) -> list[str]:
        """Send several messages; see `Endpoint.send_many`."""
        sends = list(messages)
        with self._traced(sends):
            external = None if transaction is UNSET else checked_transaction(transaction)
            composed = self._composer.compose_many(sends)
            if check_destination and self.destinations is not None:
                for queue in {outgoing.operation.destination for outgoing in composed if outgoing.due is not None}:
                    if external is None:
                        await self.destinations.check(queue)
                    else:
                        await self._check(self.destinations, queue)
            if external is not None:
                for outgoing in composed:
                    if outgoing.conflict is None:
                        await self._deliver_in(external, outgoing)
                    else:
                        await self._place(outgoing, external)
            elif composed:
                await self._shielded(self._deliver_together(composed), composed[0])
            return [outgoing.operation.message.id for outgoing in composed]

    async def _place(
        self, outgoing: Outgoing, external: ExternalConnection | ExternalTransaction | Transaction | None
    ) -> Sent:
        """Store a message that has a `conflict`, and return its id with the result."""
        transaction = external
        if transaction is not None and not isinstance(transaction, Transaction):
            if not isinstance(self._delivery, StoredDelivery):
                await place(self._delivery, outgoing, None)  # which says why it cannot
            transaction = await _enlisted(transaction, self._delivery)
        with self._reported([outgoing]):
            result = await place(self._delivery, outgoing, transaction)
        return Sent(outgoing.operation.message.id, result)

    async def _deliver_in(
        self, external: ExternalConnection | ExternalTransaction | Transaction, outgoing: Outgoing
    ) -> None:
        """Deliver in an external transaction, or in a transaction of ours.

        What an external transaction does not reach goes to the outbox. Without one, a message that is due waits in the
        store, if that is reached.
        """
        if isinstance(external, Transaction):
            await self._deliver([outgoing], external)
            return
        part = self._transport if outgoing.due is None else self._delivery
        try:
            transaction = await _enlisted(external, part)
        except ConfigurationError as refused:
            if self._outbox is not None:
                transaction = await _enlisted(external, self._outbox)
                with self._reported([outgoing]) if self._observer is not None else UNOBSERVED:
                    await self._outbox.put([(outgoing.operation, outgoing.due)], transaction)
                return
            if self._delivery is None or outgoing.due is not None:
                raise
            try:
                transaction = await _enlisted(external, self._delivery)
            except ConfigurationError:
                raise refused from None
            outgoing = outgoing._replace(due=self._clock.now())
        await self._deliver([outgoing], transaction)

    async def _check(self, destinations: Destinations, queue: str) -> None:
        """Raise QueueNotFound for a queue that does not exist; an outbox needs no transport that answers."""
        with contextlib.suppress(*() if self._outbox is None else (BackendUnavailable,)):
            await destinations.check(queue)

    async def _check_and_deliver(self, outgoing: Outgoing, destinations: Destinations | None) -> None:
        if destinations is not None:
            await destinations.check(outgoing.operation.destination)
        await self._deliver([outgoing])

    async def _deliver_together(self, sends: Sequence[Outgoing]) -> None:
        """Deliver all, in a single transaction if transport and delayed delivery can share one."""
        transport, delivery = self._transport, self._delivery
        shares = all(send.due is None for send in sends) or (
            delivery is not None and delivery.transaction_domain == transport.transaction_domain
        )
        can_share = shares and transport.transaction_domain is not None and not isinstance(transport, SupportsShards)
        with self._reported(sends):
            if can_share and isinstance(transport, SupportsTransportTransactions):
                async with transport.transaction() as transaction:
                    await self._hand_over(sends, transaction)
            else:
                await self._hand_over(sends, None)

    async def _deliver(self, sends: Sequence[Outgoing], transaction: Transaction | None = None) -> None:
        with self._reported(sends) if self._observer is not None else UNOBSERVED:
            await self._hand_over(sends, transaction)

    async def _hand_over(self, sends: Sequence[Outgoing], transaction: Transaction | None) -> None:
        try:
            await hand_over(self._transport, self._delivery, sends, transaction)
        except DispatchFailed as failed:
            first = failed.failures[min(failed.failures)]
            if isinstance(first, QueueNotFound) and transaction is None:
                first = QueueNotFound(first.queue, similar=await self._queues.similar(first.queue))
            raise first from failed

    @contextlib.contextmanager
    def _reported(self, sends: Sequence[Outgoing]) -> Iterator[None]:
        """Report the sending of the messages, which is awaited inside."""
        failed: Exception | None = None
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            failed = error
            raise
        finally:
            if self._observer is not None:
                report_sent(self._observer, sends, time.perf_counter() - began, failed)

    def _traced(self, sends: Sequence[Send]) -> AbstractContextManager[object]:
        """Return the span around sending, to be entered; without traces, a span that does nothing."""
        traces = self._composer.traces
        if traces is None:
            return UNOBSERVED
        valid = [send for send in sends if isinstance(send, Send)]
        delayed = any(send.delay is not None or send.deliver_at is not None for send in valid)
        find = self._composer.routes.find
        queues = [find(send.body) if send.destination is UNSET else send.destination for send in valid]
        return traces.sending("schedule" if delayed else "send", list(map(str, queues)))

    def _goes_on(self, outgoing: Outgoing) -> bool:
        """Return whether the delivery needs no task: it goes on when its caller is cancelled."""
        if outgoing.due is None:
            return self._dispatch_going_on is not None and self._dispatch_going_on.goes_on_when_cancelled
        delivery = self._defer_going_on
        return delivery is not None and delivery.goes_on_when_cancelled(outgoing.operation)

    async def _shielded(self, work: Coroutine[object, object, None], outgoing: Outgoing) -> None:
        """Deliver; cancelled, return at once and let the delivery go on: its effect may be there already."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller = asyncio.current_task()
        task = asyncio.create_task(_run_for(work, outgoing, done, caller), name="delayline send")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await done


async def _run_for(
    work: Coroutine[object, object, None],
    outgoing: Outgoing,
    done: asyncio.Future[None],
    caller: asyncio.Task[object] | None,
) -> None:
    WAITING_TASK.set(caller)
    try:
        await work
    except asyncio.CancelledError:
        done.cancel()
        raise
    except BaseException as error:
        if not done.done():
            done.set_exception(error)
        else:
            emit(logger, logging.WARNING, Event.SEND_ABANDONED, ABANDONED, outgoing.operation.message.id, error)
    else:
        if not done.done():
            done.set_result(None)


async def _enlisted(external: ExternalConnection | ExternalTransaction, part: object) -> Transaction:
    refusal = (
        f"{type(part).__name__} cannot take part in an external transaction: use a SqlTransport and a "
        "SqlDelayedMessageStore, give the endpoint an outbox, as in outbox=SqlOutbox(url), or send without transaction="
    )
    return await enlisted(external, part, refusal)
