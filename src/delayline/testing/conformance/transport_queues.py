"""Dispatch and receive: order, competition, acknowledgement."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from delayline.errors import DispatchFailed, InvalidMessage, QueueNotFound
from delayline.message import Message
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import (
    AWKWARD_HEADERS,
    HOSTILE_NAMES,
    LOOKALIKES,
    PATIENCE,
    operation,
)
from delayline.testing.conformance.transport_fixtures import TransportFixtures, nothing_left, received
from delayline.transaction import TransactionMode
from delayline.transport import ReceivedMessage, SupportsTransportTransactions, TransportOperation

if TYPE_CHECKING:
    from delayline.transport import Transport


def ids(messages: list[ReceivedMessage]) -> list[str]:
    """Return the ids of received messages."""
    return [entry.message.id for entry in messages]


class TransportQueues(TransportFixtures):
    """Tests of the required methods of transports."""

    async def test_messages_arrive_in_the_order_sent(self, transport: Transport) -> None:
        """First in, first out, within a dispatch and from one to the next, each queue for itself."""
        sent = [f"m{number}" for number in (5, 3, 9, 1)]
        await transport.dispatch([operation("billing", message_id) for message_id in sent])
        await transport.dispatch([operation("sales", "s1"), operation("billing", "last"), operation("sales", "s2")])
        found = ids(await received(await transport.receiver("billing"), 5))
        assert self.in_order(found) == self.in_order([*sent, "last"])
        assert self.in_order(ids(await received(await transport.receiver("sales"), 2))) == ["s1", "s2"]

    async def test_a_waiting_receiver_gets_what_is_sent(self, transport: Transport) -> None:
        """Receive waits until something is there."""
        receiver = await transport.receiver("billing")
        receiving = asyncio.create_task(received(receiver))
        await settle()
        await transport.dispatch([operation("billing")])
        assert ids(await receiving) == ["m"]

    async def test_receive_returns_at_most_the_limit(self, transport: Transport) -> None:
        """Messages beyond the limit stay for other receivers."""
        await transport.dispatch([operation("billing", f"m{number}") for number in range(3)])
        receiver = await transport.receiver("billing")
        async with asyncio.timeout(PATIENCE):
            first = list(await receiver.receive(2))
        assert 1 <= len(first) <= 2
        assert self.in_order(ids(first + await received(receiver, 3 - len(first)))) == ["m0", "m1", "m2"]

    async def test_nothing_to_send_is_no_error(self, transport: Transport) -> None:
        """An empty dispatch does nothing."""
        await transport.dispatch([])
        await nothing_left(transport, "billing")

    async def test_a_missing_queue_fails_its_operations_only(self, transport: Transport) -> None:
        """DispatchFailed names the operations by position, with QueueNotFound; the others are sent."""
        operations = [operation(to, to) for to in ("nowhere", "billing", "neither", "sales")]
        with pytest.raises(DispatchFailed) as failed:
            await transport.dispatch(operations)
        assert {position: type(error) for position, error in failed.value.failures.items()} == {
            0: QueueNotFound,
            2: QueueNotFound,
        }
        assert "nowhere" in str(failed.value.failures[0])
        assert ids(await received(await transport.receiver("billing"))) == ["billing"]
        assert ids(await received(await transport.receiver("sales"))) == ["sales"]
        await nothing_left(transport, "billing")

    async def test_a_receiver_needs_its_queue(self, transport: Transport) -> None:
        """QueueNotFound, not an endless wait."""
        with pytest.raises(QueueNotFound, match="nowhere"):
            await transport.receiver("nowhere")

    async def test_acknowledge_is_true_once(self, transport: Transport) -> None:
        """The second one learns that the message is gone."""
        await transport.dispatch([operation("billing")])
        receiver = await transport.receiver("billing")
        [message] = await received(receiver)
        assert await receiver.acknowledge(message) is True
        assert await receiver.acknowledge(message) is False
        await nothing_left(transport, "billing")

    async def test_a_received_message_is_hidden(self, transport: Transport) -> None:
        """Neither its receiver nor another one gets it again while it is held."""
        await transport.dispatch([operation("billing", "held")])
        await transport.dispatch([operation("billing", "next")])
        receiver = await transport.receiver("billing")
        assert ids(await received(receiver)) == ["held"]
        await self.holds_no_more(receiver)
        assert ids(await received(await transport.receiver("billing"))) == ["next"]
        await nothing_left(transport, "billing")

    async def test_a_released_message_is_received_again(self, transport: Transport) -> None:
        """To its old position, for any receiver; releasing it twice changes nothing."""
        await transport.dispatch([operation("billing", "first")])
        await transport.dispatch([operation("billing", "second")])
        receiver = await transport.receiver("billing")
        [first] = await received(receiver)
        await receiver.release(first)
        await receiver.release(first)
        await self.holds_no_more(receiver)
        again = await received(await transport.receiver("billing"), 2)
        assert self.in_order(ids(again)) == ["first", "second"]
        assert first.message in [one.message for one in again]
        await nothing_left(transport, "billing")

    async def test_an_acknowledged_message_cannot_be_released(self, transport: Transport) -> None:
        """It is gone for good."""
        await transport.dispatch([operation("billing")])
        receiver = await transport.receiver("billing")
        [message] = await received(receiver)
        await receiver.acknowledge(message)
        await receiver.release(message)
        await nothing_left(transport, "billing")

    async def test_competing_receivers_never_share_a_message(self, transport: Transport) -> None:
        """Every message goes to one of them, and every one goes somewhere."""
        await transport.dispatch([operation("billing", f"m{number}") for number in range(60)])
        receivers = [await transport.receiver("billing") for _ in range(4)]
        found: list[str] = []
        everything = asyncio.Event()

        async def compete(number: int) -> None:
            while batch := await receivers[number].receive(5):
                for message in batch:
                    assert await receivers[number].acknowledge(message) is True
                found.extend(ids(list(batch)))
                if len(found) >= 60:
                    everything.set()

        competing = [asyncio.create_task(compete(number)) for number in range(4)]
        async with asyncio.timeout(PATIENCE):
            await everything.wait()
            for receiver in receivers:
                await receiver.stop()
            await asyncio.gather(*competing)
        assert sorted(found) == sorted(f"m{number}" for number in range(60))

    async def test_stop_ends_a_waiting_receive(self, transport: Transport) -> None:
        """It returns nothing, at once; stopping twice is fine; received messages can still be acknowledged."""
        await transport.dispatch([operation("billing")])
        receiver = await transport.receiver("billing")
        [message] = await received(receiver)
        receiving = asyncio.create_task(receiver.receive(1))
        await settle()
        await receiver.stop()
        await receiver.stop()
        async with asyncio.timeout(PATIENCE):
            assert list(await receiving) == []
        assert await receiver.acknowledge(message) is True

    async def test_a_stopped_receiver_takes_nothing(self, transport: Transport) -> None:
        """Later messages are for other receivers."""
        receiver = await transport.receiver("billing")
        await receiver.stop()
        await transport.dispatch([operation("billing")])
        async with asyncio.timeout(PATIENCE):
            assert list(await receiver.receive(1)) == []
        assert ids(await received(await transport.receiver("billing"))) == ["m"]

    async def test_two_messages_with_one_id_are_two(self, transport: Transport) -> None:
        """Queues do not deduplicate: an at-least-once sender is not made into an at-most-once one."""
        await transport.dispatch([operation("billing"), operation("billing")])
        receiver = await transport.receiver("billing")
        first, second = await received(receiver, 2)
        assert await receiver.acknowledge(first) is True
        assert await receiver.acknowledge(second) is True

    async def test_setup_may_run_again(self, transport: Transport) -> None:
        """Queues that exist keep their messages, also when several set up at once."""
        await transport.dispatch([operation("billing")])
        await asyncio.gather(*(transport.setup_infrastructure(["billing", "new"]) for _ in range(4)))
        await transport.dispatch([operation("new", "n")])
        assert ids(await received(await transport.receiver("billing"))) == ["m"]
        assert ids(await received(await transport.receiver("new"))) == ["n"]

    async def test_several_endpoints_share_a_transport(self, transport: Transport) -> None:
        """Each start has a stop; it works until the last one."""
        await transport.start()
        await transport.stop()
        await transport.dispatch([operation("billing")])
        assert ids(await received(await transport.receiver("billing"))) == ["m"]

    async def test_its_modes_are_consistent(self, transport: Transport) -> None:
        """Modes with transactions need transactions, and one scope needs a domain to share."""
        highest = transport.highest_transaction_mode
        if highest >= TransactionMode.SENDS_ATOMIC_WITH_RECEIVE:
            assert isinstance(transport, SupportsTransportTransactions)
        if highest is TransactionMode.TRANSACTION_SCOPE:
            assert transport.transaction_domain is not None


class TransportContent(TransportFixtures):
    """Messages arrive unchanged."""

    @pytest.mark.parametrize(
        "body",
        [b"", b"\x00", bytes(range(256)), "größe 🚚".encode(), b"x" * (5 * 1024 * 1024)],
        ids=["empty", "nul", "every byte", "text", "5 MB"],
    )
    async def test_a_body_arrives(self, transport: Transport, body: bytes) -> None:
        """Any bytes, none to five megabytes, or to the transport's limit, which its error names."""
        if len(body) > self.largest_body:
            with pytest.raises(DispatchFailed, match=str(len(body))) as failed:
                await transport.dispatch([operation("billing", body=body)])
            assert isinstance(failed.value.failures[0], InvalidMessage)
            return
        await transport.dispatch([operation("billing", body=body)])
        [found] = await received(await transport.receiver("billing"))
        assert found.message.body == body

    async def test_headers_arrive(self, transport: Transport) -> None:
        """Astral characters, control characters, empty names and values."""
        sent = Message("m", AWKWARD_HEADERS, b"")
        await transport.dispatch([TransportOperation(sent, "billing")])
        [found] = await received(await transport.receiver("billing"))
        assert dict(found.message.headers) == AWKWARD_HEADERS

    async def test_damaged_headers_arrive_untouched(self, transport: Transport) -> None:
        """So that they can be looked at in the error queue."""
        await transport.dispatch([TransportOperation(Message.from_encoded("m", b"\xff{not json", b"body"), "error")])
        [found] = await received(await transport.receiver("error"))
        assert found.message.encoded_headers == b"\xff{not json"
        assert found.message.body == b"body"

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_names(self, transport: Transport, name: str) -> None:
        """Queues and ids may be called anything."""
        await self.has_queues(transport, name)
        await transport.dispatch([operation(name, name), operation("billing")])
        receiver = await transport.receiver(name)
        [found] = await received(receiver)
        assert found.message.id == name
        assert await receiver.acknowledge(found) is True
        await nothing_left(transport, name)

    @pytest.mark.parametrize(("one", "other"), LOOKALIKES)
    async def test_lookalike_queues_are_different(self, transport: Transport, one: str, other: str) -> None:
        """A queue's name is equal to itself alone."""
        await self.has_queues(transport, one, other)
        await transport.dispatch([operation(one, "1"), operation(other, "2")])
        assert ids(await received(await transport.receiver(one))) == ["1"]
        assert ids(await received(await transport.receiver(other))) == ["2"]
