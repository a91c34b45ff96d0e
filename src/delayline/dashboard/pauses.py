"""What is not dispatched, and the pausing and resuming of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.actions import OperatorAction
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import ActionOutcome
from delayline.delayed.pauses import checked_destination, dispatching_to, pausable
from delayline.errors import BackendUnavailable, DelaylineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.dashboard.actions import Actions
    from delayline.dashboard.back_ends import BackEnds
    from delayline.delayed.pauses import DispatchPause, DispatchPauses


class PausedDispatching(PageQueries):
    """Lists pauses of dispatching, and makes and ends them."""

    def __init__(self, back_ends: BackEnds, actions: Actions) -> None:
        super().__init__(back_ends)
        self._actions = actions

    @within_limit
    async def all(self) -> Sequence[DispatchPause]:
        """Return what is paused: the whole endpoint first, then destinations by name."""
        return await (await self._pauses()).all()

    async def pause(self, destination: str | None, *, actor: str) -> list[ActionOutcome]:
        """Dispatch no more messages for a destination, or of the endpoint."""

        async def change(_: str) -> bool:
            pauses, now = await self._pauses(), await self.back_ends.time()
            return await pauses.pause(checked_destination(destination), now)

        return await self._changed(OperatorAction.PAUSE, destination, actor, change, "paused", "is paused already")

    async def resume(self, destination: str | None, *, rate: float | None, actor: str) -> list[ActionOutcome]:
        """Dispatch them again, those that are overdue at a bounded rate if one is given."""

        async def change(_: str) -> bool:
            pauses, now = await self._pauses(), await self.back_ends.time()
            return await pauses.resume(checked_destination(destination), now, rate)

        done = "resumed" if rate is None else f"resumed, overdue messages at {rate:g} a second"
        return await self._changed(OperatorAction.RESUME, destination, actor, change, done, "was not paused")

    async def _changed(
        self,
        action: OperatorAction,
        destination: str | None,
        actor: str,
        change: Callable[[str], Awaitable[bool]],
        done: str,
        unchanged: str,
    ) -> list[ActionOutcome]:
        async def outcome(name: str) -> ActionOutcome:
            try:
                changed = await change(name)
            except BackendUnavailable:
                raise
            except DelaylineError as error:
                return ActionOutcome(name, done=False, text=str(error))
            return ActionOutcome(name, done=changed, text=done if changed else unchanged)

        return await self._actions.each(action, [dispatching_to(destination)], actor, outcome)

    async def _pauses(self) -> DispatchPauses:
        return pausable(await self.back_ends.store())
