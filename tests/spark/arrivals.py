"""A real endpoint, and what arrives at it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline import Endpoint, Message, MessageContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.transport import Transport

PATIENCE: Final = 90
#: How late a message may be on a machine that does much else.
LATE: Final = timedelta(seconds=20)


class Arrival(NamedTuple):
    """A message that the endpoint has handled, and when."""

    at: datetime
    body: bytes
    headers: Mapping[str, str]
    since: datetime
    """From when on the endpoint has run."""

    def on_time(self, due: datetime) -> bool:
        """Return whether it arrived when it was due or when a receiver started, and never before."""
        return due <= self.at < max(due, self.since) + LATE


def arrivals_at(
    name: str, transport: Transport, delivery: DelayedDelivery, number: int, work: Callable[[], object]
) -> list[Arrival]:
    """Set the endpoint up, do the work, then run it until so many messages have arrived; return them in their order."""

    async def run() -> list[Arrival]:
        found: list[Arrival] = []
        enough = asyncio.Event()
        endpoint = Endpoint(name, transport=transport, delayed_delivery=delivery)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            found.append(Arrival(datetime.now(UTC), message.body, message.headers, since))
            if len(found) == number:
                enough.set()

        await endpoint.setup()
        await asyncio.to_thread(work)
        since = datetime.now(UTC)
        async with endpoint:
            await asyncio.wait_for(enough.wait(), PATIENCE)
        return found

    return asyncio.run(run())
