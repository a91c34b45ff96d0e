"""Fixtures of the unit tests: a manual clock, and an endpoint in memory with faults to inject."""

from __future__ import annotations

from dataclasses import dataclass
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
)
from delayline.memory.transport import MemoryQueue, MemoryReceiver
from delayline.testing import Faults, FaultyStore, FaultyTransport, ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.spi import TransportOperation

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def a_message(id: str = "m", body: bytes = b"body", **headers: str) -> Message:
    return Message(id, headers, body)


def delayed(id: str = "m", *, after: float = 0, to: str = "out", body: bytes = b"body") -> DelayedMessage:
    return DelayedMessage(a_message(id, body), to, START + timedelta(seconds=after))


def sent_to(destination: str) -> Callable[[Sequence[TransportOperation]], bool]:
    """Return a condition for `Fault.when`: the operations go to `destination`."""
    return lambda operations: operations[0].destination == destination


class MayShareNothing:
    """A memory store or persister that may share no transaction with memory transports.

    Args:
        shared: Whether transactions are shared.
        rows: Whether transactions lock rows, if they are not shared.
    """

    def __init__(self, *, shared: bool = True, rows: bool = False) -> None:
        super().__init__()
        self._shared = shared
        self._rows = rows

    @property
    def transaction_domain(self) -> Any:  # noqa: ANN401 - Hashable | None, as the protocol has it
        return super().transaction_domain if self._shared else None  # type: ignore[misc]

    @property
    def locks_rows(self) -> bool:
        return self._rows


class MemoryStore(MayShareNothing, MemoryDelayedMessageStore):
    """A memory store that may share no transaction."""


class WatchedTransport(MemoryTransport):
    """A memory transport with queues and receivers that tests look into."""

    def __init__(self) -> None:
        super().__init__()
        self.receivers: dict[str, MemoryReceiver] = {}

    async def receiver(self, queue: str) -> MemoryReceiver:
        self.receivers[queue] = await super().receiver(queue)
        return self.receivers[queue]

    def queue(self, name: str) -> MemoryQueue:
        """Return the queue, with its visible and its hidden messages."""
        return self._queue(name)


class Queues:
    """What is in the queues of a scenario."""

    transport: FaultyTransport

    async def ids(self, queue: str) -> list[str]:
        return [message.id for message in await self.transport.browse(queue, 10_000)]

    async def only(self, queue: str) -> Message:
        """Return the only message of the queue."""
        message: Message
        (message,) = await self.transport.browse(queue, 10)
        return message


@dataclass
class Scenario(Queues):
    """An endpoint in memory, its parts, and the critical errors it reported."""

    clock: ManualClock
    faults: Faults
    transport: FaultyTransport
    queues: WatchedTransport
    store: FaultyStore
    memory: MemoryStore
    delivery: StoredDelivery
    endpoint: Endpoint
    critical: list[str]

    async def put(self, *messages: DelayedMessage) -> None:
        """Put messages into the store, as another process does."""
        await self.memory.store_many(messages)

    async def pending(self) -> list[DelayedMessage]:
        return list(await self.memory.pending(limit=10_000))


def build(
    clock: ManualClock,
    *,
    shared: bool = True,
    rows: bool = False,
    verbs_only: bool = False,
    **settings: Any,  # noqa: ANN401
) -> Scenario:
    faults, queues = Faults(), WatchedTransport()
    memory = MemoryStore(shared=shared and not verbs_only, rows=rows)
    transport = FaultyTransport(queues, shared=faults)
    store = FaultyStore(memory, verbs_only=verbs_only, shared=faults)
    names = ("number_of_retries", "batch_size", "batch_bytes", "polling", "maximum_recovery_failures_per_second")
    delivery = StoredDelivery(store, **{name: settings.pop(name) for name in names if name in settings})
    critical: list[str] = []

    async def note(endpoint: Endpoint, text: str, error: Exception) -> None:
        critical.append(text)

    settings.setdefault("on_critical_error", note)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=delivery, clock=clock, **settings)
    return Scenario(clock, faults, transport, queues, store, memory, delivery, endpoint, critical)


#: How a batch moves: in a shared transaction, in a transaction of the store, under claims, or message by message.
SCOPES: dict[str, dict[str, bool]] = {
    "one transaction": {},
    "the store's transaction": {"shared": False, "rows": True},
    "no transaction": {"shared": False},
    "six verbs": {"verbs_only": True},
}


@pytest.fixture(params=list(SCOPES))
def scenario(request: pytest.FixtureRequest, clock: ManualClock) -> Scenario:
    """The default scenario, with each way a batch can move."""
    return build(clock, **SCOPES[request.param])
