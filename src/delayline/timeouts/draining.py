"""An old timeout manager beside a new way of waiting: what is left in it, and what can be deleted when nothing is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayline.delayed.host import satellite_queues
from delayline.errors import QueueNotFound
from delayline.timeouts.manager import TWO_MINUTES, TimeoutManagerDelivery
from delayline.transport import SupportsQueueManagement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from delayline.sql import TwoPhaseCommit
    from delayline.timeouts import SqlTimeoutPersister
    from delayline.timeouts.persister import TimeoutCount
    from delayline.transport import Transport


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a timeout manager."""

    timeouts: TimeoutCount | None
    """What its table holds; None when the table is gone."""
    queued: int
    """How many messages are in its queues."""
    queues: Sequence[str]
    """Its queues, those that are there."""
    table: str

    @property
    def empty(self) -> bool:
        """Whether nothing waits any more."""
        return self.queued == 0 and (self.timeouts is None or self.timeouts.number == 0)


def drained_from(
    url: str | None, *, polling: bool = True, schema: str | None = None, outage: timedelta = TWO_MINUTES
) -> TimeoutManagerDelivery | None:
    """Return the timeout manager whose timeouts are at the URL; None for none. Raises ConfigurationError.

    outage: how long its storage may be out of reach before a critical error.
    """
    if url is None:
        return None
    persister = persister_at(url, schema=schema)
    return TimeoutManagerDelivery(persister, polling=polling, time_to_wait_before_triggering_critical_error=outage)


def persister_at(
    url: str, *, schema: str | None = None, two_phase: TwoPhaseCommit | None = None
) -> SqlTimeoutPersister:
    """Return the timeout persister on that database; only here SQLAlchemy is loaded, which is slow."""
    from delayline.timeouts import SqlTimeoutPersister

    return SqlTimeoutPersister(url, schema=schema, two_phase=two_phase)


async def remains_of(url: str, endpoint_name: str, transport: Transport, *, schema: str | None = None) -> Remains:
    """Return what is left of the endpoint's timeout manager; the transport is started.

    Raises BackendUnusable for a table that is there and cannot be used, as one of .NET's before `delayline setup`.
    """
    persister = persister_at(url, schema=schema)
    table = persister.table_of(endpoint_name)
    queues, queued = [], 0
    for queue in satellite_queues(transport, endpoint_name):
        if isinstance(transport, SupportsQueueManagement):
            try:
                queued += await transport.count(queue)
            except QueueNotFound:
                continue
        queues.append(queue)
    if not await persister.has_table(endpoint_name):
        return Remains(None, queued, queues, table)
    await persister.open(endpoint_name)
    try:
        return Remains(await persister.count(), queued, queues, table)
    finally:
        await persister.close()
