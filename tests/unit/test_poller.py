"""The poller: batches, isolation, outages, notifications, and the order of sending and removing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import START, House, build, delayed

from delayline import BackendUnavailable, DelayedMessage, DispatchFailed, Message, TransactionMode
from delayline.events import Event
from delayline.testing import Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

DOWN = BackendUnavailable("the server does not answer")
BOOM = RuntimeError("boom")
WAYS = pytest.mark.parametrize("shared", [True, False], ids=["one transaction", "no transaction"])


async def start(house: House) -> None:
    await house.transport.setup_infrastructure(["out"])
    await house.endpoint.start()
    await settle()


async def test_a_message_leaves_when_it_is_due_and_not_before(house: House) -> None:
    await start(house)
    await house.endpoint.send("out", b"x", message_id="m", delay=timedelta(seconds=5))
    await house.clock.advance(4.999)
    assert await house.ids("out") == []
    await house.clock.advance(0.001)
    assert await house.ids("out") == ["m"]
    assert await house.waiting() == []
    await house.endpoint.stop()


async def test_messages_leave_in_the_order_they_are_due(house: House) -> None:
    await house.hold(*[delayed(str(second), after=second) for second in (3, 1, 2)])
    await start(house)
    await house.clock.advance(10)
    assert await house.ids("out") == ["1", "2", "3"]
    await house.endpoint.stop()


async def test_batches_end_at_the_count(clock: ManualClock) -> None:
    house = build(clock, batch_size=4)
    await house.hold(*[delayed(f"{number:02}") for number in range(10)])
    await start(house)
    sizes = [len(ids) for verb, ids in house.faults.calls if verb == "dispatch"]
    assert sizes == [4, 4, 2]
    await house.endpoint.stop()


async def test_batches_end_at_the_bytes_but_hold_at_least_one_message(clock: ManualClock) -> None:
    house = build(clock, batch_bytes=100)
    await house.hold(*[delayed(str(number), body=b"x" * size) for number, size in enumerate((40, 40, 500, 40))])
    await start(house)
    assert [ids for verb, ids in house.faults.calls if verb == "dispatch"] == [("0", "1"), ("2",), ("3",)]
    await house.endpoint.stop()


@WAYS
async def test_one_bad_message_in_a_batch_is_isolated_and_its_neighbours_leave(
    clock: ManualClock, shared: bool
) -> None:
    # Given a message that makes the whole batch fail, without saying which it is
    house = build(clock, shared=shared)
    house.faults.for_id("dispatch", "2", BOOM)
    await house.hold(*[delayed(str(number)) for number in range(4)])
    # When the batch is due
    await start(house)
    # Then the others went out once each, and it alone failed
    assert await house.ids("out") == ["0", "1", "3"]
    assert [message.id for message in await house.waiting()] == ["2"]
    await house.endpoint.stop()


async def test_after_the_isolation_batches_are_whole_again(clock: ManualClock) -> None:
    house = build(clock, number_of_retries=9)
    house.faults.for_id("dispatch", "1", BOOM)
    await house.hold(*[delayed(str(number)) for number in range(3)])
    await start(house)
    house.faults.calls.clear()
    await house.hold(*[delayed(f"n{number}") for number in range(3)])
    await settle()
    assert [ids for verb, ids in house.faults.calls if verb == "dispatch"] == [("n0", "n1", "n2")]
    await house.endpoint.stop()


async def test_an_outage_counts_nobody_waits_a_second_and_sends_when_it_is_over(house: House) -> None:
    house.faults.always("dispatch", DOWN)
    await house.hold(*[delayed(str(number)) for number in range(3)])
    await start(house)
    for _ in range(5):
        await house.clock.advance(1)
    attempts = house.faults.count("dispatch")
    assert 5 <= attempts <= 7
    assert {message.number_of_retries for message in await house.waiting()} == {0}
    house.faults.heal()
    await house.clock.advance(1)
    assert await house.ids("out") == ["0", "1", "2"]
    assert await house.ids("error") == []
    await house.endpoint.stop()


@WAYS
async def test_an_outage_of_some_operations_of_a_batch_counts_nobody_either(clock: ManualClock, shared: bool) -> None:
    house = build(clock, shared=shared)
    house.faults.on["dispatch"] = lambda ids: DispatchFailed(dict.fromkeys(range(len(ids)), DOWN))
    await house.hold(delayed("a"), delayed("b"))
    await start(house)
    assert house.faults.count("dispatch") == 1
    assert [message.number_of_retries for message in await house.waiting()] == [0, 0]
    house.faults.heal()
    await clock.advance(1)
    assert await house.ids("out") == ["a", "b"]
    await house.endpoint.stop()


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("dispatch", "Failed to dispatch delayed messages to destination"),
        ("fetch", "Failed to fetch due delayed messages from the storage"),
        ("next_due", "Failed to fetch due delayed messages from the storage"),
    ],
)
async def test_a_fault_that_lasts_is_a_critical_error_and_polling_goes_on(house: House, verb: str, text: str) -> None:
    house.faults.always(verb, DOWN)
    await house.hold(delayed())
    await start(house)
    await house.clock.advance(29)
    assert house.critical == []
    await house.clock.advance(2)
    assert house.critical == [text]
    house.faults.heal()
    await house.clock.advance(10)
    assert await house.ids("out") == ["m"]
    await house.endpoint.stop()


async def test_a_commit_that_always_fails_triggers_the_dispatch_breaker(clock: ManualClock) -> None:
    # Given dispatches that succeed inside transactions which never commit
    house = build(clock)
    house.faults.always("remove", DOWN)
    await house.hold(delayed())
    await start(house)
    # Then those dispatches do not count as successes
    await clock.advance(31)
    assert house.critical == ["Failed to dispatch delayed messages to destination"]
    assert await house.ids("out") == []
    await house.endpoint.stop()


async def test_a_store_with_broken_answers_does_not_end_the_poller(clock: ManualClock) -> None:
    house = build(clock)
    await house.hold(delayed())

    async def naive() -> Any:  # noqa: ANN401 - a wrong type is the point
        return START.replace(tzinfo=None)

    house.store.next_due = naive  # type: ignore[method-assign]
    await start(house)
    await clock.advance(1)
    del house.store.next_due
    await clock.advance(1)
    assert await house.ids("out") == ["m"]
    await house.endpoint.stop()


async def test_something_due_earlier_wakes_the_poller(house: House) -> None:
    await house.hold(delayed("late", after=120))
    await start(house)
    await house.endpoint.send("out", b"", message_id="early", delay=timedelta(seconds=5))
    await house.clock.advance(5)
    assert await house.ids("out") == ["early"]
    await house.endpoint.stop()


async def test_something_due_later_does_not_wake_it(clock: ManualClock) -> None:
    house = build(clock)
    await house.hold(delayed("first", after=10))
    await start(house)
    before = house.faults.count("next_due")
    await house.endpoint.send("out", b"", delay=timedelta(seconds=20))
    await settle()
    assert house.faults.count("next_due") == before
    await house.endpoint.stop()


async def test_a_sleep_is_sixty_seconds_at_most(clock: ManualClock) -> None:
    # Given a store that tells nobody what others put into it
    house = build(clock, six=True)
    await house.hold(delayed("next year", after=31_536_000))
    await start(house)
    await house.hold(delayed("from elsewhere", after=1))
    await clock.advance(59.9)
    assert await house.ids("out") == []
    await clock.advance(0.2)
    assert await house.ids("out") == ["from elsewhere"]
    await house.endpoint.stop()


async def test_what_is_due_but_locked_elsewhere_is_looked_at_twenty_times_a_second_at_most(clock: ManualClock) -> None:
    house = build(clock)
    await house.hold(delayed())
    await house.store.fetch_next_due(START)  # somebody else has it

    async def still_due() -> Any:  # noqa: ANN401
        house.faults.check("next_due")
        return START

    house.store.next_due = still_due  # type: ignore[method-assign]
    await start(house)
    house.faults.calls.clear()
    await clock.advance(1)
    assert 15 <= house.faults.count("next_due") <= 21
    await house.endpoint.stop()


async def test_what_was_sent_is_removed_before_anything_else_is_sent(clock: ManualClock) -> None:
    # Given a message that was sent and whose removal fails
    house = build(clock, shared=False)
    house.faults.always("remove", DOWN)
    await house.hold(delayed("a"))
    await start(house)
    await house.hold(delayed("b"))
    await clock.advance(3)
    assert await house.ids("out") == ["a"]
    # When removing works again, although nothing else is due
    house.faults.heal()
    await clock.advance(1)
    # Then it is gone, sent once, and the next one follows
    assert await house.ids("out") == ["a", "b"]
    assert await house.waiting() == []
    assert house.faults.verbs("dispatch") == [("dispatch", ("a",)), ("dispatch", ("b",))]
    await house.endpoint.stop()


async def test_what_was_sent_is_removed_even_when_nothing_else_falls_due(clock: ManualClock) -> None:
    house = build(clock, shared=False)
    house.faults.always("remove", DOWN)
    await house.hold(delayed("a"))
    await start(house)
    house.faults.heal()
    await clock.advance(1)
    assert await house.waiting() == []
    await house.endpoint.stop()


async def test_a_removal_that_works_again_is_the_end_of_the_fault(clock: ManualClock) -> None:
    house = build(clock, shared=False)
    house.faults.always("remove", DOWN)
    await house.hold(delayed("a"))
    with Signals() as signals:
        await start(house)
        house.faults.heal()
        await clock.advance(1)
        assert signals.count(Event.BREAKER_ARMED) == signals.count(Event.BREAKER_DISARMED) == 1
    await house.endpoint.stop()


async def test_what_was_sent_is_removed_at_a_stop(clock: ManualClock) -> None:
    house = build(clock, shared=False)
    house.faults.always("remove", DOWN)
    await house.hold(delayed("a"))
    await start(house)
    house.faults.heal()
    await house.endpoint.stop()
    assert await house.waiting() == []


async def test_a_removal_that_never_works_is_a_critical_error(clock: ManualClock) -> None:
    house = build(clock, shared=False)
    house.faults.always("remove", BOOM)
    await house.hold(delayed("a"))
    await start(house)
    await clock.advance(31)
    assert house.critical == ["Failed to dispatch delayed messages to destination"]
    assert house.faults.count("dispatch") == 1
    await house.endpoint.stop()


async def test_a_message_somebody_removed_meanwhile_is_reported(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = build(clock, shared=False)
    await house.hold(delayed("a"))

    async def nothing(*_: object, **__: object) -> int:
        return 0

    house.store.remove_many = nothing  # type: ignore[method-assign, union-attr]
    await start(house)
    assert [record.message for record in caplog.records if getattr(record, "event", "") == Event.ALREADY_REMOVED] == [
        "Potential more-than-once dispatch as delayed message already removed from storage. (1 of 1)"
    ]
    await house.endpoint.stop()


async def test_what_a_handler_defers_outlives_the_late_removal_of_what_it_received(clock: ManualClock) -> None:
    # Given a message that was sent to its handler, but could not be removed yet
    house = build(clock, shared=False, transaction_mode=TransactionMode.RECEIVE_ONLY)
    house.faults.always("remove", DOWN)
    await house.hold(delayed("m", to="sales"))
    seen: list[int] = []

    @house.endpoint.handler
    async def handle(message: object, context: Any) -> None:  # noqa: ANN401
        seen.append(1)
        if len(seen) == 1:
            await context.defer(timedelta(seconds=60))

    await start(house)
    assert seen == [1]
    # When the removal works at last
    house.faults.heal()
    await clock.advance(1)
    # Then it took what was sent, not what the handler deferred
    assert len(await house.waiting()) == 1
    await clock.advance(60)
    assert seen == [1, 1]
    assert await house.waiting() == []
    await house.endpoint.stop()


async def test_stop_interrupts_a_pause_and_is_idempotent(clock: ManualClock) -> None:
    house = build(clock)
    house.faults.always("next_due", DOWN)
    await start(house)
    await house.endpoint.stop()
    await house.endpoint.stop()
    assert clock.now() == START


@pytest.mark.parametrize("verb", ["dispatch", "remove"])
async def test_what_stays_is_free_for_others_while_the_poller_waits(clock: ManualClock, verb: str) -> None:
    # Given a transport that is down for some or all of a batch
    house = build(clock, shared=False)
    house.faults.always(verb, DOWN)
    if verb == "remove":
        house.faults.on["dispatch"] = lambda ids: DispatchFailed({1: DOWN})
    await house.hold(delayed("a"), delayed("b"))
    # When the poller has begun to wait, and no time has passed
    await start(house)
    # Then what it has not sent is unlocked
    assert house.faults.verbs("release") == [("release", ("b",) if verb == "remove" else ("a", "b"))]
    await house.endpoint.stop()


async def test_a_release_that_fails_is_tried_again(clock: ManualClock) -> None:
    # Given a message that is kept, and a store that fails to unlock it
    house = build(clock, shared=False)
    house.faults.always("dispatch", DOWN)
    house.faults.always("release", DOWN)
    await house.hold(delayed())
    await start(house)
    await clock.advance(1)
    assert house.critical == []
    # When both work again
    house.faults.heal()
    await clock.advance(5)
    # Then no lock is left over that keeps it where it is
    assert (await house.ids("out"), await house.waiting()) == (["m"], [])
    await house.endpoint.stop()


@pytest.mark.parametrize("damaged", [False, True], ids=["readable", "damaged"])
async def test_the_dispatch_properties_of_dotnet_do_not_reach_the_receiver(clock: ManualClock, damaged: bool) -> None:
    house = build(clock)
    stored = b'{"NServiceBus.Timeouts.Properties.DeliverAt": "x", "mine": "1"' + (b"" if damaged else b"}")
    await house.hold(DelayedMessage(Message.from_encoded("m", stored, b""), "out", START))
    await start(house)
    sent = await house.one("out")
    if damaged:
        assert sent.encoded_headers == stored
    else:
        assert dict(sent.headers) == {"mine": "1"}
    await house.endpoint.stop()
