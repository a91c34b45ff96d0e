"""Retries by delays, by a policy, and for single handlers; timeouts of handlers."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async
from tests.unit.conftest import Scenario, build

from delayline import (
    ConfigurationError,
    Discard,
    Endpoint,
    Headers,
    MemoryTransport,
    Message,
    MessageContext,
    MoveToErrors,
    Recoverability,
    Retry,
    TransactionMode,
    exponential,
)
from delayline.events import Event
from delayline.testing.clock import settle
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.testing.clock import ManualClock

SECOND = timedelta(seconds=1)


async def failing(scenario: Scenario, error: Exception | None = None) -> list[float]:
    """Start with a handler that always fails; return the list of the times at which it was called."""
    times: list[float] = []
    began = scenario.clock.now()

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        times.append((scenario.clock.now() - began).total_seconds())
        raise (error or ValueError("boom")).with_traceback(None)

    await scenario.endpoint.start()
    await scenario.transport.dispatch([TransportOperation(Message("m", {}, b"body"), "sales")])
    await settle()
    return times


async def test_delays_of_further_rounds(clock: ManualClock) -> None:
    # Given retries after 1 s and then after 25 hours, which is longer than the usual limit of a day
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delays=[SECOND, timedelta(hours=25)]))
    times = await failing(scenario)
    # When time passes
    await clock.advance(1)
    await clock.advance(timedelta(hours=25))
    # Then the handler was called three times, and the message is in the error queue
    assert times == [0, 1, 1 + 25 * 3600]
    assert await scenario.ids("error") == ["m"]
    await scenario.endpoint.stop()


async def test_jitter_makes_delays_longer_at_random(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.5)
    scenario = build(clock, recoverability=Recoverability(immediate_retries=0, delays=[10 * SECOND], jitter=0.4))
    times = await failing(scenario)
    await clock.advance(11.9)
    assert times == [0]
    await clock.advance(0.1)
    assert times == [0, 12]
    await scenario.endpoint.stop()


async def test_a_policy_decides_by_exception_and_attempt(clock: ManualClock) -> None:
    # Given a policy that retries at once, then after 5 s twice, and then gives up
    asked: list[tuple[str, int]] = []

    def policy(error: Exception, attempt: int) -> Retry | MoveToErrors:
        asked.append((str(error), attempt))
        return MoveToErrors() if attempt >= 4 else Retry() if attempt == 1 else Retry(5 * SECOND)

    scenario = build(clock, recoverability=Recoverability(policy=policy))
    times = await failing(scenario)
    # When time passes
    await clock.advance(5)
    await clock.advance(5)
    # Then it has counted all attempts
    assert asked == [("boom", 1), ("boom", 2), ("boom", 3), ("boom", 4)]
    assert times == [0, 0, 5, 10]
    assert (await scenario.only("error")).headers[Headers.EXCEPTION_MESSAGE] == "boom"
    await scenario.endpoint.stop()


async def test_a_policy_can_discard_messages(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    scenario = build(clock, recoverability=Recoverability(policy=lambda error, attempt: Discard()))
    with caplog.at_level(logging.WARNING):
        times = await failing(scenario)
    assert times == [0]
    assert (await scenario.transport.count("sales"), await scenario.ids("error")) == (0, [])
    [record] = [record for record in caplog.records if vars(record).get("event") == Event.DISCARDED]
    assert record.getMessage() == "Discarded message m: ValueError: boom"
    await scenario.endpoint.stop()


async def _ignored(message: Message, context: MessageContext) -> None: ...


def _broken(error: Exception, attempt: int) -> Retry:
    raise RuntimeError("the policy is broken")


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_broken, "the retry policy failed: RuntimeError('the policy is broken')"),
        (lambda error, attempt: None, "the retry policy returned None"),
        (lambda error, attempt: Retry("soon"), "the retry policy returned Retry(after='soon')"),  # type: ignore[arg-type]
        (lambda error: Retry(), "the retry policy failed: TypeError("),
    ],
)
async def test_a_broken_policy_moves_the_message_to_the_error_queue(
    clock: ManualClock, policy: Callable[[Exception, int], Retry], text: str
) -> None:
    scenario = build(clock, recoverability=Recoverability(policy=policy))
    await failing(scenario)
    assert text in (await scenario.only("error")).headers[Headers.EXCEPTION_STACK_TRACE]
    await scenario.endpoint.stop()


@pytest.mark.parametrize("count", ["", "-3", "x", "9" * 5000, "٣", "3.5"])
async def test_a_hostile_attempt_count_counts_as_none(clock: ManualClock, count: str) -> None:
    asked: list[int] = []

    def policy(error: Exception, attempt: int) -> MoveToErrors:
        asked.append(attempt)
        return MoveToErrors()

    scenario = build(clock, recoverability=Recoverability(policy=policy))
    await failing(scenario)
    headers = {Headers.ATTEMPTS: count, Headers.RETRIES: count}
    await scenario.transport.dispatch([TransportOperation(Message("n", headers, b""), "sales")])
    await settle()
    assert asked == [1, 1]
    await scenario.endpoint.stop()


async def test_a_handler_with_separate_retries(clock: ManualClock) -> None:
    # Given an endpoint that retries, and a handler that does not
    scenario = build(clock, recoverability=Recoverability(immediate_retries=2, immediate_pause=timedelta(0)))
    calls: list[str] = []

    @scenario.endpoint.handles("once", recoverability=Recoverability(immediate_retries=0, delayed_retries=0))
    async def once(value: object, context: MessageContext) -> None:
        calls.append("once")
        raise ValueError("boom")

    @scenario.endpoint.handler(recoverability=Recoverability(immediate_retries=1, delayed_retries=0))
    async def twice(message: Message, context: MessageContext) -> None:
        calls.append("twice")
        raise ValueError("boom")

    await scenario.endpoint.start()
    for kind in ("once", "other"):
        message = Message(kind, {Headers.ENCLOSED_MESSAGE_TYPES: kind}, b"{}")
        await scenario.transport.dispatch([TransportOperation(message, "sales")])
        await settle()
    assert calls == ["once", "twice", "twice"]
    assert sorted(await scenario.ids("error")) == ["once", "other"]
    await scenario.endpoint.stop()


async def test_a_delay_without_delayed_delivery_moves_the_message_to_the_error_queue() -> None:
    transport = MemoryTransport()
    endpoint = Endpoint(
        "sales", transport=transport, recoverability=Recoverability(policy=lambda error, attempt: Retry(SECOND))
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        raise ValueError("boom")

    async with endpoint:
        await endpoint.send("sales", b"")
        await settle()
        [failed] = await transport.browse("error", 10)
    assert "needs delayed delivery" in failed.headers[Headers.EXCEPTION_STACK_TRACE]


async def test_a_handler_that_takes_too_long_has_failed() -> None:
    # Given handlers with a timeout, one of them a function in a thread
    transport, calls, gate = MemoryTransport(), [], threading.Event()
    none = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = Endpoint("sales", transport=transport, recoverability=none)

    @endpoint.handles("coroutine", timeout=timedelta(milliseconds=20))
    async def slow(value: object, context: MessageContext) -> None:
        calls.append("coroutine")
        await asyncio.sleep(3600)

    @endpoint.handles("thread", timeout=timedelta(milliseconds=20))
    def slow_function(value: object, context: MessageContext) -> None:
        calls.append("thread")
        gate.wait(30)

    @endpoint.handles("own")
    async def own(value: object, context: MessageContext) -> None:
        raise TimeoutError("of the handler's own")

    async with endpoint:
        # When messages come
        for kind in ("coroutine", "thread", "own"):
            await endpoint.send("sales", {}, headers={Headers.ENCLOSED_MESSAGE_TYPES: kind}, message_id=kind)
        await eventually_async(functools.partial(_has_failed, transport, 3))
        gate.set()
        failed = {message.id: message for message in await transport.browse("error", 10)}
    # Then they have failed, with their names
    texts = {name: message.headers[Headers.EXCEPTION_MESSAGE] for name, message in failed.items()}
    assert "slow has not ended within 0.02 s, its timeout" in texts["coroutine"]
    assert "slow_function has not ended within 0.02 s, its timeout" in texts["thread"]
    assert texts["own"] == "of the handler's own"
    assert calls == ["coroutine", "thread"]


async def _has_failed(transport: MemoryTransport, number: int) -> bool:
    return await transport.count("error") == number


def test_exponential_delays() -> None:
    assert exponential(SECOND, retries=5, longest=10 * SECOND) == tuple(SECOND * n for n in (1, 2, 4, 8, 10))
    assert exponential(SECOND, retries=2, factor=1) == (SECOND, SECOND)
    assert len(exponential(SECOND, retries=1000, factor=1e300)) == 1000
    for arguments in ({"retries": 0}, {"retries": 1001}, {"retries": 1, "factor": 0.5}, {"retries": 1, "longest": 0}):
        with pytest.raises(ConfigurationError):
            exponential(SECOND, **arguments)


@pytest.mark.parametrize(
    "settings",
    [
        {"delays": [SECOND], "delayed_retries": 1},
        {"delays": [timedelta(0)]},
        {"delays": ["1s"]},
        {"jitter": 1.1},
        {"jitter": float("nan")},
        {"policy": 7},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Recoverability(**settings)  # type: ignore[arg-type]


def test_a_policy_needs_a_mode_that_can_retry() -> None:
    policy = Recoverability(policy=lambda error, attempt: Retry())
    with pytest.raises(ConfigurationError, match="tries once"):
        Endpoint("sales", transport=MemoryTransport(), transaction_mode=TransactionMode.NONE, recoverability=policy)
    endpoint = Endpoint("sales", transport=MemoryTransport(), transaction_mode=TransactionMode.NONE)
    with pytest.raises(ConfigurationError, match="tries once"):
        endpoint.handler(recoverability=policy)(_ignored)
