"""The conformance suite of transports."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from delayline.errors import DispatchFailed, InvalidMessage, QueueNotFound
from delayline.events import Event
from delayline.message import Headers, Message
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import (
    AWKWARD_HEADERS,
    HOSTILE_NAMES,
    LOOKALIKES,
    PATIENCE,
    operation,
)
from delayline.testing.conformance.publishing import TransportPublishing
from delayline.testing.conformance.store import RolledBackError
from delayline.testing.conformance.transport_fixtures import (
    ManagedTransport,
    TransactionalTransport,
    TransportFixtures,
    ids,
    nothing_left,
    prefetching,
    received,
)
from delayline.transaction import SupportsSavepoints, TransactionMode
from delayline.transport import (
    QueueState,
    SupportsQueueManagement,
    SupportsQueuePass,
    SupportsQueueStates,
    SupportsTransportTransactions,
    Transport,
    TransportOperation,
)

if TYPE_CHECKING:
    pass


class TransportQueues(TransportFixtures):
    """Tests of the required methods of transports."""

    async def test_messages_arrive_in_the_order_sent(self, transport: Transport) -> None:
        """First in, first out, within a dispatch and from each to the next, each queue for itself."""
        sent = [f"m{number}" for number in (5, 3, 9, 1)]
        await transport.dispatch([operation("billing", message_id) for message_id in sent])
        await transport.dispatch([operation("sales", "s1"), operation("billing", "last"), operation("sales", "s2")])
        message_ids = ids(await received(await transport.receiver("billing"), 5))
        assert self.in_order(message_ids) == self.in_order([*sent, "last"])
        assert self.in_order(ids(await received(await transport.receiver("sales"), 2))) == ["s1", "s2"]

    async def test_a_waiting_receiver_gets_sent_messages(self, transport: Transport) -> None:
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
        """The second returns False."""
        await transport.dispatch([operation("billing")])
        receiver = await transport.receiver("billing")
        [message] = await received(receiver)
        assert await receiver.acknowledge(message) is True
        assert await receiver.acknowledge(message) is False
        await nothing_left(transport, "billing")

    async def test_a_received_message_is_hidden(self, transport: Transport) -> None:
        """Neither its receiver nor another gets it again while it is held."""
        await transport.dispatch([operation("billing", "held")])
        await transport.dispatch([operation("billing", "next")])
        receiver = await transport.receiver("billing")
        [held] = ids(await received(receiver))
        await self.holds_no_more(receiver)
        [following] = ids(await received(await transport.receiver("billing")))
        assert self.in_order([held, following]) == ["held", "next"]
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
        assert first.message in [message.message for message in again]
        await nothing_left(transport, "billing")

    async def test_an_acknowledged_message_cannot_be_released(self, transport: Transport) -> None:
        """It is gone for good."""
        await transport.dispatch([operation("billing")])
        receiver = await transport.receiver("billing")
        [message] = await received(receiver)
        await receiver.acknowledge(message)
        await receiver.release(message)
        await nothing_left(transport, "billing")

    async def test_many_messages_are_acknowledged_together(self, transport: Transport) -> None:
        """Each is removed, and the result is False for messages that were gone."""
        receiver = await prefetching(transport, "billing")
        await transport.dispatch([operation("billing", f"m{number}") for number in range(5)])
        messages = await received(receiver, 5)
        assert await receiver.acknowledge(messages[1]) is True
        results = await receiver.acknowledge_many(messages[:3])
        assert list(results) == [True, False, True]
        await receiver.release_many(messages)
        again = await received(await transport.receiver("billing"), 2)
        assert sorted(ids(again)) == ["m3", "m4"]
        await nothing_left(transport, "billing")

    async def test_a_rollback_of_many_acknowledged_messages(self, transport: Transport) -> None:
        """All of them are their receiver's still."""
        receiver = await prefetching(transport, "billing")
        if not isinstance(transport, SupportsTransportTransactions):
            pytest.skip("not claimed: SupportsTransportTransactions")
        await transport.dispatch([operation("billing", f"m{number}") for number in range(3)])
        messages = await received(receiver, 3)
        with pytest.raises(RolledBackError):
            async with transport.transaction() as transaction:
                assert list(await receiver.acknowledge_many(messages, transaction)) == [True] * 3
                raise RolledBackError
        assert [receiver.holds(message) for message in messages] == [True] * 3
        async with transport.transaction() as transaction:
            assert list(await receiver.acknowledge_many(messages, transaction)) == [True] * 3
        assert [receiver.holds(message) for message in messages] == [False] * 3
        await nothing_left(transport, "billing")

    async def test_competing_receivers_never_share_a_message(self, transport: Transport) -> None:
        """Every message goes to a single receiver, and each goes somewhere."""
        await transport.dispatch([operation("billing", f"m{number}") for number in range(60)])
        receivers = [await transport.receiver("billing") for _ in range(4)]
        message_ids: list[str] = []
        everything = asyncio.Event()

        async def compete(number: int) -> None:
            while batch := await receivers[number].receive(5):
                for message in batch:
                    assert await receivers[number].acknowledge(message) is True
                message_ids.extend(ids(list(batch)))
                if len(message_ids) >= 60:
                    everything.set()

        competing = [asyncio.create_task(compete(number)) for number in range(4)]
        async with asyncio.timeout(PATIENCE):
            await everything.wait()
            for receiver in receivers:
                await receiver.stop()
            await asyncio.gather(*competing)
        assert sorted(message_ids) == sorted(f"m{number}" for number in range(60))

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
        """Queues do not deduplicate: an at-least-once sender is not made into an at-most-once sender."""
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
        """Each start has a stop; it works until the last."""
        await transport.start()
        await transport.stop()
        await transport.dispatch([operation("billing")])
        assert ids(await received(await transport.receiver("billing"))) == ["m"]

    async def test_its_modes_are_consistent(self, transport: Transport) -> None:
        """Modes with transactions need transactions, and a scope needs a domain to share."""
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
        [message] = await received(await transport.receiver("billing"))
        assert message.message.body == body

    async def test_headers_arrive(self, transport: Transport) -> None:
        """Astral characters, control characters, empty names and values."""
        sent = Message("m", AWKWARD_HEADERS, b"")
        await transport.dispatch([TransportOperation(sent, "billing")])
        [message] = await received(await transport.receiver("billing"))
        assert dict(message.message.headers) == AWKWARD_HEADERS

    async def test_damaged_headers_arrive_untouched(self, transport: Transport) -> None:
        """So that they can be looked at in the error queue."""
        await transport.dispatch([TransportOperation(Message.from_encoded("m", b"\xff{not json", b"body"), "error")])
        [message] = await received(await transport.receiver("error"))
        assert message.message.encoded_headers == b"\xff{not json"
        assert message.message.body == b"body"

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_names(self, transport: Transport, name: str) -> None:
        """Queues and ids may be called anything."""
        await self.has_queues(transport, name)
        await transport.dispatch([operation(name, name), operation("billing")])
        receiver = await transport.receiver(name)
        [message] = await received(receiver)
        assert message.message.id == name
        assert await receiver.acknowledge(message) is True
        await nothing_left(transport, name)

    @pytest.mark.parametrize(("one", "other"), LOOKALIKES)
    async def test_lookalike_queues_are_different(self, transport: Transport, one: str, other: str) -> None:
        """A queue's name is equal to itself alone."""
        await self.has_queues(transport, one, other)
        await transport.dispatch([operation(one, "1"), operation(other, "2")])
        assert ids(await received(await transport.receiver(one))) == ["1"]
        assert ids(await received(await transport.receiver(other))) == ["2"]


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
        assert [len(page) for page in pages] == [2, 2, 1, 0]
        browsed = [message for page in pages for message in page]
        assert self.in_order([message.id for message in browsed]) == ["m0", "m1", "m2", "m3", "m4"]
        assert [message for message in browsed if message.id == "m0"] == [whole]
        message_ids = ids(await received(await managed.receiver("billing"), 5))
        assert self.in_order(message_ids) == ["m0", "m1", "m2", "m3", "m4"]

    async def test_browse_shows_hidden_messages(self, managed: ManagedTransport) -> None:
        """In order: a message being handled is still in its place."""
        if not (self.shows_hidden and self.browses_hidden):
            pytest.skip("not claimed: to list messages being handled")
        await managed.dispatch([operation("billing", f"m{number}") for number in range(4)])
        receiver = await managed.receiver("billing")
        first, second = await received(receiver, 2)
        browsed = [message.id for message in await managed.browse("billing", 9)]
        assert self.in_order(browsed) == ["m0", "m1", "m2", "m3"]
        assert [message.id for message in await managed.browse("billing", 3)] == browsed[:3]
        await receiver.release(second)
        await receiver.acknowledge(first)
        browsed.remove(first.message.id)
        assert [message.id for message in await managed.browse("billing", 9)] == browsed

    async def test_it_tells_the_states_of_queues(self, managed: ManagedTransport) -> None:
        """Received from the first `receive` on, while nothing comes too, until the receiver stops."""
        if not isinstance(managed, SupportsQueueStates):
            pytest.skip("not claimed: SupportsQueueStates")
        asking: SupportsQueueStates = managed

        async def states() -> dict[str, QueueState]:
            return {state.queue: state for state in await asking.queue_states(["billing", "nosuch", "sales"])}

        idle = QueueState("sales", messages=0, received=False, paused=False)
        assert await states() == {"sales": idle, "billing": replace(idle, queue="billing")}
        await managed.dispatch([operation("billing", "m")])
        assert await states() == {"sales": idle, "billing": QueueState("billing", 1, received=False, paused=False)}
        receiver = await managed.receiver("billing")
        (message,) = await received(receiver)
        found = (await states())["billing"]
        assert (found.received, found.messages) in {(True, 1), (True, 0)}  # a broker leaves out what is held
        await receiver.acknowledge(message)
        assert (await states())["billing"].received
        await receiver.stop()
        async with asyncio.timeout(PATIENCE):
            while await states() != {"sales": idle, "billing": replace(idle, queue="billing")}:
                pass
        listed = {state.queue for state in await asking.queue_states(None)}
        assert listed >= {"billing", "sales"}

    async def test_a_pass_removes_what_it_is_told_to(self, managed: ManagedTransport) -> None:
        """Each message once, oldest first; removed messages are gone at once, and all others stay."""
        if not isinstance(managed, SupportsQueuePass):
            pytest.skip("not claimed: SupportsQueuePass")
        await managed.dispatch([operation("billing", f"m{number}") for number in range(5)])
        seen = []
        async with managed.passing("billing") as messages:
            async for message in messages:
                seen.append(message.id)
                if message.id in {"m1", "m4"}:
                    assert await messages.remove() is True
        assert seen == ["m0", "m1", "m2", "m3", "m4"]
        assert await messages.remove() is False
        async with managed.passing("billing") as messages:  # a pass that ends early
            async for _ in messages:
                break
        message_ids = ids(await received(await managed.receiver("billing"), 3))
        assert sorted(message_ids) == ["m0", "m2", "m3"]
        with pytest.raises(QueueNotFound):
            async with managed.passing("missing") as messages:
                await anext(messages)

    async def test_take_removes_one_copy(self, managed: ManagedTransport) -> None:
        """Singly, and False when none is left."""
        await managed.dispatch([operation("billing"), operation("billing", "other"), operation("billing")])
        assert await managed.take("billing", "m") is True
        await self.counted(managed, "billing", visible=2)
        assert await managed.take("billing", "m") is True
        assert await managed.take("billing", "m") is False
        assert ids(await received(await managed.receiver("billing"))) == ["other"]

    async def test_take_keeps_messages_in_handlers(self, managed: ManagedTransport) -> None:
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
        assert self.in_order([message.id for message in await managed.browse("error", 10)]) == ["first", "second"]
        async with managed.transaction() as transaction:
            assert await managed.take("error", "first", transaction) is True
            await managed.dispatch([operation("billing", "first")], transaction)
        assert [message.id for message in await managed.browse("error", 10)] == ["second"]
        assert ids(await received(await managed.receiver("billing"))) == ["first"]

    async def test_purge_keeps_messages_in_handlers(self, managed: ManagedTransport) -> None:
        """It returns how many it removed."""
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


NO_LIFE = "00:00:00"
LONGEST_LIFE = "10675199.02:48:05.4775807"  # the longest in .NET: beyond year 9999
LIFE_OF_A_DAY = "1.00:00:00"


def expiring(span: str, id: str = "m", **headers: str) -> TransportOperation:
    """Return a send of a message that may wait for so long."""
    return TransportOperation(Message(id, {Headers.TIME_TO_BE_RECEIVED: span} | headers, b"body"), "billing")


class TransportExpiry(TransportFixtures):
    """Tests of messages with the header NServiceBus.TimeToBeReceived."""

    async def test_an_expired_message_is_deleted_unseen(
        self, transport: Transport, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Receivers get messages around it; it is gone, and logged."""
        sent = [operation("billing", "before"), expiring(NO_LIFE, "late"), operation("billing", "after")]
        with caplog.at_level(logging.DEBUG, "delayline"):
            await transport.dispatch(sent)
            message_ids = ids(await received(await transport.receiver("billing"), 2))
            assert self.in_order(message_ids) == self.in_order(["before", "after"])
            await nothing_left(transport, "billing")
        logged = [record for record in caplog.records if getattr(record, "event", None) == Event.EXPIRED]
        if self.logs_expired:
            assert len(logged) == 1
            assert "late" in logged[0].getMessage()
        if isinstance(transport, SupportsQueueManagement):
            await self.counted(cast("ManagedTransport", transport), "billing", visible=0, hidden=2)

    async def test_many_expired_messages_are_passed_over(self, transport: Transport) -> None:
        """More of them than a receiver takes at once."""
        await transport.dispatch([*(expiring(NO_LIFE, f"m{number}") for number in range(30)), operation("billing")])
        receiver = await transport.receiver("billing")
        assert ids(await received(receiver, 1)) == ["m"]
        await nothing_left(transport, "billing")
        if isinstance(transport, SupportsQueueManagement):
            await self.counted(cast("ManagedTransport", transport), "billing", visible=0, hidden=1)

    @pytest.mark.parametrize("span", [LIFE_OF_A_DAY, LONGEST_LIFE, "soon", "", "00:00", "25:00:00", "-00:00:01"])
    async def test_others_arrive(self, transport: Transport, span: str) -> None:
        """Unexpired messages, and messages with an unreadable header, are never lost."""
        await transport.dispatch([expiring(span)])
        [message] = await received(await transport.receiver("billing"))
        assert message.message.headers[Headers.TIME_TO_BE_RECEIVED] == span

    @pytest.mark.parametrize("header", [Headers.FAILED_QUEUE, Headers.RETRIES])
    async def test_the_time_to_be_received_ends_with_the_first_receive(self, transport: Transport, header: str) -> None:
        """A message in the error queue, or on its way to be handled again, was received in time."""
        await transport.dispatch([expiring(NO_LIFE, "m", **{header: "1"})])
        assert ids(await received(await transport.receiver("billing"))) == ["m"]

    async def test_an_expired_message_in_a_transaction(self, transport: Transport) -> None:
        """The same, when it was sent in a transaction."""
        if not isinstance(transport, SupportsTransportTransactions):
            pytest.skip("not claimed: SupportsTransportTransactions")
        async with transport.transaction() as transaction:
            await transport.dispatch([expiring(NO_LIFE, "late"), operation("billing")], transaction)
        assert ids(await received(await transport.receiver("billing"))) == ["m"]
        await nothing_left(transport, "billing")


class TransportTransactionality(TransportFixtures):
    """Commit and rollback."""

    async def test_a_commit_acknowledges_and_sends(self, transactional: TransactionalTransport) -> None:
        """The message is gone and its consequences are there, in order."""
        await transactional.dispatch([operation("billing", "in")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        async with transactional.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is True
            await transactional.dispatch([operation("sales", "out1"), operation("sales", "out2")], transaction)
            await transactional.dispatch([operation("sales", "out3")], transaction)
        assert ids(await received(await transactional.receiver("sales"), 3)) == ["out1", "out2", "out3"]
        assert await receiver.acknowledge(message) is False
        await receiver.release(message)
        await nothing_left(transactional, "billing")

    async def test_a_rollback_leaves_all_as_before(self, transactional: TransactionalTransport) -> None:
        """Nothing was sent, and the message is its receiver's still: to release or to try again."""
        await transactional.dispatch([operation("billing", "in")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        with pytest.raises(RolledBackError):
            async with transactional.transaction() as transaction:
                await receiver.acknowledge(message, transaction)
                await transactional.dispatch([operation("sales", "out")], transaction)
                raise RolledBackError
        await nothing_left(transactional, "sales")
        await receiver.release(message)
        assert ids(await received(receiver)) == ["in"]

    async def test_a_savepoint_undoes_its_sends_only(self, transactional: TransactionalTransport) -> None:
        """Sends inside it are undone; sends before and after it are not."""
        async with transactional.transaction() as transaction:
            if not isinstance(transaction, SupportsSavepoints):
                pytest.skip("not claimed: SupportsSavepoints")
            await transactional.dispatch([operation("sales", "before")], transaction)
            with pytest.raises(RolledBackError):
                async with transaction.savepoint():
                    await transactional.dispatch([operation("sales", "inside")], transaction)
                    raise RolledBackError
            await transactional.dispatch([operation("sales", "after")], transaction)
        assert ids(await received(await transactional.receiver("sales"), 2)) == ["before", "after"]
        await nothing_left(transactional, "sales")

    async def test_nothing_is_received_before_the_commit(self, transactional: TransactionalTransport) -> None:
        """A send in a transaction is seen at its commit."""
        receiver = await transactional.receiver("sales")
        async with transactional.transaction() as transaction:
            await transactional.dispatch([operation("sales", "second")], transaction)
            await receiver.stop()
        assert list(await receiver.receive(1)) == []
        assert ids(await received(await transactional.receiver("sales"))) == ["second"]

    async def test_a_missing_queue_in_a_transaction(self, transactional: TransactionalTransport) -> None:
        """It is known before the commit, and the others are sent if the transaction goes on."""
        async with transactional.transaction() as transaction:
            with pytest.raises(DispatchFailed) as failed:
                await transactional.dispatch([operation("nowhere", "lost"), operation("sales", "sent")], transaction)
            assert {position: type(error) for position, error in failed.value.failures.items()} == {0: QueueNotFound}
            await transactional.dispatch([operation("error", "lost")], transaction)
        assert ids(await received(await transactional.receiver("sales"))) == ["sent"]
        assert ids(await received(await transactional.receiver("error"))) == ["lost"]

    async def test_a_rollback_after_a_missing_queue(self, transactional: TransactionalTransport) -> None:
        """Then nothing is sent at all."""
        with pytest.raises(DispatchFailed):
            async with transactional.transaction() as transaction:
                await transactional.dispatch([operation("sales", "sent"), operation("nowhere")], transaction)
        await nothing_left(transactional, "sales")

    async def test_an_acknowledge_in_a_transaction_answers_at_once(self, transactional: TransactionalTransport) -> None:
        """False for a removed message: the caller rolls back instead of handling twice."""
        await transactional.dispatch([operation("billing")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        assert await receiver.acknowledge(message) is True
        async with transactional.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is False

    async def test_a_transaction_can_be_tried_again(self, transactional: TransactionalTransport) -> None:
        """Rolled back, then done: the message is handled once."""
        await transactional.dispatch([operation("billing", "in")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        with pytest.raises(RolledBackError):
            async with transactional.transaction() as transaction:
                await receiver.acknowledge(message, transaction)
                raise RolledBackError
        async with transactional.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is True
        assert await receiver.acknowledge(message) is False
        await nothing_left(transactional, "billing")

    async def test_after_commit_runs_after_the_commit(self, transactional: TransactionalTransport) -> None:
        """And not after a rollback."""
        called: list[str] = []
        async with transactional.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await transactional.dispatch([operation("sales")], transaction)
            assert called == []
        with pytest.raises(RolledBackError):
            async with transactional.transaction() as transaction:
                transaction.after_commit(lambda: called.append("rolled back"))
                raise RolledBackError
        assert called == ["committed"]


class TransportConformance(
    TransportQueues,
    TransportContent,
    TransportExpiry,
    TransportTransactionality,
    TransportManagement,
    TransportPublishing,
):
    """The conformance suite of transports: subclass it, override `make_transport`, run pytest.

    Capabilities are found as the endpoint finds them, with `isinstance`; tests of a capability that the transport does
    not have are reported as `not claimed`.
    """
