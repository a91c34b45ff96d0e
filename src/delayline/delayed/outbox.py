"""The outbox: what is sent in a transaction of the user's waits beside the user's rows, and goes on after the commit.

::

    transaction of the user's                  after its commit, in a single process of the endpoint at a time
      rows                                       |
      sends --> OUTBOX, in order --- commit ---> FORWARDED --- due now --> the transport's queue
                                                    |     `--- delayed --> the delayed delivery
                                                    `--- cannot be sent -> the error queue

It is a delayed message store whose messages are all due at once, so the poller, its retries and its breakers do the
work. A row's id has the message's in it: an outbox may have several messages with the same id.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from delayline.circuit_breaker import first_of
from delayline.clock import from_microseconds, to_microseconds
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.store import SupportsRightsCheck
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError, DispatchFailed
from delayline.events import Event, emit
from delayline.message import DelayedMessage, Message, new_message_id
from delayline.observer import Observers
from delayline.transaction import TransactionMode
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from datetime import datetime

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.store import DelayedMessageStore, SupportsBatches
    from delayline.external import SupportsExternalTransactions
    from delayline.transaction import Transaction
    from delayline.transport import Receiver, Transport

    class Outbox(DelayedMessageStore, SupportsBatches, SupportsExternalTransactions, Protocol):
        """Keeps sent messages beside the user's rows, in the order in which they were stored."""

        @property
        def transaction_domain(self) -> Hashable:
            """The domain of transactions that reach it."""
            ...

        async def take_turn(self) -> bool:
            """Return whether this process is the one that forwards; another takes over when it ends."""
            ...

        async def end_turn(self) -> None:
            """Let another process forward."""
            ...


logger: logging.Logger = logging.getLogger(__name__)

#: Attempts to send a message after the first has failed; outages of the back end do not count.
RETRIES: Final = 4
#: An outbox is there so that its endpoint outlives a broker that is away: that is logged, and no critical error.
OUTLIVES: Final = timedelta(days=365)
#: Seconds between looks of a process that waits for its turn, and of the one that has it whether it still does.
TURN_EVERY: Final = 1.0
TURN_KEPT: Final = 5.0
#: The longest text before a message's own id in the id of its row: a UUID, and microseconds since 1970.
LONGEST_ROW_PREFIX: Final = 36 + 1 + 18 + 1


def row_of(operation: TransportOperation, due: datetime | None, now: datetime) -> DelayedMessage:
    """Return what the outbox keeps of an operation: a message that is due at once, with both in its id."""
    message = operation.message
    row_id = f"{new_message_id(now)}/{'' if due is None else to_microseconds(due)}/{message.id}"
    return DelayedMessage(
        Message.from_encoded(row_id, message.encoded_headers, message.body), operation.destination, now
    )


def operation_of(kept: TransportOperation) -> tuple[TransportOperation, datetime | None]:
    """Return the operation that `row_of` was given, and its due time; a row of another's as it is."""
    message = kept.message
    try:
        _, kept_due, message_id = message.id.split("/", 2)
        due = from_microseconds(int(kept_due)) if kept_due else None
    except (ValueError, OverflowError):
        return kept, None
    own = Message.from_encoded(message_id, message.encoded_headers, message.body)
    return TransportOperation(own, kept.destination), due


class OutboxTransport:
    """Sends the rows of an outbox: to the transport or, if they are delayed, to the delayed delivery.

    Args:
        transport: Sends messages that are due.
        delivery: Keeps the others; None for none.
        error_queue: Where messages go at once, whatever their due time.
    """

    transaction_domain = None
    highest_transaction_mode = TransactionMode.RECEIVE_ONLY

    def __init__(self, transport: Transport, delivery: DelayedDelivery | None, error_queue: str) -> None:
        self._transport = transport
        self._delivery = delivery
        self._error_queue = error_queue

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Send every row; see `Transport.dispatch`."""
        del transaction  # of no domain
        now: list[tuple[int, TransportOperation]] = []
        later: list[tuple[int, TransportOperation, datetime]] = []
        for position, kept in enumerate(operations):
            operation, due = operation_of(kept)
            if due is None or operation.destination == self._error_queue:
                now.append((position, operation))
            else:
                later.append((position, operation, due))
        failures: dict[int, Exception] = {}
        if now:
            try:
                await self._transport.dispatch([operation for _, operation in now])
            except DispatchFailed as failed:
                failures |= {now[position][0]: error for position, error in failed.failures.items()}
        failures |= await self._defer(later)
        if failures:
            raise DispatchFailed(dict(sorted(failures.items())))

    async def _defer(self, later: Sequence[tuple[int, TransportOperation, datetime]]) -> dict[int, Exception]:
        """Defer the rows, at the same time, and return the failures."""
        delivery = self._delivery
        if not later:
            return {}
        if delivery is None:
            error = ConfigurationError("a message in the outbox has a delay, and this endpoint has no delayed delivery")
            return {position: error for position, _, _ in later}
        outcomes = await asyncio.gather(
            *(delivery.defer(operation, due) for _, operation, due in later), return_exceptions=True
        )
        failures: dict[int, Exception] = {}
        for (position, _, _), outcome in zip(later, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failures[position] = outcome
            elif outcome is not None:
                raise outcome
        return failures

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Leave that to the endpoint."""

    async def start(self) -> None:
        """Leave that to the endpoint."""

    async def stop(self) -> None:
        """Leave that to the endpoint."""

    async def receiver(self, queue: str) -> Receiver:
        """Return a receiver of the transport."""
        return await self._transport.receiver(queue)


class OutboxDelivery(StoredDelivery):
    """Keeps sends in an outbox and forwards them, in the order in which they were stored.

    A single process of the endpoint forwards, or the order would be lost; another takes over within a second when it
    ends. A message that fails is tried again later, and those behind it pass it.

    Args:
        outbox: Keeps the messages.
        delivery: Takes delayed messages; None for none.
    """

    def __init__(self, outbox: Outbox, delivery: DelayedDelivery | None) -> None:
        super().__init__(
            outbox,
            number_of_retries=RETRIES,
            time_to_trigger_store_circuit_breaker=OUTLIVES,
            time_to_trigger_fetch_circuit_breaker=OUTLIVES,
            time_to_trigger_dispatch_circuit_breaker=OUTLIVES,
            polling=False,
        )
        self.outbox = outbox
        self._delivery = delivery
        self._turns: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._is_forwarding = False

    def bind(self, host: DeliveryHost) -> None:
        """Attach to the endpoint."""
        transport = OutboxTransport(host.transport, self._delivery, host.error_queue)
        # Without its observers: they measure delayed messages, which these are not.
        super().bind(replace(host, transport=transport, mode=TransactionMode.RECEIVE_ONLY, observers=Observers()))

    async def start(self) -> None:
        """Open the outbox, and forward once this process has the turn."""
        await super().start()
        self._stopping.clear()
        self._turns = asyncio.create_task(self._take_turns(), name=f"delayline outbox {self.host.endpoint_name}")

    async def stop(self) -> None:
        """Finish the batch that is forwarded, and let another process forward."""
        if self._turns is not None:
            self._stopping.set()
            await asyncio.wait([self._turns])  # not cancelled: it might still take the turn afterwards
            self._turns = None
            await self._stop_polling()
            self._is_forwarding = False
            try:
                await self.outbox.end_turn()
            except (DelaylineError, RuntimeError) as error:  # no new thread at the interpreter's end: it ends there too
                log_text = "The outbox of %s could not be given up: %s"
                emit(logger, logging.DEBUG, Event.BACKGROUND_TASK_FAILED, log_text, self.host.endpoint_name, error)
        await super().stop()

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the statements that grant the missing rights: every process of the endpoint may have to forward."""
        if not isinstance(self.outbox, SupportsRightsCheck):
            return ()
        return await self.outbox.missing_rights(endpoint_name, takes=takes)

    async def put(
        self, operations: Sequence[tuple[TransportOperation, datetime | None]], transaction: Transaction
    ) -> None:
        """Keep the operations, each with its due time, None for now, from the commit of the transaction on."""
        now = self.host.clock.now()
        await self._store_in(transaction, [row_of(operation, due, now) for operation, due in operations])

    async def _take_turns(self) -> None:
        while not self._stopping.is_set():
            try:
                has_turn = await self.outbox.take_turn()
                if has_turn and not self._is_forwarding:
                    self._start_polling()
                elif self._is_forwarding and not has_turn:
                    await self._stop_polling()
                self._is_forwarding = has_turn
            except Exception as error:  # of an outage the poller tells, if it runs
                level = logging.DEBUG if isinstance(error, BackendUnavailable) else logging.ERROR
                log_text = "The outbox of %s cannot be asked whether this process forwards: %s"
                emit(logger, level, Event.FETCH_FAILED, log_text, self.host.endpoint_name, error)
            pause = TURN_KEPT if self._is_forwarding else TURN_EVERY
            await first_of(self._stopping.wait(), self.host.clock.sleep(pause))
