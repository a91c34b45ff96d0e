from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline.clock import EPOCH, from_microseconds, to_microseconds
from delayline.spi import SystemClock


def test_the_system_clock_is_aware_and_in_utc() -> None:
    before = time.time_ns() // 1000
    now = SystemClock().now()
    after = time.time_ns() // 1000
    assert now.tzinfo is UTC
    assert before <= to_microseconds(now) <= after


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Provide the delays of the event loop's timers, none of which comes."""
    delays: list[float] = []

    def note(delay: float, *_: object) -> Mock:
        delays.append(delay)
        return Mock()

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", note)
    return delays


@pytest.mark.parametrize("seconds", [0, -10, float("-inf")])
async def test_the_system_clock_does_not_sleep_for_zero_or_less(seconds: float, timers: list[float]) -> None:
    """Given nothing to wait for, when it sleeps, then it lets others run once, and ends without a timer."""
    sleep = SystemClock().sleep(seconds)
    sleep.send(None)
    with pytest.raises(StopIteration):
        sleep.send(None)
    assert timers == []


async def test_the_system_clock_sleeps_as_long_as_it_is_asked_to(timers: list[float]) -> None:
    sleep = SystemClock().sleep(3.5)
    sleep.send(None)
    sleep.close()
    assert timers == [3.5]


@given(st.datetimes(timezones=st.just(UTC)))
def test_microseconds_are_exact_for_every_datetime(instant: datetime) -> None:
    assert from_microseconds(to_microseconds(instant)) == instant


def test_microseconds_count_from_1970() -> None:
    assert to_microseconds(EPOCH) == 0
    assert to_microseconds(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == -1
    assert to_microseconds(datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == 253_402_300_799_999_999
