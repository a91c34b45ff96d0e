"""A transaction over everything in this process's memory: effects wait for the commit, then happen all at once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from delayline.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable

#: Every memory transport and store of a process can share a transaction.
DOMAIN: Final = "memory"


class MemoryTransaction(Transaction):
    """Collects effects; the commit runs them with nothing in between, a rollback runs the compensations."""

    def __init__(self) -> None:
        super().__init__(DOMAIN)
        self._effects: list[Callable[[], None]] = []
        self._compensations: list[Callable[[], None]] = []
        self.stored: set[str] = set()
        """Ids of delayed messages that are stored at the commit."""

    def on_commit(self, effect: Callable[[], None]) -> None:
        """Run `effect` at the commit; it must not fail."""
        self._effects.append(effect)

    def on_rollback(self, compensation: Callable[[], None]) -> None:
        """Run `compensation` when the transaction is rolled back; it must not fail."""
        self._compensations.append(compensation)

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Forget the effects collected inside, and compensate, when it is left with an exception."""
        effects, compensations = len(self._effects), len(self._compensations)
        with self._undoing_callbacks():
            try:
                yield
            except BaseException:
                del self._effects[effects:]
                undone = self._compensations[compensations:]
                del self._compensations[compensations:]
                for compensation in reversed(undone):
                    compensation()
                raise

    async def _commit(self) -> None:
        for effect in self._effects:
            effect()

    async def _rollback(self) -> None:
        for compensation in reversed(self._compensations):
            compensation()


def in_memory(transaction: Transaction) -> MemoryTransaction:
    """Return `transaction` as a memory transaction; raises TypeError for a transaction of another technology."""
    if not isinstance(transaction, MemoryTransaction):
        raise TypeError(f"a {type(transaction).__name__} cannot span this process's memory")
    return transaction


class InMemory:
    """What a store or persister in memory says of its transactions."""

    @property
    def transaction_domain(self) -> Hashable:
        """The process's memory."""
        return DOMAIN

    @property
    def locks_rows(self) -> bool:
        """True: a transaction locks only what it has fetched."""
        return True

    def transaction(self) -> MemoryTransaction:
        """Return a transaction that memory transports can join."""
        return MemoryTransaction()
