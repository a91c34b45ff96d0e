"""Capability SupportsQueueManagement: looking into queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayline.errors import QueueNotFound
from delayline.message import Message
from delayline.testing.conformance.messages import AWKWARD_HEADERS, HOSTILE_NAMES, operation
from delayline.testing.conformance.store_transactions import RolledBackError
from delayline.testing.conformance.transport_fixtures import TransportFixtures, nothing_left, received
from delayline.testing.conformance.transport_queues import ids
from delayline.transport import SupportsTransportTransactions, TransportOperation

if TYPE_CHECKING:
    from delayline.testing.conformance.transport_fixtures import ManagedTransport


class TransportManagement(TransportFixtures):
    """Count, browse, take, purge."""

    async def test_count_includes_hidden_messages(self, managed: ManagedTransport) -> None:
        """A message being handled is still counted."""
        assert await managed.count("billing") == 0
        await managed.dispatch([operation("billing", f"m{number}") for number in range(3)])
        receiver = await managed.receiver("billing")
        [message] = await received(receiver)
        await self.holds_no_more(receiver)
        await self.counted(managed, "billing", visible=2, hidden=1)
        await receiver.acknowledge(message)
        await self.counted(managed, "billing", visible=2)
        assert await managed.count("sales") == 0

    async def test_browse_takes_nothing(self, managed: ManagedTransport) -> None:
        """Oldest first, page by page, whole messages, and all still there to be received."""
        whole = Message("m0", AWKWARD_HEADERS, b"\x00body")
        await managed.dispatch([TransportOperation(whole, "billing")])
        for number in range(1, 5):
            await managed.dispatch([operation("billing", f"m{number}")])
        pages = [await managed.browse("billing", 2, offset=offset) for offset in (0, 2, 4, 6)]
        assert [[message.id for message in page] for page in pages] == [["m0", "m1"], ["m2", "m3"], ["m4"], []]
        assert pages[0][0] == whole
        found = ids(await received(await managed.receiver("billing"), 5))
        assert self.in_order(found) == ["m0", "m1", "m2", "m3", "m4"]

    async def test_browse_shows_hidden_messages(self, managed: ManagedTransport) -> None:
        """In order: a message being handled is still in its place."""
        if not (self.shows_hidden and self.browses_hidden):
            pytest.skip("not claimed: to list messages being handled")
        await managed.dispatch([operation("billing", f"m{number}") for number in range(4)])
        receiver = await managed.receiver("billing")
        first, second = await received(receiver, 2)
        assert [message.id for message in await managed.browse("billing", 3)] == ["m0", "m1", "m2"]
        await receiver.release(second)
        await receiver.acknowledge(first)
        assert [message.id for message in await managed.browse("billing", 9)] == ["m1", "m2", "m3"]

    async def test_take_removes_one_copy(self, managed: ManagedTransport) -> None:
        """One at a time, and False when none is left."""
        await managed.dispatch([operation("billing"), operation("billing", "other"), operation("billing")])
        assert await managed.take("billing", "m") is True
        await self.counted(managed, "billing", visible=2)
        assert await managed.take("billing", "m") is True
        assert await managed.take("billing", "m") is False
        assert ids(await received(await managed.receiver("billing"))) == ["other"]

    async def test_take_leaves_what_is_being_handled(self, managed: ManagedTransport) -> None:
        """False, and its receiver can still acknowledge it."""
        await managed.dispatch([operation("billing")])
        receiver = await managed.receiver("billing")
        [message] = await received(receiver)
        assert await managed.take("billing", "m") is False
        assert await receiver.acknowledge(message) is True

    async def test_take_in_a_transaction(self, managed: ManagedTransport) -> None:
        """Taken at the commit; a rollback puts it back in its place."""
        if not isinstance(managed, SupportsTransportTransactions):
            pytest.skip("not claimed: SupportsTransportTransactions")
        await managed.dispatch([operation("error", "first"), operation("error", "second")])
        with pytest.raises(RolledBackError):
            async with managed.transaction() as transaction:
                assert await managed.take("error", "first", transaction) is True
                await managed.dispatch([operation("billing", "first")], transaction)
                raise RolledBackError
        assert [message.id for message in await managed.browse("error", 10)] == ["first", "second"]
        async with managed.transaction() as transaction:
            assert await managed.take("error", "first", transaction) is True
            await managed.dispatch([operation("billing", "first")], transaction)
        assert [message.id for message in await managed.browse("error", 10)] == ["second"]
        assert ids(await received(await managed.receiver("billing"))) == ["first"]

    async def test_purge_leaves_what_is_being_handled(self, managed: ManagedTransport) -> None:
        """It says how many it removed."""
        await managed.dispatch([operation("billing", f"m{number}") for number in range(4)])
        receiver = await managed.receiver("billing")
        [message] = await received(receiver)
        await self.holds_no_more(receiver)
        await self.counted(managed, "billing", visible=3, hidden=1)
        assert await managed.purge("billing") == 3
        await self.counted(managed, "billing", visible=0, hidden=1)
        assert await receiver.acknowledge(message) is True
        assert await managed.purge("billing") == 0
        await nothing_left(managed, "billing")

    async def test_a_missing_queue_is_an_error(self, managed: ManagedTransport) -> None:
        """Not an empty answer: a typing mistake must be seen."""
        with pytest.raises(QueueNotFound):
            await managed.count("nowhere")
        with pytest.raises(QueueNotFound):
            await managed.browse("nowhere", 1)
        with pytest.raises(QueueNotFound):
            await managed.purge("nowhere")

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_names_are_managed(self, managed: ManagedTransport, name: str) -> None:
        """Names are data here too."""
        await self.has_queues(managed, name)
        await managed.dispatch([operation(name, name), operation(name, "other")])
        assert await managed.count(name) == 2
        assert await managed.take(name, name) is True
        assert [message.id for message in await managed.browse(name, 9)] == ["other"]
        assert await managed.purge(name) == 1
