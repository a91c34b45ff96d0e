"""Adapters that give a timeout persister the shape of a store, so that the ordinary poller can dispatch from it.

`TimeoutRequestStore` returns a request to the dispatcher's queue for each expired timeout. `DirectTimeoutStore` returns
the messages themselves, for queues and timeouts that share transactions: a transaction sends and removes a timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from delayline.delayed.store import SupportsForwarding
from delayline.errors import CorruptHeaders
from delayline.message import DelayedMessage, Headers, Message, TimeoutHeaders, control_message, to_wire_time
from delayline.timeouts.persister import SupportsTimeoutLocks, TimeoutPersister

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.store import Forwarded
    from delayline.timeouts.persister import Timeout
    from delayline.transaction import Transaction

#: How long a requested timeout is leased to the dispatcher; then it is requested again, in case the request was lost.
DISPATCH_LEASE: Final = timedelta(minutes=1)
#: How long the poller leases a timeout to send its request, where no transaction locks it meanwhile.
REQUEST_LEASE: Final = timedelta(seconds=5)


def request_for(timeout_id: str, now: datetime) -> Message:
    """Return a request to dispatch the timeout."""
    return control_message(now, {TimeoutHeaders.TIMEOUT_ID: timeout_id})


def outgoing_message(timeout: Timeout, now: datetime) -> Message:
    """Return the timeout's message as it is sent to its destination. Raises CorruptHeaders."""
    message = timeout.message.logical
    headers = {Headers.TIME_SENT: to_wire_time(now), TimeoutHeaders.RELATED_TIMEOUT: timeout.id}
    if reply_to := message.headers.get(TimeoutHeaders.OLD_REPLY_TO):
        headers[Headers.REPLY_TO] = reply_to
    return message.with_headers(headers, without=(TimeoutHeaders.OLD_REPLY_TO,))


class NextDueCache:
    """Caches when the next timeout expires or its lease ends, to save queries."""

    def __init__(self, persister: TimeoutPersister, clock: Clock) -> None:
        self._persister = persister
        self._clock = clock
        self._version = 0
        self._next_due: datetime | None = None
        self._valid = False
        self._fresh = False

    def stored(self, due: datetime) -> None:
        """Invalidate the cached time if a timeout stored for `due` comes before it."""
        if not self._valid or self._next_due is None or due < self._next_due:
            self._version += 1
            self._valid = False

    async def next_due(self) -> datetime | None:
        """Return the next due time, from the cache where it is current; None for never."""
        now, seen = self._clock.now(), self._next_due
        if self._valid and (self._fresh or (seen is not None and seen <= now)):
            self._fresh = False
            return seen
        version = self._version
        chunk = await self._persister.next_chunk(now, 0, lease_until=now)
        self._store(chunk.next_due, version)
        self._fresh = False
        return chunk.next_due

    def invalidate(self, transaction: Transaction | None) -> Callable[[datetime | None], None]:
        """Invalidate the cache; return a function that caches a new time once the transaction commits."""
        self._valid, version = False, self._version

        def cache(next_due: datetime | None) -> None:
            if transaction is not None:
                transaction.after_commit(partial(self._store, next_due, version))

        return cache

    def _store(self, next_due: datetime | None, version: int) -> None:
        """Cache the time unless a timeout was stored meanwhile; used once, and again when it has passed."""
        if version == self._version:
            self._next_due, self._valid, self._fresh = next_due, True, True


class TimeoutRequestStore:
    """Store whose due messages are requests to the dispatcher; the timeouts stay until the dispatcher removes them."""

    def __init__(self, persister: TimeoutPersister, dispatcher: str, clock: Clock) -> None:
        self._persister = persister
        self._dispatcher = dispatcher
        self._clock = clock
        self._cache = NextDueCache(persister, clock)

    def stored(self, due: datetime) -> None:
        """Note that a timeout due at `due` was stored."""
        self._cache.stored(due)

    async def next_due(self) -> datetime | None:
        """Return when the next timeout expires or its lease ends; None for never."""
        return await self._cache.next_due()

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lease expired timeouts and return a request for each."""
        del max_bytes  # requests are small
        cache = self._cache.invalidate(transaction)
        lease_until = at + (REQUEST_LEASE if transaction is None else DISPATCH_LEASE)
        chunk = await self._persister.next_chunk(at, limit, lease_until=lease_until, transaction=transaction)
        if chunk.due:
            cache(chunk.next_due)
        return [DelayedMessage(request_for(timeout.id, at), self._dispatcher, timeout.due) for timeout in chunk.due]

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Prolong the leases; the dispatcher removes the timeouts."""
        if transaction is None:
            await self._persister.lease(_ids(messages), self._clock.now() + DISPATCH_LEASE)
        return len(messages)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Lease the timeouts until `at`; with a transaction their lease of a minute stays."""
        if transaction is None:
            await self._persister.lease(_ids(messages), at)
        return len(messages)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """End the leases."""
        await self._persister.lease(_ids(messages), self._clock.now())


#: Failures are counted for this many timeouts at most; older timeouts count anew.
MAXIMUM_COUNTED_FAILURES: Final = 1000


class DirectPersister(TimeoutPersister, SupportsTimeoutLocks, Protocol):
    """A persister whose expired timeouts a transaction can lock."""


@dataclass(frozen=True, slots=True)
class ExpiredTimeout(DelayedMessage):
    """The message of a timeout, or a request that leaves the timeout to the dispatcher."""

    timeout_id: str = ""
    is_request: bool = False


class DirectTimeoutStore:
    """Store whose due messages are the timeouts' own: a single transaction sends a message and removes its timeout.

    A timeout without a destination, or with unreadable headers, is requested from the dispatcher, which moves it to
    the error queue.
    """

    def __init__(self, persister: DirectPersister, dispatcher: str, clock: Clock) -> None:
        self._persister = persister
        self._dispatcher = dispatcher
        self._clock = clock
        self._cache = NextDueCache(persister, clock)
        self._failures: dict[str, int] = {}

    def stored(self, due: datetime) -> None:
        """Note that a timeout due at `due` was stored."""
        self._cache.stored(due)

    async def next_due(self) -> datetime | None:
        """Return when the next timeout expires or may be retried; None for never."""
        return await self._cache.next_due()

    def forwards_to(self, transport: object) -> bool:
        """Return whether the persister can move expired timeouts to the transport's queues inside its database."""
        return isinstance(self._persister, SupportsForwarding) and self._persister.forwards_to(transport)

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Move expired timeouts inside the database; the poller fetches the rest."""
        assert isinstance(self._persister, SupportsForwarding)  # noqa: S101 - `forwards_to` was True
        self._cache.invalidate(None)
        return await self._persister.forward_due(at, limit, max_bytes=max_bytes)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock expired timeouts and return their messages or requests."""
        assert transaction is not None  # noqa: S101 - the scope of a DirectTimeoutStore is shared
        cache = self._cache.invalidate(transaction)
        locked = await self._persister.lock_due(at, limit, max_bytes=max_bytes, transaction=transaction)
        if locked.due:
            cache(locked.next_due)
        return [self._expired(timeout, at) for timeout in locked.due]

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Remove the timeouts that were sent; lease the requested timeouts to the dispatcher."""
        assert transaction is not None  # noqa: S101 - as above
        requested, sent = _timeout_ids(messages, requests=True), _timeout_ids(messages, requests=False)
        if requested:
            await self._lease_locked(requested, self._clock.now() + DISPATCH_LEASE, transaction)
        if sent:
            transaction.after_commit(partial(self._forget, sent))
        return len(requested) + (await self._persister.remove_many(sent, transaction) if sent else 0)

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count a failure of each timeout and lease it until `at`."""
        assert transaction is not None  # noqa: S101 - as above
        ids = _timeout_ids(messages, requests=False) + _timeout_ids(messages, requests=True)
        await self._lease_locked(ids, at, transaction)
        transaction.after_commit(partial(self._count, ids))
        return len(ids)

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """No-op: row locks end with their transaction."""

    async def _lease_locked(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        await self._persister.lease_locked(ids, until, transaction)
        transaction.after_commit(partial(self.stored, until))

    def _expired(self, timeout: Timeout, now: datetime) -> ExpiredTimeout:
        failures = self._failures.get(timeout.id, 0)
        if timeout.destination:
            try:
                sent = outgoing_message(timeout, now)
            except CorruptHeaders:
                pass
            else:
                return ExpiredTimeout(sent, timeout.destination, timeout.due, failures, timeout.id)
        return ExpiredTimeout(
            request_for(timeout.id, now), self._dispatcher, timeout.due, failures, timeout.id, is_request=True
        )

    def _count(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._failures[timeout_id] = self._failures.pop(timeout_id, 0) + 1
        for timeout_id in list(self._failures)[:-MAXIMUM_COUNTED_FAILURES]:
            del self._failures[timeout_id]

    def _forget(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._failures.pop(timeout_id, None)


def requested_timeout(message: Message) -> str | None:
    """Return the id of the timeout that a message requests; None if the message is not a request."""
    return message.headers.get(TimeoutHeaders.TIMEOUT_ID) or message.headers.get(TimeoutHeaders.OLD_TIMEOUT_ID)


def _ids(messages: Sequence[DelayedMessage]) -> list[str]:
    return [message.message.headers[TimeoutHeaders.TIMEOUT_ID] for message in messages]


def _timeout_ids(messages: Sequence[DelayedMessage], *, requests: bool) -> list[str]:
    return [
        message.timeout_id
        for message in messages
        if isinstance(message, ExpiredTimeout) and message.is_request is requests
    ]
