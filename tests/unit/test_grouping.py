"""Concurrent sends share transactions; each waits for its own message only."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import MemoryStore, delayed

from delayline import BackendUnavailable, InvalidMessage
from delayline.circuit_breaker import BreakerState, RepeatedFailuresOverTime
from delayline.delayed.delivery import MAXIMUM_STORED_GROUP, StoreGroup
from delayline.errors import BackendUnusable
from delayline.grouping import Grouping
from delayline.testing import Fault, FaultyStore
from delayline.testing.clock import settle
from delayline.testing.faults import STORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline import DelayedMessage
    from delayline.spi import Transaction
    from delayline.testing.clock import ManualClock


class SlowStore(MemoryStore):
    """Stores when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        await asyncio.sleep(0)  # as every store that does I/O
        await self.gate.wait()
        await super().store_many(messages, transaction)


@pytest.fixture
def breaker(clock: ManualClock) -> RepeatedFailuresOverTime:
    return RepeatedFailuresOverTime("store", time_to_trigger=timedelta(30), trigger=lambda _: None, clock=clock)


@pytest.fixture
def memory() -> SlowStore:
    return SlowStore()


@pytest.fixture
def store(memory: SlowStore) -> FaultyStore:
    return FaultyStore(memory)


@pytest.fixture
def group(store: FaultyStore, breaker: RepeatedFailuresOverTime) -> StoreGroup:
    return StoreGroup(store, breaker, lambda _: None)


def groups(store: FaultyStore) -> list[int]:
    return [len(ids) for _, ids in store.faults.recorded(*STORE)]


async def test_one_store_is_one_transaction(group: StoreGroup, store: FaultyStore) -> None:
    await group.store(delayed())
    assert groups(store) == [1]


async def test_concurrent_stores_share_transactions(group: StoreGroup, store: FaultyStore, memory: SlowStore) -> None:
    await asyncio.gather(*[group.store(delayed(str(number))) for number in range(2 * MAXIMUM_STORED_GROUP + 2)])
    assert groups(store) == [MAXIMUM_STORED_GROUP, MAXIMUM_STORED_GROUP, 2]
    assert len(await memory.pending(limit=5000)) == 2 * MAXIMUM_STORED_GROUP + 2


async def test_stores_during_a_transaction_go_into_the_next(
    group: StoreGroup, store: FaultyStore, memory: SlowStore
) -> None:
    memory.gate.clear()
    first = asyncio.create_task(group.store(delayed("first")))
    await settle()
    later = [asyncio.create_task(group.store(delayed(str(number)))) for number in range(5)]
    await settle()
    assert not any(task.done() for task in (first, *later))
    memory.gate.set()
    await asyncio.gather(first, *later)
    assert groups(store) == [1, 5]


async def test_one_bad_message_fails_alone(
    group: StoreGroup, store: FaultyStore, memory: SlowStore, clock: ManualClock
) -> None:
    store.faults.inject(Fault(STORE, ValueError("too odd"), message_id="2"))
    tasks = [asyncio.create_task(group.store(delayed(str(number)))) for number in range(4)]
    await clock.advance(1)
    failed = [str(task.exception()) for task in tasks if task.exception()]
    assert failed == ["too odd"]
    assert [message.id for message in await memory.pending()] == ["0", "1", "3"]


async def test_a_message_the_store_refuses_fails_alone_and_arms_no_breaker(
    group: StoreGroup, store: FaultyStore, memory: SlowStore, breaker: RepeatedFailuresOverTime
) -> None:
    store.faults.inject(Fault(STORE, InvalidMessage("too long for this back end"), message_id="2"))
    results = await asyncio.gather(*[group.store(delayed(str(n))) for n in range(4)], return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [InvalidMessage]
    assert [message.id for message in await memory.pending()] == ["0", "1", "3"]
    assert breaker.state is BreakerState.DISARMED
    breaker.close()


@pytest.mark.parametrize("error", [BackendUnavailable("down"), BackendUnusable("newer")])
async def test_an_outage_fails_the_whole_group_without_trying_each(
    group: StoreGroup, store: FaultyStore, clock: ManualClock, error: Exception
) -> None:
    store.faults.inject(Fault(STORE, error))
    tasks = [asyncio.create_task(group.store(delayed(str(number)))) for number in range(4)]
    await clock.advance(1)
    assert [task.exception() for task in tasks] == [error] * 4
    assert groups(store) == [4]


async def test_a_failure_is_raised_at_once_and_arms_the_breaker(
    group: StoreGroup, store: FaultyStore, clock: ManualClock, breaker: RepeatedFailuresOverTime
) -> None:
    store.faults.inject(Fault(STORE, BackendUnavailable("down")))
    before = clock.now()
    with pytest.raises(BackendUnavailable):
        await group.store(delayed())
    assert breaker.state is BreakerState.ARMED
    assert clock.now() == before  # a caller's request is not held
    store.faults.heal()
    await group.store(delayed())
    assert breaker.state.name == BreakerState.DISARMED.name


async def test_cancelling_a_caller_fails_no_other_caller(
    group: StoreGroup, store: FaultyStore, memory: SlowStore
) -> None:
    memory.gate.clear()
    alone, grouped, other = (asyncio.create_task(group.store(delayed(name))) for name in ("alone", "grouped", "other"))
    await settle()
    alone.cancel()
    grouped.cancel()
    await settle()
    memory.gate.set()
    await other
    assert alone.cancelled()
    assert grouped.cancelled()
    await group.stop()
    assert {message.id for message in await memory.pending()} >= {"other"}


@pytest.mark.parametrize("fails", [False, True], ids=["stored", "failed"])
async def test_cancelling_a_caller_of_a_six_verb_store_does_not_lose_its_message(
    breaker: RepeatedFailuresOverTime, fails: bool
) -> None:
    memory, gate = MemoryStore(), asyncio.Event()
    fault = Fault("store", ValueError("too odd") if fails else None, until=gate)
    store = FaultyStore(memory, fault, verbs_only=True)
    group = StoreGroup(store, breaker, lambda _: None)
    caller = asyncio.create_task(group.store(delayed()))
    await settle()
    caller.cancel()
    await settle()
    stopping = asyncio.create_task(group.stop())
    await settle()
    assert not stopping.done()
    gate.set()
    await stopping
    assert caller.cancelled()
    assert len(await memory.pending()) == (0 if fails else 1)


async def test_stop_waits_for_accepted_messages(group: StoreGroup, store: FaultyStore, memory: SlowStore) -> None:
    await group.stop()
    memory.gate.clear()
    task = asyncio.create_task(group.store(delayed()))
    await settle()
    stopping = asyncio.create_task(group.stop())
    await settle()
    assert not stopping.done()
    memory.gate.set()
    await stopping
    await task


async def test_callers_do_not_hang_when_the_writer_is_cancelled(
    group: StoreGroup, store: FaultyStore, memory: SlowStore
) -> None:
    # Given a message that is being stored, and one in the group that follows
    memory.gate.clear()
    first = asyncio.create_task(group.store(delayed("first")))
    await settle()
    grouped = asyncio.create_task(group.store(delayed("grouped")))
    await settle()
    (writer,) = [task for task in asyncio.all_tasks() if task.get_name() == "delayline group"]
    # When the group's writer is cancelled
    writer.cancel()
    # Then both callers get the error, and the next one can store
    for caller in (first, grouped):
        with pytest.raises(asyncio.CancelledError):
            await caller
    memory.gate.set()
    await group.store(delayed("next"))
    assert [message.id for message in await memory.pending()] == ["next"]


@pytest.mark.parametrize("to_the_end", [True, False])
async def test_a_group_that_is_cancelled_before_it_begins_keeps_nobody_waiting(*, to_the_end: bool) -> None:
    """Given an event loop that ends, which cancels all tasks, then those that wait for a group end too."""

    async def work(items: Sequence[int]) -> Sequence[int]:
        raise NotImplementedError

    grouping: Grouping[int, int] = Grouping(work, maximum=10)

    async def caller() -> int:
        return await (grouping.run_to_end if to_the_end else grouping.run)(1)

    waiting = asyncio.create_task(caller())
    await asyncio.sleep(0)
    (group,) = (task for task in asyncio.all_tasks() if task.get_name() == "delayline group")
    group.cancel()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await grouping.stop()
