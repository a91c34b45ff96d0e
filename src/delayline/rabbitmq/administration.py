"""What an administrator does with delay levels: create them, count what waits, and catch what nobody takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable
from delayline.rabbitmq.browsing import count
from delayline.rabbitmq.connection import BrokerConnection, NothingThere
from delayline.rabbitmq.delay_levels import LEVELS, MAXIMUM_DELAY
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.management import Policy, effective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiormq.channel import Channel

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.management import ManagementApi

#: Seconds from now until which people want to know what comes due.
WINDOWS: Final = (60, 3600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400, MAXIMUM_DELAY)


@dataclass(frozen=True, slots=True)
class Window:
    """What comes due within so many seconds: surely, probably and at most, by the levels that messages are in."""

    seconds: int
    at_least: int
    estimate: int
    at_most: int


async def create(address: BrokerAddress, infrastructure: DelayInfrastructure) -> None:
    """Create what is missing. Idempotent. Raises BackendUnavailable; BackendUnusable with the argument that differs."""
    connection = BrokerConnection(address, "delayline create")
    try:
        await connection.run(infrastructure.declare)
    finally:
        await connection.close()


async def pending(address: BrokerAddress, infrastructure: DelayInfrastructure) -> list[int]:
    """Return how many messages wait at each level, from 0 to 27. Raises BackendUnusable where there are no levels."""
    connection = BrokerConnection(address, "delayline pending")

    async def look(channel: Channel) -> list[int]:
        return [await count(channel, infrastructure.level(level)) for level in range(LEVELS)]

    try:
        return await connection.run(look)
    except NothingThere as error:
        raise BackendUnusable(
            f"there are no complete delay levels {infrastructure.prefix}* at {address}. "
            "Create them with: delayline rabbitmq create"
        ) from error
    finally:
        await connection.close()


def windows(counts: Sequence[int]) -> list[Window]:
    """Return what the counts of the levels say about when messages come due.

    One at level n has up to 2^n seconds to go there, and then any of the seconds below: together a triangle from 0 to
    2^(n+1) with its top in the middle. That is an estimate; where the triangle begins and ends is not.
    """
    return [
        Window(
            seconds,
            at_least=sum(number for level, number in enumerate(counts) if (2 << level) - 1 <= seconds),
            estimate=round(sum(number * _share(seconds, 1 << level) for level, number in enumerate(counts))),
            at_most=sum(counts),
        )
        for seconds in WINDOWS
    ]


def _share(seconds: int, length: int) -> float:
    """Return how much of a triangle from 0 to twice the length lies before these seconds."""
    part = seconds / length
    if part >= 2 or seconds >= 2 * length - 1:
        return 1.0
    return part * part / 2 if part <= 1 else 1 - (2 - part) ** 2 / 2


def catch_all_name(infrastructure: DelayInfrastructure) -> str:
    """Return the name that the queue, its exchange and the policy share."""
    return f"{infrastructure.prefix}.delay-undeliverable"


async def catch_all_on(address: BrokerAddress, infrastructure: DelayInfrastructure, api: ManagementApi) -> str:
    """Have due messages without a destination go to a queue, where they hold nobody up; return its name. Idempotent.

    A policy gives the delivery exchange an alternate exchange, which is none of the arguments that .NET compares
    (reference 1.10). Raises BackendUnusable where another policy is in the way.
    """
    name = catch_all_name(infrastructure)
    policy = Policy(name, f"^{re.escape(infrastructure.delivery)}$", {"alternate-exchange": name})
    others = [one for one in await api.policies() if one.name != name]
    there = effective(others, infrastructure.delivery, "exchanges")
    if there is not None:
        raise BackendUnusable(
            f"policy {there.name!r} is in force for {infrastructure.delivery!r}, and an exchange has one only: add "
            f'"alternate-exchange": "{name}" to it, or narrow its pattern'
        )
    connection = BrokerConnection(address, "delayline catch-all")

    async def declare(channel: Channel) -> None:
        await channel.exchange_declare(name, exchange_type="fanout", durable=True)
        await channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        await channel.queue_bind(name, name)

    try:
        await connection.run(declare)
    finally:
        await connection.close()
    await api.set_policy(policy)
    return name


async def catch_all_off(infrastructure: DelayInfrastructure, api: ManagementApi) -> bool:
    """Have due messages without a destination stay in their level again; False when they did. What was caught stays."""
    return await api.delete_policy(catch_all_name(infrastructure))
