"""Satellites: queues of a delayed delivery's own, received from by a pipeline like the endpoint's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable
from delayline.outgoing import Composer, Outgoing
from delayline.pipeline import Pipeline
from delayline.recoverability import Decision, GiveBack, MoveToError, Recoverability, RetryNow
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from delayline.delayed.host import DeliveryHost, Satellite, SatelliteWork
    from delayline.message import Message
    from delayline.pipeline import MessageContext
    from delayline.transaction import Transaction

IMMEDIATE_RETRIES: Final = 4  # NServiceBus's number for satellites of the timeout manager


async def open_satellite(host: DeliveryHost, satellite: Satellite) -> Pipeline:
    """Return a pipeline on the satellite's queue, not started yet. Raises QueueNotFound."""
    work = _Work(satellite.work, satellite.queue, host)
    return Pipeline(
        host=replace(host, mode=satellite.mode),
        queue=satellite.queue,
        receiver=await host.transport.receiver(satellite.queue),
        handlers=[work.handle],
        delivery=work,
        composer=Composer(host.endpoint_name, host.clock, reply_to=None),
        recoverability=SatelliteRecoverability(
            immediate_retries=IMMEDIATE_RETRIES, immediate_pause=timedelta(0), delayed_retries=0
        ),
        concurrency=satellite.concurrency,
    )


class SatelliteRecoverability(Recoverability):
    """Five attempts at once, then the error queue; while a back end is out of reach messages stay where they are."""

    __slots__ = ()

    def decide(self, error: Exception, attempt: int, headers: Mapping[str, str], now: datetime) -> Decision:
        """Return what to do after the `attempt`-th failure."""
        del headers, now
        if isinstance(error, BackendUnavailable):
            return GiveBack()
        return RetryNow() if attempt <= self.immediate_retries else MoveToError()


@dataclass(frozen=True, slots=True)
class _Work:
    """Dispatches a satellite's operations in the transaction of the receive."""

    of_satellite: SatelliteWork
    queue: str
    host: DeliveryHost

    async def handle(self, message: Message, context: MessageContext) -> None:
        await self.of_satellite.prepare(message, context.attempt)
        context.outgoing.append(Outgoing(TransportOperation(message, self.queue), self.host.clock.now()))

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        del due
        await self.of_satellite.work(operation.message, transaction)
