"""The recurring messages of an endpoint, and what people do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.actions import OperatorAction
from delayline.backends import backend_of
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import ActionOutcome
from delayline.delayed.schedules import Schedules, scheduled
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.dashboard.actions import Actions
    from delayline.dashboard.back_ends import BackEnds
    from delayline.delayed.schedules import Schedule


class RecurringMessages(PageQueries):
    """Lists schedules, and pauses, resumes and triggers them."""

    def __init__(self, back_ends: BackEnds, actions: Actions) -> None:
        super().__init__(back_ends)
        self._actions = actions

    @within_limit
    async def all(self) -> Sequence[Schedule]:
        """Return the schedules by name."""
        return await (await self._schedules()).list()

    async def act(self, action: OperatorAction, name: str, *, actor: str) -> list[ActionOutcome]:
        """Pause, resume or trigger a schedule.

        Args:
            action: `OperatorAction.PAUSE`, `RESUME` or `TRIGGER`.
            name: The schedule.
            actor: Who does it, for the log.
        """

        async def change(name: str) -> ActionOutcome:
            schedules = await self._schedules()
            try:
                match action:
                    case OperatorAction.PAUSE:
                        await schedules.pause(name)
                    case OperatorAction.RESUME:
                        await schedules.resume(name)
                    case OperatorAction.TRIGGER:
                        return ActionOutcome(name, done=True, text=f"sent now as {await schedules.trigger(name)}")
                    case _:
                        raise ConfigurationError(f"{action.value} is no action on schedules")
            except BackendUnavailable:
                raise
            except DelaylineError as error:
                return ActionOutcome(name, done=False, text=str(error))
            return ActionOutcome(name, done=True, text="done")

        return await self._actions.each(action, [name], actor, change)

    async def _schedules(self) -> Schedules:
        if (place := self._without_store()) is not None:
            raise ConfigurationError(
                f"schedules are kept in a delayed message store, and this endpoint has none: its delayed messages wait "
                f"in {place}. Give it a database as store_url, such as sqlite:///delayline.db"
            )
        return Schedules(scheduled(await self.back_ends.store()), await self.back_ends.store_clock())

    def _without_store(self) -> str | None:
        """Return where delayed messages wait, in words, if in no store."""
        settings, delivery = self.back_ends.settings, self.back_ends.delivery
        if settings is None:
            return type(delivery).__name__ if delivery is not None and delivery.store is None else None
        backend = backend_of(settings.resolved_store_url)
        return None if settings.timeout_manager else backend.native_delays
