"""Every log record has its subject as an attribute."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import delayline
from delayline import Endpoint, Event, MemoryTransport, Message, MessageContext, Recoverability, events
from delayline.circuit_breaker import FailureRate, RepeatedFailuresOverTime
from delayline.errors import BackendUnavailable
from delayline.events import emit
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


def raised(error: Exception) -> Exception:
    def fail_so() -> None:
        raise error

    try:
        fail_so()
    except Exception as caught:
        return caught
    raise AssertionError


def test_a_failure_a_thousand_times_is_a_traceback_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("delayline.probe")
    caplog.set_level(logging.INFO, "delayline")
    for number in range(1000):
        error = raised(ValueError(str(number)))
        emit(logger, logging.ERROR, Event.MOVED_TO_ERROR, "Moved: %s", error, exception=error)
    assert [record.exc_info is not None for record in caplog.records] == [True] + [False] * 999
    assert caplog.records[0].getMessage() == "Moved: 0"
    assert caplog.records[-1].getMessage() == "Moved: 999 (999 more since the traceback)"


def test_another_type_place_or_event_has_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("delayline.probe")
    caplog.set_level(logging.INFO, "delayline")
    first = raised(ValueError("a"))
    with pytest.raises(ValueError, match="invalid literal") as elsewhere:
        int("a")
    for error in (first, raised(LookupError("a")), elsewhere.value):
        emit(logger, logging.ERROR, Event.MOVED_TO_ERROR, "failed", exception=error)
    emit(logger, logging.ERROR, Event.CRITICAL_ERROR, "failed", exception=first)
    assert all(record.exc_info for record in caplog.records)


def test_a_traceback_is_logged_again_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tracebacks, error = [0.0], events.Tracebacks(), raised(ValueError())
    monkeypatch.setattr("delayline.events.time.monotonic", lambda: now[0])
    logged = []
    for now[0] in range(0, 6000, 60):
        if not tracebacks.earlier("probe", error):
            logged.append(now[0])
    assert logged == [0, 600, 1800, 4200]


def test_kinds_of_failure_beyond_the_limit_are_forgotten() -> None:
    tracebacks, error = events.Tracebacks(), raised(ValueError())
    assert tracebacks.earlier("first", error) == 0
    for number in range(events.MOST_KINDS_OF_FAILURE):
        assert tracebacks.earlier(str(number), error) == 0
    assert len(tracebacks._shown) == events.MOST_KINDS_OF_FAILURE
    assert tracebacks.earlier("first", error) == 0


@pytest.mark.parametrize(("level", "has_traceback"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_an_outage_has_a_traceback_at_debug_only(
    caplog: pytest.LogCaptureFixture, level: int, has_traceback: bool
) -> None:
    caplog.set_level(level, "delayline")
    error = raised(BackendUnavailable("no answer"))
    emit(
        logging.getLogger("delayline.probe"), logging.WARNING, Event.FETCH_FAILED, "Failed: %s", error, exception=error
    )
    (record,) = caplog.records
    assert record.getMessage() == "Failed: no answer"
    assert bool(record.exc_info) is has_traceback
