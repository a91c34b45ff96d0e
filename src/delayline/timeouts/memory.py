"""The reference timeout persister: every capability, in this process's memory, gone with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.memory.transaction import DOMAIN, MemoryTransaction, in_memory
from delayline.timeouts.persister import DueTimeout, LockedTimeouts, TimeoutCount, TimeoutsChunk

if TYPE_CHECKING:
    import uuid
    from collections.abc import Hashable, Sequence
    from datetime import datetime

    from delayline.timeouts.persister import Timeout
    from delayline.transaction import Transaction


class MemoryTimeoutPersister:
    """Keeps timeouts in memory: for tests, tutorials and messages that may die with the process."""

    def __init__(self) -> None:
        self._timeouts: dict[str, Timeout] = {}
        self._holds: dict[str, datetime] = {}
        self._locked: set[str] = set()

    @property
    def transaction_domain(self) -> Hashable:
        """The process's memory."""
        return DOMAIN

    @property
    def locks_rows(self) -> bool:
        """True: a transaction locks only what it has looked at."""
        return True

    def transaction(self) -> MemoryTransaction:
        """Return a transaction that memory transports can join."""
        return MemoryTransaction()

    async def add(self, timeout: Timeout, transaction: Transaction | None = None) -> None:
        """Keep the timeout."""
        if transaction is None:
            self._insert(timeout)
        else:
            in_memory(transaction).on_commit(lambda: self._insert(timeout))

    async def peek(self, timeout_id: str, transaction: Transaction | None = None) -> Timeout | None:
        """Return the timeout; one that another transaction has is gone."""
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
        there = timeout_id in self._timeouts
        if transaction is None:
            self._delete([timeout_id])
        else:
            in_memory(transaction).on_commit(lambda: self._delete([timeout_id]))
        return there

    async def remove_by_saga(self, saga_id: uuid.UUID, transaction: Transaction | None = None) -> int:
        """Delete the saga's timeouts."""
        ids = [timeout.id for timeout in self._timeouts.values() if timeout.saga_id == saga_id]
        if transaction is None:
            self._delete(ids)
        else:
            in_memory(transaction).on_commit(lambda: self._delete(ids))
        return len(ids)

    async def next_chunk(
        self, at: datetime, limit: int, *, hold_until: datetime, transaction: Transaction | None = None
    ) -> TimeoutsChunk:
        """Hold what is due and free."""
        self._holds = {held: until for held, until in self._holds.items() if until > at}
        free = sorted((timeout.due, timeout.id) for timeout in self._timeouts.values() if timeout.id not in self._holds)
        due = [DueTimeout(timeout_id, when) for when, timeout_id in free[:limit] if when <= at]
        ids = [one.id for one in due]
        if transaction is not None:
            in_memory(transaction).on_rollback(lambda: self._free(ids))
        self._holds |= dict.fromkeys(ids, hold_until)
        times = [*self._holds.values(), *(when for when, _ in free[len(due) :])]
        return TimeoutsChunk(due, min(times, default=None))

    async def lock_due(self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction) -> LockedTimeouts:
        """Lock what is due and free; what another transaction has is passed over."""
        self._holds = {held: until for held, until in self._holds.items() if until > at}
        free = sorted((one.due, one.id) for one in self._timeouts.values() if one.id not in self._holds)
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
        times = [*self._holds.values(), *(when for when, timeout_id in free if timeout_id not in ids)]
        return LockedTimeouts(due, min(times, default=None))

    async def remove_many(self, ids: Sequence[str], transaction: Transaction) -> int:
        """Delete timeouts that are locked."""
        in_memory(transaction).on_commit(lambda: self._delete(ids))
        return sum(timeout_id in self._timeouts for timeout_id in ids)

    async def set_aside(self, ids: Sequence[str], until: datetime, transaction: Transaction) -> None:
        """Hold timeouts that are locked."""
        held = dict.fromkeys(ids, until)
        in_memory(transaction).on_commit(lambda: self._holds.update(held))

    async def hold(self, ids: Sequence[str], until: datetime) -> None:
        """Hold until then what is held."""
        self._holds |= {timeout_id: until for timeout_id in ids if timeout_id in self._holds}

    async def count(self) -> TimeoutCount:
        """Return how many timeouts wait."""
        times = [timeout.due for timeout in self._timeouts.values()]
        return TimeoutCount(len(times), min(times, default=None), max(times, default=None))

    def _insert(self, timeout: Timeout) -> None:
        self._timeouts.setdefault(timeout.id, timeout)

    def _free(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._holds.pop(timeout_id, None)

    def _delete(self, ids: Sequence[str]) -> None:
        for timeout_id in ids:
            self._timeouts.pop(timeout_id, None)
        self._free(ids)
