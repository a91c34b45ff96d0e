"""Which transaction a batch moves in: one with the transport, one of the store's own, or none."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayline.delayed.store import BatchStore, StoreTransactions
from delayline.errors import BackendUnavailable
from delayline.transaction import Savepoints, share_transactions

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from delayline.delayed.store import DelayedMessageStore
    from delayline.transaction import Transaction
    from delayline.transport import Transport


@dataclass(frozen=True, slots=True)
class Scope:
    """What holds a batch from its fetch to its removal."""

    begin: Callable[[], Transaction] | None
    """Returns the transaction that does; None where the store's locks without a transaction do."""
    shared: bool
    """Whether the messages are dispatched in that transaction too."""

    def open(self) -> AbstractAsyncContextManager[Transaction | None]:
        """Return the transaction for one batch, to be entered."""
        return contextlib.nullcontext() if self.begin is None else self.begin()

    def of_dispatch(self, transaction: Transaction | None) -> Transaction | None:
        """Return what the messages of a batch in `transaction` are dispatched in."""
        return transaction if self.shared else None


def scope_between(store: DelayedMessageStore, transport: Transport) -> Scope:
    """Return the strongest scope that store and transport can have together (seeds 000, Consistency).

    Six verbs have no way to count a failure in a transaction: such a store's own are left alone.
    """
    if isinstance(store, StoreTransactions):
        if share_transactions(store, transport):
            return Scope(store.transaction, shared=True)
        if store.locks_rows and isinstance(store, BatchStore):
            return Scope(store.transaction, shared=False)
    return Scope(None, shared=False)


def savepoint(transaction: Transaction | None) -> AbstractAsyncContextManager[None]:
    """Return a savepoint of the transaction, where there is one and it has them."""
    return transaction.savepoint() if isinstance(transaction, Savepoints) else contextlib.nullcontext()


def spoilt(transaction: Transaction | None, error: Exception) -> bool:
    """Tell whether the transaction cannot go on after `error` left a savepoint of it."""
    if transaction is None:
        return False
    return isinstance(error, BackendUnavailable) or not isinstance(transaction, Savepoints)
