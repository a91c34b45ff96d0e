"""The states of queues, asked of any transport: in a few questions where it can, else one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.errors import BackendUnavailable, DelaylineError, QueueNotFound
from delayline.transport import QueueState, SupportsQueueLimits, SupportsQueueManagement, SupportsQueueStates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


async def states_of(transport: object, queues: Sequence[str]) -> Mapping[str, QueueState]:
    """Return the states of the queues by name, without queues that do not exist.

    Args:
        transport: The transport, started.
        queues: Names of queues.

    Raises:
        DelaylineError: Nothing can be told.
    """
    if isinstance(transport, SupportsQueueStates):
        return {state.queue: state for state in await transport.queue_states(queues)}
    if not isinstance(transport, SupportsQueueManagement):
        return {queue: QueueState(queue) for queue in queues}
    paused: Mapping[str, bool] = {}
    if isinstance(transport, SupportsQueueLimits):
        paused = {limits.queue: limits.paused for limits in await transport.limits()}
    states = {}
    for queue in queues:
        try:
            states[queue] = QueueState(queue, await transport.count(queue), paused=paused.get(queue, False))
        except QueueNotFound:
            continue
        except BackendUnavailable:
            raise
        except DelaylineError:
            states[queue] = QueueState(queue, paused=paused.get(queue, False))
    return states
