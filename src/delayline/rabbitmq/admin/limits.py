"""The delivery limits of a virtual host's queues, seen and lifted through the management API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.rabbitmq.admin.management_api import ManagementApi, Policy, QueueFacts, effective
from delayline.rabbitmq.delivery_limits import (
    ARGUMENT,
    LIMIT_LOOK_PATIENCE,
    LIMITED_FROM,
    QUORUM,
    UNLIMITED,
    DeliveryLimit,
    by_argument,
    default_limit,
    reason,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.infrastructure import DelayInfrastructure

SETTING: Final = "delivery-limit"
#: What .NET's Regex.Escape writes with a backslash: the patterns of both are the same.
ESCAPED: Final = {ord(character): f"\\{character}" for character in "\\*+?|{[()^$.# "} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    ord("\f"): "\\f",
}


def unlimited_policy(queue: str) -> Policy:
    """Return the policy that NServiceBus 10 and 11 create for a queue that they receive from."""
    return Policy(
        f"nsb.{queue}.{SETTING}", f"^{queue.translate(ESCAPED)}$", {SETTING: UNLIMITED}, apply_to=f"{QUORUM}_queues"
    )


def levels_policy(levels: DelayInfrastructure) -> Policy:
    """Return the policy for the queues of all delay levels."""
    policy = unlimited_policy(f"{levels.prefix}.delay-level")
    return replace(policy, pattern=f"^{levels.prefix.translate(ESCAPED)}\\.delay-level-[0-9]{{2}}$")


@dataclass(frozen=True, slots=True)
class Policies:
    """What limits the queues of a virtual host, beside their arguments, at a moment."""

    vhost: str
    version: tuple[int, ...]
    of_users: Sequence[Policy]
    of_operators: Sequence[Policy]

    def limit_of(self, queue: QueueFacts) -> DeliveryLimit:
        """Return the limit in force: the lowest of the queue's argument, its policy and its operator policy."""
        if queue.type != QUORUM:
            return DeliveryLimit(queue.name)
        limits = list(self._set_for(queue))
        if self.version < LIMITED_FROM:  # a number below 0 is taken for 0, and without a number there is no limit
            limits = [replace(limit, returns=limit.returns or 0) for limit in limits]
        elif not limits:
            return default_limit(queue.name, self.version, self._remedy(queue.name, self.in_force(queue)))
        limited = [limit for limit in limits if limit.returns is not None]
        return min(limited, key=lambda limit: limit.returns or 0, default=DeliveryLimit(queue.name))

    def in_force(self, queue: QueueFacts) -> Policy | None:
        """Return the policy that counts for the queue: a single policy does."""
        return next((policy for policy in self.of_users if policy.name == queue.policy), None)

    def _set_for(self, queue: QueueFacts) -> Iterator[DeliveryLimit]:
        """Yield every limit that is set for the queue; limits below 0 as none."""
        if (number := _whole(queue.arguments.get(ARGUMENT))) is not None:
            yield by_argument(queue.name, number)
        operators = effective(self.of_operators, queue.name, QUORUM)
        for policy, kind in ((self.in_force(queue), "policy"), (operators, "operator policy")):
            if policy is not None and (number := _whole(policy.definition.get(SETTING))) is not None:
                remedy = f"Change it: {self._command(policy, kind)}"
                yield DeliveryLimit(queue.name, None if number < 0 else number, f"by {kind} {policy.name!r}", remedy)

    def _remedy(self, queue: str, policy: Policy | None) -> str:
        if policy is None:
            return lifting(self.vhost, queue)
        return (
            f"It has the policy {policy.name!r}, and a queue has one alone: add {SETTING} to that one with: "
            f"{self._command(policy, 'policy')}"
        )

    def _command(self, policy: Policy, kind: str) -> str:
        limited = replace(policy, definition={**policy.definition, SETTING: UNLIMITED})
        return _command(self.vhost, limited, kind)


def lifting(vhost: str, queue: str) -> str:
    """Return what lifts the default limit of a queue without a policy."""
    return f"Lift the limit with: {_command(vhost, unlimited_policy(queue))}"


def _command(vhost: str, policy: Policy, kind: str = "policy") -> str:
    definition = json.dumps(dict(policy.definition), ensure_ascii=False)
    words = [f"set_{kind.replace(' ', '_')}", "-p", vhost, policy.name, policy.pattern, definition]
    return shlex.join(["rabbitmqctl", *words, "--priority", str(policy.priority), "--apply-to", policy.apply_to])


def unseen(vhost: str, version: tuple[int, ...], queues: Collection[str], why: str) -> dict[str, DeliveryLimit]:
    """Return the limits to reckon with where no policies can be seen, for this reason."""
    return {queue: default_limit(queue, version, lifting(vhost, queue), unseen=why) for queue in queues}


async def read(api: ManagementApi, version: tuple[int, ...], queues: Collection[str]) -> dict[str, DeliveryLimit]:
    """Return the limits of the existing queues. Raises BackendUnavailable or BackendUnusable."""
    policies, facts = await asyncio.gather(_policies(api, version), _facts(api, queues))
    return {name: policies.limit_of(queue) for name, queue in facts.items()}


async def limits_of(
    api: ManagementApi, version: tuple[int, ...], queues: Collection[QueueFacts]
) -> list[DeliveryLimit]:
    """Return the limits of the queues. Raises BackendUnavailable or BackendUnusable."""
    policies = await _policies(api, version)
    return [policies.limit_of(queue) for queue in queues]


async def lift(api: ManagementApi, version: tuple[int, ...], queues: Collection[str]) -> dict[str, DeliveryLimit]:
    """Set a policy for each queue that has no policy and the default limit; return the limits that are then in force.

    Queues with another policy keep it: a single policy counts for a queue. Queues for which the user may set none, or
    whose policy the broker refuses, keep their limit. Idempotent.

    Args:
        api: The management API.
        version: The broker's version.
        queues: Names of queues; missing queues will be quorum queues.

    Raises:
        BackendUnavailable: There is no answer; some policies may be set.
        BackendUnusable: The user may not see policies.
    """
    policies, facts = await asyncio.gather(_policies(api, version), _facts(api, queues))
    limits = {}
    for name in queues:
        queue = facts.get(name) or _planned(name, policies)
        limits[name] = policies.limit_of(queue)
        if limits[name].is_default and queue.policy is None:
            policy = unlimited_policy(name)
            try:
                await api.set_policy(policy)
            except BackendUnusable:  # the limit says what another user may do
                continue
            with_it = replace(policies, of_users=[policy])
            limits[name] = with_it.limit_of(replace(queue, policy=policy.name))
    return limits


async def lift_levels(api: ManagementApi, version: tuple[int, ...], levels: DelayInfrastructure) -> list[DeliveryLimit]:
    """Set a policy for the queues of the levels where a queue has no policy and the default limit; return their limits.

    They get no argument: .NET declares them without it, and would be refused. Raises as `lift`.
    """
    limits = await read_levels(api, version, levels)
    if any(limit.is_default for limit in limits):
        free = {queue.name for queue in (await api.queues()).values() if queue.policy is None}
        if any(limit.is_default and limit.queue in free for limit in limits):
            with contextlib.suppress(BackendUnusable):  # the limits say what another user may do
                await api.set_policy(levels_policy(levels))
            return await read_levels(api, version, levels)
    return limits


async def read_levels(api: ManagementApi, version: tuple[int, ...], levels: DelayInfrastructure) -> list[DeliveryLimit]:
    """Return the limits of the queues of the levels that exist. Raises BackendUnavailable or BackendUnusable."""
    policies, queues = await asyncio.gather(_policies(api, version), api.queues())
    facts = [queues[level.name] for level in levels.queues if level.name in queues]
    limits = [policies.limit_of(queue) for queue in facts]
    remedy = f"Lift the limit with: {_command(api.vhost, levels_policy(levels))}"
    return [
        replace(limit, remedy=remedy) if limit.is_default and queue.policy is None else limit
        for limit, queue in zip(limits, facts, strict=True)
    ]


async def limit_of_levels(
    address: BrokerAddress, version: tuple[int, ...], levels: DelayInfrastructure
) -> DeliveryLimit:
    """Return the lowest limit of the levels' queues, or the limit to reckon with where policies cannot be seen."""
    try:
        async with asyncio.timeout(LIMIT_LOOK_PATIENCE), ManagementApi(address) as api:
            limits = await read_levels(api, version, levels)
    except (BackendUnavailable, BackendUnusable, ConfigurationError, TimeoutError) as error:
        return unseen_levels(address.vhost, version, levels, reason(address, error))
    limited = [limit for limit in limits if limit.drops]
    return min(limited, key=lambda limit: limit.returns or 0, default=DeliveryLimit(levels.level(0)))


def unseen_levels(vhost: str, version: tuple[int, ...], levels: DelayInfrastructure, why: str) -> DeliveryLimit:
    """Return the limit to reckon with for the queues of the levels, where no policies can be seen."""
    remedy = f"Lift the limit with: {_command(vhost, levels_policy(levels))}"
    if not levels.quorum:
        return DeliveryLimit(levels.level(0))
    return default_limit(levels.level(0), version, remedy, unseen=why)


async def _policies(api: ManagementApi, version: tuple[int, ...]) -> Policies:
    of_users, of_operators = await asyncio.gather(api.policies(), api.policies(of_operators=True))
    return Policies(api.vhost, version, of_users, of_operators)


async def _facts(api: ManagementApi, queues: Collection[str]) -> Mapping[str, QueueFacts]:
    answers = await asyncio.gather(*map(api.queue, queues))
    return {queue.name: queue for queue in answers if queue is not None}


def _planned(name: str, policies: Policies) -> QueueFacts:
    """Return the quorum queue as it will be when it is created."""
    policy = effective(policies.of_users, name, QUORUM)
    return QueueFacts(name, QUORUM, True, False, False, {}, 0, 0, 0, None if policy is None else policy.name)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
