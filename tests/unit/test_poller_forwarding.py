"""The poller over a store that moves messages by itself: what that store leaves, and when it is not asked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import MemoryStore, build, delayed
from tests.unit.test_poller import start

from delayline import MemoryDelayedMessageStore, MemoryTransport
from delayline.spi import Forwarded, TransportOperation
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.testing.clock import ManualClock


class ForwardingStore(MemoryStore):
    """A store that moves by itself what goes to `out`, and passes over the rest or stops before it."""

    def __init__(self, *, stops: bool = False, shared: bool = True) -> None:
        super().__init__(shared=shared)
        self.stops = stops
        self.transport = MemoryTransport()
        self.forwarded: list[list[str]] = []

    def forwards_to(self, transport: object) -> bool:
        return True

    async def forward_due(self, at: datetime, limit: int, *, max_bytes: int) -> Forwarded:
        due = [message for message in await self.pending(limit=limit) if message.due <= at]
        plain = [message for message in due if message.destination == "out"]
        if self.stops:
            plain = list(itertools.takewhile(lambda message: message in plain, due))
        self.forwarded.append([message.id for message in plain])
        await self.transport.dispatch([TransportOperation(message.message, "out") for message in plain])
        for message in plain:
            await self.remove(message)
        left = 0 if self.stops else len(due) - len(plain)
        return Forwarded(len(plain), await MemoryDelayedMessageStore.next_due(self), left)


@pytest.mark.parametrize("stops", [False, True], ids=["passes over", "stops before"])
async def test_messages_that_forwarding_skips_are_dispatched_before_the_next_forwarding(
    clock: ManualClock, stops: bool
) -> None:
    # Given messages that the store can move around one that it cannot
    scenario = build(clock)
    store = ForwardingStore(stops=stops)
    await store.transport.setup_infrastructure(["out"])
    scenario.delivery.store = store
    await store.store_many([delayed("a"), delayed("lost", to="nowhere"), delayed("b")])
    # When they are due
    await start(scenario)
    # Then the poller handled the remaining messages before the store moved others
    dispatched = [ids for _, ids in scenario.faults.recorded("dispatch")]
    assert store.forwarded[0] == (["a"] if stops else ["a", "b"])
    assert dispatched == [("lost", "b") if stops else ("lost",), ("lost",)]
    assert not any(store.forwarded[1:])
    assert (await scenario.ids("error"), await store.next_due()) == (["lost"], None)
    await store.store_many([delayed("c")])
    await settle()
    assert store.forwarded[-1] == ["c"]
    await scenario.endpoint.stop()


async def test_a_store_of_another_domain_does_not_forward(clock: ManualClock) -> None:
    scenario = build(clock)
    scenario.delivery.store = store = ForwardingStore(shared=False)
    await store.store(delayed())
    await start(scenario)
    assert (await scenario.ids("out"), store.forwarded) == (["m"], [])
    await scenario.endpoint.stop()
