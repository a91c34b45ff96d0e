"""Whose messages a delayed delivery keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from delayline.transport import SupportsQualifiedQueues

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayline.clock import Clock
    from delayline.message import Message
    from delayline.transaction import Transaction, TransactionMode
    from delayline.transport import Transport


TIMEOUTS: Final = "Timeouts"
DISPATCHER: Final = "TimeoutsDispatcher"


def satellite_queues(transport: Transport, endpoint_name: str) -> tuple[str, str]:
    """Return the names of the timeout manager's two queues: to be stored, and to be dispatched (reference 2.1)."""
    if isinstance(transport, SupportsQualifiedQueues):
        return transport.qualified(endpoint_name, TIMEOUTS), transport.qualified(endpoint_name, DISPATCHER)
    return f"{endpoint_name}.{TIMEOUTS}", f"{endpoint_name}.{DISPATCHER}"


class SatelliteWork(Protocol):
    """What is done with each message of a satellite's queue; what fails is tried again, five times in all."""

    async def prepare(self, message: Message, attempt: int) -> None:
        """Do what comes before the receive is committed; `attempt` counts from 1."""
        ...

    async def work(self, message: Message, transaction: Transaction | None) -> None:
        """Do it: in `transaction` where the receive is a part of it too, else before the message leaves its queue."""
        ...


@dataclass(frozen=True, slots=True)
class Satellite:
    """A queue of a delayed delivery's own, received from like the endpoint's."""

    queue: str
    work: SatelliteWork
    mode: TransactionMode
    concurrency: int


class Receiving(Protocol):
    """A receiver that runs."""

    def start(self) -> None:
        """Begin to receive."""
        ...

    async def stop(self) -> None:
        """Take no more messages and finish those at work. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class DeliveryHost:
    """What a delayed delivery learns from the endpoint it belongs to."""

    endpoint_name: str
    transport: Transport
    mode: TransactionMode
    error_queue: str
    clock: Clock
    """What the endpoint goes by: the one it was given, else the delivery's, else this machine's."""
    critical_error: Callable[[str, Exception], None]
    """Reports a fault that lasted too long; returns at once."""
    satellite: Callable[[DeliveryHost, Satellite], Awaitable[Receiving]]
    """Returns the receiver of a satellite's queue, not started yet. Raises QueueNotFound."""
