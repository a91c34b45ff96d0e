"""Time to be received: an expired message is never delivered."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import pytest

from delayline.events import Event
from delayline.message import Headers, Message
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.transport_fixtures import TransportFixtures, nothing_left, received
from delayline.testing.conformance.transport_queues import ids
from delayline.transport import SupportsQueueManagement, SupportsTransportTransactions, TransportOperation

if TYPE_CHECKING:
    from delayline.testing.conformance.transport_fixtures import ManagedTransport
    from delayline.transport import Transport

AT_ONCE = "00:00:00"
LONG = "10675199.02:48:05.4775807"  # the longest that .NET knows: beyond year 9999
DAY = "1.00:00:00"


def expiring(span: str, id: str = "m", **headers: str) -> TransportOperation:
    """Return a send of a message that may wait for so long."""
    return TransportOperation(Message(id, {Headers.TIME_TO_BE_RECEIVED: span} | headers, b"body"), "billing")


class TransportExpiry(TransportFixtures):
    """Tests of messages with the header NServiceBus.TimeToBeReceived."""

    async def test_an_expired_message_is_deleted_unseen(
        self, transport: Transport, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Receivers get those around it; it is gone, and the log says so."""
        sent = [operation("billing", "before"), expiring(AT_ONCE, "late"), operation("billing", "after")]
        with caplog.at_level(logging.DEBUG, "delayline"):
            await transport.dispatch(sent)
            found = ids(await received(await transport.receiver("billing"), 2))
            assert self.in_order(found) == self.in_order(["before", "after"])
            await nothing_left(transport, "billing")
        told = [record for record in caplog.records if getattr(record, "event", None) == Event.EXPIRED]
        if self.tells_expired:
            assert len(told) == 1
            assert "late" in told[0].getMessage()
        if isinstance(transport, SupportsQueueManagement):
            await self.counted(cast("ManagedTransport", transport), "billing", visible=0, hidden=2)

    async def test_many_expired_messages_are_passed_over(self, transport: Transport) -> None:
        """More of them than a receiver takes at once."""
        await transport.dispatch([*(expiring(AT_ONCE, f"m{number}") for number in range(30)), operation("billing")])
        receiver = await transport.receiver("billing")
        assert ids(await received(receiver, 1)) == ["m"]
        await nothing_left(transport, "billing")
        if isinstance(transport, SupportsQueueManagement):
            await self.counted(cast("ManagedTransport", transport), "billing", visible=0, hidden=1)

    @pytest.mark.parametrize("span", [DAY, LONG, "soon", "", "00:00", "25:00:00", "-00:00:01"])
    async def test_others_arrive(self, transport: Transport, span: str) -> None:
        """Unexpired messages, and those with an unreadable header, are never lost."""
        await transport.dispatch([expiring(span)])
        [found] = await received(await transport.receiver("billing"))
        assert found.message.headers[Headers.TIME_TO_BE_RECEIVED] == span

    @pytest.mark.parametrize("header", [Headers.FAILED_QUEUE, Headers.RETRIES])
    async def test_what_was_received_once_stays(self, transport: Transport, header: str) -> None:
        """A message in the error queue, or on its way to be handled again, was received in time."""
        await transport.dispatch([expiring(AT_ONCE, "m", **{header: "1"})])
        assert ids(await received(await transport.receiver("billing"))) == ["m"]

    async def test_an_expired_message_in_a_transaction(self, transport: Transport) -> None:
        """The same, when it was sent in one."""
        if not isinstance(transport, SupportsTransportTransactions):
            pytest.skip("not claimed: SupportsTransportTransactions")
        async with transport.transaction() as transaction:
            await transport.dispatch([expiring(AT_ONCE, "late"), operation("billing")], transaction)
        assert ids(await received(await transport.receiver("billing"))) == ["m"]
        await nothing_left(transport, "billing")
