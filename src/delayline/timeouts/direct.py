"""Expired timeouts on the short way: where queues and timeouts share transactions, the poller sends them itself.

What the dispatcher's queue is for elsewhere, to remove a timeout only when it was sent, one transaction does here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from delayline.delayed.store import SupportsForwarding
from delayline.errors import CorruptHeaders
from delayline.message import DelayedMessage
from delayline.timeouts.persister import SupportsTimeoutLocks, TimeoutPersister
from delayline.timeouts.poll import HELD_FOR, LookAhead, as_sent, request_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.store import Forwarded
    from delayline.timeouts.persister import Timeout
    from delayline.transaction import Transaction

#: Failures of so many timeouts are remembered; older ones begin to count anew (reference 1.7).
REMEMBERED: Final = 1000


class DirectPersister(TimeoutPersister, SupportsTimeoutLocks, Protocol):
    """A persister whose timeouts the poller can send itself."""


@dataclass(frozen=True, slots=True)
class Expired(DelayedMessage):
    """A timeout's message, or, where that is for the dispatcher to look at, a request for it."""

    timeout_id: str = ""
    asks: bool = False


class DirectTimeouts:
    """Gives a timeout persister the shape of a store; a message is sent and its timeout removed in one transaction.

    What has no destination, or headers that cannot be read, is asked for: the dispatcher knows what to do with it.
    """

    def __init__(self, persister: DirectPersister, dispatcher: str, clock: Clock) -> None:
        self._persister = persister
        self._dispatcher = dispatcher
        self._clock = clock
        self._ahead = LookAhead(persister, clock)
        self._failures: dict[str, int] = {}

    def stored(self, due: datetime) -> None:
        """Know that something due then was stored."""
        self._ahead.stored(due)

    async def next_due(self) -> datetime | None:
        """Return when the next timeout expires, or may be tried again."""
        return await self._ahead.next_due()

    def forwards_to(self, transport: object) -> bool:
        """Tell whether the persister can move expired timeouts to that transport's queues by itself."""
        return isinstance(self._persister, SupportsForwarding) and self._persister.forwards_to(transport)

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Let the persister move expired timeouts; what it leaves is fetched."""
        assert isinstance(self._persister, SupportsForwarding)  # noqa: S101 - asked before
        self._ahead.fetching(None)
        return await self._persister.forward_due(at, limit, max_bytes=max_bytes)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock expired timeouts and return their messages."""
        assert transaction is not None  # noqa: S101 - without one there is no short way
        see = self._ahead.fetching(transaction)
        locked = await self._persister.lock_due(at, limit, max_bytes=max_bytes, transaction=transaction)
        if locked.due:
            see(locked.next_due)
        return [self._leaving(timeout, at) for timeout in locked.due]

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Remove what was sent; leave to the dispatcher what was asked for."""
        assert transaction is not None  # noqa: S101 - as above
        asked, sent = _ids(messages, asks=True), _ids(messages, asks=False)
        if asked:
            await self._set_aside(asked, self._clock.now() + HELD_FOR, transaction)
        if sent:
            transaction.after_commit(partial(self._forget, sent))
        return len(asked) + (await self._persister.remove_many(sent, transaction) if sent else 0)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count a failure of each and keep it until `at`."""
        assert transaction is not None  # noqa: S101 - as above
        ids = _ids(messages, asks=False) + _ids(messages, asks=True)
        await self._set_aside(ids, at, transaction)
        transaction.after_commit(partial(self._count, ids))
        return len(ids)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Nothing: locks end with their transaction."""

    async def _set_aside(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        await self._persister.set_aside(ids, until, transaction)
        transaction.after_commit(partial(self.stored, until))

    def _leaving(self, timeout: Timeout, now: datetime) -> Expired:
        failures = self._failures.get(timeout.id, 0)
        if timeout.destination:
            try:
                sent = as_sent(timeout, now)
            except CorruptHeaders:
                pass
            else:
                return Expired(sent, timeout.destination, timeout.due, failures, timeout.id)
        return Expired(request_for(timeout.id, now), self._dispatcher, timeout.due, failures, timeout.id, asks=True)

    def _count(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._failures[timeout_id] = self._failures.pop(timeout_id, 0) + 1
        for timeout_id in list(self._failures)[:-REMEMBERED]:
            del self._failures[timeout_id]

    def _forget(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._failures.pop(timeout_id, None)


def _ids(messages: Sequence[DelayedMessage], *, asks: bool) -> list[str]:
    return [message.timeout_id for message in messages if isinstance(message, Expired) and message.asks is asks]
