"""Expired timeouts, as the poller sees them: due messages that ask the dispatcher for one timeout each."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.delayed.timeout_headers import TRUE, TimeoutHeaders
from delayline.message import DelayedMessage, Headers, Message, new_message_id, to_wire_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.timeout_persister import TimeoutPersister, TimeoutsChunk
    from delayline.transaction import Transaction

#: How long a timeout is the dispatcher's alone; then it is asked for again, in case the request was lost.
HELD_FOR: Final = timedelta(minutes=1)
#: How long it is the poller's, where no transaction holds it until the request is made.
HELD_WHILE_ASKING: Final = timedelta(seconds=5)


def control_message(now: datetime, headers: dict[str, str]) -> Message:
    """Return a message without a body that says something to a satellite."""
    message_id = new_message_id(now)
    fixed = {
        Headers.MESSAGE_ID: message_id,
        Headers.INTENT: "Send",
        Headers.TIME_SENT: to_wire_time(now),
        TimeoutHeaders.CONTROL_MESSAGE: TRUE,
    }
    return Message(message_id, fixed | headers, b"")


class ExpiredTimeouts:
    """Gives a timeout persister the shape of a store; what leaves it are requests, the timeouts stay."""

    def __init__(self, persister: TimeoutPersister, dispatcher: str, clock: Clock) -> None:
        self._persister = persister
        self._dispatcher = dispatcher
        self._clock = clock
        self._news = 0
        self._ahead: TimeoutsChunk | None = None
        self._fresh = False

    def stored(self, due: datetime) -> None:
        """Know that something due then was stored: what was seen when looking ahead is old, unless it is due before."""
        ahead = self._ahead
        if ahead is None or ahead.next_due is None or due < ahead.next_due:
            self._news += 1
            self._ahead = None

    async def next_due(self) -> datetime | None:
        """Return when the next timeout expires, or is free again; what was seen before is not asked for twice."""
        now, ahead = self._clock.now(), self._ahead
        if ahead is not None and (self._fresh or (ahead.next_due is not None and ahead.next_due <= now)):
            self._fresh = False
            return ahead.next_due
        news = self._news
        chunk = await self._persister.next_chunk(now, 0, hold_until=now)
        self._look_ahead(chunk, news)
        self._fresh = False
        return chunk.next_due

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Hold expired timeouts and return a request for each."""
        del max_bytes  # requests are small
        self._ahead, news = None, self._news
        hold_until = at + (HELD_WHILE_ASKING if transaction is None else HELD_FOR)
        chunk = await self._persister.next_chunk(at, limit, hold_until=hold_until, transaction=transaction)
        if transaction is not None and chunk.due:
            transaction.after_commit(partial(self._look_ahead, chunk, news))
        return [
            DelayedMessage(control_message(at, {TimeoutHeaders.TIMEOUT_ID: one.id}), self._dispatcher, one.due)
            for one in chunk.due
        ]

    def _look_ahead(self, chunk: TimeoutsChunk, news: int) -> None:
        """Remember what was seen, unless something was stored since: once, and again when its time has come."""
        if news == self._news:
            self._ahead, self._fresh = chunk, True

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Leave the timeouts to the dispatcher, which removes them."""
        if transaction is None:
            await self._persister.hold(_ids(messages), self._clock.now() + HELD_FOR)
        return len(messages)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Hold the timeouts until `at`; those that a transaction holds are held for their minute."""
        if transaction is None:
            await self._persister.hold(_ids(messages), at)
        return len(messages)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Set the timeouts free."""
        await self._persister.hold(_ids(messages), self._clock.now())


def timeout_of(message: Message) -> str | None:
    """Return the id of the timeout that a request asks for; None when it is no request."""
    return message.headers.get(TimeoutHeaders.TIMEOUT_ID) or message.headers.get(TimeoutHeaders.OLD_TIMEOUT_ID)


def _ids(messages: Sequence[DelayedMessage]) -> list[str]:
    return [message.message.headers[TimeoutHeaders.TIMEOUT_ID] for message in messages]
