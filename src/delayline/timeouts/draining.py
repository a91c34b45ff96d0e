"""Draining an old timeout manager after a change of delayed delivery: remaining timeouts and queues to delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

#: The most timeouts without a time whose ids are read.
MOST_NAMED_TIMEOUTS: Final = 10


@dataclass(frozen=True, slots=True)
class RemainingTimeouts:
    """Timeouts and messages that remain in a timeout manager."""

    timeouts: TimeoutCount | None
    """The count of its table; None if the table is gone."""
    queued: int
    """Messages in its queues."""
    queues: Sequence[str]
    """Its existing queues."""
    table: str
    without_time: Sequence[str] = ()
    """The ids of timeouts without a time, the first ones."""

    @property
    def empty(self) -> bool:
        """Whether no timeout that will be due, and no message, remains."""
        return self.queued == 0 and (self.timeouts is None or self.timeouts.number == 0)


def draining_delivery(
    url: str | None, *, polling: bool = True, schema: str | None = None, outage: timedelta = TWO_MINUTES
) -> TimeoutManagerDelivery | None:
    """Return a timeout manager on the database at `url`, or None without a URL.

    Args:
        url: the timeout persister's database; no timeout manager if None.
        polling: whether this process forwards due timeouts.
        schema: the database schema; the connection's default if None.
        outage: how long the persister may be unreachable before a critical error.

    Raises:
        ConfigurationError: The URL is not that of a supported database.
    """
    if url is None:
        return None
    persister = persister_at(url, schema=schema)
    return TimeoutManagerDelivery(persister, polling=polling, time_to_wait_before_triggering_critical_error=outage)


def persister_at(
    url: str, *, schema: str | None = None, two_phase: TwoPhaseCommit | None = None
) -> SqlTimeoutPersister:
    """Return the timeout persister on the database at `url`; imports SQLAlchemy, which is slow, only here."""
    from delayline.timeouts import SqlTimeoutPersister

    return SqlTimeoutPersister(url, schema=schema, two_phase=two_phase)


async def remaining_timeouts(
    url: str, endpoint_name: str, transport: Transport, *, schema: str | None = None
) -> RemainingTimeouts:
    """Count what remains in the endpoint's timeout manager. The transport must be started.

    Raises BackendUnusable for a table of an unexpected shape, such as .NET's before `delayline setup`.
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
        return RemainingTimeouts(None, queued, queues, table)
    await persister.open(endpoint_name)
    try:
        without_time = await persister.without_time(limit=MOST_NAMED_TIMEOUTS)
        return RemainingTimeouts(
            await persister.count(), queued, queues, table, [message.id for message in without_time]
        )
    finally:
        await persister.close()
