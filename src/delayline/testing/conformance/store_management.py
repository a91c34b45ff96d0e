"""Capabilities SupportsManagement and SupportsNotifications."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.delayed.store import DueCount, Outcome, SupportsTransactions
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import AT, HOSTILE_NAMES, LOOKALIKES, PATIENCE, delayed, same
from delayline.testing.conformance.store_fixtures import StoreFixtures

if TYPE_CHECKING:
    from delayline.testing.conformance.store_fixtures import ManagedStore, NotifyingStore

HOUR = timedelta(hours=1)
LATER = AT + timedelta(days=1)


class StoreManagement(StoreFixtures):
    """Listing, cancelling and rescheduling pending messages."""

    async def test_a_cancelled_message_is_gone(self, managed: ManagedStore) -> None:
        """DONE once, then NOT_PENDING."""
        await managed.store(delayed())
        await managed.store(delayed("other"))
        assert await managed.cancel("m") is Outcome.DONE
        assert await managed.cancel("m") is Outcome.NOT_PENDING
        same(await managed.fetch_next_due(AT), delayed("other"))
        assert await managed.fetch_next_due(LATER) is None

    async def test_a_rescheduled_message_is_due_at_its_new_time_only(self, managed: ManagedStore) -> None:
        """Later and earlier, nothing else about it changes."""
        await managed.store(delayed())
        assert await managed.reschedule("m", LATER) is Outcome.DONE
        assert await managed.next_due() == LATER
        assert await managed.fetch_next_due(LATER - self.step) is None
        assert await managed.reschedule("m", AT - HOUR) is Outcome.DONE
        same(await managed.fetch_next_due(AT - HOUR), delayed(due=AT - HOUR))

    async def test_what_never_was_is_not_pending(self, managed: ManagedStore) -> None:
        """Unknown ids change nothing."""
        assert await managed.cancel("never") is Outcome.NOT_PENDING
        assert await managed.reschedule("never", LATER) is Outcome.NOT_PENDING
        assert await managed.next_due() is None

    async def test_a_fetched_message_is_dispatching(self, managed: ManagedStore) -> None:
        """Too late: the answer says so, and the message is its holder's."""
        await managed.store(delayed())
        fetched = await managed.fetch_next_due(AT)
        assert fetched is not None
        async with asyncio.timeout(PATIENCE):
            assert await managed.cancel("m") is Outcome.DISPATCHING
            assert await managed.reschedule("m", LATER) is Outcome.DISPATCHING
        assert await managed.remove(fetched) is True
        assert await managed.cancel("m") is Outcome.NOT_PENDING

    @pytest.mark.parametrize("verb", ["cancel", "reschedule"])
    async def test_a_message_that_leaves_meanwhile(self, managed: ManagedStore, verb: str) -> None:
        """In a race with a transaction that removes the message the answer is never DONE."""
        if not isinstance(managed, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        await managed.store(delayed())
        async with managed.transaction() as transaction:
            fetched = await managed.fetch_next_due(AT, transaction)
            assert fetched is not None
            answer = asyncio.create_task(managed.cancel("m") if verb == "cancel" else managed.reschedule("m", LATER))
            await settle()
            assert await managed.remove(fetched, transaction) is True
        async with asyncio.timeout(PATIENCE):
            assert await answer in {Outcome.DISPATCHING, Outcome.NOT_PENDING}
        assert await managed.next_due() is None

    async def test_an_answer_holds_whatever_the_race(self, managed: ManagedStore) -> None:
        """Of cancel and fetch at the same moment one has the message, never both, never neither."""
        for number in range(20):
            await managed.store(delayed(f"m{number}"))
            outcome, fetched = await asyncio.gather(managed.cancel(f"m{number}"), managed.fetch_next_due(AT))
            assert (outcome is Outcome.DONE) == (fetched is None), f"{outcome} and {fetched}"
            if fetched is not None:
                assert await managed.remove(fetched) is True

    async def test_a_failed_message_can_be_cancelled(self, managed: ManagedStore) -> None:
        """Unlocked by its failure it is pending again."""
        await managed.store(delayed())
        fetched = await managed.fetch_next_due(AT)
        assert fetched is not None
        await managed.increment_failure_count(fetched)
        assert await managed.cancel("m") is Outcome.DONE

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_names_are_managed(self, managed: ManagedStore, name: str) -> None:
        """Names are data here too."""
        await managed.store(delayed(name, destination=name))
        await managed.store(delayed("other"))
        assert [message.id for message in await managed.pending(destination=name)] == [name]
        assert await managed.reschedule(name, LATER) is Outcome.DONE
        assert await managed.cancel(name) is Outcome.DONE
        assert [message.id for message in await managed.pending()] == ["other"]

    @pytest.mark.parametrize(("one", "other"), LOOKALIKES)
    async def test_lookalike_destinations_are_different(self, managed: ManagedStore, one: str, other: str) -> None:
        """A destination is equal to itself alone."""
        await managed.store(delayed("1", destination=one))
        await managed.store(delayed("2", destination=other))
        assert [message.id for message in await managed.pending(destination=one)] == ["1"]
        assert sum(entry.count for entry in await managed.count_by_due(HOUR) if entry.destination == other) == 1

    async def test_pending_lists_by_due_time(self, managed: ManagedStore) -> None:
        """Earliest first, complete, one destination where asked, without locking."""
        for number in (3, 1, 2):
            destination = "billing" if number % 2 else "sales"
            await managed.store(delayed(f"m{number}", AT + number * self.step, destination=destination))
        found = await managed.pending()
        assert [message.id for message in found] == ["m1", "m2", "m3"]
        same(found[0], delayed("m1", AT + self.step))
        assert [message.id for message in await managed.pending(destination="billing")] == ["m1", "m3"]
        assert list(await managed.pending(destination="nowhere")) == []
        same(await managed.fetch_next_due(LATER), delayed("m1", AT + self.step))

    async def test_pending_shows_fetched_messages(self, managed: ManagedStore) -> None:
        """A message that is being dispatched is still pending."""
        await managed.store(delayed())
        await managed.fetch_next_due(AT)
        async with asyncio.timeout(PATIENCE):
            assert [message.id for message in await managed.pending()] == ["m"]

    async def test_pages_of_pending_are_complete(self, managed: ManagedStore) -> None:
        """Page by page every message is seen once, ties included."""
        for number in range(25):
            await managed.store(delayed(f"m{number:02}", AT + (number // 10) * self.step))
        pages = [await managed.pending(limit=10, offset=offset) for offset in (0, 10, 20, 30)]
        assert [len(page) for page in pages] == [10, 10, 5, 0]
        assert [message.id for page in pages for message in page] == [f"m{number:02}" for number in range(25)]

    async def test_counts_by_due_time(self, managed: ManagedStore) -> None:
        """Buckets are aligned to 1970, their start belongs to them, their end to the next; earliest first."""
        dues = {"a": AT, "b": AT + HOUR - self.step, "c": AT + HOUR, "d": AT - self.step}
        for message_id, due in dues.items():
            await managed.store(delayed(message_id, due))
        await managed.store(delayed("e", AT, destination="sales"))
        found = await managed.count_by_due(HOUR)
        assert [entry.start for entry in found] == sorted(entry.start for entry in found)
        assert sorted(found, key=lambda entry: (entry.start, entry.destination)) == [
            DueCount(AT - HOUR, "billing", 1),
            DueCount(AT, "billing", 2),
            DueCount(AT, "sales", 1),
            DueCount(AT + HOUR, "billing", 1),
        ]

    @pytest.mark.parametrize("bucket", [timedelta(seconds=1), timedelta(minutes=7), timedelta(days=1)])
    async def test_buckets_of_any_size(self, managed: ManagedStore, bucket: timedelta) -> None:
        """Every message is in the bucket that holds its due time, before 1970 and in the far future too."""
        epoch = datetime(1970, 1, 1, tzinfo=AT.tzinfo)
        dues = [epoch - self.step, epoch, AT + self.step, AT + timedelta(days=365 * 500)]
        for number, due in enumerate(dues):
            await managed.store(delayed(f"m{number}", due))
        found = await managed.count_by_due(bucket)
        assert [entry.start for entry in found] == [epoch + (due - epoch) // bucket * bucket for due in dues]

    async def test_an_empty_store_has_no_counts(self, managed: ManagedStore) -> None:
        """Nothing waits, nothing is listed."""
        assert list(await managed.count_by_due(HOUR)) == []
        assert list(await managed.pending()) == []


class StoreSignals(StoreFixtures):
    """Telling the poller that something was stored."""

    async def test_a_store_wakes(self, waking: NotifyingStore) -> None:
        """The callback gets the due time, once the message can be fetched."""
        woken, dues = asyncio.Event(), []

        def wake(due: datetime) -> None:
            dues.append(due)
            woken.set()

        stop = waking.on_stored(wake)
        await waking.store(delayed())
        async with asyncio.timeout(PATIENCE):
            await woken.wait()
        stop()
        assert min(dues) <= AT
        same(await waking.fetch_next_due(AT), delayed())

    async def test_a_transaction_wakes_after_its_commit(self, waking: NotifyingStore) -> None:
        """Not before: the poller would look, find nothing and sleep."""
        if not isinstance(waking, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        woken, message = asyncio.Event(), delayed()
        stop = waking.on_stored(lambda due: woken.set() if due == message.due else None)
        async with waking.transaction() as transaction:
            await waking.store(message, transaction)
            await settle()
            assert not woken.is_set(), "woken before the commit"
        async with asyncio.timeout(PATIENCE):
            await woken.wait()
        stop()

    async def test_nobody_is_woken_after_stop(self, waking: NotifyingStore) -> None:
        """A callback that was taken back is not called; the others still are."""
        called: list[str] = []
        woken = asyncio.Event()
        stop_first = waking.on_stored(lambda due: called.append("first"))
        stop_second = waking.on_stored(lambda due: woken.set())
        stop_first()
        await waking.store(delayed())
        async with asyncio.timeout(PATIENCE):
            await woken.wait()
        stop_second()
        assert called == []
