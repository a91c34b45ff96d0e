"""The checks of `delayline doctor` on a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin import verification
from delayline.rabbitmq.admin.management_api import ManagementApi
from delayline.rabbitmq.admin.operations import NOT_CAUGHT
from delayline.rabbitmq.admin.verification import CATCH_ALL, Check, check_limits
from delayline.rabbitmq.amqp.methods import ExchangeDeclare
from delayline.rabbitmq.binding_overlap import receivers
from delayline.rabbitmq.delivery_limits import read
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.refusals import NotFound
from delayline.rabbitmq.transport import RabbitMQTransport

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

WHAT: Final = "delay levels"


async def examine(
    url: str, *, delay_levels: bool = True, endpoint: str | None = None, queues: Collection[str] = ()
) -> Sequence[Check]:
    """Check the broker, its exchanges, queues and policies.

    Args:
        url: the broker's URL, with its options.
        delay_levels: whether to check the delay levels.
        endpoint: the only endpoint name to check if the management API, which lists all names, does not answer.
        queues: queues that are received from or moved to.

    Returns:
        Findings: subject, whether it is as it should be, and value.

    Raises:
        BackendUnavailable: The broker cannot be reached.
        BackendUnusable: The broker refuses the login, or something that the check needs.
    """
    transport = RabbitMQTransport(url)
    connection, levels = transport.connection, DelayInfrastructure.named(transport.address.delays)
    await transport.start()
    try:
        version = [Check("RabbitMQ", ok=True, text=".".join(map(str, await connection.version())))]
        version += await limits_of(transport, queues)
        if not delay_levels:
            return version
        await connection.run(lambda channel: channel.call(ExchangeDeclare(exchange=levels.delivery, passive=True)))
        crossing = await receivers(connection, levels, endpoint or "")
    except NotFound:
        return [
            *version,
            Check(WHAT, ok=False, text="none. Create them: delayline setup, or delayline rabbitmq create"),
        ]
    finally:
        await transport.stop()
    try:
        return [*version, *await _closely(transport.address, levels)]
    except (BackendUnavailable, BackendUnusable) as error:
        finding = f"{levels.delivery!r} is there; not looked at more closely: {error}"
        refused = isinstance(error, BackendUnusable)
        if refused:
            finding += f". It may be that {NOT_CAUGHT}"
        exchange = Check(f"{WHAT}: {CATCH_ALL}" if refused else WHAT, ok=False if refused else None, text=finding)
        return [*version, exchange, _names(endpoint, crossing)] if endpoint else [*version, exchange]


async def alarms(url: str) -> Check:
    """Return whether the broker has an alarm of memory or disk space, in which it accepts no messages.

    Only the management API tells it: over AMQP a broker tells those whose messages it holds up already.

    Args:
        url: the broker's URL, with its options.
    """
    what = "alarms"
    try:
        async with ManagementApi(BrokerAddress.parse(url)) as api:
            raised = await api.alarms()
    except (BackendUnavailable, BackendUnusable) as error:
        return Check(what, ok=None, text=f"whether it lacks memory or disk space was not looked at: {error}")
    if raised:
        finding = f"{', '.join(raised)}: the broker accepts no messages until there is more. See rabbitmqctl status"
        return Check(what, ok=False, text=finding)
    return Check(what, ok=True, text="none: memory and disk space suffice")


async def limits_of(transport: RabbitMQTransport, queues: Collection[str]) -> Sequence[Check]:
    """Return which of the queues drop messages that are returned often; nothing where that cannot be seen."""
    limits = await read(transport.address, transport.connection, queues)
    limited = [
        Check(f"queue {name}: delivery limit", ok=False if limit.seen else None, text=str(limit))
        for name, limit in limits.items()
        if limit.drops
    ]
    if limited or not all(limit.seen for limit in limits.values()):
        return limited
    return [check_limits([])] if limits else []


async def _closely(address: BrokerAddress, levels: DelayInfrastructure) -> Sequence[Check]:
    """Return the problems of the levels, as far as the management API shows them."""
    async with ManagementApi(address) as api:
        checks = [*await verification.verify(api, levels), *await verification.examine(api, levels)]
    wrong = [Check(f"{WHAT}: {check.what}", ok=False, text=check.text) for check in checks if not check.ok]
    return wrong or [Check(WHAT, ok=True, text=f"{levels.prefix}.* are complete, and due messages get through")]


def _names(endpoint: str, crossing: Sequence[str]) -> Check:
    """Return the findings about names that need no management API."""
    what = f"{WHAT}: names"
    if crossing:
        pairs = ", ".join(map(repr, crossing))
        finding = f"{pairs} on the broker, in which {endpoint!r} ends, would get its delayed messages too. Rename one"
        return Check(what, ok=False, text=finding)
    finding = (
        f"{endpoint!r} ends in no other name on the broker. Whether another one ends in {endpoint!r} was not looked "
        "at: it takes the management API, at management= in the URL"
    )
    return Check(what, ok=None, text=finding)
