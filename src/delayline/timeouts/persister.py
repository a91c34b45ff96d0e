"""Protocol of the storage of a timeout manager: NServiceBus' IPersistTimeouts and IQueryTimeouts together.

A persister may also implement the capabilities here, and a store's SupportsSetup, SupportsTransactions, SupportsClock.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.message import DelayedMessage, Message
    from delayline.transaction import Transaction

#: The saga id of a timeout that no saga requested.
NO_SAGA: Final = uuid.UUID(int=0)
#: What to do with a timeout without a time.
TO_GIVE_A_TIME: Final = (
    "Give each a time with `delayline reschedule ID --at TIME --timeouts`, or delete it with `delayline cancel ID "
    "--timeouts`"
)


@dataclass(frozen=True, slots=True)
class Timeout:
    """A message stored in a timeout manager."""

    id: str
    message: Message
    destination: str | None
    """The queue to send the message to; None if the sender named none."""
    due: datetime
    saga_id: uuid.UUID = NO_SAGA
    """The saga that requested it; `remove_by_saga` deletes all of a saga's timeouts."""


@dataclass(frozen=True, slots=True)
class DueTimeout:
    """A timeout that is due."""

    id: str
    due: datetime


@dataclass(frozen=True, slots=True)
class TimeoutsChunk:
    """Expired timeouts, and when to look again."""

    due: Sequence[DueTimeout]
    """Due timeouts without a lease, earliest first; `next_chunk` has leased them."""
    next_due: datetime | None
    """When to look again: the next due time of the other timeouts, or the end of the earliest lease; None for never."""


class TimeoutPersister(Protocol):
    """Storage for the timeouts of an endpoint. Called from a single event loop; calls may overlap.

    A change in a transaction locks the timeout until the transaction ends. Every method may raise BackendUnavailable
    for a transient fault.
    """

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        """Store the timeout, durably on return or at the commit. Idempotent by its id.

        Args:
            timeout: The timeout.
            transaction: Stores it with the commit.
        """
        ...

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        """Return the timeout; None when it is gone.

        Args:
            timeout_id: Its id.
            transaction: Locks the timeout until its end.
        """
        ...

    async def remove(self, timeout_id: str, transaction: Transaction | None = None) -> bool:
        """Delete the timeout and its lease; return False if it was gone already.

        Args:
            timeout_id: Its id.
            transaction: Deletes it with the commit.
        """
        ...

    async def remove_by_saga(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> int:
        """Delete every timeout of the saga and return how many there were.

        Args:
            saga_id: The saga's id.
            transaction: Deletes them with the commit.
        """
        ...

    async def next_chunk(
        self, at: datetime, limit: int, *, lease_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        """Lease up to `limit` timeouts due at or before `at`, so that no other process returns them meanwhile.

        Args:
            at: The present time; the lease of a timeout that ended by then is ignored.
            limit: The most timeouts to lease; 0 changes nothing and returns only the next due time.
            lease_until: The end of the leases.
            transaction: The leases begin with its commit.

        Returns:
            The leased timeouts, also timeouts stored after their due time, and when to look again.
        """
        ...

    async def lease(self, ids: Sequence[str], until: datetime) -> None:
        """Change the end of the timeouts' leases. Ignores timeouts without a lease.

        Args:
            ids: The timeouts' ids.
            until: The new end; a past time ends the leases.
        """
        ...


@runtime_checkable
class SupportsOpen(Protocol):
    """Capability: the persister has connections or files, opened for an endpoint."""

    async def open(self, endpoint_name: str) -> None:
        """Connect.

        Args:
            endpoint_name: The endpoint whose timeouts are stored.

        Raises:
            BackendUnavailable: The database does not answer; nothing is left open.
            BackendUnusable: It cannot be used as it is; nothing is left open.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent; `open` opens it again."""
        ...


@runtime_checkable
class SupportsTake(Protocol):
    """Capability: `peek` and `remove` in a single step of a transaction."""

    async def take(self, timeout_id: str, transaction: Transaction) -> Timeout | None:
        """Delete the timeout and return it; None when it is gone.

        Args:
            timeout_id: Its id.
            transaction: Deletes it with the commit.
        """
        ...


@dataclass(frozen=True, slots=True)
class LockedTimeouts:
    """Expired timeouts that a transaction has locked, and when to look again."""

    due: Sequence[Timeout]
    """The locked timeouts, earliest due first."""
    next_due: datetime | None
    """When to look again, as in TimeoutsChunk; includes timeouts that other transactions have locked."""


@runtime_checkable
class SupportsTimeoutLocks(Protocol):
    """Capability: a transaction can lock, remove and lease many timeouts."""

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        """Lock expired timeouts, earliest due first; skips leased timeouts and timeouts locked by others.

        Args:
            at: Timeouts due at or before this time have expired.
            limit: The most timeouts to lock.
            max_bytes: The most bytes that their headers and bodies have together; a single timeout may have more.
            transaction: Its end unlocks them.
        """
        ...

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        """Delete timeouts; return their number.

        Args:
            ids: The timeouts' ids.
            transaction: The transaction that has locked them.
        """
        ...

    async def lease_locked(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        """Lease timeouts.

        Args:
            ids: The timeouts' ids.
            until: The end of the leases.
            transaction: The transaction that has locked them.
        """
        ...


@dataclass(frozen=True, slots=True)
class TimeoutCount:
    """The number of stored timeouts that have a due time, and the due times of the first and the last."""

    number: int
    first: datetime | None
    last: datetime | None
    without_time: int = 0
    """The number of those that have none, and are never due: .NET may have left some."""


@runtime_checkable
class SupportsCount(Protocol):
    """Capability: the persister can count its timeouts."""

    async def count(self) -> TimeoutCount:
        """Count the stored timeouts, leased timeouts included."""
        ...


@runtime_checkable
class SupportsWithoutTime(Protocol):
    """Capability: the persister's table may have timeouts without a time, and it can name them."""

    async def without_time(self, limit: int = 100) -> Sequence[DelayedMessage]:
        """Return the messages of such timeouts, which are never due.

        Args:
            limit: The most messages to return; 1 or more.
        """
        ...
