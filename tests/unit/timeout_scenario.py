"""An endpoint in memory with a timeout manager and faults to inject."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.unit.conftest import START, MayShareNothing, Queues

from delayline import Endpoint, MemoryTransport, Message
from delayline.message import TimeoutHeaders, to_wire_time
from delayline.testing import Faults, FaultyTimeoutPersister, FaultyTransport
from delayline.testing.clock import settle
from delayline.timeouts import MemoryTimeoutPersister, Timeout, TimeoutManagerDelivery
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from delayline.receiving.context import MessageContext
    from delayline.testing import ManualClock

TIMEOUTS, DISPATCHER = "sales.Timeouts", "sales.TimeoutsDispatcher"


class MemoryPersister(MayShareNothing, MemoryTimeoutPersister):
    """A memory persister that has to be opened, and may share no transaction with memory transports."""

    opened = 0

    @property
    def kept(self) -> dict[str, Timeout]:
        """The stored timeouts by id."""
        return self._timeouts

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Do nothing."""

    async def open(self, endpoint_name: str) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.opened -= 1


class PeekingPersister(MemoryPersister):
    """A persister without SupportsTimeoutLocks: the dispatcher peeks at each timeout."""

    lock_due = None  # type: ignore[assignment]


@dataclass
class TimeoutScenario(Queues):
    """An endpoint with a timeout manager, its parts, the messages it handled and its critical errors."""

    clock: ManualClock
    faults: Faults
    transport: FaultyTransport
    queues: MemoryTransport
    persister: FaultyTimeoutPersister
    memory: MemoryPersister
    delivery: TimeoutManagerDelivery
    endpoint: Endpoint
    handled: list[tuple[Message, datetime]]
    critical: list[str]

    async def start(self) -> None:
        await self.transport.setup_infrastructure(["out"])
        await self.endpoint.start()
        await settle()

    async def pending(self) -> int:
        """Return the number of stored timeouts."""
        return (await self.memory.count()).number

    async def put(self, queue: str, message: Message) -> None:
        """Put a message into a queue, as another endpoint does, without a fault."""
        await self.queues.dispatch([TransportOperation(message, queue)])
        await settle()

    def expiring(self, id: str = "m", *, after: float, **headers: str) -> Message:
        """A message as a .NET sender routes it to the timeouts queue."""
        routed = {
            TimeoutHeaders.EXPIRE: to_wire_time(START + timedelta(seconds=after)),
            TimeoutHeaders.DESTINATION: "out",
        }
        return Message(id, routed | headers, b"body")


def build_timeouts(
    clock: ManualClock,
    *,
    shared: bool = True,
    rows: bool = False,
    direct: bool = False,
    beside: TimeoutScenario | None = None,
    **settings: Any,  # noqa: ANN401
) -> TimeoutScenario:
    """Build an endpoint with a timeout manager.

    Args:
        clock: The endpoint's clock.
        shared: Whether transport and persister share transactions.
        rows: Whether the persister's transactions lock rows, if they are not shared.
        direct: Whether expired timeouts are sent directly, without the dispatcher's queue.
        beside: A scenario whose transport and persister to use.
        settings: Settings of the delivery and the endpoint.
    """
    if beside is None:
        faults, queues = Faults(), MemoryTransport()
        transport = FaultyTransport(queues, shared=faults)
        memory = (MemoryPersister if direct else PeekingPersister)(shared=shared, rows=rows)
        persister = FaultyTimeoutPersister(memory, shared=faults)
    else:
        faults, queues, transport = beside.faults, beside.queues, beside.transport
        memory, persister = beside.memory, beside.persister
    names = ("time_to_wait_before_triggering_critical_error", "concurrency", "batch_size", "polling")
    delivery = TimeoutManagerDelivery(persister, **{name: settings.pop(name) for name in names if name in settings})
    handled: list[tuple[Message, datetime]] = []
    critical: list[str] = []

    async def note_handled(message: Message, context: MessageContext) -> None:
        handled.append((message, clock.now()))

    async def note_critical(endpoint: Endpoint, text: str, error: Exception) -> None:
        critical.append(text)

    settings.setdefault("on_critical_error", note_critical)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=delivery, clock=clock, **settings)
    endpoint.handler(note_handled)
    return TimeoutScenario(clock, faults, transport, queues, persister, memory, delivery, endpoint, handled, critical)


#: The transactions that transport and persister can have, where the dispatcher peeks at each timeout.
PEEKING: dict[str, dict[str, Any]] = {
    "one transaction": {},
    "the persister's transaction": {"shared": False, "rows": True},
    "no transaction": {"shared": False},
}
SCOPES = PEEKING | {"direct": {"direct": True}}
