"""Compares the delay levels of a broker with their definition, and finds causes of undelivered messages."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delayline.clock import SystemClock
from delayline.rabbitmq.admin import limits
from delayline.rabbitmq.admin.management_api import effective, version_of
from delayline.rabbitmq.infrastructure import Difference
from delayline.rabbitmq.levels import crossings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from delayline.clock import Clock
    from delayline.rabbitmq.admin.management_api import ExchangeFacts, ManagementApi, Policy, QueueFacts
    from delayline.rabbitmq.delivery_limits import DeliveryLimit
    from delayline.rabbitmq.infrastructure import Binding, DelayInfrastructure

OLDEST_VERIFIED: Final = (3, 10, 0)
#: From here on the flag is part of the broker.
FLAG_IS_GIVEN: Final = (3, 12, 0)
FLAG: Final = "stream_queue"
SHOWN_FACTS: Final = 5
#: In versions before this one a level whose leader was lost may go on sending to the lost node until that runs again:
#: its sender keeps the node that led the destination when it first sent there. Seen on 3.10.8, not on 4.0.5.
SENDS_ON_AFTER_A_LOSS: Final = (4, 0, 0)
#: Policy settings that break a level: they cut delays, drop messages, or delete the queue.
HARMFUL: Final = ("message-ttl", "max-length", "max-length-bytes", "expires", "dead-letter-exchange")
LEAST_LOOKS: Final = 3
MOST_LOOKS: Final = 6
#: A quorum queue counts its messages every 5 s (`quorum_tick_interval`): an earlier look would see the same numbers.
SECONDS_BETWEEN_LOOKS: Final = 6.0
DESTINATION_START: Final = "#."
LENGTH_LIMITS: Final = ("max-length", "max-length-bytes")
#: What a queue does with more messages than its limit, where it does not drop old messages.
REFUSING_OVERFLOWS: Final = frozenset({"reject-publish", "reject-publish-dlx"})
CATCH_ALL: Final = "catch-all"
RETURNS: Final = "returns"


class Check(NamedTuple):
    """A finding: its subject, whether it is as it should be, and its value."""

    what: str
    ok: bool | None
    """None if that is unknown: the check could not be made."""
    text: str


async def verify(api: ManagementApi, infrastructure: DelayInfrastructure) -> list[Check]:
    """Return whether the broker can carry the levels, and has them all exactly as they should be.

    Raises BackendUnavailable or BackendUnusable when it cannot be looked at.
    """
    checks = [check_version(await api.version())]
    if infrastructure.quorum:
        checks.append(_flag(await api.version(), await api.feature_flags()))
    queues, bindings = await api.queues(), await api.bindings()
    version = version_of(await api.version())
    ends = [catch_all_name(infrastructure), *destinations(infrastructure, bindings)]
    limited = await limits.read_levels(api, version, infrastructure)
    limited += await limits.limits_of(api, version, [queues[name] for name in dict.fromkeys(ends) if name in queues])
    return [
        *checks,
        _exchanges(infrastructure, await api.exchanges()),
        _queues(infrastructure, queues),
        _bindings(infrastructure, bindings),
        _policies(infrastructure, await api.policies(), await api.policies(of_operators=True)),
        check_limits(limited),
    ]


def check_limits(limits: Sequence[DeliveryLimit]) -> Check:
    """Return whether queues drop messages that are returned to them often."""
    limited = [limit for limit in limits if limit.drops]
    if not limited:
        return Check(RETURNS, ok=True, text="no queue drops messages that are returned to it")
    others = f"; so do {len(limited) - 1} more" if len(limited) > 1 else ""
    remedies = dict.fromkeys(limit.remedy for limit in limited)
    finding = f"{limited[0].fact}{others}. " + " ".join(list(remedies)[:SHOWN_FACTS])
    return Check(RETURNS, ok=False if any(limit.seen for limit in limited) else None, text=finding)


async def examine(api: ManagementApi, infrastructure: DelayInfrastructure, clock: Clock | None = None) -> list[Check]:
    """Return whether messages reach their destinations, and no others.

    Looks several times, for up to 30 s, where due messages seem to have nowhere to go: some may just be on their way.
    """
    queues, bindings = await api.queues(), await api.bindings()
    policies = await api.policies(), await api.policies(of_operators=True)
    ends = reached(infrastructure, bindings)
    caught = _caught(infrastructure, queues, policies[0])
    refusing = refusals(queues, policies, {name for names in ends.values() for name in names})
    return [
        await _undeliverable(api, infrastructure, clock or SystemClock(), caught=caught.ok, refusing=refusing),
        _destinations(infrastructure, ends, refusing),
        _names(infrastructure, bindings),
        caught,
    ]


def catch_all_name(infrastructure: DelayInfrastructure) -> str:
    """Return the name that the catch-all's queue, its exchange and its policy share."""
    return f"{infrastructure.prefix}.delay-undeliverable"


async def blocked(api: ManagementApi, infrastructure: DelayInfrastructure, clock: Clock) -> dict[str, int]:
    """Return where due messages are that reach no destination, and how many: levels, and the catch-all's queue."""
    places = dict(await _stuck_for_long(api, infrastructure, clock, _always_some))
    caught = (await api.queues()).get(catch_all_name(infrastructure))
    if caught is not None and caught.messages:
        places[caught.name] = caught.messages
    return places


def destinations(infrastructure: DelayInfrastructure, bindings: Iterable[Binding]) -> list[str]:
    """Return the destinations that are bound to the delivery exchange."""
    return sorted(
        binding.routing_key.removeprefix(DESTINATION_START)
        for binding in bindings
        if binding.source == infrastructure.delivery and binding.routing_key.startswith(DESTINATION_START)
    )


def check_version(version: str) -> Check:
    """Return whether a broker of that version can carry levels of quorum queues."""
    if version_of(version) >= OLDEST_VERIFIED:
        return Check("version", ok=True, text=version)
    return Check(
        "version",
        ok=False,
        text=f"An unsupported broker version was detected: {version}. The broker must be at least version 3.10.0.",
    )


def _flag(version: str, flags: Mapping[str, str]) -> Check:
    if flags.get(FLAG) == "enabled" or version_of(version) >= FLAG_IS_GIVEN:
        return Check("feature flag", ok=True, text=f"{FLAG} is enabled")
    return Check(
        "feature flag",
        ok=False,
        text=f"An unsupported broker configuration was detected. The '{FLAG}' feature flag needs to be enabled. "
        f"Without it due messages may be lost on their way. Enable it with: rabbitmqctl enable_feature_flag {FLAG}",
    )


def _exchanges(infrastructure: DelayInfrastructure, exchanges: Mapping[str, ExchangeFacts]) -> Check:
    faults: list[str] = []
    for name in infrastructure.exchanges:
        if name not in exchanges:
            faults.append(f"{name} is missing")
            continue
        exchange = exchanges[name]
        wanted: dict[str, object] = {"type": "topic", "durable": True, "auto_delete": False, "internal": False}
        actual = {argument: getattr(exchange, argument) for argument in wanted} | dict(exchange.arguments)
        faults += _differences("exchange", name, wanted, actual)
    return _judged("exchanges", len(infrastructure.exchanges), faults)


def _queues(infrastructure: DelayInfrastructure, queues: Mapping[str, QueueFacts]) -> Check:
    faults: list[str] = []
    for queue in infrastructure.queues:
        if queue.name not in queues:
            faults.append(f"{queue.name} is missing")
            continue
        fact = queues[queue.name]
        wanted = {"durable": True, "auto_delete": False, **queue.arguments}
        described = {"durable": fact.durable, "auto_delete": fact.auto_delete, "x-queue-type": fact.type}
        actual = described | dict(fact.arguments)  # which name the type where the declaration did, or since RabbitMQ 4
        faults += _differences("queue", queue.name, wanted, actual)
    return _judged("queues", len(infrastructure.queues), faults)


def _bindings(infrastructure: DelayInfrastructure, actual: Sequence[Binding]) -> Check:
    """Every binding of ours is there; and from a level, no other: it would lead messages astray."""
    ours, theirs = set(infrastructure.bindings), set(actual)
    levels = {binding.source for binding in ours}
    faults = [
        f"{binding.source} to {binding.destination} with key {binding.routing_key} is missing"
        for binding in ours - theirs
    ]
    faults += [
        f"{binding.source} to {binding.destination} with key {binding.routing_key} is too many"
        for binding in theirs - ours
        if binding.source in levels or (binding.to_queue and binding.destination in levels)
    ]
    return _judged("bindings", len(ours), sorted(faults))


def _policies(infrastructure: DelayInfrastructure, *layers: Sequence[Policy]) -> Check:
    """Policies that reach the levels by accident, as a policy for all queues does."""
    kind = "quorum" if infrastructure.quorum else "classic"
    reached: dict[str, list[str]] = defaultdict(list)
    for queue in infrastructure.queues:
        for policy in (effective(layer, queue.name, kind) for layer in layers):
            for setting in HARMFUL if policy else ():
                if policy and setting in policy.definition:
                    reached[f"{policy.name!r} sets {setting}={policy.definition[setting]}"].append(queue.name)
    faults = [f"{setting} on {_some(names)}" for setting, names in reached.items()]
    if not faults:
        return Check("policies", ok=True, text="none changes what the levels do")
    return Check(
        "policies", ok=False, text=f"policy {'; '.join(faults)}. Narrow its pattern: delays are cut, or messages lost"
    )


def _differences(kind: str, name: str, wanted: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    for argument in (*wanted, *(extra for extra in actual if extra not in wanted)):
        ours, theirs = wanted.get(argument, "none"), actual.get(argument, "none")
        if ours != theirs:
            yield str(Difference(kind, name, argument, theirs=str(theirs), ours=str(ours)))


def _judged(what: str, number: int, faults: Sequence[str]) -> Check:
    if not faults:
        return Check(what, ok=True, text=f"all {number} are as they should be")
    return Check(what, ok=False, text=f"{len(faults)} of {number} differ: {_some(faults)}")


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - SHOWN_FACTS} more" if len(texts) > SHOWN_FACTS else ""
    return "; ".join(texts[:SHOWN_FACTS]) + more


async def _undeliverable(
    api: ManagementApi,
    infrastructure: DelayInfrastructure,
    clock: Clock,
    *,
    caught: bool | None,
    refusing: Sequence[Refusal],
) -> Check:
    stuck, what = await _stuck_for_long(api, infrastructure, clock, _none_left), "due messages"
    if stuck:
        where = _some([f"{number} in {name}" for name, number in stuck.items()])
        lost = await _lost_nodes(api, stuck)
        reason = _hanging(infrastructure, caught=caught, refusing=refusing, lost=lost)
        return Check(what, ok=False, text=f"{where} {reason}")
    if infrastructure.quorum or caught:
        return Check(what, ok=True, text="all find their destinations")
    finding = (
        "those whose destination is missing are dropped by the broker, uncounted, as these levels are classic queues. "
        "Let a queue catch them: delayline rabbitmq catch-all on"
    )
    return Check(what, ok=False, text=finding)


async def _lost_nodes(api: ManagementApi, levels: Collection[str]) -> Sequence[str]:
    """Return the lost nodes to which levels may go on sending; none of a broker whose levels do not."""
    if version_of(await api.version()) >= SENDS_ON_AFTER_A_LOSS:
        return ()
    queues = await api.queues()
    return sorted({node for name in levels if name in queues for node in queues[name].lost_nodes})


def _hanging(
    infrastructure: DelayInfrastructure, *, caught: bool | None, refusing: Sequence[Refusal], lost: Sequence[str]
) -> str:
    """Return why due messages hang, and what lets them go on."""
    full = [refusal for refusal in refusing if refusal.full or caught]
    if full:
        return f"hang, and 32 stop a level for all: {_some([refusal.text(infrastructure) for refusal in full])}"
    if lost:
        return (
            f"hang, and {_some(lost)} does not run: before RabbitMQ 4 a level may go on sending to a lost node. Start "
            "it again, or move the level's leader, as the page on RabbitMQ's administration shows. If they hang then "
            "too, a destination is missing or full"
        )
    if caught:
        return (
            "hang, and 32 stop a level for all. Those without a destination are caught, so a destination refuses "
            "these: look for a queue with a limit that is full"
        )
    return (
        "have no destination: its queue was deleted, or is full. From 32 on a level stops for all. Create the queue "
        "again with: delayline setup --queue NAME; or let a queue catch those without one: delayline rabbitmq "
        "catch-all on"
    )


def reached(infrastructure: DelayInfrastructure, bindings: Sequence[Binding]) -> Mapping[str, Collection[str]]:
    """Return the queues that each destination of the delivery exchange leads to, over any exchanges between."""
    onward: defaultdict[str, list[Binding]] = defaultdict(list)
    for binding in bindings:
        onward[binding.source].append(binding)
    queues_of: dict[str, Collection[str]] = {}
    for first in onward[infrastructure.delivery]:
        queues, seen, coming = set(), set(), [first]
        while coming:
            binding = coming.pop()
            if binding.to_queue:
                queues.add(binding.destination)
            elif binding.destination not in seen:
                seen.add(binding.destination)
                coming += onward[binding.destination]
        name = first.routing_key.removeprefix(DESTINATION_START)
        queues_of[name] = queues | set(queues_of.get(name, ()))
    return queues_of


class Refusal(NamedTuple):
    """A queue that refuses messages while it is full."""

    queue: str
    limit: str
    full: bool

    def text(self, infrastructure: DelayInfrastructure) -> str:
        """Return what it means for due messages in the levels, and the remedy, as a sentence."""
        state = "is full and refuses messages" if self.full else "refuses messages while it is full"
        lost = "hang in their level, for all endpoints from 32 on" if infrastructure.quorum else "are dropped"
        return (
            f"queue {self.queue!r} {state} ({self.limit}): due ones {lost}. The catch-all cannot take them: have its "
            "messages handled, and take away its limit"
        )


def refusals(
    queues: Mapping[str, QueueFacts], layers: Sequence[Sequence[Policy]], names: Collection[str]
) -> Sequence[Refusal]:
    """Return which of the queues refuse messages at a limit, by arguments, policy or operator policy.

    Args:
        queues: The virtual host's queues.
        layers: Its policies, and its operators' policies.
        names: The queues to look at.
    """
    looked_at = (_refusal(queues[name], layers) for name in sorted(names) if name in queues)
    return [refusal for refusal in looked_at if refusal is not None]


def _refusal(queue: QueueFacts, layers: Sequence[Sequence[Policy]]) -> Refusal | None:
    policies = [policy.definition for layer in layers if (policy := effective(layer, queue.name, queue.type))]
    sources = [{name.removeprefix("x-"): value for name, value in queue.arguments.items()}, *reversed(policies)]
    overflow = next((source["overflow"] for source in sources if "overflow" in source), "drop-head")
    limits = {
        name: min(values)
        for name in LENGTH_LIMITS
        if (values := [source[name] for source in sources if isinstance(source.get(name), int)])
    }
    if not limits or overflow not in REFUSING_OVERFLOWS:
        return None
    sizes = {"max-length": queue.ready, "max-length-bytes": None}
    full = any((sizes[name] or 0) >= limit for name, limit in limits.items())
    sizes_set = ", ".join(f"{name}={limit}" for name, limit in limits.items())
    return Refusal(queue.name, f"{sizes_set}, overflow={overflow}", full)


def _destinations(
    infrastructure: DelayInfrastructure, ends: Mapping[str, Collection[str]], refusing: Sequence[Refusal]
) -> Check:
    """Return whether every destination that is bound leads to a queue, and to none that refuses due messages."""
    lost = "hang in their level" if infrastructure.quorum else "are dropped"
    faults = [
        f"{name!r} leads to no queue, so due messages for it {lost}: create it with delayline setup --queue {name}"
        for name, queues in sorted(ends.items())
        if not queues
    ]
    faults += [refusal.text(infrastructure) for refusal in refusing]
    if faults:
        return Check("destinations", ok=False, text=_some(faults))
    return Check("destinations", ok=True, text=f"all {len(ends)} lead to a queue that takes due messages")


async def _stuck_for_long(
    api: ManagementApi,
    infrastructure: DelayInfrastructure,
    clock: Clock,
    those_of: Callable[[Sequence[Mapping[str, int]]], Mapping[str, int]],
) -> Mapping[str, int]:
    """Return the levels in which due messages hang, and how many.

    Looks until no level is left, until the numbers stay the same, or until it has looked `MOST_LOOKS` times.

    Args:
        api: the broker's management API.
        infrastructure: the levels.
        clock: measures the time between looks.
        those_of: decides which levels are left after the looks so far, each with its number of messages.
    """
    looks = [await _stuck(api, infrastructure)]
    while those_of(looks) and (len(looks) < LEAST_LOOKS or (len(looks) < MOST_LOOKS and looks[-1] != looks[-2])):
        await clock.sleep(SECONDS_BETWEEN_LOOKS)
        looks.append(await _stuck(api, infrastructure))
    return those_of(looks)


def _always_some(looks: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the levels with due messages in every look, and the least number: some may hang while others leave."""
    return {name: min(look[name] for look in looks) for name in looks[0] if all(name in look for look in looks)}


def _none_left(looks: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the levels whose due messages never became fewer, and their number: in a busy level they come and go."""
    return {
        name: number
        for name, number in looks[-1].items()
        if all(0 < earlier.get(name, 0) <= later.get(name, 0) for earlier, later in pairwise(looks))
    }


async def _stuck(api: ManagementApi, infrastructure: DelayInfrastructure) -> dict[str, int]:
    queues, lowest = await api.queues(), infrastructure.level(0)
    facts = [queues[level.name] for level in infrastructure.queues if level.name in queues]
    # At the lowest level, where messages stay for a second, brokers may show them as taken.
    numbers = {
        fact.name: fact.undeliverable + ((fact.unacknowledged or 0) if fact.name == lowest else 0) for fact in facts
    }
    return {name: number for name, number in numbers.items() if number}


def _caught(infrastructure: DelayInfrastructure, queues: Mapping[str, QueueFacts], policies: Sequence[Policy]) -> Check:
    """Return whether due messages without a destination are caught, and how many were."""
    name = catch_all_name(infrastructure)
    number = queues[name].messages or 0 if name in queues else 0
    if number:
        finding = f"{number} due messages are in {name}, for their destinations were missing. Look into it and empty it"
        return Check(CATCH_ALL, ok=False, text=finding)
    policy = effective(policies, infrastructure.delivery, "exchanges")
    if name not in queues or policy is None or policy.definition.get("alternate-exchange") != name:
        finding = (
            "off: due messages without a destination stay in their level, and 32 of them stop it for every endpoint. "
            "Switch it on with: delayline rabbitmq catch-all on"
        )
        return Check(CATCH_ALL, ok=False, text=finding)
    return Check(CATCH_ALL, ok=True, text=f"{name} is empty")


def _names(infrastructure: DelayInfrastructure, bindings: Iterable[Binding]) -> Check:
    crossed = list(crossings(destinations(infrastructure, bindings)))
    if not crossed:
        return Check("names", ok=True, text="no destination gets another's delayed messages")
    pairs = _some([f"{receiver!r} also gets those for {meant!r}" for receiver, meant in crossed])
    return Check(
        "names", ok=False, text=f"delayed messages cross: {pairs}. Rename one: no name may be the dotted end of another"
    )
