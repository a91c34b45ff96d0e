"""Destinations of delayed sends are looked up once, and not during an outage."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import BackendUnavailable, MemoryTransport, QueueNotFound
from delayline import outgoing as module
from delayline.outgoing import Destinations
from delayline.testing import Fault, FaultyTransport

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock


async def queues(*names: str) -> FaultyTransport:
    transport = FaultyTransport(MemoryTransport())
    await transport.setup_infrastructure(names)
    return transport


async def test_similar_names_are_suggested(clock: ManualClock) -> None:
    destinations = Destinations(await queues("billing", "shipping", "sales"), clock)
    with pytest.raises(QueueNotFound, match="Did you mean 'billing'") as raised:
        await destinations.check("biling")
    assert raised.value.similar[0] == "billing"
    with pytest.raises(QueueNotFound) as unlike:
        await destinations.check("warehouse")
    assert unlike.value.similar == ()
    assert "Did you mean" not in str(unlike.value)


async def test_a_queue_that_is_made_later_is_found(clock: ManualClock) -> None:
    transport = await queues()
    destinations = Destinations(transport, clock)
    with pytest.raises(QueueNotFound):
        await destinations.check("billing")
    await transport.setup_infrastructure(["billing"])
    await clock.advance(1)
    await destinations.check("billing")


async def test_many_sends_at_once_ask_once(clock: ManualClock) -> None:
    transport, asked = await queues("billing"), []
    transport.inject(Fault("has_queue", before=lambda: asked.append("!")))
    destinations = Destinations(transport, clock)
    await asyncio.gather(*(destinations.check("billing") for _ in range(100)))
    assert len(asked) == 1
    refused = await asyncio.gather(*(destinations.check("biling") for _ in range(100)), return_exceptions=True)
    assert {str(one) for one in refused} == {str(refused[0])}
    assert isinstance(refused[0], QueueNotFound)
    assert len(asked) == 2


async def test_an_outage_is_asked_about_once_a_minute(clock: ManualClock) -> None:
    transport, asked = await queues("billing"), []
    transport.inject(
        Fault("has_queue", before=lambda: asked.append("!")),
        Fault("has_queue", error=BackendUnavailable("no answer")),
    )
    destinations = Destinations(transport, clock)
    for _ in range(5):
        await destinations.check("biling")
    assert len(asked) == 1
    transport.heal()
    await destinations.check("biling")
    await clock.advance(timedelta(minutes=1))
    with pytest.raises(QueueNotFound):
        await destinations.check("biling")


async def test_no_send_waits_long_for_the_answer(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(MemoryTransport):
        async def has_queue(self, queue: str) -> bool:
            await asyncio.Event().wait()
            return False

    monkeypatch.setattr(module, "CHECK_PATIENCE", 0)
    await Destinations(Silent(), clock).check("biling")


async def test_a_transport_without_queue_lookup_is_not_asked(clock: ManualClock) -> None:
    class Mute:
        """Have no capability."""

    await Destinations(Mute(), clock).check("biling")  # type: ignore[arg-type]
