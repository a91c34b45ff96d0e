"""A broker with delay levels and one destination, `billing`, and the messages in the levels."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.integration.test_rabbitmq_infrastructure import a_channel
from tests.integration.test_rabbitmq_migration import conventional, taken

from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.operations import create, pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.rabbitmq.infrastructure import DelayInfrastructure


def on_broker(url: str, work: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - what it returns
    async def run() -> Any:  # noqa: ANN401
        async with a_channel(url) as channel:
            return await work(channel)

    return asyncio.run(run())


def with_levels(url: str, levels: DelayInfrastructure) -> None:
    """Create the levels, and the destination."""
    asyncio.run(create(BrokerAddress.parse(url), levels))
    on_broker(url, lambda channel: conventional(channel, "billing"))


def in_levels(url: str, levels: DelayInfrastructure) -> list[Any]:
    """Take everything that waits."""

    async def take(channel: Any) -> list[Any]:  # noqa: ANN401
        return [one for queue in levels.queues for one in await taken(channel, queue.name)]

    found: list[Any] = on_broker(url, take)
    return found


def count(url: str, levels: DelayInfrastructure) -> int:
    """Return the number of messages in the levels."""
    return sum(asyncio.run(pending(BrokerAddress.parse(url), levels)))
