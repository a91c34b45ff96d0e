"""Where delayed messages wait: the six verbs of a store, and the capabilities it may add.

A class that implements DelayedMessageStore and nothing else works end to end. Every further protocol here is found
with `isinstance` when the endpoint starts, and used when present. Prove a store with
`delayline.testing.StoreConformance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime, timedelta

    from delayline.clock import Clock
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction, TransactionMode


class DelayedMessageStore(Protocol):
    """Keeps delayed messages until they are due. Called from one event loop; calls may overlap.

    A fetched message is locked, so that nobody else can fetch it: until its transaction ends, or, fetched without
    one, until it is removed, counted as failed, or its lease runs out. A lease must be longer than a dispatch takes;
    a minute is a good one. Every method may raise BackendUnavailable for a fault that may pass. Source: seeds 000,
    IDelayedMessageStore; reference 1.4.
    """

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the store for one endpoint; called once, after `setup_infrastructure` where there is one.

        Raises UnsupportedTransactionMode when it cannot honour `mode`.
        """
        ...

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Keep the message, durably on return or at the commit of `transaction`.

        Idempotent by message id: storing an id that already waits succeeds and changes nothing (reference H4).
        """
        ...

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        """Lock and return the message with the earliest due time not after `at`; None when there is none unlocked."""
        ...

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of any message, past or future, or None when the store is empty."""
        ...

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message; False when it was gone already."""
        ...

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Add one to the message's `number_of_retries`, durably, and unlock it; False when it was gone already."""
        ...


@runtime_checkable
class SupportsSetup(Protocol):
    """Capability: the store can create what it needs (tables, folders)."""

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create it. Idempotent; safe in several processes at once. Called before `initialize`."""
        ...


@runtime_checkable
class SupportsRightsCheck(Protocol):
    """Capability of stores, deliveries and transports: the tables' owner grants a user rights on each of them."""

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the statements that grant what the user lacks on the tables that are there; it need not be open.

        Args:
            endpoint_name: the endpoint that needs the rights.
            takes: whether it also takes messages out again, as pollers and receivers do, or only puts them in.

        Raises:
            BackendUnavailable, BackendUnusable: the database cannot be asked.
        """
        ...


@runtime_checkable
class SupportsTransactions(Protocol):
    """Capability: the store's verbs can share one transaction, and with a transport of the same domain its sends."""

    @property
    def transaction_domain(self) -> Hashable | None:
        """Equal to a transport's domain when both can share one local transaction."""
        ...

    @property
    def locks_rows(self) -> bool:
        """True when a transaction locks only the rows it touches.

        Then it may stay open while messages are dispatched elsewhere.
        """
        ...

    def transaction(self) -> Transaction:
        """Return a new transaction; enter it with `async with`."""
        ...


@runtime_checkable
class SupportsBatches(Protocol):
    """Capability: many messages in one round trip, and failures that wait their turn inside the store."""

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Like `store` for each, in one transaction: all or none."""
        ...

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return up to `limit` messages due not after `at`, earliest first, ties in the order stored.

        Stops before the bodies and headers exceed `max_bytes` together, but returns at least one that is due.
        """
        ...

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        """Delete the messages and return how many were still there."""
        ...

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        """Count a failure of each, make each due at `at`, unlock; return how many were still there.

        Durable on return, or at the commit of `transaction`.
        """
        ...

    async def release_many(self, messages: Sequence[DelayedMessage]) -> None:
        """Unlock messages that were fetched without a transaction, uncounted. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a SupportsForwarding did."""

    number: int
    """How many messages moved."""
    next_due: datetime | None
    """The earliest due time of all that is left in the store, or `at` where more may be due; None when it is empty."""
    left: int = 0
    """Due messages passed over because they need the poller's own hands, such as one whose queue does not exist."""


@runtime_checkable
class SupportsForwarding(Protocol):
    """Capability: due messages move to a transport's queues inside the back end, in one step."""

    def forwards_to(self, transport: object) -> bool:
        """Tell whether that transport's queues are where this store can move messages to."""
        ...

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        """Move up to `limit` messages due not after `at` to their queues, earliest first.

        One transaction, all or none; bounded like `fetch_due`. A message that needs the poller's own hands, such as
        one whose queue does not exist or whose headers hold dispatch properties, stays: the store stops before it, or
        passes over it and counts it as `left`. None moved says that such a message is the next one, that somebody
        holds messages without a transaction, or that none is due. After `left`, or none moved, the poller fetches
        and sends one batch itself.
        """
        ...


@runtime_checkable
class SupportsNotifications(Protocol):
    """Capability: tells when anybody, in this process or another, has stored something."""

    def on_stored(self, callback: Callable[[datetime], None]) -> Callable[[], None]:
        """Call `callback` on this event loop with the earliest due time after each commit; return how to stop it.

        Calls may come late, doubled or, at worst, not at all: the poller's sleep is capped.
        """
        ...


@runtime_checkable
class SupportsJournal(Protocol):
    """Writes down what becomes of each message."""

    def gave_up(self, messages: Sequence[DelayedMessage]) -> None:
        """Note that these go to the error queue: their removal, which comes next, is not that of dispatched ones."""
        ...


@runtime_checkable
class SupportsClock(Protocol):
    """Capability: the back end's clock decides, whatever the clocks of the machines around it say."""

    def clock(self) -> Clock:
        """Return the back end's clock: what is due and what a delay means go by it.

        Asked for once, before `setup_infrastructure`; until the store is open it may tell this machine's time.
        `now` must not block: a back end far away is asked now and then, and this machine's elapsed time added. What
        that leaves uncertain makes messages early, unless the clock is a `delayline.clock.BoundedClock`.
        """
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """Capability: the store holds connections or files while it is open."""

    async def close(self) -> None:
        """Let go of them, and of every lock. Idempotent; `initialize` opens the store again."""
        ...


class Outcome(StrEnum):
    """How a cancel or a reschedule ended; exactly one of these, whatever the poller does at the same moment."""

    DONE = "done"
    """It took effect: the message did not leave, or will leave at its new time only."""
    DISPATCHING = "dispatching"
    """Too late: the poller is sending the message now."""
    NOT_PENDING = "not pending"
    """No such message waits: it has left, was cancelled, or never was."""


@dataclass(frozen=True, slots=True)
class DueCount:
    """How many messages fall due for one destination in the bucket that starts at `start`."""

    start: datetime
    destination: str
    count: int


@runtime_checkable
class SupportsManagement(Protocol):
    """Capability: people can look at what waits, cancel it and reschedule it."""

    async def cancel(self, message_id: str) -> Outcome:
        """Delete a waiting message, if the poller does not have it already."""
        ...

    async def reschedule(self, message_id: str, due: datetime) -> Outcome:
        """Give a waiting message a new due time, if the poller does not have it already. Raises InvalidDueTime."""
        ...

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """Return waiting messages, earliest due first, without locking them."""
        ...

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Return counts by destination and due bucket, earliest first; buckets are aligned to 1970 UTC."""
        ...


def managed(store: object) -> SupportsManagement:
    """Return the store as one that people can look into; raises ConfigurationError."""
    if not isinstance(store, SupportsManagement):
        raise ConfigurationError(
            f"{type(store).__name__} cannot list, cancel or reschedule messages: use a store with SupportsManagement"
        )
    return store
