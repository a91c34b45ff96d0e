"""Fixtures of delivery tests: a transport and a store under faults, a clock, signals, an endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import pytest_asyncio

from delayline.delayed.batch import scope_between
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.store import SupportsSetup, SupportsTransactions
from delayline.endpoint import Endpoint
from delayline.errors import UnsupportedTransactionMode
from delayline.events import Event
from delayline.testing.clock import ManualClock, settle
from delayline.testing.conformance.messages import AT, ENDPOINT, PATIENCE, TICK
from delayline.testing.conformance.store_fixtures import closed
from delayline.testing.conformance.transport_fixtures import received
from delayline.testing.faults import Fault
from delayline.testing.faulty_store import FaultyStore
from delayline.testing.faulty_transport import FaultyTransport
from delayline.testing.signals import Signals
from delayline.transaction import TransactionMode, guarantee, share_transactions

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from datetime import datetime
    from pathlib import Path

    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import Message
    from delayline.pipeline import MessageContext
    from delayline.transport import Transport, TransportOperation

Result = TypeVar("Result")

MODES = list(TransactionMode)
ELSEWHERE = "elsewhere"


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids of a signal's messages."""
    found: dict[str, Any] = vars(record)["facts"]
    return found


@dataclass
class DeliveryScenario:
    """One test's endpoint and everything around it; the transport is started, no endpoint is."""

    transport: FaultyTransport
    store: FaultyStore
    signals: Signals
    clock: ManualClock = field(default_factory=lambda: ManualClock(AT))
    handled: list[tuple[Message, datetime]] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)

    def endpoint(
        self,
        mode: TransactionMode | None = None,
        *,
        handles: bool = True,
        concurrency: int = 8,
        number_of_retries: int = 0,
        batch_size: int = 500,
        store_breaker: timedelta = timedelta(seconds=30),
    ) -> Endpoint:
        """Return an endpoint that records handled messages and critical errors; skips if `mode` is not claimed."""
        delivery = StoredDelivery(
            self.store,
            number_of_retries=number_of_retries,
            batch_size=batch_size,
            time_to_trigger_store_circuit_breaker=store_breaker,
        )
        try:
            guarantee(self.transport, delivery, TransactionMode.NONE if mode is None else mode)
        except UnsupportedTransactionMode:
            pytest.skip(f"not claimed: {mode.name if mode is not None else 'any mode'}")
        endpoint = Endpoint(
            ENDPOINT,
            transport=self.transport,
            delayed_delivery=delivery,
            transaction_mode=mode,
            concurrency=concurrency,
            on_critical_error=self.note_critical,
            clock=self.clock,
        )
        if handles:
            endpoint.handler(self._note_handled)
        return endpoint

    @property
    def shared(self) -> bool:
        """Whether transport and store are in one transaction: then a batch is fetched, sent and removed in one."""
        return isinstance(self.store, SupportsTransactions) and share_transactions(self.store, self.transport)

    @property
    def transactional(self) -> bool:
        """Whether a transaction, with the transport or without it, holds a batch from its fetch to its removal."""
        return scope_between(self.store, self.transport).begin is not None

    def note_dispatches(self) -> list[datetime]:
        """Return a list that gets the instant of each dispatch from now on: when messages leave the store."""
        instants: list[datetime] = []
        self.transport.inject(Fault("dispatch", before=lambda: instants.append(self.clock.now())))
        return instants

    def handled_ids(self) -> list[str]:
        """Return the ids of handled messages, in the order they were handled."""
        return [message.id for message, _ in self.handled]

    async def _note_handled(self, message: Message, context: MessageContext) -> None:
        self.handled.append((message, self.clock.now()))

    async def note_critical(self, endpoint: Endpoint, text: str, error: Exception) -> None:
        """Take note of a critical error and go on: for Endpoint(on_critical_error=...)."""
        self.critical.append(text)

    async def poller_sleeps(self, until: datetime) -> None:
        """Return once the poller is about to sleep until that instant."""
        await self.signals.wait_for(
            Event.SLEEPS, timeout=PATIENCE, where=lambda record: facts(record)["until"] == until
        )

    async def advance_to(self, due: datetime) -> None:
        """Wait until the poller sleeps towards `due`, then move time exactly there."""
        await self.poller_sleeps(due)
        await self.clock.advance(due - self.clock.now())

    async def happens(self, event: Event, count: int = 1) -> None:
        """Return once `event` has happened, while time stands still."""
        await self.signals.wait_for(event, count, timeout=PATIENCE)

    async def comes(self, event: Event, count: int = 1) -> None:
        """Move time on until `event` has happened."""
        await self.runs_until(self.signals.wait_for(event, count, timeout=PATIENCE))

    async def runs_until(self, done: Coroutine[None, None, Result]) -> Result:
        """Move time on until `done` has finished, never while a call to store or transport is under way."""
        return await self.clock.run_until(done, quiet=self._quiet)

    async def emptied(self) -> None:
        """Move time on until the store is empty."""
        await self.runs_until(asyncio.wait_for(self._empty(), PATIENCE))

    async def _empty(self) -> None:
        while await self.store.next_due() is not None:
            await self.happens(Event.SLEEPS, self.signals.count(Event.SLEEPS) + 1)

    async def _quiet(self) -> None:
        while self.store.busy or self.transport.busy:
            await self.store.quiet()
            await self.transport.quiet()
            await settle()

    async def removed(self, number: int) -> None:
        """Return once that many messages have been removed from the store."""
        while sum(len(facts(record)["messages"]) for record in self.signals.records(Event.REMOVED)) < number:
            await self.happens(Event.REMOVED, self.signals.count(Event.REMOVED) + 1)

    async def nothing_waits(self) -> None:
        """Return once the store is empty: a removal may be committed a moment after its log record."""
        async with asyncio.timeout(PATIENCE):
            while await self.store.next_due() is not None:
                await settle()

    async def received(self, queue: str, number: int = 1) -> list[Message]:
        """Take that many messages from a queue that no endpoint receives from."""
        receiver = await self.transport.receiver(queue)
        found = await received(receiver, number)
        for message in found:
            await receiver.acknowledge(message)
        await receiver.stop()
        return [message.message for message in found]

    def heal(self) -> None:
        """End all faults."""
        self.store.heal()
        self.transport.heal()


async def send_all(endpoint: Endpoint, ids: Sequence[str], delay: timedelta, destination: str = ENDPOINT) -> None:
    """Send a delayed message for each id, all at once."""
    async with asyncio.timeout(PATIENCE * 3):
        await asyncio.gather(
            *(
                endpoint.send(destination, b"body", message_id=message_id, delay=delay, check_destination=False)
                for message_id in ids
            )
        )


def to(destination: str, operations: Sequence[TransportOperation]) -> bool:
    """Tell whether a dispatch has something for the destination: for Fault.when."""
    return any(operation.destination == destination for operation in operations)


class DeliveryFixtures:
    """Fixtures of the delivery suite."""

    pytestmark = pytest.mark.asyncio

    #: How many messages fall due at one instant in the burst tests.
    burst: int = 1000
    #: As in the store's suite: the steps of due times, and whether ties are in the order of storing or of their ids.
    step: timedelta = TICK
    keeps_order: bool = True
    #: Whether the transport hands messages out in the order in which they were dispatched to it.
    arrives_in_order: bool = True

    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedMessageStore]:
        """Return a new transport and a new store over storage that is empty when a test begins. Override this."""
        raise NotImplementedError("override make_backends in your subclass of DeliveryConformance")

    @pytest_asyncio.fixture
    async def scenario(self, tmp_path: Path) -> AsyncIterator[DeliveryScenario]:
        """Provide the parts, the transport started and set up."""
        transport, store = await self.make_backends(tmp_path)
        with Signals() as signals:
            scenario = DeliveryScenario(FaultyTransport(transport), FaultyStore(store), signals)
            await scenario.transport.start()
            await scenario.transport.setup_infrastructure([ENDPOINT, ELSEWHERE])
            if isinstance(store, SupportsSetup):
                await store.setup_infrastructure(ENDPOINT)
            yield scenario
            scenario.heal()
            await closed(store)
            await scenario.transport.stop()
