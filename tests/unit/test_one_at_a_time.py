"""A six-verb store behind the face of a batch store."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import START, MemoryStore, delayed

from delayline import BackendUnavailable, MemoryDelayedMessageStore
from delayline.delayed.one_at_a_time import OneAtATime, batches_of
from delayline.testing import Fault, FaultyStore

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(shared=False)


@pytest.fixture
def store(memory: MemoryStore) -> FaultyStore:
    return FaultyStore(memory, verbs_only=True)


@pytest.fixture
def batches(store: FaultyStore, clock: ManualClock) -> OneAtATime:
    return OneAtATime(store, clock)


async def fetch(batches: OneAtATime, after: float = 0) -> list[str]:
    found = await batches.fetch_due(START + timedelta(seconds=after), 500, max_bytes=1)
    return [message.id for message in found]


def test_a_store_that_works_in_batches_is_left_alone(store: FaultyStore, clock: ManualClock) -> None:
    memory = MemoryDelayedMessageStore()
    assert batches_of(memory, clock) is memory
    assert isinstance(batches_of(store, clock), OneAtATime)


async def test_it_stores_each_and_fetches_one(batches: OneAtATime) -> None:
    await batches.store_many([delayed("a"), delayed("b", after=1)])
    assert await batches.next_due() == START
    assert [await fetch(batches, 1) for _ in range(3)] == [["a"], ["b"], []]


async def test_released_messages_come_first(batches: OneAtATime) -> None:
    await batches.store_many([delayed("a"), delayed("b")])
    (message,) = await batches.fetch_due(START, 1, max_bytes=1)
    await batches.release_many([message])
    assert [await fetch(batches), await fetch(batches)] == [["a"], ["b"]]


async def test_a_message_that_backs_off_is_not_fetched_though_its_lease_ran_out(
    batches: OneAtATime, memory: MemoryStore, clock: ManualClock
) -> None:
    # Given a message that backs off, and a store that has unlocked it
    await batches.store_many([delayed("a"), delayed("b")])
    (message,) = await batches.fetch_due(START, 1, max_bytes=1)
    await batches.retry_many([message], START + timedelta(seconds=2))
    await memory.release_many([message])
    # When something is fetched, then it is the next one
    assert await fetch(batches) == ["b"]
    # And the first comes back, counted, when its time has come
    await clock.advance(2)
    (again,) = await batches.fetch_due(clock.now(), 1, max_bytes=1)
    assert (again.id, again.number_of_retries) == ("a", 1)


async def test_a_failure_that_cannot_be_counted_blocks_no_others(
    batches: OneAtATime, store: FaultyStore, clock: ManualClock
) -> None:
    # Given a message that backs off, and a store that cannot count its failure
    await batches.store_many([delayed("a")])
    await batches.retry_many(await batches.fetch_due(START, 1, max_bytes=1), START + timedelta(seconds=1))
    await batches.store_many([delayed("b")])
    store.faults.inject(Fault("increment_failure_count", RuntimeError("cannot count")))
    await clock.advance(1)
    # When something is fetched, then it is the next one
    assert await fetch(batches, 1) == ["b"]
    # And the first comes back, once it can be counted
    store.faults.heal()
    await clock.advance(60)
    assert await fetch(batches, 61) == ["a"]


async def test_an_outage_while_a_failure_is_counted_is_one_of_the_fetch(
    batches: OneAtATime, store: FaultyStore, clock: ManualClock
) -> None:
    await batches.store_many([delayed("a")])
    await batches.retry_many(await batches.fetch_due(START, 1, max_bytes=1), START)
    store.faults.inject(Fault("increment_failure_count", BackendUnavailable("down")))
    with pytest.raises(BackendUnavailable):
        await fetch(batches)
    store.faults.heal()
    assert await fetch(batches) == ["a"]
