"""The states of queues: how many messages are in each, whether a process receives from it, and whether it is paused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, select

from delayline.errors import BackendUnavailable, DelaylineError
from delayline.transport import QueueState

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import Column, Connection, Select

    from delayline.sql.claims import Claims
    from delayline.sql.database import Database
    from delayline.sql.schema import QueueTables

#: Queues that a statement names; for more it reads the rows of all.
MOST_IN_STATEMENT: Final = 500


async def read_states(
    database: Database, tables: QueueTables, claims: Claims, queues: Sequence[str] | None
) -> list[QueueState]:
    """Return the states of the queues that are registered, of all where None, in three statements.

    Who receives is unknown where the receivers cannot be read, as with tables of an older delayline.
    """
    counted = await database.read(partial(_counted, tables=tables, queues=queues))
    received: set[str] | None = None
    try:
        received = await database.read(partial(_received, tables=tables, claims=claims, queues=queues))
    except BackendUnavailable:
        raise
    except DelaylineError:
        pass
    return [
        QueueState(name, number, None if received is None else name in received, bool(paused))
        for name, (number, paused) in counted.items()
        if queues is None or name in queues
    ]


def _counted(
    connection: Connection, tables: QueueTables, queues: Collection[str] | None
) -> dict[str, tuple[int, object]]:
    """Return the number of messages of each queue, and what says that it is paused."""
    registry, queued = tables.queues.c, tables.queued.c
    numbers = select(queued.queue, func.count()).group_by(queued.queue)
    counts = {name: int(number) for name, number in connection.execute(_only(numbers, queued.queue, queues))}
    kept = connection.execute(
        _only(select(registry.name, registry.paused), registry.name, queues).order_by(registry.name)
    )
    return {name: (counts.get(name, 0), paused) for name, paused in kept}


def _received(connection: Connection, tables: QueueTables, claims: Claims, queues: Collection[str] | None) -> set[str]:
    """Return the queues with a receiver whose process runs: a claim on its number is held.

    This process's receivers are asked for first, and further receivers of their queues not at all: to try a claim
    means to hold it for a moment.
    """
    receivers = tables.receivers.c
    rows = connection.execute(_only(select(receivers.queue, receivers.number), receivers.queue, queues)).all()
    received = {queue for queue, number in rows if claims.holds(number)}
    others = {number: queue for queue, number in rows if queue not in received}
    crashed = claims.take(others, len(others))
    claims.release(crashed)
    return received | {queue for number, queue in others.items() if number not in set(crashed)}


def _only(query: Select[Any], name: Column[Any], queues: Collection[str] | None) -> Select[Any]:
    return query if queues is None or len(queues) > MOST_IN_STATEMENT else query.where(name.in_(queues))
