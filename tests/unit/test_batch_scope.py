"""Which transaction a batch moves in, and what becomes of what was sent when it is lost."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import START, FaultyStore, FaultyTransaction, FaultyTransport, House, SixVerbs, build, delayed

from delayline import BackendUnavailable, DispatchFailed
from delayline.delayed.batch import scope_between
from delayline.memory.transaction import MemoryTransaction
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime

    from delayline import DelayedMessage
    from delayline.spi import Transaction, TransportOperation
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the server does not answer")
ERRORS = pytest.mark.parametrize("error", [BOOM, DOWN], ids=["unexpected", "outage"])


class NoSavepoints(FaultyTransaction):
    savepoint = None  # type: ignore[assignment]


class LostSavepoints(FaultyTransaction):
    """A transaction whose savepoints cannot be gone back to: the database has forgotten them."""

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:
            raise RuntimeError("no such savepoint") from error


@pytest.fixture
def rows(clock: ManualClock) -> House:
    """A store that locks rows, beside a transport that does not share its transactions."""
    return build(clock, shared=False, rows=True, number_of_retries=1)


async def start(house: House) -> None:
    await house.transport.setup_infrastructure(["out"])
    await house.endpoint.start()
    await settle()


@pytest.mark.parametrize(
    ("shared", "rows", "transactional"), [(True, True, True), (False, True, True), (False, False, False)]
)
def test_the_strongest_scope_is_taken(shared: bool, rows: bool, transactional: bool) -> None:
    scope = scope_between(FaultyStore(shared=shared, rows=rows), FaultyTransport())
    assert (scope.shared, scope.begin is not None) == (shared, transactional)


def test_six_verbs_have_no_scope() -> None:
    assert scope_between(SixVerbs(), FaultyTransport()).begin is None


async def test_the_stores_transaction_is_open_while_messages_are_sent_outside_it(rows: House) -> None:
    # Given a transport that looks into the store while it sends
    seen: list[tuple[Transaction | None, object]] = []
    send = rows.transport.dispatch

    async def dispatch(operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        seen.append((transaction, await rows.store.fetch_next_due(START)))
        await send(operations, transaction)

    rows.transport.dispatch = dispatch  # type: ignore[method-assign]
    await rows.hold(delayed("a"), delayed("b"))
    # When a batch is sent
    await start(rows)
    # Then it is locked, by a transaction that the transport has no part in
    assert seen == [(None, None)]
    assert rows.faults.verbs("commit", "release") == [("commit", ())]
    assert (await rows.ids("out"), await rows.waiting()) == (["a", "b"], [])
    await rows.endpoint.stop()


@ERRORS
@pytest.mark.parametrize("step", ["remove", "commit"])
async def test_what_was_sent_before_the_transaction_was_lost_is_removed_and_not_sent_again(
    rows: House, step: str, error: Exception
) -> None:
    # Given a transaction that is lost after the send
    rows.faults.always(step, error)
    await rows.hold(delayed("a"), delayed("lost", to="nowhere"))
    await start(rows)
    await rows.hold(delayed("b"))
    # When the store works again
    rows.faults.heal()
    await rows.clock.advance(2)
    # Then each message left once, and was removed before the next one was sent
    assert (await rows.ids("out"), await rows.ids("error")) == (["a", "b"], ["lost"])
    assert await rows.waiting() == []
    assert [verb for verb, _ in rows.faults.verbs("remove", "dispatch")][-3:] == ["remove", "dispatch", "remove"]
    await rows.endpoint.stop()


@ERRORS
async def test_a_commit_that_fails_before_anything_was_sent_loses_no_count_to_an_outage(
    rows: House, error: Exception
) -> None:
    # Given a message that fails, and a commit of its count that fails too
    rows.faults.for_id("dispatch", "m", DispatchFailed({0: BOOM}))
    rows.faults.on["commit"] = lambda _: error if rows.faults.count("commit") == 1 else None
    await rows.hold(delayed())
    await start(rows)
    # Then an outage counts nobody, and anything else is the message's
    assert [message.number_of_retries for message in await rows.waiting()] == [0 if error is DOWN else 1]
    rows.faults.heal()
    await rows.clock.advance(5)
    assert await rows.ids("out") == ["m"]
    await rows.endpoint.stop()


async def test_an_outage_of_the_transport_leaves_all_as_it_was(rows: House) -> None:
    rows.faults.always("dispatch", DOWN)
    await rows.hold(delayed("a"), delayed("b"))
    await start(rows)
    assert [message.number_of_retries for message in await rows.waiting()] == [0, 0]
    assert await rows.store.fetch_next_due(START) is not None
    await rows.endpoint.stop()


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("error", [BOOM, DispatchFailed({0: BOOM})], ids=["unattributed", "attributed"])
async def test_without_savepoints_a_failure_is_counted_after_the_rollback(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, retries: int, error: Exception
) -> None:
    house = build(clock, number_of_retries=retries)
    monkeypatch.setattr(house.store, "transaction", lambda: NoSavepoints(house.faults))
    sends = house.transport

    def fail(ids: tuple[str, ...]) -> Exception | None:
        return error if sends.sends_to == "out" and "bad" in ids else None

    house.faults.on["dispatch"] = fail
    await house.hold(delayed("bad"))
    await start(house)
    await house.hold(delayed("good"))
    await settle()
    assert await house.ids("out") == ["good"]
    await clock.advance(timedelta(seconds=10))
    assert (await house.ids("out"), await house.ids("error")) == (["good"], ["bad"])
    assert await house.waiting() == []
    await house.endpoint.stop()


async def test_without_savepoints_an_error_queue_that_fails_holds_nobody_up(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = build(clock)
    monkeypatch.setattr(house.store, "transaction", lambda: NoSavepoints(house.faults))
    house.faults.for_id("dispatch", "bad", BOOM)
    await house.hold(delayed("bad"), delayed("good"))
    await start(house)
    assert await house.ids("out") == ["good"]
    await clock.advance(3)
    assert [message.number_of_retries for message in await house.waiting()] == [3]
    house.faults.heal()
    await clock.advance(60)
    assert await house.ids("out") == ["good", "bad"]
    await house.endpoint.stop()


@ERRORS
@pytest.mark.parametrize("step", ["dispatch", "move", "retry"])
async def test_what_a_lost_savepoint_leaves_behind_is_not_committed(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    # Given a step that fails half way, and a savepoint that is lost
    house = build(clock, number_of_retries=5 if step == "retry" else 0)
    monkeypatch.setattr(house.store, "transaction", lambda: LostSavepoints(house.faults))
    assert isinstance(house.store, FaultyStore)
    put, count = house.transport.dispatch, house.store.retry_many
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
        counted = await count(messages, at, transaction)
        if failing and step == "retry":
            raise error
        return counted

    monkeypatch.setattr(house.transport, "dispatch", dispatch)
    monkeypatch.setattr(house.store, "retry_many", retry_many)
    await house.hold(delayed())
    await start(house)
    # When all works again
    failing = False
    await clock.advance(120)
    # Then the message is in one place, once
    assert len([*await house.ids("out"), *await house.ids("error")]) == 1
    assert await house.waiting() == []
    await house.endpoint.stop()


async def test_one_message_that_the_error_queue_refuses_keeps_no_other_from_it(clock: ManualClock) -> None:
    # Given two messages to a missing queue, and an error queue that takes only one of them
    house = build(clock)
    sends = house.transport
    house.faults.on["dispatch"] = lambda ids: BOOM if sends.sends_to == "error" and "bad" in ids else None
    await house.hold(delayed("a"), delayed("bad", to="nowhere"), delayed("lost", to="nowhere"))
    # When they are due
    await start(house)
    # Then all that can move has moved, in one transaction, and the other one backs off
    assert (await house.ids("out"), await house.ids("error")) == (["a"], ["lost"])
    assert house.faults.count("commit") == 1
    assert [(message.id, message.number_of_retries) for message in await house.waiting()] == [("bad", 1)]
    await house.endpoint.stop()


@pytest.mark.parametrize("way", [{}, {"shared": False, "rows": True}], ids=["one transaction", "the store's"])
async def test_an_outage_while_a_failure_is_counted_counts_nobody(clock: ManualClock, way: dict[str, bool]) -> None:
    house = build(clock, number_of_retries=1, **way)
    house.faults.always("dispatch", BOOM)
    house.faults.always("retry", DOWN)
    await house.hold(delayed())
    await start(house)
    assert [message.number_of_retries for message in await house.waiting()] == [0]
    house.faults.heal()
    await clock.advance(1)
    assert (await house.ids("out"), await house.waiting()) == (["m"], [])
    await house.endpoint.stop()


async def test_what_reached_the_error_queue_at_the_second_try_is_removed_though_its_transaction_was_lost(
    clock: ManualClock,
) -> None:
    # Given an error queue that fails at first, and commits that fail for a while
    house = build(clock, shared=False, rows=True)
    tries: list[str] = []

    def fail(_: tuple[str, ...]) -> Exception | None:
        tries.append(house.transport.sends_to)
        return BOOM if house.transport.sends_to == "out" or tries.count("error") == 1 else None

    house.faults.on["dispatch"] = fail
    house.faults.on["commit"] = lambda _: BOOM if house.faults.count("commit") <= 2 else None
    await house.hold(delayed())
    await start(house)
    # When the poller goes on
    await clock.advance(10)
    # Then the message is in the error queue, once, and nowhere else
    assert tries == ["out", "error", "error"]
    assert (await house.ids("error"), await house.waiting()) == (["m"], [])
    await house.endpoint.stop()


async def test_a_savepoint_undoes_its_part_and_the_transaction_goes_on() -> None:
    happened: list[str] = []
    async with MemoryTransaction() as transaction:
        transaction.on_commit(lambda: happened.append("kept effect"))
        with pytest.raises(RuntimeError, match="boom"):
            async with transaction.savepoint():
                transaction.on_commit(lambda: happened.append("undone effect"))
                transaction.on_rollback(lambda: happened.append("compensated"))
                transaction.after_commit(lambda: happened.append("told too early"))
                transaction.after_end(lambda: happened.append("ended"))
                raise BOOM
        assert happened == ["compensated", "ended"]
        async with transaction.savepoint():
            transaction.after_commit(lambda: happened.append("told"))
    assert happened == ["compensated", "ended", "kept effect", "told"]
