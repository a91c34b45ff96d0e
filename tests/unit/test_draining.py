"""Moving from a timeout manager to another way of waiting: the old one drains while new messages go elsewhere."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import Faults, FaultyTransport
from tests.unit.timeout_house import TIMEOUTS, FaultyPersister, build_timeouts

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.testing.clock import settle
from delayline.timeouts import MemoryTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

FIVE = timedelta(seconds=5)


async def left_behind(clock: ManualClock, transport: FaultyTransport, persister: FaultyPersister) -> None:
    """One timeout in the storage, one on its way to it, of an endpoint that has used its timeout manager till now."""
    old = build_timeouts(clock, transport=transport, persister=persister)
    await old.start()
    await old.endpoint.send("out", b"", message_id="stored", delay=FIVE)
    await settle()
    await old.delivery._satellites[0].stop()
    await old.endpoint.send("out", b"", message_id="on its way", delay=FIVE)
    await old.endpoint.stop()


def moved(clock: ManualClock, transport: FaultyTransport, persister: FaultyPersister, **settings: Any) -> Endpoint:  # noqa: ANN401
    """The same endpoint with a store."""
    return Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()),
        draining=TimeoutManagerDelivery(persister),
        clock=clock,
        **settings,
    )


@pytest.fixture
def persister() -> FaultyPersister:
    return FaultyPersister(Faults())


@pytest.fixture
def transport() -> FaultyTransport:
    return FaultyTransport()


async def test_what_waits_in_the_old_one_arrives_and_new_messages_go_to_the_new_one(
    clock: ManualClock, transport: FaultyTransport, persister: FaultyPersister
) -> None:
    # Given
    await left_behind(clock, transport, persister)
    endpoint = moved(clock, transport, persister)
    # When
    async with endpoint:
        await endpoint.send("out", b"", message_id="new", delay=FIVE)
        await settle()
        # Then
        assert [waiting.id for waiting in await endpoint.delayed.pending()] == ["new"]
        assert (await persister.count()).number == 2
        await clock.advance(5)
        arrived = {message.id for message in await transport.browse("out", 10)}
        assert arrived == {"stored", "on its way", "new"}
        assert (await persister.count()).number == 0


async def test_other_endpoints_may_still_use_the_old_one(
    clock: ManualClock, transport: FaultyTransport, persister: FaultyPersister
) -> None:
    """An instance that knows nothing of the new way defers beside one that does."""
    old = build_timeouts(clock, transport=transport, persister=persister)
    await old.start()
    async with moved(clock, transport, persister) as endpoint:
        await old.endpoint.send("out", b"", message_id="old way", delay=FIVE)
        await endpoint.send("out", b"", message_id="new way", delay=FIVE)
        await clock.advance(5)
        assert sorted(message.id for message in await transport.browse("out", 10)) == ["new way", "old way"]
        await old.endpoint.stop()


async def test_a_disabled_timeout_manager_is_left_alone(
    clock: ManualClock, transport: FaultyTransport, persister: FaultyPersister
) -> None:
    await left_behind(clock, transport, persister)
    calls = len(persister.faults.calls)
    async with moved(clock, transport, persister, disable_timeout_manager=True):
        await clock.advance(10)
        assert await transport.count("out") == 0
        assert await transport.count(TIMEOUTS) == 1
    assert len(persister.faults.calls) == calls


async def test_draining_needs_no_transaction_with_the_new_one(clock: ManualClock, transport: FaultyTransport) -> None:
    """The mode is that of the transport and the new way; the old one does what it can."""
    elsewhere = FaultyPersister(Faults(), shared=False)
    await left_behind(clock, transport, elsewhere)
    endpoint = moved(clock, transport, elsewhere)
    assert endpoint.transaction_mode is TransactionMode.TRANSACTION_SCOPE
    async with endpoint:
        await clock.advance(5)
        assert await transport.count("out") == 2


async def test_an_outage_of_the_old_storage_stops_nothing_new(
    clock: ManualClock, transport: FaultyTransport, persister: FaultyPersister
) -> None:
    await transport.setup_infrastructure(["out"])
    persister.faults.always("setup", BackendUnavailable("down"))
    async with moved(clock, transport, persister) as endpoint:
        await endpoint.send("out", b"", message_id="new", delay=FIVE)
        await clock.advance(5)
        assert await transport.count("out") == 1


def test_the_new_one_is_not_drained() -> None:
    delivery = TimeoutManagerDelivery(MemoryTimeoutPersister())
    with pytest.raises(ConfigurationError, match="leave it out"):
        Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delivery, draining=delivery)
