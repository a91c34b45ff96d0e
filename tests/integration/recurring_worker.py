"""A process with a recurring message that kills itself at a step between two occurrences."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from delayline import Endpoint, RabbitMQTransport, SqlDelayedMessageStore, SqlTransport, StoredDelivery, interval
from delayline.delayed.mover import Mover
from delayline.delayed.schedules import Schedules

ENDPOINT = "recurring"


def transport_for(url: str) -> SqlTransport | RabbitMQTransport:
    return RabbitMQTransport(url) if url.startswith("amqp") else SqlTransport(url)


def endpoint_at(store_url: str, queues_url: str) -> Endpoint:
    endpoint = Endpoint(
        ENDPOINT,
        transport=transport_for(queues_url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(store_url)),
        send_only=True,
    )
    endpoint.every("tick", interval(seconds=1), "reports", b"tick", missed="all", check_destination=False)
    return endpoint


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(step: str, store_url: str, queues_url: str) -> None:
    advance: Any = Schedules.advance
    removed: Any = Mover._removed

    async def advance_then_kill(*given: object) -> None:
        await advance(*given)
        kill()

    def kill_when_removed(mover: Mover, messages: object, now: object) -> None:
        if messages:
            kill()
        removed(mover, messages, now)

    if step == "dispatched":
        Schedules.advance = kill  # type: ignore[method-assign, assignment]
    elif step == "followed":
        Schedules.advance = advance_then_kill  # type: ignore[method-assign, assignment]
    elif step == "removed":
        Mover._removed = kill_when_removed  # type: ignore[method-assign, assignment]
    async with endpoint_at(store_url, queues_url) as endpoint:
        await endpoint.wait_stopped()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
