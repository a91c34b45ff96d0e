"""Messages for which something fails alone: they are set aside, and hold up no other."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import SCOPES, Scenario, build, delayed, sent_to

from delayline import BackendUnavailable, Endpoint, MemoryTransport, StoredDelivery, TransactionMode
from delayline.errors import DispatchFailed
from delayline.spi import Transaction
from delayline.testing import Fault, FaultyTransport
from delayline.testing.clock import settle
from delayline.testing.faults import COUNT_FAILURE, FETCH, REMOVE

if TYPE_CHECKING:
    from datetime import datetime

    from delayline import DelayedMessage
    from delayline.testing.clock import ManualClock

DOWN = BackendUnavailable("the server does not answer")
BOOM = RuntimeError("boom")
#: How a batch moves where store and queues share no transaction.
APART = pytest.mark.parametrize("way", ["the store's transaction", "no transaction", "six verbs"])
DISPATCH_TEXT = "Failed to dispatch delayed messages to destination"
RECOVERY_TEXT = "Failed to execute error handling for delayed message forwarding"


async def start(scenario: Scenario) -> None:
    await scenario.transport.setup_infrastructure(["out"])
    await scenario.endpoint.start()
    await settle()


def scenario_of(clock: ManualClock, way: str, **settings: Any) -> Scenario:  # noqa: ANN401 - those of `build`
    return build(clock, **SCOPES[way], **settings)


def removal_fails(scenario: Scenario, *ids: str, error: Exception = BOOM) -> None:
    for message_id in ids:
        scenario.faults.inject(Fault(REMOVE, error, message_id=message_id))


@APART
@pytest.mark.parametrize("bad", [["0"], ["1"], ["0", "1", "2"], ["0", "2", "4"]], ids="+".join)
async def test_messages_that_cannot_be_removed_hold_up_no_others(clock: ManualClock, way: str, bad: list[str]) -> None:
    # Given some messages whose removal fails
    scenario = scenario_of(clock, way)
    removal_fails(scenario, *bad)
    # When they are due, a moment one after the other
    await scenario.put(*[delayed(str(number), after=number / 10) for number in range(6)])
    await start(scenario)
    await clock.advance(20)
    # Then each message was sent, once, only these are left, and the endpoint goes on
    assert await scenario.ids("out") == ["0", "1", "2", "3", "4", "5"]
    assert [message.id for message in await scenario.pending()] == bad
    await clock.advance(180)
    assert (await scenario.ids("out"), scenario.critical) == (["0", "1", "2", "3", "4", "5"], [])
    # And they are removed once that works
    scenario.faults.heal()
    await clock.advance(61)
    assert (await scenario.ids("out"), await scenario.pending()) == (["0", "1", "2", "3", "4", "5"], [])
    await scenario.endpoint.stop()


@APART
async def test_messages_of_one_batch_are_removed_one_by_one(clock: ManualClock, way: str) -> None:
    scenario = scenario_of(clock, way)
    removal_fails(scenario, "2")
    await scenario.put(*[delayed(str(number)) for number in range(5)])
    await start(scenario)
    assert await scenario.ids("out") == ["0", "1", "2", "3", "4"]
    assert [message.id for message in await scenario.pending()] == ["2"]
    await scenario.put(delayed("later"))
    await clock.advance(1)
    assert await scenario.ids("out") == ["0", "1", "2", "3", "4", "later"]
    await scenario.endpoint.stop()


@APART
async def test_a_message_is_not_held_up_longer_than_a_moment_by_the_first_that_cannot_be_removed(
    clock: ManualClock, way: str
) -> None:
    scenario = scenario_of(clock, way)
    removal_fails(scenario, "bad")
    await scenario.put(delayed("bad"), delayed("good", after=0.2))
    await start(scenario)
    await clock.advance(0.5)
    assert await scenario.ids("out") == ["bad", "good"]
    await scenario.endpoint.stop()


@APART
async def test_a_back_end_that_removes_nothing_gets_no_flood_of_messages(clock: ManualClock, way: str) -> None:
    # Given a store of which no message can be removed, with an error that says nothing
    scenario = scenario_of(clock, way, batch_size=10)
    scenario.faults.inject(Fault(REMOVE, BOOM))
    await scenario.put(*[delayed(f"{number:03}", after=number) for number in range(200)])
    await start(scenario)
    # When it goes on until the critical error
    await clock.advance(32)
    # Then about one message a second was sent, each once
    sent = await scenario.ids("out")
    assert scenario.critical == [DISPATCH_TEXT]
    assert 5 <= len(sent) == len(set(sent)) <= 32
    # And all are removed when it works again, none sent twice
    scenario.faults.heal()
    await clock.advance(200)
    assert sorted(await scenario.ids("out")) == [f"{number:03}" for number in range(200)]
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


@APART
async def test_an_outage_of_the_removal_of_one_message_is_its_own_in_the_end(clock: ManualClock, way: str) -> None:
    """A row that another session has locked: the back end says that it is away, and only this message cannot go."""
    scenario = scenario_of(clock, way)
    removal_fails(scenario, "locked", error=DOWN)
    await scenario.put(delayed("locked"), delayed("a", after=1), delayed("b", after=2))
    await start(scenario)
    await clock.advance(5)
    assert await scenario.ids("out") == ["locked"]
    await clock.advance(15)
    assert (await scenario.ids("out"), scenario.critical) == (["locked", "a", "b"], [])
    scenario.faults.heal()
    await clock.advance(61)
    assert (await scenario.ids("out"), await scenario.pending()) == (["locked", "a", "b"], [])
    await scenario.endpoint.stop()


@APART
async def test_another_message_with_the_id_of_one_that_was_set_aside_is_sent(clock: ManualClock, way: str) -> None:
    # Given a message that was sent and cannot be removed, though others can
    scenario = scenario_of(clock, way)
    removal_fails(scenario, "m")
    await scenario.put(delayed("m"), delayed("other", after=0.1))
    await start(scenario)
    await clock.advance(1)
    assert await scenario.ids("out") == ["m", "other"]
    # When somebody deletes it, and stores another one with its id
    scenario.faults.heal()
    scenario.memory._delete(["m"])
    await scenario.put(delayed("m", after=120, body=b"another"))
    await clock.advance(100)
    if way != "the store's transaction":  # without one its claim protects the id: nobody could have deleted it
        return await scenario.endpoint.stop()
    # Then that one is sent too
    assert [message.message.body for message in await scenario.pending()] == [b"another"]
    await clock.advance(100)
    assert await scenario.ids("out") == ["m", "other", "m"]
    return await scenario.endpoint.stop()


@APART
async def test_a_stop_removes_what_could_not_be_removed_before(clock: ManualClock, way: str) -> None:
    scenario = scenario_of(clock, way)
    removal_fails(scenario, "m")
    await scenario.put(delayed("m"))
    await start(scenario)
    scenario.faults.heal()
    await scenario.endpoint.stop()
    assert await scenario.pending() == []


@APART
@pytest.mark.parametrize("number", [1, 3, 100])
async def test_failures_that_cannot_be_counted_become_a_critical_error_with_their_own_text(
    clock: ManualClock, way: str, number: int
) -> None:
    # Given messages that cannot be sent, which cannot be counted
    scenario = scenario_of(clock, way, number_of_retries=3, maximum_recovery_failures_per_second=1)
    scenario.faults.inject(Fault("dispatch", BOOM), Fault(COUNT_FAILURE, BOOM))
    await scenario.put(*[delayed(str(position)) for position in range(number)])
    await start(scenario)
    # When that lasts
    await clock.advance(45)
    # Then the endpoint is told of that, and of nothing else
    assert set(scenario.critical) == {RECOVERY_TEXT}
    scenario.faults.heal()
    await clock.advance(61)
    assert len(await scenario.ids("out")) == number
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


@APART
async def test_the_rate_of_failures_to_count_is_the_setting(clock: ManualClock, way: str) -> None:
    scenario = scenario_of(clock, way, number_of_retries=3, maximum_recovery_failures_per_second=10)
    scenario.faults.inject(Fault("dispatch", BOOM), Fault(COUNT_FAILURE, BOOM))
    await scenario.put(*[delayed(str(position)) for position in range(5)])
    await start(scenario)
    await clock.advance(100)
    assert scenario.critical == []
    await scenario.put(*[delayed(f"n{position}") for position in range(20)])
    await clock.advance(60)
    assert set(scenario.critical) == {RECOVERY_TEXT}
    await scenario.endpoint.stop()


@pytest.mark.parametrize("way", SCOPES)
async def test_a_failure_that_cannot_be_counted_holds_up_no_others(clock: ManualClock, way: str) -> None:
    scenario = scenario_of(clock, way, number_of_retries=9)
    scenario.faults.inject(Fault("dispatch", BOOM, when=sent_to("error")), Fault(COUNT_FAILURE, BOOM, message_id="bad"))
    await scenario.put(delayed("bad", to="error"))
    await start(scenario)
    for number in range(20):
        await scenario.put(delayed(str(number)))
        await clock.advance(1)
    assert await scenario.ids("out") == [str(number) for number in range(20)]
    assert [message.id for message in await scenario.pending()] == ["bad"]
    # And one message alone, among others that move, stops no endpoint
    for number in range(60):
        await scenario.put(delayed(f"n{number}"))
        await clock.advance(1)
    assert scenario.critical == []
    await scenario.endpoint.stop()


@pytest.mark.parametrize("retries", [0, 5])
async def test_many_messages_that_fail_do_not_hold_up_those_due_after_them(clock: ManualClock, retries: int) -> None:
    """Where moving one to the error queue takes a request, as on Azure, hundreds would take seconds."""
    # Given 300 messages to missing queues or of failing sends
    scenario = scenario_of(clock, "no transaction", number_of_retries=retries)
    scenario.faults.inject(
        Fault("dispatch", lambda sent: DispatchFailed(dict.fromkeys(range(len(sent)), BOOM)), when=sent_to("bad"))
    )
    await scenario.transport.setup_infrastructure(["bad"])
    await scenario.put(*[delayed(f"{number:03}", to="bad" if retries else "nowhere") for number in range(300)])
    # When another one is due while the first of them are recovered
    recovered: list[int] = []
    step, size = ("retry_many", 1) if retries else ("dispatch", 32)

    def note() -> None:
        recovered.append(size)
        if len(recovered) == 1:
            with contextlib.suppress(StopIteration):  # a store in memory does not wait
                scenario.put(delayed("good")).send(None)

    seen: list[int] = []
    scenario.faults.inject(
        Fault(step, before=note, when=None if retries else sent_to("error")),
        Fault("dispatch", before=lambda: seen.append(sum(recovered)), when=sent_to("out")),
    )
    await start(scenario)
    # Then they leave before most of those have been recovered
    assert await scenario.ids("out") == ["good"]
    assert len(seen) == 1
    assert seen[0] <= 96
    # And all of these are recovered, once each
    await clock.advance(120)
    assert sorted(await scenario.ids("error")) == [f"{number:03}" for number in range(300)]
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_failures_left_at_a_stop_are_free_for_others(clock: ManualClock) -> None:
    scenario = scenario_of(clock, "no transaction")
    await scenario.put(*[delayed(f"{number:03}", to="nowhere") for number in range(100)])
    await start(scenario)
    await scenario.endpoint.stop()
    moved = await scenario.ids("error")
    async with scenario.endpoint:
        await clock.advance(1)
        assert len(await scenario.ids("error")) == 100
    assert set(moved) <= set(await scenario.ids("error"))
    assert await scenario.pending() == []


@APART
async def test_one_message_that_is_set_aside_is_not_asked_for_all_the_time(clock: ManualClock, way: str) -> None:
    scenario = scenario_of(clock, way, number_of_retries=9)
    removal_fails(scenario, "bad")
    await scenario.put(delayed("bad"), delayed("good"))
    await start(scenario)
    await clock.advance(60)
    scenario.faults.clear_record()
    await clock.advance(10)
    assert scenario.faults.calls("next_due", *FETCH) < 60
    await scenario.endpoint.stop()


async def test_six_verbs_are_not_asked_all_the_time_while_a_message_backs_off(clock: ManualClock) -> None:
    scenario = build(clock, verbs_only=True, number_of_retries=9)
    scenario.faults.inject(Fault("dispatch", BOOM))
    await scenario.put(delayed())
    await start(scenario)
    await clock.advance(10)
    assert scenario.faults.calls("next_due", *FETCH) < 60
    await scenario.endpoint.stop()


class RowLock(Transaction):
    """A transaction whose end unlocks the messages that it has fetched, and deletes those that it has removed."""

    def __init__(self, store: TransactionLockStore) -> None:
        super().__init__("rows")
        self._store = store
        self.locked: set[str] = set()
        self.removed: set[str] = set()

    async def _commit(self) -> None:
        for message_id in self.removed:
            del self._store.messages[message_id]
        await self._rollback()

    async def _rollback(self) -> None:
        self._store.locks.difference_update(self.locked)
        self.locked.clear()


class TransactionLockStore:
    """Six verbs and transactions: what a transaction has fetched is locked for others until its end, and only then."""

    transaction_domain = "rows"
    locks_rows = True

    def __init__(self) -> None:
        self.messages: dict[str, DelayedMessage] = {}
        self.locks: set[str] = set()
        self.outside: list[str] = []
        self.open = 0
        self.most_open = 0

    def transaction(self) -> Transaction:
        transaction = RowLock(self)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        transaction.after_end(self._ended)
        return transaction

    def _ended(self) -> None:
        self.open -= 1

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None: ...

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        self.messages.setdefault(message.id, message)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        own = transaction.locked if isinstance(transaction, RowLock) else set()
        if transaction is None:
            self.outside.append("fetch")
        due = [message for message in self.messages.values() if message.due <= at]
        free = [message for message in due if message.id not in self.locks - own]
        first = min(free, key=lambda message: message.due, default=None)
        if first is not None and isinstance(transaction, RowLock):
            self.locks.add(first.id)
            transaction.locked.add(first.id)
        return first

    async def next_due(self) -> datetime | None:
        return min((message.due for message in self.messages.values()), default=None)

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        if message.id not in self.messages:
            return False
        if isinstance(transaction, RowLock):
            transaction.removed.add(message.id)
        else:
            assert message.id not in self.locks, "would wait for its own lock"
            self.outside.append("remove")
            del self.messages[message.id]
        return True

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        assert message.id not in self.locks, "would wait for its own lock"
        stored = self.messages.get(message.id)
        if stored is None:
            return False
        self.messages[message.id] = replace(stored, number_of_retries=stored.number_of_retries + 1)
        return True


async def run(
    clock: ManualClock, store: TransactionLockStore, transport: FaultyTransport, *, endpoints: int = 1, retries: int = 0
) -> list[Endpoint]:
    await transport.setup_infrastructure(["out"])
    made = [
        Endpoint(
            "sales",
            transport=transport,
            delayed_delivery=StoredDelivery(store, number_of_retries=retries),
            transaction_mode=TransactionMode.SENDS_ATOMIC_WITH_RECEIVE,
            clock=clock,
        )
        for _ in range(endpoints)
    ]
    for endpoint in made:
        await endpoint.start()
    await settle()
    return made


async def ids(transport: FaultyTransport, queue: str) -> list[str]:
    return [message.id for message in await transport.browse(queue, 1000)]


async def test_a_message_is_fetched_and_removed_in_one_transaction_of_a_store_with_six_verbs(
    clock: ManualClock,
) -> None:
    # Given a store whose lock is its transaction, and two instances of the endpoint
    store, transport = TransactionLockStore(), FaultyTransport(MemoryTransport())
    for number in range(30):
        await store.store(delayed(f"{number:02}"))
    # When the messages are due
    endpoints = await run(clock, store, transport, endpoints=2)
    await clock.advance(5)
    # Then each is sent once, and nothing is done outside a transaction
    assert await ids(transport, "out") == [f"{number:02}" for number in range(30)]
    assert (store.messages, store.outside, store.open) == ({}, [], 0)
    for endpoint in endpoints:
        await endpoint.stop()


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("instances", [1, 2])
async def test_a_message_that_backs_off_is_locked_by_a_transaction_of_its_own(
    clock: ManualClock, retries: int, instances: int
) -> None:
    # Given a message that cannot be sent, at the head of the store
    store, transport = TransactionLockStore(), FaultyTransport(MemoryTransport())
    transport.inject(Fault("dispatch", BOOM, when=sent_to("out"), message_id="bad"))
    await store.store(delayed("bad"))
    for number in range(5):
        await store.store(delayed(str(number), after=number * 0.1))
    # When they are due
    endpoints = await run(clock, store, transport, retries=retries, endpoints=instances)
    await clock.advance(0.9)
    # Then the others leave, and it is tried as often as it should
    assert await ids(transport, "out") == ["0", "1", "2", "3", "4"]
    await clock.advance(30)
    tried = [call for call in transport.faults.recorded("dispatch") if call.ids == ("bad",)]
    assert len(tried) == retries + 2  # the last one is to the error queue
    assert await ids(transport, "error") == ["bad"]
    assert (store.messages, store.open) == ({}, 0)
    for endpoint in endpoints:
        await endpoint.stop()


async def test_many_messages_that_back_off_do_not_open_a_transaction_each(clock: ManualClock) -> None:
    store, transport = TransactionLockStore(), FaultyTransport(MemoryTransport())
    transport.inject(Fault("dispatch", BOOM, when=sent_to("out")))
    for number in range(100):
        await store.store(delayed(f"bad{number:03}"))
    await store.store(delayed("good", after=0.01, to="elsewhere"))
    await transport.setup_infrastructure(["elsewhere"])
    [endpoint] = await run(clock, store, transport, retries=2)
    await clock.advance(30)
    assert await ids(transport, "elsewhere") == ["good"]
    assert len(await ids(transport, "error")) == 100
    assert transport.calls("dispatch") == 3 * 100 + 100 + 1
    assert store.most_open <= 50
    await endpoint.stop()
    assert store.open == 0


async def test_a_failure_is_counted_at_once_and_survives_a_stop(clock: ManualClock) -> None:
    store, transport = TransactionLockStore(), FaultyTransport(MemoryTransport())
    transport.inject(Fault("dispatch", BOOM, message_id="bad"))
    await store.store(delayed("bad"))
    [endpoint] = await run(clock, store, transport, retries=5)
    assert store.messages["bad"].number_of_retries == 1
    await endpoint.stop()
    assert (store.messages["bad"].number_of_retries, store.locks, store.open) == (1, set(), 0)


async def test_an_outage_of_the_queues_counts_no_failure_of_a_message(clock: ManualClock) -> None:
    store, transport = TransactionLockStore(), FaultyTransport(MemoryTransport())
    transport.inject(Fault("dispatch", DOWN))
    for number in range(3):
        await store.store(delayed(str(number)))
    [endpoint] = await run(clock, store, transport, retries=5)
    await clock.advance(timedelta(seconds=5))
    assert {message.number_of_retries for message in store.messages.values()} == {0}
    transport.heal()
    await clock.advance(2)
    assert await ids(transport, "out") == ["0", "1", "2"]
    await endpoint.stop()
