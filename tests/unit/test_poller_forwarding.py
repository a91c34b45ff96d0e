"""The poller over a store that moves messages by itself: what that store leaves, and when it is not asked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import FaultyStore, build, delayed
from tests.unit.test_poller import start

from delayline import MemoryDelayedMessageStore, MemoryTransport
from delayline.spi import Forwarded, TransportOperation
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.testing.clock import ManualClock


class Forwarding(FaultyStore):
    """A store that moves by itself what goes to `out`, and passes over the rest or stops before it."""

    stops = False
    transport: MemoryTransport

    def forwards_to(self, transport: object) -> bool:
        return True

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        due = [message for message in await self.pending(limit=limit) if message.due <= at]
        plain = [message for message in due if message.destination == "out"]
        if self.stops:
            plain = list(itertools.takewhile(lambda message: message in plain, due))
        self.faults.check("forward", tuple(message.id for message in plain))
        await self.transport.dispatch([TransportOperation(message.message, "out") for message in plain])
        for message in plain:
            await self.remove(message)
        left = 0 if self.stops else len(due) - len(plain)
        return Forwarded(len(plain), await MemoryDelayedMessageStore.next_due(self), left)


@pytest.mark.parametrize("stops", [False, True], ids=["passes over", "stops before"])
async def test_what_a_forwarding_store_leaves_is_taken_in_hand_before_it_forwards_again(
    clock: ManualClock, stops: bool
) -> None:
    # Given messages that the store can move around one that it cannot
    house = build(clock)
    store = Forwarding(house.faults)
    store.transport, store.stops = MemoryTransport(), stops
    await store.transport.setup_infrastructure(["out"])
    house.delivery.store = store
    await store.store_many([delayed("a"), delayed("lost", to="nowhere"), delayed("b")])
    # When they are due
    await start(house)
    # Then the poller took in hand what was left, before the store moved anything else
    by = [(verb, ids) for verb, ids in house.faults.verbs("forward", "remove", "dispatch") if ids]
    taken = ("lost", "b") if stops else ("lost",)
    expected = [("forward", ("a",) if stops else ("a", "b")), ("dispatch", taken), ("dispatch", ("lost",))]
    assert [call for call in by if call[0] != "remove"] == expected
    assert (await house.ids("error"), await store.next_due()) == (["lost"], None)
    await store.store_many([delayed("c")])
    await settle()
    assert house.faults.verbs("forward")[-1] == ("forward", ("c",))
    await house.endpoint.stop()


async def test_a_store_of_another_domain_does_not_forward(clock: ManualClock) -> None:
    house = build(clock)
    house.delivery.store = Forwarding(house.faults, shared=False)
    await house.delivery.store.store(delayed())
    await start(house)
    assert (await house.ids("out"), house.faults.count("forward")) == (["m"], 0)
    await house.endpoint.stop()
