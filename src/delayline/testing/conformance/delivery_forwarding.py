"""Capability SupportsForwarding: due messages move to their queues inside the back end, or stay for the poller."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import pytest
import pytest_asyncio

from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.store import DelayedMessageStore, SupportsForwarding
from delayline.endpoint import Endpoint
from delayline.events import Event
from delayline.message import Headers
from delayline.testing.clock import ManualClock
from delayline.testing.conformance.delivery_fixtures import ELSEWHERE, DeliveryFixtures
from delayline.testing.conformance.messages import AT, AWKWARD_HEADERS, ENDPOINT, PATIENCE, delayed
from delayline.testing.conformance.store_fixtures import closed, opened
from delayline.testing.conformance.transport_fixtures import nothing_left, received
from delayline.testing.signals import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from typing import Protocol

    from delayline.delayed.store import Forwarded
    from delayline.message import DelayedMessage
    from delayline.transport import Transport

    class Forwards(DelayedMessageStore, SupportsForwarding, Protocol):
        """A store that claims forwarding."""


PLENTY = 1 << 40
BILLING = "billing"
NOWHERE = "nowhere"


class Inside(NamedTuple):
    """A store, open, and the transport whose queues it moves messages to, started."""

    transport: Transport
    store: Forwards

    async def hold(self, *messages: DelayedMessage) -> None:
        """Store messages, one after the other."""
        for message in messages:
            await self.store.store(message)

    async def forward(self, limit: int = 100, max_bytes: int = PLENTY) -> Forwarded:
        """Let the store move due messages."""
        return await self.store.forward_due(AT, limit, max_bytes=max_bytes)

    async def takes(self, number: int, queue: str = BILLING) -> list[str]:
        """Take that many messages, and no more, from a queue; return their ids in order."""
        receiver = await self.transport.receiver(queue)
        found = await received(receiver, number) if number else []
        for one in found:
            await receiver.acknowledge(one)
        await receiver.stop()
        await nothing_left(self.transport, queue)
        return [one.message.id for one in found]

    async def waiting(self) -> list[str]:
        """Return the ids of the remaining messages, by taking them out of the store."""
        ids: list[str] = []
        while (message := await self.store.fetch_next_due(AT + timedelta(days=1))) is not None:
            ids.append(message.id)
            await self.store.remove(message)
        return ids


class DeliveryForwarding(DeliveryFixtures):
    """Messages that the store moves inside its database, and those that it leaves to the poller."""

    @pytest_asyncio.fixture
    async def forwarding(self, tmp_path: Path) -> AsyncIterator[Inside]:
        """Provide the parts as they are, without faults: those would have to pass through this process."""
        transport, store = await self.make_backends(tmp_path)
        if not isinstance(store, SupportsForwarding) or not store.forwards_to(transport):
            pytest.skip("not claimed: SupportsForwarding")
        await transport.start()
        await transport.setup_infrastructure([BILLING, ELSEWHERE, "error"])
        await opened(store)
        yield Inside(transport, store)
        await closed(store)
        await transport.stop()

    async def test_what_is_due_moves_in_the_order_of_due_times(self, forwarding: Inside) -> None:
        """Down to the step, ties in the order stored; nothing that is due later moves."""
        before, later = delayed("first", AT - self.step), delayed("early", AT + self.step)
        await forwarding.hold(delayed("second"), delayed("third"), before, later)
        forwarded = await forwarding.forward()
        assert (forwarded.number, forwarded.next_due, forwarded.left) == (3, AT + self.step, 0)
        assert await forwarding.takes(3) == ["first", "second", "third"]
        assert await forwarding.waiting() == ["early"]

    async def test_an_empty_store_forwards_nothing(self, forwarding: Inside) -> None:
        """And says that nothing is due."""
        forwarded = await forwarding.forward()
        assert (forwarded.number, forwarded.next_due, forwarded.left) == (0, None, 0)

    async def test_each_destination_gets_its_own_untouched(self, forwarding: Inside) -> None:
        """Headers and bodies, byte for byte."""
        message = delayed("a", headers=AWKWARD_HEADERS, body=bytes(range(256)))
        await forwarding.hold(message, delayed("b", destination=ELSEWHERE))
        assert (await forwarding.forward()).number == 2
        [found] = await received(await forwarding.transport.receiver(BILLING))
        assert (found.message.id, found.message.body) == ("a", message.message.body)
        assert found.message.encoded_headers == message.message.encoded_headers
        assert await forwarding.takes(1, ELSEWHERE) == ["b"]

    async def test_the_limit_holds(self, forwarding: Inside) -> None:
        """At most `limit`, the earliest; the next one, due as well, is not to be waited for."""
        await forwarding.hold(*(delayed(f"m{number}", AT - (5 - number) * self.step) for number in range(5)))
        forwarded = await forwarding.forward(limit=2)
        assert forwarded.number == 2
        assert forwarded.next_due is not None
        assert forwarded.next_due <= AT
        assert await forwarding.takes(2) == ["m0", "m1"]

    async def test_max_bytes_bounds_a_move(self, forwarding: Inside) -> None:
        """Bodies and headers count, as in a fetch; one that is too large moves alone."""
        await forwarding.hold(
            *(delayed(f"m{number}", headers={"h": "x" * 5000}, body=b"x" * 5000) for number in range(5))
        )
        assert (await forwarding.forward(max_bytes=35_000)).number == 3
        assert (await forwarding.forward(max_bytes=1)).number == 1
        assert await forwarding.takes(4) == ["m0", "m1", "m2", "m3"]

    async def test_a_missing_queue_is_stopped_at_or_passed_over(self, forwarding: Inside) -> None:
        """Messages move in order; the next remaining one is returned."""
        await forwarding.hold(delayed("a"), delayed("lost", destination=NOWHERE), delayed("b"))
        first = await forwarding.forward()
        assert first.next_due == AT
        if first.left:
            assert (first.number, first.left) == (2, 1)
            assert await forwarding.takes(2) == ["a", "b"]
            assert await forwarding.waiting() == ["lost"]
        else:
            assert (first.number, (await forwarding.forward()).number) == (1, 0)
            assert await forwarding.takes(1) == ["a"]
            assert await forwarding.waiting() == ["lost", "b"]

    async def test_what_is_held_without_a_transaction_does_not_move(self, forwarding: Inside) -> None:
        """Another process is dispatching the message."""
        await forwarding.hold(delayed("held", AT - self.step), delayed("free"))
        held = await forwarding.store.fetch_next_due(AT)
        assert held is not None
        forwarded = await forwarding.forward()
        found = await forwarding.takes(forwarded.number)
        assert await forwarding.store.remove(held) is True
        assert [*found, *await forwarding.waiting()] == ["free"]

    async def test_competing_moves_double_nothing(self, forwarding: Inside) -> None:
        """Every message moves once."""
        ids = [f"m{number:02}" for number in range(40)]
        await forwarding.hold(*map(delayed, ids))
        moves = await asyncio.gather(*(forwarding.forward(limit=10) for _ in range(4)))
        number = sum(move.number for move in moves)
        assert sorted([*await forwarding.takes(number), *await forwarding.waiting()]) == ids

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
    async def test_a_move_that_is_cancelled_moves_all_or_nothing(self, forwarding: Inside, turns: int) -> None:
        """And is over when the cancellation is raised: no message is in two places, or in none."""
        ids = [f"m{number:02}" for number in range(20)]
        await forwarding.hold(*map(delayed, ids))
        moving = asyncio.create_task(forwarding.forward())
        for _ in range(turns):
            await asyncio.sleep(0)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        left = await forwarding.waiting()
        assert left in ([], ids)
        assert await forwarding.takes(len(ids) - len(left)) == (ids if not left else [])

    async def test_a_message_that_expires_is_left_to_the_poller(self, forwarding: Inside) -> None:
        """Its time to be received begins when it is sent, which moving is not."""
        await forwarding.hold(delayed("expires", headers={Headers.TIME_TO_BE_RECEIVED: "00:00:00"}))
        assert (await forwarding.forward()).number == 0
        assert await forwarding.waiting() == ["expires"]

    async def test_the_poller_takes_in_hand_what_is_left(self, forwarding: Inside) -> None:
        """A missing queue: to the error queue. Dispatch properties: no receiver sees them. The others: just moved."""
        marked = {Headers.DISPATCH_PROPERTIES + "DeliverAt": "x", "kept": "yes"}
        await forwarding.hold(
            delayed("a"), delayed("marked", headers=marked), delayed("lost", destination=NOWHERE), delayed("b")
        )
        endpoint = Endpoint(
            ENDPOINT,
            transport=forwarding.transport,
            delayed_delivery=StoredDelivery(forwarding.store),
            send_only=True,
            clock=ManualClock(AT),
        )
        with Signals() as signals:
            async with endpoint:
                await signals.wait_for(Event.SLEEPS, timeout=PATIENCE)
                receiver = await forwarding.transport.receiver(BILLING)
                found = {one.message.id: one.message for one in await received(receiver, 3)}
                [failed] = await received(await forwarding.transport.receiver("error"))
        assert sorted(found) == ["a", "b", "marked"]
        assert dict(found["marked"].headers) == {"kept": "yes"}
        assert (failed.message.id, failed.message.headers[Headers.FAILED_QUEUE]) == ("lost", NOWHERE)
        assert await (await opened(forwarding.store)).next_due() is None
