"""The six verbs: order, locks, counts, and answers that are exact."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.delayed.store import SupportsSetup, SupportsTransactions
from delayline.errors import UnsupportedTransactionMode
from delayline.testing.conformance.messages import AT, ENDPOINT, delayed, same
from delayline.testing.conformance.store_fixtures import StoreFixtures, closed, opened
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from pathlib import Path

    from delayline.delayed.store import DelayedMessageStore

LATER = AT + timedelta(days=1)


class StoreVerbs(StoreFixtures):
    """Tests of the six required methods of stores."""

    async def test_a_stored_message_is_fetched_once_due(self, store: DelayedMessageStore) -> None:
        """Store, then fetch: the message comes back unchanged."""
        await store.store(delayed())
        same(await store.fetch_next_due(AT), delayed())

    async def test_an_empty_store_has_nothing_due(self, store: DelayedMessageStore) -> None:
        """Nothing stored: nothing fetched, no next due time."""
        assert await store.fetch_next_due(LATER) is None
        assert await store.next_due() is None

    async def test_a_message_due_after_at_is_not_fetched(self, store: DelayedMessageStore) -> None:
        """One microsecond too early is early; the very instant is due."""
        await store.store(delayed(due=AT + self.step))
        assert await store.fetch_next_due(AT) is None
        same(await store.fetch_next_due(AT + self.step), delayed(due=AT + self.step))

    async def test_messages_are_fetched_by_due_time(self, store: DelayedMessageStore) -> None:
        """The earliest due comes first, down to the microsecond, whatever the order of storing."""
        offsets = [5, 3, 9, 1, 7, 0, 8, 2, 6, 4]
        for offset in offsets:
            await store.store(delayed(f"m{offset}", AT + offset * self.step))
        fetched = [await store.fetch_next_due(LATER) for _ in offsets]
        assert [message.id for message in fetched if message] == [f"m{offset}" for offset in range(10)]

    async def test_messages_due_together_are_fetched_as_stored(self, store: DelayedMessageStore) -> None:
        """Ties keep the order of storing, not that of the ids."""
        if not self.keeps_order:
            pytest.skip("not claimed: ties in the order of storing")
        ids = ["m5", "m9", "m1", "M3", "m10", "a", "z", "m2"]
        for message_id in ids:
            await store.store(delayed(message_id))
        fetched = [await store.fetch_next_due(AT) for _ in ids]
        assert [message.id for message in fetched if message] == ids

    async def test_a_fetched_message_is_locked(self, store: DelayedMessageStore) -> None:
        """A fetched message is skipped by other fetches, which return the next one."""
        await store.store(delayed("first"))
        await store.store(delayed("second", AT + self.step))
        same(await store.fetch_next_due(LATER), delayed("first"))
        same(await store.fetch_next_due(LATER), delayed("second", AT + self.step))
        assert await store.fetch_next_due(LATER) is None

    async def test_competing_fetches_never_share_a_message(self, store: DelayedMessageStore) -> None:
        """Concurrent fetches get different messages, and every message is got."""
        ids = {f"m{number}" for number in range(20)}
        for message_id in ids:
            await store.store(delayed(message_id))
        fetched = await asyncio.gather(*(store.fetch_next_due(AT) for _ in range(25)))
        found = [message.id for message in fetched if message is not None]
        assert len(found) == len(set(found)), "a message was fetched twice"
        while (message := await store.fetch_next_due(AT)) is not None:
            found.append(message.id)  # a competitor may have come away with nothing
        assert sorted(found) == sorted(ids)

    async def test_next_due_is_the_earliest_of_all(self, store: DelayedMessageStore) -> None:
        """Past or future, the earliest due time is the next one."""
        await store.store(delayed("later", LATER))
        assert await store.next_due() == LATER
        await store.store(delayed("past", AT - timedelta(days=9)))
        await store.store(delayed("now", AT))
        assert await store.next_due() == AT - timedelta(days=9)

    async def test_next_due_counts_locked_messages(self, store: DelayedMessageStore) -> None:
        """A locked message still waits: its holder may die, and another poller must look again soon."""
        await store.store(delayed())
        await store.store(delayed("later", LATER))
        await store.fetch_next_due(AT)
        assert await store.next_due() == AT

    async def test_remove_is_true_once(self, store: DelayedMessageStore) -> None:
        """The first remove deletes, the second finds nothing."""
        await store.store(delayed())
        message = await store.fetch_next_due(AT)
        assert message is not None
        assert await store.remove(message) is True
        assert await store.remove(message) is False
        assert await store.next_due() is None

    async def test_remove_takes_that_message_only(self, store: DelayedMessageStore) -> None:
        """Its neighbours stay."""
        await store.store(delayed("first"))
        await store.store(delayed("second"))
        await store.fetch_next_due(AT)
        assert await store.remove(delayed("first")) is True
        same(await store.fetch_next_due(AT), delayed("second"))

    async def test_competing_removes_have_one_winner(self, store: DelayedMessageStore) -> None:
        """Of concurrent removes of one message exactly one is true."""
        await store.store(delayed())
        message = await store.fetch_next_due(AT)
        assert message is not None
        answers = await asyncio.gather(*(store.remove(message) for _ in range(8)))
        assert sorted(answers) == [False] * 7 + [True]

    async def test_counting_a_failure_unlocks(self, store: DelayedMessageStore) -> None:
        """A failed message is fetched again, its count one higher each time, nothing else changed."""
        await store.store(delayed())
        for failures in range(4):
            message = await store.fetch_next_due(AT)
            same(message, replace(delayed(), number_of_retries=failures))
            assert message is not None
            assert await store.increment_failure_count(message) is True

    async def test_counting_a_failure_of_a_message_that_is_gone(self, store: DelayedMessageStore) -> None:
        """False, and it does not come back."""
        await store.store(delayed())
        message = await store.fetch_next_due(AT)
        assert message is not None
        await store.remove(message)
        assert await store.increment_failure_count(message) is False
        assert await store.next_due() is None

    async def test_a_duplicate_id_changes_nothing(self, store: DelayedMessageStore) -> None:
        """Storing an id that waits succeeds: the first one stays as it is."""
        await store.store(delayed())
        await store.store(delayed(due=LATER, destination="elsewhere", body=b"other"))
        same(await store.fetch_next_due(LATER), delayed())
        assert await store.fetch_next_due(LATER) is None
        assert await store.remove(delayed()) is True
        assert await store.next_due() is None

    async def test_a_duplicate_id_does_not_unlock(self, store: DelayedMessageStore) -> None:
        """A message being dispatched is not dispatched again because its sender repeats itself."""
        await store.store(delayed())
        await store.fetch_next_due(AT)
        await store.store(delayed())
        assert await store.fetch_next_due(AT) is None

    async def test_an_id_can_be_used_again_when_its_message_is_gone(self, store: DelayedMessageStore) -> None:
        """Ids are unique among pending messages only."""
        await store.store(delayed())
        await store.remove(delayed())
        await store.store(delayed(due=LATER, body=b"again"))
        same(await store.fetch_next_due(LATER), delayed(due=LATER, body=b"again"))

    async def test_concurrent_stores_of_one_id_keep_one(self, store: DelayedMessageStore) -> None:
        """All succeed, one is kept."""
        await asyncio.gather(*(store.store(delayed()) for _ in range(8)))
        assert await store.remove(delayed()) is True
        assert await store.next_due() is None

    async def test_setup_may_run_again(self, tmp_path: Path, store: DelayedMessageStore) -> None:
        """Set up twice, one after the other and at once, and nothing stored is lost."""
        if not isinstance(store, SupportsSetup):
            pytest.skip("not claimed: SupportsSetup")
        await store.store(delayed())
        await store.setup_infrastructure(ENDPOINT)
        await asyncio.gather(*(store.setup_infrastructure(ENDPOINT) for _ in range(4)))
        same(await store.fetch_next_due(AT), delayed())

    @pytest.mark.parametrize("mode", list(TransactionMode))
    async def test_a_mode_works_or_is_refused(self, tmp_path: Path, mode: TransactionMode) -> None:
        """Initialize accepts a mode and the store works, or raises UnsupportedTransactionMode."""
        store = await self.make_store(tmp_path)
        if isinstance(store, SupportsSetup):
            await store.setup_infrastructure(ENDPOINT)
        try:
            await store.initialize(ENDPOINT, mode)
        except UnsupportedTransactionMode:
            assert mode > TransactionMode.NONE, "the weakest mode asks nothing of a store"
            if mode is not TransactionMode.TRANSACTION_SCOPE or isinstance(store, SupportsTransactions):
                raise
            pytest.skip(f"not claimed: {mode.name}")
        await store.store(delayed())
        same(await store.fetch_next_due(AT), delayed())
        await closed(store)

    async def test_messages_outlive_the_store_object(self, tmp_path: Path) -> None:
        """A new store over the same storage sees stored messages, with their failure counts."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        first = await opened(await self.make_store(tmp_path))
        await first.store(delayed())
        message = await first.fetch_next_due(AT)
        assert message is not None
        await first.increment_failure_count(message)
        await closed(first)
        second = await opened(await self.make_store(tmp_path))
        same(await second.fetch_next_due(AT), replace(delayed(), number_of_retries=1))
        await closed(second)

    async def test_a_lock_holds_for_other_store_objects(self, tmp_path: Path) -> None:
        """Another process gets neither the message nor a second removal of it."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        mine = await opened(await self.make_store(tmp_path))
        theirs = await opened(await self.make_store(tmp_path))
        await mine.store(delayed())
        fetched = await mine.fetch_next_due(AT)
        same(fetched, delayed())
        assert await theirs.fetch_next_due(AT) is None
        assert await theirs.next_due() == AT
        assert await mine.remove(delayed()) is True
        assert await theirs.remove(delayed()) is False
        await closed(theirs)
        await closed(mine)
