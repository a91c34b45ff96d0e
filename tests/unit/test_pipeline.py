"""Receiving: retries, the error queue, sends of handlers, and the transaction modes."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import Scenario, build, sent_to

from delayline import (
    BackendUnavailable,
    Headers,
    InvalidDueTime,
    InvalidMessage,
    Message,
    MessageContext,
    QueueNotFound,
    Recoverability,
    TransactionMode,
)
from delayline.errors import DispatchFailed
from delayline.events import Event
from delayline.testing import Fault
from delayline.testing.clock import ManualClock, settle
from delayline.testing.faults import FETCH, STORE
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

BOOM = RuntimeError("boom")
DOWN = BackendUnavailable("the server does not answer")
STRONGER = [TransactionMode.RECEIVE_ONLY, TransactionMode.SENDS_ATOMIC_WITH_RECEIVE, TransactionMode.TRANSACTION_SCOPE]


async def start(scenario: Scenario, act: Callable[[Message, MessageContext], Awaitable[None]]) -> list[tuple[str, int]]:
    """Start with that handler; return the list of (message id, attempt) it fills."""
    seen: list[tuple[str, int]] = []

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append((message.id, context.attempt))
        await act(message, context)

    await scenario.transport.setup_infrastructure(["out"])
    await scenario.endpoint.start()
    return seen


async def receive(scenario: Scenario, id: str = "m", **headers: str) -> None:
    await scenario.transport.dispatch([TransportOperation(Message(id, headers, b"body"), "sales")])
    await settle()


async def fail(message: Message, context: MessageContext) -> None:
    raise BOOM.with_traceback(None)


async def succeed(message: Message, context: MessageContext) -> None:
    """Do nothing."""


@pytest.mark.parametrize("mode", STRONGER)
async def test_six_attempts_in_four_rounds_then_the_error_queue(clock: ManualClock, mode: TransactionMode) -> None:
    scenario = build(clock, transaction_mode=mode, recoverability=Recoverability(immediate_pause=timedelta(0)))
    seen = await start(scenario, fail)
    await receive(scenario)
    counts = [len(seen)]
    for seconds in (10, 20, 30):
        await clock.advance(seconds - 0.1)
        assert len(seen) == counts[-1]
        await clock.advance(0.1)
        counts.append(len(seen))
    assert counts == [6, 12, 18, 24]
    assert [attempt for _, attempt in seen] == [1, 2, 3, 4, 5, 6] * 4
    assert {id for id, _ in seen} == {"m"}
    failed = await scenario.only("error")
    assert failed.headers[Headers.FAILED_QUEUE] == "sales"
    assert failed.headers[Headers.EXCEPTION_MESSAGE] == "boom"
    assert Headers.RETRIES not in failed.headers
    assert Headers.RETRIES_TIMESTAMP in failed.headers
    assert (await scenario.transport.count("sales"), await scenario.pending()) == (0, [])
    await scenario.endpoint.stop()


async def test_a_retry_that_succeeds_ends_it(clock: ManualClock) -> None:
    scenario = build(clock)

    async def third_time(message: Message, context: MessageContext) -> None:
        if context.attempt < 3:
            raise BOOM.with_traceback(None)

    seen = await start(scenario, third_time)
    await receive(scenario)
    await clock.advance(0.01)
    assert [attempt for _, attempt in seen] == [1, 2, 3]
    assert (await scenario.transport.count("sales"), await scenario.ids("error")) == (0, [])
    await scenario.endpoint.stop()


async def test_immediate_retries_pause_longer_and_longer_and_are_as_many(clock: ManualClock) -> None:
    # Given the defaults
    scenario = build(clock)
    seen = await start(scenario, fail)
    await receive(scenario)
    # Then the first retry waits for nothing, and the others for 10, 20, 40 and 80 ms
    assert [attempt for _, attempt in seen] == [1, 2]
    for number, milliseconds in enumerate([10, 20, 40, 80], start=3):
        await clock.advance((milliseconds - 1) / 1000)
        assert len(seen) == number - 1
        await clock.advance(0.001)
        assert len(seen) == number
    # And so in each round, until the message is in the error queue
    await clock.advance(100)
    assert [attempt for _, attempt in seen] == [1, 2, 3, 4, 5, 6] * 4
    assert Headers.RETRIES not in (await scenario.only("error")).headers
    await scenario.endpoint.stop()


async def test_a_stop_ends_the_pause_before_a_retry(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_pause=timedelta(hours=1)))
    seen = await start(scenario, fail)
    await receive(scenario)
    assert len(seen) == 2
    await scenario.endpoint.stop()
    assert len(seen) == 2
    assert await scenario.ids("sales") == ["m"]


async def test_a_message_that_fails_has_one_traceback_in_the_log(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "delayline")
    scenario = build(clock)

    async def fail_at_length(message: Message, context: MessageContext) -> None:
        raise ValueError("boom\n" + "x" * 200_000)

    seen = await start(scenario, fail_at_length)
    await receive(scenario)
    await clock.advance(100)
    assert len(seen) == 24
    about = [record for record in caplog.records if "handle" in record.getMessage() or "Moved" in record.getMessage()]
    assert [getattr(record, "event", "") for record in about if record.exc_info] == [Event.MOVED_TO_ERROR]
    assert sum(getattr(record, "event", "") == Event.HANDLER_FAILED for record in about) == 24
    assert all("\n" not in record.getMessage() and len(record.getMessage()) < 500 for record in about)
    await scenario.endpoint.stop()


async def test_an_unrecoverable_exception_goes_to_the_error_queue_at_once(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(unrecoverable=(RuntimeError,)))
    seen = await start(scenario, fail)
    await receive(scenario)
    assert len(seen) == 1
    assert await scenario.ids("error") == ["m"]
    await scenario.endpoint.stop()


async def test_headers_that_cannot_be_read_go_raw_to_the_error_queue(clock: ManualClock) -> None:
    scenario = build(clock)
    seen = await start(scenario, succeed)
    poison = Message.from_encoded("m", b"{" * 100_000, b"body")
    await scenario.transport.dispatch([TransportOperation(poison, "sales")])
    await settle()
    moved = await scenario.only("error")
    assert seen == []
    assert (moved.encoded_headers, moved.body) == (poison.encoded_headers, b"body")
    assert scenario.critical == []
    await scenario.endpoint.stop()


@pytest.mark.parametrize("mode", TransactionMode)
async def test_sends_leave_after_success_and_only_then(clock: ManualClock, mode: TransactionMode) -> None:
    scenario = build(clock, transaction_mode=mode)
    early: list[int] = []

    async def act(message: Message, context: MessageContext) -> None:
        await context.send("out", b"now", message_id=f"now {message.id}")
        await context.send("out", b"later", message_id=f"later {message.id}", delay=timedelta(seconds=5))
        await context.reply(b"yes")
        early.append(await scenario.transport.count("out") + len(await scenario.pending()))
        if message.id == "bad":
            raise BOOM.with_traceback(None)

    await start(scenario, act)
    await receive(scenario, "good", **{Headers.REPLY_TO: "out"})
    assert set(early) == {0}
    assert len(await scenario.ids("out")) == 2
    assert [message.id for message in await scenario.pending()] == ["later good"]
    await receive(scenario, "bad", **{Headers.REPLY_TO: "out"})
    await clock.advance(100)
    left = await scenario.transport.browse("out", 100)
    assert {message.headers[Headers.RELATED_TO] for message in left} == {"good"}
    assert (await scenario.only("error")).logical.id == "bad"
    await scenario.endpoint.stop()


async def test_sends_that_are_not_awaited_leave_all_the_same(clock: ManualClock) -> None:
    scenario = build(clock)
    ids: list[str] = []

    async def act(message: Message, context: MessageContext) -> None:
        if context.message.id == "again" or ids:
            return
        context.send("out", b"now", message_id="now")
        context.send("out", b"later", message_id="later", delay=timedelta(seconds=5))
        context.reply(b"yes")
        context.defer(timedelta(seconds=9))
        ids.append(await context.send("out", b"", message_id="awaited"))
        ids.extend(await asyncio.gather(context.send("out", b"", message_id="gathered")))
        task: Coroutine[Any, Any, str] = context.send("out", b"", message_id="task")  # type: ignore[assignment]
        ids.append(await asyncio.create_task(task))

    seen = await start(scenario, act)
    with warnings.catch_warnings(record=True) as caught:
        await receive(scenario, **{Headers.REPLY_TO: "out"})
        gc.collect()
    assert caught == []
    assert ids == ["awaited", "gathered", "task"]
    bodies = sorted(message.body for message in await scenario.transport.browse("out", 10))
    assert bodies == [b"", b"", b"", b"now", b"yes"]
    assert sorted(message.destination for message in await scenario.pending()) == ["out", "sales"]
    await clock.advance(9)
    assert len(seen) == 2
    await scenario.endpoint.stop()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda context: context.send("", b""), InvalidMessage),
        (lambda context: context.send("out", object()), InvalidMessage),
        (lambda context: context.send("out", b"", delay=timedelta(-1)), InvalidDueTime),
        (lambda context: context.reply(b""), InvalidMessage),
        (lambda context: context.defer(), InvalidDueTime),
    ],
)
async def test_a_bad_argument_is_raised_by_the_call_without_await(
    clock: ManualClock, wrong: Callable[[MessageContext], object], error: type[Exception]
) -> None:
    scenario = build(clock, recoverability=Recoverability(unrecoverable=(InvalidMessage,)))
    raised: list[Exception] = []

    async def act(message: Message, context: MessageContext) -> None:
        try:
            wrong(context)
        except Exception as caught:
            raised.append(caught)
            raise

    await start(scenario, act)
    await receive(scenario)
    assert [type(one) for one in raised] == [error]
    assert await scenario.ids("error") == ["m"]
    await scenario.endpoint.stop()


async def test_sends_after_the_handler_has_ended_are_refused(clock: ManualClock) -> None:
    scenario = build(clock)
    contexts: list[MessageContext] = []

    async def act(message: Message, context: MessageContext) -> None:
        contexts.append(context)

    await start(scenario, act)
    await receive(scenario)
    with pytest.raises(InvalidMessage, match=r"handler of message 'm' has ended.*Endpoint\.send"):
        contexts[0].send("out", b"")
    await scenario.endpoint.stop()


async def test_a_deferred_message_is_handled_again_later(clock: ManualClock) -> None:
    scenario = build(clock)

    async def once_more(message: Message, context: MessageContext) -> None:
        if len(seen) == 1:
            await context.defer(timedelta(seconds=5))

    seen: list[tuple[str, int]] = await start(scenario, once_more)
    await receive(scenario)
    await clock.advance(4.9)
    assert seen == [("m", 1)]
    await clock.advance(0.1)
    assert seen == [("m", 1), ("m", 1)]
    await scenario.endpoint.stop()


async def test_defer_needs_a_time(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(unrecoverable=(InvalidDueTime,)))

    async def defer(message: Message, context: MessageContext) -> None:
        await context.defer()

    seen = await start(scenario, defer)
    await receive(scenario)
    assert (len(seen), await scenario.ids("error")) == (1, ["m"])
    assert "give the time" in (await scenario.only("error")).headers[Headers.EXCEPTION_MESSAGE]
    await scenario.endpoint.stop()


async def test_a_misspelt_destination_of_a_delayed_send_fails_the_handler(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(unrecoverable=(QueueNotFound,)))

    async def act(message: Message, context: MessageContext) -> None:
        checked = message.id != "unchecked"
        context.send("uot", b"", message_id=f"from {message.id}", delay=timedelta(5), check_destination=checked)

    await start(scenario, act)
    await receive(scenario, "checked")
    failed = await scenario.only("error")
    assert failed.headers[Headers.EXCEPTION_MESSAGE].startswith("queue 'uot' does not exist. Did you mean 'out'?")
    assert await scenario.pending() == []
    await receive(scenario, "unchecked")
    assert [one.id for one in await scenario.pending()] == ["from unchecked"]
    await scenario.endpoint.stop()


@pytest.mark.parametrize("mode", TransactionMode)
async def test_when_the_message_leaves_its_queue(clock: ManualClock, mode: TransactionMode) -> None:
    scenario = build(clock, transaction_mode=mode)
    during: list[int] = []

    async def look(message: Message, context: MessageContext) -> None:
        during.append(await scenario.transport.count("sales"))

    await start(scenario, look)
    await receive(scenario)
    assert during == [0 if mode is TransactionMode.NONE else 1]
    assert await scenario.transport.count("sales") == 0
    await scenario.endpoint.stop()


async def test_mode_none_tries_once_and_moves_the_message_to_the_error_queue(clock: ManualClock) -> None:
    scenario = build(clock, transaction_mode=TransactionMode.NONE)
    seen = await start(scenario, fail)
    await receive(scenario)
    assert (len(seen), await scenario.ids("error")) == (1, ["m"])
    await scenario.endpoint.stop()


@pytest.mark.parametrize(
    ("mode", "sent", "stored"),
    [
        (TransactionMode.RECEIVE_ONLY, True, True),
        (TransactionMode.SENDS_ATOMIC_WITH_RECEIVE, False, True),
        (TransactionMode.TRANSACTION_SCOPE, False, False),
    ],
)
async def test_a_message_handled_elsewhere_is_rolled_back_as_far_as_the_mode_goes(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, mode: TransactionMode, sent: bool, stored: bool
) -> None:
    scenario = build(clock, transaction_mode=mode)

    async def lose(message: Message, context: MessageContext) -> None:
        scenario.queues.queue("sales").hidden.clear()  # its lock ran out and another process handled it
        await context.send("out", b"", message_id="now")
        await context.send("out", b"", message_id="later", delay=timedelta(1))

    seen = await start(scenario, lose)
    await receive(scenario)
    assert len(seen) == 1
    assert await scenario.ids("out") == (["now"] if sent else [])
    assert [message.id for message in await scenario.pending()] == (["later"] if stored else [])
    assert [record for record in caplog.records if getattr(record, "event", "") == Event.RECEIVE_LOST]
    assert await scenario.ids("error") == []
    await scenario.endpoint.stop()


async def test_a_message_gone_before_its_handler_in_mode_none_is_skipped(clock: ManualClock) -> None:
    scenario = build(clock, transaction_mode=TransactionMode.NONE)
    seen = await start(scenario, succeed)
    receiver = scenario.queues.receivers["sales"]

    async def gone(*_: object) -> bool:
        return False

    receiver.acknowledge = gone  # type: ignore[method-assign,assignment]
    await receive(scenario)
    assert seen == []
    await scenario.endpoint.stop()


async def test_a_message_that_cannot_be_moved_backs_off_alone_and_stops_nothing(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a handler that fails, and an error queue that fails too
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))
    scenario.faults.inject(Fault("dispatch", lambda _: BOOM if seen else None))
    seen: list[tuple[str, int]] = []
    seen = await start(scenario, fail)
    await receive(scenario)
    assert len(seen) == 1
    # Then it is given back after 1, 2 and 4 seconds, and nothing is critical
    for seconds, times in ((0.9, 1), (0.1, 2), (1.9, 2), (0.1, 3), (4, 4)):
        await clock.advance(seconds)
        assert len(seen) == times
    assert scenario.critical == []
    failed = [record for record in caplog.records if getattr(record, "event", "") == Event.ERROR_MOVE_FAILED]
    assert [(vars(record)["facts"]["count"], bool(record.exc_info)) for record in failed] == [
        (1, True), (2, False), (3, False), (4, False)
    ]  # fmt: skip
    assert "boom" in failed[-1].getMessage()
    scenario.faults.heal()
    await clock.advance(8)
    assert await scenario.ids("error") == ["m"]
    await scenario.endpoint.stop()


async def test_messages_that_cannot_be_moved_take_no_other_message_s_place(clock: ManualClock) -> None:
    # Given more of them than are handled at once
    scenario = build(clock, concurrency=2, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

    async def some_fail(message: Message, context: MessageContext) -> None:
        if message.id.startswith("bad"):
            raise BOOM.with_traceback(None)

    seen = await start(scenario, some_fail)
    scenario.faults.inject(Fault("dispatch", BOOM, when=sent_to("error")))
    for number in range(20):
        await receive(scenario, f"bad {number}")
    await receive(scenario, "good")
    # Then a good one is handled at once all the same
    assert "good" in [id for id, _ in seen]
    assert scenario.critical == []
    await scenario.endpoint.stop()
    assert sorted(await scenario.ids("sales")) == sorted(f"bad {number}" for number in range(20))


async def test_a_message_that_does_not_fit_goes_in_a_smaller_form(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))
    sizes: list[int] = []
    await start(scenario, fail)
    dispatch = scenario.transport.dispatch

    async def small_ones_only(operations: Sequence[TransportOperation], transaction: Any = None) -> None:  # noqa: ANN401
        sizes.extend(len(operation.message.encoded_headers) for operation in operations)
        if operations[0].destination == "error" and sizes[-1] > 40:
            raise DispatchFailed({0: InvalidMessage("too large")})
        await dispatch(operations, transaction)

    scenario.transport.dispatch = small_ones_only  # type: ignore[method-assign]
    await receive(scenario, tenant="acme")
    [moved] = await scenario.transport.browse("error", 10)
    assert (moved.id, moved.body, dict(moved.headers)) == ("m", b"body", {"tenant": "acme"})
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert scenario.critical == []
    await scenario.endpoint.stop()


async def test_a_retry_that_cannot_wait_goes_to_the_error_queue(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delayed_retries=3))
    scenario.faults.inject(Fault(STORE, InvalidMessage("larger than a delayed message may be")))
    seen = await start(scenario, fail)
    await receive(scenario)
    failed = await scenario.only("error")
    assert len(seen) == 1
    assert failed.headers[Headers.EXCEPTION_MESSAGE] == "larger than a delayed message may be"
    assert "boom" in failed.headers[Headers.EXCEPTION_STACK_TRACE]
    await scenario.endpoint.stop()


async def test_an_outage_while_recovering_waits_and_gives_the_message_back(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))
    seen: list[tuple[str, int]] = []
    scenario.faults.inject(Fault("dispatch", lambda _: DOWN if seen else None))
    seen = await start(scenario, fail)
    await receive(scenario)
    await clock.advance(3)
    assert scenario.critical == []
    scenario.faults.heal()
    await clock.advance(1)
    assert await scenario.ids("error") == ["m"]
    await scenario.endpoint.stop()


@pytest.mark.parametrize("mode", STRONGER)
@pytest.mark.parametrize("retries", [0, 2])
async def test_an_outage_after_the_handler_has_succeeded_costs_its_message_nothing(
    clock: ManualClock, mode: TransactionMode, retries: int
) -> None:
    """Given a server that is away when a handler's outcome is committed, when it is back, then that is repeated."""
    recoverability = Recoverability(immediate_retries=retries, delayed_retries=0)
    scenario = build(clock, transaction_mode=mode, recoverability=recoverability)
    failures = 0

    def away(_: Sequence[TransportOperation]) -> Exception | None:
        nonlocal failures
        if failures == 2 * (retries + 1):
            return None
        failures += 1
        return DOWN

    async def reply(message: Message, context: MessageContext) -> None:
        await context.send("out", b"", message_id="reply")

    scenario.faults.inject(Fault("dispatch", away, message_id="reply"))
    seen = await start(scenario, reply)
    # When the outage outlasts two rounds, in which a move to the error queue would have succeeded
    await receive(scenario)
    for _ in range(6):
        await clock.advance(1)
    # Then the message is handled again, from its first attempt on, and is nowhere else
    assert failures == 2 * (retries + 1)
    assert [attempt for _, attempt in seen] == [*range(1, retries + 2)] * 2 + [1]
    assert (await scenario.ids("error"), await scenario.ids("out"), await scenario.ids("sales")) == ([], ["reply"], [])
    assert scenario.critical == []
    await scenario.endpoint.stop()


async def test_a_cancelled_error_out_of_a_handler_is_a_failure_like_any_other(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=1, delayed_retries=0))

    async def stray(message: Message, context: MessageContext) -> None:
        raise asyncio.CancelledError

    seen = await start(scenario, stray)
    await receive(scenario)
    assert (len(seen), await scenario.ids("error")) == (2, ["m"])
    await scenario.endpoint.stop()


def cancel_own_task(depth: int = 1) -> None:
    task = asyncio.current_task()
    assert task is not None
    for _ in range(depth):
        task.cancel()


async def cancel_tasks(scenario: Scenario) -> None:
    (task,) = scenario.endpoint._pipeline.intake.tasks._tasks  # type: ignore[union-attr]
    task.cancel()
    await settle()


@pytest.mark.parametrize("depth", [1, 3])
async def test_a_handler_whose_task_others_cancel_has_failed(clock: ManualClock, depth: int) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=2, delayed_retries=1), concurrency=1)

    async def cancelled(message: Message, context: MessageContext) -> None:
        if message.id == "m":
            cancel_own_task(depth)
            await asyncio.Event().wait()

    # Given a handler that is cancelled from outside each time
    seen = await start(scenario, cancelled)
    await receive(scenario)
    await clock.advance(1)
    # Then its message is tried again as often as any other, and other messages are handled meanwhile
    assert [attempt for _, attempt in seen] == [1, 2, 3]
    await receive(scenario, "other")
    assert seen[-1] == ("other", 1)
    # And it ends in the error queue, with the reason
    await clock.advance(11)
    moved = await scenario.only("error")
    assert (moved.id, len(seen)) == ("m", 3 + 1 + 3)
    assert moved.headers[Headers.EXCEPTION_TYPE] == "delayline.errors.HandlerCancelled"
    assert "was cancelled, and not by its endpoint" in moved.headers[Headers.EXCEPTION_MESSAGE]
    await scenario.endpoint.stop()


async def test_a_message_whose_task_others_cancel_between_attempts_backs_off(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=9, immediate_pause=timedelta(seconds=1)))
    seen = await start(scenario, fail)
    await receive(scenario)
    await cancel_tasks(scenario)
    # It is not received again at once, and the log says why
    assert [attempt for _, attempt in seen] == [1, 2]
    assert "was cancelled, and not by its endpoint" in caplog.text
    await clock.advance(1.5)
    assert [attempt for _, attempt in seen] == [1, 2, 1, 2]
    # A second cancellation, while it backs off, does not lose it either
    await cancel_tasks(scenario)
    await cancel_tasks(scenario)
    assert [attempt for _, attempt in seen] == [1, 2, 1, 2, 1, 2]
    await scenario.endpoint.stop()


async def test_a_message_whose_task_others_cancel_while_it_is_completed_is_not_lost(clock: ManualClock) -> None:
    scenario = build(clock, transaction_mode=TransactionMode.TRANSACTION_SCOPE)

    async def send(message: Message, context: MessageContext) -> None:
        await context.send("out", b"", message_id="sent")
        if context.attempt == 1:
            cancel_own_task()

    await start(scenario, send)
    await receive(scenario)
    await clock.advance(2)
    assert (await scenario.ids("sales"), await scenario.ids("error")) == ([], [])
    assert await scenario.ids("out") == ["sent"]
    await scenario.endpoint.stop()


async def test_a_stop_that_cancels_handlers_gives_their_messages_back(clock: ManualClock) -> None:
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

    async def wait(message: Message, context: MessageContext) -> None:
        await asyncio.Event().wait()

    seen = await start(scenario, wait)
    await receive(scenario)
    stopping = asyncio.create_task(scenario.endpoint.stop(grace=timedelta(seconds=5)))
    await settle()
    await clock.advance(6)
    await stopping
    assert (len(seen), await scenario.ids("sales"), await scenario.ids("error")) == (1, ["m"], [])


def test_the_end_of_an_event_loop_ends_handlers_too(caplog: pytest.LogCaptureFixture) -> None:
    async def forget_to_stop() -> int:
        async def wait(message: Message, context: MessageContext) -> None:
            await asyncio.Event().wait()

        scenario = build(ManualClock())
        seen = await start(scenario, wait)
        await receive(scenario)
        return len(seen)

    assert asyncio.run(forget_to_stop()) == 1  # it returns
    assert "The task that receives from sales was cancelled" in caplog.text


@pytest.mark.parametrize("verb", ["receive", "next_due", FETCH])
async def test_a_cancelled_error_out_of_a_back_end_is_an_error_like_any_other(
    clock: ManualClock, verb: str | tuple[str, ...]
) -> None:
    scenario = build(clock)
    for part in (scenario.transport, scenario.store):
        part.inject(Fault(verb, asyncio.CancelledError(), calls=1))
    seen = await start(scenario, succeed)
    await receive(scenario)
    await scenario.endpoint.send("out", b"", delay=timedelta(seconds=5))
    for _ in range(3):
        await clock.advance(60)
    assert (len(seen), len(await scenario.ids("out"))) == (1, 1)
    await scenario.endpoint.stop()


async def test_stop_lets_the_handlers_finish_and_starts_no_more_attempts(clock: ManualClock) -> None:
    scenario = build(clock)
    gate = asyncio.Event()

    async def wait(message: Message, context: MessageContext) -> None:
        await gate.wait()
        raise BOOM.with_traceback(None)

    seen = await start(scenario, wait)
    await receive(scenario)
    stopping = asyncio.create_task(scenario.endpoint.stop())
    await settle()
    assert not stopping.done()
    gate.set()
    await stopping
    assert len(seen) == 1
    assert await scenario.ids("sales") == ["m"]


async def test_no_more_messages_at_once_than_the_concurrency(clock: ManualClock) -> None:
    scenario = build(clock, concurrency=2)
    gate, running = asyncio.Event(), []

    async def wait(message: Message, context: MessageContext) -> None:
        running.append(message.id)
        await gate.wait()

    await start(scenario, wait)
    for number in range(5):
        await receive(scenario, str(number))
    assert running == ["0", "1"]
    gate.set()
    await settle()
    assert running == ["0", "1", "2", "3", "4"]
    await scenario.endpoint.stop()


def break_receiving(scenario: Scenario, error: Exception) -> Callable[[], None]:
    """Make receiving fail; return what mends it."""
    receiver: Any = scenario.queues.receivers["sales"]

    async def broken(limit: int) -> Any:  # noqa: ANN401
        raise error

    receiver.receive = broken
    return lambda: delattr(receiver, "receive")


async def test_receiving_that_fails_for_long_is_critical(clock: ManualClock) -> None:
    scenario = build(clock)
    await start(scenario, succeed)
    break_receiving(scenario, DOWN)
    await receive(scenario)
    await settle()
    await clock.advance(31)
    assert scenario.critical == ["Failed to receive from sales"]
    await scenario.endpoint.stop()


async def test_an_idle_queue_after_a_short_fault_is_not_critical(clock: ManualClock) -> None:
    # Given one failed receive, after which the queue is reachable and empty
    scenario = build(clock)
    seen = await start(scenario, succeed)
    await settle()
    mend = break_receiving(scenario, DOWN)
    await receive(scenario, "first")
    mend()
    # When nothing arrives for a long time
    await clock.advance(120)
    # Then no outage is reported, and the next message is handled
    assert scenario.critical == []
    await receive(scenario, "second")
    assert [id for id, _ in seen] == ["first", "second"]
    await scenario.endpoint.stop()


async def test_the_log_names_the_id_that_handlers_see(scenario: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    """Given a copy, whose id on its way is another one, when its handler fails, then lines name its header's."""
    caplog.set_level(logging.DEBUG, "delayline")
    seen: list[str] = []

    async def note(message: Message, context: MessageContext) -> None:
        seen.append(message.id)
        raise ValueError("no")

    await start(scenario, note)
    await receive(scenario, "native", **{Headers.MESSAGE_ID: "logical"})
    await settle()
    lines = [one.getMessage() for one in caplog.records if "Attempt" in one.getMessage()]
    assert set(seen) == {"logical"}
    assert lines
    assert all("message logical failed" in line for line in lines)
