"""What the unit tests share: a clock they tick, parts in memory, and faults they switch on."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import (
    DelayedMessage,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    StoredDelivery,
    TransactionMode,
)
from delayline.memory.transaction import MemoryTransaction
from delayline.testing.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.spi import Transaction, TransportOperation

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def a_message(id: str = "m", body: bytes = b"body", **headers: str) -> Message:
    return Message(id, headers, body)


def delayed(id: str = "m", *, after: float = 0, to: str = "out", body: bytes = b"body") -> DelayedMessage:
    return DelayedMessage(a_message(id, body), to, START + timedelta(seconds=after))


@dataclass
class Faults:
    """What each verb raises: `on["verb"]` returns the error to raise for its arguments, or None."""

    on: dict[str, Callable[..., Exception | None]] = field(default_factory=dict)
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def always(self, verb: str, error: Exception) -> None:
        self.on[verb] = lambda *_: error

    def for_id(self, verb: str, message_id: str, error: Exception) -> None:
        self.on[verb] = lambda ids: error if message_id in ids else None

    def heal(self) -> None:
        self.on.clear()

    def check(self, verb: str, ids: tuple[str, ...] = ()) -> None:
        self.calls.append((verb, ids))
        error = self.on[verb](ids) if verb in self.on else None
        if error is not None:
            raise error.with_traceback(None)  # one instance, raised often, would gather tracebacks

    def count(self, verb: str) -> int:
        return sum(1 for name, _ in self.calls if name == verb)

    def verbs(self, *wanted: str) -> list[tuple[str, tuple[str, ...]]]:
        return [call for call in self.calls if call[0] in wanted]


class FaultyTransaction(MemoryTransaction):
    """A memory transaction whose commit can fail; it is rolled back then."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    async def _commit(self) -> None:
        try:
            self._faults.check("commit")
        except Exception:
            await self._rollback()
            raise
        await super()._commit()


class FaultyStore(MemoryDelayedMessageStore):
    """A memory store whose verbs can fail; `shared=False` leaves it transactions of its own, if they lock `rows`."""

    def __init__(self, faults: Faults | None = None, *, shared: bool = True, rows: bool = False) -> None:
        super().__init__()
        self.faults = faults or Faults()
        self._shared = shared
        self._rows = rows

    @property
    def transaction_domain(self) -> Any:  # noqa: ANN401 - Hashable | None, as the protocol has it
        return super().transaction_domain if self._shared else None

    @property
    def locks_rows(self) -> bool:
        return self._rows

    def transaction(self) -> MemoryTransaction:
        return FaultyTransaction(self.faults)

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        self.faults.check("store", tuple(message.id for message in messages))
        await super().store_many(messages, transaction)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        self.faults.check("fetch")
        return await super().fetch_due(at, limit, max_bytes=max_bytes, transaction=transaction)

    async def next_due(self) -> datetime | None:
        self.faults.check("next_due")
        return await super().next_due()

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        self.faults.check("remove", tuple(message.id for message in messages))
        return await super().remove_many(messages, transaction)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        self.faults.check("retry", tuple(message.id for message in messages))
        return await super().retry_many(messages, at, transaction)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        self.faults.check("release", tuple(message.id for message in messages))
        await super().release_many(messages)


class SixVerbs:
    """A store with the six verbs and nothing else, over a FaultyStore."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.inner = FaultyStore(faults, shared=False)
        self.faults = self.inner.faults
        self.initialized: list[tuple[str, TransactionMode]] = []

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        self.initialized.append((endpoint_name, mode))

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        await self.inner.store(message, transaction)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        return await self.inner.fetch_next_due(at, transaction)

    async def next_due(self) -> datetime | None:
        return await self.inner.next_due()

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        return await self.inner.remove(message, transaction)

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        self.faults.check("increment", (message.id,))
        return await self.inner.increment_failure_count(message)


class FaultyTransport(MemoryTransport):
    """A memory transport whose dispatch can fail, and which remembers what it sent."""

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__()
        self.faults = faults or Faults()
        self.stops = 0
        self.sends_to = ""

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        self.sends_to = operations[0].destination
        self.faults.check("dispatch", tuple(operation.message.id for operation in operations))
        await super().dispatch(operations, transaction)

    async def stop(self) -> None:
        self.stops += 1


@dataclass
class House:
    """An endpoint in memory, its parts, and what it reported as critical."""

    clock: ManualClock
    faults: Faults
    transport: FaultyTransport
    store: FaultyStore | SixVerbs
    delivery: StoredDelivery
    endpoint: Endpoint
    critical: list[str]

    async def ids(self, queue: str) -> list[str]:
        return [message.id for message in await self.transport.browse(queue, 10_000)]

    async def one(self, queue: str) -> Message:
        (message,) = await self.transport.browse(queue, 10)
        return message

    async def hold(self, *messages: DelayedMessage) -> None:
        """Put messages into the store behind the endpoint's back."""
        for message in messages:
            await self.store.store(message)

    async def waiting(self) -> list[DelayedMessage]:
        store = self.store.inner if isinstance(self.store, SixVerbs) else self.store
        return list(await store.pending(limit=10_000))


def build(
    clock: ManualClock,
    *,
    shared: bool = True,
    rows: bool = False,
    six: bool = False,
    **settings: Any,  # noqa: ANN401
) -> House:
    faults = Faults()
    transport = FaultyTransport(faults)
    store = SixVerbs(faults) if six else FaultyStore(faults, shared=shared, rows=rows)
    names = ("number_of_retries", "batch_size", "batch_bytes", "polling", "maximum_recovery_failures_per_second")
    delivery = StoredDelivery(store, **{name: settings.pop(name) for name in names if name in settings})
    critical: list[str] = []

    async def note(endpoint: Endpoint, text: str, error: Exception) -> None:
        critical.append(text)

    settings.setdefault("on_critical_error", note)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=delivery, clock=clock, **settings)
    return House(clock, faults, transport, store, delivery, endpoint, critical)


#: The ways a batch can move: in one transaction, in one of the store's, held by its claims, or one message at a time.
WAYS: dict[str, dict[str, bool]] = {
    "one transaction": {},
    "the store's transaction": {"shared": False, "rows": True},
    "no transaction": {"shared": False},
    "six verbs": {"six": True},
}


@pytest.fixture(params=list(WAYS))
def house(request: pytest.FixtureRequest, clock: ManualClock) -> House:
    """The default house, in each way a batch can move."""
    return build(clock, **WAYS[request.param])
