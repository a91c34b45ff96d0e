"""Pending messages, and what people do to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from delayline.actions import OperatorAction, SetRequest
from delayline.clock import latest_of
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.contents import BODY_SHOWN, details
from delayline.dashboard.model import ActionOutcome, MessageDetails
from delayline.delayed.store import Outcome
from delayline.errors import ConfigurationError
from delayline.message import in_utc

if TYPE_CHECKING:
    from delayline.actions import ActionRecord
    from delayline.dashboard.actions import Actions
    from delayline.dashboard.contents import Form
    from delayline.dashboard.search import PendingSearch
    from delayline.filters import MessageFilter


class PendingMessages(PageQueries):
    """Shows a pending message, and changes the chosen messages or all that match."""

    def __init__(self, search: PendingSearch, actions: Actions) -> None:
        super().__init__(search.back_ends)
        self._search = search
        self._actions = actions

    @within_limit
    async def message(self, message_id: str, *, form: Form | None = None) -> MessageDetails | None:
        """Return a pending message with headers and body, or None.

        Args:
            message_id: The message.
            form: The form of the body: `json`, `text` or `hex`; by default the most readable.
        """
        match = await self._search.find(message_id, body_limit=BODY_SHOWN)
        if match is None:
            return None
        delayed, message = match.message, match.message.message
        size = match.size - len(message.encoded_headers)
        return details(message, delayed.destination, delayed.due, delayed.number_of_retries, size, form)

    async def change(
        self,
        action: OperatorAction,
        ids: Sequence[str],
        *,
        to: datetime | None = None,
        by: timedelta | None = None,
        actor: str,
    ) -> list[ActionOutcome]:
        """Cancel, reschedule or send now pending messages, message by message.

        Args:
            action: `OperatorAction.CANCEL`, `RESCHEDULE` or `SEND_NOW`.
            ids: The messages.
            to: The new due time.
            by: How much later, or earlier where it is negative.
            actor: Who does it, for the log.
        """
        return await self._actions.each(action, ids, actor, self._changing(action, to, by))

    async def change_all(
        self,
        action: OperatorAction,
        wanted: MessageFilter,
        *,
        actor: str,
        rate: float | None = 100.0,
        to: datetime | None = None,
        by: timedelta | None = None,
        expected: int | None = None,
    ) -> ActionRecord:
        """Do the same with all pending messages that match, as a job.

        The job changes messages that are there now, and that match when it comes to them. In a SQL database it is
        recorded, and goes on in another process if this one ends.

        Args:
            action: As for `change`.
            wanted: Which messages.
            actor: Who does it, for the record.
            rate: Messages a second at most, 1 to 1,000,000; None for as many as go.
            to: The new due time.
            by: How much later, or earlier where it is negative.
            expected: The number of the preview, if it was exact.
        """
        request = SetRequest(action, wanted, to=to, by=by)
        return await self._actions.start(request, actor=actor, rate=rate, expected=expected)

    def _changing(
        self, action: OperatorAction, to: datetime | None, by: timedelta | None
    ) -> Callable[[str], Awaitable[ActionOutcome]]:
        match action:
            case OperatorAction.CANCEL:
                return self._cancel
            case OperatorAction.RESCHEDULE:
                return partial(self._reschedule, move=_mover(to, by))
            case OperatorAction.SEND_NOW:
                return self._send_now
        raise ConfigurationError(f"{action.value!r} is not an action on pending messages")

    async def _cancel(self, message_id: str) -> ActionOutcome:
        return _outcome(message_id, await (await self.back_ends.managed_store()).cancel(message_id))

    async def _reschedule(self, message_id: str, *, move: Callable[[datetime | None], datetime]) -> ActionOutcome:
        store = await self.back_ends.managed_store()
        match = await self._search.find(message_id)
        if match is None:
            return _outcome(message_id, Outcome.NOT_PENDING)
        return _outcome(message_id, await store.reschedule(message_id, move(match.message.due)))

    async def _send_now(self, message_id: str) -> ActionOutcome:
        store = await self.back_ends.managed_store()
        due = latest_of(await self.back_ends.store_clock())()
        return _outcome(message_id, await store.reschedule(message_id, due))


def _mover(to: datetime | None, by: timedelta | None) -> Callable[[datetime | None], datetime]:
    if (to is None) == (by is None):
        raise ConfigurationError("give the new due time, to=, or how much later, by=")
    if to is not None:
        due = in_utc(to)
        return lambda _: due
    assert by is not None  # noqa: S101 - checked above

    def moved(due: datetime | None) -> datetime:
        try:
            return (due or datetime.now(UTC)) + by
        except OverflowError as error:
            raise ConfigurationError(f"by={by} leads beyond year 9999, or before year 1") from error

    return moved


def _outcome(message_id: str, outcome: Outcome) -> ActionOutcome:
    return ActionOutcome(message_id, outcome is Outcome.DONE, outcome.meaning)
