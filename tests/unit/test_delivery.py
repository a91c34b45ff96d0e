"""StoredDelivery: its settings and its place in an endpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import START, a_message, build

from delayline import ConfigurationError, Endpoint, MemoryDelayedMessageStore, MemoryTransport, NotStarted
from delayline.delayed.delivery import StoredDelivery
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

TIMES = [f"time_to_trigger_{name}_circuit_breaker" for name in ("store", "fetch", "dispatch")]


def test_the_defaults_are_the_references() -> None:
    delivery = StoredDelivery(MemoryDelayedMessageStore())
    assert delivery.number_of_retries == 0
    assert delivery.maximum_recovery_failures_per_second == 1
    assert [getattr(delivery, name) for name in TIMES] == [timedelta(seconds=30)] * 3


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        *[("number_of_retries", value, 0) for value in (-1, 1.0, "1", True, None)],
        *[(name, value, 1) for name in ("maximum_recovery_failures_per_second", "batch_size", "batch_bytes")
          for value in (0, -1, 1.5, "1", True)],
    ],
)  # fmt: skip
def test_numbers_that_cannot_work_are_refused(name: str, value: Any, least: int) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match=f"{name} must be a whole number of {least} or more, not ") as caught:
        StoredDelivery(MemoryDelayedMessageStore(), **{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1), 30, None])
def test_times_that_cannot_work_are_refused(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match=f"{name} must be a timedelta longer than zero, not ") as caught:
        StoredDelivery(MemoryDelayedMessageStore(), **{name: value})
    assert repr(value) in str(caught.value)


def test_zero_retries_are_one_attempt_and_valid() -> None:
    assert StoredDelivery(MemoryDelayedMessageStore(), number_of_retries=0).number_of_retries == 0


def test_it_belongs_to_one_endpoint() -> None:
    delivery = StoredDelivery(MemoryDelayedMessageStore())
    with pytest.raises(NotStarted, match="belongs to no endpoint yet"):
        _ = delivery.host
    Endpoint("a", transport=MemoryTransport(), delayed_delivery=delivery)
    with pytest.raises(ConfigurationError, match="belongs to endpoint 'a'; give endpoint 'b' one of its own"):
        Endpoint("b", transport=MemoryTransport(), delayed_delivery=delivery)


async def test_it_defers_when_started_only(clock: ManualClock) -> None:
    house = build(clock)
    with pytest.raises(NotStarted, match="use `async with endpoint:`"):
        await house.delivery.defer(TransportOperation(a_message(), "out"), START)


async def test_what_is_due_already_goes_straight_to_the_transport(clock: ManualClock) -> None:
    house = build(clock)
    async with house.endpoint:
        await house.endpoint.send("sales", b"", message_id="m", deliver_at=START - timedelta(hours=1))
        assert await house.ids("sales") == ["m"]
        assert house.faults.count("store") == 0


async def test_without_polling_it_stores_and_sends_nothing(clock: ManualClock) -> None:
    house = build(clock, polling=False)
    async with house.endpoint:
        await house.endpoint.send("sales", b"", delay=timedelta(seconds=1))
        await clock.advance(100)
        assert await house.ids("sales") == []
        assert len(await house.waiting()) == 1


async def test_a_store_that_can_close_is_closed(clock: ManualClock) -> None:
    house = build(clock)
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    house.store.close = close  # type: ignore[union-attr]
    async with house.endpoint:
        assert closed == []
    assert closed == [True]
