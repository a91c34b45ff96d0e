"""Which transaction a batch moves in: one with the transport, one of the store's own, or none."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayline.delayed.store import SupportsBatches, SupportsTransactions
from delayline.errors import BackendUnavailable
from delayline.transaction import SupportsSavepoints, share_transactions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
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
    scope = scope_of(store, transport)
    return scope if scope.shared or isinstance(store, SupportsBatches) else Scope(None, shared=False)


def scope_of(storage: object, transport: Transport) -> Scope:
    """Return the strongest scope that transactions of the storage, where it has some, can give."""
    if isinstance(storage, SupportsTransactions):
        if share_transactions(storage, transport):
            return Scope(storage.transaction, shared=True)
        if storage.locks_rows:
            return Scope(storage.transaction, shared=False)
    return Scope(None, shared=False)


class SavepointLost(Exception):
    """A savepoint could not be set, undone or released: nobody knows what its transaction holds."""


def savepoint(transaction: Transaction | None) -> AbstractAsyncContextManager[None]:
    """Return a savepoint of the transaction, where there is one and it has them; raises SavepointLost."""
    return _checked(transaction) if isinstance(transaction, SupportsSavepoints) else contextlib.nullcontext()


@contextlib.asynccontextmanager
async def _checked(transaction: SupportsSavepoints) -> AsyncIterator[None]:
    """Tell an error of the savepoint's own, after which nothing is certain, from one that it has undone."""
    inside: list[Exception] = []
    try:
        async with transaction.savepoint():
            try:
                yield
            except Exception as error:
                inside.append(error)
                raise
    except Exception as error:
        if error in inside or isinstance(error, BackendUnavailable):
            raise
        outage = next((one for one in inside if isinstance(one, BackendUnavailable)), None)
        raise outage or SavepointLost(f"a part of the transaction could not be undone: {error}") from error


def spoilt(transaction: Transaction | None, error: Exception) -> bool:
    """Tell whether the transaction cannot go on after `error` left a savepoint of it."""
    if transaction is None:
        return False
    return isinstance(error, BackendUnavailable | SavepointLost) or not isinstance(transaction, SupportsSavepoints)
