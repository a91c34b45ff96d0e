"""Where a timeout manager keeps timeouts: one small protocol for IPersistTimeouts and IQueryTimeouts (reference 2.6).

Capabilities are those of a delayed message store: SupportsSetup, SupportsTransactions, SupportsClock; and the two here.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.message import Message
    from delayline.transaction import Transaction

#: What stands for no saga.
NO_SAGA: Final = uuid.UUID(int=0)


@dataclass(frozen=True, slots=True)
class Timeout:
    """A message that waits in a timeout manager."""

    id: str
    message: Message
    destination: str | None
    """The queue it goes to; None where the sender named none."""
    due: datetime
    saga_id: uuid.UUID = NO_SAGA
    """Which saga asked for it; it can be cleared by that."""


@dataclass(frozen=True, slots=True)
class DueTimeout:
    """A timeout that is due."""

    id: str
    due: datetime


@dataclass(frozen=True, slots=True)
class TimeoutsChunk:
    """What a look at the storage found."""

    due: Sequence[DueTimeout]
    """Those that were due and free, earliest first; they are held from now on."""
    next_due: datetime | None
    """When to look again: the earliest due time of what else is free, or the end of the earliest hold; None for never.
    """


class TimeoutPersister(Protocol):
    """Keeps timeouts of one endpoint. Called from one event loop; calls may overlap.

    Whoever changes something in a transaction locks it until the transaction ends. Every method may raise
    BackendUnavailable for a fault that may pass.
    """

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        """Keep the timeout, durably on return or at the commit. Idempotent by its id."""
        ...

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        """Return the timeout, locked until the end of `transaction` where given; None when it is gone."""
        ...

    async def remove(self, timeout_id: str, transaction: Transaction | None = None) -> bool:
        """Delete the timeout and its hold; False when it was gone already."""
        ...

    async def remove_by_saga(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> int:
        """Delete every timeout of the saga and return how many there were."""
        ...

    async def next_chunk(
        self, at: datetime, limit: int, *, hold_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        """Hold up to `limit` timeouts due not after `at` until `hold_until`, so that nobody else gets them meanwhile.

        Looks at everything that is due, however late it was stored. With a limit of 0 nothing is changed.
        """
        ...

    async def hold(self, ids: Sequence[str], until: datetime) -> None:
        """Hold those of the timeouts that are held until then instead; a time that has passed sets them free."""
        ...


@runtime_checkable
class SupportsOpen(Protocol):
    """Capability: the persister has connections or files, and has to learn whose timeouts it keeps."""

    async def open(self, endpoint_name: str) -> None:
        """Connect. Raises BackendUnavailable, having undone what it did, or BackendUnusable."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent; `open` opens it again."""
        ...


@runtime_checkable
class SupportsTake(Protocol):
    """Capability: `peek` and `remove` in one step, for a transaction that dispatches in between or after."""

    async def take(self, timeout_id: str, transaction: Transaction) -> Timeout | None:
        """Delete the timeout and return it; None when it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class LockedTimeouts:
    """What a transaction has locked."""

    due: Sequence[Timeout]
    """Those that are due and nobody's, earliest first."""
    next_due: datetime | None
    """When to look again, as in TimeoutsChunk; locked ones of others count."""


@runtime_checkable
class SupportsTimeoutLocks(Protocol):
    """Capability: a transaction that sends expired timeouts, many at once, locks, removes or keeps them."""

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        """Lock up to `limit` timeouts due not after `at`; those that others hold or have locked are passed over.

        Stops before headers and bodies exceed `max_bytes` together, but gives at least one that is due.
        """
        ...

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        """Delete timeouts that the transaction has locked and return how many there were."""
        ...

    async def set_aside(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        """Hold timeouts that the transaction has locked until then."""
        ...


@dataclass(frozen=True, slots=True)
class TimeoutCount:
    """How many timeouts wait, and when the first and the last of them are due."""

    number: int
    first: datetime | None
    last: datetime | None


@runtime_checkable
class SupportsCount(Protocol):
    """Capability: people can see what waits."""

    async def count(self) -> TimeoutCount:
        """Return how many timeouts wait, held ones included."""
        ...
