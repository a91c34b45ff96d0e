"""The reference timeout persister: every capability, in the memory of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.memory.transaction import InMemory, in_memory
from delayline.timeouts.persister import DueTimeout, LockedTimeouts, TimeoutCount, TimeoutsChunk

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.timeouts.persister import Timeout
    from delayline.transaction import Transaction


class MemoryTimeoutPersister(InMemory):
    """Timeout persister in memory, for tests, tutorials and messages that may be lost with the process."""

    def __init__(self) -> None:
        self._timeouts: dict[str, Timeout] = {}
        self._leases: dict[str, datetime] = {}
        self._locked: set[str] = set()

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        """Keep the timeout."""
        if transaction is None:
            self._insert(timeout)
        else:
            in_memory(transaction).on_commit(lambda: self._insert(timeout))

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        """Return the timeout; None if another transaction has locked it."""
        timeout = self._timeouts.get(timeout_id)
        if timeout is None or transaction is None:
            return timeout
        if timeout_id in self._locked:
            return None
        self._locked.add(timeout_id)
        transaction.after_end(lambda: self._locked.discard(timeout_id))
        return timeout

    async def remove(self, timeout_id: str, transaction: Transaction | None = None) -> bool:
        """Delete the timeout."""
        exists = timeout_id in self._timeouts
        if transaction is None:
            self._delete([timeout_id])
        else:
            in_memory(transaction).on_commit(lambda: self._delete([timeout_id]))
        return exists

    async def remove_by_saga(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> int:
        """Delete the saga's timeouts."""
        ids = [timeout.id for timeout in self._timeouts.values() if timeout.saga_id == saga_id]
        if transaction is None:
            self._delete(ids)
        else:
            in_memory(transaction).on_commit(lambda: self._delete(ids))
        return len(ids)

    async def next_chunk(
        self, at: datetime, limit: int, *, lease_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        """Lease due timeouts."""
        self._leases = {key: until for key, until in self._leases.items() if until > at}
        free = sorted((timeout.due, key) for key, timeout in self._timeouts.items() if key not in self._leases)
        due = [DueTimeout(timeout_id, when) for when, timeout_id in free[:limit] if when <= at]
        ids = [timeout.id for timeout in due]
        if transaction is not None:
            in_memory(transaction).on_rollback(lambda: self._free(ids))
        self._leases |= dict.fromkeys(ids, lease_until)
        times = [*self._leases.values(), *(when for when, _ in free[len(due) :])]
        return TimeoutsChunk(due, min(times, default=None))

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        """Lock due timeouts; skips timeouts locked by other transactions."""
        self._leases = {key: until for key, until in self._leases.items() if until > at}
        free = sorted((timeout.due, key) for key, timeout in self._timeouts.items() if key not in self._leases)
        due: list[Timeout] = []
        for when, timeout_id in free:
            timeout = self._timeouts[timeout_id]
            max_bytes -= len(timeout.message.body) + len(timeout.message.encoded_headers)
            if when > at or len(due) == limit or (due and max_bytes < 0):
                break
            if timeout_id not in self._locked:
                due.append(timeout)
        ids = {timeout.id for timeout in due}
        self._locked |= ids
        transaction.after_end(lambda: self._locked.difference_update(ids))
        times = [*self._leases.values(), *(when for when, timeout_id in free if timeout_id not in ids)]
        return LockedTimeouts(due, min(times, default=None))

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        """Delete timeouts that are locked."""
        in_memory(transaction).on_commit(lambda: self._delete(ids))
        return sum(timeout_id in self._timeouts for timeout_id in ids)

    async def lease_locked(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        """Lease locked timeouts."""
        leased = dict.fromkeys(ids, until)
        in_memory(transaction).on_commit(lambda: self._leases.update(leased))

    async def lease(self, ids: Sequence[str], until: datetime) -> None:
        """Change the end of existing leases."""
        self._leases |= {timeout_id: until for timeout_id in ids if timeout_id in self._leases}

    async def count(self) -> TimeoutCount:
        """Return how many timeouts wait."""
        times = [timeout.due for timeout in self._timeouts.values()]
        return TimeoutCount(len(times), min(times, default=None), max(times, default=None))

    def _insert(self, timeout: Timeout) -> None:
        self._timeouts.setdefault(timeout.id, timeout)

    def _free(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._leases.pop(timeout_id, None)

    def _delete(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._timeouts.pop(timeout_id, None)
        self._free(ids)
