"""The story of a message, from its queue to its end.

::

    received
       |
       v
    MAY BEGIN? -- removed by another meanwhile, in mode NONE, which removes it here --> gone
       |      `-- has ended its process too often ------------------> the error queue
       v
    ATTEMPT --- no handler here takes its type ---------------------> later, for ten minutes; then the error queue
       |  ^ `-- it cannot be read ----------------------------------> the error queue
       |  ^
       |  `------------------------------- again at once --.
       v                                                   |
    run the handlers ---- failed ----> RECOVER ------------+------> again later: a copy waits in delayed delivery
       |                                  ^                +------> no more: the error queue, or dropped
       v                                  |                `------> a back end is away: to its queue, after a pause
    complete: the sends and the --- failed
    removal, as the mode has them --- removed by another meanwhile --> lost to it, and logged
       |
       v
    HANDLED

What cannot be recovered either, as with an error queue that fails, is held for a while then given back (`recovery`).
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from delayline.errors import CorruptHeaders, InvalidPayload, TooManyCrashes, UnknownMessageType
from delayline.receiving.completion import UNTRACED, AlreadyHandled
from delayline.receiving.transactions import TransactionLost
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.observer import SupportsTraces
    from delayline.outgoing import Effect
    from delayline.receiving.completion import Completion
    from delayline.receiving.intake import Intake
    from delayline.receiving.recoverability import Recoverability
    from delayline.receiving.recovery import Recovery
    from delayline.receiving.suspects import Suspects
    from delayline.transport import ReceivedMessage

#: So often a handler is repeated, within an attempt, whose own transaction has ended in favour of another ...
MOST_CONFLICTS: Final = 20
#: ... after a pause in seconds that doubles from a millisecond up to this, so that each of many gets its turn.
LONGEST_CONFLICT_PAUSE: Final = 0.25


class Stopping(Exception):
    """The endpoint stops before the handler of a message may run."""


class Attempt(Protocol):
    """An attempt to handle a message."""

    @property
    def recoverability(self) -> Recoverability:
        """The retries of what has failed."""
        ...

    @property
    def effects(self) -> Sequence[Effect]:
        """What the handlers have sent, and the pending messages that they have changed."""
        ...

    def run(self) -> Awaitable[None]:
        """Run the handlers. Raises Stopping if the endpoint stops before they begin."""
        ...

    def complete(self) -> Awaitable[None]:
        """Remove the message, with what has to be done together with that."""
        ...

    def gave_way(self, error: Exception) -> bool:
        """Return whether it can be repeated at once, as a transaction has ended in favour of another."""
        ...


@dataclass(slots=True)
class Handling:
    """Handles the messages of a queue, each from its beginning to its end."""

    intake: Intake
    begin: Callable[[ReceivedMessage, int], Attempt]
    """Begins an attempt, with its number in this round from 1; raises the errors of messages that nothing can take."""
    completion: Completion
    recovery: Recovery
    suspects: Suspects
    traces: SupportsTraces | None

    async def handle(self, received: ReceivedMessage) -> None:
        """Handle the message until it has left its queue or is given back."""
        with UNTRACED if self.traces is None else self.traces.processing(self.intake.queue, received.message):
            try:
                is_first = not received.earlier_deliveries and self.intake.host.mode is not TransactionMode.NONE
                if is_first or await self._may_begin(received):
                    await self._attempt(received)
            except AlreadyHandled as error:
                self.intake.reports.lost(received.message, error)
                await self.intake.receiver.release(received)
            except (Exception, asyncio.CancelledError) as caught:
                failure = self.intake.tasks.failure(caught)
                if failure is None:
                    await self.intake.receiver.release(received)
                    raise
                await self.recovery.give_back(received, failure)
            except BaseException:
                await self.intake.receiver.release(received)
                raise

    async def _may_begin(self, received: ReceivedMessage) -> bool:
        """Return whether to handle the message; it is elsewhere if not."""
        if self.intake.host.mode is TransactionMode.NONE:
            return await self.completion.remove(received)
        try:
            await self.suspects.begin(received)
        except TooManyCrashes as error:
            await self.recovery.move_to_errors(received, error)
            return False
        return True

    async def _attempt(self, received: ReceivedMessage) -> None:
        """Run attempts until an attempt succeeds or the message has gone elsewhere."""
        message = received.message
        number, conflicts = 1, 0
        while True:
            try:
                attempt = self.begin(received, number)
            except (CorruptHeaders, UnknownMessageType, InvalidPayload) as error:
                await self.recovery.not_taken(received, error)
                return
            ended, began = None, time.perf_counter()
            try:
                await attempt.run()
                ended = time.perf_counter()
                await attempt.complete()
            except AlreadyHandled:
                raise
            except Stopping:
                await self.intake.receiver.release(received)
                return
            except (Exception, asyncio.CancelledError) as caught:
                failure = self.intake.tasks.failure(caught)
                if failure is None:
                    raise
                if conflicts < MOST_CONFLICTS and not self.intake.tasks.stopping.is_set() and attempt.gave_way(failure):
                    self.intake.reports.repeated(message.logical, failure)
                    await self.intake.tasks.wait(_pause_after_conflict(conflicts))
                    conflicts += 1
                    continue
                self.intake.reports.not_handled(message, (ended or time.perf_counter()) - began, failure)
                handled = ended is not None or isinstance(failure, TransactionLost)
                own = attempt.recoverability
                if not await self.recovery.recover(received, failure, number, own, handled=handled):
                    return
                number, conflicts = number + 1, 0
            else:
                self.recovery.completed(message.id)
                self.intake.reports.handled(message, attempt.effects, began, ended)
                return


def _pause_after_conflict(number: int) -> timedelta:
    """Return how long to wait before the handler runs again, after so many earlier conflicts."""
    return timedelta(seconds=min(0.001 * 2**number, LONGEST_CONFLICT_PAUSE) * random.random())  # noqa: S311 - spreads load
