"""Whose fault a failed dispatch is: the message's, or that of the back end, which meets every message of a table.

An error of a known kind says it, and Python's own exceptions, such as a ValueError, come of the code that met this
message. Any other error of a driver or client is judged by the messages beside it: where others go to the same
destination and this message does not, the fault is its own; where several fail alike and none goes, it is the back
end's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.circuit_breaker import FailureLog
from delayline.clock import EPOCH
from delayline.delayed.set_aside import TRIED_AGAIN, Reason
from delayline.errors import BackendUnavailable, CorruptHeaders, InvalidMessage, MessageRejected, QueueNotFound
from delayline.events import Event
from delayline.failures import brief

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.recovery import Failures
    from delayline.delayed.set_aside import SetAside
    from delayline.message import DelayedMessage

logger: logging.Logger = logging.getLogger(__name__)

#: Errors that say whose fault they are.
OF_KNOWN_FAULT: Final = (BackendUnavailable, CorruptHeaders, InvalidMessage, MessageRejected, QueueNotFound)
#: A message that fails alone is in doubt if others follow it to its destination within this time.
FOLLOWS_WITHIN: Final = timedelta(seconds=1)
#: How long the counted failure of a message that failed alone puts the next message in doubt that fails alike.
EVIDENCE_FOR: Final = timedelta(seconds=10)
#: After this time a message that is to be tried again, and was not, has left the store by other hands.
GONE_AFTER: Final = timedelta(minutes=2)
#: While others are sent, so many messages in doubt are tried again ...
PROBES: Final = 3
#: ... so often.
PROBES_EVERY: Final = timedelta(seconds=5)
#: The most messages in doubt that are set aside.
MOST_IN_DOUBT: Final = 1000


@dataclass(slots=True, eq=False)
class _Failed:
    message: DelayedMessage
    error: Exception
    at: datetime
    sent_elsewhere: bool
    """Whether messages were sent to other destinations in its batch or since."""
    in_doubt: bool = False
    """Whether its failure is not counted yet; else it was counted, and makes the next one doubtful."""
    awaits_others: bool = False
    """Whether others follow it within a moment, and will show whose fault it is."""

    def is_like(self, other: _Failed) -> bool:
        """Return whether the same fault may have met both."""
        near = self.message.destination == other.message.destination
        return (near or not (self.sent_elsewhere or other.sent_elsewhere)) and kind(self.error) == kind(other.error)


class Blame:
    """Tells messages that fail by themselves from messages that a back end's fault meets. Belongs to a poller.

    A message in doubt is set aside, and no attempt of it is counted. It is tried again when there is no other to try,
    and a few are from time to time. A message of its destination that is sent shows that the fault is its own: it is
    tried at once, and counted if it fails again.

    Args:
        aside: Where messages in doubt wait.
        clock: Tells when evidence is too old.
    """

    def __init__(self, aside: SetAside, clock: Clock) -> None:
        self._aside = aside
        self._clock = clock
        self._failed: dict[str, _Failed] = {}
        #: Ids of messages whose next failure is their own, and since when.
        self._shown: dict[str, datetime] = {}
        #: Messages in doubt on which no verdict was given yet.
        self._undecided: list[_Failed] = []
        #: Destinations that messages were sent to since the last verdict, and none has failed at since.
        self._working: set[str] = set()
        self._probes_at = EPOCH
        self._log = FailureLog(clock)

    @property
    def is_open(self) -> bool:
        """Whether messages are in doubt, or to be tried again because others went."""
        return bool(self._shown) or any(failed.in_doubt for failed in self._failed.values())

    @property
    def is_undecided(self) -> bool:
        """Whether messages are in doubt for which no verdict was asked yet."""
        return bool(self._undecided)

    def has_failed(self, message_id: str) -> bool:
        """Return whether the message has failed lately."""
        return message_id in self._failed or message_id in self._shown

    def sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Note that messages were sent to their destinations."""
        if not messages:
            return
        destinations = {message.destination for message in messages}
        self._working |= destinations
        if not self._failed and not self._shown:
            return
        self._forget(messages)
        for failed in list(self._failed.values()):
            if failed.message.destination in destinations:
                self._show(failed)
            else:
                failed.sent_elsewhere = True
        if not self._failed:
            self._log.over()

    async def own(
        self,
        failures: Failures,
        *,
        others_left: bool,
        others_follow: Callable[[DelayedMessage], Awaitable[bool]],
    ) -> Failures:
        """Return the failures that are their messages' own, to be counted; the other messages are in doubt.

        Args:
            failures: The messages that were not sent, after `sent` was called for the messages that were.
            others_left: Whether messages that failed with them in a batch are still to be tried.
            others_follow: Returns whether others are due at the message's destination within FOLLOWS_WITHIN.
        """
        now, elsewhere = self._clock.now(), bool(self._working)
        self._forget_before(now)
        self._forget([message for message, error in failures if not says_no_fault(error)])
        unknown = [
            (_Failed(message, error, now, elsewhere), self._failed.get(message.id))
            for message, error in failures
            if says_no_fault(error)
        ]
        working = frozenset(self._working)
        self._failed |= {failed.message.id: failed for failed, _ in unknown}
        for failed, before in unknown:
            message = failed.message
            failed.sent_elsewhere |= before is not None and before.sent_elsewhere
            if message.id in self._shown or message.destination in working:
                self._working.discard(message.destination)
                self._shown.pop(message.id, None)
                del self._failed[message.id]
            elif self._alike(failed):
                failed.in_doubt = True
            elif before is None or not before.in_doubt:
                failed.awaits_others = not others_left and await others_follow(message)
                failed.in_doubt = others_left or failed.awaits_others
        in_doubt = [failed for failed, _ in unknown if failed.in_doubt]
        self._undecided += in_doubt
        doubtful = {failed.message.id for failed in in_doubt}
        return [(message, error) for message, error in failures if message.id not in doubtful]

    def set_aside(self, message: DelayedMessage) -> bool:
        """Set a message in doubt aside; return False if too many are."""
        if len(self._failed) > MOST_IN_DOUBT:
            return False
        self._aside.add_failed(message, Reason.UNSENT, self._clock.now())
        return True

    def to_try(self, now: datetime, *, idle: bool) -> Sequence[DelayedMessage]:
        """Return messages in doubt that are to be tried again.

        Args:
            now: The present time.
            idle: Whether there is no other message to try. Then all are tried, unless others go elsewhere: they must
                not be held up by more than a few.
        """
        self._forget_before(now)
        if not self._failed or (not idle and now < self._probes_at):
            return ()
        ready = [failed for failed in self._failed.values() if failed.in_doubt and now - failed.at >= TRIED_AGAIN]
        everywhere = [failed for failed in ready if idle and not failed.sent_elsewhere]
        if not everywhere:
            self._probes_at = now + PROBES_EVERY
        probes = everywhere or sorted(ready, key=lambda failed: failed.at)[:PROBES]
        return [failed.message for failed in probes]

    def verdict(self) -> Exception | None:
        """Return the error of messages that fail alike while none goes anywhere: the back end's.

        To be called once all messages of a batch that failed were tried. Messages that failed like no other are shown
        to fail by themselves.
        """
        self._working.clear()
        undecided, self._undecided = self._undecided, []
        blamed: list[_Failed] = []
        for failed in undecided:
            if self._failed.get(failed.message.id) is not failed:
                continue
            if self._alike(failed):
                blamed.append(failed)
            elif not failed.awaits_others:
                self._show(failed)
        everywhere = next((failed.error for failed in blamed if not failed.sent_elsewhere), None)
        if blamed and everywhere is None:
            destinations = sorted({failed.message.destination for failed in blamed})
            log_text = "%d delayed messages to %s fail alike and none is sent, so no attempt is counted: %s"
            names = ", ".join(map(repr, destinations))
            error = blamed[0].error
            messages = tuple(failed.message for failed in blamed)
            self._log.log_failure(
                logger,
                logging.ERROR,
                Event.DISPATCH_FAILED,
                log_text,
                len(blamed),
                names,
                brief(error),
                exception=error,
                messages=messages,
            )
        return everywhere

    def _alike(self, failed: _Failed) -> bool:
        return any(fault is not failed and fault.is_like(failed) for fault in self._failed.values())

    def _show(self, failed: _Failed) -> None:
        """Take a message out of doubt: if it fails again the fault is its own."""
        message = failed.message
        del self._failed[message.id]
        if failed.in_doubt:
            self._shown[message.id] = self._clock.now()
            self._aside.try_now([message])
            for message_id in list(self._shown)[:-MOST_IN_DOUBT]:
                del self._shown[message_id]

    def _forget(self, messages: Sequence[DelayedMessage]) -> None:
        for message in messages:
            self._failed.pop(message.id, None)
            self._shown.pop(message.id, None)

    def _forget_before(self, now: datetime) -> None:
        for message_id, failed in list(self._failed.items()):
            if failed.in_doubt and self._aside.waits(message_id):
                continue
            if now - failed.at > (GONE_AFTER if failed.in_doubt else EVIDENCE_FOR):
                del self._failed[message_id]
        for message_id, since in list(self._shown.items()):
            if now - since > GONE_AFTER:
                del self._shown[message_id]


def says_no_fault(error: Exception) -> bool:
    """Return whether the error leaves open whose fault it is."""
    if isinstance(error, OF_KNOWN_FAULT):
        return False
    return isinstance(error, OSError) or type(error).__module__ != Exception.__module__


def kind(error: Exception) -> Hashable:
    """Return what errors of a fault have in common: type and code, as texts may name the message."""
    cause = getattr(error, "orig", None) or error  # SQLAlchemy's errors keep the driver's
    code = getattr(cause, "sqlstate", None) or getattr(cause, "sqlite_errorcode", None)
    if code is None and cause.args and isinstance(cause.args[0], int):
        code = cause.args[0]  # PyMySQL's number of the error
    return type(cause), code
