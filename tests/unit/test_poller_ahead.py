"""One batch ahead: the next one is fetched while one is on its way, and given back when that one goes wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import SCOPES, START, build, delayed

from delayline import BackendUnavailable
from delayline.delayed.store import Outcome
from delayline.testing import Fault
from delayline.testing.clock import settle
from delayline.testing.faults import FETCH, REMOVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.conftest import Scenario

    from delayline.spi import Transaction, TransportOperation
    from delayline.testing.clock import ManualClock

DOWN = BackendUnavailable("the server does not answer")
BOOM = RuntimeError("boom")
APART = pytest.mark.parametrize("way", ["the store's transaction", "no transaction"])


class Confirms:
    """Has a transport's sends wait for their confirms."""

    def __init__(self, scenario: Scenario) -> None:
        self.arrive = asyncio.Event()
        self._send = scenario.transport.dispatch
        scenario.transport.dispatch = self._dispatch  # type: ignore[method-assign]

    async def _dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        await self._send(operations, transaction)
        await self.arrive.wait()


async def six_in_twos(clock: ManualClock, way: str) -> tuple[Scenario, Confirms]:
    settings: dict[str, Any] = SCOPES[way]
    scenario = build(clock, batch_size=2, **settings)
    await scenario.put(*[delayed(str(number)) for number in range(6)])
    await scenario.transport.setup_infrastructure(["out"])
    return scenario, Confirms(scenario)


async def free(scenario: Scenario) -> list[str]:
    return [message.id for message in await scenario.store.fetch_due(START, 10, max_bytes=1000)]


@APART
async def test_the_next_batch_is_fetched_meanwhile_and_sent_after_the_removal(clock: ManualClock, way: str) -> None:
    scenario, confirms = await six_in_twos(clock, way)
    # When the first batch is sent, and not confirmed yet
    await scenario.endpoint.start()
    await settle()
    # Then the second one is fetched, and no more
    assert [verb for verb, _ in scenario.faults.recorded(*FETCH, "dispatch", *REMOVE)] == [
        "fetch_due",
        "dispatch",
        "fetch_due",
    ]
    # And it is sent once the first is removed
    confirms.arrive.set()
    await settle()
    moved = [(verb, ids) for ids in (("0", "1"), ("2", "3"), ("4", "5")) for verb in ("dispatch", "remove_many")]
    assert scenario.faults.recorded("dispatch", *REMOVE) == moved
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


async def test_one_transaction_has_one_batch(clock: ManualClock) -> None:
    scenario, confirms = await six_in_twos(clock, "one transaction")
    await scenario.endpoint.start()
    await settle()
    assert scenario.faults.calls(*FETCH) == 1
    confirms.arrive.set()
    await scenario.endpoint.stop()


@APART
async def test_an_outage_leaves_nothing_locked_and_the_order_as_it_was(clock: ManualClock, way: str) -> None:
    scenario, confirms = await six_in_twos(clock, way)
    confirms.arrive.set()
    # Given a transport that goes away under the first batch, while the second is fetched
    scenario.faults.inject(Fault("dispatch", DOWN))
    await scenario.endpoint.start()
    await settle()
    # Then everybody may have the second one
    assert await scenario.store.cancel("3") is Outcome.DONE
    # And afterwards all leave in their order
    scenario.faults.heal()
    await clock.advance(2)
    assert await scenario.ids("out") == ["0", "1", "2", "4", "5"]
    await scenario.endpoint.stop()


@APART
async def test_one_bad_message_is_isolated_before_the_next_batch_is_sent(clock: ManualClock, way: str) -> None:
    scenario, confirms = await six_in_twos(clock, way)
    confirms.arrive.set()
    scenario.faults.inject(Fault("dispatch", BOOM, message_id="1"))
    await scenario.endpoint.start()
    await settle()
    assert await scenario.ids("out") == ["0", "2", "3", "4", "5"]
    assert await scenario.ids("error") == []
    assert [message.id for message in await scenario.pending()] == ["1"]
    await scenario.endpoint.stop()


@APART
async def test_nothing_fetched_ahead_is_sent_while_a_removal_fails(clock: ManualClock, way: str) -> None:
    scenario, confirms = await six_in_twos(clock, way)
    confirms.arrive.set()
    scenario.faults.inject(Fault(REMOVE, DOWN))
    await scenario.endpoint.start()
    await clock.advance(3)
    assert await scenario.ids("out") == ["0", "1"]
    scenario.faults.heal()
    await clock.advance(1)
    assert await scenario.ids("out") == ["0", "1", "2", "3", "4", "5"]
    assert await scenario.pending() == []
    await scenario.endpoint.stop()


@APART
async def test_a_failed_fetch_ahead_is_repeated(clock: ManualClock, way: str) -> None:
    scenario, confirms = await six_in_twos(clock, way)
    await scenario.endpoint.start()
    scenario.faults.inject(Fault(FETCH, DOWN))
    await settle()
    confirms.arrive.set()
    await settle()
    assert await scenario.ids("out") == ["0", "1"]
    scenario.faults.heal()
    await clock.advance(1)
    assert await scenario.ids("out") == ["0", "1", "2", "3", "4", "5"]
    await scenario.endpoint.stop()


@APART
async def test_a_stop_finishes_sent_batches_and_returns_unsent_ones(clock: ManualClock, way: str) -> None:
    scenario, confirms = await six_in_twos(clock, way)
    await scenario.endpoint.start()
    await settle()
    # When the endpoint stops between the two
    stopping = asyncio.create_task(scenario.endpoint.stop())
    await settle()
    confirms.arrive.set()
    await stopping
    # Then the first batch is dispatched, and the rest is free for other processes
    assert await scenario.ids("out") == ["0", "1"]
    assert await free(scenario) == ["2", "3", "4", "5"]


@APART
async def test_messages_are_fetched_again_after_their_lease(clock: ManualClock, way: str) -> None:
    """Given a transport that blocks for longer than a lease, when it goes on, then locks are fresh."""
    scenario, confirms = await six_in_twos(clock, way)
    await scenario.endpoint.start()
    await clock.advance(6)
    confirms.arrive.set()
    await settle()
    fetched = [verb for verb, _ in scenario.faults.recorded(*FETCH, "dispatch")][:5]
    assert fetched == ["fetch_due", "dispatch", "fetch_due", "fetch_due", "dispatch"]
    assert await scenario.ids("out") == ["0", "1", "2", "3", "4", "5"]
    await scenario.endpoint.stop()
