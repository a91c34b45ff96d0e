"""A receiver that stops leaves nothing that says that it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayline import SqlTransport


async def test_a_receiver_that_stops_while_it_starts_is_gone(queues: SqlTransport) -> None:
    """Given a receiver that is being noted in the database, when it stops, then its queue has no receiver."""
    receiver = await queues.receiver("billing")
    receiving = asyncio.create_task(receiver.receive(1))
    await asyncio.sleep(0)
    await receiver.stop()
    assert await receiving == []
    [state] = await queues.queue_states(["billing"])
    assert not state.received
