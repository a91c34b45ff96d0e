"""The queues of an endpoint's transport with their limits, and the changing of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delayline.actions import OperatorAction
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import ActionOutcome
from delayline.errors import BackendUnavailable, DelaylineError
from delayline.queue_states import states_of
from delayline.transport import QueueState, limited

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayline.dashboard.actions import Actions
    from delayline.dashboard.back_ends import BackEnds
    from delayline.transport import QueueLimits


class LimitedQueue(NamedTuple):
    """A queue: its state, and its limits."""

    state: QueueState
    limits: QueueLimits


class LimitedQueues(PageQueries):
    """Lists the queues, and pauses and limits them."""

    def __init__(self, back_ends: BackEnds, actions: Actions) -> None:
        super().__init__(back_ends)
        self._actions = actions

    @within_limit
    async def all(self) -> Sequence[LimitedQueue]:
        """Return all queues, by name."""
        transport = await self.back_ends.transport()
        limits = await limited(transport).limits()
        states = await states_of(transport, [each.queue for each in limits])
        return [LimitedQueue(states.get(each.queue, QueueState(each.queue)), each) for each in limits]

    async def change(self, queue: str, changes: Mapping[str, Any], *, actor: str) -> ActionOutcome:
        """Change the limits that are given, as `set_limits` takes them; in all processes within a second."""
        paused = changes.get("paused")
        action = OperatorAction.LIMIT
        if paused is not None and len(changes) == 1:
            action = OperatorAction.PAUSE if paused else OperatorAction.RESUME

        async def change() -> ActionOutcome:
            try:
                limits = await limited(await self.back_ends.transport()).set_limits(queue, **changes)
            except BackendUnavailable:
                raise
            except DelaylineError as error:
                return ActionOutcome(queue, done=False, text=str(error))
            return ActionOutcome(queue, done=True, text=limits.text)

        answer = await self.back_ends.ask((action, queue, repr(changes), actor), change)
        if not isinstance(answer, ActionOutcome):
            answer = ActionOutcome(queue, done=False, text=f"{answer.reason}: look at it again")
        await self._actions.note(action, actor, f"queue {queue}", answer.text, done=answer.done, failed=True)
        return answer
