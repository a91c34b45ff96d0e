"""Nothing is lost, and nothing doubled but where the guarantee allows it: faults at every step, and stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayline.delayed.delivery import StoredDelivery
from delayline.endpoint import Endpoint
from delayline.errors import BackendUnavailable
from delayline.events import Event
from delayline.testing.clock import settle
from delayline.testing.conformance.delivery_fixtures import ELSEWHERE, MODES, DeliveryFixtures, send_all
from delayline.testing.conformance.messages import AT, ENDPOINT, PATIENCE
from delayline.testing.conformance.store_fixtures import opened
from delayline.testing.faults import FETCH, REMOVE, STORE, Fault
from delayline.transaction import Guarantee, TransactionMode

if TYPE_CHECKING:
    from delayline.message import Message
    from delayline.pipeline import MessageContext
    from delayline.testing.conformance.delivery_fixtures import DeliveryScenario

SECOND = timedelta(seconds=1)
DUE = AT + 5 * SECOND
IDS = [f"m{number}" for number in range(10)]
ERRORS = [BackendUnavailable("gone for a moment"), RuntimeError("unexpected")]
Step = str | tuple[str, ...]
STEPS: list[Step] = ["next_due", FETCH, "dispatch", REMOVE, "commit"]


def name_of(step: object) -> str:
    """Return a test id."""
    if isinstance(step, Exception):
        return type(step).__name__
    return step[0] if isinstance(step, tuple) else str(step)


class DeliveryFaults(DeliveryFixtures):
    """Faults that pass."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("error", ERRORS, ids=name_of)
    @pytest.mark.parametrize("step", STEPS, ids=name_of)
    async def test_a_step_that_fails_once_neither_loses_nor_doubles(
        self, scenario: DeliveryScenario, mode: TransactionMode, error: Exception, step: Step
    ) -> None:
        """While the process lives and its log is complete, every message is handled exactly once."""
        async with scenario.endpoint(mode, number_of_retries=3) as endpoint:
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, error=error, calls=1))
            await scenario.comes(Event.HANDLED, len(IDS))
            await scenario.emptied()
        assert Counter(scenario.handled_ids()) == Counter(IDS)
        assert scenario.signals.count(Event.MOVED_TO_ERROR) == 0

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("error", ERRORS, ids=name_of)
    @pytest.mark.parametrize("step", [FETCH, "dispatch", REMOVE, "commit"], ids=name_of)
    async def test_a_step_that_was_done_but_reported_as_failed(
        self, scenario: DeliveryScenario, mode: TransactionMode, error: Exception, step: Step
    ) -> None:
        """The nastiest fault: nothing is lost, and where the guarantee is exactly once nothing is doubled."""
        endpoint = scenario.endpoint(mode, number_of_retries=3)
        if step == FETCH and not scenario.transactional:
            pytest.skip("not claimed: a fetch that is rolled back; its lock ends with the lease, in real time")
        async with endpoint:
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, error=error, calls=1, takes_effect=True))
            await scenario.comes(Event.HANDLED, len(IDS))
            await scenario.emptied()
            await settle()
        assert set(scenario.handled_ids()) == set(IDS)
        if endpoint.guarantee is Guarantee.EXACTLY_ONCE:
            assert Counter(scenario.handled_ids()) == Counter(IDS)

    @pytest.mark.parametrize("takes_effect", [False, True], ids=["rolled back", "committed"])
    async def test_a_receive_whose_commit_is_reported_as_failed_has_its_effects_once(
        self, scenario: DeliveryScenario, takes_effect: bool
    ) -> None:
        """The handler may run again; its sends and delayed sends leave once."""
        endpoint = scenario.endpoint(TransactionMode.TRANSACTION_SCOPE, handles=False)

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await context.send(ELSEWHERE, b"", message_id="now")
            await context.send(ELSEWHERE, b"", message_id="later", delay=5 * SECOND)

        async with endpoint:
            scenario.transport.inject(
                Fault("commit", error=BackendUnavailable("no answer"), calls=1, takes_effect=takes_effect)
            )
            await endpoint.send(ENDPOINT, b"")
            await scenario.comes(Event.RECEIVE_LOST if takes_effect else Event.HANDLED)
            await scenario.runs_until(scenario.removed(1))
            await endpoint.send(ELSEWHERE, b"", message_id="end")
            found = await scenario.received(ELSEWHERE, 3)
        assert sorted(message.id for message in found) == ["end", "later", "now"]

    async def test_a_delayed_commit_sends_nothing_early(self, scenario: DeliveryScenario) -> None:
        """Dispatched messages are invisible until the commit."""
        gate, reached = asyncio.Event(), asyncio.Event()
        async with scenario.endpoint(TransactionMode.TRANSACTION_SCOPE) as endpoint:
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            scenario.store.inject(Fault("commit", calls=1, before=reached.set, until=gate))
            await scenario.clock.advance(5 * SECOND)
            async with asyncio.timeout(PATIENCE):
                await reached.wait()
            await settle()
            assert scenario.handled == []
            gate.set()
            await scenario.happens(Event.HANDLED, len(IDS))
        assert Counter(scenario.handled_ids()) == Counter(IDS)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("step", [FETCH, "dispatch", REMOVE], ids=name_of)
    async def test_a_stop_in_the_middle_of_a_batch(
        self, scenario: DeliveryScenario, mode: TransactionMode, step: Step
    ) -> None:
        """The batch in flight is finished, and after the next start every message was handled once."""
        gate, reached = asyncio.Event(), asyncio.Event()
        endpoint = scenario.endpoint(mode, batch_size=4)
        async with endpoint:
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, calls=2, before=reached.set, until=gate))
            await scenario.clock.advance(5 * SECOND)
            async with asyncio.timeout(PATIENCE):
                await reached.wait()
            stopping = asyncio.create_task(endpoint.stop())
            await settle()
            assert not stopping.done()
            gate.set()
            async with asyncio.timeout(PATIENCE):
                await stopping
        async with endpoint:
            await scenario.happens(Event.HANDLED, len(IDS))
            await scenario.removed(len(IDS))
            await scenario.nothing_waits()
        assert Counter(scenario.handled_ids()) == Counter(IDS)

    async def test_a_stop_does_not_wait_for_a_due_time(self, scenario: DeliveryScenario) -> None:
        """Pending messages are not lost either."""
        endpoint = scenario.endpoint()
        async with endpoint:
            await send_all(endpoint, IDS, timedelta(days=300))
        async with asyncio.timeout(PATIENCE), endpoint:
            assert await scenario.store.next_due() == AT + timedelta(days=300)


class DeliveryBreakers(DeliveryFixtures):
    """Faults that last become critical errors, with texts that operators know."""

    async def critical(self, scenario: DeliveryScenario, text: str) -> None:
        """Move time on until the critical error has come; assert that it has this text."""
        await scenario.comes(Event.CRITICAL_ERROR)
        await settle()
        assert scenario.critical[0] == text

    async def test_one_failed_send_is_no_lasting_fault(self, scenario: DeliveryScenario) -> None:
        """Its sender knows; the silence after it stops no endpoint."""
        async with scenario.endpoint() as endpoint:
            scenario.store.inject(Fault(STORE, error=BackendUnavailable("down")))
            with pytest.raises(BackendUnavailable):
                await scenario.runs_until(endpoint.send(ENDPOINT, b"", delay=SECOND))
            await scenario.clock.advance(100 * SECOND)
        assert scenario.critical == []

    async def test_storing_keeps_failing(self, scenario: DeliveryScenario) -> None:
        """The store's breaker."""
        scenario.store.inject(Fault(STORE, error=BackendUnavailable("down")))
        trigger = 5 * SECOND
        async with scenario.endpoint(store_breaker=trigger) as endpoint:

            async def keep_sending() -> None:
                while not scenario.critical:
                    with pytest.raises(BackendUnavailable):
                        await endpoint.send(ENDPOINT, b"", delay=SECOND)
                    await scenario.clock.sleep(0.1)  # time stands still while the store is at work

            sending = asyncio.create_task(keep_sending())
            await self.critical(scenario, "Failed to store delayed message")
            assert scenario.clock.now() >= AT + trigger
            await scenario.runs_until(asyncio.wait_for(sending, PATIENCE))
            scenario.store.heal()
            await endpoint.send(ENDPOINT, b"", message_id="m", delay=SECOND)
            await scenario.comes(Event.HANDLED)
        assert scenario.handled_ids() == ["m"]

    @pytest.mark.parametrize("step", [FETCH, "next_due"], ids=name_of)
    async def test_fetching_keeps_failing(self, scenario: DeliveryScenario, step: Step) -> None:
        """The fetch breaker: for a store whose fetch fails, and for one whose `next_due` fails."""
        async with scenario.endpoint() as endpoint:
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            scenario.store.inject(Fault(step, error=BackendUnavailable("down")))
            await self.critical(scenario, "Failed to fetch due delayed messages from the storage")
            assert scenario.clock.now() >= DUE + 30 * SECOND
            scenario.store.heal()
            await scenario.comes(Event.HANDLED, len(IDS))
        assert Counter(scenario.handled_ids()) == Counter(IDS)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("step", ["dispatch", REMOVE, "commit"], ids=name_of)
    async def test_dispatching_keeps_failing(
        self, scenario: DeliveryScenario, mode: TransactionMode, step: Step
    ) -> None:
        """The dispatch breaker: no success between, so nothing disarms it, wherever dispatching fails."""
        async with scenario.endpoint(mode) as endpoint:
            if step == "commit" and not scenario.shared:
                pytest.skip("not claimed: one transaction over transport and store; sends are removed without")
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            part = scenario.transport if step == "dispatch" else scenario.store
            part.inject(Fault(step, error=BackendUnavailable("down")))
            await self.critical(scenario, "Failed to dispatch delayed messages to destination")
            assert scenario.clock.now() >= DUE + 30 * SECOND
            scenario.heal()
            await scenario.comes(Event.HANDLED, len(IDS))
            await scenario.runs_until(scenario.removed(len(IDS)))
        assert Counter(scenario.handled_ids()) == Counter(IDS)
        assert scenario.signals.count(Event.MOVED_TO_ERROR) == 0

    @pytest.mark.parametrize("mode", MODES)
    async def test_failure_handling_keeps_failing(self, scenario: DeliveryScenario, mode: TransactionMode) -> None:
        """More than one failed recovery a second, over half a minute; and nothing is lost by it."""
        ids = [f"m{number}" for number in range(40)]
        async with scenario.endpoint(mode) as endpoint:
            await send_all(endpoint, ids, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            scenario.transport.inject(Fault("dispatch", error=RuntimeError("all dispatches fail")))
            await scenario.clock.advance(5 * SECOND)
            # All of them: one whose dispatch has failed, but not its move yet, would be moved once the transport heals.
            await scenario.happens(Event.ERROR_MOVE_FAILED, len(ids))
            await settle()
            assert scenario.critical == ["Failed to execute error handling for delayed message forwarding"] * 10
            scenario.heal()
            await scenario.comes(Event.HANDLED, len(ids))
        assert Counter(scenario.handled_ids()) == Counter(ids)

    async def test_a_critical_error_stops_the_endpoint(self, scenario: DeliveryScenario) -> None:
        """Unless the host decides otherwise; pending messages stay stored."""
        endpoint = Endpoint(
            ENDPOINT,
            transport=scenario.transport,
            delayed_delivery=StoredDelivery(scenario.store),
            clock=scenario.clock,
        )
        async with endpoint:
            await send_all(endpoint, IDS, 5 * SECOND)
            await scenario.poller_sleeps(DUE)
            scenario.transport.inject(Fault("dispatch", error=BackendUnavailable("down")))
            await scenario.runs_until(asyncio.wait_for(endpoint.wait_stopped(), PATIENCE))
        assert scenario.handled == []
        await opened(scenario.store)
        assert await scenario.store.next_due() == DUE
