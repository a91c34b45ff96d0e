from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import pytest

from delayline import Guarantee, TransactionMode, guarantee
from delayline.errors import UnsupportedTransactionMode
from delayline.spi import Transaction
from delayline.transaction import share_transactions, strongest_mode

if TYPE_CHECKING:
    from collections.abc import Hashable

NONE, RECEIVE_ONLY, ATOMIC, SCOPE = TransactionMode
ONCE, AT_LEAST, AT_MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE


@dataclass(frozen=True)
class Participant:
    transaction_domain: Hashable | None


@dataclass(frozen=True)
class Queues(Participant):
    highest_transaction_mode: TransactionMode = SCOPE


SAME, OTHER, LONELY = Participant("db"), Participant("other"), Participant(None)


@pytest.mark.parametrize(
    ("delivery", "mode", "promise"),
    [
        (SAME, NONE, AT_MOST),
        (SAME, RECEIVE_ONLY, AT_LEAST),
        (SAME, ATOMIC, AT_LEAST),
        (SAME, SCOPE, ONCE),
        (None, NONE, AT_MOST),
        (None, RECEIVE_ONLY, AT_LEAST),
        (None, ATOMIC, AT_LEAST),
        (None, SCOPE, ONCE),
        *[(lone, NONE, Guarantee.BEST_EFFORT) for lone in (OTHER, LONELY)],
        *[(lone, mode, AT_LEAST) for lone in (OTHER, LONELY) for mode in (RECEIVE_ONLY, ATOMIC)],
    ],
)
def test_the_guarantee_of_a_pair(delivery: Participant | None, mode: TransactionMode, promise: Guarantee) -> None:
    assert guarantee(Queues("db"), delivery, mode) is promise


@pytest.mark.parametrize(("queues", "delivery"), [("db", OTHER), ("db", LONELY), (None, LONELY), (None, SAME)])
def test_a_scope_over_two_databases_is_refused_with_the_remedy(queues: str | None, delivery: Participant) -> None:
    with pytest.raises(UnsupportedTransactionMode, match="Keep both in the same database") as caught:
        guarantee(Queues(queues), delivery, SCOPE)
    assert str(delivery.transaction_domain) in str(caught.value)
    assert "transaction_mode=TransactionMode.SENDS_ATOMIC_WITH_RECEIVE" in str(caught.value)


@pytest.mark.parametrize(
    ("highest", "mode"), [(high, mode) for high, mode in product(TransactionMode, repeat=2) if mode > high]
)
def test_a_mode_beyond_the_transport_is_refused_with_the_remedy(
    highest: TransactionMode, mode: TransactionMode
) -> None:
    with pytest.raises(UnsupportedTransactionMode, match=f"Use transaction_mode=TransactionMode.{highest.name}"):
        guarantee(Queues("db", highest), SAME, mode)


@pytest.mark.parametrize("highest", TransactionMode)
def test_the_strongest_mode_of_a_pair_is_never_refused(highest: TransactionMode) -> None:
    for delivery in (None, SAME, OTHER, LONELY):
        mode = strongest_mode(Queues("db", highest), delivery)
        assert mode is min(highest, ATOMIC if delivery in (OTHER, LONELY) else SCOPE)
        guarantee(Queues("db", highest), delivery, mode)


def test_parts_without_a_domain_share_nothing() -> None:
    assert not share_transactions(LONELY, LONELY)
    assert share_transactions(SAME, Participant("db"))


class Journal(Transaction):
    def __init__(self, *, commit: Exception | None = None) -> None:
        super().__init__("journal")
        self.events: list[str] = []
        self._error = commit
        self.after_commit(lambda: self.events.append("after"))

    async def _commit(self) -> None:
        if self._error is not None:
            raise self._error
        self.events.append("commit")

    async def _rollback(self) -> None:
        self.events.append("rollback")


async def test_callbacks_run_after_the_commit() -> None:
    async with Journal() as transaction:
        assert transaction.events == []
    assert transaction.events == ["commit", "after"]


async def test_a_rollback_runs_no_callbacks() -> None:
    transaction = Journal()
    with pytest.raises(LookupError):
        async with transaction:
            raise LookupError
    assert transaction.events == ["rollback"]


async def test_a_failed_commit_runs_no_callbacks() -> None:
    transaction = Journal(commit=OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        async with transaction:
            pass
    assert "after" not in transaction.events


async def test_a_technology_supplies_commit_and_rollback() -> None:
    bare = Transaction("bare")
    with pytest.raises(NotImplementedError):
        await bare._commit()
    with pytest.raises(NotImplementedError):
        await bare._rollback()
