"""Messages that the poller sets aside because something has failed for them, so that they hold up no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from delayline.clock import EPOCH
from delayline.failures import back_off

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from delayline.message import DelayedMessage

#: A message in doubt, or whose failure cannot be counted, is tried again after this time: a little more often than
#: once a second, so that such failures, if they last, exceed `maximum_recovery_failures_per_second`.
TRIED_AGAIN: Final = timedelta(seconds=0.9)
#: Failures of messages whose time has come are remembered until there are so many.
MOST_ENDED: Final = 1000


class Reason(Enum):
    """Why a message is set aside."""

    UNCOUNTED = auto()
    """It could not be sent, which is counted when its time comes: the store cannot change due times."""
    BACKS_OFF = auto()
    """It could not be sent, and is sent again when its time comes."""
    UNSENT = auto()
    """It could not be sent: a failure of this message, or of the back end, so it is not counted."""
    IN_DOUBT = auto()
    """It was sent and could not be removed: a failure of this message, or of the back end."""
    UNREMOVABLE = auto()
    """It was sent and could not be removed, while others could."""


SENT_REASONS: Final = frozenset({Reason.IN_DOUBT, Reason.UNREMOVABLE})


@dataclass(slots=True)
class AsideMessage:
    """A message that is set aside."""

    message: DelayedMessage
    reason: Reason
    until: datetime
    failures: int = 1
    """How often in a row it has failed."""
    removals: int = 0
    """How many messages had been removed when it failed."""
    ended: bool = False
    """Whether its time has come: it is sent, or removed if it was sent, once it is fetched again."""
    locked_at: datetime | None = None
    """Since when a transaction is kept open to lock it."""
    unlock: Callable[[], Awaitable[None]] | None = field(default=None, compare=False)
    """Ends that transaction."""

    @property
    def sent(self) -> bool:
        """Whether it was sent, and must not be sent again."""
        return self.reason in SENT_REASONS

    async def end_lock(self) -> None:
        """End the transaction that locks it, if there is any."""
        unlock, self.unlock = self.unlock, None
        if unlock is not None:
            await unlock()

    def is_same(self, fetched: DelayedMessage) -> bool:
        """Return whether the store has returned this message, and not another with its id."""
        ours = self.message
        return (ours.due, ours.destination, ours.message.body) == (
            fetched.due,
            fetched.destination,
            fetched.message.body,
        )


class SetAside:
    """The messages that are set aside, by id. Belongs to a poller."""

    def __init__(self) -> None:
        self._messages: dict[str, AsideMessage] = {}
        self._removals = 0

    @property
    def waiting(self) -> list[AsideMessage]:
        """The messages whose time has not come."""
        return [aside for aside in self._messages.values() if not aside.ended]

    @property
    def first_end(self) -> datetime | None:
        """When the first of them is tried again; None for never."""
        return min((aside.until for aside in self.waiting), default=None)

    def of(self, *reasons: Reason) -> list[AsideMessage]:
        """Return the messages with any of the reasons."""
        return [aside for aside in self._messages.values() if aside.reason in reasons]

    def locked(self) -> list[AsideMessage]:
        """Return the messages that a transaction is kept open for."""
        return [aside for aside in self._messages.values() if aside.unlock is not None]

    def add(self, message: DelayedMessage, reason: Reason, until: datetime) -> None:
        """Set a message aside until `until`."""
        before = self._messages.pop(message.id, None)
        aside = AsideMessage(message, reason, until, removals=self._removals)
        if before is not None:
            aside.unlock, aside.locked_at = before.unlock, before.locked_at
        self._keep(aside)

    def add_failed(self, message: DelayedMessage, reason: Reason, now: datetime) -> AsideMessage:
        """Set a message aside because of a failure, for longer each time if others are moved meanwhile."""
        before = self._messages.pop(message.id, None)
        aside = AsideMessage(message, reason, now + TRIED_AGAIN, removals=self._removals)
        if before is not None:
            aside.unlock, aside.locked_at = before.unlock, before.locked_at
            if aside.sent and before.reason is Reason.UNREMOVABLE:
                aside.reason = before.reason
            own = aside.reason is Reason.UNREMOVABLE or self._removals > before.removals
            if own and before.sent is aside.sent:
                aside.failures = before.failures + 1
                aside.until = now + back_off(aside.failures)
        self._keep(aside)
        return aside

    def waits(self, message_id: str) -> bool:
        """Return whether the message could not be sent, and waits for `try_now`."""
        aside = self._messages.get(message_id)
        return aside is not None and aside.reason is Reason.UNSENT

    def try_now(self, messages: Sequence[DelayedMessage]) -> int:
        """End the time of messages that could not be sent, which does not end by itself; return how many waited."""
        waiting = [message.id for message in messages if self.waits(message.id)]
        for message_id in waiting:
            aside = self._messages[message_id]
            aside.reason, aside.until = Reason.BACKS_OFF, EPOCH
        return len(waiting)

    def removed(self, messages: Sequence[DelayedMessage], now: datetime) -> list[AsideMessage]:
        """Note that messages were removed; return messages thereby no longer in doubt: the failure is theirs."""
        self.forget(messages)
        if not messages:
            return []
        self._removals += len(messages)
        blamed = self.of(Reason.IN_DOUBT)
        for aside in blamed:
            aside.reason, aside.until = Reason.UNREMOVABLE, now + back_off(aside.failures)
        return blamed

    def find(self, fetched: DelayedMessage) -> AsideMessage | None:
        """Return the fetched message if it is set aside; forgets a message that the store has replaced."""
        aside = self._messages.get(fetched.id)
        if aside is None or aside.is_same(fetched):
            return aside
        self.forget([fetched])
        return None

    def forget(self, messages: Sequence[DelayedMessage]) -> None:
        """Treat messages as any other from now on."""
        for message in messages:
            self._messages.pop(message.id, None)

    def _keep(self, aside: AsideMessage) -> None:
        self._messages[aside.message.id] = aside
        if len(self._messages) > MOST_ENDED:  # some are never fetched again, as other processes have moved them
            ended = [message_id for message_id, aside in self._messages.items() if aside.ended]
            for message_id in ended[: len(self._messages) - MOST_ENDED]:
                del self._messages[message_id]
