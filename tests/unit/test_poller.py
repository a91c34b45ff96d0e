"""The poller: batches, isolation, outages, notifications, and the order of sending and removing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import START, Scenario, build, delayed

from delayline import BackendUnavailable, DelayedMessage, Message, TransactionMode
from delayline.errors import DispatchFailed
from delayline.events import Event
from delayline.testing import Fault, Signals
from delayline.testing.clock import settle
from delayline.testing.faults import FETCH, REMOVE

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.testing.clock import ManualClock

DOWN = BackendUnavailable("the server does not answer")
BOOM = RuntimeError("boom")
WAYS = pytest.mark.parametrize("shared", [True, False], ids=["one transaction", "no transaction"])


async def start(scenario: Scenario) -> None:
    await scenario.transport.setup_infrastructure(["out"])
    await scenario.endpoint.start()
    await settle()


async def test_a_message_leaves_when_it_is_due_and_not_before(scenario: Scenario) -> None:
    await start(scenario)
    await scenario.endpoint.send("out", b"x", message_id="m", delay=timedelta(seconds=5))
    await scenario.clock.advance(4.999)
    assert await scenario.ids("out") == []
    await scenario.clock.advance(0.001)
    assert await scenario.ids("out") == ["m"]
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_messages_leave_in_the_order_they_are_due(scenario: Scenario) -> None:
    await scenario.put(*[delayed(str(second), after=second) for second in (3, 1, 2)])
    await start(scenario)
    await scenario.clock.advance(10)
    assert await scenario.ids("out") == ["1", "2", "3"]
    await scenario.endpoint.stop()


async def test_batches_end_at_the_count(clock: ManualClock) -> None:
    scenario = build(clock, batch_size=4)
    await scenario.put(*[delayed(f"{number:02}") for number in range(10)])
    await start(scenario)
    sizes = [len(ids) for _, ids in scenario.faults.recorded("dispatch")]
    assert sizes == [4, 4, 2]
    await scenario.endpoint.stop()


async def test_batches_end_at_the_bytes_but_hold_at_least_one_message(clock: ManualClock) -> None:
    scenario = build(clock, batch_bytes=100)
    await scenario.put(*[delayed(str(number), body=b"x" * size) for number, size in enumerate((40, 40, 500, 40))])
    await start(scenario)
    assert [ids for _, ids in scenario.faults.recorded("dispatch")] == [("0", "1"), ("2",), ("3",)]
    await scenario.endpoint.stop()


@WAYS
async def test_one_bad_message_in_a_batch_is_isolated_and_its_neighbours_leave(
    clock: ManualClock, shared: bool
) -> None:
    # Given a message that makes the whole batch fail, without saying which it is
    scenario = build(clock, shared=shared)
    scenario.faults.inject(Fault("dispatch", BOOM, message_id="2"))
    await scenario.put(*[delayed(str(number)) for number in range(4)])
    # When the batch is due
    await start(scenario)
    # Then the others went out once each, and it alone failed
    assert await scenario.ids("out") == ["0", "1", "3"]
    assert [message.id for message in await scenario.pending()] == ["2"]
    await scenario.endpoint.stop()


async def test_after_the_isolation_batches_are_whole_again(clock: ManualClock) -> None:
    scenario = build(clock, number_of_retries=9)
    scenario.faults.inject(Fault("dispatch", BOOM, message_id="1"))
    await scenario.put(*[delayed(str(number)) for number in range(3)])
    await start(scenario)
    scenario.faults.clear_record()
    await scenario.put(*[delayed(f"n{number}") for number in range(3)])
    await settle()
    assert [ids for _, ids in scenario.faults.recorded("dispatch")] == [("n0", "n1", "n2")]
    await scenario.endpoint.stop()


async def test_an_outage_is_no_failure_of_a_message_and_is_retried_each_second(scenario: Scenario) -> None:
    scenario.faults.inject(Fault("dispatch", DOWN))
    await scenario.put(*[delayed(str(number)) for number in range(3)])
    await start(scenario)
    for _ in range(5):
        await scenario.clock.advance(1)
    attempts = scenario.faults.calls("dispatch")
    assert 5 <= attempts <= 7
    assert {message.number_of_retries for message in await scenario.pending()} == {0}
    scenario.faults.heal()
    await scenario.clock.advance(1)
    assert await scenario.ids("out") == ["0", "1", "2"]
    assert await scenario.ids("error") == []
    await scenario.endpoint.stop()


@WAYS
async def test_an_outage_of_some_operations_of_a_batch_counts_no_failure(clock: ManualClock, shared: bool) -> None:
    scenario = build(clock, shared=shared)
    scenario.faults.inject(Fault("dispatch", lambda sent: DispatchFailed(dict.fromkeys(range(len(sent)), DOWN))))
    await scenario.put(delayed("a"), delayed("b"))
    await start(scenario)
    assert scenario.faults.calls("dispatch") == 1
    assert [message.number_of_retries for message in await scenario.pending()] == [0, 0]
    scenario.faults.heal()
    await clock.advance(1)
    assert await scenario.ids("out") == ["a", "b"]
    await scenario.endpoint.stop()


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("dispatch", "Failed to dispatch delayed messages to destination"),
        (FETCH, "Failed to fetch due delayed messages from the storage"),
        ("next_due", "Failed to fetch due delayed messages from the storage"),
    ],
    ids=["dispatch", "fetch", "next_due"],
)
async def test_a_fault_that_lasts_is_a_critical_error_and_polling_goes_on(
    scenario: Scenario, verb: str | tuple[str, ...], text: str
) -> None:
    scenario.faults.inject(Fault(verb, DOWN))
    await scenario.put(delayed())
    await start(scenario)
    await scenario.clock.advance(29)
    assert scenario.critical == []
    await scenario.clock.advance(2)
    assert scenario.critical == [text]
    scenario.faults.heal()
    await scenario.clock.advance(10)
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.stop()


async def test_a_commit_that_always_fails_triggers_the_dispatch_breaker(clock: ManualClock) -> None:
    # Given dispatches that succeed inside transactions which never commit
    scenario = build(clock)
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.put(delayed())
    await start(scenario)
    # Then those dispatches do not count as successes
    await clock.advance(31)
    assert scenario.critical == ["Failed to dispatch delayed messages to destination"]
    assert await scenario.ids("out") == []
    await scenario.endpoint.stop()


async def test_a_store_with_broken_answers_does_not_end_the_poller(clock: ManualClock) -> None:
    scenario = build(clock)
    await scenario.put(delayed())

    async def naive() -> Any:  # noqa: ANN401 - a wrong type is the point
        return START.replace(tzinfo=None)

    scenario.store.next_due = naive  # type: ignore[method-assign]
    await start(scenario)
    await clock.advance(1)
    del scenario.store.next_due
    await clock.advance(1)
    assert await scenario.ids("out") == ["m"]
    await scenario.endpoint.stop()


async def test_something_due_earlier_wakes_the_poller(scenario: Scenario) -> None:
    await scenario.put(delayed("late", after=120))
    await start(scenario)
    await scenario.endpoint.send("out", b"", message_id="early", delay=timedelta(seconds=5))
    await scenario.clock.advance(5)
    assert await scenario.ids("out") == ["early"]
    await scenario.endpoint.stop()


async def test_a_message_stored_during_the_sleep_is_moved_without_asking_when_it_is_due(clock: ManualClock) -> None:
    # Given a poller that sleeps
    scenario = build(clock)
    await scenario.put(delayed("late", after=30))
    await start(scenario)
    before = scenario.faults.calls("next_due")
    # When messages are stored that are due soon, each before the last
    for second in (1.9, 1.5, 1):
        await scenario.endpoint.send("out", b"", message_id=str(second), delay=timedelta(seconds=second))
        await settle()
    # Then their due times are known
    await scenario.clock.advance(0.9)
    assert scenario.faults.calls("next_due") == before
    assert await scenario.ids("out") == []
    # And all leave when they are due, as do those that it has slept for
    await scenario.clock.advance(0.1)
    assert await scenario.ids("out") == ["1"]
    await scenario.clock.advance(29)
    assert await scenario.ids("out") == ["1", "1.5", "1.9", "late"]
    await scenario.endpoint.stop()


async def test_a_message_stored_during_the_sleep_may_be_gone_when_it_is_due(clock: ManualClock) -> None:
    scenario = build(clock)
    await scenario.put(delayed("late", after=10))
    await start(scenario)
    await scenario.endpoint.send("out", b"", message_id="early", delay=timedelta(seconds=2))
    await scenario.clock.advance(1)
    await scenario.endpoint.delayed.cancel("early")
    await scenario.clock.advance(9)
    assert await scenario.ids("out") == ["late"]
    await scenario.endpoint.stop()


async def test_something_due_later_does_not_wake_it(clock: ManualClock) -> None:
    scenario = build(clock)
    await scenario.put(delayed("first", after=10))
    await start(scenario)
    before = scenario.faults.calls("next_due")
    await scenario.endpoint.send("out", b"", delay=timedelta(seconds=20))
    await settle()
    assert scenario.faults.calls("next_due") == before
    await scenario.endpoint.stop()


async def test_a_sleep_is_sixty_seconds_at_most(clock: ManualClock) -> None:
    # Given a store without notifications of other processes' messages
    scenario = build(clock, verbs_only=True)
    await scenario.put(delayed("next year", after=31_536_000))
    await start(scenario)
    await scenario.put(delayed("from elsewhere", after=1))
    await clock.advance(59.9)
    assert await scenario.ids("out") == []
    await clock.advance(0.2)
    assert await scenario.ids("out") == ["from elsewhere"]
    await scenario.endpoint.stop()


async def test_due_messages_locked_elsewhere_are_queried_twenty_times_a_second_at_most(clock: ManualClock) -> None:
    scenario = build(clock)
    await scenario.put(delayed())
    await scenario.store.fetch_next_due(START)  # another process has claimed it

    async def still_due() -> datetime:
        return START

    scenario.memory.next_due = still_due  # type: ignore[method-assign]
    await start(scenario)
    scenario.faults.clear_record()
    await clock.advance(1)
    assert 15 <= scenario.faults.calls("next_due") <= 21
    await scenario.endpoint.stop()


async def test_sent_messages_are_removed_before_others_are_sent(clock: ManualClock) -> None:
    # Given a message that was sent and whose removal fails
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.put(delayed("a"))
    await start(scenario)
    await scenario.put(delayed("b"))
    await clock.advance(3)
    assert await scenario.ids("out") == ["a"]
    # When removing works again, although nothing else is due
    scenario.faults.heal()
    await clock.advance(1)
    # Then it is gone, sent once, and the next one follows
    assert await scenario.ids("out") == ["a", "b"]
    assert await scenario.pending() == []
    assert scenario.faults.recorded("dispatch") == [("dispatch", ("a",)), ("dispatch", ("b",))]
    await scenario.endpoint.stop()


async def test_sent_messages_are_removed_when_no_others_are_due(clock: ManualClock) -> None:
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.put(delayed("a"))
    await start(scenario)
    scenario.faults.heal()
    await clock.advance(1)
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_a_removal_that_works_again_is_the_end_of_the_fault(clock: ManualClock) -> None:
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.put(delayed("a"))
    with Signals() as signals:
        await start(scenario)
        scenario.faults.heal()
        await clock.advance(1)
        assert signals.count(Event.BREAKER_ARMED) == signals.count(Event.BREAKER_DISARMED) == 1
    await scenario.endpoint.stop()


async def test_sent_messages_are_removed_at_a_stop(clock: ManualClock) -> None:
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.put(delayed("a"))
    await start(scenario)
    scenario.faults.heal()
    await scenario.endpoint.stop()
    assert await scenario.pending() == []


async def test_a_removal_that_never_works_is_a_critical_error(clock: ManualClock) -> None:
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault(REMOVE, BOOM))
    await scenario.put(delayed("a"))
    await start(scenario)
    await clock.advance(31)
    assert scenario.critical == ["Failed to dispatch delayed messages to destination"]
    assert scenario.faults.calls("dispatch") == 1
    await scenario.endpoint.stop()


async def test_a_message_removed_meanwhile_is_reported(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    scenario = build(clock, shared=False)
    await scenario.put(delayed("a"))

    async def nothing(*_: object, **__: object) -> int:
        return 0

    scenario.memory.remove_many = nothing  # type: ignore[method-assign]
    await start(scenario)
    assert [record.message for record in caplog.records if getattr(record, "event", "") == Event.ALREADY_REMOVED] == [
        "Potential more-than-once dispatch as delayed message already removed from storage. (1 of 1)"
    ]
    await scenario.endpoint.stop()


async def test_a_deferred_message_survives_the_late_removal_of_the_received_one(clock: ManualClock) -> None:
    # Given a message that was sent to its handler, but could not be removed yet
    scenario = build(clock, shared=False, transaction_mode=TransactionMode.RECEIVE_ONLY)
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.put(delayed("m", to="sales"))
    seen: list[int] = []

    @scenario.endpoint.handler
    async def handle(message: object, context: Any) -> None:  # noqa: ANN401
        seen.append(1)
        if len(seen) == 1:
            await context.defer(timedelta(seconds=60))

    await start(scenario)
    assert seen == [1]
    # When the removal works at last
    scenario.faults.heal()
    await clock.advance(1)
    # Then it dispatched the sent message, not the one that the handler deferred
    assert len(await scenario.pending()) == 1
    await clock.advance(60)
    assert seen == [1, 1]
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_stop_interrupts_a_pause_and_is_idempotent(clock: ManualClock) -> None:
    scenario = build(clock)
    scenario.faults.inject(Fault("next_due", DOWN))
    await start(scenario)
    await scenario.endpoint.stop()
    await scenario.endpoint.stop()
    assert clock.now() == START


@pytest.mark.parametrize("verb", ["dispatch", "remove_many"])
async def test_messages_that_stay_are_unlocked_while_the_poller_waits(clock: ManualClock, verb: str) -> None:
    # Given a transport that is down for some or all of a batch
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault(verb, DOWN))
    if verb == "remove_many":
        scenario.faults.inject(Fault("dispatch", DispatchFailed({1: DOWN})))
    await scenario.put(delayed("a"), delayed("b"))
    # When the poller has begun to wait, and no time has passed
    await start(scenario)
    # Then unsent messages are unlocked
    assert scenario.faults.recorded("release_many") == [
        ("release_many", ("b",) if verb == "remove_many" else ("a", "b"))
    ]
    await scenario.endpoint.stop()


async def test_a_release_that_fails_is_tried_again(clock: ManualClock) -> None:
    # Given a message that is kept, and a store that fails to unlock it
    scenario = build(clock, shared=False)
    scenario.faults.inject(Fault("dispatch", DOWN))
    scenario.faults.inject(Fault("release_many", DOWN))
    await scenario.put(delayed())
    await start(scenario)
    await clock.advance(1)
    assert scenario.critical == []
    # When both work again
    scenario.faults.heal()
    await clock.advance(5)
    # Then no lock is left over that keeps it where it is
    assert (await scenario.ids("out"), await scenario.pending()) == (["m"], [])
    await scenario.endpoint.stop()


@pytest.mark.parametrize("damaged", [False, True], ids=["readable", "damaged"])
async def test_the_dispatch_properties_of_dotnet_do_not_reach_the_receiver(clock: ManualClock, damaged: bool) -> None:
    scenario = build(clock)
    stored = b'{"NServiceBus.Timeouts.Properties.DeliverAt": "x", "mine": "1"' + (b"" if damaged else b"}")
    await scenario.put(DelayedMessage(Message.from_encoded("m", stored, b""), "out", START))
    await start(scenario)
    sent = await scenario.only("out")
    if damaged:
        assert sent.encoded_headers == stored
    else:
        assert dict(sent.headers) == {"mine": "1"}
    await scenario.endpoint.stop()
