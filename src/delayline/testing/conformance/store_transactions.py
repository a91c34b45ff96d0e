"""Capability SupportsTransactions: all of a transaction happens, or nothing does.

Where a back end lets one writer in at a time, what another caller asks meanwhile may wait for the transaction's end:
so the tests ask in a task, and look at its answer afterwards.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.delayed.store import SupportsBatches
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import AT, PATIENCE, delayed, same
from delayline.testing.conformance.store_fixtures import StoreFixtures
from delayline.transaction import SupportsSavepoints

if TYPE_CHECKING:
    from delayline.testing.conformance.store_fixtures import TransactionalStore

LATER = AT + timedelta(days=1)
PLENTY = 1 << 40


class RolledBackError(Exception):
    """Raised by a test inside a transaction, to roll it back."""


class StoreTransactionality(StoreFixtures):
    """Commit and rollback."""

    async def test_a_commit_applies_everything(self, transactional: TransactionalStore) -> None:
        """Fetch, remove and store in one transaction."""
        store = transactional
        await store.store(delayed("old"))
        async with store.transaction() as transaction:
            fetched = await store.fetch_next_due(AT, transaction)
            same(fetched, delayed("old"))
            assert await store.remove(delayed("old"), transaction) is True
            await store.store(delayed("new", LATER), transaction)
        assert await store.next_due() == LATER
        same(await store.fetch_next_due(LATER), delayed("new", LATER))
        assert await store.fetch_next_due(LATER) is None

    async def test_a_rollback_leaves_all_as_before(self, transactional: TransactionalStore) -> None:
        """Removed messages are back, stored ones are gone, fetched ones are unlocked and not counted."""
        store = transactional
        await store.store(delayed("old"))
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                same(await store.fetch_next_due(AT, transaction), delayed("old"))
                assert await store.remove(delayed("old"), transaction) is True
                await store.store(delayed("new"), transaction)
                raise RolledBackError
        same(await store.fetch_next_due(AT), delayed("old"))
        assert await store.fetch_next_due(LATER) is None

    async def test_a_cancelled_transaction_is_rolled_back(self, transactional: TransactionalStore) -> None:
        """Cancelling the task that holds it leaves no lock and no trace."""
        store, fetched = transactional, asyncio.Event()
        await store.store(delayed("old"))

        async def hold() -> None:
            async with store.transaction() as transaction:
                await store.fetch_next_due(AT, transaction)
                await store.store(delayed("new"), transaction)
                fetched.set()
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        await fetched.wait()
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        same(await store.fetch_next_due(AT), delayed("old"))
        assert await store.fetch_next_due(AT) is None

    async def test_a_message_fetched_in_a_transaction_is_locked(self, transactional: TransactionalStore) -> None:
        """Until the transaction ends no other fetch returns the message; after its removal none ever does."""
        store = transactional
        await store.store(delayed())
        async with store.transaction() as transaction:
            fetched = await store.fetch_next_due(AT, transaction)
            other = asyncio.create_task(store.fetch_next_due(AT))
            await settle()
            assert fetched is not None
            await store.remove(fetched, transaction)
        assert await other is None

    async def test_a_lock_without_a_transaction_holds_for_transactions(self, transactional: TransactionalStore) -> None:
        """Pollers that use transactions and pollers that do not can work on one store."""
        store = transactional
        await store.store(delayed())
        fetched = await store.fetch_next_due(AT)
        assert fetched is not None
        async with store.transaction() as transaction:
            assert await store.fetch_next_due(AT, transaction) is None
        assert await store.increment_failure_count(fetched) is True
        async with store.transaction() as transaction:
            assert await store.fetch_next_due(AT, transaction) is not None

    async def test_an_uncommitted_store_is_not_seen(self, transactional: TransactionalStore) -> None:
        """Nor is one that is rolled back, ever."""
        store = transactional
        other: asyncio.Task[object]
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                await store.store(delayed(), transaction)
                other = asyncio.create_task(store.fetch_next_due(AT))
                await settle()
                raise RolledBackError
        assert await other is None
        assert await store.next_due() is None

    async def test_a_fetch_committed_without_a_remove_unlocks(self, transactional: TransactionalStore) -> None:
        """The lock ends with the transaction, however it ends."""
        store = transactional
        await store.store(delayed())
        async with store.transaction() as transaction:
            same(await store.fetch_next_due(AT, transaction), delayed())
        same(await store.fetch_next_due(AT), delayed())

    async def test_a_remove_in_a_transaction_answers_at_once(self, transactional: TransactionalStore) -> None:
        """False for a missing message: the caller rolls back instead of sending twice."""
        store = transactional
        async with store.transaction() as transaction:
            assert await store.remove(delayed(), transaction) is False

    async def test_a_duplicate_in_a_transaction_does_not_spoil_it(self, transactional: TransactionalStore) -> None:
        """The rest of the transaction still commits."""
        store = transactional
        await store.store(delayed("old"))
        async with store.transaction() as transaction:
            await store.store(delayed("old", LATER), transaction)
            await store.store(delayed("new"), transaction)
        for message_id in self.in_order(["old", "new"]):
            same(await store.fetch_next_due(AT), delayed(message_id))

    async def test_a_failure_is_counted_after_a_rollback(self, transactional: TransactionalStore) -> None:
        """The poller's way: roll back, then count, durably."""
        store = transactional
        await store.store(delayed())
        fetched = None
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                fetched = await store.fetch_next_due(AT, transaction)
                raise RolledBackError
        assert fetched is not None
        assert await store.increment_failure_count(fetched) is True
        again = await store.fetch_next_due(AT)
        assert again is not None
        assert again.number_of_retries == 1

    async def test_failures_are_counted_in_a_transaction(self, transactional: TransactionalStore) -> None:
        """At its commit, with the new due time; after a rollback they are as they were."""
        store = transactional
        if not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsBatches")
        await store.store_many([delayed("a"), delayed("b")])
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                fetched = await store.fetch_due(AT, 10, max_bytes=PLENTY, transaction=transaction)
                assert await store.retry_many(fetched, LATER, transaction) == 2
                raise RolledBackError
        async with store.transaction() as transaction:
            fetched = await store.fetch_due(AT, 10, max_bytes=PLENTY, transaction=transaction)
            assert [(message.id, message.number_of_retries) for message in fetched] == [("a", 0), ("b", 0)]
            assert await store.retry_many(fetched[:1], LATER, transaction) == 1
            assert await store.remove_many(fetched[1:], transaction) == 1
        assert await store.next_due() == LATER
        again = await store.fetch_due(LATER, 10, max_bytes=PLENTY)
        assert [(message.id, message.number_of_retries) for message in again] == [("a", 1)]

    async def test_a_savepoint_undoes_a_part_and_the_rest_goes_on(self, transactional: TransactionalStore) -> None:
        """Work inside it is undone, with callbacks for the commit; callbacks for the end run at once."""
        store, called = transactional, list[str]()
        await store.store(delayed("old"))
        async with store.transaction() as transaction:
            if not isinstance(transaction, SupportsSavepoints):
                pytest.skip("not claimed: SupportsSavepoints")
            await store.store(delayed("before", LATER), transaction)
            with pytest.raises(RolledBackError):
                async with transaction.savepoint():
                    same(await store.fetch_next_due(AT, transaction), delayed("old"))
                    await store.remove(delayed("old"), transaction)
                    await store.store(delayed("inside"), transaction)
                    transaction.after_commit(lambda: called.append("committed"))
                    transaction.after_end(lambda: called.append("ended"))
                    raise RolledBackError
            assert called == ["ended"]
            async with transaction.savepoint():
                await store.store(delayed("after", LATER), transaction)
                transaction.after_commit(lambda: called.append("told"))
        assert called == ["ended", "told"]
        found = [await store.fetch_next_due(LATER) for _ in range(4)]
        assert [message.id for message in found if message] == ["old", *self.in_order(["before", "after"])]

    async def test_others_go_on_beside_a_transaction_that_locks_rows(self, transactional: TransactionalStore) -> None:
        """Others store, fetch unlocked messages, count and remove, without waiting for the transaction's end."""
        store = transactional
        if not store.locks_rows:
            pytest.skip("not claimed: locks_rows")
        await store.store(delayed("mine"))
        await store.store(delayed("theirs"))
        async with store.transaction() as transaction:
            mine = await store.fetch_next_due(AT, transaction)
            same(mine, delayed("mine"))
            assert mine is not None
            async with asyncio.timeout(PATIENCE):
                theirs = await store.fetch_next_due(AT)
                same(theirs, delayed("theirs"))
                assert theirs is not None
                assert await store.fetch_next_due(AT) is None
                assert await store.next_due() == AT
                assert await store.increment_failure_count(theirs) is True
                await store.store(delayed("new", LATER))
                async with store.transaction() as other:
                    assert await store.remove(delayed("theirs"), other) is True
            assert await store.remove(mine, transaction) is True
        assert await store.next_due() == LATER

    async def test_after_commit_runs_after_the_commit(self, transactional: TransactionalStore) -> None:
        """Never before it, once, and not at all after a rollback."""
        store = transactional
        called: list[str] = []
        async with store.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await store.store(delayed(), transaction)
            assert called == []
        assert called == ["committed"]
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                transaction.after_commit(lambda: called.append("rolled back"))
                raise RolledBackError
        assert called == ["committed"]

    async def test_an_empty_transaction_is_fine(self, transactional: TransactionalStore) -> None:
        """Entered and left, with nothing in it."""
        async with transactional.transaction():
            pass
        with pytest.raises(RolledBackError):
            async with transactional.transaction():
                raise RolledBackError
        assert await transactional.next_due() is None

    async def test_batches_in_a_transaction(self, transactional: TransactionalStore) -> None:
        """Fetch, remove and store many: rolled back, then committed."""
        store = transactional
        if not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsBatches")
        await store.store_many([delayed(f"m{number}") for number in range(10)])
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                fetched = await store.fetch_due(AT, 10, max_bytes=PLENTY, transaction=transaction)
                assert await store.remove_many(fetched, transaction) == 10
                await store.store_many([delayed("new")], transaction)
                raise RolledBackError
        async with store.transaction() as transaction:
            fetched = await store.fetch_due(AT, 4, max_bytes=PLENTY, transaction=transaction)
            assert [message.id for message in fetched] == ["m0", "m1", "m2", "m3"]
            assert await store.remove_many(fetched, transaction) == 4
        left = await store.fetch_due(AT, 100, max_bytes=PLENTY)
        assert [message.id for message in left] == [f"m{number}" for number in range(4, 10)]
