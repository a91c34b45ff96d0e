"""Expired timeouts, as the poller sees them: due messages that ask the dispatcher for one timeout each."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.message import DelayedMessage, Headers, Message, TimeoutHeaders, new_message_id, to_wire_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.timeouts.persister import Timeout, TimeoutPersister
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
        TimeoutHeaders.CONTROL_MESSAGE: TimeoutHeaders.TRUE,
    }
    return Message(message_id, fixed | headers, b"")


def request_for(timeout_id: str, now: datetime) -> Message:
    """Return the request to dispatch that timeout."""
    return control_message(now, {TimeoutHeaders.TIMEOUT_ID: timeout_id})


def as_sent(timeout: Timeout, now: datetime) -> Message:
    """Return the message as it goes to its destination. Raises CorruptHeaders."""
    message = timeout.message.logical
    headers = {Headers.TIME_SENT: to_wire_time(now), TimeoutHeaders.RELATED_TIMEOUT: timeout.id}
    if reply_to := message.headers.get(TimeoutHeaders.OLD_REPLY_TO):
        headers[Headers.REPLY_TO] = reply_to
    return message.with_headers(headers, without=(TimeoutHeaders.OLD_REPLY_TO,))


class LookAhead:
    """When the next timeout expires, or is free again; what was seen before is not asked for twice."""

    def __init__(self, persister: TimeoutPersister, clock: Clock) -> None:
        self._persister = persister
        self._clock = clock
        self._news = 0
        self._next_due: datetime | None = None
        self._known = False
        self._fresh = False

    def stored(self, due: datetime) -> None:
        """Know that something due then was stored: what was seen is old, unless it is due before."""
        if not self._known or self._next_due is None or due < self._next_due:
            self._news += 1
            self._known = False

    async def next_due(self) -> datetime | None:
        """Return it."""
        now, seen = self._clock.now(), self._next_due
        if self._known and (self._fresh or (seen is not None and seen <= now)):
            self._fresh = False
            return seen
        news = self._news
        chunk = await self._persister.next_chunk(now, 0, hold_until=now)
        self._see(chunk.next_due, news)
        self._fresh = False
        return chunk.next_due

    def fetching(self, transaction: Transaction | None) -> Callable[[datetime | None], None]:
        """Know that the storage changes; return what to call with what is seen then, to hold from the commit on."""
        self._known, news = False, self._news

        def see(next_due: datetime | None) -> None:
            if transaction is not None:
                transaction.after_commit(partial(self._see, next_due, news))

        return see

    def _see(self, next_due: datetime | None, news: int) -> None:
        """Remember it, unless something was stored since: once, and again when its time has come."""
        if news == self._news:
            self._next_due, self._known, self._fresh = next_due, True, True


class ExpiredTimeouts:
    """Gives a timeout persister the shape of a store; what leaves it are requests, the timeouts stay."""

    def __init__(self, persister: TimeoutPersister, dispatcher: str, clock: Clock) -> None:
        self._persister = persister
        self._dispatcher = dispatcher
        self._clock = clock
        self._ahead = LookAhead(persister, clock)

    def stored(self, due: datetime) -> None:
        """Know that something due then was stored."""
        self._ahead.stored(due)

    async def next_due(self) -> datetime | None:
        """Return when the next timeout expires, or is free again."""
        return await self._ahead.next_due()

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Hold expired timeouts and return a request for each."""
        del max_bytes  # requests are small
        see = self._ahead.fetching(transaction)
        hold_until = at + (HELD_WHILE_ASKING if transaction is None else HELD_FOR)
        chunk = await self._persister.next_chunk(at, limit, hold_until=hold_until, transaction=transaction)
        if chunk.due:
            see(chunk.next_due)
        return [DelayedMessage(request_for(one.id, at), self._dispatcher, one.due) for one in chunk.due]

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
