"""StoredDelivery: its settings and its place in an endpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.unit.conftest import START, a_message, build, sent_to

from delayline import (
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    NotStarted,
)
from delayline.delayed.delivery import StoredDelivery
from delayline.spi import SystemClock
from delayline.testing import Fault, FaultyTransport
from delayline.testing.clock import ManualClock, settle
from delayline.testing.faults import STORE
from delayline.transport import TransportOperation

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
    with pytest.raises(ConfigurationError, match="belongs to endpoint 'a'; create another for endpoint 'b'"):
        Endpoint("b", transport=MemoryTransport(), delayed_delivery=delivery)


async def test_it_defers_when_started_only(clock: ManualClock) -> None:
    scenario = build(clock)
    with pytest.raises(NotStarted, match="use `async with endpoint:`"):
        await scenario.delivery.defer(TransportOperation(a_message(), "out"), START)


async def test_due_messages_are_sent_without_storing(clock: ManualClock) -> None:
    scenario = build(clock)
    async with scenario.endpoint:
        await scenario.endpoint.send("sales", b"", message_id="m", deliver_at=START - timedelta(hours=1))
        assert await scenario.ids("sales") == ["m"]
        assert scenario.faults.calls(*STORE) == 0


async def test_without_polling_it_stores_and_sends_nothing(clock: ManualClock) -> None:
    scenario = build(clock, polling=False)
    async with scenario.endpoint:
        await scenario.endpoint.send("sales", b"", delay=timedelta(seconds=1))
        await clock.advance(100)
        assert await scenario.ids("sales") == []
        assert len(await scenario.pending()) == 1


async def test_a_store_that_can_close_is_closed(clock: ManualClock) -> None:
    scenario = build(clock)
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    scenario.store.close = close  # type: ignore[attr-defined]
    async with scenario.endpoint:
        assert closed == []
    assert closed == [True]


class ClockedStore(MemoryDelayedMessageStore):
    """A store on a server whose clock is not this machine's."""

    def __init__(self, off: timedelta) -> None:
        super().__init__()
        self.own = ManualClock(SystemClock().now() + off)

    def clock(self) -> ManualClock:
        return self.own


@pytest.mark.parametrize("off", [timedelta(hours=-1), timedelta(hours=1)], ids=["behind", "ahead"])
async def test_a_stores_clock_overrides_the_machines(off: timedelta) -> None:
    # Given a store whose clock is an hour off this machine's
    store, transport = ClockedStore(off), MemoryTransport()
    delivery = StoredDelivery(store, number_of_retries=1)
    async with Endpoint("sales", transport=transport, delayed_delivery=delivery) as endpoint:
        # When messages are sent with a delay, and for an instant
        await endpoint.send("sales", b"", message_id="delay", delay=timedelta(seconds=5))
        await endpoint.send("sales", b"", message_id="instant", deliver_at=store.own.now() + timedelta(seconds=10))
        await endpoint.send("sales", b"", message_id="past", deliver_at=store.own.now())
        # Then nothing leaves early by the store's clock, and nothing late
        sent = []
        for seconds in (4.999, 0.001, 4.999, 0.001):
            await store.own.advance(seconds)
            sent.append([message.id for message in await transport.browse("sales", 10)])
        assert sent == [["past"], ["past", "delay"], ["past", "delay"], ["past", "delay", "instant"]]


async def test_a_message_backs_off_by_the_stores_clock() -> None:
    # Given a message that cannot be sent, in a store whose clock is an hour behind
    store, transport = ClockedStore(timedelta(hours=-1)), FaultyTransport(MemoryTransport())
    transport.faults.inject(Fault("dispatch", RuntimeError("boom"), when=sent_to("out")))
    delivery = StoredDelivery(store, number_of_retries=1)
    await transport.setup_infrastructure(["out"])
    async with Endpoint("sales", transport=transport, delayed_delivery=delivery):
        now = store.own.now()
        await store.store(DelayedMessage(a_message(), "out", now))
        await settle()
        # Then it is tried again a second later
        assert await store.next_due() == now + timedelta(seconds=1)
        await store.own.advance(0.999)
        assert transport.faults.calls("dispatch") == 1
        await store.own.advance(0.001)
        assert transport.faults.calls("dispatch") == 3  # again, and to the error queue
    assert [message.id for message in await transport.browse("error", 10)] == ["m"]


def test_a_store_without_a_clock_leaves_it_to_the_endpoint() -> None:
    assert StoredDelivery(MemoryDelayedMessageStore()).clock is None
