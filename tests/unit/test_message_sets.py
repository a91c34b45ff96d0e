"""Jobs on sets of messages that a back end changes one by one, killed at any record and gone on with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayline import (
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    Headers,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageFilter,
    StoredDelivery,
    SyncEndpoint,
    TransactionMode,
)
from delayline.actions import ActionRecord, JobState, OperatorAction, SetRequest
from delayline.message import to_wire_time
from delayline.message_sets import SetOfPending
from delayline.set_jobs import MemoryActionLog, SetJob
from delayline.testing import ManualClock
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class Killed(Exception):
    """The process has ended."""


class LogOfKilled(MemoryActionLog):
    """A record whose job's process is killed before each of some records."""

    def __init__(self, clock: ManualClock, kills: set[int]) -> None:
        super().__init__("shop", clock)
        self._kills = kills
        self._asked = 0

    async def advance(self, record: ActionRecord, owner: str) -> bool:
        self._asked += 1
        if self._asked in self._kills:
            raise Killed
        return await super().advance(record, owner)


async def store_with(offsets: list[int]) -> MemoryDelayedMessageStore:
    store = MemoryDelayedMessageStore()
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    for number, minutes in enumerate(offsets):
        await store.store(DelayedMessage(Message(f"m{number}", {}, b""), "billing", NOW + minutes * MINUTE))
    return store


async def run_through_kills(
    store: MemoryDelayedMessageStore, request: SetRequest, clock: ManualClock, kills: set[int]
) -> ActionRecord:
    """Run a job, each time by another process, until it is over."""
    log = LogOfKilled(clock, kills)
    messages = SetOfPending(store, log, clock)
    record = await log.begin(request, await messages.preview(request), actor="me", rate=None)
    while True:
        try:
            return await SetJob(messages, log, record, clock).run()
        except Killed:
            messages = SetOfPending(store, log, clock)


OFFSETS = st.lists(st.integers(-30, 300), min_size=1, max_size=12)
KILLS = st.sets(st.integers(1, 20), max_size=8)


@settings(max_examples=60, deadline=None)
@given(offsets=OFFSETS, by=st.sampled_from([-120, -7, -1, 1, 7, 120]), kills=KILLS)
async def test_each_message_is_moved_once_however_often_the_process_is_killed(
    offsets: list[int], by: int, kills: set[int]
) -> None:
    clock = ManualClock(NOW)
    store = await store_with(offsets)
    request = SetRequest(OperatorAction.RESCHEDULE, MessageFilter(destination="billing"), by=by * MINUTE)
    record = await run_through_kills(store, request, clock, kills)
    moved = {message.id: message.due for message in await store.pending(limit=100)}
    assert moved == {f"m{number}": NOW + (minutes + by) * MINUTE for number, minutes in enumerate(offsets)}
    assert (record.state, record.failed) == (JobState.DONE, 0)
    assert record.done <= len(offsets)
    assert kills or record.done == len(offsets)


@settings(max_examples=30, deadline=None)
@given(offsets=OFFSETS, kills=KILLS, action=st.sampled_from(["cancel", "to", "now"]))
async def test_other_changes_are_whole_after_kills(offsets: list[int], kills: set[int], action: str) -> None:
    clock, to = ManualClock(NOW), NOW + 100 * MINUTE
    store = await store_with(offsets)
    asked = {
        "cancel": SetRequest(OperatorAction.CANCEL, MessageFilter()),
        "to": SetRequest(OperatorAction.RESCHEDULE, MessageFilter(), to=to),
        "now": SetRequest(OperatorAction.SEND_NOW, MessageFilter()),
    }[action]
    record = await run_through_kills(store, asked, clock, kills)
    dues = [message.due for message in await store.pending(limit=100)]
    if action == "cancel":
        assert dues == []
    elif action == "to":
        assert dues == [to] * len(offsets)
    else:
        assert len(dues) == len(offsets)
        assert max(dues) <= NOW
    assert (record.state, record.failed) == (JobState.DONE, 0)


@pytest.fixture
async def shop() -> AsyncIterator[Endpoint]:
    """A started endpoint in memory with pending and failed messages."""
    clock = ManualClock(NOW)
    delivery = StoredDelivery(MemoryDelayedMessageStore())
    endpoint = Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery, clock=clock)
    async with endpoint:
        for number in range(4):
            await endpoint.send("shop", b"", message_id=f"m{number}", deliver_at=NOW + (number + 1) * MINUTE)
        for number, kind in enumerate(["ValueError", "KeyError", "ValueError"]):
            headers = {Headers.FAILED_QUEUE: "shop", Headers.EXCEPTION_TYPE: kind}
            headers[Headers.TIME_OF_FAILURE] = to_wire_time(NOW - MINUTE)
            await endpoint.transport.dispatch([TransportOperation(Message(f"f{number}", headers, b""), "error")])
        yield endpoint


async def test_the_api_changes_sets_and_says_that_nothing_is_recorded(shop: Endpoint) -> None:
    seen: list[int] = []
    two = MessageFilter(message_id="m*", due_before=NOW + 3 * MINUTE)
    assert (await shop.delayed.count(two)).number == 2
    record = await shop.delayed.cancel_all(two, progress=lambda job: seen.append(job.done), actor="ann")
    assert (record.state, record.result, record.actor, seen[-1]) == (JobState.DONE, "2 cancelled", "ann", 2)
    record = await shop.delayed.reschedule_all(MessageFilter(), by=MINUTE)
    assert record.done == 2
    record = await shop.delayed.reschedule_all(MessageFilter(message_id="m2"), to=NOW + 9 * MINUTE)
    assert [message.due for message in await shop.delayed.pending()] == [NOW + 5 * MINUTE, NOW + 9 * MINUTE]
    # Then the endpoint knows its jobs, of which no database has a record
    assert not shop.delayed.jobs.is_recorded
    assert [each.name for each in await shop.delayed.jobs.list(1)] == [record.name]
    assert (await shop.delayed.jobs.resume(record.name)).done == 1
    assert not await shop.delayed.jobs.stop(record.name)
    record = await shop.delayed.send_now_all(MessageFilter(message_id="m3"), rate=10)
    assert record.done == 1


async def test_the_api_retries_and_deletes_failed_messages(shop: Endpoint) -> None:
    values = MessageFilter(exception="ValueError")
    assert (await shop.errors.count(values)).number == 2
    record = await shop.errors.retry_all(values, to="error")
    assert (record.state, record.done) == (JobState.DONE, 2)
    assert (await shop.errors.count(values)).number == 0, "they have left as new messages"
    assert (await shop.errors.purge_all(MessageFilter(exception="KeyError"))).done == 1
    assert [each.action for each in await shop.errors.jobs.list()] == [OperatorAction.PURGE, OperatorAction.RETRY]


async def test_what_means_nothing_is_refused(shop: Endpoint) -> None:
    wrong: object = "destination=billing"
    with pytest.raises(ConfigurationError, match=r"MessageFilter, not str.*means every message"):
        await shop.delayed.cancel_all(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rate must be 1 to"):
        await shop.errors.purge_all(MessageFilter(), rate=0)
    with pytest.raises(ConfigurationError, match="no exception and no group"):
        await shop.delayed.count(MessageFilter(exception="KeyError"))
    with pytest.raises(ConfigurationError, match="no due time"):
        await shop.errors.count(MessageFilter(due_before=NOW))
    with pytest.raises(ConfigurationError, match="give the new due time"):
        await shop.delayed.reschedule_all(MessageFilter())
    with pytest.raises(ConfigurationError, match="there is no job 'nothing' here"):
        await shop.delayed.jobs.resume("nothing")


def test_synchronous_code_changes_sets() -> None:
    clock = ManualClock(NOW)
    delivery = StoredDelivery(MemoryDelayedMessageStore())
    endpoint = Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery, clock=clock)
    with SyncEndpoint(endpoint) as shop:
        for number in range(3):
            shop.send("shop", b"", message_id=f"m{number}", deliver_at=NOW + (number + 1) * MINUTE)
        everything = MessageFilter()
        assert shop.delayed.count(everything).number == 3
        assert shop.delayed.reschedule_all(everything, by=MINUTE).done == 3
        record = shop.delayed.cancel_all(MessageFilter(message_id="m0"), rate=100)
        assert shop.delayed.jobs.list()[0].name == record.name
        assert shop.delayed.jobs.resume(record.name).done == 1
        assert not shop.delayed.jobs.stop(record.name)
        assert not shop.delayed.jobs.is_recorded
        assert shop.delayed.send_now_all(MessageFilter(message_id="m1")).done == 1
        assert shop.errors.count(everything).number == 0
        assert shop.errors.retry_all(everything).done == 0
        assert shop.errors.purge_all(everything).done == 0
        assert len(shop.errors.jobs.list()) == 2
