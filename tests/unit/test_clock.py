from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from delayline.clock import EPOCH, from_microseconds, to_microseconds
from delayline.spi import SystemClock


def test_the_system_clock_is_aware_and_in_utc() -> None:
    first, second = SystemClock().now(), SystemClock().now()
    assert first.utcoffset() == timedelta(0)
    assert second - first < timedelta(hours=1)


async def test_the_system_clock_does_not_sleep_for_zero_or_less() -> None:
    await SystemClock().sleep(0)
    await SystemClock().sleep(-10)


@given(st.datetimes(timezones=st.just(UTC)))
def test_microseconds_are_exact_for_every_datetime(instant: datetime) -> None:
    assert from_microseconds(to_microseconds(instant)) == instant


def test_microseconds_count_from_1970() -> None:
    assert to_microseconds(EPOCH) == 0
    assert to_microseconds(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == -1
    assert to_microseconds(datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == 253_402_300_799_999_999
