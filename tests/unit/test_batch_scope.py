"""The transaction in which a batch moves, and the fate of its messages when it is lost."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import START, MemoryStore, Scenario, build, delayed, sent_to

from delayline import BackendUnavailable, MemoryTransport
from delayline.delayed.mover import scope_between
from delayline.errors import DispatchFailed
from delayline.memory.transaction import MemoryTransaction
from delayline.testing import Fault, FaultyStore
from delayline.testing.clock import settle
from delayline.testing.faults import COUNT_FAILURE, REMOVE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime

    from delayline import DelayedMessage
    from delayline.spi import Transaction, TransportOperation
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the server does not answer")
ERRORS = pytest.mark.parametrize("error", [BOOM, DOWN], ids=["unexpected", "outage"])


class NoSavepoints(MemoryTransaction):
    savepoint = None  # type: ignore[assignment]


class LostSavepoints(MemoryTransaction):
    """A transaction whose savepoints cannot be gone back to: the database has forgotten them."""

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:
            raise RuntimeError("no such savepoint") from error


@pytest.fixture
def rows(clock: ManualClock) -> Scenario:
    """A store that locks rows, beside a transport that does not share its transactions."""
    return build(clock, shared=False, rows=True, number_of_retries=1)


async def start(scenario: Scenario) -> None:
    await scenario.transport.setup_infrastructure(["out"])
    await scenario.endpoint.start()
    await settle()


@pytest.mark.parametrize(
    ("shared", "rows", "transactional"), [(True, True, True), (False, True, True), (False, False, False)]
)
def test_the_strongest_scope_is_taken(shared: bool, rows: bool, transactional: bool) -> None:
    scope = scope_between(MemoryStore(shared=shared, rows=rows), MemoryTransport())
    assert (scope.shared, scope.begin is not None) == (shared, transactional)


def test_six_verbs_have_no_scope() -> None:
    assert scope_between(FaultyStore(MemoryStore(), verbs_only=True), MemoryTransport()).begin is None


async def test_the_stores_transaction_is_open_while_messages_are_sent_outside_it(rows: Scenario) -> None:
    # Given a transport that looks into the store while it sends
    seen: list[tuple[Transaction | None, object]] = []
    send = rows.transport.dispatch

    async def dispatch(operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        seen.append((transaction, await rows.store.fetch_next_due(START)))
        await send(operations, transaction)

    rows.transport.dispatch = dispatch  # type: ignore[method-assign]
    await rows.put(delayed("a"), delayed("b"))
    # When a batch is sent
    await start(rows)
    # Then it is locked, by a transaction that the transport has no part in
    assert seen == [(None, None)]
    assert rows.faults.recorded("commit", "release_many") == [("commit", ())]
    assert (await rows.ids("out"), await rows.pending()) == (["a", "b"], [])
    await rows.endpoint.stop()


@ERRORS
@pytest.mark.parametrize("step", [REMOVE, "commit"], ids=["remove", "commit"])
async def test_messages_sent_before_a_lost_transaction_are_removed_and_not_sent_again(
    rows: Scenario, step: str | tuple[str, ...], error: Exception
) -> None:
    # Given a transaction that is lost after the send
    rows.faults.inject(Fault(step, error))
    await rows.put(delayed("a"), delayed("lost", to="nowhere"))
    await start(rows)
    await rows.put(delayed("b"))
    # When the store works again
    rows.faults.heal()
    await rows.clock.advance(2)
    # Then each message left once, and was removed before the next one was sent
    assert (await rows.ids("out"), await rows.ids("error")) == (["a", "b"], ["lost"])
    assert await rows.pending() == []
    assert [verb for verb, _ in rows.faults.recorded(*REMOVE, "dispatch")][-3:] == [
        "remove_many",
        "dispatch",
        "remove_many",
    ]
    await rows.endpoint.stop()


@ERRORS
async def test_a_commit_that_fails_before_anything_was_sent_loses_no_count_to_an_outage(
    rows: Scenario, error: Exception
) -> None:
    # Given a message that fails, and a commit of its count that fails too
    rows.faults.inject(Fault("dispatch", DispatchFailed({0: BOOM}), message_id="m"))
    rows.faults.inject(Fault("commit", error, calls=1))
    await rows.put(delayed())
    await start(rows)
    # Then an outage counts as a failure of no message, and other errors of the message
    assert [message.number_of_retries for message in await rows.pending()] == [0 if error is DOWN else 1]
    rows.faults.heal()
    await rows.clock.advance(5)
    assert await rows.ids("out") == ["m"]
    await rows.endpoint.stop()


async def test_an_outage_of_the_transport_leaves_all_as_it_was(rows: Scenario) -> None:
    rows.faults.inject(Fault("dispatch", DOWN))
    await rows.put(delayed("a"), delayed("b"))
    await start(rows)
    assert [message.number_of_retries for message in await rows.pending()] == [0, 0]
    assert await rows.store.fetch_next_due(START) is not None
    await rows.endpoint.stop()


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("error", [BOOM, DispatchFailed({0: BOOM})], ids=["unattributed", "attributed"])
async def test_without_savepoints_a_failure_is_counted_after_the_rollback(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, retries: int, error: Exception
) -> None:
    scenario = build(clock, number_of_retries=retries)
    monkeypatch.setattr(scenario.store, "transaction", lambda: scenario.faults.apply_to(NoSavepoints()))
    scenario.faults.inject(Fault("dispatch", error, when=sent_to("out"), message_id="bad"))
    await scenario.put(delayed("bad"))
    await start(scenario)
    await scenario.put(delayed("good"))
    await settle()
    assert await scenario.ids("out") == ["good"]
    await clock.advance(timedelta(seconds=10))
    assert (await scenario.ids("out"), await scenario.ids("error")) == (["good"], ["bad"])
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_without_savepoints_a_failing_error_queue_blocks_no_others(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = build(clock)
    monkeypatch.setattr(scenario.store, "transaction", lambda: scenario.faults.apply_to(NoSavepoints()))
    scenario.faults.inject(Fault("dispatch", BOOM, message_id="bad"))
    await scenario.put(delayed("bad"), delayed("good"))
    await start(scenario)
    assert await scenario.ids("out") == ["good"]
    await clock.advance(3)
    assert [message.number_of_retries for message in await scenario.pending()] == [3]
    scenario.faults.heal()
    await clock.advance(60)
    assert await scenario.ids("out") == ["good", "bad"]
    await scenario.endpoint.stop()


@ERRORS
@pytest.mark.parametrize("step", ["dispatch", "move", "retry"])
async def test_work_after_a_lost_savepoint_is_not_committed(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    # Given a step that fails half way, and a savepoint that is lost
    scenario = build(clock, number_of_retries=5 if step == "retry" else 0)
    monkeypatch.setattr(scenario.store, "transaction", lambda: scenario.faults.apply_to(LostSavepoints()))
    put, count = scenario.transport.dispatch, scenario.store.retry_many
    failing = True

    async def dispatch(operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        if not failing:
            await put(operations, transaction)
        elif operations[0].destination == "error" or step == "dispatch":
            await put(operations, transaction)
            raise error
        else:
            raise DispatchFailed({0: BOOM})

    async def retry_many(
        messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        counted: int = await count(messages, at, transaction)
        if failing and step == "retry":
            raise error
        return counted

    monkeypatch.setattr(scenario.transport, "dispatch", dispatch)
    monkeypatch.setattr(scenario.store, "retry_many", retry_many)
    await scenario.put(delayed())
    await start(scenario)
    # When all works again
    failing = False
    await clock.advance(120)
    # Then the message is in one place, once
    assert len([*await scenario.ids("out"), *await scenario.ids("error")]) == 1
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_one_message_that_the_error_queue_refuses_keeps_no_other_from_it(clock: ManualClock) -> None:
    # Given two messages to a missing queue, and an error queue that takes only one of them
    scenario = build(clock)
    scenario.faults.inject(Fault("dispatch", BOOM, when=sent_to("error"), message_id="bad"))
    await scenario.put(delayed("a"), delayed("bad", to="nowhere"), delayed("lost", to="nowhere"))
    # When they are due
    await start(scenario)
    # Then all that can move has moved, in one transaction, and the other one backs off
    assert (await scenario.ids("out"), await scenario.ids("error")) == (["a"], ["lost"])
    assert scenario.faults.calls("commit") == 1
    assert [(message.id, message.number_of_retries) for message in await scenario.pending()] == [("bad", 1)]
    await scenario.endpoint.stop()


@pytest.mark.parametrize("way", [{}, {"shared": False, "rows": True}], ids=["one transaction", "the store's"])
async def test_an_outage_while_a_failure_is_counted_counts_no_failure(clock: ManualClock, way: dict[str, bool]) -> None:
    scenario = build(clock, number_of_retries=1, **way)
    scenario.faults.inject(Fault("dispatch", BOOM))
    scenario.faults.inject(Fault(COUNT_FAILURE, DOWN))
    await scenario.put(delayed())
    await start(scenario)
    assert [message.number_of_retries for message in await scenario.pending()] == [0]
    scenario.faults.heal()
    await clock.advance(1)
    assert (await scenario.ids("out"), await scenario.pending()) == (["m"], [])
    await scenario.endpoint.stop()


async def test_a_message_moved_at_the_second_attempt_is_removed_although_its_transaction_was_lost(
    clock: ManualClock,
) -> None:
    # Given an error queue that fails at first, and commits that fail for a while
    scenario = build(clock, shared=False, rows=True)
    tries: list[str] = []

    def fail(operations: Sequence[TransportOperation]) -> Exception | None:
        tries.append(operations[0].destination)
        return BOOM if operations[0].destination == "out" or tries.count("error") == 1 else None

    scenario.faults.inject(Fault("dispatch", fail))
    scenario.faults.inject(Fault("commit", BOOM, calls=range(1, 3)))
    await scenario.put(delayed())
    await start(scenario)
    # When the poller goes on
    await clock.advance(10)
    # Then the message is in the error queue, once, and nowhere else
    assert tries == ["out", "error", "error"]
    assert (await scenario.ids("error"), await scenario.pending()) == (["m"], [])
    await scenario.endpoint.stop()


async def test_a_savepoint_undoes_its_part_and_the_transaction_goes_on() -> None:
    happened: list[str] = []
    async with MemoryTransaction() as transaction:
        transaction.on_commit(lambda: happened.append("kept effect"))
        with pytest.raises(RuntimeError, match="boom"):
            async with transaction.savepoint():
                transaction.on_commit(lambda: happened.append("undone effect"))
                transaction.on_rollback(lambda: happened.append("compensated"))
                transaction.after_commit(lambda: happened.append("called too early"))
                transaction.after_end(lambda: happened.append("ended"))
                raise BOOM
        assert happened == ["compensated", "ended"]
        async with transaction.savepoint():
            transaction.after_commit(lambda: happened.append("called"))
    assert happened == ["compensated", "ended", "kept effect", "called"]
