"""The endpoint as seen by its delayed delivery, and the satellite queues that a delivery may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from delayline.observer import Observers
from delayline.transport import qualified_queue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.clock import Clock
    from delayline.message import Message
    from delayline.transaction import Transaction, TransactionMode
    from delayline.transport import Transport


TIMEOUTS_QUEUE: Final = "Timeouts"
DISPATCHER: Final = "TimeoutsDispatcher"


def satellite_queues(transport: Transport, endpoint_name: str) -> tuple[str, str]:
    """Return the names of the timeout manager's two queues: timeouts to be stored, and timeouts to be dispatched.

    NServiceBus names them so: https://docs.particular.net/nservicebus/messaging/timeout-manager
    """
    return (
        qualified_queue(transport, endpoint_name, TIMEOUTS_QUEUE),
        qualified_queue(transport, endpoint_name, DISPATCHER),
    )


class SatelliteWork(Protocol):
    """Handles the messages of a satellite's queue; a failed message is tried five times in all."""

    async def prepare(self, message: Message, attempt: int) -> None:
        """Prepare for `message` before the receive is committed; `attempt` counts from 1."""
        ...

    async def work(self, message: Message, transaction: Transaction | None) -> None:
        """Handle the message: in `transaction` where the receive is part of it, else before it leaves its queue."""
        ...


@dataclass(frozen=True, slots=True)
class Satellite:
    """An extra queue of a delayed delivery, received from like the endpoint's input queue."""

    queue: str
    work: SatelliteWork
    mode: TransactionMode
    concurrency: int


@runtime_checkable
class SupportsSatellites(Protocol):
    """Capability of a delayed delivery: it receives from queues of its own."""

    @property
    def satellite_queues(self) -> Sequence[str]:
        """The names of these queues, once it belongs to an endpoint."""
        ...


class RunningSatellite(Protocol):
    """The receiver of a satellite's queue."""

    def start(self) -> None:
        """Start to receive."""
        ...

    async def stop(self) -> None:
        """Receive no more messages and finish the messages being handled. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class DeliveryHost:
    """The endpoint that a delayed delivery belongs to."""

    endpoint_name: str
    transport: Transport
    mode: TransactionMode
    error_queue: str
    clock: Clock
    """The endpoint's clock: the one it was given, else the delivery's, else this machine's."""
    critical_error: Callable[[str, Exception], None]
    """Reports a fault that lasted too long; returns at once."""
    satellite: Callable[[DeliveryHost, Satellite], Awaitable[RunningSatellite]]
    """Returns the receiver of a satellite's queue, not started yet. Raises QueueNotFound."""
    observers: Observers = field(default_factory=Observers)
    """What is called with the work of the endpoint and of its delayed delivery."""
