"""The schedules of the store in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from delayline.memory.transaction import in_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.delayed.schedules import Schedule
    from delayline.memory.transaction import MemoryTransaction
    from delayline.transaction import Transaction


class MemoryScheduleRows:
    """Schedules in memory; a transaction that has read any keeps others from all of them until it ends."""

    def __init__(self) -> None:
        self._schedules: dict[str, Schedule] = {}
        self._lock = asyncio.Lock()
        self._owner: MemoryTransaction | None = None
        #: The changes of the owner, which its commit makes.
        self._changes: dict[str, Schedule | None] = {}

    async def exist(self) -> bool:
        """Return True."""
        return True

    def require(self) -> None:
        """Do nothing."""

    async def all(self) -> Sequence[Schedule]:
        """Return the schedules by name."""
        return [self._schedules[name] for name in sorted(self._schedules)]

    async def locked(self, name: str, transaction: Transaction) -> Schedule | None:
        """Return the schedule with that name, locked until the transaction ends."""
        owner = in_memory(transaction)
        if self._owner is not owner:
            await self._lock.acquire()
            self._owner, self._changes = owner, {}
            owner.on_commit(self._commit)
            owner.after_end(self._unlock)
        return self._changes[name] if name in self._changes else self._schedules.get(name)

    async def insert(self, schedule: Schedule, transaction: Transaction) -> bool:
        """Keep a new schedule."""
        if await self.locked(schedule.name, transaction) is not None:
            return False
        self._changes[schedule.name] = schedule
        return True

    async def update(self, schedule: Schedule, transaction: Transaction) -> None:
        """Replace a schedule."""
        await self.locked(schedule.name, transaction)
        self._changes[schedule.name] = schedule

    async def delete(self, name: str, transaction: Transaction) -> None:
        """Delete a schedule."""
        await self.locked(name, transaction)
        self._changes[name] = None

    def _commit(self) -> None:
        for name, schedule in self._changes.items():
            if schedule is None:
                self._schedules.pop(name, None)
            else:
                self._schedules[name] = schedule

    def _unlock(self) -> None:
        self._owner, self._changes = None, {}
        self._lock.release()
