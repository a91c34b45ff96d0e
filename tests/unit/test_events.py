"""Every log record has its subject as an attribute."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import delayline
from delayline import Endpoint, Event, MemoryTransport, Message, MessageContext, Recoverability
from delayline.circuit_breaker import FailureRate, RepeatedFailuresOverTime
from delayline.spi import TransportOperation
from delayline.testing import Fault, FaultyTransport, Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")
PLAIN = re.compile(r"\b_?logger\.(?:debug|info|warning|error|critical|exception)\(")


def fail(error: Exception | None = None) -> None:
    raise BOOM


def test_nothing_is_logged_without_an_event() -> None:
    sources = Path(delayline.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if PLAIN.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("action", ["arm", "disarm", "trigger"])
async def test_an_action_of_a_breaker_fails(clock: ManualClock, action: str) -> None:
    actions: dict[str, Any] = {"arm": lambda: None, "disarm": lambda: None, "trigger": lambda error: None, action: fail}
    breaker = RepeatedFailuresOverTime("probe", time_to_trigger=timedelta(seconds=1), clock=clock, **actions)
    with Signals() as signals:
        try:
            breaker.note(BOOM)
            await clock.advance(1)
            breaker.note(BOOM)
            breaker.success()
        except RuntimeError:
            assert action != "trigger"
    (record,) = signals.records(Event.BREAKER_ACTION_FAILED)
    assert record.exc_info is not None
    assert record.exc_info[1] is BOOM


async def test_the_action_of_a_failure_rate_fails(clock: ManualClock) -> None:
    rate = FailureRate("probe", maximum_per_second=1, trigger=fail, clock=clock)
    with Signals() as signals:
        for _ in range(31):
            rate.failure(BOOM)
    assert signals.count(Event.BREAKER_ACTION_FAILED) == 1
    rate.close()


async def test_the_critical_error_action_fails() -> None:
    async def act(endpoint: Endpoint, text: str, error: Exception) -> None:
        raise BOOM

    async with Endpoint("sales", transport=MemoryTransport(), on_critical_error=act) as endpoint:
        with Signals() as signals:
            endpoint._critical_error("fire", LookupError())
            await settle()
    assert signals.count(Event.CRITICAL_ERROR_ACTION_FAILED) == 1


async def test_a_message_cannot_be_given_back(clock: ManualClock) -> None:
    """Given a queue that takes nothing back, when a message cannot be recovered, then the log says so."""
    transport = FaultyTransport(MemoryTransport(), Fault("commit", error=BOOM), Fault("release", error=BOOM))

    async def note(endpoint: Endpoint, text: str, error: Exception) -> None:
        """Leave the endpoint running."""

    endpoint = Endpoint(
        "sales", transport=transport, clock=clock, recoverability=Recoverability(0, 0), on_critical_error=note
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        raise BOOM

    with Signals() as signals:
        async with endpoint:
            await transport.dispatch([TransportOperation(Message("m", {}, b""), "sales")])
            await settle()
            await clock.advance(1)
    assert signals.count(Event.RECEIVE_TASK_FAILED) == 1


async def test_headers_cannot_be_read(clock: ManualClock) -> None:
    transport = MemoryTransport()
    endpoint = Endpoint("sales", transport=transport)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        """Handle nothing."""

    with Signals() as signals:
        async with endpoint:
            await transport.dispatch([TransportOperation(Message.from_encoded("m", b"{", b""), "sales")])
            await settle()
    (record,) = signals.records(Event.POISON_MESSAGE)
    assert record.__dict__["facts"]["message"].id == "m"
