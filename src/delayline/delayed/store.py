"""The delayed message store: its six verbs, and the capabilities that a store may add.

A class with the methods of `DelayedMessageStore` alone works end to end. An endpoint checks for every other protocol
here with `isinstance` when it starts. `delayline.testing.StoreConformance` tests a store.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

from delayline.errors import ConfigurationError, CorruptHeaders
from delayline.message import Headers, Message, from_wire_time, in_utc, to_wire_time

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from datetime import timedelta

    from delayline.clock import Clock
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction, TransactionMode


class DelayedMessageStore(Protocol):
    """Keeps delayed messages until they are due. Called from a single event loop; calls may overlap.

    A fetched message is locked, so that no other process can fetch it: until its transaction ends, or, fetched without
    a transaction, until it is removed, counted as failed, or its lease runs out. A lease must be longer than a dispatch
    takes; a minute is a good choice. Every method may raise BackendUnavailable for a fault that may pass. The verbs are
    those of NServiceBus' `IDelayedMessageStore`, https://docs.particular.net/transports/sql/native-delayed-delivery

    Example:
        A store over a dict, with no capability, is in `docs/how-to/custom-store.md`.
    """

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the store for an endpoint; called once, after `setup_infrastructure` if the store has that.

        Args:
            endpoint_name: The endpoint whose messages are stored.
            mode: The endpoint's transaction mode.

        Raises:
            UnsupportedTransactionMode: The store cannot honour `mode`.
        """
        ...

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Store the message, durably on return or at the commit of `transaction`.

        Idempotent by message id: storing an id that is pending already succeeds and changes nothing, so that a sender
        can repeat a send whose outcome is unknown.

        Args:
            message: The message, with its destination and due time.
            transaction: A transaction of this store, or of a transport that shares its domain.
        """
        ...

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        """Lock and return the unlocked message with the earliest due time.

        Args:
            at: The latest due time.
            transaction: The transaction that locks the message; without it the message is locked until it is removed,
                counted as failed, or its lease runs out.

        Returns:
            The message, or None if no unlocked message is due by `at`.
        """
        ...

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message, past or future, or None when the store is empty."""
        ...

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message.

        Args:
            message: A message that this store has fetched.
            transaction: The transaction of the deletion; without it the message is deleted durably on return.

        Returns:
            Whether the message still existed.
        """
        ...

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Add 1 to the message's `number_of_retries`, durably, and unlock it.

        Args:
            message: A message that this store has fetched.

        Returns:
            Whether the message still existed.
        """
        ...


@runtime_checkable
class SupportsSetup(Protocol):
    """Capability: the store can create its tables or folders."""

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create missing tables or folders; called before `initialize`.

        Idempotent, and safe in several processes at once.

        Args:
            endpoint_name: The endpoint whose messages will be stored.
        """
        ...


@runtime_checkable
class SupportsRightsCheck(Protocol):
    """Capability of stores, deliveries and transports: report missing rights on their tables."""

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the statements that grant the missing rights on existing tables; works on a closed store.

        Args:
            endpoint_name: The endpoint that needs the rights.
            takes: Whether the endpoint also removes messages, as pollers and receivers do, or only adds them.

        Raises:
            BackendUnavailable, BackendUnusable: The database cannot be queried.
        """
        ...


@runtime_checkable
class SupportsTransactions(Protocol):
    """Capability: the verbs can share a transaction, also with the sends of a transport of the same domain."""

    @property
    def transaction_domain(self) -> Hashable | None:
        """Equal to a transport's domain when both can share a local transaction."""
        ...

    @property
    def locks_rows(self) -> bool:
        """Whether a transaction locks only the rows it touches.

        It may then stay open while messages are dispatched to another system.
        """
        ...

    def transaction(self) -> Transaction:
        """Return a new transaction; enter it with `async with`."""
        ...


@runtime_checkable
class SupportsBatches(Protocol):
    """Capability: many messages in a single round trip, and a later due time for failed messages."""

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Store all of the messages in a single transaction, or none.

        Args:
            messages: The messages; pending ids are left as they are, as by `store`.
            transaction: The transaction; without it the messages are durable on return.
        """
        ...

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return messages due not after `at`, earliest first, ties in the order stored.

        Args:
            at: The latest due time.
            limit: The most messages to return.
            max_bytes: The most bytes of bodies and headers together; a due message is returned anyway.
            transaction: The transaction that locks the messages; without it they are locked until they are removed,
                released, or a lease runs out.
        """
        ...

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages.

        Args:
            messages: Messages that this store has fetched.
            transaction: The transaction of the deletions; without it they are durable on return.

        Returns:
            How many of the messages still existed.
        """
        ...

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count a failed attempt of each message, make it due again later, and unlock it.

        Args:
            messages: Messages that this store has fetched.
            at: The new due time.
            transaction: The transaction of the changes; without it they are durable on return.

        Returns:
            How many of the messages still existed.
        """
        ...

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock messages that were fetched without a transaction; no attempt is counted. Idempotent.

        Args:
            messages: Messages that this store has fetched.
        """
        ...


class SingleMessageVerbs:
    """Mixin for a store with SupportsBatches: the verbs for a message, each as a batch of 1."""

    async def fetch_next_due(
        self: SupportsBatches, at: datetime, transaction: Transaction | None = None
    ) -> DelayedMessage | None:
        batch = await self.fetch_due(at, 1, max_bytes=1, transaction=transaction)
        return batch[0] if batch else None

    async def remove(self: SupportsBatches, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        return await self.remove_many([message], transaction) == 1

    async def increment_failure_count(self: SupportsBatches, message: DelayedMessage) -> bool:
        return await self.retry_many([message], message.due) == 1


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The result of `SupportsForwarding.forward_due`."""

    number: int
    """How many messages were moved."""
    next_due: datetime | None
    """The earliest due time of all remaining messages, `at` if more may be due, or None for an empty store."""
    left: int = 0
    """Due messages that cannot be moved inside the database, such as those for an unknown queue: the poller's task."""
    moved: Mapping[tuple[str, datetime | None], int] | None = None
    """How many were moved by destination and due time, where the store counts them; see `SupportsForwardedCounts`."""


@runtime_checkable
class SupportsForwarding(Protocol):
    """Capability: move due messages to a transport's queues inside the back end."""

    def forwards_to(self, transport: object) -> bool:
        """Return whether this store can move messages to that transport's queues.

        Args:
            transport: The endpoint's transport.
        """
        ...

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Move due messages to their queues, earliest first, in a single transaction: all or none.

        A message that only the poller can dispatch, such as for an unknown queue or with dispatch properties in its
        headers, stays: the store stops before it, or skips it and counts it in `left`. If no message was moved, the
        next is of that kind, other processes have locked the due messages, or none is due. After `left` or no
        move the poller fetches and dispatches a batch itself.

        Args:
            at: The latest due time.
            limit: The most messages to move.
            max_bytes: The most bytes of bodies and headers together, as for `fetch_due`.
        """
        ...


@runtime_checkable
class SupportsForwardedCounts(Protocol):
    """Capability: count the messages that `forward_due` moves, for metrics."""

    def count_forwarded(self) -> None:
        """From now on return `Forwarded.moved`, how many were moved by destination and due time."""
        ...


@runtime_checkable
class SupportsNotifications(Protocol):
    """Capability: notify of messages stored by this process or another."""

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call a function after each commit that stores messages.

        Calls may be late, repeated or lost: the poller's sleep is capped.

        Args:
            callback: Called on this event loop with the earliest due time of the commit.

        Returns:
            A function that ends the calls.
        """
        ...


class MessageJournal(Protocol):
    """What becomes of the messages of a store, beside what its back end writes down by itself."""

    @property
    def is_kept(self) -> bool:
        """Whether it is kept; False until the store is open."""
        ...

    def gave_up(self, messages: Sequence[DelayedMessage]) -> None:
        """Record that the messages go to the error queue: their removal, which follows, is not a dispatch.

        Args:
            messages: The messages.
        """
        ...

    async def handled(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Record that messages were handled, where the journal is kept.

        Args:
            messages: The messages, each with the queue that it was handled in as its destination.
            transaction: The transaction of the entries; without it they are durable on return.
        """
        ...


@runtime_checkable
class SupportsJournal(Protocol):
    """Capability: record the outcome of each message in a journal."""

    @property
    def journal(self) -> MessageJournal:
        """The journal."""
        ...


@runtime_checkable
class SupportsClock(Protocol):
    """Capability: the back end's clock decides when messages are due, not the clocks of the machines."""

    def clock(self) -> Clock:
        """Return the back end's clock, which due times and delays are measured with.

        Called once, before `setup_infrastructure`; until the store is open the clock may return this machine's time.
        `now` must not block: query a remote back end now and then, and add the elapsed time of this machine. The error
        of that makes messages early, unless the clock is a `delayline.clock.BoundedClock`.
        """
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """Capability: the store has connections or files to close."""

    async def close(self) -> None:
        """Close them and release every lock. Idempotent; `initialize` opens the store again."""
        ...


class Outcome(StrEnum):
    """The outcome of a cancel or reschedule: exactly one of them, also in a race with the poller."""

    DONE = "done"
    """The message was cancelled, or leaves at its new time only."""
    DISPATCHING = "dispatching"
    """Too late: the poller is dispatching the message."""
    NOT_PENDING = "not pending"
    """No such message is pending: it was dispatched or cancelled, or never existed."""

    @property
    def meaning(self) -> str:
        """What it means to the person who asked for it."""
        return {
            Outcome.DONE: "done",
            Outcome.DISPATCHING: "too late: it is being sent now",
            Outcome.NOT_PENDING: "no pending message has this id: it has left, was cancelled, or never existed",
        }[self]


#: What to do about a pending message with the same id.
OnConflict = Literal["keep", "replace", "raise"]
#: The same for a message that is sent alone.
SendConflict = Literal["keep", "replace", "postpone", "raise"]


def postponed(message: DelayedMessage, pending: DelayedMessage, at_most: timedelta) -> DelayedMessage:
    """Return the message as it replaces a pending one: due no later than `at_most` after the first send of its id.

    Where the pending message does not say when it was sent, its headers being damaged, the time counts from now on.
    """
    first_sent: str | None
    try:
        headers = pending.message.headers
        first_sent = headers.get(Headers.FIRST_SENT) or headers[Headers.TIME_SENT]
        due = min(message.due, from_wire_time(first_sent) + at_most)
    except (CorruptHeaders, KeyError, ValueError, OverflowError):
        first_sent, due = message.message.headers.get(Headers.TIME_SENT), message.due
    if first_sent is None:
        return message
    added = {Headers.FIRST_SENT: first_sent, Headers.DELIVER_AT: to_wire_time(due)}
    return replace(message, due=due, message=message.message.with_headers(added))


class StoreResult(StrEnum):
    """What became of a message that was sent with `on_conflict`."""

    STORED = "stored"
    """No message with its id was pending."""
    KEPT = "kept"
    """The pending message with its id was kept, and this one was not stored."""
    REPLACED = "replaced"
    """This message has replaced the pending one."""
    DISPATCHING = "dispatching"
    """The message with its id is being dispatched: it could not be replaced, and this one was not stored."""


@runtime_checkable
class SupportsReplacement(Protocol):
    """Capability: replace pending messages, and report whether a pending message was replaced."""

    async def store_or_replace(
        self,
        message: DelayedMessage,
        *,
        replace: bool,
        at_most: timedelta | None = None,
        transaction: Transaction | None = None,
    ) -> StoreResult:
        """Store the message unless a message with its id is pending.

        Args:
            message: The message; if it replaces another, then with destination, due time, headers and body.
            replace: Whether it replaces a pending message that the poller does not have already; else that is kept.
            at_most: If given, what replaces the pending message is `postponed(message, pending, at_most)`.
            transaction: The transaction of the change; without it the message is durable on return.
        """
        ...


@dataclass(frozen=True, slots=True)
class DueCount:
    """The number of messages due for a destination in the bucket that starts at `start`."""

    start: datetime
    destination: str
    count: int


@runtime_checkable
class SupportsManagement(Protocol):
    """Capability: list, cancel and reschedule pending messages."""

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a pending message, unless the poller has it already.

        Args:
            message_id: Id of the message.
            transaction: The transaction of the deletion, until whose end the message is neither dispatched nor gone;
                without it the message is deleted durably on return.
        """
        ...

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Give a pending message a new due time, unless the poller has it already.

        Args:
            message_id: Id of the message.
            due: The new due time, with a time zone; a past time means now.
            transaction: The transaction of the change; see `cancel`.

        Raises:
            InvalidDueTime: The store cannot keep that time.
        """
        ...

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first, without locking them.

        Args:
            destination: The destination of the messages; by default all.
            limit: The most messages to return.
            offset: How many messages to leave out first.
        """
        ...

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Return counts by destination and due bucket, earliest first.

        Args:
            bucket: The length of a bucket; buckets are aligned to 1970 UTC.
        """
        ...


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A pending message that a search has found."""

    message: DelayedMessage
    """The message with the beginning of its body, or with none."""
    size: int
    """Bytes of headers and whole body."""


def found_of(message: DelayedMessage, body_limit: int) -> FoundMessage:
    """Return a message that was read whole, with the beginning of its body."""
    kept = message.message
    cut = Message.from_encoded(kept.id, kept.encoded_headers, kept.body[:body_limit])
    return FoundMessage(replace(message, message=cut), len(kept.encoded_headers) + len(kept.body))


@runtime_checkable
class SupportsLookup(Protocol):
    """Capability: find pending messages by id or due time, each by an index, without locking them."""

    async def find(self, message_id: str, *, body_limit: int) -> FoundMessage | None:
        """Return the pending message with that id, or None.

        Args:
            message_id: The id.
            body_limit: How many bytes of the body to read at most.
        """
        ...

    async def due_between(
        self, start: datetime | None, end: datetime | None, *, limit: int, offset: int = 0
    ) -> Sequence[FoundMessage]:
        """Return messages without their bodies, earliest due first.

        Args:
            start: The earliest due time; None for any.
            end: The time before which they are due; None for any.
            limit: The most messages to return.
            offset: How many to skip; meant for messages that are due at the same time as `start`.
        """
        ...


#: The most edges of a forecast.
MOST_EDGES: Final = 200


@dataclass(frozen=True, slots=True)
class DueBucket:
    """The number of messages that are due from `start` on and before `end`."""

    start: datetime | None
    """None: from the earliest message on."""
    end: datetime | None
    """None: up to the latest message."""
    count: int
    exact: bool = True
    """Whether the numbers are exact; else they come from samples or the database's statistics."""
    at_least: bool = False
    """Whether there may be more messages, because the back end can only count the first ones."""
    destinations: Mapping[str, int] = field(default_factory=dict)
    """The number by destination, the largest first; empty unless asked for."""


@dataclass(frozen=True, slots=True)
class DueForecast:
    """When the pending messages of a store are due."""

    buckets: Sequence[DueBucket]
    """One before the first edge, one between each two, one from the last edge on."""
    earliest: datetime | None
    """The earliest due time; it is past while a message is overdue. None for an empty store."""

    @property
    def exact(self) -> bool:
        """Whether every number is exact."""
        return all(bucket.exact for bucket in self.buckets)


@runtime_checkable
class SupportsDueForecast(Protocol):
    """Capability: count pending messages by due time in bounded time, however many there are."""

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        """Return the number of messages in each bucket of due times, without reading all of them.

        Buckets with few messages are counted exactly, by an index. Larger buckets are estimated from samples or from
        the database's statistics, or have a lower bound. With the present time as the first edge, the first bucket
        counts the overdue messages.

        Args:
            edges: The times between buckets, aware and rising; 1 to 200.
            by_destination: Whether to divide each bucket by destination too; in larger buckets by a sample.

        Raises:
            ConfigurationError: The edges do not rise, or are too many or too few.
        """
        ...


def checked_edges(edges: Sequence[datetime]) -> list[datetime]:
    """Return the edges of a forecast in UTC. Raises ConfigurationError."""
    if not 1 <= len(edges) <= MOST_EDGES:
        raise ConfigurationError(f"edges must be 1 to {MOST_EDGES} times, not {len(edges)}")
    ascending = [in_utc(edge) for edge in edges]
    for before, after in pairwise(ascending):
        if before >= after:
            raise ConfigurationError(f"edges must rise, but {before.isoformat()} is before {after.isoformat()}")
    return ascending


def spans_of(edges: Sequence[datetime]) -> list[tuple[datetime | None, datetime | None]]:
    """Return the start and the end of each bucket between the edges."""
    return list(pairwise([None, *edges, None]))


def managed(store: object) -> SupportsManagement:
    """Return the store if it has management; raises ConfigurationError if it has none."""
    if not isinstance(store, SupportsManagement):
        raise ConfigurationError(
            f"{type(store).__name__} cannot list, cancel or reschedule messages: use a store with SupportsManagement"
        )
    return store
