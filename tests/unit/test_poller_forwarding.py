"""The poller over a store that moves messages by itself: what that store leaves, and when it is not asked."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import MemoryStore, Scenario, build, delayed
from tests.unit.test_poller import start

from delayline import MemoryDelayedMessageStore, MemoryTransport
from delayline.spi import Forwarded, TransportOperation
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.testing.clock import ManualClock


class ForwardingStore(MemoryStore):
    """A store that moves by itself what goes to `out`, and passes over the rest or stops before it."""

    def __init__(
        self, *, stops: bool = False, shared: bool = True, takes: float = 0, clock: ManualClock | None = None
    ) -> None:
        super().__init__(shared=shared)
        self.stops = stops
        self.takes = takes
        """Seconds that a move takes by the clock."""
        self.clock = clock
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
        if self.clock is not None:
            await self.clock.sleep(self.takes)
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


async def resting(clock: ManualClock, takes: float) -> tuple[Scenario, ForwardingStore]:
    """Return a poller that has just moved a message, which took so many seconds."""
    scenario = build(clock)
    scenario.delivery.store = store = ForwardingStore(takes=takes, clock=clock)
    await store.transport.setup_infrastructure(["out"])
    await store.store_many([delayed("a", after=1), *(delayed(f"b{ms}", after=1 + ms / 1000) for ms in (2, 4, 6))])
    await start(scenario)
    await clock.advance(1 + takes)
    assert store.forwarded == [["a"]]
    return scenario, store


async def test_messages_due_soon_after_a_move_are_moved_together(clock: ManualClock) -> None:
    # Given a poller that rests for 4 ms after a move that took a millisecond
    scenario, store = await resting(clock, 0.001)
    # When messages are due meanwhile, and one is stored that is due at once
    await clock.advance(0.003)
    await scenario.endpoint.send("out", b"", message_id="c", delay=timedelta(microseconds=1))
    await clock.advance(0.000999)
    assert store.forwarded == [["a"]]
    # Then they move together at the end of the rest, and the one that is due later does not
    await clock.advance(0.000001)
    assert store.forwarded == [["a"], ["b2", "b4", "c"]]
    await clock.advance(0.02)
    assert store.forwarded == [["a"], ["b2", "b4", "c"], ["b6"]]
    await scenario.endpoint.stop()


async def test_a_rest_is_short_after_a_move_that_took_long(clock: ManualClock) -> None:
    # Given a poller that rests after a move that took 5 ms
    scenario, store = await resting(clock, 0.005)
    # Then it moves again 6 ms after that move began
    await clock.advance(0.0009)
    assert store.forwarded == [["a"]]
    await clock.advance(0.0002)
    assert store.forwarded == [["a"], ["b2", "b4", "b6"]]
    await clock.advance(0.02)
    await scenario.endpoint.stop()


async def test_a_rest_is_short_if_the_clock_is_set_back(clock: ManualClock) -> None:
    # Given a poller that rests
    scenario, store = await resting(clock, 0.001)
    # When the clock is set back by an hour, and a message is due
    clock.set(clock.now() - timedelta(hours=1))
    await scenario.endpoint.send("out", b"", message_id="c", delay=timedelta(microseconds=1))
    # Then it is moved in time
    await clock.advance(0.009)
    assert store.forwarded == [["a"], ["c"]]
    await clock.advance(0.02)
    await scenario.endpoint.stop()


async def test_a_message_whose_due_time_is_known_is_moved_without_a_query(clock: ManualClock) -> None:
    # Given a poller that sleeps until a message is due
    scenario = build(clock)
    scenario.delivery.store = store = ForwardingStore()
    await store.transport.setup_infrastructure(["out"])
    await store.store_many([delayed("a", after=1), delayed("b", after=2)])
    queries: list[int] = []
    next_due = store.next_due

    async def counted() -> datetime | None:
        queries.append(len(store.forwarded))
        return await next_due()

    store.next_due = counted  # type: ignore[method-assign]
    await start(scenario)
    # When both are due
    await clock.advance(3)
    # Then the poller asked once, before the first
    assert (store.forwarded, queries) == ([["a"], ["b"]], [0])
    await scenario.endpoint.stop()


async def test_a_message_that_has_gone_before_it_was_due_is_no_reason_for_a_pause(clock: ManualClock) -> None:
    # Given a poller that sleeps until a message is due
    scenario = build(clock)
    scenario.delivery.store = store = ForwardingStore()
    await store.transport.setup_infrastructure(["out"])
    gone = delayed("gone", after=1)
    await store.store_many([gone, delayed("a", after=1.01)])
    await start(scenario)
    # When another process removes it
    await store.remove(gone)
    await clock.advance(1.01)
    # Then the next one is on time
    assert store.forwarded == [[], ["a"]]
    await scenario.endpoint.stop()
