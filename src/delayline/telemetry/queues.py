"""The states of the queues that an endpoint knows, for metrics."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.observer import UNKNOWN_DESTINATION, QueueRole
from delayline.queue_states import states_of
from delayline.telemetry.measurements import OTHER
from delayline.topics import is_topic
from delayline.transport import SupportsQueueStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.observer import ObservedEndpoint
    from delayline.telemetry.measurements import Snapshot
    from delayline.telemetry.remembered import Question
    from delayline.transport import QueueState

#: Seconds after which the states are unknown: an outage must not leave numbers behind that no longer are true.
LATEST_STATES: Final = 300.0


class KnownQueue(NamedTuple):
    """The state of a queue, and what the queue is to the endpoint."""

    state: QueueState
    role: QueueRole


def queues_question(endpoint: ObservedEndpoint, snapshot: Snapshot) -> Question[Sequence[KnownQueue]] | None:
    """Return what asks for the states of the endpoint's own queues, and of destinations where that costs no more."""
    transport, roles = endpoint.transport, dict(endpoint.queue_roles)
    if isinstance(transport, SupportsQueueStates):
        sent = (destination for (_, destination, error) in snapshot.sent if not error)
        for destination in chain(sent, snapshot.stored, snapshot.lateness):
            if destination not in {OTHER, UNKNOWN_DESTINATION} and not is_topic(destination):
                roles.setdefault(destination, QueueRole.DESTINATION)
    else:
        roles = {queue: role for queue, role in roles.items() if role is not QueueRole.DESTINATION}
    return partial(_ask, transport, roles) if roles else None


async def _ask(transport: object, roles: dict[str, QueueRole]) -> list[KnownQueue]:
    states = await states_of(transport, list(roles))
    return [KnownQueue(state, roles[name]) for name, state in states.items() if name in roles]
