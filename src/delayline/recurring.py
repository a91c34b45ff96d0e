"""The recurring messages that an endpoint declares: added or changed when it starts, and kept going while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.recurrence import Cron, Interval
from delayline.delayed.schedules import (
    OF_OCCURRENCE,
    Schedule,
    Schedules,
    SupportsSchedules,
    checked_missed,
    checked_name,
    fingerprint,
    scheduled,
)
from delayline.errors import ConfigurationError
from delayline.events import Event, emit
from delayline.outgoing import Send

if TYPE_CHECKING:
    from delayline.clock import Clock
    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.recurrence import Recurrence
    from delayline.delayed.schedules import Missed
    from delayline.message import Body
    from delayline.outgoing import Composer, Destinations, HeaderMap

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds between two looks for schedules whose pending occurrence is gone.
MENDS_EVERY: Final = 60.0
SOME_DELAY: Final = timedelta(days=1)


class RecurringMessages:
    """The recurring messages of an endpoint. Belongs to an event loop once it is started.

    Args:
        endpoint_name: The endpoint, for errors.
        composer: Composes its messages.
        delivery: Its delayed delivery.
        clock: Its clock.
    """

    def __init__(self, endpoint_name: str, composer: Composer, delivery: DelayedDelivery | None, clock: Clock) -> None:
        self._endpoint_name = endpoint_name
        self._composer = composer
        self._delivery = delivery
        self._clock = clock
        self._declared: dict[str, tuple[Schedule, bool]] = {}
        self._mending: asyncio.Task[None] | None = None

    @property
    def schedules(self) -> Schedules:
        """The schedules. Raises ConfigurationError where the endpoint's store keeps none."""
        if not isinstance(self._delivery, StoredDelivery):
            kind = "no delayed delivery" if self._delivery is None else f"a {type(self._delivery).__name__}"
            raise ConfigurationError(
                f"recurring messages need a store that keeps schedules, and endpoint {self._endpoint_name!r} has "
                f"{kind}: pass delayed_delivery=StoredDelivery(...) over a SqlDelayedMessageStore or a "
                "MemoryDelayedMessageStore"
            )
        return Schedules(scheduled(self._delivery.store), self._clock)

    def declare(
        self,
        name: str,
        recurrence: Recurrence,
        destination: str,
        body: Body,
        *,
        headers: HeaderMap | None,
        missed: Missed,
        check_destination: bool,
    ) -> None:
        """Declare a recurring message; see `Endpoint.every`."""
        self.schedules.require()
        schedule = schedule_of(
            self._composer, self._clock, name, recurrence, destination, body, headers=headers, missed=missed
        )
        if name in self._declared:
            raise ConfigurationError(f"schedule {name!r} is declared twice: give each recurring message its own name")
        self._declared[name] = schedule, check_destination

    async def start(self, destinations: Destinations | None) -> None:
        """Add or change what is declared, and keep all schedules going from now on. Raises QueueNotFound."""
        for schedule, check_destination in self._declared.values():
            if destinations is not None and check_destination:
                await destinations.check(schedule.destination)
            await self.schedules.declare(schedule)
        if self._declared or await self._has_some():
            self._mending = asyncio.create_task(self._mend(), name=f"delayline schedules {self._endpoint_name}")

    async def stop(self) -> None:
        """Undo a `start`."""
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait([self._mending])
            self._mending = None

    async def _has_some(self) -> bool:
        """Return whether there are schedules that were added by hand; what cannot be told is not looked after."""
        if not isinstance(self._delivery, StoredDelivery) or not isinstance(self._delivery.store, SupportsSchedules):
            return False
        with contextlib.suppress(Exception):
            return bool(await self.schedules.list())
        return False

    async def _mend(self) -> None:
        while True:
            try:
                await self.schedules.mend()
            except Exception as error:
                log_text = "Failed to look after the schedules: %s"
                emit(logger, logging.WARNING, Event.SCHEDULE_FAILED, log_text, error, exception=error)
            await self._clock.sleep(MENDS_EVERY)


def schedule_of(
    composer: Composer,
    clock: Clock,
    name: str,
    recurrence: Recurrence,
    destination: str,
    body: Body,
    *,
    headers: HeaderMap | None = None,
    missed: Missed = "one",
) -> Schedule:
    """Return the schedule of a recurring message. Raises InvalidMessage or ConfigurationError."""
    checked_name("schedule name", name)
    if not isinstance(recurrence, Cron | Interval):
        raise ConfigurationError(
            f"schedule {name!r} is due at {recurrence!r}: give cron('0 9 * * MON-FRI', tz='Europe/Berlin') or "
            "interval(hours=6)"
        )
    message = composer.compose(Send(destination, body, headers, delay=SOME_DELAY)).operation.message
    kept = {key: value for key, value in message.headers.items() if key not in OF_OCCURRENCE}
    schedule = Schedule(
        name, str(recurrence), destination, kept, message.body, checked_missed(missed), since=clock.now()
    )
    # What differs from machine to machine, or from version to version of delayline, is no part of the declaration.
    return replace(schedule, declared=fingerprint(schedule, headers or {}))
