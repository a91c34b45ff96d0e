"""An endpoint with a timeout manager in memory, and faults to switch on."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.unit.conftest import START, Faults, FaultyTransaction, FaultyTransport

from delayline import Endpoint, MemoryTransport, Message
from delayline.message import TimeoutHeaders, to_wire_time
from delayline.testing.clock import settle
from delayline.timeouts import MemoryTimeoutPersister, TimeoutManagerDelivery
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from delayline.memory.transaction import MemoryTransaction
    from delayline.pipeline import MessageContext
    from delayline.spi import Transaction
    from delayline.testing.clock import ManualClock
    from delayline.timeouts.persister import LockedTimeouts, Timeout, TimeoutsChunk

TIMEOUTS, DISPATCHER = "sales.Timeouts", "sales.TimeoutsDispatcher"


class FaultyPersister(MemoryTimeoutPersister):
    """A memory persister whose verbs can fail; `shared=False` leaves it transactions of its own, if they lock rows."""

    def __init__(self, faults: Faults, *, shared: bool = True, rows: bool = False) -> None:
        super().__init__()
        self.faults = faults
        self._shared = shared
        self._rows = rows
        self.opened = 0

    @property
    def transaction_domain(self) -> Any:  # noqa: ANN401 - Hashable | None, as the protocol has it
        return super().transaction_domain if self._shared else None

    @property
    def locks_rows(self) -> bool:
        return self._rows

    def transaction(self) -> MemoryTransaction:
        return FaultyTransaction(self.faults)

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        self.faults.check("setup")

    async def open(self, endpoint_name: str) -> None:
        self.faults.check("open")
        self.opened += 1

    async def close(self) -> None:
        self.opened -= 1

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        self.faults.check("add", (timeout.message.id,))
        await super().add(timeout, transaction)

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        self.faults.check("peek")
        return await super().peek(timeout_id, transaction)

    async def remove(self, timeout_id: str, transaction: Transaction | None = None) -> bool:
        self.faults.check("remove")
        return await super().remove(timeout_id, transaction)

    async def remove_by_saga(self, saga_id: UUID, transaction: Transaction | None = None) -> int:
        self.faults.check("remove_by_saga")
        return await super().remove_by_saga(saga_id, transaction)

    async def next_chunk(
        self, at: datetime, limit: int, *, lease_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        self.faults.check("take" if limit else "look")
        return await super().next_chunk(at, limit, lease_until=lease_until, transaction=transaction)

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        self.faults.check("lock_due")
        return await super().lock_due(at, limit, max_bytes=max_bytes, transaction=transaction)

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        self.faults.check("remove_many")
        return await super().remove_many(ids, transaction)

    async def lease_locked(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        self.faults.check("lease_locked")
        await super().lease_locked(ids, until, transaction)

    async def lease(self, ids: Sequence[str], until: datetime) -> None:
        self.faults.check("lease")
        await super().lease(ids, until)


class AskingPersister(FaultyPersister):
    """One that leaves every timeout to the dispatcher, as one of somebody's own may."""

    lock_due = None  # type: ignore[assignment]


@dataclass
class TimeoutHouse:
    clock: ManualClock
    faults: Faults
    transport: FaultyTransport
    persister: FaultyPersister
    delivery: TimeoutManagerDelivery
    endpoint: Endpoint
    handled: list[tuple[Message, datetime]] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)

    async def start(self) -> None:
        await self.transport.setup_infrastructure(["out"])
        await self.endpoint.start()
        await settle()

    async def ids(self, queue: str) -> list[str]:
        return [message.id for message in await self.transport.browse(queue, 10_000)]

    async def one(self, queue: str) -> Message:
        (message,) = await self.transport.browse(queue, 10)
        return message

    async def waiting(self) -> int:
        return (await self.persister.count()).number

    async def put(self, queue: str, message: Message) -> None:
        """Put a message into a queue behind the endpoint's back, as another endpoint does."""
        await MemoryTransport.dispatch(self.transport, [TransportOperation(message, queue)])
        await settle()

    def expiring(self, id: str = "m", *, after: float, **headers: str) -> Message:
        """A message as a .NET sender routes it to the timeouts queue."""
        routed = {
            TimeoutHeaders.EXPIRE: to_wire_time(START + timedelta(seconds=after)),
            TimeoutHeaders.DESTINATION: "out",
        }
        return Message(id, routed | headers, b"body")

    async def note_handled(self, message: Message, context: MessageContext) -> None:
        self.handled.append((message, self.clock.now()))

    async def note_critical(self, endpoint: Endpoint, text: str, error: Exception) -> None:
        self.critical.append(text)


def build_timeouts(
    clock: ManualClock,
    *,
    shared: bool = True,
    rows: bool = False,
    direct: bool = False,
    transport: FaultyTransport | None = None,
    persister: FaultyPersister | None = None,
    **settings: Any,  # noqa: ANN401
) -> TimeoutHouse:
    faults = Faults()
    transport = transport or FaultyTransport(faults)
    persister = persister or (FaultyPersister if direct else AskingPersister)(faults, shared=shared, rows=rows)
    names = ("time_to_wait_before_triggering_critical_error", "concurrency", "batch_size", "polling")
    delivery = TimeoutManagerDelivery(persister, **{name: settings.pop(name) for name in names if name in settings})
    house = TimeoutHouse(clock, faults, transport, persister, delivery, None)  # type: ignore[arg-type]
    settings.setdefault("on_critical_error", house.note_critical)
    house.endpoint = Endpoint("sales", transport=transport, delayed_delivery=delivery, clock=clock, **settings)
    house.endpoint.handler(house.note_handled)
    return house


#: The ways transport and persister can hang together, where the dispatcher is asked.
ASKING: dict[str, dict[str, Any]] = {
    "one transaction": {},
    "the persister's transaction": {"shared": False, "rows": True},
    "no transaction": {"shared": False},
}
PAIRS = ASKING | {"the short way": {"direct": True}}
