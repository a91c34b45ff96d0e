"""Delayed delivery: the protocol, and `StoredDelivery`, which keeps messages in a delayed message store.

Concurrent sends share the store's transactions, and each waits for its own message only.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

from delayline.checks import time_span, whole_number
from delayline.circuit_breaker import FailureRate, RepeatedFailuresOverTime, back_end_of
from delayline.delayed.blame import Blame
from delayline.delayed.fairness import FairBy, served_fairly
from delayline.delayed.mover import Mover, scope_between
from delayline.delayed.one_at_a_time import batches_of
from delayline.delayed.poller import Poller
from delayline.delayed.recovery import Recovery
from delayline.delayed.schedules import Schedules, SupportsSchedules, scheduled
from delayline.delayed.set_aside import SetAside
from delayline.delayed.store import (
    StoreResult,
    SupportsBatches,
    SupportsClock,
    SupportsClose,
    SupportsForwardedCounts,
    SupportsForwarding,
    SupportsLookup,
    SupportsNotifications,
    SupportsReplacement,
    SupportsRightsCheck,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.errors import ConfigurationError, InvalidMessage, NotStarted
from delayline.events import Event, emit
from delayline.external import SupportsExternalTransactions
from delayline.grouping import ABANDONED, Grouping
from delayline.message import DelayedMessage
from delayline.shards import SupportsShards
from delayline.transaction import SupportsHighestMode, TransactionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.mover import BatchScope
    from delayline.delayed.store import DelayedMessageStore
    from delayline.external import ExternalTransaction
    from delayline.observer import Observer
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation


VERBS: Final = ("initialize", "store", "fetch_next_due", "next_due", "remove", "increment_failure_count")
THIRTY_SECONDS: Final = timedelta(seconds=30)
BY_DUE: Final = attrgetter("due")


class DelayedDelivery(Protocol):
    """Delivers messages when they are due. An endpoint calls bind, setup, start, defer and stop in this order."""

    @property
    def transaction_domain(self) -> Hashable | None:
        """Equal to the transport's domain if deferring can be part of its transactions."""
        ...

    @property
    def clock(self) -> Clock | None:
        """The back end's clock, where that decides when messages are due; the endpoint uses it unless given another."""
        ...

    @property
    def store(self) -> object | None:
        """What keeps the messages, such as a delayed message store; None where the back end itself holds them."""
        ...

    def bind(self, host: DeliveryHost) -> None:
        """Attach to the endpoint; called once before anything else. No I/O.

        Args:
            host: The endpoint's name, transport, clock and critical errors.
        """
        ...

    async def setup_infrastructure(self) -> None:
        """Create tables, queues or exchanges. Idempotent."""
        ...

    async def start(self) -> None:
        """Start to deliver due messages. Raises UnsupportedTransactionMode or BackendUnusable."""
        ...

    async def stop(self) -> None:
        """Finish messages in flight and stop; none is lost. Idempotent."""
        ...

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Keep the operation until `due`, durably on return or at the commit of `transaction`.

        Args:
            operation: A message with its destination.
            due: When it leaves, with a time zone; a past time means now.
            transaction: The transaction that the operation is kept in.
        """
        ...


@runtime_checkable
class SupportsCancelledDefer(Protocol):
    """Capability of a delayed delivery: a `defer` without a transaction that is cancelled returns at once, and goes on.

    `stop` waits for its end; errors after the cancellation are logged.
    """

    def goes_on_when_cancelled(self, operation: TransportOperation) -> bool:
        """Return whether it would do so now with that operation."""
        ...


@runtime_checkable
class SupportsDeferredSetup(Protocol):
    """Capability of a delayed delivery: the endpoint can start while the storage is unavailable."""

    def set_up_later(self) -> None:
        """Set up as soon as the storage is available, before any other operation on it."""
        ...


@runtime_checkable
class SupportsDeferMany(Protocol):
    """Capability of a delayed delivery: several operations in a single round trip."""

    async def defer_many(
        self, operations: Sequence[tuple[TransportOperation, datetime]], transaction: Transaction | None = None
    ) -> None:
        """Keep each operation until its due time, as `defer` does; in `transaction` all of them or none."""
        ...


@runtime_checkable
class SupportsDestinationCheck(Protocol):
    """Capability of a delayed delivery: `defer` itself raises QueueNotFound for a destination that does not exist."""

    finds_destinations: bool


@runtime_checkable
class SupportsPendingView(Protocol):
    """Capability of a delayed delivery: a view of its pending messages, which may be kept in another form than sent."""

    @property
    def management(self) -> object:
        """What lists and changes the messages as they were sent."""
        ...


def storage_of(delivery: DelayedDelivery) -> object:
    """Return what keeps the messages: the delivery's store, or without a store the delivery itself."""
    return delivery if delivery.store is None else delivery.store


def management_of(delivery: DelayedDelivery) -> object:
    """Return where the pending messages of a delivery are listed and changed."""
    return delivery.management if isinstance(delivery, SupportsPendingView) else storage_of(delivery)


class StoredDelivery:
    """Delayed delivery through a delayed message store and a poller, over any transport.

    Args:
        store: Keeps the messages until they are due.
        number_of_retries: Attempts to dispatch a due message after the first has failed; 0 or more.
        time_to_trigger_store_circuit_breaker: How long storing may fail before a critical error.
        time_to_trigger_fetch_circuit_breaker: How long fetching due messages may fail before a critical error.
        time_to_trigger_dispatch_circuit_breaker: How long dispatching may fail before a critical error.
        maximum_recovery_failures_per_second: How often the recovery of failed messages may itself fail; 1 or more.
        batch_size: The most messages that the poller takes at once; 1 or more.
        batch_bytes: The most bytes of headers and bodies that the poller takes at once; 1 or more. Where store and
            queues share no transaction, a second batch is prefetched while the first is sent.
        fair_by: What due messages are served fairly by while more are due than leave at once: `destination`, or
            `header:NAME` for the values of that header. By default messages leave by due time alone.
        polling: False only stores messages, and leaves dispatching to other processes of the endpoint.

    Raises:
        ConfigurationError: `store` lacks any of the six verbs, cannot serve fairly, or a value is out of range.

    Example:
        >>> from delayline import MemoryDelayedMessageStore, StoredDelivery
        >>> delivery = StoredDelivery(MemoryDelayedMessageStore(), number_of_retries=7)
    """

    def __init__(  # noqa: PLR0913 - settings, all keyword-only but the store
        self,
        store: DelayedMessageStore,
        *,
        number_of_retries: int = 0,
        time_to_trigger_store_circuit_breaker: timedelta = THIRTY_SECONDS,
        time_to_trigger_fetch_circuit_breaker: timedelta = THIRTY_SECONDS,
        time_to_trigger_dispatch_circuit_breaker: timedelta = THIRTY_SECONDS,
        maximum_recovery_failures_per_second: int = 1,
        batch_size: int = 500,
        batch_bytes: int = 16 * 1024 * 1024,
        fair_by: str | None = None,
        polling: bool = True,
    ) -> None:
        missing = [verb for verb in VERBS if not hasattr(store, verb)]
        if missing:
            raise ConfigurationError(f"{store!r} is not a delayed message store: it has no method {missing[0]!r}")
        self.store = store
        self.number_of_retries: int = whole_number("number_of_retries", number_of_retries, at_least=0)
        self.time_to_trigger_store_circuit_breaker: timedelta = time_span(
            "time_to_trigger_store_circuit_breaker", time_to_trigger_store_circuit_breaker
        )
        self.time_to_trigger_fetch_circuit_breaker: timedelta = time_span(
            "time_to_trigger_fetch_circuit_breaker", time_to_trigger_fetch_circuit_breaker
        )
        self.time_to_trigger_dispatch_circuit_breaker: timedelta = time_span(
            "time_to_trigger_dispatch_circuit_breaker", time_to_trigger_dispatch_circuit_breaker
        )
        self.maximum_recovery_failures_per_second: int = whole_number(
            "maximum_recovery_failures_per_second", maximum_recovery_failures_per_second, at_least=1
        )
        self.batch_size: int = whole_number("batch_size", batch_size, at_least=1)
        self.batch_bytes: int = whole_number("batch_bytes", batch_bytes, at_least=1)
        self.fair_by: FairBy | None = None if fair_by is None else FairBy.of(fair_by)
        if self.fair_by is not None and not isinstance(store, SupportsShards):
            served_fairly(store).be_fair(self.fair_by)
        self.polling = polling
        self._host: DeliveryHost | None = None
        self._group: StoreGroup | None = None
        self._poller: Poller | None = None
        self._signalled: Poller | None = None
        """The poller, if the store does not notify it."""
        self._unsubscribe: Callable[[], None] | None = None
        """Ends the store's notifications of the poller."""
        self._closers: list[Callable[[], None]] = []
        given: object = store
        if isinstance(given, SupportsShards):
            from delayline.delayed import sharded

            self.__class__ = sharded.ShardedDelivery
            sharded.divide(self, fair_by=fair_by)

    @property
    def transaction_domain(self) -> Hashable | None:
        """The store's domain, or None for a store without transactions."""
        return self.store.transaction_domain if isinstance(self.store, SupportsTransactions) else None

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """The strongest mode that the store says it supports; the strongest of all if it says nothing."""
        if isinstance(self.store, SupportsHighestMode):
            return self.store.highest_transaction_mode
        return TransactionMode.TRANSACTION_SCOPE

    @property
    def clock(self) -> Clock | None:
        """The store's clock; None if it uses the machine's."""
        return self.store.clock() if isinstance(self.store, SupportsClock) else None

    @property
    def host(self) -> DeliveryHost:
        """The endpoint that this delivery belongs to. Raises NotStarted before `bind`."""
        if self._host is None:
            raise NotStarted(
                "this StoredDelivery belongs to no endpoint yet: pass it to Endpoint(delayed_delivery=...)"
            )
        return self._host

    def bind(self, host: DeliveryHost) -> None:
        """Attach to the endpoint. Raises ConfigurationError if attached to another already."""
        if self._host is not None and self._host.endpoint_name != host.endpoint_name:
            raise ConfigurationError(
                f"this StoredDelivery belongs to endpoint {self._host.endpoint_name!r}; "
                f"create another for endpoint {host.endpoint_name!r}"
            )
        self._host = host

    async def setup_infrastructure(self) -> None:
        """Create the store's tables if the store supports that; runs before `start`."""
        if isinstance(self.store, SupportsSetup):
            await self.store.setup_infrastructure(self.host.endpoint_name)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the statements that grant the store's user the missing rights, see `SupportsRightsCheck`."""
        if not isinstance(self.store, SupportsRightsCheck):
            return ()
        return await self.store.missing_rights(endpoint_name, takes=takes and self.polling)

    async def start(self) -> None:
        """Open the store, then start the poller."""
        host = self.host
        await self.store.initialize(host.endpoint_name, host.mode)
        breaker = self._breaker("DelayedDeliveryStore", "Failed to store delayed message")
        self._group = StoreGroup(self.store, breaker, self._signal, host.observers.all)
        if self.polling:
            self._start_polling()

    def _start_polling(self) -> None:
        self._poller = self._new_poller()
        if isinstance(self.store, SupportsNotifications):
            self._unsubscribe = self.store.on_stored(self._poller.signal)
        else:
            self._signalled = self._poller
        self._poller.start()

    async def _stop_polling(self) -> None:
        """Wait for the poller's batch."""
        if self._poller is not None:
            await self._poller.stop()
            self._poller = self._signalled = None
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    async def stop(self) -> None:
        """Wait for the poller's batch and for running stores, then close the store if it supports that."""
        await self._stop_polling()
        if self._group is not None:
            await self._group.stop()
            self._group = None
            for close in reversed(self._closers):
                close()
            self._closers.clear()
            if isinstance(self.store, SupportsClose):
                await self.store.close()

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction if deferring can take part in it. Raises ConfigurationError."""
        if isinstance(self.store, SupportsExternalTransactions):
            return await self.store.enlist(external)
        raise ConfigurationError(
            f"{type(self.store).__name__} cannot take part in an external transaction: use a SqlDelayedMessageStore, "
            "or send without transaction="
        )

    def goes_on_when_cancelled(self, operation: TransportOperation) -> bool:
        """Return True: the store stores groups of messages without their senders."""
        del operation
        return True

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Store the operation until `due`; the poller moves it at once if that is over."""
        message = DelayedMessage(operation.message, operation.destination, due)
        if transaction is None:
            await self._started_group().store(message)
        else:
            await self._store_in(transaction, [message])

    async def defer_or_replace(
        self,
        operation: TransportOperation,
        due: datetime,
        *,
        replace: bool,
        at_most: timedelta | None = None,
        transaction: Transaction | None = None,
    ) -> StoreResult:
        """Store the operation unless a message with its id is pending; see `SupportsReplacement`."""
        group = self._started_group()
        if not isinstance(self.store, SupportsReplacement):
            raise ConfigurationError(
                f"{type(self.store).__name__} cannot replace pending messages, or report them: send without on_conflict"
            )
        message = DelayedMessage(operation.message, operation.destination, due)
        result = await self.store.store_or_replace(message, replace=replace, at_most=at_most, transaction=transaction)
        stored = [message] if result in (StoreResult.STORED, StoreResult.REPLACED) else []
        if transaction is None:
            group.report(stored)
            self._signal(due)
        else:
            transaction.after_commit(lambda: self._stored_in(stored, due))
        return result

    async def defer_many(
        self, operations: Sequence[tuple[TransportOperation, datetime]], transaction: Transaction | None = None
    ) -> None:
        """Store several operations, each until its due time; see `defer`."""
        group = self._started_group()
        messages = [DelayedMessage(operation.message, operation.destination, due) for operation, due in operations]
        if transaction is None:
            await asyncio.gather(*map(group.store, messages))
        else:
            await self._store_in(transaction, messages)

    async def _store_in(self, transaction: Transaction, messages: Sequence[DelayedMessage]) -> None:
        self._started_group()
        if len(messages) > 1 and isinstance(self.store, SupportsBatches):
            await self.store.store_many(messages, transaction)
        else:
            for message in messages:
                await self.store.store(message, transaction)
        first = min(message.due for message in messages)
        transaction.after_commit(lambda: self._stored_in(messages, first))

    def _started_group(self) -> StoreGroup:
        if self._group is None:
            raise NotStarted("delayed delivery is not started: use `async with endpoint:` or `await endpoint.start()`")
        return self._group

    def _stored_in(self, messages: Sequence[DelayedMessage], first: datetime) -> None:
        self._signal(first)
        if self._group is not None:
            self._group.report(messages)

    def _signal(self, due: datetime) -> None:
        """Signal the poller, unless the store notifies it."""
        if self._signalled is not None:
            self._signalled.signal(due)

    def _new_poller(self) -> Poller:
        host, store, scope = self.host, self.store, scope_between(self.store, self.host.transport)
        aside, failure_rate = SetAside(), self._failure_rate()
        batches = batches_of(
            store, host.clock, aside, failure_rate=failure_rate, in_transactions=scope.begin is not None
        )
        recovery = Recovery(
            batches,
            host,
            number_of_retries=self.number_of_retries,
            scope=scope,
            failure_rate=failure_rate,
            aside=aside,
        )
        return Poller(
            batches,
            host,
            mover=Mover(
                batches,
                host.transport,
                scope=scope,
                recovery=recovery,
                batch_bytes=self.batch_bytes,
                blame=Blame(aside, host.clock),
                lookup=store if isinstance(store, SupportsLookup) else None,
                aside=aside,
                prefetches=isinstance(store, SupportsBatches),
                schedules=Schedules(scheduled(store), host.clock) if isinstance(store, SupportsSchedules) else None,
            ),
            forwarding=self._forwarding(scope),
            fetch_breaker=self._breaker("DelayedMessageFetch", "Failed to fetch due delayed messages from the storage"),
            dispatch_breaker=self._breaker(
                "DelayedMessageDispatch", "Failed to dispatch delayed messages to destination"
            ),
            batch_size=self.batch_size,
            batch_bytes=self.batch_bytes,
        )

    def _forwarding(self, scope: BatchScope) -> SupportsForwarding | None:
        store = self.store
        if scope.shared and isinstance(store, SupportsForwarding) and store.forwards_to(self.host.transport):
            if self.host.observers.all is not None and isinstance(store, SupportsForwardedCounts):
                store.count_forwarded()
            return store
        return None

    def _breaker(self, name: str, text: str) -> RepeatedFailuresOverTime:
        host = self.host
        times = {
            "DelayedDeliveryStore": self.time_to_trigger_store_circuit_breaker,
            "DelayedMessageFetch": self.time_to_trigger_fetch_circuit_breaker,
            "DelayedMessageDispatch": self.time_to_trigger_dispatch_circuit_breaker,
        }
        breaker = RepeatedFailuresOverTime(
            name,
            time_to_trigger=times[name],
            trigger=lambda error: host.critical_error(text, error),
            clock=host.clock,
            observer=host.observers.all,
            back_end=back_end_of(host.transport if name == "DelayedMessageDispatch" else self.store),
        )
        self._closers.append(breaker.close)
        return breaker

    def _failure_rate(self) -> FailureRate:
        host = self.host
        rate = FailureRate(
            "DelayedMessageFailureHandling",
            maximum_per_second=self.maximum_recovery_failures_per_second,
            trigger=lambda error: host.critical_error(
                "Failed to execute error handling for delayed message forwarding", error
            ),
            clock=host.clock,
            observer=host.observers.all,
        )
        self._closers.append(rate.close)
        return rate


logger: logging.Logger = logging.getLogger(__name__)

MAXIMUM_STORED_GROUP: Final = 500
#: Stores at the same time of a store without batches.
SINGLE_STORES: Final = 1000


class StoreGroup:
    """Stores messages; messages that arrive while a transaction is running share the next.

    Args:
        store: Stores the messages, in batches if it can.
        breaker: Counts failures.
        stored: Called with the earliest due time of each group that is stored.
        observer: Called with the messages of each group that is stored.
    """

    def __init__(
        self,
        store: DelayedMessageStore,
        breaker: RepeatedFailuresOverTime,
        stored: Callable[[datetime], None],
        observer: Observer | None = None,
    ) -> None:
        self._store = store
        self._observer = observer
        self._stored = stored
        self._breaker = breaker
        self._group: Grouping[DelayedMessage, None] = (
            Grouping(self._store_many, maximum=MAXIMUM_STORED_GROUP, abandoned=_log_abandoned)
            if isinstance(store, SupportsBatches)
            else Grouping(self._store_each, maximum=1, at_once=SINGLE_STORES, abandoned=_log_abandoned)
        )

    async def store(self, message: DelayedMessage) -> None:
        """Return when the message is durable; raises the store's error.

        If cancelled, it returns at once, and the message is usually stored all the same, though not twice.
        """
        try:
            await self._group.run(message)
        except Exception as error:
            emit(
                logger,
                logging.WARNING,
                Event.STORE_FAILED,
                "Error while storing delayed message %s: %s",
                message.id,
                error,
                message=message,
            )
            if not isinstance(error, InvalidMessage):  # the message's fault, not the store's
                self._breaker.note(error)  # without a pause: the caller gets the error at once
            raise
        self._breaker.success()
        if logger.isEnabledFor(logging.DEBUG):
            emit(logger, logging.DEBUG, Event.STORED, "stored %s due %s", message.id, message.due, messages=(message,))

    async def stop(self) -> None:
        """Wait until every accepted message is stored or has failed."""
        await self._group.stop()

    async def _store_many(self, messages: Sequence[DelayedMessage]) -> Sequence[None]:
        await cast("SupportsBatches", self._store).store_many(messages)
        return self._notify(messages)

    def report(self, messages: Sequence[DelayedMessage]) -> None:
        """Report stored messages to the observer."""
        if self._observer is not None:
            self._observer.stored(messages)

    async def _store_each(self, messages: Sequence[DelayedMessage]) -> Sequence[None]:
        for message in messages:
            await self._store.store(message)
        return self._notify(messages)

    def _notify(self, messages: Sequence[DelayedMessage]) -> Sequence[None]:
        self._stored(min(messages, key=BY_DUE).due)
        if self._observer is not None:
            self._observer.stored(messages)
        return [None] * len(messages)


def _log_abandoned(message: DelayedMessage, error: Exception) -> None:
    emit(logger, logging.WARNING, Event.SEND_ABANDONED, ABANDONED, message.id, error)
