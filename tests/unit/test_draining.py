"""Moving from a timeout manager to another way of waiting: the old one drains while new messages go elsewhere."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.timeout_scenario import TIMEOUTS, TimeoutScenario, build_timeouts

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.testing import Fault
from delayline.testing.clock import settle
from delayline.timeouts import MemoryTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

FIVE = timedelta(seconds=5)


@pytest.fixture
def old(clock: ManualClock) -> TimeoutScenario:
    """The endpoint with a timeout manager."""
    return build_timeouts(clock)


async def leave_timeouts(old: TimeoutScenario) -> None:
    """Stop the endpoint with one stored timeout and one that waits in the timeouts queue."""
    await old.start()
    await old.endpoint.send("out", b"", message_id="stored", delay=FIVE)
    await settle()
    await old.delivery._satellites[0].stop()
    await old.endpoint.send("out", b"", message_id="on its way", delay=FIVE)
    await old.endpoint.stop()


def moved(old: TimeoutScenario, **settings: Any) -> Endpoint:  # noqa: ANN401
    """Return the same endpoint with a store."""
    return Endpoint(
        "sales",
        transport=old.transport,
        delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()),
        draining=TimeoutManagerDelivery(old.persister),
        clock=old.clock,
        **settings,
    )


async def test_messages_of_the_old_delivery_arrive_and_new_ones_use_the_new_delivery(
    clock: ManualClock, old: TimeoutScenario
) -> None:
    # Given
    await leave_timeouts(old)
    endpoint = moved(old)
    # When
    async with endpoint:
        await endpoint.send("out", b"", message_id="new", delay=FIVE)
        await settle()
        # Then
        assert [waiting.id for waiting in await endpoint.delayed.pending()] == ["new"]
        assert (await old.memory.count()).number == 2
        await clock.advance(5)
        arrived = {message.id for message in await old.transport.browse("out", 10)}
        assert arrived == {"stored", "on its way", "new"}
        assert (await old.memory.count()).number == 0


async def test_other_endpoints_may_still_use_the_old_one(clock: ManualClock, old: TimeoutScenario) -> None:
    """An instance that knows nothing of the new way defers beside one that does."""
    await old.start()
    async with moved(old) as endpoint:
        await old.endpoint.send("out", b"", message_id="old way", delay=FIVE)
        await endpoint.send("out", b"", message_id="new way", delay=FIVE)
        await clock.advance(5)
        assert sorted(message.id for message in await old.transport.browse("out", 10)) == ["new way", "old way"]
        await old.endpoint.stop()


async def test_a_disabled_timeout_manager_is_left_alone(clock: ManualClock, old: TimeoutScenario) -> None:
    await leave_timeouts(old)
    old.faults.clear_record()
    async with moved(old, disable_timeout_manager=True):
        await clock.advance(10)
        assert await old.transport.count("out") == 0
        assert await old.transport.count(TIMEOUTS) == 1
    assert old.faults.calls("open", "add", "next_chunk", "peek", "remove") == 0


async def test_draining_needs_no_transaction_with_the_new_one(clock: ManualClock) -> None:
    """The mode is that of the transport and the new delivery; the old one uses the best that it supports."""
    old = build_timeouts(clock, shared=False)
    await leave_timeouts(old)
    endpoint = moved(old)
    assert endpoint.transaction_mode is TransactionMode.TRANSACTION_SCOPE
    async with endpoint:
        await clock.advance(5)
        assert await old.transport.count("out") == 2


async def test_an_outage_of_the_old_storage_stops_nothing_new(clock: ManualClock, old: TimeoutScenario) -> None:
    await old.transport.setup_infrastructure(["out"])
    old.faults.inject(Fault("setup_infrastructure", BackendUnavailable("down"), when=lambda name: name == "sales"))
    async with moved(old) as endpoint:
        await endpoint.send("out", b"", message_id="new", delay=FIVE)
        await clock.advance(5)
        assert await old.transport.count("out") == 1


def test_the_new_one_is_not_drained() -> None:
    delivery = TimeoutManagerDelivery(MemoryTimeoutPersister())
    with pytest.raises(ConfigurationError, match="leave it out"):
        Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delivery, draining=delivery)
