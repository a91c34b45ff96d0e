"""An old timeout manager beside a new way of waiting: what is left in it, and what can be deleted when nothing is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayline.delayed.host import satellite_queues
from delayline.delayed.timeout_manager import TimeoutManagerDelivery
from delayline.errors import QueueNotFound
from delayline.transport import ManagedQueues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.delayed.timeout_persister import TimeoutCount
    from delayline.sql import SqlTimeoutPersister
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


def drained_from(url: str | None, *, polling: bool = True) -> TimeoutManagerDelivery | None:
    """Return the timeout manager whose timeouts are at the URL; None for none. Raises ConfigurationError."""
    return None if url is None else TimeoutManagerDelivery(persister_at(url), polling=polling)


def persister_at(url: str) -> SqlTimeoutPersister:
    """Return the timeout persister on that database; only here SQLAlchemy is loaded, which is slow."""
    from delayline.sql import SqlTimeoutPersister

    return SqlTimeoutPersister(url)


async def remains_of(url: str, endpoint_name: str, transport: Transport) -> Remains:
    """Return what is left of the endpoint's timeout manager; the transport is started.

    Raises BackendUnusable for a table that is there and cannot be used, as one of .NET's before `delayline setup`.
    """
    persister = persister_at(url)
    table = persister.table_of(endpoint_name)
    queues, queued = [], 0
    for queue in satellite_queues(transport, endpoint_name):
        if isinstance(transport, ManagedQueues):
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
