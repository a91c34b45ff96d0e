"""Satellites: the extra queues of a delayed delivery, received from like the endpoint's input queue.

A satellite has no handlers. Its work runs in the transaction of the receive where the transaction mode has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable
from delayline.receiving.completion import Completion
from delayline.receiving.intake import open_intake
from delayline.receiving.pipeline import Pipeline
from delayline.receiving.recoverability import Decision, GiveBack, MoveToErrors, Recoverability, RetryNow

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from delayline.delayed.host import DeliveryHost, Satellite, SatelliteWork
    from delayline.message import Message
    from delayline.transport import ReceivedMessage

#: A satellite attempts a message 5 times at once, as NServiceBus does.
SATELLITE_RETRIES: Final = 4


async def open_satellite(host: DeliveryHost, satellite: Satellite) -> Pipeline:
    """Return a pipeline on the satellite's queue, not started yet. Raises QueueNotFound."""
    intake = await open_intake(replace(host, mode=satellite.mode), satellite.queue, satellite.concurrency)
    completion = Completion(intake, together=False)  # each waits for the timeout storage by itself
    recoverability = SatelliteRecoverability(
        immediate_retries=SATELLITE_RETRIES, immediate_pause=timedelta(0), delayed_retries=0
    )
    attempts = SatelliteAttempts(satellite.work, completion, recoverability)
    return Pipeline(intake, completion, attempts.begin, recoverability)


class SatelliteRecoverability(Recoverability):
    """Five attempts at once, then the error queue; while a back end is out of reach messages stay where they are."""

    __slots__ = ()

    def decide(self, error: Exception, attempt: int, headers: Mapping[str, str], now: datetime) -> Decision:
        """Return the action after the `attempt`-th failure."""
        del headers, now
        if isinstance(error, BackendUnavailable):
            return GiveBack()
        return RetryNow() if attempt <= self.immediate_retries else MoveToErrors()


@dataclass(frozen=True, slots=True)
class SatelliteAttempts:
    """Has a satellite's work done for the messages of its queue."""

    work: SatelliteWork
    completion: Completion
    recoverability: Recoverability

    def begin(self, received: ReceivedMessage, number: int) -> SatelliteAttempt:
        """Return an attempt. Raises CorruptHeaders."""
        return SatelliteAttempt(self, received, received.message.logical, number)


@dataclass(frozen=True, slots=True)
class SatelliteAttempt:
    """An attempt of a satellite's work."""

    attempts: SatelliteAttempts
    received: ReceivedMessage
    message: Message
    number: int
    effects: tuple[()] = ()
    """Nothing: the message is only moved."""

    @property
    def recoverability(self) -> Recoverability:
        """The satellite's."""
        return self.attempts.recoverability

    async def run(self) -> None:
        """Prepare for the message."""
        await self.attempts.work.prepare(self.message, self.number)

    async def complete(self) -> None:
        """Do the work, and remove the message."""
        work = partial(self.attempts.work.work, self.message)
        await self.attempts.completion.complete_work(self.received, work)

    def gave_way(self, error: Exception) -> bool:
        """Return False: it has no transaction of its own."""
        del error
        return False
