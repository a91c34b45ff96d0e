"""Capability SupportsBatches: many messages in one round trip."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from delayline.testing.conformance.messages import AT, AWKWARD_HEADERS, delayed, same
from delayline.testing.conformance.store_fixtures import StoreFixtures

if TYPE_CHECKING:
    from delayline.testing.conformance.store_fixtures import BatchingStore

PLENTY = 1 << 40
LATER = AT + timedelta(days=1)


class StoreBatches(StoreFixtures):
    """Batches are the single verbs, faster."""

    async def test_a_batch_comes_back_in_order(self, batches: BatchingStore) -> None:
        """By due time, ties in the order stored, content untouched."""
        messages = [
            delayed(f"m{n}", AT + (n % 3) * self.step, headers=AWKWARD_HEADERS, body=bytes([n])) for n in range(9)
        ]
        await batches.store_many(messages)
        fetched = await batches.fetch_due(LATER, 100, max_bytes=PLENTY)
        expected = sorted(messages, key=lambda message: message.due)
        assert [message.id for message in fetched] == [message.id for message in expected]
        for found, message in zip(fetched, expected, strict=True):
            same(found, message)

    async def test_an_empty_batch_is_nothing(self, batches: BatchingStore) -> None:
        """No messages, no work, no error."""
        await batches.store_many([])
        assert await batches.remove_many([]) == 0
        assert await batches.retry_many([], LATER) == 0
        await batches.release_many([])
        assert list(await batches.fetch_due(LATER, 10, max_bytes=PLENTY)) == []

    async def test_a_large_batch(self, batches: BatchingStore) -> None:
        """More rows than one statement may have parameters."""
        messages = [delayed(f"m{number:04}") for number in range(self.large_batch)]
        await batches.store_many(messages)
        fetched = await batches.fetch_due(AT, self.large_batch, max_bytes=PLENTY)
        assert [message.id for message in fetched] == [message.id for message in messages]
        assert await batches.remove_many(fetched) == self.large_batch
        assert await batches.next_due() is None

    async def test_the_limit_holds(self, batches: BatchingStore) -> None:
        """At most `limit`, the earliest, and the rest stays unlocked."""
        await batches.store_many([delayed(f"m{number}") for number in range(5)])
        first = await batches.fetch_due(AT, 3, max_bytes=PLENTY)
        second = await batches.fetch_due(AT, 3, max_bytes=PLENTY)
        assert [message.id for message in (*first, *second)] == ["m0", "m1", "m2", "m3", "m4"]
        assert len(first) == 3

    async def test_nothing_due_after_at_is_in_a_batch(self, batches: BatchingStore) -> None:
        """The very instant is due, a microsecond later is not."""
        await batches.store_many([delayed("due", AT), delayed("not due", AT + self.step)])
        assert [message.id for message in await batches.fetch_due(AT, 10, max_bytes=PLENTY)] == ["due"]

    async def test_max_bytes_bounds_a_batch(self, batches: BatchingStore) -> None:
        """Three of 10 000 bytes fit into 35 000, a fourth does not, and is not locked."""
        messages = [delayed(f"m{number}", headers={}, body=b"x" * 10_000) for number in range(5)]
        await batches.store_many(messages)
        assert len(await batches.fetch_due(AT, 10, max_bytes=35_000)) == 3
        assert len(await batches.fetch_due(AT, 10, max_bytes=35_000)) == 2

    async def test_max_bytes_counts_headers(self, batches: BatchingStore) -> None:
        """Headers take memory as bodies do."""
        messages = [delayed(f"m{number}", headers={"h": "x" * 10_000}, body=b"") for number in range(3)]
        await batches.store_many(messages)
        assert len(await batches.fetch_due(AT, 10, max_bytes=25_000)) == 2

    async def test_one_message_larger_than_max_bytes_is_returned(self, batches: BatchingStore) -> None:
        """Alone: a large message must not wait for ever."""
        await batches.store_many([delayed("large", body=b"x" * min(100_000, self.largest_body)), delayed("small")])
        assert [message.id for message in await batches.fetch_due(AT, 10, max_bytes=1)] == ["large"]
        assert [message.id for message in await batches.fetch_due(AT, 10, max_bytes=1)] == ["small"]

    async def test_duplicates_in_a_batch_change_nothing(self, batches: BatchingStore) -> None:
        """Neither ids that wait already nor ids twice in the batch are an error."""
        await batches.store(delayed("old"))
        again = delayed("old", LATER, body=b"other")
        await batches.store_many([again, delayed("new"), delayed("new", LATER, body=b"other")])
        fetched = await batches.fetch_due(LATER, 10, max_bytes=PLENTY)
        assert [message.id for message in fetched] == self.in_order(["old", "new"])
        for found in fetched:
            same(found, delayed(found.id))

    async def test_remove_many_counts_what_was_there(self, batches: BatchingStore) -> None:
        """Those that were gone already are not counted."""
        await batches.store_many([delayed("a"), delayed("b"), delayed("c")])
        fetched = await batches.fetch_due(AT, 10, max_bytes=PLENTY)
        assert await batches.remove(delayed("b")) is True
        assert await batches.remove_many(fetched) == 2
        assert await batches.next_due() is None

    async def test_retry_many_counts_moves_and_unlocks(self, batches: BatchingStore) -> None:
        """The failed message waits inside the store, without delaying later ones."""
        await batches.store_many([delayed("bad"), delayed("good", AT + self.step), delayed("gone")])
        fetched = await batches.fetch_due(AT, 10, max_bytes=PLENTY)
        await batches.remove(delayed("gone"))
        again = AT + timedelta(seconds=10)
        assert await batches.retry_many(fetched, again) == 1
        assert await batches.next_due() == AT + self.step
        same(await batches.fetch_next_due(AT + self.step), delayed("good", AT + self.step))
        assert await batches.fetch_next_due(AT + self.step) is None
        same(await batches.fetch_next_due(again), replace(delayed("bad", again), number_of_retries=1))

    async def test_release_many_unlocks_uncounted(self, batches: BatchingStore) -> None:
        """Released messages are fetched again unchanged; releasing twice, or a removed message, is not an error."""
        await batches.store_many([delayed("a"), delayed("b")])
        fetched = await batches.fetch_due(AT, 10, max_bytes=PLENTY)
        await batches.remove(delayed("b"))
        await batches.release_many(fetched)
        await batches.release_many(fetched)
        same(await batches.fetch_next_due(AT), delayed("a"))
        assert await batches.fetch_next_due(AT) is None

    async def test_competing_batches_never_share_a_message(self, batches: BatchingStore) -> None:
        """Concurrent fetches get different messages."""
        await batches.store_many([delayed(f"m{number}") for number in range(50)])
        fetched = await asyncio.gather(*(batches.fetch_due(AT, 10, max_bytes=PLENTY) for _ in range(5)))
        ids = [message.id for batch in fetched for message in batch]
        assert len(ids) == len(set(ids))
        ids += [message.id for message in await batches.fetch_due(AT, 100, max_bytes=PLENTY)]
        assert sorted(ids) == sorted(f"m{number}" for number in range(50))
