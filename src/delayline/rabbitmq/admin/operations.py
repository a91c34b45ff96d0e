"""Operations on delay levels: create them, count their messages, and catch undeliverable messages."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.backends import DueWithin
from delayline.clock import ONE_DAY, ONE_HOUR, ONE_MINUTE, SystemClock
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, QueueNotFound
from delayline.rabbitmq.admin import limits
from delayline.rabbitmq.admin.management_api import ManagementApi, Policy, effective, version_of
from delayline.rabbitmq.admin.verification import (
    CATCH_ALL,
    RETURNS,
    Check,
    blocked,
    catch_all_name,
    check_limits,
    refusals,
)
from delayline.rabbitmq.amqp.methods import ExchangeDeclare, QueueBind, QueueDeclare
from delayline.rabbitmq.browsing import count, must_exist
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.delivery_limits import LIMITED_FROM, reason
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import LEVELS, MAXIMUM_DELAY, remaining
from delayline.rabbitmq.refusals import NotFound, PreconditionFailed
from delayline.rabbitmq.topology import TOPOLOGY_TYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from delayline.clock import Clock
    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import Channel

#: Times from now for which the number of due messages is estimated.
WINDOWS: Final = (
    ONE_MINUTE,
    ONE_HOUR,
    *(days * ONE_DAY for days in (1, 7, 30, 365)),
    timedelta(seconds=MAXIMUM_DELAY),
)
SETUP_PATIENCE: Final = 5.0
"""Seconds that a set-up waits for the management API."""
NOT_CAUGHT: Final = (
    "due messages without a destination are not caught: 32 of them stop a level for every endpoint. As a user who may "
    "set policies run: delayline rabbitmq catch-all on"
)


@dataclass(frozen=True, slots=True)
class BlockedMessages:
    """Numbers of due messages that do not reach a destination, by place."""

    places: Mapping[str, int]
    unseen: str | None = None
    """Why not all messages could be counted; None if all were."""

    def __str__(self) -> str:
        """Return the counts and the remedy as a sentence."""
        where = ", ".join(f"{number} in {name}" for name, number in self.places.items())
        return (
            f"{where}: due, and without a destination, or refused by a full one. Create the queue again, take its "
            "limit away, or read the catch-all queue, before this broker is switched off. To see the cause: delayline "
            "rabbitmq verify"
        )


async def create(address: BrokerAddress, infrastructure: DelayInfrastructure) -> None:
    """Create missing levels. Idempotent. Raises BackendUnavailable; BackendUnusable with the argument that differs."""
    connection = BrokerConnection(address, "delayline create")
    try:
        await connection.run(infrastructure.declare)
    finally:
        await connection.close()


async def bind(address: BrokerAddress, infrastructure: DelayInfrastructure, destinations: Sequence[str]) -> None:
    """Have due messages get to the destinations, which exist. Idempotent; a no-op on a broker without the levels.

    Raises BackendUnavailable; QueueNotFound for a destination that does not exist.
    """
    connection, delivery = BrokerConnection(address, "delayline bind"), infrastructure.delivery
    work = partial(TOPOLOGY_TYPES[address.topology].bind_delivery, delivery_exchange=delivery)
    try:
        if not await has_exchange(connection, delivery):
            return
        for destination in destinations:
            try:
                await connection.run(partial(work, destination=destination))
            except NotFound as error:
                raise QueueNotFound(destination) from error
    finally:
        await connection.close()


async def has_exchange(connection: BrokerConnection, name: str) -> bool:
    """Return whether the broker has an exchange of that name."""
    try:
        await connection.run(lambda channel: channel.call(ExchangeDeclare(exchange=name, passive=True)))
    except NotFound:
        return False
    return True


async def pending(address: BrokerAddress, infrastructure: DelayInfrastructure) -> list[int]:
    """Return the number of messages at each level, from 0 to 27. Raises BackendUnusable if there are no levels."""
    connection = BrokerConnection(address, "delayline pending")

    async def look(channel: Channel) -> list[int]:
        return [await count(channel, infrastructure.level(level)) for level in range(LEVELS)]

    try:
        return await connection.run(look)
    except NotFound as error:
        raise BackendUnusable(
            f"there are no complete delay levels {infrastructure.prefix}* at {address}. "
            "Create them with: delayline rabbitmq create"
        ) from error
    finally:
        await connection.close()


async def overdue(
    address: BrokerAddress, infrastructure: DelayInfrastructure, clock: Clock | None = None
) -> BlockedMessages:
    """Return the messages that no count of ready messages includes: stuck in levels though due, or undeliverable.

    Without a management API only the latter. Raises BackendUnavailable where the broker does not answer.
    """
    try:
        async with ManagementApi(address) as api:
            return BlockedMessages(await blocked(api, infrastructure, clock or SystemClock()))
    except (BackendUnavailable, BackendUnusable) as error:
        unseen = f"it is unknown how many due messages hang in the levels, beside those counted: {error}"
    name = catch_all_name(infrastructure)
    connection = BrokerConnection(address, "delayline pending")
    try:
        number = await connection.run(lambda channel: count(channel, name))
    except NotFound:
        number = 0
    finally:
        await connection.close()
    return BlockedMessages({name: number} if number else {}, unseen)


def due_within(counts: Sequence[int]) -> list[DueWithin]:
    """Return the counts of the levels with the longest time that a message of each has left."""
    return [
        DueWithin(timedelta(seconds=remaining(MAXIMUM_DELAY, level)), number) for level, number in enumerate(counts)
    ]


LONGEST_TYPE: Final = 240  # bytes of UTF-8: names of exchanges and keys have 255


async def subscribe(address: BrokerAddress, endpoint: str, event_type: str, *, undo: bool = False) -> None:
    """Have an endpoint receive the events of a .NET type, or no more; its queue exists.

    Raises QueueNotFound for an endpoint that has no queue, and BackendUnusable for an exchange of another kind.
    """
    if not event_type.strip(".:") or len(event_type.encode("utf-8", "replace")) > LONGEST_TYPE:
        raise ConfigurationError(
            "the type is the full name of a .NET type, such as Contoso.Messages.OrderPlaced, of at most "
            f"{LONGEST_TYPE} bytes: not {event_type[:100]!r}"
        )
    topology, connection = TOPOLOGY_TYPES[address.topology], BrokerConnection(address, "delayline subscribe")
    work = topology.unsubscribe if undo else topology.subscribe
    try:
        await connection.run(partial(must_exist, queue=endpoint))
        await connection.run(partial(work, queue=endpoint, event_type=event_type))
    except NotFound as error:
        raise QueueNotFound(endpoint) from error
    except PreconditionFailed as error:
        raise BackendUnusable(
            f"the exchange of {event_type!r} is there already, and not as .NET has it: {error}"
        ) from error
    finally:
        await connection.close()


async def catch_all_on(address: BrokerAddress, infrastructure: DelayInfrastructure, api: ManagementApi) -> str:
    """Route due messages without a destination to a queue, so that they do not block their level; return its name.

    Idempotent. A policy sets the alternate exchange of the delivery exchange, because NServiceBus declares that
    exchange without arguments and would be refused if it had any. Raises BackendUnusable if another policy is in the
    way.
    """
    name = catch_all_name(infrastructure)
    policy = Policy(name, f"^{re.escape(infrastructure.delivery)}$", {"alternate-exchange": name})
    others = [policy for policy in await api.policies() if policy.name != name]
    in_force = effective(others, infrastructure.delivery, "exchanges")
    if in_force is not None:
        raise BackendUnusable(
            f"policy {in_force.name!r} is in force for {infrastructure.delivery!r}, and an exchange has one only: add "
            f'"alternate-exchange": "{name}" to it, or narrow its pattern'
        )
    connection = BrokerConnection(address, "delayline catch-all")

    async def declare(channel: Channel) -> None:
        await channel.call(ExchangeDeclare(exchange=name, exchange_type="fanout", durable=True))
        await channel.call(QueueDeclare(queue=name, durable=True, arguments={"x-queue-type": "quorum"}))
        await channel.call(QueueBind(queue=name, exchange=name))

    await limits.lift(api, version_of(await api.version()), [name])
    try:
        await connection.run(declare)
    finally:
        await connection.close()
    await api.set_policy(policy)
    return name


async def catch_undeliverable(address: BrokerAddress, infrastructure: DelayInfrastructure) -> Check:
    """Enable the catch-all during set-up; return whether it is enabled, else the remedy.

    It is not enabled if the broker refuses, for lack of rights or because of another policy. Without a management API
    that is unknown.
    """
    try:
        async with asyncio.timeout(SETUP_PATIENCE), ManagementApi(address) as api:
            name = await catch_all_on(address, infrastructure, api)
    except (BackendUnusable, ConfigurationError) as error:
        return Check(CATCH_ALL, ok=False, text=f"{NOT_CAUGHT}: {error}")
    except (BackendUnavailable, TimeoutError) as error:
        reason = str(error) or f"no answer from {address.management_url} in {SETUP_PATIENCE:g} s"
        return Check(CATCH_ALL, ok=None, text=f"it may be that {NOT_CAUGHT}: {reason}")
    return Check(CATCH_ALL, ok=True, text=f"due messages without a destination go to the queue {name}")


async def lift_limits(address: BrokerAddress, infrastructure: DelayInfrastructure) -> Check:
    """Have the broker drop nothing that is returned to the queues of the levels and of the catch-all.

    Returns whether it does not, else the remedy. Raises BackendUnavailable where the broker does not answer.
    """
    connection = BrokerConnection(address, "delayline limits")
    try:
        version = await connection.version()
    finally:
        await connection.close()
    if version < LIMITED_FROM or not infrastructure.quorum:
        return Check(RETURNS, ok=True, text="such queues have none, unless a policy sets one")
    try:
        async with asyncio.timeout(SETUP_PATIENCE), ManagementApi(address) as api:
            lifted = await limits.lift_levels(api, version, infrastructure)
            lifted += (await limits.lift(api, version, [catch_all_name(infrastructure)])).values()
    except (BackendUnavailable, BackendUnusable, ConfigurationError, TimeoutError) as error:
        lifted = [limits.unseen_levels(address.vhost, version, infrastructure, reason(address, error))]
    return check_limits(lifted)


async def refusing_queues(
    address: BrokerAddress, infrastructure: DelayInfrastructure, names: Collection[str]
) -> Sequence[str]:
    """Return a sentence for each of the queues that refuses due messages; none without a management API."""
    try:
        async with asyncio.timeout(SETUP_PATIENCE), ManagementApi(address) as api:
            layers = await api.policies(), await api.policies(of_operators=True)
            return [refusal.text(infrastructure) for refusal in refusals(await api.queues(), layers, names)]
    except (BackendUnavailable, BackendUnusable, ConfigurationError, TimeoutError):
        return []  # the catch-all's check says so


async def catch_all_off(infrastructure: DelayInfrastructure, api: ManagementApi) -> bool:
    """Disable the catch-all; False if it was not enabled. Messages in its queue stay."""
    return await api.delete_policy(catch_all_name(infrastructure))
